"""MT-Bench: 80 two-turn questions in eight categories (Zheng et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Card, Prompt, Tokenizer
from .hub import HubTask, Source
from .reading import interleave, turns, unique


class MtBench(HubTask):
    name = "mt-bench"
    summary = "MT-Bench, 80 two-turn chats in eight categories (hub)"
    card = Card(
        source="HuggingFaceH4/mt_bench_prompts (default), split train",
        size="80 prompts of two turns, ten in each of eight categories",
        licence="Apache-2.0",
        template="the questions as stored; the second follows the model's own first answer; 1024 new tokens",
        limits="short prompts, English only; the reference answers are not read",
    )
    source = Source("HuggingFaceH4/mt_bench_prompts", "default", "train", ("prompt", "category"))

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        return interleave(unique(self.pairs()), key=lambda prompt: prompt.category)[:limit]

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        name = row.get("prompt_id")
        return Prompt(
            id=str(index if name is None else name),
            turns=turns(row, "prompt", where),
            category=str(row["category"]),
            max_new_tokens=1024,
        )
