"""Long prompts from Python's own reference, which every installation has (`pydoc_data.topics`).

The needle follows "needle in a haystack" tests: one invented sentence hidden in the text, and a question about it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ..errors import TaskError
from .base import Card, Prompt, Task, Tokenizer
from .lengths import fill

SIZE = 24
COLOURS = ("amber", "copper", "crimson", "ivory", "olive", "scarlet", "silver", "violet")
THINGS = ("cabinet", "ferry", "greenhouse", "lantern", "locker", "observatory", "piano", "workshop")


@dataclass(frozen=True)
class PythonDocsOptions:
    """`prompt_tokens` is the length of the text before any chat template, in the target's tokens."""

    prompt_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise TaskError(f"python-docs: prompt-tokens must be 1 or more, not {self.prompt_tokens}.")


class PythonDocs(Task):
    name = "python-docs"
    summary = "long prompts of a chosen length from Python's reference, no download"
    card = Card(
        source="pydoc_data.topics of the Python that runs specbench",
        size=f"{SIZE} prompts, or as many as asked for; about 100,000 tokens of text in all",
        licence="PSF",
        template="prompt-tokens tokens (2048, met within 1 %) before any chat template. continuation: the text, to be "
        "continued without a chat template, 128 new tokens; needle: a sentence hidden in it and a question, 32; "
        "summary: an instruction and the text, 256",
        limits="technical prose and code that models know well; differs between Python versions, so compare runs of "
        "one version; prompts share topics with each other",
    )
    subtasks = ("continuation", "needle", "summary")
    Options = PythonDocsOptions

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        """Subtasks in turn; which prompt comes at a place depends on seed, length and tokenizer only."""
        kinds = (self.subtask,) if self.subtask else self.subtasks
        numbered = ((kind, number) for number in range(max(limit or 0, SIZE)) for kind in kinds)
        return [
            self._prompt(kind, number, tokenizer) for kind, number in islice(numbered, SIZE if limit is None else limit)
        ]

    def _prompt(self, kind: str, number: int, tokenizer: Tokenizer) -> Prompt:
        rng = random.Random(f"{self.options.seed}/{kind}/{number}")
        render, max_new_tokens = {
            "continuation": (lambda text: text, 128),
            "needle": (_needle(rng, number), 32),
            "summary": (_summary, 256),
        }[kind]
        tokens = self.options.prompt_tokens
        # 8 characters a token is ample; the whole reference would take a second to encode each time
        material = _material(rng, 8 * tokens)
        filled = fill(render, material, tokens, tokenizer)
        if filled is None:
            raise TaskError(
                f"python-docs:{kind} cannot make a prompt of {tokens} tokens: too short for its instruction, or longer "
                "than all the text; choose another prompt-tokens."
            )
        return Prompt(
            id=f"{kind}-{number}",
            turns=(filled,),
            category=kind,
            max_new_tokens=max_new_tokens,
            raw=kind == "continuation",
        )


def _material(rng: random.Random, characters: int) -> str:
    from pydoc_data.topics import topics

    names = sorted(topics)
    rng.shuffle(names)
    parts, size = [], 0
    for name in names:
        parts.append(topics[name].strip())
        size += len(parts[-1])
        if size >= characters:
            break
    return "\n\n".join(parts)


def _summary(text: str) -> str:
    return f"Summarise the following pages of a reference manual in one paragraph of plain prose.\n\n{text}"


def _needle(rng: random.Random, number: int) -> Callable[[str], str]:
    place = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
    code = rng.randrange(100_000, 1_000_000)
    depth = (number % 9 + 1) / 10  # 10 % to 90 % of the way down

    def render(text: str) -> str:
        at = max(0, text.rfind("\n\n", 0, int(depth * len(text))))
        before, after = (f"{text[:at]}\n\n", text[at:]) if at else ("", f"\n\n{text}")
        hidden = f"{before}The number that opens {place} is {code}.{after}"
        return (
            "Somewhere in the text below a sentence tells which number opens something.\n\n"
            f"{hidden}\n\nWhich number opens {place}? Answer with the number alone."
        )

    return render
