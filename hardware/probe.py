"""What this machine can do, measured: the parts of `specbench profile-hardware` that need no model.

Every part has its share of the time and ends early with what it has. Nothing here prints; `watch` is told what is
being measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import probe_cpu, probe_energy, probe_gpu, probe_rates
from .probe_timing import Budget

Watch = Callable[[str], None]


def probe(
    threads: Sequence[int],
    cores: Sequence[int],
    budget: Budget,
    watch: Watch | None = None,
    reads: probe_rates.Reads | None = None,
    products: probe_rates.Products | None = None,
) -> dict[str, Any]:
    """Facts and rates of CPU and GPUs; JSON-safe, null where something cannot be known.

    Args:
        threads: what the models will run with, ours first; rates are measured with one and with as many.
        cores: that this process may use.
        reads, products: further ways to read memory and to multiply matrices, see `probe_rates`.
    """
    watch = watch or (lambda text: None)
    watch("reading what the machine says about itself")
    facts = probe_cpu.facts(cores)
    busy = probe_cpu.busy_cores(cores)
    openmp = probe_cpu.openmp()
    counts = sorted({1, *(count for count in threads if count <= len(cores))})
    watch("reading memory")
    size = probe_rates.buffer_bytes(facts["caches"], facts["memory_limit_bytes"])
    found = {
        "cpu": facts,
        "openmp": openmp,
        "energy": probe_energy.sources(),
        "busy_cores_before": busy,
        "memory": probe_rates.memory(counts, size, facts["caches"], budget, reads),
    }
    watch("multiplying matrices")
    found["matrix"] = probe_rates.matrix(counts, budget, products=products)
    found["gpus"] = probe_gpu.gpus(budget, watch)
    found["warnings"] = probe_cpu.warnings(facts, openmp, threads[0], busy)
    return found
