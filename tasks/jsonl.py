"""Prompts from the user's own JSONL file, one object a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TaskError
from .base import Card, Prompt, Task, Tokenizer
from .reading import field, interleave, json_lines, text, turns, unique


@dataclass(frozen=True)
class JsonlOptions:
    """`prompt`, `id`, `category` and `max_new_tokens` are names of columns.

    The last three are optional columns when they are not named: "id", "category" and "max_new_tokens" if the rows
    have them. A column that is named must be in every row.
    """

    path: Path | None = None
    prompt: str = "prompt"
    id: str | None = None
    category: str | None = None
    max_new_tokens: str | None = None
    raw: bool = False


class Jsonl(Task):
    name = "jsonl"
    summary = "your own prompts, one JSON object a line"
    card = Card(
        source="the file given with the option path",
        size="as many as the file has rows",
        licence="the file's own",
        template="the text as it stands; raw=true: continued without a chat template; 256 new tokens unless a row says",
        limits="whatever is in the file; nothing is known about it",
    )
    Options = JsonlOptions

    def check(self) -> None:
        self._all()

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        return interleave(self._all(), key=lambda prompt: prompt.category)[:limit]

    def _all(self) -> list[Prompt]:
        if self.options.path is None:
            raise TaskError("jsonl needs the option path. Pass it as: --option jsonl.path=prompts.jsonl")
        return unique((where, self._prompt(row, where)) for where, row in json_lines(self.options.path))

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        limit = self._optional(row, "max_new_tokens", where, 256)
        if type(limit) is not int or limit < 1:
            column = self.options.max_new_tokens or "max_new_tokens"
            raise TaskError(f'{where}: "{column}" must be a whole number of 1 or more, not {limit!r}.')
        return Prompt(
            id=str(self._optional(row, "id", where, where.rpartition(":")[2])),
            turns=self._turns(row, where),
            category=str(self._optional(row, "category", where, "")),
            max_new_tokens=limit,
            raw=self.options.raw,
        )

    def _turns(self, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """The prompt column, a text or a list of them; a row that lacks it may have "turns" instead."""
        column = self.options.prompt
        if column not in row and "turns" in row:
            column = "turns"
        return turns(row, column, where) if isinstance(row.get(column), list) else (text(row, column, where),)

    def _optional(self, row: Mapping[str, Any], what: str, where: str, default: Any) -> Any:
        named = getattr(self.options, what)
        if named is not None:
            return field(row, named, where)
        value = row.get(what)
        return default if value is None else value
