"""What the driver of a grid does beside the grid: Ray's output, its errors in a line, Ctrl-C, a look at an address."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError


class Mine:
    """stdout for the thread that it was made in. What other threads print there is dropped: Ray has one that tells of
    dead workers in a page of prose, in the midst of the results; our own warning has said it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return self._stream.write(text) if threading.get_ident() == self._thread else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def first_line(error: BaseException) -> str:
    """Ray's errors are pages; the last line of a traceback in one says what it was, else the first of all."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    name = type(cause or error).__name__
    if not lines:
        return name
    if detail := re.search(r"Worker exit detail: (.+?)(?: Some common|$)", str(error), re.MULTILINE):
        lines[0] += f" {detail[1]}"
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b: ", line)]
    return (raised[-1] if raised else lines[0])[:300]


def reach(address: str) -> None:
    """Ray itself tries for a minute. Raises UsageError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: nobody answers there ({error}); name the head of a cluster, as ray start prints it"
        ) from None


@contextlib.contextmanager
def interrupts() -> Iterator[list[bool]]:
    """Ctrl-C becomes a question that is asked between two messages, so that none is lost half-way; a second one passes
    through. Outside the main thread nothing is changed."""
    asked: list[bool] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
