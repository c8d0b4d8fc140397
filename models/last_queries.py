"""The queries of the latest tokens of each row, as the forwards themselves computed them.

What a text attends to is known to whoever has its queries and the keys in the cache. A prefill makes the queries of a
prompt's last tokens and a verification those of the tokens it accepts, so nothing has to be computed twice to learn
which part of a cache matters (`sparse_select`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .packed_attention import Span
from .packed_layers import Watch

SPARE = 64  # tokens kept beyond those wanted, since the last ones may turn out to be drafts that are rejected


class LastQueries:
    """Rotated and scaled queries of the last `window` tokens of every row, kept while forwards run.

    A forward asks `watch` what to note and hands it to `keep` when it is done. Tokens that a later forward replaces
    (drafts that were rejected) are dropped by it.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        # Per row, pieces (first position, queries of adjacent tokens), each beginning where the one before it ends.
        self._pieces: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def watch(self, spans: Sequence[Span], decoder: Any) -> Watch:
        """What a forward over these spans has to note."""
        tokens, end = [], 0
        for span in spans:
            end += span.count
            tokens += range(end - self._noted(span), end)
        shape = (len(decoder.layers), len(tokens), decoder.heads, decoder.head_dim)
        return Watch(torch.tensor(tokens), torch.empty(shape, dtype=decoder.dtype))

    def keep(self, spans: Sequence[Span], watch: Watch) -> None:
        """Takes over what a forward over these spans has noted."""
        at = 0
        for span in spans:
            count = self._noted(span)
            pieces = self._before(span.row, span.start) if count == span.count else []
            pieces.append((span.start + span.count - count, watch.queries.narrow(1, at, count)))
            at += count
            while sum(piece.shape[1] for _, piece in pieces[1:]) >= self.window + SPARE:
                pieces.pop(0)
            self._pieces[span.row] = pieces

    def of(self, row: int, end: int) -> torch.Tensor | None:
        """(layers, n, heads, head_dim): the queries of the last n tokens before position `end`, n at most `window`.

        None where those are not known.
        """
        pieces = self._before(row, end)
        return torch.cat([piece for _, piece in pieces], 1)[:, -self.window :] if pieces else None

    def forget(self, row: int) -> None:
        self._pieces.pop(row, None)

    def _noted(self, span: Span) -> int:
        return min(span.count, self.window + SPARE)

    def _before(self, row: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """The pieces of a row up to position `end`; nothing, unless they reach it."""
        pieces = [
            (first, piece.narrow(1, 0, min(piece.shape[1], end - first)))
            for first, piece in self._pieces.get(row, ())
            if first < end
        ]
        return pieces if pieces and pieces[-1][0] + pieces[-1][1].shape[1] == end else []
