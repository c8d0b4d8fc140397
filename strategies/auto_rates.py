"""What each way of `auto` costs and promises by the measured curves: computed once, then looked up for every token."""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware.cost_model import best_draft_length, expected_tokens
from .cascade_schedule import Times

_STEPS = 200  # that acceptance is rounded to
_EXACT, _COARSE = 16, 8  # tokens to read that are told apart; beyond, so many are rounded up to together


class Rates:
    """Tokens per millisecond and milliseconds, for any number of rows.

    Args:
        target: times of the target.
        draft: times of the draft model, or None.
        most: the longest draft.
        extra_ms: what a way takes per forward of the draft model beside that forward, by its name.
    """

    def __init__(
        self, target: Times, draft: Times | None = None, most: int = 16, extra_ms: Mapping[str, float] | None = None
    ) -> None:
        self.target, self.draft, self.most, self.extra_ms = target, draft, most, dict(extra_ms or {})
        self._best: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._reading: dict[tuple[int, int], float] = {}

    def plain(self, rows: int) -> float:
        return 1 / self.target.of(rows)[1]

    def token_ms(self, way: str, rows: int) -> float:
        """One token of the draft model."""
        assert self.draft is not None
        return self.draft.of(rows)[1] + self.extra_ms.get(way, 0.0)

    def best(self, way: str, alpha: float, rows: int) -> tuple[int, float]:
        """The draft length, at least 1, with which speculative rounds are fastest for an acceptance, and their rate.

        Source: Leviathan et al. 2023, with measured costs.
        """
        key = way, round(_STEPS * min(max(alpha, 0.0), 1.0)), rows
        found = self._best.get(key)
        if found is None:
            alpha, token_ms, times = key[1] / _STEPS, self.token_ms(way, rows), self.target.of(rows)
            length, rate = best_draft_length([alpha] * self.most, lambda k: k * token_ms, times.__getitem__)
            if not length:
                length, rate = 1, expected_tokens(alpha, 1) / (token_ms + times[2])
            found = self._best[key] = length, rate
        return found

    def reading(self, behind: int, rows: int) -> float:
        """What the draft model's next forward takes more where it has so many tokens to read beside the latest."""
        if self.draft is None or behind < 1:
            return 0.0
        if behind > _EXACT:
            behind = -(-behind // _COARSE) * _COARSE
        found = self._reading.get((behind, rows))
        if found is None:
            found = self._reading[behind, rows] = self.draft.reading(behind, rows)
        return found
