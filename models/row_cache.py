"""A KV cache that keeps the token at position p of a row in slot p of that row.

transformers' own `DynamicCache` holds a batch of equally long rows, so a row that rejects more than its neighbour
leaves a hole, and every step copies the whole cache to append to it. Here a row is cut by forgetting its tail: no
hole, no copy, no compaction, and rows that a call does not name are not touched. Only layers that keep one key and
one value per token can do that; all others are refused before a model is loaded (`models.load.check_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

ROUND_TOKENS = 256


class Window:
    """Where the next forward writes and reads, shared by all layers.

    Attributes:
        rows: the cache rows of the batch, in the order of the batch.
        start: the slot of the first query, where all rows start alike.
        queries: queries per row, padding included.
        slots: (rows, queries), where each query is stored; None for start, start + 1, ... in every row.
        keys: how many slots of a row attention is given.
    """

    __slots__ = ("keys", "queries", "rows", "rows_index", "slots", "span", "start")

    def __init__(self) -> None:
        self.set((0,), 0, 0, None, 0)

    def set(self, rows: Sequence[int], start: int, queries: int, slots: torch.Tensor | None, keys: int) -> None:
        self.rows, self.start, self.queries, self.slots, self.keys = rows, start, queries, slots, keys
        first = rows[0]
        contiguous = all(row == first + i for i, row in enumerate(rows))
        self.span = slice(first, first + len(rows)) if contiguous else None
        self.rows_index: torch.Tensor | None = None
        if slots is not None or not contiguous:
            device = slots.device if slots is not None else None
            self.rows_index = torch.tensor(list(rows), dtype=torch.long, device=device)


class RowLayer(CacheLayerMixin):
    """Keys and values of one attention layer, (rows, heads, slots, head_dim); the two head sizes may differ."""

    is_croppable = True
    is_sliding = False

    def __init__(self, window: Window, reserved: list[int]) -> None:
        super().__init__()
        self.window = window
        self.reserved = reserved  # [rows, slots] asked for, shared by all layers
        self.written = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new keys and values; returns those of all slots that the queries may see."""
        if self.is_initialized:
            self.grow()
        else:
            self.lazy_initialization(key_states, value_states)
        self.written = True
        return self._exchange(self.keys, key_states), self._exchange(self.values, value_states)

    def grow(self) -> None:
        """Makes the room that was reserved meanwhile, and keeps what is there."""
        assert self.keys is not None
        assert self.values is not None
        if self.reserved[0] > self.keys.shape[0] or self.reserved[1] > self.keys.shape[2]:
            self.keys, self.values = self._room(self.keys, self.keys), self._room(self.values, self.values)

    def copy(self, source: int, to: int, start: int, end: int) -> None:
        """Copies the positions from `start` to `end` of one row into another."""
        self.grow()
        for room in (self.keys, self.values):
            room[to, :, start:end] = room[source, :, start:end]  # type: ignore[index]

    def _room(self, like: torch.Tensor, old: torch.Tensor | None = None) -> torch.Tensor:
        # zeros, not empty: a masked slot has weight 0, and 0 times a stray NaN is NaN
        rows, slots = self.reserved
        room = like.new_zeros((rows, like.shape[1], slots, like.shape[3]))
        if old is not None:
            room[: old.shape[0], :, : old.shape[2]] = old
        return room

    def _exchange(self, room: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        assert room is not None
        at = self.window
        if at.slots is not None:
            assert at.rows_index is not None
            room[at.rows_index[:, None], :, at.slots] = new.transpose(1, 2)
        elif at.span is not None:
            room[at.span, :, at.start : at.keys] = new
        else:
            room[at.rows_index, :, at.start : at.keys] = new
        return room[at.span if at.span is not None else at.rows_index, :, : at.keys]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.keys if self.written else self.window.start

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """One `RowLayer` per attention layer, and one place to tell them all where a forward writes and reads."""

    def __init__(self, layer_types: Sequence[str]) -> None:
        self.window = Window()
        self.reserved = [1, ROUND_TOKENS]
        self.row_layers: list[RowLayer] = []
        layers: list = []
        for kind in layer_types:
            if kind == "dummy":  # shares the cache of another layer, or has none to keep
                layers.append(DummyLayer())
            else:
                layers.append(RowLayer(self.window, self.reserved))
                self.row_layers.append(layers[-1])
        super().__init__(layers=layers)

    def reserve(self, rows: int, tokens: int) -> None:
        """Grows every layer, at its next update, to at least so many rows and tokens; never shrinks."""
        self.reserved[0] = max(self.reserved[0], rows)
        if tokens > self.reserved[1]:
            grown = max(tokens, self.reserved[1] * 3 // 2)
            self.reserved[1] = -(-grown // ROUND_TOKENS) * ROUND_TOKENS

    def begin(self, rows: Sequence[int], start: int, queries: int, slots: torch.Tensor | None, keys: int) -> None:
        """Says where the next forward writes and reads; see `Window`."""
        self.window.set(rows, start, queries, slots, keys)
        for layer in self.row_layers:
            layer.written = False

    def complete(self) -> bool:
        """Whether every layer took its keys and values in the forward since `begin`."""
        return all(layer.written for layer in self.row_layers)

    def copy(self, source: int, to: int, start: int, end: int) -> None:
        """Copies the positions from `start` to `end` of one row into another, in every layer."""
        for layer in self.row_layers:
            layer.copy(source, to, start, end)

    def release(self) -> None:
        """Frees the memory."""
        for layer in self.row_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
