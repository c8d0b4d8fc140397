"""Weight matrices packed once for the kernels of this processor, and their product with a few rows.

On CPU that is oneDNN's blocked layout, through the operators that inductor's freezing uses as well. They are private
to torch: where they are missing or refuse, `torch.nn.functional.linear` takes their place, slower but right.

oneDNN sums a single row in another order than two or more, so a single one is filled up with copies: a token must
get the same bits alone and in the middle of a draft. Up to four rows cost no more than one on most processors, and
less on some, where more loads are then in flight.

`multiply` is compiled by TorchScript as part of the layer loop (`packed_layers`), hence its plain style.
"""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

PLAIN, ONE_DNN, INT8, INT4, NATIVE = 0, 1, 2, 3, 4
FILLED_ROWS = 4  # what fewer rows are filled up to, unless two are faster here


class Matrix(NamedTuple):
    """A packed (out, in) matrix.

    Attributes:
        kind: which kernel takes it.
        weight: in that kernel's layout.
        scales: of a quantised kind, see `quantised`.
        group_size: columns that share a scale in int4.
    """

    kind: int
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    group_size: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        parts = [part for part in (self.weight, self.bias, self.scales) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)


def multiply(x: torch.Tensor, matrix: Matrix, filled_rows: int) -> torch.Tensor:
    """(rows, in) times the matrix: (rows, out).

    Args:
        filled_rows: from `choose_filled_rows`; at least 2 wherever bits matter.
    """
    kind, bias = matrix.kind, matrix.bias
    if kind == 1:
        rows = x.shape[0]
        if rows >= filled_rows:
            return torch.ops.mkldnn._linear_pointwise(x, matrix.weight, bias, "none", [], "")
        filled = x.expand(filled_rows, -1) if rows == 1 else F.pad(x, [0, 0, 0, filled_rows - rows])
        return torch.ops.mkldnn._linear_pointwise(filled, matrix.weight, bias, "none", [], "").narrow(0, 0, rows)
    if kind == 0:
        return F.linear(x, matrix.weight, bias)
    scales = matrix.scales
    assert scales is not None
    if kind == 2:
        y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), matrix.weight, scales)
    else:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), matrix.weight, matrix.group_size, scales)
    if bias is not None:
        y = y.add_(bias)
    return y


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """The matrix as it is, sharing its memory."""
    return Matrix(PLAIN, weight, bias)


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """Packs a (out, in) matrix for the CPU; the unpacked one is not kept, unless nothing better is to be had here."""
    if can_prepack(weight.dtype):
        return Matrix(ONE_DNN, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)
    return plain(weight, bias)


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linears exist here and are made for this dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        probe = torch.ops.mkldnn._reorder_linear_weight(torch.ones(32, 32, dtype=dtype))
        done = torch.ops.mkldnn._linear_pointwise(torch.ones(1, 32, dtype=dtype), probe, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((done == 32).all())


def choose_filled_rows(matrices: Sequence[Matrix], width: int, dtype: torch.dtype, rounds: int = 5) -> int:
    """How many rows a single one is filled up to, by timing cold weights: 4, or 2 where that is faster.

    It depends on the processor and the number of threads. Both share their order of summation with every larger
    number of rows, so the choice changes no result.

    Args:
        matrices: of the same shape, together larger than the caches; what is found holds for all shapes.
        width: columns of these matrices.
    """
    packed = [matrix for matrix in matrices if matrix.kind == ONE_DNN]
    took: dict[int, list[int]] = {2: [], FILLED_ROWS: []}
    for _ in range(rounds if packed else 0):
        for rows, times in took.items():
            x = torch.ones(rows, width, dtype=dtype)
            began = time.perf_counter_ns()
            for matrix in packed:
                multiply(x, matrix, rows)
            times.append(time.perf_counter_ns() - began)
    if not packed:
        return 2
    return FILLED_ROWS if sorted(took[FILLED_ROWS])[rounds // 2] <= sorted(took[2])[rounds // 2] else 2
