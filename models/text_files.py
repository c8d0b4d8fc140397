"""Text from a file of the user's: plain, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelError


def read_texts(path: Path) -> Iterator[str]:
    """A text file as one text, or JSON lines with `text`, `turns` or `messages` as one each. Raises ModelError."""
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                yield _text_of(json.loads(line), f"{path}:{number}")
    except OSError as error:
        raise ModelError(f"--data {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"--data {path}: {error}") from None


def _text_of(item: Any, where: str) -> str:
    if isinstance(item, dict):
        if isinstance(item.get("text"), str):
            return item["text"]
        said = [message.get("content") for message in item.get("messages") or [] if isinstance(message, dict)]
        turns: Any = item.get("turns") or said
        if turns and all(isinstance(turn, str) for turn in turns):
            return "\n".join(turns)
    raise ModelError(f"{where}: a line needs text, turns or messages")
