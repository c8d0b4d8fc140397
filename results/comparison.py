"""What comparing runs found: rows, tables, and gates for a CI job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from ..errors import UsageError, unknown
from . import tables
from .runs import Difference
from .statistics import Speedup
from .summary import ALL_TASKS, Row, Summary
from .tables import NONE, Column, Table

METRICS = {
    "decode": "decode time",
    "e2e": "end-to-end latency",
    "ttft": "time to first token",
    "tpot": "decode time per token",
}
GROUPINGS = ("task", "category", "prompt")


@dataclass
class ComparedRow(Row):
    """A row of a comparison. `arm` is its label, `task` its group.

    Attributes:
        run, own_name: where it comes from, and what it is called there.
        hardware: of its run.
        compared_with: label of its baseline; None for a baseline and where there is none.
        metric: what `speedup`, `p_value` and `verdict` are about.
        p_value: of the paired test; None for fewer than six prompts.
        verdict: "faster" or "slower" where the interval *and* the test say so, "no difference", or None.
        imported: the file it was imported from.
    """

    run: str = ""
    own_name: str = ""
    hardware: str = ""
    compared_with: str | None = None
    metric: str = "decode"
    speedup: Speedup | None = None
    p_value: float | None = None
    verdict: str | None = None
    imported: str | None = None


@dataclass
class Comparison(Summary):
    """What `specbench compare` prints. `rows` are ComparedRows, by group, baselines first."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    metric: str = "decode"
    by: str = "task"

    @property
    def compared(self) -> list[ComparedRow]:
        return [row for row in self.rows if isinstance(row, ComparedRow)]


# --- gates -----------------------------------------------------------------------------------------------------------


def too_slow(comparison: Comparison, least: float) -> list[str]:
    """Why a gate on the speed-up fails, a line per row below it; rows without one fail too.

    Where the baseline has namesakes in other runs (before against after), only they are looked at.

    Raises:
        UsageError: there is no arm that is compared with another one.
    """
    rows = [row for row in comparison.compared if row.compared_with]
    if not rows:
        raise UsageError("--fail-below: no arm is compared with a baseline; name one with --baseline")
    baselines = {(row.task, row.own_name) for row in comparison.compared if row.baseline}
    rows = [row for row in rows if (row.task, row.own_name) in baselines] or rows
    reasons = []
    for row in rows:
        if row.speedup is None:
            reasons.append(f"{row.arm} on {row.task}: no speed-up could be measured")
        elif row.speedup.value < least:
            what = f"{tables.interval(row.speedup)} ({comparison.metric}, against {row.compared_with})"
            reasons.append(f"{row.arm} on {row.task}: {what} is below {least:g}x")
    return reasons


def not_the_same(comparison: Comparison) -> list[str]:
    """Why a gate on the output fails: an arm that has to emit the baseline's tokens did not, or not for all prompts."""
    reasons = []
    for row in comparison.compared:
        if row.task == ALL_TASKS or not row.compared_with or not row.lossless:
            continue
        counts = row.exactness
        who = f"{row.arm} on {row.task}"
        if counts is None or not counts["compared"]:
            reasons.append(f"{who}: outputs cannot be compared token by token with {row.compared_with}'s")
        elif counts["different"]:
            first = next(one for one in counts["first"] if not one["near_tie"])
            where = f"the first in prompt {first['prompt_id']} at token {first['index']}"
            reasons.append(f"{who}: {counts['different']} of {counts['compared']} outputs differ; {where}")
    missing = [caution for caution in comparison.cautions if caution.code in ("missing", "left-out", "failed")]
    return reasons + [caution.text for caution in missing]


# --- tables ----------------------------------------------------------------------------------------------------------


def _verdict_text(row: Row) -> str:
    if not isinstance(row, ComparedRow) or row.compared_with is None:
        return NONE
    if row.verdict is None:
        return "too few prompts"
    p = row.p_value or 0
    return f"{row.verdict} (p {f'= {p:.2g}' if p >= 1e-3 else '< 0.001'})"


def _extra(comparison: Comparison) -> list[tuple[str, Column]]:
    """Columns that only a comparison has, each with the name of the column it stands behind."""
    rows = comparison.compared
    several = len({row.compared_with for row in rows if row.compared_with}) > 1
    what = METRICS[comparison.metric]
    found = []
    if comparison.metric in ("ttft", "tpot"):
        short = comparison.metric.upper()
        found.append(("decode speed-up", Column(
            f"{short} speed-up", ("speed-up", short), 0, _metric, right=False,
            meaning=f"speed-up {short}: the baseline's {what} / the arm's",
        )))  # fmt: skip
    if any(row.compared_with for row in rows):
        found.append(("decode speed-up", Column(
            "verdict", ("verdict", comparison.metric), 1, _verdict_text, right=False,
            meaning=f"verdict: on the {what}, where the interval and a paired sign-flip test agree",
        )))  # fmt: skip
    if several:
        found.append(("verdict", Column("compared with", ("compared", "with"), 1, _compared_with, right=False)))
    if len({row.run for row in rows}) > 1 and not all(row.run in row.arm for row in rows):
        found.append(("devices", Column("run", ("run", ""), 4, _run, right=False)))
    if len({row.hardware for row in rows}) > 1:
        found.append(("devices", Column("hardware", ("hardware", ""), 2, _hardware, right=False)))
    return found


def _metric(row: Row) -> str:
    return "1.00x" if row.baseline else tables.interval(getattr(row, "speedup", None))


def _run(row: Row) -> str:
    return getattr(row, "run", "") or NONE


def _hardware(row: Row) -> str:
    return getattr(row, "hardware", "") or NONE


def _compared_with(row: Row) -> str:
    return getattr(row, "compared_with", None) or NONE


def build(comparison: Comparison) -> Table:
    """The table of `results.tables`, with the columns that only a comparison has."""
    table = tables.build(comparison)
    columns = list(table.columns)
    for behind, column in _extra(comparison):
        at = next((at for at, known in enumerate(columns) if known.name == behind), len(columns) - 1)
        columns.insert(at + 1, column)
    groups = tuple(
        dataclasses.replace(group, cells=tuple(tuple(column.cell(row) for column in columns) for row in group.rows))
        for group in table.groups
    )
    return dataclasses.replace(table, columns=tuple(columns), groups=groups, causes=table.causes + _ties(comparison))


def _ties(comparison: Comparison) -> tuple[str, ...]:
    """Said in words, since a narrow table has no room for a verdict and 1.05x looks like a result."""
    if comparison.by == "prompt":
        return ()
    return tuple(
        f"{row.arm} on {row.task}: no difference from {row.compared_with} "
        f"({comparison.metric} {tables.interval(row.speedup)}, p = {row.p_value:.2g})"
        for row in comparison.compared
        if row.verdict == "no difference"
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """As `tables.print_summary`: what differs first, then table, causes, warnings and legend."""
    tables._Terminal(build(comparison), console).show(None)


def to_markdown(comparison: Comparison) -> str:
    """The whole table, with what differs, warnings and legend."""
    table = build(comparison)
    grid = _grid(table, range(len(table.columns)), "pipe", lambda cell: cell.replace("|", "\\|"))
    said = [*(("", line) for line in table.causes), *(("Warning: ", line) for line in table.cautions)]
    said += [*(("Note: ", line) for line in table.notes), *(("", column.meaning) for column in table.columns)]
    bullets = "\n".join(f"- {lead}{line}" for lead, line in said if line)
    head = [f"**{table.title[0]}**", "\n".join(line if line[0] == "-" else f"\n{line}" for line in table.title[1:])]
    return "\n\n".join([*head, *(f"**{line}**" for line in table.watermarks), grid, bullets]) + "\n"


def to_latex(comparison: Comparison) -> str:
    """The important columns for booktabs. What differs and the watermarks are in the caption, so that they cannot get
    lost."""
    table = build(comparison)
    chosen = [at for at, column in enumerate(table.columns) if column.priority <= tables.LATEX_PRIORITY]
    grid = _grid(table, chosen, "latex_booktabs")
    caption = tables._latex("; ".join(line.removeprefix("- ") for line in [*table.title, *table.watermarks]))
    comments = [f"% {' '.join(line.split())}" for line in (*table.cautions, *table.causes)]
    head = ["% needs \\usepackage{booktabs}", *comments, "\\begin{table}", f"\\caption{{{caption}}}"]
    return "\n".join([*head, grid, "\\end{table}"]) + "\n"


def _grid(table: Table, chosen: Sequence[int], format: str, spell: Callable[[str], str] = str) -> str:
    import tabulate

    body = [[spell(cell) for cell in line] for line in tables._body(table, chosen)]
    columns = [table.columns[at] for at in chosen]
    aligns = ("left", *("right" if column.right else "left" for column in columns))
    headers = ["task", *(column.name for column in columns)]
    return tabulate.tabulate(body, headers, tablefmt=format, colalign=aligns, disable_numparse=True)


RENDERERS: dict[str, Callable[[Comparison], str]] = {
    "json": tables.to_json, "csv": tables.to_csv, "md": to_markdown, "latex": to_latex,
}  # fmt: skip


def render(comparison: Comparison, format: str) -> str:
    """The whole table as text in one of RENDERERS.

    Raises:
        UsageError: another format.
    """
    if format not in RENDERERS:
        raise UsageError(unknown("format", format, [*RENDERERS, "table"]))
    return RENDERERS[format](comparison)
