r"""Spec-Bench's `question.jsonl`, read as it is (Xia et al. 2024, https://github.com/hemingkx/Spec-Bench).

Any file of that shape will do: a part of the rows, other ids, one file per subtask, further keys. `reference` is
not read: some rows lack it, and in the retrieval rows it is a list of lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import TaskError
from .base import Card, Prompt, Task, Tokenizer
from .reading import field, interleave, json_lines, text, turns, unique

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class SpecBenchOptions:
    path: Path | None = None


class SpecBench(Task):
    name = "spec-bench"
    summary = "Spec-Bench's question.jsonl: six groups from chat to retrieval (needs the file)"
    card = Card(
        source="data/spec_bench/question.jsonl of the GitHub repository hemingkx/Spec-Bench",
        size="480 prompts: 80 each of mt_bench (two turns), translation, summarization, qa, math_reasoning, rag",
        licence="Apache-2.0 (repository); the rows come from MT-Bench, WMT14, CNN/DailyMail, Natural Questions, GSM8K",
        template="the text as stored, one user turn each; 1024 new tokens",
        limits="not part of specbench: the file has to be given. Spec-Bench itself used Vicuna's template in float16",
    )
    subtasks = (*GROUPS, *MT_BENCH)
    Options = SpecBenchOptions

    def check(self) -> None:
        self._rows()

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        """Groups in turn, and within mt_bench its eight categories in turn."""
        rows = self._rows()
        by_category = interleave(rows, key=lambda prompt: rows[prompt])
        return interleave(by_category, key=lambda prompt: prompt.category)[:limit]

    def _rows(self) -> dict[Prompt, str]:
        """The prompts that were asked for, each with its category as the file has it."""
        path = self.options.path
        if path is None:
            raise TaskError(
                "spec-bench needs the option path: question.jsonl is in data/spec_bench of the GitHub repository "
                "hemingkx/Spec-Bench. Pass it as: --option spec-bench.path=question.jsonl"
            )
        read = [(where, *_prompt(row, where)) for where, row in json_lines(path)]
        unique((where, prompt) for where, prompt, _ in read)
        rows = {
            p: category for _, p, category in read if self.subtask is None or self.subtask in (p.category, category)
        }
        if not rows:
            found = ", ".join(sorted({category for _, _, category in read}))
            raise TaskError(f"{path} has no rows of {self.subtask}; the categories there are: {found}.")
        return rows


def _prompt(row: dict, where: str) -> tuple[Prompt, str]:
    category = text(row, "category", where)
    group = "mt_bench" if category in MT_BENCH else category
    name = str(field(row, "question_id", where))
    return Prompt(id=name, turns=turns(row, "turns", where), category=group, max_new_tokens=1024), category
