"""Two processes side by side: how long a message between them takes, and how much they slow each other down.

A strategy with a worker runs the target on some cores and the draft on others. What they share (the memory bus, the
last level of cache, the power budget) shows when both do at once what each has done alone before.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PlacementError, WorkerError
from .devices import Device, default_threads, split
from .probe_timing import Budget

if TYPE_CHECKING:
    from .workers import Port, Worker

IDS = tuple(range(10))  # of the message that is timed: a draft with its confidences is about as long
PAIRS = (("read", "read"), ("read", "cache"), ("matrix", "matrix"))
ROUNDS = 5
_SIZE = 512  # of the matrices


def side_by_side(
    cores: Sequence[int],
    size: int,
    cache_bytes: int | None,
    budget: Budget,
    apart: tuple[Device, Device] | None = None,
) -> dict[str, Any]:
    """Messages and slow-downs between two workers.

    Args:
        cores: to divide between the two, unless `apart` says how.
        size: bytes of the memory that each of them reads.
        cache_bytes: of a buffer that stays in the cache of one of them.

    Returns:
        `reason` where nothing could be measured, else None; `cores` of both; `message` with the microseconds of a
        round trip; `pairs`, each with the rates alone and together and the factors by which each side is slower.
    """
    empty: dict[str, Any] = {"reason": None, "cores": None, "message": None, "pairs": []}
    if not hasattr(os, "sched_setaffinity"):
        return {**empty, "reason": "this system cannot bind a process to cores"}
    try:
        parts = apart or split(cores)
        if budget.left < (8 if budget.quick else 15):
            return {**empty, "reason": "no time was left"}
        return {**empty, **_measured(parts, size, cache_bytes or size, budget)}
    except (PlacementError, WorkerError) as error:
        return {**empty, "reason": str(error)}


def _measured(parts: Sequence[Device], size: int, cache_bytes: int, budget: Budget) -> dict[str, Any]:
    from .workers import Worker

    workers: list[Worker] = []
    try:
        for name, part in zip(("first", "second"), parts, strict=True):
            few = min(cache_bytes, size)
            workers.append(Worker(name, part, default_threads(part.cores), make, size, few))
        message = _round_trips(workers[1], parts[0].cores, budget.share(0.5, 2.0))
        pairs = []
        for pair in PAIRS:
            if budget.left < 1:
                break
            pairs.append(_pair(workers, pair, budget.share(2.0, 6.0)))
    finally:
        for worker in workers:
            worker.close()
    return {"cores": [list(part.cores) for part in parts], "message": message, "pairs": pairs}


def _round_trips(worker: Worker, ours: Sequence[int], seconds: float) -> dict[str, Any]:
    """Ten ids there and back, with this process on the other core set, as a run places it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ours)
    try:
        port = worker.start(echo)
        took, end = [], time.perf_counter() + seconds
        while len(took) < 50 or time.perf_counter() < end:
            began = time.perf_counter_ns()
            port.send(1, ids=IDS)
            port.wait()
            took.append((time.perf_counter_ns() - began) / 1e3)
        worker.settle()
    finally:
        os.sched_setaffinity(0, before)
    took = sorted(took[10:])  # the first ones wake the other side up
    return {
        "round_trip_us": round(statistics.median(took), 2),
        "p90_us": round(took[int(0.9 * (len(took) - 1))], 2),
        "ids": len(IDS),
        "samples": len(took),
    }


def _pair(workers: Sequence[Worker], kinds: tuple[str, str], seconds: float) -> dict[str, Any]:
    """Each alone and both together, in short turns, so that a moment in which others are busy hits all of them."""
    alone, together = [], []
    for _ in range(ROUNDS):
        turn = seconds / (3 * ROUNDS)
        alone.append([_rates([worker], [kind], turn)[0] for worker, kind in zip(workers, kinds, strict=True)])
        together.append(_rates(workers, kinds, turn))
    slower = [[one / both for one, both in zip(*pair, strict=True)] for pair in zip(alone, together, strict=True)]
    return {
        "first": kinds[0],
        "second": kinds[1],
        "alone": [float(f"{_median(alone, side) / 1e9:.5g}") for side in (0, 1)],
        "together": [float(f"{_median(together, side) / 1e9:.5g}") for side in (0, 1)],
        "slower": [round(_median(slower, side), 3) for side in (0, 1)],
    }


def _median(rounds: Sequence[Sequence[float]], side: int) -> float:
    return statistics.median(one[side] for one in rounds)


def _rates(workers: Sequence[Worker], kinds: Sequence[str], seconds: float) -> list[float]:
    """What each worker reaches while all of them work: bytes or operations a second."""
    ports: list[Port] = [worker.start(work, kind) for worker, kind in zip(workers, kinds, strict=True)]
    for port in ports:  # both are warm before the first one starts to count
        port.wait()
    for port in ports:
        port.send(1, ids=(int(seconds * 1e6),))
    answers = [port.wait() for port in ports]
    for worker in workers:
        worker.join()
    return [float(answer.ids[0]) for answer in answers if answer is not None]


# --- in the worker ---------------------------------------------------------------------------------------------------


def make(size: int, few: int) -> dict[str, Any]:
    import torch

    buffer = torch.ones(size // 4)
    matrix = torch.randn(_SIZE, _SIZE)
    return {
        "read": (buffer.sum, 4 * buffer.numel()),
        "cache": (buffer[: few // 4].sum, few // 4 * 4),
        "matrix": (lambda: matrix @ matrix, 2 * _SIZE**3),
    }


def echo(state: Any, port: Port) -> None:
    while True:
        message = port.wait()
        if message is not None:
            port.send(message.kind, ids=message.ids)


def work(state: Any, port: Port, kind: str) -> None:
    """Does one thing over and over for as long as it is told to, and says how fast."""
    operation, amount = state[kind]
    for _ in range(2):
        operation()
    port.send(1)
    message = port.wait()
    assert message is not None
    began, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - began < message.ids[0] / 1e6:
        operation()
        rounds += 1
    port.send(1, ids=(int(rounds * amount / (time.perf_counter() - began)),))
