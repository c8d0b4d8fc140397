"""What runs on a node of a Ray cluster: cells of a grid, one after another, on cores and GPUs that are its own.

A cell is measured as anywhere else, into a scratch folder here. What it writes is sent to the driver while it goes on,
between two samples and never during one. Nothing heavy is imported before the process is on its cores.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..hardware import devices, environment
from .listener import Listener
from .records import RunFolder, Sample

if TYPE_CHECKING:
    from .plan import Plan

Send = Callable[[str, Any], None]


@dataclass(frozen=True)
class Seat:
    """Which part of its machine a worker has.

    Attributes:
        cpus: Ray's count of CPUs of each node of this machine, of which there may be several.
        node: number of the worker's node among them.
        gpus: of the node in all, where the worker has one or more of them for itself and a share of the cores with
            each; 0 for all cores of the node.
        number: of the worker on its node, for GPUs that Ray does not number.
    """

    cpus: tuple[int, ...]
    node: int
    gpus: int = 0
    number: int = 0

    def cores(self, of_machine: Sequence[int], gpu_ids: Sequence[str]) -> tuple[int, ...]:
        """Its cores; none where other nodes have them all. No other worker has any of them, of whatever sweep: they
        follow from what Ray gives to one process at a time."""
        mine = devices.divide(of_machine, self.cpus)[self.node]
        if not self.gpus or not mine:
            return mine
        physical = devices.physical_cores(mine)
        each = max(1, physical // self.gpus) * (len(mine) // physical)
        parts = devices.divide(mine, [each] * self.gpus)
        numbers = [int(one) if one.isdigit() and int(one) < self.gpus else self.number for one in gpu_ids]
        return tuple(sorted({core for number in numbers for core in parts[number]}))


@dataclass(frozen=True)
class Job:
    """A cell as it goes to a worker.

    Attributes:
        plan: but for `out` and `resume`, which are the worker's.
        manifest, samples: what is there of the cell already, and is gone on with; None and nothing for a new one.
    """

    name: str
    plan: Plan
    argv: tuple[str, ...] = ()
    manifest: str | None = None
    samples: bytes = b""


class Worker:
    """The actor. Models stay loaded between cells."""

    def __init__(self, seat: Seat, folder: str) -> None:
        with contextlib.suppress(OSError):  # where the driver's folder is shared, paths mean the same here
            os.chdir(folder)
        self.gpu_ids = _gpu_ids()
        self.cores = seat.cores(devices.available_cores(), self.gpu_ids)
        if self.cores:
            devices.bind(self.cores, devices.default_threads(self.cores))
            devices.available_cores.cache_clear()  # these are now all that there are
        # One thread for all cells: a model's own process ends with the thread that started it.
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specbench-cell")
        self.shelf: Any = None

    def describe(self) -> dict[str, Any]:
        """Who and where it is; what it runs on is the environment of a manifest."""
        return {
            "specbench": __version__,
            "host": platform.node(),
            "pid": os.getpid(),
            "cores": list(self.cores),
            "gpu_ids": self.gpu_ids,
            "environment": environment.environment(),
        }

    def check(self, plans: Sequence[Plan]) -> tuple[int, str] | None:
        """The first plan that cannot be run here, as far as that shows without a model, and why."""
        from ..errors import UsageError
        from .plan import check

        for number, plan in enumerate(plans):
            try:
                check(plan)
            except UsageError as error:
                return number, str(error)
        return None

    def run(self, job: Job) -> Iterator[tuple[str, Any]]:
        """Measures a cell and yields what the driver is to do with its folder; the last is `end`, how it ended.

        `manifest` and `file` replace a file, `lines` go to the end of the samples, `anew` replaces them; `begin` is how
        many samples there will be and are; `note` and `warn` are for whoever watches.
        """
        inbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        taken = threading.Semaphore(0)

        def send(kind: str, value: Any) -> None:
            inbox.put((kind, value))
            taken.acquire()  # Ray has it: nothing is packed while the next sample runs

        def measure() -> None:
            try:
                self._measure(job, send)
            finally:
                inbox.put(None)

        ended = self.thread.submit(measure)
        while (message := inbox.get()) is not None:
            yield message
            taken.release()
        ended.result()

    def _measure(self, job: Job, send: Send) -> None:
        from .sweep import Cell, Shelf, run_cell

        self.shelf = self.shelf or Shelf()
        scratch = Path(tempfile.mkdtemp(prefix="specbench-cell-"))
        try:
            folder = RunFolder(scratch / "run")
            courier = Courier(folder, send)
            if job.manifest is not None:
                folder.path.mkdir()
                folder.manifest_path.write_text(job.manifest, encoding="utf-8")
                folder.samples_path.write_bytes(job.samples)
                courier.knows(job.manifest, len(job.samples))
            cell = Cell(job.name, {}, replace(job.plan, out=folder.path, resume=job.manifest is not None))
            run_cell(cell, courier, job.argv, self.shelf)
            courier.ship_all()
            send("end", (cell.state, cell.error, cell.problems))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _gpu_ids() -> list[str]:
    import ray

    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class Courier(Listener):
    """Sends what is new in a run folder whenever the run says something."""

    def __init__(self, folder: RunFolder, send: Send) -> None:
        self.folder, self.send = folder, send
        self.manifest: str | None = None
        self.file: int | None = None  # which one the samples were in
        self.sent = 0

    def knows(self, manifest: str, samples_bytes: int) -> None:
        """What the driver sent does not go back."""
        self.manifest, self.sent = manifest, samples_bytes
        self.file = self.folder.samples_path.stat().st_ino

    def stage(self, text: str) -> None:
        self.ship()

    def note(self, text: str) -> None:
        self.ship()
        self.send("note", text)

    def warn(self, text: str) -> None:
        self.ship()
        self.send("warn", text)

    def begin(self, total: int, done: int) -> None:
        self.ship()
        self.send("begin", (total, done))

    def sample(self, samples: Sequence[Sample]) -> None:
        self.ship()

    def end(self) -> None:
        self.ship()

    def ship(self) -> None:
        """The manifest first, so that no sample is ever without one."""
        with contextlib.suppress(FileNotFoundError):
            text = self.folder.manifest_path.read_text(encoding="utf-8")
            if text != self.manifest:
                self.send("manifest", text)
                self.manifest = text
        with contextlib.suppress(FileNotFoundError), self.folder.samples_path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            kind = "lines" if self.file in (None, number) else "anew"  # the file was replaced: failed samples are out
            at = self.sent if kind == "lines" else 0
            file.seek(at)
            new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            if new or kind == "anew":
                self.send(kind, new)
            self.file, self.sent = number, at + len(new)

    def ship_all(self) -> None:
        """The exports too, which are there once the run has ended."""
        self.ship()
        known = (self.folder.manifest_path, self.folder.samples_path)
        for path in sorted(self.folder.path.iterdir()) if self.folder.path.is_dir() else ():
            if path not in known and path.is_file():
                self.send("file", (path.name, path.read_text(encoding="utf-8")))
