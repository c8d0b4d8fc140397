"""What the cost model says of the very texts that `two_devices.py` has measured: ceilings, and the simulator's check.

    python benchmarks/overlap_model.py FILE.json [--json]

FILE.json is what `two_devices.py --out FILE.json` wrote, with FILE.samples.jsonl beside it; nothing is measured again.
`two_devices.py` prints the same for the samples that it has just measured.

An independent acceptance rate is not enough to come within 10 %: the draft is right for a while, then wrong for a
while, and a text of a hundred tokens begins and ends. So every text has its own trace, position by position. Whether
the draft's token is the target's depends on the text alone, not on how it was decoded: what one arm has not looked at
(the token after an accepted block), another one with other draft lengths has.

Step times are those of the same samples. What a forward takes alone, the plain and the speculative arms tell: the cost
curves from the beginning of the run are scaled to them, target and draft each by one factor. For an arm that overlaps,
both are scaled to what its own forwards took, contention included. So a prediction says what the protocol makes of
given step times and a given text; and a ceiling, what it could make of them if neither side slowed the other down, no
message took time, no branch cost anything and it had known the best policy for the task from the beginning. Two devices
that share a memory cannot reach that, so a second ceiling lets each slow the other down as was measured before the run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlap_arms import BOTH, PLAIN, kind_of, share_costs, strategy_of
from overlap_traces import Samples, acceptance, traces

from specbench.hardware.overlap import Costs, perfect_rate, plain_rate
from specbench.hardware.overlap_simulator import Fixed, Simulated, Steering, in_turns, simulate, simulate_published
from specbench.results import metrics
from specbench.results.records import Sample
from specbench.strategies.base import Strategy
from specbench.strategies.duo import PUBLISHED_GAMMA
from specbench.strategies.overlapped import Overlapped
from specbench.strategies.side_by_side import from_record

NEAR = 0.1  # how far a prediction may be off
GOAL = 0.9  # of the ceiling
LONGEST = 12
POLICIES = [Fixed(need, most) for most in (2, 4, 8, LONGEST) for need in range(most + 1)]


# Step times


def alone(costs: Costs, samples: Samples) -> Costs:
    """The cost curves, scaled to what forwards took in these samples while the other side rested: the target's by the
    plain arm, the draft's by the speculative ones, or like the target's where these do not tell."""
    plain = [(ms, drafted) for sample in samples[PLAIN] for ms, drafted in _middle(sample, 1)]
    target = sum(ms for ms, _ in plain) / (len(plain) * costs.target_ms(1)) if plain else 1.0
    steps = [
        step
        for name, ours in samples.items()
        if name.startswith("speculative") and BOTH not in name
        for sample in ours
        for step in _middle(sample, 2)  # the draft's prefill is in the first one
    ]
    drafted = sum(count for _, count in steps)
    draft = target
    if drafted:
        left = sum(ms - target * costs.target_ms(count + 1) for ms, count in steps)
        draft = left / (drafted * costs.draft_ms(1))
    if draft <= 0:  # a curve from a slow moment
        draft = target
    return Costs(lambda n: target * costs.target_ms(n), lambda r: draft * costs.draft_ms(r))


def _middle(sample: Sample, skip: int) -> list[tuple[float, int]]:
    """(ms, draft tokens) of the steps but for the first `skip` and the last, which may have been cut."""
    pairs = list(zip(sample.steps, sample.steps[1:], strict=False))[skip - 1 : -1]
    return [((after[0] - before[0]) / 1e6, after[2]) for before, after in pairs]


@dataclass(frozen=True)
class Own:
    """What an arm's own forwards took.

    Attributes:
        costs: contention included, so without factors.
        rows: of a draft forward, on average.
        target_prefill_ms, draft_prefill_ms: per sample.
    """

    costs: Costs
    rows: float
    target_prefill_ms: list[float]
    draft_prefill_ms: list[float]

    @property
    def first_at(self) -> list[float]:
        """Per sample, when the draft's prefill was over that began with the target's, in ms after the latter's end."""
        return [draft - target for target, draft in zip(self.target_prefill_ms, self.draft_prefill_ms, strict=True)]


def own_times(costs: Costs, contended: Costs, samples: Sequence[Sample]) -> Own:
    """From the accounts that both sides keep.

    Older records do not say how long the draft's prefill took: there its steps are the contended ones, and its prefill
    the share of the target's that a step of it is.

    Args:
        costs: of forwards alone, from `alone`.
    """
    facts = [sample.facts or {} for sample in samples]
    target_prefill = [
        fact.get("target_prefill_ns") or sample.ttft_ns or 0 for fact, sample in zip(facts, samples, strict=True)
    ]
    busy = sum(fact["target_busy_ns"] for fact in facts) - sum(target_prefill)
    steps = [step for sample in samples for step in sample.steps[1:]]
    slower = busy / 1e6 / sum(costs.target_ms(step[2] + 1) for step in steps) if steps and busy > 0 else 1.0
    forwards = sum(fact["draft_forwards"] for fact in facts)
    rows = sum(fact.get("draft_token_rows", fact["draft_forwards"]) for fact in facts) / max(forwards, 1)
    ratio, draft_slower = costs.draft_ms(1) / costs.target_ms(1), contended.draft_factor
    draft_prefill = [fact.get("draft_prefill_ns", ns * ratio) for fact, ns in zip(facts, target_prefill, strict=True)]
    known = [fact for fact in facts if "draft_prefill_ns" in fact]
    if len(known) == len(facts) and forwards > len(facts):
        busy = sum(fact["draft_busy_ns"] for fact in facts) - sum(draft_prefill)
        draft_slower = busy / 1e6 / ((forwards - len(facts)) * costs.draft_ms(rows))
    scaled = Costs(lambda n: slower * costs.target_ms(n), lambda r: draft_slower * costs.draft_ms(r))
    return Own(scaled, rows, [ns / 1e6 for ns in target_prefill], [ns / 1e6 for ns in draft_prefill])


def _excess(costs: Costs, sample: Sample) -> float:
    """How much longer the first step after the prefill took than later ones of its kind: the draft's prefill."""
    if len(sample.steps) < 3:
        return 0.0
    ms, drafted = (sample.steps[1][0] - sample.steps[0][0]) / 1e6, sample.steps[1][2]
    return max(0.0, ms - costs.target_ms(drafted + 1) - drafted * costs.draft_ms(1))


# Predictions and ceilings


def predict(name: str, strategy: Strategy, samples: Samples, costs: Costs, contended: Costs) -> Simulated | None:
    """What the simulator makes of an arm's texts; None for what it does not know: both cores in every forward, rounds
    with an end, branches one after another.

    Args:
        costs: of forwards alone.
        contended: as measured at the beginning of the run.
    """
    own, options = samples[name], strategy.options
    kind, given = kind_of(name)
    limits = [sample.max_new_tokens for sample in own]
    if BOTH in name or name == PLAIN:
        return None
    if kind == "speculative":
        first = [_excess(costs, sample) + costs.draft_ms(1) for sample in own]
        texts = zip(traces(own, samples), limits, first, strict=True)
        steering = in_turns(options.draft_length)
        return added(simulate(costs, ranks, steering, limit, first_at=at) for ranks, limit, at in texts)
    if {"batched", "interrupt", "first_token"} & set(given):
        return None
    times = own_times(costs, contended, own)
    hit, ready = anticipated(own)
    ranked = traces(own, samples, hit)
    if kind == "duo" and options.faithful:
        rounds = sum((sample.facts or {}).get("rounds", 0) for sample in own)
        branches = 1 + sum((sample.facts or {}).get("branches", 0) for sample in own) / max(rounds, 1)
        texts = zip(traces(own, samples), limits, strict=True)
        return added(simulate_published(times.costs, ranks, PUBLISHED_GAMMA, branches, limit) for ranks, limit in texts)
    assert isinstance(strategy, Overlapped)
    after = kind == "async" and options.faithful
    first = times.draft_prefill_ms if after else times.first_at
    return added(
        simulate(times.costs, ranks, strategy.controller(), limit, ready, times.rows, at, int(after))
        for ranks, limit, at in zip(ranked, limits, first, strict=True)
    )


def anticipated(samples: Sequence[Sample]) -> tuple[float, float]:
    """Share of the rejections after which something was ready, and how many tokens then; older records do not tell the
    latter, and as many are assumed as there was time for."""
    facts = [sample.facts or {} for sample in samples]
    names = "rejections", "rejections_anticipated", "branch_tokens_ready"
    rejections, hits, ready = (sum(fact.get(name, 0) for fact in facts) for name in names)
    if not hits:
        return 0.0, 0.0
    return hits / rejections, ready / hits if all("branch_tokens_ready" in fact for fact in facts) else math.inf


def added(parts: Any) -> Simulated:
    """Several texts one after another."""
    parts = list(parts)
    return Simulated(sum(p.tokens for p in parts), sum(p.steps for p in parts), sum(p.ms for p in parts))


def ceiling(costs: Costs, name: str, samples: Samples, contended: Costs) -> float | None:
    """Tokens per ms of the best fixed policy for the task, in turns or at once, where nothing is in anybody's way but
    the other side, if `costs` have factors."""
    own = samples[name]
    hit, _ = anticipated(own)
    first_at: list[float]
    ways_to_go: list[Steering] = [in_turns(length) for length in range(1, LONGEST + 1)]
    if kind_of(name)[0] == "speculative":
        first_at, position = [_excess(costs, sample) + costs.draft_ms(1) for sample in own], 1
    else:
        first_at, position = own_times(costs, contended, own).first_at, 0
        ways_to_go += [*POLICIES, Fixed(0, 0, 0, "plain")]
    texts = list(zip(traces(own, samples, hit), [sample.max_new_tokens for sample in own], first_at, strict=True))
    rates = [
        added(
            simulate(costs, ranks, way, limit, math.inf if hit else 0.0, 1.0, at, position)
            for ranks, limit, at in texts
        )
        for way in ways_to_go
    ]
    return max((found.rate for found in rates if found.ms), default=None)


def model_of(
    samples: Samples, strategies: Mapping[str, Strategy], contended: Costs, best_speculative: str | None
) -> dict[str, Any]:
    """Ceilings, how near the arms came to them, and predictions, for one task; {} where nothing was drafted.

    Args:
        strategies: by arm, with costs shared.
        contended: the cost curves and factors from the beginning of the run.
    """
    alpha = acceptance({name: ours for name, ours in samples.items() if BOTH not in name})
    if alpha is None or PLAIN not in samples:
        return {}
    costs = alone(contended, samples)
    model: dict[str, Any] = {
        "alpha": alpha,
        "cost_ratio": costs.draft_ms(1) / costs.target_ms(1),
        "target_ms": costs.target_ms(1),
        "draft_ms": costs.draft_ms(1),
        "plain_tokens_per_s": 1e3 * plain_rate(costs),
        "perfect_anticipation_tokens_per_s": 1e3 * perfect_rate(costs, alpha, LONGEST),
        "hit": anticipated(samples.get("duo", []))[0],
        "simulated": {},
    }
    for name, ours in samples.items():
        found = predict(name, strategies[name], samples, costs, contended)
        measured = metrics.decode_tokens_per_s(ours)
        if found and found.ms and measured:
            predicted = 1e3 * found.rate
            entry = {"predicted_tokens_per_s": predicted, "measured_tokens_per_s": measured}
            model["simulated"][name] = entry | {"ratio": predicted / measured, "steps": found.steps}
    for kind, name in (("speculative", best_speculative), ("async", "async"), ("duo", "duo")):
        if name not in samples:
            continue
        highest = ceiling(costs, name, samples, contended)
        factors = {"target_factor": contended.target_factor, "draft_factor": contended.draft_factor}
        shared = ceiling(replace(costs, **factors), name, samples, contended)
        measured = metrics.decode_tokens_per_s(samples[name])
        if highest and shared and measured:
            reached = measured / 1e3 / highest
            model[kind] = {
                "ceiling_tokens_per_s": 1e3 * highest, "of_ceiling": reached, "goal": reached >= GOAL,
                "ceiling_with_contention_tokens_per_s": 1e3 * shared,
                "of_ceiling_with_contention": measured / 1e3 / shared,
            }  # fmt: skip
    return model


def check(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many of the predictions of all tasks and arms are within 10 % of what was measured."""
    ratios = {
        f"{task}, {arm}": entry["ratio"]
        for task, found in tasks.items()
        for arm, entry in found.get("model", {}).get("simulated", {}).items()
    }
    near = [abs(ratio - 1) <= NEAR for ratio in ratios.values()]
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1), default=None)
    return {
        "cells": len(ratios),
        "within_10_percent": sum(near) / len(near) if near else None,
        "worst": None if worst is None else {"cell": worst, "ratio": ratios[worst]},
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """One task's ceilings and predictions for a terminal."""
    model, text = found.get("model", {}), []
    for kind in ("speculative", "async", "duo"):
        if entry := model.get(kind):
            highest, reached = entry["ceiling_tokens_per_s"], entry["of_ceiling"]
            shared, of_it = entry["ceiling_with_contention_tokens_per_s"], entry["of_ceiling_with_contention"]
            text.append(f"  ceiling of {kind}: {highest:.2f} tok/s, reached {reached:.2f} of it; with the contention "
                        f"measured {shared:.2f}, reached {of_it:.2f}")  # fmt: skip
    for arm, entry in model.get("simulated", {}).items():
        text.append(
            f"  simulated {arm:32} {entry['predicted_tokens_per_s']:7.2f} tok/s, {entry['ratio']:.2f} of the measured"
        )
    return text


def line_of_check(checked: Mapping[str, Any]) -> str:
    if not checked["cells"]:
        return "nothing to simulate"
    worst = checked["worst"]
    return (
        f"simulated within 10 %: {checked['within_10_percent']:.0%} of {checked['cells']} (task, arm) cells; "
        f"farthest {worst['ratio']:.2f} ({worst['cell']})"
    )


# Recorded runs


def read_document(path: Path) -> dict[str, Any]:
    """What `two_devices.py --out` wrote, with cost curves in it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(document, dict) or document.get("benchmark") != "two-devices" or not document.get("costs"):
        raise SystemExit(f"{path}: no cost curves; two_devices.py writes them where async or duo is among its arms")
    return document


def read_samples(path: Path, tasks: Collection[str]) -> dict[str, dict[str, list[Sample]]]:
    """The samples beside such a document by task and arm, the latest of each."""
    beside = path.with_suffix(".samples.jsonl")
    try:
        rows = beside.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"{beside}: cannot be read ({error.strerror}); it is written beside {path.name}") from None
    latest = {}
    for row in rows:
        sample = Sample(**json.loads(row))
        latest[sample.key] = sample
    found: dict[str, dict[str, list[Sample]]] = {}
    for sample in latest.values():
        if sample.task in tasks:
            found.setdefault(sample.task, {}).setdefault(sample.arm, []).append(sample)
    return found


def remodel(path: Path) -> dict[str, Any]:
    """The document with its models and its check made anew from the samples."""
    document = read_document(path)
    samples = read_samples(path, document["tasks"])
    costs = from_record(document["costs"])
    strategies = {name: strategy_of(name, {}) for ours in samples.values() for name in ours}
    share_costs(list(strategies.values()), costs)
    for task, ours in samples.items():
        found = document["tasks"][task]
        found["model"] = model_of(ours, strategies, costs, found.get("best_speculative"))
    document["simulator"] = check(document["tasks"])
    return document


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="print the whole document")
    args = parser.parse_args(argv)
    document = remodel(args.file)
    if args.json:
        print(json.dumps(document, indent=2))
        return
    for task, found in document["tasks"].items():
        print("\n".join([f"{task}, {found['prompts']} prompts", *lines(found)]))
    print(line_of_check(document["simulator"]))


if __name__ == "__main__":
    main()
