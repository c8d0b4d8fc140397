"""How many machine hours a grid will take, told before it runs.

An upper bound where drafts are accepted as often as is assumed, since answers may end early.

From a profile of the target that the cache folder keeps (of this machine, or copied from one of the cluster), else from
a speed that the user assumes, else not at all: a number out of thin air would be worse than none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SpecbenchError
from ..models.builtin import cache_folder
from . import machines, servers
from .forecasts import FOLDER, Kept, documents
from .listener import Listener
from .plan import Arm, Plan, check
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


@dataclass(frozen=True)
class _Readings:
    """What an arm reads and writes.

    Attributes:
        measured: in one repeat.
        more: in check and trace.
        warmup: one row of each task's.
    """

    measured: list[_Reading]
    more: list[_Reading]
    warmup: list[_Reading]

    def of(self, arm: Arm, plan: Plan) -> list[_Reading]:
        """All of it, with as many rows of warm-up as `run` sends."""
        rows = plan.batch + (plan.batch > 1 and arm.strategy.continuous)
        return self.measured * plan.repeats + self.more + self.warmup * (plan.warmup * rows)


def estimate(cells: Sequence[Cell], tokens_per_s: float | None = None, folder: Path | None = None) -> Estimate:
    """Of the cells that are not done.

    Args:
        tokens_per_s: assumed of plain decoding where no profile tells.
        folder: where profiles are kept; by default the cache folder's.
    """
    found = Estimate()
    profiles = [Kept(document) for document in documents(folder or cache_folder() / FOLDER)]
    known: dict[str, Prepared] = {}
    basis: dict[str, None] = {}
    for cell in cells:
        if cell.state == "done":
            continue
        try:
            found.cells.append(_cell(cell, tokens_per_s, profiles, known, basis))
        except SpecbenchError as error:
            found.cells.append(CellTime(cell.name, 0, 0, None))
            basis[f"cannot be told here: {error}"] = None
    found.basis = list(basis)
    return found


def _cell(
    cell: Cell, tokens_per_s: float | None, profiles: Sequence[Kept], known: dict[str, Prepared], basis: dict[str, None]
) -> CellTime:
    plan = cell.plan
    # Which devices there are is not known here; what is read and written does not depend on them.
    here = dataclasses.replace(plan, place="target=cpu", threads=None, exact=False, tp=1)
    checked = check(here)
    key = dumps([servers.only_servers(checked.arms), *(getattr(plan, name) for name in _OF_THE_WORK)])
    prepared = known[key] if key in known else known.setdefault(key, prepare(checked, Listener()))
    readings = _readings(prepared, plan)
    work = [(arm.strategy.name, readings.of(arm, plan)) for arm in checked.arms]
    samples = len(readings.measured) * plan.repeats * len(work)
    tokens = sum(one.new for _, each in work for one in each)
    kept = _profile(prepared, plan, profiles)
    if isinstance(kept, str):
        if tokens_per_s is None:
            basis[f"{kept}; a speed can be assumed with --assume TOK_PER_S"] = None
            return CellTime(cell.name, samples, tokens, None)
        basis[f"assuming {tokens_per_s:g} tok/s in every arm, and no time for prompts"] = None
        return CellTime(cell.name, samples, tokens, tokens / tokens_per_s / 3600)
    speeds = _speedups(kept.document)
    unknown = sorted({arm for arm, _ in work if arm not in speeds and arm != "autoregressive"})
    model = kept.document["models"]["target"]
    hardware = machines.told(kept.document["identity"]["hardware"], int(model["device"].startswith("cuda")))
    said = f"by the profile of {str(kept.document.get('made'))[:10]} ({hardware})"
    said += f", strategies at an acceptance of {ACCEPTANCE}"
    basis[said + (f", {', '.join(unknown)} as slow as plain decoding" if unknown else "")] = None
    hours = sum(_plain_ms(each, kept, plan.batch) / speeds.get(arm, 1.0) for arm, each in work) / HOUR_MS
    return CellTime(cell.name, samples, tokens, hours)


def _readings(prepared: Prepared, plan: Plan) -> _Readings:
    measured: list[_Reading] = []
    more: list[_Reading] = []
    warmup: list[_Reading] = []
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
        middle = int(np.median([reading.prompt for reading in readings]))
        warmup.append(_Reading(middle, WARMUP_TOKENS))
        more += readings[: plan.trace * plan.batch]
    if len(measured) > 1:
        more += next(iter(firsts.values()))[: plan.batch]
    return _Readings(measured, more, warmup)


def _profile(prepared: Prepared, plan: Plan, profiles: Sequence[Kept]) -> Kept | str:
    """Of the same target in the same dtype on the same kind of device: one of the same runtime rather than another, a
    full one rather than a quick one, the latest. Where there is none, the reason."""
    if servers.only_servers(prepared.checked.arms):
        return "how fast a server is stands in no profile"
    if plan.tp > 1:
        return f"profiles are of a target on one device, and this one is in {plan.tp} parts"
    info, device = prepared.infos["target"], plan.devices_as_written["target"]
    kind = "cuda" if device.startswith("cuda") else "cpu"
    auto = "bfloat16" if kind == "cuda" else "float32"
    dtype = prepared.quant("target") or (auto if plan.dtype == "auto" else plan.dtype)
    runtime = prepared.runtimes["target"]
    found = []
    for kept in profiles:
        document = kept.document
        model = document["models"].get("target") or {}
        same = (model.get("fingerprint"), model.get("dtype")) == (info.fingerprint, dtype)
        same = same and bool(document["identity"].get("exact")) == plan.exact
        if same and str(model.get("device")).startswith(kind):
            rank = model.get("runtime") == runtime, not document.get("quick"), str(document.get("made"))
            found.append((rank, kept))
    if found:
        return max(found, key=lambda one: one[0])[1]
    what = f"{info.name} in {dtype}{', exact,' if plan.exact else ''}"
    return f"no profile of {what} is kept here; make one with: specbench profile-hardware -t {info.name}"


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
