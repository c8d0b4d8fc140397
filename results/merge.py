"""Run folders of several sites made into one.

Runs become one run where their records may stand in one row: the same arms of the same models under the same settings,
on the same kind of hardware with the same versions. Then prompts and tasks are put together, and what two runs both
measured becomes further repeats. Anything else would be an average of unlike things and is refused, or, if asked for,
kept apart: a folder of runs, which `compare`, `report` and `show` take like the folder of a sweep. Cells of sweeps are
merged by their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import MeasurementError, RunFolderError, UsageError
from . import lossless, machines
from .manifest import now
from .records import MANIFEST, SAMPLES, RunFolder, Sample, dumps, write_atomically
from .runs import SWEEP, folders, short_names, spelled
from .summary import summarise
from .sweep import SCHEMA
from .tables import EXPORTS, write_exports

_PLAN_MAY_DIFFER = {
    "out", "resume", "overwrite", "trace", "warmup", "require_lossless", "limit", "repeats", "task", "options",
    "target", "draft",  # models are compared by what they hold, not by where they lie
}  # fmt: skip
_SETTINGS_MAY_DIFFER = {"repeats", "require_lossless", "templates", "target", "draft"}
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
_OF_A_ROLE = (
    "device",
    "devices",
    "threads",
    "dtype",
    "runtime",
    "kernels",
    "follows",
    "served",
    "software",
)  # and the fingerprint


@dataclass
class Part:
    """A run to be merged.

    Attributes:
        name: of the run, as short as tells it from the others.
        cell: its name in the sweep that it comes from; None for a run of its own.
    """

    path: Path
    name: str
    cell: str | None
    manifest: dict[str, Any]
    samples: list[Sample]

    @property
    def environment(self) -> dict[str, Any]:
        return self.manifest.get("environment") or {}


@dataclass
class Merged:
    """What came out: `runs` are folder names with how many runs are in each; "." for a result that is one run."""

    out: Path
    runs: dict[str, int]


def merge(out: Path, paths: Sequence[Path], apart: bool = False) -> Merged:
    """Writes a new folder; the runs themselves are not touched.

    Args:
        apart: what cannot be one run stands beside the others, instead of being refused.

    Raises:
        UsageError: runs that would be averaged and must not be, each difference named; or the same records twice.
        RunFolderError: a folder that is no run, or `out` holds something already.
    """
    parts = read(paths)
    if len(parts) < 2:
        raise UsageError("nothing to merge; name two or more runs, as in: specbench merge runs/all runs/a runs/b")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out}: holds something already; name a new or empty folder")
    groups = _groups(parts, apart)
    single = len(groups) == 1 and not any(part.cell for part in parts)
    names = ["."] if single else _names(groups)
    made = [
        join(group) if len(group) > 1 else None for group in groups
    ]  # all that can be wrong is found before writing
    out.mkdir(parents=True, exist_ok=True)
    for name, group, joined in zip(names, groups, made, strict=True):
        if joined is None:
            _copy(group[0], out / name)
        else:
            _write(out / name, *joined)
    if not single:
        _write_list(out, names, groups)
    return Merged(out, {name: len(group) for name, group in zip(names, groups, strict=True)})


def read(paths: Iterable[Path]) -> list[Part]:
    """Run folders, and the cells of sweeps. Raises RunFolderError, and UsageError for a folder that is named twice."""
    found = folders(paths, "its records would count twice")
    names = short_names([path for path, _ in found])
    parts = []
    for (path, cell), name in zip(found, names, strict=True):
        folder = RunFolder(path)
        manifest, samples = folder.manifest(), folder.samples()
        if not manifest.get("arms") or not samples:
            raise RunFolderError(f"{path}: holds no measured sample")
        parts.append(Part(path, name, cell, manifest, samples))
    return parts


# --- what may be one run ---------------------------------------------------------------------------------------------


def _groups(parts: Sequence[Part], apart: bool) -> list[list[Part]]:
    """Runs that become one: those of a cell, or all that are of no sweep."""
    groups: list[list[Part]] = []
    for part in parts:
        rivals = [group for group in groups if group[0].cell == part.cell]
        home = next((group for group in rivals if not any(differences(one, part) for one in group)), None)
        if home is not None:
            home.append(part)
        elif rivals and not apart:
            first = next(one for one in rivals[0] if differences(one, part))
            what = "; ".join(f"{name}: {ours} and {theirs}" for name, ours, theirs in differences(first, part))
            raise UsageError(
                f"{first.name} and {part.name} cannot be one run, since their records would be averaged, and they "
                f"differ in {what}. --apart keeps such runs beside each other, to be compared"
            )
        else:
            groups.append([part])
    return groups


def differences(one: Part, other: Part) -> list[tuple[str, str, str]]:
    """Name and both values of everything that forbids to put the records of two runs into one row."""
    found = machines.differences(one.environment, other.environment)
    ours, theirs = _facts(one), _facts(other)
    found += [
        (name, spelled(ours.get(name)), spelled(theirs.get(name)))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    return found + _other_prompts(one, other)


def _facts(part: Part) -> dict[str, Any]:
    manifest = part.manifest
    plan, settings = manifest.get("plan") or {}, manifest.get("settings") or {}
    tasks = {name.partition(":")[0] for name in plan.get("task") or ()}
    facts: dict[str, Any] = {"specbench": manifest.get("specbench")}
    packages = part.environment.get("packages") or {}
    facts |= {name: packages.get(name) for name in _PACKAGES}
    facts |= {name: value for name, value in plan.items() if name not in _PLAN_MAY_DIFFER}
    facts |= {name: value for name, value in settings.items() if name not in _SETTINGS_MAY_DIFFER}
    facts |= {name: manifest.get(name) for name in ("vocab_size", "eos", "baseline")}
    options = plan.get("options") or {}
    facts |= {f"options of {name}": keys for name, keys in options.items() if name not in tasks}
    for arm in manifest["arms"]:
        facts[f"arm {arm['name']}"] = arm.get("options")
        for role, known in (arm.get("roles") or {}).items():
            facts |= {f"{arm['name']}'s {role}, {name}": known.get(name) for name in _OF_A_ROLE}
            facts[f"{arm['name']}'s {role}, by fingerprint"] = known.get("fingerprint")
    return facts


def _other_prompts(one: Part, other: Part) -> list[tuple[str, str, str]]:
    """A prompt of the same name that is another one: other text, template or tokenizer."""
    ours = _hashes(one)
    changed = [(*key, mark) for key, mark in _hashes(other).items() if ours.get(key, mark) != mark]
    return [(f"prompt {task} {ident}", ours[task, ident][:12], mark[:12]) for task, ident, mark in changed[:1]]


def _hashes(part: Part) -> dict[tuple[str, str], str]:
    return {(prompt["task"], prompt["id"]): prompt["hash"] for prompt in part.manifest.get("prompts") or []}


# --- one run of several ----------------------------------------------------------------------------------------------


def join(parts: Sequence[Part]) -> tuple[dict[str, Any], list[Sample]]:
    """Manifest and samples of all of them. What several have measured becomes repeats, in their order.

    Raises:
        UsageError: two of them hold the same records.
    """
    _refuse_copies(parts)
    samples: list[Sample] = []
    repeats: dict[tuple[str, str], int] = {}  # the next free one of a prompt, the same in all arms
    group = 0
    for part in parts:
        begins = dict(repeats)
        for sample in part.samples:
            prompt = (sample.task, sample.prompt_id)
            moved = dataclasses.replace(
                sample, repeat=sample.repeat + begins.get(prompt, 0), group=sample.group + group
            )
            samples.append(moved)
            repeats[prompt] = max(repeats.get(prompt, 0), moved.repeat + 1)
        group = 1 + max(sample.group for sample in samples)
    return _manifest(parts, max(repeats.values())), samples


def _refuse_copies(parts: Sequence[Part]) -> None:
    """A time in nanoseconds that occurs twice for the same prompt and arm was measured once."""
    seen: dict[tuple[Any, ...], str] = {}
    for part in parts:
        mine = {
            (sample.arm, sample.task, sample.prompt_hash, sample.turn, sample.ttft_ns, sample.e2e_ns)
            for sample in part.samples
            if sample.ok and sample.kind == "measure"
        }
        common = [key for key in mine if key in seen]
        if common:
            raise UsageError(
                f"{seen[common[0]]} and {part.name} hold the same records ({len(common)} of {len(mine)}); merged, they "
                "would count twice"
            )
        seen |= dict.fromkeys(mine, part.name)


def _manifest(parts: Sequence[Part], repeats: int) -> dict[str, Any]:
    """Of the first, with what the others add to it."""
    first, all_of = parts[0].manifest, [part.manifest for part in parts]
    found = dict(first)
    found.pop("executor", None)  # of a run, not of the whole: see `_origin`
    prompts = {(one["task"], one["id"]): one for each in all_of for one in each.get("prompts") or []}
    found["prompts"] = list(prompts.values())
    tasks = list(dict.fromkeys(task for each in all_of for task in (each.get("plan") or {}).get("task") or ()))
    options: dict[str, Any] = {}
    for each in reversed(all_of):
        options |= (each.get("plan") or {}).get("options") or {}
    changed = {"task": tasks, "options": options, "repeats": repeats, "out": None, "limit": None}
    found["plan"] = (first.get("plan") or {}) | changed
    templates = {one for each in all_of for one in (each.get("settings") or {}).get("templates") or ()}
    found["settings"] = (first.get("settings") or {}) | {"repeats": repeats, "templates": sorted(templates)}
    for name in ("load_ns", "warmup"):
        found[name] = [one for each in all_of for one in each.get(name) or []]
    found["notes"] = list(dict.fromkeys(note for each in all_of for note in each.get("notes") or []))
    found["notes"].append(f"merged from {len(parts)} runs: {', '.join(part.name for part in parts)}")
    found["peak_memory_bytes"] = _largest(each.get("peak_memory_bytes") or {} for each in all_of)
    found["lossless"] = _lossless(each.get("lossless") for each in all_of)
    found["started"] = min(str(each.get("started")) for each in all_of)
    found["interrupted"] = any(each.get("interrupted") or "finished" not in each for each in all_of)
    found["finished"] = max(str(each.get("finished") or "") for each in all_of)
    found["resumed"] = sorted(time for each in all_of for time in each.get("resumed") or [])
    found["merged"] = [one for part in parts for one in part.manifest.get("merged") or [_origin(part)]]
    return found


def _largest(peaks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in peaks:
        for arm, value in each.items():
            found[arm] = max(found.get(arm) or 0, value or 0) or None
    return found


def _lossless(reports: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Counts added up; None where one run has no report, since its outputs were never compared."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for report in reports:
        if report is None:
            return None
        for task, arms in report.items():
            for arm, counts in arms.items():
                found.setdefault(task, {}).setdefault(arm, []).append(counts)
    return {task: {arm: lossless.added(each) for arm, each in arms.items()} for task, arms in found.items()}


def _origin(part: Part) -> dict[str, Any]:
    """What a merged manifest keeps of each run: where, when and by which code."""
    names = (
        "specbench",
        "commit",
        "argv",
        "started",
        "finished",
        "interrupted",
        "load_at_start",
        "load_at_end",
        "executor",
    )
    kept = {name: part.manifest[name] for name in names if name in part.manifest}
    return {"run": part.name, "samples": len(part.samples), **kept, "environment": part.environment}


# --- writing ---------------------------------------------------------------------------------------------------------


def _names(groups: Sequence[Sequence[Part]]) -> list[str]:
    """Of cells their names where one group has it, else those of the runs."""
    names = []
    for group in groups:
        cell = group[0].cell
        alone = cell is not None and sum(other[0].cell == cell for other in groups) == 1
        names.append(cell if alone and cell else group[0].name.replace("/", "--"))
    return [f"{name}-{at}" if names.count(name) > 1 else name for at, name in enumerate(names, start=1)]


def _write(path: Path, manifest: dict[str, Any], samples: list[Sample]) -> None:
    folder = RunFolder(path)
    folder.write_manifest(manifest)
    folder.rewrite(samples)
    with contextlib.suppress(MeasurementError):  # every sample failed
        write_exports(summarise(folder.manifest(), samples), path)


def _copy(part: Part, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, SAMPLES, *EXPORTS):
        if (part.path / name).is_file():
            shutil.copy2(part.path / name, path / name)


def _write_list(out: Path, names: Sequence[str], groups: Sequence[Sequence[Part]]) -> None:
    """`sweep.json`, by which a folder of runs is known."""
    cells = []
    for name, group in zip(names, groups, strict=True):
        whole = all(part.manifest.get("finished") and not part.manifest.get("interrupted") for part in group)
        cells.append({"name": name, "settings": {}, "state": "done" if whole else "interrupted", "error": None,
                      "problems": [], "merged": [part.name for part in group]})  # fmt: skip
    document = {"schema": SCHEMA, "specbench": __version__, "merged": now(), "grid": {}, "cells": cells}
    write_atomically(out / SWEEP, dumps(document, indent=2) + "\n")
