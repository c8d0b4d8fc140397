"""The two ends of a conversation: between processes over shared memory, or between threads of one process.

Waiting spins only where nobody else wants the core, and only for so long as a message within a step takes; then it
blocks in the kernel, where an idle end costs nothing. The one who writes rings a bell (a byte in a pipe) if the other
end sleeps; a wake-up that got lost costs one poll interval and nothing more.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WorkerError
from .ring import Message, Ring

SPIN_S = 0.002  # a good part of a step; blocking and waking costs some 30 microseconds
POLL_S = 0.05
HANG_S = 300.0  # longer than a draft's prefill of a long prompt on one core


class HangUp(BaseException):
    """Ends the function at the far end of a conversation that its caller has ended. Not an error, never caught there
    (`finally` runs); raised by every method of its port."""


class Port(ABC):
    """One end of a conversation.

    In the process that began it, everything raises WorkerError, naming the role, once the other side has died or
    raised. In the other one, everything raises `HangUp` once the conversation has been ended from here.
    """

    @abstractmethod
    def send(
        self, kind: int, epoch: int = 0, base: int = 0, ids: Sequence[int] = (), confidences: Sequence[float] = ()
    ) -> None:
        """Sends a message and does not wait for it to be read, unless the ring is full. What the numbers mean is for
        the two ends to agree on."""

    @abstractmethod
    def receive(self) -> Message | None:
        """The next message, or None at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Message | None:
        """Blocks for the next message; None after `timeout_s`.

        Raises:
            WorkerError: besides the above, the other side has returned, or has said nothing for as long as the hang
                timeout, counted over the waiting since the last message in either direction.
        """


class RingPort(Port):
    """An end over two rings.

    Args:
        number: of the conversation.
        bell_in, bell_out: file descriptors of the pipes that wake this end and the other one.
        spins: whether this end has its core to itself.
        gone: called when there is no message and the other side has left, or (with True) when it has died, since its
            end of the bell is closed; raises unless it has left in good order.
        hang_s: raise after so long a silence; None to wait forever.
        role: for messages.
    """

    def __init__(
        self,
        number: int,
        incoming: Ring,
        outgoing: Ring,
        bell_in: int,
        bell_out: int,
        spins: bool,
        gone: Callable[[bool], None],
        hang_s: float | None,
        role: str,
    ) -> None:
        self._number, self._in, self._out = number, incoming, outgoing
        self._bell_in, self._bell_out = bell_in, bell_out
        self._spins, self._gone, self._hang_s, self._role = spins, gone, hang_s, role
        self._waited_s = 0.0
        self._poll = select.poll()
        self._poll.register(bell_in, select.POLLIN)

    def send(
        self, kind: int, epoch: int = 0, base: int = 0, ids: Sequence[int] = (), confidences: Sequence[float] = ()
    ) -> None:
        self._waited_s = 0.0
        for record in self._out.records(kind, epoch, base, ids, confidences):
            if not self._out.write(record):
                self._write_when_read(record)
            if self._out.reader_is_asleep():
                self._ring_bell()

    def receive(self) -> Message | None:
        message = self._in.read()
        if message is None:
            self._check()
            message = self._in.read()  # it may have been the last one before the other side left
        return message

    def wait(self, timeout_s: float | None = None) -> Message | None:
        began = time.monotonic()
        message = self._in.read()
        if message is None and self._spins:
            message = self._spin(began + min(SPIN_S, SPIN_S if timeout_s is None else timeout_s))
        while message is None:
            message = self.receive()
            waited = time.monotonic() - began
            if message is not None:
                break
            if self._in.writer_has_left(self._number):  # perhaps since we looked: it says why, or its last words
                if (message := self.receive()) is not None:
                    break
                raise WorkerError(f"{self._role}: has left the conversation")
            self._say_if_hung(self._waited_s + waited)
            left = POLL_S if timeout_s is None else min(POLL_S, timeout_s - waited)
            if left <= 0:
                self._waited_s += waited
                return None
            message = self._sleep(left)
        self._waited_s = 0.0
        return message

    def _spin(self, until: float) -> Message | None:
        while (message := self._in.read()) is None:
            if self._in.writer_has_left(self._number) or time.monotonic() > until:
                return None
        return message

    def _sleep(self, seconds: float) -> Message | None:
        self._in.sleep(True)
        try:
            message = self._in.read()  # may have come before it was known that this end sleeps
            if message is None and not self._in.writer_has_left(self._number):
                for _ in self._poll.poll(max(1, int(seconds * 1000))):
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._bell_in, 4096)
        finally:
            self._in.sleep(False)
        return message

    def _write_when_read(self, record: Any) -> None:
        began = time.monotonic()
        while not self._out.write(record):
            if self._out.reader_is_asleep():
                self._ring_bell()
            self._check()
            if self._in.writer_has_left(self._number):
                return  # nobody will read it
            self._say_if_hung(time.monotonic() - began)
            time.sleep(0.0005)

    def _check(self) -> None:
        if self._in.writer_has_left(self._number):
            self._gone(False)
        for _, events in self._poll.poll(0):
            if events & select.POLLHUP:
                self._gone(True)

    def _say_if_hung(self, waited_s: float) -> None:
        if self._hang_s is not None and waited_s > self._hang_s:
            raise WorkerError(f"{self._role}: hangs; no message from its worker for {self._hang_s:g} s")

    def _ring_bell(self) -> None:
        try:
            os.write(self._bell_out, b"!")
        except BlockingIOError:
            pass  # it has been rung often enough
        except BrokenPipeError:
            self._gone(True)


class ThreadPort(Port):
    """An end between two threads; `pair` makes both."""

    def __init__(self, role: str, hang_s: float | None) -> None:
        self._role, self._hang_s = role, hang_s
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._other: ThreadPort = self
        self._gone: Callable[[bool], None] = lambda died: None
        self.left = False  # whether this end takes no part any more

    @staticmethod
    def pair(role: str, hang_s: float | None) -> tuple[ThreadPort, ThreadPort]:
        ours, theirs = ThreadPort(role, hang_s), ThreadPort(role, None)
        ours._other, theirs._other = theirs, ours
        return ours, theirs

    def leave(self) -> None:
        self.left = True
        with self._other._changed:
            self._other._changed.notify_all()

    def send(
        self, kind: int, epoch: int = 0, base: int = 0, ids: Sequence[int] = (), confidences: Sequence[float] = ()
    ) -> None:
        message = Message(
            int(kind), int(epoch), int(base), tuple(int(token) for token in ids), tuple(float(c) for c in confidences)
        )
        with self._other._changed:
            self._other._messages.append(message)
            self._other._changed.notify_all()

    def receive(self) -> Message | None:
        if not self._messages and self._other.left:
            self._gone(False)
        return self._messages.popleft() if self._messages else None

    def wait(self, timeout_s: float | None = None) -> Message | None:
        limit = self._hang_s if timeout_s is None else timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._other.left, limit)
        message = self.receive()
        if message is None and self._other.left and (message := self.receive()) is None:
            raise WorkerError(f"{self._role}: has left the conversation")
        if message is None and timeout_s is None:
            raise WorkerError(f"{self._role}: hangs; no message for {self._hang_s:g} s")
        return message
