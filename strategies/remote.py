"""Drafters that run in a worker, next to their models, so that a draft may sit on another device than the target.

What goes there are the tokens that became final since the last round, what comes back are draft tokens: a few words
each way, however long the context. Both ends work in turns here, as the strategies that use it do; strategies whose
ends work at the same time have a protocol of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import UsageError
from ..hardware.workers import Port
from ..models.base import CachedModel
from ..models.remote import ModelWorker, RemoteModel, timed
from .base import Draft, Drafter, Level, Request, Row
from .sampling import Sampling

Factory = Callable[[Mapping[str, CachedModel], Sampling, Any], Drafter]
"""Makes a drafter from its models by role; a function of a module, so that a worker can find it."""

_PROPOSE, _DRAFTS = 1, 2
_KEY_BITS = 32  # a prompt's key is an unsigned number of 64 bits, a word of a message a signed one


def drafter_for(
    models: Mapping[str, CachedModel], roles: Sequence[str], factory: Factory, sampling: Sampling, options: Any
) -> Drafter:
    """The drafter that `factory` makes of the models of these roles: here, or in the worker that they live in.

    To be made anew for every call of `generate`; there is nothing to close.

    Raises:
        UsageError: the models are on different devices, or the rejection rule needs what does not travel.
    """
    placed = {role: models[role] for role in roles}
    workers = {id(model.worker) if isinstance(model, RemoteModel) else None for model in placed.values()}
    if workers == {None}:
        return factory(placed, sampling, options)
    if len(workers) > 1:
        where = ", ".join(f"{role} on {model.device}" for role, model in placed.items())
        raise UsageError(f"the drafts work together and have to be on one device ({where}); see --place")
    check_remote(sampling)
    return RemoteDrafter(placed, factory, sampling, options)


def check_remote(sampling: Sampling) -> None:
    """Raises UsageError where a draft on another device than the target's would have to send its probabilities."""
    if not sampling.greedy and sampling.verify == "rejection":
        raise UsageError(
            "--verify rejection: the draft's probabilities do not travel between devices; place the draft with the "
            "target, or use --verify coupled, which needs none"
        )


class RemoteDrafter(Drafter):
    """The near end. A round's time in the worker is left in `last_forward_ns` of each of its models."""

    def __init__(self, models: Mapping[str, CachedModel], factory: Factory, sampling: Sampling, options: Any) -> None:
        self.models: list[Any] = list(models.values())
        self._worker: ModelWorker = self.models[0].worker
        keys = {role: model.key for role, model in models.items() if isinstance(model, RemoteModel)}
        self._make = (keys, factory, sampling, options)
        self._port: Port | None = None
        self._sent: dict[int, int] = {}  # tokens of each row that the far end knows

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        if self._port is None:  # the caches were emptied before this call, which would have ended it
            self._port = self._worker.start(_draft, *self._make)
        self._port.send(_PROPOSE, ids=self._question(rows, limits))
        answer = self._port.wait()
        assert answer is not None
        for model in self.models:
            model.last_forward_ns = answer.base
        words = iter(answer.ids)
        return [_read_draft(words) for _ in rows]

    def begin(self, row: Row) -> None:
        self._sent.pop(row.index, None)  # with the next question the far end hears of it

    def reset(self) -> None:
        self._port = None
        self._sent = {}

    def _question(self, rows: Sequence[Row], limits: Sequence[int]) -> list[int]:
        """Per row: index, limit, key and token limit if it is new, and the tokens that are final since last time."""
        words = [len(rows)]
        for row, limit in zip(rows, limits, strict=True):
            sent = self._sent.get(row.index, 0)
            fresh = row.tokens.view()[sent:].tolist()
            words += [row.index, limit, row.prompt_length if not sent else 0]
            if not sent:
                key = row.request.key
                words += [key >> _KEY_BITS, key & ((1 << _KEY_BITS) - 1), row.request.max_new_tokens]
            words += [len(fresh), *fresh]
            self._sent[row.index] = sent + len(fresh)
        return words


def _draft(
    state: Mapping[str, CachedModel],
    port: Port,
    keys: Mapping[str, str],
    factory: Factory,
    sampling: Sampling,
    options: Any,
) -> None:
    """The far end: makes the drafter and answers until it is hung up."""
    drafter = factory({role: state[key] for role, key in keys.items()}, sampling, options)
    known: dict[int, Row] = {}
    while True:
        question = port.wait()
        assert question is not None
        rows, limits = _read_question(iter(question.ids), known, drafter.begin)
        drafts, took_ns = timed(drafter.propose, rows, limits)
        port.send(_DRAFTS, base=took_ns, ids=[word for draft in drafts for word in _draft_words(draft)])


def _read_question(words: Any, known: dict[int, Row], begin: Callable[[Row], None]) -> tuple[list[Row], list[int]]:
    rows, limits = [], []
    for _ in range(next(words)):
        index, limit, prompt_length = next(words), next(words), next(words)
        if prompt_length:
            key = (next(words) << _KEY_BITS) | next(words)
            max_new_tokens = next(words)
        fresh = [next(words) for _ in range(next(words))]
        if prompt_length:
            known[index] = Row(index, Request(key, fresh[:prompt_length], max_new_tokens))
            begin(known[index])
            fresh = fresh[prompt_length:]
        known[index].tokens.extend(fresh)
        rows.append(known[index])
        limits.append(limit)
    return rows, limits


def _draft_words(draft: Draft) -> list[int]:
    levels = [number for level in draft.levels for number in level]
    return [len(draft.tokens), *draft.tokens, len(draft.levels), *levels]


def _read_draft(words: Any) -> Draft:
    tokens = [next(words) for _ in range(next(words))]
    levels = tuple(Level(*(next(words) for _ in Level._fields)) for _ in range(next(words)))
    return Draft(tokens, levels=levels)
