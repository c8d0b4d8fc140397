"""Pairs, speed-ups and paired tests over columns: the numbers of `results.statistics`, for 100,000 samples at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import metrics, statistics
from .columns import Columns
from .records import Sample
from .statistics import Pair, Pairing, Speedup

SIGNIFICANCE = 0.05
MOST_DRAWN = 1_000
LEAST_TESTED = 6  # two-sided, the smallest p that 5 prompts can give is 2 / 2**5 = 0.0625


def distinct_prompts(data: Columns, chosen: np.ndarray) -> int:
    """How many prompts there are in the chosen samples."""
    return len(np.unique(data["task"][chosen] * len(data.names["prompt_id"].texts) + data["prompt_id"][chosen]))


@dataclass(frozen=True)
class Calls:
    """The calls that some samples of one arm ran in, one entry each; what they are is said in `results.metrics`.

    Attributes:
        drain_ns: -1 where it is not known.
    """

    wall_ns: np.ndarray
    tokens: np.ndarray
    drain_ns: np.ndarray


def calls_of(data: Columns, chosen: np.ndarray) -> Calls:
    """As `metrics.calls`, `call_ns` and `call_tokens`; the chosen samples are of one arm."""
    ends = np.maximum(data["call_ns"][chosen], data["admitted_ns"][chosen] + data["e2e_ns"][chosen])
    tokens, drain = data["tokens"][chosen], data["drain_ns"][chosen]
    alone = data["batch_rows"][chosen] == 1
    if alone.all():
        return Calls(ends, tokens, drain)
    own = np.where(alone, 1 + np.arange(len(chosen)), 0)
    keys = np.stack([*(data[name][chosen] for name in ("task", "repeat", "group")), own])
    number = np.unique(keys, axis=1, return_inverse=True)[1].ravel()
    calls = Calls(*(np.full(number.max() + 1, least, dtype=np.int64) for least in (0, 0, -1)))
    np.maximum.at(calls.wall_ns, number, ends)
    np.add.at(calls.tokens, number, tokens)
    np.maximum.at(calls.tokens, number, data["call_tokens"][chosen])
    np.maximum.at(calls.drain_ns, number, drain)
    return calls


def drain_share(calls: Calls) -> float | None:
    """As `metrics.drain_share`."""
    known = calls.drain_ns >= 0
    return metrics.ratio(int(calls.drain_ns[known].sum()), int(calls.wall_ns[known].sum()))


def spread(data: Columns, chosen: np.ndarray) -> float | None:
    """As `statistics.spread`."""
    decode = data["e2e_ns"][chosen] - data["ttft_ns"][chosen]
    timed = (data["tokens"][chosen] > 1) & (decode > 0)
    chosen, tpot = chosen[timed], decode[timed] / (data["tokens"][chosen][timed] - 1)
    keys = np.stack([data[name][chosen] for name in ("task", "prompt_id", "turn")])
    _, units, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    if not (counts > 1).any():
        return None
    mean = np.bincount(units.ravel(), tpot) / counts
    squares = np.bincount(units.ravel(), (tpot - mean[units.ravel()]) ** 2)[counts > 1]
    return float(np.sqrt((squares / (counts[counts > 1] - 1) / mean[counts > 1] ** 2).mean()))


# --- pairs and speed-ups ---------------------------------------------------------------------------------------------


NOBODY = Pair(Sample("", "", "", "", "", 0, 0, "", 0, 0, 0, 0), Sample("", "", "", "", "", 0, 0, "", 0, 0, 0, 0))


@dataclass(frozen=True)
class TestedSpeedup(Speedup):
    """A speed-up that a paired test was made of; see `sign_flip`.

    Attributes:
        p_value: None for fewer than six prompts.
    """

    p_value: float | None = None

    @property
    def verdict(self) -> str | None:
        """ "faster" or "slower" where the interval lies on one side of 1 *and* the test agrees; else "no difference",
        and None where there are too few prompts to tell."""
        if self.p_value is None:
            return None
        return (super().verdict or "no difference") if self.p_value < SIGNIFICANCE else "no difference"


@dataclass
class Paired:
    """What two arms have in common, as `statistics.Pairing` tells it: places in the columns instead of records.

    Attributes:
        left, right: the places of what both finished, in the order of the baseline.
        equal: which of them emitted equally many tokens.
        failed, missing: as there.
    """

    left: np.ndarray
    right: np.ndarray
    equal: np.ndarray
    failed: int
    missing: int

    def places(self, which: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        return self.left[which], self.right[which]

    def counts(self) -> Pairing:
        """How many there are of each, for those who only count."""
        return _Counts(self)


class _Counts(Pairing):
    def __init__(self, paired: Paired) -> None:
        super().__init__([NOBODY] * len(paired.left), paired.failed, paired.missing)
        self.equal = int(paired.equal.sum())

    @property
    def matched(self) -> list[Pair]:
        return self.pairs[: self.equal]


def pair(data: Columns, baseline: np.ndarray, other: np.ndarray) -> Paired:
    """Pairs samples over the same (task, prompt hash, turn, repeat), in the order of the baseline; prompts that occur
    twice one to one."""
    ours, theirs = _keys(data, baseline, other)
    _, one, two = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    order = np.argsort(one)
    left, right = baseline[one[order]], other[two[order]]
    ok = (data["failed"][left] == 0) & (data["failed"][right] == 0)
    missing = len(baseline) + len(other) - 2 * len(left)
    left, right = left[ok], right[ok]
    return Paired(left, right, data["tokens"][left] == data["tokens"][right], int((~ok).sum()), missing)


def _keys(data: Columns, *arms: np.ndarray) -> list[np.ndarray]:
    """One number per sample: equal in two arms for the same prompt, turn and repeat, and in no arm twice."""
    numbers = np.zeros(sum(map(len, arms)), dtype=np.int64)
    for name in ("task", "prompt_hash", "turn", "repeat"):
        column = np.concatenate([data[name][at] for at in arms])
        numbers = np.unique(numbers * (1 + column.max(initial=0)) + column, return_inverse=True)[1]
    keys, done = [], 0
    for at in arms:
        mine = numbers[done : done + len(at)]
        done += len(at)
        order = np.lexsort((data["prompt_id"][at], mine))
        fresh = np.append(True, mine[order][1:] != mine[order][:-1]) if len(at) else np.zeros(0, dtype=bool)
        begin = np.maximum.accumulate(np.where(fresh, np.arange(len(at)), 0))
        place = np.empty(len(at), dtype=np.int64)
        place[order] = np.arange(len(at)) - begin  # how many of the same key came before
        keys.append(mine * (1 + len(data)) + place)
    return keys


def speedup(data: Columns, pairs: tuple[np.ndarray, np.ndarray], metric: str, per_token: bool) -> TestedSpeedup | None:
    """How many times faster the second arm is, as `statistics.decode_speedup` tells it."""
    left, right = pairs
    if not len(left):
        return None
    values = np.stack([part for at in (left, right) for part in _times(data, at, metric)], axis=1)[:, [0, 2, 1, 3]]
    per_token = (per_token and metric != "ttft") or metric == "tpot"
    total = values.sum(axis=0).tolist()
    if not all(total[:2]) or (per_token and not all(total)):
        return None
    units = _units(data, left)
    sums = np.stack([np.bincount(units, column) for column in values.T], axis=1)

    def ratio(drawn: np.ndarray) -> np.ndarray:
        return statistics._ratio_of_sums(drawn, per_token)

    drawn = _few(sums)
    low, high = statistics.bootstrap_interval(drawn, ratio)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = ratio(sums)
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    return TestedSpeedup(
        value=float(ratio(np.asarray([total], dtype=float))[0]), low=low, high=high,
        geometric_mean=float(np.exp(np.log(ratios).mean())) if len(ratios) else None,
        prompts=len(sums), pairs=len(left), per_token=per_token, baseline_ns=total[0], arm_ns=total[1],
        baseline_tokens=total[2], arm_tokens=total[3], p_value=sign_flip(drawn, ratio),
    )  # fmt: skip


def _few(sums: np.ndarray) -> np.ndarray:
    """At most 1,000 rows: more prompts are put together by lot, so that drawing them does not take gigabytes. Groups of
    independent prompts are as independent, and their sums scatter as much: interval and test stay what they are."""
    if len(sums) <= MOST_DRAWN:
        return sums
    groups = np.random.default_rng(statistics.SEED).permutation(len(sums)) % MOST_DRAWN
    return np.stack([np.bincount(groups, column) for column in sums.T], axis=1)


def _times(data: Columns, at: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Time and tokens of one side."""
    e2e, ttft, tokens = data["e2e_ns"][at], data["ttft_ns"][at], data["tokens"][at]
    if metric == "ttft":
        return ttft, np.ones_like(tokens)
    return (e2e, tokens) if metric == "e2e" else (e2e - ttft, tokens - 1)


def _units(data: Columns, at: np.ndarray) -> np.ndarray:
    """The number of the prompt, or of the rows of a batch that it first ran with, of each pair; see
    `statistics._units`."""
    prompts = data["task"][at] * len(data.names["prompt_id"].texts) + data["prompt_id"][at]
    _, first, back = np.unique(prompts, return_index=True, return_inverse=True)
    shared = data["batch_rows"][at][first] > 1
    call = np.where(shared, data["group"][at][first], prompts[first])
    unit = np.stack([data["task"][at][first], shared, call, np.where(shared, _blocks(data, at)[first], 0)])
    _, number = np.unique(unit, axis=1, return_inverse=True)
    numbers = number.ravel()[back]
    _, first, back = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[back]  # counted in the order of the pairs


def _blocks(data: Columns, at: np.ndarray) -> np.ndarray:
    """Which block of as many as its call's rows each sample was admitted in; see `statistics._blocks`."""
    keys = np.stack([data["batch_rows"][at] > 1, data["group"][at], data["task"][at]])
    order = np.lexsort((data["admitted_ns"][at], *keys))  # stable: equal ones stay in the order of the pairs
    fresh = (np.diff(keys[:, order], prepend=-1) != 0).any(axis=0)
    begin = np.maximum.accumulate(np.where(fresh, np.arange(len(at)), 0))
    blocks = np.empty(len(at), dtype=np.int64)
    blocks[order] = (np.arange(len(at)) - begin) // np.maximum(data["batch_rows"][at][order], 1)
    return blocks


def sign_flip(sums: np.ndarray, ratio: Callable[[np.ndarray], np.ndarray]) -> float | None:
    """p of the hypothesis that the two arms do not differ: how often the ratio of sums is as far from 1 when the two
    arms of some prompts are swapped.

    All swaps for up to 12 prompts, else 9,999 of them drawn with a fixed seed (fewer for more than 1,000 prompts). Two-
    sided. Exact in the sense that under the hypothesis p <= 0.05 happens in at most 5 % of cases, whatever the times
    are distributed like. None for fewer than six prompts, which cannot give a p below 0.05.

    Source: Fisher 1935; Pitman 1937. For draws: Phipson and Smyth 2010, the observed arrangement counts as one.
    """
    rows = len(sums)
    if rows < LEAST_TESTED:
        return None
    every = rows <= 12
    swaps = (np.arange(1 << rows)[:, None] >> np.arange(rows) & 1).astype(float) if every else _swaps(rows)
    total = sums.sum(axis=0)
    other = sums[:, [1, 0, 3, 2]]
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.abs(np.log(ratio(total + swaps @ (other - sums).astype(swaps.dtype))))
        observed = np.abs(np.log(ratio(total[None])))[0]
    if not np.isfinite(observed):
        return None
    as_far = np.count_nonzero(drawn >= observed * (1 - 1e-9) - 1e-15)
    return float((as_far + (not every)) / (len(drawn) + (not every)))


@functools.lru_cache(maxsize=2)
def _swaps(rows: int) -> np.ndarray:
    """(draws, rows) of 0 and 1; single precision halves the memory, and p does not need more."""
    draws = min(9_999, max(999, 10_000_000 // rows))
    return np.random.default_rng(statistics.SEED).integers(2, size=(draws, rows), dtype=np.int8).astype(np.float32)
