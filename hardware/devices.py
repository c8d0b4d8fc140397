"""Devices and who sits on which. A core set is a device: `cpu:0`, `cpu:0-3`, `cpu:0,2`; so is `cuda:1`.

Threads are counted within the cores that this process may use (affinity) and the share it may take (cgroup), so that
nothing is ever oversubscribed unseen.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import PlacementError

_DEVICE = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<where>[0-9,-]+))?")


@dataclass(frozen=True)
class Device:
    """A core set or a GPU.

    Attributes:
        kind: `cpu` or `cuda`.
        cores: the cores of a CPU device; empty for "all that this process may use".
        index: of a GPU.
    """

    kind: str
    cores: tuple[int, ...] = ()
    index: int = 0

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"cuda:{self.index}"
        return f"cpu:{_ranges(self.cores)}" if self.cores else "cpu"


def parse_device(text: str) -> Device:
    """Raises PlacementError for what is not a device, or cores that this process may not use."""
    match = _DEVICE.fullmatch(text.strip().lower())
    if not match:
        raise PlacementError(
            f'"{text}" is not a device; write cpu, cpu:0, cpu:0-3 or cuda:0. See: specbench list devices'
        )
    where = match["where"]
    if match["kind"] == "cuda":
        if where and not where.isdigit():
            raise PlacementError(f'"{text}": a GPU has one number, as in cuda:0')
        return Device("cuda", index=int(where or 0))
    if not where:
        return Device("cpu")
    cores = tuple(sorted(_numbers(where, text)))
    missing = sorted(set(cores) - set(available_cores()))
    if missing:
        allowed = _ranges(available_cores())
        raise PlacementError(f'"{text}": core {_ranges(missing)} is not there or not allowed here; allowed: {allowed}')
    return Device("cpu", cores)


def _numbers(where: str, text: str) -> set[int]:
    cores: set[int] = set()
    for part in where.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise PlacementError(f'"{text}": cores are written as 0, 0-3 or 0,2')
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def _ranges(cores: Sequence[int]) -> str:
    """0-3,6 for 0 1 2 3 6."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


@dataclass(frozen=True)
class Placement:
    """Which role runs where, and with how many threads."""

    devices: Mapping[str, Device]
    threads: int

    def of(self, role: str) -> Device:
        return self.devices.get(role, self.devices["target"])


def parse_placement(text: str, threads: int | None = None) -> Placement:
    """`target=cuda:0,draft=cpu:0-7`; a bare device is the target's; a role that is not named follows the target.

    Raises PlacementError for a role named twice, a device that is not there, or more threads than cores.
    """
    devices: dict[str, Device] = {}
    for part in filter(None, re.split(r",(?=\s*[a-z]+\s*=)", text.strip())):
        role, equals, device = part.partition("=")
        if not equals:
            role, device = "target", part
        role = role.strip()
        if role not in ("target", "draft"):
            raise PlacementError(f'"{part}": "{role}" is not a role; the roles are target and draft')
        if role in devices:
            raise PlacementError(f'"{text}": {role} is placed twice')
        devices[role] = parse_device(device)
    devices.setdefault("target", Device("cpu"))
    sets = {device.cores for device in devices.values() if device.kind == "cpu"}
    if len(sets) > 1:
        # One process has one core set; a second one needs a worker process of its own.
        raise PlacementError(
            f'"{text}": two different core sets need a worker process each, which no strategy here starts yet; '
            "give both roles the same cores, or one of them a GPU"
        )
    cores = next(iter(sets), ()) or tuple(available_cores())
    if threads is None:
        threads = default_threads(cores)
    if not 1 <= threads <= len(cores):
        raise PlacementError(f"--threads {threads}: from 1 to {len(cores)}, the cores that may be used here")
    return Placement(devices, threads)


@functools.cache
def available_cores() -> tuple[int, ...]:
    """The cores that this process might use when it was first asked, before it bound itself to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cgroup_cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores' worth of time a container may take, or None where nothing limits it."""
    for quota_file, period_file in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (root / quota_file).read_text().split()
            period = words[1] if period_file is None else (root / period_file).read_text()
            quota = float("inf") if words[0] == "max" else float(words[0])
            if 0 < quota < float("inf"):
                return quota / float(period)
        except (OSError, ValueError, IndexError):
            continue
    return None


def physical_cores(cores: Sequence[int]) -> int:
    """How many of the cores are not SMT siblings of one another."""
    siblings = set()
    for core in cores:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            siblings.add(path.read_text().strip())
        except OSError:
            siblings.add(str(core))
    return len(siblings)


def default_threads(cores: Sequence[int]) -> int:
    """One thread per physical core, and no more than the cgroup lets run at once."""
    limit = cgroup_cpu_limit()
    return max(1, min(physical_cores(cores), math.floor(limit) if limit else len(cores)))


def apply(placement: Placement) -> None:
    """Sets this process's affinity and torch's threads, and switches off shortcuts in precision. Once per process."""
    import torch

    cpu = next((device for device in placement.devices.values() if device.kind == "cpu"), None)
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        for thread in _threads():  # OpenMP's threads may be there already, and each has an affinity of its own
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpu.cores or available_cores())
    torch.set_num_threads(placement.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _threads() -> list[int]:
    tasks = Path("/proc/self/task")
    return [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [0]


def check_gpus(placement: Placement) -> None:
    """Raises PlacementError for a GPU that torch does not see. Imports torch, which `parse_placement` does not."""
    wanted = [device for device in placement.devices.values() if device.kind == "cuda"]
    if not wanted:
        return
    import torch

    count = torch.cuda.device_count()
    for device in wanted:
        if device.index >= count:
            found = f"torch sees {count} GPU(s)" if count else "torch sees no GPU here"
            raise PlacementError(f"{device}: not there; {found}. See: specbench list devices")


def gpus() -> list[dict[str, str]]:
    """Name and memory of each GPU, asked of the driver's own tool so that torch need not be imported."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    fields = (line.split(", ") for line in lines if line.count(", ") >= 2)
    return [{"device": f"cuda:{index}", "name": name, "memory": memory} for index, name, memory, *_ in fields]
