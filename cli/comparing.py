"""`specbench compare`: runs side by side, and gates on what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import reports_errors
from .output import print_json, stderr, stdout

COMPARE_HELP = """Compare the arms of any number of runs, on the prompts that all of them have.

What differs between the runs comes first. Runs of other models, dtypes, sampling or limits are refused.

Example: specbench compare runs/before runs/after --baseline before:speculative --fail-below 0.95
"""


@reports_errors
def compare(
    runs: Annotated[
        list[Path] | None,
        # Left to `load`, whose errors are one line.
        typer.Argument(metavar="RUN...", help="Run folders, or the folder of a sweep", readable=False),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Arm of 1.00x: NAME, or RUN:NAME where several runs have it (default: each run's own)"),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What verdict and --fail-below are about: decode, e2e, ttft or tpot")
    ] = "decode",
    by: Annotated[str, typer.Option(help="A group of rows per task, category or prompt")] = "task",
    format: Annotated[str, typer.Option("--format", "-f", help="table, md, csv, json or latex")] = "table",
    json: Annotated[bool, typer.Option("--json/--no-json", help="The same as --format json")] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(help="Exit with 1 if a speed-up is below this, as in 1.2", show_default=False),
    ] = None,
    fail_on_difference: Annotated[
        bool,
        typer.Option(
            "--fail-on-difference/--no-fail-on-difference",
            help="Exit with 1 if a lossless arm emitted other tokens than its baseline, near-ties aside, or lacks some",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force/--no-force", help="Compare what should not be; a watermark says so")
    ] = False,
    imported: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--import",
            metavar="FORMAT PATH",
            help="More rows from elsewhere: spec-bench and an answer file, or a folder of them",
            show_default=False,
        ),
    ] = None,
) -> None:
    from ..errors import UsageError
    from ..results import compare as comparing
    from ..results import comparison as made
    from ..results import spec_bench_answers as answers
    from ..results.runs import load
    from ..results.tables import print_cautions

    if fail_below is not None and not 0 < fail_below < float("inf"):
        raise UsageError(f"--fail-below {fail_below}: not a number above 0")
    if not runs and imported is None:
        raise UsageError("nothing to compare; name one or more run folders, as in: specbench compare runs/a runs/b")
    rows = answers.load(*imported) if imported else []
    own = None if answers.has(rows, baseline) else baseline
    found = comparing.compare(load(runs), own, metric, by, force) if runs else None
    if found is None or rows:
        found = answers.add(rows, found, baseline, by)
    reasons = made.too_slow(found, fail_below) if fail_below is not None else []
    if fail_on_difference:
        reasons += made.not_the_same(found)
    if json or format == "json":
        print_cautions(found, stderr())
        print_json(found.to_dict())
    elif format == "table":
        made.print_comparison(found, stdout())
    else:
        typer.echo(made.render(found, format), nl=False)
    for reason in reasons:
        stderr().print(f"failed: {reason}", soft_wrap=True, markup=False)
    if reasons:
        raise typer.Exit(1)
