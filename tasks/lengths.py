"""Texts of a given length in tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from .base import Tokenizer


def count(text: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(text))


def head(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The beginning of `text` with as many tokens as fit into `tokens`, when it is encoded on its own."""
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text
    cut = tokenizer.decode(ids[:tokens])
    if text.startswith(cut) and count(cut, tokenizer) == tokens:
        return cut
    # The cut fell inside a character, or the tokenizer does not give its text back: search by characters.
    return text[: _search(len(text), tokens, lambda size: count(text[:size], tokenizer))]


def tail(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The end of `text` with as many tokens as fit into `tokens`, when it is encoded on its own."""
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text
    cut = tokenizer.decode(ids[len(ids) - tokens :])
    if text.endswith(cut) and count(cut, tokenizer) == tokens:
        return cut
    size = _search(len(text), tokens, lambda size: count(text[len(text) - size :], tokenizer))
    return text[len(text) - size :]


def _search(longest: int, tokens: int, count_of: Callable[[int], int]) -> int:
    return max(0, bisect.bisect_right(range(longest + 1), tokens, key=count_of) - 1)


def head_and_tail(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """`text` cut in the middle to about `tokens` tokens, so that instruction and question both stay."""
    if count(text, tokenizer) <= tokens:
        return text
    return head(text, tokens // 2, tokenizer) + tail(text, tokens - tokens // 2, tokenizer)


def fill(render: Callable[[str], str], material: str, tokens: int, tokenizer: Tokenizer) -> str | None:
    """`render(part)` for the beginning of `material` with which it has at most, and nearly, `tokens` tokens.

    Nearly is within four tokens and 1 %, for the tokenizers tried. None if `render` is too long with no material at
    all, or too short with all of it.
    """
    budget = tokens - count(render(""), tokenizer)
    slack = min(4, tokens // 100)
    best = None
    for _ in range(6):
        if budget < 0:
            break
        part = head(material, budget, tokenizer)
        filled = render(part)
        missing = tokens - count(filled, tokenizer)
        if missing > slack and part == material:
            return None
        if missing >= 0:
            best = filled
        if 0 <= missing <= slack:
            break
        budget += missing  # tokens may merge where the part meets its frame
    return best
