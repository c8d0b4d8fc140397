"""WMT14 news translation between German and English (Bojar et al. 2014)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TaskError
from .base import Card, Prompt
from .hub import HubTask, Source
from .reading import text

LANGUAGES = {"de": "German", "en": "English"}


class Wmt14(HubTask):
    name = "wmt14"
    summary = "WMT14, sentences from German to English or back (hub)"
    card = Card(
        source="wmt/wmt14 (de-en), split test",
        size="3,003 sentence pairs",
        licence="not stated by the data set; news texts collected for the shared task",
        template='"Translate German to English: " and the sentence; 256 new tokens',
        limits="single sentences, so short prompts and short answers; de-en unless the subtask says en-de",
    )
    subtasks = ("de-en", "en-de")
    source = Source("wmt/wmt14", "de-en", "test", ("translation",))

    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        pair = row["translation"]
        if not isinstance(pair, Mapping):
            raise TaskError(f'{where}: "translation" must be an object with "de" and "en".')
        direction = self.subtask or "de-en"
        source, target = direction.split("-")
        asked = f"Translate {LANGUAGES[source]} to {LANGUAGES[target]}: {text(pair, source, where)}"
        return Prompt(id=str(index), turns=(asked,), category=direction, max_new_tokens=256)
