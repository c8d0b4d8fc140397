"""The target's book of what the draft has posted, compared with what is verified.

It also keeps the accounts: every posted token is looked at by a verification, or confirmed (the target came to the
same token by itself, so the line that it belongs to goes on), or wasted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import TokenBuffer


class _Entry:
    """One posted token; lines that share it share the entry."""

    __slots__ = ("open", "token")

    def __init__(self, token: int) -> None:
        self.token, self.open = token, True


class Ledger:
    """Lines of one request, as the draft names them in its messages (`strategies.ahead`).

    Args:
        text: the verified text, prompt included; the ledger reads it and does not change it.

    Attributes:
        posted, looked, confirmed, wasted: draft tokens so far.
        branched: of those posted, how many continue another line than the oldest live one.
        rescued: tokens that were ready on another line when the oldest one turned out to be wrong.
    """

    def __init__(self, text: TokenBuffer) -> None:
        self._text = text
        self._length = len(text)  # of the text, as far as the lines have been compared with it
        self._lines: dict[int, list[_Entry]] = {}  # what live lines say from there on
        self._newest = 0
        self.posted = self.looked = self.confirmed = self.wasted = 0
        self.branched = self.rescued = 0

    def draft(self, number: int, base: int, ids: Sequence[int]) -> None:
        """A line goes on with `ids` at position `base`, or begins there."""
        self.posted += len(ids)
        line = self._lines.get(number)
        if line is None:
            if number <= self._newest:  # dead
                self.wasted += len(ids)
                return
            self._newest = number
            line = self._lines[number] = []
        self.branched += len(ids) if number > min(self._lines) else 0
        late = min(max(self._length - base, 0), len(ids))
        self.wasted += late
        if late and list(ids[:late]) != self._text.view()[base : base + late].tolist():
            self.wasted += len(ids) - late
            self._end(number)
        else:
            line.extend(_Entry(token) for token in ids[late:])

    def fork(self, number: int, base: int, parent: int, ids: Sequence[int]) -> None:
        """A line begins that says `ids` from position `base` on, all but the last of them as its parent does."""
        self._newest = number
        self.posted += 1
        new = _Entry(ids[-1])
        shared = self._length - base  # of the ids: verified meanwhile
        if shared >= len(ids):
            self.wasted += 1
            if list(ids) == self._text.view()[base : base + len(ids)].tolist():
                self._lines[number] = []
        elif parent in self._lines and list(ids[:shared]) == self._text.view()[base : base + shared].tolist():
            # The parent says the same as this line up to the last token, which is not verified yet.
            self._lines[number] = [*self._lines[parent][: len(ids) - 1 - shared], new]
        else:
            self.wasted += 1

    def best(self) -> list[int]:
        """Draft tokens to verify next: those of the oldest live line that has any, which is the main one."""
        for number in sorted(self._lines):
            if self._lines[number]:
                return [entry.token for entry in self._lines[number]]
        return []

    def verified(self, tokens: Sequence[int], looked: int) -> bool:
        """The text has grown by `tokens`, after a look at the first `looked` tokens of `best()`.

        Returns:
            Whether a live line is left that says what comes next.
        """
        self.looked += looked
        seen = next((line for _, line in sorted(self._lines.items()) if line), [])[:looked]
        for entry in seen:
            entry.open = False
        agreeing = {number for number, line in self._lines.items() if _agree(line, tokens)}
        for number in agreeing:
            line = self._lines[number]
            for entry in line[: len(tokens)]:
                self.confirmed += entry.open
                entry.open = False
            del line[: len(tokens)]
        oldest = min(self._lines, default=None)
        for number in self._lines.keys() - agreeing:
            self._end(number)
        self._length += len(tokens)
        if oldest not in agreeing and self._lines:
            self.rescued += len(self._lines[min(self._lines)])
        return any(self._lines.values())

    def close(self) -> None:
        """Nothing more will be looked at."""
        for number in list(self._lines):
            self._end(number)

    def _end(self, number: int) -> None:
        for entry in self._lines.pop(number):
            self.wasted += entry.open
            entry.open = False


def _agree(line: list[_Entry], tokens: Sequence[int]) -> bool:
    return all(entry.token == token for entry, token in zip(line, tokens, strict=False))
