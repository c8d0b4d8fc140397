"""The manifest of a run: what was asked, of which models, on what hardware. Written before the first prompt."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import RunFolderError
from ..hardware import environment
from ..models.base import CachedModel
from ..strategies.base import Strategy
from .plan import to_json
from .prepare import Prepared
from .records import BASELINE, dumps

# Settings that change a number; `compare` refuses to mix runs that differ in one of them.
_SETTINGS = (
    "temperature", "top_k", "top_p", "seed", "verify", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_new_tokens", "max_new_tokens", "ignore_eos", "raw", "batch", "repeats", "require_lossless",
)  # fmt: skip


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def redact(word: str) -> str:
    """A word of the command line without what looks like a token or a key."""
    word = re.sub(r"://[^/\s@]+@", "://[redacted]@", word)  # user and password of an address
    word = re.sub(r"\bhf_\w{6,}", "hf_[redacted]", word)
    return re.sub(r"(?i)\b((?:api[-_]?)?(?:key|token|secret|password))=\S+", r"\1=[redacted]", word)


def new_manifest(prepared: Prepared, argv: Sequence[str]) -> dict[str, Any]:
    """All that is known before a model is loaded; `docs/files.md` describes every field."""
    plan, infos = prepared.plan, prepared.infos
    arms, reference = prepared.checked.arms, prepared.checked.reference
    settings = {name: getattr(plan, name) for name in _SETTINGS}
    several_turns = any(len(prompt.turns) > 1 for _, prompt in prepared.prompts)
    return {
        "specbench": __version__,
        "commit": environment.commit(Path(__file__).resolve().parents[1]),
        "argv": [redact(word) for word in argv],
        "started": now(),
        "plan": to_json(plan),
        "settings": settings
        | {
            "target": infos["target"].name,
            "draft": ",".join(info.name for role, info in infos.items() if role != "target") or None,
            "dtype": prepared.dtype,
            "runtime": plan.runtime,
            "threads": prepared.checked.placement.threads,
            "tp": plan.tp,
            "batch_prompts": plan.prompts_per_call if plan.batch > 1 else None,
            "templates": sorted({turn.template for turn in prepared.first_turns}),
        },
        "arms": [
            {"name": arm.name, "options": dataclasses.asdict(arm.options), "roles": {}} | _facts(arm.strategy)
            for arm in arms
        ],
        "baseline": reference if reference == BASELINE else None,
        "replayed_answers_of": reference if several_turns else None,
        "models": {role: info.record() for role, info in infos.items()},
        "vocab_size": prepared.vocab_size,
        "eos": list(prepared.eos),
        "prompts": [
            {"task": turn.task, "id": turn.prompt.id, "hash": turn.hash, "tokens": len(turn.ids)}
            for turn in prepared.first_turns
        ],
        "environment": environment.environment(),
        "load_at_start": environment.load(),
        "load_ns": [],
        "warmup": [],
        "peak_memory_bytes": {},
        "lossless": None,
        "lossless_reference": None,
        "notes": [],
    }


def check_same_work(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raises RunFolderError where a run to resume read other prompts or other models than it would now."""
    new = json.loads(dumps(new))
    for what in ("vocab_size", "eos"):
        if old.get(what) != new[what]:
            raise RunFolderError(f"{path}: {what} was {old.get(what)} and is {new[what]} now; start a new run")
    for role, model in new["models"].items():
        before = (old.get("models") or {}).get(role) or {}
        if before.get("fingerprint") != model["fingerprint"]:
            raise RunFolderError(f"{path}: the {role} is not the one that was measured ({model['spec']} has changed)")
    hashes = {(prompt["task"], prompt["id"]): prompt["hash"] for prompt in old.get("prompts") or []}
    for prompt in new["prompts"]:
        if hashes.get((prompt["task"], prompt["id"])) != prompt["hash"]:
            raise RunFolderError(f"{path}: {prompt['task']} {prompt['id']} is not the prompt that was measured")
    if (old.get("settings") or {}).get("dtype") != new["settings"]["dtype"]:
        raise RunFolderError(f"{path}: was measured in {old['settings'].get('dtype')}; start a new run")


def different_environment(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs in hardware and software between two sessions of one run, in words; empty if nothing does."""
    before, after = old.get("environment") or {}, json.loads(dumps(new["environment"]))
    parts = [
        f"{key}: {before.get(key)}, then {after[key]}"
        for key in ("cpu", "cores", "gpus")
        if before.get(key) != after[key]
    ]
    packages = before.get("packages") or {}
    parts += [
        f"{name} {packages.get(name)}, then {version}"
        for name, version in after["packages"].items()
        if packages.get(name) != version
    ]
    return "; ".join(parts)


def describe_arm(
    prepared: Prepared, name: str, strategy: Strategy, models: Mapping[str, CachedModel]
) -> dict[str, Any]:
    """An arm as it really runs, once its models are loaded."""
    placement, roles = prepared.checked.placement, {}
    for role, model in models.items():
        if (told := model.record()) is not None:
            roles[role] = told
            continue
        device = placement.of(role)
        roles[role] = {
            "model": prepared.infos[role].name,
            "device": str(device),
            "devices": [str(each) for each in placement.all_of(role)],
            "threads": placement.threads_of(role) if device.kind == "cpu" else None,
            "dtype": model.dtype,
            "runtime": model.runtime,
            "kernels": model.kernels,
            "fingerprint": prepared.infos[role].fingerprint,
            "weight_bytes": model.weight_bytes,
            "follows": model.original is not None,
        }
    return {"name": name, "options": dataclasses.asdict(strategy.options), "roles": roles} | _facts(type(strategy))


def _facts(strategy: type[Strategy]) -> dict[str, Any]:
    return {
        "strategy": strategy.name,
        "lossless": strategy.lossless,
        "engine": strategy.engine,
        "reports_drafts": strategy.reports_drafts,
        "sends_text": strategy.sends_text,
        "continuous": strategy.continuous,
    }
