"""The two large tables of a model, its embedding and its head, read without the rest of it.

A distilled draft has none of its own. It names the target whose tables it was trained with by a digest of them, which
is the same for copies in other folders, other files and other float formats that round to the same bfloat16.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from .info import ModelInfo, weight_files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 64  # of the embedding, in the digest


def tables_digest(info: ModelInfo) -> str | None:
    """Of rows spread over the embedding; None where the weights are not on this machine as safetensors yet."""
    file = _file_of(Path(info.path), EMBEDDING)
    if file is None:
        return None
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        rows = source.get_slice(EMBEDDING)
        count, width = rows.get_shape()
        picked = torch.cat([rows[at : at + 1] for at in range(0, count, max(1, count // _ROWS))])
    return _digest(picked, count, width)


def digest_of(embedding: torch.Tensor) -> str:
    """The same from a table in memory, (vocabulary, width)."""
    count, width = embedding.shape
    return _digest(embedding[:: max(1, count // _ROWS)], count, width)


def _digest(rows: torch.Tensor, count: int, width: int) -> str:
    numbers = rows.detach().cpu().bfloat16().contiguous().view(torch.int16).numpy()
    return hashlib.sha256(f"{count} x {width}:".encode() + numbers.tobytes()).hexdigest()[:16]


def read_tables(info: ModelInfo) -> dict[str, torch.Tensor]:
    """Embedding and head by their names, as stored; the head is missing where it is tied.

    Raises:
        KeyError: the files hold no embedding of that name, or are no safetensors.
    """
    found: dict[str, Any] = {}
    from safetensors import safe_open

    for name in (EMBEDDING, HEAD):
        file = _file_of(Path(info.path), name)
        if file is not None:
            with safe_open(file, framework="pt") as source:
                found[name] = source.get_tensor(name)
    if EMBEDDING not in found:
        raise KeyError(EMBEDDING)
    return found


def _file_of(folder: Path, name: str) -> Path | None:
    from safetensors import safe_open

    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as source:
                if name in source.keys():  # noqa: SIM118 - not a mapping
                    return file
    return None
