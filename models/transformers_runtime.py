"""The generic runtime: any decoder of transformers with full attention, through its ordinary forward.

It is the runtime of last resort and the reference for the faster ones, so it stays close to transformers: the model's
own forward, sdpa attention, no compilation. What it does itself is the cache (`row_cache`), the mask of a ragged
batch, and to ask for logits only where they are wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from ..errors import ModelError
from ..hardware.clock import Clock
from .base import CachedModel, Forward, Ids, common_prefix, copy_ids
from .row_cache import RowCache

MOST_ROWS = 256


class TransformersModel(CachedModel):
    """A loaded `PreTrainedModel` with a KV cache per row.

    Rows of a ragged batch are aligned at their last token: shorter rows are padded in front with queries whose
    results are dropped. Every query sees exactly the slots up to its own position, so a row computes what it would
    compute alone. Whether the architecture honours that is tried once, on construction; where it does not
    (positions taken from the batch, no mask per row), `max_rows` is 1 and `one_row_because` says why.

    Args:
        hf_model: in eval mode, on its device; not changed. Stays reachable as `hf_model`.
        vocab_size: cut the logits to so many tokens; None keeps the head's size.

    Raises:
        ModelError: the forward takes no KV cache that can be cut.
    """

    runtime = "transformers"

    def __init__(
        self,
        hf_model: Any,
        *,
        name: str,
        context_length: int,
        vocab_size: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        config = hf_model.config.get_text_config(decoder=True)
        self.hf_model: Any = hf_model
        self.name = name
        self.device = str(hf_model.device)
        self.dtype = str(hf_model.dtype).removeprefix("torch.")
        head_size = getattr(hf_model.get_output_embeddings(), "out_features", None) or config.vocab_size
        self.vocab_size = head_size if vocab_size is None else vocab_size
        self.context_length = context_length
        self._cut = self.vocab_size < head_size
        self._now = (clock or Clock()).now
        self._synchronise = torch.cuda.synchronize if hf_model.device.type == "cuda" else None

        takes = inspect.signature(hf_model.forward).parameters
        cache_name = next((known for known in ("cache", "past_key_values") if known in takes), None)
        if cache_name is None:
            raise ModelError(
                f"{name}: {type(hf_model).__name__} keeps no KV cache that can be rolled back; use another model"
            )
        self._layer_types = get_layer_types_and_kwargs(config)[0]
        self._cache = RowCache(self._layer_types)
        self._arguments: dict[str, Any] = {cache_name: self._cache, "use_cache": True, "return_dict": True}
        self._keep_name = "logits_to_keep" if "logits_to_keep" in takes else None
        self._eager = getattr(config, "_attn_implementation", "sdpa") == "eager"

        self._ids = np.zeros((1, 0), dtype=np.int64)  # what is cached, (rows, tokens)
        self._lengths: list[int] = [0]
        self.max_rows = MOST_ROWS
        self.one_row_because = _by_batch(config, takes) or self._probe()
        self.max_rows = 1 if self.one_row_because else MOST_ROWS

    @torch.inference_mode()
    def advance(
        self, contexts: Sequence[Ids], last: Sequence[int] | int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        count = len(contexts)
        if rows is None:
            rows = (0,) if count == 1 else range(count)
        lasts = (last,) * count if isinstance(last, int) else last
        arrays = [context if isinstance(context, np.ndarray) else np.asarray(context, np.int64) for context in contexts]
        self.check_call(arrays, lasts, rows)
        self.reserve(max(rows) + 1, max(map(len, arrays)))

        starts = []
        for row, context, wanted in zip(rows, arrays, lasts, strict=True):
            known = common_prefix(self._ids[row, : self._lengths[row]], context)
            starts.append(min(known, len(context) - wanted))
            self._lengths[row] = starts[-1]  # stays true if the forward fails

        logits = self._forward(arrays, starts, rows, max(lasts))
        for row, context, start in zip(rows, arrays, starts, strict=True):
            self._ids[row, start : len(context)] = context[start:]
            self._lengths[row] = len(context)

        if self._cut:
            logits = logits[..., : self.vocab_size]
        if count == 1:
            return logits[0]
        if all(wanted == lasts[0] for wanted in lasts):
            return logits.flatten(0, 1)
        return torch.cat([logits[i, -wanted:] for i, wanted in enumerate(lasts)])

    @torch.inference_mode()
    def copy_row(self, source: int, to: int) -> None:
        self.check_copy(source, to)
        self.reserve(max(source, to) + 1, 0)
        copy_ids(self._ids, self._lengths, source, to, self._copy)

    def reset(self) -> None:
        self._lengths = [0] * len(self._lengths)

    def forget(self, row: int) -> None:
        if row < len(self._lengths):
            self._lengths[row] = 0

    def reserve(self, rows: int, tokens: int) -> None:
        tokens = min(tokens, self.context_length)
        self._cache.reserve(rows, tokens)
        have_rows, have_tokens = self._ids.shape
        need_rows, need_tokens = self._cache.reserved
        if need_rows > have_rows or need_tokens > have_tokens:
            self._ids = np.pad(self._ids, ((0, need_rows - have_rows), (0, need_tokens - have_tokens)))
            self._lengths += [0] * (need_rows - have_rows)

    def close(self) -> None:
        self.reset()
        self._cache.release()
        self._arguments = {}
        self.hf_model = None

    @property
    def weight_bytes(self) -> int:
        return decoded_bytes(self.hf_model)

    def _forward(self, arrays: list[np.ndarray], starts: list[int], rows: Sequence[int], wanted: int) -> torch.Tensor:
        """One forward over what each row lacks; (rows, wanted, vocabulary of the head)."""
        lengths = [len(context) for context in arrays]
        queries = max(length - start for length, start in zip(lengths, starts, strict=True))
        if len(rows) == 1:
            ids = torch.tensor(arrays[0][None, starts[0] :], device=self.device)
            masked = self._level(rows, starts[0], lengths[0])
        elif len(set(starts)) == 1 and len(set(lengths)) == 1:
            ids = torch.tensor(np.stack([context[starts[0] :] for context in arrays]), device=self.device)
            masked = self._level(rows, starts[0], lengths[0])
        else:
            ids, masked = self._ragged(arrays, starts, rows, queries)
        if self._keep_name:
            masked[self._keep_name] = wanted

        traced = self.trace is not None
        if traced and self._synchronise:
            self._synchronise(self.device)
        began = self._now()
        logits = self.hf_model(ids, **self._arguments, **masked).logits
        if traced and self._synchronise:
            self._synchronise(self.device)
        ended = self._now()
        self.last_forward_ns = ended - began
        if self.trace is not None:
            new = sum(lengths) - sum(starts)
            self.trace.append(Forward(began, ended, len(rows), new))
        if not self._cache.complete():
            raise ModelError(f"{self.name}: a layer ignored the KV cache it was given; it cannot be rolled back")
        return logits if logits.shape[1] == wanted else logits[:, -wanted:]

    def _copy(self, source: int, to: int, start: int, end: int) -> None:
        """Keys and values of these positions, from row to row."""
        self._cache.copy(source, to, start, end)

    def _level(self, rows: Sequence[int], start: int, end: int) -> dict[str, Any]:
        """All rows start and end alike: transformers' own causal mask is right, often none is needed."""
        self._cache.begin(rows, start, end - start, None, end)
        return {}

    def _ragged(
        self, arrays: list[np.ndarray], starts: list[int], rows: Sequence[int], queries: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Pads rows in front. A padding query repeats the row's last token and position, so that it stays finite,
        and is stored in a slot behind the row's end, where nothing of that row ever looks."""
        shape = (len(rows), queries)
        ids, slots, positions = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
        for i, (context, start) in enumerate(zip(arrays, starts, strict=True)):
            end = len(context)
            pad = queries - (end - start)
            ids[i, :pad], ids[i, pad:] = context[-1], context[start:]
            slots[i, :pad] = np.arange(end, end + pad)
            slots[i, pad:] = np.arange(start, end)
            positions[i, :pad], positions[i, pad:] = end - 1, slots[i, pad:]
        keys = max(map(len, arrays))
        self._cache.reserve(1, int(slots.max()) + 1)

        at = torch.tensor(slots, device=self.device)
        where = torch.tensor(positions, device=self.device)
        self._cache.begin(rows, keys - queries, queries, at, keys)
        sees = torch.arange(keys, device=self.device) <= where[:, None, :, None]  # (rows, 1, queries, keys)
        if self._eager:  # adds the mask to the scores
            dtype = self.hf_model.dtype
            sees = torch.zeros(sees.shape, dtype=dtype, device=self.device).masked_fill_(~sees, torch.finfo(dtype).min)
        return torch.tensor(ids, device=self.device), {"attention_mask": sees, "position_ids": where}

    def _probe(self) -> str:
        """Tries a ragged batch against single rows, with a few tokens; the reason if it differs, else nothing."""
        last = self.vocab_size - 1
        first, second = [min(i + 1, last) for i in range(6)], [min(2 * i + 3, last) for i in range(7)]
        after_rejection = [*first[:3], second[0]]  # starts and ends elsewhere than the other row
        try:
            alone = []
            for context in (after_rejection, second):
                self.reset()
                alone.append(self.advance([context])[0])
            self.reset()
            self.advance([first])
            together = self.advance([after_rejection, second])
        except (ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            return f"its forward refuses a ragged batch: {type(error).__name__}"
        finally:
            self._cache = RowCache(self._layer_types)
            self._arguments = {
                name: self._cache if isinstance(value, RowCache) else value for name, value in self._arguments.items()
            }
            self._ids, self._lengths = np.zeros((1, 0), dtype=np.int64), [0]
            self.last_forward_ns = 0
        expected = torch.stack(alone).float()
        room = 1e-4 if self.dtype == "float32" else 0.05
        if (together.float() - expected).abs().max() > room * expected.abs().max().clamp(min=1):
            return "rows of a ragged batch influence each other in this architecture"
        return ""


def _by_batch(config: Any, takes: Any) -> str:
    """Why rows of one batch cannot be told apart, where the config or the signature says so."""
    if "position_ids" not in takes:
        return "its forward takes no position_ids"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its local attention counts slots of the batch, not positions of the row"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its {rope['rope_type']} rope depends on the longest row"
    return ""


def decoded_bytes(hf_model: Any) -> int:
    """Bytes of weights that one decoded token reads: an embedding table only if it is the head as well, and of a
    mixture's experts those that are active."""
    config = hf_model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    share = active / experts if experts and active else 1.0
    head = hf_model.get_output_embeddings()
    head_id = id(head.weight) if head is not None else 0
    looked_up = {id(m.weight) for m in hf_model.modules() if isinstance(m, torch.nn.Embedding)} - {head_id}
    total = 0.0
    for name, weight in hf_model.named_parameters():
        if id(weight) not in looked_up:
            total += weight.numel() * weight.element_size() * (share if ".experts." in name else 1.0)
    return int(total)
