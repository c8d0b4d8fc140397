"""`specbench bigrams`: a table for the n-gram level of `cascade`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .errors import reports_errors
from .output import stdout

BIGRAMS_HELP = """Learn which token mostly follows which, for cascade.bigrams, from text that is not measured.

Take the training part of a data set or any other text, never prompts of the run: the table would know the answers.

Example: specbench bigrams --target org/big --data train.jsonl --out bigrams.json
"""


@reports_errors
def bigrams(
    target: Annotated[str, typer.Option("--target", "-t", help="Model whose tokenizer is used", show_default=False)],
    data: Annotated[
        Path,
        typer.Option("--data", help="Text file, or JSON lines with text, turns or messages", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write", show_default=False)],
) -> None:
    from ..errors import UsageError
    from ..models.bigrams import learn
    from ..models.info import describe
    from ..models.specs import parse
    from ..models.text_files import read_texts

    if out.exists():
        raise UsageError(f"--out {out}: exists; choose another name or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: {out.parent} is no folder")
    texts = list(read_texts(data))
    codec = describe(parse(target), "target").codec
    table = learn(codec.encode(text) for text in texts)
    if not table:
        raise UsageError(f"--data {data}: no token is followed by another often enough; give more text")
    out.write_text(json.dumps(table) + "\n", encoding="utf-8")
    stdout().print(f"{out}: {len(table)} tokens", soft_wrap=True)
    stdout().print(f"use it with: specbench run -s cascade -t {target} --option cascade.bigrams={out}", soft_wrap=True)
