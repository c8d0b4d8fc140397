"""CNN/DailyMail: news articles to be summarised (Hermann et al. 2015, See et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Card, Prompt
from .hub import HubTask, Source
from .reading import text


class CnnDailymail(HubTask):
    name = "cnn-dailymail"
    summary = "CNN/DailyMail, news articles to be summarised (hub)"
    card = Card(
        source="abisee/cnn_dailymail (3.0.0), split test",
        size="11,490 articles",
        licence="Apache-2.0 (the collection); the articles are the publishers'",
        template='"Summarize:", a line break and the article; 256 new tokens',
        limits="articles are not cut: some are longer than 2,000 tokens",
    )
    source = Source("abisee/cnn_dailymail", "3.0.0", "test", ("article",))

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        asked = f"Summarize:\n{text(row, 'article', where)}"
        return Prompt(id=str(row.get("id") or index), turns=(asked,), category="summarization", max_new_tokens=256)
