"""How many machine hours a grid will take, told before it runs: an upper bound, since answers may end early.

From a profile of the target that the cache folder keeps (of this machine, or copied from one of the cluster), else from
a speed that the user assumes, else not at all: a number out of thin air would be worse than none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SpecbenchError
from ..models.builtin import cache_folder
from . import machines
from .forecasts import FOLDER, Kept, _documents
from .listener import Listener
from .plan import Plan, check
from .prepare import Prepared, prepare
from .records import dumps
from .run import WARMUP_TOKENS
from .sweep import Cell

ACCEPTANCE = 0.7
HOUR_MS = 3_600_000
_OF_THE_WORK = (
    "target", "draft", "task", "limit", "max_new_tokens", "raw", "dtype", "runtime", "target_quant", "draft_quant",
    "options",
)  # fmt: skip


@dataclass(frozen=True)
class CellTime:
    """One cell that is not done.

    Attributes:
        samples: measured ones, over all arms and repeats.
        tokens: new ones at most, the samples that feed no table included.
        hours: None where it cannot be told.
    """

    name: str
    samples: int
    tokens: int
    hours: float | None


@dataclass
class Estimate:
    """What the cells that are left come to. `basis` says what it rests on, or why there are no hours."""

    cells: list[CellTime] = field(default_factory=list)
    basis: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(cell.samples for cell in self.cells)

    @property
    def tokens(self) -> int:
        return sum(cell.tokens for cell in self.cells)

    @property
    def hours(self) -> float | None:
        """Of all; None where one cell cannot be told."""
        hours = [cell.hours for cell in self.cells]
        return None if None in hours else sum(filter(None, hours))

    def to_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "tokens": self.tokens, "machine_hours": self.hours, "basis": self.basis,
                "cells": [asdict(cell) for cell in self.cells]}  # fmt: skip


@dataclass(frozen=True)
class _Reading:
    """One turn: tokens before the answer, and the most that the answer may have."""

    prompt: int
    new: int


def estimate(cells: Sequence[Cell], tokens_per_s: float | None = None, folder: Path | None = None) -> Estimate:
    """Of the cells that are not done.

    Args:
        tokens_per_s: assumed of plain decoding where no profile tells.
        folder: where profiles are kept; by default the cache folder's.
    """
    found = Estimate()
    known: dict[str, Prepared] = {}
    basis: dict[str, None] = {}
    for cell in cells:
        if cell.state == "done":
            continue
        try:
            found.cells.append(_cell(cell, tokens_per_s, folder or cache_folder() / FOLDER, known, basis))
        except SpecbenchError as error:
            found.cells.append(CellTime(cell.name, 0, 0, None))
            basis[f"cannot be told here: {error}"] = None
    found.basis = list(basis)
    return found


def _cell(
    cell: Cell, tokens_per_s: float | None, folder: Path, known: dict[str, Prepared], basis: dict[str, None]
) -> CellTime:
    plan = cell.plan
    # Which devices there are is not known here; what is read and written does not depend on them.
    here = dataclasses.replace(plan, place="target=cpu", threads=None, exact=False, tp=1)
    checked = check(here)
    key = dumps([getattr(plan, name) for name in _OF_THE_WORK])
    prepared = known[key] if key in known else known.setdefault(key, prepare(checked, Listener()))
    measured, more = _readings(prepared, plan)
    arms = [arm.strategy.name for arm in checked.arms]
    work = measured * plan.repeats + more
    samples = len(measured) * plan.repeats * len(arms)
    tokens = sum(one.new for one in work) * len(arms)
    kept = _profile(prepared, plan, folder) if plan.tp == 1 else None
    if kept is None and tokens_per_s is None:
        name = prepared.infos["target"].name
        why = (
            f"no profile of {name} in {_dtype(plan)} is kept here; make one with: specbench profile-hardware -t {name}"
        )
        basis[f"{why}, or assume a speed with --assume TOK_PER_S"] = None
        return CellTime(cell.name, samples, tokens, None)
    if kept is None:
        assert tokens_per_s is not None
        basis[f"assuming {tokens_per_s:g} tok/s in every arm, and no time for prompts"] = None
        return CellTime(cell.name, samples, tokens, tokens / tokens_per_s / 3600)
    speeds = _speedups(kept.document)
    plain = _plain_ms(work, kept, plan.batch)
    unknown = sorted({arm for arm in arms if arm not in speeds and arm != "autoregressive"})
    model = kept.document["models"]["target"]
    hardware = machines.told(kept.document["identity"]["hardware"], int(model["device"].startswith("cuda")))
    said = f"by the profile of {str(kept.document.get('made'))[:10]} ({hardware})"
    said += f", strategies at an acceptance of {ACCEPTANCE}"
    basis[said + (f", {', '.join(unknown)} as slow as plain decoding" if unknown else "")] = None
    hours = sum(plain / speeds.get(arm, 1.0) for arm in arms) / HOUR_MS
    return CellTime(cell.name, samples, tokens, hours)


def _dtype(plan: Plan) -> str:
    if plan.dtype != "auto":
        return plan.dtype
    return "bfloat16" if "cuda" in plan.place.lower() else "float32"


def _readings(prepared: Prepared, plan: Plan) -> tuple[list[_Reading], list[_Reading]]:
    """What one arm reads and writes: once in a repeat; and besides, in warm-up, check and trace."""
    measured: list[_Reading] = []
    more: list[_Reading] = []
    firsts: dict[str, list[_Reading]] = {}
    for turn in prepared.first_turns:
        if turn.error is not None:
            continue
        length = len(turn.ids)
        for number, said in enumerate(turn.prompt.turns):
            length += (turn.max_new_tokens + len(prepared.codec.encode(said))) if number else 0
            measured.append(_Reading(length, turn.max_new_tokens))
        firsts.setdefault(turn.task, []).append(_Reading(len(turn.ids), turn.max_new_tokens))
    for readings in firsts.values():
        middle = sorted(reading.prompt for reading in readings)[len(readings) // 2]
        more += [_Reading(middle, WARMUP_TOKENS)] * (plan.warmup * plan.batch)
        more += readings[: plan.trace * plan.batch]
    if len(measured) > 1:
        more += next(iter(firsts.values()))[: plan.batch]
    return measured, more


def _profile(prepared: Prepared, plan: Plan, folder: Path) -> Kept | None:
    """Of the same target in the same dtype on the same kind of device: one of the same runtime rather than another, a
    full one rather than a quick one, the latest."""
    info, kind = prepared.infos["target"], "cuda" if "cuda" in plan.place.lower() else "cpu"
    runtime = prepared.runtimes["target"]
    found = []
    for document in _documents(folder):
        model = document["models"].get("target") or {}
        same = (model.get("fingerprint"), model.get("dtype")) == (info.fingerprint, _dtype(plan))
        if same and str(model.get("device")).startswith(kind):
            found.append(
                (model.get("runtime") == runtime, not document.get("quick"), str(document.get("made")), document)
            )
    return Kept(max(found, key=lambda one: one[:3])[3]) if found else None


def _plain_ms(work: Sequence[_Reading], kept: Kept, batch: int) -> float:
    """Of plain decoding; rows of a batch share its forwards."""
    curve = kept.prices.curves["target"]
    return sum(curve.ms(one.prompt) + one.new * curve.ms(1, one.prompt + one.new / 2, batch) / batch for one in work)


def _speedups(document: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over plain decoding, by strategy, where there is a formula for it."""
    rows = (document.get("predicted") or {}).get("strategies") or []
    return {
        row["strategy"]: at["speedup"]
        for row in rows
        for at in row["at"]
        if at["acceptance"] == ACCEPTANCE and at["speedup"] > 0
    }
