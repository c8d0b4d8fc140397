"""What a sweep found: every arm of every cell in one table, and the best setting per task with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import SpecbenchError
from . import statistics, tables
from .compare import compare
from .comparison import ComparedRow, Comparison
from .paired import pair
from .runs import Run, load
from .statistics import Caution, Speedup
from .summary import ALL_TASKS
from .sweep import Cell, SweepResult

# Axes that leave the baseline what it is; any other one makes speed-ups of different cells ratios to different things.
_SAME_BASELINE = ("strategy", "draft", "draft_length", "draft_quant", "task", "trace", "warmup", "require_lossless")


@dataclass
class Best:
    """The best setting of one task.

    Attributes:
        cell, arm, settings: which.
        by: "decode speed-up", or "decode tok/s" where the cells' baselines are not of one kind.
        speedup: against the baseline of its own cell.
        tokens_per_s: of decoding.
        second: cell and arm of the next best; None where there is only one.
        ratio, low, high: how much better than the second, on the prompts that both have, with its 95 % interval.
        separable: whether that interval lies above 1; None without a second.
        hardware: that it is the best on, where the cells ran on several kinds; machines are not ranked.
    """

    task: str
    cell: str
    arm: str
    settings: dict[str, str]
    by: str
    speedup: Speedup | None
    tokens_per_s: float | None
    second: str | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    separable: bool | None = None
    hardware: str | None = None

    @property
    def text(self) -> str:
        value = tables.interval(self.speedup) if self.speedup else f"{tables.digits(self.tokens_per_s)} tok/s"
        if self.speedup and self.by != "decode speed-up":
            value = f"{tables.digits(self.tokens_per_s)} tok/s, {value}"
        where = f"{self.task} on {self.hardware}" if self.hardware else self.task
        said = f"{where}: best is {self.arm} in {self.cell}, {value}"
        if self.speedup and self.speedup.verdict == "slower":
            said += ", slower than the baseline all the same"
        if self.second is None:
            return said
        if self.low is None or self.high is None:
            return f"{said}; too few prompts in common to tell it from {self.second}"
        by = f"{tables.digits(self.ratio, 'x')} [{tables.digits(self.low)}, {tables.digits(self.high)}]"
        if self.separable:
            return f"{said}; better than the second, {self.second}, by {by}"
        return f"{said}; cannot be told from the second, {self.second} ({by})"


@dataclass
class _Candidate:
    row: ComparedRow
    cell: Cell
    sums: dict[tuple[str, int], np.ndarray]  # per prompt: time and tokens of the baseline, of the arm


def findings(result: SweepResult) -> tuple[Comparison | None, list[Best]]:
    """Rows of all finished cells by task and hardware, the best first, and the best of each.

    A cell whose folder cannot be read is marked as failed. None where no cell has any row.
    """
    axes = {key for cell in result.cells for key in cell.settings if "." not in key}
    by = "decode speed-up" if axes <= set(_SAME_BASELINE) else "decode tok/s"
    candidates: list[_Candidate] = []
    cautions: list[Caution] = []
    whole: Comparison | None = None
    loaded = _loaded(result.cells)
    for cell, run in loaded:
        found = compare([run])
        whole = whole or found
        cautions += [Caution(c.code, f"{cell.name}: {c.text}", c.task, c.arm, c.value) for c in found.cautions]
        candidates += [_Candidate(row, cell, _per_prompt(run, row)) for row in found.compared if row.task != ALL_TASKS]
    if whole is None:
        return None, []
    best = []
    rows: list[ComparedRow] = []
    several = len({one.row.hardware for one in candidates}) > 1
    tasks = list(dict.fromkeys(one.row.task for one in candidates))
    groups = dict.fromkeys((one.row.task, one.row.hardware) for one in candidates)
    for task, hardware in sorted(groups, key=lambda group: tasks.index(group[0])):
        here = [one for one in candidates if (one.row.task, one.row.hardware) == (task, hardware)]
        ranked = [one for one in here if not one.row.baseline] or here
        ranked.sort(key=lambda one: -_worth(one, by))
        if _worth(ranked[0], by) > 0:
            best.append(_best(task, ranked, by, hardware if several else None))
        rows += [_labelled(one) for one in ranked]
    counted = f"{sum(cell.state == 'done' for cell in result.cells)} of {len(result.cells)} cells are done"
    title = [f"sweep {result.out}, by {by}, the best first: {counted}", *whole.title]
    summary = Comparison(
        title, list(dict.fromkeys(whole.watermarks)), whole.baseline, whole.settings, whole.environment, list(rows),
        _once(cautions), [], runs=[{"name": cell.name, "folder": str(cell.folder)} for cell, _ in loaded],
    )  # fmt: skip
    return summary, best


def _loaded(cells: Sequence[Cell]) -> list[tuple[Cell, Run]]:
    found = []
    for cell in cells:
        if cell.state in ("done", "interrupted"):
            try:
                run = load([cell.folder])[0]
                compare([run])
            except SpecbenchError as error:
                if cell.state == "done":
                    cell.state, cell.error = "failed", str(error)
                continue
            found.append((cell, run))
    return found


def _once(cautions: Sequence[Caution]) -> list[Caution]:
    """A warning that every cell has would bury the others: of one kind, the first and how many there are."""
    kept = []
    for code in dict.fromkeys(caution.code for caution in cautions):
        same = [caution for caution in cautions if caution.code == code]
        first = same[0]
        text = first.text if len(same) == 1 else f"{first.text} (and {len(same) - 1} more of this kind)"
        kept.append(Caution(first.code, text, first.task, first.arm, first.value))
    return kept


def _labelled(one: _Candidate) -> ComparedRow:
    one.row.arm = f"{one.row.own_name} in {one.cell.name}" if one.row.own_name not in one.cell.name else one.cell.name
    one.row.run = one.cell.name
    return one.row


def _per_prompt(run: Run, row: ComparedRow) -> dict[tuple[str, int], np.ndarray]:
    """Decode time and tokens of the baseline and of the arm by prompt turn; without a baseline the arm twice."""
    data = run.columns
    task = data["task"] == data.names["task"].numbers[row.task]
    mine = _of(run, row.own_name, task)
    base = _of(run, row.compared_with, task) if row.compared_with else mine
    pairing = pair(data, base, mine)
    sums: dict[tuple[str, int], np.ndarray] = {}
    for left, right in zip(pairing.left.tolist(), pairing.right.tolist(), strict=True):
        values = [float(part) for at in (left, right)
                  for part in (data["e2e_ns"][at] - data["ttft_ns"][at], data["tokens"][at] - 1)]  # fmt: skip
        key = (data.text("prompt_hash", left), int(data["turn"][left]))
        sums[key] = sums.get(key, np.zeros(4)) + values
    return sums


def _of(run: Run, arm: str, where: np.ndarray) -> np.ndarray:
    number = run.columns.names["arm"].numbers.get(arm, -1)
    return np.flatnonzero((run.columns["arm"] == number) & where)


def _worth(one: _Candidate, by: str) -> float:
    if by == "decode speed-up" and one.row.decode_speedup is not None:
        return one.row.decode_speedup.value
    return one.row.decode_tokens_per_s or 0.0 if by == "decode tok/s" or one.row.baseline else 0.0


def _best(task: str, ranked: Sequence[_Candidate], by: str, hardware: str | None) -> Best:
    first = ranked[0]
    found = Best(task, first.cell.name, first.row.own_name, first.cell.settings, by, first.row.decode_speedup,
                 first.row.decode_tokens_per_s, hardware=hardware)  # fmt: skip
    if len(ranked) == 1:
        return found
    second = ranked[1]
    found.second = f"{second.row.own_name} in {second.cell.name}"
    common = [key for key in first.sums if key in second.sums]
    if not common:
        return found
    sums = np.array([[*first.sums[key], *second.sums[key]] for key in common])

    def ratio(drawn: np.ndarray) -> np.ndarray:
        base1, base_tokens1, time1, tokens1, base2, base_tokens2, time2, tokens2 = drawn.T
        per_token = time2 / tokens2 / (time1 / tokens1)
        return per_token * (base1 / base_tokens1) / (base2 / base_tokens2) if by == "decode speed-up" else per_token

    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(ratio(sums.sum(axis=0)[None])[0])
    found.ratio = value if np.isfinite(value) else None
    found.low, found.high = statistics.bootstrap_interval(sums, ratio)
    found.separable = found.low is not None and found.low > 1
    return found


def to_dict(result: SweepResult, summary: Comparison | None, best: Sequence[Best]) -> dict[str, Any]:
    """JSON-safe."""
    return {
        "folder": str(result.out),
        "interrupted": result.interrupted,
        "cells": [cell.record() | {"folder": str(cell.folder)} for cell in result.cells],
        "best": [asdict(one) | {"text": one.text} for one in best],
        **(summary.to_dict() if summary else {"rows": []}),
    }
