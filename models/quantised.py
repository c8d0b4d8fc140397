"""Weight-only quantised matrices for CPU: int8 with a scale per row, int4 with a scale and a zero point per group.

A quantised form is another model: it serves as a draft, or as a target that says what it is in its dtype. It is never
lossless with respect to the weights it was made from. Activations are bfloat16, the only dtype that torch's kernels
for these are fast in (in float32 they are 20 times slower).

The head stays in bfloat16 unless asked for. Rounding it costs the most agreement, and torch's int8 kernel reads half
the bytes in the same time.

Scales are rounded to bfloat16 *before* weights are rounded to the grid they span, so a row has no systematic error.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .draft_options import GROUP_SIZES
from .packed_linear import INT4, INT8, Matrix, pack

QUANTS = ("int8", "int4")
INT4_ROWS = 16  # the int4 kernel wants a multiple of so many rows


def pack_quantised(weight: torch.Tensor, bias: torch.Tensor | None, quant: str, group_size: int) -> Matrix:
    """Packs a (out, in) bfloat16 matrix as `int8` or `int4`.

    Raises:
        ModelError: an unknown form or group size, or a width that groups do not divide.
    """
    if quant == "int8":
        levels, scales = quantise_int8(weight)
        return Matrix(INT8, levels, bias, scales)
    if quant != "int4":
        raise ModelError(f"unknown quantised form {quant!r}; known: {', '.join(QUANTS)}")
    check_groups(weight.shape[1], group_size)
    if weight.shape[0] % INT4_ROWS:
        return pack(weight, bias)  # a narrow projection; as it is, which is more exact and hardly larger
    levels, scales_and_zeros = quantise_int4(weight, group_size)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return Matrix(INT4, packed, bias, scales_and_zeros, group_size)


def check_groups(width: int, group_size: int) -> None:
    """Raises ModelError where int4 has no groups of that size, or they do not divide the width."""
    if group_size not in GROUP_SIZES:
        raise ModelError(f"int4 groups have {', '.join(map(str, GROUP_SIZES))} columns, not {group_size}")
    if width % group_size:
        raise ModelError(f"int4 groups of {group_size} columns do not divide a width of {width}")


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels in -127..127 and a bfloat16 scale per row; the matrix they stand for is levels x scale."""
    widest = weight.abs().amax(1).float() / 127
    scales = widest.bfloat16()
    levels = (weight.float() / scales.float().clamp(min=1e-30)[:, None]).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scales


def quantise_int4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels in 0..15 as int32, and (groups, rows, 2) bfloat16; what they stand for is (level - 8) x scale + zero."""
    rows, width = weight.shape
    groups = weight.float().view(rows, width // group_size, group_size)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    levels = (groups - zeros.float()[..., None]) / scales.float().clamp(min=1e-30)[..., None] + 8
    levels = levels.round_().clamp_(0, 15).to(torch.int32).view(rows, width)
    return levels, torch.stack([scales.t(), zeros.t()], dim=2).contiguous()


def shift_channels(hf_model: Any, offset: int) -> None:
    """Renumbers channels so that groups of columns begin at another one; the model computes the same function.

    Rolls the residual stream, the inside of each MLP, and the inside of each value head to the left, in the weights
    that write them and the ones that read them alike. Whatever grid weights lie on already, a form made afterwards
    has another one, at no cost when it runs.
    """

    def roll(weight: torch.Tensor, axis: int, inside: int = 0) -> None:
        """By `offset`; with `inside`, within every so many channels."""
        parts = weight.data.unflatten(axis, (-1, inside)) if inside else weight.data
        weight.data = parts.roll(-offset, axis + bool(inside)).reshape(weight.shape)

    def roll_outputs(part: Any, inside: int = 0) -> None:
        roll(part.weight, 0, inside)
        if part.bias is not None:
            roll(part.bias, 0, inside)

    decoder, head = hf_model.model, hf_model.lm_head
    head_dim = decoder.layers[0].self_attn.head_dim
    roll(decoder.embed_tokens.weight, 1)
    if head.weight is not decoder.embed_tokens.weight:
        roll(head.weight, 1)
    roll(decoder.norm.weight, 0)
    for block in decoder.layers:
        attention, mlp = block.self_attn, block.mlp
        roll(block.input_layernorm.weight, 0)
        roll(block.post_attention_layernorm.weight, 0)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            roll(part.weight, 1)
        roll_outputs(attention.v_proj, head_dim)
        roll(attention.o_proj.weight, 1, head_dim)
        roll_outputs(attention.o_proj)
        for part in (mlp.gate_proj, mlp.up_proj):
            roll_outputs(part)
        roll(mlp.down_proj.weight, 1)
        roll_outputs(mlp.down_proj)
