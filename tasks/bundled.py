"""Prompts of our own, in the package: eight kinds of work, no download.

They are written for specbench and belong to no published data set, so that no model can have met the answers there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from .base import Card, Prompt, Task, Tokenizer
from .reading import interleave

CATEGORIES = (
    "chat",
    "code-writing",
    "code-editing",
    "math-reasoning",
    "summarisation",
    "translation",
    "question-answering",
    "retrieval-qa",
)


@dataclass(frozen=True)
class BundledOptions:
    pass


class Bundled(Task):
    name = "bundled"
    summary = "prompts of our own for eight kinds of work, no download"
    card = Card(
        source="tasks/bundled.jsonl of specbench",
        size="64 prompts, eight in each of eight categories; those of chat have two turns",
        licence="as specbench",
        template="the text as stored; 96 (question-answering) to 512 (the two of code) new tokens",
        limits="small and by one hand: good for trying out and for CI, too few for a claim; no reference answers",
    )
    subtasks = CATEGORIES
    Options = BundledOptions

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        """Categories in turn, in the order of `CATEGORIES`."""
        lines = (
            files(__name__.rpartition(".")[0])
            .joinpath("bundled.jsonl")
            .read_text(encoding="utf-8")
            .rstrip("\n")
            .split("\n")
        )
        rows = [json.loads(line) for line in lines]
        prompts = [
            Prompt(row["id"], tuple(row["turns"]), row["category"], row["max_new_tokens"])
            for row in rows
            if self.subtask in (None, row["category"])
        ]
        return interleave(prompts, key=lambda prompt: prompt.category)[:limit]
