"""DuoDecoding as its authors' code has it: lock-step rounds, a fixed budget, branches one after another, one exchange.

In a round the draft spends `gamma` tokens on k sequences that follow the whole text, the block in flight included, and
the target verifies that block; then each sends the other one message. A block in flight begins with a token that is
verified already. After a rejection nothing is in flight: the target decodes one token while the draft drafts (the
bubble). In round 0 the budget is one token, so the first token is out after one exchange.

Not reproduced: tokens that were never verified are neither emitted nor counted (the published loop stops once they
reach the limit); k is rounded down to a divisor of any gamma (published for 12, 16 and 24, elsewhere k is 1 without a
word); a draw of exactly 0.0 that accepts a wrong token; drafting beyond the token limit or a context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..hardware.workers import Message, Port
from ..models.base import CachedModel
from .ahead import REPORT, STOP, Report, make_note, values_of
from .base import Draft, Request, Row, Step
from .conversation import Conversation
from .sampling import Sampling
from .verify import Verifier

SEQUENCES = 20  # epoch: how many; ids: their tokens, all of one length
REPLY = 21  # epoch: 1 for (index, token) to go on with, 0 for a sequence; base: index; ids: the token, or how many
MOST_BRANCHES = 8


@dataclass
class _Accounts:
    """Where the tokens went that the draft has posted: looked at by a verification, confirmed (the target came to the
    first token of a sequence by itself), or wasted."""

    looked: int = 0
    confirmed: int = 0
    wasted: int = 0

    def late(self, message: Message) -> None:
        if message.kind == SEQUENCES:
            self.wasted += len(message.ids)


def published_rounds(
    target: CachedModel, draft: CachedModel, request: Request, sampling: Sampling, gamma: int, facts: dict[str, Any]
) -> Iterator[Step]:
    """The target's side."""
    verifier, row, accounts = Verifier(sampling), Row(0, request), _Accounts()
    limit = min(len(request.ids) + request.max_new_tokens - 1, target.context_length)
    block: list[int] = []  # in flight and not verified
    rounds = in_flight = busy_ns = prefill_ns = 0
    talk = Conversation(draft, accounts.late, _draft_rounds, sampling, request, limit, gamma)
    try:
        with talk:
            while not request.done:
                logits = target.advance([row.tokens.view(block)], len(block) + 1, [0])
                (verdict,) = verifier.verify([row], [Draft(block)], logits)
                busy_ns += target.last_forward_ns
                prefill_ns = prefill_ns or busy_ns
                drafted, accepted, rejected = len(block), verdict.accepted, tuple(block[verdict.accepted :])
                row.tokens.extend(verdict.tokens)
                accounts.looked += drafted
                message = talk.wait()
                count, own = message.epoch, verdict.tokens[-1]
                length = len(message.ids) // max(count, 1)
                sequences = [message.ids[at * length : (at + 1) * length] for at in range(count)]
                firsts = [sequence[0] for sequence in sequences]
                found = accepted == drafted and own in firsts
                if found:
                    chosen = firsts.index(own)
                    block = list(sequences[chosen][1 : 1 + row.room(target)])
                    talk.send(REPLY, 0, chosen, (len(block) + 1,))
                else:
                    block = []
                    talk.send(REPLY, 1, accepted, (own,))
                rounds, in_flight = rounds + 1, in_flight + bool(block)
                thrown_away = len(message.ids) - found - len(block)
                accounts.confirmed += found
                accounts.wasted += thrown_away
                yield Step(0, verdict.tokens, drafted, accepted, (), thrown_away, rejected)
    finally:
        report = talk.report
        facts |= {
            "target_busy_ns": busy_ns,
            "target_prefill_ns": prefill_ns,
            "draft_busy_ns": report.busy_ns,
            "draft_prefill_ns": report.prefill_ns,
            "draft_forwards": report.forwards,
            "draft_token_rows": report.token_rows,
            "drafts_posted": report.posted,
            "drafts_looked_at": accounts.looked,
            "drafts_confirmed": accounts.confirmed,
            "drafts_wasted": accounts.wasted + len(block),  # what is in flight at the end is not looked at any more
            "rounds": rounds,
            "rounds_with_a_block": in_flight,
            "branches": report.forks,
            "messages_sent": talk.sent,
            "messages_received": talk.received,
        }


def _draft_rounds(model: CachedModel, port: Port, sampling: Sampling, request: Request, limit: int, gamma: int) -> None:
    """The draft's side."""
    drafting = _Rounds(model, port, sampling, request, min(limit, model.context_length + 1))
    budget = 1
    while not drafting.stopped:
        sequences = drafting.draft(budget)
        if drafting.stopped:
            break
        port.send(SEQUENCES, len(sequences), 0, [token for sequence in sequences for token in sequence])
        drafting.posted += sum(map(len, sequences))
        drafting.hear(sequences)
        budget = gamma
    counts = drafting.busy_ns, drafting.posted, 1, drafting.forks, drafting.prefill_ns
    port.send(REPORT, ids=Report(drafting.forwards, drafting.forwards, *counts))


class _Rounds:
    def __init__(self, model: CachedModel, port: Port, sampling: Sampling, request: Request, limit: int) -> None:
        self.model, self.port, self.request, self.limit = model, port, request, limit
        self.verifier = Verifier(sampling)
        self.values = values_of(sampling, self.verifier)
        self.text = self._row(0, list(request.ids))  # verified tokens and the block in flight
        self.verified = len(request.ids)
        self.cache_rows = [0]  # of the sequences of the latest round
        self.forwards = self.busy_ns = self.prefill_ns = self.posted = self.forks = 0
        self.stopped = False

    def draft(self, budget: int) -> list[list[int]]:
        """k sequences of budget / k tokens, fewer where a limit comes first."""
        longest = self.limit - len(self.text.tokens)
        if longest < 1:
            return []
        first, after = self._rank(self.text, 2 if budget > 1 and longest > 1 else 1)
        count = min(_branches(first, after, budget), self.model.max_rows) if after else 1
        length = min(budget // count, longest)
        used, sequences = [self.text.index], []
        for at in range(count):
            if at:  # the first token is given
                used.append(next(index for index in range(MOST_BRANCHES) if index not in used))
                self.model.copy_row(self.text.index, used[-1])
                self.forks += 1
            row = self._row(used[-1], self._ids())
            sequence = [first[at][0]] if at or not after else [first[0][0], after[0][0]][:length]
            row.tokens.extend(sequence)
            while len(sequence) < length and not self.stopped:
                sequence.append(self._rank(row, 1)[0][0][0])
                row.tokens.extend(sequence[-1:])
            sequences.append(sequence)
        self.cache_rows = used
        return sequences

    def hear(self, sequences: list[list[int]]) -> None:
        """The target's reply, and the same change to the text that the target has made."""
        message = self.port.wait()
        assert message is not None
        if message.kind == STOP:
            self.stopped = True
        elif message.epoch:
            end = self.verified + message.base
            self.text = self._row(self.text.index, [*self._ids()[:end], *message.ids])
            self.verified = end + 1
        else:
            self.verified = len(self.text.tokens) + 1
            ids = [*self._ids(), *sequences[message.base][: message.ids[0]]]
            self.text = self._row(self.cache_rows[message.base], ids)

    def _rank(self, row: Row, steps: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Greedy steps after a row: the ranked tokens of the first, and of the second if it is asked for."""
        ranked: list[list[tuple[int, float]]] = [[], []]
        probe = row
        for step in range(steps):
            message = self.port.receive()
            if message is not None:  # before the sequences are sent, nothing else can come
                self.stopped = True
            logits = self.model.advance([probe.tokens.view()], 1, [probe.index])
            self.forwards += 1
            self.busy_ns += self.model.last_forward_ns
            if self.forwards == 1:
                self.prefill_ns = self.busy_ns
            ((token, _),) = self.verifier.choose_drafts(logits, [probe], [()])
            note = make_note(self.values(logits[0], probe), token, MOST_BRANCHES)
            ranked[step] = [(token, note.confidence), *note.others]
            if step + 1 < steps:
                probe = self._row(row.index, [*row.tokens.view().tolist(), token])
        return ranked[0], ranked[1]

    def _ids(self) -> list[int]:
        return self.text.tokens.view().tolist()

    def _row(self, index: int, ids: list[int]) -> Row:
        row = Row(index, self.request)
        row.tokens.extend(ids[row.prompt_length :])
        return row


def _branches(first: list[tuple[int, float]], after: list[tuple[int, float]], budget: int) -> int:
    """1 and the first tokens, from the top, that are likelier than the first two tokens of the main sequence; rounded
    down to a divisor of the budget."""
    theta = first[0][1] * after[0][1]
    count = 1
    while count < min(len(first), MOST_BRANCHES) and first[count][1] > theta:
        count += 1
    return next(k for k in range(count, 0, -1) if budget % k == 0)
