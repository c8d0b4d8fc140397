"""A queue of messages in shared memory, with one writer and one reader and no lock between them.

A message is written first and published last, by moving one counter that only the writer moves; the reader moves
another one. Every record carries its own position, so a reader that is out of step finds out. Nothing is pickled and
neither side ever waits for an answer; a message that is longer than the ring holds goes in parts.

    words 0, 8, 16, 24     written, read, reader asleep, conversation that the writer has left (a cache line each)
    words 32 ...           the records: 9 words of header, then ids, then confidences as the bits of float64
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import WorkerError

WORDS = 1 << 16  # 512 KiB
_WRITTEN, _READ, _ASLEEP, _LEFT = 0, 8, 16, 24
_CONTROL = 32
_HEADER = 9


class Message(NamedTuple):
    """Token ids and small integers, meaning whatever the two ends agreed on.

    Attributes:
        kind: what it is, from 0 upwards.
        epoch: number of the state it belongs to, so that what is stale can be told.
        base: a position, a count, or a time.
        ids: token ids.
        confidences: a float per token, or none.
    """

    kind: int
    epoch: int = 0
    base: int = 0
    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


class Ring:
    """One direction. Both processes make one over the same memory; one of them only writes, the other only reads.

    Args:
        memory: int64 words, zeroed, such as `multiprocessing.RawArray("q", WORDS)`.
    """

    def __init__(self, memory: Any) -> None:
        words = memoryview(memory).cast("B").cast("q")
        self._control, self._data = words[:_CONTROL], words[_CONTROL:]
        self._size = len(self._data)
        self._part = self._size // 4 - _HEADER  # the most payload of one record
        self._fence = threading.Lock()
        self._payload: list[int] = []  # of a message that has not arrived whole

    def fence(self) -> None:
        """Keeps what this process wrote before from being seen after what it writes or reads now."""
        with self._fence:  # taking and giving back a lock is a full memory barrier
            pass

    # The writer's side

    def records(
        self, kind: int, epoch: int, base: int, ids: Sequence[int] | np.ndarray, confidences: Sequence[float]
    ) -> Iterator[array]:
        """The records of one message, to be written in this order; usually one."""
        payload = _words(ids)
        if len(confidences):
            payload.frombytes(array("d", confidences).tobytes())
        start, end = 0, len(payload)
        while True:
            part = payload[start : start + self._part] if end > self._part else payload
            left = end - start - len(part)
            record = array("q", (_HEADER + len(part), 0, kind, epoch, base, len(ids), len(confidences), start, left))
            record.extend(part)
            yield record
            start += len(part)
            if not left:
                return

    def write(self, record: array) -> bool:
        """Writes and publishes a record; False, and nothing done, where there is no room for it yet."""
        length, written = len(record), self._control[_WRITTEN]
        if written - self._control[_READ] + length > self._size:
            return False
        record[1] = written
        at = written % self._size
        first = min(length, self._size - at)
        self._data[at : at + first] = record[:first] if first < length else record
        if first < length:
            self._data[: length - first] = record[first:]
        self.fence()
        self._control[_WRITTEN] = written + length
        return True

    def reader_is_asleep(self) -> bool:
        self.fence()
        return bool(self._control[_ASLEEP])

    def leave(self, conversation: int) -> None:
        """Says that the writer takes no part in this conversation, or an earlier one, any more."""
        self.fence()
        self._control[_LEFT] = conversation

    @property
    def written(self) -> int:
        return self._control[_WRITTEN]

    # The reader's side

    def read(self) -> Message | None:
        """The next message, or None if there is none that is whole. Raises WorkerError if the ring is out of step."""
        while self._control[_WRITTEN] != self._control[_READ]:
            message = self._read_record()
            if message is not None:
                return message
        return None

    def _read_record(self) -> Message | None:
        self.fence()
        position = self._control[_READ]
        length, written_at, kind, epoch, base, n_ids, n_floats, start, left = self._take(position, _HEADER)
        if written_at != position or start != len(self._payload):
            raise WorkerError(f"messages are out of step: {written_at} where {position} was expected")
        payload = self._take(position + _HEADER, length - _HEADER)
        self.fence()
        self._control[_READ] = position + length
        if start or left:
            self._payload += payload
            if left:
                return None
            payload, self._payload = self._payload, []
        floats = tuple(array("d", array("q", payload[n_ids:]).tobytes())) if n_floats else ()
        return Message(kind, epoch, base, tuple(payload[:n_ids] if n_floats else payload), floats)

    def _take(self, position: int, length: int) -> list[int]:
        at = position % self._size
        words = self._data[at : at + length].tolist()
        if len(words) < length:
            words += self._data[: length - len(words)].tolist()
        return words

    def skip_to(self, position: int) -> None:
        """Drops what was written before `position`: it belongs to an earlier conversation."""
        self._payload = []
        self._control[_READ] = position

    def sleep(self, asleep: bool) -> None:
        """Says whether the writer has to wake the reader up."""
        self._control[_ASLEEP] = asleep
        self.fence()

    def writer_has_left(self, conversation: int) -> bool:
        return self._control[_LEFT] >= conversation


def _words(ids: Sequence[int] | np.ndarray) -> array:
    if isinstance(ids, np.ndarray):
        return array("q", np.ascontiguousarray(ids, dtype=np.int64).tobytes())
    return array("q", ids)
