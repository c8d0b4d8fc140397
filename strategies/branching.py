"""What a branch is worth: how likely it is to be needed, what a row of the draft's forward costs, and whether it paid.

A draft token is of use if it becomes part of the text. Its chance of that is the product of the chances of all tokens
before it that are not verified yet, and everything here is counted in such tokens. A row more makes a forward longer,
and so delays every other row of it: a branch is continued only while it is expected to bring more than it delays. How
sure the draft says it is, is not how often it is right, so its figures are calibrated by what the target said in the
same text; and since every estimate may be wrong, an account is kept of what branches cost and what they brought.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from ..hardware.cost_model import expected_tokens

UNKNOWN_ROW_COST = 0.1  # of a draft's forward, where nothing was measured
LEAST = 0.05  # chance below which nothing is prepared for, even where a row costs nothing
MARGIN = 2.5  # times its cost that a branch has to be expected to bring; to begin one, a cache row is copied
# Of probabilities; finer at both ends, where most of them are.
_BORDERS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
_PRIOR = 6.0  # observations that the draft's own figure counts as

KEEPS = 0.97  # of the account, per step
ENOUGH = 2.0  # draft steps that branches have cost before anything is decided
HALF_A_STEP = 0.5  # that a draft works in vain, on average, after a rejection that was not prepared for
REST_TOKENS = 64  # before branches are tried again; doubled each time


class Calibration:
    """How often the target agreed where the draft gave such a probability, for first choices and for others apart."""

    def __init__(self) -> None:
        bins = len(_BORDERS) + 1
        self._right = {True: [0] * bins, False: [0] * bins}
        self._seen = {True: [0] * bins, False: [0] * bins}

    def observe(self, probability: float, first: bool, right: bool) -> None:
        """Takes note of a position where the target read what the draft had read.

        Args:
            probability: that the draft gave to a token.
            first: whether that was its first choice.
            right: whether it was the target's.
        """
        at = bisect(_BORDERS, probability)
        self._seen[first][at] += 1
        self._right[first][at] += right

    def chance(self, probability: float, first: bool) -> float:
        """Of being the target's token, by what was observed so far."""
        at = bisect(_BORDERS, probability)
        return (probability * _PRIOR + self._right[first][at]) / (_PRIOR + self._seen[first][at])


def rows_that_pay(main: float | None, others: Sequence[float], row_costs: Sequence[float]) -> int:
    """How many of the other lines a forward should carry, so that it makes the most tokens of use per time.

    Args:
        main: chance that the main line is right up to its end; it is always carried. None where it rests.
        others: the chances of the other lines, highest first.
        row_costs: what forwards of 1, 2, ... rows take, as multiples of the first; empty where rows cost nothing.
    """
    if not row_costs:
        return len(others)
    count, expected, alone = 0, main or 0.0, main is None
    best = expected
    for more, chance in enumerate(others, 1):
        took = row_costs[min(more - alone, len(row_costs) - 1)]
        expected += chance
        rate = expected / (1 + MARGIN * (took - 1))
        if rate > best:
            count, best = more, rate
    return count


class BranchAccount:
    """Whether branches have paid over the latest steps; they are switched off where they have not, and tried again.

    Both sides are in draft steps. A row of a branch costs `row_cost` of a step, as far as a token more in the block
    would have been of use, which is alpha to the power of the block's length. A branch that a rejection has made the
    main line brings those of its tokens that will be taken, and the half step that the draft would have ended in vain.

    Args:
        row_cost: what a second row adds to a forward, as a share of it.

    Attributes:
        on: whether branches may be begun.
        switches: how often that has changed.
    """

    def __init__(self, row_cost: float) -> None:
        self.on, self.switches = True, 0
        self._row_cost = row_cost
        self._cost = self._brought = 0.0
        self._rest, self._rested = REST_TOKENS, 0

    def observe(self, alpha: float, drafted: int, new_tokens: int, branched: int, rescued: int) -> bool:
        """Takes note of a step; True if that has switched branches on or off.

        Args:
            alpha: the running acceptance.
            drafted: draft tokens of the block.
            branched: tokens posted on branches since the step before.
            rescued: tokens that were ready on a branch when it became the main line.
        """
        if not self.on:
            self._rested += new_tokens
            if self._rested < self._rest:
                return False
            self._rest, self._rested = 2 * self._rest, 0
            self._cost = self._brought = 0.0
        else:
            self._cost = KEEPS * self._cost + self._row_cost * branched * alpha**drafted
            self._brought *= KEEPS
            if rescued:
                self._brought += expected_tokens(alpha, rescued) - 1 + HALF_A_STEP
            if self._cost < ENOUGH or self._brought >= self._cost:
                return False
        self.on = not self.on
        self.switches += 1
        return True
