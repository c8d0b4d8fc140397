"""The target's side of the strategies on two devices: verify what the draft has posted, and tell it at once.

The draft's program (`strategies.ahead`) runs in a worker, the target in the main process, beside the receiver. The
first token is out after the target's own prefill; the draft's prefill runs beside it. After every verification the
draft is told what is final before anything else is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from ..errors import UsageError, WorkerError
from ..hardware.overlap import Costs
from ..hardware.workers import Message, Port
from ..models.remote import host_of
from . import ahead
from .ahead import Report, Settings, draft_ahead
from .base import Draft, Request, Row, Step, Strategy
from .controller import Controller, Way, ways
from .ledger import Ledger
from .sampling import Sampling
from .side_by_side import measure_costs
from .verify import Verifier

MOST = 12  # draft tokens per verification, where no option says otherwise


class Overlapped(Strategy):
    """What `async` and `duo` share. A subclass says how the draft goes ahead, and with which controller."""

    roles = ("target", "draft")
    verifications = ("coupled",)
    max_batch = 1
    apart = True
    tells_rounds: ClassVar[bool] = False  # whether the draft is told what is being verified

    @classmethod
    def check(cls, sampling: Sampling, batch: int) -> None:
        if not sampling.greedy and sampling.verify not in cls.verifications:
            raise UsageError(
                f"{cls.name}: no draft probabilities travel between devices, so --verify {sampling.verify} is only "
                "for temperature 0; use --verify coupled"
            )
        super().check(sampling, batch)

    def __init__(self, models: Any, options: Any) -> None:
        super().__init__(models, options)
        self.costs: Costs | None = None
        self.table: dict[tuple[int, int], dict[str, Way]] | None = None

    def settings(self) -> Settings:
        """How the draft goes ahead, as the options and the measured costs have it."""
        raise NotImplementedError

    def controller(self) -> Controller:
        """A fresh one, for a prompt."""
        raise NotImplementedError

    def prepare(self, rows: int, tokens: int) -> None:
        draft = self.models["draft"]
        branches = min(self.settings().branches, draft.max_rows)
        draft.reserve(branches, tokens)
        self.costs = measure_costs(self.target, draft, tokens, branches)
        self.table = ways(self.costs, MOST, self.settings().lead, (1 + branches) / 2)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        if len(requests) != 1:
            raise UsageError(f"{self.name}: runs one row at a time, not {len(requests)}")
        yield from _Verifying(self, requests[0], sampling).run()


class _Verifying:
    """The state of one request on the target's side."""

    def __init__(self, strategy: Overlapped, request: Request, sampling: Sampling) -> None:
        self.target, self.draft = strategy.target, strategy.models["draft"]
        self.request, self.sampling, self.facts = request, sampling, strategy.facts
        self.settings, self.controller = strategy.settings(), strategy.controller()
        self.after_round = getattr(strategy.options, "first_token", "") == "after_round"
        self.tells_rounds = strategy.tells_rounds
        self.row = Row(0, request)
        self.ledger = Ledger(self.row.tokens)
        self.rounds = self.sent = self.received = self.busy_ns = self.rejected = self.hits = self.bonus_hits = 0
        self.idle: tuple[int, int] | None = None  # (rounds, verified length) that the draft last ran out of work at
        self.report = Report()
        self.port: Port | None = None

    def run(self) -> Iterator[Step]:
        host = host_of(self.draft)
        limit = min(len(self.request.ids) + self.request.max_new_tokens - 1, self.target.context_length)
        args = self.sampling, self.request, limit, self.settings
        self.port = host.start(draft_ahead, *args)
        in_step = True
        try:
            yield from self._steps()
        except WorkerError:  # the draft's side has ended and said why
            in_step = False
            raise
        finally:
            if in_step:
                self._end()
                host.join()

    def _steps(self) -> Iterator[Step]:
        assert self.port is not None
        verifier, row, way = Verifier(self.sampling), self.row, self.controller.way
        self._pace(way)
        draft, told = Draft(()), 0  # nothing is waited for before the first token is out
        while not self.request.done:
            logits = self.target.advance([row.tokens.view(draft.tokens)], len(draft.tokens) + 1, [0])
            (verdict,) = verifier.verify([row], [draft], logits)
            start = len(row.tokens)
            row.tokens.extend(verdict.tokens)
            self.busy_ns += self.target.last_forward_ns
            self._listen()  # before the news goes out: what was drafted after it is about a longer text
            self._send(ahead.VERIFIED, base=start, ids=verdict.tokens)
            hit = self.ledger.verified(verdict.tokens, len(draft.tokens))
            drafted, accepted = len(draft.tokens), verdict.accepted
            if self.after_round and row.new_tokens == 1:
                self._wait(1)
            rejected = tuple(draft.tokens[accepted:])
            wasted, told = self.ledger.wasted - told, self.ledger.wasted
            yield Step(0, verdict.tokens, drafted, accepted, (), wasted, rejected)
            if self.request.done:
                return
            if not self.settings.interrupt:  # only now is known what it has prepared
                self._wait(None)
                hit = bool(self.ledger.best())
            self._count(drafted, accepted, hit)
            if self.controller.observe(drafted, accepted, len(verdict.tokens), hit):
                self._pace(self.controller.way)
            draft = self._next()

    def _next(self) -> Draft:
        """The draft to verify now; empty for a plain step."""
        way = self.controller.way
        room = self.row.room(self.target)
        if room and self.settings.interrupt:
            reads_still = not self.ledger.posted and not self.settings.after_prefill
            self._wait(0 if reads_still else min(way.need, room))
        tokens = self.ledger.best()[: min(way.most, room)]
        if self.tells_rounds:
            self.rounds += 1
            self._send(ahead.ROUND, epoch=self.rounds, base=len(self.row.tokens) + len(tokens))
        return Draft(tokens)

    def _wait(self, need: int | None) -> None:
        """Until so many draft tokens are there (None: until the draft has ended its round), or none will come."""
        assert self.port is not None
        self._listen()
        while not self._out_of_work(need is None) and (need is None or len(self.ledger.best()) < need):
            self._take(self.port.wait())

    def _out_of_work(self, round_only: bool) -> bool:
        if self.idle is None:
            return False
        return self.idle[0] == self.rounds and (round_only or self.idle[1] == len(self.row.tokens))

    def _listen(self) -> None:
        assert self.port is not None
        while (message := self.port.receive()) is not None:
            self._take(message)

    def _take(self, message: Message | None) -> None:
        if message is None:
            return
        self.received += 1
        if message.kind == ahead.DRAFT:
            self.ledger.draft(message.epoch, message.base, message.ids)
        elif message.kind == ahead.FORK:
            self.ledger.fork(message.epoch, message.base, message.ids[0], message.ids[1:])
        elif message.kind == ahead.IDLE:
            self.idle = message.epoch, message.base
        elif message.kind == ahead.REPORT:
            self.report = Report(*message.ids)

    def _send(self, kind: int, epoch: int = 0, base: int = 0, ids: Sequence[int] = ()) -> None:
        assert self.port is not None
        self.sent += 1
        self.port.send(kind, epoch, base, ids)

    def _pace(self, way: Way) -> None:
        self.idle = None
        self._send(ahead.PACE, epoch=self.settings.branches if way.mode == "overlap" else 1, base=way.lead)

    def _count(self, drafted: int, accepted: int, hit: bool) -> None:
        if accepted < drafted:
            self.rejected += 1
            self.hits += hit
        elif drafted:
            self.bonus_hits += hit

    def _end(self) -> None:
        """Stops the draft, which first finishes the forward that it is in."""
        assert self.port is not None
        self._send(ahead.STOP)
        while not self.report.lines:
            self._take(self.port.wait())
        self.ledger.close()
        ledger, report = self.ledger, self.report
        self.facts |= {
            "target_busy_ns": self.busy_ns,
            "draft_busy_ns": report.busy_ns,
            "draft_forwards": report.forwards,
            "draft_token_rows": report.token_rows,
            "drafts_posted": ledger.posted,
            "drafts_looked_at": ledger.looked,
            "drafts_confirmed": ledger.confirmed,
            "drafts_wasted": ledger.wasted,
            "lines": report.lines,
            "branches": report.forks,
            "rejections": self.rejected,
            "rejections_anticipated": self.hits,
            "bonus_tokens_hit": self.bonus_hits,
            "messages_sent": self.sent,
            "messages_received": self.received,
            "alpha": round(self.controller.alpha, 4),
            "mode": self.controller.way.mode,
            "mode_changes": self.controller.changes,
            **{f"steps_{mode}": count for mode, count in sorted(self.controller.steps.items())},
        }


def not_default(options: Any, *but: str) -> list[str]:
    """Names of the options that were changed, but for some."""
    return [f.name for f in fields(options) if f.name not in but and getattr(options, f.name) != f.default]
