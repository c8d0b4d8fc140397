"""Reading rows from local files, with errors that name file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import TaskError
from .base import Prompt


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    r"""Each object of a JSONL file, `.gz` or not, with "file:line" for messages.

    Always UTF-8, whatever the locale, with or without a byte order mark. Lines end at \n alone: the other
    characters that Python's `splitlines` takes for line ends may stand inside JSON text. Blank lines are skipped.

    Raises:
        TaskError: no such file, not UTF-8, not JSON, not an object, or no rows at all.
    """
    if path.is_dir():
        raise TaskError(f"{path} is a folder; give a JSONL file.")
    empty = True
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    empty = False
                    yield where, _parse(line, where)
    except FileNotFoundError:
        raise TaskError(f"no such file: {path}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    if empty:
        raise TaskError(f"{path} holds no rows; one JSON object a line is expected.")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not valid JSON: {error.msg} (column {error.colno}).") from None
    except RecursionError:
        raise TaskError(f"{where}: the JSON is nested too deeply.") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: expected a JSON object, found {_kind(row)}.")
    return row


def text(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in `column`: there, a string, not blank, and fit to be tokenised; else TaskError."""
    return _checked(field(row, column, where), f'"{column}"', where)


def turns(row: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    """The list of texts in `column`, one a turn; else TaskError."""
    value = field(row, column, where)
    if not isinstance(value, list) or not value:
        raise TaskError(f'{where}: "{column}" must be a list of texts, not {_kind(value)}.')
    return tuple(_checked(turn, f'turn {number} of "{column}"', where) for number, turn in enumerate(value, 1))


def field(row: Mapping[str, Any], column: str, where: str) -> Any:
    """The value in `column`, or a TaskError that lists the columns there are."""
    if column not in row:
        raise TaskError(f'{where}: no column "{column}"; the columns there are: {", ".join(row) or "none"}.')
    return row[column]


def _checked(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise TaskError(f"{where}: {what} must be text, not {_kind(value)}.")
    if not value.strip():
        raise TaskError(f"{where}: {what} is empty.")
    try:
        value.encode("utf-8")  # JSON can spell half of a surrogate pair, on which tokenizers fail later
    except UnicodeEncodeError:
        raise TaskError(f"{where}: {what} holds half of a surrogate pair, which is no character.") from None
    return value


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "an empty list" if value == [] else "a list", str: "text"}
    return "null" if value is None else kinds.get(type(value), f"{value!r}")


def unique(prompts: Iterable[tuple[str, Prompt]]) -> list[Prompt]:
    """The prompts of (where, prompt) pairs; TaskError if an id comes twice."""
    seen: dict[str, str] = {}
    kept = []
    for where, prompt in prompts:
        if prompt.id in seen:
            raise TaskError(f'{where}: the id "{prompt.id}" stands at {seen[prompt.id]} already; ids must be unique.')
        seen[prompt.id] = where
        kept.append(prompt)
    return kept


def interleave(prompts: Iterable[Prompt], key: Callable[[Prompt], str]) -> list[Prompt]:
    """One prompt of each group in turn, groups and prompts in the order in which they first come."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(key(prompt), []).append(prompt)
    longest = max(map(len, groups.values()), default=0)
    return [group[rank] for rank in range(longest) for group in groups.values() if rank < len(group)]
