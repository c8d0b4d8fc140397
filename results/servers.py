"""`--target endpoint:URL#model`, which is short for a run whose only arm is a server, and what such arms rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..models.endpoint_options import without_secrets

if TYPE_CHECKING:
    from .plan import Arm, Plan

NAME = "endpoint"
PREFIX = f"{NAME}:"


def expand(
    given: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings and options with a target that is a server spelled out: the strategy `endpoint` with `url` and `model`,
    no baseline, and as target the model that `--tokenizer` names, of which only tokenizer and template are read.

    Raises:
        UsageError: no tokenizer, or something that only models of ours can do; no message holds what an address may
            hide.
    """
    settings, spelled = dict(given), {name: dict(keys) for name, keys in options.items()}
    target, tokenizer = settings.get("target"), settings.pop("tokenizer", None)
    if not isinstance(target, str) or not target.startswith(PREFIX):
        if tokenizer is not None:
            raise UsageError(f"--tokenizer {tokenizer}: goes with --target {PREFIX}URL#model; a model brings its own")
        return settings, spelled
    url, _, model = target.removeprefix(PREFIX).partition("#")
    shown = f"--target {PREFIX}{without_secrets(url)}"
    if tokenizer is None:
        raise UsageError(
            f"{shown}: needs --tokenizer, the model whose tokenizer and chat template make its prompts (no weights are "
            "read)"
        )
    others = [name for name in settings.get("strategy") or () if name != NAME]
    if others or settings.get("draft") or settings.get("baseline"):
        what = ", ".join(others) or ("--draft" if settings.get("draft") else "--baseline")
        raise UsageError(
            f"{shown}: a server is a run of its own, without {what}; to have both in one table, name a model with "
            f"--target and add --strategy {NAME} --option {NAME}.url=URL"
        )
    said = {"url": url} | ({"model": model} if model else {})
    other = spelled.get(NAME, {})
    if twice := [f"--option {NAME}.{key}" for key in said if other.get(key, said[key]) != said[key]]:
        raise UsageError(f"{shown}: says already what {' and '.join(twice)} would; leave out one of them")
    spelled.setdefault(NAME, {}).update(said)
    return settings | {"target": tokenizer, "strategy": (NAME,), "baseline": False}, spelled


def check(plan: Plan, arms: Sequence[Arm]) -> None:
    """What an arm that is a server cannot do as asked. Raises UsageError."""
    served = [arm.name for arm in arms if arm.strategy.sends_text]
    if served and plan.ignore_eos:
        raise UsageError(f"{', '.join(served)}: a server ends its answers by itself; leave --ignore-eos out")
    if plan.tp > 1 and only_servers(arms):
        raise UsageError(
            f"{', '.join(served)}: --tp {plan.tp} shares a target of ours among ranks, and here a server computes it, "
            "on as many GPUs as it was started with; leave --tp out"
        )


def only_servers(arms: Sequence[Arm]) -> bool:
    """Whether nothing is computed here, so that no model of ours has to be able to."""
    return all(arm.strategy.sends_text for arm in arms)
