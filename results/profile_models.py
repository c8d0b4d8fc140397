"""The models' part of a hardware profile: cost curves, and how near the memory bandwidth they come.

A forward of one token reads every weight and the whole KV cache once, so bytes over bandwidth is a time that no
forward undercuts (unless it all stays in a cache); what is measured beside it says how much is left to gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..hardware.devices import Placement, check_gpus, parse_placement
from ..hardware.probe_energy import EnergyMeter
from ..hardware.probe_timing import Budget
from ..models.base import CachedModel
from ..models.cost_curve import CostCurve
from ..models.drafts import describe_draft
from ..models.info import ModelInfo, describe
from ..models.load import check_cache, check_pair, check_runtime, load
from ..models.remote import cost_of, load_remote
from ..models.specs import parse
from .listener import Listener
from .plan import Plan

CONTEXT = 256
QUICK_COUNTS, FULL_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
CONTEXTS, ROWS = (CONTEXT, 1024, 4096), (1, 4)
PROMPT = 128  # tokens that a draft model is timed to read at once, as the prompt that it finds when it is first asked
_LEAST_RATIO = 0.95  # of T(n)/T(1)
_KEPT = 12.0  # seconds for what comes after the models
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Models:
    """What is to be profiled, checked, with no weights read.

    Attributes:
        infos: by role, the target first; empty for a profile of the hardware alone.
        dtype: that all of them run in.
    """

    plan: Plan
    placement: Placement
    infos: Mapping[str, ModelInfo]
    dtype: str
    vocab_size: int | None = None

    @property
    def apart(self) -> bool:
        """Whether the draft is on a device of its own, and so in a process of its own."""
        return "draft" in self.infos and self.placement.of("draft") != self.placement.of("target")

    def quant(self, role: str) -> str | None:
        return self.infos[role].spec.quant or (self.plan.target_quant if role == "target" else self.plan.draft_quant)


def find(plan: Plan, with_models: bool, listener: Listener) -> Models:
    """Places the roles, describes the models and refuses what does not fit together.

    Raises:
        PlacementError, ModelError, UsageError: before anything is measured.
    """
    if plan.draft and not with_models:
        raise UsageError(f"--draft {plan.draft}: needs --target, the model that it drafts for")
    placement = parse_placement(plan.place, plan.threads)
    check_gpus(placement)
    drafts = plan.drafts if with_models else {}
    if unused := sorted(role for role in placement.devices if role != "target" and role not in drafts):
        raise UsageError(f"--place {plan.place}: there is no model for {unused[0]}; name one with --draft")
    dtype = plan.dtype
    if dtype == "auto":
        dtype = "bfloat16" if placement.of("target").kind == "cuda" else "float32"
    infos: dict[str, ModelInfo] = {}
    size = None
    for role, name in {"target": plan.target, **drafts}.items() if with_models else ():
        listener.stage(f"looking up {role} {name}")
        if role == "target":
            infos[role] = describe(parse(name), role, progress=listener.note)
        else:
            options = plan.draft_options(role)
            infos[role] = describe_draft(
                parse(name), infos["target"], role, options, plan.draft_quant, progress=listener.note
            )
        check_cache(infos[role])
        size = min(size or infos[role].vocab_size, infos[role].vocab_size)
        if role != "target":
            size = min(size, check_pair(infos["target"], infos[role], 1))
    models = Models(plan, placement, infos, dtype, size)
    for role, info in infos.items():
        check_runtime(info, placement.of(role).torch_name, dtype, plan.runtime, models.quant(role), plan.exact)
    return models


def load_role(models: Models, role: str) -> CachedModel:
    """The model of a role, in a worker where its device is not the target's."""
    placement, plan = models.placement, models.plan
    how: dict[str, Any] = dict(dtype=models.dtype, runtime=plan.runtime, vocab_size=models.vocab_size)
    how |= dict(quant=models.quant(role), exact=plan.exact)
    device = placement.of(role)
    if device == placement.of("target"):
        return load(models.infos[role], device=device.torch_name, **how)
    return load_remote(models.infos[role], role, device, placement.threads_of(role), **how)


def measure(models: Models, hardware: Mapping[str, Any], budget: Budget, listener: Listener) -> dict[str, Any]:
    """Loads the models, measures them, and gives them back.

    Returns:
        `models`: by role what is known and measured of each; `together`: the factors by which target and draft are
        slower while the other works too, for a draft on a device of its own, else None.
    """
    loaded: dict[str, CachedModel] = {}
    found: dict[str, Any] = {"models": {}, "together": None}
    try:
        for role, info in models.infos.items():
            listener.stage(f"loading {role} {info.name}")
            loaded[role] = load_role(models, role)
        for role, model in loaded.items():
            listener.stage(f"measuring the cost curve of {role} {models.infos[role].name}")
            left = len(loaded) - len(found["models"])
            seconds = min(15.0 if budget.quick else 90.0, max(1.0, budget.left - _KEPT) / left)
            found["models"][role] = _describe(models, role, model, hardware, seconds, budget)
        if models.apart:
            from ..strategies.side_by_side import measure_costs

            listener.stage("measuring target and draft side by side")
            costs = measure_costs(loaded["target"], loaded["draft"], 2 * CONTEXT, 1)
            found["together"] = {
                "target_factor": round(costs.target_factor, 3),
                "draft_factor": round(costs.draft_factor, 3),
            }
    finally:
        for model in loaded.values():
            model.close()
    return found


def _describe(
    models: Models, role: str, model: CachedModel, hardware: Mapping[str, Any], seconds: float, budget: Budget
) -> dict[str, Any]:
    info, device = models.infos[role], models.placement.of(role)
    curve, further, left_out = curve_within(model, seconds, budget)
    bytes_per_token = kv_bytes_per_token(info.config, models.dtype)
    threads = models.placement.threads_of(role) if device.kind == "cpu" else None
    rates = bandwidth(hardware, str(device), threads)
    return {
        **info.record(),
        "device": str(device),
        "threads": threads,
        "runtime": model.runtime,
        "dtype": model.dtype,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": bytes_per_token,
        "one_token_ms": round(curve.ms(1), 4),
        "tokens_per_s": round(1000 / curve.ms(1), 2),
        "curve": curve.as_record(),
        "further": [more.as_record() for more in further],
        "reading": reading(model, curve.new_tokens[-1]) if role != "target" else None,
        "bound": [bound(curve, context, model.weight_bytes, bytes_per_token, rates) for context in curve.contexts],
        "joules_per_token": joules_per_token(model, device.kind, curve, budget),
        "left_out": left_out,
        "cautions": cautions(curve),
    }


def curve_within(model: CachedModel, seconds: float, budget: Budget) -> tuple[CostCurve, list[CostCurve], list[str]]:
    """A cost curve on as large a grid as the time allows, what was measured beyond a full grid, and what was left out.

    The grid grows context by context, then row by row; the first part is measured in any case, with fewer points
    where one forward is slow. A number of rows that there was no time to measure after every context is not part of the
    grid, and becomes a curve of its own.
    """
    now = budget.clock.now
    counts = QUICK_COUNTS if budget.quick else FULL_COUNTS
    repeats, left_out = (5 if budget.quick else 9), []
    first = min(CONTEXT, max(1, model.context_length - counts[-1]))
    began = now()
    once = cost_of(model, new_tokens=(1, 4), context=min(16, first), repeats=1).ms(4) / 1000
    if len(counts) * (repeats + 1) * 1.5 * once > seconds:
        counts, repeats = (1, 2, 4, 8, 16), 3
        left_out.append(f"points between {counts}: a forward takes {1000 * once:.0f} ms")
    contexts = (
        [first] if budget.quick else [at for at in CONTEXTS if at + counts[-1] <= model.context_length] or [first]
    )
    rows = [1] if budget.quick else [count for count in ROWS if count <= model.max_rows]
    parts: dict[tuple[int, int], CostCurve] = {}
    took = size = 0.0
    for row, context in ((row, context) for row in rows for context in contexts):
        left = seconds - (now() - began) / 1e9
        if parts and took * row * context / size > left:
            left_out.append(f"{context} tokens of context, {row} row(s) and what follows: no time was left")
            break
        start = now()
        parts[context, row] = cost_of(model, new_tokens=counts, context=context, rows=row, repeats=repeats)
        took, size = (now() - start) / 1e9, float(row * context)
    return *_joined(parts), left_out


def _joined(parts: Mapping[tuple[int, int], CostCurve]) -> tuple[CostCurve, list[CostCurve]]:
    """One grid of all rows that have every context that the first ones have, and a curve for each of the others."""
    by_row: dict[int, list[int]] = {}
    for context, row in parts:
        by_row.setdefault(row, []).append(context)
    contexts = next(iter(by_row.values()))
    whole = [row for row, there in by_row.items() if there == contexts]
    rest = [_grid(parts, there, [row]) for row, there in by_row.items() if there != contexts]
    return _grid(parts, contexts, whole), rest


def _grid(parts: Mapping[tuple[int, int], CostCurve], contexts: Sequence[int], rows: Sequence[int]) -> CostCurve:
    values = np.stack(
        [np.stack([parts[context, row].median_ms[:, 0, 0] for row in rows], axis=-1) for context in contexts], axis=1
    )
    return CostCurve(parts[contexts[0], rows[0]].new_tokens, tuple(contexts), tuple(rows), values)


def reading(model: CachedModel, longest: int) -> dict[str, Any]:
    """`ms` in which a draft model reads a prompt of so many `tokens` at once: beyond the longest block of the curve a
    token costs less than its slope says.

    Args:
        longest: tokens of that block. No more logits than it has are asked for: a prompt needs one, and what lies
            between the two is then a line of reading alone.
    """
    tokens = max(1, min(PROMPT, model.context_length - 1))
    curve = cost_of(model, new_tokens=(tokens,), context=1, repeats=3, last=longest)
    return {"tokens": tokens, "ms": round(curve.ms(tokens), 4)}


def cautions(curve: CostCurve) -> list[str]:
    """What makes a curve doubtful: several tokens cannot cost less than one, unless something else ran meanwhile or
    the one-token kernel is a bad one; either way speculation looks better on it than it is."""
    found = []
    for context in curve.contexts:
        ratio, count = min((curve.ratio(count, context), count) for count in curve.new_tokens)
        if ratio < _LEAST_RATIO:
            found.append(
                f"{count} new tokens took {ratio:.2f} times as long as one, after {context} tokens of context: "
                "disturbed, or a slow path for one token; predictions on this curve are too good"
            )
    return found


def kv_bytes_per_token(config: Any, dtype: str) -> int | None:
    """Bytes of one key and one value in every layer; None for a family whose config does not tell."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    layers, width = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (width and heads and width // text.num_attention_heads)
    return 2 * layers * heads * size * _BYTES[dtype] if layers and heads and size else None


def bandwidth(hardware: Mapping[str, Any], device: str, threads: int | None) -> dict[str, Any]:
    """GB/s read from memory and from the last level of cache, and how much that holds, as measured for a device."""
    for gpu in hardware["gpus"]:
        if gpu["device"] == device:
            return {"memory": gpu["read"]["rate"], "cache": None, "cache_bytes": 0}
    rates = hardware["memory"]["rates"]
    row = max((row for row in rates if row["threads"] <= (threads or 1)), key=lambda row: row["threads"])
    last = max((c for c in hardware["cpu"]["caches"] if c["kind"] != "instruction"), key=lambda c: c["level"],
               default={"bytes": 0, "count": 0})  # fmt: skip
    return {
        "memory": row["read"]["rate"],
        "cache": row["cache"] and row["cache"]["rate"],
        "cache_bytes": last["bytes"] * last["count"],
    }


def bound(
    curve: CostCurve, context: int, weight_bytes: int, kv_bytes: int | None, rates: Mapping[str, Any]
) -> dict[str, Any]:
    """The least time that reading takes for one token after `context` others, and the fraction of it reached.

    A model that fits into half of the last level of cache is held against the cache's bandwidth.
    """
    read = weight_bytes + context * (kv_bytes or 0)
    cached = bool(rates["cache"]) and 2 * read <= rates["cache_bytes"]
    speed = rates["cache"] if cached else rates["memory"]
    least, measured = read / speed / 1e6, curve.ms(1, context)
    return {
        "context": context,
        "bytes": read,
        "from": "cache" if cached else "memory",
        "bound_ms": round(least, 4),
        "measured_ms": round(measured, 4),
        "fraction": round(least / measured, 4),
    }


def joules_per_token(model: CachedModel, kind: str, curve: CostCurve, budget: Budget) -> float | None:
    """Of the whole processor or GPU while it decodes one token after another; None where no counter can be read."""
    meter = EnergyMeter(kind)
    if meter.joules() is None:
        return None
    repeats = max(8, round(budget.share(1.0, 3.0) * 1000 / curve.ms(1)))
    cost_of(model, new_tokens=(1,), context=8, repeats=repeats)
    joules = meter.joules()
    return None if joules is None else joules / (repeats + 2)  # one round that is not counted, and the prompt
