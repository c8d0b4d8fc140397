"""The CPU: what the kernel says about it, how busy others keep it, and what would slow a measurement down."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .devices import cgroup_cpu_limit, physical_cores
from .environment import environment, load

_INSTRUCTIONS = {
    "avx2": "AVX2", "fma": "FMA", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 bfloat16", "avx512_fp16": "AVX-512 float16", "amx_bf16": "AMX bfloat16",
    "amx_int8": "AMX int8", "asimd": "NEON", "bf16": "NEON bfloat16", "i8mm": "NEON int8", "sve": "SVE",
    "sve2": "SVE2",
}  # fmt: skip


def facts(cores: Sequence[int], root: Path = Path("/")) -> dict[str, Any]:
    """Model, cores, caches and instructions. Nothing is measured.

    Args:
        cores: that the process may use.
        root: of the file system, for tests.
    """
    known = environment()
    physical = physical_cores(cores)
    return {
        "model": known["cpu"],
        "architecture": known["architecture"],
        "cores": list(cores),
        "cores_of_machine": os.cpu_count() or len(cores),
        "physical_cores": physical,
        "threads_per_core": round(len(cores) / physical, 2) if physical else None,
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "cgroup_cpu_limit": cgroup_cpu_limit(root / "sys/fs/cgroup"),
        "caches": caches(cores, root),
        "instructions": instructions(root),
        "governor": _read(root / f"sys/devices/system/cpu/cpu{next(iter(cores), 0)}/cpufreq/scaling_governor"),
        "memory_bytes": known["memory_bytes"],
        "memory_limit_bytes": memory_limit(known["memory_bytes"], root),
    }


def caches(cores: Sequence[int], root: Path = Path("/")) -> list[dict[str, Any]]:
    """Each level once: `level`, `kind` (data, instruction, unified), `bytes` of one, `shared_by` cores of ours, and
    `count` of them among our cores."""
    found: dict[tuple[int, str], dict[str, set[int]]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index[0-9]*")):
            level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
            shared = _read(index / "shared_cpu_list")
            match = re.fullmatch(r"(\d+)([KMG]?)", size or "")
            if not (level and kind and match):
                continue
            key = int(level), kind.lower()
            sizes[key] = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
            found.setdefault(key, {}).setdefault(shared or str(core), set()).add(core)
    return [
        {
            "level": level,
            "kind": kind,
            "bytes": sizes[level, kind],
            "shared_by": max(map(len, groups.values())),
            "count": len(groups),
        }
        for (level, kind), groups in sorted(found.items())
    ]


def last_level(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    data = [cache for cache in found if cache["kind"] != "instruction"]
    return max(data, key=lambda cache: cache["level"], default=None)


def instructions(root: Path = Path("/")) -> list[str]:
    """The vector and matrix instructions that matter here, by their common names."""
    text = _read(root / "proc/cpuinfo") or ""
    lines = (line.partition(":") for line in text.splitlines())
    words = next((set(rest.split()) for name, _, rest in lines if name.strip() in ("flags", "Features")), set())
    return [name for flag, name in _INSTRUCTIONS.items() if flag in words]


def memory_limit(memory_bytes: int | None, root: Path = Path("/")) -> int | None:
    """What may be allocated: the machine's memory or the cgroup's limit, whichever is less."""
    limits = [memory_bytes] if memory_bytes else []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(root / "sys/fs/cgroup" / name)
        if text and text.isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def openmp() -> dict[str, Any]:
    """The OpenMP that torch runs on: the libraries loaded, its threads, and the variables that steer it."""
    import torch

    backend = re.search(r"ATen parallel backend: (.+)", torch.__config__.parallel_info())
    maps = _read(Path("/proc/self/maps")) or ""
    libraries = set(re.findall(r"/(lib[gi]?omp\d?)[-.\w]*\.so[.\d]*$", maps, re.M))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
    return {
        "backend": backend[1].strip() if backend else None,
        "libraries": sorted(libraries) or None,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "variables": {name: os.environ[name] for name in names if name in os.environ},
    }


def busy_cores(cores: Sequence[int], seconds: float = 0.3, root: Path = Path("/")) -> float | None:
    """How many of these cores others keep busy (stolen time of a virtual machine included); None if unknown.

    The process sleeps meanwhile, so whatever runs is somebody else's.
    """
    before = _ticks(cores, root)
    time.sleep(seconds)
    after = _ticks(cores, root)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round(len(cores) * (after[0] - before[0]) / (after[1] - before[1]), 2)


def _ticks(cores: Sequence[int], root: Path) -> tuple[int, int] | None:
    """(busy, all) ticks of these cores since the machine started."""
    busy = total = seen = 0
    for line in (_read(root / "proc/stat") or "").splitlines():
        match = re.match(r"cpu(\d+) ", line)
        if match and int(match[1]) in cores:
            ticks = [int(word) for word in line.split()[1:9]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle and waiting for a disk
            seen += 1
    return (busy, total) if seen else None


def warnings(known: Mapping[str, Any], omp: Mapping[str, Any], threads: int, busy: float | None) -> list[str]:
    """What would make the numbers of this machine worse than they need be."""
    cores, limit, found = len(known["cores"]), known["cgroup_cpu_limit"], []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        asked = omp["variables"].get(name, "").partition(",")[0].strip()
        if asked.isdigit() and int(asked) > cores:
            found.append(f"{name}={asked} is more than the {cores} core(s) that may be used here; unset it")
    if threads > known["physical_cores"]:
        found.append(
            f"{threads} threads on {known['physical_cores']} physical core(s): hyper-threads share one core's units"
        )
    if limit and threads > limit:
        found.append(f"{threads} threads, but the cgroup allows the time of {limit:g} core(s): they will be stopped")
    elif limit and limit < cores:
        found.append(f"the cgroup allows the time of {limit:g} of {cores} cores; rates of all cores are out of reach")
    if len(omp["libraries"] or ()) > 1:
        found.append(f"several OpenMP libraries are loaded ({', '.join(omp['libraries'])}); they compete for the cores")
    if omp["backend"] and "OpenMP" not in omp["backend"]:
        found.append(f"torch's threads are {omp['backend']}, not OpenMP")
    if busy is not None and busy > 0.15 * cores:
        found.append(f"others kept {busy:.1f} of {cores} core(s) busy before measuring; the rates are too low")
    elif busy is None and (load() or 0) > 0.3 * cores:
        found.append(f"the machine had a load of {load()} before measuring; the rates may be too low")
    if known["governor"] not in (None, "performance"):
        found.append(f"the frequency governor is {known['governor']}; performance gives steadier numbers")
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
