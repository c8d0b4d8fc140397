"""The numbers of a run, one row per task and arm, as plain data. Pure functions of manifest and samples, but for what a
profile in the cache folder predicts.

Raw values only: nanoseconds, counts, unrounded ratios; null where a number is not defined. `results.tables` rounds and
lays them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import MeasurementError, RunFolderError
from . import choices, forecasts, lossless, machines, metrics, rounds, served, statistics
from .metrics import Drafting, TimeSplit
from .records import SCHEMA, Sample, without_collector
from .statistics import Caution, Pairing, Speedup

ALL_TASKS = "all tasks"
SPEEDUPS = ("decode_speedup", "e2e_speedup", "throughput_speedup")
MOST_LOAD = 0.5  # of the physical cores, as the one-minute load average before a run


@dataclass
class Row:
    """One arm on one task, or on all tasks together. Fields are described in `docs/files.md`."""

    task: str
    arm: str
    strategy: str
    engine: str
    baseline: bool
    reference: bool
    lossless: bool
    prompts: int
    n_ok: int
    n_failed: int
    tokens: int = 0
    tokens_per_sample: float | None = None
    ttft_p50_ns: float | None = None
    tpot_ns: float | None = None
    decode_tokens_per_s: float | None = None
    e2e_tokens_per_s: float | None = None
    throughput_tokens_per_s: float | None = None
    latency_p50_ns: float | None = None
    latency_p90_ns: float | None = None
    latency_p99_ns: float | None = None
    decode_speedup: Speedup | None = None
    e2e_speedup: Speedup | None = None
    throughput_speedup: Speedup | None = None
    decode_speedup_per_device: float | None = None
    predicted_decode_speedup: float | None = None
    profile_decode_speedup: float | None = None
    tokens_per_step: float | None = None
    accepted_per_step: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    conditional_acceptance_by_position: list[float] = field(default_factory=list)
    acceptance_by_level: list[float | None] = field(default_factory=list)
    levels: list[dict[str, Any]] = field(default_factory=list)
    standardized_improvement: float | None = None
    exactness: dict[str, Any] | None = None
    devices: list[str] = field(default_factory=list)
    threads: int | None = None
    runtime: str | None = None
    dtype: str | None = None
    models: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    continuous: bool = False
    trace: dict[str, Any] | None = None
    spread: float | None = None
    drain_share: float | None = None
    sums: dict[str, int] = field(default_factory=dict)
    cause: str | None = None


@dataclass
class Summary:
    """What `specbench show` prints and `summary.*` hold.

    Attributes:
        title: lines that say what was measured on what.
        watermarks: what makes these numbers unfit for comparison with ordinary ones; stands in every output.
        rows: by task, the baseline first; with several tasks, `all tasks` last.
        cautions: what a reader has to be warned of.
        notes: what the run itself had to say.
    """

    title: list[str]
    watermarks: list[str]
    baseline: str | None
    settings: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    cautions: list[Caution]
    notes: list[str]
    schema: int = SCHEMA

    @property
    def n_failed(self) -> int:
        """Failed samples of the whole run; a run with any exits with 1."""
        return sum(row.n_failed for row in self.rows if row.task != ALL_TASKS)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: no NaN, no Infinity. Speed-ups carry their verdict."""
        plain = asdict(self)
        for row, data in zip(self.rows, plain["rows"], strict=True):
            for name in SPEEDUPS:
                speedup = getattr(row, name)
                if speedup is not None:
                    data[name]["verdict"] = speedup.verdict
        return {"schema": plain.pop("schema"), **plain}


@dataclass
class _Cell:
    """What is known about one arm on one task, in a form that can be added over tasks."""

    measured: list[Sample]
    failed: list[Sample]
    traced: list[Sample]
    drafting: Drafting
    split: TimeSplit | None
    pairing: Pairing | None = None

    def __add__(self, other: _Cell) -> _Cell:
        splits = [split for split in (self.split, other.split) if split is not None]
        pairings = [pairing for pairing in (self.pairing, other.pairing) if pairing is not None]
        return _Cell(
            self.measured + other.measured,
            self.failed + other.failed,
            self.traced + other.traced,
            self.drafting + other.drafting,
            splits[0] + splits[1] if len(splits) == 2 else (splits or [None])[0],
            pairings[0] + pairings[1] if len(pairings) == 2 else (pairings or [None])[0],
        )


@without_collector()
def summarise(manifest: dict[str, Any], samples: Sequence[Sample]) -> Summary:
    """Everything that a table of this run shows.

    Raises:
        MeasurementError: not one sample finished. There is no row of zeros for that.
        RunFolderError: the samples name an arm that the manifest does not.
    """
    arms = _arms(manifest)
    cells = _cells(arms, samples)
    baseline = manifest.get("baseline")
    cautions: list[Caution] = []
    tasks = list(dict.fromkeys(task for task, _ in cells))
    for task in tasks:
        reference = cells.get((task, baseline)) if baseline else None
        prompts = max(len(_prompts(cells[task, arm].measured)) for arm in arms if (task, arm) in cells)
        if prompts < statistics.FEW_PROMPTS:
            text = f"{task}: only {prompts} prompt{'' if prompts == 1 else 's'}; too few to generalise from"
            cautions.append(Caution("few-prompts", text, task, None, prompts))
        if reference and baseline:
            cautions += statistics.drift_caution(task, baseline, reference.measured)
        for name, arm in arms.items():
            cell = cells.get((task, name))
            if cell is None:
                continue
            found = statistics.arm_cautions(task, name, cell.measured, cell.failed)
            cautions += served.without_stalls(found) if served.is_served(arm) else found
            if reference and baseline and name != baseline:
                cell.pairing = statistics.pair(reference.measured + reference.failed, cell.measured + cell.failed)
                same = _same_tokens(arm, manifest)
                cautions += statistics.pairing_cautions(task, name, baseline, cell.pairing, same)
                cautions += _exactness_cautions(task, name, arm, manifest, cell)
    if all(sample.repeat == 0 for sample in samples if sample.kind == "measure"):
        cautions.append(Caution("one-repeat", "every prompt was measured once: how much repeats differ is not known"))
    if manifest.get("interrupted"):
        cautions.append(Caution("interrupted", "the run was interrupted; this is what was measured until then"))
    twice = len(samples) - len({sample.key for sample in samples})
    if twice:
        text = f"{twice} records stand in the folder more than once; two runs must have written there, so trust none"
        cautions.append(Caution("broken", text, value=twice))
    cautions += _check_cautions(samples)
    cautions += _thread_cautions(arms, manifest)

    if len(tasks) > 1:
        for name in arms:
            ours = [cells[task, name] for task in tasks if (task, name) in cells]
            if ours:
                cells[ALL_TASKS, name] = sum(ours[1:], ours[0])
        tasks.append(ALL_TASKS)
    rows = [
        _row(task, arms[name], cells[task, name], cells.get((task, baseline)) if baseline else None, manifest)
        for task in tasks
        for name in arms
        if (task, name) in cells
    ]
    notes = _notes(rows, cells, arms, manifest)
    return Summary(
        title=_title(manifest, arms),
        watermarks=_watermarks(manifest, arms),
        baseline=baseline,
        settings=dict(manifest.get("settings") or {}),
        environment=dict(manifest.get("environment") or {}),
        rows=rows,
        cautions=cautions,
        notes=notes,
    )


def _notes(
    rows: Sequence[Row], cells: dict[tuple[str, str], _Cell], arms: dict[str, dict[str, Any]], manifest: dict[str, Any]
) -> list[str]:
    """What the run had to say, what `auto` chose, and the profile that predictions come from; fills those in."""
    found = list(manifest.get("notes") or [])
    for row in (row for row in rows if row.task != ALL_TASKS):
        samples = cells[row.task, row.arm].measured
        told = (tell(row.task, row.arm, samples) for tell in (choices.told, rounds.told, served.told))
        found += [line for line in told if line]
    kept = forecasts.find(manifest)
    for row in rows if kept else ():
        samples = cells[row.task, row.arm].measured
        if row.baseline or kept is None:
            continue
        tasks, drafting = {sample.task for sample in samples}, cells[row.task, row.arm].drafting
        told = ((forecasts.steps_of(sample), sample.levels) for sample in samples)
        row.profile_decode_speedup = forecasts.speedup(
            kept, arms[row.arm], manifest, drafting, len(samples), told, tasks
        )
    if kept and any(row.profile_decode_speedup for row in rows):
        found.append(kept.note)
    return found


def _arms(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arms by name, the baseline first."""
    baseline = manifest.get("baseline")
    arms = sorted(manifest.get("arms") or [], key=lambda arm: arm["name"] != baseline)
    return {arm["name"]: arm for arm in arms}


def _batch(manifest: dict[str, Any]) -> int:
    return (manifest.get("settings") or {}).get("batch") or 1


def _cells(arms: dict[str, Any], samples: Sequence[Sample]) -> dict[tuple[str, str], _Cell]:
    by_cell: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_cell.setdefault((sample.task, sample.arm), []).append(sample)
    foreign = sorted({arm for _, arm in by_cell} - set(arms))
    if foreign:
        known = ", ".join(arms) or "none"
        raise RunFolderError(f'the samples name the arm "{foreign[0]}", the manifest does not (its arms: {known})')
    cells = {}
    for key, ours in by_cell.items():
        measured = metrics.finished(ours)
        failed = [sample for sample in ours if sample.kind == "measure" and not sample.ok]
        if measured or failed:
            traced = metrics.finished(ours, "trace")
            cells[key] = _Cell(measured, failed, traced, metrics.drafting(measured), metrics.time_split(traced))
    if not any(cell.measured for cell in cells.values()):
        failed = [sample for cell in cells.values() for sample in cell.failed]
        why = f"all {len(failed)} samples failed, the first with: {failed[0].error}" if failed else "no samples"
        raise MeasurementError(f"nothing measured: {why}")
    return cells


def _prompts(samples: Iterable[Sample]) -> set[tuple[str, str]]:
    return {(sample.task, sample.prompt_id) for sample in samples}


def _row(task: str, arm: dict[str, Any], cell: _Cell, reference: _Cell | None, manifest: dict[str, Any]) -> Row:
    ok, drafting, split = cell.measured, cell.drafting, cell.split
    name, roles = arm["name"], arm.get("roles") or {}
    row = Row(
        task=task,
        arm=name,
        strategy=arm.get("strategy", name),
        engine=arm.get("engine", "specbench"),
        baseline=name == manifest.get("baseline"),
        reference=name == (manifest.get("lossless_reference") or manifest.get("baseline")),
        lossless=bool(arm.get("lossless", True)),
        prompts=len(_prompts(ok)),
        n_ok=len(ok),
        n_failed=len(cell.failed),
        devices=metrics.devices(arm),
        threads=metrics.threads(arm),
        runtime=_distinct(roles, "runtime"),
        dtype=_distinct(roles, "dtype"),
        models={role: str(facts.get("model")) for role, facts in roles.items()},
        peak_memory_bytes=(manifest.get("peak_memory_bytes") or {}).get(name),
        continuous=bool(arm.get("continuous")),
        exactness=_exactness(task, name, manifest),
    )
    if not ok:
        return row
    latencies = [metrics.e2e_ns(sample) for sample in ok]
    ttfts = [metrics.ttft_ns(sample) for sample in ok]
    row.tokens = sum(map(metrics.emitted, ok))
    row.tokens_per_sample = metrics.ratio(row.tokens, len(ok))
    row.ttft_p50_ns = metrics.percentile(ttfts, 50)
    row.tpot_ns = metrics.pooled_tpot_ns(ok)
    row.decode_tokens_per_s = metrics.decode_tokens_per_s(ok)
    row.e2e_tokens_per_s = metrics.e2e_tokens_per_s(ok)
    row.throughput_tokens_per_s = metrics.throughput_tokens_per_s(ok)
    row.latency_p50_ns = metrics.percentile(latencies, 50)
    row.latency_p90_ns = metrics.percentile(latencies, 90)
    row.latency_p99_ns = metrics.percentile(latencies, 99)
    row.tokens_per_step = drafting.tokens_per_step
    row.accepted_per_step = drafting.accepted_per_step
    row.acceptance_rate = drafting.acceptance_rate
    row.acceptance_by_position = drafting.acceptance_by_position
    row.conditional_acceptance_by_position = drafting.conditional_acceptance_by_position
    row.acceptance_by_level = drafting.acceptance_by_level
    row.levels = _levels(ok, drafting, roles)
    if row.levels and all(level["cost"] is not None for level in row.levels):
        forwards, costs = zip(*((level["forwards"], level["cost"]) for level in row.levels), strict=True)
        row.standardized_improvement = metrics.standardized_improvement(ok, forwards, costs)
    row.spread = statistics.spread(ok)
    row.drain_share = metrics.drain_share(ok)
    row.sums = {
        "decode_tokens": drafting.tokens,
        "ttft_ns": sum(ttfts),
        "decode_ns": sum(latencies) - sum(ttfts),
        "e2e_ns": sum(latencies),
        "wall_ns": metrics.wall_ns(ok),
        "wall_tokens": metrics.wall_tokens(ok),
        "steps": drafting.steps,
        "empty_steps": drafting.empty_steps,
        "drafted": drafting.drafted,
        "accepted": drafting.accepted,
        "wasted": drafting.wasted,
    }
    if served.is_served(arm):
        served.tell_drafting(row, ok)
    if cell.pairing is not None:
        pairing = cell.pairing
        # Arms that ought to emit the same tokens are compared where they did; the others per token.
        matched = pairing.matched if _same_tokens(arm, manifest) else []
        pairs = matched or pairing.pairs
        row.decode_speedup = statistics.decode_speedup(pairs, per_token=not matched)
        row.e2e_speedup = statistics.e2e_speedup(pairs, per_token=not matched)
        if _batch(manifest) > 1:
            row.throughput_speedup = statistics.throughput_speedup(pairs)
        base_devices = metrics.devices(_arms(manifest)[manifest["baseline"]])
        if row.decode_speedup and row.devices and base_devices:
            row.decode_speedup_per_device = row.decode_speedup.value * len(base_devices) / len(row.devices)
    if split is not None:
        plain = reference.split if reference is not None and not row.baseline else None
        row.predicted_decode_speedup = metrics.predicted_speedup(drafting.tokens_per_step, split, plain)
        row.trace = _trace(split, plain)
    row.cause = _cause(row, arm, split, reference.split if reference else None)
    return row


def _levels(samples: Sequence[Sample], drafting: Drafting, roles: dict[str, Any]) -> list[dict[str, Any]]:
    """What each level of a cascade did. `cost` is its forward in forwards of the target, by bytes of weights."""
    known = next((sample.facts["levels"] for sample in samples if sample.facts and "levels" in sample.facts), "")
    names = str(known).split(",") if known else []
    target_bytes = (roles.get("target") or {}).get("weight_bytes")
    found = []
    for at, (drafted, accepted, forwards, time_ns) in enumerate(drafting.levels):
        name = names[at] if at < len(names) else f"level {at + 1}"
        role = roles.get(name) or {}
        found.append({
            "name": name, "model": role.get("model"), "drafted": drafted, "accepted": accepted,
            "acceptance_rate": metrics.ratio(accepted, drafted), "forwards": forwards, "time_ns": time_ns,
            "cost": metrics.ratio(role.get("weight_bytes"), target_bytes) if role else None if forwards else 0.0,
        })  # fmt: skip
    return found


def _trace(split: TimeSplit, plain: TimeSplit | None) -> dict[str, Any]:
    """The sums and what follows from them; `cost_ratio` is c of the literature."""
    draft_forward = metrics.ratio(split.draft_ns, split.draft_forwards)
    plain_forward = metrics.ratio(plain.verify_ns, plain.verify_forwards) if plain else None
    return {
        **asdict(split),
        "draft_ns_per_step": split.draft_ns_per_step,
        "verify_ns_per_step": split.verify_ns_per_step,
        "rest_ns_per_step": split.rest_ns_per_step,
        "draft_share": split.draft_share,
        "verify_share": split.verify_share,
        "rest_share": split.rest_share,
        "cost_ratio": metrics.ratio(draft_forward, plain_forward),
    }


def _cause(row: Row, arm: dict[str, Any], split: TimeSplit | None, plain: TimeSplit | None) -> str | None:
    """Why a row is below 1.00x, as far as its counts and its trace can tell; None where it is not below."""
    if row.decode_speedup is None or row.decode_speedup.value >= 1:
        return None
    facts = []
    plain_step = metrics.ratio(plain.decode_ns, plain.steps) if plain else None
    if split is not None and plain_step and split.steps:
        parts = {"draft": split.draft_ns_per_step, "verify": split.verify_ns_per_step, "other": split.rest_ns_per_step}
        shares = ", ".join(f"{name} {(ns or 0) / plain_step:.2f}" for name, ns in parts.items())
        whole = split.decode_ns / split.steps / plain_step
        facts.append(f"a step takes {whole:.2f} times a plain one ({shares})")
        if row.tokens_per_step is not None and row.tokens_per_step >= whole:
            facts.insert(0, "the traced prompts do not show why")
    if split is not None and split.overlap_ns:  # the draft's time is no part of the whole then, and may exceed it
        both = metrics.ratio(split.overlap_ns, split.decode_ns)
        facts.append(f"draft and target worked at the same time for {statistics.percent(both or 0)} of the time")
    elif split is not None and split.draft_share:
        facts.append(f"drafting took {statistics.percent(split.draft_share)} of the time")
    if row.tokens_per_step is not None:
        facts.append(f"{row.tokens_per_step:.2f} tokens per step")
    if row.acceptance_rate is not None:
        facts.append(f"acceptance {row.acceptance_rate:.2f}")
    elif arm.get("reports_drafts", True) and row.strategy != "autoregressive":
        facts.append("nothing was drafted")
    return "; ".join(facts)


def _distinct(roles: dict[str, Any], name: str) -> str | None:
    """One value when all roles share it, else `target/draft` values in the order of the roles."""
    ordered = sorted(roles, key=lambda role: role != "target")
    values = [str(roles[role][name]) for role in ordered if roles[role].get(name) is not None]
    return "/".join(values if len(set(values)) > 1 else values[:1]) or None


# --- losslessness ----------------------------------------------------------------------------------------------------


def _greedy(manifest: dict[str, Any]) -> bool:
    return not (manifest.get("settings") or {}).get("temperature")


def _same_tokens(arm: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Whether an arm ought to emit the very tokens of the baseline: lossless, and greedy or with coupled noise, which
    another engine does not have; of a server only text is known."""
    if not arm.get("lossless", True) or served.is_served(arm):
        return False
    coupled = (manifest.get("settings") or {}).get("verify", "coupled") == "coupled"
    return _greedy(manifest) or (coupled and arm.get("engine", "specbench") == "specbench")


def _exactness(task: str, arm: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest's losslessness report for one row; added up for all tasks."""
    report = manifest.get("lossless") or {}
    if task != ALL_TASKS:
        return (report.get(task) or {}).get(arm)
    found = [arms[arm] for arms in report.values() if arms and arm in arms]
    return lossless.added(found) if found else None


def _exactness_cautions(
    task: str, name: str, arm: dict[str, Any], manifest: dict[str, Any], cell: _Cell
) -> list[Caution]:
    """A lossless arm that emitted other tokens, or whose tokens were not all compared."""
    report = _exactness(task, name, manifest)
    if report is None or not arm.get("lossless", True):
        return []
    found = []
    different, compared = report.get("different") or 0, report.get("compared") or 0
    if different:
        text = f"{task}, {name}: {different} of {compared} outputs differ from the baseline's, and not in a near-tie"
        found.append(Caution("different-tokens", text, task, name, different))
    expected = len(cell.pairing.pairs) if cell.pairing else 0
    if compared < expected:
        text = f"{task}, {name}: only {compared} of {expected} outputs were compared with the baseline's"
        found.append(Caution("not-compared", text, task, name, expected - compared))
    return found


def _check_cautions(samples: Iterable[Sample]) -> list[Caution]:
    """The first prompt runs once more at the end: an arm that then says something else kept state between prompts."""
    samples = list(samples)
    checks = [sample for sample in samples if sample.kind == "check" and sample.ok]
    wanted = {(check.arm, check.task, check.prompt_id, check.turn) for check in checks}
    first = {
        key: sample
        for sample in reversed(samples)
        if sample.kind == "measure" and sample.ok
        for key in [(sample.arm, sample.task, sample.prompt_id, sample.turn)]
        if key in wanted
    }
    found = []
    for check in checks:
        before = first.get((check.arm, check.task, check.prompt_id, check.turn))
        if before is not None and before.token_ids != check.token_ids:
            text = (
                f"{check.task}, {check.arm}: {check.prompt_id} gave other tokens when it was run again at the end; "
                "something is kept between prompts"
            )
            found.append(Caution("state", text, check.task, check.arm))
    return found


def _thread_cautions(arms: dict[str, dict[str, Any]], manifest: dict[str, Any]) -> list[Caution]:
    """More threads than cores, or other people's, can halve the speed of drafting on a CPU, and nothing else in a
    table shows it."""
    cores = (manifest.get("environment") or {}).get("physical_cores")
    found = []
    for name, arm in arms.items():
        threads = metrics.threads(arm)
        if isinstance(cores, int) and threads is not None and threads > cores:
            text = f"{name}: {threads} threads on {cores} physical cores; they take turns, which can halve its speed"
            found.append(Caution("threads", text, None, name, threads))
    load = manifest.get("load_at_start")
    if isinstance(cores, int) and isinstance(load, (int, float)) and load > MOST_LOAD * cores:
        text = f"the machine was busy before the run began (load {load:.1f} on {cores} physical cores)"
        found.append(Caution("busy", text, value=load))
    return found


# --- titles ----------------------------------------------------------------------------------------------------------


def _title(manifest: dict[str, Any], arms: dict[str, dict[str, Any]]) -> list[str]:
    """Model, precision, runtime and hardware; then how it was decoded; then the other models."""
    settings, environment = manifest.get("settings") or {}, manifest.get("environment") or {}
    targets = list(dict.fromkeys(_target(arm, "model") for arm in arms.values()))
    dtypes = list(dict.fromkeys(_target(arm, "dtype") for arm in arms.values()))
    runtimes = list(dict.fromkeys(_target(arm, "runtime") for arm in arms.values()))
    parts = _known(targets)
    parts += _known(dtypes) if len(dtypes) == 1 else []  # where arms differ in it, it is a column
    parts += _known(runtimes) if len(runtimes) == 1 else []
    parts += [f"tp {settings['tp']}"] if settings.get("tp", 1) > 1 else []
    parts.append(hardware(environment, arms))
    used = {(" + ".join(metrics.devices(arm)), metrics.threads(arm)) for arm in arms.values()}
    if len(used) == 1:
        devices, threads = used.pop()
        parts += [devices, f"{threads} thread{'' if threads == 1 else 's'}" if threads else ""]
    drafts: dict[str, list[str]] = {}
    for arm in arms.values():
        for role, facts in (arm.get("roles") or {}).items():
            if role != "target" and facts.get("model") and facts["model"] not in drafts.setdefault(role, []):
                drafts[role].append(facts["model"])
    lines = [", ".join(part for part in parts if part)]
    lines += [f"{role}: {', '.join(models)}" for role, models in drafts.items() if models]
    lines += [served.title(name, arm) for name, arm in arms.items() if served.is_served(arm)]
    others = {name: arm for name, arm in arms.items() if arm.get("engine", "specbench") != "specbench"}
    peers = [name for name, arm in others.items() if not served.is_served(arm)]
    lines += [f"{', '.join(peers)}: another library's own decoding loop under the same clock"] if peers else []
    lines.append(_decoding(settings))
    replayed = manifest.get("replayed_answers_of")
    lines += [f"later turns of a conversation follow the answers of {replayed} in all arms"] if replayed else []
    return lines


def _target(arm: dict[str, Any], fact: str) -> Any:
    return ((arm.get("roles") or {}).get("target") or {}).get(fact)


def _known(values: Sequence[Any]) -> list[str]:
    known = [str(value) for value in values if value]
    return ["/".join(known)] if known else []


def hardware(environment: dict[str, Any], arms: dict[str, dict[str, Any]]) -> str:
    """The GPUs that the arms use by name, else the processor and its cores."""
    if served.only_served(arms):
        return served.HARDWARE
    used = {device for arm in arms.values() for device in metrics.devices(arm)}
    names = [gpu.get("name", gpu["device"]) for gpu in environment.get("gpus") or [] if gpu.get("device") in used]
    found = machines.counted(names)
    if environment.get("cpu") and (not found or any(device.startswith("cpu") for device in used)):
        found.append(machines.processor(environment))
    return " + ".join(found)


def _decoding(settings: dict[str, Any]) -> str:
    temperature = settings.get("temperature")
    if not temperature:
        parts = ["greedy"]
    else:
        parts = [f"temperature {temperature:g}"]
        parts += [f"top-k {settings['top_k']}"] if settings.get("top_k") else []
        parts += [f"top-p {settings['top_p']:g}"] if settings.get("top_p") not in (None, 1, 1.0) else []
        parts += [f"{settings['verify']} verification"] if settings.get("verify") else []
        parts += [f"seed {settings['seed']}"] if settings.get("seed") is not None else []
    if settings.get("max_new_tokens"):
        parts.append(f"at most {settings['max_new_tokens']} new tokens")
    prompts = f" ({settings['batch_prompts']} prompts a call)" if settings.get("batch_prompts") else ""
    parts.append(f"batch {settings.get('batch') or 1}{prompts}")
    repeats = settings.get("repeats") or 1
    parts.append(f"{repeats} repeat{'' if repeats == 1 else 's'}")
    templates = settings.get("templates") or (["raw"] if settings.get("raw") else ["chat"])
    parts.append(" and ".join("raw prompts" if template == "raw" else "chat template" for template in templates))
    return ", ".join(parts)


def _watermarks(manifest: dict[str, Any], arms: dict[str, dict[str, Any]]) -> list[str]:
    settings = manifest.get("settings") or {}
    found = []
    if settings.get("ignore_eos"):
        found.append("EOS ignored: the models write on past their end, where acceptance means little")
    if any(value for name, value in settings.items() if name.startswith("synthetic")):
        found.append("SYNTHETIC acceptance: no draft was judged; these are not measurements of a strategy")
    found += [f"SYNTHETIC: {name} does not draft with a model" for name, arm in arms.items() if arm.get("synthetic")]
    lossy = [name for name, arm in arms.items() if not arm.get("lossless", True)]
    if lossy:
        found.append(f"LOSSY: {', '.join(lossy)} may emit what the target model would not")
    return found
