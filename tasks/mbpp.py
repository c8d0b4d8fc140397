"""MBPP: small Python functions from a sentence and three tests (Austin et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import TaskError
from .base import Card, Prompt
from .hub import HubTask, Source
from .reading import text


class Mbpp(HubTask):
    name = "mbpp"
    summary = "MBPP, small Python functions from a sentence and tests (hub)"
    card = Card(
        source="google-research-datasets/mbpp (full, or sanitized with the subtask of that name), split test",
        size="500 problems (full), 257 (sanitized)",
        licence="CC BY 4.0",
        template="the problem, an instruction, and its tests in a Python code fence; 512 new tokens",
        limits="no examples before the problem, unlike the paper's three; answers are not executed",
    )
    subtasks = ("full", "sanitized")
    source = Source("google-research-datasets/mbpp", "full", "test", ("task_id", "text", "test_list"))

    def selected(self) -> Source:
        if self.subtask == "sanitized":
            return replace(self.source, config="sanitized", columns=("task_id", "prompt", "test_list"))
        return self.source

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        tests = row["test_list"]
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise TaskError(f'{where}: "test_list" must be a list of texts.')
        problem = text(row, self.selected().columns[1], where)
        fence = "```python\n" + "\n".join(tests) + "\n```"
        asked = f"{problem}\n\nAnswer with one Python code block. The code has to pass these tests:\n\n{fence}"
        return Prompt(id=str(row["task_id"]), turns=(asked,), category="code", max_new_tokens=512)
