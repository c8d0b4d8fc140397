"""The preallocated KV cache of the packed runtime on CPU: per-row lengths, no holes, dense for the matrix kernels.

oneDNN copies a matrix that is not dense, so a slice of a longer buffer costs as much as reading it twice. Keys and
values of all rows are therefore kept in blocks of exactly `slots` positions, and attention runs over all of them
with a mask. `slots` follows the longest row in steps; changing it moves the blocks within the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

ALIGNMENT = 64  # slots; a multiple of every vector width, so that no kernel has a ragged tail
LARGE = 4 << 20  # bytes from which on large pages are asked for: two of those that processors usually have


def slots_for(tokens: int) -> int:
    """Slots to attend over for so many tokens: at most 64 too many, or one part in sixteen of a long context."""
    step = ALIGNMENT
    while step * 16 < tokens:
        step *= 2
    return -(-tokens // step) * step


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, on large pages where the system has them to give.

    Attention reads a long cache once per step, and on small pages waits for their addresses as well. The memory is
    handed out as it is written to, whatever its size.
    """
    size = count * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


class KeyValueCache:
    """Keys and values, (layers, 2, rows, heads, slots, head_dim), in one piece of memory that is moved, not remade.

    Slots that hold nothing yet are finite numbers (zeros, or what was there before), never NaN, since a masked slot
    takes part in the sums with weight zero.

    Attributes:
        rows: rows there is room for.
        slots: positions of each row that attention runs over.
        blocks: the view that layers read and write, (layers, 2, rows, heads, slots, head_dim).
    """

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.layers, self.heads, self.head_dim, self.dtype = layers, heads, head_dim, dtype
        self.rows, self.slots = 1, ALIGNMENT
        self._memory = zeros(self._numbers(1, ALIGNMENT), dtype)
        self.blocks = self._view()

    def reserve(self, rows: int, tokens: int) -> None:
        """Allocates for so many rows and tokens. What is cached stays; `slots` stays."""
        numbers = self._numbers(max(rows, self.rows), max(slots_for(tokens), self.slots))
        if numbers > self._memory.numel():
            self._move(max(rows, self.rows), self.slots, [self.slots] * self.rows, numbers)

    def fit(self, rows: int, tokens: int, lengths: list[int]) -> None:
        """Makes room for `rows` rows and a longest row of `tokens` tokens; keeps the first lengths[r] of row r.

        Slots shrink only when many more than a draft are unneeded, so that one that is rejected again and again at a
        boundary does not move the cache each time, and a long text before does not slow down a short one.
        """
        needed = slots_for(tokens)
        rows = max(rows, self.rows)
        if needed > self.slots or needed + 2 * ALIGNMENT + self.slots // 8 < self.slots:
            self._move(rows, needed, lengths, self._numbers(rows, needed))
        elif rows > self.rows:
            self._move(rows, self.slots, lengths, self._numbers(rows, self.slots))

    def copy(self, source: int, to: int, start: int, end: int) -> None:
        """Copies the positions from `start` to `end` of one row into another."""
        self.blocks[:, :, to, :, start:end] = self.blocks[:, :, source, :, start:end]

    def take(self, other: KeyValueCache, row: int, start: int, end: int, at: int, roll: int = 0) -> None:
        """Copies the slots from `start` to `end` of the same row of another cache to the slots from `at` on.

        Args:
            roll: by how many channels the values here begin later than the other's.
        """
        self.put(other.blocks[:, :, row, :, start:end], row, at, roll)

    def put(self, states: torch.Tensor, row: int, at: int, roll: int = 0) -> None:
        """Writes keys and values, (layers, 2, heads, n, head_dim), to the slots of a row from `at` on.

        Args:
            roll: by how many channels the values here begin later than those given.
        """
        here = self.blocks[:, :, row, :, at : at + states.shape[3]]
        here.copy_(states)
        if roll:
            values = here[:, 1]
            values.copy_(values.roll(-roll, -1))

    def pick(self, row: int, wanted: torch.Tensor) -> torch.Tensor:
        """Keys and values of some slots of a row, a copy: (layers, 2, heads, n, head_dim).

        Args:
            wanted: (layers, heads, n), the slots that each head wants.
        """
        blocks = torch.arange(2 * self.layers).view(self.layers, 2, 1, 1) * self.rows + row
        places = (blocks * self.heads + torch.arange(self.heads)[:, None]) * self.slots + wanted[:, None]
        table = self.blocks.view(-1, self.head_dim)
        return table.index_select(0, places.flatten()).view(*places.shape, self.head_dim)

    @property
    def nbytes(self) -> int:
        return self._memory.numel() * self._memory.element_size()

    @property
    def row_bytes(self) -> int:
        return self._numbers(1, self.slots) * self._memory.element_size()

    def release(self) -> None:
        self._memory = torch.zeros(0, dtype=self.dtype)
        self.blocks = self._memory

    def _numbers(self, rows: int, slots: int) -> int:
        return self.layers * 2 * rows * self.heads * slots * self.head_dim

    def _view(self) -> torch.Tensor:
        shape = (self.layers, 2, self.rows, self.heads, self.slots, self.head_dim)
        return self._memory[: self._numbers(self.rows, self.slots)].view(shape)

    def _move(self, rows: int, slots: int, lengths: list[int], numbers: int) -> None:
        """Lays the blocks out anew, in place where the memory is large enough."""
        source = self._memory
        if numbers > source.numel():
            self._memory = zeros(numbers, self.dtype)
        slot_bytes = self.head_dim * source.element_size()
        moves = []
        for outer in range(self.layers * 2):
            for row in range(min(self.rows, len(lengths))):
                for head in range(self.heads if lengths[row] else 0):
                    old = ((outer * self.rows + row) * self.heads + head) * self.slots
                    new = ((outer * rows + row) * self.heads + head) * slots
                    moves.append(
                        (new * slot_bytes, old * slot_bytes, min(lengths[row], slots, self.slots) * slot_bytes)
                    )
        if slots > self.slots or rows > self.rows:
            if slots < self.slots:  # some blocks would move up and others down: two passes, each in one direction
                self._move(self.rows, slots, lengths, 0)
                return self._move(rows, slots, lengths, numbers)
            moves.reverse()  # blocks move up: the last one first, so that none is overwritten before it has moved
        to, since = self._memory.data_ptr(), source.data_ptr()
        for new, old, size in moves:
            ctypes.memmove(to + new, since + old, size)
        self.rows, self.slots = rows, slots
        self.blocks = self._view()
        return None
