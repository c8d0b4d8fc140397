"""The one loop, one clock and one token counter that every strategy is measured by.

The receiver counts: it notes the time of each step, trims at end of text, stop string and token limit, and stores the
ids. It never believes a strategy's own count, and what is trimmed counts nowhere, neither as a token nor as accepted.
It also decides who runs: where a request ends in a batch, its row goes to the next one that waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import StrategyError
from ..hardware.clock import Clock
from ..strategies.base import Request, Step, Strategy
from ..strategies.pieces import Piece
from ..strategies.sampling import Sampling
from . import transcripts

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
    """What one request of a call came to.

    Attributes:
        start_ns: when the call began, on the clock; all other times are durations in nanoseconds.
        admitted_ns: from the start of the call until there was a row for the request; 0 for those that began with it.
        ttft_ns, e2e_ns: from then to its first and its last token; the first numbers of `steps` count from then, too.
        drain_ns: how long the devices worked on after the call; None where it broke off.
        call_ns, call_tokens: of the whole call: the time to its last token, and how many tokens all its rows made.
        texts: of an engine that sends text, what each of the `steps` brought; `transcripts` makes ids of them later.
    """

    start_ns: int = 0
    admitted_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    drain_ns: int | None = None
    steps: list[list[int]] = field(default_factory=list)
    levels: list[list[list[int]]] = field(default_factory=list)
    rejected: list[list[int]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    call_ns: int = 0
    call_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    error: str | None = None

    def take(self, step: Step, at_ns: int, ending: Ending, limit: int) -> bool:
        """Adds a step that came `at_ns` after the request was admitted; True when it is finished by it."""
        if isinstance(step, Piece):
            return self._hear(step, at_ns)
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

    def _hear(self, piece: Piece, at_ns: int) -> bool:
        """A piece of text, whose tokens are counted later; its engine says when the answer ends."""
        self.texts.append(piece.text)
        self.steps.append([at_ns, 0, 0, 0, 0])
        self.rejected.append([])
        if self.ttft_ns is None:
            self.ttft_ns = at_ns
        self.e2e_ns, self.finish = at_ns, piece.finish
        return piece.finish is not None


class Call:
    """One call of a strategy's `generate`: some requests through its rows, from empty caches to the end of the last.

    The first requests begin together, one per row. When one of them ends, the next one that waits takes its row at that
    very moment, from which its times count (continuous batching). Requests that are as many as the rows are a group.

    Attributes:
        outcomes: one per request, in their order. Where the call broke off, those that had ended are whole.

    Args:
        ending: what ends the requests; one for all, or one per request.
        drain: waits for every device and worker; called before the start and after the end.
        rows: how many run at a time; by default all of them.

    Raises:
        ValueError: fewer rows than requests, for a strategy that is not `continuous`.
    """

    def __init__(
        self,
        strategy: Strategy,
        requests: Sequence[Request],
        sampling: Sampling,
        ending: Ending | Sequence[Ending],
        clock: Clock,
        drain: Callable[[], None],
        rows: int | None = None,
    ) -> None:
        rows = len(requests) if rows is None else min(rows, len(requests))
        if rows < len(requests) and not strategy.continuous:
            raise ValueError(f"{strategy.name}: {len(requests)} requests in {rows} row(s), and it replaces none")
        self.outcomes = [Outcome() for _ in requests]
        self._strategy, self._sampling, self._clock, self._drain = strategy, sampling, clock, drain
        self._asked = list(requests)
        self._endings = [ending] * len(requests) if isinstance(ending, Ending) else list(ending)
        self._rows = self._asked[:rows]  # what the strategy sees; changed while it runs
        self._numbers = list(range(rows))  # which of the requests is in each row
        self._next = rows
        self._start_ns = self._last_ns = self._tokens = 0

    def run(self) -> list[Outcome]:
        """Runs and times the call.

        An exception of the strategy becomes the `error` of every request that was in a row, with no times; what still
        waited then has neither an error nor a `finish`. KeyboardInterrupt passes.
        """
        self._strategy.reset()
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()  # a collection in the middle of a step would be counted against whoever it hits
        try:
            self._drain()
            self._start_ns = self._clock.now()
            steps = self._strategy.generate(self._rows, self._sampling)
            try:
                self._receive(steps)
            finally:
                steps.close()  # type: ignore[attr-defined]
            end = self._clock.now()
            self._drain()
            drain_ns = self._clock.now() - end
            self._check_end()
            for outcome in self.outcomes:
                outcome.drain_ns = drain_ns
        except Exception as error:  # noqa: BLE001 - whatever a strategy raises becomes a failed sample, never a number
            late = all(request.done for request in self._rows)  # it came from closing or draining: the last ones pay
            for number, request in zip(self._numbers, self._rows, strict=True):
                if late or not request.done:
                    self.outcomes[number] = Outcome(error=_one_line(error))
        finally:
            if was_enabled:
                gc.enable()
            self._settle()
            for outcome, request in zip(self.outcomes, self._asked, strict=True):
                if outcome.finish is not None:
                    outcome.start_ns, outcome.facts = self._start_ns, self._strategy.facts_of(request)
                    outcome.call_ns, outcome.call_tokens = self._last_ns, self._tokens
        return self.outcomes

    def _receive(self, steps: Iterable[Step]) -> None:
        for step in steps:
            now = self._clock.now() - self._start_ns
            _check(step, self._rows)
            request = self._rows[step.row]
            if request.done:  # finished within this round, by an earlier step of the same row
                continue
            number = self._numbers[step.row]
            outcome = self.outcomes[number]
            if isinstance(step, Piece) and step.restarted:
                self._restart(outcome, now)
                continue
            if isinstance(step, Piece) and step.error is not None:
                self.outcomes[number], request.done = Outcome(error=step.error), True
            else:
                at_ns = now - outcome.admitted_ns
                request.done = outcome.take(step, at_ns, self._endings[number], request.max_new_tokens)
                self._last_ns = now
                self._tokens += outcome.steps[-1][1]
            if not request.done:
                continue
            if self._next < len(self._asked):
                self._admit(step.row, now)
            elif all(other.done for other in self._rows):
                break

    def _admit(self, row: int, now: int) -> None:
        """Puts the next request that waits in a row that has become free."""
        number = self._numbers[row] = self._next
        self.outcomes[number].admitted_ns = now
        self._rows[row] = self._asked[number]
        self._next += 1

    def _restart(self, outcome: Outcome, now: int) -> None:
        """A request is sent once more: what came before is in no time of its own; of a call with others it is part."""
        if len(self._asked) == 1:
            self._start_ns += now
        else:
            outcome.admitted_ns = now

    def _settle(self) -> None:
        """Ids for the answers that came as text and are whole."""
        for number, outcome in enumerate(self.outcomes):
            if outcome.texts and outcome.finish is not None:
                limit = self._asked[number].max_new_tokens
                settled = transcripts.settle(outcome, self._strategy, self._endings[number], limit)
                self.outcomes[number] = settled
                self._tokens += len(settled.token_ids)

    def _check_end(self) -> None:
        for row, (number, request) in enumerate(zip(self._numbers, self._rows, strict=True)):
            if not request.done:
                made = len(self.outcomes[number].token_ids)
                raise StrategyError(f"{self._strategy.name}: stopped by itself after {made} tokens of row {row}")


def measure(
    strategy: Strategy,
    requests: Sequence[Request],
    sampling: Sampling,
    ending: Ending | Sequence[Ending],
    clock: Clock,
    drain: Callable[[], None],
    rows: int | None = None,
) -> list[Outcome]:
    """Runs one `Call` and returns what its requests came to."""
    return Call(strategy, requests, sampling, ending, clock, drain, rows).run()


def _check(step: Step, requests: Sequence[Request]) -> None:
    if not 0 <= step.row < len(requests):
        raise StrategyError(f"step for row {step.row} of {len(requests)}")
    if isinstance(step, Piece):
        return
    if not step.tokens or not all(type(token) is int for token in step.tokens):
        raise StrategyError(f"step of row {step.row} holds no tokens, or not Python ints: {step.tokens!r}")
    if not 0 <= step.accepted <= step.drafted or step.accepted > len(step.tokens):
        raise StrategyError(
            f"step of row {step.row}: {step.accepted} of {step.drafted} accepted, but {len(step.tokens)} tokens emitted"
        )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
