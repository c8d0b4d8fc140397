"""A worker: a process on a device of its own, which holds a state and runs functions on it.

The worker knows nothing of models: it is given functions. `call` runs one and brings its result; `start` begins a
conversation, in which messages go both ways through shared memory (`ring`, `ports`) while both sides work. One thing
at a time: a conversation that was left open is hung up when the next thing is asked for.

Nothing is left behind. The shared memory has no name, so nothing has to be unlinked, however a process ends. A worker
ends when its parent is gone: a thread of it waits for the end of a pipe that only the parent holds. A parent sees the
death of a worker in the same way, at once. Ctrl-C is for the parent alone to deal with: workers never see it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from typing import Any

from ..errors import SpecbenchError, WorkerError
from .devices import Device, available_cores, bind, share_a_core
from .ports import HANG_S, HangUp, Port, RingPort, ThreadPort
from .ring import WORDS, Message, Ring

__all__ = ["HangUp", "Message", "Port", "ThreadHost", "Worker", "describe"]

CALL_S = 600.0
SETTLE_S = HANG_S  # after a hang-up the other side may have to finish a forward, and that may be a long prefill


class Worker:
    """A process on one device, with the state that `init` made there.

    Args:
        role: for messages.
        device: the process is bound to its cores; that of a GPU, to those that this process leaves free, if any.
        threads: for OpenMP and torch.
        init: makes the state, in the process, `init(*args)`; it and all functions are pickled by name.
        hang_timeout_s: how long a port waits in vain before it calls that an error.

    Raises:
        WorkerError: `init` failed; what it raised is the `__cause__` where that is an error of ours.
    """

    def __init__(
        self,
        role: str,
        device: Device,
        threads: int,
        init: Callable[..., Any],
        *args: Any,
        hang_timeout_s: float = HANG_S,
    ) -> None:
        self.role, self.device, self.threads, self.hang_timeout_s = role, device, threads, hang_timeout_s
        self._number = 0  # of the last thing asked for
        self._answered = 0
        self._conversing = False
        self._dead: WorkerError | None = None
        cores = device.cores or _free_cores(device)
        spins = device.kind == "cpu" and not share_a_core(cores, _affinity())
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("q", WORDS), context.RawArray("q", WORDS)  # to the worker, from the worker
        self._control, control = context.Pipe()
        bell_there, self._bell_out = context.Pipe(duplex=False)
        self._bell_in, bell_back = context.Pipe(duplex=False)
        for bell in (self._bell_out, self._bell_in, bell_there, bell_back):
            os.set_blocking(bell.fileno(), False)
        self._out, self._in, self._spins = Ring(memory[0]), Ring(memory[1]), spins
        there = (control, bell_there, bell_back)
        task = pickle.dumps((init, args))
        self._process = context.Process(
            target=_serve,
            args=(*there, *memory, cores, threads, spins, task),
            name=f"specbench-{role}",
            daemon=True,
        )
        try:
            with _ctrl_c_withheld():
                self._process.start()
        finally:
            for end in there:  # from now on an end of file means that the other side is gone
                end.close()
        try:
            self._answer(None)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def where(self) -> str:
        return f"{self.role} (worker on {self.device})"

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> Any:
        """Runs `function(state, *args)` in the worker and returns its result, pickled on the way.

        Raises:
            WorkerError: it raised, the worker died, or it took longer than `timeout_s`.
        """
        self.settle()
        self._ask("call", function, args)
        return self._answer(timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> Port:
        """Starts `function(state, port, *args)` in the worker and returns our end of the conversation."""
        self.settle()
        self._in.skip_to(self._in.written)
        self._ask("start", function, args, self._out.written)
        self._conversing = True
        bells = self._bell_in.fileno(), self._bell_out.fileno()
        return RingPort(
            self._number, self._in, self._out, *bells, self._spins, self._gone, self.hang_timeout_s, self.where
        )

    def join(self, timeout_s: float = SETTLE_S) -> None:
        """Waits until the started function has returned; what it raised comes out as WorkerError."""
        if self._dead is not None:
            raise self._dead
        if self._answered < self._number:
            self._answer(timeout_s)

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Hangs up a conversation that is still open and waits until the worker has nothing left to do."""
        if self._conversing and self._answered < self._number:
            self._out.leave(self._number)
            self._ring_bell()
        self.join(timeout_s)

    def close(self) -> None:
        """Ends the process, whatever it is doing. May be called twice; never raises for a worker that is dead."""
        if self._dead is None:
            self._dead = WorkerError(f"{self.where}: was closed")
        if self._control.closed:
            return
        self._out.leave(self._number)
        self._ring_bell()
        for end in (self._control, self._bell_out):
            end.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._bell_in.close()

    def _ask(self, what: str, function: Callable[..., Any], args: tuple[Any, ...], skip_to: int = 0) -> None:
        task = pickle.dumps((function, args))
        self._number += 1
        try:
            self._control.send((self._number, what, skip_to, task))
        except (BrokenPipeError, ConnectionResetError):
            self._die()

    def _answer(self, timeout_s: float | None) -> Any:
        """The answer to the last thing asked for, past those that nobody waited for."""
        while True:
            try:
                if not connection.wait([self._control], timeout_s):
                    raise WorkerError(f"{self.where}: still at work after {timeout_s:g} s")
                number, error, result = self._control.recv()
            except (EOFError, ConnectionResetError):
                self._die()
            self._answered = number
            if number == self._number:
                break
        self._conversing = False
        if error is not None:
            raise WorkerError(f"{self.where}: {error}") from (result if isinstance(result, Exception) else None)
        return result

    def _gone(self, died: bool) -> None:
        """A port has nothing to read, and the worker has left the conversation, or died."""
        if died:
            self._die()
        self.join()

    def _die(self) -> None:
        self._process.join(5)
        code = self._process.exitcode
        how = "lost its connection" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        self._dead = WorkerError(f"{self.where}: died ({how})")
        raise self._dead

    def _ring_bell(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._bell_out.fileno(), b"!")


class ThreadHost:
    """The methods of a `Worker` over a state in this process: `start` runs its function in a thread.

    For tests, and for a model that sits in this process.
    """

    def __init__(self, role: str, state: Any, hang_timeout_s: float = HANG_S) -> None:
        self.role, self.state, self.hang_timeout_s = role, state, hang_timeout_s
        self._thread: threading.Thread | None = None
        self._port: ThreadPort | None = None
        self._error: BaseException | None = None

    alive = True

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> Any:
        self.settle()
        try:
            return function(self.state, *args)
        except Exception as error:
            raise WorkerError(f"{self.role}: {describe(error)}") from error

    def start(self, function: Callable[..., Any], *args: Any) -> Port:
        self.settle()
        ours, theirs = ThreadPort.pair(self.role, self.hang_timeout_s)
        ours._gone, theirs._gone = self._gone, _hang_up
        self._port = ours

        def run() -> None:
            try:
                function(self.state, theirs, *args)
            except HangUp:
                pass
            except BaseException as error:  # noqa: BLE001 - travels to the caller
                self._error = error
            finally:
                theirs.leave()

        self._thread = threading.Thread(target=run, name=f"specbench-{self.role}", daemon=True)
        self._thread.start()
        return ours

    def join(self, timeout_s: float = SETTLE_S) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise WorkerError(f"{self.role}: still at work after {timeout_s:g} s")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise WorkerError(f"{self.role}: {describe(error)}") from error

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        if self._port is not None:
            self._port.leave()
        self.join(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(WorkerError):
            self.settle()

    def _gone(self, died: bool) -> None:
        self.join()


# --- in the worker ---------------------------------------------------------------------------------------------------


def _serve(
    control: connection.Connection,
    bell_in: connection.Connection,
    bell_out: connection.Connection,
    incoming_memory: Any,
    outgoing_memory: Any,
    cores: tuple[int, ...],
    threads: int,
    spins: bool,
    task: bytes,
) -> None:
    """The whole life of a worker process: makes the state, then does what it is asked, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout belongs to the results
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    bind(cores, threads)
    try:
        init, args = pickle.loads(task)  # imports what it needs, on the right cores
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        state = init(*args)
        control.send((0, None, None))
    except BaseException as error:  # noqa: BLE001 - travels to the caller
        control.send(_failure(0, error))
        os._exit(1)
    incoming, outgoing = Ring(incoming_memory), Ring(outgoing_memory)
    bells = bell_in.fileno(), bell_out.fileno()
    while True:
        try:
            number, what, skip_to, task = control.recv()
        except (EOFError, OSError):
            os._exit(0)  # there is nothing to save, and Python's own way out takes its time after torch
        result = None
        try:
            function, args = pickle.loads(task)
            if what == "call":
                result = function(state, *args)
            else:
                incoming.skip_to(skip_to)
                port = RingPort(number, incoming, outgoing, *bells, spins, _hang_up, None, "parent")
                with contextlib.suppress(HangUp):
                    function(state, port, *args)
            answer = pickle.dumps((number, None, result))
        except BaseException as error:  # noqa: BLE001 - travels to the caller
            answer = pickle.dumps(_failure(number, error))
        del result
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            control.send_bytes(answer)
            outgoing.leave(number)
            os.write(bells[1], b"!")


def _hang_up(died: bool) -> None:
    raise HangUp


def _end_with(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


def _failure(number: int, error: BaseException) -> tuple[int, str, Exception | None]:
    return number, describe(error), error if isinstance(error, SpecbenchError) else None


def describe(error: BaseException) -> str:
    """An error in one line; of what kind it is, where it is none of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecbenchError) else f"{type(error).__name__}: {text}"


# --- beside it -------------------------------------------------------------------------------------------------------


def _affinity() -> tuple[int, ...]:
    return tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else available_cores()


def _free_cores(device: Device) -> tuple[int, ...]:
    """All cores for a CPU device that names none; for a GPU those that our own process is not bound to, so that
    launching kernels does not stand in the way of a target on the CPU."""
    free = tuple(sorted(set(available_cores()) - set(_affinity()))) if device.kind == "cuda" else ()
    return free or available_cores()


@contextlib.contextmanager
def _ctrl_c_withheld() -> Iterator[None]:
    """A process that starts in here never sees Ctrl-C, not even before it has run a line of its own."""
    resource_tracker.ensure_running()  # else it is started in between, and lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
