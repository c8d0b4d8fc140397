"""Did the output change? Ids against the baseline's, and for every difference the reason.

A difference is a near-tie when the target itself can hardly tell the two tokens apart: a teacher-forced pass over the
common prefix gives the values that the tokens were chosen by (logits; under sampling, logits over temperature plus
the coupled noise), and both tokens lie within the rounding of the dtype below the best. Rounding differs between a
forward of one token and of several, so near-ties are expected wherever the runtime is not bit-invariant. Anything
else is a real difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .records import Sample

# Relative to the largest logit: some units in the last place, as many as the sums of a deep model lose.
TOLERANCE = {"float32": 2.0**-15, "float16": 2.0**-8, "bfloat16": 2.0**-6}

_COUNTS = ("exact", "near_tie", "different", "compared")


@dataclass(frozen=True)
class Divergence:
    """Where two arms part: the target's values there.

    Attributes:
        index: of the first token that differs, counted from the first generated one.
        top_gap: the best value minus the second best, the target's own uncertainty; None where only one is left.
        gap: the best value minus the smaller of the two tokens' values.
        tolerance: what counts as a tie at this place.
    """

    index: int
    top_gap: float | None
    gap: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tolerance


# (sample of the baseline, index, token of the baseline, token of the arm) -> Divergence
Judge = Callable[[Sample, int, int, int], Divergence]
# ids -> the ids of their text tokenised again
Reread = Callable[[Sequence[int]], list[int]]


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first id that differs, the shorter length where one is a prefix of the other, None if equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def report(
    samples: Iterable[Sample],
    baseline: str,
    arms: Iterable[str],
    judge: Judge,
    as_text: Mapping[str, Reread] | None = None,
) -> dict[str, Any]:
    """Per task and arm: how many outputs are exact, near-ties, really different, and where each first parts.

    Repeats of one prompt count once each; failed samples on either side are not compared.

    Args:
        as_text: arms of which only the text is known, tokenised again; the baseline's answers are compared with theirs
            in the same form.
    """
    measured = [sample for sample in samples if sample.kind == "measure" and sample.ok]
    base = {(s.task, s.prompt_id, s.prompt_hash, s.turn, s.repeat): s for s in measured if s.arm == baseline}
    result: dict[str, dict[str, Any]] = {}
    for arm in arms:
        if arm == baseline:
            continue
        for sample in measured:
            if sample.arm != arm:
                continue
            reference = base.get((sample.task, sample.prompt_id, sample.prompt_hash, sample.turn, sample.repeat))
            if reference is None:
                continue
            counts = result.setdefault(sample.task, {}).setdefault(arm, dict.fromkeys(_COUNTS, 0) | {"first": []})
            counts["compared"] += 1
            if as_text and arm in as_text:
                reference = replace(reference, token_ids=as_text[arm](reference.token_ids))
                counts["text_only"] = True
            _count(counts, reference, sample, judge)
    return result


def _count(counts: dict[str, Any], reference: Sample, sample: Sample, judge: Judge) -> None:
    at = first_difference(reference.token_ids, sample.token_ids)
    if at is None:
        counts["exact"] += 1
        return
    where: Mapping[str, Any] = {"prompt_id": sample.prompt_id, "turn": sample.turn, "index": at}
    if at >= min(len(reference.token_ids), len(sample.token_ids)):
        # The same tokens, but one goes on: an end was found in one arm and not in the other. No rounding does that.
        counts["different"] += 1
        counts["first"].append({**where, "top_gap": None, "gap": None, "near_tie": False})
        return
    found = judge(reference, at, reference.token_ids[at], sample.token_ids[at])
    counts["near_tie" if found.near_tie else "different"] += 1
    counts["first"].append({**where, "top_gap": found.top_gap, "gap": found.gap, "near_tie": found.near_tie})


def added(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Reports of an arm added up: counts summed, `first` joined, `text_only` where one of them is."""
    reports = list(reports)
    counts = {name: sum(one.get(name) or 0 for one in reports) for name in _COUNTS}
    text_only = {"text_only": True} if any(one.get("text_only") for one in reports) else {}
    return counts | text_only | {"first": [first for one in reports for first in one.get("first") or []]}


def violations(found: dict[str, Any] | None) -> list[str]:
    """Why a run that has to be lossless is not; empty if every output is exact."""
    if not found:
        return ["nothing could be compared token by token, so losslessness was not shown"]
    reasons = []
    for task, arms in found.items():
        for arm, counts in arms.items():
            if counts["exact"] < counts["compared"]:
                reasons.append(
                    f"{arm} on {task}: {counts['exact']} of {counts['compared']} outputs exact, "
                    f"{counts['near_tie']} near-tie(s), {counts['different']} different"
                )
    return reasons
