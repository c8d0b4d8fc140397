"""Comparing two arms: pairs, the speed-up with its interval, spread, drift, and what a reader has to be warned of."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean

import numpy as np

from ..errors import MeasurementError
from . import metrics
from .records import Sample

SEED = 20240229
CONFIDENCE = 0.95
FEW_PROMPTS = 10
LEAST_PROMPTS = 5  # fewer cannot span an interval: simulated, 95 % of 3 prompts hold the truth in 75 %
MOST_SPREAD = 0.10
MOST_DRIFT = 0.05
MOST_DRAIN = 0.01
MOST_STALL = 0.02

Key = tuple[str, str, int, int]
Block = tuple[int, int]


# --- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One prompt turn and repeat, measured with both arms."""

    baseline: Sample
    other: Sample

    @property
    def equal_length(self) -> bool:
        return len(self.baseline.token_ids) == len(self.other.token_ids)


@dataclass
class Pairing:
    """What two arms have in common.

    Attributes:
        pairs: both finished. Equal length or not.
        failed: measured with both arms, but one of them failed: it leaves both.
        missing: measured with one arm only.
    """

    pairs: list[Pair] = field(default_factory=list)
    failed: int = 0
    missing: int = 0

    @property
    def matched(self) -> list[Pair]:
        """The pairs that emitted equally many tokens."""
        return [pair for pair in self.pairs if pair.equal_length]

    @property
    def unequal(self) -> int:
        return len(self.pairs) - len(self.matched)

    def __add__(self, other: Pairing) -> Pairing:
        return Pairing(self.pairs + other.pairs, self.failed + other.failed, self.missing + other.missing)

    def require_complete(self, what: str) -> None:
        """Raises MeasurementError where one arm has samples that the other lacks.

        A comparison that stops at the end of the shorter file calls a truncated one equal.
        """
        if self.missing:
            total = len(self.pairs) + self.failed + self.missing
            raise MeasurementError(f"{what}: {self.missing} of {total} samples were measured with one arm only")


def _key(sample: Sample) -> Key:
    return (sample.task, sample.prompt_hash, sample.turn, sample.repeat)


def pair(baseline: Iterable[Sample], other: Iterable[Sample]) -> Pairing:
    """Pairs measured samples over the same (task, prompt hash, turn, repeat).

    The hash is of the rendered prompt, so only what a model really saw alike is compared. Prompts that occur twice in
    a task are paired by their ids.
    """
    left, right = _by_key(baseline), _by_key(other)
    pairing = Pairing()
    for key, ours in left.items():
        theirs = right.get(key, [])
        pairing.missing += abs(len(ours) - len(theirs))
        for one, two in zip(ours, theirs, strict=False):
            if one.ok and two.ok:
                pairing.pairs.append(Pair(one, two))
            else:
                pairing.failed += 1
    pairing.missing += sum(len(theirs) for key, theirs in right.items() if key not in left)
    return pairing


def _by_key(samples: Iterable[Sample]) -> dict[Key, list[Sample]]:
    found: dict[Key, list[Sample]] = {}
    for sample in samples:
        if sample.kind == "measure":
            found.setdefault(_key(sample), []).append(sample)
    for same in found.values():
        if len(same) > 1:
            same.sort(key=lambda sample: sample.prompt_id)
    return found


# --- the speed-up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the baseline.

    Attributes:
        value: sum of the baseline's times / sum of the arm's, over the same pairs.
        low, high: 95 % bootstrap interval over prompts; None for fewer than five.
        geometric_mean: of the ratios of single prompts (turns and repeats of a prompt summed first).
        prompts, pairs: how many of each are in it.
        per_token: times were divided by tokens first, because the two arms emit different lengths.
        baseline_ns, arm_ns: the two sums.
        baseline_tokens, arm_tokens: what was emitted in them.
    """

    value: float
    low: float | None
    high: float | None
    geometric_mean: float | None
    prompts: int
    pairs: int
    per_token: bool
    baseline_ns: int
    arm_ns: int
    baseline_tokens: int
    arm_tokens: int

    @property
    def verdict(self) -> str | None:
        """ "faster", "slower", or "no difference" where the interval holds 1; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "no difference"


def decode_speedup(pairs: Sequence[Pair], per_token: bool = False) -> Speedup | None:
    """Sum of baseline decode times / sum of the arm's decode times over the same pairs.

    With `per_token`, each sum is divided by its sum of (n - 1) first: the only fair ratio where lengths differ, and the
    same number where they do not. None where there is no decode time at all.
    """
    return _speedup(pairs, metrics.decode_ns, lambda sample: metrics.emitted(sample) - 1, per_token)


def e2e_speedup(pairs: Sequence[Pair], per_token: bool = False) -> Speedup | None:
    """Sum of baseline end-to-end latencies / sum of the arm's; with `per_token` each over its sum of n."""
    return _speedup(pairs, metrics.e2e_ns, metrics.emitted, per_token)


def throughput_speedup(pairs: Sequence[Pair]) -> Speedup | None:
    """Tokens per second of all rows together / the baseline's, over the calls that the pairs ran in.

    Every answer counts with its part of its call's wall time (`metrics.wall_parts_ns`), per token.
    """
    parts = metrics.wall_parts_ns(one.baseline for one in pairs) | metrics.wall_parts_ns(one.other for one in pairs)
    return _speedup(pairs, lambda sample: parts[id(sample)], metrics.emitted, per_token=True)


def _speedup(
    pairs: Sequence[Pair], time: Callable[[Sample], float], tokens: Callable[[Sample], int], per_token: bool
) -> Speedup | None:
    if not pairs:
        return None
    units = _units(pairs)
    sums = np.zeros((max(units) + 1, 4))  # per prompt: baseline time, arm time, baseline tokens, arm tokens
    values = [(time(p.baseline), time(p.other), tokens(p.baseline), tokens(p.other)) for p in pairs]
    np.add.at(sums, np.asarray(units), np.asarray(values, dtype=float))
    total = [sum(column) for column in zip(*values, strict=True)]
    if not all(total[:2]) or (per_token and not all(total)):
        return None
    low, high = bootstrap_interval(sums, functools.partial(_ratio_of_sums, per_token=per_token))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _ratio_of_sums(sums, per_token)
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    return Speedup(
        value=float(_ratio_of_sums(np.asarray([total], dtype=float), per_token)[0]),
        low=low,
        high=high,
        geometric_mean=float(np.exp(np.log(ratios).mean())) if len(ratios) else None,
        prompts=len(sums),
        pairs=len(pairs),
        per_token=per_token,
        baseline_ns=round(total[0]),
        arm_ns=round(total[1]),
        baseline_tokens=total[2],
        arm_tokens=total[3],
    )


def _ratio_of_sums(sums: np.ndarray, per_token: bool) -> np.ndarray:
    ratio = sums[:, 0] / sums[:, 1]
    return ratio * sums[:, 3] / sums[:, 2] if per_token else ratio


def _units(pairs: Sequence[Pair]) -> list[int]:
    """The number of the prompt that each pair belongs to, counted from 0.

    Turns and repeats of a prompt are not independent draws of anything, and neither are rows that run at the same time:
    they are resampled together. Where more requests went through a batch than it has rows, as many as it has rows that
    were admitted one after another are taken for such a block.
    """
    blocks = _blocks([one.baseline for one in pairs])
    first_call: dict[tuple[str, str], tuple[str, Block | str]] = {}
    numbers: dict[tuple[str, Block | str], int] = {}
    units = []
    for one, block in zip(pairs, blocks, strict=True):
        sample = one.baseline
        prompt = (sample.task, sample.prompt_id)
        if prompt not in first_call:
            first_call[prompt] = (sample.task, block or sample.prompt_id)
        units.append(numbers.setdefault(first_call[prompt], len(numbers)))
    return units


def _blocks(samples: Sequence[Sample]) -> list[Block | None]:
    """Per sample its call, and which block of as many as its rows it was admitted in; None for one that ran alone."""
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for at, sample in enumerate(samples):
        if sample.batch_rows > 1:
            calls[sample.task, sample.group].append(at)
    blocks: list[Block | None] = [None] * len(samples)
    for (_, group), members in calls.items():
        members.sort(key=lambda at: samples[at].admitted_ns or 0)
        for rank, at in enumerate(members):
            blocks[at] = (group, rank // samples[at].batch_rows)
    return blocks


def bootstrap_interval(
    sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Percentile bootstrap over the rows of `sums`: (low, high), or (None, None) for fewer than five rows.

    Rows are drawn with replacement and added; `statistic` maps (draws, columns) sums to (draws,) values. The seed is
    fixed, so that the same records give the same interval. The percentiles are widened for few rows, as the normal
    ones are for Student's t; without it an interval over 10 rows that says 95 % holds the truth in 90 %.

    Source: Hesterberg 2015, "What teachers should know about the bootstrap" (expanded percentile interval).
    """
    rows = len(sums)
    if rows < LEAST_PROMPTS:
        return None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = statistic(_draws(rows) @ sums)
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return None, None
    tail = NormalDist().cdf(-math.sqrt(rows / (rows - 1)) * student_quantile((1 + confidence) / 2, rows - 1))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


@functools.lru_cache(maxsize=2)
def _draws(rows: int) -> np.ndarray:
    """(draws, rows): how often each row is drawn. 10,000 draws, fewer for many rows (at least 1,000), where the
    interval is narrow anyway and 10 million counts are enough memory."""
    draws = min(10_000, max(1_000, 10_000_000 // rows))
    picked = np.random.default_rng(SEED).integers(rows, size=(draws, rows))
    picked += np.arange(draws)[:, None] * rows  # one range of numbers per draw, so that one count does for all
    return np.bincount(picked.ravel(), minlength=draws * rows).reshape(draws, rows).astype(float)


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t for p from 0.5, by numbers: with t = sqrt(degrees) * tan(a), the density of the angle a
    is proportional to cos(a) ** (degrees - 1)."""
    angle = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (degrees - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(np.interp(2 * p - 1, below / below[-1], angle))


# --- spread and drift ------------------------------------------------------------------------------------------------


def spread(samples: Iterable[Sample]) -> float | None:
    """How much repeats of one prompt differ: the coefficient of variation (standard deviation / mean) of the decode
    time per token of each prompt turn over its repeats, pooled over prompts as the root of the mean square.

    None where nothing was repeated.
    """
    repeats: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for sample in samples:
        tpot = metrics.tpot_ns(sample)
        if tpot:
            repeats[sample.task, sample.prompt_id, sample.turn].append(tpot)
    squares = []
    for values in repeats.values():
        if len(values) > 1:
            mean = fmean(values)
            squares.append(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / mean**2)
    return math.sqrt(fmean(squares)) if squares else None


@dataclass(frozen=True)
class Drift:
    """How the last half of an arm's run compares with its first half.

    Attributes:
        change: time per token of the last half / of the first half, minus 1; 0.07 is 7 % slower.
        same_prompts: the halves hold repeats of the same prompts. Otherwise different prompts were compared.
        beyond_noise: more than two standard errors from 0.
    """

    change: float
    same_prompts: bool
    beyond_noise: bool


def drift(samples: Sequence[Sample]) -> Drift | None:
    """Compares the first with the last half of one arm's samples of one task, in the order they were made.

    Where prompts were repeated in both halves, only those are compared, each with itself; otherwise the halves as they
    are. The change is the geometric mean of ratios of time per token. None for fewer than two values per half.
    """
    timed = [(sample, tpot) for sample in samples if (tpot := metrics.tpot_ns(sample))]
    middle = len(timed) // 2
    halves = [_log_means(timed[:middle]), _log_means(timed[middle:])]
    common = [key for key in halves[0] if key in halves[1]]
    if len(common) > 1:
        changes = np.array([halves[1][key] - halves[0][key] for key in common])
        change, error = changes.mean(), changes.std(ddof=1) / math.sqrt(len(changes))
    else:
        first, last = (np.array(list(half.values())) for half in halves)
        if len(first) < 2 or len(last) < 2:
            return None
        change = last.mean() - first.mean()
        error = math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return Drift(math.expm1(change), len(common) > 1, bool(abs(change) > 2 * error))


def _log_means(timed: Iterable[tuple[Sample, float]]) -> dict[tuple[str, int], float]:
    logs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for sample, tpot in timed:
        logs[sample.prompt_id, sample.turn].append(math.log(tpot))
    return {key: fmean(values) for key, values in logs.items()}


# --- warnings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caution:
    """Something that a reader of the table has to know.

    Attributes:
        code: for programs: `failed`, `few-prompts`, `one-repeat`, `spread`, `drift`, `drain`, `stall`, `length`,
            `per-token`, `missing`, `interrupted`, `not-compared`, `different-tokens`, `state`, `first-step`,
            `threads`, `busy`, `broken`.
        text: one sentence with the number in it.
        task, arm: what it is about; None for all.
        value: the number behind it.
    """

    code: str
    text: str
    task: str | None = None
    arm: str | None = None
    value: float | None = None


def percent(share: float) -> str:
    """0.0734 -> "7.3 %"; whole numbers from 10 on."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def arm_cautions(task: str, arm: str, ok: Sequence[Sample], failed: Sequence[Sample]) -> list[Caution]:
    """What is wrong with one arm on one task, whatever it is compared with."""
    found = []
    if failed:
        why = f"; the first: {failed[0].error}"
        total = len(ok) + len(failed)
        text = f"{task}, {arm}: {len(failed)} of {total} samples failed and count for neither arm{why}"
        found.append(Caution("failed", text, task, arm, len(failed)))
    broken = [f"{sample.prompt_id}: {faults[0]}" for sample in ok if (faults := metrics.defects(sample))]
    if broken:
        text = f"{task}, {arm}: {len(broken)} records contradict themselves; the first, {broken[0]}"
        found.append(Caution("broken", text, task, arm, len(broken)))
    share = spread(ok)
    if share is not None and share > MOST_SPREAD:
        text = f"{task}, {arm}: repeats of one prompt differ by {percent(share)} (standard deviation / mean)"
        found.append(Caution("spread", text, task, arm, share))
    left = metrics.drain_share(ok)
    if left is not None and left > MOST_DRAIN:
        text = f"{task}, {arm}: devices worked on for {percent(left)} of the time after the last token"
        found.append(Caution("drain", text, task, arm, left))
    stalled = metrics.stall_share(ok)
    if stalled is not None and stalled > MOST_STALL:
        text = (
            f"{task}, {arm}: {percent(stalled)} of its decode time went into steps of over ten times the usual length; "
            "something else had the machine, so measure again"
        )
        found.append(Caution("stall", text, task, arm, stalled))
    early = sum(1 for sample in ok if sample.steps and sample.steps[0][metrics.KEPT] > 1)
    if early:
        text = f"{task}, {arm}: {early} of {len(ok)} outputs began with several tokens at once; compare it end to end"
        found.append(Caution("first-step", text, task, arm, early))
    return found


def drift_caution(task: str, baseline: str, ok: Sequence[Sample]) -> list[Caution]:
    """Warns when the machine itself got slower or faster while the baseline ran."""
    change = drift(ok)
    if change is None or abs(change.change) <= MOST_DRIFT or not change.beyond_noise:
        return []
    way = "slower" if change.change > 0 else "faster"
    prompts = "the same prompts" if change.same_prompts else "other prompts"
    text = f"{task}, {baseline}: its last half was {percent(abs(change.change))} {way} than its first ({prompts})"
    return [Caution("drift", text, task, baseline, change.change)]


def pairing_cautions(task: str, arm: str, baseline: str, pairing: Pairing, same_tokens: bool) -> list[Caution]:
    """What is wrong with a comparison. `same_tokens`: the two arms ought to emit the very same tokens."""
    found = []
    if pairing.missing:
        text = f"{task}, {arm}: {pairing.missing} samples were measured with only one of {arm} and {baseline}"
        found.append(Caution("missing", text, task, arm, pairing.missing))
    unequal = pairing.unequal
    if unequal and same_tokens:
        text = f"{task}, {arm}: {unequal} of {len(pairing.pairs)} outputs differ in length from {baseline}'s"
        left_out = "they are left out of the speed-up" if pairing.matched else "the speed-up is per token"
        found.append(Caution("length", f"{text}; {left_out}", task, arm, unequal))
    elif unequal:
        text = f"{task}, {arm}: emits other tokens than {baseline}, so that its speed-up is per token"
        found.append(Caution("per-token", text, task, arm, unequal))
    return found
