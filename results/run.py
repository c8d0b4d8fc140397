"""A run from a plan to a folder of records and a summary.

Arms are interleaved prompt by prompt and take turns at going first; in batches, by as many prompts as one call runs
through its rows (`Plan.prompts_per_call`). Later turns of a prompt replay the answer of the reference arm (the
baseline) for all arms. After the measured samples come the first prompt once more (state carried over between prompts
would show) and a traced pass over a few prompts (where the time goes); neither feeds a table's speed.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MeasurementError, RunFolderError, UsageError, WorkerError
from ..hardware import devices, environment
from ..hardware.clock import Clock, Drain, drain_for
from ..models.base import CachedModel
from ..models.info import ModelInfo
from ..models.load import connect, load
from ..models.remote import ModelWorker, load_remote, peak_memory_bytes, reset_peak_memory
from ..strategies.base import Request, Row, Strategy
from ..strategies.verify import Verifier
from ..tasks import warmup
from . import drafts, lossless
from .listener import Listener
from .manifest import check_same_work, describe_arm, different_environment, new_manifest, now
from .measure import Call, Ending, Outcome, measure
from .plan import Arm, Plan, check, to_json
from .prepare import Prepared, Turn, prepare
from .records import SAMPLES, RunFolder, Sample, SampleWriter
from .summary import Summary, summarise
from .tables import EXPORTS, write_exports

WARMUP_TOKENS = 16


@dataclass
class RunResult:
    folder: Path
    manifest: dict[str, Any]
    summary: Summary
    interrupted: bool

    @property
    def failures(self) -> list[str]:
        """Why the exit code has to be 1; empty when all is well."""
        reasons = []
        if self.summary.n_failed:
            reasons.append(f"{self.summary.n_failed} sample(s) failed; see `error` in {self.folder / SAMPLES}")
        if self.manifest["settings"]["require_lossless"]:
            reasons += lossless.violations(self.manifest["lossless"])
        return reasons


def validate(plan: Plan, listener: Listener | None = None) -> Prepared:
    """Every check short of loading weights, the run folder included."""
    checked = check(plan)
    folder = run_folder(plan)
    if folder is not None:
        _check_folder(folder, plan)
    return prepare(checked, listener or Listener())


class Models:
    """Where a run gets its models, and gives them back. A sweep keeps them for the next run."""

    def __init__(self) -> None:
        self.workers: dict[tuple[devices.Device, int], ModelWorker] = {}

    def load(
        self, info: ModelInfo, device: str, apart: tuple[devices.Device, int] | None = None, **how: Any
    ) -> CachedModel:
        """A model of this process; or, with `apart`, one in the worker on that device, with so many threads."""
        if apart is None:
            return load(info, device=device, **how)
        worker = self.workers.get(apart)
        model = load_remote(info, info.role, *apart, **how, worker=worker if worker and worker.alive else None)
        self.workers[apart] = model.worker
        return model

    def release(self, model: CachedModel) -> None:
        model.close()


def run(
    plan: Plan,
    listener: Listener | None = None,
    argv: Sequence[str] = (),
    clock: Clock | None = None,
    models: Models | None = None,
) -> RunResult:
    """Measures; see the module's docstring.

    Ctrl-C (KeyboardInterrupt) ends the measuring and leaves a summary of what there is; a second one passes through.

    Raises:
        UsageError and its kin: before anything was measured or written.
        MeasurementError: nothing could be measured; the records are kept.
        WorkerError: a worker process died or hangs. What was measured is kept and summarised.
    """
    listener = listener or Listener()
    prepared = validate(plan, listener)
    folder = run_folder(plan) or _new_folder(prepared)
    return _Run(prepared, folder, listener, clock or Clock(), argv, models or Models()).run()


def run_folder(plan: Plan) -> RunFolder | None:
    return RunFolder(plan.out) if plan.out else None


def _new_folder(prepared: Prepared) -> RunFolder:
    plan = prepared.plan
    words = [re.sub(r"[^\w.-]+", "-", Path(plan.target).name or plan.target), *plan.strategy]
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    base = Path("runs") / "-".join([stamp, *words])[:120]
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return RunFolder(path)


def _check_folder(folder: RunFolder, plan: Plan) -> None:
    if plan.resume:
        if not folder.exists():
            raise RunFolderError(f"{folder.path}: nothing to resume there; leave --resume out to start")
        _check_same(folder.manifest()["plan"], to_json(plan), folder.path)
    elif folder.exists() and not plan.overwrite:
        raise RunFolderError(f"{folder.path}: holds a run already; go on with --resume, or replace it with --overwrite")
    elif not folder.exists() and folder.path.is_dir() and any(folder.path.iterdir()):
        raise RunFolderError(f"{folder.path}: holds other files; name a new or empty folder with --out")
    elif folder.path.exists() and not folder.path.is_dir():
        raise RunFolderError(f"{folder.path}: is a file; name a folder with --out")
    there = next(path for path in (folder.path, *folder.path.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder.path}: cannot be written, since {there} is not a folder one may write to")


_MAY_DIFFER = {"out", "resume", "overwrite", "trace", "require_lossless"}


def _check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    new = json.loads(json.dumps(new))
    differing = [key for key in new if key not in _MAY_DIFFER and old.get(key) != new[key]]
    if differing:
        what = "; ".join(f"{key}: {old.get(key)!r} there, {new[key]!r} now" for key in differing)
        raise RunFolderError(f"{path}: was made with other settings ({what}); --resume needs the same ones")


@dataclass
class _Arm:
    name: str
    strategy: Strategy
    models: dict[str, CachedModel]
    engine: str
    peak_bytes: int | None = None


class _Run:
    """The state of one run while it is being measured."""

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        listener: Listener,
        clock: Clock,
        argv: Sequence[str],
        source: Models,
    ) -> None:
        self.prepared = prepared
        self.plan = prepared.plan
        self.folder = folder
        self.listener = listener
        self.clock = clock
        self.source = source
        self.sampling = self.plan.sampling(prepared.eos)
        self.eos = frozenset() if self.plan.ignore_eos else frozenset(prepared.eos)
        self.arms: list[_Arm] = []
        self.models: dict[tuple[str, str], CachedModel] = {}
        self.group = 0  # number of the next call
        self.rounds = 0  # how many prompts, turns and repeats all arms went through: whose turn it is to go first
        self.manifest = new_manifest(prepared, argv)
        self.old: dict[str, Any] = {}  # the manifest of a run to resume
        self.done: dict[tuple, Sample] = {}
        self.writer: SampleWriter | None = None
        self.reference = prepared.checked.reference
        self.drain = drain_for([prepared.checked.placement.of("target").torch_name])

    # The whole

    def run(self) -> RunResult:
        self.done = self._resume() if self.plan.resume else {}
        self.group = 1 + max((sample.group for sample in self.done.values()), default=-1)
        interrupted = False
        try:
            try:
                if not self._is_complete():
                    self._load()  # what can still be refused is refused here, before anything is written
                    self._begin_folder()
                    self._warm_up()
                    self._measure_all()
                    self._check_first_again()
                    self._trace()
            except KeyboardInterrupt:
                self.listener.end()
                if not self.done:
                    raise  # there is nothing to summarise
                interrupted = True
                self.listener.note("interrupted; summarising what was measured (Ctrl-C again to leave at once)")
            except WorkerError as error:
                self.listener.end()
                if self.writer is None or not self.done:
                    raise
                with contextlib.suppress(MeasurementError, WorkerError):  # the target may be what is gone
                    self._finish(interrupted=True)
                way_out = f"the run ends here; go on with --resume --out {self.folder.path}"
                raise WorkerError(f"{error}; {way_out}") from error
            else:
                self.listener.end()
            return self._finish(interrupted)
        finally:
            gc.unfreeze()
            if self.writer is not None:
                self.writer.close()
            for arm in self.arms:
                arm.strategy.close()
            for model in self.models.values():
                self.source.release(model)

    def _resume(self) -> dict[tuple, Sample]:
        """What is there already and counts. Refuses if it was measured on other prompts or models; failed samples are
        dropped from the folder, to be measured again."""
        old = self.folder.manifest()
        check_same_work(old, self.manifest, self.folder.path)
        if differing := different_environment(old, self.manifest):
            self.listener.warn(f"resumed in another environment ({differing}); speeds from before and after may differ")
            self.manifest["notes"].append(f"resumed in another environment: {differing}")
        samples = self.folder.samples()
        kept = [sample for sample in samples if sample.ok]
        if len(kept) < len(samples):
            self.folder.rewrite(kept)
        self.old = old
        self.manifest |= {key: old[key] for key in ("started", "argv") if key in old}
        for key in ("load_ns", "warmup", "notes"):
            self.manifest[key] = [*old.get(key, []), *self.manifest[key]]
        self.manifest["peak_memory_bytes"] = dict(old.get("peak_memory_bytes") or {})
        self.manifest["resumed"] = [*old.get("resumed", []), now()]
        return {sample.key: sample for sample in kept}

    def _is_complete(self) -> bool:
        """Whether the folder to resume holds a whole run: nothing to measure, check, trace or compare."""
        if not self.old.get("finished") or self.old.get("interrupted") or self._left():
            return False
        self.manifest = {
            **self.old,
            "resumed": self.manifest["resumed"],
            "settings": {**self.old["settings"], "require_lossless": self.plan.require_lossless},
        }
        return True

    def _left(self) -> int:
        """How many measured samples are missing. Turns whose question is never asked, since the answer before them
        failed, are among them."""
        return sum(
            (arm.name, task, prompt.id, turn, repeat, "measure") not in self.done
            for task, prompt in self.prepared.prompts
            for arm in self.prepared.checked.arms
            for turn in range(len(prompt.turns))
            for repeat in range(self.plan.repeats)
        )

    def _begin_folder(self) -> None:
        while self.plan.out is None:  # claimed in one step: another run may have begun in the same second
            try:
                self.folder.path.mkdir(parents=True)
                break
            except FileExistsError:
                self.folder = _new_folder(self.prepared)
        if self.plan.overwrite:
            self.folder.clear(EXPORTS)
        self.folder.write_manifest(self.manifest)
        self.writer = self.folder.writer()

    def _finish(self, interrupted: bool) -> RunResult:
        samples = self.folder.samples()
        if self.arms:
            if self._comparable():
                self.listener.stage("comparing outputs")
                arms = {arm.name: arm.strategy for arm in self.arms if arm.strategy.lossless}
                as_text = {name: self._reread(strategy) for name, strategy in arms.items() if strategy.sends_text}
                names = [name for name in arms if name not in as_text or self.sampling.greedy]
                self.turns = self._turns_by_hash()
                known = [sample for sample in samples if sample.prompt_hash in self.turns]
                found = lossless.report(known, self.reference, names, self._judge, as_text)
                self.manifest["lossless"], self.manifest["lossless_reference"] = found, self.reference
            peaks = self.manifest["peak_memory_bytes"]
            for arm in self.arms:
                peaks[arm.name] = max(peaks.get(arm.name) or 0, arm.peak_bytes or 0) or None
            self.manifest |= {"interrupted": interrupted, "finished": now(), "load_at_end": environment.load()}
        self.folder.write_manifest(self.manifest)
        summary = summarise(self.manifest, samples)
        write_exports(summary, self.folder.path)
        return RunResult(self.folder.path, self.manifest, summary, interrupted)

    def _comparable(self) -> bool:
        """Token by token: always when greedy, and under the coupled rule at any temperature."""
        return self.sampling.greedy or self.sampling.verify == "coupled"

    def _reread(self, strategy: Strategy) -> lossless.Reread:
        """Ids of ours as they are read back from an engine that sends text."""
        return lambda ids: strategy.read(self.prepared.codec.decode(ids), None)

    def _turns_by_hash(self) -> dict[str, Turn]:
        """Every turn that was asked, later ones rendered from the answers on record."""
        turns = list(self.prepared.first_turns)
        for task, prompt in self.prepared.prompts:
            said: list[str] = []
            for number in range(len(prompt.turns) - 1):
                answer = self.done.get((self.reference, task, prompt.id, number, 0, "measure"))
                if answer is None or not answer.ok:
                    break
                said.append(self.prepared.codec.decode(answer.token_ids, skip_special=True))
                turns.append(self.prepared.turn(task, prompt, said))
        return {turn.hash: turn for turn in turns}

    # Models

    def _load(self) -> None:
        placement = self.prepared.checked.placement
        devices.apply(placement)
        for arm in self.prepared.checked.arms:
            roles = [*arm.strategy.roles, *(r for r in arm.strategy.optional_roles if self._at_hand(r, arm))]
            loaded = {role: self._model(role, arm) for role in roles}
            connect(self.prepared.infos, loaded)
            limit = min(model.max_rows for model in loaded.values())
            if self.plan.batch > limit:
                raise UsageError(f"{arm.name}: this model runs at most {limit} row(s) at a time; lower --batch")
            strategy = arm.strategy(loaded, arm.options)
            self.arms.append(_Arm(arm.name, strategy, loaded, arm.engine))
        self.drain = Drain((*self.drain.waits, *(worker.drain for worker in _workers(self.models.values()))))
        # What is loaded by now stays; a collection before each sample need not look at it again.
        gc.collect()
        gc.freeze()
        self.manifest["environment"] |= environment.torch_environment()
        self.manifest["settings"]["runtime"] = self.models["target", self.arms[0].engine].runtime
        for model in self.models.values():
            model.reserve(self.plan.batch, self.prepared.needed_tokens)
        for arm in self.arms:
            self.listener.stage(f"preparing {arm.name}")
            arm.strategy.prepare(self.plan.batch, self.prepared.needed_tokens)
        learners = [arm.strategy for arm in self.arms if type(arm.strategy).practise is not Strategy.practise]
        questions = drafts.questions(self.prepared.infos["target"], self.plan.raw) if learners else []
        for strategy in learners:
            strategy.practise(questions)
        self.manifest["arms"] = [describe_arm(self.prepared, arm.name, arm.strategy, arm.models) for arm in self.arms]

    def _at_hand(self, role: str, arm: Arm) -> bool:
        """Whether there is a model for a role that a strategy can do without; a peer cannot take a quantised one, nor
        one that is in another process."""
        info = self.prepared.infos.get(role)
        ours = arm.engine == "specbench"
        return info is not None and (ours or not (info.spec.quant or self.prepared.checked.in_worker(arm, role)))

    def _model(self, role: str, arm: Arm) -> CachedModel:
        """The model of a role; a peer's engine takes the transformers runtime whatever ours uses. One in a worker is
        another one than that of the same role in this process."""
        placement, apart = self.prepared.checked.placement, self.prepared.checked.in_worker(arm, role)
        ranks = placement.ranks if role == "target" else ()
        engine = "worker" if apart else arm.engine
        if engine == "transformers":
            ours = self.models.get((role, "specbench"))
            if ours is not None and ours.runtime == "transformers":
                return ours
        if (role, engine) not in self.models:
            info = self.prepared.infos[role]
            own = arm.strategy.model_of_its_own(info, arm.options) if role == "target" else None
            if own is not None:
                self.models[role, engine] = own
                return own
            start = self.clock.now()
            whose = {"transformers": " for transformers", "worker": f" in a worker on {placement.of(role)}"}
            shared = f" on {len(ranks)} ranks" if ranks else ""
            self.listener.stage(f"loading {role} {info.name}{whose.get(engine, shared)}")
            self.models[role, engine] = self.source.load(
                info,
                apart=(placement.of(role), placement.threads_of(role)) if apart else None,
                device=placement.of(role).torch_name,
                dtype=self.prepared.dtype,
                runtime="transformers" if engine == "transformers" else self.plan.runtime_of(role),
                vocab_size=self.prepared.vocab_size,
                quant=self.prepared.quant(role),
                exact=self.plan.exact and engine != "transformers",
                **({"ranks": ranks} if ranks else {}),
            )
            self.manifest["load_ns"].append([role, engine, self.clock.now() - start])
        return self.models[role, engine]

    # Measuring

    def _warm_up(self) -> None:
        """Text of no task, as long as the task's middle prompt, through every arm; the first is the cold one."""
        self.listener.stage("warm-up")
        for task in dict.fromkeys(task for task, _ in self.prepared.prompts):
            lengths = [len(t.ids) for t in self.prepared.first_turns if t.task == task and t.error is None]
            if not lengths:
                continue
            text = warmup.text(int(np.median(lengths)), self.prepared.codec)
            ids = tuple(self.prepared.codec.encode(text)) or self.prepared.first_turns[0].ids[:1]
            rows = self.plan.batch
            for arm in self.arms:
                count = rows + (rows > 1 and arm.strategy.continuous)  # one more, to take the row of another
                for _ in range(self.plan.warmup):
                    requests = [Request(number, ids, WARMUP_TOKENS) for number in range(count)]
                    ending = Ending(self.eos)
                    outcomes = measure(arm.strategy, requests, self.sampling, ending, self.clock, self.drain, rows)
                    self.manifest["warmup"].append([task, arm.name, outcomes[0].e2e_ns])
                    if outcomes[0].error:
                        self.listener.warn(f"{arm.name}, warm-up: {outcomes[0].error}")

    def _measure_all(self) -> None:
        there = sum(sample.kind == "measure" for sample in self.done.values())
        self.listener.begin(self._left() + there, there)
        self.listener.stage("measuring")
        for task in dict.fromkeys(task for task, _ in self.prepared.prompts):
            turns = [turn for turn in self.prepared.first_turns if turn.task == task]
            size = self.plan.prompts_per_call
            for at in range(0, len(turns), size):
                self._measure_group(turns[at : at + size])

    def _measure_group(self, turns: list[Turn]) -> None:
        answers: list[list[str]] = [[] for _ in turns]
        number = 0
        while turns:
            for repeat in range(self.plan.repeats):
                first = self.rounds % len(self.arms)
                self.rounds += 1
                for arm in self.arms[first:] + self.arms[:first]:
                    self._sample(arm, turns, repeat, "measure")
            going_on = []
            for turn, said in zip(turns, answers, strict=True):
                answer = self.done.get((self.reference, turn.task, turn.prompt.id, number, 0, "measure"))
                if answer is not None and answer.ok and number + 1 < len(turn.prompt.turns):
                    said = [*said, self.prepared.codec.decode(answer.token_ids, skip_special=True)]
                    going_on.append((self.prepared.turn(turn.task, turn.prompt, said), said))
            turns = [turn for turn, _ in going_on]
            answers = [said for _, said in going_on]
            number += 1

    def _sample(self, arm: _Arm, turns: list[Turn], repeat: int, kind: str) -> None:
        """Measures some prompts on one arm, unless they are on the disk already, and writes what is new.

        Where the strategy takes up requests that wait, one call does them all; else they go in groups of a batch.
        """
        size = len(turns) if arm.strategy.continuous else self.plan.batch
        for at in range(0, len(turns), size):
            left = turns[at : at + size]
            while left:
                left = self._call(arm, left, repeat, kind)

    def _call(self, arm: _Arm, turns: list[Turn], repeat: int, kind: str) -> list[Turn]:
        """One call; returns the turns that it did not get to before it broke off, fewer than there were.

        What is on the disk already runs once more beside what is not, so that every row has its company.
        """
        samples = [self._blank(arm, turn, repeat, kind) for turn in turns]
        if all(sample.key in self.done for sample in samples):
            return []
        running = [turn for turn in turns if turn.error is None]
        for sample, turn in zip(samples, turns, strict=True):
            sample.error = turn.error
            sample.batch_rows = min(self.plan.batch, len(running))
        ran = [sample for sample in samples if sample.ok]
        requests = [Request(turn.key, turn.ids, turn.max_new_tokens, stop=self._stops(turn)) for turn in running]
        endings = [self._ending(turn) for turn in running]
        call = Call(arm.strategy, requests, self.sampling, endings, self.clock, self.drain, self.plan.batch)
        try:
            if running:
                environment.reset_peak_memory()
                for worker in _workers(arm.models.values()):
                    worker.call(reset_peak_memory)
                call.run()
                arm.peak_bytes = max(arm.peak_bytes or 0, _peak_memory_bytes(arm) or 0) or None
        except KeyboardInterrupt:
            if kind == "measure":  # the other passes are short, and begin anew
                self._keep(arm, samples, ran, call.outcomes)
            raise
        self._keep(arm, samples, ran, call.outcomes)
        for worker in _workers(arm.models.values()):
            worker.join()  # a sample may fail; a worker that is gone would fail all that follow
        return [turn for turn, sample in zip(turns, samples, strict=True) if not sample.ended]

    def _keep(self, arm: _Arm, samples: list[Sample], ran: list[Sample], outcomes: list[Outcome]) -> None:
        """Fills in what a call came to, and writes what has ended and is not on the disk yet."""
        for sample, outcome in zip(ran, outcomes, strict=True):
            _fill(sample, outcome, alone=len(ran) == 1)
            if sample.kind == "trace" and sample.ok:
                sample.forwards = self._forwards(arm, outcome)
                sample.rejected = outcome.rejected if any(outcome.rejected) else None
        fresh = [sample for sample in samples if sample.ended and sample.key not in self.done]
        assert self.writer is not None
        self.writer.append(fresh)
        self.done |= {sample.key: sample for sample in fresh}
        self.group += 1
        for sample in fresh:
            if sample.error:
                self.listener.warn(f"{arm.name}, {sample.task} {sample.prompt_id}: {sample.error}")
        if fresh:
            self.listener.sample(fresh)

    def _blank(self, arm: _Arm, turn: Turn, repeat: int, kind: str) -> Sample:
        return Sample(
            arm=arm.name,
            task=turn.task,
            prompt_id=turn.prompt.id,
            prompt_hash=turn.hash,
            category=turn.prompt.category,
            turn=turn.number,
            repeat=repeat,
            kind=kind,
            group=self.group,
            batch_rows=1,
            prompt_tokens=len(turn.ids),
            max_new_tokens=turn.max_new_tokens,
        )

    def _ending(self, turn: Turn) -> Ending:
        return Ending(self.eos, self._stops(turn), self.prepared.codec.decode)

    def _stops(self, turn: Turn) -> tuple[str, ...]:
        return (*self.plan.stop, *turn.prompt.stop)

    # After the measured samples

    def _check_first_again(self) -> None:
        """State that a strategy carries from prompt to prompt shows as another answer; the summary looks for it."""
        turns = [t for t in self.prepared.first_turns if t.error is None][: self.plan.batch]
        if not turns or len(self.prepared.first_turns) < 2:
            return
        for arm in self.arms:
            self._sample(arm, turns, 0, "check")

    def _trace(self) -> None:
        """Where the time goes, on a few prompts of each task, with every forward noted."""
        if not self.plan.trace:
            return
        self.listener.stage("tracing")
        for task in dict.fromkeys(task for task, _ in self.prepared.prompts):
            turns = [t for t in self.prepared.first_turns if t.task == task and t.error is None]
            for at in range(0, min(len(turns), self.plan.trace * self.plan.batch), self.plan.batch):
                for arm in self.arms:
                    if arm.engine != "specbench":
                        continue
                    for model in arm.strategy.models.values():  # with what a strategy made of them itself
                        model.trace = []
                    self._sample(arm, turns[at : at + self.plan.batch], 0, "trace")
                    for model in arm.strategy.models.values():
                        model.trace = None

    def _forwards(self, arm: _Arm, outcome: Outcome) -> dict[str, list[list[int]]]:
        start = outcome.start_ns
        return {
            role: [[f.start_ns - start, f.end_ns - start, f.rows, f.new_tokens] for f in model.trace or []]
            for role, model in arm.strategy.models.items()
        }

    def _judge(self, reference: Sample, index: int, token: int, other: int) -> lossless.Divergence:
        """The target's values where two arms part, by a teacher-forced pass over what they share."""
        turn = self.turns[reference.prompt_hash]
        row = Row(0, Request(turn.key, turn.ids, turn.max_new_tokens))
        row.tokens.extend(reference.token_ids[:index])
        target = self.models.get(("target", "specbench")) or self.models["target", "transformers"]
        target.reset()
        logits = target.advance([row.tokens.view()], 1)[0]
        values = Verifier(self.sampling).values(logits, row)
        best = values.topk(2).values
        tolerance = lossless.TOLERANCE.get(target.dtype, lossless.TOLERANCE["bfloat16"]) * float(logits.abs().max())
        if not self.sampling.greedy:
            tolerance /= self.sampling.temperature
        distances = [float(best[0] - values[at]) for at in (token, other)]
        # A token that top-k or top-p has dropped has no value; its distance from the border is what rounding may cross.
        distances = [
            distance if math.isfinite(distance) else Verifier(self.sampling).distance_to_border(logits, row, at)
            for distance, at in zip(distances, (token, other), strict=True)
        ]
        top_gap = float(best[0] - best[1])
        return lossless.Divergence(index, top_gap if math.isfinite(top_gap) else None, max(distances), tolerance)


def _workers(models: Iterable[CachedModel]) -> list[Any]:
    """The other processes that some of the models live in: a `ModelWorker`, or the `Ranks` of a target."""
    return list(dict.fromkeys(model.worker for model in models if model.worker is not None))


def _peak_memory_bytes(arm: _Arm) -> int | None:
    """Of this process and of the arm's workers together; None where one of them is not known."""
    peaks = [environment.peak_memory_bytes()]
    with contextlib.suppress(WorkerError):  # its sample has failed then
        peaks += [worker.call(peak_memory_bytes) for worker in _workers(arm.models.values())]
    return None if None in peaks else sum(peak for peak in peaks if peak)


def _fill(sample: Sample, outcome: Outcome, alone: bool) -> None:
    """What a request came to; nothing where it had not ended."""
    sample.error = outcome.error
    if outcome.finish is None:
        return
    sample.token_ids = outcome.token_ids
    sample.finish = outcome.finish
    sample.ttft_ns = outcome.ttft_ns
    sample.e2e_ns = outcome.e2e_ns
    sample.drain_ns = outcome.drain_ns
    sample.steps = outcome.steps
    sample.levels = outcome.levels or None
    sample.facts = outcome.facts or None
    sample.admitted_ns = outcome.admitted_ns or None
    if not alone:
        sample.call_ns, sample.call_tokens = outcome.call_ns, outcome.call_tokens
