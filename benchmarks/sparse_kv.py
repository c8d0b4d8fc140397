"""What a sparse KV cache brings at long contexts, over batched plain decoding on the same runtime; and its cost model.

    python benchmarks/sparse_kv.py --target MODEL [--draft MODEL] [--dtype bfloat16] [--threads 2]
        [--contexts 2048,4096] [--batches 1,4] [--task python-docs:summary] [--max-new-tokens 128] [--ignore-eos]
        [--cells 4096x1,8000x8] [--budgets 128,256,512,1024] [--selections snapkv,stream] [--gammas 3,5] [--refresh 128]
        [--ngram] [--arms WORD,...] [--json] [--out FILE]

A cell is a context and a batch: those of `--cells`, or every context with every batch. With `--out` each is added to
the file as soon as it is measured, and cells that the file has already are left as they are, so that a grid can be
measured bit by bit; everything else about the runs has to be the same. Flags in the file are held against those given,
and its number type, threads and CPU against ours where a cell is to be measured; arms and task options are not checked.

In each cell: plain decoding, lookup, with `--draft` speculative; `sparse-kv` for every selection, budget and gamma,
with `--refresh` also with positions chosen anew, with `--ngram` also over n-grams, and on its automatic schedule; with
`--draft` all of these once more where that model drafts over a small cache (of a self-draft: rounded weights over a
part of the target's); and on the automatic schedule with an n-gram level below the target. Arms take turns at going
first; the target reads the prompts once for all of them, but for the last tokens, and only decoding is compared: from
the moment when all rows have their first token to the last token of the last row. The draft's reading and choosing is
in it.

Each row of a batch is another prompt. Beside every speed-up stand the acceptance, the share of distinct tokens (a text
that goes round in circles flatters every draft), the step time that the cost model gives for what was drafted, over
the measured one, and what plain decoding reads of keys and values per second: a slow baseline flatters most of all.
Exit code 1 where a token differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from interleaved import Arm, Note, keeping, load_models, parser_of, prepared_tasks, to_sample

from specbench.errors import UsageError
from specbench.hardware import devices
from specbench.hardware.clock import Clock, Drain
from specbench.hardware.environment import environment, peak_memory_bytes
from specbench.models.base import CachedModel
from specbench.models.sparse_cost import SparseCosts, measure_sparse_costs
from specbench.options import build
from specbench.results.measure import Ending, Outcome, measure
from specbench.results.prepare import Prepared, Turn
from specbench.results.records import BASELINE, line_of, write_atomically
from specbench.results.rounds import mean, terms
from specbench.strategies import registry
from specbench.strategies.base import Request
from specbench.strategies.sparse_kv import SparseKv

READ_BY_ARMS = 64  # last tokens of a prompt that every arm reads itself, so that their queries are there to choose by
CLOSE = 0.1  # how far a predicted step may be from the measured one


@dataclass
class Cell:
    """One context and batch: `seen` are each arm's outcomes, call by call."""

    context: int
    batch: int
    prepared: Prepared
    arms: list[Arm]
    costs: SparseCosts
    seen: dict[str, list[list[Outcome]]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, draft_required=False)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--task", default="python-docs:summary", help="a long-context task with a prompt-tokens option")
    parser.add_argument("--contexts", default="2048", help="tokens of the prompts")
    parser.add_argument("--batches", default="1,4", help="rows")
    parser.add_argument("--cells", type=cells_of, default=None, help="CONTEXTxROWS, instead of contexts and batches")
    parser.add_argument("--groups", type=int, default=1, help="calls per cell, each with prompts of its own")
    parser.add_argument("--budgets", default="128,256,512,1024")
    parser.add_argument("--selections", default="snapkv,stream")
    parser.add_argument("--gammas", default="3,5")
    parser.add_argument("--refresh", type=int, default=0, help="also with positions chosen anew after so many tokens")
    parser.add_argument("--ngram", action="store_true", help="also with an n-gram level under each sparse draft")
    parser.add_argument("--arms", default="", help="only arms whose name has one of these words, and the baseline")
    parser.add_argument("--ignore-eos", action="store_true", help="rows run to the limit, beyond what is said")
    args = parser.parse_args(argv)
    args.cells = args.cells or [(context, rows) for context in numbers(args.contexts) for rows in numbers(args.batches)]
    return args


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def cells_of(text: str) -> list[tuple[int, int]]:
    """From `4096x1,8000x8`."""
    found = [tuple(map(int, cell.split("x"))) for cell in text.split(",")]
    if any(len(cell) != 2 or min(cell) < 1 for cell in found):
        raise ValueError(text)
    return [(context, rows) for context, rows in found]


def make_arms(models: dict[str, CachedModel], args: argparse.Namespace, context: int) -> list[Arm]:
    """Every arm of a cell; budgets that keep more than the context are left out."""

    def arm(name: str, strategy: str, **options: Any) -> Arm:
        kind = registry.get(strategy)
        roles = [role for role in (*kind.roles, *kind.optional_roles) if role in models]
        return Arm(name, kind({role: models[role] for role in roles}, build(kind.Options, options, strategy)))

    def sparse(name: str, **options: Any) -> Arm:
        return arm(name, "sparse-kv", explain=True, **options)

    found, drafting = [arm(BASELINE, BASELINE), arm("lookup", "lookup")], {"sparse-kv": "self"}
    if "draft" in models:
        drafting["sparse-kv draft model"] = "model"
        found += [arm(f"speculative {k}", "speculative", draft_length=k) for k in numbers(args.lengths)]
    budgets = [number for number in numbers(args.budgets) if number < context]
    fixed = itertools.product(drafting.items(), args.selections.split(","), budgets, numbers(args.gammas))
    for (title, draft), selection, budget, gamma in fixed:
        name = f"{title} {selection} {budget} x{gamma}"
        given = {"draft": draft, "selection": selection, "budget": budget, "gamma": gamma}
        found.append(sparse(name, **given))
        if args.refresh:
            found.append(sparse(f"{name} refresh", refresh=args.refresh, **given))
        if args.ngram:
            found.append(sparse(f"{name} ngram", bottom="ngram", **given))
    found += [sparse(f"{title} auto", draft=draft) for title, draft in drafting.items()]
    found.append(sparse("sparse-kv auto ngram", bottom="ngram"))
    words = [word for word in args.arms.split(",") if word]
    return [one for one in found if one.name == BASELINE or not words or any(word in one.name for word in words)]


def share_costs(arms: Sequence[Arm], args: argparse.Namespace, batch: int, tokens: int) -> SparseCosts:
    """Measures forwards once for all sparse arms of a cell, and once more where the draft is another model."""
    sparse = [arm.strategy for arm in arms if isinstance(arm.strategy, SparseKv)]
    known: dict[int, SparseCosts] = {}
    for strategy in sparse:
        model = id(strategy.view.model)
        if model not in known:
            budgets = [budget for budget in numbers(args.budgets) if budget >= strategy.options.least_budget]
            longest = max(one.longest for one in sparse)
            target: Any = strategy.target
            known[model] = measure_sparse_costs(target, strategy.view, batch, tokens, budgets or [1024], longest)
        strategy.use_costs(known[model], batch, tokens)
    return next(iter(known.values()))


@contextlib.contextmanager
def reading_once(model: CachedModel, turns: Sequence[Turn]) -> Iterator[Any]:
    """Has the model read the prompts, and keep them whatever arms forget; yields a function that takes it back there.

    Going back costs a forward of one token per row, one that does not follow there.
    """
    kept = [list(turn.ids[: max(1, len(turn.ids) - READ_BY_ARMS)]) for turn in turns]
    model.reset()
    for row, ids in enumerate(kept):
        model.advance([ids], 1, [row])

    def back() -> None:
        follows = [turn.ids[len(ids)] if len(turn.ids) > len(ids) else 0 for turn, ids in zip(turns, kept, strict=True)]
        model.advance([[*ids, 1 - min(token, 1)] for ids, token in zip(kept, follows, strict=True)])

    with keeping(model):
        yield back


def measure_cell(cell: Cell, args: argparse.Namespace, target: CachedModel) -> None:
    prepared, clock = cell.prepared, Clock()
    sampling = prepared.plan.sampling(prepared.eos)
    ending = Ending(frozenset(() if args.ignore_eos else prepared.eos))
    turns = [turn for turn in prepared.first_turns if turn.error is None]
    if len(turns) < cell.batch:
        raise UsageError(f"{args.task} has {len(turns)} prompts of {cell.context} tokens, fewer than {cell.batch} rows")
    rounds = 0
    for at in range(0, len(turns) - cell.batch + 1, cell.batch):
        group = turns[at : at + cell.batch]
        with reading_once(target, group) as back:
            for repeat in range(-1, args.repeats):  # the first does not count
                first = rounds % len(cell.arms)
                rounds += 1
                for arm in cell.arms[first:] + cell.arms[:first]:
                    back()
                    limit = 8 if repeat < 0 else None
                    requests = [Request(turn.key, turn.ids, limit or turn.max_new_tokens) for turn in group]
                    outcomes = measure(arm.strategy, requests, sampling, ending, clock, Drain())
                    if outcomes[0].error:
                        raise SystemExit(f"{arm.name}, {cell.context} x {cell.batch}: {outcomes[0].error}")
                    if repeat >= 0:
                        cell.seen[arm.name].append(outcomes)
                        keep_samples(args, cell, arm.name, group, repeat, outcomes)
                print(f"{cell.context} x {cell.batch}: round {rounds}", file=sys.stderr, flush=True)


def keep_samples(
    args: argparse.Namespace, cell: Cell, arm: str, turns: Sequence[Turn], repeat: int, outcomes: Sequence[Outcome]
) -> None:
    """Adds a call to the file of samples, so that a cell that is stopped is not lost either."""
    if not args.out:
        return
    with args.out.with_suffix(".samples.jsonl").open("a", encoding="utf-8") as file:
        for turn, outcome in zip(turns, outcomes, strict=True):
            sample = to_sample(arm, f"{args.task}:{cell.context}", turn, repeat, outcome)
            file.write(line_of(dataclasses.replace(sample, batch_rows=cell.batch)))


def decode_ns(outcomes: Sequence[Outcome]) -> int:
    """From the moment when every row has its first token to the last token of all."""
    return max(outcome.e2e_ns or 0 for outcome in outcomes) - max(outcome.ttft_ns or 0 for outcome in outcomes)


def report_arm(name: str, calls: Sequence[Sequence[Outcome]], base: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    rows = [outcome for outcomes in calls for outcome in outcomes]
    plain = [outcome for outcomes in base for outcome in outcomes]
    tokens, took = sum(len(row.token_ids) - 1 for row in rows), sum(map(decode_ns, calls))
    steps = [step for row in rows for step in row.steps[1:]]
    drafted, accepted = sum(step[2] for step in steps), sum(step[3] for step in steps)
    rounds = sum(max(len(row.steps) - 1 for row in outcomes) for outcomes in calls)
    entry: dict[str, Any] = {
        "decode_ns": took,
        "decode_tokens_per_s": tokens / took * 1e9,
        "row_tokens_per_s": tokens / took * 1e9 / len(calls[0]),
        "step_ms": took / rounds / 1e6,
        "tokens_per_step": tokens / len(steps),
        "acceptance_rate": accepted / drafted if drafted else None,
        "exact": sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(rows, plain, strict=True)),
        "outputs": len(rows),
        "speedup": sum(map(decode_ns, base)) / took,
    }
    facts = [dict(outcomes[0].facts) for outcomes in calls]
    if facts and "predicted_verify_ms" in facts[0]:
        entry |= prediction(facts, entry)
        entry["facts"] = facts[-1]
    return entry


def prediction(facts: Sequence[dict[str, Any]], entry: dict[str, Any]) -> dict[str, Any]:
    """The cost model's step beside the measured one. A step is a round of the whole batch, plain ones included."""
    said, measured = terms(facts, "predicted_"), terms(facts)
    predicted, plain = sum(said.values()), mean(facts, "predicted_plain_ms")
    return {
        "predicted_step_ms": predicted,
        "predicted_over_measured": predicted / entry["step_ms"],
        "terms_ms": {**said, "target": plain, "constant": facts[0]["constant_ms"]},
        "measured_terms_ms": {**measured, "other": entry["step_ms"] - sum(measured.values())},
        "omega": entry["tokens_per_step"],
        "predicted_speedup": entry["tokens_per_step"] * plain / predicted,
    }


def read_gb_per_s(costs: SparseCosts, batch: int, row_bytes_per_slot: float) -> float | None:
    """What a plain step reads of keys and values per second, by what it takes longer at a longer context."""
    slots = costs.target.contexts
    if len(slots) < 2:
        return None
    longer_ms = costs.target.ms(1, slots[-1], batch) - costs.target.ms(1, slots[0], batch)
    return (slots[-1] - slots[0]) * row_bytes_per_slot * batch / longer_ms / 1e6 if longer_ms > 0 else None


def report(cell: Cell) -> dict[str, Any]:
    base = cell.seen[BASELINE]
    arms = {arm.name: report_arm(arm.name, cell.seen[arm.name], base) for arm in cell.arms}
    texts = [outcome.token_ids for outcomes in base for outcome in outcomes]
    sparse = next(arm.strategy for arm in cell.arms if isinstance(arm.strategy, SparseKv))
    cache = sparse.target._cache  # type: ignore[attr-defined]
    counts = cell.costs.target.new_tokens
    return {
        "context": cell.context,
        "batch": cell.batch,
        "prompt_tokens": [len(turn.ids) for turn in cell.prepared.first_turns],
        "distinct_token_share": float(np.mean([len(set(ids)) / len(ids) for ids in texts])),
        "output_tokens": [len(ids) for ids in texts],
        "baseline_reads_gb_per_s": read_gb_per_s(cell.costs, cell.batch, cache.row_bytes / cache.slots),
        "target_ratio": {
            count: cell.costs.target.ratio(count, cell.costs.target.contexts[-1], cell.batch) for count in counts
        },
        "cache_bytes_per_row": cache.row_bytes,
        "arms": arms,
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells and sparse arms: exactness, how good the predictions were, and the best speed-up."""
    found = [(cell, name, arm) for cell in cells for name, arm in cell["arms"].items()]
    predicted = [arm for _, _, arm in found if "predicted_over_measured" in arm]
    drafting = [arm for arm in predicted if arm["acceptance_rate"] is not None]
    best = max((arm["speedup"], f"{cell['context']} x {cell['batch']}: {name}") for cell, name, arm in found)
    return {
        "exact": all(arm["exact"] == arm["outputs"] for _, _, arm in found),
        "steps_within_tenth": _share([abs(arm["predicted_over_measured"] - 1) <= CLOSE for arm in predicted]),
        "right_side_of_break_even": _share(
            [(arm["predicted_speedup"] > 1) == (arm["speedup"] > 1) for arm in drafting]
        ),
        "best_speedup": best[0],
        "best": best[1],
    }


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        document = measure_cells(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(document, indent=1, allow_nan=False) if args.json else table(document))
    return 0 if document["summary"]["exact"] else 1


def measure_cells(args: argparse.Namespace) -> dict[str, Any]:
    """The document, with what `--out` has already and the cells that it lacks.

    Raises:
        UsageError: what `--out` has was measured in another way, or a cell cannot be.
    """
    document: dict[str, Any] = {"benchmark": "sparse-kv"}
    if args.out and args.out.exists():
        document = json.loads(args.out.read_text(encoding="utf-8"))
        if document.get("benchmark") != "sparse-kv":
            raise UsageError(f"{args.out} is not a document of this benchmark; name another --out")
        same_way(document, settings(args), args)
    cells = document.get("cells", [])
    strategies = ("sparse-kv", "speculative", "lookup") if args.draft else ("sparse-kv", "lookup")
    models: dict[str, CachedModel] = {}
    option, given = args.task.partition(":")[0] + ".prompt-tokens", list(args.task_option)
    known = {(cell["context"], cell["batch"]) for cell in cells}
    for context, batch in args.cells:
        if (context, batch) in known:
            Note().stage(f"{context} x {batch}: measured before")
            continue
        args.tasks = f"{args.task}={batch * args.groups}"
        args.task_option = [*given, f"{option}={context}"]
        (prepared,) = prepared_tasks(
            args, strategies, threads=args.threads, ignore_eos=args.ignore_eos, batch=batch, runtime="packed"
        )
        asked = settings(args) | where(prepared)
        same_way(document, asked, args)
        if not models:
            devices.apply(prepared.checked.placement)
            models = load_models([prepared], "packed")
        cells.append(whole_cell(args, prepared, models, context, batch))
        document |= {**asked, "cells": cells, "summary": summary(cells)}
        if args.out:
            write_atomically(args.out, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def whole_cell(
    args: argparse.Namespace, prepared: Prepared, models: dict[str, CachedModel], context: int, batch: int
) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    for model in models.values():
        model.reserve(batch, prepared.needed_tokens)
    arms = make_arms(models, args, context)
    Note().stage(f"{context} x {batch}: measuring costs")
    costs = share_costs(arms, args, batch, prepared.needed_tokens)
    for arm in arms:
        if not isinstance(arm.strategy, SparseKv):
            arm.strategy.prepare(batch, prepared.needed_tokens)
    cell = Cell(context, batch, prepared, arms, costs, {arm.name: [] for arm in arms})
    measure_cell(cell, args, models["target"])
    found = report(cell)
    for arm in arms:
        arm.strategy.close()
    machine = {"load_before": load_before, "load_after": os.getloadavg()[0], "peak_memory_bytes": peak_memory_bytes()}
    return found | machine


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all cells of a document have in common by their flags; `where` has the rest of it."""
    names = ("target", "draft", "task", "max_new_tokens", "ignore_eos", "temperature", "seed", "repeats", "groups")
    return {name: getattr(args, name) for name in names}


def where(prepared: Prepared) -> dict[str, Any]:
    threads = prepared.checked.placement.threads
    return {"dtype": prepared.dtype, "threads": threads, "cpu": environment()["cpu"]}


def same_way(document: dict[str, Any], asked: dict[str, Any], args: argparse.Namespace) -> None:
    """Holds settings against those of the cells that a document has.

    Raises:
        UsageError: some differ.
    """
    differing = [name for name, value in asked.items() if document.get("cells") and document.get(name) != value]
    if differing:
        raise UsageError(f"{args.out}: its cells have another {', '.join(differing)}; name another --out")


def table(document: dict[str, Any]) -> str:
    lines = []
    for cell in document["cells"]:
        reads = cell["baseline_reads_gb_per_s"]
        lines.append(
            f"{cell['context']} tokens, {cell['batch']} row(s): {cell['distinct_token_share']:.0%} distinct tokens, "
            f"plain decoding reads {'-' if reads is None else f'{reads:.0f}'} GB/s of keys and values"
        )
        width = max(map(len, cell["arms"]))
        for name, arm in cell["arms"].items():
            rate = arm["acceptance_rate"]
            accepted = "    -" if rate is None else f"{rate:5.2f}"
            line = (
                f"  {name:{width}s} {arm['decode_tokens_per_s']:7.1f} tok/s {arm['speedup']:5.2f}x "
                f"{arm['step_ms']:8.1f} ms/step {arm['tokens_per_step']:5.2f} tokens/step {accepted} accepted"
            )
            if "predicted_over_measured" in arm:
                line += f"  predicted/measured {arm['predicted_over_measured']:.2f}"
            lines.append(f"{line}  {arm['exact']}/{arm['outputs']} exact")
    lines.append(", ".join(f"{name} {value if isinstance(value, bool | str | None) else round(value, 3)}"
                           for name, value in document["summary"].items()))  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
