"""What a cascade brings over plain decoding, over `speculative` at its best length, and over `lookup`, task by task.

    python benchmarks/cascade.py --target MODEL --draft MODEL[,MODEL] [--dtype bfloat16] [--threads 2]
        [--tasks humaneval=32,spec-bench:summarization=16,...] [--max-new-tokens 128]
        [--task-option spec-bench.path=FILE] [--lengths 2,3,4,6]
        [--static 2,4,6,8] [--temperature 0] [--json] [--out FILE]

Arms are interleaved prompt by prompt on one set of loaded models and take turns at going first: plain decoding,
`speculative` once per length, `lookup`, `cascade` on its automatic schedule, and `cascade` with fixed lengths for the
sweep that the schedule has to keep up with. The target reads a prompt once for all arms, outside the clock. Speed-ups
are sums of decode times over the same prompts, with bootstrap intervals. Every arm's tokens are compared with plain
decoding's. The ceiling is what the cost model gives for the best fixed lengths with the acceptance that was measured:
where a goal is missed, it says how much there was to be had.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from interleaved import Arm, load_models, measure_task, parser_of, prepared_tasks

from specbench.hardware import devices
from specbench.hardware.cost_model import cascade_tokens_per_s
from specbench.hardware.environment import environment
from specbench.models.cost_curve import CostCurve
from specbench.options import build
from specbench.results import drafts, metrics, statistics
from specbench.results.records import BASELINE, Sample
from specbench.strategies import registry
from specbench.strategies.cascade import cost_curves


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--static", default="2,4,6,8", help="draft lengths of the static cascade; empty for none")
    parser.add_argument("--options", default="", help="options of the automatic cascade: probe=16,tail=false")
    return parser.parse_args(argv)


def make_arms(models: dict[str, Any], args: argparse.Namespace) -> list[Arm]:
    def arm(name: str, strategy: str, **options: Any) -> Arm:
        kind = registry.get(strategy)
        roles = [role for role in (*kind.roles, *kind.optional_roles) if role in models]
        return Arm(name, kind({role: models[role] for role in roles}, build(kind.Options, options, strategy)))

    numbers = lambda text: [int(number) for number in text.split(",") if number]  # noqa: E731
    chosen = dict(pair.split("=") for pair in args.options.split(",") if pair)
    return [
        arm(BASELINE, BASELINE),
        *(arm(f"speculative {k}", "speculative", draft_length=k) for k in numbers(args.lengths)),
        arm("lookup", "lookup"),
        arm("cascade", "cascade", **chosen),
        *(arm(f"cascade static {k}", "cascade", schedule="static", draft_length=k) for k in numbers(args.static)),
    ]


def report_task(task: str, arms: list[Arm], curves: dict[str, CostCurve]) -> dict[str, Any]:
    base = arms[0].samples[task]
    tokens = {(sample.prompt_id, sample.repeat): sample.token_ids for sample in base}
    found: dict[str, Any] = {"prompts": len({sample.prompt_id for sample in base}), "arms": {}}
    for arm in arms:
        ours = arm.samples[task]
        drafting = metrics.drafting(ours)
        entry = {
            "decode_ns": metrics.total_decode_ns(ours),
            "decode_tokens_per_s": metrics.decode_tokens_per_s(ours),
            "tokens_per_step": drafting.tokens_per_step,
            "acceptance_rate": drafting.acceptance_rate,
            "exact": sum(sample.token_ids == tokens[sample.prompt_id, sample.repeat] for sample in ours),
            "outputs": len(ours),
        }
        if arm is not arms[0]:
            speedup = statistics.decode_speedup(statistics.pair(base, ours).pairs, per_token=True)
            if speedup is not None:
                entry |= {"speedup": speedup.value, "low": speedup.low, "high": speedup.high}
        if drafting.levels:
            names = str((ours[0].facts or {}).get("levels", "")).split(",")
            fields = ("drafted", "accepted", "forwards", "time_ns")
            counts = [dict(zip(fields, level, strict=True)) for level in drafting.levels]
            entry["levels"] = [{"name": name, **level} for name, level in zip(names, counts, strict=True)]
            entry["decisions"] = decisions(ours)
        found["arms"][arm.name] = entry
    speed = {name: entry.get("speedup", 1.0) for name, entry in found["arms"].items()}
    speculative = {name: value for name, value in speed.items() if name.startswith("speculative")}
    static = {name: value for name, value in speed.items() if name.startswith("cascade static")}
    best = max(speculative, key=lambda name: speculative[name])
    found["best_speculative"] = best
    found["cascade_over_best_speculative"] = speed["cascade"] / speed[best]
    found["cascade_over_lookup"] = speed["cascade"] / speed["lookup"]
    found["cascade_over_better_of_both"] = speed["cascade"] / max(speed[best], speed["lookup"])
    if static:
        found["best_static"] = max(static, key=lambda name: static[name])
        found["auto_over_best_static"] = speed["cascade"] / max(static.values())
    found["ceiling"] = ceiling(found["arms"], curves)
    return found


def decisions(samples: list[Sample]) -> dict[str, float]:
    """The schedule's rounds of each kind, added up."""
    total: dict[str, float] = {}
    for sample in samples:
        for name, value in (sample.facts or {}).items():
            if name.endswith("_rounds"):
                total[name] = total.get(name, 0) + value
    return total


def ceiling(arms: dict[str, Any], curves: dict[str, CostCurve]) -> dict[str, Any] | None:
    """Speed-up that the cost model gives for the best fixed lengths with the acceptance measured with fixed lengths.

    It takes acceptance for independent of position and text, so a schedule that follows the text may pass it.
    """
    static = [entry for name, entry in arms.items() if name.startswith("cascade static") and entry.get("levels")]
    if not static:
        return None
    depth = len(static[0]["levels"])
    alphas = []
    for level in range(depth):
        drafted = sum(entry["levels"][level]["drafted"] for entry in static)
        accepted = sum(entry["levels"][level]["accepted"] for entry in static)
        alphas.append(conditional(accepted, drafted))
    forward_ms = [lambda n, curve=curve: curve.ms(n) for curve in curves.values()]
    lengths = [1, 2, 3, 4, 6, 8, 12, 16]
    best = max(
        ((cascade_tokens_per_s(alphas, [k, *[inner] * (depth - 1)], forward_ms), k, inner)
         for k in lengths for inner in lengths if inner <= k),
    )  # fmt: skip
    plain = 1000 / next(iter(curves.values())).ms(1)
    return {"speedup": best[0] / plain, "length": best[1], "inner_length": best[2], "alphas": alphas}


def conditional(accepted: int, drafted: int) -> float:
    """Accepted / drafted. A cautious stand-in for the acceptance of a token given those before it, which is higher."""
    return accepted / drafted if drafted else 0.0


def summary(tasks: dict[str, Any]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return sum(task[name] for task in tasks.values()) / len(tasks)

    total = {
        "mean_over_best_speculative": mean("cascade_over_best_speculative"),
        "best_task_over_best_speculative": max(task["cascade_over_best_speculative"] for task in tasks.values()),
        "worst_over_better_of_both": min(task["cascade_over_better_of_both"] for task in tasks.values()),
        "mean_speedup": sum(task["arms"]["cascade"].get("speedup", 1.0) for task in tasks.values()) / len(tasks),
        "exact": all(
            arm["exact"] == arm["outputs"] for task in tasks.values() for arm in task["arms"].values()
        ),
    }  # fmt: skip
    if all("auto_over_best_static" in task for task in tasks.values()):
        total["worst_auto_over_best_static"] = min(task["auto_over_best_static"] for task in tasks.values())
    return total


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    load_before = os.getloadavg()[0]
    prepared = prepared_tasks(args, ("speculative", "lookup", "cascade"), threads=args.threads)
    placement = prepared[0].checked.placement
    devices.apply(placement)
    models = load_models(prepared)
    needed = max(one.needed_tokens for one in prepared)
    for model in models.values():
        model.reserve(1, needed)
    arms = make_arms(models, args)
    questions = drafts.questions(prepared[0].infos["target"])
    for arm in arms:
        arm.strategy.prepare(1, needed)
        arm.strategy.practise(questions)
    rounds = 0
    for one in prepared:
        rounds = measure_task(one, arms, args, rounds, reader=models["target"])
    curves = cost_curves(models, 1, needed)  # as the schedule had them
    tasks = {one.plan.task[0]: report_task(one.plan.task[0], arms, curves) for one in prepared}
    document = {
        "benchmark": "cascade", "target": args.target, "draft": args.draft, "dtype": prepared[0].dtype,
        "threads": placement.threads, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
        "seed": args.seed, "repeats": args.repeats, "options": args.options, "cpu": environment()["cpu"],
        "load_before": load_before, "load_after": os.getloadavg()[0],
        "forward_ms": {role: {n: curve.ms(n) for n in (1, 2, 4, 8, 16)} for role, curve in curves.items()},
        "tasks": tasks, "summary": summary(tasks),
    }  # fmt: skip
    text = json.dumps(document, indent=1, allow_nan=False)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        show(document)
    return 0 if document["summary"]["exact"] else 1


def show(document: dict[str, Any]) -> None:
    for task, found in document["tasks"].items():
        print(f"{task}, {found['prompts']} prompts")
        for name, arm in found["arms"].items():
            interval = f" [{arm['low']:.2f}, {arm['high']:.2f}]" if arm.get("low") else ""
            speed = f"{arm['speedup']:.2f}x{interval}" if "speedup" in arm else "1.00x"
            print(f"  {name:20s} {arm['decode_tokens_per_s']:7.1f} tok/s  {speed:22s} "
                  f"{arm['tokens_per_step']:5.2f} tokens/step  {arm['exact']}/{arm['outputs']} exact")  # fmt: skip
        print(f"  over {found['best_speculative']}: {found['cascade_over_best_speculative']:.3f}, "
              f"over lookup: {found['cascade_over_lookup']:.3f}")  # fmt: skip
    print(", ".join(f"{name} {value if isinstance(value, bool) else round(value, 3)}"
                    for name, value in document["summary"].items()))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
