"""The numbers of a run while it is being measured: sums per arm that cost next to nothing to keep up.

The interval here is Student's, of the ratio of sums linearised, not the bootstrap of the finished table: it needs no
draws and no memory to speak of, so that looking at a run does not change it. The two agree within some per cent of
their width from ten prompts on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import metrics
from .metrics import Drafting
from .records import BASELINE, Sample
from .statistics import LEAST_PROMPTS, student_quantile

Prompt = tuple[str, str]


@dataclass(frozen=True)
class Standing:
    """How an arm stands.

    Attributes:
        baseline: whether the others are compared with it.
        samples, failed: measured since the run began, or was resumed.
        decode_tokens_per_s, acceptance_rate: as in a table, None where there is nothing to divide.
        speedup, low, high: decode time per token of the baseline / of the arm, over the prompts that both have.
    """

    arm: str
    baseline: bool
    samples: int
    failed: int
    decode_tokens_per_s: float | None
    acceptance_rate: float | None
    speedup: float | None
    low: float | None
    high: float | None


@dataclass
class _Arm:
    samples: int = 0
    failed: int = 0
    decode_ns: int = 0
    tokens: int = 0
    drafting: Drafting = field(default_factory=Drafting)
    by_prompt: dict[Prompt, list[int]] = field(default_factory=dict)  # decode time and tokens


class Running:
    """Adds up what comes in. Without an arm called like the baseline there are no speed-ups."""

    def __init__(self, baseline: str = BASELINE) -> None:
        self.baseline = baseline
        self.arms: dict[str, _Arm] = {}

    def add(self, samples: Sequence[Sample]) -> None:
        """Other kinds than `measure` are looked over."""
        for sample in samples:
            if sample.kind != "measure":
                continue
            arm = self.arms.setdefault(sample.arm, _Arm())
            arm.samples += 1
            if not sample.ok:
                arm.failed += 1
                continue
            ns, tokens = metrics.decode_ns(sample), metrics.emitted(sample) - 1
            arm.decode_ns += ns
            arm.tokens += tokens
            arm.drafting += metrics.drafting([sample])
            sums = arm.by_prompt.setdefault((sample.task, sample.prompt_id), [0, 0])
            sums[0] += ns
            sums[1] += tokens

    def standings(self) -> list[Standing]:
        """The baseline first, then in the order in which arms appeared."""
        names = sorted(self.arms, key=lambda name: name != self.baseline)
        return [self._standing(name, self.arms[name]) for name in names]

    def _standing(self, name: str, arm: _Arm) -> Standing:
        speed = metrics.ratio(arm.tokens * metrics.NS_PER_S, arm.decode_ns)
        value = low = high = None
        base = self.arms.get(self.baseline)
        if base is not None and name != self.baseline:
            both = [prompt for prompt in arm.by_prompt if prompt in base.by_prompt]
            value, low, high = linear_interval([(*base.by_prompt[prompt], *arm.by_prompt[prompt]) for prompt in both])
        rate = arm.drafting.acceptance_rate
        return Standing(name, name == self.baseline, arm.samples, arm.failed, speed, rate, value, low, high)


def linear_interval(
    prompts: Sequence[Sequence[int]],
) -> tuple[float | None, float | None, float | None]:
    """Ratio of times per token with its 95 % interval: (value, low, high), None for what cannot be told.

    For R = (sum b / sum m) / (sum a / sum n) the logarithm changes with prompt i by b_i/sum b - m_i/sum m - a_i/sum a +
    n_i/sum n; the standard error is the root of the sum of squares, times N / (N - 1) under the root.

    Args:
        prompts: per prompt b and m, decode time and tokens of the baseline, and a and n, those of the arm.
    """
    sums = np.asarray(prompts, dtype=float).reshape(-1, 4)
    total = sums.sum(axis=0)
    if not len(sums) or not total.all():
        return None, None, None
    value = float(total[0] / total[1] / (total[2] / total[3]))
    count = len(sums)
    if count < LEAST_PROMPTS:
        return value, None, None
    parts = sums / total
    influence = parts[:, 0] - parts[:, 1] - parts[:, 2] + parts[:, 3]
    error = math.sqrt(float((influence**2).sum()) * count / (count - 1))
    reach = math.exp(student_quantile(0.975, count - 1) * error)
    return value, value / reach, value * reach
