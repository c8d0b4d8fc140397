"""Run folders that are compared: read as columns, what differs between them, and what their arms are called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RunFolderError, UsageError, unknown
from . import served, summary
from .columns import Columns, Names, read
from .records import RunFolder

SWEEP = "sweep.json"


@dataclass
class Run:
    """One run folder, read."""

    name: str
    path: Path
    manifest: dict[str, Any]
    columns: Columns

    @property
    def hardware(self) -> str:
        return summary.hardware(self.manifest.get("environment") or {}, self.arms)

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        return {arm["name"]: arm for arm in self.manifest.get("arms") or []}


@dataclass(frozen=True)
class Difference:
    """Something in which the runs differ.

    Attributes:
        kind: `setting`, `model` or `environment`.
        values: of each run, as text.
        refused: runs that differ in it are compared with --force only.
    """

    kind: str
    name: str
    values: tuple[str, ...]
    refused: bool = False


# --- reading ---------------------------------------------------------------------------------------------------------


def load(paths: Sequence[Path]) -> list[Run]:
    """Reads run folders; the folder of a sweep stands for its cells.

    Raises:
        RunFolderError: one clear line for a folder that is missing, empty, foreign, broken or of a newer schema.
        UsageError: a folder that is named twice.
    """
    found = [path for path, _ in folders(paths, "a run cannot be compared with itself")]
    names: dict[str, Names] = {}
    runs = []
    for path, name in zip(found, short_names(found), strict=True):
        folder = RunFolder(path)
        manifest = folder.manifest()
        _check_shape(folder, manifest)
        columns = read(folder, names)
        _check_arms(folder, manifest, columns)
        runs.append(Run(name, path, manifest, columns))
    return runs


def folders(paths: Iterable[Path], twice: str) -> list[tuple[Path, str | None]]:
    """Run folders, each with its name among the cells of the sweep that it was found in; None for one of its own.

    Args:
        twice: why none may be named twice.

    Raises:
        RunFolderError: a sweep without a cell.
        UsageError: a folder that is named twice.
    """
    found: list[tuple[Path, str | None]] = []
    for path in paths:
        found += [(cell, cell.name) for cell in cells(path)] if is_sweep(path) else [(path, None)]
    seen: set[Path] = set()
    for path, _ in found:
        real = path.resolve()
        if real in seen:
            raise UsageError(f"{path}: named twice; {twice}")
        seen.add(real)
    return found


def is_sweep(path: Path) -> bool:
    """Whether a folder holds runs rather than being one."""
    try:
        return (path / SWEEP).is_file()
    except OSError:  # a folder that may not be entered; reading its manifest says so
        return False


def cells(path: Path) -> list[Path]:
    """Run folders of a sweep. Raises RunFolderError where there is none."""
    found = sorted(folder.parent for folder in path.glob("*/manifest.json") if RunFolder(folder.parent).exists())
    if not found:
        raise RunFolderError(f"{path}: a sweep without a finished cell")
    return found


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path; as many parts as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _check_shape(folder: RunFolder, manifest: dict[str, Any]) -> None:
    arms = manifest.get("arms")
    named = [arm for arm in arms if isinstance(arm, dict) and isinstance(arm.get("name"), str)] if arms else []
    if not isinstance(arms, list) or not named or len(named) < len(arms):
        raise RunFolderError(f"{folder.manifest_path}: has no list of arms; written by something else?")
    for name in ("settings", "environment"):
        if not isinstance(manifest.get(name) or {}, dict):
            raise RunFolderError(f"{folder.manifest_path}: {name} is not an object; written by something else?")


def _check_arms(folder: RunFolder, manifest: dict[str, Any], columns: Columns) -> None:
    if not len(columns):
        raise RunFolderError(f"{folder.path}: holds no measured sample")
    known = {arm["name"] for arm in manifest["arms"]}
    for number in np.unique(columns["arm"]):
        name = columns.names["arm"].texts[number]
        if name not in known:
            raise RunFolderError(
                f'{folder.path}: the samples name the arm "{name}", the manifest does not ({", ".join(sorted(known))})'
            )


# --- what differs ----------------------------------------------------------------------------------------------------

_SAMPLING = ("top_k", "top_p", "seed", "verify")  # without a temperature they change nothing
_REFUSED = (
    "temperature", *_SAMPLING, "presence_penalty", "frequency_penalty", "repetition_penalty", "min_new_tokens",
    "max_new_tokens", "ignore_eos", "raw", "batch", "stop", "suppress_tokens", "dtype",
    "target_quant",
)  # fmt: skip
_OF_THE_MODEL = ("dtype", "target_quant")  # a server has its own, which nobody knows
_OF_THE_PLAN = ("stop", "suppress_tokens", "target_quant", "exact", "place")
_SHOWN_AS_MODEL = ("target", "draft")
_UNTOLD = ("cpu_flags", "parallel_info", "cores", "memory_bytes", "require_lossless")


def differences(runs: Sequence[Run]) -> list[Difference]:
    """In what the runs differ: models, settings, then environment; what forbids a comparison first."""
    greedy = not any((run.manifest.get("settings") or {}).get("temperature") for run in runs)
    found = _model_differences(runs)
    for name, values in differing_facts([_settings(run) for run in runs]):
        refused = name in _REFUSED and not (greedy and name in _SAMPLING)
        if name in _OF_THE_MODEL:
            ours = {value for value, run in zip(values, runs, strict=True) if not served.only_served(run.arms)}
            refused = refused and len(ours) > 1
        found.append(Difference("setting", name, values, refused))
    found += [
        Difference("environment", name, values) for name, values in differing_facts([_environment(run) for run in runs])
    ]
    return sorted(found, key=lambda difference: not difference.refused)


def _settings(run: Run) -> dict[str, Any]:
    plan, settings = run.manifest.get("plan") or {}, run.manifest.get("settings") or {}
    more = {name: plan[name] for name in _OF_THE_PLAN if name in plan}
    return {name: value for name, value in (more | settings).items() if name not in _SHOWN_AS_MODEL}


def _environment(run: Run) -> dict[str, Any]:
    flat: dict[str, Any] = {name: run.manifest.get(name) for name in ("specbench", "commit")}
    for name, value in (run.manifest.get("environment") or {}).items():
        if name == "gpus":
            flat[name] = ", ".join(str(gpu.get("name")) for gpu in value or []) or None
        elif isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def differing_facts(facts: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """Names and values of the facts that are not the same in all."""
    found = []
    for name in dict.fromkeys(name for one in facts for name in one):
        values = tuple(spelled(one.get(name)) for one in facts)
        if len(set(values)) > 1 and name not in _UNTOLD:
            found.append((name, values))
    return found


def spelled(value: Any) -> str:
    """A setting or a fact in a line of text; a long one is cut short."""
    if value is None or value == [] or value == "":
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _model_differences(runs: Sequence[Run]) -> list[Difference]:
    """The target has to be the same, by fingerprint; a draft may be another one, but not another one of that name."""
    found = []
    for role in dict.fromkeys(role for run in runs for role in _models(run)):
        models = [_models(run).get(role) for run in runs]
        there = [model for model in models if model]
        if len(set(there)) <= 1 and (role != "target" or len(there) in (0, len(runs))):
            continue
        prints = {name: {mark for other, mark in there if other == name} for name, _ in there}
        changed = any(len(marks) > 1 for marks in prints.values())
        refused = changed or (role == "target" and len({mark or name for name, mark in there}) > 1)
        values = tuple(f"{model[0]} ({(model[1] or 'no fingerprint')[:12]})" if model else "none" for model in models)
        if not changed and len({name for name, _ in there}) > 1:
            values = tuple(model[0] if model else "none" for model in models)
        found.append(Difference("model", role, values, refused))
    return found


def _models(run: Run) -> dict[str, tuple[str, str]]:
    """Name and fingerprint per role, from the arms, which know what was loaded, else from the plan."""
    found: dict[str, tuple[str, str]] = {}
    for arm in run.arms.values():
        for role, facts in (arm.get("roles") or {}).items():
            if facts.get("model"):
                found[role] = (str(facts["model"]), str(facts.get("fingerprint") or ""))
    for role, facts in (run.manifest.get("models") or {}).items():
        found.setdefault(role, (str(facts.get("spec")), str(facts.get("fingerprint") or "")))
    return found


def told(difference: Difference, runs: Sequence[Run]) -> str:
    """`dtype: float32 (a, b), bfloat16 (c)`; runs are counted where naming them all would hide the values."""
    by_value: dict[str, list[str]] = {}
    for value, run in zip(difference.values, runs, strict=True):
        by_value.setdefault(value, []).append(run.name)
    parts = []
    for value, names in by_value.items():
        parts.append(f"{value} ({', '.join(names) if len(names) <= 3 else f'{len(names)} runs'})")
    return f"{difference.name}: {', '.join(parts)}"


# --- arms, labels and baselines --------------------------------------------------------------------------------------


@dataclass
class ComparedArm:
    run: Run
    number: int  # of the run
    name: str
    facts: dict[str, Any]
    label: str = ""

    @property
    def key(self) -> tuple[int, str]:
        return (self.number, self.name)

    @property
    def where(self) -> str:
        return f"{self.run.name}:{self.name}"


def list_arms(runs: Sequence[Run]) -> list[ComparedArm]:
    """Every arm of every run, with a label that no other one has."""
    arms = [
        ComparedArm(run, number, name, facts) for number, run in enumerate(runs) for name, facts in run.arms.items()
    ]
    for name in dict.fromkeys(arm.name for arm in arms):
        same = [arm for arm in arms if arm.name == name]
        for arm, label in zip(same, _labels(name, same), strict=True):
            arm.label = label
    return arms


def _labels(name: str, same: Sequence[ComparedArm]) -> list[str]:
    """The name where it is the only one; else with what differs between its arms, else with the run."""
    if len(same) == 1:
        return [name]
    differing = differing_facts([_distinguishing(arm) for arm in same])
    labels = []
    for chosen in zip(*(values for _, values in differing), strict=True):
        facts = [f"{key}={value}" for (key, _), value in zip(differing, chosen, strict=True)]
        labels.append(f"{name} [{', '.join(facts)}]")
    if len(set(labels)) == len(same):
        return labels
    labels = labels or [name] * len(same)
    return [f"{label} @ {arm.run.name}" for label, arm in zip(labels, same, strict=True)]


def _distinguishing(arm: ComparedArm) -> dict[str, Any]:
    options = {key.replace("_", "-"): value for key, value in (arm.facts.get("options") or {}).items()}
    roles = arm.facts.get("roles") or {}
    models = {role: facts.get("model") for role, facts in roles.items() if role != "target"}
    dtypes = {f"{role} dtype" if role != "target" else "dtype": facts.get("dtype") for role, facts in roles.items()}
    return {**options, **models, **dtypes}


def _find(arms: Sequence[ComparedArm], name: str) -> list[ComparedArm]:
    """Every arm of that name, or the one of that label or `RUN:NAME`."""
    for named in ([arm for arm in arms if name in (arm.label, arm.where)], [arm for arm in arms if arm.name == name]):
        if named:
            return named
    raise UsageError(unknown("baseline", name, {arm.label for arm in arms} | {arm.where for arm in arms}))


def baselines(arms: Sequence[ComparedArm], name: str | None) -> dict[tuple[int, str], ComparedArm]:
    """For every arm, what it is compared with; a baseline with itself. Arms without any are left out."""
    default = [arm for arm in arms if arm.name == arm.run.manifest.get("baseline")]
    found = default if name is None else _find(arms, name)
    by_run = {arm.number: arm for arm in found}
    chosen = {}
    for arm in arms:
        baseline = by_run.get(arm.number)
        if baseline is None and len(found) > 1 and name is not None:
            which = ", ".join(other.where for other in found)
            raise UsageError(f"--baseline {name}: {arm.run.name} has none, several other runs do; name one of {which}")
        if baseline is None and found:
            baseline = found[0]
        if baseline is not None:
            chosen[arm.key] = baseline
    return chosen
