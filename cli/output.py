"""Consoles and JSON: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console


def stdout() -> Console:
    """For results. Outside a terminal no colour; the width is the terminal's, or wide where there is none."""
    return _console(sys.stdout)


def stderr() -> Console:
    """For progress, notes, warnings."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    # A pipe has no width of its own: 80 would drop columns that whoever reads the pipe could have used.
    width = None if stream.isatty() or _columns_are_set() else 200
    tolerate(stream)
    # Paths and names may hold square brackets, which are no markup here.
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, markup=False)


def _columns_are_set() -> bool:
    import os

    return os.environ.get("COLUMNS", "").isdigit()


def tolerate(stream: Any) -> None:
    """A character that the stream's encoding lacks becomes `?` instead of an exception in the middle of a table."""
    if hasattr(stream, "reconfigure") and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def print_json(document: Any) -> None:
    """One valid JSON document on stdout and nothing else; ASCII, so that no encoding can spoil it."""
    sys.stdout.write(json.dumps(document, allow_nan=False, indent=2, default=str) + "\n")
