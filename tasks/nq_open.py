"""NQ-Open: questions people asked a search engine, without a document (Kwiatkowski et al. 2019, Lee et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Card, Prompt
from .hub import HubTask, Source
from .reading import text


class NqOpen(HubTask):
    name = "nq-open"
    summary = "Natural Questions without documents, short factual questions (hub)"
    card = Card(
        source="google-research-datasets/nq_open (nq_open), split validation",
        size="3,610 questions",
        licence="CC BY-SA 3.0",
        template="the bare question as stored, without a question mark; 256 new tokens",
        limits="prompts of about ten tokens: prefill says nothing here",
    )
    source = Source("google-research-datasets/nq_open", "nq_open", "validation", ("question",))

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        return Prompt(id=str(index), turns=(text(row, "question", where),), category="qa", max_new_tokens=256)
