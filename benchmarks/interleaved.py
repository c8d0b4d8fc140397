"""What benchmarks of several arms share: the same prompts for all, prompt by prompt, taking turns at going first.

A run of `specbench run` has one arm per strategy; a benchmark compares one strategy with many settings or on many
devices, over one set of loaded models. Samples are `results.records.Sample`s, so that all metrics apply; with `--out`
each is also appended to a file beside it as soon as it is there, so that a benchmark that is stopped loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.hardware.clock import Clock, Drain
from specbench.models.base import CachedModel
from specbench.models.load import connect
from specbench.results.listener import Listener
from specbench.results.measure import Ending, Outcome, measure
from specbench.results.plan import Plan, check, parse_option
from specbench.results.prepare import Prepared, Turn, prepare
from specbench.results.records import Sample, line_of
from specbench.results.run import Models
from specbench.strategies.base import Request, Strategy
from specbench.tasks import warmup


@dataclass
class Arm:
    """A row of the table. `cores` is where its target runs; `samples` are by task."""

    name: str
    strategy: Strategy
    cores: tuple[int, ...] = ()
    samples: dict[str, list[Sample]] = field(default_factory=dict)


class Note(Listener):
    """Progress on stderr."""

    def stage(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    note = warn = stage


def parser_of(description: str | None, draft_required: bool = True) -> argparse.ArgumentParser:
    """With the arguments that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=draft_required, help="where it applies several, from large to small: A,B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tasks", default="bundled=16", help="task=prompts, comma-separated")
    parser.add_argument(
        "--task-option", action="append", default=[], help="spec-bench.path=FILE, or the draft: draft.group-offset=16"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--lengths", default="2,3,4,6", help="draft lengths of speculative")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--out", type=Path, help="also write that document there, and every sample to FILE.samples.jsonl"
    )
    return parser


def prepared_tasks(args: argparse.Namespace, strategy: tuple[str, ...], **settings: Any) -> list[Prepared]:
    """One plan per task, since each has its own number of prompts.

    Args:
        strategy: those whose roles are needed.
        settings: further fields of the plan.
    """
    found = []
    for entry in args.tasks.split(","):
        task, _, limit = entry.partition("=")
        options: dict[str, dict[str, str]] = {}
        for name, key, value in map(parse_option, args.task_option):
            if name in (task.partition(":")[0], "draft"):
                options.setdefault(name, {})[key] = value
        plan = Plan(
            strategy=strategy, target=args.target, draft=args.draft, task=(task,), options=options,
            limit=int(limit) if limit else None, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
            seed=args.seed, dtype=args.dtype, trace=0, **settings,
        )  # fmt: skip
        found.append(prepare(check(plan), Note()))
    return found


def load_models(prepared: Sequence[Prepared], runtime: str = "auto") -> dict[str, CachedModel]:
    """The models of some plans over the same ones, by role, on the CPU, with room for one vocabulary."""
    source, first = Models(), prepared[0]
    vocab = min(one.vocab_size for one in prepared)
    models = {
        role: source.load(
            info, device="cpu", dtype=first.dtype, runtime=runtime, vocab_size=vocab, quant=first.quant(role)
        )
        for role, info in first.infos.items()
    }
    connect(first.infos, models)
    return models


def measure_task(
    prepared: Prepared,
    arms: Sequence[Arm],
    args: argparse.Namespace,
    rounds: int,
    drain: Callable[[], None] | None = None,
    before: Callable[[Arm], None] = lambda arm: None,
    reader: CachedModel | None = None,
    between: Callable[[], None] = lambda: None,
) -> int:
    """All arms on every prompt in turn; the order moves on by one each time.

    Args:
        rounds: how many rounds there were before, of earlier tasks; returned with those of this one added.
        drain: waits for devices and workers.
        before: called before each sample, untimed.
        reader: the target of all arms, where only decode times are compared: it reads each prompt once, untimed, and
            keeps it for all arms, each of which computes the last token again. Times to the first token then mean
            nothing; drafts read the prompt themselves, or take it over, inside the clock, as ever.
        between: called after each prompt.
    """
    arms, task = list(arms), prepared.plan.task[0]
    sampling, clock = prepared.plan.sampling(prepared.eos), Clock()
    wait = drain or Drain()
    turns = [turn for turn in prepared.first_turns if turn.error is None]
    text = warmup.text(sorted(len(turn.ids) for turn in turns)[len(turns) // 2], prepared.codec)
    for arm in arms:
        before(arm)
        measure(arm.strategy, [Request(0, prepared.codec.encode(text), 16)], sampling, Ending(), clock, wait)
    for number, turn in enumerate(turns, 1):
        ending = Ending(frozenset(prepared.eos), turn.prompt.stop, prepared.codec.decode)
        with _read(reader, turn):
            for repeat in range(args.repeats):
                first = rounds % len(arms)
                rounds += 1
                for arm in arms[first:] + arms[:first]:
                    before(arm)
                    request = Request(turn.key, turn.ids, turn.max_new_tokens)
                    (outcome,) = measure(arm.strategy, [request], sampling, ending, clock, wait)
                    sample = to_sample(arm.name, task, turn, repeat, outcome)
                    arm.samples.setdefault(task, []).append(sample)
                    if args.out:
                        with args.out.with_suffix(".samples.jsonl").open("a", encoding="utf-8") as file:
                            file.write(line_of(sample))
        print(f"{task}: {number} of {len(turns)} prompts", file=sys.stderr, flush=True)
        between()
    return rounds


@contextlib.contextmanager
def keeping(model: CachedModel) -> Iterator[None]:
    """Has the model keep what it has cached, whatever the arms ask it to forget."""
    model.reset = model.forget = lambda *row: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del model.reset, model.forget  # type: ignore[attr-defined]


@contextlib.contextmanager
def _read(reader: CachedModel | None, turn: Turn) -> Iterator[None]:
    """Has the model read the prompt and keep it."""
    if reader is None:
        yield
        return
    reader.reset()
    reader.advance([turn.ids])
    with keeping(reader):
        yield


def to_sample(arm: str, task: str, turn: Turn, repeat: int, outcome: Outcome) -> Sample:
    """Stops the benchmark where a sample failed: a table with holes compares nothing."""
    if outcome.error:
        raise SystemExit(f"{arm}, {task} {turn.prompt.id}: {outcome.error}")
    return Sample(
        arm=arm, task=task, prompt_id=turn.prompt.id, prompt_hash=turn.hash, category=turn.prompt.category, turn=0,
        repeat=repeat, kind="measure", group=0, batch_rows=1, prompt_tokens=len(turn.ids),
        max_new_tokens=turn.max_new_tokens, token_ids=outcome.token_ids, finish=outcome.finish,
        ttft_ns=outcome.ttft_ns, e2e_ns=outcome.e2e_ns, drain_ns=outcome.drain_ns, steps=outcome.steps,
        levels=outcome.levels or None, facts=outcome.facts or None,
    )  # fmt: skip
