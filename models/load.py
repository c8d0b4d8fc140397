"""Loading a model for a role: what can be refused is refused before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError, unknown
from ..hardware.devices import Device
from .base import CachedModel
from .info import ModelInfo, describe, explained, hub_snapshot, weight_files
from .quiet import quiet

__all__ = [
    "ModelInfo",
    "check_cache",
    "check_context",
    "check_pair",
    "connect",
    "describe",
    "load",
    "load_transformers",
]

DTYPES = ("float32", "bfloat16", "float16")
RUNTIMES = ("auto", "packed", "transformers")

# One key and one value per token, or nothing at all; everything else cannot be put back after a rejection.
_ROLLS_BACK = {"full_attention", "dummy"}
# Families that keep a state of their own, of which transformers' layer types say nothing.
_OWN_STATE = {
    "rwkv": "recurrent layers",
    "xlstm": "recurrent layers",
    "xlnet": "segment recurrence",
    "reformer": "hashed attention",
    "big_bird": "block-sparse attention",
    "openai-gpt": "attention without a KV cache",
    "lfm2": "conv layers",
    "lfm2_moe": "conv layers",
    "blt": "byte patches",
}


def check_cache(info: ModelInfo) -> None:
    """Refuses a model whose cache cannot be cut back to any earlier token.

    Raises:
        ModelError: naming the layer type: sliding-window, chunked, recurrent, linear-attention, convolutional and
            hybrid layers; an encoder-decoder; a bidirectional model.
    """
    what, way_out = f"{info.role} {info.name} ({info.model_type})", "choose a model with full attention only"
    if info.config.is_encoder_decoder:
        raise ModelError(f"{what} is an encoder-decoder model; choose a decoder-only model")
    if info.model_type in _masked_families() and not getattr(info.config, "is_decoder", False):
        raise ModelError(f"{what} reads in both directions; choose a decoder-only model")
    window = getattr(info.config.get_text_config(decoder=True), "sliding_window", None) or 0
    harmless = _ROLLS_BACK | ({"sliding_attention"} if window >= info.context_length else set())  # it never fills
    bad = [kind for kind in info.layer_types if kind not in harmless]
    if bad:
        kinds = " and ".join(f"{bad.count(kind)} {kind}" for kind in dict.fromkeys(bad))
        raise ModelError(f"{what} has {kinds} layers, whose cache cannot be rolled back after a rejection; {way_out}")
    if info.model_type in _OWN_STATE:
        raise ModelError(f"{what} has {_OWN_STATE[info.model_type]}, which cannot be rolled back; {way_out}")


def check_context(info: ModelInfo, needed: int) -> None:
    """Refuses a model that cannot hold `needed` tokens (prompt and output together). Raises ModelError."""
    if needed > info.context_length:
        raise ModelError(
            f"{info.role} {info.name} holds {info.context_length} tokens, the longest prompt and its output need "
            f"{needed}; lower --max-new-tokens or leave out long prompts"
        )


def check_pair(target: ModelInfo, draft: ModelInfo, needed_tokens: int) -> int:
    """Checks that a draft's tokens mean the same to the target, and that the draft holds what the target does.

    Heads of different size are fine as long as the rows that one of them has more stand for no token of the target
    (padding, as in Qwen2.5: 151,936 and 152,064).

    Args:
        needed_tokens: the most tokens that a prompt and its output take; only the target may set this limit.

    Returns:
        The common size: logits of both are to be cut to it.

    Raises:
        ModelError: the vocabularies differ, with the first token that does; or the draft's context is too short.
    """
    ours, theirs = target.codec.token_map, draft.codec.token_map
    common = min(target.vocab_size, draft.vocab_size)
    pair = f"target {target.name} and draft {draft.name}"
    way_out = "choose a draft with the target's tokenizer"
    if ours != theirs:
        sizes = f"{len(ours)} and {len(theirs)} tokens"
        raise ModelError(f"{pair} have different vocabularies ({sizes}; {_first_difference(ours, theirs)}); {way_out}")
    highest = max(ours.values(), default=-1)
    if highest >= common:
        raise ModelError(
            f"{pair} have heads of {target.vocab_size} and {draft.vocab_size} rows, but token ids up to {highest}; "
            f"{way_out}"
        )
    if needed_tokens > draft.context_length:
        raise ModelError(
            f"draft {draft.name} holds {draft.context_length} tokens and target {target.name} {target.context_length}, "
            f"the longest prompt and its output need {needed_tokens}; choose a draft with a longer context, or lower "
            "--max-new-tokens"
        )
    return common


def check_runtime(
    info: ModelInfo, device: str, dtype: str, runtime: str, quant: str | None = None, exact: bool = False
) -> bool:
    """Whether the model will run packed; needs no weights.

    Raises:
        ModelError: something was asked for that only the packed runtime has, and it cannot have this model.
    """
    head = f"a head of {len(info.head_ids)} tokens" if info.head_ids is not None and info.tables is None else None
    for asked in filter(None, (quant, "--exact" if exact else None, head)):
        if runtime == "transformers":
            raise ModelError(f"{info.role} {info.name}: {asked} needs the packed runtime, not transformers")
    from . import packed

    refusal = packed.supports(info.config, device, dtype)
    if refusal and (runtime == "packed" or quant or exact or head):
        way_out = "; name another draft with --draft" if info.self_draft else ""
        raise ModelError(f"{info.role} {info.name}: the packed runtime does not support this model: {refusal}{way_out}")
    if quant and not device.startswith("cpu"):
        raise ModelError(f"{info.role} {info.name}: {quant} is made for CPU only; place that role on cpu")
    return not refusal and runtime != "transformers"


def check_ranks(info: ModelInfo, ranks: int) -> None:
    """Refuses a model that so many processes cannot share by transformers' tensor-parallel plan; 1 is always right.

    Raises:
        ModelError: the architecture has no plan, or its attention heads cannot be dealt out evenly.
    """
    if ranks == 1:
        return
    config, what = info.config.get_text_config(decoder=True), f"--tp {ranks}: {info.role} {info.name}"
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(
            f"{what} is a {info.model_type}, for which transformers has no tensor-parallel plan; leave --tp out, or "
            "choose another model"
        )
    if not any("att" in name and style == "colwise" for name, style in plan.items()):
        return  # every rank computes all heads
    heads = config.num_attention_heads
    counts = {"KV": getattr(config, "num_key_value_heads", None) or heads, "attention": heads}
    possible = [str(n) for n in range(2, heads + 1) if not any(count % n for count in counts.values())]
    for kind, count in counts.items():
        if count % ranks:
            way_out = f"it takes --tp {' or '.join(possible)}" if possible else "leave --tp out"
            raise ModelError(f"{what} has {count} {kind} head(s), which {ranks} ranks cannot share evenly; {way_out}")


def load(
    info: ModelInfo,
    device: str = "cpu",
    dtype: str = "float32",
    runtime: str = "auto",
    vocab_size: int | None = None,
    quant: str | None = None,
    exact: bool = False,
    ranks: Sequence[tuple[Device, int]] = (),
) -> CachedModel:
    """Loads the weights and puts a runtime around them; silent on stdout and stderr.

    Args:
        runtime: `packed` and `transformers` insist; `auto` is packed where that runtime supports the model.
        vocab_size: cut logits to it, see `check_pair`; None keeps the head.
        quant: quantise the weights (`int4`, `int8`); the packed runtime only.
        exact: on CUDA, compute so that a draft changes no bits, at a price; the packed runtime only.
        ranks: device and threads of every rank that shares the model, ours first, as `Placement.ranks`; none for a
            model of this process alone. The transformers runtime only, so `runtime`, `quant` and `exact` say nothing.

    Raises:
        ModelError: the model's cache cannot be rolled back, the runtime does not support the model, or loading fails.
        WorkerError: another rank cannot be started, or died.
    """
    if runtime not in RUNTIMES:
        raise ModelError(unknown("runtime", runtime, RUNTIMES))
    check_cache(info)
    if ranks:
        from . import tensor_parallel

        check_ranks(info, len(ranks))
        if info.spec.kind == "hub":
            _fetch_weights(info)  # once, before every rank reads them
        return tensor_parallel.load(info, ranks, dtype, vocab_size)
    if check_runtime(info, device, dtype, runtime, quant, exact):
        from . import packed

        size = info.vocab_size if vocab_size is None else vocab_size
        ids = None if info.head_ids is None else [token for token in info.head_ids if token < size]
        return packed.PackedModel.from_transformers(
            load_transformers(info, "cpu", dtype),  # it moves the weights itself, layer by layer
            name=info.name,
            device=device,
            dtype=dtype,
            vocab_size=size,
            quant=quant,
            group_size=info.options.group_size,
            group_offset=info.options.group_offset,
            head_ids=ids,
            head_quant=info.options.head if info.options.head != "bfloat16" else None,
            exact=exact,
        )
    from .transformers_runtime import TransformersModel

    hf_model = load_transformers(info, device, dtype)
    return TransformersModel(hf_model, name=info.name, context_length=info.context_length, vocab_size=vocab_size)


def connect(infos: Mapping[str, ModelInfo], models: Mapping[str, CachedModel]) -> None:
    """Lets self-drafts follow the target: what that has read they need not read, see `CachedModel.follow`.

    Drafts in other processes, and models outside the packed runtime on CPU, read everything themselves.

    Args:
        infos, models: by role, `target` among them.
    """
    from .packed_cpu import CpuPackedModel

    target = models["target"]
    for role, model in models.items():
        info = infos[role]
        if info.self_draft and isinstance(model, CpuPackedModel):
            model.original = target if info.options.follow and isinstance(target, CpuPackedModel) else None


def load_transformers(info: ModelInfo, device: str = "cpu", dtype: str = "float32", ranks: int = 1) -> Any:
    """The plain transformers model: on its device, in eval mode, without gradients, with sdpa attention where the
    architecture has it.

    Args:
        ranks: of the process group, in which every rank calls this and gets its shard; the device is then the group's.

    Raises:
        ModelError: an unknown dtype, files that cannot be read, or weights that are missing in them.
    """
    if dtype not in DTYPES:
        raise ModelError(unknown("dtype", dtype, DTYPES))
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(info.config)]
    attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    if info.spec.kind == "hub":
        _fetch_weights(info)
    if info.tables is not None:
        return _assemble(info, info.tables, dtype).to(device).eval().requires_grad_(False)
    with explained(info.spec, info.role), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.path,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            **_sharded(ranks),
        )
        hf_model, found = loaded[0] if ranks > 1 else loaded[0].to(device), loaded[1]
    if missing := sorted(found["missing_keys"]):
        raise ModelError(  # transformers would fill them with random numbers
            f"{info.role} {info.name}: its files lack {len(missing)} of the weights, first {missing[0]}; they are not "
            f"those of a {info.architecture}"
        )
    return hf_model.eval().requires_grad_(False)


def _sharded(ranks: int) -> dict[str, Any]:
    if ranks == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def _assemble(info: ModelInfo, target: ModelInfo, dtype: str) -> Any:
    """A distilled draft: its own layers and norm, the target's embedding and head."""
    import torch
    from transformers import AutoModelForCausalLM

    from .distilled_file import read_layers
    from .tables import EMBEDDING, HEAD, digest_of, read_tables

    if target.spec.kind == "hub":
        _fetch_weights(target)
    try:
        tables = read_tables(target)
    except KeyError:  # not as safetensors
        whole = load_transformers(target, "cpu", dtype)
        tables = {EMBEDDING: whole.get_input_embeddings().weight, HEAD: whole.get_output_embeddings().weight}
    if digest_of(tables[EMBEDDING]) != info.tables_digest:
        raise ModelError(f"{info.role} {info.name}: was distilled for another target than {target.name}")
    with explained(info.spec, info.role), quiet():
        hf_model: Any = AutoModelForCausalLM.from_config(
            info.config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        weights = {**read_layers(info.path), **{name: table.to(hf_model.dtype) for name, table in tables.items()}}
        if info.config.tie_word_embeddings:
            weights[HEAD] = weights[EMBEDDING]
        hf_model.load_state_dict(weights)
    return hf_model


def _fetch_weights(info: ModelInfo) -> None:
    for patterns in (("model*.safetensors", "model.safetensors.index.json"), ("pytorch_model*",)):
        if weight_files(hub_snapshot(info.spec, info.role, info.revision, patterns)):
            return
    raise ModelError(f"{info.role} {info.name}: the hub cache holds no weights for it; connect once, or choose another")


def _masked_families() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """The lowest id that means something else to the other tokenizer."""
    by_id, their_by_id = ({token_id: token for token, token_id in tokens.items()} for tokens in (ours, theirs))
    at = min(i for i in by_id.keys() | their_by_id.keys() if by_id.get(i) != their_by_id.get(i))
    first, second = (repr(tokens[at]) if at in tokens else "nothing" for tokens in (by_id, their_by_id))
    return f"id {at} is {first} and {second}"
