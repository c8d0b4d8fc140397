"""What `prediction.py` predicts by: cost curves that are measured again and again, and what arms do beside forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from interleaved import Arm

from specbench.hardware.clock import Clock, Drain
from specbench.models.base import CachedModel, Ids
from specbench.models.cost_curve import CostCurve
from specbench.models.remote import cost_of
from specbench.results.measure import Ending, measure
from specbench.results.prediction import Prices
from specbench.strategies.base import Request
from specbench.strategies.practice import around_a_forward_ns
from specbench.strategies.sampling import Sampling

COUNTS = (1, 2, 3, 4, 5, 8, 12, 13, 17)  # beyond 12 tokens (AVX2: 5 or 6) the CPU kernels take a second turn
QUESTIONS, TOKENS = 3, 24  # that every arm answers to show what it does beside forwards


def measure_round(models: Mapping[str, CachedModel], prompt: int, answer: int) -> dict[str, Any]:
    """One round of curves, as plain lists: `curves` by role in the middle of an answer, `reading` of the drafts.

    Args:
        prompt, answer: tokens of a task's prompts and answers; the drafts are timed to read such a prompt at once.
    """
    longest = min(model.context_length for model in models.values())
    context = min(prompt + answer // 2, longest - COUNTS[-1])
    grid: dict[str, Any] = dict(new_tokens=COUNTS, context=context, repeats=1)
    reading: dict[str, Any] = dict(new_tokens=min(prompt, longest - 1), context=1, repeats=1, last=1)
    drafts = {role: model for role, model in models.items() if role != "target"}
    return {
        "curves": {role: cost_of(model, **grid).as_record() for role, model in models.items()},
        "reading": {role: cost_of(model, **reading).as_record() for role, model in drafts.items()},
    }


def prices(rounds: Sequence[Mapping[str, Any]], prompt: int) -> Prices:
    """The medians over some rounds with the same grid.

    Args:
        prompt: the length of a task's prompts, which drafts were timed to read.
    """
    curves = {role: _median([one["curves"][role] for one in rounds]) for role in rounds[0]["curves"]}
    reading = {role: _median([one["reading"][role] for one in rounds]).ms(prompt) for role in rounds[0]["reading"]}
    return Prices(curves, {role: (float(prompt), ms) for role, ms in reading.items()})


def _median(records: Sequence[dict[str, Any]]) -> CostCurve:
    curves = [CostCurve.from_record(record) for record in records]
    values = np.median([curve.median_ms for curve in curves], axis=0)
    return CostCurve(curves[0].new_tokens, curves[0].contexts, curves[0].rows, values)


def beside_ms(arm: Arm, questions: Sequence[Ids], sampling: Sampling) -> float:
    """Milliseconds per forward that an arm takes beside its forwards, which no curve has counted: verifying, planning,
    the receiver. The median over questions that no task holds.
    """
    models = list(arm.strategy.models.values())
    around = [around_a_forward_ns(model, questions[0]) for model in models]
    found = []
    try:
        for key, ids in enumerate(questions[:QUESTIONS]):
            for model in models:
                model.trace = []
            (outcome,) = measure(
                arm.strategy, [Request(key, ids, TOKENS)], sampling, Ending(frozenset(sampling.eos)), Clock(), Drain()
            )
            if outcome.error or outcome.ttft_ns is None or outcome.e2e_ns is None:
                raise SystemExit(f"{arm.name}, on a question of no task: {outcome.error}")
            left, count = outcome.e2e_ns - outcome.ttft_ns, 0
            for model, more in zip(models, around, strict=True):
                for forward in model.trace or []:
                    if forward.start_ns >= outcome.start_ns + outcome.ttft_ns:
                        left -= forward.end_ns - forward.start_ns + more
                        count += 1
            if count:
                found.append(left / count / 1e6)
    finally:
        for model in models:
            model.trace = None
    return max(0.0, float(np.median(found))) if found else 0.0
