"""What a strategy finds out about its models before the first prompt, on texts that no task holds.

How often the draft model's first choice is the target's, on a few questions and the target's answers; and what
drafting takes beside the forwards that the cost curves know: for small models that is a good part of a token's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..models.base import CachedModel, Ids
from ..models.remote import RemoteModel, timed
from .base import Drafter, Request, Row
from .cascade_levels import confidence_classes
from .cascade_schedule import ALPHA, SURE, Assumed
from .sampling import argmax

ASSUMED = 8.0  # observations that what is assumed of any pair weighs
MARGIN = 8  # tokens at both ends of a question that are left out: a template wrote them
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


def assumed_of(target: CachedModel, draft: CachedModel, given: Sequence[Answer]) -> Assumed:
    """How often the draft's first choice is the target's: on the questions, which neither wrote, and on the answers.

    Answers of the target are easier to guess than most of what it will write, questions harder, so both kinds of text
    count the same, however long they are. A draft that follows its target in decoding is judged here by what it makes
    of the text alone, which is somewhat worse; a row's own tokens soon outweigh that. A model that is surer is taken to
    be right at least as often. The caches are empty afterwards.
    """
    kinds = {False: [0, 0], True: [0, 0]}  # right, seen; of answers?
    classes = [[0, 0] for _ in SURE]
    for ids, asked in given:
        count = len(ids) - 1
        if count < 1:
            continue
        target.reset()
        draft.reset()
        own, logits = argmax(target.advance([ids[:-1]], count)), draft.advance([ids[:-1]], count)
        theirs = argmax(logits)
        for at, sign in enumerate(confidence_classes(logits, theirs)):
            answered = at + 1 >= asked
            if answered or MARGIN <= at < asked - 1 - MARGIN:
                for tally in (kinds[answered], classes[sign]):
                    tally[0] += own[at] == theirs[at]
                    tally[1] += 1
    target.reset()
    draft.reset()
    shares = [right / seen for right, seen in kinds.values() if seen]
    weight = len(shares) * kinds[True][1]
    alpha = (ASSUMED * ALPHA + sum(shares) * kinds[True][1]) / (ASSUMED + weight)
    sure = [(ASSUMED * usual + right) / (ASSUMED + seen) for usual, (right, seen) in zip(SURE, classes, strict=True)]
    return Assumed(alpha, tuple(accumulate(sure, max)))


def practised(target: CachedModel, draft: CachedModel, texts: Sequence[Ids]) -> tuple[list[Answer], Assumed]:
    """Answers to the texts and what they say of the draft; kept with it, as cost curves are with their models."""
    known = vars(draft).setdefault("known_practice", WeakKeyDictionary()).setdefault(target, {})
    key = tuple(map(tuple, texts[:TEXTS]))
    if key not in known:
        given = answers(target, texts, min(target.context_length, draft.context_length))
        known[key] = given, assumed_of(target, draft, given)
    return known[key]


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
