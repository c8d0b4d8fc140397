"""The packed runtime on CUDA: static caches, and one CUDA graph per shape of a forward.

A decoded token is a few hundred kernels of microseconds each; launched one by one from Python they take longer than
they run. So every small forward has one of a few shapes (rows, new tokens, slots), each captured once as a graph
and replayed: rows with fewer new tokens are padded at their end, in slots that the next forward overwrites before
anything can see them. Long prompts are computed without a graph, in pieces.

The kernels that a graph holds depend on its shape, and with them the last bits of a row: cuBLAS chooses tiles and
split sums by the number of rows, and so does attention. With `exact`, every forward after the prompt has the same
number of new tokens, so a token's bits are the same alone and inside a draft. It costs what that many tokens cost
more than one, which `benchmarks/gpu_check.sh` prints.

Runs on other devices too, without graphs, which is how its bookkeeping is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..hardware.clock import Clock
from .packed import PackedModel
from .packed_attention import Span
from .packed_layers import Decoder
from .packed_linear import plain

NEW_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
EXACT_NEW_TOKENS = 16
PROMPT_PIECE = 512
SMALLEST_SLOTS = 256
STATES_ROWS = 16  # texts whose states are computed together


class StaticPackedModel(PackedModel):
    """The forward over static buffers.

    Args:
        exact: one number of new tokens (16) for all graphs, so that drafts change no bits.
        graphs: replay CUDA graphs; False runs the same shapes eagerly. Only on CUDA devices.
    """

    def __init__(
        self,
        hf_model: Any,
        *,
        name: str,
        device: str,
        dtype: str,
        vocab_size: int,
        head_ids: Sequence[int] | None = None,
        exact: bool = False,
        graphs: bool = True,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(hf_model.config, name=name, device=device, dtype=dtype, vocab_size=vocab_size, clock=clock)
        self._torch_dtype = getattr(torch, dtype)
        self._decoder: Any = Decoder(hf_model, device, self._torch_dtype, vocab_size, plain, plain, head_ids)
        self._on_cuda = torch.device(device).type == "cuda"
        self._graphs_wanted = graphs and self._on_cuda
        self._counts = (EXACT_NEW_TOKENS,) if exact else NEW_TOKENS
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._pool: Any = None
        self._last_forward: tuple[Any, Any] | int = 0
        self._cache_rows, self._cache_slots = 0, 0
        self._allocate(1, SMALLEST_SLOTS)

    @property
    def last_forward_ns(self) -> int:  # type: ignore[override]
        """By events on the device; reading it waits for that forward."""
        if isinstance(self._last_forward, tuple):
            started, ended = self._last_forward
            ended.synchronize()
            self._last_forward = int(started.elapsed_time(ended) * 1e6)
        return self._last_forward

    @last_forward_ns.setter
    def last_forward_ns(self, value: int) -> None:
        if not self._on_cuda:  # there, how long it took to launch says nothing
            self._last_forward = value

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._cache.numel() * self._cache.element_size()

    def close(self) -> None:
        self._graphs.clear()
        self._decoder = None
        self._cache = torch.empty(0)
        if self._on_cuda:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def states(self, ids: np.ndarray) -> torch.Tensor:
        self.reset()
        tokens, parts = ids.shape[1], []
        for texts in np.array_split(ids, -(-len(ids) // STATES_ROWS)):
            self._allocate(len(texts), tokens)
            positions = torch.arange(tokens, device=self.device).repeat(len(texts))
            flat = self._to_device(torch.from_numpy(np.ascontiguousarray(texts, np.int64).reshape(-1)))
            hidden = self._pass(flat, positions, 0, len(texts), tokens, min(_slots_for(tokens), self._cache_slots))
            parts.append(self._decoder.states(hidden).view(len(texts), tokens, -1))
        return torch.cat(parts)

    def _synchronise(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self.device)

    def _reserve_cache(self, rows: int, tokens: int) -> None:
        self._allocate(rows, tokens + self._counts[-1])

    def _copy_cache(self, source: int, to: int, start: int, end: int) -> None:
        self._allocate(len(self._lengths), max(end, *self._lengths) + self._counts[-1])
        self._cache[:, :, to, :, start:end] = self._cache[:, :, source, :, start:end]

    def _allocate(self, rows: int, slots: int) -> None:
        """Makes the cache at least so large, and keeps what it holds. Graphs know addresses, so they are made anew."""
        rows, slots = max(rows, self._cache_rows), max(_slots_for(slots), self._cache_slots)
        if (rows, slots) == (self._cache_rows, self._cache_slots):
            return
        self._graphs.clear()
        decoder = self._decoder
        shape = (len(decoder.layers), 2, rows, decoder.kv_heads, slots, decoder.head_dim)
        cache = torch.zeros(shape, dtype=self._torch_dtype, device=self.device)  # zeros: see KeyValueCache
        if self._cache_rows:
            cache[:, :, : self._cache_rows, :, : self._cache_slots] = self._cache
        self._cache, self._cache_rows, self._cache_slots = cache, rows, slots
        decoder.rotation.reach(slots)

    def _forward(self, arrays: list[np.ndarray], spans: list[Span], lasts: list[int]) -> torch.Tensor:
        largest = self._counts[-1]
        longest = max(max(map(len, arrays)), *self._lengths)
        self._allocate(len(self._lengths), longest + largest)
        events = None
        if self._on_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        logits = self._compute(arrays, spans, lasts)
        if events is not None:
            events[1].record()
            self._last_forward = events
        return logits

    def _compute(self, arrays: list[np.ndarray], spans: list[Span], lasts: list[int]) -> torch.Tensor:
        """Rows with a whole prompt to read by themselves: beside them the others would go without graphs, too."""
        long = [span.count > self._counts[-1] for span in spans]
        if all(long) or not any(long):
            return (self._large if long[0] else self._small)(arrays, spans, lasts)
        parts: dict[int, torch.Tensor] = {}
        for compute, wanted in ((self._small, False), (self._large, True)):  # first what pads other rows
            which = [i for i, is_long in enumerate(long) if is_long == wanted]
            logits = compute([arrays[i] for i in which], [spans[i] for i in which], [lasts[i] for i in which])
            parts |= zip(which, logits.split([lasts[i] for i in which]), strict=True)
        return torch.cat([parts[i] for i in range(len(spans))])

    def _small(self, arrays: list[np.ndarray], spans: list[Span], lasts: Sequence[int]) -> torch.Tensor:
        """All rows up to the last one named, each padded to the same number of new tokens, as a graph.

        A row that is not named computes padding behind its own end.
        """
        rows = max(span.row for span in spans) + 1
        count = next(c for c in self._counts if c >= max(span.count for span in spans))
        starts = list(self._lengths[:rows])
        ids = np.zeros((2, rows, count), dtype=np.int64)  # ids, positions
        for array, span in zip(arrays, spans, strict=True):
            ids[0, span.row, : span.count] = array[span.start :]
            starts[span.row] = span.start
        ids[1] = np.array(starts)[:, None] + np.arange(count)
        slots = min(_slots_for(max(starts) + count), self._cache_slots)
        logits = self._run_shape(torch.from_numpy(ids), rows, count, slots)
        picked = [
            span.row * count + span.count - wanted + i
            for span, wanted in zip(spans, lasts, strict=True)
            for i in range(wanted)
        ]
        return logits.index_select(0, self._to_device(torch.tensor(picked)))

    def _large(self, arrays: list[np.ndarray], spans: list[Span], lasts: Sequence[int]) -> torch.Tensor:
        """Row by row and piece by piece, without graphs; logits only of the tokens asked for."""
        parts = []
        for array, span, wanted in zip(arrays, spans, lasts, strict=True):
            kept: list[torch.Tensor] = []
            for begin in range(span.start, len(array), PROMPT_PIECE):
                end = min(begin + PROMPT_PIECE, len(array))
                ids = self._to_device(torch.from_numpy(np.ascontiguousarray(array[begin:end])))
                positions = torch.arange(begin, end, device=self.device)
                hidden = self._pass(ids, positions, span.row, 1, end - begin, min(_slots_for(end), self._cache_slots))
                first_wanted = len(array) - wanted
                if end > first_wanted:
                    kept.append(hidden[max(first_wanted - begin, 0) :])
            parts.append(torch.cat(kept) if len(kept) > 1 else kept[0])
        return self._decoder.logits(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _run_shape(self, host: torch.Tensor, rows: int, count: int, slots: int) -> torch.Tensor:
        """Logits of (2, rows, count) ids and positions, (rows x count, vocab_size); valid until the next forward."""

        def run(inputs: torch.Tensor) -> torch.Tensor:
            flat = inputs.view(2, -1)
            return self._decoder.logits(self._pass(flat[0], flat[1], 0, rows, count, slots))

        if not self._graphs_wanted:
            return run(self._to_device(host))
        key = (rows, count, slots)
        graph = self._graphs.get(key)
        if graph is None:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = self._graphs[key] = _Graph(run, self._to_device(host), self._pool)
        return graph(host)

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, rows: int, count: int, slots: int
    ) -> torch.Tensor:
        """Hidden states of rows x count tokens of adjacent cache rows, which see the first `slots` slots."""
        decoder = self._decoder
        heads, kv_heads, head_dim = decoder.heads, decoder.kv_heads, decoder.head_dim
        group = heads // kv_heads
        cache = self._cache[:, :, first_row : first_row + rows]  # (layers, 2, rows, kv_heads, slots, head_dim)
        row_of = torch.arange(rows, device=self.device).repeat_interleave(count)
        seen = torch.arange(slots, device=self.device) <= positions.view(rows, 1, 1, count, 1)
        # The heads of a group are extra queries of their key head: every key is read once.
        mask = torch.zeros(seen.shape, dtype=self._torch_dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        mask = mask.expand(rows, 1, group, count, slots).reshape(rows, 1, group * count, slots)
        mask = mask.expand(rows, kv_heads, group * count, slots)

        def attend(layer: int, parts: torch.Tensor) -> torch.Tensor:
            for side, at in ((0, heads), (1, heads + kv_heads)):
                target = cache[layer, side].transpose(1, 2)  # (rows, slots, kv_heads, head_dim)
                target.index_put_((row_of, positions), parts.narrow(1, at, kv_heads))
            queries = parts.narrow(1, 0, heads).view(rows, count, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
            keys, values = cache[layer, 0, :, :, :slots], cache[layer, 1, :, :, :slots]
            queries = queries.reshape(rows, kv_heads, group * count, head_dim)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
            mixed = mixed.view(rows, kv_heads, group, count, head_dim).permute(0, 3, 1, 2, 4)
            return mixed.reshape(rows * count, heads * head_dim)

        return decoder.hidden_by(ids, decoder.rotation.at(positions), attend)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self.device, non_blocking=True) if self._on_cuda else host.to(self.device)


class _Graph:
    """One captured forward: copies its inputs into place, replays, and hands out its static output.

    It is tried out on the inputs of a real forward, since a trial writes keys and values as well.
    """

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, pool: Any) -> None:
        self._inputs = inputs
        side = torch.cuda.Stream(inputs.device)
        side.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side):
            for _ in range(3):  # cuBLAS and SDPA choose and allocate before anything is captured
                run(inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs.device), torch.cuda.graph(self._graph, pool=pool):
            self._logits = run(inputs)

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        self._inputs.copy_(host.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._logits


def _slots_for(tokens: int) -> int:
    """A few sizes only, since each is a graph of its own: powers of two and the halves between them."""
    size = SMALLEST_SLOTS
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
