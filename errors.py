"""Every error that specbench raises on purpose.

    SpecbenchError            exit 1: it ran, and something failed
      UsageError              exit 2: a flag, option, name or file that cannot be used as asked
        PlacementError        a device or core set that is not there, or is asked for twice
        ModelError            a model that cannot be found, loaded, rolled back or paired
        TaskError             a data set that cannot be found or read
        RunFolderError        a run folder that exists, is foreign, truncated or of another schema
      StrategyError           a strategy broke its contract while it ran
      WorkerError             a worker process died, hung or raised; the message names its role
      MeasurementError        nothing measured, or nothing that can be compared

This module stands below every other one; it is the only one that all folders may import. A message says what,
where, and the way out, on one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecbenchError(Exception):
    exit_code = 1


class UsageError(SpecbenchError):
    exit_code = 2


class PlacementError(UsageError):
    pass


class ModelError(UsageError):
    pass


class TaskError(UsageError):
    pass


class RunFolderError(UsageError):
    pass


class StrategyError(SpecbenchError):
    pass


class WorkerError(SpecbenchError):
    pass


class MeasurementError(SpecbenchError):
    pass


def unknown(kind: str, name: str, known: Iterable[str], way_out: str = "") -> str:
    """The message for a name that is not known: the near name if there is one, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    guess = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known) or 'none'}."
    return f'unknown {kind} "{name}"; {guess}{" " + way_out if way_out else ""}'
