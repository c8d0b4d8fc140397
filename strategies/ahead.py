"""The draft's side of the strategies on two devices: a program that runs next to the draft model and writes ahead.

It drafts one token after another and posts each at once; between two forwards it looks for news of the target. What
the target verified is an append-only text, so no message needs an answer:

- A **line** is a text that begins like the verified one and goes on as drafted. Lines are numbered; the number is the
  epoch of its messages. `DRAFT(line, base, ids)` says that a line goes on with `ids` at position `base`; a number that
  was never seen before begins at the text verified up to `base`. `FORK(line, base, (parent, *ids))` begins a line too;
  only its last token is new, those before it are its parent's.
- `VERIFIED(base, ids)` says that the verified text goes on with `ids`. Both sides compare it with every line. A line
  that differs is dead; one that is a part of it takes over the rest. If none is left, a new one begins.

So a message about a dead line can be told by its number, a rejection costs no round trip, and what was prepared for
another outcome is simply a line that is still alive. Tokens are chosen by the coupled rule: draft and target draw with
the same noise, and no probabilities travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..hardware.workers import Message, Port
from ..models.base import CachedModel, TokenBuffer
from .base import Request, Row
from .branching import Calibration, rows_that_pay
from .sampling import Sampling
from .verify import Verifier

# From the draft to the target:
DRAFT = 1  # epoch: line; base: position; ids: tokens
FORK = 2  # epoch: line; base: position; ids: the parent's number, its tokens from base on, the new token
IDLE = 3  # epoch: rounds begun; base: verified length; nothing will come until there is news
REPORT = 4  # ids: see `Report`
# From the target to the draft:
VERIFIED = 5  # base: position; ids: tokens
ROUND = 6  # epoch: rounds begun; base: where the block that is being verified ends
PACE = 7  # base: lead; epoch: branches
STOP = 8

OTHERS = 4  # next-ranked tokens that are remembered per position


@dataclass(frozen=True)
class Settings:
    """How the draft goes ahead.

    Attributes:
        lead: tokens that a line may be ahead of the verified text.
        after_prefill: begin when the target's first token is there.
        branches: lines at most; 1 for none beside the main one.
        first_tokens: branch at the token that follows the block in flight (the theta rule).
        anticipate: branch where the block in flight may be rejected.
        worth: the least probability of being needed that a branch is begun for.
        row_costs: what forwards of 1, 2, ... rows take, as multiples of the first; a branch is begun, and continued,
            while it makes up for that (`branching.rows_that_pay`). Empty to continue all of them.
        batched: all lines in one forward; else the shortest line first, one at a time.
        budget: token-rows per round, 0 for no bound.
        interrupt: listen after every forward; else once the budget is used up.
    """

    lead: int = 16
    after_prefill: bool = False
    branches: int = 1
    first_tokens: bool = True
    anticipate: bool = True
    worth: float = 0.1
    row_costs: tuple[float, ...] = ()
    batched: bool = True
    budget: int = 0
    interrupt: bool = True


class Report(NamedTuple):
    """What the draft did for one request. `prefill_ns` is its first forward, and is part of `busy_ns`."""

    forwards: int = 0
    token_rows: int = 0
    busy_ns: int = 0
    posted: int = 0
    lines: int = 0
    forks: int = 0
    prefill_ns: int = 0


class Note(NamedTuple):
    """How sure the draft was of a token, and what came next: (token, probability), most likely first."""

    confidence: float
    others: list[tuple[int, float]]


@dataclass
class Line:
    number: int
    row: Row  # its tokens are the whole line, drafted ones included; its index is the cache row
    notes: dict[int, Note] = field(default_factory=dict)  # by position
    chances: dict[int, float] = field(default_factory=dict)  # by position: that the token is right if all before it are
    opened: set[tuple[int, int]] = field(default_factory=set)  # (position, token) of the branches begun

    def __len__(self) -> int:
        return len(self.row.tokens)

    def reach(self, start: int, end: int) -> float:
        """Chance that the text follows the line from `start` up to `end`; what no note was made of counts as right."""
        return math.prod(self.chances.get(position, 1.0) for position in range(start, end))


def draft_ahead(
    model: CachedModel, port: Port, sampling: Sampling, request: Request, limit: int, settings: Settings
) -> None:
    """Drafts until it is told to stop. Runs where the model is, `host_of(draft).start(draft_ahead, ...)`.

    Args:
        limit: the most tokens of a line, prompt included.
    """
    Drafting(model, port, sampling, request, limit, settings).run()


class Drafting:
    """The state of one request on the draft's side."""

    def __init__(
        self, model: CachedModel, port: Port, sampling: Sampling, request: Request, limit: int, settings: Settings
    ) -> None:
        self.model, self.port, self.request, self.settings = model, port, request, settings
        self.verifier = Verifier(sampling)
        self.values = values_of(sampling, self.verifier)
        # To draft a token the model has to read the line: past its context it drafts no more.
        self.limit = min(limit, model.context_length + 1)
        self.verified = TokenBuffer(request.ids, room=request.max_new_tokens + 64)
        self.lead, self.branches = settings.lead, min(settings.branches, model.max_rows)
        self.rounds, self.rows_left = 0, settings.budget
        self.block_end = len(request.ids)  # of what is being verified
        self.numbers = self.forwards = self.token_rows = self.posted = self.forks = 0
        self.busy_ns = self.prefill_ns = 0
        self.calibration = Calibration()
        self.stopped, self.said_idle = False, False
        self.lines: list[Line] = []  # the main one first
        self._begin_line(0)

    def run(self) -> None:
        while self.settings.after_prefill and not self.stopped and len(self.verified) == len(self.request.ids):
            self._hear(self.port.wait())
        while not self.stopped:
            if self.settings.interrupt or self.rows_left <= 0:
                while (message := self.port.receive()) is not None:
                    self._hear(message)
            if lines := self._due():
                self._step(lines)
            elif not self.stopped:
                self._say_idle()
                self._hear(self.port.wait())
        counts = self.forwards, self.token_rows, self.busy_ns, self.posted, self.numbers, self.forks, self.prefill_ns
        self.port.send(REPORT, ids=Report(*counts))

    # What to do next

    def _due(self) -> list[Line]:
        """The lines that the next forward continues."""
        if self.stopped or (self.settings.budget and self.rows_left <= 0):
            return []
        end = min(self.limit, len(self.verified) + self.lead)
        lines = [line for line in self.lines[:1] if len(line) < end]
        if self.branches > 1:
            lines += self._branches(end, main_rests=not lines)
        if not self.settings.batched:
            lines = sorted(lines, key=len)[:1]
        return lines[: self.rows_left] if self.settings.budget else lines

    def _branches(self, end: int, main_rests: bool) -> list[Line]:
        """The lines beside the main one that are worth a row now; those that are not there yet begin."""
        main, start = self.lines[0], len(self.verified)
        found: list[tuple[float, Line | tuple[int, int]]] = [
            (line.reach(start, len(line)), line) for line in self.lines[1:] if len(line) < end
        ]
        if room := max(0, self.branches - len(self.lines)):
            begun = sorted(self._candidates(main, end), reverse=True)[:room]
            found += [(chance, (position, token)) for chance, position, token in begun]
        found.sort(key=lambda one: one[0], reverse=True)
        reach = None if main_rests else main.reach(start, len(main))
        count = rows_that_pay(reach, [chance for chance, _ in found], self.settings.row_costs)
        return [one if isinstance(one, Line) else self._fork(main, *one) for _, one in found[:count]]

    def _candidates(self, main: Line, end: int) -> list[tuple[float, int, int]]:
        """(probability of being needed, position, token) of outcomes of the verification in flight that are likely
        enough to begin a branch for."""
        found = []
        start = len(self.verified)
        for position in range(start, min(self.block_end + 1, len(main), end - 1)):
            note = main.notes.get(position)
            if note is None:  # made while no branches were allowed, or by a line that has become the main one meanwhile
                break
            at_end = position == self.block_end
            theta = self._theta(main, position) if at_end else 0.0
            if self.settings.first_tokens if at_end else self.settings.anticipate:
                reached = main.reach(start, position)
                for token, probability in note.others:
                    if probability <= theta:
                        break
                    chance = reached * self.calibration.chance(probability, first=False)
                    if chance >= self.settings.worth and (position, token) not in main.opened:
                        found.append((chance, position, token))
        return found

    def _theta(self, main: Line, position: int) -> float:
        """DuoDecoding's rule: another first token is worth a branch if it is likelier than the first two tokens of the
        main line together. 1 where the second of them is not there yet."""
        after = main.notes.get(position + 1)
        return main.notes[position].confidence * after.confidence if after else 1.0

    def _begin_line(self, cache_row: int) -> None:
        """A new main line at the end of the verified text. It is named by its first token."""
        row = Row(cache_row, self.request)
        row.tokens.extend(self.verified.view()[row.prompt_length :])
        self.numbers += 1
        self.lines = [Line(self.numbers, row)]

    def _fork(self, main: Line, position: int, token: int) -> Line:
        main.opened.add((position, token))
        used = {line.row.index for line in self.lines}
        row = Row(next(index for index in range(self.branches) if index not in used), self.request)
        text = main.row.tokens.view()[:position]
        row.tokens.extend(text[row.prompt_length :])
        row.tokens.extend((token,))
        self.model.copy_row(main.row.index, row.index)
        self.numbers += 1
        self.forks += 1
        self.posted += 1
        known, line = len(self.verified), Line(self.numbers, row)
        line.chances = {at: main.chances[at] for at in range(known, position)}
        probability = dict(main.notes[position].others)[token]
        line.chances[position] = self.calibration.chance(probability, first=False)
        self.lines.append(line)
        self.port.send(FORK, line.number, known, (main.number, *text[known:].tolist(), token))
        return line

    # One forward

    def _step(self, lines: list[Line]) -> None:
        rows = [line.row for line in lines]
        logits = self.model.advance([row.tokens.view() for row in rows], 1, [row.index for row in rows])
        chosen = self.verifier.choose_drafts(logits, rows, [()] * len(rows))
        for i, (line, (token, _)) in enumerate(zip(lines, chosen, strict=True)):
            sure: tuple[float, ...] = ()
            if self.branches > 1:  # else nobody asks, and it takes a softmax over the vocabulary
                values = self.values(logits[i], line.row)
                note = line.notes[len(line)] = make_note(values, token, OTHERS, 1 - self.settings.worth)
                line.chances[len(line)] = self.calibration.chance(note.confidence, first=True)
                sure = (note.confidence,)
            self.port.send(DRAFT, line.number, len(line), (token,), sure)
            line.row.tokens.extend((token,))
        self.forwards += 1
        self.token_rows += len(lines)
        self.rows_left -= len(lines)
        self.posted += len(lines)
        self.busy_ns += self.model.last_forward_ns
        if self.forwards == 1:
            self.prefill_ns = self.busy_ns
        self.said_idle = False

    # What the target says

    def _hear(self, message: Message | None) -> None:
        assert message is not None
        if message.kind == VERIFIED:
            self._verified(message.ids)
        elif message.kind == ROUND:
            self.rounds, self.block_end, self.rows_left = message.epoch, message.base, self.settings.budget
            self.said_idle = False
        elif message.kind == PACE:
            self.lead, self.branches = message.base, min(message.epoch, self.settings.branches, self.model.max_rows)
            self.said_idle = False
        elif message.kind == STOP:
            self.stopped = True

    def _verified(self, ids: tuple[int, ...]) -> None:
        start = len(self.verified)
        self.verified.extend(ids)
        text = self.verified.view()
        self._learn(self.lines[0], text, start)
        cache_row = self.lines[0].row.index
        self.lines = [line for line in self.lines if _agrees(line, text, start)]
        for line in self.lines:
            line.row.tokens.extend(text[len(line) :])
        if not self.lines:
            self._begin_line(cache_row)
        self.block_end = len(text)  # nothing is in flight
        self.said_idle = False

    def _learn(self, main: Line, text: np.ndarray, start: int) -> None:
        """Compares what was known about the main line's tokens with what became of them, up to the first wrong one."""
        drafted = main.row.tokens.view()
        for position in range(start, min(len(text), len(main))):
            right = bool(drafted[position] == text[position])
            if note := main.notes.get(position):
                self.calibration.observe(note.confidence, True, right)
                for token, probability in note.others:
                    self.calibration.observe(probability, False, token == int(text[position]))
            if not right:
                break

    def _say_idle(self) -> None:
        if not self.said_idle:
            self.said_idle = True
            self.port.send(IDLE, self.rounds, len(self.verified))


def values_of(sampling: Sampling, verifier: Verifier) -> Callable[[torch.Tensor, Row], torch.Tensor]:
    """What a row's draws are the argmax of: (vocab,) logits, and the row that they follow."""
    if sampling.greedy and not sampling.edits_logits:
        return lambda logits, row: logits.float()
    return verifier.values


def make_note(values: torch.Tensor, token: int, count: int, enough: float = 1.0) -> Note:
    """Probabilities by the softmax of the values; with noise they say how clear the draw was.

    Args:
        values: (vocab,), from `values_of`.
        count: how many of the highest-ranked tokens to look at.
        enough: a confidence above which the others are not asked for.
    """
    total = values.logsumexp(-1)
    confidence = float((values[token] - total).exp())
    if confidence > enough:
        return Note(confidence, [])
    best = values.topk(min(count, len(values)))
    pairs = zip(best.indices.tolist(), (best.values - total).exp().tolist(), strict=True)
    return Note(confidence, [(other, chance) for other, chance in pairs if other != token])


def _agrees(line: Line, text: np.ndarray, start: int) -> bool:
    end = min(len(line), len(text))
    return bool((line.row.tokens.view()[start:end] == text[start:end]).all())
