"""What the rounds of `sparse-kv` took beside what its cost model says, in words: pure functions of facts in records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .records import Sample


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
    terms = {
        "draft": _pair(facts, "draft_ms", drafted=True),
        "verification": _pair(facts, "verify_ms"),
        "choosing": tuple(
            sum(one.get(name, 0.0) for one in facts) / rounds for name in ("select_ms", "predicted_select_ms")
        ),
        "following": _pair(facts, "follow_ms", drafted=True),
    }
    took, predicted = (sum(term[at] for term in terms.values()) for at in range(2))
    parts = ", ".join(f"{name} {term[0]:.1f} ({term[1]:.1f})" for name, term in terms.items())
    plain = _mean(facts, "predicted_plain_ms")
    omega = _mean(facts, "omega", drafted=True) + sum(one["plain_rounds"] for one in facts) / rounds
    constant = _mean(facts, "constant_ms")
    return (
        f"{task}, {arm}: a round took {took:.1f} ms (predicted {predicted:.1f}): {parts}; it made {omega:.2f} tokens a "
        f"row, and a plain step would take {plain:.1f}: {omega * plain / predicted:.2f}x predicted. Every forward "
        f"takes {constant:.1f} before it reads any of the cache"
    )


def _pair(facts: Sequence[dict[str, Any]], name: str, drafted: bool = False) -> tuple[float, float]:
    """Measured and predicted."""
    return _mean(facts, name, drafted), _mean(facts, f"predicted_{name}", drafted)


def _mean(facts: Sequence[dict[str, Any]], name: str, drafted: bool = False) -> float:
    """Over all rounds, of a fact that is a mean over all of them, or over those in which something was drafted."""
    weights = [one["rounds"] - (one["plain_rounds"] if drafted else 0) for one in facts]
    total = sum(one.get(name, 0.0) * weight for one, weight in zip(facts, weights, strict=True))
    return total / sum(one["rounds"] for one in facts)
