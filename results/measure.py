"""The one loop, one clock and one token counter that every strategy is measured by.

The receiver counts: it notes the time of each step, trims at end of text, stop string and token limit, and stores the
ids. It never believes a strategy's own count, and what is trimmed counts nowhere, neither as a token nor as accepted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import StrategyError
from ..hardware.clock import Clock
from ..strategies.base import Request, Step, Strategy
from ..strategies.sampling import Sampling

_STOP_WINDOW = 64  # tokens before the new ones that a stop string may have begun in


@dataclass(frozen=True)
class Ending:
    """What ends a row.

    Attributes:
        eos: end-of-text ids; empty to run to the limit.
        stop: strings that end the answer; the token that completes one is the last one kept.
        decode: ids to text, needed for stop strings only.
    """

    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def find(self, ids: list[int], fresh: int, limit: int) -> tuple[int, str] | None:
        """Where the row ends, as (tokens kept, reason), or None if it goes on.

        Args:
            ids: all emitted ids, the last `fresh` of them new.
            limit: the most tokens the row may have.
        """
        ends = [(at + 1, "eos") for at in range(len(ids) - fresh, len(ids)) if ids[at] in self.eos][:1]
        if self.stop and self.decode:
            ends += self._find_stop(ids, fresh)
        if len(ids) >= limit:
            ends.append((limit, "length"))
        # At the same length, end of text is a better reason than the limit.
        return min(ends, key=lambda end: (end[0], end[1] == "length")) if ends else None

    def _find_stop(self, ids: list[int], fresh: int) -> list[tuple[int, str]]:
        assert self.decode is not None
        start = max(0, len(ids) - fresh - _STOP_WINDOW)
        if not self._stops(ids[start:]):
            return []
        first = next(at for at in range(len(ids) - fresh, len(ids)) if self._stops(ids[start : at + 1]))
        return [(first + 1, "stop")]

    def _stops(self, ids: Sequence[int]) -> bool:
        assert self.decode is not None
        text = self.decode(ids)
        return any(stop in text for stop in self.stop)


@dataclass
class Outcome:
    """What one row of one call came to. Times in nanoseconds from the start of the call, which is `start_ns`."""

    start_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    drain_ns: int | None = None
    steps: list[list[int]] = field(default_factory=list)
    levels: list[list[list[int]]] = field(default_factory=list)
    rejected: list[list[int]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, step: Step, at_ns: int, ending: Ending, limit: int) -> bool:
        """Adds a step; True when the row is finished by it."""
        before = len(self.token_ids)
        self.token_ids.extend(step.tokens)
        end = ending.find(self.token_ids, len(step.tokens), limit)
        if end:
            del self.token_ids[end[0] :]
            self.finish = end[1]
        kept = len(self.token_ids) - before
        drafted, accepted = step.drafted, step.accepted
        if kept < len(step.tokens):  # cut inside the block: what lies behind the cut was never there
            drafted, accepted = min(drafted, kept), min(accepted, kept)
        self.steps.append([at_ns, kept, drafted, accepted, step.wasted])
        self.rejected.append(list(step.rejected))
        if step.levels:
            self.levels.append([list(level) for level in step.levels])
        if self.ttft_ns is None:
            self.ttft_ns = at_ns
        self.e2e_ns = at_ns
        return end is not None


def measure(
    strategy: Strategy,
    requests: Sequence[Request],
    sampling: Sampling,
    ending: Ending | Sequence[Ending],
    clock: Clock,
    drain: Callable[[], None],
) -> list[Outcome]:
    """Runs one batch of requests from empty caches to the end of each row, and times it.

    An exception of the strategy becomes the `error` of every row, with no times; KeyboardInterrupt passes.

    Args:
        ending: what ends the rows; one for all, or one per row.
        drain: waits for every device and worker; called before the start and after the end.
    """
    endings = [ending] * len(requests) if isinstance(ending, Ending) else list(ending)
    rows = [Outcome() for _ in requests]
    strategy.reset()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of a step would be counted against whoever it hits
    try:
        drain()
        start = clock.now()
        steps = strategy.generate(requests, sampling)
        try:
            for step in steps:
                now = clock.now() - start
                _check(step, requests)
                if requests[step.row].done:  # finished within this round, by an earlier step of the same row
                    continue
                request = requests[step.row]
                request.done = rows[step.row].take(step, now, endings[step.row], request.max_new_tokens)
                if request.done and all(other.done for other in requests):
                    break
        finally:
            steps.close()  # type: ignore[attr-defined]
        end = clock.now()
        drain()
        drain_ns = clock.now() - end
        unfinished = [at for at, request in enumerate(requests) if not request.done]
        if unfinished:
            made = len(rows[unfinished[0]].token_ids)
            raise StrategyError(f"{strategy.name}: stopped by itself after {made} tokens of row {unfinished[0]}")
    except Exception as error:  # noqa: BLE001 - whatever a strategy raises becomes a failed sample, never a number
        return [Outcome(error=_one_line(error)) for _ in requests]
    finally:
        if was_enabled:
            gc.enable()
    for row in rows:
        row.start_ns, row.drain_ns, row.facts = start, drain_ns, dict(strategy.facts)
    return rows


def _check(step: Step, requests: Sequence[Request]) -> None:
    if not 0 <= step.row < len(requests):
        raise StrategyError(f"step for row {step.row} of {len(requests)}")
    if not step.tokens or not all(type(token) is int for token in step.tokens):
        raise StrategyError(f"step of row {step.row} holds no tokens, or not Python ints: {step.tokens!r}")
    if not 0 <= step.accepted <= step.drafted or step.accepted > len(step.tokens):
        raise StrategyError(
            f"step of row {step.row}: {step.accepted} of {step.drafted} accepted, but {len(step.tokens)} tokens emitted"
        )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
