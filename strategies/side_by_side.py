"""What forwards cost on two devices, alone and side by side: what the controllers of `async` and `duo` decide by.

Measured once per run, before the warm-up, where the models are; strategies of a run that use the same models share what
was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..hardware.overlap import Costs
from ..hardware.workers import Port
from ..models.base import CachedModel
from ..models.cost_curve import CostCurve
from ..models.remote import cost_of, fastest_costs, host_of, timed

COUNTS = (1, 2, 3, 4, 6, 8, 12)
ROWS = (1, 2, 4, 8)
ROUNDS, REPEATS = 2, 3
MOST_CACHED = 512
MOST_FACTOR = 2.0  # two that share one core; what is beyond it is noise
READY, ENOUGH, DONE = range(3)


def measure_costs(target: CachedModel, draft: CachedModel, tokens: int, branches: int) -> Costs:
    """Cost curves of both models, and how much each slows the other down.

    Args:
        tokens: of the longest row that will come; measured at half of it, but at most at 512, which takes long enough.
        branches: rows of a draft forward at most.
    """
    longest = min(target.context_length, draft.context_length)
    counts = [count for count in COUNTS if count < longest]
    context = max(1, min(tokens // 2, MOST_CACHED, longest - counts[-1]))
    rows = [count for count in ROWS if count <= branches]
    grids = {
        "target": {"new_tokens": counts, "context": context},
        "draft": {"new_tokens": 1, "context": context, "rows": rows},
    }
    curves = fastest_costs({"target": target, "draft": draft}, grids)
    # The factors stay with the draft, as the curves stay with their models.
    known = vars(draft).setdefault("known_contention", WeakKeyDictionary()).setdefault(target, {})
    if context not in known:
        known[context] = _contention(target, draft, counts[:4], context)
    return Costs(curves["target"].ms, lambda rows: curves["draft"].ms(1, rows=rows), *known[context])


def _contention(target: CachedModel, draft: CachedModel, counts: Sequence[int], context: int) -> tuple[float, float]:
    """How many times slower target and draft are while the other one works, too.

    The faster of two rounds counts, of each alone and of each beside the other: a machine that is busy for a moment
    would make overlap look worse, or better, for the whole run.
    """
    rounds = zip(*(_one_round(target, draft, counts, context) for _ in range(ROUNDS)), strict=True)
    alone, beside, draft_alone, draft_beside = (np.min(took, axis=0) for took in rounds)
    slower, draft_slower = float((beside / alone).mean()), float(draft_beside / draft_alone)
    return min(max(1.0, slower), MOST_FACTOR), min(max(1.0, draft_slower), MOST_FACTOR)


def _one_round(
    target: CachedModel, draft: CachedModel, counts: Sequence[int], context: int
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Milliseconds of the target alone and beside the draft, by count of tokens, then of the draft's steps likewise."""
    few = {"new_tokens": counts, "context": context, "repeats": REPEATS}
    alone, draft_alone = cost_of(target, **few), cost_of(draft, new_tokens=1, context=context, repeats=REPEATS)
    host = host_of(draft)
    port = host.start(_keep_busy, context)
    port.wait()  # its prefill is done
    beside = cost_of(target, **few)
    port.send(ENOUGH)
    message = port.wait()
    host.join()
    assert message is not None
    return alone.median_ms.ravel(), beside.median_ms.ravel(), draft_alone.ms(1), message.base / 1e6


def _keep_busy(model: CachedModel, port: Port, context: int) -> None:
    """One-token steps until told to stop; then says how many nanoseconds the median one took."""
    ids = [1] * (context + 1)
    model.advance([ids])
    port.send(READY)
    took: list[int] = []
    while not took or port.receive() is None:
        took.append(timed(lambda: model.advance([ids]).argmax(-1).tolist())[1])
    model.reset()
    port.send(DONE, base=sorted(took)[len(took) // 2])


def as_record(costs: Costs) -> dict[str, Any]:
    """The measured costs in plain numbers, for benchmarks; `from_record` takes them back."""
    return {
        "target_ms": {n: costs.target_ms(n) for n in COUNTS},
        "draft_ms": {n: costs.draft_ms(n) for n in ROWS},
        "target_factor": costs.target_factor,
        "draft_factor": costs.draft_factor,
    }


def from_record(record: Mapping[str, Any]) -> Costs:
    """Costs from `as_record`, also after a way through JSON, where keys are text. Linear between what was recorded."""
    target, draft = (
        dict(sorted((int(n), float(ms)) for n, ms in record[name].items())) for name in ("target_ms", "draft_ms")
    )
    verify = CostCurve(tuple(target), (1,), (1,), np.array(list(target.values())).reshape(-1, 1, 1))
    step = CostCurve((1,), (1,), tuple(draft), np.array(list(draft.values())).reshape(1, 1, -1))
    return Costs(verify.ms, lambda rows: step.ms(1, rows=rows), record["target_factor"], record["draft_factor"])
