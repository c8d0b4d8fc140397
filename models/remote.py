"""A model that lives in a worker process, on another device than the target's.

All models of a device share one worker, whose state is a dict of them. Weights, caches and logits stay there; what
travels is token ids. A strategy that wants more of the model than it can ask for here brings a function of its own to
it with `host_of(model).start(...)`.

Times of the worker can be compared with ours: both read the same monotonic clock on Linux, and where a system counts
each process on its own, the difference is measured once and taken off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SpecbenchError, WorkerError
from ..hardware import environment
from ..hardware.clock import Clock
from ..hardware.devices import Device, set_up_torch
from ..hardware.workers import SETTLE_S, Port, ThreadHost, Worker
from .base import CachedModel, Forward, Ids
from .cost_curve import CostCurve, measure_cost
from .info import ModelInfo, without_codec

if TYPE_CHECKING:
    import torch

State = dict[str, CachedModel]  # what a worker holds, by key
_FACTS = ("runtime", "kernels", "dtype", "vocab_size", "context_length", "max_rows", "one_row_because", "weight_bytes")


class ModelWorker(Worker):
    """A worker that holds models. It ends with its last model."""

    def __init__(self, role: str, device: Device, threads: int) -> None:
        super().__init__(role, device, threads, _begin, threads)
        self.models: set[str] = set()
        self.offset_ns = self._clock_offset()
        self._made = 0

    def load(self, info: ModelInfo, role: str, how: Mapping[str, Any]) -> str:
        """Loads a model and returns its key in the worker's state. Raises what `models.load.load` raises."""
        self._made += 1
        key = f"{role}-{self._made}"
        try:
            self.call(_load, key, without_codec(info), dict(how), timeout_s=_LOAD_S)
        except WorkerError as error:
            if isinstance(error.__cause__, SpecbenchError):
                raise error.__cause__ from None
            raise
        self.models.add(key)
        return key

    def unload(self, key: str) -> None:
        self.models.discard(key)
        if not self.models:
            self.close()
        elif self.alive:
            try:
                self.settle(2)
                self.call(_unload, key)
            except WorkerError:  # it is at something that nobody waits for any more
                self.close()

    def drain(self) -> None:
        """Ends what is still going on in the worker, and waits until it and its device have nothing left to do."""
        self.settle()
        if self.device.kind == "cuda":
            self.call(_synchronise, self.device.torch_name)

    def _clock_offset(self) -> int:
        before = Clock().now()
        there = self.call(_now)
        after = Clock().now()
        return 0 if before <= there <= after else there - (before + after) // 2


_LOAD_S = 24 * 3600.0  # as long as it takes; a worker that dies meanwhile is noticed at once


class RemoteModel(CachedModel):
    """A model in a worker. What is asked of it one call at a time is slow (logits are pickled): for reference only."""

    def __init__(self, name: str, worker: ModelWorker, key: str) -> None:
        self.name, self.worker, self.key = name, worker, key
        self.device = worker.device.torch_name
        self._tracing = False
        facts = worker.call(_facts, key)
        self._weight_bytes = facts.pop("weight_bytes")
        for fact, value in facts.items():
            setattr(self, fact, value)

    def advance(
        self, contexts: Sequence[Ids], last: Sequence[int] | int = 1, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        import torch

        count = len(contexts)
        rows = range(count) if rows is None else rows
        lasts = [last] * count if isinstance(last, int) else list(last)
        arrays = [np.asarray(context, dtype=np.int64) for context in contexts]
        self.check_call(arrays, lasts, rows)
        logits, dtype, self.last_forward_ns = self.worker.call(_advance, self.key, arrays, lasts, list(rows))
        return torch.from_numpy(logits).to(getattr(torch, dtype))

    def copy_row(self, source: int, to: int) -> None:
        self.check_copy(source, to)
        self.worker.call(_copy_row, self.key, source, to)

    def reset(self) -> None:
        self.worker.call(_reset, self.key)

    def forget(self, row: int) -> None:
        self.worker.call(_forget, self.key, row)

    def reserve(self, rows: int, tokens: int) -> None:
        self.worker.call(_reserve, self.key, rows, tokens)

    def cost_curve(self, **grid: Any) -> CostCurve:
        """`measure_cost(model, **grid)`, where the model is."""
        return self.worker.call(_measure_cost, self.key, grid)

    @property
    def trace(self) -> list[Forward] | None:  # type: ignore[override]
        """What the worker noted so far, in our time. A copy: setting a list begins a new trace, None ends it."""
        if not self._tracing:
            return None
        offset, found = self.worker.offset_ns, self.worker.call(_trace, self.key)
        return [Forward(start - offset, end - offset, rows, new) for start, end, rows, new in found]

    @trace.setter
    def trace(self, wanted: list[Forward] | None) -> None:
        if (wanted is not None) or self._tracing:
            self.worker.call(_set_trace, self.key, wanted is not None)
        self._tracing = wanted is not None

    def close(self) -> None:
        self.worker.unload(self.key)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes


class ModelHost:
    """Runs functions next to a model, wherever that is: `program(model, port, *args)`."""

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self._host: Worker | ThreadHost
        self._host = model.worker if isinstance(model, RemoteModel) else ThreadHost(model.name, model)

    def start(self, program: Callable[..., None], *args: Any) -> Port:
        """Starts `program(model, port, *args)`, a function of a module, and returns our end of the conversation."""
        if isinstance(self.model, RemoteModel):
            return self._host.start(_run_beside, self.model.key, program, args)
        return self._host.start(program, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(model, *args)`, run there, and its result."""
        if isinstance(self.model, RemoteModel):
            return self._host.call(_call_beside, self.model.key, function, args)
        return self._host.call(function, *args)

    def join(self, timeout_s: float = SETTLE_S) -> None:
        """Waits until the program has returned; what it raised comes out as WorkerError."""
        self._host.join(timeout_s)

    def settle(self) -> None:
        """Hangs up a program that is still running and waits for its end."""
        self._host.settle()

    def close(self) -> None:
        """Ends what `start` began; the model and its worker stay."""
        if self._host.alive:
            self._host.settle()


def host_of(model: CachedModel) -> ModelHost:
    """Where to run a program next to a model: in its worker, or in a thread for a model of this process."""
    return ModelHost(model)


def cost_of(model: CachedModel, **grid: Any) -> CostCurve:
    """`measure_cost`, run where the model is."""
    return model.cost_curve(**grid) if isinstance(model, RemoteModel) else measure_cost(model, **grid)


def fastest_costs(
    models: Mapping[str, CachedModel], grids: Mapping[str, dict[str, Any]], rounds: int = 4
) -> dict[str, CostCurve]:
    """Cost curves of models that are to be compared, by role; measured once and kept with the model.

    The models take turns and the fastest of a few rounds counts: a machine that is busy for a moment makes one of them
    slow and never one fast.

    Args:
        grids: what `measure_cost` takes, by role, without `repeats`.
    """
    known = {role: vars(model).setdefault("known_costs", {}) for role, model in models.items()}
    missing = [role for role, grid in grids.items() if str(grid) not in known[role]]
    for _ in range(rounds):
        for role in missing:
            key, curve = str(grids[role]), cost_of(models[role], **grids[role], repeats=1)
            if key in known[role]:
                fastest = np.minimum(curve.median_ms, known[role][key].median_ms)
                curve = dataclasses.replace(curve, median_ms=fastest)
            known[role][key] = curve
    return {role: known[role][str(grid)] for role, grid in grids.items()}


def load_remote(
    info: ModelInfo,
    role: str,
    device: Device,
    threads: int,
    dtype: str = "float32",
    runtime: str = "auto",
    vocab_size: int | None = None,
    quant: str | None = None,
    exact: bool = False,
    worker: ModelWorker | None = None,
) -> RemoteModel:
    """Loads a model in a worker on `device`; the arguments are those of `models.load.load`.

    Args:
        worker: of this device, to load it into; None starts one, which ends with its last model.

    Raises:
        ModelError: as `load`.
        WorkerError: the worker cannot be started, or dies.
    """
    how = {"device": device.torch_name, "dtype": dtype, "runtime": runtime, "vocab_size": vocab_size}
    host = worker or ModelWorker(role, device, threads)
    try:
        return RemoteModel(info.name, host, host.load(info, role, how | {"quant": quant, "exact": exact}))
    except BaseException:
        if not host.models:
            host.close()
        raise


# --- in the worker ---------------------------------------------------------------------------------------------------


def _begin(threads: int) -> State:
    set_up_torch(threads)
    return {}


def _load(state: State, key: str, info: ModelInfo, how: dict[str, Any]) -> None:
    from .load import load

    state[key] = load(info, **how)


def _unload(state: State, key: str) -> None:
    state.pop(key).close()


def _facts(state: State, key: str) -> dict[str, Any]:
    return {name: getattr(state[key], name) for name in _FACTS}


def _advance(state: State, key: str, contexts: Any, last: Any, rows: Any) -> tuple[np.ndarray, str, int]:
    logits = state[key].advance(contexts, last, rows)
    dtype = str(logits.dtype).removeprefix("torch.")
    wide = logits if dtype == "float64" else logits.float()  # NumPy has no bfloat16; widening changes no value
    return wide.cpu().numpy(), dtype, state[key].last_forward_ns


def _copy_row(state: State, key: str, source: int, to: int) -> None:
    state[key].copy_row(source, to)


def _reset(state: State, key: str) -> None:
    state[key].reset()


def _forget(state: State, key: str, row: int) -> None:
    state[key].forget(row)


def _reserve(state: State, key: str, rows: int, tokens: int) -> None:
    state[key].reserve(rows, tokens)


def _measure_cost(state: State, key: str, grid: dict[str, Any]) -> CostCurve:
    return measure_cost(state[key], **grid)


def _trace(state: State, key: str) -> list[tuple[int, int, int, int]]:
    return [(f.start_ns, f.end_ns, f.rows, f.new_tokens) for f in state[key].trace or []]


def _set_trace(state: State, key: str, on: bool) -> None:
    state[key].trace = [] if on else None


def _now(state: State) -> int:
    return Clock().now()


def _synchronise(state: State, name: str) -> None:
    import torch

    torch.cuda.synchronize(name)


def _run_beside(state: State, port: Port, key: str, program: Callable[..., None], args: tuple[Any, ...]) -> None:
    program(state[key], port, *args)


def _call_beside(state: State, key: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(state[key], *args)


def reset_peak_memory(state: State) -> None:
    environment.reset_peak_memory()


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What `function(*args)` returns, and how many nanoseconds it took."""
    began = Clock().now()
    result = function(*args)
    return result, Clock().now() - began


def peak_memory_bytes(state: State) -> int | None:
    return environment.peak_memory_bytes()
