"""The weights of a distilled draft on disk: layers and final norm, as bfloat16, or int8 with a scale per row."""

from __future__ import annotations

from pathlib import Path

import torch

from .quantised import quantise_int8

WEIGHTS = "model.safetensors"
STORES = ("bfloat16", "int8")
_SCALES = ".scales"


def write_layers(folder: Path, weights: dict[str, torch.Tensor], store: str = "bfloat16") -> None:
    """Replaces the file at once, so that a reader never sees half of it."""
    from safetensors.torch import save

    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu().bfloat16().contiguous()
        if store == "int8" and weight.dim() == 2:
            stored[name], stored[name + _SCALES] = quantise_int8(weight)
        else:
            stored[name] = weight
    part = folder / (WEIGHTS + ".part")
    part.write_bytes(save(stored))  # save_file would make a file that nobody else may read
    part.replace(folder / WEIGHTS)


def read_layers(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    stored = load_file(Path(folder) / WEIGHTS)
    return {
        name: weight.float() * stored[name + _SCALES].float()[:, None] if name + _SCALES in stored else weight
        for name, weight in stored.items()
        if not name.endswith(_SCALES)
    }
