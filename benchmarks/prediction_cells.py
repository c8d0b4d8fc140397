"""Cells of `prediction.py`, a strategy on a task each: those of other benchmarks, what all add up to, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.results.plots import COLOURS
from specbench.results.records import BASELINE

OTHERS = ("two-devices", "sparse-kv")
TWO_DEVICES = ("async", "duo")

Cell = dict[str, Any]  # task, arm, predicted, speedup


def also(paths: str) -> list[Cell]:
    """The cells of documents of other benchmarks. Ends the program where one is none."""
    found: list[Cell] = []
    for name in filter(None, paths.split(",")):
        try:
            document = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SystemExit(f"--also {name}: cannot be read as JSON ({error})") from None
        kind = document.get("benchmark") if isinstance(document, dict) else None
        if kind not in OTHERS:
            raise SystemExit(f"--also {name}: not a document of {' or '.join(OTHERS)}, but of {kind}")
        found += _two_devices(document) if kind == "two-devices" else _sparse(document)
    return found


def _two_devices(document: Mapping[str, Any]) -> Iterator[Cell]:
    """Over plain decoding on the target's own device, as a run with `--place` has it."""
    for task, found in document["tasks"].items():
        plain = found["arms"][BASELINE]["decode_tokens_per_s"]
        for arm, entry in found.get("model", {}).get("simulated", {}).items():
            if arm in TWO_DEVICES:
                yield {
                    "task": task,
                    "arm": arm,
                    "predicted": entry["predicted_tokens_per_s"] / plain,
                    "speedup": entry["measured_tokens_per_s"] / plain,
                }


def _sparse(document: Mapping[str, Any]) -> Iterator[Cell]:
    for cell in document["cells"]:
        for arm, entry in cell["arms"].items():
            if "predicted_speedup" in entry:
                task = f"{cell['context']} tokens, {cell['batch']} row(s)"
                predicted, speedup = entry["predicted_speedup"], entry["speedup"]
                yield {"task": task, "arm": arm, "predicted": predicted, "speedup": speedup}


def cells_of(document: Mapping[str, Any]) -> list[Cell]:
    """All cells with a prediction."""
    own = [
        {"task": task, "arm": name, "predicted": entry["predicted"], "speedup": entry["speedup"]}
        for task, found in document["tasks"].items()
        for name, entry in found["arms"].items()
        if entry.get("predicted")
    ]
    return own + document["also"]


def summary(cells: Sequence[Cell], tasks: Mapping[str, Any], within: float) -> dict[str, Any]:
    """How many predictions are right, which one is furthest off, and how `auto` did."""
    ratios = [cell["predicted"] / cell["speedup"] for cell in cells]
    far = max(range(len(cells)), key=lambda at: abs(np.log(ratios[at])), default=None)
    arms = [arm for found in tasks.values() for arm in found["arms"].values()]
    halves = [ratio for arm in arms for ratio in arm.get("from_other_half", ())]
    by_strategy: dict[str, list[float]] = {}
    for cell, ratio in zip(cells, ratios, strict=True):
        by_strategy.setdefault(cell["arm"].split()[0], []).append(ratio)
    return {
        "cells": len(cells),
        "within": within,
        "share_within": _share(ratios, within),
        "share_within_by_strategy": {name: _share(found, within) for name, found in by_strategy.items()},
        "share_within_from_other_half": _share(halves, within),
        "furthest": None if far is None else {**cells[far], "predicted_over_measured": ratios[far]},
        "auto_worst_over_best_single": min(found["auto"]["over_best_single"] for found in tasks.values()),
        "auto_worst_over_plain": min(found["arms"]["auto"]["speedup"] for found in tasks.values()),
        "auto_calibration_ms": max(found["auto"]["calibration_ms"] for found in tasks.values()),
        "exact": all(arm["exact"] == arm["outputs"] for arm in arms),
    }  # fmt: skip


def _share(ratios: Sequence[float], within: float) -> float | None:
    return sum(abs(ratio - 1) <= within for ratio in ratios) / len(ratios) if ratios else None


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Measured over predicted, a colour per strategy, on logarithmic axes with the band of `within`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    groups: dict[str, list[tuple[float, float]]] = {}
    for cell in cells_of(document):
        groups.setdefault(cell["arm"].split()[0], []).append((cell["predicted"], cell["speedup"]))
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
        axes.plot(
            x, y, "osD^vPX"[number % 7], color=COLOURS[f"arm{number % 7}"], markersize=6, linestyle="", label=name
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="predicted decode speed-up", ylabel="measured decode speed-up")
    ticks = [tick for tick in (0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12) if low <= tick <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=COLOURS["line"], linewidth=0.6, alpha=0.6)
    axes.legend(frameon=False, loc="upper left")
    models = f"{Path(document['target']).name}, draft {Path(document['draft']).name}, {document['dtype']}"
    axes.set_title(f"{models}\n{document['cpu']}, {document['threads']} threads", fontsize=10, loc="left")
    figure.savefig(path)
