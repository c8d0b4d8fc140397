"""Where working at the same time pays: a map of `async` and `duo` over the cost ratio and the acceptance.

    python benchmarks/overlap_map.py [FILE.json ...] [--curve 1:1,4:1.12,8:1.3,13:1.6] [--rows 1:1,4:1.3]
        [--factors 1.1,1.1] [--hit 0.5] [--ready 2] [--mean-rows 1.5] [--cells 15] [--tokens 4000]
        [--json] [--plot FILE.png]

FILE.json is what `two_devices.py --out FILE.json` has measured: the cost curves and the contention of the first file
are those of the map, and what was measured on each task of all files stands on it as a point. Without a file the curves
are given by hand: T(n)/T(1) of the target, and the draft's forward over so many rows against one.

In every cell the draft's curve is scaled to the cost ratio, and a long text of independent acceptance is simulated
(`hardware.overlap_simulator`) under the policy that is best there (`hardware.overlap`). The gain is the speed over that
of speculative decoding in turns on the same two devices at its best draft length there, 0 (plain decoding) included.
Neither strategy's controller is in it: below 1 it takes turns, or rests the draft, and gets 1. `duo` drops its branches
where they do not pay; how many rejections it prepares for, how much is ready then, and with how many rows, is taken
from the first file if it is there.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from overlap_model import read_document

from specbench.hardware.overlap import Costs, best_policy, best_sequential, plain_rate
from specbench.hardware.overlap_simulator import Fixed, random_ranks, simulate
from specbench.results import plots
from specbench.strategies.side_by_side import from_record

LEAD, MOST = 16, 12  # as the options of both strategies have them
LEVELS = (1.0, 1.29)  # break-even, and AMUSD's mean gain over speculative decoding
RATIOS, ACCEPTANCES = (0.02, 1.0), (0.3, 0.99)
ARMS = ("async", "duo")


@dataclass(frozen=True)
class Point:
    """What was measured on one task: gain over the best speculative arm, by strategy."""

    task: str
    cost_ratio: float
    acceptance: float
    gains: dict[str, float]


@dataclass(frozen=True)
class Prepared:
    """How `duo` prepares: for which share of the rejections, with how many tokens ready, and with how many rows."""

    hit: float = 0.5
    ready: float = 2.0
    rows: float = 1.5


@dataclass(frozen=True)
class Map:
    """`gains[arm]`: (acceptances, ratios)."""

    ratios: np.ndarray
    acceptances: np.ndarray
    gains: dict[str, np.ndarray]
    prepared: Prepared


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--curve", type=_curve, help="T(n)/T(1) of the target")
    parser.add_argument("--rows", type=_curve, default={1: 1.0, 4: 1.3}, help="of the draft, with --curve")
    parser.add_argument("--factors", default="1,1", help="how much slower target and draft get, with --curve")
    parser.add_argument("--hit", type=float, help="share of rejections that duo has prepared for, else 0.5")
    parser.add_argument("--ready", type=float, help="tokens that are ready then, else 2")
    parser.add_argument("--mean-rows", type=float, help="rows of duo's draft steps, else 1.5")
    parser.add_argument("--cells", type=int, default=15, help="in each direction")
    parser.add_argument("--tokens", type=int, default=4000, help="simulated per cell")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, help="FILE.png; FILE.svg is written beside it")
    args = parser.parse_args(argv)
    if bool(args.files) == bool(args.curve):
        parser.error("give either files that two_devices.py has written, or a --curve")
    if args.cells < 2 or args.tokens < 100:
        parser.error("a map has at least 2 cells in each direction, and at least 100 tokens in each")
    if args.plot and args.plot.suffix != ".png":
        parser.error(f"--plot {args.plot}: has to end in .png")
    return args


def _curve(text: str) -> dict[int, float]:
    try:
        curve = {int(n): float(value) for n, value in (point.split(":") for point in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}": write points as 1:1,4:1.12,8:1.3') from None
    if 1 not in curve or min(curve) < 1 or min(curve.values()) <= 0:
        raise argparse.ArgumentTypeError(f'"{text}": begins at 1, and every value is above 0')
    return curve


def given_costs(curve: Mapping[int, float], rows: Mapping[int, float], factors: str) -> Costs:
    try:
        target, draft = (float(factor) for factor in factors.split(","))
    except ValueError:
        raise SystemExit(f"--factors {factors}: two numbers, as in 1.1,1.05") from None
    if min(target, draft) < 1:
        raise SystemExit(f"--factors {factors}: nothing gets faster while the other works; at least 1")
    return from_record({"target_ms": curve, "draft_ms": rows, "target_factor": target, "draft_factor": draft})


# The map


def scaled(costs: Costs, ratio: float) -> Costs:
    """The same shapes with T = 1 for one token of the target, and a draft that costs `ratio` of it."""
    target, draft = costs.target_ms(1), costs.draft_ms(1) / ratio
    return Costs(
        lambda n: costs.target_ms(n) / target,
        lambda rows: costs.draft_ms(rows) / draft,
        costs.target_factor,
        costs.draft_factor,
    )


def overlap_rate(costs: Costs, alpha: float, how: Prepared, tokens: int) -> float:
    """Simulated, under the policy that is best in the long run."""
    policy = best_policy(costs, alpha, MOST, LEAD, how.hit, how.rows)
    ranks = random_ranks(alpha, how.hit, tokens)  # the same luck in every cell, so that neighbours can be compared
    steering = Fixed(policy.need, policy.most, LEAD)
    return simulate(costs, ranks, steering, prepares=how.ready if how.hit else 0.0, rows=how.rows).rate


def draw_map(costs: Costs, how: Prepared, cells: int, tokens: int) -> Map:
    ratios = np.geomspace(*RATIOS, cells)
    acceptances = np.linspace(*ACCEPTANCES, cells)
    gains = {arm: np.zeros((cells, cells)) for arm in ARMS}
    for column, ratio in enumerate(ratios.tolist()):
        here = scaled(costs, ratio)
        for row, alpha in enumerate(acceptances.tolist()):
            in_turns = max(best_sequential(here, alpha, MOST)[0], plain_rate(here))
            without = overlap_rate(here, alpha, Prepared(0.0, 0.0, 1.0), tokens)
            prepared = overlap_rate(here, alpha, how, tokens)
            gains["async"][row, column] = without / in_turns
            gains["duo"][row, column] = max(without, prepared) / in_turns
    return Map(ratios, acceptances, gains, how)


def points_of(document: Mapping[str, Any]) -> list[Point]:
    found = []
    for task, entry in document["tasks"].items():
        model, arms = entry.get("model") or {}, entry["arms"]
        gains = {arm: arms[arm]["over_speculative"][0] for arm in ARMS if "over_speculative" in arms.get(arm, {})}
        if "cost_ratio" in model and gains:
            found.append(Point(task, model["cost_ratio"], model["alpha"], gains))
    return found


def measured_hits(document: Mapping[str, Any]) -> Prepared:
    """Over all tasks; what is not in the document is as by default."""
    duo = [entry["arms"]["duo"] for entry in document["tasks"].values() if "duo" in entry["arms"]]
    names = "rejections", "rejections_anticipated", "branch_tokens_ready", "draft_token_rows", "draft_forwards"
    rejections, hits, ready, rows, forwards = (sum(arm.get(name, 0) for arm in duo) for name in names)
    known = Prepared()
    return Prepared(
        hits / rejections if rejections else known.hit,
        ready / hits if ready else known.ready,
        rows / forwards if forwards else known.rows,
    )


# The picture


def plot_of(found: Map, points: Sequence[Point]) -> plots.Plot:
    best = {arm: float(gains.max()) for arm, gains in found.gains.items()}
    reached = {arm: float((gains >= LEVELS[1]).mean()) for arm, gains in found.gains.items()}
    alt = "; ".join(f"{arm}: at most {best[arm]:.2f}x, {reached[arm]:.0%} of the map above 1.29x" for arm in ARMS)
    return plots.Plot(
        "overlap-map",
        "Speed over speculative decoding in turns, on the same two devices",
        "",
        alt,
        lambda width, lines: _draw(found, points, width, lines),
    )


def _draw(found: Map, points: Sequence[Point], width: float, lines: Sequence[str]) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.figure import Figure

    colours = plots.COLOURS
    lines = [part for line in lines for part in textwrap.wrap(line, int(width / 6.6))]
    values = np.stack([found.gains[arm] for arm in ARMS])
    norm = TwoSlopeNorm(1.0, min(0.8, float(values.min())), max(1.3, float(values.max())))
    palette = LinearSegmentedColormap.from_list("gain", [colours["arm2"], colours["paper"], colours["arm1"]])
    top, tall, left, gap, right = 18.0 * len(lines) + 34, 300.0, 52.0, 48.0, 64.0
    height, across = top + tall + 46, (width - left - gap - right) / 2
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    for number, line in enumerate(lines):
        style: dict[str, Any] = dict(weight="bold", fontsize=13) if number == 0 else {}
        figure.text(12 / width, 1 - (14 + 18 * number) / height, line, **style)
    bottom = 46 / height
    for number, arm in enumerate(ARMS):
        box = ((left + number * (across + gap)) / width, bottom, across / width, tall / height)
        axes = figure.add_axes(box)
        axes.set_title(arm, loc="left", fontsize=12, weight="bold", pad=8)
        axes.pcolormesh(found.ratios, found.acceptances, found.gains[arm], cmap=palette, norm=norm, shading="nearest")
        axes.set(xscale="log", xlim=RATIOS, ylim=ACCEPTANCES, xlabel="one draft step / one target step")
        axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1.0], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
        axes.minorticks_off()
        axes.tick_params(length=0, pad=6)
        if number == 0:
            axes.set_ylabel("acceptance")
        for level, dashes in zip(LEVELS, ("-", "--"), strict=True):
            if found.gains[arm].min() < level < found.gains[arm].max():
                grid = found.ratios, found.acceptances, found.gains[arm]
                line = axes.contour(*grid, levels=[level], colors=colours["ink"], linewidths=1.3, linestyles=dashes)
                axes.clabel(line, fmt=f"{level:g}x", fontsize=11)
        _mark(axes, arm, points, palette, norm)
    scale = figure.add_axes(((width - right + 14) / width, bottom, 12 / width, tall / height))
    bar = figure.colorbar(ScalarMappable(norm, palette), cax=scale)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, pad=4)
    bar.ax.set_title("gain", fontsize=11, pad=8)
    return figure


def _mark(axes: Any, arm: str, points: Sequence[Point], palette: Any, norm: Any) -> None:
    """Measured points in the colours of the map, their names beside them, moved apart where they would overlap."""
    ink, low = plots.COLOURS["ink"], ACCEPTANCES[0]
    for point in sorted((point for point in points if arm in point.gains), key=lambda point: point.acceptance):
        x, y = point.cost_ratio, point.acceptance
        axes.plot([x], [y], "o", markersize=8, color=palette(norm(point.gains[arm])), markeredgecolor=ink, zorder=5)
        name = point.task.rpartition(":")[2].replace("_", " ")
        low = max(y, low)
        left = x > 0.2
        at = x / 1.15 if left else x * 1.15
        style: dict[str, Any] = dict(va="center", ha="right" if left else "left", fontsize=11, zorder=6)
        style["bbox"] = dict(facecolor=plots.COLOURS["paper"], edgecolor="none", alpha=0.7, pad=1)
        axes.text(at, low, f"{name} {point.gains[arm]:.2f}x", **style)
        low += 0.04


# Out


def document_of(found: Map, points: Sequence[Point], costs: Costs, source: str) -> dict[str, Any]:
    share = {
        arm: {f"at_least_{level:g}": float((gains >= level).mean()) for level in LEVELS}
        for arm, gains in found.gains.items()
    }
    return {
        "benchmark": "overlap-map",
        "source": source,
        "target_factor": costs.target_factor,
        "draft_factor": costs.draft_factor,
        "target_curve": {n: costs.target_ms(n) / costs.target_ms(1) for n in (1, 2, 4, 8, MOST + 1)},
        **vars(found.prepared),
        "cost_ratios": found.ratios.tolist(),
        "acceptances": found.acceptances.tolist(),
        "gains": {arm: gains.tolist() for arm, gains in found.gains.items()},
        "share_of_the_map": share,
        "measured": [vars(point) for point in points],
    }


def show(document: Mapping[str, Any]) -> None:
    for arm in ARMS:
        print(f"\n{arm}: gain over speculative in turns; down: acceptance, across: draft step / target step")
        print("       " + " ".join(f"{ratio:5.2f}" for ratio in document["cost_ratios"]))
        rows = zip(document["acceptances"], document["gains"][arm], strict=True)
        for acceptance, gains in reversed(list(rows)):
            print(f"  {acceptance:.2f} " + " ".join(f"{gain:5.2f}" for gain in gains))
    for point in document["measured"]:
        gains = ", ".join(f"{arm} {gain:.2f}x" for arm, gain in point["gains"].items())
        print(f"measured on {point['task']} at {point['cost_ratio']:.2f}, {point['acceptance']:.3f}: {gains}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.plot:
        plots.require_matplotlib()
    documents = [read_document(path) for path in args.files]
    if documents:
        costs = from_record(documents[0]["costs"])
        known = measured_hits(documents[0])
        names = [Path(documents[0][role]).name for role in ("target", "draft")]  # a path says little to others
        source = f"curves of {names[0]} and {names[1]}, {documents[0]['dtype']}"
    else:
        costs, known, source = given_costs(args.curve, args.rows, args.factors), Prepared(), "curves given by hand"
    given = {"hit": args.hit, "ready": args.ready, "rows": args.mean_rows}
    how = replace(known, **{name: value for name, value in given.items() if value is not None})
    points = [point for document in documents for point in points_of(document)]
    found = draw_map(costs, how, args.cells, args.tokens)
    document = document_of(found, points, costs, source)
    if args.plot:
        slower = f"{costs.target_factor:.2f}x and {costs.draft_factor:.2f}x slower side by side"
        heading = [
            f"Simulated with {source}; target and draft {slower}; acceptance independent per token.",
            f"duo prepares for {how.hit:.0%} of rejections, {how.ready:.1f} tokens each; {how.rows:.2f} rows per step."
            + " Dots: measured." * bool(points),
        ]
        plots.save(plot_of(found, points), args.plot.parent, args.plot.stem, heading)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)


if __name__ == "__main__":
    main()
