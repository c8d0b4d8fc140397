"""Which tasks there are: a table of our own, and the entry points of other people's packages.

A task is one module and one line in `BUILT_IN`. Nothing is imported before it is asked for, and no task module
imports torch, transformers or datasets when it is loaded, so listing them all is quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from ..errors import TaskError, UsageError, unknown
from .base import Task

GROUP = "specbench.tasks"
WAY_OUT = "See: specbench list tasks"

# name: (module, class)
BUILT_IN = {
    "bundled": ("bundled", "Bundled"),
    "spec-bench": ("spec_bench", "SpecBench"),
    "jsonl": ("jsonl", "Jsonl"),
    "python-docs": ("python_docs", "PythonDocs"),
    "humaneval": ("humaneval", "HumanEval"),
    "mt-bench": ("mt_bench", "MtBench"),
    "gsm8k": ("gsm8k", "Gsm8k"),
    "mbpp": ("mbpp", "Mbpp"),
    "wmt14": ("wmt14", "Wmt14"),
    "cnn-dailymail": ("cnn_dailymail", "CnnDailymail"),
    "nq-open": ("nq_open", "NqOpen"),
    "pg19": ("pg19", "Pg19"),
    "longbench": ("longbench", "LongBench"),
}


def names() -> list[str]:
    """Every task that can be asked for, our own first; plug-ins are not loaded."""
    return [*BUILT_IN, *sorted(set(_plug_ins()) - set(BUILT_IN))]


def get(name: str) -> type[Task]:
    """The task's class. Our own come before a plug-in of the same name.

    Raises:
        UsageError: no task of that name; TaskError: a plug-in that cannot be loaded, or is no task.
    """
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        return getattr(import_module(f".{module}", __package__), attribute)
    found = _plug_ins().get(name)
    if found is None:
        raise UsageError(unknown("task", name, names(), WAY_OUT))
    return _load(found)


def parse(text: str) -> tuple[type[Task], str | None]:
    """The class and the subtask of "name" or "name:subtask"; UsageError if there is no such one."""
    name, colon, subtask = text.partition(":")
    task = get(name)
    if not colon:
        return task, None
    if subtask not in task.subtasks:
        raise UsageError(unknown(f"subtask of {name}:", subtask, task.subtasks, WAY_OUT))
    return task, subtask


def summaries() -> list[tuple[str, str]]:
    """(name, one line) of every task; for a plug-in that cannot be used, the line says why."""
    rows = []
    for name in names():
        try:
            rows.append((name, get(name).summary))
        except TaskError as error:
            rows.append((name, f"cannot be used: {error}"))
    hidden = sorted(set(_plug_ins()) & set(BUILT_IN))
    rows += [(name, f"cannot be used: {_origin(_plug_ins()[name])} is hidden by our own {name}") for name in hidden]
    return rows


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> type[Task]:
    try:
        task = point.load()
    except Exception as error:  # whatever a stranger's module raises must not become our traceback
        reason = " ".join(str(error).split()) or "no reason given"
        raise TaskError(
            f'task "{point.name}" of {_origin(point)} cannot be loaded: {type(error).__name__}: {reason}'
        ) from error
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise TaskError(f'task "{point.name}" of {_origin(point)} is not a subclass of specbench.tasks.base.Task.')
    missing = [part for part in ("name", "summary", "card", "Options") if not hasattr(task, part)]
    if missing:
        raise TaskError(f'task "{point.name}" of {_origin(point)} lacks the attributes {", ".join(missing)}.')
    return task


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
