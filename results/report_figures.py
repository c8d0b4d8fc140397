"""The charts of a report, from the records of a run: what is drawn, its words for who does not see it, its table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from . import metrics, plots, served, statistics
from .metrics import prompt_forwards
from .plots import BarGroup, BarRow, Curve, Lane, Panel, Plot, Spread, Stack, Track
from .records import Sample
from .report_runs import Grid, Run, count
from .summary import ALL_TASKS
from .tables import digits, interval

MOST_ARMS = 12  # in a chart of one task
MOST_FORWARDS = 400  # of an arm in the files of a timeline
MOST_STEPS = 8  # of the slowest arm in the close-up of a timeline
PLACES = 20  # parts that the output positions are put into


@dataclass(frozen=True)
class Figure:
    """A chart with the table that it was drawn from."""

    plot: Plot
    grid: Grid | None
    key: tuple[tuple[str, str], ...] = ()  # colour -> what it stands for, where the chart itself does not say
    prefix: str = ""

    @cached_property
    def wide(self) -> str:
        return plots.inline_svg(self.plot, plots.WIDE, f"{self.prefix}{self.plot.name}-w")

    @cached_property
    def narrow(self) -> str:
        return plots.inline_svg(self.plot, plots.NARROW, f"{self.prefix}{self.plot.name}-n")


def alt(lead: str, parts: Iterable[str]) -> str:
    return f"{lead} {'; '.join(parts)}."


def bar_rows(run: Run, task: str) -> list[BarRow]:
    rows = [row for row in run.rows(task) if not row.baseline][:MOST_ARMS]
    return [
        BarRow(row.arm if row.lossless else f"{row.arm} (lossy)", run.colour(row.arm), row.decode_speedup,
               row.e2e_speedup, row.predicted_decode_speedup)
        for row in rows
    ]  # fmt: skip


def task_title(run: Run, task: str) -> str:
    return f"{task}, {count(max(row.prompts for row in run.rows(task)), 'prompt')}"


SPEEDUP_COLUMNS = ("value", "low", "high", "verdict", "geometric_mean", "prompts", "pairs", "per_token")


def _speedup_grid(run: Run, name: str) -> Grid:
    columns = ["task", "arm"]
    columns += [f"{which}_{part}" for which in ("decode", "e2e") for part in SPEEDUP_COLUMNS]
    rows = []
    for row in run.summary.rows:
        if not row.baseline:
            parts = [getattr(one, part, None) for one in (row.decode_speedup, row.e2e_speedup)
                     for part in SPEEDUP_COLUMNS]  # fmt: skip
            rows.append([row.task, row.arm, *parts])
    return Grid(name, columns, rows)


def speedups(run: Run, tasks: Sequence[str]) -> Figure | None:
    """Speed-up bars with intervals, by task."""
    shown = [run.scope, *tasks] if run.scope == ALL_TASKS else tasks
    groups = [BarGroup(task_title(run, task), rows) for task in shown if (rows := bar_rows(run, task))]
    baseline = run.summary.baseline
    if baseline is None or not groups:
        return None
    words = [
        f"{group.title}: {row.label} decode {interval(row.decode)}, end to end {interval(row.e2e)}"
        for group in groups
        for row in group.rows
    ]
    plot = Plot(
        "speedup",
        "Speed-up by task",
        f"Times as fast as {baseline} on the same prompts, with 95 % intervals (none below {statistics.LEAST_PROMPTS} "
        "prompts). An interval across the dashed line shows no difference.",
        alt("Bars of speed-ups.", words),
        lambda width, heading: plots.speedup_bars(groups, baseline, width, heading),
    )
    return Figure(plot, _speedup_grid(run, f"{run.prefix}speedup"), prefix=run.prefix)


def predicted(run: Run, tasks: Sequence[str]) -> Figure | None:
    """Predicted against measured speed-ups; None where nothing was traced."""
    groups = []
    for task in tasks:
        rows = [row for row in bar_rows(run, task) if row.predicted is not None]
        groups += [BarGroup(task_title(run, task), rows)] if rows else []
    if not groups:
        return None
    words = [
        f"{group.title}: {row.label} predicted {digits(row.predicted, 'x')}, measured {interval(row.decode)}"
        for group in groups
        for row in group.rows
    ]
    plot = Plot(
        "predicted",
        "Predicted against measured",
        "Predicted: tokens per step times a plain step, over draft, verify and other time per step, from the traced "
        "pass. It explains a measured number and never stands in for one. Far apart means that something costs time "
        "outside the traced forwards, or that the traced prompts are not like the rest.",
        alt("Predicted and measured decode speed-ups.", words),
        lambda width, heading: plots.predicted_dots(groups, width, heading),
    )
    values = [
        [row.task, row.arm, row.predicted_decode_speedup,
         *(getattr(row.decode_speedup, part, None) for part in ("value", "low", "high"))]
        for row in run.summary.rows if row.predicted_decode_speedup is not None
    ]  # fmt: skip
    columns = ["task", "arm", "predicted_decode_speedup", "measured_decode_speedup", "low", "high"]
    return Figure(plot, Grid(f"{run.prefix}predicted", columns, values), prefix=run.prefix)


def overview(runs: Sequence[Run]) -> Figure | None:
    """The speed-ups of several runs in one chart, each against its own baseline."""
    groups = [BarGroup(f"{run.name}: {task_title(run, run.scope)}", rows) for run in runs
              if run.summary.baseline and (rows := bar_rows(run, run.scope))]  # fmt: skip
    if not groups:
        return None
    values = [
        [run.name, row.task, row.arm, *(getattr(row.decode_speedup, part, None) for part in SPEEDUP_COLUMNS)]
        for run in runs for row in run.rows(run.scope) if not row.baseline
    ]  # fmt: skip
    words = [f"{group.title}: {row.label} {interval(row.decode)}" for group in groups for row in group.rows]
    plot = Plot(
        "overview", "Speed-up by run",
        "Every speed-up refers to the baseline of its own run, measured in turns with it. Speeds of two runs are not "
        "divided by each other here; `specbench compare` does that, over the prompts that they share.",
        alt("Bars of speed-ups.", words),
        lambda width, heading: plots.speedup_bars(groups, "each run's own baseline", width, heading),
    )  # fmt: skip
    return Figure(plot, Grid("overview", ["run", "task", "arm", *SPEEDUP_COLUMNS], values))


def latency(run: Run, task: str) -> list[Figure]:
    """TTFT and TPOT of every sample of a task."""
    figures = []
    for name, what, caption, value in (
        ("ttft", "Time to first token", "Prefill, up to the first token on the host; tokenisation is outside.",
         metrics.ttft_ns),
        ("tpot", "Time per output token", "Decode time over (n - 1), one value per answer.", metrics.tpot_ns),
    ):  # fmt: skip
        rows = []
        for row in run.rows(task)[:MOST_ARMS]:
            found = [ns / 1e6 for one in run.measured(task, row.arm) if (ns := value(one)) is not None]
            if found:
                rows.append(Spread(row.arm, run.colour(row.arm), np.asarray(found)))
        if rows:
            figures.append(_distribution(run, task, f"{name}-{run.slug(task)}", what, caption, rows))
    return figures


def _distribution(run: Run, task: str, name: str, what: str, caption: str, rows: list[Spread]) -> Figure:
    columns = ["arm", "n", "min", "p25", "p50", "p75", "p90", "p99", "max"]
    values = [
        [one.label, len(one.values), float(one.values.min()),
         *(metrics.percentile(one.values.tolist(), part) for part in (25, 50, 75, 90, 99)), float(one.values.max())]
        for one in rows
    ]  # fmt: skip
    words = [f"{row[0]} median {digits(row[4])} ms, middle half {digits(row[3])} to {digits(row[5])}" for row in values]
    sampled = any(len(one.values) > plots.MOST_DOTS for one in rows)
    dots = f"{plots.MOST_DOTS} of the samples, evenly by rank, as dots" if sampled else "A dot per sample"
    plot = Plot(
        name,
        f"{what}, {task}",
        f"{caption} {dots}; the box is the middle half, the line the median.",
        alt(f"{what} in ms.", words),
        lambda width, heading: plots.distributions(rows, "ms", width, heading),
    )
    columns = [column if column in ("arm", "n") else f"{column}_ms" for column in columns]
    return Figure(plot, Grid(f"{run.prefix}{name}", columns, values), prefix=run.prefix)


def acceptance(run: Run, task: str) -> Figure | None:
    """Acceptance by position of the draft; None where nothing was drafted."""
    of_all, conditional, values = [], [], []
    for row in run.rows(task)[:MOST_ARMS]:
        if row.acceptance_by_position:
            places = range(1, len(row.acceptance_by_position) + 1)
            colour = run.colour(row.arm)
            of_all.append(Curve(row.arm, colour, list(places), row.acceptance_by_position))
            conditional.append(Curve(row.arm, colour, list(places), row.conditional_acceptance_by_position))
            parts = zip(places, row.acceptance_by_position, row.conditional_acceptance_by_position, strict=True)
            values += [[row.arm, *part] for part in parts]
    if not of_all:
        return None
    panels = [
        Panel("share of all steps", "position in the draft", of_all, share=True, whole=True),
        Panel("share of drafts that long", "position in the draft", conditional, share=True, whole=True),
    ]
    words = [f"{curve.label} {' '.join(f'{share:.2f}' for share in curve.y[:8])}" for curve in of_all]
    name = f"acceptance-{run.slug(task)}"
    plot = Plot(
        name,
        f"Acceptance by position, {task}",
        "Steps in which at least so many draft tokens were accepted: as a share of all steps, where the points add up "
        "to the accepted tokens per step, and as a share of the steps that drafted at least so many.",
        alt("Share of all steps with at least 1, 2, 3, ... accepted tokens.", words),
        lambda width, heading: plots.curves(panels, width, heading),
    )
    columns = ["arm", "position", "share_of_all_steps", "share_of_drafts_that_long"]
    return Figure(plot, Grid(f"{run.prefix}{name}", columns, values), prefix=run.prefix)


@dataclass(frozen=True)
class Place:
    """Steps that began in one part of the output positions.

    Attributes:
        first, last: positions, counted from 1 for the token of the prefill.
        tokens_per_step: tokens kept / steps.
        low, high: 95 % interval over prompts (linearised ratio); None for fewer than five.
    """

    first: int
    last: int
    prompts: int
    steps: int
    tokens_per_step: float
    low: float | None
    high: float | None


def tokens_by_place(samples: Sequence[Sample], width: int) -> list[Place]:
    """Tokens per step over the output position at which a step began, in parts `width` positions long.

    Sums over sums, as everywhere. Parts that fewer than five prompts reach (or all, where there are fewer) are left
    out: what would be seen there is a single answer.
    """
    numbers: dict[str, int] = {}
    owners: list[int] = []
    starts: list[int] = []
    kept: list[int] = []
    for sample in samples:
        if len(sample.steps) < 2:
            continue
        tokens = [step[metrics.KEPT] for step in sample.steps]
        starts += list(accumulate(tokens))[:-1]
        kept += tokens[1:]
        owners += [numbers.setdefault(sample.prompt_id, len(numbers))] * (len(tokens) - 1)
    if not kept:
        return []
    place = np.asarray(starts) // width
    cell = np.asarray(owners) * (int(place.max()) + 1) + place
    shape = (len(numbers), int(place.max()) + 1)
    steps = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(float)
    tokens = np.bincount(cell, weights=kept, minlength=shape[0] * shape[1]).reshape(shape)
    least = min(statistics.LEAST_PROMPTS, len(numbers))
    found = []
    for at in range(shape[1]):
        there = steps[:, at] > 0
        prompts = int(there.sum())
        if prompts < least:
            continue
        s, t = steps[there, at], tokens[there, at]
        value, low, high = float(t.sum() / s.sum()), None, None
        if prompts >= statistics.LEAST_PROMPTS:
            error = math.sqrt(prompts / (prompts - 1) * float(((t - value * s) ** 2).sum())) / float(s.sum())
            error *= statistics.student_quantile(0.975, prompts - 1)
            low, high = value - error, value + error
        first = at * width + 1
        found.append(Place(first, first + width - 1, prompts, int(s.sum()), value, low, high))
    return found


def over_output(run: Run, task: str) -> Figure | None:
    """Tokens per step over the output position; a server tells of no steps."""
    arms = [row.arm for row in run.rows(task)[:MOST_ARMS] if not served.is_served(run.arm(row.arm))]
    longest = max((len(one.token_ids) for arm in arms for one in run.measured(task, arm)), default=0)
    width = max(1, math.ceil(longest / PLACES))
    series, values, words = [], [], []
    for arm in arms:
        places = tokens_by_place(run.measured(task, arm), width)
        if not places:
            continue
        middle = [(place.first + place.last) / 2 for place in places]
        banded = all(place.low is not None for place in places)
        low = [max(0.0, place.low or 0.0) for place in places] if banded else []
        high = [place.high or 0.0 for place in places] if banded else []
        mean = [place.tokens_per_step for place in places]
        series.append(Curve(arm, run.colour(arm), middle, mean, low, high))
        values += [[arm, *vars(place).values()] for place in places]
        words.append(f"{arm} from {digits(mean[0])} at the start to {digits(mean[-1])} at the end")
    if not series:
        return None
    name = f"tokens-per-step-{run.slug(task)}"
    panels = [Panel("tokens per step", "output position at which the step began", series)]
    plot = Plot(
        name,
        f"Tokens per step over the output, {task}",
        "Tokens kept over steps, for the steps that began there; plain decoding is 1. The band is the 95 % interval "
        f"over prompts. Places that fewer than {statistics.LEAST_PROMPTS} prompts reach are left out; near the token "
        "limit drafts are cut short.",
        alt("Tokens per step along the output.", words),
        lambda width, heading: plots.curves(panels, width, heading),
    )
    columns = ["arm", "first_position", "last_position", "prompts", "steps", "tokens_per_step", "low", "high"]
    return Figure(plot, Grid(f"{run.prefix}{name}", columns, values), prefix=run.prefix)


def step_split(run: Run, task: str) -> Figure | None:
    """The mean step of each arm, from the traced pass."""
    rows = [row for row in run.rows(task)[:MOST_ARMS] if row.trace and row.trace["steps"]]
    if not rows:
        return None
    stacks, values, words = [], [], []
    columns = ["arm", "steps", "draft_ms_per_step", "verify_ms_per_step", "other_ms_per_step", "overlap_ms_per_step",
               "draft_share", "verify_share", "other_share", "tokens_per_step", "cost_ratio"]  # fmt: skip
    for row in rows:
        trace = row.trace or {}
        parts = {kind: (trace[f"{kind}_ns_per_step"] or 0) / 1e6 for kind in ("draft", "verify", "rest")}
        overlap = trace["overlap_ns"] / trace["steps"] / 1e6
        note = f"{digits(sum(parts.values()) - overlap)} ms for {digits(row.tokens_per_step)} tokens"
        note += f", {digits(overlap)} ms at once" if overlap > 0 else ""
        stacks.append(Stack(row.arm, note, parts))
        shares = [trace[f"{kind}_share"] for kind in ("draft", "verify", "rest")]
        values.append([row.arm, trace["steps"], *parts.values(), overlap, *shares, row.tokens_per_step,
                       trace["cost_ratio"]])  # fmt: skip
        spelled = ", ".join(digits(part) for part in parts.values())
        words.append(f"{row.arm}: draft, verify and other {spelled} ms; {note}")
    name = f"step-{run.slug(task)}"
    plot = Plot(
        name,
        f"Where the time of a step goes, {task}",
        "Mean time per verification step from the traced pass, in which devices are synchronised around every "
        "forward: slower than a measured run, and in no speed. Where models ran at once, the parts add up to more than "
        "the step.",
        alt("Mean time per step.", words),
        lambda width, heading: plots.step_stacks(stacks, width, heading),
    )
    return Figure(
        plot, Grid(f"{run.prefix}{name}", columns, values), key=tuple(plots.STEP_KEY.items()), prefix=run.prefix
    )


def traced_prompt(run: Run, task: str) -> list[Sample]:
    """The traced calls of one prompt, the first that most arms have, by arm."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for row in run.rows(task)[:MOST_ARMS]:
        for sample in run.traced(task, row.arm):
            ours = found.setdefault((sample.prompt_id, sample.turn), [])
            if all(other.arm != sample.arm for other in ours):
                ours.append(sample)
    return max(found.values(), key=len, default=[])


def timelines(run: Run, task: str) -> list[Figure]:
    """One traced prompt, every model of every arm on one time axis; and its first steps from nearby."""
    samples = traced_prompt(run, task)
    if not samples:
        return []
    tracks = [_track(run, sample) for sample in samples]
    values = [row for sample in samples for row in _forward_rows(sample)[:MOST_FORWARDS]]
    columns = ["arm", "role", "kind", "start_ms", "end_ms", "rows", "new_tokens"]
    name, prompt = f"timeline-{run.slug(task)}", samples[0].prompt_id
    words = [f"{track.label} {track.note}" for track in tracks]
    plot = Plot(
        name,
        f"Timeline of one prompt, {task}: {prompt}",
        "One traced call per arm, all on one time axis: lanes that are filled above each other ran at once. Strokes "
        "are steps, as high as the tokens they brought. Traced forwards are synchronised, so everything is slower here "
        "than when it was measured, and work that would overlap on one device may not.",
        alt("What ran when.", words),
        lambda width, heading: plots.timeline(tracks, width, heading),
    )
    seen = {kind for track in tracks for lane in track.lanes for kind in lane.spans}
    key = tuple((kind, meaning) for kind, meaning in plots.TIME_KEY.items() if kind in seen)
    figures = [Figure(plot, Grid(f"{run.prefix}{name}", columns, values), key=key, prefix=run.prefix)]
    until = max(sample.steps[min(MOST_STEPS, len(sample.steps) - 1)][metrics.NS] for sample in samples) / 1e6
    if until < 0.8 * max(track.end_ms for track in tracks):
        near = Plot(
            f"{name}-start",
            f"The first {MOST_STEPS} steps from nearby, {task}: {prompt}",
            f"Up to the end of step {MOST_STEPS} of the slowest arm.",
            alt("The start of the timeline.", words),
            lambda width, heading: plots.timeline(tracks, width, heading, until),
        )
        figures.append(Figure(near, None, key=key, prefix=run.prefix))
    return figures


def _kinds(sample: Sample) -> dict[str, list[tuple[str, list[int]]]]:
    """Every forward of a traced sample with its kind, by role, the target first."""
    forwards, first = sample.forwards or {}, metrics.ttft_ns(sample)
    found = {}
    for role in sorted(forwards, key=lambda role: role != "target"):
        passes = forwards[role]
        prompt = 0 if role == "target" else prompt_forwards(passes, [sample.prompt_tokens] * sample.batch_rows)
        what = "verify" if role == "target" else "draft"
        found[role] = [
            (f"{what}-prefill" if (one[0] < first if role == "target" else number < prompt) else what, one)
            for number, one in enumerate(passes)
        ]
    return found


def _forward_rows(sample: Sample) -> list[list[Any]]:
    rows = [
        [sample.arm, role, kind, start / 1e6, end / 1e6, rows, tokens]
        for role, passes in _kinds(sample).items()
        for kind, (start, end, rows, tokens) in passes
    ]
    return sorted(rows, key=lambda row: row[3])


def _track(run: Run, sample: Sample) -> Track:
    roles, lanes, busy = run.arm(sample.arm).get("roles") or {}, [], []
    for role, passes in _kinds(sample).items():
        spans: dict[str, list[tuple[float, float]]] = {}
        for kind, (start, end, *_) in passes:
            spans.setdefault(kind, []).append((start / 1e6, end / 1e6))
            busy.append((start / 1e6, end / 1e6))
        device = str((roles.get(role) or {}).get("device") or "")
        lanes.append(Lane(role, device, spans))
    end = metrics.e2e_ns(sample) / 1e6
    lanes.append(Lane("idle", "", {"rest": _gaps(busy, end)}))
    split = metrics.time_split([sample])
    note = f"{digits(end)} ms, {len(sample.token_ids)} tokens"
    if split and split.overlap_ns > 0 and split.decode_ns:
        note += f", {statistics.percent(split.overlap_ns / split.decode_ns)} at once"
    tokens = [(step[metrics.NS] / 1e6, step[metrics.KEPT]) for step in sample.steps]
    return Track(sample.arm, note, lanes, tokens, end)


def _gaps(busy: Iterable[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """The time from 0 to `end` in which nothing ran."""
    gaps, reached = [], 0.0
    for start, stop in sorted(busy):
        if start > reached:
            gaps.append((reached, min(start, end)))
        reached = max(reached, stop)
    return [*gaps, (reached, end)] if reached < end else gaps
