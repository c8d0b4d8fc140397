"""The command line: parsing, progress, exit codes. No arithmetic, and nothing heavy is imported for `--help`."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from .. import __version__
from . import bigrams, comparing, distilling, lists, merging, profiling, reporting, running, showing, sweeping
from .errors import show_tracebacks
from .output import tolerate


class _App(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            tolerate(stream)
        try:
            return super().__call__(*args, **kwargs)
        finally:  # one more Ctrl-C while Python shuts down would only add a traceback of somebody's clean-up
            signal.signal(signal.SIGINT, signal.SIG_IGN)


app = _App(
    name="specbench",
    help="Run and benchmark decoding strategies for language models: one loop, one clock, one token counter, and "
    "proof that the output did not change.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"specbench {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback/--no-traceback", help="Show where in the code a known error arose.")
    ] = False,
) -> None:
    show_tracebacks.set(traceback)


app.command("run", help=running.RUN_HELP)(running.run)
app.command("validate", help=running.VALIDATE_HELP)(running.validate)
app.command("show")(showing.show)
app.command("report")(reporting.report)
app.command("compare", help=comparing.COMPARE_HELP)(comparing.compare)
app.command("merge", help=merging.MERGE_HELP)(merging.merge)
app.command("sweep", help=sweeping.SWEEP_HELP)(sweeping.sweep)
app.command("distill", help=distilling.DISTILL_HELP)(distilling.distill)
app.command("bigrams", help=bigrams.BIGRAMS_HELP)(bigrams.bigrams)
app.command("profile-hardware", help=profiling.PROFILE_HELP)(profiling.profile_hardware)
app.add_typer(lists.app, name="list")

__all__ = ["app"]
