"""Predicted against measured: how well cost curves and acceptance explain the decode speed-up of every strategy.

    python benchmarks/prediction.py --target MODEL --draft MODEL[,MODEL] [--dtype bfloat16] [--threads 2]
        [--tasks humaneval=8,spec-bench:math_reasoning=8,...] [--task-option spec-bench.path=FILE]
        [--lengths 2,4,6] [--max-new-tokens 64] [--plot FILE.png] [--json] [--out FILE]

Arms are interleaved prompt by prompt on one set of loaded models: plain decoding, `speculative` once per length,
`lookup`, `cascade`, and `auto`. The cost curves are measured before the first task and after each, and the median of
these counts, so that a machine that changes its speed changes both sides. Predicted is what
`results.prediction.replay` makes of the steps that were counted: the same function that fills the column
"predicted by profile" of a run's table.

A cell is a strategy on a task. The summary tells the share of cells whose prediction is within `--within` of what was
measured, and how `auto` compares with the best single strategy and with plain decoding on each task. What `auto`
spends on trying is measured: the time of its first rounds on a prompt less what plain decoding takes for their tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import Arm, load_models, measure_task, parser_of, prepared_tasks

from specbench.hardware import devices
from specbench.hardware.environment import environment
from specbench.models.base import CachedModel
from specbench.models.cost_curve import CostCurve
from specbench.models.remote import cost_of
from specbench.options import build
from specbench.results import metrics, statistics
from specbench.results.forecasts import asked, level_roles
from specbench.results.plots import COLOURS, require_matplotlib
from specbench.results.prediction import Prices, Work, replay
from specbench.results.records import Sample
from specbench.strategies import registry

BASELINE, AUTO = "autoregressive", "auto"
COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 17)
CONTEXTS = (64, 384)
PROMPT = 128


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--within", type=float, default=0.1, help="what counts as right (default: 0.1)")
    parser.add_argument("--plot", type=Path, help="a scatter plot, as PNG or SVG")
    return parser.parse_args(argv)


def make_arms(models: dict[str, CachedModel], lengths: Sequence[int]) -> list[Arm]:
    def arm(name: str, strategy: str, **options: Any) -> Arm:
        kind = registry.get(strategy)
        roles = [role for role in (*kind.roles, *kind.optional_roles) if role in models]
        return Arm(name, kind({role: models[role] for role in roles}, build(kind.Options, options, strategy)))

    drafted = [arm(f"speculative {length}", "speculative", draft_length=length) for length in lengths]
    return [arm(BASELINE, BASELINE), *drafted, arm("lookup", "lookup"), arm("cascade", "cascade"), arm(AUTO, AUTO)]


class Curves:
    """Cost curves that are measured again and again."""

    def __init__(self, models: dict[str, CachedModel], needed: int) -> None:
        self.models, self.rounds, self.reading = models, [], []
        longest = min(model.context_length for model in models.values())
        self.contexts = tuple(sorted({min(at, longest - COUNTS[-1], max(needed, CONTEXTS[0])) for at in CONTEXTS}))
        self.prompt = min(PROMPT, longest - 1)

    def measure(self) -> None:
        grid: dict[str, Any] = dict(new_tokens=COUNTS, context=self.contexts, repeats=3)
        self.rounds.append({role: cost_of(model, **grid) for role, model in self.models.items()})
        once: dict[str, Any] = dict(new_tokens=(self.prompt,), context=1, repeats=1)
        drafts = {role: model for role, model in self.models.items() if role != "target"}
        self.reading.append({role: cost_of(model, **once).ms(self.prompt) for role, model in drafts.items()})

    def prices(self) -> Prices:
        """The medians."""
        curves = {}
        for role, first in self.rounds[0].items():
            values = np.median([found[role].median_ms for found in self.rounds], axis=0)
            curves[role] = CostCurve(first.new_tokens, first.contexts, first.rows, values)
        reading = {role: float(np.median([found[role] for found in self.reading])) for role in self.reading[0]}
        return Prices(curves, {role: ms / self.prompt for role, ms in reading.items()})


def predicted(arm: Arm, samples: Sequence[Sample], prices: Prices) -> float | None:
    """Decode speed-up over plain decoding, from the counted steps and the curves."""
    drafting = metrics.drafting(samples)
    facts = {"roles": dict.fromkeys(arm.strategy.models), "options": {}}
    roles = level_roles(facts, len(drafting.levels))
    assert roles is not None  # no arm names its levels
    ran = asked((sample.levels for sample in samples), len(samples), arm.strategy.name)
    length = sum(sample.prompt_tokens for sample in samples) / len(samples)
    found = replay(arm.strategy.name, Work(drafting, len(samples), ran, length, roles), prices)
    return found[0] / found[1] if found else None


def report_task(task: str, arms: Sequence[Arm], prices: Prices) -> dict[str, Any]:
    base = arms[0].samples[task]
    tokens = {(sample.prompt_id, sample.repeat): sample.token_ids for sample in base}
    found: dict[str, Any] = {"prompts": len({sample.prompt_id for sample in base}), "arms": {}}
    for arm in arms:
        ours = arm.samples[task]
        drafting = metrics.drafting(ours)
        entry: dict[str, Any] = {
            "decode_tokens_per_s": metrics.decode_tokens_per_s(ours),
            "tokens_per_step": drafting.tokens_per_step,
            "acceptance_rate": drafting.acceptance_rate,
            "exact": sum(sample.token_ids == tokens[sample.prompt_id, sample.repeat] for sample in ours),
            "outputs": len(ours),
            "speedup": 1.0,
        }
        if arm is not arms[0]:
            speedup = statistics.decode_speedup(statistics.pair(base, ours).pairs, per_token=True)
            assert speedup is not None
            entry |= {"speedup": speedup.value, "low": speedup.low, "high": speedup.high}
            entry["predicted"] = predicted(arm, ours, prices)
            if entry["predicted"] is not None:
                entry["predicted_over_measured"] = entry["predicted"] / speedup.value
        found["arms"][arm.name] = entry
    speeds = {name: entry["speedup"] for name, entry in found["arms"].items() if name != AUTO}
    found["best_single"] = max(speeds, key=lambda name: speeds[name])
    found["auto"] = choosing(next(arm for arm in arms if arm.name == AUTO).samples[task], base)
    found["auto"]["over_best_single"] = found["arms"][AUTO]["speedup"] / speeds[found["best_single"]]
    return found


def choosing(samples: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """What `auto` chose, and the share of its decode time that its first rounds on a prompt lost against plain
    decoding, by the clock."""
    plain_ns = metrics.pooled_tpot_ns(base) or 0.0
    chosen: dict[str, int] = {}
    lost = 0.0
    for sample in samples:
        facts = sample.facts or {}
        chosen[facts.get("choice", "?")] = chosen.get(facts.get("choice", "?"), 0) + 1
        steps = sample.steps[: 1 + facts.get("trial_rounds", 0)]
        lost += steps[-1][metrics.NS] - steps[0][metrics.NS]
        lost -= plain_ns * sum(step[metrics.KEPT] for step in steps[1:])
    decode_ns = metrics.total_decode_ns(samples)
    return {
        "chosen": chosen,
        "switches": sum((sample.facts or {}).get("switches", 0) for sample in samples),
        "trials_lost_share": lost / decode_ns if decode_ns else None,
        "calibration_ms": max((sample.facts or {}).get("calibration_ms", 0) for sample in samples),
    }


def summary(tasks: dict[str, Any], within: float) -> dict[str, Any]:
    cells = [
        (task, name, entry["predicted_over_measured"])
        for task, found in tasks.items()
        for name, entry in found["arms"].items()
        if "predicted_over_measured" in entry
    ]
    right = sum(abs(ratio - 1) <= within for _, _, ratio in cells)
    far = max(cells, key=lambda cell: abs(np.log(cell[2])), default=None)
    return {
        "cells": len(cells),
        "within": within,
        "share_within": right / len(cells) if cells else None,
        "furthest": far and {"task": far[0], "arm": far[1], "predicted_over_measured": far[2]},
        "auto_worst_over_best_single": min(found["auto"]["over_best_single"] for found in tasks.values()),
        "auto_worst_over_plain": min(found["arms"][AUTO]["speedup"] for found in tasks.values()),
        "exact": all(arm["exact"] == arm["outputs"] for found in tasks.values() for arm in found["arms"].values()),
    }


def draw(document: dict[str, Any], path: Path) -> None:
    """Measured over predicted, a colour per strategy, on logarithmic axes with the band of `within`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    groups: dict[str, list[tuple[float, float]]] = {}
    for found in document["tasks"].values():
        for name, entry in found["arms"].items():
            if entry.get("predicted"):
                groups.setdefault(name.partition(" ")[0], []).append((entry["predicted"], entry["speedup"]))
    values = [value for points in groups.values() for point in points for value in point]
    low, high = min([*values, 1.0]) / 1.08, max([*values, 1.0]) * 1.08
    figure = Figure(figsize=(6.4, 6.2), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    within, line = document["summary"]["within"], np.array([low, high])
    axes.fill_between(line, line / (1 + within), line * (1 + within), color=COLOURS["line"], alpha=0.4, linewidth=0,
                      label=f"within {within:.0%}")  # fmt: skip
    axes.plot(line, line, color=COLOURS["soft"], linewidth=1)
    for number, (name, points) in enumerate(groups.items(), 1):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "osD^v"[number % 5], color=COLOURS[f"arm{number % 7}"], markersize=6, label=name)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="predicted decode speed-up", ylabel="measured decode speed-up")
    ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12) if low <= tick <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=COLOURS["line"], linewidth=0.6, alpha=0.6)
    axes.legend(frameon=False, loc="upper left")
    models = f"{Path(document['target']).name}, draft {Path(document['draft']).name}, {document['dtype']}"
    axes.set_title(f"{models}\n{document['cpu']}, {document['threads']} threads", fontsize=10, loc="left")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.plot:
        require_matplotlib()
    load_before = os.getloadavg()[0]
    prepared = prepared_tasks(args, ("speculative", "lookup", "cascade"), threads=args.threads)
    placement = prepared[0].checked.placement
    devices.apply(placement)
    models = load_models(prepared)
    needed = max(one.needed_tokens for one in prepared)
    for model in models.values():
        model.reserve(1, needed)
    arms = make_arms(models, [int(length) for length in args.lengths.split(",") if length])
    for arm in arms:
        arm.strategy.prepare(1, needed)
    curves, rounds = Curves(models, needed), 0
    curves.measure()
    for one in prepared:
        rounds = measure_task(one, arms, args, rounds)
        curves.measure()
    prices = curves.prices()
    tasks = {one.plan.task[0]: report_task(one.plan.task[0], arms, prices) for one in prepared}
    document = {
        "benchmark": "prediction", "target": args.target, "draft": args.draft, "dtype": prepared[0].dtype,
        "threads": placement.threads, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
        "seed": args.seed, "repeats": args.repeats, "cpu": environment()["cpu"],
        "load_before": load_before, "load_after": os.getloadavg()[0],
        "curves": {role: curve.as_record() for role, curve in prices.curves.items()},
        "reading_ms_per_token": dict(prices.reading_ms),
        "tasks": tasks, "summary": summary(tasks, args.within),
    }  # fmt: skip
    text = json.dumps(document, indent=1, allow_nan=False)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        draw(document, args.plot)
    if args.json:
        print(text)
    else:
        show(document)
    return 0


def show(document: dict[str, Any]) -> None:
    for task, found in document["tasks"].items():
        print(f"{task}, {found['prompts']} prompts")
        for name, arm in found["arms"].items():
            told = f"predicted {arm['predicted']:5.2f}x" if arm.get("predicted") else ""
            interval = f" [{arm['low']:.2f}, {arm['high']:.2f}]" if arm.get("low") else ""
            print(f"  {name:16s} {arm['speedup']:5.2f}x{interval:15s} {told:17s} {arm['tokens_per_step']:5.2f} "
                  f"tokens/step  {arm['exact']}/{arm['outputs']} exact")  # fmt: skip
        auto = found["auto"]
        print(f"  auto chose {auto['chosen']}, {auto['over_best_single']:.3f} of {found['best_single']}, trials lost "
              f"{auto['trials_lost_share'] or 0:.1%}, calibrated {auto['calibration_ms'] / 1000:.1f} s")  # fmt: skip
    for name, value in document["summary"].items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
