"""`specbench show`: the table of a run that was made before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import reports_errors
from .output import print_json, stderr, stdout


@reports_errors
def show(
    run: Annotated[Path, typer.Argument(help="Run folder, or that of a sweep", show_default=False, readable=False)],
    format: Annotated[
        str, typer.Option("--format", "-f", help="table, md, csv, json, latex, or vllm (its bench's JSON)")
    ] = "table",
    json: Annotated[bool, typer.Option("--json/--no-json", help="The same as --format json")] = False,
) -> None:
    """Print the table of a run folder, or one table after another of a sweep's cells.

    Example: specbench show runs/2026-01-31_120000-tiny-lookup
    """
    from ..errors import MeasurementError, UsageError
    from ..results.runs import cells, is_sweep

    format = "json" if json else format
    if not is_sweep(run):
        _show(run, format)
        return
    if format not in ("table", "md", "latex"):
        raise UsageError(f"{run}: holds several runs, and {format} is for one of them; name its folder")
    for cell in cells(run):
        typer.echo(f"{cell}:")
        try:
            _show(cell, format)
        except MeasurementError as error:  # begun, and no more than that
            typer.echo(str(error))
        typer.echo()


def _show(path: Path, format: str) -> None:
    from ..results import tables
    from ..results.records import RunFolder
    from ..results.summary import summarise

    folder = RunFolder(path)
    if format == "vllm":
        from ..results import export

        typer.echo(export.to_json(folder.manifest(), folder.samples()), nl=False)
        return
    summary = summarise(folder.manifest(), folder.samples())
    if format == "json":
        tables.print_cautions(summary, stderr())
        print_json(summary.to_dict())
    elif format == "table":
        tables.print_summary(summary, stdout(), folder.path)
    else:
        typer.echo(tables.render(summary, format), nl=False)
