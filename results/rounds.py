"""What the rounds of `sparse-kv` took beside what its cost model says, in words: pure functions of facts in records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .records import Sample


def told(task: str, arm: str, samples: Sequence[Sample]) -> str | None:
    """One sentence about an arm on a task; None for an arm that was not asked to explain itself.

    Times are means of the forwards of a round, of all rows together, over all rounds; plain ones count too.

    Args:
        samples: finished ones.
    """
    facts = [sample.facts for sample in samples if sample.facts and sample.facts.get("explained")]
    rounds = sum(one["rounds"] for one in facts)
    if not rounds:
        return None
    draft, verify = _mean(facts, "draft_ms", drafted=True), _mean(facts, "verify_ms")
    said_draft, said_verify = _mean(facts, "predicted_draft_ms", drafted=True), _mean(facts, "predicted_verify_ms")
    plain = _mean(facts, "predicted_plain_ms")
    select = sum(one["select_ms"] for one in facts) / rounds
    omega = _mean(facts, "omega", drafted=True) + sum(one["plain_rounds"] for one in facts) / rounds
    predicted = said_draft + said_verify + select
    return (
        f"{task}, {arm}: a round took {draft + verify + select:.1f} ms (draft {draft:.1f}, verification {verify:.1f}, "
        f"choosing {select:.1f}), predicted {predicted:.1f} ({said_draft:.1f}, {said_verify:.1f}), and made "
        f"{omega:.2f} tokens a row; a plain step would take {plain:.1f}: {omega * plain / predicted:.2f}x predicted"
    )


def _mean(facts: Sequence[dict[str, Any]], name: str, drafted: bool = False) -> float:
    """Over all rounds, of a fact that is a mean over all of them, or over those in which something was drafted."""
    weights = [one["rounds"] - (one["plain_rounds"] if drafted else 0) for one in facts]
    total = sum(one.get(name, 0.0) * weight for one, weight in zip(facts, weights, strict=True))
    return total / sum(one["rounds"] for one in facts)
