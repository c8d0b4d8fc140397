"""From a table of predictions to one recommendation: the acceptance of a few prompts, measured.

The strategies that are at hand decode the prompts as `specbench run` would; `prediction.replay` says what their steps
cost by the curves of the profile, and resampling the prompts says how far that can be trusted. What was measured in
passing stands beside it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..hardware.cost_model import expected_tokens
from ..hardware.devices import parse_placement
from . import metrics, statistics
from .forecasts import prices, replayed
from .listener import Listener
from .plan import Plan, check
from .prediction import LONGEST, PAYS, Prices, conditional_acceptance
from .records import BASELINE, RunFolder, Sample
from .run import run

NEW_TOKENS = 64
LEAST_JUDGED = 100  # draft tokens, for an acceptance to be worth believing: two standard errors are 0.1 at most
KNOWN_LENGTH = 4


def plan_of(plan: Plan, task: str, limit: int, document: Mapping[str, Any] | None = None) -> Plan:
    """The run that measures the acceptance: every strategy with a formula that the models and places allow.

    Args:
        document: the profile, for the draft length that it advises; without it any will do.

    Raises:
        UsageError and its kin: what such a run may not be.
    """
    names, options = ["lookup"], {name: dict(keys) for name, keys in plan.options.items()}
    if plan.draft:
        names += ["speculative", "cascade"]
        options["speculative"] = {"draft-length": _advised_length(document)}
        placement = parse_placement(plan.place, plan.threads)
        if placement.of("draft") != placement.of("target"):
            names += ["async", "duo"]
    made = dataclasses.replace(
        plan, strategy=tuple(names), task=(task,), limit=limit, max_new_tokens=NEW_TOKENS, options=options, trace=0,
        baseline=True, out=None,
    )  # fmt: skip
    check(made)
    return made


def _advised_length(document: Mapping[str, Any] | None) -> int:
    """The best draft length at a middling acceptance."""
    for row in ((document or {}).get("predicted") or {}).get("strategies") or []:
        if row["strategy"] == "speculative" and row["at"]:
            return row["at"][len(row["at"]) // 2]["setting"]["draft-length"]
    return KNOWN_LENGTH


def calibrate(
    plan: Plan, task: str, limit: int, document: Mapping[str, Any], listener: Listener | None = None
) -> dict[str, Any]:
    """Measures and recommends; JSON-safe, see `docs/hardware.md`.

    Raises:
        UsageError and its kin: before anything is measured.
        MeasurementError: nothing could be measured.
    """
    made = plan_of(plan, task, limit, document)
    with tempfile.TemporaryDirectory() as folder:
        result = run(dataclasses.replace(made, out=Path(folder) / "calibration"), listener)
        samples = [sample for sample in RunFolder(result.folder).samples() if sample.kind == "measure" and sample.ok]
        arms = {arm["name"]: arm for arm in result.manifest["arms"]}
    rows = [_row(arm, samples, prices(document)) for name, arm in arms.items() if name != BASELINE]
    return {
        "task": task,
        "prompts": len({sample.prompt_id for sample in samples}),
        "max_new_tokens": NEW_TOKENS,
        "strategies": rows,
        "recommended": recommend(rows),
    }


def _row(arm: Mapping[str, Any], samples: Sequence[Sample], known: Prices) -> dict[str, Any]:
    """What one strategy did, what that should bring, and what it brought."""
    ours = [sample for sample in samples if sample.arm == arm["name"]]
    drafting = metrics.drafting(ours)
    alpha, setting = conditional_acceptance(drafting), {}
    judged = drafting.accepted + sum(n for (drafted, taken), n in drafting.outcomes.items() if taken < drafted)
    sums = [found for unit in _by_prompt(ours) if (found := replayed(arm, unit, known)) is not None]
    predicted = None
    if sums:
        gain = 1.0
        if arm["strategy"] == "speculative":
            length = arm["options"]["draft_length"]
            best, gain = best_length(alpha, length, known, sum(s.prompt_tokens for s in ours) / len(ours))
            setting = {"draft-length": best}
        predicted = _interval(np.array(sums), gain)
    base = [sample for sample in samples if sample.arm == BASELINE]
    measured = statistics.decode_speedup(statistics.pair(base, ours).pairs, per_token=True)
    return {
        "strategy": arm["strategy"],
        "setting": setting,
        "judged": judged,
        "acceptance": alpha,
        "tokens_per_step": drafting.tokens_per_step,
        "predicted": predicted,
        "measured": None if measured is None else _told(measured),
        "measured_with": {name: value for name, value in arm["options"].items() if name == "draft_length"},
        "doubt": _doubt(judged, alpha, predicted),
    }


def _told(speedup: statistics.Speedup) -> dict[str, Any]:
    return {"speedup": speedup.value, "low": speedup.low, "high": speedup.high}


def _by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.prompt_id, []).append(sample)
    return list(found.values())


def best_length(alpha: float | None, measured: int, known: Prices, context: float) -> tuple[int, float]:
    """The draft length that is best for an acceptance, and by which factor it is better than the one measured."""
    target, draft = known.curves["target"], known.curves["draft"]

    def rate(length: int) -> float:
        return expected_tokens(alpha or 0.0, length) / (length * draft.ms(1, context) + target.ms(length + 1, context))

    best = max(range(1, max(1, min(LONGEST, target.new_tokens[-1] - 1)) + 1), key=rate)
    return best, rate(best) / rate(measured)


def _interval(sums: np.ndarray, gain: float) -> dict[str, Any]:
    """Sum of plain times / sum of replayed times, times `gain`, with a bootstrap interval over prompts."""
    low, high = statistics.bootstrap_interval(sums, lambda drawn: drawn[:, 0] / drawn[:, 1])
    plain, ours = sums.sum(axis=0)
    return {
        "speedup": float(gain * plain / ours),
        "low": None if low is None else gain * low,
        "high": None if high is None else gain * high,
    }


def _doubt(judged: int, alpha: float | None, predicted: Mapping[str, Any] | None) -> str | None:
    """Why a row is not to be trusted."""
    if alpha is None:
        return "nothing was drafted"
    if predicted is None:
        return "its models' costs are not in the profile"
    if judged < LEAST_JUDGED:
        return f"only {judged} draft tokens were judged"
    if predicted["low"] is None:
        return f"fewer than {statistics.LEAST_PROMPTS} prompts"
    return None


def recommend(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The strategy with the highest predicted speed-up, plain decoding if none pays, and what it cannot be told apart
    from: every other one whose interval overlaps, and plain decoding where the interval reaches 1."""
    known = [row for row in rows if row["predicted"] is not None]
    best = max(known, key=lambda row: row["predicted"]["speedup"], default=None)
    if best is None or best["predicted"]["speedup"] < PAYS:
        unsure = [row["strategy"] for row in known if (row["predicted"]["high"] or 0) >= PAYS]
        return {"strategy": BASELINE, "setting": {}, "speedup": 1.0, "low": None, "high": None,
                "not_told_apart_from": unsure, "doubt": None}  # fmt: skip
    found = best["predicted"]
    close = []
    if found["low"] is not None:
        close = [
            row["strategy"]
            for row in known
            if row is not best and (row["predicted"]["high"] or row["predicted"]["speedup"]) >= found["low"]
        ]
        close += [BASELINE] if found["low"] <= 1 else []
    return {"strategy": best["strategy"], "setting": best["setting"], **found, "not_told_apart_from": close,
            "doubt": best["doubt"]}  # fmt: skip
