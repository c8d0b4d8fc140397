"""The contract of a task: where its prompts come from, and what they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class Tokenizer(Protocol):
    """What a task may ask of the target's tokenizer: lengths and cuts in tokens, no special tokens added."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """One item of a task.

    Attributes:
        id: unique within the task and stable over runs.
        turns: what the user says; later turns are asked after the answer to the one before.
        category: the group that tables may split by.
        max_new_tokens: the task's own limit per turn; `--max-new-tokens` overrules it.
        raw: continue the text as it is, whatever chat template the tokenizer has.
        stop: strings that end the answer; what follows the first of them is trimmed.
    """

    id: str
    turns: tuple[str, ...]
    category: str = ""
    max_new_tokens: int = 256
    raw: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """What a reader has to know about a data set before believing a number made on it."""

    source: str
    size: str
    licence: str
    template: str
    limits: str


class Task(ABC):
    """A data set that yields prompts.

    `Options` is a frozen dataclass whose fields are the task's options (`--option name.key=value`, hyphens for
    underscores); a bad value raises `TaskError` in its `__post_init__`, before anything is loaded.

    `subtasks` are the names that may follow the task's own after a colon (`spec-bench:mt_bench`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    card: ClassVar[Card]
    subtasks: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type]

    def __init__(self, options: Any, subtask: str | None = None) -> None:
        self.options = options
        self.subtask = subtask

    def check(self) -> None:  # noqa: B027 - most tasks have nothing to check
        """Refuses what can be refused before a model is loaded: a missing file or column. Raises TaskError."""

    @abstractmethod
    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        """The first `limit` prompts (all if None), in a fixed order that spreads over the categories where there
        are any. Raises TaskError with file, line and reason for bad data; never connects anywhere when the
        offline flags are set."""
