"""A forward of the packed runtime as one call of our own kernels (`native.c`): weights, shapes and memory for them.

Embedding, layers and head run without Python or torch between them, in one team of threads. A long prompt goes through
in parts of `MOST_TOKENS`, which bounds the memory; the bits of a token are the same in any part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .kv_cache import KeyValueCache
from .native import CMatrix, Kernels, Packer, int4_numbers, kernels, packed_numbers
from .packed_attention import Span
from .packed_layers import Decoder, Watch, Weights, head_dim_of
from .packed_linear import Matrix

MOST_TOKENS = 512  # of one call
WIDEST_HEAD = 256

Part = tuple[int, int, list[tuple[int, int, int]]]


class CLayer(ctypes.Structure):
    _fields_ = [("norm", ctypes.c_void_p), ("qkv", CMatrix), ("heads_norm", ctypes.c_void_p), ("out", CMatrix),
                ("mlp_norm", ctypes.c_void_p), ("gate_up", CMatrix), ("down", CMatrix)]  # fmt: skip


class CModel(ctypes.Structure):
    _fields_ = [("layers", ctypes.POINTER(CLayer)), ("embedding", ctypes.c_void_p), ("final_norm", ctypes.c_void_p),
                ("head", CMatrix), *((name, ctypes.c_int32) for name in (
                    "layer_count", "width", "inner", "heads", "kv_heads", "head_dim")),
                ("eps", ctypes.c_float)]  # fmt: skip


class CCall(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in (
                    "ids", "positions", "rotation", "spans", "cache", "wanted", "logits", "states", "watched",
                    "queries", "scratch")),
                *((name, ctypes.c_int32) for name in (
                    "tokens", "span_count", "rows", "slots", "wanted_count", "watched_count", "watched_all",
                    "watched_at", "threads"))]  # fmt: skip


class CChoice(ctypes.Structure):
    _fields_ = [("queries", ctypes.c_void_p), ("chosen", ctypes.c_void_p),
                *((name, ctypes.c_int32) for name in ("budget", "window", "pooled"))]  # fmt: skip


def packer_for(
    config: Any, dtype: torch.dtype, head_rows: int, quant: str | None = None, group_size: int = 32
) -> Packer | None:
    """Packs the weights of a model for these kernels, or None where they are not to be had, or not for its shapes.

    Args:
        config: of a model that the packed runtime supports.
        head_rows: tokens that get a logit.
        quant, group_size: the form of its layers.
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
    if inner % 32 or width % 2 or head_dim > WIDEST_HEAD or quant not in (None, "int4"):
        return None
    found = kernels(dtype)
    if found is None:
        return None
    shapes = [((heads + 2 * kv_heads) * head_dim, width), (width, heads * head_dim), (2 * inner, width), (width, inner)]
    layer = sum(int4_numbers(*shape, group_size) if quant else packed_numbers(*shape) for shape in shapes)
    return Packer(found, config.num_hidden_layers * layer + packed_numbers(head_rows, width))


class NativePass:
    """Runs a decoder whose matrices were packed for the kernels.

    Not for several threads at once: calls share their scratch memory.

    Args:
        head_rows: tokens that get a logit.
        tied: the head is the embedding; where it has all its rows, the decoder's own copy is given back.

    Attributes:
        kernels: what runs.
        inner: width of the gates.
    """

    def __init__(self, found: Kernels, decoder: Decoder, head_rows: int, tied: bool = False) -> None:
        self.kernels, self._decoder, self._head_rows = found, decoder, head_rows
        self._held: list[Any] = []  # what the structures point to
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._known, self._width = decoder.embedding.shape
        tied = tied and head_rows == self._known
        self.inner = found.c_matrix(decoder.layers[0].down, self._width).units * found.per_unit
        described = [self._layer(weights) for weights in decoder.layers]
        self._layers = (CLayer * len(described))(*described)
        self._model = CModel(
            self._layers,
            None if tied else decoder.embedding.data_ptr(),
            self._norm(decoder.final_norm),
            found.c_matrix(decoder.head, head_rows),
            len(described),
            self._width,
            self.inner,
            decoder.heads,
            decoder.kv_heads,
            decoder.head_dim,
            decoder.shape.eps,
        )
        self._call = CCall()
        if tied:
            decoder.embedding = decoder.embedding.new_empty(0, self._width)

    def logits(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        cache: KeyValueCache,
        spans: Sequence[Span],
        wanted: Sequence[int],
        watch: Watch | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass of tokens; their keys and values are cached.

        Args:
            ids: (tokens) int64, those of one span after the other's.
            positions: (tokens) int64, what they are rotated by; `decoder.rotation` must reach them.
            cache: has room for the spans.
            spans: rows and slots; the tokens of a row see all slots before them.
            wanted: the tokens whose logits are asked for, in ascending order.
            watch: queries to note.
            states: room for what the head multiplies for these logits, from `room_for_states`.

        Returns:
            (len(wanted), rows of the head) float32, rounded to the dtype of the model.

        Raises:
            IndexError: an id that the embedding does not have.
        """
        logits = torch.empty(len(wanted), self._head_rows)
        self._run(ids, positions, cache, spans, wanted, logits, states, watch)
        return logits

    def room_for_states(self, tokens: int) -> torch.Tensor:
        return torch.empty(tokens, self._width, dtype=self.kernels.dtype)

    def states(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        cache: KeyValueCache,
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """As `logits`, but what the head multiplies after every token: (tokens, width)."""
        states = self.room_for_states(len(ids))
        self._run(ids, positions, cache, spans, range(len(ids)), None, states, None)
        return states

    def attention(
        self, heads: torch.Tensor, positions: np.ndarray, cache: KeyValueCache, spans: Sequence[Span]
    ) -> torch.Tensor:
        """Rotation, cache and attention of the first layer alone, for checks and measurements, of one part.

        Args:
            heads: (tokens, heads + 2 kv_heads, head_dim): queries, keys, values, not rotated.

        Returns:
            (tokens, heads x head_dim).
        """
        ((_, _, placed),) = parts_of(spans)
        to = torch.empty(len(heads), self._decoder.heads * self._decoder.head_dim, dtype=heads.dtype)
        call, heads = self._call, heads.contiguous()
        described = np.array(placed, np.int32)
        call.spans, call.span_count, call.tokens = described.ctypes.data, len(placed), len(heads)
        call.positions = positions.ctypes.data
        self._prepare(cache)
        self.kernels.library.attention(ctypes.byref(self._model), ctypes.byref(call), heads.data_ptr(), to.data_ptr())
        return to

    def choose(
        self, queries: torch.Tensor, cache: KeyValueCache, row: int, known: int, budget: int, window: int, pooled: int
    ) -> torch.Tensor:
        """The positions of a row that `sparse_select.snapkv` keeps: (layers, kv_heads, budget), ascending.

        Args:
            queries: (layers, n, heads, head_dim), rotated and scaled, of the last n of the row's `known` tokens.
            budget: less than `known`, more than `window`, the last tokens, which stay.
            pooled: neighbouring positions that are chosen by their sum, an odd number.

        Raises:
            MemoryError: there is not enough for the weights of all these queries.
        """
        layers, count = queries.shape[:2]
        queries = queries.contiguous()
        chosen = torch.empty(layers, self._decoder.kv_heads, budget, dtype=torch.int64)
        span, call = np.array([row, known - count, count], np.int32), self._call
        call.spans, call.span_count, call.tokens = span.ctypes.data, 1, count
        self._prepare(cache)
        choice = CChoice(queries.data_ptr(), chosen.data_ptr(), budget, window, pooled)
        if self.kernels.library.choose(ctypes.byref(self._model), ctypes.byref(call), ctypes.byref(choice)):
            raise MemoryError(f"no memory to choose among {known} positions")
        return chosen

    def _run(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        cache: KeyValueCache,
        spans: Sequence[Span],
        wanted: Sequence[int],
        logits: torch.Tensor | None,
        states: torch.Tensor | None,
        watch: Watch | None,
    ) -> None:
        if int(ids.min()) < 0 or int(ids.max()) >= self._known:
            raise IndexError(f"a token id is not in the embedding, which has {self._known} rows")
        ids, positions = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(positions, np.int64)
        call, size = self._call, self.kernels.dtype.itemsize
        wanted_at = np.asarray(wanted, np.int32)
        watched = np.zeros(0, np.int64) if watch is None else watch.tokens.numpy()
        for begin, end, placed in parts_of(spans):
            described = np.array(placed, np.int32)
            low, high = np.searchsorted(wanted_at, (begin, end)).tolist()
            first, last = np.searchsorted(watched, (begin, end)).tolist()
            its_wanted, its_watched = wanted_at[low:high] - np.int32(begin), watched[first:last] - begin
            call.ids, call.positions = ids.ctypes.data + 8 * begin, positions.ctypes.data + 8 * begin
            call.spans, call.span_count, call.tokens = described.ctypes.data, len(placed), end - begin
            call.wanted, call.wanted_count = its_wanted.ctypes.data, high - low
            call.logits = None if logits is None else logits.data_ptr() + 4 * low * self._head_rows
            call.states = None if states is None else states.data_ptr() + size * low * self._width
            call.watched, call.watched_count, call.watched_at = its_watched.ctypes.data, last - first, first
            call.watched_all = len(watched)
            call.queries = None if watch is None else watch.queries.data_ptr()
            self._prepare(cache)
            self.kernels.library.forward(ctypes.byref(self._model), ctypes.byref(call))

    def _prepare(self, cache: KeyValueCache) -> None:
        """What is the same for all parts of a forward, and the scratch memory that this part needs."""
        call = self._call
        call.rotation = self._decoder.rotation.table.data_ptr()
        call.cache, call.rows, call.slots = cache.blocks.data_ptr(), cache.rows, cache.slots
        call.threads = torch.get_num_threads()
        needed = self.kernels.library.scratch_bytes(ctypes.byref(self._model), ctypes.byref(call))
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        call.scratch = self._scratch.data_ptr()

    def _layer(self, weights: Weights) -> CLayer:
        decoder, width = self._decoder, self._width
        heads_norm = None
        if weights.heads_norm is not None:
            heads_norm = self._hold(weights.heads_norm.float().contiguous())
        return CLayer(
            self._norm(weights.norm),
            self._matrix(weights.qkv, (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim),
            heads_norm,
            self._matrix(weights.out, width),
            self._norm(weights.mlp_norm),
            self._matrix(weights.gate_up, 2 * self.inner),
            self._matrix(weights.down, width),
        )

    def _matrix(self, matrix: Matrix, rows: int) -> CMatrix:
        return self.kernels.c_matrix(matrix, rows)

    def _norm(self, weight: torch.Tensor) -> int:
        return self._hold(weight[: self._width].float().contiguous())

    def _hold(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


def parts_of(spans: Sequence[Span]) -> Iterator[Part]:
    """Cuts a forward into calls: (first token, end, its (row, slot, tokens)), each of `MOST_TOKENS` but the last."""
    placed: list[tuple[int, int, int]] = []
    begin = end = 0
    for span in spans:
        done = 0
        while done < span.count:
            count = min(span.count - done, begin + MOST_TOKENS - end)
            placed.append((span.row, span.start + done, count))
            done += count
            end += count
            if end - begin == MOST_TOKENS:
                yield begin, end, placed
                placed, begin = [], end
    if placed:
        yield begin, end, placed
