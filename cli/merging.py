"""`specbench merge`: run folders of several sites made into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import reports_errors
from .output import print_json, stdout

MERGE_HELP = """Put run folders together: prompts and repeats of the same plan into one run, cells of sweeps by name.

Runs whose records must not be averaged (other hardware, models, dtype, versions, settings) are refused.

Example: specbench merge runs/all site-a/run site-b/run
"""


@reports_errors
def merge(
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty", show_default=False)],
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, or folders of sweeps", show_default=False, readable=False),
    ],
    apart: Annotated[
        bool,
        typer.Option("--apart/--no-apart", help="Keep runs that cannot be one beside each other, to be compared"),
    ] = False,
    json: Annotated[bool, typer.Option("--json/--no-json", help="One JSON document on stdout")] = False,
) -> None:
    from ..results import merge as merging

    found = merging.merge(out, runs, apart)
    if json:
        print_json({"folder": str(found.out), "runs": found.runs})
        return
    console = stdout()
    for name, count in found.runs.items():
        what = "copied" if count == 1 else f"{count} runs in one"
        console.print(f"{found.out if name == '.' else found.out / name}: {what}", soft_wrap=True)
