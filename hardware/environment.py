"""What the numbers were made on: recorded with every run, so that two runs can be told apart later."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .devices import available_cores, cgroup_cpu_limit, gpus, physical_cores

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "accelerate", "gguf", "datasets")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY",
    "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "HF_HUB_OFFLINE",
    "SPECBENCH_NATIVE",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """JSON-safe facts about hardware and software; null where something cannot be read. Does not import torch."""
    cores = available_cores()
    info = _cpuinfo()
    words = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": list(cores),
        "physical_cores": physical_cores(cores),
        "cgroup_cpu_limit": cgroup_cpu_limit(),
        "cpu_flags": [flag for flag in _FLAGS if flag in words],
        "memory_bytes": _memory_bytes(),
        "gpus": gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def torch_environment() -> dict[str, Any]:
    """What only torch knows: its threads, its OpenMP, its kernels."""
    import torch

    parallel = [line.strip() for line in torch.__config__.parallel_info().splitlines() if line.strip()]
    return {
        "threads": torch.get_num_threads(),
        "parallel_info": parallel,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def load() -> float | None:
    """The one-minute load average: how busy the machine was with anything at all."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def reset_peak_memory() -> None:
    """Starts a new count of this process's peak resident memory, where the kernel lets us, and of each GPU's."""
    for index, cuda in _gpus_in_use():
        cuda.reset_peak_memory_stats(index)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int | None:
    """The most resident memory since the last reset (or the start), plus what CUDA had allocated; None if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
        resident = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None
    return resident + sum(cuda.max_memory_allocated(index) for index, cuda in _gpus_in_use())


def _gpus_in_use() -> list[tuple[int, Any]]:
    """(index, torch.cuda) of every GPU, if this process has begun to use any."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [(index, torch.cuda) for index in range(torch.cuda.device_count())]


def commit(folder: Path) -> str | None:
    """The git commit of the code that runs, with `+changes` where the tree is not clean; None outside a checkout."""
    if not (folder / ".git").exists():
        return None
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "HEAD") + ("+changes" if run("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
