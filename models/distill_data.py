"""Text to distil from: conversations that the target itself writes, or a file; and where it is kept meanwhile.

A user turn is opened through the chat template with a word or two; the target goes on, its end of text is followed by
what the template puts before an answer, and after the answer the next user turn is opened. So questions and answers
are both the target's own, and the text needs no data set. The target's final hidden states are stored with the text:
its distribution over any part of the vocabulary is then one product with the head.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ModelError
from .packed import PackedModel
from .text_files import read_texts
from .tokenizer import TextCodec

OPENINGS = (
    "What", "What is", "How", "How do I", "Why", "Who", "When", "Which", "Is", "Can you", "Could you explain", "Write",
    "Write a Python function that", "Write a short story about", "Explain", "Describe", "Summarize", "Translate",
    "List", "Give me", "Compare", "Calculate", "Solve", "If", "A train", "Rewrite", "I", "My", "The", "def", "Please",
    "Tell me about",
)  # fmt: skip
TEMPERATURES = (0.7, 1.0)
QUESTION_TOKENS = 96  # a user turn that is longer is ended
_MARKS = ("USERASKS1", "MODELSAYS1", "USERASKS2")


@dataclass(frozen=True)
class Template:
    """Token ids around the turns: before the first user turn, between question and answer, before the next one."""

    first: list[int]
    answer: list[int]
    again: list[int]

    @classmethod
    def of(cls, codec: TextCodec) -> Template:
        """Without a chat template a text is one long turn."""
        if not codec.has_template:
            return cls(codec.prefix, [], codec.prefix)
        asked, said, next_one = _MARKS
        messages = [("user", asked), ("assistant", said), ("user", next_one)]
        text = codec.hf_tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        parts = [text]
        for mark in _MARKS:
            before, found, after = parts[-1].partition(mark)
            if not found:
                raise ModelError(f"{codec.name}: its chat template leaves out a turn; distil with --data FILE")
            parts[-1:] = [before, after]
        return cls(*(codec.encode(part) for part in (parts[0], parts[3], parts[2])))


@dataclass(frozen=True)
class Written:
    """Conversations.

    Attributes:
        ids: (rows, tokens).
        answers: (rows, tokens), whether a token is an answer's; the template's own are not.
        states: (rows, tokens, width) bfloat16 on CPU, what the target's head multiplies after every token.
    """

    ids: np.ndarray
    answers: np.ndarray
    states: torch.Tensor


class Writer:
    """Lets a target write conversations, a batch of rows in step.

    Args:
        tokens: length of every text.
    """

    def __init__(self, target: PackedModel, codec: TextCodec, eos: tuple[int, ...], rows: int, tokens: int) -> None:
        self.target, self.codec, self.eos, self.rows, self.tokens = target, codec, set(eos), rows, tokens
        self.template = Template.of(codec)

    def write(self, seed: int, temperature: float, greedy_answers: bool = False) -> Written:
        target = self.target
        chance, generator = random.Random(seed), torch.Generator(target.device).manual_seed(seed)
        target.reset()
        rows = [_Row(self, chance) for _ in range(self.rows)]
        ids = np.zeros((self.rows, self.tokens), dtype=np.int64)
        answers = np.zeros((self.rows, self.tokens), dtype=bool)
        start = max(1, min(*(len(row.forced) for row in rows), self.tokens))
        for row, line in zip(rows, ids, strict=True):
            line[:start] = [row.take(None)[0] for _ in range(start)]
        states: list[torch.Tensor] = []

        def read(end: int) -> torch.Tensor:
            logits = target.advance([line[:end] for line in ids])
            if target.last_states is not None:
                states.append(target.last_states.bfloat16())
            return logits

        with target.keeping_states():
            for end in range(1, start) if target.keeps_states else ():
                read(end)
            for end in range(start, self.tokens):
                logits = read(end)
                drawn = _draw(logits, temperature, generator)
                if greedy_answers:
                    best = logits.argmax(-1).tolist()
                    drawn = [b if row.answers else d for row, b, d in zip(rows, best, drawn, strict=True)]
                for number, row in enumerate(rows):
                    ids[number, end], answers[number, end] = row.take(drawn[number])
            if target.keeps_states:
                read(self.tokens)
        target.reset()
        return Written(ids, answers, torch.stack(states, 1) if states else target.states(ids).bfloat16().cpu())


class _Row:
    """Where one conversation stands: what is put in next, and whether the target is answering."""

    def __init__(self, writer: Writer, chance: random.Random) -> None:
        self.writer, self.chance = writer, chance
        self.forced = deque(writer.template.first)
        self.answers, self.said = not writer.codec.has_template, 0
        self._open()
        if not self.forced:
            raise ModelError(f"{writer.codec.name}: has neither a chat template nor a word to begin with")

    def take(self, drawn: int | None) -> tuple[int, bool]:
        """The next token, and whether it was drawn inside an answer."""
        if self.forced:
            return self.forced.popleft(), False
        assert drawn is not None
        self.said += 1
        mine, template = self.answers, self.writer.template
        ended, too_long = drawn in self.writer.eos, not self.answers and self.said >= QUESTION_TOKENS
        if ended or too_long:
            following = template.again if self.answers else template.answer
            # the drawn token may be the first of what the template puts there
            self.forced.extend(following[1:] if following[:1] == [drawn] else following)
            if self.writer.codec.has_template:
                self.answers = not self.answers
            if not self.answers or not self.writer.codec.has_template:
                self._open()
            self.said = 0
        return drawn, mine

    def _open(self) -> None:
        self.forced.extend(self.writer.codec.encode(self.chance.choice(OPENINGS)))


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    held = (logits.float() / temperature).softmax(-1).cumsum(-1)
    luck = torch.rand(len(held), 1, generator=generator, device=held.device) * held[:, -1:]
    return torch.searchsorted(held, luck).clamp_(max=held.shape[1] - 1).squeeze(-1).tolist()


def read_file(path: Path, codec: TextCodec, tokens: int) -> np.ndarray:
    """A text file, or JSON lines with `text`, `turns` or `messages`, cut to (texts, tokens) ids. Raises ModelError."""
    stream: list[int] = []
    end = [] if codec.eos_id is None else [codec.eos_id]
    for text in read_texts(path):
        stream += [*codec.prefix, *codec.encode(text), *end]
    count = len(stream) // tokens
    if count < 2:
        raise ModelError(f"--data {path}: holds {len(stream)} tokens; at least {2 * tokens} are needed")
    return np.array(stream[: count * tokens], dtype=np.int64).reshape(count, tokens)


class Texts:
    """Texts with the target's hidden states, in files of a folder: what is there is used again after a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._open_files: list[Any] = []
        self._ids: list[np.ndarray] = []
        for file in sorted(folder.glob("texts-*.safetensors")):
            self._open(file)

    def __len__(self) -> int:
        return sum(map(len, self._ids))

    @property
    def files(self) -> int:
        return len(self._ids)

    @property
    def tokens(self) -> int:
        return sum(ids.size for ids in self._ids)

    def add(self, ids: np.ndarray, states: torch.Tensor) -> None:
        """ids (texts, tokens), states (texts, tokens, width)."""
        from safetensors.torch import save_file

        file = self.folder / f"texts-{self.files:04}.safetensors"
        part = file.with_suffix(".part")
        save_file({"ids": torch.from_numpy(ids), "states": states.bfloat16().cpu().contiguous()}, part)
        part.replace(file)
        self._open(file)

    def batch(self, picked: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (len(picked), tokens) and states (len(picked), tokens, width) of texts by their number."""
        ids, states = [], []
        starts = np.cumsum([0, *map(len, self._ids)])
        for number in picked:
            at = int(np.searchsorted(starts, number, side="right")) - 1
            row = number - int(starts[at])
            ids.append(torch.from_numpy(self._ids[at][row]))
            states.append(self._open_files[at].get_slice("states")[row])
        return torch.stack(ids).to(device), torch.stack(states).to(device)

    def frequent(self) -> list[int]:
        """Ids that occur, the most frequent first."""
        counts = np.bincount(np.concatenate([ids.ravel() for ids in self._ids]))
        order = np.argsort(-counts, kind="stable")
        return order[counts[order] > 0].tolist()

    def _open(self, file: Path) -> None:
        from safetensors import safe_open

        source: Any = safe_open(file, framework="pt").__enter__()  # stays open: its pages are read as they are needed
        self._open_files.append(source)
        self._ids.append(source.get_tensor("ids").numpy())
