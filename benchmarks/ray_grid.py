"""A grid of 40 cells on a local Ray cluster of two nodes, against the same grid in this process: the same records?

    python benchmarks/ray_grid.py [--kill] [--json]

Needs two cores and the extra `ray`. Cells are of the built-in `tiny`, one prompt and four tokens each, so what is timed
is what handing out costs, not decoding. With --kill the first worker that has a sample is killed with SIGKILL, and its
cell has to go on on another one. Exit code 1 if a record differs in anything but its times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specbench.results import sweep
from specbench.results.listener import Grid, Listener
from specbench.results.plan import Plan
from specbench.results.ray_executor import RayExecutor
from specbench.results.records import RunFolder

GRID: dict[str, list[Any]] = {
    "strategy": ["lookup", "speculative"],
    "draft_length": [1, 2, 3, 4, 5],
    "seed": [0, 1],
    "dtype": ["float32", "bfloat16"],
}
PLAN = Plan(target="tiny", draft="tiny-draft", limit=1, max_new_tokens=4, temperature=0.8, threads=1, trace=0, warmup=0)


class Killer(Listener):
    """Kills the first worker that has a sample and lacks others."""

    def __init__(self, out: Path, kill: bool) -> None:
        self.out, self.killed = out, None if kill else ""

    def grid(self, grid: Grid) -> None:
        for one in grid.working:
            if self.killed is None and 0 < one.samples < one.total:
                self.killed = one.cell
                attempts = RunFolder(self.out / one.cell).manifest()["executor"]["attempts"]
                os.kill(attempts[-1]["pid"], signal.SIGKILL)


def records(folder: Path) -> list[str]:
    """Samples without times and without the number of their call, which a cell that went on counts anew; sorted."""
    found = []
    for sample in RunFolder(folder).samples():
        fields = {name: value for name, value in vars(sample).items() if not name.endswith("_ns") and name != "group"}
        fields["steps"] = [step[1:] for step in sample.steps]
        found.append(json.dumps(fields, sort_keys=True))
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        with tempfile.TemporaryDirectory() as folder:
            found = compare(Path(folder), cluster.address, given.kill)
    finally:
        cluster.shutdown()
    if given.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0 if not found["differing"] and found["cells"] == found["done"] else 1


def compare(folder: Path, address: str, kill: bool) -> dict[str, Any]:
    start = time.perf_counter()
    listener = Killer(folder / "ray", kill)
    there = sweep.sweep(PLAN, GRID, folder / "ray", listener, executor=RayExecutor(address))
    between = time.perf_counter()
    here = sweep.sweep(PLAN, GRID, folder / "local")
    end = time.perf_counter()
    pairs = list(zip(there.cells, here.cells, strict=True))
    return {
        "cells": len(pairs),
        "done": sum(cell.state == "done" for cell in there.cells),
        "records": sum(len(records(cell.folder)) for cell in there.cells),
        "differing": [one.name for one, other in pairs if records(one.folder) != records(other.folder)],
        "workers": len({attempt["worker"] for cell in there.cells for attempt in cell.attempts}),
        "killed": listener.killed or None,
        "attempts": {cell.name: cell.attempts for cell in there.cells if len(cell.attempts) > 1},
        "ray_s": round(between - start, 1),
        "local_s": round(end - between, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
