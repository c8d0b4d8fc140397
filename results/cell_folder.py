"""A cell's run folder on the driver, filled with what a worker elsewhere sends.

Each record is on the disk before the next message is looked at. A folder holds one kind of hardware: a cell that goes
on somewhere else begins anew, and what there was is set aside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

from ..errors import MeasurementError
from . import machines
from .listener import Listener
from .manifest import now
from .records import RunFolder, Sample, SampleWriter, write_atomically
from .summary import summarise
from .sweep import Cell
from .tables import write_exports

ASIDE = "set-aside"  # beside the cells; not one of them


class CellFolder:
    """One attempt at a cell.

    Args:
        environment: of the worker.
        attempt: what is recorded of it, in the manifest and in the cell; completed as it ends.

    Attributes:
        samples, total: measured so far and in all; 0 before that is known.
    """

    def __init__(self, cell: Cell, environment: dict[str, Any], attempt: dict[str, Any], listener: Listener) -> None:
        self.cell, self.attempt, self.listener = cell, attempt, listener
        self.folder = RunFolder(cell.folder)
        self.writer: SampleWriter | None = None
        self.manifest: dict[str, Any] | None = None
        self.samples = self.total = 0
        if not self.fits(cell, environment):
            self._set_aside()
        cell.attempts.append(attempt)

    @staticmethod
    def fits(cell: Cell, environment: dict[str, Any]) -> bool:
        """Whether a machine may go on with what there is of a cell."""
        folder = RunFolder(cell.folder)
        if not folder.manifest_path.exists():
            return True
        return machines.kind(folder.manifest().get("environment") or {}) == machines.kind(environment)

    def _set_aside(self) -> None:
        base = self.cell.folder.parent / ASIDE
        base.mkdir(exist_ok=True)
        names = (base / f"{self.cell.name}-{number}" for number in itertools.count(1))
        self.cell.folder.rename(next(path for path in names if not path.exists()))
        self.listener.warn(f"cell {self.cell.name}: begins anew on other hardware; what there was is in {base}")

    def content(self) -> tuple[str | None, bytes]:
        """What the worker has to know in order to go on: manifest and whole lines of samples; None where it begins."""
        if not self.folder.manifest_path.exists():
            return None, b""
        lines = b"".join(line for _, line in self.folder.lines()) if self.folder.samples_path.exists() else b""
        return self.folder.manifest_path.read_text(encoding="utf-8"), lines

    def take(self, kind: str, value: Any) -> None:
        """Does what a message says; see `Worker.run`."""
        if kind == "manifest":
            self.manifest = json.loads(value)
            self._write_manifest()
        elif kind in ("lines", "anew"):
            self._append(self._parsed(value), anew=kind == "anew")
        elif kind == "file":
            name, text = value
            write_atomically(self.folder.path / name, text)
        elif kind == "begin":
            self.total, self.samples = value
        elif kind == "note":
            self.listener.note(f"{self.cell.name}: {value}")
        elif kind == "warn":
            self.listener.warn(f"{self.cell.name}: {value}")

    def end(self, how: str, why: str | None = None) -> None:
        """Records how the attempt ended, and lets the folder go."""
        self.attempt |= {"ended": now(), "how": how} | ({"why": why} if why else {})
        if self.manifest is not None:
            self._write_manifest()
        self.close()

    def interrupt(self) -> None:
        """What there is becomes an interrupted run with a summary, as after Ctrl-C on one machine."""
        if self.manifest is not None:
            self.manifest |= {"interrupted": True, "finished": now()}
        self.end("interrupted")
        if self.manifest is not None:
            with contextlib.suppress(MeasurementError):
                write_exports(summarise(self.folder.manifest(), self.folder.samples()), self.folder.path)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _write_manifest(self) -> None:
        assert self.manifest is not None
        self.manifest["plan"]["out"] = str(self.folder.path)
        self.manifest["executor"] = {"kind": "ray", "attempts": self.cell.attempts}
        self.folder.write_manifest(self.manifest)

    def _parsed(self, lines: bytes) -> list[Sample]:
        return [self.folder.sample(number, line) for number, line in enumerate(lines.splitlines(), start=1)]

    def _append(self, samples: list[Sample], anew: bool) -> None:
        if anew:
            self.close()
            self.folder.rewrite(samples)
        if self.writer is None:
            self.writer = self.folder.writer()
        if not anew:
            self.writer.append(samples)
            self.samples += sum(sample.kind == "measure" for sample in samples)
