"""A known error is one line on stderr and an exit code; a traceback only where it was asked for."""

from __future__ import annotations

import contextlib
import contextvars
import errno
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
            result = command(*args, **kwargs)
            sys.stdout.flush()  # a reader that has gone, or a full disk, is met here and not at shutdown
            return result
        except SpecbenchError as error:
            if show_tracebacks.get():
                raise
            typer.echo(f"error: {one_line(str(error))}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_stdout()  # the reader has gone (`specbench show run | head`)
            raise typer.Exit(0) from None
        except OSError as error:
            if show_tracebacks.get():
                raise
            if error.errno == errno.ENOSPC:
                _drop_stdout()
            typer.echo(f"error: {error.filename or 'output'}: {error.strerror or error}", err=True)
            raise typer.Exit(1) from None

    return run


def _drop_stdout() -> None:
    """Python flushes once more while shutting down, and would complain again."""
    with contextlib.suppress(OSError, ValueError):  # io.UnsupportedOperation where stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    return " ".join(text.split())
