"""Tables: one model of rows and columns, and renderers for terminal, Markdown, CSV, JSON and LaTeX.

A number is never cut. On a terminal, columns of low priority give way until the rest fits, and a line says which and
where they are; where not even the important ones fit, every arm becomes a block of lines. Three significant digits
here; the files `summary.json` and `summary.csv` hold the raw values.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..errors import UsageError, unknown
from . import records
from .statistics import Speedup
from .summary import ALL_TASKS, SPEEDUPS, Row, Summary

EXPORTS = ("summary.json", "summary.csv", "summary.md", "summary.tex")
NONE = "-"
GAP = 2


# --- numbers ---------------------------------------------------------------------------------------------------------


def digits(value: float | None, unit: str = "") -> str:
    """Three significant digits, never an exponent: 0.0712, 1.50, 45.2, 1230. `-` for None."""
    if value is None:
        return NONE
    if value == 0:
        return f"0{unit}"
    places = 2 - math.floor(math.log10(abs(value)))
    value = round(value, places)  # may reach the next power of ten: 9.996 is 10.0, not 10.00
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}{unit}"


def interval(speedup: Speedup | None) -> str:
    """1.48x [1.42, 1.55]; without the bracket where there is no interval."""
    if speedup is None:
        return NONE
    if speedup.low is None or speedup.high is None:
        return digits(speedup.value, "x")
    return f"{digits(speedup.value, 'x')} [{digits(speedup.low)}, {digits(speedup.high)}]"


def exactness(row: Row) -> str:
    """`32/32 exact`; `29/32, 3 near-ties`; with real differences, or `text only` for a server, on a second line."""
    if row.reference:
        return "reference"
    report = row.exactness
    if not row.lossless:
        return "lossy"
    if not report or not report.get("compared"):
        return "not compared"
    exact, near, different = (report.get(name) or 0 for name in ("exact", "near_tie", "different"))
    text = f"{exact}/{report['compared']}"
    if not near and not different:
        text += " exact"
    if near:
        text += f", {near} near-tie{'' if near == 1 else 's'}"
    if different:
        text += (",\n" if near else ", ") + f"{different} different"
    if report.get("text_only"):
        text += ",\ntext only"
    return text


def _milliseconds(ns: float | None) -> str:
    return digits(None if ns is None else ns / 1e6)


def _seconds(ns: float | None) -> str:
    return digits(None if ns is None else ns / 1e9)


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: what it is, in full, with its unit.
        header: two short lines for the head of a table on a terminal.
        priority: 0 is never dropped; the highest goes first.
        cell: what it shows of a row, `-` for nothing; a line break where it may be broken.
        right: aligned to the right, as numbers are.
        meaning: for the legend under the table.
        shown: whether this summary has something to say about it; by default, if any cell holds anything.
    """

    name: str
    header: tuple[str, str]
    priority: int
    cell: Callable[[Row], str]
    right: bool = True
    meaning: str = ""
    shown: Callable[[Summary], bool] | None = None


@dataclass(frozen=True)
class Group:
    """The rows of one task. Cells stand in the order of the table's columns."""

    title: str
    rows: tuple[Row, ...]
    cells: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """What is to be shown, without saying on what.

    `levels` are lines of cells in the order of LEVEL_COLUMNS, of the arms that have levels; often there are none.
    """

    title: tuple[str, ...]
    watermarks: tuple[str, ...]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    levels: tuple[tuple[str, ...], ...]
    causes: tuple[str, ...]
    cautions: tuple[str, ...]
    notes: tuple[str, ...]


def _arm(row: Row) -> str:
    return row.arm if row.lossless else f"{row.arm} (lossy)"


def _samples(row: Row) -> str:
    return f"{row.n_ok} ok, {row.n_failed} failed" if row.n_failed else f"{row.n_ok} ok"


def _value(speedup: Speedup | None) -> str:
    return digits(speedup.value if speedup else None, "x")


def _interval_only(speedup: Speedup | None) -> str:
    return NONE if speedup is None or speedup.low is None else interval(speedup).partition(" ")[2]


def _latency(row: Row) -> str:
    return NONE if row.latency_p50_ns is None else f"{_seconds(row.latency_p50_ns)} / {_seconds(row.latency_p90_ns)}"


def _split(row: Row) -> str:
    if row.trace is None:
        return NONE
    unseen = row.trace["draft_forwards"] == 0 and len(row.models) > 1  # another engine's draft is not traced
    draft = "?" if unseen else _milliseconds(row.trace["draft_ns_per_step"])
    return " + ".join([draft, *(_milliseconds(row.trace[f"{part}_ns_per_step"]) for part in ("verify", "rest"))])


def _per_step(row: Row, name: str) -> float | None:
    return row.sums[name] / row.sums["steps"] if row.sums.get("steps") else None


def _positions(row: Row) -> str:
    shown = row.acceptance_by_position[:4]
    more = " .." if len(row.acceptance_by_position) > 4 else ""
    return " ".join(f"{share:.2f}" for share in shown) + more if shown else NONE


def _varies(value: Callable[[Row], Any]) -> Callable[[Summary], bool]:
    return lambda summary: len({value(row) for row in summary.rows}) > 1


def _batched(summary: Summary) -> bool:
    return (summary.settings.get("batch") or 1) > 1


def _compared(summary: Summary) -> bool:
    return summary.baseline is not None and any(not row.baseline for row in summary.rows)


def _counts_vary(summary: Summary) -> bool:
    counts: dict[str, set[int]] = {}
    for row in summary.rows:
        counts.setdefault(row.task, set()).add(row.n_ok)
    return summary.n_failed > 0 or any(len(seen) > 1 for seen in counts.values())


COLUMNS = (
    Column("arm", ("arm", ""), 0, _arm, right=False),
    Column(
        "decode speed-up", ("speed-up", "decode"), 0,
        lambda row: "1.00x" if row.baseline else interval(row.decode_speedup), right=False, shown=_compared,
        meaning="speed-up: sum of the baseline's decode times / sum of the arm's, over the same prompts "
        "[95 % bootstrap interval over prompts]",
    ),
    Column(
        "predicted by profile", ("predicted", "by profile"), 3, lambda row: digits(row.profile_decode_speedup, "x"),
        meaning="by profile: the decode speed-up that is predicted, not measured: the steps of this run at the prices "
        "of the cost curves that specbench profile-hardware keeps",
    ),
    Column(
        "end-to-end speed-up", ("end to", "end"), 1,
        lambda row: "1.00x" if row.baseline else _value(row.e2e_speedup),
        shown=_compared, meaning="end to end: the speed-up with prefill",
    ),
    Column(
        "end-to-end interval", ("end to end", "95 %"), 6, lambda row: _interval_only(row.e2e_speedup), right=False,
    ),
    Column("decode tok/s", ("decode", "tok/s"), 1, lambda row: digits(row.decode_tokens_per_s)),
    Column(
        "throughput tok/s", ("batch", "tok/s"), 2, lambda row: digits(row.throughput_tokens_per_s), shown=_batched,
        meaning="batch tok/s: tokens of all rows / the time they took together; all other times are those of a row",
    ),
    Column(
        "throughput speed-up", ("batch", "speed-up"), 2,
        lambda row: "1.00x" if row.baseline else _value(row.throughput_speedup),
        shown=lambda summary: _batched(summary) and _compared(summary),
        meaning="batch speed-up: batch tok/s / the baseline's",
    ),
    Column(
        "throughput interval", ("batch", "95 %"), 6, lambda row: _interval_only(row.throughput_speedup), right=False,
        shown=lambda summary: _batched(summary) and _compared(summary),
    ),
    Column("samples", ("samples", ""), 1, _samples, right=False, shown=_counts_vary),
    Column(
        "lossless", ("lossless", ""), 1, exactness, right=False,
        shown=lambda summary: _compared(summary) or any(row.exactness for row in summary.rows),
        meaning="lossless: outputs that equal the baseline's, token for token",
    ),
    Column("TTFT p50 ms", ("TTFT", "ms"), 2, lambda row: _milliseconds(row.ttft_p50_ns), meaning="TTFT: median"),
    Column(
        "tokens/step", ("tokens", "/step"), 2, lambda row: digits(row.tokens_per_step),
        meaning="tokens/step: tokens after the first / verification steps",
    ),
    Column(
        "acceptance rate", ("accepted", "/drafted"), 2, lambda row: digits(row.acceptance_rate),
    ),
    Column("devices", ("devices", ""), 3, lambda row: " + ".join(row.devices) or NONE, right=False),
    Column(
        "decode speed-up per device", ("speed-up", "/device"), 2,
        lambda row: "1.00x" if row.baseline else digits(row.decode_speedup_per_device, "x"),
        shown=lambda summary: _compared(summary) and len({len(row.devices) for row in summary.rows if row.devices}) > 1,
        meaning="speed-up/device: speed-up x devices of the baseline / devices of the arm",
    ),
    Column("dtype", ("dtype", ""), 2, lambda row: row.dtype or NONE, right=False, shown=_varies(lambda row: row.dtype)),
    Column("runtime", ("runtime", ""), 3, lambda row: row.runtime or NONE, right=False,
           shown=_varies(lambda row: row.runtime)),
    Column("TPOT ms", ("TPOT", "ms"), 4, lambda row: _milliseconds(row.tpot_ns)),
    Column("end-to-end tok/s", ("end to end", "tok/s"), 6, lambda row: digits(row.e2e_tokens_per_s)),
    Column(
        "batching", ("batching", ""), 3, lambda row: "continuous" if row.continuous else "in groups", right=False,
        shown=lambda summary: _batched(summary) and _varies(lambda row: row.continuous)(summary),
        meaning="batching: a row that ends is given to the next prompt, or waits for the last of its group",
    ),
    Column("threads", ("threads", ""), 4, lambda row: str(row.threads or NONE)),
    Column(
        "row latency p50 / p90 s", ("row latency s", "p50 / p90"), 2, _latency, shown=_batched,
        meaning="row latency: from when a row was free for a prompt to the last token of its answer",
    ),
    Column("latency p50 / p90 s", ("latency s", "p50 / p90"), 6, _latency, shown=lambda summary: not _batched(summary)),
    Column(
        "accepted/step", ("accepted", "/step"), 7,
        lambda row: NONE if row.acceptance_rate is None else digits(row.accepted_per_step),
    ),
    Column(
        "wasted draft tokens/step", ("wasted", "/step"), 7,
        lambda row: NONE if row.acceptance_rate is None else digits(_per_step(row, "wasted")),
        shown=lambda summary: any(row.sums.get("wasted") for row in summary.rows),
        meaning="wasted: draft tokens thrown away before the target looked at them",
    ),
    Column(
        "steps without a draft", ("undrafted", "of steps"), 8,
        lambda row: NONE if row.acceptance_rate is None else digits(_per_step(row, "empty_steps")),
    ),
    Column(
        "step ms: draft + verify + other", ("step ms", "draft + verify + other"), 5, _split, right=False,
        meaning="step: mean time in draft forwards + target forwards + neither, from a separate traced pass",
    ),
    Column(
        "predicted speed-up", ("predicted", "speed-up"), 7, lambda row: digits(row.predicted_decode_speedup, "x"),
        meaning="predicted: from tokens/step and the traced times, not measured",
    ),
    Column(
        "accepted by position", ("accepted", "by position"), 8, _positions, right=False,
        meaning="by position: share of all steps with at least 1, 2, 3, ... accepted tokens",
    ),
    Column("peak memory GB", ("peak", "GB"), 8,
           lambda row: digits(None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e9)),
)  # fmt: skip


LEVEL_COLUMNS = ("task", "arm", "level", "model", "drafted", "accepted", "accepted/drafted", "forwards/step",
                 "ms/forward", "SWI")  # fmt: skip
LEVELS_MEANING = (
    "levels: tokens that each level of a cascade proposed, to the target or to the level above it, and how many of "
    "them were taken; SWI: tokens / (target forwards + forwards of the levels weighted by their bytes of weights), "
    "a count of forwards and not a time"
)


def _level_lines(row: Row) -> list[tuple[str, ...]]:
    lines = []
    for at, level in enumerate(row.levels):
        forwards = level["forwards"]
        lines.append((
            "" if at else row.task, "" if at else row.arm, level["name"], level["model"] or NONE, str(level["drafted"]),
            str(level["accepted"]), digits(level["acceptance_rate"]),
            digits(forwards / row.sums["steps"]) if forwards and row.sums.get("steps") else NONE,
            _milliseconds(level["time_ns"] / forwards) if forwards else NONE,
            "" if at else digits(row.standardized_improvement, "x"),
        ))  # fmt: skip
    return lines


def _slower(row: Row) -> str:
    """A row below 1.00x and why; called slower only where the statistics say so."""
    assert row.decode_speedup is not None
    value = digits(row.decode_speedup.value, "x")
    if row.decode_speedup.verdict == "slower":
        return f"{row.arm} is slower on {row.task} ({value}): {row.cause}"
    return f"{row.arm} came to {value} on {row.task}, which is not enough to call it slower: {row.cause}"


def build(summary: Summary) -> Table:
    """Chooses what this summary has something to say about: columns that would be empty everywhere are not there."""
    columns = tuple(column for column in COLUMNS if _has_something(column, summary))
    groups = []
    for task in dict.fromkeys(row.task for row in summary.rows):
        rows = tuple(row for row in summary.rows if row.task == task)
        title = f"{task}, {_count(max(row.prompts for row in rows), 'prompt')}"
        title += "" if _counts_vary(summary) else f", {_count(rows[0].n_ok, 'sample')} per arm"
        groups.append(Group(title, rows, tuple(tuple(column.cell(row) for column in columns) for row in rows)))
    causes = [_slower(row) for row in summary.rows if row.cause and row.decode_speedup and row.task != ALL_TASKS]
    return Table(
        title=tuple(summary.title),
        watermarks=tuple(summary.watermarks),
        columns=columns,
        groups=tuple(groups),
        levels=tuple(line for row in summary.rows for line in _level_lines(row)),
        causes=tuple(causes),
        cautions=tuple(caution.text for caution in summary.cautions),
        notes=tuple(summary.notes),
    )


def _has_something(column: Column, summary: Summary) -> bool:
    if column.shown is not None:
        return column.shown(summary)
    return any(column.cell(row) != NONE for row in summary.rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- terminal --------------------------------------------------------------------------------------------------------

_PLAIN = str.maketrans({"×": "x", "±": "+-", "–": "-", "—": "-", "…": "...", "·": ",", "→": "->", "µ": "u", "─": "-"})


def printable(text: str, encoding: str) -> str:
    """The text as a stream of this encoding can take it: plain signs for typographic ones, escapes for the rest."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_summary(summary: Summary, console: Console, folder: Path | None = None) -> None:
    """Title, table, causes, warnings and legend, as wide as the console.

    Args:
        folder: the run folder, named in the line that says where the columns are that did not fit.
    """
    _Terminal(build(summary), console).show(folder)


def print_cautions(summary: Summary, console: Console) -> None:
    """The warnings and notes alone, for stderr beside `--json`."""
    _Terminal(build(summary), console).cautions()


class _Terminal:
    """A table on a console. Widths come from the data, as the console's encoding spells it."""

    def __init__(self, table: Table, console: Console) -> None:
        self.table = table
        self.console = console
        self.cells = [[[self.spell(cell) for cell in cells] for cells in group.cells] for group in table.groups]
        self.widths = []
        for at, column in enumerate(table.columns):
            texts = [*column.header, *(cells[at] for group in self.cells for cells in group)]
            self.widths.append(max(cell_len(line) for text in texts for line in text.split("\n")))

    def spell(self, text: str) -> str:
        return printable(text, self.console.encoding)

    def show(self, folder: Path | None) -> None:
        for number, line in enumerate(self.table.title):
            self.lines(line, "bold" if number == 0 else "dim")
        for line in self.table.watermarks:
            self.lines(f"! {line}", "bold yellow")
        self.console.print()
        chosen = self.fit()
        if chosen:
            self.rows(chosen)
        else:
            chosen = [at for at, column in enumerate(self.table.columns) if column.priority <= BLOCK_PRIORITY]
            self.blocks(chosen)
        self.console.print()
        if self.table.levels:
            self.levels()
            self.console.print()
        for line in self.table.causes:
            self.lines(line, "", hang="  ")
        self.cautions()
        if self.table.causes or self.table.cautions or self.table.notes:
            self.console.print()
        meanings = [self.table.columns[at].meaning for at in chosen]
        meanings += [LEVELS_MEANING] if self.table.levels else []
        self.lines("; ".join(meaning for meaning in meanings if meaning), "dim")
        left_out = [column.name for at, column in enumerate(self.table.columns) if at not in chosen]
        if left_out:
            where = f"see {folder / 'summary.md'}" if folder else "a wider terminal shows them"
            self.lines(f"not shown for lack of room ({where}): {', '.join(left_out)}", "dim")

    def cautions(self) -> None:
        for line in self.table.cautions:
            self.lines(f"warning: {line}", "yellow", hang="  ")
        for line in self.table.notes:
            self.lines(f"note: {line}", "dim", hang="  ")

    def lines(self, text: str, style: str, hang: str = "") -> None:
        """Wraps at spaces only: a number or a path that is too long stays whole."""
        for line in _wrap(self.spell(text), self.console.width, hang):
            self.print(Text(line, style=style))

    def print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def total(self, chosen: Sequence[int]) -> int:
        return sum(self.widths[at] for at in chosen) + GAP * (len(chosen) - 1)

    def fit(self) -> list[int]:
        """The columns that fit, in their order, the least important dropped first; empty where those of priority 0 and
        1 do not fit."""
        columns = self.table.columns
        chosen = list(range(len(columns)))
        for worst in sorted(chosen, key=lambda at: (-columns[at].priority, -at)):
            if self.total(chosen) <= self.console.width:
                break
            if columns[worst].priority <= 1:
                return []
            chosen.remove(worst)
        return chosen

    def rows(self, chosen: Sequence[int]) -> None:
        grid = self.grid(chosen)
        for line, style in enumerate(("bold", "dim")):
            grid.add_row(*[Text(self.table.columns[at].header[line], style=style) for at in chosen])
        self.console.print(grid)
        for group, spelled in zip(self.table.groups, self.cells, strict=True):
            self.rule(group.title, self.total(chosen))
            grid = self.grid(chosen)
            for row, cells in zip(group.rows, spelled, strict=True):
                grid.add_row(*[Text(cells[at], style=_style(self.table.columns[at], row)) for at in chosen])
            self.console.print(grid)

    def grid(self, chosen: Sequence[int]) -> RichTable:
        grid = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for at in chosen:
            justify = "right" if self.table.columns[at].right else "left"
            grid.add_column(justify=justify, width=self.widths[at], no_wrap=True, overflow="crop")
        return grid

    def rule(self, title: str, width: int) -> None:
        line, title = self.spell("─"), self.spell(title)
        room = width - cell_len(title) - 4
        if room < 0:
            self.lines(title, "bold cyan")
            return
        text = Text(line * 2 + " ", style="dim")
        text.append(title, style="bold cyan")
        self.print(text.append(" " + line * room, style="dim"))

    def levels(self) -> None:
        """What each level of a cascade did: a small table, or a line per level on a narrow terminal."""
        lines = [tuple(map(self.spell, line)) for line in (LEVEL_COLUMNS, *self.table.levels)]
        widths = [max(cell_len(line[at]) for line in lines) for at in range(len(LEVEL_COLUMNS))]
        if sum(widths) + GAP * (len(widths) - 1) <= self.console.width:
            for number, line in enumerate(lines):
                cells = [
                    cell.ljust(width) if at < 4 else cell.rjust(width)
                    for at, (cell, width) in enumerate(zip(line, widths, strict=True))
                ]
                self.print(Text((" " * GAP).join(cells).rstrip(), style="" if number else "bold"))
            return
        for line in lines[1:]:
            named = zip(LEVEL_COLUMNS, line, strict=True)
            self.lines(", ".join(f"{name} {cell}" for name, cell in named if cell not in ("", NONE)), "", hang="  ")

    def blocks(self, chosen: Sequence[int]) -> None:
        """One block of lines per arm, for a terminal too narrow for a table."""
        names = {at: self.table.columns[at].name for at in chosen if at > 0}
        room = max((len(name) for name in names.values() if len(name) <= LABEL), default=0)
        for group, spelled in zip(self.table.groups, self.cells, strict=True):
            self.rule(group.title, self.console.width)
            for row, cells in zip(group.rows, spelled, strict=True):
                self.print(Text(cells[0], style="dim" if row.baseline else "bold"))
                for at, name in names.items():
                    if cells[at] != NONE:
                        self.pair(name, room, cells[at].replace("\n", " "), _style(self.table.columns[at], row))

    def pair(self, name: str, room: int, value: str, style: str) -> None:
        """`name  value` on one line, or the value under the name where it does not fit beside it."""
        label = Text("  ").append(name, style="dim")
        if 2 + max(room, len(name)) + GAP + cell_len(value) <= self.console.width:
            label.append(" " * (max(room - len(name), 0) + GAP)).append(value, style=style)
            self.print(label)
            return
        self.print(label)
        for line in _wrap(value, self.console.width - 4):
            self.print(Text("    ").append(line, style=style))


BLOCK_PRIORITY = 4
LABEL = 20  # a longer name does not push the values of all others to the right


def _style(column: Column, row: Row) -> str:
    if column.name == "arm":
        return "dim" if row.baseline else "bold"
    if column.name == "decode speed-up" and row.decode_speedup is not None:
        return {"faster": "green", "slower": "red"}.get(row.decode_speedup.verdict or "", "")
    wrong = (column.name == "samples" and row.n_failed) or (
        column.name == "lossless" and row.exactness and row.exactness.get("different")
    )
    return "red" if wrong else ""


def _wrap(text: str, width: int, hang: str = "") -> list[str]:
    """Lines of at most `width` terminal cells, broken at spaces only, so that no number is cut; a word that is longer
    than a line stays whole."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append((hang if lines else "") + word)
    return lines


# --- files -----------------------------------------------------------------------------------------------------------


def to_json(summary: Summary) -> str:
    """One JSON document, raw values, null for what is not defined. ASCII, so that every stream can take it."""
    return json.dumps(summary.to_dict(), allow_nan=False, indent=2, default=str) + "\n"


def to_csv(summary: Summary) -> str:
    """One line per task and arm, raw values, empty for null. Every line carries model, dtype and hardware, so that it
    still means something alone; nested values are flattened with `_` or, for lists, joined by spaces."""
    lines = [_flat(summary, row) for row in summary.to_dict()["rows"]]
    names = list(dict.fromkeys(name for line in lines for name in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


_SPEEDUP_FIELDS = ("value", "low", "high", "geometric_mean", "prompts", "pairs", "per_token", "verdict")
_SETTINGS = ("temperature", "top_k", "top_p", "seed", "verify", "max_new_tokens", "batch", "batch_prompts", "repeats")
_EXACTNESS_FIELDS = ("exact", "near_tie", "different", "compared")


def _flat(summary: Summary, row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in SPEEDUPS:
            parts = {part: (value or {}).get(part) for part in _SPEEDUP_FIELDS}
            flat |= {name: parts.pop("value"), **{f"{name}_{part}": inner for part, inner in parts.items()}}
        elif name == "exactness":
            flat |= {f"lossless_{part}": (value or {}).get(part) for part in _EXACTNESS_FIELDS}
        elif name == "models":
            flat["target"] = value.get("target")
            flat["draft"] = " ".join(model for role, model in value.items() if role != "target")
        elif name == "levels":
            for number, level in enumerate(value, 1):
                flat |= {f"level{number}_{part}": inner for part, inner in level.items()}
        elif isinstance(value, dict) or name == "trace":
            plain = {part: inner for part, inner in (value or {}).items() if not isinstance(inner, dict)}
            flat |= {f"{name}_{part}": inner for part, inner in plain.items()}
        elif isinstance(value, list):
            flat[name] = " ".join("" if part is None else str(part) for part in value)
        else:
            flat[name] = value
    flat |= {name: summary.settings.get(name) for name in _SETTINGS}
    return flat | {"title": "; ".join(summary.title), "watermarks": "; ".join(summary.watermarks)}


def to_markdown(summary: Summary) -> str:
    """The whole table, with title, causes, warnings and legend."""
    import tabulate

    table = build(summary)
    body = [[cell.replace("|", "\\|") for cell in line] for line in _body(table, range(len(table.columns)))]
    aligns = ("left", *("right" if column.right else "left" for column in table.columns))
    headers = ["task", *(column.name for column in table.columns)]
    grid = tabulate.tabulate(body, headers, tablefmt="pipe", colalign=aligns, disable_numparse=True)
    parts = [f"**{table.title[0]}**" if table.title else "", *table.title[1:]]
    parts += [f"**{line}**" for line in table.watermarks] + [grid]
    if table.levels:
        cells = [[cell.replace("|", "\\|") for cell in line] for line in table.levels]
        sides = ["left"] * 4 + ["right"] * (len(LEVEL_COLUMNS) - 4)
        parts.append(tabulate.tabulate(cells, LEVEL_COLUMNS, tablefmt="pipe", colalign=sides, disable_numparse=True))
    parts += [_bullets("", table.causes), _bullets("Warning: ", table.cautions), _bullets("Note: ", table.notes)]
    meanings = [column.meaning for column in table.columns if column.meaning]
    parts += [_bullets("", [*meanings, LEVELS_MEANING] if table.levels else meanings)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _body(table: Table, chosen: Sequence[int]) -> list[list[str]]:
    """Lines of cells with the group in the first."""
    lines = [(group.title, cells) for group in table.groups for cells in group.cells]
    return [[title, *(cells[at].replace("\n", " ") for at in chosen)] for title, cells in lines]


def _bullets(lead: str, lines: Iterable[str]) -> str:
    return "\n".join(f"- {lead}{line}" for line in lines)


LATEX_PRIORITY = 3


def to_latex(summary: Summary) -> str:
    """The important columns as a `tabular` with booktabs rules. Title and watermarks are the caption, so that they
    cannot get lost; causes and warnings are comments."""
    import tabulate

    table = build(summary)
    chosen = [at for at, column in enumerate(table.columns) if column.priority <= LATEX_PRIORITY]
    body = _body(table, chosen)
    aligns = ("left", *("right" if table.columns[at].right else "left" for at in chosen))
    headers = ["task", *(table.columns[at].name for at in chosen)]
    grid = tabulate.tabulate(body, headers, tablefmt="latex_booktabs", colalign=aligns, disable_numparse=True)
    caption = _latex(". ".join([*table.title, *table.watermarks]))
    comments = [f"% warning: {line}" for line in table.cautions] + [f"% {line}" for line in table.causes]
    head = ["% needs \\usepackage{booktabs}", *(" ".join(line.split()) for line in comments)]
    return "\n".join([*head, "\\begin{table}", f"\\caption{{{caption}}}", grid, "\\end{table}"]) + "\n"


def _latex(text: str) -> str:
    """Text with LaTeX's special characters escaped, by the library that escapes the cells."""
    import tabulate

    line = tabulate.tabulate([[text]], tablefmt="latex", disable_numparse=True).splitlines()[2]
    return line.strip().removesuffix("\\\\").strip()


RENDERERS: dict[str, Callable[[Summary], str]] = {
    "json": to_json, "csv": to_csv, "md": to_markdown, "latex": to_latex,
}  # fmt: skip


def render(summary: Summary, format: str) -> str:
    """The whole table as text in one of RENDERERS.

    Raises:
        UsageError: another format.
    """
    if format not in RENDERERS:
        raise UsageError(unknown("format", format, [*RENDERERS, "table", "vllm"]))
    return RENDERERS[format](summary)


def write_exports(summary: Summary, folder: Path) -> list[Path]:
    """Writes `summary.json`, `.csv`, `.md` and `.tex`, each replaced in one step; returns their paths."""
    for name, to_text in zip(EXPORTS, RENDERERS.values(), strict=True):
        records.write_atomically(folder / name, to_text(summary))
    return [folder / name for name in EXPORTS]
