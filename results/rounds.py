"""What the rounds of `sparse-kv` took beside what its cost model says, in words: pure functions of facts in records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .records import Sample

_WORDS = {"draft": "draft", "verify": "verification", "select": "choosing", "follow": "following"}


def told(task: str, arm: str, samples: Sequence[Sample]) -> str | None:
    """One sentence about an arm on a task; None for an arm that was not asked to explain itself.

    Times are means per round, of all rows together; plain rounds count too. What choosing takes is spread over all of
    them. Each term stands beside what was predicted of it.

    Args:
        samples: finished ones.
    """
    facts = [sample.facts for sample in samples if sample.facts and sample.facts.get("explained")]
    rounds = sum(one["rounds"] for one in facts)
    if not rounds:
        return None
    measured, said = terms(facts), terms(facts, "predicted_")
    took, predicted = sum(measured.values()), sum(said.values())
    parts = ", ".join(f"{word} {measured[name]:.1f} ({said[name]:.1f})" for name, word in _WORDS.items())
    plain = mean(facts, "predicted_plain_ms")
    omega = mean(facts, "omega", drafted=True) + sum(one["plain_rounds"] for one in facts) / rounds
    constant = mean(facts, "constant_ms")
    return (
        f"{task}, {arm}: a round took {took:.1f} ms (predicted {predicted:.1f}): {parts}; it made {omega:.2f} tokens a "
        f"row, and a plain step would take {plain:.1f}: {omega * plain / predicted:.2f}x predicted. Every forward "
        f"takes {constant:.1f} before it reads any of the cache"
    )


def terms(facts: Sequence[dict[str, Any]], kind: str = "") -> dict[str, float]:
    """Milliseconds of a round by its parts, on average; what choosing takes is spread over all rounds.

    Args:
        facts: of calls that had rounds.
        kind: `predicted_` for what the cost model says of them.
    """
    return {
        "draft": mean(facts, f"{kind}draft_ms", drafted=True),
        "verify": mean(facts, f"{kind}verify_ms"),
        "select": sum(one.get(f"{kind}select_ms", 0.0) for one in facts) / sum(one["rounds"] for one in facts),
        "follow": mean(facts, f"{kind}follow_ms", drafted=True),
    }


def mean(facts: Sequence[dict[str, Any]], name: str, drafted: bool = False) -> float:
    """Over all rounds, of a fact that is a mean over all of them, or over those in which something was drafted."""
    weights = [one["rounds"] - (one["plain_rounds"] if drafted else 0) for one in facts]
    total = sum(one.get(name, 0.0) * weight for one, weight in zip(facts, weights, strict=True))
    return total / sum(one["rounds"] for one in facts)
