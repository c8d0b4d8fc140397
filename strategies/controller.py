"""How two devices share the work: when the target verifies how much, and whether the draft works meanwhile.

The costs of both models are measured once; then `hardware.overlap` says for any acceptance rate which way is the
fastest, and how fast. The controller keeps the running acceptance of a prompt and goes from one mode to another when
that pays:

- `overlap`: both work at once; the target waits until so many draft tokens are ready that verifying pays;
- `turns`: the draft makes a block and rests while the target verifies it, which is speculative decoding as usual;
- `plain`: the draft rests, the target decodes alone. It is tried again after a while.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..hardware.overlap import Costs, best_policy, best_sequential, plain_rate
from .branching import UNKNOWN_ROW_COST, BranchAccount

ALPHAS = (0.05, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98)
HITS = (0.0, 0.25, 0.5)
PRIOR_ALPHA, PRIOR_HIT, PRIOR_WEIGHT = 0.75, 0.25, 4.0
KEEPS = 0.97  # of what was observed, per step: some thirty steps are remembered
FEWEST = 12  # draft tokens looked at before anything is decided
BETTER = 1.01  # by which another mode has to be expected to be, since going back costs little
PLAIN_BETTER = 1.03  # by which plain decoding has to be: it learns nothing more of the draft for a while
REST_TOKENS = 32  # in plain mode before drafting is tried again; doubled each time


@dataclass(frozen=True)
class Way:
    """One way of going on.

    Attributes:
        mode: `overlap`, `turns` or `plain`.
        need: draft tokens to wait for before a verification.
        most: draft tokens that one verification takes.
        lead: tokens that the draft may be ahead.
        rate: tokens per ms that are expected of it.
    """

    mode: str
    need: int
    most: int
    lead: int
    rate: float = 0.0


def ways(costs: Costs, most: int, lead: int, rows: float = 1.0) -> dict[tuple[int, int], dict[str, Way]]:
    """The best way of each mode, by index in ALPHAS and in HITS. Takes some tenths of a second.

    Args:
        rows: of a draft step, on average, where rejections are prepared for.
    """
    table = {}
    plain = Way("plain", 0, 0, 0, plain_rate(costs))
    for a, alpha in enumerate(ALPHAS):
        rate, length = best_sequential(costs, alpha, most)
        turns = Way("turns", length, length, length, rate)
        for h, hit in enumerate(HITS):
            # Further ahead than two verifications changes nothing, and costs a lot to compute.
            best = best_policy(costs, alpha, most, min(lead, 2 * most), hit, rows if hit else 1.0)
            overlap = Way("overlap", best.need, best.most, lead, best.rate)
            table[a, h] = {way.mode: way for way in (overlap, turns, plain)}
    return table


class Controller:
    """The running state of one prompt.

    Args:
        start: the way to begin with, and to keep where nothing is known of costs.
        table: from `ways`, or None.
        need, most: fixed by the user, or None.
        anticipates: whether rejections may be prepared for.
        row_cost: what a second row adds to a forward of the draft, as a share of it.
        on: False to keep the mode `overlap`, and to keep branches.
    """

    def __init__(
        self,
        start: Way,
        table: dict[tuple[int, int], dict[str, Way]] | None,
        need: int | None = None,
        most: int | None = None,
        anticipates: bool = False,
        row_cost: float = UNKNOWN_ROW_COST,
        on: bool = True,
    ) -> None:
        self._start, self._table, self._need, self._most = start, table, need, most
        self._anticipates, self._on = anticipates, on
        self._branches = BranchAccount(row_cost)
        self._accepted, self._tried = PRIOR_ALPHA * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._hits, self._rejected = PRIOR_HIT * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._looked = 0
        self._rest, self._rested = REST_TOKENS, 0
        self.steps: Counter[str] = Counter()
        self.changes = 0
        self.way = self._fixed(self._best(("overlap", "turns", "plain")))

    @property
    def alpha(self) -> float:
        return self._accepted / self._tried

    @property
    def branching(self) -> bool:
        """Whether the draft may prepare for rejections now."""
        return self._anticipates and self._branches.on and self.way.mode == "overlap"

    @property
    def branch_switches(self) -> int:
        return self._branches.switches

    def observe(
        self, drafted: int, accepted: int, new_tokens: int, hit: bool, branched: int = 0, rescued: int = 0
    ) -> bool:
        """Takes note of a step; True if the way has changed, or whether there may be branches.

        Args:
            hit: whether something was prepared for what came instead of the draft.
            branched, rescued: see `BranchAccount.observe`.
        """
        self.steps[self.way.mode] += 1
        if self.way.mode == "plain":
            self._rested += new_tokens
            if self._rested < self._rest:
                return False
            self._rest, self._rested = self._rest * 2, 0
            self._accepted, self._tried = 0.25 * self._accepted, 0.25 * self._tried
            self._looked = 0
            return self._go(self._best(("overlap", "turns")))
        switched = False
        if self._on and self._anticipates and self.way.mode == "overlap":
            switched = self._branches.observe(self.alpha, drafted, new_tokens, branched, rescued)
        return self._look(drafted, accepted, hit) or switched

    def _look(self, drafted: int, accepted: int, hit: bool) -> bool:
        """Goes by the acceptance; True if the way has changed."""
        if drafted:
            rejected = accepted < drafted
            self._accepted = self._accepted * KEEPS + accepted
            self._tried = self._tried * KEEPS + accepted + rejected
            if rejected and self.branching:
                self._hits, self._rejected = self._hits * KEEPS + hit, self._rejected * KEEPS + 1
        self._looked += drafted or 1  # a draft that is never there in time has to be given up, too
        if self._table is None:
            return False
        known = self._table[self._at()]
        if self._on and self._looked >= FEWEST:
            best = self._best(("overlap", "turns", "plain"))
            margin = PLAIN_BETTER if best.mode == "plain" else BETTER
            if best.rate > margin * known[self.way.mode].rate:
                return self._go(best)
        return self._go(known[self.way.mode])

    def _best(self, modes: tuple[str, ...]) -> Way:
        """What is expected to be the fastest now, if it may be anything but overlap."""
        if self._table is None:
            return self._start
        known = self._table[self._at()]
        return max((known[mode] for mode in modes), key=lambda way: way.rate) if self._on else known["overlap"]

    def _at(self) -> tuple[int, int]:
        hit = self._hits / self._rejected if self._anticipates and self._branches.on else 0.0
        return _nearest(ALPHAS, self.alpha), _nearest(HITS, hit)

    def _go(self, way: Way) -> bool:
        way = self._fixed(way)
        changed = (way.mode, way.lead) != (self.way.mode, self.way.lead)
        self.changes += way.mode != self.way.mode
        self.way = way
        return changed

    def _fixed(self, way: Way) -> Way:
        if way.mode == "plain":
            return way
        if way.mode == "turns":
            length = min(way.most, self._most or way.most, self._start.lead)
            return Way(way.mode, length, length, length, way.rate)
        most = way.most if self._most is None else self._most
        if self._need is None:
            return Way(way.mode, min(way.need, most), most, way.lead, way.rate)
        most = max(most, self._need) if self._most is None else most
        return Way(way.mode, min(self._need, most), most, way.lead, way.rate)


def _nearest(grid: tuple[float, ...], value: float) -> int:
    return min(range(len(grid)), key=lambda at: abs(grid[at] - value))
