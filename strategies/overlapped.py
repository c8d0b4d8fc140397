"""The target's side of the strategies on two devices: verify what the draft has posted, and tell it at once.

The draft's program (`strategies.ahead`) runs in a worker, the target in the main process, beside the receiver. The
first token is out after the target's own prefill; the draft's prefill runs beside it. After every verification the
draft is told what is final before anything else is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from ..errors import UsageError
from ..hardware.overlap import Costs
from ..hardware.workers import Message
from . import ahead
from .ahead import Settings, draft_ahead
from .base import Draft, Request, Row, Step, Strategy
from .controller import Controller, Way, ways
from .conversation import Conversation
from .ledger import Ledger
from .sampling import Sampling
from .side_by_side import measure_costs
from .verify import Verifier

MOST = 12  # draft tokens per verification, where no option says otherwise
ROWS_SHARE = 0.25  # of the branches that are allowed, how many a draft step carries on average


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
        self.go_by(measure_costs(self.target, draft, tokens, branches))

    def go_by(self, costs: Costs) -> None:
        """Lets settings and controllers decide by these costs."""
        settings = self.settings()
        self.costs = costs
        self.table = ways(costs, MOST, settings.lead, 1 + ROWS_SHARE * (settings.branches - 1))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        if len(requests) != 1:
            raise UsageError(f"{self.name}: runs one row at a time, not {len(requests)}")
        yield from _Verifying(self, requests[0], sampling).run()


class _Verifying:
    """The state of one request on the target's side."""

    def __init__(self, strategy: Overlapped, request: Request, sampling: Sampling) -> None:
        self.target, self.request, self.sampling = strategy.target, request, sampling
        self.facts = strategy.facts
        self.settings, self.controller = strategy.settings(), strategy.controller()
        self.after_round = getattr(strategy.options, "first_token", "") == "after_round"
        self.tells_rounds = strategy.tells_rounds
        self.row = Row(0, request)
        self.ledger = Ledger(self.row.tokens)
        self.rounds = self.busy_ns = self.prefill_ns = self.rejected = self.hits = self.bonus_hits = 0
        self.idle: tuple[int, int] | None = None  # (rounds, verified length) that the draft last ran out of work at
        limit = min(len(request.ids) + request.max_new_tokens - 1, self.target.context_length)
        args = sampling, request, limit, self.settings
        self.talk = Conversation(strategy.models["draft"], self._take, draft_ahead, *args)

    def run(self) -> Iterator[Step]:
        try:
            with self.talk:
                yield from self._steps()
        finally:
            self._close_accounts()

    def _steps(self) -> Iterator[Step]:
        verifier, row, ledger = Verifier(self.sampling), self.row, self.ledger
        self._pace()
        draft = Draft(())  # nothing is waited for before the first token is out
        wasted = branched = rescued = 0  # as far as they have been told
        while not self.request.done:
            logits = self.target.advance([row.tokens.view(draft.tokens)], len(draft.tokens) + 1, [0])
            (verdict,) = verifier.verify([row], [draft], logits)
            start = len(row.tokens)
            row.tokens.extend(verdict.tokens)
            self.busy_ns += self.target.last_forward_ns
            if row.new_tokens == 1:
                self.prefill_ns = self.busy_ns
            self._listen()  # before the news goes out: what was drafted after it is about a longer text
            self.talk.send(ahead.VERIFIED, base=start, ids=verdict.tokens)
            hit = ledger.verified(verdict.tokens, len(draft.tokens))
            drafted, accepted = len(draft.tokens), verdict.accepted
            if self.after_round and row.new_tokens == 1:
                self._wait(1)
            thrown_away, wasted = ledger.wasted - wasted, ledger.wasted
            yield Step(0, verdict.tokens, drafted, accepted, (), thrown_away, tuple(draft.tokens[accepted:]))
            if self.request.done:
                return
            if not self.settings.interrupt:  # only now is known what it has prepared
                self._wait(None)
                hit = bool(ledger.best())
            self._count(drafted, accepted, hit)
            rows, branched = ledger.branched - branched, ledger.branched
            ready, rescued = ledger.rescued - rescued, ledger.rescued
            if self.controller.observe(drafted, accepted, len(verdict.tokens), hit, rows, ready):
                self._pace()
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
            self.talk.send(ahead.ROUND, epoch=self.rounds, base=len(self.row.tokens) + len(tokens))
        return Draft(tokens)

    def _wait(self, need: int | None) -> None:
        """Until so many draft tokens are there (None: until the draft has ended its round), or none will come."""
        self._listen()
        while not self._out_of_work(need is None) and (need is None or len(self.ledger.best()) < need):
            self._take(self.talk.wait())

    def _out_of_work(self, round_only: bool) -> bool:
        if self.idle is None:
            return False
        return self.idle[0] == self.rounds and (round_only or self.idle[1] == len(self.row.tokens))

    def _listen(self) -> None:
        while (message := self.talk.receive()) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message.kind == ahead.DRAFT:
            self.ledger.draft(message.epoch, message.base, message.ids)
        elif message.kind == ahead.FORK:
            self.ledger.fork(message.epoch, message.base, message.ids[0], message.ids[1:])
        elif message.kind == ahead.IDLE:
            self.idle = message.epoch, message.base

    def _pace(self) -> None:
        self.idle = None
        way, branches = self.controller.way, self.settings.branches if self.controller.branching else 1
        self.talk.send(ahead.PACE, epoch=branches, base=way.lead)

    def _count(self, drafted: int, accepted: int, hit: bool) -> None:
        if accepted < drafted:
            self.rejected += 1
            self.hits += hit
        elif drafted:
            self.bonus_hits += hit

    def _close_accounts(self) -> None:
        self.ledger.close()
        ledger, report, controller = self.ledger, self.talk.report, self.controller
        self.facts |= {
            "target_busy_ns": self.busy_ns,
            "target_prefill_ns": self.prefill_ns,
            "draft_busy_ns": report.busy_ns,
            "draft_prefill_ns": report.prefill_ns,
            "draft_forwards": report.forwards,
            "draft_token_rows": report.token_rows,
            "drafts_posted": ledger.posted,
            "drafts_looked_at": ledger.looked,
            "drafts_confirmed": ledger.confirmed,
            "drafts_wasted": ledger.wasted,
            "lines": report.lines,
            "branches": report.forks,
            "branch_tokens": ledger.branched,
            "branch_tokens_ready": ledger.rescued,
            "branch_switches": controller.branch_switches,
            "rejections": self.rejected,
            "rejections_anticipated": self.hits,
            "bonus_tokens_hit": self.bonus_hits,
            "messages_sent": self.talk.sent,
            "messages_received": self.talk.received,
            "alpha": round(controller.alpha, 4),
            "mode": controller.way.mode,
            "mode_changes": controller.changes,
            **{f"steps_{mode}": count for mode, count in sorted(controller.steps.items())},
        }


def not_default(options: Any, *but: str) -> list[str]:
    """Names of the options that were changed, but for some."""
    return [f.name for f in fields(options) if f.name not in but and getattr(options, f.name) != f.default]
