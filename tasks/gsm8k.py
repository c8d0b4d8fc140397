"""GSM8K: primary-school word problems (Cobbe et al. 2021). No examples are shown before the problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Card, Prompt
from .hub import HubTask, Source
from .reading import text

INSTRUCTION = "Solve this step by step, and put the final number in \\boxed{}."


class Gsm8k(HubTask):
    name = "gsm8k"
    summary = "GSM8K, word problems to be solved step by step (hub)"
    card = Card(
        source="openai/gsm8k (main), split test",
        size="1,319 problems",
        licence="MIT",
        template=f"the problem, an empty line, and: {INSTRUCTION} 512 new tokens",
        limits="Spec-Bench gives the bare problem, lm-eval five examples before it: not comparable with either",
    )
    source = Source("openai/gsm8k", "main", "test", ("question",))

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        asked = f"{text(row, 'question', where)}\n\n{INSTRUCTION}"
        return Prompt(id=str(index), turns=(asked,), category="math", max_new_tokens=512)
