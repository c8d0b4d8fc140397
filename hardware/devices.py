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
    """Which role runs where, and with how many threads.

    Attributes:
        devices: of the roles that were named, the target's always; of a target with several ranks, that of rank 0.
        counts: threads per CPU device; of the target's GPU where no role is on a CPU.
        followers: devices of the target's other ranks, in order; a GPU with the cores that its process runs on.
    """

    devices: Mapping[str, Device]
    counts: Mapping[Device, int]
    followers: tuple[Device, ...] = ()

    def of(self, role: str) -> Device:
        """A role that is not named sits with the first draft, if that is named, else with the target."""
        if role in self.devices:
            return self.devices[role]
        return self.devices["draft"] if role != "target" and "draft" in self.devices else self.devices["target"]

    def all_of(self, role: str) -> tuple[Device, ...]:
        """Every device that computes for a role: of a target with several ranks, one per rank."""
        return (self.of(role), *(self.followers if role == "target" else ()))

    def threads_of(self, role: str) -> int:
        """OpenMP threads of the process that the role runs in; the target's launches kernels where it is on a GPU."""
        device = self.of(role)
        return self.counts.get(device, default_threads(self.main_cores) if role == "target" else 1)

    @property
    def threads(self) -> int:
        """Of the target's process, which is ours."""
        return self.threads_of("target")

    @property
    def ranks(self) -> tuple[tuple[Device, int], ...]:
        """Device and threads of every rank of the target, ours first; none where it has a single one."""
        return tuple((device, self.counts[device]) for device in self.all_of("target")) if self.followers else ()

    @property
    def main_cores(self) -> tuple[int, ...]:
        """The cores of our own process: the target's, or, where that is on a GPU, those that no one else has."""
        target = self.of("target")
        if target.kind == "cpu":
            return target.cores or available_cores()
        others = *(device for device in self.devices.values() if device.kind == "cpu"), *self.followers
        taken = {core for device in others for core in device.cores}
        return tuple(core for core in available_cores() if core not in taken)


def named(place: str) -> list[tuple[str, str]]:
    """Role and device of each part of a placement, as they are written and not checked; a bare device is the target's.

    For plans of another machine, whose devices are not here to be looked for.
    """
    parts = filter(None, re.split(r",(?=\s*[a-z]+\d*\s*=)", place.strip()))
    split = (part.partition("=") for part in parts)
    return [(role.strip(), device.strip()) if equals else ("target", role.strip()) for role, equals, device in split]


def parse_placement(text: str, threads: int | None = None, ranks: int = 1) -> Placement:
    """`target=cuda:0,draft=cpu:1-7`; a bare device is the target's.

    Args:
        threads: of the target's cores, or, where the target is on a GPU, of the first draft's; by default one per
            physical core. Other core sets are used whole.
        ranks: how many processes share the target. They share its cores, or take the GPUs that follow it; a role on
            the target's device sits with rank 0, and `threads` is of each rank.

    Raises:
        PlacementError: a role that is not one or is placed twice, a device that is not there, core sets that overlap,
            more threads than cores or than the cgroup lets run, no core left to launch a GPU's kernels from, more
            ranks than cores, or a draft on the GPU of a rank other than the first.
    """
    devices: dict[str, Device] = {}
    for role, device in named(text):
        if not re.fullmatch(r"target|draft([2-9]|[1-9]\d+)?", role):
            raise PlacementError(f'"{role}={device}": "{role}" is not a role; the roles are target, draft, draft2, ...')
        if role in devices:
            raise PlacementError(f'"{text}": {role} is placed twice')
        devices[role] = parse_device(device)
    devices.setdefault("target", Device("cpu"))
    if devices["target"].kind == "cuda":
        devices = _leave_cores(devices, ranks)
    _check_overlap(devices)
    if ranks > 1:
        return _place_ranks(devices, threads, ranks)
    return Placement(devices, _count_threads(devices, threads))


def _place_ranks(devices: dict[str, Device], threads: int | None, ranks: int) -> Placement:
    """One device per rank, and for the process of each a share of the cores, the same for all: they wait for one
    another at every layer."""
    target = devices["target"]
    taken = {core for device in devices.values() if device.kind == "cpu" and device != target for core in device.cores}
    cores = target.cores or tuple(core for core in available_cores() if core not in taken)
    units = _units(cores)
    if len(units) < ranks:
        where = f"of {target}" if target.kind == "cpu" else "left by the drafts"
        raise PlacementError(
            f"--tp {ranks}: {ranks} ranks need a core each, and of those {where} {len(units)} can be used; lower --tp, "
            "or leave the target more cores"
        )
    size = len(units) // ranks
    shares = [
        tuple(sorted(core for unit in units[at : at + size] for core in unit)) for at in range(0, size * ranks, size)
    ]
    if target.kind == "cpu":
        first, *others = (Device("cpu", share) for share in shares)
    else:
        first = target
        others = [Device("cuda", share, target.index + rank) for rank, share in enumerate(shares) if rank]
        for role, device in devices.items():
            if device.kind == "cuda" and target.index < device.index < target.index + ranks:
                raise PlacementError(
                    f"--tp {ranks}: {device} is taken by a rank of the target ({target} to {others[-1]}); place "
                    f"{role} on {target}, on another GPU or on cpu"
                )
    count = default_threads(shares[0]) if threads is None else threads
    if not 1 <= count <= len(shares[0]):
        raise PlacementError(f"--threads {threads}: from 1 to {len(shares[0])}, the cores of each of {ranks} ranks")
    placed = {role: first if device == target else device for role, device in devices.items()}
    rest = {device for device in placed.values() if device.kind == "cpu"} - {first}
    counts = {device: default_threads(device.cores) for device in rest} | dict.fromkeys((first, *others), count)
    _check_cgroup(counts)
    return Placement(placed, counts, tuple(others))


def _leave_cores(devices: dict[str, Device], ranks: int) -> dict[str, Device]:
    """With the target on a GPU, our process needs a core to launch kernels from, and so does that of every other rank:
    a draft on `cpu` leaves them the first ones, so that a worker does not stand in their way."""
    cores = available_cores()
    rest = Device("cpu", cores[ranks:])
    left = {role: rest if device == Device("cpu") else device for role, device in devices.items()}
    taken = {core for device in left.values() for core in device.cores}
    if taken >= set(cores) or (rest in left.values() and len(cores) < ranks + 1):
        target = devices["target"]
        way_out = f"draft=cpu:{_ranges(cores[ranks:])}" if len(cores) > ranks else f"draft={target}"
        raise PlacementError(
            f"every core ({len(cores)}) is placed, and none is left to launch the kernels of target={target} from; "
            f"leave one out, as in {way_out}"
        )
    return left


def _check_overlap(devices: Mapping[str, Device]) -> None:
    placed = [(role, device) for role, device in devices.items() if device.kind == "cpu"]
    for at, (role, device) in enumerate(placed):
        for other_role, other in placed[:at]:
            shared = set(device.cores or available_cores()) & set(other.cores or available_cores())
            if shared and device != other:
                raise PlacementError(
                    f"{other_role}={other} and {role}={device} share core {_ranges(sorted(shared))}; give both the "
                    "same cores, or cores that do not overlap"
                )


def _count_threads(devices: Mapping[str, Device], threads: int | None) -> dict[Device, int]:
    """Threads per CPU device. The flag is for the first one, the target's before a draft's."""
    order = sorted(devices, key=lambda role: (role != "target", role))
    counts: dict[Device, int] = {}
    for device in (devices[role] for role in order if devices[role].kind == "cpu"):
        if device not in counts:
            cores = device.cores or available_cores()
            counts[device] = default_threads(cores) if threads is None or counts else threads
            if not 1 <= counts[device] <= len(cores):
                raise PlacementError(
                    f"--threads {threads}: from 1 to {len(cores)}, the cores that may be used on {device}"
                )
    if not counts:  # all on GPUs: threads of the process that launches the kernels
        counts[devices["target"]] = threads or default_threads(available_cores())
        if counts[devices["target"]] > len(available_cores()):
            raise PlacementError(f"--threads {threads}: from 1 to {len(available_cores())}, the cores that may be used")
    _check_cgroup(counts)
    return counts


def _check_cgroup(counts: Mapping[Device, int]) -> None:
    limit, total = cgroup_cpu_limit(), sum(counts.values())
    if len(counts) > 1 and limit is not None and total > limit:
        each = " + ".join(str(count) for count in counts.values())
        raise PlacementError(
            f"{' and '.join(map(str, counts))}: {each} threads at once, but this container may take {limit:g} cores of "
            "time; name fewer cores"
        )


def split(cores: Sequence[int]) -> tuple[Device, Device]:
    """Two core sets for two roles that work at once: half of the physical cores each, the first one the larger.

    No more cores than the cgroup lets run. Raises PlacementError where there are not two.
    """
    limit, units = cgroup_cpu_limit(), _units(cores)
    if len(units) < 2:
        raise PlacementError(
            f"two roles that work at the same time need two cores; there is {len(units) or 1} here"
            + (f" (the container may take {limit:g} cores of time)" if limit and limit < 2 else "")
        )
    half = (len(units) + 1) // 2
    first, second = (tuple(sorted(core for unit in part for core in unit)) for part in (units[:half], units[half:]))
    return Device("cpu", first), Device("cpu", second)


def _units(cores: Sequence[int]) -> list[list[int]]:
    """What can be given to processes that work at once: physical cores with their siblings, or, of a single physical
    core, its siblings; no more of them than the cgroup lets run."""
    limit, units = cgroup_cpu_limit(), _physical(cores)
    return units[: math.floor(limit)] if limit else units


def _physical(cores: Sequence[int]) -> list[list[int]]:
    """Physical cores with their siblings; of a single one, each sibling for itself."""
    groups: dict[str, list[int]] = {}
    for core in cores:
        groups.setdefault(_siblings(core), []).append(core)
    return list(groups.values()) if len(groups) > 1 else [[core] for core in cores]


def divide(cores: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Core sets for several processes of one machine: at least so many cores each, none at all where they run out.

    No two share a physical core, unless there is only one.
    """
    units = _physical(sorted(cores))
    parts = []
    for count in counts:
        part: list[int] = []
        while units and len(part) < count:
            part += units.pop(0)
        parts.append(tuple(sorted(part)))
    return parts


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
    return len({_siblings(core) for core in cores})


def _siblings(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def default_threads(cores: Sequence[int]) -> int:
    """One thread per physical core, and no more than the cgroup lets run at once."""
    limit = cgroup_cpu_limit()
    return max(1, min(physical_cores(cores), math.floor(limit) if limit else len(cores)))


def share_a_core(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two core sets have a physical core in common; SMT siblings are one."""
    return physical_cores([*ours, *theirs]) < physical_cores(ours) + physical_cores(theirs)


def bind(cores: Sequence[int], threads: int) -> None:
    """Binds this process to cores, and tells OpenMP its threads before torch is imported. For worker processes."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    _set_affinity(cores)


def apply(placement: Placement) -> None:
    """Binds this process to the target's cores and sets torch up. Once per process."""
    _set_affinity(placement.main_cores)
    set_up_torch(placement.threads)


def set_up_torch(threads: int) -> None:
    """Sets torch's threads, and switches off shortcuts in precision. In our process and in every worker alike."""
    import torch

    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _set_affinity(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        for thread in _threads():  # OpenMP's threads may be there already, and each has an affinity of its own
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    tasks = Path("/proc/self/task")
    return [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [0]


def check_gpus(placement: Placement) -> None:
    """Raises PlacementError for a GPU that torch does not see. Imports torch, which `parse_placement` does not."""
    wanted = [device for device in (*placement.devices.values(), *placement.followers) if device.kind == "cuda"]
    on_cpu_ranks = placement.followers and placement.of("target").kind == "cpu"
    if not wanted and not on_cpu_ranks:
        return
    import torch

    count = torch.cuda.device_count()
    if on_cpu_ranks and count:
        raise PlacementError(
            f"target={placement.of('target')}: ranks on CPU need the GPUs out of sight, since transformers shards a "
            "model onto those it sees; set CUDA_VISIBLE_DEVICES= for this run, or place the target on cuda:0"
        )
    for device in wanted:
        if device.index >= count:
            found = f"torch sees {count} GPU(s)" if count else "torch sees no GPU here"
            asked = f"--tp {len(placement.ranks)}: " if placement.followers else ""
            raise PlacementError(f"{asked}{device}: not there; {found}. See: specbench list devices")


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
