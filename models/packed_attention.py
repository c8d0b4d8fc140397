"""Attention of the packed runtime on CPU: two matrix products over dense blocks of the cache, and rotary positions.

The query heads of a group are extra rows of one product with their key head, so every key and value is read once.
Scores stay in the dtype of the model (softmax computes in float32 inside); only the slots after the cached prefix
need a mask. In bfloat16 none of this depends on how many queries, rows or masked slots are computed together
(`tests/test_packed.py` compares bits), which scaled_dot_product_attention does not promise.

A forward has a `Plan` for every few rows, made once and used by all layers. The functions that a layer calls are
compiled by TorchScript as part of the layer loop (`packed_layers`), hence their plain style.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .kv_cache import KeyValueCache

CHUNK_QUERIES = 256  # of a prompt that attend at once; bounds the memory of the scores
BATCHED_SCORES = 1 << 20  # scores of rows that are computed together; more would not stay in the caches
PIECED_SLOTS = 1024


class Rotation:
    """Rotary factors of queries, keys and values by position, for heads that store (even, odd) pairs side by side.

    One complex factor rotates a pair. Queries carry the softmax scale as well, and values a factor of one, so that a
    single product serves all heads of a token.

    Args:
        frequencies: (head_dim / 2) from transformers' own rope initialisation, with `scaling`, its factor for cos
            and sin.

    Attributes:
        table: the factors of queries, keys and values by position, (positions, 3, head_dim / 2) complex.
    """

    def __init__(
        self, frequencies: torch.Tensor, scaling: float, heads: int, kv_heads: int, softmax_scale: float, device: str
    ) -> None:
        self._frequencies, self._scaling, self._softmax_scale = frequencies.float().cpu(), scaling, softmax_scale
        kinds = [0] * heads + [1] * kv_heads + [2] * kv_heads
        self._kind_of_head = torch.tensor(kinds, device=device)
        self.table = torch.empty(0, 3, len(frequencies), dtype=torch.complex64, device=device)

    def reach(self, end: int) -> None:
        """Computes the factors of all positions below `end`."""
        known = len(self.table)
        if end > known:
            # In whole blocks of 1024: the last element of a vector loop may round differently from the others.
            angles = torch.arange(known, -(-end // 1024) * 1024)[:, None].float() * self._frequencies
            key = torch.polar(torch.full_like(angles, self._scaling), angles)
            table = torch.stack([key * self._softmax_scale, key, torch.ones_like(key)], dim=1)
            self.table = torch.cat([self.table, table.to(self.table.device)])

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Factors of tokens at positions that `reach` has seen: (tokens, heads + 2 kv_heads, head_dim / 2)."""
        return self.table.index_select(0, positions).index_select(1, self._kind_of_head)


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one row: `count` tokens that start at position `start` of cache row `row`."""

    row: int
    start: int
    count: int


class Plan(NamedTuple):
    """Where the keys and values of some adjacent rows go, and which of them each query sees. A forward has a few.

    Attributes:
        tokens: new tokens of its rows, one row's after the other's.
        rows: how many; for a single row `slots`, `padded` and `kept` are None.
        count: new tokens per row; where rows differ, the largest number, to which all are padded.
        start: the first slot that may be hidden from a query.
        keys: by layer, transposed for the product, (rows x kv_heads, head_dim, slots).
        values: by layer, (rows x kv_heads, slots, head_dim).
        targets: by layer, where new keys and values are written: (count, 2, kv_heads, head_dim) of a single row; of
            several, all slots of the layer, (slots in all, head_dim), at `slots`.
        mask: added to the scores from `start` on, (rows, 1, count, hidden); empty where a single token needs none.
        slots: the slot of every new key and value, (tokens, 2 kv_heads).
        pieces: into how many the slots are cut, so that heads and threads come out even; 1 where bits matter.
        padded, kept: of ragged rows, the token that each padded query copies, and the queries that are real.
    """

    tokens: int
    rows: int
    count: int
    start: int
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    targets: list[torch.Tensor]
    mask: torch.Tensor
    pieces: int
    slots: torch.Tensor | None
    padded: torch.Tensor | None
    kept: torch.Tensor | None


def make_plans(cache: KeyValueCache, spans: Sequence[Span], heads: int) -> list[Plan]:
    """Adjacent rows together while their scores stay in the processor's caches; long prompts by themselves."""
    plans: list[Plan] = []
    group: list[Span] = []
    for span in spans:
        wider = [*group, span]
        count = max(s.count for s in wider)
        fits = (
            span.count <= CHUNK_QUERIES
            and len(wider) * count <= 2 * sum(s.count for s in wider)
            and len(wider) * heads * count * cache.slots <= BATCHED_SCORES
        )
        if group and not (fits and span.row == group[-1].row + 1):
            plans.append(_plan(cache, group))
            wider = [span]
        group = wider
    plans.append(_plan(cache, group))
    return plans


def _plan(cache: KeyValueCache, spans: list[Span]) -> Plan:
    return _plan_row(cache, spans[0]) if len(spans) == 1 else _plan_together(cache, spans)


def _plan_row(cache: KeyValueCache, span: Span) -> Plan:
    blocks = cache.blocks[:, :, span.row]  # (layers, 2, kv_heads, slots, head_dim)
    uneven = cache.heads % torch.get_num_threads() != 0
    wanted = 1 < span.count <= CHUNK_QUERIES
    tail = (span.count, cache.slots - span.start) if wanted else (0, 0)
    return Plan(
        tokens=span.count,
        rows=1,
        count=span.count,
        start=span.start,
        keys=list(blocks[:, 0].transpose(2, 3).unbind(0)),
        values=list(blocks[:, 1].unbind(0)),
        targets=list(blocks.narrow(3, span.start, span.count).permute(0, 3, 1, 2, 4).unbind(0)),
        mask=torch.full(tail, -torch.inf, dtype=cache.dtype).triu_(1),  # query i sees i + 1 slots of the tail
        pieces=2 if uneven and cache.dtype is torch.float32 and cache.slots >= PIECED_SLOTS else 1,
        slots=None,
        padded=None,
        kept=None,
    )


def _plan_together(cache: KeyValueCache, spans: list[Span]) -> Plan:
    rows, first, count = len(spans), spans[0].row, max(span.count for span in spans)
    blocks = cache.blocks[:, :, first : first + rows]
    shape = (cache.layers, rows * cache.heads, cache.slots, cache.head_dim)
    places = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
    row_of = torch.tensor([span.row for span in spans]).repeat_interleave(torch.tensor([span.count for span in spans]))
    side_and_row = torch.arange(2)[:, None] * cache.rows + row_of[:, None, None]
    block = side_and_row * cache.heads + torch.arange(cache.heads)  # (tokens, 2, kv_heads)
    slots = (block * cache.slots + places[:, None, None]).view(len(places), -1)

    starts = torch.tensor([span.start for span in spans])
    start = int(starts.min())
    seen = torch.arange(start, cache.slots) <= (starts[:, None] + torch.arange(count))[:, :, None]
    mask = torch.zeros(seen.shape, dtype=cache.dtype).masked_fill_(~seen, -torch.inf)[:, None]
    padded = kept = None
    if any(span.count != count for span in spans):
        each = torch.tensor([span.count for span in spans])[:, None]
        ends = each.cumsum(0) - each
        offsets = torch.arange(count)
        padded = (ends + torch.minimum(offsets, each - 1)).flatten()
        kept = (offsets < each).flatten().nonzero().flatten()
    return Plan(
        tokens=len(places),
        rows=rows,
        count=count,
        start=start,
        keys=list(blocks[:, 0].view(shape).transpose(2, 3).unbind(0)),
        values=list(blocks[:, 1].view(shape).unbind(0)),
        targets=list(cache.blocks.view(cache.layers, -1, cache.head_dim).unbind(0)),
        mask=mask,
        pieces=1,
        slots=slots,
        padded=padded,
        kept=kept,
    )


def attend(heads: torch.Tensor, layer: int, plans: list[Plan], query_heads: int, kv_heads: int) -> torch.Tensor:
    """Writes the new keys and values of a layer, and attends.

    Args:
        heads: (tokens, query_heads + 2 kv_heads, head_dim): rotated and scaled queries, rotated keys, values; the
            tokens of the rows one after another.

    Returns:
        (tokens, query_heads x head_dim).
    """
    if len(plans) == 1:
        return _attend(heads, layer, plans[0], query_heads, kv_heads)
    parts: list[torch.Tensor] = []
    at = 0
    for plan in plans:
        parts.append(_attend(heads.narrow(0, at, plan.tokens), layer, plan, query_heads, kv_heads))
        at += plan.tokens
    return torch.cat(parts)


def _attend(heads: torch.Tensor, layer: int, plan: Plan, query_heads: int, kv_heads: int) -> torch.Tensor:
    if plan.rows > 1:
        return _attend_together(heads, layer, plan, query_heads, kv_heads)
    count, head_dim = heads.shape[0], heads.shape[2]
    group, start = query_heads // kv_heads, plan.start
    plan.targets[layer].copy_(heads.narrow(1, query_heads, 2 * kv_heads).view(count, 2, kv_heads, head_dim))
    queries = heads.narrow(1, 0, query_heads)
    keys, values = plan.keys[layer], plan.values[layer]
    if count > 256:
        return _attend_prompt(queries, keys, values, start, kv_heads)
    if count == 1:
        scores = _scores(queries.view(kv_heads, group, head_dim), keys, plan.pieces)
        hidden = scores.shape[2] - start - 1
        if hidden > 0:
            scores.narrow(2, start + 1, hidden).fill_(-float("inf"))
        return _mix(torch.softmax(scores, -1), values, plan.pieces).view(1, query_heads * head_dim)
    mask = plan.mask
    scores = _scores(queries.transpose(0, 1).reshape(kv_heads, group * count, head_dim), keys, plan.pieces)
    scores.view(query_heads, count, -1).narrow(2, start, mask.shape[1]).add_(mask)
    mixed = _mix(torch.softmax(scores, -1), values, plan.pieces)
    return mixed.view(query_heads, count, head_dim).transpose(0, 1).reshape(count, -1)


def _scores(queries: torch.Tensor, keys: torch.Tensor, pieces: int) -> torch.Tensor:
    """(kv_heads, queries, head_dim) times (kv_heads, head_dim, slots), as pieces x kv_heads products."""
    if pieces == 1:
        return torch.bmm(queries, keys)
    kv_heads, rows, head_dim, slots = queries.shape[0], queries.shape[1], queries.shape[2], keys.shape[2]
    several = queries.unsqueeze(1).expand(kv_heads, pieces, rows, head_dim).reshape(-1, rows, head_dim)
    cut = keys.transpose(1, 2).view(kv_heads * pieces, slots // pieces, head_dim).transpose(1, 2)
    return torch.bmm(several, cut).view(kv_heads, pieces, rows, -1).transpose(1, 2).reshape(kv_heads, rows, slots)


def _mix(weights: torch.Tensor, values: torch.Tensor, pieces: int) -> torch.Tensor:
    """(kv_heads, queries, slots) times (kv_heads, slots, head_dim), as the sum of pieces."""
    if pieces == 1:
        return torch.bmm(weights, values)
    kv_heads, rows, slots, head_dim = weights.shape[0], weights.shape[1], weights.shape[2], values.shape[2]
    cut = weights.view(kv_heads, rows, pieces, -1).transpose(1, 2).reshape(kv_heads * pieces, rows, slots // pieces)
    mixed = torch.bmm(cut, values.view(kv_heads * pieces, slots // pieces, head_dim))
    return mixed.view(kv_heads, pieces, rows, head_dim).sum(1)


def _attend_prompt(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, kv_heads: int
) -> torch.Tensor:
    """A long run of queries, 256 at a time, each over no more of the cache than it may see."""
    tokens, query_heads, head_dim = queries.shape[0], queries.shape[1], queries.shape[2]
    group, slots_in_all = query_heads // kv_heads, values.shape[1]
    mixed = torch.empty([tokens, query_heads, head_dim], dtype=queries.dtype)
    for begin in range(0, tokens, 256):
        count = min(256, tokens - begin)
        known = start + begin
        slots = min(-(-(known + count) // 64) * 64, slots_in_all)
        mask = torch.full([count, slots - known], -float("inf"), dtype=queries.dtype).triu_(1)
        for head in range(kv_heads):
            rows = queries.narrow(0, begin, count).narrow(1, head * group, group).transpose(0, 1)
            scores = torch.mm(rows.reshape(group * count, head_dim), keys[head].narrow(1, 0, slots))
            scores.view(group, count, slots).narrow(2, known, slots - known).add_(mask)
            done = torch.mm(torch.softmax(scores, -1), values[head].narrow(0, 0, slots)).view(group, count, head_dim)
            mixed.narrow(0, begin, count).narrow(1, head * group, group).copy_(done.transpose(0, 1))
    return mixed.view(tokens, -1)


def _attend_together(heads: torch.Tensor, layer: int, plan: Plan, query_heads: int, kv_heads: int) -> torch.Tensor:
    head_dim, count, start, mask = heads.shape[2], plan.count, plan.start, plan.mask
    rows, group = plan.rows, query_heads // kv_heads
    slots, padded, kept = plan.slots, plan.padded, plan.kept
    assert slots is not None
    plan.targets[layer].index_put_([slots], heads.narrow(1, query_heads, 2 * kv_heads))
    if padded is not None:
        heads = heads.index_select(0, padded)
    queries = heads.narrow(1, 0, query_heads)
    if count > 1:
        queries = queries.view(rows, count, query_heads, head_dim).transpose(1, 2)
    queries = queries.reshape(rows * kv_heads, group * count, head_dim)
    scores = torch.bmm(queries, plan.keys[layer])
    scores.view(rows, query_heads, count, -1).narrow(3, start, mask.shape[3]).add_(mask)
    mixed = torch.bmm(torch.softmax(scores, -1), plan.values[layer]).view(rows, query_heads, count, head_dim)
    if count > 1:
        mixed = mixed.transpose(1, 2)
    mixed = mixed.reshape(rows * count, -1)
    return mixed if kept is None else mixed.index_select(0, kept)
