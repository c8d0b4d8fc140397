"""A grid of runs: every cell an ordinary run folder under the folder of the sweep.

A cell that is done is skipped when the sweep is resumed, one that fails does not stop the others. Who runs the cells is
an `Executor`; the one here runs them one after another in this process, and keeps a model that the next cell needs too.

    sweep.json       what was asked, and how far it got; replaced after every cell
    CELL/            a run folder, named after what the cell has of its own
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from .. import __version__
from ..errors import PlacementError, RunFolderError, SpecbenchError, UsageError, WorkerError, unknown
from ..models.base import CachedModel
from ..models.info import ModelInfo
from ..options import convert
from ..strategies import registry as strategies
from . import run as runs
from .listener import Listener
from .manifest import now, redact
from .plan import Plan, check, to_json, with_own_draft
from .records import BASELINE, RunFolder, dumps, write_atomically
from .runs import SWEEP

SCHEMA = 1
STATES = ("waiting", "done", "failed", "interrupted")
_NOT_OF_A_CELL = ("out", "resume", "overwrite")
_MODEL_AXES = ("target", "draft", "dtype", "runtime", "target_quant", "draft_quant", "exact", "place", "tp")
_NAMES = ("strategy", "task")


@dataclass
class Cell:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        settings: what the grid gave it, as it is written on the command line; an axis that does not concern its
            strategies is not in it.
        plan: with `out`, and `resume` where its folder has something to go on with.
        state: one of STATES.
        error: one line, where it failed.
        problems: why a run that came to its end exits with 1 all the same.
        attempts: who ran it, where there are several workers: `worker`, `pid`, `hardware`, `began`, `ended` and `how`:
            a state, or "lost" with the worker, and then `why`.
        note: what was chosen for it, where something was.
    """

    name: str
    settings: dict[str, str]
    plan: Plan
    state: str = "waiting"
    error: str | None = None
    problems: list[str] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    note: str | None = None

    @property
    def folder(self) -> Path:
        assert self.plan.out is not None
        return self.plan.out

    @property
    def models(self) -> tuple[Any, ...]:
        """Equal for cells that need the same models, loaded in the same way."""
        return tuple(getattr(self.plan, name, None) for name in _MODEL_AXES)

    def record(self) -> dict[str, Any]:
        found = {"name": self.name, "settings": self.settings, "state": self.state, "error": self.error,
                 "problems": self.problems}  # fmt: skip
        return found | ({"attempts": self.attempts} if self.attempts else {})


class Executor(Protocol):
    """Who runs the cells. Their folders are where the results are: what comes back says only how it ended.

    Attributes:
        elsewhere: whether other machines run them, and know better than this one which devices there are.
    """

    elsewhere: bool = False

    def run(self, cells: Sequence[Cell], listener: Listener, argv: Sequence[str]) -> Iterator[Cell]:
        """Runs every cell, in any order, and yields each as soon as it has ended, with its `state`, `error` and
        `problems`. A cell that fails is yielded like any other. After an interrupted one nothing more is begun."""
        ...


# --- the grid --------------------------------------------------------------------------------------------------------


def parse_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """`draft-length=2,4,8` to a name and its values. Raises UsageError."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key.strip() or not found:
            raise UsageError(f'--grid "{text}": write key=a,b, as in draft-length=2,4,8 or lookup.min-match=2,3')
        grid.setdefault(key.strip(), []).extend(found)
    return grid


def cells(base: Plan, grid: Mapping[str, Sequence[Any]], out: Path) -> list[Cell]:
    """Every combination once, those that need the same models after one another.

    What does not concern a cell's strategies (a draft length for one that drafts nothing, options of another strategy,
    a draft model that nobody uses) is left out of it, so that it is not measured twice.

    Raises:
        UsageError: an empty grid, an unknown key, a value of the wrong type, or a setting that no cell makes use of.
    """
    if not grid:
        raise UsageError("no grid; name what varies, as in --grid draft-length=2,4,8, or under sweep: in --config")
    axes = {_axis(key): [_value(key, value) for value in _listed(key, values)] for key, values in grid.items()}
    found: dict[str, Cell] = {}
    used: set[str] = set()
    for values in itertools.product(*axes.values()):
        given = dict(zip(axes, values, strict=True))
        plan, left = _fitting(_with(base, given))
        plan, note = (plan, None) if "draft" in given else with_own_draft(plan)
        settings = {key: _word(value) for key, value in given.items() if key not in left and _concerns(key, plan)}
        used |= {*settings, *(name for name in ("draft", "draft_length") if getattr(plan, name) is not None)}
        used |= set(plan.options)
        key = dumps({name: value for name, value in to_json(plan).items() if name not in _NOT_OF_A_CELL})
        found.setdefault(key, Cell("", settings, plan, note=note))
    _all_used(base, axes, used)
    made = list(found.values())
    for cell, name in zip(made, _folder_names(made), strict=True):
        folder = RunFolder(out / name)
        cell.name = name
        cell.plan = dataclasses.replace(cell.plan, out=folder.path, resume=folder.exists(), overwrite=False)
    order = {models: number for number, models in enumerate(dict.fromkeys(cell.models for cell in made))}
    return sorted(made, key=lambda cell: order[cell.models])


def _axis(key: str) -> str:
    """A plan's field, or `name.key` of an option."""
    if "." in key:
        name, _, option = key.partition(".")
        return f"{name.strip()}.{option.strip()}"
    field_name = key.replace("-", "_")
    known = {name for name in get_type_hints(Plan) if name not in (*_NOT_OF_A_CELL, "options")}
    if field_name not in known:
        names = [name.replace("_", "-") for name in known]
        raise UsageError(unknown("key in --grid", key, names, "Options are written as name.key=a,b."))
    return field_name


def _listed(key: str, values: Any) -> list[Any]:
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    if not listed:
        raise UsageError(f"sweep {key}: no values")
    return listed


def _value(key: str, value: Any) -> Any:
    if "." in key:
        return value
    name = key.replace("-", "_")
    value = str(value) if name in _NAMES else value
    return convert((value,) if name in _NAMES else value, get_type_hints(Plan)[name], f'"{key}" of the sweep')


def _with(base: Plan, given: Mapping[str, Any]) -> Plan:
    options = {name: dict(keys) for name, keys in base.options.items()}
    fields = {}
    for key, value in given.items():
        name, dot, option = key.partition(".")
        if dot:
            mine = options.setdefault(name, {})
            mine.pop(option.replace("-", "_"), None)
            mine[option.replace("_", "-")] = value
        else:
            fields[key] = value
    return dataclasses.replace(base, **fields, options=options)


def _fitting(plan: Plan) -> tuple[Plan, set[str]]:
    """The plan without what none of its strategies uses, and the names of what was taken away."""
    kinds = [strategies.get(name) for name in plan.strategy]
    changes: dict[str, Any] = {}
    if not any("draft" in (*kind.roles, *kind.optional_roles) for kind in kinds):
        roles = re.split(r",(?=\s*\w+\s*=)", plan.place)
        changes = {"draft": None, "draft_quant": None,
                   "place": ",".join(role for role in roles if not role.strip().startswith("draft"))}  # fmt: skip
    if not any(_drafts_a_length(kind) for kind in kinds):
        changes["draft_length"] = None
    names = {*plan.strategy, *(name.partition(":")[0] for name in plan.task), *([BASELINE] if plan.baseline else [])}
    if "draft" not in changes:
        names |= {"draft", *plan.drafts}
    changes["options"] = {name: keys for name, keys in plan.options.items() if name in names}
    left = {name for name, value in changes.items() if name != "options" and value != getattr(plan, name)}
    return dataclasses.replace(plan, **changes), left


def _drafts_a_length(kind: Any) -> bool:
    return any(option.name == "draft_length" for option in dataclasses.fields(kind.Options))


def _concerns(key: str, plan: Plan) -> bool:
    name, dot, _ = key.partition(".")
    return not dot or name in plan.options


def _all_used(base: Plan, axes: Mapping[str, Any], used: set[str]) -> None:
    """A setting that changes nothing anywhere is a mistake, not a wish."""
    for key in axes:
        if key not in used:
            raise UsageError(f"--grid {key.replace('_', '-')}: no strategy or task of this sweep has it")
    for name in ("draft", "draft_length"):
        if getattr(base, name) is not None and name not in used:
            raise UsageError(f"--{name.replace('_', '-')}: no strategy of this sweep uses it")
    for name in base.options:
        if name not in used:
            raise UsageError(f'--option {name}.…: "{name}" is not part of this sweep')


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _folder_names(made: Sequence[Cell]) -> list[str]:
    names = []
    for cell in made:
        parts = [value if key in _NAMES else f"{key.replace('_', '-')}={value}" for key, value in cell.settings.items()]
        name = re.sub(r"[^\w.=-]+", "-", "_".join(parts)).strip("-.") or "cell"
        names.append(name)
    for at, (name, cell) in enumerate(zip(names, made, strict=True)):
        if len(name) > 100 or names.count(name) > 1:
            mark = hashlib.sha256(dumps(cell.settings).encode()).hexdigest()[:8]
            names[at] = f"{name[:90]}-{mark}"
    return names


# --- running it ------------------------------------------------------------------------------------------------------


@dataclass
class SweepResult:
    """Attributes:
    out: folder of the sweep.
    cells: in the order they were run.
    interrupted: by Ctrl-C; what was finished is kept.
    """

    out: Path
    cells: list[Cell]
    interrupted: bool

    @property
    def failures(self) -> list[str]:
        """Why the exit code has to be 1; empty when all is well."""
        failed = [f"{cell.name}: {cell.error}" for cell in self.cells if cell.state == "failed"]
        return failed + [f"{cell.name}: {problem}" for cell in self.cells for problem in cell.problems]


def new_folder() -> Path:
    """A folder under `runs/` that is not there yet."""
    base = Path("runs") / f"{datetime.datetime.now():%Y-%m-%d_%H%M%S}-sweep"
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


def prepare(
    base: Plan, grid: Mapping[str, Sequence[Any]], out: Path, resume: bool = False, elsewhere: bool = False
) -> list[Cell]:
    """The cells, each checked as far as that goes without a model; done ones are marked.

    Args:
        elsewhere: see `Executor`; devices that are not here are no mistake then.

    Raises:
        UsageError and its kin: the first thing that is wrong with any cell, or a folder that holds something else.
    """
    made = cells(base, grid, out)
    file = out / SWEEP
    if file.exists() and not resume:
        raise RunFolderError(f"{out}: holds a sweep already; go on with --resume, or name another folder with --out")
    if resume and not file.exists():
        raise RunFolderError(f"{out}: no sweep to resume there; leave --resume out to start one")
    if not file.exists() and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out}: holds other files; name a new or empty folder with --out")
    for cell in made:
        try:
            check(cell.plan)
        except UsageError as error:
            if not (elsewhere and isinstance(error, PlacementError)):
                raise type(error)(f"cell {cell.name}: {error}") from None
        if cell.plan.resume:
            manifest = RunFolder(cell.folder).manifest()
            cell.attempts = list((manifest.get("executor") or {}).get("attempts") or [])
            runs._check_same(manifest.get("plan") or {}, to_json(cell.plan), cell.folder)
            if manifest.get("finished") and not manifest.get("interrupted") and not _failed_before(file, cell.name):
                cell.state = "done"
    return made


def notes_of(cells: Iterable[Cell]) -> list[str]:
    """What was chosen for them, each thing once."""
    return list(dict.fromkeys(cell.note for cell in cells if cell.note))


def _failed_before(file: Path, name: str) -> bool:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))["cells"]
        return any(cell["name"] == name and cell["state"] == "failed" for cell in known)
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFolderError(f"{file}: not the file of a sweep; written by something else?") from None


def sweep(
    base: Plan,
    grid: Mapping[str, Sequence[Any]],
    out: Path,
    listener: Listener | None = None,
    argv: Sequence[str] = (),
    resume: bool = False,
    executor: Executor | None = None,
) -> SweepResult:
    """Runs every cell that is not done yet.

    Ctrl-C (KeyboardInterrupt) ends the cell that is running as it ends a run, and the sweep with it; a second one
    passes through.

    Raises:
        UsageError and its kin: before anything was measured or written.
    """
    listener = listener or Listener()
    executor = executor or LocalExecutor()
    made = prepare(base, grid, out, resume, executor.elsewhere)
    left = [cell for cell in made if cell.state != "done"]
    running = executor.run(left, listener, argv)  # what it refuses, it refuses here
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "schema": SCHEMA, "specbench": __version__, "argv": [redact(word) for word in argv], "started": now(),
        "grid": {key: [_word(value) for value in _listed(key, values)] for key, values in grid.items()},
        "plan": to_json(base),
    }  # fmt: skip

    def write(**more: Any) -> None:
        document = {**facts, **more, "cells": [cell.record() for cell in made]}
        write_atomically(out / SWEEP, dumps(document, indent=2) + "\n")

    write()
    done = len(made) - len(left)
    listener.note(f"{len(made)} cells" + (f", {done} of them done already" if done else ""))
    for note in notes_of(made):
        listener.note(note)
    interrupted = False
    try:
        for cell in running:
            interrupted = interrupted or cell.state == "interrupted"
            write()
            if cell.error:
                listener.warn(f"cell {cell.name}: {cell.error}")
    except KeyboardInterrupt:
        interrupted = True
        listener.end()
    write(interrupted=interrupted, finished=now())
    return SweepResult(out, made, interrupted)


class LocalExecutor:
    """One cell after the other, in this process."""

    elsewhere = False

    def run(self, cells: Sequence[Cell], listener: Listener, argv: Sequence[str]) -> Iterator[Cell]:
        shelf = Shelf()
        try:
            for number, cell in enumerate(cells, start=1):
                listener.note(f"cell {number} of {len(cells)}: {cell.name}")
                run_cell(cell, listener, argv, shelf)
                yield cell
                if cell.state == "interrupted":
                    return
        finally:
            shelf.close()


def run_cell(cell: Cell, listener: Listener, argv: Sequence[str] = (), models: runs.Models | None = None) -> None:
    """Runs one cell and writes into it how that ended; models on a shelf stay loaded unless it failed."""
    if isinstance(models, Shelf):
        models.begin()
    try:
        result = runs.run(cell.plan, listener, argv, models=models)
    except KeyboardInterrupt:
        cell.state = "interrupted"
        listener.end()
    except Exception as error:  # noqa: BLE001 - whatever happens in one cell, the others go on
        listener.end()
        named = "" if isinstance(error, SpecbenchError) else f"{type(error).__name__}: "
        cell.state, cell.error = "failed", " ".join(f"{named}{error}".split())
        if isinstance(models, Shelf):
            models.close()  # whatever went wrong may have left a model in a state that no prompt should meet
    else:
        cell.state, cell.error = "interrupted" if result.interrupted else "done", None
        cell.problems = [] if result.interrupted else result.failures


class Shelf(runs.Models):
    """Models that stay loaded between cells. A model that the running cell has not asked for so far gives way when
    another one has to be loaded, so that no more is in memory than a cell needs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[Any, ...], CachedModel] = {}
        self.used: set[tuple[Any, ...]] = set()

    def begin(self) -> None:
        self.used = set()

    def load(self, info: ModelInfo, **how: Any) -> CachedModel:
        # Two roles of the same weights need a cache each.
        key = (info.role, info.fingerprint, str(info.path), *sorted(how.items()))
        if key not in self.kept:
            for other in [other for other in self.kept if other not in self.used]:
                self.kept.pop(other).close()
            self.kept[key] = super().load(info, **how)
        self.used.add(key)
        self.kept[key].reset()
        return self.kept[key]

    def release(self, model: CachedModel) -> None:
        with contextlib.suppress(WorkerError):  # of a worker that is gone; the cell has failed with it
            model.trace = None
            model.reset()

    def close(self) -> None:
        for model in self.kept.values():
            model.close()
        self.kept = {}
