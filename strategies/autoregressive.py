"""Plain decoding: one token per forward of the target. The baseline that every speed-up is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .base import Draft, Request, Row, Step, Strategy
from .sampling import Sampling
from .verify import Verifier


@dataclass(frozen=True)
class Options:
    pass


class Autoregressive(Strategy):
    name = "autoregressive"
    summary = "plain decoding, one token per forward; the baseline"
    roles = ("target",)
    Options = Options

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        verifier = Verifier(sampling)
        rows = [Row(index, request) for index, request in enumerate(requests)]
        nothing = Draft(())
        while active := [row for row in rows if not row.request.done]:
            logits = self.target.advance([row.tokens.view() for row in active], 1, [row.index for row in active])
            for row, verdict in zip(active, verifier.verify(active, [nothing] * len(active), logits), strict=True):
                row.tokens.extend(verdict.tokens)
                yield Step(row.index, verdict.tokens)
