"""Which part of a KV cache a sparse one takes over: the rules, as functions of queries and keys.

`snapkv` (Li et al. 2024, arXiv 2404.14469, as MagicDec uses it, arXiv 2408.11049): the queries of the last tokens say
what they attend to; each key head keeps the positions that got most, and those last tokens. Beyond MagicDec's code the
scores are scaled by 1/sqrt(head_dim) before their softmax, as attention itself is, and any number of query heads may
share a key head. `stream` (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453): the first few tokens and the latest ones,
here at the positions that they had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import UsageError, unknown

KINDS = ("snapkv", "stream")
POOLED = 5  # neighbouring positions whose scores are averaged, so that what is kept comes in pieces of text


@dataclass(frozen=True)
class Selection:
    """A rule and its numbers.

    Attributes:
        kind: `snapkv` or `stream`.
        window: snapkv: the last tokens, whose queries choose and which stay.
        sinks: stream: the first tokens, which stay.

    Raises:
        UsageError: one of them makes no sense.
    """

    kind: str = "snapkv"
    window: int = 32
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(unknown("selection", self.kind, KINDS))
        if self.window < 1 or self.sinks < 0:
            raise UsageError(f"a window of {self.window} and {self.sinks} sinks: at least 1 and 0 tokens")

    @property
    def fixed(self) -> int:
        """Positions that stay whatever their scores; a budget has to be larger."""
        return self.window if self.kind == "snapkv" else self.sinks


def attention_received(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """How much attention each position gets from the last tokens, summed over them and over a key head's query heads.

    Args:
        queries: (m, heads, head_dim), rotated and scaled, of the last m of n tokens.
        keys: (kv_heads, n, head_dim), rotated.

    Returns:
        (kv_heads, n) float32. Each query's own share is 1, over the positions up to its own.
    """
    count, heads, head_dim = queries.shape
    kv_heads, length, _ = keys.shape
    grouped = queries.float().view(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, -1, head_dim), keys.float().transpose(1, 2))
    later = torch.full((count, count), -torch.inf).triu_(1)  # a token does not see those behind it
    scores.view(kv_heads, -1, count, length)[..., length - count :] += later
    return scores.softmax(-1).sum(1)


def snapkv(queries: torch.Tensor, keys: torch.Tensor, budget: int, window: int) -> torch.Tensor:
    """The positions that each key head keeps, ascending: (kv_heads, budget).

    Args:
        queries, keys: as for `attention_received`; n is larger than the budget, m at most the window.
        budget: positions to keep, more than `window`, the last ones that stay anyway.
    """
    length = keys.shape[1]
    earlier = attention_received(queries, keys)[:, : length - window]
    pooled = F.avg_pool1d(earlier, POOLED, stride=1, padding=POOLED // 2)
    chosen = pooled.topk(budget - window, dim=-1).indices.sort(-1).values
    recent = torch.arange(length - window, length).expand(len(keys), window)
    return torch.cat([chosen, recent], 1)


def sinks_and_window(length: int, budget: int, sinks: int) -> torch.Tensor:
    """The first `sinks` and the last `budget - sinks` of `length` positions, ascending: (budget,)."""
    return torch.cat([torch.arange(sinks), torch.arange(length - budget + sinks, length)])
