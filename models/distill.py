"""`specbench distill`: a small draft for a target that has none.

A draft of a few layers starts from the target's own, shares its embedding and head (which stay as they are and are not
stored again), and learns the target's distribution over the most frequent tokens, on text that the target writes
meanwhile. Writing and training take turns, so that the text keeps growing: it is what such a draft runs out of first.
Distilling from a target's own text: Zhou et al. 2024 (DistillSpec, arXiv 2310.08461); left out here is text that the
draft writes, and divergences other than cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ModelError, UsageError
from ..hardware.clock import Clock
from . import distill_card, head_vocab
from .distill_data import TEMPERATURES, Texts, Writer, read_file
from .distill_student import HeldOut, Layers, Quality, Student, compute_dtype, head_loss
from .info import ModelInfo
from .load import check_cache, load_transformers
from .packed import PackedModel, supports

WARM_UP_STEPS = 20
LEAST_RATE = 0.03  # of the learning rate, at the end
ONLY_TRAINING = 0.15  # of the time, at the end
TRIAL = 0.02  # of the time, for each set of layers that is tried
LOOKS = 24  # how often held-out text is looked at


@dataclass(frozen=True)
class Settings:
    """What is to be made.

    Attributes:
        layers: of the draft.
        head_vocab: tokens that it may draft; all that the target has if that is fewer.
        minutes: for everything after loading; with `resume`, what was spent before counts.
        data: text or JSON lines to train on in place of text that the target writes.
        store: `bfloat16` or `int8`, on disk.
        rows, tokens: texts written at once, and their length; `rows` None for what suits the device.
        batch: texts per training step, and their learning rate; None for what suits the device: a CPU has time for few
            steps, which are small and large, respectively.
    """

    layers: int = 2
    head_vocab: int = 16384
    minutes: float = 60.0
    data: Path | None = None
    seed: int = 0
    store: str = "bfloat16"
    rows: int | None = None
    tokens: int = 288
    batch: int | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("head_vocab", 16), ("tokens", 32)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {least}")
        if not self.minutes > 0:
            raise UsageError(f"--minutes {self.minutes}: more than 0")
        if self.store not in ("bfloat16", "int8"):
            raise UsageError(f"--store {self.store}: bfloat16 or int8")
        if self.data is not None and not self.data.is_file():
            raise UsageError(f"--data {self.data}: no such file")


@dataclass
class Progress:
    """How far it is; the same object, changed in place.

    Attributes:
        doing: in words.
        spent_s, total_s: of the time that was given.
        text_tokens: written, or read from the file, so far; seen_tokens: trained on, repeats included.
        steps: of training.
        loss: of the latest step, in nats per token.
        before: what the target's first layers do before any training.
        latest, best: on held-out text.
    """

    doing: str = "loading"
    spent_s: float = 0.0
    total_s: float = 0.0
    text_tokens: int = 0
    seen_tokens: int = 0
    steps: int = 0
    loss: float | None = None
    before: Quality | None = None
    latest: Quality | None = None
    best: Quality | None = None


@dataclass(frozen=True)
class Distilled:
    """A draft that was made, or as far as it came."""

    folder: Path
    start: tuple[int, ...]
    progress: Progress
    interrupted: bool
    card: dict[str, Any] = field(repr=False)


def check(target: ModelInfo, settings: Settings, out: Path, resume: bool, device: str = "cpu") -> None:
    """Refuses, before weights are read, what cannot be distilled. Raises UsageError or ModelError."""
    check_cache(target)
    refusal = supports(target.config, device, compute_dtype(device))
    if refusal:
        raise ModelError(f"target {target.name}: cannot be distilled: {refusal}")
    if settings.layers > target.config.num_hidden_layers:
        raise UsageError(f"--layers {settings.layers}: {target.name} has {target.config.num_hidden_layers}")
    if settings.tokens > target.context_length:
        raise UsageError(f"texts of {settings.tokens} tokens do not fit {target.name}'s {target.context_length}")
    distill_card.check_folder(out, _identity(target, settings), resume)


def distill(
    target: ModelInfo,
    settings: Settings,
    out: Path,
    resume: bool = False,
    device: str = "cpu",
    watch: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> Distilled:
    """Makes a draft; `out` holds the best one so far from the first look at held-out text on.

    Ctrl-C (KeyboardInterrupt) ends the training, keeps the best draft, and leaves what `resume` needs to go on.

    Raises:
        UsageError, ModelError: see `check`.
    """
    check(target, settings, out, resume, device)
    distill_card.begin_folder(out, _identity(target, settings))
    return _Distilling(target, settings, out, device, watch or (lambda progress: None), clock or Clock()).run(resume)


_MAY_CHANGE = ("minutes", "store", "rows", "batch", "learning_rate")


def _identity(target: ModelInfo, settings: Settings) -> dict[str, Any]:
    """What has to be the same for a resume."""
    chosen = asdict(settings) | {"data": settings.data and settings.data.name}
    chosen = {name: value for name, value in chosen.items() if name not in _MAY_CHANGE}
    return {"target": target.fingerprint, **chosen}


def starts(layers: int, of: int) -> list[tuple[int, ...]]:
    """Which of the target's layers a draft may start from; which are best is tried out."""
    first = tuple(range(layers))
    ends = (*range(layers - 1), of - 1)
    spread = tuple(round(at * (of - 1) / max(1, layers - 1)) for at in range(layers))
    last = tuple(range(of - layers, of))
    return list(dict.fromkeys((first, ends, spread, last)))


class _Distilling:
    def __init__(
        self,
        target: ModelInfo,
        settings: Settings,
        out: Path,
        device: str,
        watch: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self.info, self.settings, self.out, self.device, self.watch, self.clock = (
            target,
            settings,
            out,
            device,
            watch,
            clock,
        )
        on_cpu = device.startswith("cpu")
        self.rows = settings.rows or (64 if on_cpu else 256)
        self.batch = settings.batch or (4 if on_cpu else 64)
        self.learning_rate = settings.learning_rate or (2e-3 if on_cpu else 1e-3)
        self.work = out / distill_card.WORK
        self.progress = Progress(total_s=settings.minutes * 60)
        self.texts = Texts(self.work)
        self.chance = np.random.default_rng([settings.seed, self.texts.files])
        self.written_s = 0.0
        self.began_s = math.inf  # when the layers were chosen; from then on the learning rate falls
        self.since = 0
        self.next_look = 0.0

    # The whole

    def run(self, resume: bool) -> Distilled:
        self.watch(self.progress)
        self._load()
        self.since = self.clock.now()
        interrupted = False
        try:
            self._begin(resume)
            while self.spent < self.progress.total_s:
                if self._wants_text():
                    self._write()
                else:
                    self._train_step()
                    if self.spent >= self.next_look:
                        self._look()
            self._look()
        except KeyboardInterrupt:
            if self.progress.best is None:
                raise  # there is nothing to keep yet
            interrupted = True
        finally:
            self.target.close()
        self._save_state()
        return Distilled(self.out, self.student.start, self.progress, interrupted, self._write_card())

    @property
    def spent(self) -> float:
        now = self.clock.now()
        self.progress.spent_s += (now - self.since) / 1e9
        self.since = now
        return self.progress.spent_s

    # Beginning

    def _load(self) -> None:
        torch.manual_seed(self.settings.seed)
        dtype = compute_dtype(self.device)
        hf_model = load_transformers(self.info, "cpu", dtype)
        self.choices = starts(self.settings.layers, self.info.config.num_hidden_layers)
        wanted = sorted({at for choice in self.choices for at in choice})
        self.source = Layers(hf_model, wanted, self.device, getattr(torch, dtype))
        self.target = PackedModel.from_transformers(
            hf_model,
            name=self.info.name,
            device=self.device,
            dtype=dtype,
            vocab_size=self.info.vocab_size,
            clock=self.clock,
        )
        self.target.reserve(self.rows, self.settings.tokens)
        self.file: np.ndarray | None = None
        if self.settings.data is not None:
            self.file = read_file(self.settings.data, self.info.codec, self.settings.tokens)
        self.writer = self._writer(self.rows)

    def _writer(self, rows: int) -> Writer:
        return Writer(self.target, self.info.codec, self.info.eos_ids, rows, self.settings.tokens)

    def _begin(self, resume: bool) -> None:
        saved = self.work / distill_card.STATE
        state = torch.load(saved, weights_only=True) if resume and saved.is_file() else None
        if state is not None:
            self.written_s, self.began_s = state["written_s"], state["began_s"]
            self.progress.spent_s = state["spent_s"]
            for name in ("seen_tokens", "steps"):
                setattr(self.progress, name, state[name])
        self.held_out = self._held_out()
        if not len(self.texts):
            self._write()
        self._kept()
        if state is None:
            self.student, self.optimizer = self._choose_start()
            self.began_s = self.spent
            self._look()
            return
        self.student = self.source.student(state["start"])
        self.student.load(state["weights"])
        self.optimizer = self._optimizer(self.student)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress.before = distill_card.quality(state["before"])
        self.progress.best = distill_card.quality(state["best"])

    def _held_out(self) -> HeldOut:
        """Sampled questions, answers as greedy decoding writes them; or the end of the file."""
        self._say("writing held-out text" if self.file is None else "reading held-out text")
        if self.file is not None:
            count = max(1, min(64, len(self.file) // 20))
            ids, self.file = self.file[-count:], self.file[:-count]
            states = self.target.states(ids).bfloat16().cpu()
            counts = np.ones_like(ids, dtype=bool)
        else:
            saved = self.work / "held-out.npz"
            if saved.is_file():
                found = np.load(saved)
                ids, answers = found["ids"], found["answers"]
                states = self.target.states(ids).bfloat16().cpu()
            else:
                writer = self._writer(min(self.rows, 32 if self.device.startswith("cpu") else 64))
                written = writer.write(self.settings.seed * 1_000_003 + 999_983, 1.0, greedy_answers=True)
                ids, answers, states = written.ids, written.answers, written.states
                np.savez(saved, ids=ids, answers=answers)
            counts = np.zeros_like(answers)
            counts[:, :-1] = answers[:, 1:]  # the choice that a position makes is the token after it
            if not counts.any():
                counts[:] = True
        return HeldOut(ids, states, counts, self.source)

    def _choose_start(self) -> tuple[Student, torch.optim.Optimizer]:
        """Trains each choice of layers for a moment on the same texts, and goes on with the best."""
        best: tuple[float, Student, torch.optim.Optimizer] | None = None
        counted = (0, 0)
        for choice in self.choices:
            self._say(f"trying layers {', '.join(map(str, choice))}")
            student = self.source.student(choice)
            if self.progress.before is None:
                self.progress.before = self.held_out.judge(student, self.kept)
            self.student, self.optimizer = student, self._optimizer(student)
            self.progress.steps = self.progress.seen_tokens = 0
            self.chance = np.random.default_rng([self.settings.seed, 1])
            until = self.spent + min(60.0, TRIAL * self.progress.total_s)
            while self.progress.steps < 2 or (len(self.choices) > 1 and self.spent < until):
                self._train_step()
            loss = self.held_out.judge(student, self.kept).loss
            if best is None or loss < best[0]:
                best = (loss, student, self.optimizer)
                counted = (self.progress.steps, self.progress.seen_tokens)
        assert best is not None
        self.progress.steps, self.progress.seen_tokens = counted
        return best[1], best[2]

    def _optimizer(self, student: Student) -> torch.optim.Optimizer:
        return torch.optim.AdamW(student.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    # Writing and training

    def _wants_text(self) -> bool:
        """Half of the time goes into text, except at the end, or until the file is used up."""
        left = 1 - self.spent / self.progress.total_s
        if self.file is not None:
            return len(self.texts) < len(self.file) and self.written_s < self.spent / 2
        return left > ONLY_TRAINING and self.written_s < self.spent / 2

    def _write(self) -> None:
        self._say("writing text" if self.file is None else "reading text")
        began = self.clock.now()
        if self.file is not None:
            ids = self.file[len(self.texts) : len(self.texts) + self.rows]
            self.texts.add(ids, self.target.states(ids))
        else:
            number = self.texts.files
            seed = self.settings.seed * 1_000_003 + number
            written = self.writer.write(seed, TEMPERATURES[number % len(TEMPERATURES)])
            self.texts.add(written.ids, written.states)
        self._kept()
        self.written_s += (self.clock.now() - began) / 1e9

    def _kept(self) -> None:
        """The tokens that may be drafted, by their frequency in the text so far, then as the tokenizer ranks them."""
        self.progress.text_tokens = self.texts.tokens
        rest = head_vocab.by_tokenizer(self.info.codec)
        self.ranked = list(dict.fromkeys([*self.info.eos_ids, *self.texts.frequent(), *rest]))
        self.ranked = self.ranked[: self.settings.head_vocab]
        self.kept = torch.tensor(sorted(self.ranked), device=self.device)
        self.head = self.source.head[self.kept]

    def _train_step(self) -> None:
        self._say("training")
        picked = self.chance.choice(len(self.texts), min(self.batch, len(self.texts)), replace=False).tolist()
        ids, teacher = self.texts.batch(picked, self.device)
        progress, rate = self.progress, self.learning_rate
        share = 0.0
        if progress.spent_s > self.began_s:
            share = min(1.0, (progress.spent_s - self.began_s) / max(1.0, progress.total_s - self.began_s))
        rate *= LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (progress.steps + 1) / WARM_UP_STEPS)
        states = self.student.states(ids)
        loss, gradient = head_loss(states.detach(), teacher.flatten(0, 1), self.head)
        self.optimizer.zero_grad()
        states.backward(gradient)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        progress.loss, progress.steps, progress.seen_tokens = (
            loss,
            progress.steps + 1,
            progress.seen_tokens + ids.numel(),
        )

    def _look(self) -> None:
        """At held-out text; keeps the draft if it is the best so far."""
        self._say("looking at held-out text")
        self.next_look = self.spent + self.progress.total_s / LOOKS
        found = self.progress.latest = self.held_out.judge(self.student, self.kept)
        if self.progress.best is None or found.agreement > self.progress.best.agreement:
            distill_card.write_draft(self.out, self.student, self.ranked, self.settings.store)
            self.progress.best = found  # only now is there a draft to speak of, should Ctrl-C come
            self._write_card()
        self._save_state()
        self._say("training")

    def _say(self, doing: str) -> None:
        self.progress.doing = doing
        self.watch(self.progress)

    # Keeping

    def _save_state(self) -> None:
        progress, part = self.progress, self.work / (distill_card.STATE + ".part")
        state = {
            "spent_s": self.spent,
            "written_s": self.written_s,
            "began_s": self.began_s,
            "seen_tokens": progress.seen_tokens,
            "steps": progress.steps,
            "start": list(self.student.start),
            "weights": self.student.weights(),
            "optimizer": self.optimizer.state_dict(),
            "before": progress.before and asdict(progress.before),
            "best": progress.best and asdict(progress.best),
        }
        torch.save(state, part)
        part.replace(self.work / distill_card.STATE)

    def _write_card(self) -> dict[str, Any]:
        return distill_card.write_card(
            self.out, self.info, self.student, self.settings, self.progress, self.device, self.source.embedding
        )
