"""The packed runtime: a lean forward for the Llama family, close to what memory bandwidth allows.

Llama, SmolLM, Mistral without sliding window, Qwen2, Qwen3: grouped-query attention with rotary positions, RMSNorm,
SwiGLU. transformers stays the loader, the tokenizer and the reference; the weights are taken out of its model, fused
(query, key and value; gate and up), packed for the processor, and the unpacked copy is freed on the way.

On CPU a forward is one call of our own kernels (`packed_native`, compiled once where it runs). Where they cannot be had
every linear is one of oneDNN's packed ones (`packed_linear`) and attention is two matrix products per layer
(`packed_attention`). Either way the cache is preallocated and dense (`kv_cache`), and the logits of a token have the
same bits whether it is computed alone, inside a draft, inside a prompt, or beside other rows: with torch's operators in
bfloat16, with our kernels in every dtype. So greedy decoding with a draft is exact there, token for token.
`packed_cuda` is the counterpart for CUDA devices.

Left out, and refused by `supports`: sliding windows, mixtures of experts, rope types whose frequencies depend on the
length (`dynamic`, `longrope`), partial rotation, activations other than SiLU, quantised checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ModelError
from ..hardware.clock import Clock
from .base import CachedModel, Forward, Ids, common_prefix, copy_ids
from .kv_cache import KeyValueCache
from .last_queries import LastQueries
from .packed_attention import Span, make_plans
from .packed_layers import Decoder, Watch, head_dim_of
from .packed_linear import ONE_DNN, choose_filled_rows, pack
from .packed_native import NativePass, packer_for
from .quantised import pack_quantised, shift_channels

if TYPE_CHECKING:
    from .sparse_select import Selection
    from .sparse_view import SparseView

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
    """

    runtime = "packed"

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
            if group_offset:
                shift_channels(hf_model, group_offset)
            grid = {"group_size": group_size, "head_quant": head_quant}
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


class CpuPackedModel(PackedModel):
    """The forward on CPU. All tokens of all rows stand one after another, so linears see no padding."""

    def __init__(
        self,
        hf_model: Any,
        *,
        name: str,
        device: str,
        dtype: str,
        vocab_size: int,
        quant: str | None = None,
        group_size: int = 32,
        head_ids: Sequence[int] | None = None,
        head_quant: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            hf_model.config, name=name, device=device, dtype=quant or dtype, vocab_size=vocab_size, clock=clock
        )
        number = torch.bfloat16 if quant else getattr(torch, dtype)
        head_rows = vocab_size if head_ids is None else len(head_ids)
        packer = None if head_quant else packer_for(hf_model.config, number, head_rows, quant, group_size)
        if packer:
            pack_part = partial(packer.pack_int4, group_size=group_size) if quant else packer.pack
            pack_head = packer.pack
        else:
            pack_part = partial(pack_quantised, quant=quant, group_size=group_size) if quant else pack
            pack_head = partial(pack_quantised, quant=head_quant, group_size=group_size) if head_quant else pack
        tied = head_ids is None and hf_model.lm_head.weight is hf_model.model.embed_tokens.weight
        self._decoder: Any = Decoder(hf_model, device, number, vocab_size, pack_part, pack_head, head_ids)
        if packer:
            self.kernels = "native"
            self._decoder.native = NativePass(packer.kernels, self._decoder, head_rows, tied)
        self._cache = KeyValueCache(len(self._decoder.layers), self._decoder.kv_heads, self._decoder.head_dim, number)
        self._threads_filled = 0
        self._queries: LastQueries | None = None
        _return_freed_memory()

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._cache.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes that the keys and values of one row take, as the cache is laid out now."""
        return self._cache.row_bytes

    def sparse_view(self, selection: Selection) -> SparseView:
        from .sparse_view import SparseView

        return SparseView(self, selection)

    def watch_queries(self, window: int) -> None:
        """From now on the queries of the last `window` tokens of every row are kept; 0 for none."""
        self._queries = LastQueries(window) if window else None

    @torch.inference_mode()
    def assume(self, rows: int, tokens: int) -> np.ndarray:
        """Pretends that rows have read random texts of so many tokens, to measure what a forward behind them costs.

        Their keys and values are zeros, written out: memory that was never written to is read in no time.

        Returns:
            (rows, tokens) the ids.
        """
        ids = np.random.default_rng(0).integers(0, self.vocab_size, (rows, tokens))
        self.reset()
        self._make_room(rows, tokens)
        self._ids[:rows, :tokens] = ids
        self._cache.fit(len(self._lengths), tokens, self._lengths)
        self._cache.blocks.zero_()
        self._lengths[:rows] = [tokens] * rows
        return ids

    def close(self) -> None:
        self._decoder = None
        self._cache.release()

    def _reserve_cache(self, rows: int, tokens: int) -> None:
        self._cache.reserve(rows, tokens)

    def _copy_cache(self, source: int, to: int, start: int, end: int) -> None:
        self._cache.fit(len(self._lengths), max(end, *self._lengths), self._lengths)
        self._cache.copy(source, to, start, end)
        if self._queries is not None:
            self._queries.forget(to)

    def _forward(self, arrays: list[np.ndarray], spans: list[Span], lasts: list[int]) -> torch.Tensor:
        decoder, ids, positions, slots = self._decoder, *self._place(arrays, spans)
        watch = None if self._queries is None else self._queries.watch(spans, decoder)
        wanted = _last_tokens(spans, lasts)
        if decoder.native is not None:
            logits = decoder.spread(decoder.native.logits(ids, positions, self._cache, slots, wanted, watch))
        else:
            hidden = self._hidden(ids, positions, slots, watch)
            if len(wanted) < len(hidden):
                hidden = hidden[-len(wanted) :] if len(spans) == 1 else hidden.index_select(0, torch.tensor(wanted))
            # widened, which changes no value: argmax over bfloat16 takes torch four times as long, conversion included
            logits = decoder.logits(hidden).float()
        if self._queries is not None and watch is not None:
            self._queries.keep(spans, watch)
        return logits

    @torch.inference_mode()
    def states(self, ids: np.ndarray) -> torch.Tensor:
        self.reset()
        self._make_room(1, ids.shape[1])
        decoder, parts = self._decoder, []
        for row in ids:
            placed = self._place([row], [Span(0, 0, len(row))])
            if decoder.native is not None:
                parts.append(decoder.native.states(placed[0], placed[1], self._cache, placed[2]))
            else:
                parts.append(decoder.states(self._hidden(*placed, None)))
        return torch.stack(parts)

    def _place(self, arrays: list[np.ndarray], spans: list[Span]) -> tuple[np.ndarray, np.ndarray, list[Span]]:
        """Ids and positions of the new tokens, and the slots for their keys and values, which there is room for."""
        slots, used = self._in_slots(spans)
        self._cache.fit(len(used), max(*(span.start + span.count for span in slots), *used), used)
        self._decoder.rotation.reach(max(map(len, arrays)))
        if len(spans) == 1:
            start = spans[0].start
            return arrays[0][start:], np.arange(start, len(arrays[0])), slots
        ids = np.concatenate([array[span.start :] for array, span in zip(arrays, spans, strict=True)])
        positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
        return ids, positions, slots

    def _hidden(self, ids: np.ndarray, positions: np.ndarray, slots: list[Span], watch: Watch | None) -> torch.Tensor:
        """Hidden states of the new tokens, (tokens, width), by torch's operators; their keys and values are cached."""
        decoder = self._decoder
        self._choose_filled_rows()
        plans = make_plans(self._cache, slots, decoder.heads)
        rotation = decoder.rotation.at(torch.from_numpy(positions))
        return decoder.hidden(torch.from_numpy(ids), rotation, plans, watch)

    def _in_slots(self, spans: list[Span]) -> tuple[list[Span], list[int]]:
        """Where new tokens stand in the cache, and how many slots each row uses: here every position has its slot."""
        return spans, self._lengths

    def _choose_filled_rows(self) -> None:
        """Once, and again when the number of threads has changed."""
        threads = torch.get_num_threads()
        if threads != self._threads_filled:
            self._threads_filled = threads
            decoder, width = self._decoder, self._decoder.embedding.shape[1]
            largest = [weights.gate_up for weights in decoder.layers]
            if all(matrix.kind != ONE_DNN for matrix in largest):
                largest = [decoder.head]
            decoder.filled_rows = choose_filled_rows(largest, width, decoder.dtype)


def _last_tokens(spans: Sequence[Span], lasts: Sequence[int]) -> list[int]:
    """Places of the last tokens of each span among all tokens."""
    wanted, end = [], 0
    for span, count in zip(spans, lasts, strict=True):
        end += span.count
        wanted += range(end - count, end)
    return wanted


def _return_freed_memory() -> None:
    """Asks glibc to give freed memory back to the system; elsewhere there is nothing to ask."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
