"""`specbench sweep`: a grid of runs."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import typer

from . import running
from .errors import INTERRUPTED, reports_errors
from .output import print_json, stderr, stdout

SWEEP_HELP = """Run every combination of a grid, each as a run of its own, and name the best setting per task.

Takes the options of run. Resumable: done cells are skipped. One that fails does not stop the others.

With --executor ray the cells run on the nodes of a Ray cluster, one per node or GPU at a time.

Example: specbench sweep -s speculative -t org/big -d org/small --grid draft-length=2,4,8 --grid dtype=float32,bfloat16
"""

_GRID = typer.Option(
    "--grid",
    "-g",
    help="What varies: key=a,b,c with any setting of run, or name.key=a,b for an option; may be repeated. "
    "Also as lists under sweep: in --config",
    rich_help_panel="What to measure",
    show_default=False,
)


_EXECUTOR = typer.Option(
    "--executor",
    help="Who runs the cells: local (this process, one after another) or ray (the nodes of a cluster)",
    rich_help_panel="Where it runs",
)
_ADDRESS = typer.Option(
    "--address", help="Of the Ray cluster: auto, or host:port of its head", rich_help_panel="Where it runs"
)
_HARDWARE = typer.Option(
    "--hardware",
    help="With ray: a custom resource that a node must have, as in ray start --resources '{\"a100\": 1}'",
    rich_help_panel="Where it runs",
    show_default=False,
)
_ASSUME = typer.Option(
    "--assume",
    help="With --dry-run: tok/s of every arm, where no profile of the target tells the machine hours",
    rich_help_panel="What comes out",
    show_default=False,
)


def _sweep(
    grid: Annotated[list[str] | None, _GRID] = None,
    executor: Annotated[str, _EXECUTOR] = "local",
    address: Annotated[str, _ADDRESS] = "auto",
    hardware: Annotated[str | None, _HARDWARE] = None,
    assume: Annotated[float | None, _ASSUME] = None,
    **given: Any,
) -> None:
    """What it has of its own; `given` are the options of run."""
    from ..results import best, sweep
    from ..results.comparison import print_comparison
    from ..results.tables import print_cautions
    from .progress import listener_for

    plan, axes = _plan(given, grid or [])
    out, resume = plan.out or sweep.new_folder(), plan.resume
    _check_assumed(assume, given["dry_run"])
    runs_them = _executor(executor, address, hardware, given["dry_run"])
    if given["dry_run"]:
        from ..results.estimate import estimate

        cells = sweep.prepare(plan, axes, out, resume, elsewhere=executor != "local")
        for note in [] if given["quiet"] else sweep.notes_of(cells):
            stderr().print(note, soft_wrap=True)
        _say_what_would_run(cells, estimate(cells, assume), given["json"])
        return
    listener = listener_for(given["quiet"])
    result = sweep.sweep(plan, axes, out, listener, sys.argv[1:], resume, runs_them)
    summary, found = best.findings(result)
    console = stderr()
    if given["json"]:
        if summary:
            print_cautions(summary, console)
        print_json(best.to_dict(result, summary, found))
    elif summary:
        print_comparison(summary, stdout())
        stdout().print()
        for one in found:
            stdout().print(one.text, soft_wrap=True)
    if not given["quiet"]:
        console.print(f"sweep folder: {result.out}", soft_wrap=True)
    for reason in result.failures:
        console.print(f"failed: {reason}", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.failures or summary is None:
        raise typer.Exit(1)


def _check_assumed(speed: float | None, dry_run: bool) -> None:
    from ..errors import UsageError

    if speed is not None and not (dry_run and 0 < speed < float("inf")):
        raise UsageError(f"--assume {speed:g}: is a speed above 0, and goes with --dry-run")


def _executor(name: str, address: str, hardware: str | None, dry_run: bool) -> Any:
    """None for the local one, and in a dry run. Raises UsageError for what does not go together."""
    from ..errors import UsageError, unknown

    if name not in ("local", "ray"):
        raise UsageError(unknown("executor", name, ("local", "ray")))
    if name == "local" and address != "auto":
        raise UsageError(f"--address {address}: goes with --executor ray")
    if name == "local" and hardware is not None:
        raise UsageError(f"--hardware {hardware}: goes with --executor ray")
    if name == "local" or dry_run:
        return None
    from ..results.ray_executor import RayExecutor

    return RayExecutor(address, hardware)


def _plan(given: dict[str, Any], grid: list[str]) -> tuple[Any, dict[str, Any]]:
    """The plan that all cells share, and the grid: flags over the file, key by key."""
    from ..errors import UsageError
    from ..results.plan import parse_option, resolve
    from ..results.sweep import parse_grid
    from .presets import preset

    where, settings = "command line", {}
    if given["preset"]:
        where, settings = f"preset {given['preset']}", dict(preset(given["preset"]))
    axes: dict[str, Any] = {}
    if given["config"] is not None:
        where = str(given["config"])
        file = {key.replace("-", "_"): value for key, value in running._read_yaml(given["config"]).items()}
        axes = file.pop("sweep", None) or {}
        if not isinstance(axes, dict):
            raise UsageError(f"{where}: sweep: is a mapping of settings to lists, as in draft-length: [2, 4, 8]")
        settings |= file
    axes = {str(key).replace("_", "-"): value for key, value in axes.items()}
    axes |= {key.replace("_", "-"): values for key, values in parse_grid(grid).items()}
    flags = {name: value for name, value in given.items() if value not in (None, []) and name not in _HERE}
    for name in ("strategy", "task"):
        if name in flags:
            flags[name] = tuple(part.strip() for text in flags[name] for part in text.split(",") if part.strip())
    if "stop" in flags:
        flags["stop"] = tuple(flags["stop"])
    flags["options"] = {}
    for name, key, value in map(parse_option, given["option"] or []):
        flags["options"].setdefault(name, {})[key] = value
    if given["all_prompts"]:
        flags["limit"] = None
    return resolve(flags, settings, where), axes


_HERE = {"option", "config", "preset", "all_prompts", "dry_run", "json", "quiet"}
_NOT_HERE = {"overwrite"}


def _say_what_would_run(cells: Any, estimate: Any, json: bool) -> None:
    if json:
        print_json({"ok": True, "cells": [cell.record() for cell in cells], "estimate": estimate.to_dict()})
        return
    from ..results.tables import digits

    for cell in cells:
        stdout().print(f"{cell.name}{' (done)' if cell.state == 'done' else ''}", soft_wrap=True)
    console = stdout()
    work = f"{len(estimate.cells)} to run: {estimate.samples:,} samples, at most {estimate.tokens:,} new tokens"
    if estimate.cells:
        hours = "not known" if estimate.hours is None else f"at most {digits(estimate.hours)}, without loading models"
        console.print(work, soft_wrap=True)
        console.print(f"machine hours: {hours}", soft_wrap=True)
        for line in estimate.basis:
            console.print(f"  {line}", soft_wrap=True)
    console.print(f"{len(cells)} cells; all checks passed; nothing was run")


def _with_the_options_of_run() -> Any:
    """`sweep` as the command line sees it: the options of run, read off its signature, between the grid and the rest
    of `_sweep`'s own."""
    known = inspect.signature(running.run).parameters
    hints = inspect.get_annotations(inspect.unwrap(running.run), eval_str=True)
    options = {name: known[name].replace(annotation=hints[name]) for name in known if name not in _NOT_HERE}
    mine = inspect.signature(_sweep, eval_str=True).parameters.values()
    grid, *more = (one for one in mine if one.kind is not inspect.Parameter.VAR_KEYWORD)
    parameters = [grid, *options.values(), *more]

    def sweep(**given: Any) -> None:
        _sweep(**given)

    sweep.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    sweep.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return reports_errors(sweep)


sweep = _with_the_options_of_run()
