"""What a forward pass costs: T(new tokens, context length, rows), measured on any `CachedModel`.

Whether speculation pays depends on this curve as much as on acceptance: a draft of k tokens is worth verifying only
while T(k + 1) is less than the accepted tokens times T(1). Measured, because no formula knows the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..hardware.clock import Clock
from .base import CachedModel


@dataclass(frozen=True)
class CostCurve:
    """Median milliseconds of one forward on a grid, and what lies between.

    Attributes:
        new_tokens: tokens per row that one forward computes, ascending.
        contexts: tokens that each row had cached before, ascending.
        rows: rows of the batch, ascending.
        median_ms: (new_tokens, contexts, rows).
    """

    new_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    median_ms: np.ndarray

    def ms(self, new_tokens: float, context: float | None = None, rows: float = 1) -> float:
        """T in milliseconds, linear between the points of the grid and level beyond its ends.

        Beyond the largest number of new tokens it continues the last segment, since a cost that stays level there
        would make the longest draft look free. Without `context`, that of the shortest one measured.
        """
        values = self.median_ms
        values = _between(self.rows, np.moveaxis(values, 2, 0), rows)
        values = _between(self.contexts, np.moveaxis(values, 1, 0), self.contexts[0] if context is None else context)
        last = self.new_tokens[-1]
        if new_tokens > last and len(self.new_tokens) > 1:
            slope = (values[-1] - values[-2]) / (last - self.new_tokens[-2])
            return float(values[-1] + max(slope, 0.0) * (new_tokens - last))
        return float(_between(self.new_tokens, values, new_tokens))

    def ratio(self, new_tokens: float, context: float | None = None, rows: float = 1) -> float:
        """T(new tokens) / T(1): how much dearer it is to verify than to decode one token."""
        return self.ms(new_tokens, context, rows) / self.ms(1, context, rows)

    def as_record(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; `from_record` takes them back."""
        return {
            "new_tokens": list(self.new_tokens),
            "contexts": list(self.contexts),
            "rows": list(self.rows),
            "median_ms": self.median_ms.tolist(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> CostCurve:
        return cls(
            tuple(record["new_tokens"]), tuple(record["contexts"]), tuple(record["rows"]), np.array(record["median_ms"])
        )


def measure_cost(
    model: CachedModel,
    new_tokens: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16),
    context: Sequence[int] | int = 256,
    rows: Sequence[int] | int = 1,
    repeats: int = 7,
    clock: Clock | None = None,
    last: int | None = None,
) -> CostCurve:
    """Times one forward at every point of the grid; the model's cache is empty before and after.

    What is timed is what a decoding step needs: the forward with logits after every new token (or `last`), their
    argmax, and its way to the host, so that nothing is left running on the device. All numbers of new tokens are
    measured in turn, `repeats` times, after one round that does not count: a slow moment hits all of them alike. Token
    ids are random and the same on every call.

    Args:
        context: cached tokens per row before the forward, one or several.
        rows: rows computed at once, one or several; at most the model's `max_rows`.
        last: how many of the new tokens get logits at most; 1 for what reading a prompt costs. None for all.

    Raises:
        ValueError: an empty or impossible grid.
    """
    counts, contexts, batches = _axis(new_tokens), _axis(context), _axis(rows)
    if repeats < 1:
        raise ValueError("a median needs at least one repeat")
    if last is not None and last < 1:
        raise ValueError(f"a forward has logits after at least its last token, not {last}")
    if contexts[-1] + counts[-1] > model.context_length:
        raise ValueError(
            f"{contexts[-1]} + {counts[-1]} tokens are more than {model.name}'s context of {model.context_length}"
        )
    if batches[-1] > model.max_rows:
        raise ValueError(f"{model.name} computes at most {model.max_rows} rows, not {batches[-1]}")
    now = (clock or Clock()).now
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (batches[-1], contexts[-1] + counts[-1]))
    took = np.zeros((repeats, len(counts), len(contexts), len(batches)))
    model.reset()
    model.reserve(batches[-1], contexts[-1] + counts[-1])
    for k, batch in enumerate(batches):
        for j, cached in enumerate(contexts):
            behind = [row[:cached] for row in ids[:batch]]
            model.advance(behind)
            for repeat in range(-1, repeats):
                for i, count in enumerate(counts):
                    asked, wanted = [row[: cached + count] for row in ids[:batch]], min(count, last or count)
                    if wanted < count:  # or the tokens of the last time would still be there; waits for the device
                        model.advance(behind).argmax(-1).tolist()
                    began = now()
                    model.advance(asked, last=wanted).argmax(-1).tolist()
                    ended = now()
                    if repeat >= 0:
                        took[repeat, i, j, k] = (ended - began) / 1e6
        model.reset()
    return CostCurve(counts, contexts, batches, np.median(took, axis=0))


def _axis(values: Sequence[int] | int) -> tuple[int, ...]:
    axis = (values,) if isinstance(values, int) else tuple(sorted(set(values)))
    if not axis or axis[0] < 1:
        raise ValueError(f"new tokens, contexts and rows are counted from 1, not {list(axis)}")
    return axis


def _between(axis: tuple[int, ...], values: np.ndarray, at: float) -> np.ndarray:
    """Linear interpolation along the first axis of `values`, level beyond its ends."""
    at = min(max(at, axis[0]), axis[-1])
    right = int(np.searchsorted(axis, at))
    if axis[right] == at:
        return values[right]
    left = right - 1
    share = (at - axis[left]) / (axis[right] - axis[left])
    return values[left] * (1 - share) + values[right] * share
