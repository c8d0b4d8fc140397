"""The drafter of `sparse-kv`: a model with a small cache, which is chosen, kept up to date and chosen anew here.

Nothing is done when a request begins: a row's small cache is chosen the first time that it is to be drafted for, out of
what the target's own prefill has left. All that is known of a request is one `RowState`, made afresh when another
request takes the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..models.sparse_view import SparseView
from .base import Draft, Drafter, Level, Row, Step
from .cascade_levels import Accounts, CascadeDrafter, Stages
from .sparse_kv_schedule import RowState, Schedule
from .statistical import Ngram
from .verify import Verifier

LEVELS = ("sparse", "ngram")
MIN_MATCH, PER_MATCH = 2, 2.0  # of the n-gram level, as for a cascade with fixed lengths
_NO_LIMIT = 1 << 30


@dataclass
class Account:
    """What all rounds of a call came to.

    `row_rounds` are those of each row in which something was drafted for it, `follow` is bringing small caches up to
    date. Times are in milliseconds, the predicted ones only where costs were measured.
    """

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    row_rounds: int = 0
    selections: int = 0
    select_ms: float = 0.0
    follow_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    predicted_select_ms: float = 0.0
    predicted_follow_ms: float = 0.0
    predicted_draft_ms: float = 0.0
    predicted_verify_ms: float = 0.0
    predicted_plain_ms: float = 0.0


class SparseDrafter(Drafter):
    """Drafts with a view of a model, token by token or in blocks that n-grams propose.

    Args:
        view: of the target, or of a draft model; it is this one's alone while it drafts.
        shared: whether it is a part of the target's cache, so that verifications tell what it should hold.
        ngram: whether the view reviews what n-grams say instead of drafting one by one.
        refresh: tokens after which a row's small cache is chosen anew; 0 for never.
    """

    def __init__(
        self, view: SparseView, verifier: Verifier, schedule: Schedule, shared: bool, ngram: bool = False,
        refresh: int = 0,
    ) -> None:  # fmt: skip
        self.view, self.schedule, self.shared, self.refresh = view, schedule, shared, refresh
        self.accounts = Accounts(2 if ngram else 1)
        self.account = Account()
        below = Stages([(Ngram(1, MIN_MATCH, PER_MATCH), _NO_LIMIT)]) if ngram else None
        self.feed = Stages([(CascadeDrafter(view, below, verifier, self.accounts, follow=False), _NO_LIMIT)])
        self._states: dict[int, RowState] = {}
        self._to_verify = False

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        states = [self._heard(row) for row in rows]
        limits = [self._limit(row, limit) for row, limit in zip(rows, limits, strict=True)]
        lengths = self.schedule.lengths(rows, states, limits)
        live = [at for at, length in enumerate(lengths) if length]
        drafts = [Draft(())] * len(rows)
        if live:
            self._make_ready([rows[at] for at in live], [states[at] for at in live], len(rows))
            made = self.feed.propose([rows[at] for at in live], [lengths[at] for at in live])
            for at, proposal in zip(live, made, strict=True):
                drafts[at] = Draft(proposal.tokens, proposal.probs, self.accounts.take(rows[at]))
                states[at].drafted, states[at].drafted_at = proposal.tokens, len(rows[at].tokens)
        self._note(rows, states, drafts)
        return drafts

    def begin(self, row: Row) -> None:
        self._states[row.index] = self.schedule.begin(row.request)
        self.accounts.begin(row)
        self.feed.begin(row)
        if not self.shared:
            self.view.dense.forget(row.index)

    def verified(self, step: Step, forward_ns: int) -> Step:
        """The step with the sparse level's part in it; takes note of how long its verification took, once a round."""
        if self._to_verify:
            self.account.verify_ms += forward_ns / 1e6
            self._to_verify = False
        if not step.levels:
            return step
        first = step.levels[0]
        first = first._replace(drafted=first.drafted + step.drafted, accepted=first.accepted + step.accepted)
        self.account.drafted += step.drafted
        self.account.accepted += step.accepted
        self.account.row_rounds += 1
        levels: tuple[Level, ...] = (first, *step.levels[1:])
        return Step(step.row, step.tokens, step.drafted, step.accepted, levels, rejected=step.rejected)

    def facts(self) -> dict[str, Any]:
        """What the record says of this call, see docs/strategies/sparse-kv.md."""
        account, drafted_rounds = self.account, self.account.rounds - self.account.plain_rounds
        facts: dict[str, Any] = {
            "levels": ",".join(LEVELS[: self.accounts.levels]),
            "rounds": account.rounds,
            "plain_rounds": account.plain_rounds,
            "selections": account.selections,
            "select_ms": round(account.select_ms, 3),
            "budgets": ",".join(str(number) for number in sorted({s.budget for s in self._states.values()} - {0})),
            "sparse_bytes_per_row": self.view.row_bytes,
            "cache_bytes_per_row": self.view.dense.row_bytes,
        }
        if account.row_rounds:
            facts["mean_gamma"] = round(account.drafted / account.row_rounds, 3)
            facts["omega"] = round(account.accepted / account.row_rounds + 1, 3)
        if drafted_rounds:
            facts |= {name: round(getattr(account, name) / drafted_rounds, 3) for name in ("draft_ms", "follow_ms")}
        if account.rounds:
            facts["verify_ms"] = round(account.verify_ms / account.rounds, 3)
        if account.predicted_verify_ms:
            facts |= {
                name: round(getattr(account, name) / account.rounds, 3)
                for name in ("predicted_verify_ms", "predicted_plain_ms")
            }
            facts["predicted_select_ms"] = round(account.predicted_select_ms, 3)
            if drafted_rounds:
                facts |= {
                    name: round(getattr(account, name) / drafted_rounds, 3)
                    for name in ("predicted_draft_ms", "predicted_follow_ms")
                }
        return facts

    # The parts

    def _limit(self, row: Row, limit: int) -> int:
        """Nothing beyond a draft model's own context: to draft a token it has to have read the row."""
        return limit if len(row.tokens) <= self.view.context_length else 0

    def _heard(self, row: Row) -> RowState:
        """The state of a row, once its latest draft has been compared with what came."""
        state = self._states[row.index]
        if state.drafted:
            came = row.tokens.view()[state.drafted_at :].tolist()
            pairs = zip(state.drafted, came, strict=False)
            accepted = next((at for at, (token, truth) in enumerate(pairs) if token != truth), len(state.drafted))
            self.schedule.learn(state, len(state.drafted), accepted)
            state.drafted = ()
        return state

    def _make_ready(self, rows: Sequence[Row], states: Sequence[RowState], batch: int) -> None:
        """Chooses small caches that are missing or due to be chosen anew, and brings the others up to date."""
        due = [
            (row, state)
            for row, state in zip(rows, states, strict=True)
            if state.chosen_at is None or (self.refresh and len(row.tokens) - state.chosen_at >= self.refresh)
        ]
        if due and not self.shared:
            # all but the last token, with which a draft begins
            dense = self.view.dense
            dense.advance([row.tokens.view()[:-1] for row, _ in due], 1, [row.index for row, _ in due])
            self.account.select_ms += dense.last_forward_ns / 1e6
        for row, state in due:
            budget = self.schedule.budget_for(len(row.tokens), batch)
            self.view.select(row.index, row.tokens.view(), budget)
            if self.schedule.costs is not None:
                unread = len(row.tokens) - (state.chosen_at or 0)
                self.account.predicted_select_ms += self.schedule.costs.begin_ms(len(row.tokens), unread)
            self.schedule.chosen(state, len(row.tokens), budget)
            self.account.selections += 1
            self.account.select_ms += self.view.last_select_ns / 1e6
        if self.shared:
            for row in rows:
                self.view.follow(row.index, row.tokens.view())
                self.account.follow_ms += self.view.last_follow_ns / 1e6

    def _note(self, rows: Sequence[Row], states: Sequence[RowState], drafts: Sequence[Draft]) -> None:
        """Adds a round to the account, and what it was predicted to take."""
        account, lengths = self.account, [len(draft.tokens) for draft in drafts]
        levels = [draft.levels[0] for draft in drafts if draft.levels]
        account.rounds += 1
        account.plain_rounds += not levels
        account.draft_ms += sum(level.time_ns for level in levels) / 1e6
        self._to_verify = True
        for length, draft in zip(lengths, drafts, strict=True):
            if draft.levels:
                self.schedule.reviewed(length, draft.levels[0].forwards)
        if self.schedule.costs is not None:
            predicted = self.schedule.predicted(rows, states, lengths)
            account.predicted_draft_ms += predicted.draft
            account.predicted_verify_ms += predicted.verify
            account.predicted_follow_ms += predicted.follow
            account.predicted_plain_ms += predicted.plain
