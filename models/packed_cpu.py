"""The packed runtime on CPU.

A forward is one call of our own kernels (`packed_native`, compiled once where it runs). Where they cannot be had
every linear is one of oneDNN's packed ones (`packed_linear`) and attention is two matrix products per layer
(`packed_attention`). Either way the cache is preallocated and dense (`kv_cache`), and the logits of a token have the
same bits whether it is computed alone, inside a draft, inside a prompt, or beside other rows: with torch's operators in
bfloat16, with our kernels in every dtype. So greedy decoding with a draft is exact there, token for token.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..hardware.clock import Clock
from .base import Ids, common_prefix
from .kv_cache import KeyValueCache
from .last_queries import LastQueries
from .packed import PackedModel
from .packed_attention import Span, make_plans
from .packed_layers import Decoder, Watch
from .packed_linear import ONE_DNN, choose_filled_rows, pack
from .packed_native import NativePass, packer_for
from .quantised import pack_quantised, shift_channels

if TYPE_CHECKING:
    from .sparse_select import Selection
    from .sparse_view import SparseView


class CpuPackedModel(PackedModel):
    """The forward on CPU. All tokens of all rows stand one after another, so linears see no padding."""

    keeps_states = True

    def __init__(
        self,
        hf_model: Any,
        *,
        name: str,
        device: str,
        dtype: str,
        vocab_size: int,
        quant: str | None = None,
        group_size: int = 32,
        group_offset: int = 0,
        head_ids: Sequence[int] | None = None,
        head_quant: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            hf_model.config, name=name, device=device, dtype=quant or dtype, vocab_size=vocab_size, clock=clock
        )
        if group_offset:
            shift_channels(hf_model, group_offset)
        self._value_roll = group_offset
        number = torch.bfloat16 if quant else getattr(torch, dtype)
        head_rows = vocab_size if head_ids is None else len(head_ids)
        packer = None if head_quant else packer_for(hf_model.config, number, head_rows, quant, group_size)
        if packer:
            pack_part = partial(packer.pack_int4, group_size=group_size) if quant else packer.pack
            pack_head = packer.pack
        else:
            pack_part = partial(pack_quantised, quant=quant, group_size=group_size) if quant else pack
            pack_head = partial(pack_quantised, quant=head_quant, group_size=group_size) if head_quant else pack
        tied = head_ids is None and hf_model.lm_head.weight is hf_model.model.embed_tokens.weight
        self._decoder: Any = Decoder(hf_model, device, number, vocab_size, pack_part, pack_head, head_ids)
        if packer:
            self.kernels = "native"
            self._decoder.native = NativePass(packer.kernels, self._decoder, head_rows, tied)
        self._cache = KeyValueCache(len(self._decoder.layers), self._decoder.kv_heads, self._decoder.head_dim, number)
        self._threads_filled = 0
        self._queries: LastQueries | None = None
        self._exact = [0]  # per row, the positions whose keys and values are those of `original`
        _return_freed_memory()

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._cache.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes that the keys and values of one row take, as the cache is laid out now."""
        return self._cache.row_bytes

    @torch.inference_mode()
    def follow(self, row: int, context: Ids) -> None:
        if self.original is None:
            return
        array = np.asarray(context, np.int64)
        self._make_room(row + 1, len(array))
        start = min(self._exact[row], common_prefix(self._ids[row, : self._lengths[row]], array))
        known = self._known_to_original(row, array)
        if known > start:
            self._take(row, array, start, known)

    def reset(self) -> None:
        super().reset()
        self._exact = [0] * len(self._lengths)

    def forget(self, row: int) -> None:
        super().forget(row)
        if row < len(self._exact):
            self._exact[row] = 0

    def sparse_view(self, selection: Selection) -> SparseView:
        from .sparse_view import SparseView

        return SparseView(self, selection)

    def watch_queries(self, window: int) -> None:
        """From now on the queries of the last `window` tokens of every row are kept; 0 for none."""
        self._queries = LastQueries(window) if window else None

    @torch.inference_mode()
    def assume(self, rows: int, tokens: int) -> np.ndarray:
        """Pretends that rows have read random texts of so many tokens, to measure what a forward behind them costs.

        Their keys and values are zeros, written out: memory that was never written to is read in no time.

        Returns:
            (rows, tokens) the ids.
        """
        ids = np.random.default_rng(0).integers(0, self.vocab_size, (rows, tokens))
        self.reset()
        self._make_room(rows, tokens)
        self._ids[:rows, :tokens] = ids
        self._cache.fit(len(self._lengths), tokens, self._lengths)
        self._cache.blocks.zero_()
        self._lengths[:rows] = [tokens] * rows
        return ids

    def close(self) -> None:
        self._decoder = self.original = None
        self._cache.release()

    def _reserve_cache(self, rows: int, tokens: int) -> None:
        self._cache.reserve(rows, tokens)

    def _copy_cache(self, source: int, to: int, start: int, end: int) -> None:
        self._cache.fit(len(self._lengths), max(end, *self._lengths), self._lengths)
        self._cache.copy(source, to, start, end)
        self._exact[to] = min(start, self._exact[to])
        if self._queries is not None:
            self._queries.forget(to)

    def _make_room(self, rows: int, tokens: int) -> None:
        super()._make_room(rows, tokens)
        self._exact += [0] * (len(self._lengths) - len(self._exact))

    def _cut(self, row: int, start: int) -> int:
        self._exact[row] = min(self._exact[row], start)
        return super()._cut(row, start)

    def _known_to_original(self, row: int, context: np.ndarray) -> int:
        """How many tokens of a context the original has read."""
        original = cast("CpuPackedModel", self.original)
        if row >= len(original._lengths):
            return 0
        return common_prefix(original._ids[row, : original._lengths[row]], context)

    def _take(self, row: int, context: np.ndarray, start: int, end: int) -> None:
        """Takes over the original's positions from `start` to `end`, and drops what the row held behind them."""
        self._lengths[row] = start
        if end > start:
            (slots,), used = self._in_slots([Span(row, start, end - start)])
            self._cache.fit(len(used), max(slots.start + slots.count, *used), used)
            original = cast("CpuPackedModel", self.original)
            self._cache.take(original._cache, row, start, end, slots.start, self._value_roll)
        self._mark(row, context, start, end)

    def _mark(self, row: int, context: np.ndarray, start: int, end: int) -> None:
        self._ids[row, start:end] = context[start:end]
        self._lengths[row] = self._exact[row] = end

    def _forward(self, arrays: list[np.ndarray], spans: list[Span], lasts: list[int]) -> torch.Tensor:
        decoder, ids, positions, slots = self._decoder, *self._place(arrays, spans)
        watch = None if self._queries is None else self._queries.watch(spans, decoder)
        wanted = _last_tokens(spans, lasts)
        if decoder.native is not None:
            states = decoder.native.room_for_states(len(wanted)) if self._states_wanted else None
            logits = decoder.spread(decoder.native.logits(ids, positions, self._cache, slots, wanted, watch, states))
        else:
            hidden = self._hidden(ids, positions, slots, watch)
            if len(wanted) < len(hidden):
                hidden = hidden[-len(wanted) :] if len(spans) == 1 else hidden.index_select(0, torch.tensor(wanted))
            # widened, which changes no value: argmax over bfloat16 takes torch four times as long, conversion included
            logits = decoder.logits(hidden).float()
            states = decoder.states(hidden) if self._states_wanted else None
        if self._queries is not None and watch is not None:
            self._queries.keep(spans, watch)
        self.last_states = states
        return logits

    @torch.inference_mode()
    def states(self, ids: np.ndarray) -> torch.Tensor:
        self.reset()
        self._make_room(1, ids.shape[1])
        decoder, parts = self._decoder, []
        for row in ids:
            placed = self._place([row], [Span(0, 0, len(row))])
            if decoder.native is not None:
                parts.append(decoder.native.states(placed[0], placed[1], self._cache, placed[2]))
            else:
                parts.append(decoder.states(self._hidden(*placed, None)))
        return torch.stack(parts)

    def _place(self, arrays: list[np.ndarray], spans: list[Span]) -> tuple[np.ndarray, np.ndarray, list[Span]]:
        """Ids and positions of the new tokens, and the slots for their keys and values, which there is room for."""
        slots, used = self._in_slots(spans)
        self._cache.fit(len(used), max(*(span.start + span.count for span in slots), *used), used)
        self._decoder.rotation.reach(max(map(len, arrays)))
        if len(spans) == 1:
            start = spans[0].start
            return arrays[0][start:], np.arange(start, len(arrays[0])), slots
        ids = np.concatenate([array[span.start :] for array, span in zip(arrays, spans, strict=True)])
        positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
        return ids, positions, slots

    def _hidden(self, ids: np.ndarray, positions: np.ndarray, slots: list[Span], watch: Watch | None) -> torch.Tensor:
        """Hidden states of the new tokens, (tokens, width), by torch's operators; their keys and values are cached."""
        decoder = self._decoder
        self._choose_filled_rows()
        plans = make_plans(self._cache, slots, decoder.heads)
        rotation = decoder.rotation.at(torch.from_numpy(positions))
        return decoder.hidden(torch.from_numpy(ids), rotation, plans, watch)

    def _in_slots(self, spans: list[Span]) -> tuple[list[Span], list[int]]:
        """Where new tokens stand in the cache, and how many slots each row uses: here every position has its slot."""
        return spans, self._lengths

    def _choose_filled_rows(self) -> None:
        """Once, and again when the number of threads has changed."""
        threads = torch.get_num_threads()
        if threads != self._threads_filled:
            self._threads_filled = threads
            decoder, width = self._decoder, self._decoder.embedding.shape[1]
            largest = [weights.gate_up for weights in decoder.layers]
            if all(matrix.kind != ONE_DNN for matrix in largest):
                largest = [decoder.head]
            decoder.filled_rows = choose_filled_rows(largest, width, decoder.dtype)


def _last_tokens(spans: Sequence[Span], lasts: Sequence[int]) -> list[int]:
    """Places of the last tokens of each span among all tokens."""
    wanted, end = [], 0
    for span, count in zip(spans, lasts, strict=True):
        end += span.count
        wanted += range(end - count, end)
    return wanted


def _return_freed_memory() -> None:
    """Asks glibc to give freed memory back to the system; elsewhere there is nothing to ask."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
