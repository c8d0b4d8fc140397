"""What a run is to do, settled before anything expensive starts.

Flags over YAML over defaults become one frozen `Plan`, which is stored with the results. Whatever can be refused
without reading weights is refused by `check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PlacementError, UsageError, unknown
from ..hardware.devices import (
    Device,
    Placement,
    available_cores,
    check_gpus,
    named,
    parse_placement,
    share_a_core,
    split,
)
from ..models.draft_options import DraftOptions
from ..options import build
from ..strategies import registry as strategies
from ..strategies.base import Strategy
from ..strategies.sampling import Sampling
from ..tasks import registry as tasks
from ..tasks.base import Task
from . import servers
from .records import BASELINE

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIMES = ("auto", "packed", "transformers")
QUANTS = (None, "int8", "int4")
OWN_DRAFT = "self:int4"  # of a strategy that needs a draft, where none is named
PROMPTS_PER_ROW = 4  # that one call runs through its rows, where no option says how many


@dataclass(frozen=True)
class Plan:
    """The resolved settings of a run; see `docs/running.md` for what each one does.

    Fields are named as the long options of `specbench run`. `options` holds `name -> {key: value}` for strategies and
    tasks alike.
    """

    strategy: tuple[str, ...] = ()
    target: str = "smollm2-135m"
    draft: str | None = None
    task: tuple[str, ...] = ("bundled",)
    limit: int | None = 16
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    verify: str = "coupled"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft_length: int | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtype: str = "auto"
    runtime: str = "auto"
    target_quant: str | None = None
    draft_quant: str | None = None
    exact: bool = False
    place: str = "target=cpu"
    threads: int | None = None
    tp: int = 1
    batch: int = 1
    batch_prompts: int | None = None
    repeats: int = 1
    raw: bool = False
    baseline: bool = True
    warmup: int = 1
    trace: int = 2
    require_lossless: bool = False
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("repeats", 1), ("tp", 1), ("warmup", 0), ("trace", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)}: at least {least}")
        for name in ("limit", "max_new_tokens", "draft_length", "threads", "batch_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: at least 1")
        if self.batch_prompts is not None and (self.batch == 1 or self.batch_prompts < self.batch):
            wanted = f"at least --batch {self.batch}" if self.batch > 1 else "is of a batch; give --batch, too"
            raise UsageError(f"--batch-prompts {self.batch_prompts}: {wanted}")
        for name, known in (
            ("dtype", DTYPES),
            ("runtime", RUNTIMES),
            ("target_quant", QUANTS),
            ("draft_quant", QUANTS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(unknown(name.replace("_", "-"), str(value), filter(None, known)))
        for asked, flag in (
            (self.target_quant, "target-quant"),
            (self.draft_quant, "draft-quant"),
            (self.exact, "exact"),
        ):
            if asked and self.runtime == "transformers":
                raise UsageError(f"--{flag}: needs the packed runtime, not --runtime transformers")
            if asked and flag != "draft-quant" and self.tp > 1:
                raise UsageError(f"--{flag}: needs the packed runtime, and --tp {self.tp} the transformers one")
        if self.tp > 1 and self.runtime == "packed":
            raise UsageError(f"--tp {self.tp}: runs in the transformers runtime; leave --runtime packed out")
        if not self.task:
            raise UsageError("no task; name one with --task. See: specbench list tasks")
        if self.resume and self.overwrite:
            raise UsageError("--resume keeps what is there and --overwrite deletes it; give one of them")
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out, the run folder to go on with")
        for what in ("strategy", "task"):
            names = getattr(self, what)
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise UsageError(f"--{what}: {', '.join(twice)} is named twice")

    @property
    def prompts_per_call(self) -> int:
        """How many prompts one call runs through its rows, and by how many the arms take turns; 1 without a batch.

        Enough that rows which stand idle at the end of a call, with no prompt left to begin, weigh little; few enough
        that no arm has the machine for long.
        """
        return (self.batch_prompts or PROMPTS_PER_ROW * self.batch) if self.batch > 1 else 1

    @property
    def drafts(self) -> dict[str, str]:
        """Draft models by role, `draft`, `draft2`, ...: from large to small, as `--draft A,B` names them."""
        names = [name.strip() for name in (self.draft or "").split(",") if name.strip()]
        return {f"draft{number}" if number > 1 else "draft": name for number, name in enumerate(names, 1)}

    @property
    def devices_as_written(self) -> dict[str, str]:
        """By role; the target's, and what else is named. Not looked for: they may be another machine's."""
        return {"target": "cpu"} | dict(named(self.place.lower()))

    def draft_options(self, role: str) -> DraftOptions:
        """What `--option draft.key=value` (of a second draft `draft2.key=value`) asks of a draft. Raises UsageError."""
        return build(DraftOptions, self.options.get(role, {}), f'model "{role}"')

    def runtime_of(self, role: str) -> str:
        """The runtime that is asked of a role: a target over several ranks has only one."""
        return "transformers" if role == "target" and self.tp > 1 else self.runtime

    def sampling(self, eos: tuple[int, ...] = ()) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            verify=self.verify,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_new_tokens,
            suppress=self.suppress_tokens,
            eos=() if self.ignore_eos else eos,
        )


def resolve(flags: Mapping[str, Any], config: Mapping[str, Any] | None = None, where: str = "config") -> Plan:
    """Flags over a YAML mapping over defaults.

    Args:
        flags: only what was given on the command line, by field name.
        config: what the YAML file holds; keys with hyphens or underscores, a single name or a list where names go.

    Raises:
        UsageError: an unknown key (the known ones are listed) or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for key, value in (config or {}).items():
        name = str(key).replace("-", "_")
        if isinstance(value, list):
            value = tuple(value)
        if name in ("strategy", "task", "stop") and isinstance(value, str):
            value = (value,)
        values[name] = value
    options = _merge_options(values.pop("options", {}), flags.get("options", {}), where)
    given = {**values, **{key: value for key, value in flags.items() if key != "options"}}
    given, options = servers.expand(given, options)
    return dataclasses.replace(build(Plan, given, where), options=options)


def with_own_draft(plan: Plan) -> tuple[Plan, str | None]:
    """The plan, with the target's own int4 copy as the draft where a strategy needs one and none is named.

    Where such a copy cannot be had (another runtime, a GPU, several ranks) or has nothing to save (a quantised target)
    the plan stays as it is, and `check` says that a draft is missing.

    Returns:
        the plan, and what to tell the user of the choice; None where there was nothing to choose.

    Raises:
        UsageError: a strategy that is not there. Of devices only the kind is looked at: they may be another machine's.
    """
    lacking = [name for name in plan.strategy if "draft" in strategies.get(name).roles]
    others = plan.draft or plan.draft_quant or plan.target_quant or plan.runtime == "transformers" or plan.tp > 1
    if not lacking or others:
        return plan, None
    place = plan.devices_as_written
    if any(place.get(role, place["target"]).startswith("cuda") for role in ("target", "draft")):
        return plan, None
    more = [name for name in plan.strategy if "draft" in strategies.get(name).optional_roles]
    said = f"no --draft for {', '.join(lacking)}: the target drafts for itself, in int4 (--draft {OWN_DRAFT})"
    said += f", for {', '.join(more)} as well" if more else ""
    return dataclasses.replace(plan, draft=OWN_DRAFT), f"{said}; what else could: specbench list drafts"


def _merge_options(config: Any, flags: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(config, Mapping) or not all(isinstance(keys, Mapping) for keys in config.values()):
        raise UsageError(
            f"{where}: options are written as a mapping of names to mappings, as in lookup: {{min-match: 2}}"
        )
    merged = {str(name): dict(keys) for name, keys in config.items()}
    for name, keys in flags.items():
        merged.setdefault(name, {}).update(keys)
    return merged


def parse_option(text: str) -> tuple[str, str, str]:
    """`strategy.key=value` to its three parts. Raises UsageError."""
    name, dot, rest = text.partition(".")
    key, equals, value = rest.partition("=")
    if not (dot and equals and name and key):
        raise UsageError(f'--option "{text}": write name.key=value, as in lookup.min-match=3')
    return name.strip(), key.strip(), value


@dataclass(frozen=True)
class Arm:
    """One row of the table: a strategy with its options."""

    name: str
    strategy: type[Strategy]
    options: Any

    @property
    def engine(self) -> str:
        return self.strategy.engine


@dataclass(frozen=True)
class Checked:
    """A plan that passed every check that needs no model."""

    plan: Plan
    arms: tuple[Arm, ...]
    tasks: tuple[tuple[str, Task], ...]
    placement: Placement
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The arm that tokens are compared with, and whose answers later turns follow: the baseline, else the first one
        that has ids of its own, else the first."""
        names = [arm.name for arm in self.arms]
        with_ids = [arm.name for arm in self.arms if not arm.strategy.sends_text]
        return BASELINE if BASELINE in names else (with_ids or names)[0]

    @property
    def roles(self) -> set[str]:
        return {role for arm in self.arms for role in self.roles_of(arm)}

    def roles_of(self, arm: Arm) -> list[str]:
        """The roles of an arm, those that it can do without where there is a model for them."""
        return [*arm.strategy.roles, *(role for role in arm.strategy.optional_roles if role in self.plan.drafts)]

    def in_worker(self, arm: Arm, role: str) -> bool:
        """Whether the model of a role has a process of its own: on another device than the target, or at work while
        the target is."""
        return role != "target" and (arm.strategy.apart or self.placement.of(role) != self.placement.of("target"))


def check(plan: Plan) -> Checked:
    """Strategies, tasks, options, devices and the run folder; imports torch, loads nothing.

    Raises:
        UsageError, PlacementError, TaskError: one clear line.
    """
    roles = set(plan.drafts)
    known = set(strategies.names()) | {name.partition(":")[0] for name in plan.task} | set(tasks.names()) | {"draft"}
    known |= roles
    for name in plan.options:
        if name not in known:
            raise UsageError(unknown("name in --option", name, known))
    arms = tuple(_arms(plan))
    used = {arm.name for arm in arms} | {name.partition(":")[0] for name in plan.task} | roles
    for name in plan.options:
        if name not in used:
            raise UsageError(f'--option {name}.…: "{name}" is not part of this run ({", ".join(sorted(used))})')
    placement, notes = _place(plan, arms)
    check_gpus(placement)
    if plan.exact and placement.of("target").kind == "cpu" and plan.dtype != "bfloat16":
        raise UsageError("--exact: bits are kept in bfloat16 on CPU, without it; in float32 tokens are, but not bits")
    if plan.require_lossless:
        _check_comparable(plan, arms)
    servers.check(plan, arms)
    checked = Checked(plan, arms, tuple((name, _task(plan, name)) for name in plan.task), placement, notes)
    _check_roles(checked)
    _check_devices(checked)
    for _, task in checked.tasks:
        task.check()
    return checked


def _place(plan: Plan, arms: tuple[Arm, ...]) -> tuple[Placement, tuple[str, ...]]:
    """Which role runs where, and what the user should know of it.

    Without a word about it, a run with a strategy whose two models work at the same time gets half of the cores for
    each of them, in all of its arms.
    """
    place = plan.place
    placement, notes = parse_placement(place, plan.threads), []
    target, draft = placement.of("target"), placement.of("draft")
    apart = [arm.name for arm in arms if arm.strategy.apart]
    if apart and target == draft and target.kind == "cpu":
        halves = "target={},draft={}".format(*split(available_cores()))
        if target != Device("cpu") or len(placement.devices) > 1:
            raise PlacementError(
                f"--place {plan.place}: {', '.join(apart)} runs both models at the same time, and they need cores of "
                f"their own, as in --place {halves}"
            )
        place = halves
        placement = parse_placement(place, plan.threads)
        target, draft = placement.of("target"), placement.of("draft")
        alone = ", ".join(arm.name for arm in arms if "draft" not in arm.strategy.roles)
        notes.append(
            f"{', '.join(apart)} runs both models at the same time; every arm of this run is placed as --place {halves}"
            + (f", so {alone} uses {len(target.cores)} of {len(available_cores())} cores" if alone else "")
        )
    if target != draft and target.kind == draft.kind == "cpu" and share_a_core(target.cores, draft.cores):
        notes.append(f"{target} and {draft} are threads of the same physical core and slow each other down")
    if plan.tp > 1:
        placement = parse_placement(place, plan.threads, plan.tp)
    return placement, tuple(notes)


def _check_devices(checked: Checked) -> None:
    """What cannot be done with models on different devices. Raises UsageError."""
    plan, placement = checked.plan, checked.placement
    for role in placement.devices:
        if role != "target" and role not in checked.roles:
            raise UsageError(f"--place {plan.place}: no strategy of this run uses a {role} model")
    for arm in checked.arms:
        drafts = [role for role in checked.roles_of(arm) if role != "target" and checked.in_worker(arm, role)]
        if not drafts:
            continue
        where = f"target={placement.of('target')}, draft={placement.of('draft')}"
        if arm.engine != "specbench" and getattr(arm.options, "method", "auto") in ("auto", "draft"):
            raise UsageError(
                f"{arm.name}: runs both models in one process, and here they are apart ({where}); place them together, "
                f"or use --option {arm.name}.method=lookup"
            )
        sampling = plan.sampling()
        if not sampling.greedy and sampling.verify == "rejection":
            raise UsageError(
                f"{arm.name}: --verify rejection would have to send the draft's probabilities from one device to "
                f"another ({where}); place both together, or use --verify coupled, which needs none"
            )
        devices = dict.fromkeys(str(placement.of(role)) for role in checked.roles_of(arm) if role != "target")
        if len(devices) > 1:
            raise UsageError(f"{arm.name}: its drafts have to be on one device, not {', '.join(devices)}")


def _check_comparable(plan: Plan, arms: tuple[Arm, ...]) -> None:
    sampling = plan.sampling()
    if not sampling.greedy and sampling.verify != "coupled":
        raise UsageError(
            f"--require-lossless: tokens cannot be compared under --verify {plan.verify} at this temperature"
        )
    if len(arms) < 2:
        names = ", ".join(arm.name for arm in arms)
        raise UsageError(f"--require-lossless: {names} alone has nothing to be compared with")


def _arms(plan: Plan) -> list[Arm]:
    names = list(plan.strategy)
    if plan.baseline and BASELINE not in names:
        names.insert(0, BASELINE)
    if not names:
        raise UsageError("no strategy; name one with --strategy. See: specbench list strategies")
    sampling, arms, drafting = plan.sampling(), [], False
    for name in names:
        strategy = strategies.get(name)
        strategy.check(sampling, plan.batch)
        given = dict(plan.options.get(name, {}))
        takes = any(f.name == "draft_length" for f in dataclasses.fields(strategy.Options))
        drafting |= takes
        if plan.draft_length is not None and takes and not {"draft-length", "draft_length"} & set(given):
            given["draft_length"] = plan.draft_length
        arms.append(Arm(name, strategy, build(strategy.Options, given, f'strategy "{name}"')))
    if plan.draft_length is not None and not drafting:
        raise UsageError(f"--draft-length: no strategy of this run drafts a fixed length ({', '.join(names)})")
    return arms


def _task(plan: Plan, name: str) -> Task:
    cls, subtask = tasks.parse(name)
    given = plan.options.get(name.partition(":")[0], {})
    return cls(build(cls.Options, given, f'task "{cls.name}"'), subtask)


def _check_roles(checked: Checked) -> None:
    plan = checked.plan
    for arm in checked.arms:
        if "draft" in arm.strategy.roles and not plan.draft:
            raise UsageError(f"{arm.name}: needs a draft model; name one with --draft. See: specbench list drafts")
        if arm.strategy.needs_packed and plan.runtime_of("target") == "transformers":
            asked = f"--tp {plan.tp}" if plan.tp > 1 else "--runtime transformers"
            raise UsageError(f"{arm.name}: needs the packed runtime, not {asked}")
        if arm.engine != "specbench" and not arm.strategy.sends_text and plan.tp > 1:
            raise UsageError(
                f"{arm.name}: runs {arm.engine}' own loop, in one process; leave it out, or leave --tp {plan.tp} out"
            )
        if arm.strategy.needs_packed and checked.placement.of("target").kind != "cpu":
            raise UsageError(f"{arm.name}: is built for CPU only; use --place target=cpu")
    for role in plan.drafts:
        options = plan.draft_options(role)
        if options != DraftOptions() and plan.runtime == "transformers":
            raise UsageError(f"--option {role}.…: needs the packed runtime, not --runtime transformers")
    for draft in plan.drafts.values():
        if draft.startswith("self:") and (plan.draft_quant or plan.runtime == "transformers"):
            other = "--draft-quant" if plan.draft_quant else "--runtime transformers"
            raise UsageError(f"--draft {draft}: is quantised by the packed runtime already; leave {other} out")
    if plan.draft_quant and not plan.draft:
        raise UsageError(f"--draft-quant {plan.draft_quant}: there is no draft model; name one with --draft")
    for arm in checked.arms:
        changed = plan.target_quant or plan.draft_quant or plan.options.keys() & plan.drafts
        if arm.engine == "transformers" and changed:
            raise UsageError(
                f"{arm.name}: runs {arm.engine}' own models, which --target-quant, --draft-quant and --option draft.… "
                "do not touch"
            )
    if plan.draft and "draft" not in checked.roles:
        raise UsageError(f"--draft {plan.draft}: no strategy of this run uses a draft model")
    if unused := [name for role, name in plan.drafts.items() if role not in checked.roles]:
        raise UsageError(f"--draft {plan.draft}: no strategy of this run uses more than one draft ({unused[0]})")


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as it is stored in a manifest."""
    return {**dataclasses.asdict(plan), "out": str(plan.out) if plan.out else None}
