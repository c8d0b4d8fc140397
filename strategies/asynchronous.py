"""Asynchronous speculative decoding: the draft writes on, the target verifies what is there, neither waits for turns.

After AMUSD (McDanel 2024, arXiv 2410.17375). As published (`faithful`), the draft begins after the target's prefill,
runs ahead without bound, and the target waits until at least two draft tokens follow the verified text, which after a
rejection includes waiting for the draft to have rolled back. Not reproduced are defects of the published code: a
rollback that caches one token twice, a second prefill of the draft, acknowledgements that get out of step.

By default the lead is bounded, the draft's prefill runs beside the target's, one token is enough, and a controller
decides by measured costs and running acceptance when waiting for more pays, and when overlap does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from .ahead import Settings
from .controller import Controller, Way
from .overlapped import MOST, Overlapped, not_default

UNBOUNDED = 1 << 20


@dataclass(frozen=True)
class Options:
    """lead: tokens that the draft may be ahead of the verified text.
    min_ready: draft tokens to wait for before a verification; 0 takes a plain step where none is ready; auto goes by
        costs and acceptance, or is 1 where they are not known.
    max_verify: draft tokens per verification at most; auto goes by the costs.
    controller: whether overlap may be given up for turns or plain steps where these are expected to be faster.
    faithful: AMUSD's protocol; the other options must be left alone.
    """

    lead: int = 16
    min_ready: int | Literal["auto"] = "auto"
    max_verify: int | Literal["auto"] = "auto"
    controller: bool = True
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.lead < 1:
            raise UsageError(f"async.lead={self.lead}: the draft has to be at least 1 token ahead")
        if self.min_ready != "auto" and not 0 <= self.min_ready <= self.lead:
            raise UsageError(f"async.min-ready={self.min_ready}: from 0 to the lead of {self.lead}")
        if self.max_verify != "auto" and self.max_verify < 1:
            raise UsageError(f"async.max-verify={self.max_verify}: at least 1 token has to be verified")
        if self.faithful and not_default(self, "faithful"):
            raise UsageError("async.faithful=true is a protocol without options; leave the others out")


class Asynchronous(Overlapped):
    name = "async"
    summary = "draft and target run at the same time on two devices; the target verifies whatever is ready"
    source = "AMUSD: McDanel 2024 (arXiv 2410.17375)"
    Options = Options

    def settings(self) -> Settings:
        if self.options.faithful:
            return Settings(lead=UNBOUNDED, after_prefill=True)
        return Settings(lead=self.options.lead)

    def prepare(self, rows: int, tokens: int) -> None:
        if not self.options.faithful:
            super().prepare(rows, tokens)

    def controller(self) -> Controller:
        options = self.options
        if options.faithful:
            return Controller(Way("overlap", 2, UNBOUNDED, UNBOUNDED), None)
        need = None if options.min_ready == "auto" else options.min_ready
        most = None if options.max_verify == "auto" else options.max_verify
        start = Way("overlap", 1, MOST, options.lead)
        return Controller(start, self.table, need, most, on=options.controller)
