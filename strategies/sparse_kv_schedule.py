"""How far a sparse draft drafts, and how much it keeps: by measured costs and the acceptance of the text at hand.

Every round the lengths are chosen with which the batch is expected to make most tokens per ms (`hardware.sparse_cost`),
given a running acceptance of each row. Where drafting does not pay, because the context is short or the draft is often
wrong, rows are decoded plainly; they are tried again after a while, for which old observations then count less. A row
that has no small cache yet has to win back what choosing one costs over half of the tokens that it may still get.

Acceptance by budget has to be assumed until it was seen. What is seen at one budget says by what factor the assumed
share of wrong tokens is off, and that factor is taken for the other budgets and for rows that begin later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..hardware.cost_model import expected_tokens
from ..hardware.sparse_cost import Lengths, best_lengths, break_even_context, spread
from ..models.sparse_cost import SparseCosts
from .base import Request, Row
from .cascade_schedule import Share

GAMMA, BUDGET = 3, 512  # where nothing was measured
LONGEST = 8
BUDGETS = (128, 256, 512, 1024)
# Chance of a draft token to be right behind right ones, by budget: x such that (x + x^2 + x^3) / 3 is the acceptance
# that was measured with three draft tokens (docs/strategies/sparse-kv.md): 128 on four answers, 256 on six, 512 the
# worse of two; 1024 was not measured. Cautious, since what is seen corrects it within a few rounds, and a selection
# that did not pay is lost. And how much more often the target's own weights, rounded, are wrong, and another model.
ASSUMED = {128: 0.60, 256: 0.75, 512: 0.85, 1024: 0.88}
ROUNDED, OTHER_MODEL = 1.5, 3.0
WORTH = 1.02  # how much faster than plain decoding drafting has to promise to be: it takes time of its own
HOPE = 0.98  # share of right tokens with which it has to pay for a row to be tried again
REST = 32  # tokens that a row is decoded plainly before it is tried again; doubled each time
FADE = 0.25  # of the weight of what was observed before
FOLLOWS = 0.1  # weight of a round in the running mean of draft tokens per forward


@dataclass
class RowState:
    """What is known of one request.

    Attributes:
        share: of its draft tokens that were right.
        chosen_at: how long it was when its small cache was chosen; None before.
        budget: of that cache.
        drafted, drafted_at: the latest draft, and how long the row was then; not yet compared with what came.
        rests_since: how long it was when it was first decoded plainly; None while it is drafted for.
        rest: tokens until it is tried again.
    """

    request: Request
    share: Share
    chosen_at: int | None = None
    budget: int = 0
    drafted: Sequence[int] = ()
    drafted_at: int = 0
    rests_since: int | None = None
    rest: int = REST

    def held(self, length: int) -> int:
        """Positions that its small cache holds, once it has followed to so many tokens."""
        assert self.chosen_at is not None
        return min(self.budget, self.chosen_at) + length - self.chosen_at


class Predicted(NamedTuple):
    """Milliseconds of a round by its parts, and of a plain step in its place."""

    draft: float
    verify: float
    follow: float
    plain: float


class Schedule:
    """Lengths and budgets for the rows of a batch.

    Args:
        costs: None where nothing was measured: what is not fixed is then GAMMA and BUDGET.
        gamma, budget: fixed by the user, or None.
        longest: the longest draft.
        least_budget: the smallest budget that the rule for choosing positions can do with.
        misses: by what factor more draft tokens are wrong than ASSUMED says, before anything was seen.
    """

    def __init__(
        self,
        costs: SparseCosts | None = None,
        gamma: int | None = None,
        budget: int | None = None,
        longest: int = LONGEST,
        least_budget: int = 1,
        misses: float = 1.0,
    ) -> None:
        self.costs, self.gamma, self.budget = costs, gamma, budget
        self.longest = gamma or longest
        usable = [number for number in BUDGETS if number >= least_budget]
        self.budgets = [budget] if budget else usable or [least_budget]
        self._least_budget = least_budget
        self._misses, self._expected_misses = misses, 1.0
        self._per_forward = 1.0  # draft tokens that come out of one forward of the draft
        self._tables: dict[tuple[str, int, int], list[float]] = {}
        self._budgets: dict[tuple[int, int, float], int] = {}
        self._refused: tuple | None = None  # the latest situation in which drafting did not pay

    def begin(self, request: Request) -> RowState:
        return RowState(request, Share(self.acceptance(self.budget or BUDGET)))

    # Decisions

    def lengths(self, rows: Sequence[Row], states: Sequence[RowState], limits: Sequence[int]) -> list[int]:
        """How many tokens to draft for each row."""
        limits = [min(limit, self.longest) for limit in limits]
        if self.gamma is not None or self.costs is None:
            return [min(limit, self.gamma or GAMMA) for limit in limits]
        found = self._best(rows, states, limits)
        if not found and len({state.chosen_at is None for state in states}) == 2:  # those that are ready go on alone
            ready = [0 if state.chosen_at is None else limit for limit, state in zip(limits, states, strict=True)]
            found = self._best(rows, states, ready)
        lengths = found or [0] * len(rows)
        for row, state, limit, length in zip(rows, states, limits, lengths, strict=True):
            self._rest(row, state, len(rows), limit > 0 and not length)
        return lengths

    def budget_for(self, context: int, rows: int) -> int:
        """How many positions to keep of rows of so many tokens: the budget that promises most."""
        if self.budget is not None or self.costs is None:
            return self.budget or max(BUDGET, self._least_budget)
        key = (self.costs.reach(context), rows, round(self._misses / self._expected_misses, 1))
        if key not in self._budgets:
            usable = [budget for budget in self.budgets if budget < context] or self.budgets[:1]
            self._budgets[key] = max(usable, key=lambda budget: self._rate(context, rows, budget))
        return self._budgets[key]

    def chosen(self, state: RowState, length: int, budget: int) -> None:
        """Takes note that a small cache was chosen, out of a row of so many tokens."""
        if budget != state.budget:
            state.share.assumed = self.acceptance(budget)
        state.chosen_at, state.budget = length, budget

    def learn(self, state: RowState, drafted: int, accepted: int) -> None:
        """Takes note of what became of a draft."""
        for at in range(min(accepted + 1, drafted)):
            state.share.add(at < accepted)
            self._misses += at >= accepted
            self._expected_misses += 1 - _assumed(state.budget)

    def reviewed(self, tokens: int, forwards: int) -> None:
        """Takes note of how many draft tokens came out of how many forwards of the draft, see `cascade_levels`."""
        if forwards:
            self._per_forward += FOLLOWS * (tokens / forwards - self._per_forward)

    # Predictions

    def acceptance(self, budget: int) -> float:
        """The share of draft tokens that is expected to be right with such a cache."""
        return max(0.0, 1 - (1 - _assumed(budget)) * self._misses / self._expected_misses)

    def predicted(self, rows: Sequence[Row], states: Sequence[RowState], lengths: Sequence[int]) -> Predicted:
        """What a round takes; choosing small caches left out, see `SparseCosts.begin_ms`."""
        assert self.costs is not None
        draft_ms = self._draft_ms(self._held(rows, states))
        counts = [sum(length > place for length in lengths) for place in range(max(lengths))]
        verify_ms = self._verify_ms(self._context(rows), len(rows))
        follow_ms = self.costs.follow_ms * sum(length > 0 for length in lengths)
        verifying = verify_ms(1 + sum(lengths) / len(rows))
        return Predicted(sum(map(draft_ms, counts)), verifying, follow_ms, verify_ms(1))

    def gain(self, context: float, rows: int, alpha: float | None = None, answer: float = float("inf")) -> float:
        """Speed-up over plain decoding that is to be expected with the best budget and lengths.

        With lengths that are chosen it is never below 1.

        Args:
            alpha: acceptance; None for what each budget is expected to have.
            answer: tokens that a row gets, over which what choosing costs is spread.
        """
        best = max(self._rate(context, rows, budget, alpha, answer) for budget in self.budgets)
        return best * self._verify_ms(context, rows)(1) / rows

    def break_even(self, rows: int, longest: float, answer: float = float("inf")) -> float | None:
        """The context from which drafting is expected to pay; None where it is not, up to the longest one."""
        return break_even_context(lambda context: self.gain(context, rows, answer=answer) / WORTH, longest)

    def _rate(
        self, context: float, rows: int, budget: int, alpha: float | None = None, answer: float = float("inf")
    ) -> float:
        """Tokens per ms of rows that are all alike."""
        assert self.costs is not None
        alpha = self.acceptance(budget) if alpha is None else alpha
        draft_ms, verify_ms = self._draft_ms(min(budget, int(context)))(rows), self._verify_ms(context, rows)
        begin_ms, follow_ms = self.costs.begin_ms(context), rows * self.costs.follow_ms
        if self.gamma is not None:
            ms = self.gamma * draft_ms + verify_ms(self.gamma + 1) + follow_ms
            return spread(rows * expected_tokens(alpha, self.gamma) / ms, begin_ms, answer)
        found = best_lengths([alpha], [self.longest], lambda _: draft_ms, verify_ms, follow_ms)  # one stands for all
        plain = rows / verify_ms(1)
        return max(plain, spread(rows * found.rate, begin_ms, answer)) if any(found.lengths) else plain

    def _best(self, rows: Sequence[Row], states: Sequence[RowState], limits: Sequence[int]) -> list[int] | None:
        """The best lengths, or None where plain decoding is as good once small caches that are missing are paid for."""
        assert self.costs is not None
        context, held = self._context(rows), self._held(rows, states)
        alphas = [state.share.value for state in states]
        situation = (alphas, limits, self.costs.reach(context + self.longest), self.costs.reach(held + self.longest))
        if situation == self._refused:
            return None
        verify_ms = self._verify_ms(context, len(rows))
        found: Lengths = best_lengths(alphas, limits, self._draft_ms(held), verify_ms, self.costs.follow_ms)
        plain = len(rows) / verify_ms(1)
        if found.rate < WORTH * plain:
            self._refused = situation
            return None
        begin_ms = sum(
            self.costs.begin_ms(len(row.tokens))
            for row, state, length in zip(rows, states, found.lengths, strict=True)
            if length and state.chosen_at is None
        )
        left = sum(max(1, row.request.max_new_tokens - row.new_tokens) / 2 for row in rows)
        return list(found.lengths) if left / found.rate + begin_ms < left / plain else None

    def _rest(self, row: Row, state: RowState, rows: int, rests: bool) -> None:
        """Keeps count of a row that is decoded plainly, and has it tried again when its time has come."""
        length = len(row.tokens)
        if not rests:
            state.rests_since = None
        elif state.rests_since is None:
            state.rests_since = length
        elif length - state.rests_since >= state.rest:
            state.rests_since, state.rest = length, 2 * state.rest
            if self.gain(length, rows, HOPE) > WORTH:
                state.share.right *= FADE
                state.share.seen *= FADE

    def _context(self, rows: Sequence[Row]) -> float:
        assert self.costs is not None
        return self.costs.length_of([len(row.tokens) for row in rows])

    def _held(self, rows: Sequence[Row], states: Sequence[RowState]) -> float:
        """Positions that small caches hold; rows that have none yet count as they would be chosen."""
        assert self.costs is not None
        context, held = int(self._context(rows)), []
        for row, state in zip(rows, states, strict=True):
            missing = state.chosen_at is None
            held.append(self.budget_for(context, len(rows)) if missing else state.held(len(row.tokens)))
        return self.costs.length_of(held)

    # Times, looked up instead of interpolated

    def _verify_ms(self, context: float, rows: int) -> Callable[[float], float]:
        """One forward of the target by tokens per row. From two on more tokens never cost less: what looks slower than
        a larger number was measured in a bad moment."""
        assert self.costs is not None
        reach = self.costs.reach(context + self.longest + 1)
        table = self._tables.get(("target", reach, rows))
        if table is None:
            first, *more = [self.costs.target.ms(n, reach, rows) for n in range(1, self.longest + 2)]
            table = self._tables["target", reach, rows] = [first, *[*accumulate(reversed(more), min)][::-1]]
        known = table

        def look_up(tokens: float) -> float:
            at = min(int(tokens), len(known) - 1)
            return known[at - 1] + (tokens - at) * (known[at] - known[at - 1])

        return look_up

    def _draft_ms(self, held: float) -> Callable[[int], float]:
        """What a draft token takes, by the rows that draft together."""
        assert self.costs is not None
        curve, reach = self.costs.draft, self.costs.reach(held + self.longest)
        table = self._tables.setdefault(("draft", reach, 0), [])

        def look_up(rows: int) -> float:
            while len(table) < rows:
                table.append(curve.ms(1, reach, len(table) + 1))
            return table[rows - 1] / self._per_forward

        return look_up


@functools.cache
def _assumed(budget: int) -> float:
    """Share of right tokens with a cache of so many positions, before anything was seen."""
    return float(np.interp(np.log2(budget), np.log2(list(ASSUMED)), list(ASSUMED.values())))
