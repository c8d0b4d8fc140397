"""The last level of a cascade: drafters that are statistics of the text itself and cost next to nothing.

`Ngram` is the one to use. It continues the longest suffix of prompt and output that occurred before (the suffix
automaton of `lookup`), also behind draft tokens that are not verified yet. Recency decides which occurrence is
continued, frequency how far to trust it: the two latest occurrences that were followed by the same token are a much
better sign than one occurrence, and two that were not are a bad one. On 64 prompts answered by SmolLM2-135M (7,070
tokens) a match of two tokens was right in 82 % of the cases where they agreed, 53 % where there was one, 23 % where
they did not, and the second latest was never clearly better than the latest. It stops instead of inventing.

`MaxGram` is MaG of CS Drafting as published (arXiv 2312.11462, section 3.1, and its code): the longest suffix match
without a bound, the leftmost occurrence, then the same again, then a static table of bigrams. The published tables
are not shipped; without one it falls silent where they would have spoken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import UsageError
from .base import Drafter, Row
from .lookup import SuffixAutomaton
from .proposal import NOTHING, Proposal, split

LENGTHS = (1, 2, 3, 4, 5, 6, 9, 17)  # shortest match of each class
DIFFER, SINGLE, AGREE = range(3)
BIGRAM = 3 * len(LENGTHS)  # the sign of a token that comes from a table of bigrams
# Share of tokens that were right, by class of match (rows) and by what the two latest occurrences say (columns);
# measured as above, evened out. A start for what a schedule then learns from the text at hand.
SHARES = (
    (0.15, 0.35, 0.5), (0.25, 0.55, 0.8), (0.3, 0.65, 0.8), (0.35, 0.72, 0.88),
    (0.4, 0.77, 0.9), (0.4, 0.84, 0.92), (0.4, 0.92, 0.97), (0.5, 0.97, 0.98),
)  # fmt: skip
BIGRAM_SHARE = 0.15
_CLASS = [sum(length >= least for least in LENGTHS) - 1 for length in range(LENGTHS[-1] + 1)]


def share_of(sign: int) -> float:
    """The share of tokens with this sign that is right, before anything was learned."""
    return BIGRAM_SHARE if sign == BIGRAM else SHARES[sign // 3][sign % 3]


class Ngram(Drafter):
    """Continues the most recent earlier occurrence of the longest suffix; the sign of a token is how it was matched.

    Args:
        level: its number in the cascade.
        min_match: the shortest suffix that counts as an occurrence, in tokens.
        per_match: at most so many tokens are proposed per matched token.
        bigrams: the token that follows where nothing matches, by token.
    """

    def __init__(
        self, level: int = 0, min_match: int = 1, per_match: float = float("inf"),
        bigrams: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.level, self.min_match, self.per_match = level, min_match, per_match
        self.bigrams = bigrams or {}
        self._index: dict[int, SuffixAutomaton] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]:
        return [self._continue(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def begin(self, row: Row) -> None:
        self._index.pop(row.index, None)

    def reset(self) -> None:
        self._index.clear()

    def _continue(self, row: Row, limit: int) -> Proposal:
        if limit < 1:
            return NOTHING
        verified, ahead = split(row.tokens)
        index = self._index.setdefault(row.index, SuffixAutomaton())
        index.extend(verified.view()[len(index.text) :].tolist())
        place = index.place()
        for token in ahead:
            place = index.step(place, token)
        text, known = index.text, len(index.text)
        behind = list(ahead)  # what follows the verified text: the draft so far, then what is proposed now
        last = ahead[-1] if ahead else text[-1]
        tokens: list[int] = []
        signs: list[int] = []
        if place.length >= self.min_match:
            limit = int(min(limit, self.per_match * place.length))
        while len(tokens) < limit:
            nexts = []
            if place.length >= self.min_match:
                for end in index.ends(place):
                    if end < known + len(behind):  # else it is the very end of the text, which nothing follows
                        nexts.append(text[end] if end < known else behind[end - known])
            if nexts:
                kind = SINGLE if len(nexts) == 1 else AGREE if nexts[0] == nexts[1] else DIFFER
                signs.append(3 * _CLASS[min(place.length, LENGTHS[-1])] + kind)
                last = nexts[0]
            elif last in self.bigrams:
                signs.append(BIGRAM)
                last = self.bigrams[last]
            else:
                break
            tokens.append(last)
            behind.append(last)
            place = index.step(place, last)
        return Proposal(tokens, None, (), (self.level,) * len(tokens), signs)


class MaxGram(Drafter):
    """MaG as published: longest match at the leftmost occurrence, at most `block` tokens of it, then once more.

    `faithful` keeps what its code does beyond that: `block` tokens whatever is asked; the prompt stands twice in the
    text that is searched, so a match may run across the seam; the second search adds up to a whole block, so that up
    to 2 * block - 1 tokens come out.
    """

    def __init__(
        self, level: int = 0, block: int = 10, faithful: bool = True, bigrams: Mapping[int, int] | None = None
    ) -> None:
        self.level, self.block, self.faithful, self.bigrams = level, block, faithful, bigrams or {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]:
        return [self._continue(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _continue(self, row: Row, limit: int) -> Proposal:
        ids = row.tokens.view().copy()
        text = np.concatenate([ids[: row.prompt_length], ids[:-1]]) if self.faithful else ids[:-1]
        found = leftmost(text, ids)[: self.block].tolist()
        if len(found) < self.block:
            longer = np.append(ids, found)
            found += leftmost(longer[:-1], longer)[: self.block].tolist()
        last = found[-1] if found else int(ids[-1])
        while len(found) < self.block and last in self.bigrams:
            last = self.bigrams[last]
            found.append(last)
        tokens = found if self.faithful else found[:limit]
        return Proposal(tokens, None, (), (self.level,) * len(tokens))


def leftmost(text: np.ndarray, suffix: np.ndarray) -> np.ndarray:
    """What follows the leftmost place in `text` where the longest suffix of `suffix` that occurs at all occurs."""
    at = np.flatnonzero(text == suffix[-1])
    for back in range(1, len(suffix)):
        longer = at[at >= back]
        longer = longer[text[longer - back] == suffix[-1 - back]]
        if not len(longer):
            break
        at = longer
    return text[at[0] + 1 :] if len(at) else text[:0]


def read_bigrams(path: Path, vocab_size: int) -> dict[int, int]:
    """A table `{"token id": id of the token that mostly follows}`; JSON. Raises UsageError."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        bigrams = {int(token): int(follows) for token, follows in table.items()}
    except OSError as error:
        raise UsageError(f"cascade.bigrams={path}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError):
        raise UsageError(f'cascade.bigrams={path}: not a JSON object of token ids, as {{"12": 345}}') from None
    if wrong := [token for pair in bigrams.items() for token in pair if not 0 <= token < vocab_size]:
        raise UsageError(f"cascade.bigrams={path}: the vocabulary goes from 0 to {vocab_size - 1}, not to {wrong[0]}")
    return bigrams
