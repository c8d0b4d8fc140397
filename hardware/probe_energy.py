"""Energy counters, where they can be read: RAPL of Intel and AMD processors, NVML of NVIDIA GPUs. None elsewhere.

RAPL counts for whole processor packages and NVML for whole GPUs, whoever uses them; virtual machines usually show
neither, and reading RAPL takes root on most distributions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POWERCAP = Path("/sys/class/powercap")


def sources(root: Path = _POWERCAP) -> dict[str, Any]:
    """Which counters there are: `rapl` and `nvml`, each a list of names, or None with the reason in `why_not`."""
    packages, why_not = _packages(root), {}
    readable = [path for path in packages if _number(path / "energy_uj") is not None]
    if not readable:
        why_not["rapl"] = "may not be read by this user" if packages else "this kernel shows no counter"
    gpus = _Nvml.open()
    if gpus is None:
        why_not["nvml"] = "no NVIDIA driver"
    elif not gpus.handles:
        why_not["nvml"] = "the driver shows no GPU"
    return {
        "rapl": [_name(path) for path in readable] or None,
        "nvml": [f"cuda:{number}" for number in range(len(gpus.handles))] if gpus and gpus.handles else None,
        "why_not": why_not,
    }


@dataclass
class EnergyMeter:
    """Joules since it was made, of the processor packages or of all GPUs.

    Attributes:
        kind: `cpu` or `cuda`.
    """

    kind: str
    root: Path = _POWERCAP
    _before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nvml = _Nvml.open() if self.kind == "cuda" else None
        self._before = self._read()

    def joules(self) -> float | None:
        """None where no counter can be read."""
        after = self._read()
        if not self._before or self._before.keys() != after.keys():
            return None
        total = 0.0
        for name, start in self._before.items():
            spent = after[name] - start
            if spent < 0:  # the counter has started again from 0
                spent += _number(Path(name) / "max_energy_range_uj") or 0
            total += spent
        return total / 1e6

    def _read(self) -> dict[str, int]:
        """Microjoules by counter."""
        if self._nvml is not None:
            return self._nvml.microjoules()
        if self.kind == "cuda":
            return {}
        values = {str(path): _number(path / "energy_uj") for path in _packages(self.root)}
        return {name: value for name, value in values.items() if value is not None}


def _packages(root: Path) -> list[Path]:
    """The packages alone: their cores and memory controllers are counted within them."""
    return sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)


def _name(path: Path) -> str:
    try:
        return (path / "name").read_text().strip()
    except OSError:
        return path.name


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class _Nvml:
    """The driver's own library, so that no further package is needed."""

    _opened: _Nvml | None = None

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handles: list[ctypes.c_void_p] = []
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                self.handles.append(handle)

    @classmethod
    def open(cls) -> _Nvml | None:
        if cls._opened is None:
            try:
                cls._opened = cls(ctypes.CDLL("libnvidia-ml.so.1"))
            except (OSError, AttributeError):
                return None
        return cls._opened

    def microjoules(self) -> dict[str, int]:
        found, value = {}, ctypes.c_ulonglong()
        for number, handle in enumerate(self.handles):
            if not self.library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)):
                found[f"cuda:{number}"] = value.value * 1000
        return found
