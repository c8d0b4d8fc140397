"""Where the draft was right, position by position, as the measured steps of all arms tell it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specbench.results.records import Sample

Samples = Mapping[str, Sequence[Sample]]  # by arm


def observed(sample: Sample) -> dict[int, bool]:
    """By position in the output: whether the draft's token there was the target's, where a step has told."""
    found, position = {}, 0
    for _, kept, drafted, accepted, _ in sample.steps:
        found |= dict.fromkeys(range(position, position + accepted), True)
        if accepted < drafted:
            found[position + accepted] = False
        position += kept
    return found


def acceptance(samples: Samples) -> float | None:
    """Of all positions that any arm has told of, how many were accepted; None where none has."""
    known = [right for ours in samples.values() for sample in ours for right in observed(sample).values()]
    return sum(known) / len(known) if known else None


def traces(own: Sequence[Sample], everyone: Samples, prepared: float = 0.0) -> list[np.ndarray]:
    """The trace of each of an arm's texts, see `hardware.overlap_simulator`.

    Positions that no arm has told of are drawn with the acceptance of all others; other arms count as far as their
    text is the same.

    Args:
        prepared: share of the rejections whose outcome the draft had prepared.
    """
    alpha = acceptance(everyone) or 0.0
    by_prompt: dict[str, list[tuple[list[int], dict[int, bool]]]] = {}
    for sample in (sample for ours in everyone.values() for sample in ours):
        by_prompt.setdefault(sample.prompt_id, []).append((sample.token_ids, observed(sample)))
    found = []
    for number, sample in enumerate(own):
        random = np.random.default_rng(number)
        count = len(sample.token_ids)
        right = random.random(count) < alpha
        known = {}
        for ids, seen in by_prompt[sample.prompt_id]:
            same = _common(ids, sample.token_ids)
            known |= {position: is_right for position, is_right in seen.items() if position < same}
        for position, is_right in (known | observed(sample)).items():
            if position < count:
                right[position] = is_right
        found.append(np.where(right, 0, np.where(random.random(count) < prepared, 1, 2)))
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
