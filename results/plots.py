"""The charts of a report, drawn by matplotlib: as SVG whose colours a page can change, and as PNG and SVG files.

A chart is described by plain values and drawn at any width, so that a page can hold one drawing for a desktop and one
for a phone. One unit is one CSS pixel, and y runs downwards. Every row carries its name and its number as text; colour
is never the only thing that tells two arms apart.

matplotlib is an optional part (`pip install "specbench-llm[report]"`), imported when the first chart is drawn.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from .statistics import Speedup
from .tables import digits, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 816.0, 346.0
MOST_DOTS = 120  # of one arm in a distribution, evenly spaced by rank, the extremes among them
EXTRA = 'pip install "specbench-llm[report]"'

# CSS variable -> its colour on white paper. In a page the colours are replaced by the variables, whose values for light
# and dark stand in the style sheet. The arms' hues stay apart for all common kinds of colour blindness (after Paul Tol,
# "vibrant"); amber and slate are kept for drafting and verifying.
COLOURS = {
    "ink": "#1b1f24", "soft": "#57606b", "line": "#c8cfd7", "paper": "#ffffff",
    "arm0": "#7b8591", "arm1": "#0077bb", "arm2": "#cc3311", "arm3": "#009988", "arm4": "#aa3377", "arm5": "#a87900",
    "arm6": "#33a5d0", "verify": "#3d5368", "verify-prefill": "#9fb1c3", "draft": "#ee8f00", "draft-prefill": "#f6cd8b",
    "rest": "#b7c0ca",
}  # fmt: skip
# What the colours of time stand for; a page says it beside the chart, a file in it.
STEP_KEY = {"draft": "draft forwards", "verify": "target forwards", "rest": "neither (idle, sampling, Python)"}
TIME_KEY = {
    "verify": "target: verify", "verify-prefill": "target: prefill", "draft": "draft",
    "draft-prefill": "draft: prefill", "rest": "no model runs",
}  # fmt: skip
_MARKERS = ("o", "o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.size": 12, "text.parse_math": False, "text.usetex": False,
    "svg.fonttype": "none", "svg.hashsalt": "specbench", "path.simplify": False, "axes.unicode_minus": False,
    "axes.linewidth": 0.8, "axes.edgecolor": COLOURS["line"], "axes.labelcolor": COLOURS["soft"],
    "xtick.color": COLOURS["line"], "ytick.color": COLOURS["line"], "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"], "text.color": COLOURS["ink"], "axes.labelsize": 12, "xtick.labelsize": 12,
    "ytick.labelsize": 12, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
}  # fmt: skip


def require_matplotlib() -> None:
    """Raises UsageError, naming the extra, where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(f"a report needs matplotlib, which is not installed; run: {EXTRA}") from None


# --- what is drawn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """A chart that can be drawn at any width.

    Attributes:
        name: for file names and ids.
        alt: what it shows, in words and numbers, for whoever does not see it.
        draw: (width in pixels, lines over the chart) -> figure.
    """

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[float, Sequence[str]], Figure]


@dataclass(frozen=True)
class BarRow:
    """An arm and its speed-ups."""

    label: str
    colour: int
    decode: Speedup | None
    e2e: Speedup | None
    predicted: float | None = None


@dataclass(frozen=True)
class BarGroup:
    title: str
    rows: Sequence[BarRow]


@dataclass(frozen=True)
class Spread:
    """An arm and its values, one per sample."""

    label: str
    colour: int
    values: np.ndarray


@dataclass(frozen=True)
class Curve:
    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    curves: Sequence[Curve]
    share: bool = False  # y from 0 to 1
    whole: bool = False  # x are counts


@dataclass(frozen=True)
class Lane:
    """What one model did: intervals in milliseconds by the colour they are drawn in."""

    role: str
    device: str
    spans: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Track:
    """One arm's call: its lanes, when tokens came, and how many."""

    label: str
    note: str
    lanes: Sequence[Lane]
    tokens: Sequence[tuple[float, int]]
    end_ms: float


@dataclass(frozen=True)
class Stack:
    """An arm's mean step: parts in milliseconds by the colour they are drawn in."""

    label: str
    note: str
    parts: dict[str, float] = field(default_factory=dict)


# --- the sheet -------------------------------------------------------------------------------------------------------


class _Sheet:
    """A figure of so many pixels, with lines of text and a key of colours over it."""

    def __init__(
        self, width: float, height: float, heading: Sequence[str], key: Sequence[tuple[str, str]] = ()
    ) -> None:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        lines = [part for line in heading for part in textwrap.wrap(line, int(width / 6.3)) or [""]]
        key = key if heading else ()
        self.top = 18.0 * (len(lines) + bool(key)) + (8 if lines else 0)
        self.width, self.height = width, height + self.top
        self.figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72)
        for number, line in enumerate(lines):
            style: dict[str, Any] = dict(weight="bold", fontsize=13) if number == 0 else {}
            self.figure.text(12 / width, 1 - (14 + 18 * number) / self.height, line, **style)
        at, foot = 12.0, 1 - (14 + 18 * len(lines)) / self.height
        for colour, meaning in key:
            box = Rectangle((at / width, foot), 14 / width, 9 / self.height, facecolor=COLOURS[colour], linewidth=0)
            self.figure.add_artist(box)
            self.figure.text((at + 20) / width, foot, meaning)
            at += 40 + 6.6 * len(meaning)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes without a frame, at these pixels below the heading."""
        bottom = self.height - self.top - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, pad=6, which="both")
        return axes

    def rows(self, height: float, limit: tuple[float, float], bottom: float = 42.0, left: float = 12.0) -> Axes:
        """Axes over nearly the whole width, in which y counts pixels from the top."""
        axes = self.axes(left, 0, self.width - left - 12, height)
        axes.set_ylim(height, 0)
        axes.set_xlim(*limit)
        axes.yaxis.set_visible(False)
        axes.grid(axis="x", color=COLOURS["line"], linewidth=0.6, alpha=0.6)
        axes.set_axisbelow(True)
        return axes


def _fits(text: str, room: float, size: float = 12) -> str:
    """The text, shortened in its middle where it would not fit into `room` pixels."""
    text = " ".join(text.split())
    most = max(6, int(room / (size * 0.58)))
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def _caption(axes: Axes, y: float, left: str, right: str, width: float) -> None:
    """A line of text over a row: its name on the left, its numbers on the right."""
    across = axes.get_yaxis_transform()
    room = width - 24 - len(right) * 6.6 - 12
    # Paper behind the text, so that no line of the grid runs through it.
    style: dict[str, Any] = dict(transform=across, va="center", zorder=8)
    style["bbox"] = dict(facecolor=COLOURS["paper"], edgecolor="none", pad=1)
    axes.text(0, y, _fits(left, room), ha="left", weight="bold", **style)
    axes.text(1, y, right, ha="right", **style)


def _ticks(axes: Axes, width: float, unit: str = "") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5 if width < 500 else 9, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def _whisker(axes: Axes, y: float, low: float | None, high: float | None, size: float) -> None:
    if low is None or high is None:
        return
    for colour, thick in ((COLOURS["paper"], 3.4), (COLOURS["ink"], 1.5)):
        axes.plot([low, high], [y, y], color=colour, linewidth=thick, solid_capstyle="butt", zorder=4)
    for end in (low, high):
        axes.plot([end, end], [y - size, y + size], color=COLOURS["ink"], linewidth=1.5, zorder=4)


def _colour(number: int) -> str:
    return COLOURS[f"arm{number if number < 7 else 1 + (number - 1) % 6}"]


def _shape(spans: Sequence[tuple[float, float]], y: float, height: float, resolution: float) -> Any:
    """One path of rectangles; spans with gaps between them that nobody could see are joined."""
    from matplotlib.path import Path as Outline

    joined: list[list[float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < resolution:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    corners = [(x, at) for a, b in joined for x, at in ((a, y), (b, y), (b, y + height), (a, y + height), (a, y))]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(joined)
    return Outline(corners, codes)


# --- charts ----------------------------------------------------------------------------------------------------------


def speedup_bars(groups: Sequence[BarGroup], baseline: str, width: float, heading: Sequence[str] = ()) -> Figure:
    """Decode speed-up, and thinner below it end to end, each with its interval; a line at the baseline's 1x."""
    row, title = 46.0, 26.0
    height = sum(title * bool(group.title) + row * len(group.rows) for group in groups) + 4
    ends = [
        end
        for group in groups
        for one in group.rows
        for speedup in (one.decode, one.e2e)
        if speedup
        for end in (speedup.value, speedup.high or 0)
    ]
    sheet = _Sheet(width, height + 44, heading)
    axes = sheet.rows(height, (0, max([1.15, *ends]) * 1.02))
    axes.axvline(1, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    y = 0.0
    for group in groups:
        if group.title:
            text = _fits(group.title, width - 24)
            axes.text(0, y + 13, text, transform=axes.get_yaxis_transform(), va="center", color=COLOURS["soft"])
            y += title
        for one in group.rows:
            numbers = interval(one.decode) if one.decode else "no speed-up"
            if width > 500 and one.e2e:
                numbers = f"decode {numbers} · end to end {interval(one.e2e)}"
            _caption(axes, y + 8, one.label, numbers, width)
            for speedup, at, thick, alpha in ((one.decode, 23.5, 11, 1.0), (one.e2e, 33.5, 6, 0.45)):
                if speedup:
                    axes.barh(y + at, speedup.value, thick, color=_colour(one.colour), alpha=alpha, linewidth=0)
                    _whisker(axes, y + at, speedup.low, speedup.high, thick / 2 - 1)
            y += row
    _ticks(axes, width, "x")
    which = "thick: decode, thin: end to end"
    axes.set_xlabel(f"speed-up; 1x is {_fits(baseline, width / 3)}; {which}" if width > 500 else which)
    return sheet.figure


def predicted_dots(groups: Sequence[BarGroup], width: float, heading: Sequence[str] = ()) -> Figure:
    """A hollow diamond for what was predicted, a dot with its interval for what was measured."""
    row, title = 38.0, 26.0
    height = sum(title * bool(group.title) + row * len(group.rows) for group in groups) + 4
    ends = [
        end
        for group in groups
        for one in group.rows
        for end in (one.predicted or 0, *((one.decode.value, one.decode.high or 0) if one.decode else ()))
    ]
    sheet = _Sheet(width, height + 44, heading)
    axes = sheet.rows(height, (0, max([1.15, *ends]) * 1.04))
    axes.axvline(1, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    y = 0.0
    for group in groups:
        if group.title:
            text = _fits(group.title, width - 24)
            axes.text(0, y + 13, text, transform=axes.get_yaxis_transform(), va="center", color=COLOURS["soft"])
            y += title
        for one in group.rows:
            measured = one.decode.value if one.decode else None
            numbers = f"predicted {digits(one.predicted, 'x')}, measured {digits(measured, 'x')}"
            _caption(axes, y + 8, one.label, numbers, width)
            at, colour = y + 24, _colour(one.colour)
            if one.predicted is not None and measured is not None:
                axes.plot([one.predicted, measured], [at, at], color=colour, linewidth=2, alpha=0.45, zorder=2)
            if one.decode and measured is not None:
                _whisker(axes, at, one.decode.low, one.decode.high, 4)
                axes.plot([measured], [at], "o", color=colour, markersize=9, zorder=5)
            if one.predicted is not None:
                style: dict[str, Any] = dict(markerfacecolor=COLOURS["paper"], markeredgecolor=colour, zorder=6)
                axes.plot([one.predicted], [at], "D", markersize=8, markeredgewidth=2, **style)
            y += row
    _ticks(axes, width, "x")
    axes.set_xlabel("decode speed-up. Diamond: predicted, dot: measured")
    return sheet.figure


def distributions(rows: Sequence[Spread], unit: str, width: float, heading: Sequence[str] = ()) -> Figure:
    """A dot per sample, the middle half as a box, the median as a line. The axis is logarithmic where values span more
    than a factor of 20."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    row, shown = 48.0, [one for one in rows if len(one.values)]
    everything = np.concatenate([one.values for one in shown])
    smallest, largest = float(everything.min()), float(everything.max())
    logarithmic = smallest > 0 and largest > 20 * smallest
    limit = (smallest / 1.15, largest * 1.15) if logarithmic else (0.0, largest * 1.03 or 1.0)
    height = row * len(shown) + 4
    sheet = _Sheet(width, height + 44, heading)
    axes = sheet.rows(height, limit)
    if logarithmic:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.set_xlim(*limit)
        few = largest < 300 * smallest
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        _ticks(axes, width)
    for number, one in enumerate(shown):
        y, colour = number * row, _colour(one.colour)
        quarter, median, three_quarters = np.percentile(one.values, [25, 50, 75])
        _caption(axes, y + 8, one.label, f"median {digits(median)} {unit}, n = {len(one.values)}", width)
        axes.barh(y + 27, three_quarters - quarter, 18, left=quarter, color=colour, alpha=0.28, linewidth=0)
        axes.plot([median, median], [y + 16, y + 38], color=colour, linewidth=3, solid_capstyle="butt", zorder=4)
        dots = [(x, y + 20 + 14 * ((7 * at) % 16) / 15) for at, x in enumerate(_by_rank(one.values))]
        corners = [corner for x, at in dots for corner in ((x, at), (x, at + 0.02))]
        codes = [Outline.MOVETO, Outline.LINETO] * len(dots)  # round caps make dots of them, and one path of all
        patch = PathPatch(Outline(corners, codes), fill=False, edgecolor=colour, linewidth=3.6, capstyle="round")
        patch.set(alpha=0.75, zorder=3)
        axes.add_patch(patch)
    axes.set_xlabel(f"{unit}, logarithmic" if logarithmic else unit)
    return sheet.figure


def _by_rank(values: np.ndarray) -> list[float]:
    ordered = np.sort(values)
    if len(ordered) > MOST_DOTS:
        ordered = ordered[np.linspace(0, len(ordered) - 1, MOST_DOTS).round().astype(int)]
    return ordered.tolist()


def curves(panels: Sequence[Panel], width: float, heading: Sequence[str] = ()) -> Figure:
    """Panels beside each other, or on narrow paper below each other, with one legend over them."""
    from matplotlib.ticker import MaxNLocator

    across = len(panels) if width > 500 else 1
    names = list({curve.label: curve for panel in panels for curve in panel.curves}.values())
    room = (width - 24) / across
    lines, x = [[]], 12.0
    for curve in names:
        label = _fits(curve.label, width - 70)
        need = 34 + len(label) * 7.0 + 14
        if lines[-1] and x + need > width - 12:
            lines.append([])
            x = 12.0
        lines[-1].append((x, label, curve))
        x += need
    legend, tall = 20.0 * len(lines) + 8, 190.0
    down = math.ceil(len(panels) / across)
    sheet = _Sheet(width, legend + down * (tall + 76), heading)
    strip = sheet.axes(0, 0, width, legend)
    strip.set(xlim=(0, width), ylim=(legend, 0))
    strip.set_axis_off()
    for number, line in enumerate(lines):
        for x, label, curve in line:
            y = 12 + 20 * number
            strip.plot([x, x + 14, x + 28], [y] * 3, **_line(curve.colour))
            strip.text(x + 34, y, label, va="center")
    for number, panel in enumerate(panels):
        left, top = 12 + (number % across) * room, legend + (number // across) * (tall + 76)
        axes = sheet.axes(left + 34, top + 26, room - 34 - (16 if across > 1 else 0), tall)
        axes.set_title(_fits(panel.title, room - 34), loc="left", fontsize=12, weight="bold", pad=8)
        axes.grid(axis="y", color=COLOURS["line"], linewidth=0.6, alpha=0.6)
        for curve in panel.curves:
            style = _line(curve.colour)
            if len(curve.x) > 40:
                style["marker"] = ""
            axes.plot(curve.x, curve.y, label=curve.label, **style)
            if len(curve.low):
                axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set_xlabel(panel.x_label)
        axes.set_ylim(0, 1.04) if panel.share else axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(6 if room < 500 else 10, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if panel.whole:
            longest = max(len(curve.x) for curve in panel.curves)
            axes.set_xlim(0.6, longest + 0.4)
    return sheet.figure


def _line(colour: int) -> dict[str, Any]:
    return {
        "color": _colour(colour), "linewidth": 2, "marker": _MARKERS[colour % len(_MARKERS)], "markersize": 5,
        "linestyle": _DASHES[(colour // 7) % len(_DASHES)], "clip_on": False,
    }  # fmt: skip


def timeline(
    tracks: Sequence[Track], width: float, heading: Sequence[str] = (), until_ms: float | None = None
) -> Figure:
    """Every model of every arm on one time axis: what runs at once stands above each other. Below the lanes of an arm
    a stroke per step, as high as the tokens it brought. With `until_ms` only the time up to there."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    lane, strokes = 13.0, 15.0
    heights = [20 + (lane + 3) * len(track.lanes) + strokes + 12 for track in tracks]
    height, left = sum(heights), 100.0 if width > 500 else 52.0
    end = until_ms or max(track.end_ms for track in tracks)
    seen = {kind for track in tracks for one in track.lanes for kind in one.spans}
    sheet = _Sheet(width, height + 44, heading, [(kind, TIME_KEY[kind]) for kind in TIME_KEY if kind in seen])
    axes = sheet.rows(height, (0, end * 1.005), left=left)
    resolution = end / (width * 1.5)
    most = max((kept for track in tracks for _, kept in track.tokens), default=1)
    edge = -left / (width - left - 12)
    across = axes.get_yaxis_transform()
    y = 0.0
    for track, tall in zip(tracks, heights, strict=True):
        axes.text(edge, y + 10, _fits(track.label, width - 30 - 6.4 * len(track.note)), transform=across, va="center",
                  weight="bold")  # fmt: skip
        axes.text(1, y + 10, track.note, transform=across, va="center", ha="right")
        at = y + 20
        for one in track.lanes:
            name = f"{one.role} {one.device}".strip() if width > 500 else one.role
            axes.text(edge, at + lane / 2, _fits(name, left - 4, 11), transform=across, va="center", fontsize=11,
                      color=COLOURS["soft"])  # fmt: skip
            for kind, spans in one.spans.items():
                inside = [(start, min(stop, end)) for start, stop in spans if start < end]
                if inside:
                    outline = _shape(inside, at, lane, resolution)
                    axes.add_patch(PathPatch(outline, facecolor=COLOURS[kind], linewidth=0, zorder=2))
            at += lane + 3
        axes.text(edge, at + strokes / 2, "tokens", transform=across, va="center", fontsize=11, color=COLOURS["soft"])
        came = [(ms, kept / most) for ms, kept in track.tokens if kept and ms <= end * 1.001]
        if came:
            foot = at + strokes
            corners = [corner for ms, part in came for corner in ((ms, foot), (ms, foot - strokes * max(0.15, part)))]
            outline = Outline(corners, [Outline.MOVETO, Outline.LINETO] * len(came))
            axes.add_patch(PathPatch(outline, fill=False, edgecolor=COLOURS["ink"], linewidth=1.2, zorder=3))
        y += tall
    _ticks(axes, width)
    axes.set_xlabel("ms since the call began")
    return sheet.figure


def step_stacks(rows: Sequence[Stack], width: float, heading: Sequence[str] = ()) -> Figure:
    """The mean step of each arm as parts one after another."""
    row, shown = 40.0, list(rows)
    height = row * len(shown) + 4
    sheet = _Sheet(width, height + 44, heading, list(STEP_KEY.items()))
    axes = sheet.rows(height, (0, max(sum(one.parts.values()) for one in shown) * 1.02 or 1.0))
    for number, one in enumerate(shown):
        y, left = number * row, 0.0
        _caption(axes, y + 8, one.label, one.note if width > 500 else one.note.partition(",")[0], width)
        for kind, value in one.parts.items():
            axes.barh(y + 25, value, 15, left=left, color=COLOURS[kind], linewidth=0)
            left += value
    _ticks(axes, width)
    axes.set_xlabel("ms per verification step")
    return sheet.figure


# --- out -------------------------------------------------------------------------------------------------------------


@contextmanager
def _styled() -> Iterator[None]:
    """matplotlib as it comes, whatever the user's own settings are, and without complaints about rare letters."""
    import matplotlib
    from matplotlib import style

    with style.context("default"), matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")
        yield


_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def inline_svg(plot: Plot, width: float, prefix: str) -> str:
    """The chart for the inside of an HTML page: colours are CSS variables, the font is the page's, ids start with
    `prefix`, and no address stands in it."""
    out = io.StringIO()
    with _styled():
        plot.draw(width, ()).savefig(out, format="svg", metadata=_NO_METADATA)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Nothing sticks out of its axes, so nothing has to be clipped.
    parts = ("metadata", "style", "clipPath")
    text = re.sub("|".join([*(f"<{part}.*?</{part}>" for part in parts), "<!--.*?-->"]), "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", lambda tag: _page_tag(tag[0], prefix), text)  # tags alone: texts stay as they are
    return re.sub(r">\s*\n\s*<", "><", text).strip()


_NAMES = {colour: name for name, colour in COLOURS.items()}


def _page_tag(tag: str, prefix: str) -> str:
    if tag.startswith("<svg"):
        box = re.search(r'viewBox="[^"]*"', tag)
        return f'<svg {box[0] if box else ""} aria-hidden="true" focusable="false">'
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r' (?:clip-path|transform)="(?:url\(|rotate\(-0 )[^"]*"', "", tag).replace("\n", " ")
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda c: f"var(--{_NAMES[c[0]]})" if c[0] in _NAMES else c[0], tag)
    tag = re.sub(r"(-?\d+\.\d\d)\d+", r"\1", tag)
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans)", tag)
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    return re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', tag)


def share_styles(page: str) -> tuple[str, str]:
    """The page with the style attributes of its charts replaced by classes, and the rules for these: the same few
    dozen stand on thousands of lines."""
    names: dict[str, str] = {}

    def shorten(tag: re.Match[str]) -> str:
        return re.sub(r'style="([^"]*)"', lambda rule: f'class="{names.setdefault(rule[1], f"z{len(names)}")}"', tag[0])

    page = re.sub(r"<svg.*?</svg>", lambda svg: re.sub(r"<[^>]+>", shorten, svg[0]), page, flags=re.DOTALL)
    return page, "\n".join(f".{name} {{ {rule} }}" for rule, name in names.items())


def save(plot: Plot, folder: Path, name: str, heading: Sequence[str] = ()) -> list[Path]:
    """Writes the chart as `name.png` (twice the pixels of the wide drawing) and `name.svg`, on white, with lines over
    it that say what was measured: a chart that is passed on alone still has to mean something."""
    import matplotlib

    paths = []
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        with _styled(), matplotlib.rc_context({"svg.fonttype": "path"}):
            figure = plot.draw(WIDE, [plot.title, *heading])
            metadata = _NO_METADATA if kind == "svg" else {"Software": None}
            size: dict[str, Any] = dict(dpi=144, bbox_inches="tight", pad_inches=0.15)
            figure.savefig(path, format=kind, facecolor=COLOURS["paper"], metadata=metadata, **size)
        paths.append(path)
    return paths
