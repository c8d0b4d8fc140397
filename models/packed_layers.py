"""The layers of a Llama-family decoder: weights taken out of transformers' model and fused, and one pass through them.

On CPU the loop over the layers, with its attention, is compiled by TorchScript: the same operators in the same order,
without Python between them, which is a sixth of the time of a decoded token in a small model. TorchScript is
deprecated, so where it is missing the very same functions run as Python. On CUDA a graph does that job, and attention
is the caller's (`packed_cuda`).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .packed_attention import Plan, Rotation, attend
from .packed_linear import NATIVE, Matrix, multiply

Pack = Callable[[torch.Tensor, torch.Tensor | None], Matrix]
Attend = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, heads) -> (tokens, heads x head_dim)


class Shape(NamedTuple):
    """What is the same in all layers; `by_layer_norm` says how RMSNorm is computed."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    by_layer_norm: bool


class Weights(NamedTuple):
    """One decoder layer's weights; `heads_norm` is for models that normalise queries and keys."""

    norm: torch.Tensor
    qkv: Matrix
    heads_norm: torch.Tensor | None  # (heads + kv_heads, head_dim), in the order of the pairs
    out: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


class Watch(NamedTuple):
    """Which queries of a forward are to be noted, and where to.

    Attributes:
        tokens: their places among the tokens of the forward.
        queries: filled by the forward, (layers, len(tokens), heads, head_dim): rotated, and scaled for the softmax.
    """

    tokens: torch.Tensor
    queries: torch.Tensor


class Decoder:
    """Embedding, layers and head of a model, on one device.

    Query and key heads are stored as (even, odd) pairs, which one complex product rotates.

    Args:
        hf_model: loses its weights one after another, so that never more than one is there twice.
        vocab_size: width of the logits; the head has so many rows, unless `head_ids` names fewer.
        pack, pack_head: make a `Matrix` of one in `dtype` on `device`.
        head_ids: the only tokens that get a logit, for a draft; the others get -inf.
    """

    def __init__(
        self,
        hf_model: Any,
        device: str,
        dtype: torch.dtype,
        vocab_size: int,
        pack: Pack,
        pack_head: Pack,
        head_ids: Sequence[int] | None = None,
    ) -> None:
        config = hf_model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim_of(config),
        )
        self.dtype, self.device = dtype, device
        self.shape = Shape(self.heads, self.kv_heads, self.head_dim, config.rms_norm_eps, _by_layer_norm(device, dtype))
        self.filled_rows = 2
        self._pack, self._vocab_size = pack, vocab_size
        rotary = hf_model.model.rotary_emb
        self.rotation = Rotation(
            rotary.inv_freq, rotary.attention_scaling, self.heads, self.kv_heads, self.head_dim**-0.5, device
        )
        with torch.inference_mode():
            self.layers = [self._take_layer(block) for block in hf_model.model.layers]
            self.final_norm = self._take_norm(hf_model.model.norm)
            head, embedding = hf_model.lm_head, hf_model.model.embed_tokens
            # a copy: what transformers loaded may be a view of its whole file, which would stay in memory with it
            self.embedding = embedding.weight.detach().to(device, dtype, copy=True)
            rows = self._move(head.weight)[:vocab_size]
            self._head_ids = None if head_ids is None else torch.tensor(head_ids, device=device)
            self.head = pack_head(rows if self._head_ids is None else rows[self._head_ids], None)
            embedding.weight = head.weight = None
        self.native: Any = None  # a `packed_native.NativePass` that takes the place of `hidden` and `logits`
        self._run = _compiled(self.layers, self.shape) if device == "cpu" and self.head.kind != NATIVE else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that one token reads; norms and the embedding's one row are next to nothing."""
        parts = [part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(matrix.nbytes for matrix in [*parts, self.head])

    def hidden(
        self, ids: torch.Tensor, rotation: torch.Tensor, plans: list[Plan], watch: Watch | None = None
    ) -> torch.Tensor:
        """One pass of tokens, standing one after another, through all layers, on CPU: (tokens, width).

        Args:
            rotation: from `self.rotation.at` the tokens' positions.
            plans: where their keys and values go, and what they see.
            watch: queries to note; they change nothing about the result.
        """
        hidden = F.embedding(ids, self.embedding)
        if self._run is not None:
            return self._run(hidden, rotation, plans, self.filled_rows, watch)
        return run_layers(self.layers, self.shape, hidden, rotation, plans, self.filled_rows, watch)

    def hidden_by(self, ids: torch.Tensor, rotation: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The same with attention of the caller's.

        Args:
            attend: gets (tokens, heads + 2 kv_heads, head_dim): queries (rotated, and scaled for the softmax), keys
                (rotated), values.
        """
        hidden = F.embedding(ids, self.embedding)
        for index, weights in enumerate(self.layers):
            heads = heads_of(hidden, weights, rotation, self.shape, 1)
            hidden = rest_of(hidden, attend(index, heads), weights, self.shape, 1)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after tokens, (tokens, vocab_size); of a head with fewer rows in float32 on CPU."""
        return self.spread(multiply(self.states(hidden), self.head, self.filled_rows))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the head's rows at the places of their tokens, (tokens, vocab_size)."""
        if self._head_ids is None:
            return logits
        if self.device == "cpu":
            logits = logits.float()  # before they are spread, since there are fewer of them
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return spread.index_copy_(1, self._head_ids, logits)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head multiplies: hidden states after the final norm, (tokens, width)."""
        return rms_norm(hidden, self.final_norm, self.shape)

    def _move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to(self.device, self.dtype)

    def _take_layer(self, block: Any) -> Weights:
        attention, mlp = block.self_attn, block.mlp
        heads_norm = None
        if hasattr(attention, "q_norm"):
            query, key = (
                interleave_pairs(part.weight.detach().float().to(self.device), self.head_dim)
                for part in (attention.q_norm, attention.k_norm)
            )
            heads_norm = torch.stack([query] * self.heads + [key] * self.kv_heads)
        return Weights(
            norm=self._take_norm(block.input_layernorm),
            qkv=self._take(attention.q_proj, attention.k_proj, attention.v_proj, paired=2),
            heads_norm=heads_norm,
            out=self._take(attention.o_proj),
            mlp_norm=self._take_norm(block.post_attention_layernorm),
            gate_up=self._take(mlp.gate_proj, mlp.up_proj),
            down=self._take(mlp.down_proj),
        )

    def _take(self, *parts: Any, paired: int = 0) -> Matrix:
        """One matrix from several linears on top of each other; the first `paired` get their rows in pairs."""
        weights, biases = [], []
        for i, part in enumerate(parts):
            weight, bias = self._move(part.weight), None if part.bias is None else self._move(part.bias)
            if i < paired:
                weight = interleave_pairs(weight, self.head_dim)
                bias = None if bias is None else interleave_pairs(bias, self.head_dim)
            weights.append(weight)
            biases.append(bias)
            part.weight = None
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        return self._pack(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def _take_norm(self, part: Any) -> torch.Tensor:
        weight = self._move(part.weight).clone()
        return weight if not self.shape.by_layer_norm else torch.cat([weight, torch.zeros_like(weight)])


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def interleave_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders the output rows of a query or key projection from (first halves, second halves) to pairs."""
    heads = weight.shape[0] // head_dim
    return weight.view(heads, 2, head_dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def heads_of(
    hidden: torch.Tensor, weights: Weights, rotation: torch.Tensor, shape: Shape, filled_rows: int
) -> torch.Tensor:
    """Rotated queries and keys, and values, of every token: (tokens, heads + 2 kv_heads, head_dim)."""
    dtype, tokens, all_heads = hidden.dtype, hidden.shape[0], shape.heads + 2 * shape.kv_heads
    heads = multiply(rms_norm(hidden, weights.norm, shape), weights.qkv, filled_rows).float()
    norm = weights.heads_norm
    if norm is not None:
        heads = heads.view(tokens, all_heads, shape.head_dim)
        count = norm.shape[0]
        normed = F.rms_norm(heads.narrow(1, 0, count), [shape.head_dim], None, shape.eps) * norm
        heads = torch.cat([normed, heads.narrow(1, count, shape.kv_heads)], 1)
    pairs = torch.view_as_complex(heads.view(tokens, all_heads, shape.head_dim // 2, 2))
    return torch.view_as_real(pairs * rotation).view(tokens, all_heads, shape.head_dim).to(dtype)


def rest_of(
    hidden: torch.Tensor, mixed: torch.Tensor, weights: Weights, shape: Shape, filled_rows: int
) -> torch.Tensor:
    """The layer after its attention; changes `hidden` in place."""
    hidden = hidden.add_(multiply(mixed, weights.out, filled_rows))
    both = multiply(rms_norm(hidden, weights.mlp_norm, shape), weights.gate_up, filled_rows)
    width = both.shape[1] // 2
    gated = F.silu(both.narrow(1, 0, width)).mul_(both.narrow(1, width, width))
    return hidden.add_(multiply(gated, weights.down, filled_rows))


def run_layers(
    layers: list[Weights],
    shape: Shape,
    hidden: torch.Tensor,
    rotation: torch.Tensor,
    plans: list[Plan],
    filled_rows: int,
    watch: Watch | None = None,
) -> torch.Tensor:
    for index in range(len(layers)):
        weights = layers[index]
        heads = heads_of(hidden, weights, rotation, shape, filled_rows)
        if watch is not None:
            watch.queries[index].copy_(heads.narrow(1, 0, shape.heads).index_select(0, watch.tokens))
        mixed = attend(heads, index, plans, shape.heads, shape.kv_heads)
        hidden = rest_of(hidden, mixed, weights, shape, filled_rows)
    return hidden


def rms_norm(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    """RMSNorm; or the LayerNorm of (x, -x), whose mean is 0, where `weight` is followed by as many zeros."""
    width = x.shape[1]
    if shape.by_layer_norm:
        return torch.layer_norm(torch.cat([x, -x], 1), [2 * width], weight, None, shape.eps).narrow(1, 0, width)
    return F.rms_norm(x, [width], weight, shape.eps)


def _by_layer_norm(device: str, dtype: torch.dtype) -> bool:
    """Whether LayerNorm's one fused kernel beats the small ones of RMSNorm: on CPU, except in float32."""
    return device == "cpu" and dtype is not torch.float32


class _Loop(torch.nn.Module):
    """`run_layers` with weights that stay on TorchScript's side."""

    layers: list[Weights]
    shape: Shape

    def __init__(self, layers: list[Weights], shape: Shape) -> None:
        super().__init__()
        self.layers, self.shape = layers, shape

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        plans: list[Plan],
        filled_rows: int,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        return run_layers(self.layers, self.shape, hidden, rotation, plans, filled_rows, watch)


def _compiled(layers: list[Weights], shape: Shape) -> Callable[..., torch.Tensor] | None:
    """The loop as TorchScript, or None where this torch has none or cannot compile it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            return torch.jit.script(_Loop(layers, shape))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
