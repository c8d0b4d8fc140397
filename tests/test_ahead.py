"""The draft's side and the target's book: what is posted is what the cache holds, and every token is accounted for."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from toys import TableModel

from specbench.hardware.workers import Message
from specbench.models.base import TokenBuffer
from specbench.strategies import ahead
from specbench.strategies.ahead import Drafting, Settings, make_note
from specbench.strategies.base import Request
from specbench.strategies.ledger import Ledger
from specbench.strategies.sampling import Sampling

VOCAB = 12


class Script:
    """A port whose other end is a list: what to say, by how many messages were posted before it is read."""

    def __init__(self, says: list[tuple[int, Message]]) -> None:
        self.says, self.posted = deque(says), []

    def send(self, kind, epoch=0, base=0, ids=(), confidences=()):
        self.posted.append(Message(kind, epoch, base, tuple(ids), tuple(confidences)))

    def receive(self):
        return self.says.popleft()[1] if self.says and self.says[0][0] <= len(self.posted) else None

    def wait(self, timeout_s=None):
        return self.says.popleft()[1] if self.says else Message(ahead.STOP)


def play(says=(), settings=None, prompt=(3, 1, 4), limit=40, model=None, sampling=None):
    port = Script(list(says))
    drafting = Drafting(
        model or TableModel(VOCAB, seed=1), port, sampling or Sampling(), Request(5, list(prompt), 30), limit,
        settings or Settings(),
    )  # fmt: skip
    drafting.run()
    return drafting, port.posted


def drafted(posted, line=1):
    return [
        token for message in posted if message.kind == ahead.DRAFT and message.epoch == line for token in message.ids
    ]


def greedy(prompt, count):
    model, ids = TableModel(VOCAB, seed=1), list(prompt)
    for _ in range(count):
        ids.append(int(model.advance([ids])[0].argmax()))
    return ids[len(prompt) :]


def test_it_drafts_from_the_prompt_on_up_to_its_lead_and_then_says_so():
    _, posted = play(settings=Settings(lead=6))
    assert drafted(posted) == greedy([3, 1, 4], 6)
    assert [message.base for message in posted if message.kind == ahead.DRAFT] == list(range(3, 9))
    assert posted[-2] == Message(ahead.IDLE, 0, 3)
    assert posted[-1].kind == ahead.REPORT
    report = ahead.Report(*posted[-1].ids)
    assert (report.forwards, report.posted, report.lines) == (6, 6, 1)


def test_it_goes_on_where_the_target_agrees():
    """Nothing is computed twice and no new line begins."""
    text = greedy([3, 1, 4], 9)
    model = TableModel(VOCAB, seed=1)
    says = [(4, Message(ahead.VERIFIED, 0, 3, tuple(text[:3])))]
    _, posted = play(says, Settings(lead=6), model=model)
    assert drafted(posted) == text
    assert model.forwards == [[3], *[[1]] * 8]


@pytest.mark.parametrize("agreed", [0, 1, 3])
def test_it_rolls_back_to_where_the_target_differs(agreed):
    """The rule that AMUSD's code misses by one: the cache ends with the common prefix, what follows is fed once."""
    text = greedy([3, 1, 4], 6)
    verified = [*text[:agreed], (text[agreed] + 1) % VOCAB]
    model = TableModel(VOCAB, seed=1)
    drafting, posted = play([(6, Message(ahead.VERIFIED, 0, 3, tuple(verified)))], Settings(lead=6), model=model)
    assert drafted(posted, line=2) == greedy([3, 1, 4, *verified], 6)
    first = next(message for message in posted if message.epoch == 2 and message.kind == ahead.DRAFT)
    assert first.base == 3 + len(verified)
    assert model.cache[0].tolist() == drafting.lines[0].row.tokens.view()[:-1].tolist()
    assert model.forwards[6] == [1]  # the token that the target put there


def test_it_takes_over_what_the_target_found_by_itself():
    """Verified text that is longer than the line and begins with it: no new line, no token is drafted for it."""
    text = greedy([3, 1, 4], 8)
    says = [(2, Message(ahead.VERIFIED, 0, 3, tuple(text[:5])))]
    drafting, posted = play(says, Settings(lead=3))
    assert drafting.numbers == 1
    assert [m.base for m in posted if m.kind == ahead.DRAFT] == [3, 4, 8, 9, 10]
    assert drafted(posted)[2:] == text[5:8]


def test_it_drafts_past_neither_limit_nor_context():
    _, posted = play(limit=7)
    assert len(drafted(posted)) == 4
    _, posted = play(model=TableModel(VOCAB, seed=1, context_length=5))
    assert len(drafted(posted)) == 3  # to read five tokens is enough to draft the sixth
    _, posted = play(model=TableModel(VOCAB, seed=1, context_length=2))
    assert posted[0].kind == ahead.IDLE


def test_a_draft_that_begins_after_the_prefill_is_silent_before():
    text = greedy([3, 1, 4], 1)
    _, posted = play([(0, Message(ahead.VERIFIED, 0, 3, tuple(text)))], Settings(lead=2, after_prefill=True))
    assert [message.base for message in posted if message.kind == ahead.DRAFT] == [4, 5]


def test_a_budget_ends_a_round_and_the_next_one_renews_it():
    says = [(4, Message(ahead.ROUND, 1, 5))]
    _, posted = play(says, Settings(budget=3))
    assert [m.kind for m in posted] == [ahead.DRAFT] * 3 + [ahead.IDLE] + [ahead.DRAFT] * 3 + [ahead.IDLE, ahead.REPORT]
    assert posted[3].epoch == 0
    assert posted[7].epoch == 1


def test_branches_say_their_main_line_up_to_another_token_and_are_rows_of_one_forward():
    model = TableModel(VOCAB, seed=1)
    settings = Settings(lead=5, branches=4, worth=0.01)
    drafting, posted = play([(3, Message(ahead.ROUND, 1, 6))], settings, model=model)
    forks = [message for message in posted if message.kind == ahead.FORK]
    assert 1 <= len(forks) <= 3
    main = drafted(posted)
    for fork in forks:
        parent, *ids = fork.ids
        assert (parent, fork.base) == (1, 3)
        assert ids[:-1] == main[: len(ids) - 1]
        assert ids[-1] != main[len(ids) - 1]
        assert drafted(posted, fork.epoch) == greedy([3, 1, 4, *ids], 5 - len(ids))
    assert max(map(len, model.forwards)) > 1
    for line in drafting.lines:
        assert model.cache[line.row.index].tolist() == line.row.tokens.view()[:-1].tolist()
    one_by_one = TableModel(VOCAB, seed=1)
    play([(3, Message(ahead.ROUND, 1, 6))], Settings(lead=5, branches=4, worth=0.01, batched=False), model=one_by_one)
    assert max(map(len, one_by_one.forwards)) == 1


def test_a_branch_that_the_target_takes_goes_on_without_a_new_line():
    settings = Settings(lead=5, branches=4, worth=0.01)
    _, posted = play([(3, Message(ahead.ROUND, 1, 6))], settings)
    at = next(i for i, message in enumerate(posted) if message.kind == ahead.FORK)
    fork = posted[at]
    says = [(3, Message(ahead.ROUND, 1, 6)), (at + 6, Message(ahead.VERIFIED, 0, 3, fork.ids[1:]))]
    drafting, posted = play(says, settings)
    assert drafting.lines[0].number == fork.epoch
    assert drafted(posted, fork.epoch) == greedy([3, 1, 4, *fork.ids[1:]], 5)


def test_a_note_ranks_what_came_next():
    logits = TableModel(VOCAB, seed=1).advance([[3, 1, 4]])[0].float()
    best = int(logits.argmax())
    note = make_note(logits, best, 4)
    probs = logits.softmax(-1)
    assert note.confidence == pytest.approx(float(probs[best]))
    assert [token for token, _ in note.others] == probs.argsort(descending=True)[1:4].tolist()
    assert make_note(logits, best, 4, enough=0.0).others == []


def test_no_notes_are_made_while_no_branches_are_allowed(monkeypatch):
    """A note is a softmax over the vocabulary. In turns, in plain steps and in `async` nobody asks for it."""
    monkeypatch.setattr(ahead, "make_note", lambda *given: pytest.fail("a note was made"))
    _, posted = play(settings=Settings(lead=4))
    assert len(drafted(posted)) == 4
    says = [(0, Message(ahead.PACE, 1, 4))]
    drafting, posted = play(says, Settings(lead=4, branches=4, worth=0.01))
    assert len(drafted(posted)) == 4
    assert drafting.lines[0].notes == {}
    assert all(message.confidences == () for message in posted)


def test_branches_rest_as_soon_as_they_are_not_allowed_any_more():
    settings = Settings(lead=8, branches=4, worth=0.01)
    _, posted = play([(3, Message(ahead.ROUND, 1, 6))], settings)
    first = next(i for i, message in enumerate(posted) if message.kind == ahead.FORK)
    says = [(3, Message(ahead.ROUND, 1, 6)), (first + 1, Message(ahead.PACE, 1, 8))]
    _, posted = play(says, settings)
    switched = max(i for i, message in enumerate(posted) if message.kind == ahead.FORK)
    later = [message.epoch for message in posted[switched + 5 :] if message.kind == ahead.DRAFT]
    assert later
    assert set(later) == {1}
    assert len(drafted(posted)) == 8


def test_notes_that_are_missing_begin_no_branch():
    """Tokens drafted while no branches were allowed: nothing is known of their next-ranked ones."""
    says = [(0, Message(ahead.PACE, 1, 8)), (3, Message(ahead.ROUND, 1, 6)), (4, Message(ahead.PACE, 4, 8))]
    _, posted = play(says, Settings(lead=8, branches=4, worth=0.01))
    assert not [message for message in posted if message.kind == ahead.FORK]
    assert len(drafted(posted)) == 8


def test_a_row_that_costs_more_than_it_brings_is_not_given():
    says = [(3, Message(ahead.ROUND, 1, 6)), (14, Message(ahead.STOP))]
    for row_costs, branches in (((), True), ((1.0, 200.0, 400.0, 600.0), False)):
        settings = Settings(lead=30, branches=4, worth=0.01, row_costs=row_costs)
        _, posted = play(says, settings)
        assert any(message.kind == ahead.FORK for message in posted) == branches
        assert any(message.kind == ahead.DRAFT and message.epoch > 1 for message in posted) == branches
        assert drafted(posted) == greedy([3, 1, 4], len(drafted(posted)))


def test_a_branch_costs_nothing_beside_a_main_line_that_rests():
    settings = Settings(lead=5, branches=4, worth=0.01, row_costs=(1.0, 200.0, 400.0, 600.0))
    _, posted = play([(3, Message(ahead.ROUND, 1, 6))], settings)
    ends = max(i for i, message in enumerate(posted) if message.kind == ahead.DRAFT and message.epoch == 1)
    forks = [i for i, message in enumerate(posted) if message.kind == ahead.FORK]
    assert forks
    assert min(forks) > ends


def test_the_draft_learns_how_often_it_is_right_from_what_is_verified():
    """Its first token is replaced by the target's: it was as sure as its note says, and is told to be less so."""
    text = greedy([3, 1, 4], 1)
    wrong = (text[0] + 1) % VOCAB
    settings = Settings(lead=4, branches=2, worth=0.01)
    before, _ = play((), settings)
    note = before.lines[0].notes[3]
    assert before.calibration.chance(note.confidence, first=True) == pytest.approx(note.confidence)
    after, _ = play([(4, Message(ahead.VERIFIED, 0, 3, (wrong,)))], settings)
    assert after.calibration.chance(note.confidence, first=True) < note.confidence
    right, _ = play([(4, Message(ahead.VERIFIED, 0, 3, tuple(text)))], settings)
    assert right.calibration.chance(note.confidence, first=True) > note.confidence


def test_the_first_forward_is_the_prefill():
    class Ticking(TableModel):
        def advance(self, contexts, last=1, rows=None):
            logits = super().advance(contexts, last, rows)
            self.last_forward_ns = 100 * sum(self.forwards[-1])
            return logits

    _, posted = play(settings=Settings(lead=4), model=Ticking(VOCAB, seed=1))
    report = ahead.Report(*posted[-1].ids)
    assert (report.prefill_ns, report.busy_ns) == (300, 600)


# The target's book


def book(prompt=(7, 7)):
    text = TokenBuffer(prompt)
    ledger = Ledger(text)

    def verified(*tokens, looked=0):
        text.extend(tokens)
        return ledger.verified(tokens, looked)

    return ledger, verified


def accounts(ledger):
    ledger.close()
    assert ledger.posted == ledger.looked + ledger.confirmed + ledger.wasted
    return ledger.looked, ledger.confirmed, ledger.wasted


def test_a_block_that_is_accepted_and_a_bonus_token_that_the_draft_had():
    ledger, verified = book()
    ledger.draft(1, 2, (1, 2, 3, 4))
    assert ledger.best() == [1, 2, 3, 4]
    assert verified(1, 2, 3, looked=2)
    assert ledger.best() == [4]
    assert accounts(ledger) == (2, 1, 1)


def test_messages_of_a_dead_line_are_dropped():
    ledger, verified = book()
    ledger.draft(1, 2, (1, 2))
    assert not verified(1, 9, looked=2)
    ledger.draft(1, 4, (3,))
    assert ledger.best() == []
    ledger.draft(2, 4, (5, 6))
    ledger.draft(1, 5, (3,))
    assert ledger.best() == [5, 6]
    assert accounts(ledger) == (2, 0, 4)


def test_a_late_message_is_compared_with_what_was_verified_meanwhile():
    """A line that begins at a text of two tokens arrives when four are verified: right at first, then wrong."""
    for late, left in (((1, 2, 3), [3]), ((1, 9, 3), [])):
        ledger, verified = book()
        verified(1, 2)
        for at, token in enumerate(late):
            ledger.draft(1, 2 + at, (token,))
        assert ledger.best() == left
        assert accounts(ledger) == (0, 0, 3)


def test_a_branch_survives_where_its_main_line_is_rejected():
    ledger, verified = book()
    ledger.draft(1, 2, (1, 2, 3))
    ledger.fork(2, 2, 1, (1, 5))
    ledger.draft(2, 4, (6, 7))
    assert ledger.best() == [1, 2, 3]
    assert verified(1, 5, looked=3)
    assert ledger.best() == [6, 7]
    assert accounts(ledger) == (3, 1, 2)


def test_a_branch_that_comes_too_late_lives_only_if_it_was_right():
    for token, left in ((5, [6]), (4, [])):
        ledger, verified = book()
        ledger.draft(1, 2, (1, 2))
        verified(1, 5, looked=2)
        ledger.fork(2, 2, 1, (1, token))
        ledger.draft(2, 4, (6,))
        assert ledger.best() == left
        assert accounts(ledger)[0] == 2


@pytest.mark.parametrize("seed", range(5))
def test_accounts_add_up_whatever_comes(seed):
    random = np.random.default_rng(seed)
    ledger, verified = book()
    length, number = 2, 0
    lines: dict[int, int] = {}
    for _ in range(400):
        if not lines or random.random() < 0.1:
            number += 1
            lines = {number: length}
        for _ in range(random.integers(0, 4)):
            line = max(lines)
            ledger.draft(line, lines[line], (int(random.integers(2)),))
            lines[line] += 1
        block = ledger.best()[: random.integers(0, 4)]
        taken = block[: random.integers(0, len(block) + 1)]
        own = int(random.integers(2)) if taken == block else 1 - block[len(taken)]
        verified(*taken, own, looked=len(block))
        length += len(taken) + 1
        lines = {line: max(end, length) for line, end in lines.items()}
    assert accounts(ledger)[0] > 50


def test_rows_of_branches_are_counted_and_what_was_ready_when_one_was_needed():
    ledger, verified = book()
    ledger.draft(1, 2, (1, 2, 3))
    ledger.fork(2, 2, 1, (1, 5))
    assert ledger.branched == 0  # no forward was needed for it
    ledger.draft(2, 4, (6, 7))
    ledger.draft(1, 5, (4,))
    assert ledger.branched == 2
    assert verified(1, 2, looked=1)
    assert ledger.rescued == 0  # the main line was right
    ledger, verified = book()
    ledger.draft(1, 2, (1, 2, 3))
    ledger.fork(2, 2, 1, (1, 5))
    ledger.draft(2, 4, (6, 7))
    assert verified(1, 5, looked=3)
    assert ledger.rescued == 2
    ledger.draft(2, 6, (8,))
    assert ledger.branched == 2  # it is the main line now
    assert not verified(9)
    assert ledger.rescued == 2
