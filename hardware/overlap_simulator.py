"""A draft and a target on two devices, event by event: how long a text takes them.

Nothing here runs a model. `hardware.overlap` says what is reached in the long run if acceptance is independent from
token to token; here one text has its own trace of where the draft is right, a beginning, an end, and a controller that
may change its mind. Real acceptance comes in runs, and a text of a hundred tokens spends a good part of its time
finding out, so that only this can be held against a measured run.

A trace has an entry per position of the text, the first token's included: 0 where the draft's own choice is the
target's token, given that all before it was read, 1 where its prepared second choice is, 2 where neither is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .overlap import Costs


class Way(Protocol):
    """How to go on: `overlap`, `turns` or `plain`; see `strategies.controller.Way`."""

    @property
    def mode(self) -> str: ...
    @property
    def need(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def lead(self) -> int: ...


class Steering(Protocol):
    """Who decides how to go on after every step; `strategies.controller.Controller` is one."""

    @property
    def way(self) -> Way: ...
    def observe(
        self, drafted: int, accepted: int, new_tokens: int, hit: bool, branched: int = 0, rescued: int = 0
    ) -> bool: ...


@dataclass(frozen=True)
class Fixed:
    """One way, kept to the end.

    Attributes:
        need: draft tokens to wait for before a verification.
        most: draft tokens that one verification takes.
        lead: tokens that the draft may be ahead.
    """

    need: int
    most: int
    lead: int = 16
    mode: str = "overlap"

    @property
    def way(self) -> Way:
        return self

    def observe(
        self, drafted: int, accepted: int, new_tokens: int, hit: bool, branched: int = 0, rescued: int = 0
    ) -> bool:
        return False


def in_turns(length: int) -> Fixed:
    """Speculative decoding as usual: the draft makes a block, then rests while the target verifies it."""
    return Fixed(length, length, length, "turns")


class Simulated(NamedTuple):
    """What a text took after its first token: `tokens` in `steps` forwards of the target and `ms` milliseconds."""

    tokens: int
    steps: int
    ms: float

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def random_ranks(alpha: float, second: float, count: int, seed: int = 0) -> np.ndarray:
    """A trace of independent entries, (count,): 0 with probability alpha, else 1 with probability `second`, else 2."""
    luck = np.random.default_rng(seed).random((2, count))
    return np.where(luck[0] < alpha, 0, np.where(luck[1] < second, 1, 2))


def simulate(
    costs: Costs,
    ranks: Sequence[int] | np.ndarray,
    steering: Steering,
    limit: int | None = None,
    prepares: float = 0.0,
    rows: float = 1.0,
    first_at: float | None = None,
    first_position: int = 1,
) -> Simulated:
    """Decodes the text of a trace with a draft that writes ahead and a target that verifies what is there.

    Args:
        ranks: the trace.
        limit: tokens that may be generated, which both sides know and plan with; the length of the trace by default.
        prepares: tokens that a second line has ready at most, on average, where a block is rejected and the draft's
            second choice replaces it; 0 where there is no second line, infinity for as many as there was time for.
        rows: rows of a draft step, on average.
        first_at: when the draft has made its first token, in ms after the target's first one, and so the end of its
            prefill; by default one step after. While that is to come the target takes plain steps.
        first_position: of that token: 0 where the draft reads the prompt beside the target, 1 where it waits for the
            target's first token (and the target then waits for the draft's).
    """
    if len(ranks) < 2:
        return Simulated(0, 0, 0.0)
    limit = max(limit or 0, len(ranks))
    draft = _Draft(costs.draft_ms(rows) * costs.draft_factor, list(map(int, ranks)), limit, steering.way.lead)
    draft.begin(first_position, draft.step_ms if first_at is None else first_at)
    steering.observe(0, 0, 1, draft.ready > 0)  # the prefill is a step, too
    now, steps, owed = 0.0, 0, 0.0
    while draft.known < len(ranks):
        way, position = steering.way, draft.known
        draft.lead = way.lead
        draft.go_on(now)
        draft.work(now)
        room = max(0, limit - position - 1)
        need = min(way.need, room) if draft.posted or first_position else 0
        while draft.ready < need and draft.due is not None:  # the target rests, so nothing slows the draft down
            now += (draft.due - now) / costs.draft_factor
            draft.end_step(now)
        k, due = min(draft.ready, way.most, room), draft.due
        began, now = now, now + costs.target_ms(k + 1) * (1.0 if due is None else costs.target_factor)
        draft.work(now)
        accepted = next((i for i in range(k) if draft.ranks[position + i]), k)
        prepared = None
        if prepares and accepted < k and draft.ranks[position + accepted] == 1:
            whole_steps = max(0, int((now - (began if due is None else due)) / draft.step_ms))
            owed += prepares
            prepared = int(min(whole_steps, owed))
            owed = min(owed - prepared, prepares)
        draft.hear(position + accepted + 1, now, prepared)
        steps += 1
        steering.observe(k, accepted, accepted + 1, draft.ready > 0)
    return Simulated(len(ranks) - 1, steps, now)


class _Draft:
    """The draft's side: its line, and the forward that it is in.

    Attributes:
        known: how many tokens of the text it knows to be verified.
        head: position of the token that it makes next; what it has ready begins at `known`.
        due: when the forward that it is in ends; None while it rests.
        posted: whether it has made any token yet.
    """

    def __init__(self, step_ms: float, ranks: list[int], limit: int, lead: int) -> None:
        self.step_ms, self.limit, self.lead = step_ms, limit, lead
        self.ranks = ranks + [0] * (limit - len(ranks))
        self.known = self.head = 0
        self.due: float | None = None
        self.posted = self._in_vain = False

    @property
    def ready(self) -> int:
        return self.head - self.known

    def begin(self, position: int, due: float) -> None:
        """The first forward, from whose end on there are tokens, unless none are wanted; at time 0 the target's first
        token is there."""
        self.known = self.head = position
        self.due = due if self.lead else None
        if position == 0:
            self.work(0.0)
            self.hear(1, 0.0, None)

    def work(self, until: float) -> None:
        while self.due is not None and self.due <= until:
            self.end_step(self.due)

    def end_step(self, now: float) -> None:
        """The forward that it is in ends now, and another begins unless it is far enough ahead."""
        self.posted = True
        if self._in_vain:
            self._in_vain = False
        else:
            self.head += 1
        self.due = None
        self.go_on(now)

    def go_on(self, now: float) -> None:
        if self.due is None and self.head < min(self.limit - 1, self.known + self.lead):
            self.due = now + self.step_ms

    def hear(self, known: int, now: float, prepared: int | None) -> None:
        """The text is verified up to `known`.

        Args:
            prepared: tokens that a second line has ready that says the same; None where there is none.
        """
        wrong = any(self.ranks[at] for at in range(self.known, min(self.head, known)))
        if prepared is not None:
            self.head = known + min(prepared, self.lead)
        elif wrong or self.head < known:
            self.head = known
            self._in_vain = self.due is not None
        self.known = known
        self.go_on(now)


def simulate_published(
    costs: Costs, ranks: Sequence[int] | np.ndarray, budget: int, branches: float = 1.0, limit: int | None = None
) -> Simulated:
    """DuoDecoding's published protocol: rounds in which both work, each as long as the slower side.

    Args:
        budget: draft tokens per round, split over the branches, which are made one after another.
        branches: per round, on average; beyond one they know the second choice.
        limit: as for `simulate`.
    """
    limit = max(limit or 0, len(ranks))
    trace = list(map(int, ranks)) + [0] * (limit + 1 - len(ranks))
    position, block, steps, now = 1, 0, 0, 0.0  # block: tokens in flight that are not verified yet
    while position < len(ranks):
        longest = max(0, limit - 1 - position - block)
        length = min(int(budget / branches), longest)
        forwards = length + (branches - 1) * max(0, length - 1)
        if length == 1 and longest > 1:
            forwards += 1  # the second token is looked at even so, for the rule of how many branches there are
        drafting = forwards * costs.draft_ms(1) * costs.draft_factor
        now += max(costs.target_ms(block + 1) * (costs.target_factor if forwards else 1.0), drafting)
        accepted = next((i for i in range(block) if trace[position + i]), block)
        position += accepted + 1
        found = trace[position - 1] == 0 or (branches > 1 and trace[position - 1] == 1)
        room = max(0, limit - position - 1)
        block = min(length - 1, room) if accepted == block and found and length else 0
        steps += 1
    return Simulated(max(0, len(ranks) - 1), steps, now)
