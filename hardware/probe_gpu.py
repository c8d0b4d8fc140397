"""NVIDIA GPUs: memory, matrix products, launches, and copies to and from the host and between GPUs.

An operation on a GPU is timed from the call to the end of a synchronisation, so that a rate holds the launch as well;
the buffers are large enough for that not to matter.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from .probe_rates import MIB, matrix_rate
from .probe_timing import Budget, fastest, scaled

_DTYPES = ("float32", "bfloat16", "float16", "int8")
_LAUNCHES = 200
_STATE = {
    "clocks_mhz": "clocks.sm", "clocks_most_mhz": "clocks.max.sm", "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu", "utilisation_percent": "utilization.gpu",
}  # fmt: skip


def gpus(budget: Budget, watch: Callable[[str], None]) -> list[dict[str, Any]]:
    """Facts and rates of every GPU that torch sees; an empty list where there is none."""
    import torch

    if not torch.cuda.is_available():
        return []
    count, found = torch.cuda.device_count(), []
    for index in range(count):
        watch(f"measuring cuda:{index}")
        properties = torch.cuda.get_device_properties(index)
        facts = {
            "device": f"cuda:{index}",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "state": _state(str(getattr(properties, "uuid", "")) or str(index)),
        }
        size = min(1024 * MIB, torch.cuda.mem_get_info(index)[0] // 8)
        measured = measure(f"cuda:{index}", size, budget)
        found.append({**facts, **measured, "peers": _peers(index, count, size, budget)})
    return found


def measure(device: str, size: int, budget: Budget) -> dict[str, Any]:
    """The rates of one device. It runs on `cpu` as well, for tests.

    Args:
        size: bytes of the buffer that is read.
    """
    import torch

    wait = _wait_for(torch, device)
    buffer = torch.ones(size // 4, device=device)
    seconds = budget.share(0.5, 2.0)
    reads = {
        "torch.sum": lambda: (buffer.sum(), wait()),
        "torch.linalg.vector_norm": lambda: (torch.linalg.vector_norm(buffer), wait()),
    }
    half = buffer.numel() // 2
    copy = {"torch.copy_": lambda: (buffer[:half].copy_(buffer[half : 2 * half]), wait())}
    rates = {
        "read": scaled(fastest(reads, 4 * buffer.numel(), seconds, budget.clock), 1e9),
        "copy": scaled(fastest(copy, 8 * half, seconds, budget.clock), 1e9),
    }
    return {
        **rates,
        "matrix": [
            {"dtype": dtype, **matrix_rate(dtype, budget.share(0.5, 2.0), budget, device, wait)} for dtype in _DTYPES
        ],
        **_latencies(torch, device, wait, budget),
        "host": _host_copies(torch, device, wait, min(size, 256 * MIB), budget),
    }


def _latencies(torch: Any, device: str, wait: Callable[[], None], budget: Budget) -> dict[str, Any]:
    """Microseconds: of one launch among many, and from a launch until its result is a number on the host."""
    one = torch.ones(16, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1)
        wait()

    seconds = budget.share(0.2, 1.0)
    many = fastest({"add_": launches}, _LAUNCHES, seconds, budget.clock)
    single = fastest({"add_ and item": lambda: one.add_(1)[0].item()}, 1, seconds, budget.clock)
    return {"launch_us": round(1e6 / many["rate"], 2), "round_trip_us": round(1e6 / single["rate"], 2)}


def _host_copies(torch: Any, device: str, wait: Callable[[], None], size: int, budget: Budget) -> dict[str, Any]:
    """GB/s between the host's memory and the device, from pageable and from pinned memory."""
    there = torch.ones(size // 4, device=device)
    found: dict[str, Any] = {"bytes": size}
    for kind in ("pageable", "pinned") if device != "cpu" else ("pageable",):
        here = torch.ones(size // 4, pin_memory=kind == "pinned")
        ways = {
            "to_device": lambda here=here: (there.copy_(here, non_blocking=True), wait()),
            "to_host": lambda here=here: (here.copy_(there, non_blocking=True), wait()),
        }
        for name, way in ways.items():
            rate = fastest({name: way}, size, budget.share(0.3, 1.0), budget.clock)
            found[f"{kind}_{name}"] = scaled(rate, 1e9)
    return found


def _peers(index: int, count: int, size: int, budget: Budget) -> list[dict[str, Any]]:
    """GB/s from this GPU to each other one, and whether they reach each other's memory without the host."""
    import torch

    found = []
    for other in (number for number in range(count) if number != index):
        source = torch.ones(size // 8, device=f"cuda:{index}")
        goal = torch.empty_like(source, device=f"cuda:{other}")
        waits = _wait_for(torch, f"cuda:{index}"), _wait_for(torch, f"cuda:{other}")

        def copy(source: Any = source, goal: Any = goal, waits: Any = waits) -> None:
            goal.copy_(source, non_blocking=True)
            for wait in waits:
                wait()

        rate = fastest({"copy_": copy}, 4 * source.numel(), budget.share(0.3, 1.0), budget.clock)
        direct = torch.cuda.can_device_access_peer(index, other)
        found.append({"device": f"cuda:{other}", "direct": direct, **scaled(rate, 1e9)})
    return found


def _wait_for(torch: Any, device: str) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device != "cpu" else (lambda: None)


def _state(which: str) -> dict[str, float | None]:
    """Clocks, power limit, temperature and load as the driver's tool shows them now."""
    name = f"GPU-{which}" if "-" in which and not which.startswith("GPU-") else which
    query = ["nvidia-smi", f"--id={name}", f"--query-gpu={','.join(_STATE.values())}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_STATE)
    words = (word.strip() for word in text.split(","))
    return {name: _float(word) for name, word in zip(_STATE, words, strict=False)}


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
