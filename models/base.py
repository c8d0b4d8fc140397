"""The contract that every runtime keeps: a causal LM and its KV cache, for a batch of rows, on one device.

Rollback is not a strategy's job. A strategy names the context it wants; the model keeps what it can of its cache,
drops the rest and runs one forward over what is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

    from .sparse_select import Selection
    from .sparse_view import SparseView

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass, for the trace: when, over how many rows, and how many new tokens in all rows together."""

    start_ns: int
    end_ns: int
    rows: int
    new_tokens: int


class CachedModel(ABC):
    """A causal language model with a KV cache per row.

    Attributes:
        name: the spec it was loaded from, for messages.
        runtime: `transformers` or `packed`.
        kernels: what computes: `torch`, or `native`, the packed runtime's own kernels on CPU.
        device: torch device name, `cpu` or `cuda:0`.
        dtype: `float32`, `bfloat16`, `float16`; a quantised form says so (`int4`).
        vocab_size: width of the logits, already cut to the tokenizer's common size.
        context_length: the most tokens a row may hold.
        max_rows: the most rows one call may carry; 1 where a ragged batch cannot be computed right.
        one_row_because: why `max_rows` is 1, in words; empty where it is not.
        last_forward_ns: how long the last forward took, for controllers (budgets, fallbacks).
        trace: a list to append every `Forward` to, or None. With a list the device is synchronised around each
            forward, which costs time: traced passes never feed a table.
        original: the model whose weights these are, whole or rounded, if `follow` takes over what it has read; None
            for one that reads everything itself.
        worker: of a model that other processes hold, wholly or with us, what a run drains and asks them with: `call`,
            `drain`, `join`; None where this process holds it alone.
    """

    name: str
    runtime: str
    device: str
    dtype: str
    vocab_size: int
    context_length: int
    max_rows: int
    one_row_because: str = ""
    kernels: str = "torch"
    last_forward_ns: int = 0
    trace: list[Forward] | None = None
    original: CachedModel | None = None
    worker: Any = None

    @abstractmethod
    def advance(
        self, contexts: Sequence[Ids], last: Sequence[int] | int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Brings rows to the given contexts with ONE forward; returns the logits after their last tokens.

        For each row the longest common prefix of what is cached and the given context is kept and the rest of the
        cache dropped. At least one token per row is always computed, so that there are logits to return: where the
        whole context is cached already, its last `last` tokens are computed again.

        Args:
            contexts: the ids of each row, all of them (the model finds out what is new). Not changed, not kept.
            last: how many of the last positions of each row to return logits for; one number for all rows, or
                one per row. At least 1 and at most the length of the context.
            rows: the cache row of each context, no repeats; by default 0, 1, 2, ... Rows not named stay as they are.

        Returns:
            (sum of last, vocab_size), the rows one after another in the order given; on the model's device, in
            the dtype that the head computes in.

        Raises:
            ValueError: an empty context, more rows than `max_rows`, `last` out of range, or a context that is
                longer than `context_length`.
        """

    def check_call(self, arrays: Sequence[np.ndarray], lasts: Sequence[int], rows: Sequence[int]) -> None:
        """Refuses what `advance` must refuse, for every runtime alike. Raises ValueError."""
        if not arrays or len(lasts) != len(arrays) or len(rows) != len(arrays):
            raise ValueError(f"{len(arrays)} contexts, {len(lasts)} counts of logits and {len(rows)} rows do not match")
        if len(arrays) > 1 and len(set(rows)) < len(rows):
            raise ValueError(f"a row is named twice: {list(rows)}")
        if min(rows) < 0 or max(rows) >= self.max_rows or len(arrays) > self.max_rows:
            reason = f" ({self.one_row_because})" if self.max_rows == 1 else ""
            raise ValueError(f"{self.name} computes at most {self.max_rows} row(s){reason}, asked: {list(rows)}")
        for context, wanted in zip(arrays, lasts, strict=True):
            if not len(context):
                raise ValueError("an empty context has no logits")
            if len(context) > self.context_length:
                raise ValueError(f"{len(context)} tokens are more than {self.name}'s context of {self.context_length}")
            if not 1 <= wanted <= len(context):
                raise ValueError(f"logits of the last {wanted} of {len(context)} tokens cannot be returned")

    def copy_row(self, source: int, to: int) -> None:
        """Row `to` then holds what row `source` holds, so that a context can go on in two ways. No forward.

        Costs a memory copy of what the two rows do not share; what they share stays as it is.

        Raises:
            ValueError: a row that is not among the first `max_rows`.
            NotImplementedError: the runtime cannot copy rows.
        """
        raise NotImplementedError(f"{self.name}: the {self.runtime} runtime cannot copy rows")

    def check_copy(self, source: int, to: int) -> None:
        """Refuses what `copy_row` must refuse, for every runtime alike. Raises ValueError."""
        if not (0 <= source < self.max_rows and 0 <= to < self.max_rows):
            raise ValueError(f"{self.name} has at most {self.max_rows} row(s), asked to copy {source} to {to}")

    def sparse_view(self, selection: Selection) -> SparseView:
        """A second, small cache over the same weights, with a part of what this one holds, or of what its `original`
        does; see `sparse_view`.

        Raises:
            ModelError: the runtime cannot have one.
        """
        raise ModelError(
            f"{self.name}: a sparse KV cache is made in the packed runtime on cpu, next to the target; this model has "
            f"the {self.runtime} runtime on {self.device}"
        )

    def follow(self, row: int, context: Ids) -> None:  # noqa: B027 - nothing to do for most
        """Puts the keys and values of `original` in the place of this model's own, as far as it has read a context.

        What a draft that follows its target has to read itself is then only what the target has not: the latest token,
        and what it drafts. Row r here is row r there. Nothing where there is no `original`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Empties the cache of every row. Buffers may stay allocated."""

    def forget(self, row: int) -> None:
        """Empties the cache of one row: the next context there is read from its beginning, whatever it begins with.

        A row that was never used is empty. No other row changes.

        Raises:
            NotImplementedError: the runtime cannot forget a single row.
        """
        raise NotImplementedError(f"{self.name}: the {self.runtime} runtime cannot forget a single row")

    def reserve(self, rows: int, tokens: int) -> None:  # noqa: B027 - nothing to do for most
        """Says that up to `rows` rows of up to `tokens` tokens will come, so that nothing is allocated later."""

    def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Gives back memory, worker processes, graphs. The model cannot be used afterwards."""

    def record(self) -> dict[str, Any] | None:
        """For the manifest, of a model that is not ours: what is known of it, in place of what a run says itself of a
        model that it has loaded. None for one of those."""
        return None

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that one decoded token has to read."""


def common_prefix(cached: np.ndarray, context: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays; a few microseconds for thousands of tokens."""
    n = min(len(cached), len(context))
    differs = cached[:n] != context[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


def copy_ids(
    ids: np.ndarray, lengths: list[int], source: int, to: int, copy: Callable[[int, int, int, int], None]
) -> None:
    """What `copy_row` does in every runtime: row `to` becomes row `source`, and what the two share is not touched.

    Args:
        ids: (rows, tokens), what is cached; changed.
        lengths: tokens of each row; changed, and true even where `copy` fails.
        copy: copies keys and values, (source, to, first position, one past the last).
    """
    length = lengths[source]
    shared = common_prefix(ids[to, : lengths[to]], ids[source, :length])
    lengths[to] = shared
    if shared < length:
        copy(source, to, shared, length)
        ids[to, shared:length] = ids[source, shared:length]
        lengths[to] = length


class TokenBuffer:
    """The ids of one row, growing in place, with a view of them that costs nothing to take."""

    __slots__ = ("_data", "_length")

    def __init__(self, ids: Ids, room: int = 256) -> None:
        self._length = len(ids)
        self._data = np.empty(self._length + room, dtype=np.int64)
        self._data[: self._length] = ids

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Ids) -> None:
        end = self._length + len(ids)
        self._write(ids, end)
        self._length = end

    def view(self, draft: Sequence[int] = ()) -> np.ndarray:
        """The ids, followed by a draft that is not made part of them. Valid until the next call on this buffer."""
        end = self._length + len(draft)
        if draft:
            self._write(draft, end)
        return self._data[:end]

    def _write(self, ids: Ids, end: int) -> None:
        if end > len(self._data):
            self._data = np.concatenate([self._data, np.empty(max(len(self._data), end), dtype=np.int64)])
        self._data[self._length : end] = ids
