"""Cells of a sweep on the nodes of a Ray cluster (`pip install "specbench-llm[ray]"`); Ray is imported on first use.

A worker is an actor that claims what its cells need, and Ray gives nothing of that to anybody else: all CPUs of a node
where a cell computes on a CPU, else its GPUs with their share of the cores. So no measured cell shares a device, nor a
core, with another one of this sweep or of any other that runs under the same cluster. The run folders are kept here, by
the driver, which appends each record as it arrives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import UsageError, WorkerError
from . import machines
from .cell_folder import CellFolder
from .listener import Grid, Listener, Working
from .manifest import now
from .needs import Needs, needs
from .ray_driver import Mine, first_line, interrupts, reach
from .ray_worker import Job, Seat, Worker
from .sweep import Cell

INSTALL = 'pip install "specbench-llm[ray]"'
MOST_LOST = 3  # workers that one cell may take with it
NO_NODE_S = 60.0  # without any node to go on with
_LOOK_S = 2.0  # between two looks at the cluster
_WAIT_S = 0.25
_SELECTS = 0.001  # of a custom resource: names a kind of node, and claims next to nothing of it


class RayExecutor:
    """Runs cells on the nodes of a cluster that this machine belongs to.

    Args:
        address: `auto` for the cluster that runs here, or host:port of its head.
        hardware: a custom resource that a node must have, as in `ray start --resources '{"a100": 1}'`, or one that Ray
            makes itself, as `accelerator_type:A100`; None for any node.

    Raises:
        UsageError: Ray is not installed, or the address is none.
    """

    elsewhere = True

    def __init__(self, address: str = "auto", hardware: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UsageError(f"--executor ray: Ray is not installed; install it with: {INSTALL}")
        if address != "auto" and not re.fullmatch(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", address):
            raise UsageError(
                f"--address {address}: write auto, or host:port of the cluster's head; the sweep has to start on "
                "one of its machines"
            )
        self.address, self.hardware = address, hardware

    def run(self, cells: Sequence[Cell], listener: Listener, argv: Sequence[str]) -> Iterator[Cell]:
        """See `sweep.Executor`. What the cluster cannot do is refused before this returns."""
        if not cells:
            return iter(())
        grid = _Grid(cells, listener, argv, self.hardware)
        try:
            grid.connect(self.address)
            grid.check()
        except BaseException:
            grid.close()
            raise
        return grid.results()


@dataclass
class _Task:
    """A cell that is not done."""

    cell: Cell
    needs: Needs
    lost: int = 0


@dataclass
class _Seats:
    """The nodes of one machine, in the order in which they get its cores; another one may take a dead one's place."""

    nodes: list[str] = field(default_factory=list)
    cpus: list[int] = field(default_factory=list)


@dataclass
class _Hand:
    """A worker. `stream` is what it sends of `task`; `ready` is pending until it has told who it is."""

    actor: Any
    ready: Any
    needs: Needs
    node: str
    number: int
    name: str
    environment: dict[str, Any] | None = None
    pid: int | None = None
    task: _Task | None = None
    stream: Any = None
    folder: CellFolder | None = None
    models: tuple[Any, ...] | None = None

    @property
    def idle(self) -> bool:
        return self.environment is not None and self.task is None


class _Grid:
    """The state of one grid on one cluster."""

    def __init__(self, cells: Sequence[Cell], listener: Listener, argv: Sequence[str], hardware: str | None) -> None:
        self.listener, self.argv, self.hardware = listener, tuple(argv), hardware
        self.waiting = [_Task(cell, needs(cell.plan)) for cell in cells]
        self.total, self.ended, self.failed = len(cells), 0, 0
        self.hands: list[_Hand] = []
        self.machines: dict[str, _Seats] = {}
        self.unfit: dict[str, str] = {}  # why nothing runs on a node
        self.kinds: set[str] = set()
        self.nodes: list[dict[str, Any]] = []
        self.looked = self.dry_since = 0.0
        self.ray: Any = None
        self.quiet = contextlib.ExitStack()
        self.ours = False  # whether the connection is, and is to be closed

    # Beginning

    def connect(self, address: str) -> None:
        """Raises UsageError where there is no cluster."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, on what its next version will do
            import ray

            self.ray = ray
            self.quiet.enter_context(contextlib.redirect_stdout(Mine(sys.stdout)))  # type: ignore[type-var]
            if ray.is_initialized():
                return
            if address != "auto":
                reach(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise UsageError(
                    f"--address {address}: no Ray cluster can be joined from here ({first_line(error)}); start one "
                    "with: ray start --head, and on every other machine: ray start --address HOST:6379"
                ) from error
        self.ours = True

    def check(self) -> None:
        """Whether every cell can have what it needs, and, on the first worker that is there, what its plans say of
        devices. Raises UsageError."""
        self._look()
        for task in self.waiting:
            if not list(self._places(task.needs)):
                raise UsageError(f"cell {task.cell.name} needs {self._wish(task.needs)}; {self._nodes_told()}")
        self.listener.stage("waiting for workers")
        while not (ready := [hand for hand in self.hands if hand.idle]):
            self._hire()
            self._wait_for_hands()
        first = ready[0]
        tasks = [task for task in self.waiting if task.needs == first.needs]
        try:
            found = self.ray.get(first.actor.check.remote([task.cell.plan for task in tasks]))
        except self.ray.exceptions.RayError as error:
            raise WorkerError(f"worker {first.name}: {first_line(error)}") from error
        if found is not None:
            number, text = found
            raise UsageError(f"cell {tasks[number].cell.name}, on {first.name}: {text}")

    def _wait_for_hands(self) -> None:
        coming = {hand.ready: hand for hand in self.hands if hand.environment is None}
        if coming:
            for ref in self.ray.wait([*coming], timeout=_WAIT_S)[0]:
                self._meet(coming[ref])
        else:
            self._nobody()

    # The whole

    def results(self) -> Iterator[Cell]:
        with interrupts() as asked:
            try:
                while self.waiting or any(hand.task for hand in self.hands):
                    if asked:
                        yield from self._interrupt()
                        return
                    self._release()
                    self._hire()
                    self._assign()
                    for cell in self._next():
                        yield self._end(cell)
            finally:
                self.listener.end()
                self.close()

    def close(self) -> None:
        """Lets all workers go. What they had sent is on the disk."""
        for hand in self.hands:
            self._kill(hand)
        self.hands = []
        if self.ours:
            self.ours = False
            self.ray.shutdown()
        self.quiet.close()

    # Workers

    def _look(self) -> None:
        """Who is there, and which part of its machine each node has."""
        self.looked = time.monotonic()
        self.nodes = [node for node in self.ray.nodes() if node["Alive"]]
        alive = {node["NodeID"] for node in self.nodes}
        for node in sorted(self.nodes, key=lambda node: node["NodeID"]):
            seats, cpus = self.machines.setdefault(node["NodeManagerHostname"], _Seats()), _count(node, "CPU")
            if node["NodeID"] in seats.nodes or not cpus:
                continue
            for at, other in enumerate(seats.nodes):
                if other not in alive and seats.cpus[at] >= cpus:
                    seats.nodes[at] = node["NodeID"]
                    break
            else:
                seats.nodes.append(node["NodeID"])
                seats.cpus.append(cpus)

    def _places(self, wanted: Needs) -> Iterator[tuple[dict[str, Any], int]]:
        """Nodes that have what is needed, one time for every worker that there is room for, with its number there."""
        for node in self.nodes:
            cpus, gpus = _count(node, "CPU"), _count(node, "GPU")
            fits = cpus >= 1 and gpus >= wanted.gpus and node["Resources"].get("memory", 0) >= wanted.memory_bytes
            fits = fits and (self.hardware is None or node["Resources"].get(self.hardware, 0) > 0)
            if not fits or node["NodeID"] in self.unfit:
                continue
            several = 1 if wanted.whole_node else min(gpus, cpus) // max(1, wanted.gpus)
            yield from ((node, number) for number in range(several))

    def _hire(self) -> None:
        """Starts workers for cells that no worker is free for, where there is room that none of ours has."""
        if time.monotonic() - self.looked > _LOOK_S:
            self._look()
        for wanted in dict.fromkeys(task.needs for task in self.waiting):
            ours = [hand for hand in self.hands if hand.needs == wanted]
            missing = sum(task.needs == wanted for task in self.waiting) - sum(hand.task is None for hand in ours)
            taken = {(hand.node, hand.number) for hand in ours}
            for node, number in self._places(wanted):
                if missing > 0 and (node["NodeID"], number) not in taken:
                    self.hands.append(self._start(wanted, node, number))
                    missing -= 1

    def _start(self, wanted: Needs, node: dict[str, Any], number: int) -> _Hand:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ident, host = node["NodeID"], node["NodeManagerHostname"]
        seats, cpus, gpus = self.machines[host], _count(node, "CPU"), _count(node, "GPU")
        share = cpus if wanted.whole_node else max(1, cpus // gpus) * wanted.gpus
        seat = Seat(tuple(seats.cpus), seats.nodes.index(ident), 0 if wanted.whole_node else gpus, number)
        actor = self.ray.remote(
            num_cpus=share,
            num_gpus=wanted.gpus,
            memory=wanted.memory_bytes or None,
            resources={self.hardware: _SELECTS} if self.hardware else None,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ident, soft=False),
        )(Worker).remote(seat, os.getcwd())
        name = f"{host}/{ident[:6]}" + ("" if wanted.whole_node else f"/{number}")
        return _Hand(actor, actor.describe.remote(), wanted, ident, number, name)

    def _meet(self, hand: _Hand) -> None:
        """A worker that is there, or has failed to be."""
        try:
            facts = self.ray.get(hand.ready)
        except self.ray.exceptions.RayError as error:
            return self._reject(hand, first_line(error))
        if facts["specbench"] != __version__:
            return self._reject(hand, f"has specbench {facts['specbench']}, and this is {__version__}")
        if not facts["cores"]:
            return self._reject(hand, "other Ray nodes of that machine have all its cores")
        hand.environment, hand.pid = facts["environment"], facts["pid"]
        known, kind = len(self.kinds), machines.kind(facts["environment"])
        self.kinds.add(kind)
        if known == 1 and len(self.kinds) == 2:
            self.listener.warn(
                "workers of different hardware are at work; their rows are kept apart, and --hardware NAME chooses one"
            )

    def _reject(self, hand: _Hand, why: str) -> None:
        if self.unfit.setdefault(hand.node, why) is why:
            self.listener.warn(f"worker {hand.name} is not used: {why}")
        self._dismiss(hand)

    def _release(self) -> None:
        """Workers that no waiting cell can use give back what they claim."""
        wanted = {task.needs for task in self.waiting}
        for hand in [hand for hand in self.hands if hand.task is None and hand.needs not in wanted]:
            self._dismiss(hand)

    def _dismiss(self, hand: _Hand) -> None:
        self.hands.remove(hand)
        self._kill(hand)

    def _kill(self, hand: _Hand) -> None:
        if hand.folder is not None:
            hand.folder.close()
        with contextlib.suppress(Exception):  # it may be gone, and the cluster with it
            self.ray.kill(hand.actor)

    def _nobody(self) -> None:
        """No worker, and none to be had for now; nodes may come back."""
        self.dry_since = self.dry_since or time.monotonic()
        there = {node["NodeID"] for node in self.nodes}
        if time.monotonic() - self.dry_since > NO_NODE_S or (there and there <= set(self.unfit)):
            raise WorkerError(
                f"{len(self.waiting)} cells wait, and {self._nodes_told()}; go on with --resume when there are nodes"
            )
        time.sleep(_WAIT_S)

    # Cells

    def _assign(self) -> None:
        for hand in [hand for hand in self.hands if hand.idle]:
            task = self._choose(hand)
            if task is not None:
                self.waiting.remove(task)
                self._hand_out(hand, task)

    def _choose(self, hand: _Hand) -> _Task | None:
        """One that goes on where it stopped on this kind of machine, or is new; of the models that the worker has, else
        of those that have the fewest workers for their cells, so that few models are loaded twice."""
        fitting = [task for task in self.waiting if task.needs == hand.needs]
        here = [task for task in fitting if CellFolder.fits(task.cell, hand.environment or {})]
        fitting = here or fitting
        same = [task for task in fitting if task.cell.models == hand.models]
        if same or not fitting:
            return same[0] if same else None

        def waiting_per_worker(task: _Task) -> float:
            models = task.cell.models
            at_it = sum(hand.models == models for hand in self.hands)
            return sum(other.cell.models == models for other in fitting) / (1 + at_it)

        return max(fitting, key=waiting_per_worker)

    def _hand_out(self, hand: _Hand, task: _Task) -> None:
        assert hand.environment is not None
        cell, plan = task.cell, task.cell.plan
        attempt = {"worker": hand.name, "pid": hand.pid,
                   "hardware": machines.told(hand.environment, hand.needs.gpus), "began": now()}  # fmt: skip
        folder = CellFolder(cell, hand.environment, attempt, self.listener)
        manifest, samples = folder.content()
        job = Job(cell.name, plan, self.argv, manifest, samples)
        hand.task, hand.folder, hand.models = task, folder, cell.models
        hand.stream = hand.actor.run.options(num_returns="streaming").remote(job)
        self._show()

    def _next(self) -> Iterator[Cell]:
        """Waits for what comes first, does it, and yields the cells that have ended by it."""
        streams = {hand.stream: hand for hand in self.hands if hand.task}
        coming = {hand.ready: hand for hand in self.hands if hand.environment is None}
        if not streams and not coming:
            if self.waiting:
                self._nobody()
            return
        self.dry_since = 0.0
        refs = [*streams, *coming]
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=_WAIT_S)
        for ref in ready:
            if ref in coming:
                self._meet(coming[ref])
            elif (cell := self._message(streams[ref])) is not None:
                yield cell

    def _message(self, hand: _Hand) -> Cell | None:
        """The next thing that a worker sent, done; the cell where that has ended."""
        task, folder = hand.task, hand.folder
        assert task is not None
        assert folder is not None
        try:
            kind, value = self.ray.get(next(hand.stream))
        except self.ray.exceptions.RayTaskError as error:
            task.cell.state, task.cell.error = "failed", first_line(error)
        except (StopIteration, self.ray.exceptions.RayError) as error:
            why = "it stopped sending" if isinstance(error, StopIteration) else first_line(error)
            return self._lost(hand, task, why)
        else:
            if kind != "end":
                folder.take(kind, value)
                self._show()
                return None
            task.cell.state, task.cell.error, task.cell.problems = value
        folder.end(task.cell.state)
        hand.task = hand.stream = hand.folder = None
        return task.cell

    def _lost(self, hand: _Hand, task: _Task, why: str) -> Cell | None:
        """What had arrived is kept; another worker goes on with it."""
        task.lost += 1
        assert hand.folder is not None
        hand.folder.end("lost", why)
        self._dismiss(hand)
        self.looked = 0.0  # its node may be gone with it
        if task.lost < MOST_LOST:
            self.listener.warn(f"cell {task.cell.name}: worker {hand.name} was lost ({why}); another one goes on")
            self.waiting.insert(0, task)
            return None
        task.cell.state, task.cell.error = "failed", f"lost {task.lost} workers, the last: {why}"
        return task.cell

    def _end(self, cell: Cell) -> Cell:
        self.ended += 1
        self.failed += cell.state == "failed"
        where = cell.attempts[-1]["worker"] if cell.attempts else "nowhere"
        self.listener.note(f"{self.ended} of {self.total} cells: {cell.name} {cell.state} on {where}")
        self._show()
        return cell

    def _interrupt(self) -> Iterator[Cell]:
        """What has arrived is kept, what runs is given up, and nothing more is begun."""
        self.listener.end()
        self.listener.note("interrupted; keeping what has arrived (Ctrl-C again to leave at once)")
        for hand in [hand for hand in self.hands if hand.task]:
            task, folder = hand.task, hand.folder
            assert task is not None
            assert folder is not None
            while hand.task and self.ray.wait([hand.stream], timeout=0)[0]:
                if (cell := self._message(hand)) is not None:
                    yield cell
                if hand not in self.hands:  # lost in this very moment
                    break
            if hand.task and hand in self.hands:
                folder.interrupt()
                task.cell.state = "interrupted"
                yield task.cell

    # Words

    def _show(self) -> None:
        working = [
            Working(hand.name, hand.task.cell.name, hand.folder.samples, hand.folder.total)
            for hand in self.hands
            if hand.task and hand.folder
        ]
        self.listener.grid(Grid(self.total, self.ended, self.failed, working))

    def _wish(self, wanted: Needs) -> str:
        return wanted.text + (f" and the resource {self.hardware}" if self.hardware else "")

    def _nodes_told(self) -> str:
        told = []
        for node in self.nodes:
            have = node["Resources"]
            parts = [
                f"{_count(node, 'CPU')} CPUs",
                f"{_count(node, 'GPU')} GPUs",
                f"{have.get('memory', 0) / 2**30:.0f} GiB",
            ]
            parts += [self.unfit[node["NodeID"]]] if node["NodeID"] in self.unfit else []
            told.append(f"{node['NodeManagerHostname']} ({', '.join(parts)})")
        return f"the cluster has {'; '.join(told)}" if told else "the cluster has no node"


def _count(node: dict[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))
