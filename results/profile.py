"""The hardware profile: measured once per hardware, software and models, kept as JSON, and read back after that.

A profile holds what `hardware.probe` measured of the machine, what `profile_models` measured of target and draft, and
what `prediction` makes of both. Everything in it but the part called `predicted` is measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import SpecbenchError
from ..hardware import devices, environment, probe, probe_cpu, probe_rates, probe_workers
from ..hardware.clock import Clock
from ..hardware.devices import Device
from ..hardware.probe_timing import Budget, budget_for
from ..models.builtin import cache_folder
from ..models.cost_curve import CostCurve
from ..strategies import registry
from . import prediction, profile_models
from .forecasts import FOLDER, FORMAT
from .listener import Listener
from .manifest import now
from .plan import Plan
from .profile_models import CONTEXT, Models
from .records import dumps, write_atomically

_STEERING = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True)
class Profile:
    """A profile and where it came from.

    Attributes:
        document: JSON-safe; see `docs/hardware.md`.
        path: of the file in the cache, or None where that could not be written.
        cached: whether it was there already.
    """

    document: dict[str, Any]
    path: Path | None
    cached: bool


def profile(
    plan: Plan,
    with_models: bool,
    quick: bool = False,
    fresh: bool = False,
    listener: Listener | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measures the hardware, and with models their costs, or reads what was measured before.

    Args:
        plan: models, placement and precision; the rest of it does not matter here.
        with_models: False for the hardware alone.
        quick: in less than a minute, with fewer points; a full profile that is there already is as good.
        fresh: measure, whatever is there.

    Raises:
        UsageError and its kin: before anything is measured.
    """
    listener = listener or Listener()
    models = profile_models.find(plan, with_models, listener)
    facts = identity(models)
    if not fresh:
        for found in (read(facts, False), read(facts, True) if quick else None):
            if found is not None:
                if found.document["models"]:  # by the formulas and strategies of now
                    found.document["predicted"] = predicted(found.document)
                return found
    devices.apply(models.placement)
    document = measure(models, facts, budget_for(quick, clock), listener)
    path = path_of(facts, quick)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dumps(document) + "\n")
    except OSError as error:
        listener.warn(f"{path}: cannot be written ({error.strerror}); the profile is not kept")
        return Profile(document, None, False)
    return Profile(document, path, False)


# --- the cache -------------------------------------------------------------------------------------------------------


def identity(models: Models) -> dict[str, Any]:
    """All that a profile depends on and that can be known without measuring: hardware, software, models, places."""
    known = environment.environment()
    plan, placement = models.plan, models.placement
    return {
        "format": FORMAT,
        "specbench": __version__,
        "hardware": {
            name: known[name] for name in ("cpu", "architecture", "cores", "cgroup_cpu_limit", "memory_bytes", "gpus")
        },
        "packages": {name: known["packages"][name] for name in ("torch", "transformers", "numpy")},
        "variables": {name: os.environ[name] for name in _STEERING if name in os.environ},
        "devices": {role: str(placement.of(role)) for role in models.infos or ("target",)},
        "threads": {role: placement.threads_of(role) for role in models.infos or ("target",)},
        "dtype": models.dtype if models.infos else None,
        "runtime": plan.runtime if models.infos else None,
        "exact": plan.exact,
        "models": {
            role: {"fingerprint": info.fingerprint, "quant": models.quant(role)} for role, info in models.infos.items()
        },
    }


def path_of(facts: Mapping[str, Any], quick: bool) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / FOLDER / f"{key}-{'quick' if quick else 'full'}.json"


def read(facts: Mapping[str, Any], quick: bool) -> Profile | None:
    """The profile in the cache; None where there is none that can be read."""
    path = path_of(facts, quick)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("identity") != json.loads(dumps(facts)):
        return None
    return Profile(document, path, True)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(models: Models, facts: Mapping[str, Any], budget: Budget, listener: Listener) -> dict[str, Any]:
    """The document of a profile. The process has to be on the target's cores already."""
    from ..models import native

    placement = models.placement
    roles = tuple(models.infos) or ("target",)
    cores = devices.available_cores()
    threads = [placement.threads, *(placement.threads_of(r) for r in roles if placement.of(r).kind == "cpu")]
    hardware = probe.probe(threads, cores, budget, listener.stage, native.reads, native.products)
    found: dict[str, Any] = {"models": {}, "together": None}
    if models.infos:
        found = profile_models.measure(models, hardware, budget, listener)
    listener.stage("measuring two processes side by side")
    hardware["workers"] = _side_by_side(models, hardware, budget)
    hardware["busy_cores_after"] = probe_cpu.busy_cores(cores)
    document = {
        "format": FORMAT,
        "specbench": __version__,
        "made": now(),
        "quick": budget.quick,
        "took_s": round(budget.spent, 1),
        "identity": dict(facts),
        "hardware": hardware,
        **found,
        "cost_ratio": None,
        "predicted": None,
    }
    if "target" in found["models"]:
        document["cost_ratio"] = {
            role: round(model["one_token_ms"] / found["models"]["target"]["one_token_ms"], 4)
            for role, model in found["models"].items()
            if role != "target"
        }
        document["predicted"] = predicted(document)
    return document


def _side_by_side(models: Models, hardware: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    """On the cores of target and draft where these are apart, else on halves of what may be used."""
    last = probe_cpu.last_level(hardware["cpu"]["caches"])
    cache = last["bytes"] // 4 if last else None
    target, draft = models.placement.of("target"), models.placement.of("draft")
    apart: tuple[Device, Device] | None = None
    if target.cores and draft.cores and target != draft:
        apart = target, draft
    size = max(probe_rates.MIB, hardware["memory"]["buffer_bytes"] // 2)
    return probe_workers.side_by_side(devices.available_cores(), size, cache, budget, apart)


def predicted(document: Mapping[str, Any], context: int = CONTEXT, rows: int = 1) -> dict[str, Any]:
    """What the strategies that there are should bring on the measured curves."""
    places = document["identity"]["devices"]
    apart = "draft" in places and places["draft"] != places["target"]
    curves = {role: CostCurve.from_record(model["curve"]) for role, model in document["models"].items()}
    together = document["together"] or {"target_factor": 1.0, "draft_factor": 1.0}
    drafts = [curve for role, curve in curves.items() if role != "target"]
    pair = prediction.Pair(
        curves["target"], drafts, context, rows, apart, (together["target_factor"], together["draft_factor"])
    )
    return {
        "label": "predicted from measured costs, not measured",
        "context": context,
        "rows": rows,
        "acceptances": list(prediction.ALPHAS),
        "strategies": prediction.predict(pair, registry.names()),
    }


def save(found: Profile, folder: Path) -> list[Path]:
    """Writes `profile.json`, and of a profile with models the cost curves as `cost-curves.png` and `.svg`.

    Raises:
        UsageError: there are curves to draw, and matplotlib is not installed.
        SpecbenchError: the folder cannot be written.
    """
    from .profile_report import save_plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "profile.json"
        write_atomically(path, dumps(found.document) + "\n")
    except OSError as error:
        raise SpecbenchError(f"{folder}: cannot be written: {error.strerror}") from None
    return [path, *(save_plots(found.document, folder) if found.document["models"] else [])]
