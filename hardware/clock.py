"""The one clock, and waiting until the devices have nothing left to do.

`now` never synchronises a device: a token that is a Python int has already left it, and a full
synchronisation per step would hide the overlap that two-device strategies exist for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Clock:
    """Monotonic time in integer nanoseconds. Tests put a clock of their own in its place."""

    def now(self) -> int:
        return time.perf_counter_ns()


@dataclass(frozen=True)
class Drain:
    """Waits for every device and worker that a run uses; called before the start and after the end of a sample."""

    waits: tuple[Callable[[], None], ...] = ()

    def __call__(self) -> None:
        for wait in self.waits:
            wait()


def drain_for(devices: Iterable[str]) -> Drain:
    """A drain for devices by their torch names; a CPU computes synchronously and needs none."""
    cuda = sorted({name for name in devices if name.startswith("cuda")})
    if not cuda:
        return Drain()
    import torch

    return Drain(tuple(_synchronise(torch, name) for name in cuda))


def _synchronise(torch, name: str) -> Callable[[], None]:
    return lambda: torch.cuda.synchronize(name)
