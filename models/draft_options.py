"""How a draft differs from the files it comes from: `--option draft.head-vocab=16384` and its kin.

Each of these makes another model of it, with another speed and another acceptance; what the target writes stays the
same. They belong to the packed runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError

GROUP_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True)
class DraftOptions:
    """
    head_vocab: rows of the vocabulary head that are kept, those of the most frequent tokens; `auto` for a third of the
        vocabulary (or all of a shorter list), 0 for all of it, None for what the draft comes with.
    head_vocab_file: JSON list of token ids, the most frequent first, in place of the draft's own or the tokenizer's.
    head: `int8` rounds the head of an int4 or int8 draft as well.
    group_size, group_offset: columns of a row that share a scale in int4, and the channel that the first group
        begins with.
    follow: a self-draft in the target's process takes over the keys and values of what the target has read; false for
        one that reads everything itself.
    """

    head_vocab: int | Literal["auto"] | None = None
    head_vocab_file: Path | None = None
    head: Literal["bfloat16", "int8"] = "bfloat16"
    group_size: int = 32
    group_offset: int = 0
    follow: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.head_vocab, int) and self.head_vocab < 0:
            raise UsageError(f"draft.head-vocab={self.head_vocab}: a number of tokens, auto, or 0 for all of them")
        if self.head_vocab_file is not None and not self.head_vocab_file.is_file():
            raise UsageError(f"draft.head-vocab-file={self.head_vocab_file}: no such file")
        if self.head_vocab == 0 and self.head_vocab_file is not None:
            raise UsageError("draft.head-vocab=0 keeps the whole head; leave draft.head-vocab-file out")
        if self.group_size not in GROUP_SIZES:
            raise UsageError(f"draft.group-size={self.group_size}: one of {', '.join(map(str, GROUP_SIZES))}")
        if not 0 <= self.group_offset < self.group_size:
            raise UsageError(f"draft.group-offset={self.group_offset}: from 0 to {self.group_size - 1}")

    @property
    def changes_grid(self) -> bool:
        return (self.head, self.group_size, self.group_offset) != ("bfloat16", 32, 0)
