"""HumanEval: Python functions from signature and docstring (Chen et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .base import Card, Prompt
from .hub import HubOptions, HubTask, Source
from .reading import text

STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")


@dataclass(frozen=True)
class HumanEvalOptions(HubOptions):
    """`style`: chat asks for the whole function; completion continues the code and stops at the next definition."""

    style: Literal["chat", "completion"] = "chat"


class HumanEval(HubTask):
    name = "humaneval"
    summary = "HumanEval, Python functions from their docstring (hub or file)"
    card = Card(
        source="openai/openai_humaneval (openai_humaneval), split test; or HumanEval.jsonl(.gz) with the option path",
        size="164 functions",
        licence="MIT",
        template="an instruction and the code in a Python code fence; style=completion: the bare code; 512 new tokens",
        limits="answers are not executed, so a strategy's speed is measured and not the model's skill",
    )
    Options = HumanEvalOptions
    source = Source("openai/openai_humaneval", "openai_humaneval", "test", ("task_id", "prompt"))

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        code, name = text(row, "prompt", where), str(row["task_id"])
        if self.options.style == "completion":
            return Prompt(id=name, turns=(code,), category="code", max_new_tokens=512, raw=True, stop=STOP)
        asked = (
            "Complete this Python function. Answer with the whole function, its imports included, "
            f"in one code block.\n\n```python\n{code.rstrip()}\n```"
        )
        return Prompt(id=name, turns=(asked,), category="code", max_new_tokens=512)
