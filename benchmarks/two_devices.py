"""What two devices bring: `async` and `duo` against plain and speculative decoding on the same cores, task by task.

    python benchmarks/two_devices.py --target MODEL --draft MODEL [--dtype bfloat16] [--cores 0,1]
        [--tasks humaneval=32,spec-bench:summarization=16,...] [--max-new-tokens 128] [--lengths 2,3,4,6]
        [--task-option spec-bench.path=FILE] [--switches] [--temperature 0] [--json] [--out FILE]

Arms, interleaved prompt by prompt in one process, taking turns at going first:

    autoregressive            (a) the target alone on the first core
    speculative K             (b) target on the first core, draft in a worker on the second, in turns
    async, duo                the same two devices at once; with --switches also without each improvement of duo
    async/duo as published    AMUSD's and DuoDecoding's protocols
    ... on both cores         (c) plain and speculative decoding with both cores in every forward

Speed-ups are sums of decode times over the same prompts, with bootstrap intervals. Every arm's tokens are compared with
plain decoding's. Ceilings, and what the simulator makes of the same texts, come from `overlap_model.py`, which also
runs on what `--out` has written.
"""

from __future__ import annotations

import argparse
import json
import statistics as numbers
from pathlib import Path
from typing import Any

import overlap_model
import torch
from interleaved import Arm, measure_task, parser_of, prepared_tasks
from overlap_arms import BOTH, PLAIN, SWITCHES, share_costs, strategy_of, that_go_by_costs

from specbench.hardware import devices
from specbench.hardware.clock import Drain
from specbench.hardware.environment import environment
from specbench.hardware.overlap import Costs
from specbench.models.load import connect, load
from specbench.models.remote import RemoteModel, load_remote
from specbench.results import metrics, statistics
from specbench.results.prepare import Prepared
from specbench.results.records import Sample
from specbench.strategies.overlapped import Overlapped
from specbench.strategies.side_by_side import as_record


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--cores", default=None, help="the target's and the draft's, by default the first two")
    parser.add_argument("--switches", action="store_true", help="also without each improvement")
    parser.add_argument(
        "--arms",
        default="",
        help="only arms with one of these words in their name, or, as =duo, with this name; comma-separated",
    )
    return parser.parse_args(argv)


class Pair:
    """The models: the target and a copy of the draft here, the draft in a worker on the second core."""

    def __init__(self, prepared: Prepared, cores: tuple[int, ...]) -> None:
        self.cores = cores
        how = {"dtype": prepared.dtype, "vocab_size": prepared.vocab_size}
        quant = prepared.quant("draft")
        infos = prepared.infos
        use(cores[:1])
        self.target = load(infos["target"], **how, quant=prepared.quant("target"))
        self.draft = load(infos["draft"], **how, quant=quant)
        connect(infos, {"target": self.target, "draft": self.draft})
        worker_device = devices.parse_device(f"cpu:{cores[1]}")
        self.remote: RemoteModel = load_remote(infos["draft"], "draft", worker_device, 1, **how, quant=quant)

    def use(self, cores: tuple[int, ...]) -> None:
        """Moves this process, all its threads included, and lets the runtime choose its kernels again, untimed."""
        if use(cores):
            for model in (self.target, self.draft):
                model.reset()
                model.advance([[1]])

    def close(self) -> None:
        self.remote.close()


def use(cores: tuple[int, ...]) -> bool:
    """Binds this process to cores, one thread on each; whether the number of threads has changed."""
    changed = torch.get_num_threads() != len(cores)
    torch.set_num_threads(len(cores))
    torch.zeros(1 << 20).add_(1)  # starts the threads that are not there yet, so that they can be bound
    devices.bind(cores, len(cores))
    return changed


def make_arms(pair: Pair, args: argparse.Namespace) -> list[Arm]:
    apart = {"target": pair.target, "draft": pair.remote}
    together = {"target": pair.target, "draft": pair.draft}

    def arm(name: str) -> Arm:
        if name.endswith(BOTH):
            return Arm(name, strategy_of(name, together), pair.cores)
        return Arm(name, strategy_of(name, apart), pair.cores[:1])

    speculative = [f"speculative {int(length)}" for length in args.lengths.split(",")]
    names = [
        *speculative, "async", "duo", "async as published", "duo as published",
        PLAIN + BOTH, *(name + BOTH for name in speculative), *(SWITCHES if args.switches else ()),
    ]  # fmt: skip
    words = [word for word in args.arms.split(",") if word]
    if words:
        names = [name for name in names if f"={name}" in words or any(word in name for word in words)]
    return [arm(PLAIN), *map(arm, names)]


def prepare_arms(arms: list[Arm], pair: Pair, tokens: int) -> Costs | None:
    """Costs are measured once and shared, by the arm with the most branches: all arms decide by the same numbers."""
    for arm in arms:
        if not isinstance(arm.strategy, Overlapped):
            pair.use(arm.cores)
            arm.strategy.prepare(1, tokens)
    strategies = [arm.strategy for arm in arms]
    pair.use(pair.cores[:1])
    for first in that_go_by_costs(strategies)[:1]:
        first.prepare(1, tokens)
        assert first.costs is not None
        share_costs(strategies, first.costs)
        return first.costs
    return None


# What came out


def report_task(task: str, arms: list[Arm]) -> dict[str, Any]:
    base = arms[0].samples[task]
    tokens = {sample.prompt_id: sample.token_ids for sample in base}
    found: dict[str, Any] = {"prompts": len(base), "arms": {}}
    for arm in arms:
        ours = arm.samples[task]
        entry = {
            "cores": list(arm.cores),
            "decode_tokens_per_s": metrics.decode_tokens_per_s(ours),
            "ttft_ms": numbers.median((sample.ttft_ns or 0) / 1e6 for sample in ours),
            "exact": sum(sample.token_ids == tokens[sample.prompt_id] for sample in ours),
            "outputs": len(ours),
            **acceptance(ours),
            **facts(ours),
        }
        found["arms"][arm.name] = entry
    kinds = {
        "plain": [arm for arm in arms if arm.name == PLAIN],
        "speculative": [arm for arm in arms if arm.name.startswith("speculative") and BOTH not in arm.name],
        "plain_on_both": [arm for arm in arms if arm.name == PLAIN + BOTH],
        "speculative_on_both": [arm for arm in arms if arm.name.startswith("speculative") and BOTH in arm.name],
    }
    for kind, candidates in kinds.items():
        if not candidates:
            continue
        best = max(candidates, key=lambda arm: found["arms"][arm.name]["decode_tokens_per_s"] or 0)
        found[f"best_{kind}"] = best.name
        for arm in arms:
            paired = statistics.pair(best.samples[task], arm.samples[task]).pairs
            gain = statistics.decode_speedup(paired, per_token=True)
            if gain is not None:
                found["arms"][arm.name][f"over_{kind}"] = [gain.value, gain.low, gain.high]
            found["arms"][arm.name][f"ttft_over_{kind}"] = (
                found["arms"][arm.name]["ttft_ms"] / found["arms"][best.name]["ttft_ms"]
            )
    return found


def acceptance(samples: list[Sample]) -> dict[str, Any]:
    """The conditional acceptance: of the draft tokens whose forerunners were all taken, how many were taken; over all
    positions of a block, and for each, since it is not the same at all of them."""
    steps = [step for sample in samples for step in sample.steps]
    accepted = sum(step[3] for step in steps)
    rejected = sum(step[3] < step[2] for step in steps)
    found: dict[str, Any] = {"wasted": sum(step[4] for step in steps), "steps": len(steps)}
    if accepted + rejected:
        found["alpha"] = accepted / (accepted + rejected)
        reached = [sum(step[2] > at <= step[3] for step in steps) for at in range(max(step[2] for step in steps))]
        found["alpha_by_position"] = [sum(step[3] > at for step in steps) / n for at, n in enumerate(reached) if n]
        found["tokens_per_step"] = sum(step[1] for step in steps) / len(steps)
    return found


def facts(samples: list[Sample]) -> dict[str, Any]:
    """The workers' own accounts, added up, and how long each side was idle."""
    total: dict[str, Any] = {}
    for sample in samples:
        for name, value in (sample.facts or {}).items():
            if isinstance(value, int) and not isinstance(value, bool):
                total[name] = total.get(name, 0) + value
    e2e = sum(sample.e2e_ns or 0 for sample in samples)
    for role in ("target", "draft"):
        if f"{role}_busy_ns" in total and e2e:
            total[f"{role}_idle"] = max(0.0, 1 - total[f"{role}_busy_ns"] / e2e)  # its last forward may end later
    return total


def show(result: dict[str, Any]) -> None:
    for task, found in result["tasks"].items():
        print(f"\n{task}, {found['prompts']} prompts")
        print(f"  {'':34} {'tok/s':>7} {'x plain':>8} {'x spec':>7} {'x both':>7} {'TTFT ms':>8} {'alpha':>6}"
              f" {'tok/step':>8} {'idle T/D':>9} {'wasted':>6}  exact")  # fmt: skip
        for name, arm in found["arms"].items():
            ratio = lambda kind, arm=arm: (arm.get(f"over_{kind}") or [float("nan")])[0]  # noqa: E731
            idle = "/".join(f"{100 * arm[f'{role}_idle']:.0f}" for role in ("target", "draft") if f"{role}_idle" in arm)
            print(
                f"  {name:34} {arm['decode_tokens_per_s'] or 0:7.2f} {ratio('plain'):8.3f} {ratio('speculative'):7.3f}"
                f" {ratio('speculative_on_both'):7.3f} {arm['ttft_ms']:8.1f} {arm.get('alpha', 0):6.3f}"
                f" {arm.get('tokens_per_step', 1):8.2f} {idle:>9} {arm['wasted']:6}  {arm['exact']}/{arm['outputs']}"
            )
        print("\n".join(overlap_model.lines(found)))
    if "simulator" in result:
        print(overlap_model.line_of_check(result["simulator"]))


def write(result: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    args = parse()
    available = devices.available_cores()
    cores = tuple(int(core) for core in args.cores.split(",")) if args.cores else available[:2]
    if len(cores) != 2:
        raise SystemExit("two devices need two cores")
    prepared = prepared_tasks(args, ("speculative",), place=f"target=cpu:{cores[0]}")
    pair = Pair(prepared[0], cores)
    result: dict[str, Any] = {
        "benchmark": "two-devices",
        "target": prepared[0].infos["target"].name,
        "draft": prepared[0].infos["draft"].name,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "cores": list(cores),
        "cpu": environment()["cpu"],
        "tasks": {},
    }
    try:
        arms = make_arms(pair, args)
        tokens = max(one.needed_tokens for one in prepared)
        costs = prepare_arms(arms, pair, tokens)
        result["costs"] = as_record(costs) if costs else None
        rounds = 0
        for one in prepared:
            rounds = measure_task(
                one, arms, args, rounds, Drain((pair.remote.worker.drain,)), lambda arm: pair.use(arm.cores)
            )
            task = one.plan.task[0]
            result["tasks"][task] = report_task(task, arms)
            write(result, args.out)  # a task that was measured is not lost with the next one
    finally:
        pair.close()
    if costs:
        strategies = {arm.name: arm.strategy for arm in arms}
        for task, found in result["tasks"].items():
            ours = {arm.name: arm.samples[task] for arm in arms}
            found["model"] = overlap_model.model_of(ours, strategies, costs, found.get("best_speculative"))
        result["simulator"] = overlap_model.check(result["tasks"])
        write(result, args.out)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
