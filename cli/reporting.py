"""`specbench report`: a page to look at, made from run folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .errors import reports_errors
from .output import stderr


@reports_errors
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write; replaced if it is there")] = Path(
        "report.html"
    ),
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Also write every chart to this folder, as PNG and SVG")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text/--no-text", help="Show answers as text, where the tokenizer is on this machine")
    ] = True,
) -> None:
    """Write one self-contained page of charts and tables. Example: specbench report runs/NAME -o report.html"""
    # Before transformers is imported: nothing is looked up anywhere for a report.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from ..errors import UsageError
    from ..results import report as reports
    from ..results.plots import require_matplotlib
    from ..results.report_runs import read_all

    if out.is_dir():
        raise UsageError(f"-o {out}: is a folder; name a file, as in report.html")
    require_matplotlib()
    page, charts = reports.write(read_all(runs), out, plots, text)
    console = stderr()
    console.print(f"report: {page} ({page.stat().st_size / 1e6:.2g} MB)", soft_wrap=True)
    if charts:
        console.print(f"charts: {len(charts)} files in {plots}", soft_wrap=True)
