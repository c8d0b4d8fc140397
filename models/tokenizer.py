"""Text to token ids and back, once per prompt and the same for every arm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..errors import ModelError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model gets it.

    Attributes:
        ids: what is fed to every arm.
        text: what was tokenised; for `raw` without the special tokens that stand before it in `ids`.
        template: whether the tokenizer's chat template made the text.
        sha256: of the text, for the record.
    """

    ids: list[int]
    text: str
    template: Literal["chat", "raw"]
    sha256: str


class TextCodec:
    """A transformers tokenizer with nothing left to chance: special tokens are added here or not at all.

    Args:
        hf_tokenizer: any tokenizer of transformers; not changed.
        name: for messages.
    """

    def __init__(self, hf_tokenizer: Any, name: str = "tokenizer") -> None:
        self.hf_tokenizer = hf_tokenizer
        self.name = name

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone. Special tokens written in the text count as such; none are added."""
        return list(self.hf_tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of the ids, exactly; bytes that are not valid UTF-8 become U+FFFD."""
        plain = [int(token) for token in ids]
        return self.hf_tokenizer.decode(plain, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def render(self, messages: Sequence[Message], raw: bool = False) -> Rendered:
        """The ids of a conversation that the assistant is to continue.

        With the tokenizer's chat template, encoded without adding special tokens, since templates write their own.
        With `raw`, or without a template, the texts as they are: an answer follows its prompt directly, and a
        later prompt starts on a new line; special tokens stand in front where the tokenizer puts them.

        Args:
            messages: `{"role": ..., "content": ...}` each, the last one from the user.

        Raises:
            ModelError: two BOS tokens at the start, nothing at all, or the template refuses the messages.
        """
        if not raw and self.has_template:
            text, template = self._chat(messages), "chat"
            ids = self.encode(text)
        else:
            text, template = _joined(messages), "raw"
            ids = [*self.prefix, *self.encode(text)]
        if not ids:
            raise ModelError(f"{self.name}: the prompt is empty")
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            bos = self.hf_tokenizer.bos_token
            raise ModelError(f'{self.name}: the prompt starts with two BOS tokens; leave "{bos}" out of the text')
        return Rendered(ids, text, template, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())

    def _chat(self, messages: Sequence[Message]) -> str:
        try:
            return self.hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of the model's author: anything may come out
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"{self.name}: its chat template refuses the messages ({reason[:200]})") from error

    @cached_property
    def prefix(self) -> list[int]:
        """The special tokens that the tokenizer itself puts before a text, often none or one BOS."""
        bare, dressed = self.encode("a"), list(self.hf_tokenizer.encode("a"))
        for at in range(len(dressed) - len(bare) + 1):
            if dressed[at : at + len(bare)] == bare:
                return dressed[:at]
        return []

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.hf_tokenizer, "chat_template", None))

    @property
    def bos_id(self) -> int | None:
        return self.hf_tokenizer.bos_token_id

    @property
    def eos_id(self) -> int | None:
        return self.hf_tokenizer.eos_token_id

    @cached_property
    def token_map(self) -> dict[str, int]:
        """Every token with its id, added ones included."""
        return dict(self.hf_tokenizer.get_vocab())

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers with the same tokens, special tokens in front, and chat template."""
        parts = [sorted(self.token_map.items()), self.prefix, getattr(self.hf_tokenizer, "chat_template", None)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _joined(messages: Sequence[Message]) -> str:
    text = ""
    for message in messages:
        text += ("\n" if text and message["role"] == "user" else "") + message["content"]
    return text
