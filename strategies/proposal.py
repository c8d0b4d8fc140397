"""What the drafters inside a cascade hand to each other: a draft that knows where its tokens come from, and a row that
is ahead of what is verified."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from ..models.base import TokenBuffer
from .base import Draft, Row


@dataclass(frozen=True)
class Proposal(Draft):
    """A draft and the story of its tokens.

    Attributes:
        origins: per token, the number of the level that proposed it, 0 for the largest drafter.
        signs: per token, what its drafter had to go by, as a small integer: tokens with the same sign are accepted
            about equally often. May be empty where nobody asks.
    """

    origins: Sequence[int] = ()
    signs: Sequence[int] = ()


NOTHING = Proposal(())


def joined(parts: Sequence[Proposal], limit: int | None = None) -> Proposal:
    """Proposals one after the other as one, cut to `limit` tokens.

    Where some parts carry distributions and others are certain, the certain ones become one-hot rows.
    """
    if len(parts) == 1 and (limit is None or len(parts[0].tokens) <= limit):
        return parts[0]
    tokens = [token for part in parts for token in part.tokens][:limit]
    origins = [origin for part in parts for origin in part.origins][:limit]
    signs = [sign for part in parts for sign in part.signs][:limit]
    known = [part.probs for part in parts if part.probs is not None]
    probs = None
    if known:
        probs = torch.cat([_rows(part, known[0]) for part in parts])[: len(tokens)]
    return Proposal(tokens, probs, (), origins, signs)


def _rows(part: Proposal, like: torch.Tensor) -> torch.Tensor:
    """(tokens, vocab): what each token was drawn from."""
    if part.probs is not None:
        return part.probs
    rows = like.new_zeros(len(part.tokens), like.shape[-1])
    rows[range(len(part.tokens)), list(part.tokens)] = 1.0
    return rows


class AheadBuffer:
    """The ids of a row and some draft tokens behind them, in the memory of the row's own buffer.

    Takes the place of a `TokenBuffer` for drafters; `extend` lengthens the draft and leaves the row as it is.
    """

    __slots__ = ("ahead", "verified")

    def __init__(self, tokens: TokenBuffer | AheadBuffer) -> None:
        self.verified, self.ahead = split(tokens)

    def __len__(self) -> int:
        return len(self.verified) + len(self.ahead)

    def extend(self, ids: Sequence[int]) -> None:
        self.ahead = [*self.ahead, *ids]

    def view(self, draft: Sequence[int] = ()) -> np.ndarray:
        return self.verified.view([*self.ahead, *draft])


def split(tokens: TokenBuffer | AheadBuffer) -> tuple[TokenBuffer, list[int]]:
    """What is verified, and what is only drafted behind it."""
    return (tokens.verified, tokens.ahead) if isinstance(tokens, AheadBuffer) else (tokens, [])


def ahead_of(row: Row, key: int | None = None) -> Row:
    """The same row, to which draft tokens may be added without the row itself knowing.

    Args:
        key: noise of its own, for a drafter whose draws must not be those of the level above.
    """
    ahead = copy.copy(row)
    ahead.tokens = cast(TokenBuffer, AheadBuffer(row.tokens))
    if key is not None:
        ahead.request = dataclasses.replace(row.request, key=key)
    return ahead
