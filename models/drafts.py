"""Drafts that belong to a target: its own weights, quantised; one distilled for it; any model with a smaller head.

An ordinary draft model is described by `info.describe`; what is here needs the target to say what the draft is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from ..errors import ModelError
from . import head_vocab
from .draft_options import DraftOptions
from .info import ModelInfo, describe, explained, file_fingerprint
from .specs import DRAFT_FILE, ModelSpec
from .tables import tables_digest

FORMAT = 1
AUTO_HEAD = 3  # `draft.head-vocab=auto` keeps one token of so many: over 0.9 of a text (docs/drafts.md)


def describe_draft(
    spec: ModelSpec,
    target: ModelInfo,
    role: str = "draft",
    options: DraftOptions | None = None,
    quant: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelInfo:
    """Describes what drafts for a target, without reading weights.

    Args:
        quant: the form that the draft is going to be loaded in, where the spec does not say.

    Raises:
        ModelError: not found, or made for another target; or options that do not fit.
    """
    if spec.kind == "self":
        info = _self_draft(target, spec, role)
    elif spec.kind == "distilled":
        info = _distilled(target, spec, role)
    else:
        info = describe(spec, role, progress=progress)
    return _shaped(info, target, options or DraftOptions(), quant)


def read_card(folder: Path, name: str) -> dict:
    """What a distilled draft says about itself. Raises ModelError."""
    try:
        card = json.loads((folder / DRAFT_FILE).read_text(encoding="utf-8"))
        if card["format"] != FORMAT:
            raise ModelError(f"{name}: is of format {card['format']}, this specbench reads {FORMAT}; distil it again")
        return {"target": card["target"], "target_digest": card["target_digest"], **card}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{name}: its {DRAFT_FILE} cannot be read ({error}); distil it again") from None


def _self_draft(target: ModelInfo, spec: ModelSpec, role: str) -> ModelInfo:
    """The target as its own draft, in the quantised form that the spec names."""
    spec = dataclasses.replace(target.spec, text=spec.text, quant=spec.quant)
    identity = f"{target.fingerprint}:{spec.quant}"
    return dataclasses.replace(target, spec=spec, role=role, self_draft=True, fingerprint=identity)


def _distilled(target: ModelInfo, spec: ModelSpec, role: str) -> ModelInfo:
    """A folder that `specbench distill` wrote: layers of its own; tokenizer, embedding and head of the target."""
    from transformers import AutoConfig

    folder = Path(spec.location)
    card, name = read_card(folder, f"{role} {spec.text}"), f"{role} {spec.text}"
    digest = tables_digest(target)
    with explained(spec, role):
        config = AutoConfig.from_pretrained(folder)
    if config.hidden_size != target.config.hidden_size or (digest and digest != card["target_digest"]):
        raise ModelError(
            f"{name}: was distilled for {card['target']}, whose embeddings it shares, and the target {target.name} has "
            f"others; distil one for it, or name that target"
        )
    return dataclasses.replace(
        target,
        spec=dataclasses.replace(spec, location=str(folder)),
        role=role,
        path=str(folder),
        revision=None,
        config=config,
        layer_types=("full_attention",) * config.num_hidden_layers,
        parameters=None,
        fingerprint=f"{file_fingerprint(config, folder)}:{card['target_digest']}",
        tables=target,
        tables_digest=card["target_digest"],
    )


def _shaped(info: ModelInfo, target: ModelInfo, options: DraftOptions, quant: str | None) -> ModelInfo:
    """The draft with what the options make of it, in its name and its fingerprint as well."""
    quant = info.spec.quant or quant
    if options.changes_grid and quant is None:
        raise ModelError(
            f"{info.role} {info.name}: draft.head, group-size and group-offset are of quantised drafts; "
            "give --draft self:int4 or --draft-quant int4"
        )
    if not options.follow and not info.self_draft:
        raise ModelError(
            f"{info.role} {info.name}: draft.follow is of drafts that are the target itself; give --draft self:int4"
        )
    ids, words = _head_ids(info, target, options), []
    identity = info.fingerprint
    if not options.follow:
        words.append("reads itself")
        identity += ":apart"
    if quant and not info.spec.quant and (options.changes_grid or options.head_vocab):
        words.append(quant)
    if ids is not None:
        identity += f":head-{hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]}"
        if options.head_vocab is not None or options.head_vocab_file is not None:
            words.append(f"head {len(ids)}")
    if options.changes_grid:
        if options.head != "bfloat16":
            words.append(f"head {options.head}")
        if (options.group_size, options.group_offset) != (32, 0):
            words.append(
                f"groups of {options.group_size}" + f" from {options.group_offset}" * bool(options.group_offset)
            )
        identity += f":{options.head}-{options.group_size}-{options.group_offset}"
    text = f"{info.name} [{', '.join(words)}]" if words else info.name
    return dataclasses.replace(
        info,
        spec=dataclasses.replace(info.spec, text=text),
        fingerprint=identity,
        options=options,
        head_ids=ids,
    )


def _head_ids(info: ModelInfo, target: ModelInfo, options: DraftOptions) -> tuple[int, ...] | None:
    """The tokens that the draft's head is cut to, or None for all."""
    beside = Path(info.path) / head_vocab.FILE
    size = min(info.vocab_size, target.vocab_size)
    count = size // AUTO_HEAD if options.head_vocab == "auto" else options.head_vocab
    if options.head_vocab_file is not None:
        ranked, source = head_vocab.read(options.head_vocab_file), str(options.head_vocab_file)
    elif beside.is_file() and count != 0:
        ranked, source = head_vocab.read(beside), str(beside)
    elif count:
        ranked, source = head_vocab.by_tokenizer(target.codec, target.eos_ids), "the vocabulary"
    else:
        return None
    if max(ranked) >= max(info.vocab_size, target.vocab_size):
        raise ModelError(
            f"{source}: holds token id {max(ranked)}, and {info.name} has {info.vocab_size}; give a list made for it"
        )
    ids = head_vocab.choose(ranked, count or len(ranked) + len(target.eos_ids), size, target.eos_ids)
    if options.head_vocab != "auto" and count and len(ids) < min(count, size):
        raise ModelError(
            f"draft.head-vocab={count}: {source} lists {len(ids)} tokens only; lower it, or give a longer list"
        )
    return None if len(ids) >= size else ids
