"""Bandwidth and matrix rates of `specbench profile-hardware` beside those of programs that share no code with it.

    python benchmarks/hardware_check.py [--threads 1,2] [--rounds 3] [--within 0.1] [--json]

Two kinds of rows. A **peer** does the same thing in another program: reading memory and a blocked, packed product of
each dtype in a small program in C (hardware_check.c, compiled here by gcc or clang), and the float32 product of the
BLAS that numpy brings along. A **limit** is what the arithmetic units do out of registers, which no product exceeds and
a good one comes close to. Ours and theirs take turns, and `ratio` is ours / theirs, of medians.

A figure of ours is right if it lies between what the fastest of its peers does (the machine can do that much) and its
limit (it cannot do more). With `--within` the exit code is 1 where one is further than that below its fastest peer, or
above its limit; where nothing sets a limit, as for memory, also where it is further than that above its fastest peer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.hardware.devices import available_cores, default_threads
from specbench.hardware.probe_cpu import facts
from specbench.hardware.probe_rates import MIB, buffer_bytes, matrix_rate, read_bandwidth, torch_threads
from specbench.hardware.probe_timing import Budget
from specbench.models import native

SOURCE = Path(__file__).with_name("hardware_check.c")
DTYPES = ("float32", "bfloat16", "int8")
PEER, LIMIT = "peer", "limit"
ABOVE = 1.03  # of a limit, that a changing clock frequency explains
# what the C program does -> what that is for us
KINDS = {"read": (PEER, "C: reading"), "product": (PEER, "C: blocked product"),
         "registers": (LIMIT, "C: out of registers")}  # fmt: skip
BLAS = """
import sys, time, numpy as np
for size in (512, 1024, 2048):
    a = np.ones((size, size), np.float32)
    a @ a
    for _ in range(7):
        began = time.perf_counter()
        a @ a
        print(size, 2e-9 * size**3 / (time.perf_counter() - began))
"""


def compiled(folder: Path) -> Path | None:
    """The program, or None where there is no compiler."""
    compiler = next((found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    program = folder / "hardware_check"
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def run_c(program: Path, size: int, threads: int) -> dict[str, float]:
    """Medians in 1e9 per second, by name, the fastest of several ways or sizes."""
    text = subprocess.run([program, str(size // MIB), str(threads)], capture_output=True, text=True, check=True).stdout
    found = defaultdict(list)
    for line in text.splitlines():
        name, value = line.split()
        found[name].append(float(value))
    best: dict[str, float] = {}
    for name, values in found.items():
        name = name.partition(":")[0]  # read:wide and read:narrow are two ways to do the same
        best[name] = max(best.get(name, 0.0), statistics.median(values))
    return best


def run_blas(threads: int) -> float:
    """GFLOP/s of numpy's float32 product at its best size, in a process of its own with so many threads."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    env = {**os.environ, **dict.fromkeys(names, str(threads))}
    text = subprocess.run([sys.executable, "-c", BLAS], capture_output=True, text=True, check=True, env=env).stdout
    found = defaultdict(list)
    for line in text.splitlines():
        size, value = line.split()
        found[size].append(float(value))
    return max(statistics.median(values) for values in found.values())


def compare(threads: int, size: int, rounds: int, program: Path | None) -> list[dict[str, Any]]:
    """One row per rate and program: ours, theirs, and the ratio of the medians."""
    buffer = torch.ones(size // 4)
    ours: dict[str, list[float | None]] = defaultdict(list)
    theirs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        budget = Budget(3600.0)
        if program:
            for name, value in run_c(program, size, threads).items():
                rate, _, way = name.partition("-")
                theirs[rate, *KINDS[way or rate]].append(value)
        with torch_threads(threads):
            ours["read"].append(read_bandwidth(buffer, threads, 1.5, budget, native.reads)["rate"])
        theirs["float32", PEER, "numpy's BLAS"].append(run_blas(threads))
        for dtype in DTYPES:
            with torch_threads(threads):
                ours[dtype].append(matrix_rate(dtype, 1.0, budget, products=native.products)["rate"])
    rows = []
    for (rate, kind, what), values in theirs.items():
        mine = [value for value in ours[rate] if value is not None]
        mine_median, their_median = statistics.median(mine) if mine else None, statistics.median(values)
        rows.append({
            "rate": rate, "threads": threads, "kind": kind, "against": what, "ours": mine_median,
            "theirs": their_median, "ratio": round(mine_median / their_median, 3) if mine_median else None,
            "ours_rounds": mine, "theirs_rounds": values,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (["read", *DTYPES].index(row["rate"]), row["kind"] == LIMIT, -row["theirs"]))


def judged(rows: Sequence[dict[str, Any]], within: float) -> list[str]:
    """What is wrong with our figures, in words."""
    found, seen = [], set()
    limited = {(row["rate"], row["threads"]) for row in rows if row["kind"] == LIMIT}
    for row in rows:  # by rate; of its peers the fastest first
        where = f"{row['rate']}, {row['threads']} threads: {row['ratio']} of {row['against']}"
        key = row["rate"], row["threads"], row["kind"]
        if row["ratio"] is None or key in seen:
            continue
        seen.add(key)
        above = row["ratio"] > 1 + within and (row["rate"], row["threads"]) not in limited
        if row["kind"] == PEER and (row["ratio"] < 1 - within or above):
            found.append(f"{where}, further from it than {within:.0%}")
        if row["kind"] == LIMIT and row["ratio"] > ABOVE:
            found.append(f"{where}, which is the limit")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", help="counts of threads (default: 1, 2 and all physical cores, if there are)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, help="exit with 1 where a figure is further from its fastest peer")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    args = parser.parse_args()
    cores = available_cores()
    most = default_threads(cores)
    counts = [int(word) for word in args.threads.split(",")] if args.threads else sorted({1, min(2, most), most})
    known = facts(cores)
    size = buffer_bytes(known["caches"], known["memory_limit_bytes"])
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        rows = [row for count in counts for row in compare(count, size, args.rounds, program)]
    wrong = judged(rows, args.within) if args.within else []
    if args.json:
        document = {"cpu": known["model"], "cores": known["cores"], "torch": torch.__version__, "bytes": size,
                    "compiler": program is not None, "rates": rows, "wrong": wrong}  # fmt: skip
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        for row in rows:
            unit = "GB/s" if row["rate"] == "read" else "GFLOP/s"
            mine = "-" if row["ours"] is None else f"{row['ours']:.1f}"
            print(f"{row['rate']:9} {row['threads']:3} threads: {mine:>8} {unit}, {row['theirs']:8.1f} by "
                  f"{row['against']} ({row['kind']}); ratio {row['ratio']}")  # fmt: skip
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
