"""Whether two sessions ran on the same kind of machine: their times may stand in one row only if they did.

Left out are the versions of packages, which `merge` looks at itself, and the size of the main memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SAME = ("cpu", "architecture", "physical_cores", "cgroup_cpu_limit")


def facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Of an environment as a manifest has it, what makes a machine faster or slower than another one. Not which of its
    cores: a half of a machine is as good as the other half."""
    kept = {name: environment.get(name) for name in _SAME}
    kept["number of cores"] = len(environment.get("cores") or [])
    kept["gpus"] = sorted(f"{gpu.get('name')} {gpu.get('memory')}" for gpu in environment.get("gpus") or [])
    return kept


def kind(environment: Mapping[str, Any]) -> str:
    """Equal for machines of one kind."""
    return json.dumps(facts(environment), sort_keys=True, default=str)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name and both values of every fact in which two environments are of another kind; empty for the same kind."""
    ours, theirs = facts(one), facts(other)
    return [(name, _told(value), _told(theirs[name])) for name, value in ours.items() if value != theirs[name]]


def told(environment: Mapping[str, Any], gpus: int = 0) -> str:
    """In a few words: the first so many GPUs by name, else the processor and how many of its cores there are."""
    names = [str(gpu.get("name")) for gpu in environment.get("gpus") or []][:gpus]
    return ", ".join(counted(names)) or processor(environment)


def counted(names: Sequence[str]) -> list[str]:
    """Each name once; `2 x NAME` where it occurs more often."""
    return [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]


def processor(environment: Mapping[str, Any]) -> str:
    """The processor and how many of its cores there are, as far as both are known."""
    name, cores = str(environment.get("cpu") or "unknown processor"), environment.get("physical_cores")
    return f"{name} ({cores} core{'' if cores == 1 else 's'})" if cores else name


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
