"""What a strategy finds out about its models before the first prompt, on texts that no task holds.

How often the draft model's first choice is the target's, on what the target answers to a few questions; and what
drafting takes beside the forwards that the cost curves know: for small models that is a good part of a token's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..models.base import CachedModel, Ids
from ..models.remote import RemoteModel, timed
from .base import Drafter, Request, Row
from .cascade_schedule import ALPHA
from .sampling import argmax

# Observations that what is assumed of any pair weighs. Texts differ by more than chance (0.57 to 0.95 by task),
# and early words of an answer repeat its question: four texts tell less than their 48 tokens would.
ASSUMED = 36.0
TEXTS, TOKENS = 4, 12  # that are answered, and how far
_PACE = 2  # tokens that become final per round of the rounds that are timed
_LIMIT = 4  # draft tokens of such a round
_ROOM = 4096  # tokens that such a row may still get: reading its beginning pays
_REPEATS = 3


class Answer(NamedTuple):
    """A question and what the target says to it, `ids[asked:]`."""

    ids: np.ndarray
    asked: int


def answers(target: CachedModel, texts: Sequence[Ids], context_length: int) -> list[Answer]:
    """What the target says to the first of the texts, greedily. Its cache is empty afterwards.

    Args:
        context_length: of the shorter context of the two models; a text that is too long for it loses its beginning.
    """
    found = []
    room = max(1, context_length - TOKENS)
    for text in texts[:TEXTS]:
        ids = np.asarray(text, dtype=np.int64)[-room:]
        asked = len(ids)
        target.reset()
        while len(ids) < min(asked + TOKENS, context_length):
            ids = np.append(ids, argmax(target.advance([ids]))[0])
        found.append(Answer(ids, asked))
    target.reset()
    return found


def agreement(draft: CachedModel, given: Sequence[Answer]) -> tuple[int, int]:
    """(how many of the target's tokens are the draft's first choice, of how many). Its cache is empty afterwards."""
    agreed = seen = 0
    for ids, asked in given:
        if len(ids) > asked:
            draft.reset()
            theirs = argmax(draft.advance([ids[:-1]], len(ids) - asked))
            agreed += sum(one == two for one, two in zip(theirs, ids[asked:].tolist(), strict=True))
            seen += len(ids) - asked
    draft.reset()
    return agreed, seen


def expected_share(agreed: int, seen: int) -> float:
    """Share of a draft model's tokens that is right, of any text: what was seen, and ALPHA in the weight of ASSUMED."""
    return (ASSUMED * ALPHA + agreed) / (ASSUMED + seen)


def extra_ms(drafter: Drafter, models: Sequence[CachedModel], answer: Answer) -> float:
    """Milliseconds per forward of the draft models that a drafter takes beside it: choosing, judging, deciding.

    The median over rounds along an answer. 0 where no model was asked, and for models in a worker, where that work
    happens. The caches are empty afterwards.
    """
    if any(isinstance(model, RemoteModel) for model in models):
        return 0.0
    row = Row(0, Request(0, answer.ids[: answer.asked + 1].tolist(), _ROOM))
    drafter.begin(row)
    found = []
    try:
        known = [around_a_forward_ns(model, answer.ids[: answer.asked + 1]) for model in models]
        for at in range(answer.asked + 1, len(answer.ids), _PACE):
            for model in models:
                model.trace = []
            _, took_ns = timed(drafter.propose, [row], [_LIMIT])
            traces = [model.trace or [] for model in models]
            forwards = sum(map(len, traces))
            took_ns -= sum(forward.end_ns - forward.start_ns for trace in traces for forward in trace)
            took_ns -= sum(len(trace) * around for trace, around in zip(traces, known, strict=True))
            if forwards and at > answer.asked + 1:  # the first round fills tables
                found.append(took_ns / forwards / 1e6)
            row.tokens.extend(answer.ids[at : at + _PACE].tolist())
    finally:
        for model in models:
            model.trace = None
            model.reset()
    return max(0.0, float(np.median(found))) if found else 0.0


def around_a_forward_ns(model: CachedModel, ids: Ids) -> float:
    """Nanoseconds that it takes to ask for a forward and to have its result on the host, beside the forward: what
    cost curves have counted in already."""
    took = []
    for _ in range(1 + _REPEATS):
        model.trace = []
        _, all_ns = timed(lambda: model.advance([ids]).argmax(-1).tolist())
        (forward,) = model.trace
        took.append(all_ns - (forward.end_ns - forward.start_ns))
    return float(np.median(took[1:]))
