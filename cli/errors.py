"""A known error is one line on stderr and an exit code; a traceback only where it was asked for."""

from __future__ import annotations

import contextvars
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from ..errors import SpecbenchError

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED = 130

show_tracebacks: contextvars.ContextVar[bool] = contextvars.ContextVar("show_tracebacks", default=False)


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Around every command function."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except SpecbenchError as error:
            if show_tracebacks.get():
                raise
            typer.echo(f"error: {one_line(str(error))}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader has gone (`specbench show run | head`). Python would complain once more while shutting down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return run


def one_line(text: str) -> str:
    return " ".join(text.split())
