"""What forwards cost on two devices, alone and side by side: what the controllers of `async` and `duo` decide by.

Measured once per run, before the warm-up, where the models are.
"""

from __future__ import annotations

from typing import Any

from ..hardware.overlap import Costs
from ..hardware.workers import Port
from ..models.base import CachedModel
from ..models.remote import cost_of, fastest_costs, host_of, timed

COUNTS = (1, 2, 3, 4, 6, 8, 12)
ROWS = (1, 2, 4, 8)
REPEATS = 5
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
    few = {"new_tokens": counts[:4], "context": context, "repeats": REPEATS}
    alone, draft_alone = cost_of(target, **few), cost_of(draft, new_tokens=1, context=context, repeats=REPEATS)
    host = host_of(draft)
    port = host.start(_keep_busy, context)
    port.wait()  # its prefill is done
    beside = cost_of(target, **few)
    port.send(ENOUGH)
    message = port.wait()
    host.join()
    assert message is not None
    slower = [beside.ms(count) / alone.ms(count) for count in counts[:4]]
    draft_slower = message.base / 1e6 / draft_alone.ms(1)
    return Costs(
        curves["target"].ms,
        lambda rows: curves["draft"].ms(1, rows=rows),
        min(max(1.0, sum(slower) / len(slower)), MOST_FACTOR),
        min(max(1.0, draft_slower), MOST_FACTOR),
    )


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
    """The measured costs in plain numbers, for benchmarks."""
    return {
        "target_ms": {n: costs.target_ms(n) for n in COUNTS},
        "draft_ms": {n: costs.draft_ms(n) for n in ROWS},
        "target_factor": costs.target_factor,
        "draft_factor": costs.draft_factor,
    }
