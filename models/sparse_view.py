"""A second, small cache of a packed model on CPU: the model as it sees a text of which it has kept the best parts.

Self-speculation with a sparse KV cache (MagicDec, Chen et al. 2024, arXiv 2408.11049) drafts with the target's own
weights over such a cache. Keys and values of the chosen positions are copied out, so that attention runs over them
alone, dense; keys keep the rotation of the positions they came from. Tokens that come later are appended, without a
limit, at their true positions.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from .base import CachedModel, Ids, common_prefix
from .kv_cache import KeyValueCache
from .packed import PackedModel
from .packed_attention import Span
from .packed_cpu import CpuPackedModel
from .sparse_select import POOLED, Selection, sinks_and_window, snapkv

SPARE = 192  # slots for what comes after a selection, so that the cache is not laid out anew as soon as it has grown


class SparseView(CpuPackedModel):
    """A `CachedModel` over another one's weights, whose rows hold a part of what `dense` has cached.

    A row's chosen positions fill its first slots; every position behind the last one that there was to choose from has
    a slot of its own after them. So positions and slots of what comes later differ by one number per row. A context
    that parts from the row before that point is read from its beginning, with nothing left out.

    Attributes:
        model: whose weights these are. One that follows its target has read nothing itself: its view takes everything
            out of the target's cache, so a small cache and rounded weights come together.
        dense: out of whose cache positions are chosen; its row r is row r here. It is the `original` that this one
            follows: drafts go on from what full attention made of the tokens that were accepted.
        selection: the rule by which positions are chosen.
        last_select_ns, last_follow_ns: how long the latest `select` and `follow` took.
    """

    def __init__(self, model: CpuPackedModel, selection: Selection) -> None:
        PackedModel.__init__(
            self, model.config, name=model.name, device=model.device, dtype=model.dtype, vocab_size=model.vocab_size
        )
        self.dense = model if model.original is None else cast("CpuPackedModel", model.original)
        self.selection, self.original = selection, self.dense
        self.last_select_ns = self.last_follow_ns = 0
        self.model, self._now = model, model._now
        self._decoder, self._queries, self.kernels = model._decoder, None, model.kernels
        own = model._cache
        self._cache = KeyValueCache(own.layers, own.heads, own.head_dim, own.dtype)
        self._bases = [0]  # per row, the positions that there were to choose from; 0 where all of them are here
        self._shifts = [0]  # per row, by how much a later position is more than its slot
        self._value_roll = 0 if self.dense is model else model._value_roll
        self._exact = [0]  # an exact position may be left out

    # What a strategy asks for

    def watch(self, on: bool) -> None:
        """Whether the dense model keeps the queries that `select` needs; it costs a forward a hundredth or less.

        On before the forwards that read what is to be chosen from.
        """
        self.dense.watch_queries(self.selection.window if on and self.selection.kind == "snapkv" else 0)

    @torch.inference_mode()
    def select(self, row: int, context: Ids, budget: int) -> None:
        """Chooses anew what the row holds, out of what the dense model has cached of a context.

        Args:
            budget: positions to keep; where there are no more than that all are kept.

        Raises:
            ValueError: the budget leaves nothing to choose.
        """
        if budget <= self.selection.fixed:
            raise ValueError(f"a budget of {budget} positions, of which {self.selection.fixed} are fixed")
        began = self._now()
        array = np.asarray(context, np.int64)
        known = self._known_to_original(row, array)
        self._make_room(row + 1, len(array))
        self.forget(row)
        if known > budget:
            picked = self.dense._cache.pick(row, self._choose(row, known, budget))
            used = self._used()
            spare = SPARE if self.kernels == "native" else 0  # torch's operators attend over all slots
            self._cache.fit(len(used), max(budget + spare, *used), used)
            self._cache.put(picked, row, 0, self._value_roll)
            self._bases[row], self._shifts[row] = known, known - budget
            self._mark(row, array, 0, known)
        else:
            self._take(row, array, 0, known)
        self.last_select_ns = self._now() - began

    @torch.inference_mode()
    def follow(self, row: int, context: Ids) -> None:
        """As every model does that has an `original`.

        Raises:
            ValueError: the context parts from the row among the positions of which some were left out.
        """
        began = self._now()
        array = np.asarray(context, np.int64)
        if row < len(self._bases) and self._bases[row]:
            shared = common_prefix(self._ids[row, : self._lengths[row]], array)
            if shared < self._bases[row]:
                raise ValueError(f"row {row} holds a selection of {self._bases[row]} tokens, {shared} of which agree")
        super().follow(row, array)
        self.last_follow_ns = self._now() - began

    # What differs from a model that keeps everything

    def reset(self) -> None:
        super().reset()
        self._bases, self._shifts = ([0] * len(self._lengths) for _ in range(2))

    def forget(self, row: int) -> None:
        super().forget(row)
        if row < len(self._lengths):
            self._bases[row] = self._shifts[row] = 0

    def copy_row(self, source: int, to: int) -> None:
        return CachedModel.copy_row(self, source, to)

    def close(self) -> None:
        """Gives the small cache back; the weights belong to the model that this is a view of."""
        self._cache.release()

    def _make_room(self, rows: int, tokens: int) -> None:
        super()._make_room(rows, tokens)
        for numbers in (self._bases, self._shifts):
            numbers += [0] * (len(self._lengths) - len(numbers))

    def _cut(self, row: int, start: int) -> int:
        if start < self._bases[row]:
            self.forget(row)
            return 0
        return super()._cut(row, start)

    def _in_slots(self, spans: list[Span]) -> tuple[list[Span], list[int]]:
        return [Span(span.row, span.start - self._shifts[span.row], span.count) for span in spans], self._used()

    def _choose_filled_rows(self) -> None:
        self.model._choose_filled_rows()

    # The parts

    def _used(self) -> list[int]:
        return [length - shift for length, shift in zip(self._lengths, self._shifts, strict=True)]

    def _choose(self, row: int, known: int, budget: int) -> torch.Tensor:
        """(layers, kv_heads, budget) positions out of the first `known`.

        Where the queries of the row's end were not kept, the most recent positions stand in for the best.
        """
        rule, cache = self.selection, self.dense._cache
        queries = None
        if rule.kind == "snapkv" and self.dense._queries is not None:
            queries = self.dense._queries.of(row, known)
        if queries is None:
            everywhere = sinks_and_window(known, budget, min(rule.sinks, budget))
            return everywhere.expand(cache.layers, cache.heads, budget)
        native = self.dense._decoder.native
        if native is not None:
            return native.choose(queries, cache, row, known, budget, rule.window, POOLED)
        keys = cache.blocks[:, 0, row, :, :known]
        return torch.stack([snapkv(queries[layer], keys[layer], budget, rule.window) for layer in range(cache.layers)])
