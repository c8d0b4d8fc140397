"""What the n-gram level would have made of a row, without a forward: rounds played through as the text comes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import Row
from .cascade_schedule import KEPT, Scheduled
from .proposal import Proposal
from .statistical import Ngram

REACH = 4  # tokens that n-grams are asked for at first: looking further takes time itself


class _Now:
    """Times of the target, for as many rows as share its forward now."""

    times: Sequence[float] = ()

    def of(self, rows: int) -> Sequence[float]:
        return self.times


class Shadow:
    """The rounds that auto's lookup would make of a row, played through on the text as it comes; and its drafts, where
    they are wanted. Unlike the strategy of that name it drafts only as far as a longer review pays.

    A draft is the n-gram level of a cascade at the length that pays, often none at all: see `cascade_schedule`. A round
    is counted once the text tells how it ends, so the shadow stays behind by less than one draft.

    Args:
        most: the longest draft.
        eos: ends of text.
    """

    def __init__(self, row: Row, most: int = 16, eos: Sequence[int] = ()) -> None:
        self.most = most
        self._row = Row(row.index, row.request)
        self._now = _Now()
        self._feed = Scheduled(self._now, None, None, Ngram(), most, eos=eos)  # type: ignore[arg-type]
        self._draft: Proposal | None = None
        self.rounds, self.tokens, self.ms = 0, 0.0, 0.0
        self.drafts = 0  # rounds that had one
        self._catch_up(row)

    def draft(self, row: Row, limit: int, times: Sequence[float]) -> Proposal:
        """What lookup says at the end of the row; the round that it is in begins there.

        Args:
            times: milliseconds of a forward of the target by its number of tokens.
        """
        self._catch_up(row)
        self._draft = self._propose(limit, times)
        return self._draft

    def follow(self, text: np.ndarray, times: Sequence[float]) -> None:
        """Plays as many rounds as the text decides.

        Args:
            text: prompt and output so far.
            times: as for `draft`.
        """
        while (at := len(self._row.tokens)) < len(text):
            if self._draft is None:
                self._draft = self._propose(self.most, times)
            drafted = self._draft.tokens
            came = text[at : at + len(drafted) + 1].tolist()
            pairs = enumerate(zip(drafted, came, strict=False))
            accepted = next((i for i, (said, true) in pairs if said != true), min(len(drafted), len(came)))
            if accepted == len(came):  # the rest of it may still be right
                return
            made = came[: accepted + 1]
            self._feed.learn(self._row, self._draft, made)
            self._row.tokens.extend(made)
            self._draft = None
            self.rounds, self.drafts = self.rounds + 1, self.drafts + bool(drafted)
            self.tokens = KEPT * self.tokens + accepted + 1
            self.ms = KEPT * self.ms + times[len(drafted) + 1]

    def _propose(self, limit: int, times: Sequence[float]) -> Proposal:
        self._now.times = times
        room = self._row.request.max_new_tokens - self._row.new_tokens - 1
        limit = max(0, min(limit, room, len(times) - 2))
        (found,) = self._feed.propose([self._row], [min(limit, REACH)])
        if len(found.tokens) == REACH < limit:  # all of it is worth a longer review, and more may be
            (found,) = self._feed.propose([self._row], [limit])
        return found

    def _catch_up(self, row: Row) -> None:
        self._row.tokens.extend(row.tokens.view()[len(self._row.tokens) :].tolist())
