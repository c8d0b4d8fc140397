"""Lookup decoding: the continuation of an earlier occurrence of the latest tokens is the draft. No draft model.

Source of the idea: prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023, arXiv 2304.04487). Here the index
is a suffix automaton (Blumer et al. 1985) over prompt and output, grown token by token, so that the longest suffix
that occurred before is known at once, at any length, for a constant amount of work per token. Among its occurrences
the most recent is continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UsageError
from .base import Draft, Drafter, Request, Row, Step, Strategy
from .sampling import Sampling
from .speculative import draft_and_verify
from .verify import Verifier

_PROPAGATE = 32  # how many shorter suffixes hear of a new occurrence; the rest keep an older, still valid one
_KEPT = 3  # latest occurrences that are remembered of each substring


class Place(NamedTuple):
    """Where a text stands in a `SuffixAutomaton`: the longest suffix of it that occurs there.

    Attributes:
        state: of the automaton; 0 for the empty suffix.
        length: of that suffix, in tokens.
    """

    state: int
    length: int


class SuffixAutomaton:
    """All substrings of a growing text, each with where it ended the last few times."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._ends: list[tuple[int, ...]] = [(0,)]  # one past the end of the latest known occurrences, latest first
        self._last = 0
        self._previous = (0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def match(self) -> tuple[int, int]:
        """(length, end) of the longest suffix of the text that also occurs earlier: `text[end:]` followed it then.

        (0, len(text)) if the last token is new.
        """
        return self._previous

    def place(self) -> Place:
        """Where the text itself stands: the longest suffix of it that also occurs earlier."""
        state = self._link[self._last] if self.text else 0
        return Place(state, self._length[state])

    def step(self, place: Place, token: int) -> Place:
        """Where a text that stood at `place` stands after one more token, which is not made part of the automaton."""
        state, length = place
        while token not in self._next[state]:
            state = self._link[state]
            if state == -1:
                return Place(0, 0)
            length = self._length[state]
        return Place(self._next[state][token], length + 1)

    def ends(self, place: Place) -> tuple[int, ...]:
        """One past the end of the latest known occurrences of the suffix at `place`, latest first, at most three."""
        return self._ends[place.state]

    def _append(self, token: int) -> None:
        self.text.append(token)
        end = len(self.text)
        new, state = self._new_state(self._length[self._last] + 1, end), self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = 0
        else:
            self._link[new] = self._at_length(self._next[state][token], state, token)
        self._last = new
        state = self._link[new]
        self._previous = (self._length[state], self._ends[state][0] if state else end)
        for _ in range(_PROPAGATE):
            if state <= 0:
                break
            self._ends[state] = (end, *self._ends[state][: _KEPT - 1])
            state = self._link[state]

    def _at_length(self, found: int, state: int, token: int) -> int:
        """The state for exactly the strings of `state` followed by `token`, splitting `found` if it holds more."""
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        clone = self._new_state(length, *self._ends[found])
        self._next[clone] = dict(self._next[found])
        self._link[clone] = self._link[found]
        self._link[found] = clone
        while state != -1 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, length: int, *ends: int) -> int:
        self._next.append({})
        self._link.append(-1)
        self._length.append(length)
        self._ends.append(ends)
        return len(self._length) - 1


class LookupDrafter(Drafter):
    """Continues the most recent earlier occurrence of the longest suffix; says nothing where there is none.

    Args:
        min_match: the shortest suffix that counts as an occurrence, in tokens.
        per_match: at most so many tokens are proposed per matched token: a long match is worth a long draft.
    """

    def __init__(self, min_match: int = 1, per_match: float = float("inf")) -> None:
        self.min_match = min_match
        self.per_match = per_match
        self._index: dict[int, SuffixAutomaton] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        return [Draft(self._continue(row, limit)) for row, limit in zip(rows, limits, strict=True)]

    def begin(self, row: Row) -> None:
        self._index.pop(row.index, None)

    def reset(self) -> None:
        self._index.clear()

    def _continue(self, row: Row, limit: int) -> list[int]:
        index = self._index.setdefault(row.index, SuffixAutomaton())
        index.extend(row.tokens.view()[len(index.text) :].tolist())
        length, end = index.match()
        if length < self.min_match:
            return []
        limit = int(min(limit, self.per_match * length))
        draft = index.text[end : end + limit]
        period = len(index.text) - end
        while len(draft) < limit:  # the copy has caught up with itself: a loop goes on as it began
            draft.append(draft[len(draft) - period])
        return draft


@dataclass(frozen=True)
class Options:
    """
    draft_length: the most tokens proposed per round.
    min_match: the shortest suffix, in tokens, that counts as an occurrence.
    per_match: at most so many tokens per matched token.
    """

    draft_length: int = 12
    min_match: int = 2
    per_match: float = 2.0

    def __post_init__(self) -> None:
        for name in ("draft_length", "min_match", "per_match"):
            if getattr(self, name) < 1:
                raise UsageError(f"lookup.{name.replace('_', '-')}={getattr(self, name)}: has to be at least 1")


class Lookup(Strategy):
    name = "lookup"
    summary = "drafts by continuing an earlier occurrence of the latest tokens; no draft model"
    source = "Saxena 2023; Yang et al. 2023"
    roles = ("target",)
    continuous = True
    Options = Options

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        drafter = LookupDrafter(self.options.min_match, self.options.per_match)
        yield from draft_and_verify(self.target, drafter, Verifier(sampling), requests, self.options.draft_length)
