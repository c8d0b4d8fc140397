"""From text that came in pieces to token ids, once the clock has stopped: what `measure` does for a server's answers.

An answer is counted as everybody's is: by the ids of all that it emitted, trimmed at end of text, stop string and
limit. They are those of its text tokenised again. How many of them each piece brought is worked out from the text of
the pieces; their number is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..strategies.base import Strategy

if TYPE_CHECKING:
    from .measure import Ending, Outcome


def settle(outcome: Outcome, strategy: Strategy, ending: Ending, limit: int) -> Outcome:
    """The outcome with ids, finish and what each step kept, from its `texts`; a failed one where there is no token."""
    ids = strategy.read("".join(outcome.texts), outcome.finish)
    if not ids:
        return type(outcome)(error=f"{strategy.target.name}: the answer holds no text, so there is no token to count")
    if end := ending.find(ids, len(ids), limit):
        del ids[end[0] :]
        outcome.finish = end[1]
    counts = [len(strategy.read(text, None)) for text in outcome.texts]
    outcome.token_ids = ids
    for step, kept in zip(outcome.steps, shares(counts, len(ids) - (outcome.finish == "eos")), strict=True):
        step[1] = kept
    outcome.steps[-1][1] += len(ids) - sum(step[1] for step in outcome.steps)
    return outcome


def shares(counts: Sequence[int], total: int) -> list[int]:
    """`total` tokens over pieces that hold about as many as `counts` says, in whole numbers that add up to it. A first
    piece without text has one all the same: the token is there, its text comes later."""
    seen, given, found, whole = 0, 0, [], sum(counts)
    for at, count in enumerate(counts):
        seen += count
        upto = round(seen * total / whole) if whole else 0
        upto = min(total, max(upto, given, at == 0))
        found.append(upto - given)
        given = upto
    return found
