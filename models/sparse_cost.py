"""What a round with a sparse KV cache costs, measured: forwards of the target and of its view, choosing and following.

Contexts are counted as the positions that attention really runs over. With torch's operators that are the slots of the
cache, all rows alike, so a cost goes up in steps with the longest row; our own kernels read what each row has. No
prompt is read for it: the cost of a forward behind a long text does not depend on the words (`CpuPackedModel.assume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..hardware.clock import Clock
from .cost_curve import CostCurve
from .kv_cache import ALIGNMENT, slots_for

if TYPE_CHECKING:
    from .packed_cpu import CpuPackedModel
    from .sparse_view import SparseView

ROUNDS = 4  # of which the first does not count
_READ = 128  # tokens of a prompt that are read at once to see what reading it costs


@dataclass(frozen=True)
class SparseCosts:
    """Milliseconds of everything that decoding with a sparse draft consists of.

    Attributes:
        target: new tokens per row x positions x rows, with all of the text cached.
        draft: the same of the sparse draft; its positions are those in its own small cache.
        select_ms, select_base_ms: choosing a small cache for a row: per token of its context, and whatever that is.
        follow_ms: bringing a row's small cache up to date, once a round; 0 where it is not a part of the target's, but
            holds what the draft drafted with.
        read_ms: what a draft takes to read a token of a prompt; 0 where its small cache is a part of the target's.
        by_slots: whether attention runs over all slots of the cache, for all rows alike.
    """

    target: CostCurve
    draft: CostCurve
    select_ms: float = 0.0
    read_ms: float = 0.0
    by_slots: bool = True
    select_base_ms: float = 0.0
    follow_ms: float = 0.0

    def reach(self, tokens: float) -> int:
        """Where on the curves rows of so many tokens stand, new ones included."""
        return slots_for(int(tokens)) if self.by_slots else -(-int(tokens) // ALIGNMENT) * ALIGNMENT

    def length_of(self, lengths: Sequence[int]) -> float:
        """The one length that stands for rows of these."""
        return max(lengths) if self.by_slots else sum(lengths) / len(lengths)

    def begin_ms(self, context: float, unread: float | None = None) -> float:
        """Until a row of so many tokens can be drafted for: a draft model of its own has to read it, then to choose.

        Args:
            unread: tokens that are still to be read; None for all of them.
        """
        to_read = context if unread is None else unread
        return self.select_base_ms + context * self.select_ms + to_read * self.read_ms

    def constant_ms(self, rows: int) -> float:
        """What a forward of the target over one token per row takes beside reading keys and values."""
        first, last = self.target.contexts[0], self.target.contexts[-1]
        ms = self.target.ms(1, first, rows)
        slope = (self.target.ms(1, last, rows) - ms) / (last - first) if last > first else 0.0
        return max(0.0, ms - max(0.0, slope) * first)


def measure_sparse_costs(
    target: CpuPackedModel,
    view: SparseView,
    rows: int,
    tokens: int,
    budgets: Sequence[int],
    longest_draft: int,
    clock: Clock | None = None,
) -> SparseCosts:
    """Times forwards, choosing and following as decoding needs them; empties the caches of both models.

    What is timed ends with the argmax on the host. All numbers of new tokens take turns, and medians count.

    Args:
        rows: of a batch at most.
        tokens: the longest row that will come.
        budgets: positions that the small cache may hold when it is chosen.
        longest_draft: tokens.
    """
    now = (clock or Clock()).now
    room = min(longest_draft + 1, target.context_length // 2, view.context_length // 2)
    counts = sorted({count for count in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if count < room} | {room})
    batches = sorted({1, min(rows, target.max_rows)})
    contexts = sorted({slots_for(max(part, room + 1)) for part in (tokens // 4, tokens // 2, tokens)})
    target_curve = _curve(target, counts, contexts, batches, now)
    held = sorted({slots_for(budget + room) for budget in (*budgets, 2 * max(budgets))})
    draft_curve = _curve(view, [1, *(count for count in (4, room) if 1 < count <= room)], held, batches, now)
    middle = sorted(budgets)[len(budgets) // 2]
    base_ms, select_ms, follow_ms = _keeping(view, min(tokens, view.dense.context_length), middle)
    read_ms = 0.0
    if view.dense is not target:
        count = min(_READ, view.dense.context_length // 2)
        behind = max(1, min(tokens, view.dense.context_length) // 2)
        read_ms = _forward_ms(view.dense, behind, count, now) / count
        follow_ms = 0.0  # only a part of the target's cache takes over what verifications left
    by_slots = target.kernels != "native"
    return SparseCosts(target_curve, draft_curve, select_ms, read_ms, by_slots, base_ms, follow_ms)


def _curve(
    model: CpuPackedModel,
    counts: Sequence[int],
    slots: Sequence[int],
    batches: Sequence[int],
    now: Callable[[], int],
) -> CostCurve:
    """Medians over `ROUNDS`; a point of the grid stands for rows whose longest fills its slots with the new tokens."""
    counts = sorted({count for count in counts if count < slots[0]})
    median_ms = np.zeros((len(counts), len(slots), len(batches)))
    for k, batch in enumerate(batches):
        for j, size in enumerate(slots):
            held = min(size, model.context_length) - counts[-1]
            ids = model.assume(batch, held)
            fresh = np.tile(ids[:, :1], counts[-1])
            took = np.zeros((ROUNDS, len(counts)))
            for turn in range(ROUNDS):
                for i, count in enumerate(counts):
                    asked = [np.concatenate([row, new[:count]]) for row, new in zip(ids, fresh, strict=True)]
                    began = now()
                    model.advance(asked, last=count).argmax(-1).tolist()
                    took[turn, i] = (now() - began) / 1e6
            median_ms[:, j, k] = np.median(took[1:], axis=0)
    model.reset()
    return CostCurve(tuple(counts), tuple(slots), tuple(batches), median_ms)


def _forward_ms(model: CpuPackedModel, behind: int, count: int, now: Callable[[], int]) -> float:
    """One row's forward over `count` new tokens behind others, with one logit; the median of a few."""
    ids = model.assume(1, behind)[0]
    took = []
    for turn in range(ROUNDS):
        began = now()
        model.advance([np.concatenate([ids, np.full(count, turn)])])
        took.append((now() - began) / 1e6)
    model.reset()
    return float(np.median(took[1:]))


def _keeping(view: SparseView, tokens: int, budget: int) -> tuple[float, float, float]:
    """Milliseconds of a small cache's own: of choosing it, whatever the context and per token of it; of following."""
    view.watch(True)
    dense, contexts = view.dense, sorted({max(2, tokens // 2), max(2, tokens)})
    select_ms, follow_ms = [], []
    for context in contexts:
        ids = dense.assume(1, context)[0]
        dense.advance([ids], last=min(view.selection.window, context))  # whose queries choose
        took = []
        for _ in range(ROUNDS):
            view.select(0, ids[:-1], budget)
            took.append(view.last_select_ns / 1e6)
            view.follow(0, ids)
            follow_ms.append(view.last_follow_ns / 1e6)
        select_ms.append(float(np.median(took[1:])))
    view.watch(False)
    for model in (dense, view):
        model.reset()
    slope = max(0.0, (select_ms[-1] - select_ms[0]) / max(1, contexts[-1] - contexts[0]))
    return max(0.0, select_ms[0] - slope * contexts[0]), slope, float(np.median(follow_ms))
