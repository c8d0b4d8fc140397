"""What drafts are worth on a target: speed-up per task, cost, agreement, exactness; every arm on the same prompts.

    python benchmarks/drafts.py --target smollm2-135m --dtype float32 --draft DIR --tasks bundled=16,spec-bench=8 --json

Arms, interleaved prompt by prompt and taking turns at going first: plain decoding; `speculative` with self:int4 at
draft lengths 2, 3, 4 and 6, also with pruned heads, with self:int8 and with a self:int4 that reads everything itself at
length 4, and with every draft given; `lookup`; and self:int4 and every draft given with `lookup`'s n-grams below it, in
`cascade`. For an ordinary draft model (a pair) also its int4 form, and that with pruned heads. A task may have a path:
`spec-bench=8@question.jsonl`.
Two passes, greedy and sampled at temperature 1, whose outputs are compared with plain decoding token by token. The
greedy pass gives the speeds. Cost and agreement are remembered for `specbench list drafts`. Ctrl-C ends with the
prompts that all arms have done; with `--out` every sample is also written to FILE.samples.jsonl at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbench.cli.errors import INTERRUPTED
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
LOOKUP = "lookup"
LENGTHS = (2, 3, 4, 6)
NEEDED_TOKENS = 4096


@dataclass
class Drafter:
    """A draft as it is loaded, once, for all arms that use it."""

    name: str
    info: ModelInfo
    quant: str | None
    model: CachedModel | None = None


@dataclass(frozen=True)
class Item:
    task: str
    ids: tuple[int, ...]
    key: int
    limit: int
    number: int


def drafters(
    target: ModelInfo, given: list[str], heads: list[DraftOptions], offset: int | None, int8: bool
) -> list[Drafter]:
    """Self-drafts, then the given ones, of an ordinary model also its int4 form; both also with pruned heads."""
    wanted: list[tuple[str, str | None, DraftOptions]] = [
        ("self:int4", None, DraftOptions()),
        *(("self:int4", None, head) for head in heads),
        ("self:int4", None, DraftOptions(follow=False)),
    ]
    if int8:
        wanted.append(("self:int8", None, DraftOptions()))
    if offset is not None:
        wanted.append(("self:int4", None, DraftOptions(group_offset=offset)))
    for draft in given:
        wanted.append((draft, None, DraftOptions()))
        if parse(draft).kind not in ("distilled", "self"):
            wanted += [(draft, "int4", options) for options in (DraftOptions(), *heads)]
    found: dict[str, Drafter] = {}
    for draft, quant, options in wanted:
        info = describe_draft(parse(draft), target, options=options, quant=quant, progress=say)
        name = info.name if quant is None or "[" in info.name else f"{info.name} [{quant}]"
        if options.head_vocab_file:
            name += f" of {options.head_vocab_file.stem}"
        if name in found:
            raise SystemExit(f"{name} twice: a draft or a size of its head is given twice")
        found[name] = Drafter(name, info, info.spec.quant or quant)
    return list(found.values())


def head(text: str) -> DraftOptions:
    size, _, file = text.partition("@")
    if size == "0":
        raise SystemExit(f"--head-vocab {text}: 0 prunes nothing")
    options = {"head-vocab": size} | ({"head-vocab-file": file} if file else {})
    return build(DraftOptions, options, f"--head-vocab {text}")


def prompts(target: ModelInfo, tasks: str, max_new_tokens: int | None) -> Iterator[Item]:
    """First turns of `name=limit[@path]`, with commas."""
    count = 0
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
                limit_of_it = min(max_new_tokens or prompt.max_new_tokens, room)
                yield Item(name, tuple(rendered.ids), number + 1, limit_of_it, count)
                count += 1


def names_of_arms(one: Drafter, lengths: tuple[int, ...]) -> dict[str, int | None]:
    """Those of a draft, with its length in `speculative`; None for the cascade."""
    if one.name == "self:int8" or not one.info.options.follow:
        lengths = (4,)
    made: dict[str, int | None] = {f"{one.name} k={length}": length for length in lengths}
    if one.quant == one.info.spec.quant and one.info.options == DraftOptions() and one.name != "self:int8":
        made[f"cascade of {one.name}"] = None
    return made


def arms(target: CachedModel, found: list[Drafter], lengths: tuple[int, ...]) -> dict[str, Strategy]:
    made: dict[str, Strategy] = {PLAIN: Autoregressive({"target": target}, PlainOptions())}
    for one in found:
        assert one.model is not None
        models = {"target": target, "draft": one.model}
        for name, length in names_of_arms(one, lengths).items():
            made[name] = Speculative(models, DraftLength(length)) if length else Cascade(models, CascadeOptions())
    made[LOOKUP] = Lookup({"target": target}, LookupOptions())
    return made


def wanted_arms(found: list[Drafter], lengths: tuple[int, ...], words: str) -> set[str]:
    """Those with one of the words in their name; all where there are none."""
    names = {name for one in found for name in names_of_arms(one, lengths)} | {LOOKUP}
    given = [word.strip() for word in words.split(",") if word.strip()]
    for word in given:
        if not any(word in name for name in names):
            raise SystemExit(f'--arms "{word}": in no arm\'s name; they are: {", ".join(sorted(names))}')
    return {name for name in names if not given or any(word in name for word in given)} | {PLAIN}


def play(
    made: dict[str, Strategy], items: list[Item], sampling: Sampling, eos: frozenset[int], samples: Path | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """One row per arm and prompt: decode time per token after the first, tokens, drafted, accepted, ids; all arms of a
    prompt or none. And whether Ctrl-C ended it."""
    rows: list[dict[str, Any]] = []
    names, clock = list(made), Clock()
    try:
        for turn, item in enumerate(items):
            say(f"prompt {turn + 1} of {len(items)}, {item.task}")
            first, of_prompt = turn % len(names), []
            for name in names[first:] + names[:first]:
                request = Request(item.key, item.ids, item.limit)
                (row,) = measure(made[name], [request], sampling, Ending(eos), clock, Drain())
                if row.error:
                    raise SystemExit(f"{name}, {item.task}: {row.error}")
                assert row.e2e_ns is not None
                assert row.ttft_ns is not None
                steps = row.steps[1:]
                of_prompt.append({
                    "arm": name, "task": item.task, "prompt": item.number, "ids": row.token_ids,
                    "decode_ns": row.e2e_ns - row.ttft_ns, "steps": len(steps),
                    "drafted": sum(step[2] for step in steps), "accepted": sum(step[3] for step in steps),
                })  # fmt: skip
                if samples:
                    with samples.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(of_prompt[-1] | {"temperature": sampling.temperature}) + "\n")
            rows += of_prompt
    except KeyboardInterrupt:
        return rows, True
    return rows, False


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
    parser.add_argument("--head-vocab", default="auto", help="sizes of pruned heads: auto, N, N@FILE of ids")
    parser.add_argument("--arms", default="", help="only arms with one of these words in their name; comma-separated")
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
    found = drafters(info, args.draft, list(map(head, args.head_vocab.split(","))), args.offset, args.int8)
    size = min(
        [info.vocab_size, *(check_pair(info, one.info, min(NEEDED_TOKENS, one.info.context_length)) for one in found)]
    )
    items = list(prompts(info, args.tasks, args.max_new_tokens))
    lengths = tuple(int(length) for length in args.lengths.split(","))
    wanted = wanted_arms(found, lengths, args.arms)
    found = [one for one in found if wanted & set(names_of_arms(one, lengths))]
    say(f"loading {info.name}")
    target = load(info, dtype=args.dtype, vocab_size=size)
    for one in found:
        say(f"loading {one.name}")
        one.model = load(one.info, dtype=args.dtype, vocab_size=size, quant=one.quant)
        connect({"target": info, "draft": one.info}, {"target": target, "draft": one.model})
    made = {name: arm for name, arm in arms(target, found, lengths).items() if name in wanted}
    questions = known.questions(info)
    say("cost curves for the cascade")
    for strategy in made.values():
        strategy.prepare(1, max(len(item.ids) + item.limit for item in items))
        strategy.practise(questions)

    eos = frozenset(info.eos_ids)
    samples = None
    if args.out:
        samples = args.out.with_name(args.out.name.removesuffix(".json") + ".samples.jsonl")
        samples.write_text("", encoding="utf-8")
    warm = [Item("warm-up", tuple(info.codec.encode(warmup.text(64, info.codec))), 0, 16, 0)]
    _, stopped = play(made, warm, Sampling(), frozenset())
    greedy: list[dict[str, Any]] = []
    sampled: list[dict[str, Any]] = []
    if not stopped:
        greedy, stopped = play(made, items, Sampling(), eos, samples)
    if not greedy:
        raise SystemExit(INTERRUPTED)
    few = [
        item
        for at, item in enumerate(items)
        if at * args.sampled // len(items) != (at - 1) * args.sampled // len(items)
    ]
    if args.sampled and not stopped:
        sampled, stopped = play(made, few, Sampling(temperature=1.0), eos, samples)

    result = {
        "benchmark": "drafts", "target": info.name, "dtype": args.dtype, "threads": placement.threads,
        "cpu": environment()["cpu"], "tasks": args.tasks, "prompts": len({row["prompt"] for row in greedy}),
        "stopped": stopped, "max_new_tokens": args.max_new_tokens, "greedy": table(greedy, list(made)),
        "sampled": [{key: row[key] for key in ("arm", "identical", "prompts", "acceptance_rate")}
                    for row in table(sampled, list(made))] if sampled else None,
    }  # fmt: skip
    keep(result, args.out)
    if not stopped:
        try:
            costs_and_agreement(info, target, found, greedy, items, result)
        except KeyboardInterrupt:
            result["stopped"] = stopped = True
        keep(result, args.out)
    if args.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        show(result)
    if stopped:
        raise SystemExit(INTERRUPTED)


def costs_and_agreement(
    info: ModelInfo,
    target: CachedModel,
    found: list[Drafter],
    greedy: list[dict[str, Any]],
    items: list[Item],
    result: dict[str, Any],
) -> None:
    """Goes into the result, and what holds for every run of these models into what `list drafts` shows."""
    say("cost curves and agreement")
    curve = measure_cost(target)
    result |= {"target_cost_ratio": {str(n): curve.ratio(n) for n in curve.new_tokens}, "target_ms": curve.ms(1)}
    result["drafts"] = {}
    for one in found:
        assert one.model is not None
        measured = {
            "cost_ratio": measure_cost(one.model, (1, 2)).ms(1) / curve.ms(1),
            "agreement": agreement(target, one.model, greedy, items),
        }
        result["drafts"][one.name] = {
            "dtype": one.model.dtype,
            **measured,
            "weight_bytes": one.model.weight_bytes,
            "head_vocab": None if one.info.head_ids is None else len(one.info.head_ids),
        }
        place = known.hardware(result["threads"])
        known.remember(info, one.info, result["dtype"], place, quant=one.quant or "", **measured)


def keep(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    place = f"{result['threads']} thread(s), {result['cpu']}"
    print(f"{result['target']}, {result['dtype']}, {result['prompts']} prompts ({result['tasks']}), {place}")
    for name, facts in result.get("drafts", {}).items():
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
