"""What drafts are worth on a target: speed-up per task, cost, agreement, exactness; every arm on the same prompts.

    python benchmarks/drafts.py --target smollm2-135m --dtype float32 --draft DIR --tasks bundled=16,spec-bench=8 --json

Arms, interleaved prompt by prompt and taking turns at going first: plain decoding; `speculative` with self:int4 at
draft lengths 2, 3, 4 and 6, with self:int8 and with a self:int4 that reads everything itself at length 4, and with
every draft given; `lookup`; and self:int4 and every draft given with `lookup`'s n-grams below it, in `cascade`. For an
ordinary draft model (a pair) also its int4 form, and that with a pruned head. A task may have a path:
`spec-bench=8@question.jsonl`.
Two passes, greedy and sampled at temperature 1, whose outputs are compared with plain decoding token by token. The
greedy pass gives the speeds. Cost and agreement are remembered for `specbench list drafts`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbench.hardware import devices
from specbench.hardware.clock import Clock, Drain
from specbench.hardware.environment import environment
from specbench.models.base import CachedModel
from specbench.models.cost_curve import measure_cost
from specbench.models.draft_options import DraftOptions
from specbench.models.drafts import describe_draft
from specbench.models.info import ModelInfo, describe
from specbench.models.load import check_pair, connect, load
from specbench.models.specs import parse
from specbench.options import build
from specbench.results import drafts as known
from specbench.results.measure import Ending, measure
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.base import Request, Strategy
from specbench.strategies.cascade import Cascade
from specbench.strategies.cascade import Options as CascadeOptions
from specbench.strategies.lookup import Lookup
from specbench.strategies.lookup import Options as LookupOptions
from specbench.strategies.sampling import Sampling
from specbench.strategies.speculative import Options as DraftLength
from specbench.strategies.speculative import Speculative
from specbench.tasks import registry, warmup

PLAIN = "autoregressive"
LENGTHS = (2, 3, 4, 6)
NEEDED_TOKENS = 4096


@dataclass
class Drafter:
    """A draft as it is loaded, once, for all arms that use it."""

    name: str
    info: ModelInfo
    quant: str | None
    model: CachedModel | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    task: str
    ids: tuple[int, ...]
    key: int
    limit: int


def drafters(target: ModelInfo, given: list[str], head: int, offset: int | None, int8: bool) -> list[Drafter]:
    """Self-drafts, then the given ones; of an ordinary model its int4 form, and that with a pruned head."""
    wanted: list[tuple[str, str | None, DraftOptions]] = [
        ("self:int4", None, DraftOptions()),
        ("self:int4", None, DraftOptions(follow=False)),
    ]
    if int8:
        wanted.append(("self:int8", None, DraftOptions()))
    if offset is not None:
        wanted.append(("self:int4", None, DraftOptions(group_offset=offset)))
    for draft in given:
        wanted.append((draft, None, DraftOptions()))
        if parse(draft).kind not in ("distilled", "self"):
            wanted += [(draft, "int4", DraftOptions()), (draft, "int4", DraftOptions(head_vocab=head))]
    found = []
    for draft, quant, options in wanted:
        info = describe_draft(parse(draft), target, options=options, quant=quant, progress=say)
        name = info.name if quant is None or "[" in info.name else f"{info.name} [{quant}]"
        found.append(Drafter(name, info, info.spec.quant or quant))
    return found


def prompts(target: ModelInfo, tasks: str, max_new_tokens: int | None) -> Iterator[Item]:
    """First turns of `name=limit[@path]`, with commas."""
    for part in tasks.split(","):
        text, _, path = part.partition("@")
        name, _, limit = text.partition("=")
        cls, subtask = registry.parse(name)
        task = cls(build(cls.Options, {"path": path} if path else {}, f'task "{name}"'), subtask)
        task.check()
        for number, prompt in enumerate(task.prompts(target.codec, int(limit) if limit else None)):
            rendered = target.codec.render([{"role": "user", "content": prompt.turns[0]}], raw=prompt.raw)
            room = target.context_length - len(rendered.ids)
            if room > 1:
                yield Item(name, tuple(rendered.ids), number + 1, min(max_new_tokens or prompt.max_new_tokens, room))


def arms(target: CachedModel, found: list[Drafter], lengths: tuple[int, ...]) -> dict[str, Strategy]:
    made: dict[str, Strategy] = {PLAIN: Autoregressive({"target": target}, PlainOptions())}
    for one in found:
        assert one.model is not None
        for length in (4,) if one.name == "self:int8" or not one.info.options.follow else lengths:
            made[f"{one.name} k={length}"] = Speculative({"target": target, "draft": one.model}, DraftLength(length))
        if one.quant == one.info.spec.quant and one.info.options == DraftOptions() and one.name != "self:int8":
            made[f"cascade of {one.name}"] = Cascade({"target": target, "draft": one.model}, CascadeOptions())
    made["lookup"] = Lookup({"target": target}, LookupOptions())
    return made


def play(made: dict[str, Strategy], items: list[Item], sampling: Sampling, eos: frozenset[int]) -> list[dict[str, Any]]:
    """One row per arm and prompt: decode time per token after the first, tokens, drafted, accepted, ids."""
    rows, names, clock = [], list(made), Clock()
    for number, item in enumerate(items):
        say(f"prompt {number + 1} of {len(items)}, {item.task}")
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            request = Request(item.key, item.ids, item.limit)
            (row,) = measure(made[name], [request], sampling, Ending(eos), clock, Drain())
            if row.error:
                raise SystemExit(f"{name}, {item.task}: {row.error}")
            assert row.e2e_ns is not None
            assert row.ttft_ns is not None
            steps = row.steps[1:]
            rows.append({
                "arm": name, "task": item.task, "prompt": number, "ids": row.token_ids,
                "decode_ns": row.e2e_ns - row.ttft_ns, "steps": len(steps),
                "drafted": sum(step[2] for step in steps), "accepted": sum(step[3] for step in steps),
            })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Speed-up per task: the ratio of decode times per token, summed over its prompts; and the mean of the tasks."""
    found = []
    by = {(row["arm"], row["prompt"]): row for row in rows}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for name in names:
        ours = [row for row in rows if row["arm"] == name]
        speed = {}
        for task in tasks:
            pairs = [(by[PLAIN, row["prompt"]], row) for row in ours if row["task"] == task]
            plain_ns = sum(a["decode_ns"] / max(1, len(a["ids"]) - 1) for a, _ in pairs)
            own_ns = sum(b["decode_ns"] / max(1, len(b["ids"]) - 1) for _, b in pairs)
            speed[task] = plain_ns / own_ns
        drafted, steps = sum(row["drafted"] for row in ours), sum(row["steps"] for row in ours)
        tokens = sum(max(0, len(row["ids"]) - 1) for row in ours)
        found.append({
            "arm": name, "speedup": speed, "speedup_mean_of_tasks": statistics.mean(speed.values()),
            "tokens_per_step": tokens / max(1, steps),
            "acceptance_rate": sum(row["accepted"] for row in ours) / drafted if drafted else None,
            "identical": sum(row["ids"] == by[PLAIN, row["prompt"]]["ids"] for row in ours), "prompts": len(ours),
        })  # fmt: skip
    return found


def agreement(target: CachedModel, draft: CachedModel, rows: list[dict[str, Any]], items: list[Item]) -> float:
    """Share of positions of plain decoding's greedy output where the draft's likeliest token is the same; for a draft
    that follows its target, behind what that has read."""
    agreeing = total = 0
    for row in (row for row in rows if row["arm"] == PLAIN):
        ids = np.array([*items[row["prompt"]].ids, *row["ids"]], dtype=np.int64)
        draft.reset()
        if draft.original is not None:
            target.reset()
            target.advance([ids[:-1]])
            best = []
            for end in range(len(ids) - len(row["ids"]), len(ids)):
                draft.follow(0, ids[:end])
                best += draft.advance([ids[:end]]).argmax(-1).tolist()
        else:
            best = draft.advance([ids[:-1]], last=len(row["ids"])).argmax(-1).tolist()
        agreeing += sum(a == b for a, b in zip(best, row["ids"], strict=True))
        total += len(row["ids"])
    return agreeing / max(1, total)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", action="append", default=[], help="may be repeated")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", default="bundled=16", help="name=limit[@path], with commas")
    parser.add_argument("--max-new-tokens", type=int, default=None)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="draft lengths")
    parser.add_argument("--head-vocab", type=int, default=16384, help="of a pair's draft")
    parser.add_argument("--offset", type=int, default=None, help="self:int4 once more with blocks that begin there")
    parser.add_argument("--no-int8", dest="int8", action="store_false", help="leave self:int8 out, which is slow")
    parser.add_argument("--sampled", type=int, default=4, help="prompts of the sampled pass; 0 for none")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON document there as well")
    args = parser.parse_args()
    placement = devices.parse_placement("target=cpu", args.threads)
    devices.apply(placement)

    info = describe(parse(args.target), "target", progress=say)
    found = drafters(info, args.draft, args.head_vocab, args.offset, args.int8)
    size = min(
        [info.vocab_size, *(check_pair(info, one.info, min(NEEDED_TOKENS, one.info.context_length)) for one in found)]
    )
    items = list(prompts(info, args.tasks, args.max_new_tokens))
    say(f"loading {info.name}")
    target = load(info, dtype=args.dtype, vocab_size=size)
    for one in found:
        say(f"loading {one.name}")
        one.model = load(one.info, dtype=args.dtype, vocab_size=size, quant=one.quant)
        connect({"target": info, "draft": one.info}, {"target": target, "draft": one.model})
    made = arms(target, found, tuple(int(length) for length in args.lengths.split(",")))
    questions = known.questions(info)
    say("cost curves for the cascade")
    for strategy in made.values():
        strategy.prepare(1, max(len(item.ids) + item.limit for item in items))
        strategy.practise(questions)

    eos = frozenset(info.eos_ids)
    warm = [Item("warm-up", tuple(info.codec.encode(warmup.text(64, info.codec))), 0, 16)]
    play(made, warm, Sampling(), frozenset())
    greedy = play(made, items, Sampling(), eos)
    few = [
        item
        for at, item in enumerate(items)
        if at * args.sampled // len(items) != (at - 1) * args.sampled // len(items)
    ]
    sampled = play(made, few, Sampling(temperature=1.0), eos) if args.sampled else []

    say("cost curves and agreement")
    plain_curve = measure_cost(target)
    for one in found:
        assert one.model is not None
        curve = measure_cost(one.model, (1, 2))
        one.facts = {
            "dtype": one.model.dtype,
            "cost_ratio": curve.ms(1) / plain_curve.ms(1),
            "agreement": agreement(target, one.model, greedy, items),
            "weight_bytes": one.model.weight_bytes,
            "head_vocab": None if one.info.head_ids is None else len(one.info.head_ids),
        }
        place = known.hardware(placement.threads)
        measured = {name: one.facts[name] for name in ("cost_ratio", "agreement")}
        known.remember(info, one.info, args.dtype, place, quant=one.quant or "", **measured)
    result = {
        "benchmark": "drafts", "target": info.name, "dtype": args.dtype, "threads": placement.threads,
        "cpu": environment()["cpu"], "tasks": args.tasks, "prompts": len(items), "max_new_tokens": args.max_new_tokens,
        "target_cost_ratio": {str(n): plain_curve.ratio(n) for n in plain_curve.new_tokens},
        "target_ms": plain_curve.ms(1), "drafts": {one.name: one.facts for one in found},
        "greedy": table(greedy, list(made)),
        "sampled": [{key: row[key] for key in ("arm", "identical", "prompts", "acceptance_rate")}
                    for row in table(sampled, list(made))] if sampled else None,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result, indent=1, allow_nan=False))
        return
    place = f"{placement.threads} thread(s), {result['cpu']}"
    print(f"{info.name}, {args.dtype}, {len(items)} prompts ({args.tasks}), {place}")
    for name, facts in result["drafts"].items():
        print(
            f"  {name:44} {facts['dtype']:9} cost ratio {facts['cost_ratio']:.3f}  agreement {facts['agreement']:.3f}"
        )
    for row in result["greedy"]:
        tasks = "  ".join(f"{task} {value:.2f}x" for task, value in row["speedup"].items())
        same = f"{row['identical']}/{row['prompts']} identical"
        speed = f"{row['speedup_mean_of_tasks']:.2f}x  {row['tokens_per_step']:.2f} tokens/step"
        print(f"  {row['arm']:44} {speed}  {same}  {tasks}")
    for row in result["sampled"] or []:
        print(f"  sampled: {row['arm']:35} {row['identical']}/{row['prompts']} identical")


if __name__ == "__main__":
    main()
