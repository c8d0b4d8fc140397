"""Our end of a conversation with a program that runs next to the draft model: begun, counted, and ended in every case.

Whatever happens on this side (the text is complete, the receiver has gone away, the target fails), the program is told
to stop, its last messages are heard, its report is kept, and nothing is left running. Only where the draft's side has
failed there is nobody left to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WorkerError
from ..hardware.workers import Message
from ..models.base import CachedModel
from ..models.remote import host_of
from .ahead import REPORT, STOP, Report


class Conversation:
    """A context manager around the use of a port; the program runs from the start on.

    Args:
        draft: the model to run next to, `program(draft, port, *args)`.
        late: what becomes of messages that come after the program was told to stop.

    Attributes:
        report: the program's account of itself, empty before it has stopped.
        sent, received: messages so far.
    """

    def __init__(
        self, draft: CachedModel, late: Callable[[Message], None], program: Callable[..., None], *args: Any
    ) -> None:
        self.report = Report()
        self.sent = self.received = 0
        self._late, self._ended = late, False
        self._host = host_of(draft)
        self._port = self._host.start(program, *args)

    def send(self, kind: int, epoch: int = 0, base: int = 0, ids: Sequence[int] = ()) -> None:
        self.sent += 1
        self._port.send(kind, epoch, base, ids)

    def receive(self) -> Message | None:
        """The next message, or None at once."""
        message = self._port.receive()
        return None if message is None else self._heard(message)

    def wait(self) -> Message:
        """The next message. Raises WorkerError where none can come any more."""
        message = self._port.wait()
        assert message is not None  # without a timeout there is a message or an error
        return self._heard(message)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, WorkerError):  # the draft's side has ended and said why
            return
        self.send(STOP)
        while not self._ended:  # it first finishes the forward that it is in
            self._late(self.wait())
        self._host.join()

    def _heard(self, message: Message) -> Message:
        self.received += 1
        if message.kind == REPORT:
            self.report, self._ended = Report(*message.ids), True
        return message
