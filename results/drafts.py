"""What could draft for a target on this machine, and what each costs and agrees, once that was measured.

Measurements are kept in the user's cache folder, by the fingerprints of target and draft, dtype and hardware.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..hardware.clock import Clock
from ..hardware.environment import environment
from ..models.base import CachedModel
from ..models.builtin import cache_folder
from ..models.drafts import describe_draft, read_card
from ..models.info import ModelInfo
from ..models.load import check_pair, check_runtime, connect, load
from ..models.specs import DRAFT_FILE, parse
from ..models.tables import tables_digest
from ..tasks import warmup

FILE = "drafts.json"
AGREEMENT_TOKENS = 48  # that the target writes after each text


@dataclass(frozen=True)
class Candidate:
    """Something that could draft.

    Attributes:
        draft: what to write after `--draft`; empty where no model is needed.
        how: the strategy, and what the draft is.
        cost_ratio: a forward of the draft for one token / one of the target.
        agreement: share of positions where the draft's likeliest token is the target's.
        measured: with which dtype and on what; empty where nothing was measured.
    """

    draft: str
    how: str
    cost_ratio: float | None = None
    agreement: float | None = None
    measured: str = ""

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def candidates(
    target: ModelInfo, folders: Sequence[Path] = (), dtype: str = "float32", threads: int | None = None
) -> list[Candidate]:
    """Self-drafts, distilled ones and smaller siblings in the hub cache and in the given folders, and lookup; with what
    was measured of them on this hardware."""
    known, place = _load(), hardware(threads)
    found = []
    for draft, how in _found(target, folders):
        try:
            info = describe_draft(parse(draft), target)
        except ModelError as error:  # one that cannot be used must not hide the others
            found.append(Candidate(draft, f"cannot be used: {error}"))
            continue
        past = known.get(_key(target, info, dtype, place)) or {}
        measured = f"{dtype}, {place}" if past else ""
        found.append(Candidate(draft, how, past.get("cost_ratio"), past.get("agreement"), measured))
    return [*found, Candidate("", "strategy lookup: copies from the context; no draft model")]


def _found(target: ModelInfo, folders: Sequence[Path]) -> Iterable[tuple[str, str]]:
    from ..models.packed import supports

    if supports(target.config, "cpu", "bfloat16") is None:
        yield "self:int4", "the target's own weights in int4 (CPU)"
        yield "self:int8", "the target's own weights in int8 (CPU)"
    own = Path(target.path).resolve()
    digest = tables_digest(target)
    for name, folder in [*_hub_cache(), *_below(folders)]:
        if folder.resolve() == own:
            continue
        if (folder / DRAFT_FILE).is_file():
            with contextlib.suppress(ModelError):  # of another format, or not finished
                if digest and read_card(folder, name)["target_digest"] == digest:
                    yield name, "distilled for this target"
        elif (smaller := _share_of(target, folder)) is not None:
            yield name, f"the same vocabulary, {smaller:.2f} of the size"


def _hub_cache() -> Iterable[tuple[str, Path]]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for repo in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        main = repo / "refs" / "main"
        if main.is_file():
            snapshot = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
            if (snapshot / "config.json").is_file():
                yield repo.name.removeprefix("models--").replace("--", "/"), snapshot


def _below(folders: Sequence[Path]) -> Iterable[tuple[str, Path]]:
    for folder in folders:
        if not folder.is_dir():
            raise ModelError(f"--folder {folder}: no such folder")
        for config in sorted([*folder.glob("config.json"), *folder.glob("*/config.json")]):
            yield str(config.parent), config.parent


def _share_of(target: ModelInfo, folder: Path) -> float | None:
    """Size against the target's, of a smaller model with the same vocabulary; None for others. Reads no weights."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        share = _size(config) / _size(target.config.to_dict())
        same = share < 0.9 and _token_map(folder) == target.codec.token_map
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return share if same else None


def _size(config: dict[str, Any]) -> float:
    """About its parameters."""
    width, inside = config["hidden_size"], config["intermediate_size"]
    return config["num_hidden_layers"] * width * (3 * width + 3 * inside) + config["vocab_size"] * width


def _token_map(folder: Path) -> dict[str, int]:
    """As the tokenizer would say, but quickly: from its file."""
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = found["model"]["vocab"]
    tokens = dict(tokens) if isinstance(tokens, dict) else {token: at for at, (token, _) in enumerate(tokens)}
    return tokens | {added["content"]: added["id"] for added in found.get("added_tokens") or []}


# Measurements


def hardware(threads: int | None = None) -> str:
    facts = environment()
    gpus = sorted({gpu["name"] for gpu in facts["gpus"]})
    return f"{facts['cpu']}, {threads or facts['physical_cores']} thread(s)" + "".join(f", {name}" for name in gpus)


def remember(
    target: ModelInfo, draft: ModelInfo, dtype: str, place: str, cost_ratio: float, agreement: float, quant: str = ""
) -> None:
    """Keeps a measurement for `candidates`."""
    known = _load()
    known[_key(target, draft, dtype, place, quant)] = {"cost_ratio": cost_ratio, "agreement": agreement}
    path = cache_folder() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(FILE + ".part")
    part.write_text(json.dumps(known, indent=1), encoding="utf-8")
    part.replace(path)


def measure(target: ModelInfo, draft: str, dtype: str = "float32", threads: int | None = None) -> dict[str, float]:
    """Loads both, measures cost and agreement on text of no task, and remembers them."""
    info = describe_draft(parse(draft), target)
    size = check_pair(target, info, 1024)
    check_runtime(info, "cpu", dtype, "auto", info.spec.quant)
    models = {
        "target": load(target, dtype=dtype, vocab_size=size),
        "draft": load(info, dtype=dtype, vocab_size=size, quant=info.spec.quant),
    }
    connect({"target": target, "draft": info}, models)
    try:
        found = measure_pair(models["target"], models["draft"], questions(target))
    finally:
        for model in models.values():
            model.close()
    remember(target, info, dtype, hardware(threads), found["cost_ratio"], found["agreement"])
    return found


def measure_pair(target: CachedModel, draft: CachedModel, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Cost ratio, of single tokens in turn, and greedy agreement on what the target writes after each text."""
    clock, agreeing, took = Clock(), [], {id(target): [], id(draft): []}
    for text in texts:
        ids = np.array(text, dtype=np.int64)
        for model in (target, draft):
            model.reset()
            model.advance([ids])
        for _ in range(AGREEMENT_TOKENS):
            choices = []
            draft.follow(0, ids)  # as in decoding, where the target has read all but the latest token before
            for model in (target, draft):
                began = clock.now()
                choices.append(int(model.advance([ids], 1).argmax(-1)[0]))
                took[id(model)].append(clock.now() - began)
            agreeing.append(choices[0] == choices[1])
            ids = np.append(ids, choices[0])
    return {
        "cost_ratio": statistics.median(took[id(draft)]) / statistics.median(took[id(target)]),
        "agreement": sum(agreeing) / len(agreeing),
    }


def questions(target: ModelInfo, raw: bool = False) -> list[list[int]]:
    """Questions about paragraphs that no task holds; `raw` without the chat template."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in warmup.PROSE.split("\n\n")]
    asked = ("Summarize this in one sentence: ", "Go on with this text: ", "What happens here, and why? ")
    messages = [asked[at % len(asked)] + paragraph for at, paragraph in enumerate(paragraphs)]
    return [target.codec.render([{"role": "user", "content": text}], raw).ids for text in messages]


def _load() -> dict[str, Any]:
    try:
        found = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(target: ModelInfo, draft: ModelInfo, dtype: str, place: str, quant: str = "") -> str:
    parts = [target.fingerprint, draft.fingerprint, dtype, place]
    return " | ".join([*parts, quant] if quant and not draft.spec.quant else parts)
