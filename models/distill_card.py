"""The folder of a distilled draft: layers, config, the tokens it may draft, whom it belongs to, and its model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UsageError
from ..hardware.environment import environment
from . import head_vocab
from .distill_student import Quality, Student
from .distilled_file import write_layers
from .drafts import FORMAT
from .info import ModelInfo
from .specs import DRAFT_FILE
from .tables import digest_of

if TYPE_CHECKING:
    from .distill import Progress, Settings

WORK, STATE, IDENTITY = "work", "state.pt", "settings.json"


def check_folder(out: Path, identity: dict[str, Any], resume: bool) -> None:
    """Refuses a folder that is in use, or settings that a resume cannot change.

    Raises:
        UsageError: in one line.
    """
    settings = out / WORK / IDENTITY
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    if resume:
        if not settings.is_file():
            raise UsageError(f"--out {out}: nothing to resume there; leave --resume out to start")
        before = json.loads(settings.read_text(encoding="utf-8"))
        differing = [name for name, value in identity.items() if before.get(name) != value]
        if differing:
            what = ", ".join(f"{name}: {before.get(name)!r} there, {identity[name]!r} now" for name in differing)
            raise UsageError(f"--out {out}: was begun with other settings ({what}); --resume needs the same ones")
    elif out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out {out}: holds files; go on with --resume, or name a new or empty folder")


def begin_folder(out: Path, identity: dict[str, Any]) -> None:
    (out / WORK).mkdir(parents=True, exist_ok=True)
    (out / WORK / IDENTITY).write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def write_draft(out: Path, student: Student, ranked: list[int], store: str) -> None:
    """Layers, config and the list of tokens, most frequent first."""
    student.config.architectures = None
    student.config.save_pretrained(out)
    write_layers(out, student.weights(), store)
    head_vocab.write(out, ranked, "frequency in the text that it was trained on, then the tokenizer's order")


def write_card(
    out: Path, target: ModelInfo, student: Student, settings: Settings, progress: Progress, device: str, embedding: Any
) -> dict[str, Any]:
    """Writes and returns what the draft says about itself; `README.md` says it in words."""
    facts = environment()
    gpus = [gpu["name"] for gpu in facts["gpus"]] if device.startswith("cuda") else []
    card = {
        "format": FORMAT,
        "target": target.record()["spec"],
        "target_digest": digest_of(embedding),
        "tokenizer": target.tokenizer_fingerprint,
        "start": list(student.start),
        "head_vocab": min(settings.head_vocab, target.vocab_size),
        "store": settings.store,
        "data": settings.data.name if settings.data else "written by the target",
        "text_tokens": progress.text_tokens,
        "seen_tokens": progress.seen_tokens,
        "steps": progress.steps,
        "minutes": round(progress.spent_s / 60, 2),
        "hardware": ", ".join(gpus) or f"{facts['cpu']}, {facts['physical_cores']} cores",
        "before": progress.before and asdict(progress.before),
        "held_out": progress.best and asdict(progress.best),
        "specbench": __version__,
        "packages": {name: facts["packages"][name] for name in ("torch", "transformers")},
    }
    _write(out / DRAFT_FILE, json.dumps(card, indent=1) + "\n")
    _write(out / "README.md", _in_words(card))
    return card


def quality(stored: dict[str, Any] | None) -> Quality | None:
    if stored is None:
        return None
    steps = {int(length): value for length, value in stored["tokens_per_step"].items()}
    return Quality(stored["loss"], stored["agreement"], steps)


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _in_words(card: dict[str, Any]) -> str:
    layers = ", ".join(map(str, card["start"]))
    lines = [
        f"# A draft for {card['target']}",
        "",
        f"Made by `specbench distill` {card['specbench']}. {len(card['start'])} layer(s) and a final norm, started "
        f"from the target's layer(s) {layers}; embedding and head are the target's own and not stored here. It drafts "
        f"from {card['head_vocab']} tokens (`{head_vocab.FILE}`). Of use with that target only:",
        "",
        f"    specbench run --strategy speculative --target {card['target']} --draft .",
        "",
        "| | |",
        "|---|---|",
        f"| data | {card['data']}, {card['text_tokens']} tokens |",
        f"| seen in training | {card['seen_tokens']} tokens, {card['steps']} steps |",
        f"| time | {card['minutes']} minutes, writing and training |",
        f"| hardware | {card['hardware']} |",
    ]
    for name, found in (("before training", card["before"]), ("held-out", card["held_out"])):
        if found:
            steps = ", ".join(f"{value:.2f} at {length}" for length, value in found["tokens_per_step"].items())
            lines.append(f"| {name} | agreement {found['agreement']:.3f}; tokens per step by draft length: {steps} |")
    lines += [
        "",
        "Agreement is the share of positions of held-out text where its likeliest token is the target's; held-out text "
        "is written by the target from other seeds, with greedy answers, or is the end of the data file. Its weights "
        "are derived from the target's, whose licence applies.",
        "",
    ]
    return "\n".join(lines)
