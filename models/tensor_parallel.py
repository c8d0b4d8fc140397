"""A target over several devices: the transformers runtime with transformers' own tensor-parallel plan.

Every rank holds a part of each layer and of the KV cache, and all run the same forward; the plan puts the exchanges
into it. Rank 0 alone knows contexts, decides what to keep of them and measures; the others are told which rows to
bring forward, from where, and by which tokens, which is what a step adds and not the whole context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ModelError
from ..hardware.devices import Device, bind, set_up_torch
from ..hardware.ranks import Group, Ranks, surroundings
from .info import ModelInfo, without_codec
from .load import load_transformers
from .transformers_runtime import TransformersModel

_FORWARD, _RESERVE, _COPY = 0, 1, 2


class TensorParallelModel(TransformersModel):
    """A rank's part of a model; that of rank 0 is the model, as a strategy knows it.

    Args:
        hf_model: this rank's part, see `load_transformers`.
        worker: rank 0's hold on the other ranks, else None.
    """

    def __init__(self, hf_model: Any, worker: Ranks | None, info: ModelInfo, vocab_size: int | None) -> None:
        self.worker: Ranks | None = None  # all ranks try a ragged batch of their own accord
        super().__init__(hf_model, name=info.name, context_length=info.context_length, vocab_size=vocab_size)
        self.worker = worker

    def reserve(self, rows: int, tokens: int) -> None:
        before = list(self._cache.reserved)
        super().reserve(rows, tokens)
        if self.worker is not None and self._cache.reserved != before:
            with self.worker.together():
                self.worker.group.tell([_RESERVE, rows, tokens])

    def close(self) -> None:
        super().close()
        if self.worker is not None:
            self.worker.close()

    @torch.inference_mode()
    def act(self, command: np.ndarray) -> None:
        """In a rank that follows: does what rank 0 does."""
        kind, *numbers = command[:5].tolist()
        if kind == _RESERVE:
            self.reserve(*numbers)
        elif kind == _COPY:
            self._copy(*numbers)
        else:
            wanted, count = numbers[:2]
            rows, starts, lengths = command[3 : 3 + 3 * count].reshape(3, count).tolist()
            self.reserve(max(rows) + 1, max(lengths))
            at, arrays = 3 + 3 * count, []
            for row, start, length in zip(rows, starts, lengths, strict=True):
                self._ids[row, start:length] = command[at : at + length - start]
                at += length - start
                arrays.append(self._ids[row, :length])
            self._forward(arrays, starts, rows, wanted)

    def _forward(self, arrays: list[np.ndarray], starts: list[int], rows: Sequence[int], wanted: int) -> torch.Tensor:
        if self.worker is None:
            return super()._forward(arrays, starts, rows, wanted)
        head = [_FORWARD, wanted, len(rows), *rows, *starts, *map(len, arrays)]
        new = [array[start:] for array, start in zip(arrays, starts, strict=True)]
        with self.worker.together():
            began = self._now()
            self.worker.group.tell(np.concatenate([head, *new]))
            told = self._now() - began
            logits = super()._forward(arrays, starts, rows, wanted)
            self.last_forward_ns += told
            return logits

    def _copy(self, source: int, to: int, start: int, end: int) -> None:
        if self.worker is None:
            return super()._copy(source, to, start, end)
        with self.worker.together():
            self.worker.group.tell([_COPY, source, to, start, end])
            super()._copy(source, to, start, end)


def load(
    info: ModelInfo, ranks: Sequence[tuple[Device, int]], dtype: str, vocab_size: int | None = None
) -> TensorParallelModel:
    """Starts the other ranks, loads every rank's part, and returns the whole; `models.load.load` says more.

    Raises:
        ModelError: it cannot be loaded.
        WorkerError: a rank cannot be started, or died.
    """
    with surroundings(ranks[0][0]):
        team = Ranks(info.role, ranks, follow)
        try:
            with team.together():
                team.group.share((without_codec(info), dtype, vocab_size))
            return _load(team.group, info, dtype, vocab_size, team)
        except BaseException:
            team.close(at_once=True)
            raise


def follow(group: Group) -> None:
    """What a rank other than 0 does from beginning to end."""
    info, dtype, vocab_size = group.share()
    model = _load(group, info, dtype, vocab_size, None)
    try:
        group.follow(model.act)
    finally:
        model.close()


def follow_launched(rank: int, ranks: Sequence[tuple[Device, int]]) -> None:
    """The same in a process that torchrun started: on its device and cores, until rank 0 leaves.

    Args:
        ranks: as `load` gets them in rank 0.
    """
    device, threads = ranks[rank]
    bind(device.cores, threads)
    set_up_torch(threads)
    with surroundings(device):
        group = Group(rank, len(ranks), device.torch_name)
        try:
            follow(group)
        finally:
            group.leave()


def _load(group: Group, info: ModelInfo, dtype: str, vocab_size: int | None, team: Ranks | None) -> TensorParallelModel:
    """Every rank loads at the same time, and all of them fail if one does."""
    hf_model, failure = None, None
    try:
        hf_model = load_transformers(info, group.device, dtype, group.size)
    except ModelError as error:
        failure = str(error)
    with contextlib.nullcontext() if team is None else team.together():
        failures = [found for found in group.gather(failure) if found]
    if failures:
        raise ModelError(failures[0])
    return TensorParallelModel(hf_model, team, info, vocab_size)
