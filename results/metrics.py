"""Every metric, one pure function from samples, with its formula. `docs/metrics.md` says which trap each avoids.

Notation for one sample: n emitted tokens after trimming, t0 the start of the call (for a request that took the row of
another: the moment it did), tp the first and t1 the last token of this row on the host, S verification steps after the
prefill, D draft tokens that the target looked at in them, A those of them that were accepted and emitted.

Functions that take samples pool: sums are divided by sums, never ratios averaged. They want finished samples of one
arm and one kind; failed ones have no times and belong to nobody's mean (`finished` picks). A metric that is not
defined (one token has no time per output token, a step that drafted nothing has no acceptance) is None, never 0 and
never NaN.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .records import Sample

NS_PER_S = 1_000_000_000

NS, KEPT, WASTED = 0, 1, 4
"""Where they stand in an entry of `Sample.steps`: [ns, kept, drafted, accepted, wasted]."""

LEVEL_COUNTS = 4
"""Of one level in `Sample.levels`: [drafted, accepted, forwards, ns]."""


def finished(samples: Iterable[Sample], kind: str = "measure") -> list[Sample]:
    """The samples of one kind that ended without an error."""
    return [sample for sample in samples if sample.kind == kind and sample.error is None]


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, None where that is not a number."""
    return None if numerator is None or not denominator else numerator / denominator


# --- one sample: time ------------------------------------------------------------------------------------------------


def emitted(sample: Sample) -> int:
    """n: token ids that reached the host, after trimming at EOS, stop string and `max_new_tokens`.

    The only token count there is, for every arm: never a strategy's own count, never text tokenised again.
    """
    return len(sample.token_ids)


def ttft_ns(sample: Sample) -> int:
    """Time to first token: tp - t0. Tokenisation and the wait for a row are outside; the target's prefill (and the
    draft's, if the strategy starts it before its first token) is inside."""
    assert sample.ttft_ns is not None, "a failed sample has no times"
    return sample.ttft_ns


def e2e_ns(sample: Sample) -> int:
    """End-to-end latency: t1 - t0."""
    assert sample.e2e_ns is not None, "a failed sample has no times"
    return sample.e2e_ns


def decode_ns(sample: Sample) -> int:
    """Decode time: t1 - tp. It produced n - 1 tokens: the first one belongs to the prefill."""
    return e2e_ns(sample) - ttft_ns(sample)


def tpot_ns(sample: Sample) -> float | None:
    """Time per output token: (t1 - tp) / (n - 1); None for n < 2. Steps are not tokens: S does not appear here."""
    n = emitted(sample)
    return None if n < 2 else decode_ns(sample) / (n - 1)


def step_gaps_ns(sample: Sample) -> list[int]:
    """Gaps between tokens as a reader sees them: the time between steps, 0 inside a step. n - 1 values whose sum is
    the decode time."""
    gaps: list[int] = []
    before = None
    for step in sample.steps:
        if step[KEPT]:
            gaps += [0 if before is None else step[NS] - before] + [0] * (step[KEPT] - 1)
            before = step[NS]
    return gaps[1:]


def amortised_gaps_ns(sample: Sample) -> list[float]:
    """Gaps between tokens with the time of each step spread evenly over the tokens it made. n - 1 values (fewer by
    what a prefill step emitted beyond one token) whose sum is the decode time."""
    gaps: list[float] = []
    before = None
    for step in sample.steps:
        if step[KEPT]:
            if before is not None:
                gaps += [(step[NS] - before) / step[KEPT]] * step[KEPT]
            before = step[NS]
    return gaps


def defects(sample: Sample) -> list[str]:
    """What contradicts itself in one record, in words; empty for a sound one.

    A count that two places tell differently is how tokens after EOS, or drafts counted as output, get into a speed.
    """
    if sample.error is not None:
        stray = [name for name in ("ttft_ns", "e2e_ns", "finish") if getattr(sample, name) is not None]
        return [f"it failed, yet has {', '.join(stray)}"] if stray or sample.token_ids else []
    if sample.ttft_ns is None or sample.e2e_ns is None or not sample.token_ids or not sample.steps:
        return ["it did not fail, yet has no tokens or no times"]
    found = []
    now, kept, drafted, accepted, _ = zip(*sample.steps, strict=True)  # by column: long runs have millions of steps
    if sum(kept) != len(sample.token_ids):
        found.append(f"its steps kept {sum(kept)} tokens, its ids are {len(sample.token_ids)}")
    if any(map(operator.gt, accepted, drafted)) or min(accepted) < 0:
        found.append("a step accepted more than it drafted")
    if any(map(operator.gt, now, now[1:])):
        found.append("its steps run backwards in time")
    if not 0 <= sample.ttft_ns <= sample.e2e_ns:
        found.append(f"its first token came at {sample.ttft_ns} ns, its last at {sample.e2e_ns} ns")
    return found


# --- pooled: speed ---------------------------------------------------------------------------------------------------


def total_decode_ns(samples: Iterable[Sample]) -> int:
    """Sum of decode times, t1 - tp."""
    return sum(decode_ns(sample) for sample in samples)


def pooled_tpot_ns(samples: Sequence[Sample]) -> float | None:
    """Sum of decode times / sum of (n - 1). Samples of one token add nothing to either."""
    return ratio(total_decode_ns(samples), sum(emitted(sample) - 1 for sample in samples))


def decode_tokens_per_s(samples: Sequence[Sample]) -> float | None:
    """Sum of (n - 1) / sum of decode times: what one request sees, also in a batch."""
    return ratio(sum(emitted(sample) - 1 for sample in samples) * NS_PER_S, total_decode_ns(samples))


def e2e_tokens_per_s(samples: Sequence[Sample]) -> float | None:
    """Sum of n / sum of end-to-end latencies: what one request sees, also in a batch."""
    return ratio(sum(map(emitted, samples)) * NS_PER_S, sum(map(e2e_ns, samples)))


def calls(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of each `generate` call together; one that ran alone is a call of its own."""
    alone: list[list[Sample]] = []
    groups: dict[tuple[str, str, str, int, int], list[Sample]] = {}
    for sample in samples:
        if sample.batch_rows == 1:
            alone.append([sample])
        else:
            key = (sample.arm, sample.kind, sample.task, sample.repeat, sample.group)
            groups.setdefault(key, []).append(sample)
    return alone + list(groups.values())


def call_ns(rows: Iterable[Sample]) -> int:
    """Wall time of a call, from its start to the last token of any row.

    It stands in every record of the call, since some of its rows may have failed, or be on record from an earlier call;
    older records lack it, and there the last row to finish stands for the call.
    """
    return max(max(row.call_ns or 0, (row.admitted_ns or 0) + e2e_ns(row)) for row in rows)


def call_tokens(rows: Sequence[Sample]) -> int:
    """Tokens of all rows of a call, those of failed ones included as far as they came."""
    return max(sum(map(emitted, rows)), *(row.call_tokens or 0 for row in rows))


def wall_ns(samples: Iterable[Sample]) -> int:
    """Sum of the wall times of the calls that the samples ran in: rows of a batch share their time."""
    return sum(map(call_ns, calls(samples)))


def wall_tokens(samples: Iterable[Sample]) -> int:
    """Tokens of all rows of those calls."""
    return sum(map(call_tokens, calls(samples)))


def throughput_tokens_per_s(samples: Sequence[Sample]) -> float | None:
    """Tokens of all rows / wall time of the calls they ran in. Equals `e2e_tokens_per_s` for batch 1.

    The end of a call is in it, where fewer and fewer rows have something to do.
    """
    return ratio(wall_tokens(samples) * NS_PER_S, wall_ns(samples))


def wall_parts_ns(samples: Iterable[Sample]) -> dict[int, float]:
    """What each sample takes up of its call's wall time, in proportion to its tokens; by `id` of the sample."""
    return {id(row): call_ns(rows) * emitted(row) / call_tokens(rows) for rows in calls(samples) for row in rows}


def stall_share(samples: Iterable[Sample], factor: float = 10.0) -> float | None:
    """Sum of the gaps between steps that are longer than `factor` times the median gap / sum of all gaps.

    A step that takes ten times its like is no property of a strategy: something else had the machine. The first gap of
    a sample is left out, since a draft model's prefill is in it, and so is every gap in which another row of its batch
    got its first token: there a prompt was read, by the target and by a draft model.
    """
    gaps: list[int] = []
    for rows in calls(samples):
        begun = sorted((row.admitted_ns or 0) + ttft_ns(row) for row in rows)
        for row in rows:
            times = [(row.admitted_ns or 0) + step[NS] for step in row.steps[1:]]
            gaps += [
                after - before
                for before, after in zip(times, times[1:], strict=False)
                if bisect_right(begun, before) == bisect_right(begun, after)
            ]
    if not gaps:
        return None
    limit = factor * (percentile(gaps, 50) or 0)
    return ratio(sum(gap for gap in gaps if gap > limit), sum(gaps))


def drain_share(samples: Iterable[Sample]) -> float | None:
    """Sum over calls of the time the devices still worked after the last token / sum of the calls' wall times.

    Work that a strategy leaves behind is paid by whatever runs next.
    """
    drain = wall = 0
    for rows in calls(samples):
        known = [row.drain_ns for row in rows if row.drain_ns is not None]
        if known:
            drain += max(known)
            wall += call_ns(rows)
    return ratio(drain, wall)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between order statistics: rank (N - 1) * percent / 100 counted from 0 (numpy's default,
    Hyndman and Fan type 7). None for no values, and above the 90th for fewer than 100 / (100 - percent) of them (100
    for the 99th): that would be the maximum under another name."""
    if not len(values) or (percent > 90 and len(values) * (100 - percent) < 100):
        return None
    return float(np.percentile(np.asarray(values, dtype=float), percent))


# --- pooled: drafting ------------------------------------------------------------------------------------------------


@dataclass
class Drafting:
    """What the verification steps of some samples did, as counts that can be added; the ratios follow from them.

    Attributes:
        outcomes: how many steps drafted d tokens and had a of them accepted and emitted, by (d, a). The prefill is
            not a step.
        tokens: sum of (n - 1): what those steps emitted.
        wasted: draft tokens thrown away without the target having looked at them, the prefill's included.
        levels: [drafted, accepted, forwards, ns] of each level of a cascade, from the one that drafts for the target
            downwards; a level is counted with all that it drafted, for the target or for the levels above it.
    """

    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: int = 0
    wasted: int = 0
    levels: list[list[int]] = field(default_factory=list)

    def __add__(self, other: Drafting) -> Drafting:
        levels = [list(level) for level in self.levels]
        _add_levels(levels, other.levels)
        return Drafting(self.outcomes + other.outcomes, self.tokens + other.tokens, self.wasted + other.wasted, levels)

    @property
    def steps(self) -> int:
        """S, including the steps that drafted nothing."""
        return self.outcomes.total()

    @property
    def drafted(self) -> int:
        """D: draft tokens that the target looked at."""
        return sum(drafted * count for (drafted, _), count in self.outcomes.items())

    @property
    def accepted(self) -> int:
        """A: draft tokens accepted and emitted; what was trimmed at EOS or at the limit does not count."""
        return sum(accepted * count for (_, accepted), count in self.outcomes.items())

    @property
    def empty_steps(self) -> int:
        """Steps that drafted nothing (no match, no room, a fallback). They count in S."""
        return sum(count for (drafted, _), count in self.outcomes.items() if drafted == 0)

    @property
    def tokens_per_step(self) -> float | None:
        """(n - 1) / S: the bonus or corrected token is in it. 1.00 without drafting."""
        return ratio(self.tokens, self.steps)

    @property
    def accepted_per_step(self) -> float | None:
        """A / S: the bonus token is not in it."""
        return ratio(self.accepted, self.steps) if self.drafted else None

    @property
    def acceptance_rate(self) -> float | None:
        """A / D. None where nothing was drafted. Says nothing about speed by itself: D may be tiny."""
        return ratio(self.accepted, self.drafted)

    @property
    def accepted_at_least(self) -> list[int]:
        """For i = 1, 2, ...: steps with at least i accepted tokens. They add up to A."""
        return self._at_least(1)

    @property
    def drafted_at_least(self) -> list[int]:
        """For i = 1, 2, ...: steps that drafted at least i tokens. They add up to D. A tree's nodes are counted, not
        its depth."""
        return self._at_least(0)

    def _at_least(self, part: int) -> list[int]:
        longest = max((drafted for drafted, _ in self.outcomes), default=0)
        exactly = [0] * (longest + 1)
        for outcome, count in self.outcomes.items():
            exactly[outcome[part]] += count
        return np.cumsum(exactly[:0:-1])[::-1].tolist()

    @property
    def acceptance_by_position(self) -> list[float]:
        """For i = 1, 2, ...: steps with at least i accepted / ALL steps. Adds up to accepted per step."""
        return [count / self.steps for count in self.accepted_at_least]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """For i = 1, 2, ...: steps with at least i accepted / steps that drafted at least i."""
        return [a / d for a, d in zip(self.accepted_at_least, self.drafted_at_least, strict=True)]

    @property
    def acceptance_by_level(self) -> list[float | None]:
        """A / D of each level of a cascade."""
        return [ratio(accepted, drafted) for drafted, accepted, *_ in self.levels]


def _add_levels(levels: list[list[int]], more: Sequence[Sequence[int]]) -> None:
    for depth, counts in enumerate(more):
        if depth == len(levels):
            levels.append([0] * LEVEL_COUNTS)
        for at, count in enumerate(counts):  # older records have the first two
            levels[depth][at] += count


def drafting(samples: Iterable[Sample]) -> Drafting:
    """Counts the verification steps of finished samples: all but the first step of each.

    Accepted tokens that were trimmed away (EOS in the middle of a draft) are not counted: a = min(accepted, kept).
    """
    total = Drafting()
    for sample in samples:
        total.tokens += len(sample.token_ids) - 1
        if sample.steps:
            _, kept, drafted, accepted, wasted = zip(*sample.steps, strict=True)
            total.outcomes.update(zip(drafted[1:], map(min, accepted[1:], kept[1:]), strict=True))
            total.wasted += sum(wasted)
        for levels in sample.levels or ():
            _add_levels(total.levels, levels)
    return total


def standardized_improvement(
    samples: Sequence[Sample], level_forwards: Sequence[int], level_costs: Sequence[float]
) -> float | None:
    """SWI, "standardized walltime improvement": what plain decoding would cost / what was done, both in forwards of the
    target: sum of n / (sum of all steps, the prefill included, + sum over levels of forwards * cost).

    A count and no time: a forward is taken to cost the same however many tokens it looks at, and nothing else to cost
    anything. Source: CS Drafting, arXiv 2312.11462.

    Args:
        level_costs: of one forward of each level, in forwards of the target; 0 for a statistical level.
    """
    spent = sum(len(sample.steps) for sample in samples)
    spent += sum(forwards * cost for forwards, cost in zip(level_forwards, level_costs, strict=True))
    return ratio(sum(map(emitted, samples)), spent)


# --- the trace pass: where the time of a step goes -------------------------------------------------------------------


@dataclass
class TimeSplit:
    """Where decode time went, from traced samples. Sums in nanoseconds that can be added.

    decode = verify + draft + draft prefill + rest - overlap. Devices are synchronised around every traced forward, so
    a traced sample is slower than a measured one: use the shares and the times per step, never this as a speed.

    Attributes:
        steps: verification steps after the prefill.
        decode_ns: from the first to the last token.
        verify_ns: forwards of the target in that time.
        draft_ns: forwards of every other role, without their prefill.
        draft_prefill_ns: forwards with which the other roles read the prompt, whether before or after the first token.
        rest_ns: decode time in which no model ran: lookup, sampling, copies, Python.
        overlap_ns: time in which two models ran at once.
        target_prefill_ns: forwards of the target up to the first token.
        verify_forwards, draft_forwards: how many there were.
        by_role_ns: the sum of all forwards of a role, prefill included.
    """

    steps: int = 0
    decode_ns: int = 0
    verify_ns: int = 0
    draft_ns: int = 0
    draft_prefill_ns: int = 0
    rest_ns: int = 0
    overlap_ns: int = 0
    target_prefill_ns: int = 0
    verify_forwards: int = 0
    draft_forwards: int = 0
    by_role_ns: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: TimeSplit) -> TimeSplit:
        roles = {*self.by_role_ns, *other.by_role_ns}
        sums: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in vars(self) if name != "by_role_ns"
        }
        by_role = {role: self.by_role_ns.get(role, 0) + other.by_role_ns.get(role, 0) for role in sorted(roles)}
        return TimeSplit(**sums, by_role_ns=by_role)

    @property
    def verify_ns_per_step(self) -> float | None:
        """Target forwards / S."""
        return ratio(self.verify_ns, self.steps)

    @property
    def draft_ns_per_step(self) -> float | None:
        """Draft forwards without their prefill / S."""
        return ratio(self.draft_ns, self.steps)

    @property
    def rest_ns_per_step(self) -> float | None:
        """Time in which no model ran / S."""
        return ratio(self.rest_ns, self.steps)

    @property
    def draft_share(self) -> float | None:
        """Draft forwards without their prefill / decode time. May stand beside a verify share of 1: they overlap."""
        return ratio(self.draft_ns, self.decode_ns)

    @property
    def verify_share(self) -> float | None:
        """Target forwards / decode time."""
        return ratio(self.verify_ns, self.decode_ns)

    @property
    def rest_share(self) -> float | None:
        """Time in which no model ran / decode time."""
        return ratio(self.rest_ns, self.decode_ns)


def time_split(samples: Iterable[Sample]) -> TimeSplit | None:
    """The split of decode time of traced samples; None where nothing was traced.

    Rows of a batch share their forwards, so each call counts once: its decode time runs from the first first token to
    the last last one, its steps are those of its longest row. Traced calls have no more requests than rows, so that no
    prompt is read in between.
    """
    total = None
    for rows in calls(samples):
        forwards = next((row.forwards for row in rows if row.forwards), None)
        if forwards:
            split = _split_of_call(rows, forwards)
            total = split if total is None else total + split
    return total


def _split_of_call(rows: Sequence[Sample], forwards: dict[str, list[list[int]]]) -> TimeSplit:
    first, last = min(map(ttft_ns, rows)), max(map(e2e_ns, rows))
    split = TimeSplit(steps=max(len(row.steps) - 1 for row in rows), decode_ns=last - first)
    busy: list[tuple[int, int]] = []
    for role, passes in forwards.items():
        split.by_role_ns[role] = sum(end - start for start, end, *_ in passes)
        prefills = 0 if role == "target" else prompt_forwards(passes, [row.prompt_tokens for row in rows])
        for number, (start, end, *_) in enumerate(passes):
            if role == "target":
                if start < first:  # a forward begun before the first token came is what made that token
                    split.target_prefill_ns += end - start
                    continue
                split.verify_ns += end - start
                split.verify_forwards += 1
            elif number < prefills:
                split.draft_prefill_ns += end - start
            else:
                split.draft_ns += end - start
                split.draft_forwards += 1
            busy.append((max(start, first), min(end, last)))
    covered = _union(busy)
    split.rest_ns = split.decode_ns - covered
    split.overlap_ns = sum(max(0, end - start) for start, end in busy) - covered
    return split


def prompt_forwards(passes: Sequence[Sequence[int]], prompt_tokens: Sequence[int]) -> int:
    """How many leading forwards of a draft read prompts. A prompt is read at once, so none of them has fewer tokens
    than the shortest; a drafting forward feeds one or two tokens per row. A draft that takes over what the target has
    read never reads a prompt, though it may review blocks of several tokens.

    Args:
        prompt_tokens: of each row.
    """
    seen, all_of_them, shortest = 0, sum(prompt_tokens), min(prompt_tokens, default=0)
    for number, (_, _, rows, new_tokens) in enumerate(passes):
        if seen >= all_of_them or new_tokens <= 2 * rows or new_tokens < shortest:
            return number
        seen += new_tokens
    return len(passes)


def _union(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            reached = start
        if end > reached:
            covered += end - reached
            reached = end
    return covered


def predicted_speedup(tokens_per_step: float | None, split: TimeSplit | None, plain: TimeSplit | None) -> float | None:
    """Predicted decode speed-up: tokens per step * time of a plain target step / (draft + verify + rest per step).

    The plain step is the baseline's, from its own trace. It explains a measured number and never replaces one; every
    output calls it predicted. Overlapping work is counted once.
    """
    if split is None or plain is None:
        return None
    busy = split.verify_ns + split.draft_ns + split.rest_ns - split.overlap_ns
    plain_step = ratio(plain.verify_ns + plain.rest_ns, plain.steps)
    step = ratio(busy, split.steps)
    return None if tokens_per_step is None or plain_step is None else ratio(tokens_per_step * plain_step, step)


# --- what an arm ran on ----------------------------------------------------------------------------------------------


def devices(arm: dict[str, Any]) -> list[str]:
    """The distinct devices of an arm's roles, the target's first, of a target over several ranks all of them. Two core
    sets of one CPU are two devices."""
    return list(dict.fromkeys(device for role in _roles(arm) for device in _devices_of(role)))


def threads(arm: dict[str, Any]) -> int | None:
    """CPU threads of an arm: roles on one device take turns (the most of them), devices work at once (the sum)."""
    by_device: dict[str, int] = {}
    for role in _roles(arm):
        for device in _devices_of(role) if role.get("threads") else ():
            by_device[device] = max(by_device.get(device, 0), int(role["threads"]))
    return sum(by_device.values()) or None


def _devices_of(role: dict[str, Any]) -> list[str]:
    return [str(device) for device in role.get("devices") or filter(None, [role.get("device")])]


def _roles(arm: dict[str, Any]) -> list[dict[str, Any]]:
    roles = arm.get("roles") or {}
    return [roles[name] for name in sorted(roles, key=lambda name: name != "target")]
