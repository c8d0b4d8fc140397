"""Which rows of a draft's vocabulary head are worth keeping: those of the most frequent tokens.

Frequencies come from a list of ids, the most frequent first. Where there is none, the tokenizer's own order stands in
for it: byte-pair encodings number tokens in the order of their merges, which is the order of frequency in the text
that they were made from. Tokens of a single symbol come before them, since they end some vocabularies, and special
tokens before those. No prompt that is measured has any part in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import ModelError
from .tokenizer import TextCodec

FILE = "head_vocab.json"


def write(folder: Path, ids: Sequence[int], source: str) -> None:
    """Leaves the list beside a draft."""
    (folder / FILE).write_text(json.dumps({"source": source, "ids": list(ids)}) + "\n", encoding="utf-8")


def read(path: Path) -> list[int]:
    """The ids of a file: a JSON list, or what `write` made. Raises ModelError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a list of token ids ({error})") from None
    ids = found.get("ids") if isinstance(found, dict) else found
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise ModelError(f"{path}: a JSON list of token ids is expected, the most frequent first")
    return ids


def by_tokenizer(codec: TextCodec, first: Iterable[int] = ()) -> list[int]:
    """All ids of a tokenizer, likely ones first; `first` (end of text) and special tokens before them."""
    tokens = codec.token_map
    special = {*codec.prefix, *codec.hf_tokenizer.all_special_ids}
    special |= set(getattr(codec.hf_tokenizer, "added_tokens_decoder", {}))
    single = sorted(at for token, at in tokens.items() if len(token) == 1)
    return list(dict.fromkeys([*first, *sorted(special), *single, *sorted(tokens.values())]))


def choose(ranked: Sequence[int], count: int, vocab_size: int, always: Iterable[int] = ()) -> tuple[int, ...]:
    """The first `count` ids below `vocab_size`, `always` among them, in ascending order."""
    wanted = dict.fromkeys(one for one in (*always, *ranked) if one < vocab_size)
    return tuple(sorted(list(wanted)[:count]))
