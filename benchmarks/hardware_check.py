"""Bandwidth and matrix rates of `specbench profile-hardware` beside those of programs that share no code with it.

    python benchmarks/hardware_check.py [--threads 1,2] [--rounds 3] [--json]

Reading memory and the limits of the arithmetic units come from a small program in C (hardware_check.c, compiled here
by gcc or clang), the float32 product from the BLAS that numpy brings along. Ours and theirs take turns, and the ratio
is that of the medians. `ratio` is ours / theirs. A rate out of registers is what no matrix product exceeds, and one
that is well made comes close to it. Exit code 1 if `--within` is given and a ratio is further from 1.
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
from pathlib import Path
from typing import Any

import torch

from specbench.hardware.devices import available_cores, default_threads
from specbench.hardware.probe_cpu import facts
from specbench.hardware.probe_rates import MIB, buffer_bytes, matrix_rate, read_bandwidth, torch_threads
from specbench.hardware.probe_timing import Budget

SOURCE = Path(__file__).with_name("hardware_check.c")
# name of a C rate -> what it is
REGISTERS = {"float32": "FMA out of registers", "bfloat16": "dot products out of registers",
             "int8": "dot products out of registers"}  # fmt: skip
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
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def run_c(program: Path, size: int, threads: int) -> dict[str, float]:
    """Medians in 1e9 per second, by name."""
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
    """One row per rate: ours, theirs, and the ratio of the medians."""
    buffer = torch.ones(size // 4)
    ours, theirs = defaultdict(list), defaultdict(list)
    for _ in range(rounds):
        budget = Budget(3600.0)
        if program:
            for name, value in run_c(program, size, threads).items():
                theirs[name, "C: reading" if name == "read" else f"C: {REGISTERS[name]}"].append(value)
        with torch_threads(threads):
            ours["read"].append(read_bandwidth(buffer, threads, 1.5, budget)["rate"])
        theirs["float32", "numpy's BLAS"].append(run_blas(threads))
        for dtype in REGISTERS:
            with torch_threads(threads):
                ours[dtype].append(matrix_rate(dtype, 1.0, budget)["rate"])
    rows = []
    for (name, what), values in theirs.items():
        mine = [value for value in ours[name] if value is not None]
        mine_median, their_median = statistics.median(mine) if mine else None, statistics.median(values)
        rows.append({
            "rate": name, "threads": threads, "against": what, "ours": mine_median, "theirs": their_median,
            "ratio": round(mine_median / their_median, 3) if mine_median else None,
            "ours_rounds": mine, "theirs_rounds": values,
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", help="counts of threads (default: 1 and all physical cores)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, help="exit with 1 if a ratio is further from 1 than this, as in 0.1")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    args = parser.parse_args()
    cores = available_cores()
    counts = [int(word) for word in args.threads.split(",")] if args.threads else sorted({1, default_threads(cores)})
    known = facts(cores)
    size = buffer_bytes(known["caches"], known["memory_limit_bytes"])
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        rows = [row for count in counts for row in compare(count, size, args.rounds, program)]
    far = [row for row in rows if row["ratio"] and args.within and abs(row["ratio"] - 1) > args.within]
    if args.json:
        document = {"cpu": known["model"], "cores": known["cores"], "torch": torch.__version__, "bytes": size,
                    "compiler": program is not None, "rates": rows}  # fmt: skip
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        for row in rows:
            unit = "GB/s" if row["rate"] == "read" else "GFLOP/s"
            mine = "-" if row["ours"] is None else f"{row['ours']:.1f}"
            print(f"{row['rate']:9} {row['threads']:3} threads: {mine:>8} {unit}, {row['theirs']:8.1f} by "
                  f"{row['against']}; ratio {row['ratio']}")  # fmt: skip
    for row in far:
        print(f"{row['rate']}, {row['threads']} threads: ratio {row['ratio']} to {row['against']}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
