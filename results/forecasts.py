"""Predicted beside measured: what a profile that is kept in the cache folder says of the rows of a run.

A profile fits a run if the models are the same files in the same dtype, runtime and places. One of other hardware or
other versions is better than none, and a note says what differs. The prediction is that of `prediction.replay`: the
steps that were counted in the run at the prices of the profile, so it is right where the cost curves are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..models.builtin import cache_folder
from ..models.cost_curve import CostCurve
from . import metrics
from .metrics import Drafting
from .prediction import Asked, Prices, Work, replay
from .records import Sample

FORMAT = 4  # of a profile's document
FOLDER = "profiles"
_SAME = ("fingerprint", "dtype", "runtime", "device", "threads")
_MACHINE = ("cpu", "architecture", "gpus")
_SHARE = ("cores", "cgroup_cpu_limit")  # of the machine, that the process may use
_PACKAGES = ("torch", "transformers", "numpy")
BYPASSING = ("cascade", "auto")


@dataclass(frozen=True)
class Kept:
    """A profile that fits.

    Attributes:
        document: see `docs/hardware.md`.
        notes: what is not the same as in the run, in words.
    """

    document: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """For the table."""
        which = f"predicted by the profile of {str(self.document.get('made'))[:10]}"
        return f"{which}: {'; '.join(self.notes)}" if self.notes else which

    @cached_property
    def prices(self) -> Prices:
        return prices(self.document)

    def fits(self, role: str, facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
        """Whether it has the model of a role as an arm ran it."""
        model = self.document["models"].get(role)
        if model is None or any(model.get(name) != facts.get(name) for name in _SAME):
            return False
        described = (manifest.get("models") or {}).get(role) or {}
        return model.get("head_vocab") == described.get("head_vocab")


def prices(document: Mapping[str, Any]) -> Prices:
    """The prices of a profile."""
    models, together = document["models"], document.get("together") or {}
    curves = {role: CostCurve.from_record(model["curve"]) for role, model in models.items()}
    reading = {
        role: (model["reading"]["tokens"], model["reading"]["ms"])
        for role, model in models.items()
        if model.get("reading")
    }
    factors = together.get("target_factor", 1.0), together.get("draft_factor", 1.0)
    return Prices(curves, reading, factors)


def find(manifest: Mapping[str, Any], folder: Path | None = None) -> Kept | None:
    """The profile in the cache folder that fits a run best: of the same machine and versions rather than of others, of
    the models of more arms, a full one rather than a quick one, the latest. None where there is none, and for batches,
    whose steps it does not tell."""
    if ((manifest.get("settings") or {}).get("batch") or 1) > 1:
        return None
    arms = [roles for arm in manifest.get("arms") or [] if (roles := arm.get("roles"))]
    found: list[tuple[tuple[Any, ...], Kept]] = []
    for document in documents(folder or cache_folder() / FOLDER):
        if bool(document["identity"].get("exact")) != bool((manifest.get("plan") or {}).get("exact")):
            continue
        kept = Kept(document, tuple(_differences(document, manifest)))
        told = sum(all(kept.fits(role, facts, manifest) for role, facts in roles.items()) for roles in arms)
        if told:
            rank = not kept.notes, told, not document.get("quick"), str(document.get("made"))
            found.append((rank, kept))
    return max(found, key=lambda one: one[0])[1] if found else None


def documents(folder: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and document.get("format") == FORMAT and document.get("models"):
            yield document


def _differences(document: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterable[str]:
    """What differs in hardware and versions, as far as both tell."""
    identity, environment = document["identity"], json.loads(json.dumps(manifest.get("environment") or {}, default=str))
    hardware = identity.get("hardware") or {}
    other = [name for name in _MACHINE if name in environment and hardware.get(name) != environment[name]]
    if other:
        told = ", ".join(f"{_told(hardware.get(name))}, the run on {_told(environment[name])}" for name in other[:1])
        yield f"it is of another machine ({told})"
    elif any(name in environment and hardware.get(name) != environment[name] for name in _SHARE):
        yield "it was made with other cores of this machine"
    there, here = identity.get("packages") or {}, environment.get("packages") or {}
    versions = [("specbench", identity.get("specbench"), manifest.get("specbench"))]
    versions += [(name, there.get(name), here.get(name)) for name in _PACKAGES]
    differing = [f"{name} {old}, the run with {new}" for name, old, new in versions if new and old != new]
    if differing:
        yield f"it was made with {', '.join(differing)}"


def _told(value: Any) -> str:
    if isinstance(value, list):
        names = [str(one.get("name", one)) if isinstance(one, dict) else str(one) for one in value]
        return " + ".join(names) or "no GPU"
    return str(value)


def speedup(
    kept: Kept,
    arm: Mapping[str, Any],
    manifest: Mapping[str, Any],
    drafting: Drafting,
    samples: int,
    told: Iterable[tuple[Steps, Levels | None]],
    tasks: Collection[str],
) -> float | None:
    """Predicted decode speed-up over plain decoding of one arm on some tasks; None where the profile cannot tell.

    Args:
        arm: of the manifest.
        drafting: what its measured steps did.
        samples: finished ones.
        told: steps and levels of each, see `asked`.
    """
    roles = arm.get("roles") or {}
    if arm.get("engine", "specbench") != "specbench" or not roles or not samples:
        return None
    if not all(kept.fits(role, facts, manifest) for role, facts in roles.items()):
        return None
    lengths = [prompt["tokens"] for prompt in manifest.get("prompts") or [] if prompt["task"] in tasks]
    if not lengths:
        return None
    levels = level_roles(arm, len(drafting.levels))
    if levels is None:
        return None
    strategy = arm.get("strategy", "")
    ran = asked(strategy, drafting, samples, told)
    work = Work(drafting, samples, ran, sum(lengths) / len(lengths), levels, following(roles))
    found = replay(strategy, work, kept.prices)
    return found[0] / found[1] if found else None


def replayed(arm: Mapping[str, Any], samples: Sequence[Sample], prices: Prices) -> tuple[float, float] | None:
    """Milliseconds of plain decoding and of an arm (its `strategy`, `roles`, `options`) for what its samples did."""
    drafting = metrics.drafting(samples)
    levels = level_roles(arm, len(drafting.levels))
    if levels is None:
        return None
    told = ((steps_of(sample), sample.levels) for sample in samples)
    ran = asked(arm["strategy"], drafting, len(samples), told)
    length = sum(sample.prompt_tokens for sample in samples) / len(samples)
    work = Work(drafting, len(samples), ran, length, levels, following(arm["roles"]))
    return replay(arm["strategy"], work, prices)


def following(roles: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """The roles of an arm whose models take over what the target has read."""
    return [role for role, facts in roles.items() if (facts or {}).get("follows")]


def level_roles(arm: Mapping[str, Any], count: int) -> list[str | None] | None:
    """The roles of an arm's levels from large to small, None for one without a model; None where it cannot be told."""
    roles = sorted(role for role in arm.get("roles") or {} if role != "target")
    found: list[str | None] = []
    for level in (arm.get("options") or {}).get("levels") or roles:
        kind, _, which = str(level).partition(":")
        if kind in ("ngram", "mag"):
            found.append(None)
        elif not which and level in roles:
            found.append(level)
        elif which.isdigit():
            found.append("draft" if which == "1" else f"draft{which}")
        else:
            return None
    return (found + [None] * (count - len(found)))[:count]


Steps = Sequence[tuple[int, int]]  # what each step after the prefill drafted, and what of it was accepted and emitted
Levels = Sequence[Sequence[Sequence[int]]]


def steps_of(sample: Sample) -> Steps:
    return [(drafted, min(accepted, kept)) for _, kept, drafted, accepted, _ in sample.steps[1:]]


def asked(strategy: str, drafting: Drafting, count: int, samples: Iterable[tuple[Steps, Levels | None]]) -> Asked:
    """How the first draft model was asked in so many samples.

    Strategies that may bypass it tell that by levels, and these only of steps that drafted something; all others ask it
    for every draft token.

    Args:
        drafting: what the samples did.
        samples: steps and levels of each, see `Sample`.
    """
    if strategy in BYPASSING:
        return _asked_at_times(samples)
    whole = sum(n for (drafted, accepted), n in drafting.outcomes.items() if drafted == accepted > 0)
    reviews: Counter[tuple[int, int]] = Counter()
    for (drafted, _), n in drafting.outcomes.items():
        if drafted:
            reviews[drafted, 0] += n
    return Asked(count, Counter({1: whole}), reviews)


def _asked_at_times(samples: Iterable[tuple[Steps, Levels | None]]) -> Asked:
    ran, missed, reviews = 0, Counter[int](), Counter[tuple[int, int]]()
    for steps, levels in samples:
        entries = iter(levels or ())
        behind: int | None = None  # tokens that the model has missed; None before it has read the prompt
        for drafted, accepted in steps:
            own, forwards, reviewed = _first_level(next(entries, ()) if drafted else (), drafted)
            if forwards:
                reviews[forwards, reviewed] += 1
                ran += behind is None
                if behind:
                    missed[behind] += 1
                behind = max(0, accepted - own + 1)
            elif behind is not None:
                behind += accepted + 1
    return Asked(ran, missed, reviews)


def _first_level(levels: Sequence[Sequence[int]], drafted: int) -> tuple[int, int, int]:
    """Tokens of its own that the target got, forwards, and the tokens of the level below that it looked at."""
    if not levels or len(levels[0]) < 3:  # older records do not tell forwards
        return 0, 0, 0
    own, forwards = levels[0][0], levels[0][2]
    direct = max(0, drafted - own) if len(levels) == 2 else 0  # of the level below, in the target's draft
    return own, forwards, max(0, levels[1][0] - direct) if len(levels) > 1 else 0
