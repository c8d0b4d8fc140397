"""Small real objects that tests are made of: a model that can be written down, a clock that ticks, bad drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specbench.hardware.clock import Clock
from specbench.models.base import CachedModel, Forward, Ids, common_prefix
from specbench.models.sparse_select import Selection
from specbench.models.sparse_view import SparseView
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.base import Draft, Drafter, Request, Row, Strategy
from specbench.strategies.sampling import Sampling


class TableModel(CachedModel):
    """A language model that is a table: the logits depend on the last two tokens and on nothing else.

    It keeps the contract of `CachedModel` in full (prefix reuse is counted, limits are checked), in float64, so that
    no test can fail by rounding. `twist` moves its logits away from those of the model with the same seed.
    """

    runtime = "table"
    device = "cpu"
    dtype = "float64"

    def __init__(
        self, vocab: int = 32, seed: int = 0, twist: float = 0.0, context_length: int = 512, max_rows: int = 64
    ) -> None:
        self.name = f"table-{seed}"
        self.vocab_size, self.context_length, self.max_rows = vocab, context_length, max_rows
        generator = torch.Generator().manual_seed(seed)
        self.table = 3 * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)
        if twist:
            generator.manual_seed(seed + 1000)
            self.table += twist * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)
        self.forwards: list[list[int]] = []  # new tokens per row of every forward
        self.cache: dict[int, np.ndarray] = {}

    def advance(
        self, contexts: Sequence[Ids], last: Sequence[int] | int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        rows = list(range(len(contexts))) if rows is None else rows
        lasts = [last] * len(contexts) if isinstance(last, int) else last
        if len(contexts) > self.max_rows or len(set(rows)) != len(contexts) or len(lasts) != len(contexts):
            raise ValueError("rows")
        places, new = [], []
        for context, n, row in zip(contexts, lasts, rows, strict=True):
            ids = np.array(context, dtype=np.int64)
            if not 1 <= n <= len(ids) or len(ids) > self.context_length:
                raise ValueError(f"context of {len(ids)}, last {n}")
            new.append(max(len(ids) - common_prefix(self.cache.get(row, ids[:0]), ids), n))
            self.cache[row] = ids
            first = len(ids) - n
            seen = ids[first - 1 :] if first else np.concatenate([[0], ids])
            places.append(seen[:-1] * self.vocab_size + seen[1:])
        self.forwards.append(new)
        if self.trace is not None:
            self.trace.append(Forward(0, 1, len(rows), sum(new)))
        return self.table.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(places)))

    def copy_row(self, source: int, to: int) -> None:
        self.check_copy(source, to)
        self.cache[to] = self.cache.get(source, np.empty(0, np.int64)).copy()

    def reset(self) -> None:
        self.cache.clear()

    def forget(self, row: int) -> None:
        self.cache.pop(row, None)

    def sparse_view(self, selection: Selection) -> SparseView:
        return SparseTable(self, selection)  # type: ignore[return-value]

    @property
    def row_bytes(self) -> int:
        return 8 * max(map(len, self.cache.values()), default=0)

    @property
    def weight_bytes(self) -> int:
        return self.table.numel() * 8


class SparseTable(TableModel):
    """What a sparse view is to a `TableModel`: a table that is not quite the same, and a note of what it was asked.

    It is as strict as the real one: what it follows has to be what it holds, and it may only be asked for text that
    goes on from there.
    """

    twist = 1.0

    def __init__(self, dense: TableModel, selection: Selection) -> None:
        super().__init__(dense.vocab_size, context_length=dense.context_length, max_rows=dense.max_rows)
        generator = torch.Generator().manual_seed(77)
        noise = torch.randn(dense.table.shape, generator=generator, dtype=torch.float64)
        self.table = dense.table + self.twist * noise
        self.dense, self.selection = dense, selection
        self.last_select_ns = self.last_follow_ns = 1_000_000
        self.chosen: list[tuple[int, int, int]] = []  # row, tokens that there were to choose from, budget
        self.watches: list[bool] = []
        self.bases: dict[int, int] = {}

    def watch(self, on: bool) -> None:
        self.watches.append(on)

    def select(self, row: int, context: Ids, budget: int) -> None:
        assert budget > self.selection.fixed
        self.cache[row] = self._known(row, context)
        self.bases[row] = len(self.cache[row])
        self.chosen.append((row, self.bases[row], budget))

    def follow(self, row: int, context: Ids) -> None:
        assert common_prefix(self.cache[row], np.asarray(context)) >= self.bases[row]
        self.cache[row] = self._known(row, context)

    def forget(self, row: int) -> None:
        super().forget(row)
        self.bases.pop(row, None)

    def _known(self, row: int, context: Ids) -> np.ndarray:
        ids = np.array(context)
        return ids[: common_prefix(self.dense.cache.get(row, ids[:0]), ids)]


class TickingClock(Clock):
    """Moves on by `step` ns each time it is read."""

    def __init__(self, step: int = 10_000_000) -> None:
        self.time, self.step = 0, step

    def now(self) -> int:
        self.time += self.step
        return self.time


class Garbage(Drafter):
    """Proposes random tokens, a random number of them, and claims to be certain."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.random, self.vocab = np.random.default_rng(seed), vocab

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        return [
            Draft(self.random.integers(0, self.vocab, self.random.integers(0, limit + 1)).tolist()) for limit in limits
        ]


def requests(count: int, vocab: int, limit: int = 24, seed: int = 0, longest: int = 12) -> list[Request]:
    """Random prompts of 1 to `longest` tokens."""
    random = np.random.default_rng(seed)
    return [
        Request(
            int(random.integers(1 << 60)), random.integers(0, vocab, random.integers(1, longest + 1)).tolist(), limit
        )
        for _ in range(count)
    ]


def batch_of(strategy: type[Strategy], wanted: int) -> int:
    """`wanted` rows, or as many as the strategy can run."""
    return min(wanted, strategy.max_batch or wanted)


def decode(strategy: Strategy, asked: Sequence[Request], sampling: Sampling, batch: int = 1) -> list[list[int]]:
    """The ids of each request, cut at its limit, as a receiver without end-of-text would keep them."""
    results: list[list[int]] = []
    for at in range(0, len(asked), batch):
        group = asked[at : at + batch]
        strategy.reset()
        ids: list[list[int]] = [[] for _ in group]
        for request in group:
            request.done = False
        for step in strategy.generate(group, sampling):
            assert step.tokens
            assert 0 <= step.accepted <= step.drafted
            ids[step.row].extend(step.tokens)
            group[step.row].done = len(ids[step.row]) >= group[step.row].max_new_tokens
        results += [row[: request.max_new_tokens] for row, request in zip(ids, group, strict=True)]
    return results


_plain: dict[tuple, list[list[int]]] = {}


def plain(asked: Sequence[Request], sampling: Sampling, vocab: int) -> list[list[int]]:
    """Plain decoding, one by one, by the table of seed 1; computed once for all tests that ask for the same."""
    key = vocab, sampling, tuple((one.key, tuple(one.ids), one.max_new_tokens) for one in asked)
    if key not in _plain:
        strategy = Autoregressive({"target": TableModel(vocab, seed=1)}, Autoregressive.Options())
        _plain[key] = decode(strategy, asked, sampling)
    return _plain[key]
