"""What can be known about a model without loading its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import builtin
from .draft_options import DraftOptions
from .quiet import quiet
from .specs import ModelSpec
from .tokenizer import TextCodec

NO_LIMIT_TOKENS = 1 << 20  # alibi and the like: no limit in the config; memory is allocated as needed
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash")
_SAMPLE_BYTES = 1 << 16
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "vocab.bpe")
_LOCAL = "or point to a local model folder"
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_target_positions")


@dataclass(frozen=True)
class ModelInfo:
    """A model described from its config and tokenizer.

    Attributes:
        spec: what the user asked for.
        role: `target`, `draft`, for messages.
        path: local folder; of a hub model its snapshot in the hub cache, which need not hold the weights yet.
        revision: commit of a hub id, None for a folder.
        architecture: class name in transformers.
        model_type: transformers' name of the family.
        config: the transformers config, not to be changed.
        vocab_size: rows of the head, padding rows included.
        context_length: the most tokens the model was made for.
        layer_types: transformers' cache layer type of each layer; empty where the family has none.
        eos_ids: every id that ends a text, from the generation config, else config, else tokenizer; may be empty.
        bos_id: None where the tokenizer has none.
        adds_bos: whether the tokenizer puts it before a raw text.
        chat_template: whether there is one.
        parameters: number of weights, where local files tell.
        fingerprint: of config, revision and weight files; the same for the same model in another folder.
        tokenizer_fingerprint: of tokens, special tokens in front, and chat template.
        options: of a draft, what was asked of it.
        head_ids: the tokens that a draft's head is cut to, ascending; None for all.
        self_draft: whether it is the target itself, in a quantised form, to draft for it.
        tables: the model whose embedding and head a distilled draft shares, and the digest they have to have.
    """

    spec: ModelSpec
    role: str
    path: str
    revision: str | None
    architecture: str
    model_type: str
    config: Any = field(repr=False, compare=False)
    vocab_size: int
    context_length: int
    layer_types: tuple[str, ...]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    chat_template: bool
    parameters: int | None
    fingerprint: str
    codec: TextCodec = field(repr=False, compare=False)
    options: DraftOptions = DraftOptions()
    head_ids: tuple[int, ...] | None = field(default=None, repr=False)
    self_draft: bool = False
    tables: ModelInfo | None = field(default=None, repr=False)
    tables_digest: str = ""

    @property
    def name(self) -> str:
        return self.spec.text

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return self.codec.fingerprint

    def record(self) -> dict[str, Any]:
        """For the manifest: JSON values only, and no path of this machine."""
        local = self.spec.kind in ("folder", "gguf", "distilled")
        return {
            "spec": Path(self.spec.text).name if local else self.spec.text,
            "kind": self.spec.kind,
            "revision": self.revision,
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "eos_ids": list(self.eos_ids),
            "parameters": self.parameters,
            "fingerprint": self.fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "head_vocab": None if self.head_ids is None else len(self.head_ids),
        }


def describe(spec: ModelSpec, role: str, progress: Callable[[str], None] | None = None) -> ModelInfo:
    """Finds a model and reads its config, generation config and tokenizer; fetches built-in models first.

    Args:
        progress: told in a line what takes long (a download, a conversion).

    Raises:
        ModelError: not found, not reachable, not allowed, or not a causal language model that transformers knows.
    """
    path, revision = _locate(spec, role, progress)
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with explained(spec, role), quiet():
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:  # the file is optional
            generation = None
    text_config = config.get_text_config(decoder=True)
    codec = TextCodec(tokenizer, spec.text)
    files = weight_files(Path(path))
    return ModelInfo(
        spec=spec,
        role=role,
        path=path,
        revision=revision,
        architecture=_architecture(config, spec, role),
        model_type=config.model_type,
        config=config,
        vocab_size=text_config.vocab_size,
        context_length=_context_length(text_config),
        layer_types=_layer_types(text_config),
        eos_ids=_first_ids(generation, config, text_config, tokenizer),
        bos_id=codec.bos_id,
        adds_bos=codec.bos_id is not None and codec.prefix[:1] == [codec.bos_id],
        chat_template=codec.has_template,
        parameters=_parameters(files),
        fingerprint=_fingerprint(config, revision, [] if revision else files),
        codec=codec,
    )


def without_codec(info: ModelInfo) -> ModelInfo:
    """The description as it travels to another process: tokenizers stay here, where texts are."""
    tables = None if info.tables is None else without_codec(info.tables)
    return replace(info, codec=None, tables=tables)  # type: ignore[arg-type]


def _locate(spec: ModelSpec, role: str, progress: Callable[[str], None] | None) -> tuple[str, str | None]:
    if spec.kind == "builtin":
        return str(builtin.folder(spec.location, progress)), None
    if spec.kind == "gguf":
        return str(builtin.gguf_folder(Path(spec.location), progress)), None
    if spec.kind == "folder":
        return str(Path(spec.location).resolve()), None
    if spec.kind == "self":
        raise ModelError(f"{role} {spec.text}: a quantised copy of the target has no files of its own")
    if spec.kind == "distilled":
        raise ModelError(f"{role} {spec.text}: is a draft, and can only be read together with its target")
    if progress:
        progress(f"{spec.text}: asking the hub")
    snapshot = hub_snapshot(spec, role, spec.revision, _SMALL_FILES)
    return str(snapshot), snapshot.name


def hub_snapshot(spec: ModelSpec, role: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Brings files of a hub model into the hub cache, once; its folder there is named after the commit.

    Without network, or with HF_HUB_OFFLINE, the folder as it is in the cache. Raises ModelError if there is none.
    """
    from huggingface_hub import snapshot_download

    with explained(spec, role), quiet():
        snapshot = Path(snapshot_download(spec.location, revision=revision, allow_patterns=list(patterns)))
        if not (snapshot / "config.json").is_file():
            raise ModelError(f"{role} {spec.text}: no config.json, so no transformers model; {_LOCAL}")
    return snapshot


@contextlib.contextmanager
def explained(spec: ModelSpec, role: str) -> Iterator[None]:
    """Turns what the hub client and transformers raise into one line: what, which model, and the way out."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{role} {spec.text}: {_reason(error, spec.kind == 'hub')}") from error


def _reason(error: Exception, from_hub: bool) -> str:
    from huggingface_hub import errors as hub

    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)

    def caused_by(kind: type[BaseException]) -> bool:
        return any(isinstance(link, kind) for link in chain)

    if from_hub:
        if caused_by(hub.GatedRepoError):
            return f"the hub gives it on request only; log in with an account that has access, {_LOCAL}"
        if caused_by(hub.RevisionNotFoundError):
            return "the hub has no such revision; check what follows the @"
        if caused_by(hub.RepositoryNotFoundError):
            return f"the hub has no such model, or it is private; check the name, {_LOCAL}"
        if caused_by(hub.OfflineModeIsEnabled) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            return f"not in the hub cache, and HF_HUB_OFFLINE is set; unset it, {_LOCAL}"
        if caused_by(hub.LocalEntryNotFoundError) or _is_network(chain):
            return f"not in the hub cache, and the hub cannot be reached; connect once, {_LOCAL}"
    if "trust_remote_code" in str(error):
        return "it needs code of its own (trust_remote_code), which is never run here; choose another model"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"transformers cannot load it ({(lines or [type(error).__name__])[0][:240]})"


def _is_network(chain: Iterable[BaseException]) -> bool:
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    return bool(names & {"ConnectionError", "ConnectError", "TransportError", "TimeoutException", "RequestException"})


def _architecture(config: Any, spec: ModelSpec, role: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None:
        raise ModelError(f"{role} {spec.text}: {config.model_type} is no causal language model; choose another model")
    return known if isinstance(known, str) else known[0]


def _context_length(config: Any) -> int:
    for name in _LIMITS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT_TOKENS


def _layer_types(config: Any) -> tuple[str, ...]:
    """As `DynamicCache(config=...)` works them out, `use_sliding_window` and its per-family meaning included."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    try:
        return tuple(get_layer_types_and_kwargs(config)[0])
    except AttributeError:  # a family with no layers in the usual sense
        return ()


def _first_ids(*sources: Any) -> tuple[int, ...]:
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(ids)
    return ()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, else its PyTorch files, in order; empty if the weights are not there."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def parameters_in(folder: Path) -> int | None:
    """Number of weights in a model folder; None where its files do not tell, or are not there."""
    return _parameters(weight_files(folder))


def _parameters(files: list[Path]) -> int | None:
    total = 0
    for file in files:
        if file.suffix != ".safetensors":
            return None
        with file.open("rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            header = json.loads(source.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for length in tensor["shape"]:
                    count *= length
                total += count
    return total or None


def file_fingerprint(config: Any, folder: Path) -> str:
    """Of a config and the weight files of a folder."""
    return _fingerprint(config, None, weight_files(folder))


def _fingerprint(config: Any, revision: str | None, files: list[Path]) -> str:
    """Hashes the config, the commit, and of each weight file name, size, and three samples of 64 KiB: enough to tell
    two fine-tunings apart, and it takes no time for files of many gigabytes."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update((revision or "").encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as source:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                source.seek(at)
                digest.update(source.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
