"""What a cell of a grid needs for itself on a cluster: GPUs, or all cores of a node, and room for its models.

Worked out from the plan alone, since the devices that it names are those of the node that will run it, not of the
machine that hands it out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..models.info import parameters_in
from ..models.specs import ModelSpec, parse
from .plan import Plan

GIB = 1 << 30
PROCESS_BYTES = GIB  # Python, torch and prompts
COPIES = 2  # of the weights while a model is loaded
_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
_BUILT_IN = {"smollm2-135m": 134_515_008}  # the others are too small to count
_PER_GGUF_BYTE = 2  # weights; a 4-bit file holds 1.8 of them in a byte


@dataclass(frozen=True)
class Needs:
    """Cells with equal needs run on the same workers.

    Attributes:
        gpus: how many, numbered from 0 for the cell.
        whole_node: whether all cores of a node are its own: it computes on a CPU, and other work on that node would
            take memory bandwidth from it, whatever cores it were on.
        memory_bytes: for the models, rounded up to a power of two; 0 where no file here tells.
    """

    gpus: int
    whole_node: bool
    memory_bytes: int

    @property
    def text(self) -> str:
        parts = [f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"] if self.gpus else []
        parts += ["all cores of a node"] if self.whole_node else []
        parts += [f"{self.memory_bytes / GIB:g} GiB of memory"] if self.memory_bytes else []
        return ", ".join(parts)


def needs(plan: Plan) -> Needs:
    """Of one cell. Reads headers of model files that are on this machine, and asks nobody else."""
    roles = plan.devices_as_written
    last = [_last_gpu(device) for device in roles.values()]
    if roles["target"].startswith("cuda"):  # a target in parts takes the GPUs after its first one
        last.append(_last_gpu(roles["target"]) + plan.tp - 1)
    on_cpu = any(not device.startswith("cuda") for device in roles.values())
    return Needs(1 + max(last), on_cpu, _memory(plan))


def _last_gpu(device: str) -> int:
    """The number of a GPU; -1 for any other device."""
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    return int(match[1] or 0) if match else -1


def _memory(plan: Plan) -> int:
    counts = [parameters(name) for name in (plan.target, *plan.drafts.values())]
    if None in counts:
        return 0
    least = PROCESS_BYTES + COPIES * _BYTES[plan.dtype] * sum(filter(None, counts))
    return 1 << (least - 1).bit_length()


@functools.cache
def parameters(name: str) -> int | None:
    """How many weights a model has, as far as this machine can tell without loading or fetching anything; looked up
    once, since many cells have the same models."""
    try:
        spec = parse(name)
    except ModelError:  # a path of the nodes, perhaps
        return None
    if spec.kind == "builtin":
        return _BUILT_IN.get(name, 0)
    if spec.kind in ("self", "distilled"):
        return 0  # a part of the target, which is counted already, or small beside it
    if spec.kind == "gguf":
        return _PER_GGUF_BYTE * Path(spec.location).stat().st_size
    return next((count for folder in _folders(spec) if (count := parameters_in(folder))), None)


def _folders(spec: ModelSpec) -> Iterable[Path]:
    if spec.kind == "folder":
        yield Path(spec.location)
    elif spec.kind == "hub":
        from huggingface_hub import snapshot_download

        try:
            yield Path(snapshot_download(spec.location, revision=spec.revision, local_files_only=True))
        except (OSError, ValueError):  # not in the cache, which the hub's own error is an OSError for
            return
