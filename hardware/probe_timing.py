"""Timing of one operation against another, within a budget of seconds.

A rate is the median over rounds of the fastest of several ways to do the same thing, since no single torch operation
is the fastest on every processor. A part that runs out of time ends with the rounds it has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .clock import Clock

QUICK_SECONDS, FULL_SECONDS = 50.0, 270.0
_LEAST_ROUNDS = 3


@dataclass
class Budget:
    """How long the whole may take, and what is left of it.

    Attributes:
        seconds: for everything together.
        quick: measure fewer points.
    """

    seconds: float
    quick: bool = False
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._began = self.clock.now()

    @property
    def spent(self) -> float:
        return (self.clock.now() - self._began) / 1e9

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)

    def share(self, quick: float, full: float) -> float:
        """Seconds for one part, and never more than half of what is left."""
        return min(quick if self.quick else full, self.left / 2)


def budget_for(quick: bool, clock: Clock | None = None) -> Budget:
    return Budget(QUICK_SECONDS if quick else FULL_SECONDS, quick, clock or Clock())


def fastest(
    operations: Mapping[str, Callable[[], Any]], amount: float, seconds: float, clock: Clock | None = None
) -> dict[str, Any]:
    """Runs each operation in turn until the time is over; the rate of the one with the best median.

    Args:
        amount: what one call does (bytes, operations), so that a rate is amount / time.
        seconds: for all of them together; three rounds are made in any case, after one that does not count.

    Returns:
        `rate` (median, per second), `low` and `high` (p10, p90), `best` (the fastest round), `operation`, `rounds`.
    """
    now = (clock or Clock()).now
    for operation in operations.values():
        operation()
    took: dict[str, list[int]] = {name: [] for name in operations}
    end, rounds = now() + seconds * 1e9, 0
    while rounds < _LEAST_ROUNDS or now() < end:
        for name, operation in operations.items():
            began = now()
            operation()
            took[name].append(max(1, now() - began))
        rounds += 1
    name = min(took, key=lambda name: statistics.median(took[name]))
    rates = sorted(amount / (ns / 1e9) for ns in took[name])
    return {
        "rate": statistics.median(rates),
        "low": rates[math.floor(0.1 * (len(rates) - 1))],
        "high": rates[math.ceil(0.9 * (len(rates) - 1))],
        "best": rates[-1],
        "operation": name,
        "rounds": rounds,
    }


def scaled(found: Mapping[str, Any], unit: float) -> dict[str, Any]:
    """What `fastest` found in units of 1e9 (GB/s, GFLOP/s), with five significant digits."""
    numbers = {key: float(f"{found[key] / unit:.5g}") for key in ("rate", "low", "high", "best")}
    return {**found, **numbers}
