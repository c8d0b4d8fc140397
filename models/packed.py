"""The packed runtime: a lean forward for the Llama family, close to what memory bandwidth allows.

Llama, SmolLM, Mistral without sliding window, Qwen2, Qwen3: grouped-query attention with rotary positions, RMSNorm,
SwiGLU. transformers stays the loader, the tokenizer and the reference; the weights are taken out of its model, fused
(query, key and value; gate and up), packed for the processor, and the unpacked copy is freed on the way.

`packed_cpu` has the forward for CPU, `packed_cuda` its counterpart for CUDA devices.

Left out, and refused by `supports`: sliding windows, mixtures of experts, rope types whose frequencies depend on the
length (`dynamic`, `longrope`), partial rotation, activations other than SiLU, quantised checkpoints.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ModelError
from ..hardware.clock import Clock
from .base import CachedModel, Forward, Ids, common_prefix, copy_ids
from .packed_attention import Span
from .packed_layers import head_dim_of

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MOST_ROWS = 256


def supports(config: Any, device: str, dtype: str) -> str | None:
    """Why a model with this transformers config cannot run packed on this device, or None where it can."""
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES:
        return f"the packed runtime knows {', '.join(MODEL_TYPES)}, not {kind}"
    known = ("float32", "bfloat16") if device.startswith("cpu") else ("float32", "bfloat16", "float16")
    if dtype not in known:
        return f"the packed runtime computes in {', '.join(known)} on {device}, not in {dtype}"
    if getattr(config, "quantization_config", None):
        return "its checkpoint is quantised"
    if any(layer != "full_attention" for layer in getattr(config, "layer_types", None) or ()):
        return "it has layers that are not full attention"
    if kind == "mistral" and (getattr(config, "sliding_window", None) or config.max_position_embeddings) < (
        config.max_position_embeddings
    ):
        return f"it has a sliding window of {config.sliding_window} tokens"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"its rope type is {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates only a part of each head"
    if head_dim_of(config) % 2 or config.num_attention_heads % config.num_key_value_heads:
        return "its heads cannot be paired or grouped"
    return None


class PackedModel(CachedModel):
    """A Llama-family model with its own forward. Make one with `from_transformers`.

    Keeps the contract of `CachedModel`; what differs between devices is `_forward` and the cache.

    Attributes:
        keeps_states: whether it has what the head multiplies at hand after a forward (not so in a CUDA graph).
        last_states: this for the logits of the last `advance`, (tokens, width), within `keeping_states`; else None.
    """

    runtime = "packed"
    keeps_states = False

    @staticmethod
    def from_transformers(
        hf_model: Any,
        *,
        name: str,
        device: str,
        dtype: str,
        vocab_size: int,
        quant: str | None = None,
        group_size: int = 32,
        group_offset: int = 0,
        head_ids: Sequence[int] | None = None,
        head_quant: str | None = None,
        exact: bool = False,
        clock: Clock | None = None,
    ) -> PackedModel:
        """Takes the weights out of a loaded transformers model, which cannot be used afterwards.

        Args:
            hf_model: a causal LM that `supports` accepts, on any device.
            device: `cpu`, or a CUDA device name, to which the weights are moved layer by layer.
            vocab_size: cuts the logits to so many tokens.
            quant: None, or `int8` or `int4` for weight-only quantised matrices, which is a different model; it
                computes in bfloat16 and takes the place of `dtype`. On CPU only.
            group_size: columns of a row that share a scale in int4: 32, 64, 128 or 256.
            group_offset: the channel that the first group begins with.
            head_ids: the only tokens that get a logit, for a draft; the others get -inf.
            head_quant: `int8` to round the head of a quantised form as well.
            exact: on CUDA, compute so that drafts change no bits, at a price (`packed_cuda`). On CPU bfloat16 does so
                anyway.

        Raises:
            ModelError: `supports` says no, or the quantised form cannot be had here.
        """
        reason = supports(hf_model.config, device, dtype)
        if reason:
            raise ModelError(f"{name} cannot run packed: {reason}; use --runtime transformers")
        options: dict[str, Any] = {
            "name": name,
            "device": device,
            "dtype": dtype,
            "vocab_size": vocab_size,
            "head_ids": head_ids,
            "clock": clock,
        }
        if device.startswith("cpu"):
            from .packed_cpu import CpuPackedModel

            grid = {"group_size": group_size, "group_offset": group_offset, "head_quant": head_quant}
            return CpuPackedModel(hf_model, quant=quant, **grid, **options)
        if quant:
            raise ModelError(f"{name}: {quant} is made for CPU only; on {device} use float16 or bfloat16")
        from .packed_cuda import StaticPackedModel

        return StaticPackedModel(hf_model, exact=exact, **options)

    def __init__(
        self, config: Any, *, name: str, device: str, dtype: str, vocab_size: int, clock: Clock | None = None
    ) -> None:
        self.name = name
        self.device = device
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.config = config
        self.context_length = config.max_position_embeddings
        self.max_rows = MOST_ROWS
        self._states_wanted = False
        self.last_states: torch.Tensor | None = None
        self._now = (clock or Clock()).now
        self._ids = np.zeros((1, 64), dtype=np.int64)  # (rows, room for tokens)
        self._lengths = [0]

    @torch.inference_mode()
    def advance(
        self, contexts: Sequence[Ids], last: Sequence[int] | int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        count = len(contexts)
        if rows is None:
            rows = range(count)
        lasts = [last] * count if isinstance(last, int) else list(last)
        arrays = [context if isinstance(context, np.ndarray) else np.asarray(context, np.int64) for context in contexts]
        self.check_call(arrays, lasts, rows)
        self._make_room(max(rows) + 1, max(map(len, arrays)))

        spans = []
        for row, context, wanted in zip(rows, arrays, lasts, strict=True):
            known = common_prefix(self._ids[row, : self._lengths[row]], context)
            start = self._cut(row, min(known, len(context) - wanted))
            spans.append(Span(row, start, len(context) - start))

        if self.trace is not None:
            self._synchronise()
        began = self._now()
        logits = self._forward(arrays, spans, lasts)
        if self.trace is not None:
            self._synchronise()
        ended = self._now()
        self.last_forward_ns = ended - began
        if self.trace is not None:
            self.trace.append(Forward(began, ended, count, sum(span.count for span in spans)))

        for span, context in zip(spans, arrays, strict=True):
            self._ids[span.row, span.start : len(context)] = context[span.start :]
            self._lengths[span.row] = len(context)
        return logits

    @torch.inference_mode()
    def copy_row(self, source: int, to: int) -> None:
        self.check_copy(source, to)
        self._make_room(max(source, to) + 1, 0)
        copy_ids(self._ids, self._lengths, source, to, self._copy_cache)

    def reset(self) -> None:
        self._lengths = [0] * len(self._lengths)

    def forget(self, row: int) -> None:
        if row < len(self._lengths):
            self._lengths[row] = 0

    def reserve(self, rows: int, tokens: int) -> None:
        rows, tokens = min(rows, self.max_rows), min(tokens, self.context_length)
        self._make_room(rows, tokens)
        self._reserve_cache(rows, tokens)

    @contextlib.contextmanager
    def keeping_states(self) -> Iterator[None]:
        """In here `last_states` is there, where `keeps_states`."""
        self._states_wanted = self.keeps_states
        try:
            yield
        finally:
            self._states_wanted, self.last_states = False, None

    @abstractmethod
    def states(self, ids: np.ndarray) -> torch.Tensor:
        """What the head multiplies after every token of texts of one length, computed afresh, for training drafts.

        Empties the cache.

        Args:
            ids: (texts, tokens).

        Returns:
            (texts, tokens, width), on the model's device, in the dtype that it computes in.
        """

    @abstractmethod
    def _forward(self, arrays: list[np.ndarray], spans: list[Span], lasts: list[int]) -> torch.Tensor:
        """Logits of the last tokens of each span; keys and values of all new ones are cached."""

    @abstractmethod
    def _reserve_cache(self, rows: int, tokens: int) -> None: ...

    @abstractmethod
    def _copy_cache(self, source: int, to: int, start: int, end: int) -> None:
        """Copies keys and values of the positions from `start` to `end` from one row to another."""

    def _cut(self, row: int, start: int) -> int:
        """Drops what a row holds behind its first `start` tokens; returns how many are left."""
        self._lengths[row] = start  # before the forward, so that it stays true if that fails
        return start

    def _synchronise(self) -> None:
        """Waits for the device; nothing to do on CPU."""

    def _make_room(self, rows: int, tokens: int) -> None:
        have_rows, have_tokens = self._ids.shape
        if rows > have_rows or tokens > have_tokens:
            more_tokens = max(0, max(tokens, have_tokens * 3 // 2) - have_tokens) if tokens > have_tokens else 0
            self._ids = np.pad(self._ids, ((0, max(0, rows - have_rows)), (0, more_tokens)))
            self._lengths += [0] * (len(self._ids) - len(self._lengths))
