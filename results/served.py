"""What a server's answers can and cannot tell: its rows of a table, and what its own counts say beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import metrics
from .records import Sample
from .statistics import Caution, percent

if TYPE_CHECKING:
    from .summary import Row

HARDWARE = "on hardware of its own, which nobody recorded"
_DRAFTING = ("drafted", "accepted", "rounds")
_MOST_MISSING = 0.02  # of the tokens that a server counts


def is_served(arm: Mapping[str, Any]) -> bool:
    return bool(arm.get("sends_text"))


def only_served(arms: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether all arms of a run are servers, so that nothing was computed here."""
    return bool(arms) and all(map(is_served, arms.values()))


def drafting(samples: Sequence[Sample]) -> dict[str, int]:
    """What a server says it drafted: `drafted`, `accepted` and `rounds`, as far as it tells; its counters are those of
    a whole call."""
    found: dict[str, int] = {}
    for rows in metrics.calls(samples):
        facts = [row.facts or {} for row in rows]
        told = facts[:1] if facts[0].get("of_call") else facts
        for name in _DRAFTING:
            values = [one[name] for one in told if name in one]
            if values:
                found[name] = found.get(name, 0) + sum(values)
    return found


def tell_drafting(row: Row, samples: Sequence[Sample]) -> None:
    """Puts what the server says in the place of what would be read out of its pieces, which are no steps; and of its
    memory nothing is known."""
    told = drafting(samples)
    drafted, accepted, rounds = (told.get(name) for name in _DRAFTING)
    row.acceptance_rate = metrics.ratio(accepted, drafted)
    row.accepted_per_step = metrics.ratio(accepted, rounds) if drafted else None
    row.tokens_per_step = None if row.accepted_per_step is None else 1 + row.accepted_per_step
    row.acceptance_by_position, row.conditional_acceptance_by_position = [], []
    row.peak_memory_bytes = None
    if row.sums:
        steps = {"steps": rounds or 0, "empty_steps": 0, "drafted": drafted or 0, "accepted": accepted or 0}
        row.sums = row.sums | steps


def title(name: str, arm: dict[str, Any]) -> str:
    """`endpoint: llama-2-7b at 127.0.0.1:8080, another engine; HTTP is in its times, ...`"""
    facts = (arm.get("roles") or {}).get("target") or {}
    where = f"{facts['served']} at {facts.get('host')}" if facts.get("served") else "a server"
    form = {"ids": ", prompts sent as token ids", "text": ", prompts sent as text"}.get(str(facts.get("prompts")), "")
    return f"{name}: {where}, another engine; HTTP is in its times, its tokens are those of its text{form}"


def told(task: str, arm: str, samples: Sequence[Sample]) -> str | None:
    """One sentence about a server's own counts where they are not ours; None where there is nothing to say.

    Args:
        samples: finished ones.
    """
    facts = [(sample, sample.facts) for sample in samples if sample.facts and "prompts" in sample.facts]
    parts = []
    if retried := sum("retries" in one for _, one in facts):
        times = sum(one.get("retries", 0) for _, one in facts)
        parts.append(f"{retried} of {len(facts)} requests were sent again ({times} times in all), timed from then on")
    other = [sample for sample, one in facts if one.get("prompt_tokens") not in (None, sample.prompt_tokens)]
    if other:
        sample = other[0]
        read = (sample.facts or {})["prompt_tokens"]
        parts.append(
            f"the server read other prompts in {len(other)} of {len(facts)} samples ({read} tokens for the "
            f"{sample.prompt_tokens} of {sample.prompt_id}); its tokenizer or what it puts in front is not ours"
        )
    counted = [
        (metrics.emitted(sample), one["completion_tokens"]) for sample, one in facts if "completion_tokens" in one
    ]
    ours, theirs = sum(n for n, _ in counted), sum(n for _, n in counted)
    if theirs and abs(ours - theirs) > _MOST_MISSING * theirs:
        parts.append(f"the server counts {theirs} tokens where its text is {ours}")
    cached, read = (sum(one.get(name, 0) for _, one in facts) for name in ("cached_tokens", "prompt_tokens"))
    if cached:
        of = f" of {read}" if read else ""
        share = f" ({percent(cached / read)})" if read else ""
        parts.append(f"{cached}{of} prompt tokens{share} came from what it had kept of earlier prompts")
    return f"{task}, {arm}: {'; '.join(parts)}" if parts else None


def without_stalls(cautions: Sequence[Caution]) -> list[Caution]:
    """A server that drafts sends several pieces at once and then nothing for a while: no gap of it is a stall."""
    return [caution for caution in cautions if caution.code != "stall"]
