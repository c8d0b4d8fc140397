"""How fast memory is read and matrices are multiplied, by torch and by what the caller has, on a CPU or a GPU.

Bandwidth is read bandwidth, since that is what decoding does with weights: a buffer many times larger than the last
level of cache is reduced to one number by several operations of torch and numpy, and by loops of the caller's. Each of
them reaches the limit of the memory bus on some processors, none on all (`benchmarks/hardware_check.py` compares with a
program in C).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .probe_cpu import last_level
from .probe_timing import Budget, fastest, scaled

MIB, PAGE = 1 << 20, 4096
_SMALLEST, _SHARE = 512 * MIB, 8  # bytes of the buffer at least, and the part of the memory that it takes at most
DTYPES = ("float32", "bfloat16", "float16", "int8")

Reads = Callable[[Any], Mapping[str, Callable[[], Any]]]
"""Makes further operations, by name, that read a float32 tensor from one end to the other; maybe none."""

Products = Callable[[str, int], Mapping[str, Callable[[], Any]]]
"""Makes further operations, by name, that multiply two square matrices of a dtype and a size on the CPU; maybe none."""


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's threads for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def buffer_bytes(found: Sequence[Mapping[str, Any]], memory_bytes: int | None) -> int:
    """Eight times the last level of cache and at least 512 MiB, but not more than an eighth of the memory."""
    last = last_level(found)
    wanted = max(_SMALLEST, 8 * last["bytes"] * last["count"] if last else 0)
    return max(MIB, min(wanted, memory_bytes // _SHARE) if memory_bytes else wanted) // MIB * MIB


def memory(
    counts: Sequence[int], size: int, found: Sequence[Mapping[str, Any]], budget: Budget, reads: Reads | None = None
) -> dict[str, Any]:
    """GB/s (1e9 bytes) read from and copied in memory and read from the last level of cache, by number of threads."""
    import torch

    buffer = torch.ones(size // 4)
    last = last_level(found)
    rows = []
    for count in counts:
        with torch_threads(count):
            row: dict[str, Any] = {"threads": count}
            row["read"] = read_bandwidth(buffer, count, budget.share(1.5, 6.0), budget, reads)
            row["copy"] = copy_bandwidth(buffer, budget.share(0.6, 3.0), budget)
            row["cache"] = None
            if last and last["level"] >= 2:
                # Half of what one cache holds for each thread that shares it, so that it all stays there.
                part = last["bytes"] // 2 // last["shared_by"] * min(count, last["shared_by"] * last["count"])
                few = buffer[: max(1, min(part, size) // PAGE * PAGE // 4)]
                row["cache"] = read_bandwidth(few, count, budget.share(0.4, 2.0), budget, reads)
        rows.append(row)
    return {"buffer_bytes": size, "rates": rows}


def read_bandwidth(
    buffer: Any, threads: int, seconds: float, budget: Budget, reads: Reads | None = None
) -> dict[str, Any]:
    """GB/s at which a float32 tensor is read from one end to the other with torch's threads as they are."""
    operations = {**_reads(buffer, threads), **(reads(buffer) if reads else {})}
    found = fastest(operations, 4 * buffer.numel(), seconds, budget.clock)
    return {**scaled(found, 1e9), "bytes": 4 * buffer.numel()}


def _reads(buffer: Any, threads: int) -> dict[str, Callable[[], Any]]:
    import numpy as np
    import torch

    operations: dict[str, Callable[[], Any]] = {
        "torch.sum": buffer.sum,
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(buffer),
        "torch.aminmax": lambda: torch.aminmax(buffer),
    }
    if threads == 1:  # numpy has no threads here
        words = buffer[: buffer.numel() // 2 * 2].numpy().view(np.uint64)
        if len(words):
            operations["numpy.bitwise_or.reduce"] = lambda: np.bitwise_or.reduce(words)
    return operations


def copy_bandwidth(buffer: Any, seconds: float, budget: Budget) -> dict[str, Any]:
    """GB/s of bytes read plus bytes written while one half of the tensor is copied over the other."""
    half = buffer.numel() // 2
    source, goal = buffer[:half], buffer[half : 2 * half]
    return scaled(fastest({"torch.copy_": lambda: goal.copy_(source)}, 8 * half, seconds, budget.clock), 1e9)


def matrix(
    counts: Sequence[int], budget: Budget, dtypes: Sequence[str] = DTYPES, products: Products | None = None
) -> list[dict[str, Any]]:
    """Billions of multiplications and additions a second (GFLOP/s, int8: GOP/s) in a square matrix product, by dtype
    and number of threads; `rate` null where the processor or torch has no such product."""
    rows = []
    for dtype in dtypes:
        for count in counts:
            with torch_threads(count):
                row = matrix_rate(dtype, budget.share(0.7, 3.0), budget, products=products)
            rows.append({"dtype": dtype, "threads": count, **row})
    return rows


def matrix_rate(
    dtype: str,
    seconds: float,
    budget: Budget,
    device: str = "cpu",
    wait: Any = None,
    products: Products | None = None,
) -> dict[str, Any]:
    """The fastest square product in a dtype, over a few sizes that fit the time.

    Args:
        wait: called at the end of every product, for a device that computes asynchronously.
        products: further ways to multiply on the CPU.
    """
    now, done = budget.clock.now, wait or (lambda: None)
    best: dict[str, Any] | None = None
    size, most = 256, 4096 if device == "cpu" else 8192
    try:
        while size <= most:
            operations = {**_products(dtype, size, device, done), **(products(dtype, size) if products else {})}
            began = now()
            for operation in operations.values():
                operation()
            once = (now() - began) / 1e9 / len(operations)
            if best is not None and once > max(seconds / 6, 0.05):
                break  # larger ones would take too long, and are no faster once a product is long
            found = scaled(
                fastest(operations, 2.0 * size**3, min(seconds / 4, max(12 * once, 0.05)), budget.clock), 1e9
            )
            if best is None or found["rate"] > best["rate"]:
                best = {**found, "size": size}
            if best["rate"] and 2e-9 * (2 * size) ** 3 / best["rate"] > max(seconds / 6, 0.05):
                break
            size *= 2
    except (RuntimeError, AttributeError, NotImplementedError, MemoryError) as error:
        if best is None:
            return {"rate": None, "reason": " ".join(str(error).split())[:160]}
    return best or {"rate": None, "reason": "not measured"}


def _products(dtype: str, size: int, device: str, done: Callable[[], None]) -> dict[str, Callable[[], Any]]:
    import torch

    if dtype == "int8":
        a = torch.randint(-9, 9, (size, size), dtype=torch.int8, device=device)
        b = a.t().contiguous().t()
        return {"torch._int_mm": lambda: (torch._int_mm(a, b), done())}
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    b = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    products: dict[str, Callable[[], Any]] = {"linear": lambda: (torch.nn.functional.linear(a, b), done())}
    if dtype != "float16" or device != "cpu":  # on some CPUs a loop without vectors, a hundred times slower
        products["matmul"] = lambda: (a @ b, done())
    return products
