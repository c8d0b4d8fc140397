"""What a report is made from: run folders with their summaries, and tables that can be shown and downloaded."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunFolderError, SpecbenchError, UsageError
from .records import RunFolder, Sample, dumps
from .runs import SWEEP, differing_facts
from .summary import ALL_TASKS, Row, Summary, summarise
from .tables import digits

MOST_ROWS = 120  # of a table on the page; its files hold all
MOST_FAILURES = 500


@dataclass(frozen=True)
class Link:
    """A file inside the page."""

    label: str
    name: str
    kind: str
    text: str

    @property
    def href(self) -> str:
        data = self.text.encode("utf-8", "backslashreplace")
        return f"data:{self.kind};charset=utf-8;base64,{base64.b64encode(data).decode('ascii')}"


@dataclass(frozen=True)
class Grid:
    """A table of raw values: shown rounded, downloadable as it is. None is an empty cell, null, and `-`."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def shown(self) -> list[list[tuple[str, bool]]]:
        """The first rows as (text, whether it is a number)."""
        return [[_cell(value) for value in row] for row in self.rows[:MOST_ROWS]]

    @property
    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return out.getvalue()

    @property
    def json(self) -> str:
        """As pandas reads it with `orient="split"`; names of columns once, not in every row."""
        return dumps({"columns": self.columns, "data": self.rows})

    @property
    def links(self) -> list[Link]:
        return [Link("CSV", f"{self.name}.csv", "text/csv", self.csv),
                Link("JSON", f"{self.name}.json", "application/json", self.json)]  # fmt: skip


@dataclass
class Run:
    """A run folder that was read."""

    name: str
    manifest: dict[str, Any]
    samples: list[Sample]
    summary: Summary
    prefix: str = ""
    by_cell: dict[tuple[str, str, str], list[Sample]] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        """The baseline first, then as they were asked for."""
        return list(dict.fromkeys(row.arm for row in self.summary.rows))

    @property
    def tasks(self) -> list[str]:
        return [task for task in dict.fromkeys(row.task for row in self.summary.rows) if task != ALL_TASKS]

    @property
    def scope(self) -> str:
        """What the first sentence speaks of: all tasks, or the only one."""
        return ALL_TASKS if len(self.tasks) > 1 else self.tasks[0]

    def rows(self, task: str) -> list[Row]:
        return [row for row in self.summary.rows if row.task == task]

    def colour(self, arm: str) -> int:
        """0 is the baseline's grey."""
        return self.arms.index(arm) + (0 if self.summary.baseline else 1)

    def measured(self, task: str, arm: str) -> list[Sample]:
        return self.by_cell.get((task, arm, "measure"), [])

    def traced(self, task: str, arm: str) -> list[Sample]:
        return [sample for sample in self.by_cell.get((task, arm, "trace"), []) if sample.forwards]

    def slug(self, task: str) -> str:
        """A name for files and ids; another one for every task."""
        slugs = [slug(one) for one in self.tasks]
        at = self.tasks.index(task)
        same = slugs[:at].count(slugs[at])
        return f"{slugs[at]}--{same + 1}" if same else slugs[at]

    def arm(self, name: str) -> dict[str, Any]:
        return next((arm for arm in self.manifest.get("arms") or [] if arm["name"] == name), {})


def read(path: Path) -> Run:
    """A run folder and its summary.

    Raises:
        RunFolderError: not a run folder, or one that cannot be read.
        MeasurementError: not one sample of it finished.
    """
    folder = RunFolder(path)
    manifest, samples = folder.manifest(), folder.samples()
    try:
        summary = summarise(manifest, samples)
    except SpecbenchError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path}: its manifest is not as specbench writes them ({error!r})") from error
    by_cell: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        if sample.ok:
            by_cell.setdefault((sample.task, sample.arm, sample.kind), []).append(sample)
    return Run(path.resolve().name or "run", manifest, samples, summary, by_cell=by_cell)


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Run folders in their order, the folder of a sweep as its cells; those of one name are numbered.

    Raises what `read` raises, and UsageError where there is nothing to read.
    """
    folders: list[Path] = []
    for path in paths:
        cells = sorted(one.parent for one in path.glob("*/manifest.json")) if (path / SWEEP).is_file() else [path]
        if not cells:
            raise RunFolderError(f"{path}: a sweep without a finished cell")
        folders += cells
    if not folders:
        raise UsageError("no run folder; name one or more")
    runs = [read(path) for path in folders]
    seen: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        seen[run.name] = seen.get(run.name, 0) + 1
        run.name += f" ({seen[run.name]})" if seen[run.name] > 1 else ""
        run.prefix = f"r{number}-" if len(runs) > 1 else ""
    return runs


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def slug(text: str) -> str:
    """For file names and ids: lower case letters, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "task"


def _cell(value: Any) -> tuple[str, bool]:
    if isinstance(value, bool):
        return "yes" if value else "no", False
    if isinstance(value, int):
        return str(value), True
    if isinstance(value, float):
        return digits(value), True
    return ("-" if value is None else str(value)), False


def _unfold(facts: dict[str, Any], lead: str = "") -> list[list[Any]]:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _unfold(value, f"{lead}{name}.")
        else:
            plain = value if value is None or isinstance(value, str) else dumps(value)
            rows.append([f"{lead}{name}", plain])
    return rows


def settings_grid(run: Run) -> Grid:
    """What was asked, arm by arm included."""
    facts = {"specbench": run.manifest.get("specbench"), "commit": run.manifest.get("commit"),
             "command": " ".join(["specbench", *map(str, run.manifest.get("argv") or [])]),
             "started": run.manifest.get("started"), "finished": run.manifest.get("finished")}  # fmt: skip
    facts |= run.summary.settings
    for arm in run.manifest.get("arms") or []:
        facts[f"arm.{arm['name']}"] = {"options": arm.get("options"), "roles": arm.get("roles")}
    facts |= {f"model.{role}": model for role, model in (run.manifest.get("models") or {}).items()}
    return Grid(f"{run.prefix}settings", ["setting", "value"], _unfold(facts))


def environment_grid(run: Run) -> Grid:
    """The machine, its software, and how busy it was."""
    facts = dict(run.summary.environment)
    facts |= {name: run.manifest.get(name) for name in ("load_at_start", "load_at_end", "peak_memory_bytes")}
    return Grid(f"{run.prefix}environment", ["fact", "value"], _unfold(facts))


def failures_grid(run: Run) -> Grid | None:
    failed = [one for one in run.samples if not one.ok][:MOST_FAILURES]
    columns = ["arm", "task", "prompt", "turn", "repeat", "kind", "error"]
    rows = [[s.arm, s.task, s.prompt_id, s.turn, s.repeat, s.kind, s.error] for s in failed]
    return Grid(f"{run.prefix}failures", columns, rows) if rows else None


_UNTOLD = re.compile(r"command|started|finished|load_at|peak_memory|weight_bytes")


def differences(runs: Sequence[Run]) -> Grid:
    """Settings, models and machine, where the runs differ."""
    facts = []
    for run in runs:
        rows = [*settings_grid(run).rows, *environment_grid(run).rows]
        facts.append({name: value for name, value in rows if not _UNTOLD.search(name)})
    rows = [[name, *values] for name, values in differing_facts(facts)]
    return Grid("differences", ["setting", *(run.name for run in runs)], rows)
