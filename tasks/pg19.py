"""PG-19: books from before 1919, continued from their beginning (Rae et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import TaskError
from .base import Card, Prompt, Tokenizer
from .hub import HubOptions, HubTask, Source
from .lengths import count, head
from .reading import text


@dataclass(frozen=True)
class Pg19Options(HubOptions):
    prompt_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise TaskError(f"pg19: prompt-tokens must be 1 or more, not {self.prompt_tokens}.")


class Pg19(HubTask):
    name = "pg19"
    summary = "PG-19, books continued from their first few thousand tokens (hub)"
    card = Card(
        source="emozilla/pg19 (default), split test: a parquet copy of deepmind/pg19",
        size="100 books; those shorter than prompt-tokens are left out",
        licence="Apache-2.0 (the collection); the books are in the public domain in the USA",
        template="the first prompt-tokens tokens of the book (4096), no chat template; 128 new tokens",
        limits="begins with title pages and contents; the number of prompts depends on prompt-tokens",
    )
    Options = Pg19Options
    source = Source("emozilla/pg19", "default", "test", ("text",))

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        wanted = self.options.prompt_tokens
        found: list[Prompt] = []
        for _, book in self.pairs():
            if limit is not None and len(found) >= limit:
                break
            # 24 characters are more than a token of prose has; a whole book would take seconds
            start = head(book.turns[0][: 24 * wanted], wanted, tokenizer)
            if count(start, tokenizer) >= 0.99 * wanted:
                found.append(replace(book, turns=(start,)))
        if not found and limit != 0:
            raise TaskError(f"pg19: no book has {wanted} tokens; lower prompt-tokens.")
        return found

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        return Prompt(id=str(index), turns=(text(row, "text", where),), category="book", max_new_tokens=128, raw=True)
