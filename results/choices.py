"""What `auto` chose in a run, and what choosing cost, in words: pure functions of the facts in its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from . import metrics
from .records import Sample
from .statistics import percent


def told(task: str, arm: str, samples: Sequence[Sample]) -> str | None:
    """One sentence about an arm on a task; None for an arm that chooses nothing.

    Args:
        samples: finished ones.
    """
    facts = [sample.facts for sample in samples if sample.facts and "choice" in sample.facts]
    if not facts:
        return None
    chosen = Counter(str(one["choice"]) for one in facts).most_common()
    parts = [f"chose {', '.join(f'{name} in {count}' for name, count in chosen)} of {len(facts)} samples"]
    switches = sum(one.get("switches", 0) for one in facts)
    if switches:
        parts.append(f"changed its way {switches} time{'s' if switches > 1 else ''} within them")
    if prepared := max(one.get("calibration_ms", 0) for one in facts):
        parts.append(f"calibrated for {prepared / 1000:.1f} s before the first prompt, which is in no speed")
    lost = sum(one.get("trial_lost_ms", 0) for one in facts) * 1e6
    decode_ns = metrics.total_decode_ns(samples)
    if decode_ns:
        cost = f"cost {percent(lost / decode_ns)} of its decode time" if lost > 0 else "were no slower"
        parts.append(f"its first rounds on a prompt {cost} against plain decoding, by the cost curves")
    return f"{task}, {arm}: {'; '.join(parts)}"
