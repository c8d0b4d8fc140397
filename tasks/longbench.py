"""LongBench: 21 tasks over long texts in English and Chinese (Bai et al. 2024).

Read from a parquet copy that already holds each task's own instruction: `context` begins with it, `question` ends
with it, and `answer_prefix` is where the answer starts. Rows in the original layout (`context`, `input`) are read
too, as the text and the input with an empty line between them, and then have no instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import TaskError
from .base import Card, Prompt, Tokenizer
from .hub import HubOptions, HubTask, Source
from .lengths import head_and_tail
from .reading import text

# The original's limits on new tokens.
MAX_NEW_TOKENS = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64,
    "hotpotqa": 32, "2wikimqa": 32, "musique": 32, "dureader": 128,
    "gov_report": 512, "qmsum": 512, "multi_news": 512, "vcsum": 512,
    "trec": 64, "triviaqa": 32, "samsum": 128, "lsht": 64,
    "passage_count": 32, "passage_retrieval_en": 32, "passage_retrieval_zh": 32,
    "lcc": 64, "repobench-p": 64,
}  # fmt: skip
# Examples to go on from, and code: the authors advise against a chat template.
RAW = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@dataclass(frozen=True)
class LongBenchOptions(HubOptions):
    prompt_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2:
            raise TaskError(f"longbench: prompt-tokens must be 2 or more, not {self.prompt_tokens}.")


class LongBench(HubTask):
    name = "longbench"
    summary = "LongBench, 21 tasks over long texts, one a subtask (hub)"
    card = Card(
        source="Xnhyacinth/LongBench (the subtask's name), split test: a parquet copy of THUDM/LongBench",
        size="150 to 500 rows a subtask",
        licence="MIT (the collection); the texts have their own",
        template="context, question and answer prefix as stored, cut in the middle to prompt-tokens (8192); "
        "no chat template for trec, triviaqa, samsum, lsht, lcc and repobench-p; 32 to 512 new tokens",
        limits="what is cut may hold the answer; shorter rows are left as short as they are",
    )
    subtasks = tuple(MAX_NEW_TOKENS)
    Options = LongBenchOptions
    source = Source("Xnhyacinth/LongBench", "", "test", ("context",))

    def selected(self) -> Source:
        if self.subtask is None:
            raise TaskError("longbench needs a subtask, for example longbench:qasper. See: specbench list tasks")
        return replace(self.source, config=self.subtask)

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        wanted = self.options.prompt_tokens
        return [
            replace(prompt, turns=(head_and_tail(prompt.turns[0], wanted, tokenizer),))
            for prompt in super().prompts(tokenizer, limit)
        ]

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        context = text(row, "context", where)
        if "input" in row:
            asked = f"{context}\n\n{row['input'] or ''}".rstrip()
        else:
            asked = context + text(row, "question", where) + (row.get("answer_prefix") or "")
        subtask = self.selected().config
        return Prompt(
            id=str(index),
            turns=(asked,),
            category=subtask,
            max_new_tokens=MAX_NEW_TOKENS[subtask],
            raw=subtask in RAW,
        )
