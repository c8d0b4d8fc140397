"""Plain decoding: one token per forward of the target. The baseline that every speed-up is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .base import Batch, Draft, Request, Step, Strategy
from .sampling import Sampling
from .verify import Verifier


@dataclass(frozen=True)
class Options:
    pass


class Autoregressive(Strategy):
    name = "autoregressive"
    summary = "plain decoding, one token per forward; the baseline"
    roles = ("target",)
    continuous = True
    Options = Options

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        verifier = Verifier(sampling)
        batch, nothing = Batch(requests, self.target), Draft(())
        while rows := batch.next():
            logits = self.target.advance([row.tokens.view() for row in rows], 1, [row.index for row in rows])
            for row, verdict in zip(rows, verifier.verify(rows, [nothing] * len(rows), logits), strict=True):
                row.tokens.extend(verdict.tokens)
                yield Step(row.index, verdict.tokens)
