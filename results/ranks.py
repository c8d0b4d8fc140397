"""`specbench run` under torchrun, which starts it once per rank: rank 0 measures, the others follow."""

from __future__ import annotations

import os
import signal

from ..errors import UsageError
from ..hardware.ranks import launched
from .plan import Plan, check


def follow_rank_0(plan: Plan, dry_run: bool = False) -> bool:
    """Whether this process is a rank other than 0; if so, it has followed rank 0 to the end. Without torchrun, False.

    Raises:
        UsageError: torchrun started another number of processes than `--tp` says, or not all of them here.
        WorkerError: a rank is gone.
    """
    place = launched()
    if place is None:
        return False
    rank, size = place
    if plan.tp != size:
        raise UsageError(f"--tp {plan.tp}: torchrun started {size} processes; give both the same number")
    if os.environ.get("LOCAL_WORLD_SIZE", str(size)) != str(size):
        raise UsageError(f"--tp {plan.tp}: torchrun started ranks on several machines; all have to be on one")
    if rank == 0:
        return False
    if not dry_run:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the run, and may have a summary to write
        from ..models.tensor_parallel import follow_launched

        follow_launched(rank, check(plan).placement.ranks)
    return True
