"""Vanilla speculative decoding: a draft model proposes, the target verifies the block in one forward.

Sources: Leviathan, Kalman, Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318). Beyond them: rows of a
batch accept different lengths, a draft never reaches past the token limit or a context limit, and the draft's prefill
runs after the first token is out, so that it does not delay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError
from ..models.base import CachedModel
from .base import Batch, Draft, Drafter, Request, Row, Step, Strategy
from .remote import drafter_for
from .sampling import Sampling
from .verify import Verifier


class ModelDrafter(Drafter):
    """A draft model, proposing token by token. What the target has read it takes over, where it can."""

    def __init__(self, model: CachedModel, verifier: Verifier) -> None:
        self.model = model
        self.verifier = verifier

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        # To draft n tokens the model has to read the row and n - 1 of them: past its context it drafts no more.
        limits = [
            min(limit, self.model.context_length - len(row.tokens) + 1) for row, limit in zip(rows, limits, strict=True)
        ]
        for row, limit in zip(rows, limits, strict=True):
            if limit > 0:
                self.model.follow(row.index, row.tokens.view())
        tokens: list[list[int]] = [[] for _ in rows]
        probs: list[list[torch.Tensor]] = [[] for _ in rows]
        for done in range(max(limits, default=0)):
            live = [i for i, limit in enumerate(limits) if limit > done]
            logits = self.model.advance(
                [rows[i].tokens.view(tokens[i]) for i in live], 1, [rows[i].index for i in live]
            )
            chosen = self.verifier.choose_drafts(logits, [rows[i] for i in live], [tokens[i] for i in live])
            for i, (token, q) in zip(live, chosen, strict=True):
                tokens[i].append(token)
                if q is not None:
                    probs[i].append(q)
        return [Draft(t, torch.stack(q) if q else None) for t, q in zip(tokens, probs, strict=True)]

    def begin(self, row: Row) -> None:
        self.model.forget(row.index)


def model_drafter(models: Mapping[str, CachedModel], sampling: Sampling, options: Any) -> ModelDrafter:
    """Made where the draft model is, see `remote.drafter_for`."""
    return ModelDrafter(models["draft"], Verifier(sampling))


def draft_and_verify(
    target: CachedModel, drafter: Drafter, verifier: Verifier, requests: Sequence[Request], draft_length: int
) -> Iterator[Step]:
    """The loop of every strategy that drafts, then verifies: prefill, then rounds until all requests are done."""
    batch = Batch(requests, target, drafter)
    while rows := batch.next():
        if rows[0].new_tokens:
            drafts = drafter.propose(rows, [min(draft_length, row.room(target)) for row in rows])
        else:
            drafts = [Draft(())] * len(rows)  # nothing is drafted before the first token is out
        logits = target.advance(
            [row.tokens.view(draft.tokens) for row, draft in zip(rows, drafts, strict=True)],
            [len(draft.tokens) + 1 for draft in drafts],
            [row.index for row in rows],
        )
        for row, draft, verdict in zip(rows, drafts, verifier.verify(rows, drafts, logits), strict=True):
            row.tokens.extend(verdict.tokens)
            rejected = tuple(draft.tokens[verdict.accepted :])
            yield Step(row.index, verdict.tokens, len(draft.tokens), verdict.accepted, draft.levels, rejected=rejected)


@dataclass(frozen=True)
class Options:
    """draft_length: tokens proposed per round."""

    draft_length: int = 4

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise UsageError(f"speculative.draft-length={self.draft_length}: at least 1 token has to be drafted")


class Speculative(Strategy):
    name = "speculative"
    summary = "a draft model proposes a few tokens, the target verifies them in one forward"
    source = "Leviathan et al. 2023; Chen et al. 2023"
    roles = ("target", "draft")
    continuous = True
    Options = Options

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        verifier = Verifier(sampling)
        drafter = drafter_for(self.models, ("draft",), model_drafter, sampling, self.options)
        yield from draft_and_verify(self.target, drafter, verifier, requests, self.options.draft_length)
