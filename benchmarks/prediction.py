"""Predicted against measured: how well cost curves and acceptance explain the decode speed-up of every strategy.

    python benchmarks/prediction.py --target MODEL --draft MODEL[,MODEL] [--dtype bfloat16] [--threads 2]
        [--tasks humaneval=8,spec-bench:math_reasoning=8,...] [--task-option spec-bench.path=FILE]
        [--lengths 2,4] [--max-new-tokens 64] [--also FILE.json,...] [--plot FILE.png] [--json] [--out FILE]

Arms are interleaved prompt by prompt on one set of loaded models: plain decoding, `speculative` once per length,
`lookup`, `cascade`, and `auto`. The target reads each prompt once, untimed, for all of them: only decoding is compared.
Cost curves are measured before a task and after each of its prompts, once over, and their medians count for it: a
machine that changes its speed may change it differently for reading memory and for arithmetic.
Predicted is what `results.prediction.replay` makes of the steps that were counted: the same function that fills the
column "predicted by profile" of a run's table. Two things are added to what a profile knows: what an arm does beside
its forwards, measured on questions that no task holds, and the reading of prompts of the very length. Nothing is fitted
to the times that are predicted.

A cell is a strategy on a task. The summary tells the share of cells whose prediction is within `--within` of what was
measured, and how `auto` compares with the best single strategy and with plain decoding on each task. What `auto`
spends on trying is measured: the time of its first rounds on a prompt less what plain decoding takes for their tokens.
A harder test stands beside it: the acceptance of one half of the prompts against the speed-up of the other half.

With `--out` every task is written as soon as it is done, and tasks that stand in the file already are not measured
again: the same command goes on where it was stopped, and further tasks may be added. Strategies on two devices and
sparse caches have benchmarks of their own, which predict as well: `--also` takes the documents that `two_devices.py`
and `sparse_kv.py` wrote with `--out`, and counts their cells with the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import Arm, Note, load_models, measure_task, parser_of, prepared_tasks
from overlap_model import read_samples
from prediction_cells import also, cells_of, draw, summary
from prediction_costs import beside_ms, measure_round, prices

from specbench.hardware import devices
from specbench.hardware.environment import environment
from specbench.models.base import CachedModel
from specbench.options import build
from specbench.results import drafts, metrics, statistics
from specbench.results.forecasts import replayed
from specbench.results.plots import require_matplotlib
from specbench.results.prediction import Prices
from specbench.results.prepare import Prepared
from specbench.results.records import BASELINE, Sample, write_atomically
from specbench.strategies import registry

AUTO = "auto"
SETTINGS = ("target", "draft", "dtype", "lengths", "max_new_tokens", "temperature", "seed", "repeats")

Samples = dict[str, list[Sample]]  # by arm
Roles = Mapping[str, Mapping[str, Any]]  # of the models, with what the manifest of a run says of each


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.set_defaults(lengths="2,4", max_new_tokens=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--within", type=float, default=0.1, help="what counts as right (default: 0.1)")
    parser.add_argument("--also", default="", help="documents of two_devices.py and sparse_kv.py, comma-separated")
    parser.add_argument("--plot", type=Path, help="a scatter plot, as PNG or SVG")
    return parser.parse_args(argv)


def opened(args: argparse.Namespace) -> dict[str, Any]:
    """The document so far: a new one, or what stands in `--out`. Ends the program where that is of something else."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    new = {"benchmark": "prediction", **settings, "beside_ms": {}, "rounds": [], "tasks": {}}
    if args.out is None or not args.out.exists():
        return new
    try:
        found = json.loads(args.out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{args.out}: cannot be read as JSON ({error}); name another file with --out") from None
    differing = [
        name for name in ("benchmark", *SETTINGS) if not isinstance(found, dict) or found.get(name) != new[name]
    ]
    if differing:
        raise SystemExit(f"{args.out}: was measured with another {differing[0]}; name another file with --out")
    return found


def kept_samples(path: Path, document: Mapping[str, Any]) -> dict[str, Samples]:
    """The samples beside a document, of its tasks, prompts and arms."""
    found = read_samples(path, document["tasks"])
    return {
        task: {
            arm: [sample for sample in found[task][arm] if sample.prompt_id in entry["prompt_ids"]]
            for arm in document["beside_ms"]
        }
        for task, entry in document["tasks"].items()
    }


def make_arms(models: dict[str, CachedModel], lengths: Sequence[int]) -> list[Arm]:
    def arm(name: str, strategy: str, **options: Any) -> Arm:
        kind = registry.get(strategy)
        roles = [role for role in (*kind.roles, *kind.optional_roles) if role in models]
        return Arm(name, kind({role: models[role] for role in roles}, build(kind.Options, options, strategy)))

    drafted = [arm(f"speculative {length}", "speculative", draft_length=length) for length in lengths]
    return [arm(BASELINE, BASELINE), *drafted, arm("lookup", "lookup"), arm("cascade", "cascade"), arm(AUTO, AUTO)]


class Measuring:
    """Models and arms of one session, which adds what it measures to the document.

    Attributes:
        samples: by task and arm.
    """

    def __init__(self, args: argparse.Namespace, document: dict[str, Any], prepared: Sequence[Prepared]) -> None:
        self.args, self.document, self.prepared = args, document, prepared
        self.samples: dict[str, Samples] = {}
        placement = prepared[0].checked.placement
        self._same("threads", placement.threads)
        self._same("cpu", environment()["cpu"])
        devices.apply(placement)
        self.models = load_models(prepared)
        self._same("follows", [role for role, model in self.models.items() if model.original is not None])
        self.needed = max(one.needed_tokens for one in prepared)
        for model in self.models.values():
            model.reserve(1, self.needed)
        self.arms = make_arms(self.models, [int(length) for length in args.lengths.split(",") if length])

    def _same(self, name: str, value: Any) -> None:
        """Notes what all tasks of a document have in common. Ends the program where others were measured otherwise."""
        if self.document["tasks"] and self.document.get(name) != value:
            was = self.document.get(name)
            raise SystemExit(
                f"{self.args.out}: was measured with {name} {was}, not {value}; name another file with --out"
            )
        self.document[name] = value

    def run(self) -> None:
        questions = drafts.questions(self.prepared[0].infos["target"])
        say = Note().stage
        for arm in self.arms:
            say(f"preparing {arm.name}")
            arm.strategy.prepare(1, self.needed)
            arm.strategy.practise(questions)
        sampling = self.prepared[0].plan.sampling(self.prepared[0].eos)
        say("measuring what arms do beside their forwards")
        for arm in self.arms:
            found = self.document["beside_ms"].setdefault(arm.name, [])
            found.append(beside_ms(arm, questions, sampling))
        rounds = 0
        for one in self.prepared:
            name, load, before = one.plan.task[0], os.getloadavg()[0], len(self.document["rounds"])
            again = partial(self._round, _prompt_tokens(one))
            again()
            rounds = measure_task(one, self.arms, self.args, rounds, reader=self.models["target"], between=again)
            self.samples[name] = {arm.name: arm.samples[name] for arm in self.arms}
            ids = list(dict.fromkeys(sample.prompt_id for sample in self.samples[name][BASELINE]))
            entry = {"load": [load, os.getloadavg()[0]], "prompt_ids": ids, "prompt_tokens": _prompt_tokens(one)}
            entry["rounds"] = list(range(before, len(self.document["rounds"])))
            self.document["tasks"][name] = entry
            write(self.document, self.args.out)

    def _round(self, prompt: int) -> None:
        self.document["rounds"].append(measure_round(self.models, prompt, self.args.max_new_tokens))


def _prompt_tokens(prepared: Prepared) -> int:
    return max(1, round(np.mean([len(turn.ids) for turn in prepared.first_turns if turn.error is None])))


def write(document: Mapping[str, Any], path: Path | None) -> None:
    if path:
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


# What came out


def predicted(arm: str, roles: Roles, samples: Sequence[Sample], known: Prices) -> float | None:
    """Decode speed-up over plain decoding, from the counted steps and the curves; of no steps there is none."""
    facts = {"strategy": arm.split()[0], "roles": roles, "options": {}}
    found = replayed(facts, samples, known)
    return found[0] / found[1] if found else None


def report_task(samples: Samples, roles: Roles, known: Prices, beside: Mapping[str, float]) -> dict[str, Any]:
    """Every arm of a task beside its prediction, and what `auto` chose.

    Args:
        beside: milliseconds per forward, by arm.
    """
    base = samples[BASELINE]
    tokens = {(sample.prompt_id, sample.repeat): sample.token_ids for sample in base}
    found: dict[str, Any] = {"prompts": len({sample.prompt_id for sample in base}), "arms": {}}
    for name, ours in samples.items():
        drafting = metrics.drafting(ours)
        entry: dict[str, Any] = {
            "decode_tokens_per_s": metrics.decode_tokens_per_s(ours),
            "tokens_per_step": drafting.tokens_per_step,
            "acceptance_rate": drafting.acceptance_rate,
            "exact": sum(sample.token_ids == tokens[sample.prompt_id, sample.repeat] for sample in ours),
            "outputs": len(ours),
            "speedup": 1.0,
        }
        if name != BASELINE:
            own = {BASELINE: beside.get(BASELINE, 0.0), name.split()[0]: beside.get(name, 0.0)}
            entry |= _held_against(name, roles, ours, base, dataclasses.replace(known, beside_ms=own))
        found["arms"][name] = entry
    speeds = {name: entry["speedup"] for name, entry in found["arms"].items() if name != AUTO}
    found["best_single"] = max(speeds, key=lambda name: speeds[name])
    found["auto"] = choosing(samples[AUTO], base)
    found["auto"]["over_best_single"] = found["arms"][AUTO]["speedup"] / speeds[found["best_single"]]
    return found


def _held_against(
    name: str, roles: Roles, ours: Sequence[Sample], base: Sequence[Sample], known: Prices
) -> dict[str, Any]:
    speedup = statistics.decode_speedup(statistics.pair(base, ours).pairs, per_token=True)
    if speedup is None:
        return {}
    entry: dict[str, Any] = {"speedup": speedup.value, "low": speedup.low, "high": speedup.high}
    entry["predicted"] = predicted(name, roles, ours, known)
    if entry["predicted"] is not None:
        entry["predicted_over_measured"] = entry["predicted"] / speedup.value
    halves = _halves(ours), _halves(base)
    if all(map(all, halves)):
        entry["from_other_half"] = []
        for one, other in ((0, 1), (1, 0)):
            there = predicted(name, roles, halves[0][other], known)
            here = statistics.decode_speedup(statistics.pair(halves[1][one], halves[0][one]).pairs, per_token=True)
            if there is not None and here is not None:
                entry["from_other_half"].append(there / here.value)
    return entry


def _halves(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples of every other prompt, and the others."""
    prompts = list(dict.fromkeys(sample.prompt_id for sample in samples))
    even = set(prompts[::2])
    return [s for s in samples if s.prompt_id in even], [s for s in samples if s.prompt_id not in even]


def choosing(samples: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """What `auto` chose, and the share of its decode time that its first rounds on a prompt lost against plain
    decoding, by the clock."""
    plain_ns = metrics.pooled_tpot_ns(base) or 0.0
    chosen: dict[str, int] = {}
    lost = 0.0
    for sample in samples:
        facts = sample.facts or {}
        chosen[facts.get("choice", "?")] = chosen.get(facts.get("choice", "?"), 0) + 1
        steps = sample.steps[: 1 + facts.get("trial_rounds", 0)]
        lost += steps[-1][metrics.NS] - steps[0][metrics.NS]
        lost -= plain_ns * sum(step[metrics.KEPT] for step in steps[1:])
    decode_ns = metrics.total_decode_ns(samples)
    return {
        "chosen": chosen,
        "switches": sum((sample.facts or {}).get("switches", 0) for sample in samples),
        "trials_lost_share": lost / decode_ns if decode_ns else None,
        "calibration_ms": max((sample.facts or {}).get("calibration_ms", 0) for sample in samples),
    }


def reported(document: dict[str, Any], samples: Mapping[str, Samples], args: argparse.Namespace) -> dict[str, Any]:
    """The document with the reports of all its tasks, and with a summary."""
    beside = {name: float(np.median(values)) for name, values in document["beside_ms"].items()}
    roles = {role: {"follows": role in document.get("follows", ())} for role in document["rounds"][-1]["curves"]}
    for task, entry in document["tasks"].items():
        known = prices([document["rounds"][at] for at in entry["rounds"]], entry["prompt_tokens"])
        entry |= report_task(samples[task], roles, known, beside)
    document["also"] = also(args.also)
    document["summary"] = summary(cells_of(document), document["tasks"], args.within)
    return document


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.plot:
        require_matplotlib()
    also(args.also)  # whatever cannot be read is told before anything is measured
    document = opened(args)
    wanted = args.tasks.split(",")
    args.tasks = ",".join(entry for entry in wanted if entry.partition("=")[0] not in document["tasks"])
    samples: dict[str, Samples] = {}
    if document["tasks"]:
        samples = kept_samples(args.out, document)
    if args.tasks:
        prepared = prepared_tasks(args, ("speculative", "lookup", "cascade"), threads=args.threads)
        measuring = Measuring(args, document, prepared)
        measuring.run()
        samples |= measuring.samples
    reported(document, samples, args)
    write(document, args.out)
    if args.plot:
        draw(document, args.plot)
    if args.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        show(document)
    return 0


def show(document: Mapping[str, Any]) -> None:
    for task, found in document["tasks"].items():
        print(f"{task}, {found['prompts']} prompts")
        for name, arm in found["arms"].items():
            told = f"predicted {arm['predicted']:5.2f}x" if arm.get("predicted") else ""
            interval = f" [{arm['low']:.2f}, {arm['high']:.2f}]" if arm.get("low") else ""
            print(f"  {name:16s} {arm['speedup']:5.2f}x{interval:15s} {told:17s} {arm['tokens_per_step'] or 0:5.2f} "
                  f"tokens/step  {arm['exact']}/{arm['outputs']} exact")  # fmt: skip
        auto = found["auto"]
        print(f"  auto chose {auto['chosen']}, {auto['over_best_single']:.3f} of {found['best_single']}, trials lost "
              f"{auto['trials_lost_share'] or 0:.1%}, calibrated {auto['calibration_ms'] / 1000:.1f} s")  # fmt: skip
    for cell in document["also"]:
        print(f"{cell['task']}, {cell['arm']}: {cell['speedup']:.2f}x, predicted {cell['predicted']:.2f}x")
    for name, value in document["summary"].items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
