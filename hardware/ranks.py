"""Ranks: processes that compute one thing together, a device each, joined by torch.distributed.

Rank 0 is this process and says what is done; the others follow. It starts them itself, as workers: bound to cores of
their own, deaf to Ctrl-C, gone with this process. Under torchrun they are there already.

There are two groups. One (NCCL between GPUs, gloo between CPUs) carries what a forward exchanges; in it, a rank that
keeps the others waiting for longer than `HANG_S` is an error. The other, over gloo, carries the commands, and is waited
on for as long as rank 0 has nothing to say. A rank that dies closes its connections, which gloo notices at once; NCCL
does not, and its watchdog ends the process after `HANG_S`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any

import numpy as np

from ..errors import SpecbenchError, WorkerError
from .devices import Device, set_up_torch
from .ports import HANG_S, Port
from .workers import Worker, describe

HOST = "127.0.0.1"
IDLE = datetime.timedelta(days=7)
_LEAVE, _DRAIN, _CALL = -1, -2, -3  # commands of the group's own; those of the program count from 0
_HEAD = 128  # integers that every command takes: the step of a row or two fits in
_WORDS = 300  # characters of an error that are told
_BLAME_S = 1.0  # a rank whose connection is gone is dead, or about to be
_OF_OTHERS = re.compile(
    "clos|reset|broken pipe|time[d ]*out|connect|read error|abort|exited", re.I
)  # not our own fault


def launched() -> tuple[int, int] | None:
    """Rank and number of the processes where torchrun started several, of which this is one; else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Group:
    """A rank's end of the group. Every method but `tell` and `hear` is called by all ranks alike.

    Args:
        device: torch device name.
        store: where the ranks find one another; None takes torchrun's.
    """

    def __init__(self, rank: int, size: int, device: str, store: Any = None, hang_s: float = HANG_S) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size, self.device = rank, size, device
        self._torch, self._dist = torch, dist
        more: dict[str, Any] = {}
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            more = {"device_id": torch.device(device)}
        hook = sys.excepthook
        timeout = datetime.timedelta(seconds=hang_s)
        backend = "nccl" if more else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **more)
        sys.excepthook = hook  # torch writes the rank in front of every traceback from here on
        self._control = dist.new_group(backend="gloo", timeout=IDLE)
        self._head = torch.zeros(_HEAD, dtype=torch.int64)

    def tell(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Rank 0's command to all others, which `hear` it: what it is, and integers that go with it."""
        command = self._torch.as_tensor(np.asarray(numbers, dtype=np.int64))
        count, fits = len(command), min(len(command), _HEAD - 1)
        self._head[0] = count
        self._head[1 : 1 + fits] = command[:fits]
        self._dist.broadcast(self._head, 0, group=self._control)
        if count > fits:
            self._dist.broadcast(command[fits:].contiguous(), 0, group=self._control)

    def hear(self) -> np.ndarray:
        self._dist.broadcast(self._head, 0, group=self._control)
        count = int(self._head[0])
        fits = min(count, _HEAD - 1)
        command = self._torch.empty(count, dtype=self._torch.int64)
        command[:fits] = self._head[1 : 1 + fits]
        if count > fits:
            rest = self._torch.empty(count - fits, dtype=self._torch.int64)
            self._dist.broadcast(rest, 0, group=self._control)
            command[fits:] = rest
        return command.numpy()

    def share(self, thing: Any = None) -> Any:
        """What rank 0 gives, pickled on the way."""
        things = [thing]
        self._dist.broadcast_object_list(things, 0, group=self._control)
        return things[0]

    def gather(self, thing: Any = None) -> list[Any]:
        """What every rank gives, by rank; also a way to wait for all of them."""
        things: list[Any] = [None] * self.size
        self._dist.all_gather_object(things, thing, group=self._control)
        return things

    def synchronise(self) -> None:
        """Returns once the devices of all ranks have nothing left to do."""
        if self.device.startswith("cuda"):
            self._torch.cuda.synchronize(self.device)
        self._dist.barrier(group=self._control)

    def follow(self, act: Callable[[np.ndarray], None]) -> None:
        """What a rank other than 0 does until rank 0 leaves: `act` gets every command that is not the group's own."""
        while True:
            command = self.hear()
            if command[0] >= 0:
                act(command)
            elif command[0] == _DRAIN:
                self.synchronise()
            elif command[0] == _CALL:
                self.gather(self.share()(None))
            else:
                return

    def leave(self) -> None:
        self._dist.destroy_process_group()


class Ranks:
    """Rank 0's hold on the others. What is told to them is told in `with ranks.together():`.

    Where a run looks after a `Worker`, it looks after this alike: `call`, `drain`, `join`, `close`.

    Args:
        role: for messages.
        ranks: device and threads of each, ours first; a GPU with the cores that its process is bound to.
        program: what a follower runs, `program(group)`, until `Group.follow` returns; pickled by name. Under torchrun
            the followers call it themselves.
        hang_s: how long a rank may keep the others waiting.

    Raises:
        WorkerError: a process cannot be started, or they do not find one another.
    """

    def __init__(
        self,
        role: str,
        ranks: Sequence[tuple[Device, int]],
        program: Callable[[Group], None],
        hang_s: float = HANG_S,
    ) -> None:
        import torch.distributed as dist

        self.role = role
        self._followers: list[_Follower] = []
        self._store: Any = None
        self._broken: WorkerError | None = None
        self._group: Group | None = None
        if dist.is_initialized():
            raise WorkerError(f"{role}: this process has joined other ranks already; one such model at a time")
        try:
            if launched() is None:
                timeout = datetime.timedelta(seconds=hang_s)
                self._store = dist.TCPStore(HOST, 0, len(ranks), True, timeout, wait_for_workers=False)
                self._followers = _start(role, ranks)
                for rank, follower in enumerate(self._followers, start=1):
                    follower.start(_follow, rank, len(ranks), self._store.port, program, hang_s)
                self._wait_for_followers()
            with surroundings(ranks[0][0]), self.together():
                self._group = Group(0, len(ranks), ranks[0][0].torch_name, self._store, hang_s)
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def group(self) -> Group:
        assert self._group is not None
        return self._group

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do: Ctrl-C waits to its end, since they would be out of step otherwise.

        Raises:
            WorkerError: something failed in here, now or before; the message names the rank that died or failed first.
        """
        if self._broken is not None:
            raise self._broken
        with _ctrl_c_held_back():
            try:
                yield
            except SpecbenchError as error:
                self._broken = WorkerError(str(error))
                raise
            except Exception as error:
                self._broken = self._blame(error)
                raise self._broken from error

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Runs `function(None)` in every follower; the sum of what they return, None if one of them returns None."""
        with self.together():
            self.group.tell([_CALL])
            self.group.share(function)
            found = self.group.gather()[1:]
        return None if None in found else sum(found)

    def drain(self) -> None:
        """Waits until the devices of all ranks have nothing left to do."""
        with self.together():
            self.group.tell([_DRAIN])
            self.group.synchronise()

    def join(self) -> None:
        """Raises WorkerError if a rank is gone."""
        if self._broken is not None:
            raise self._broken
        for follower in self._followers:
            follower.check()

    def close(self, at_once: bool = False) -> None:
        """Ends all other ranks, whatever they are doing. May be called twice; never raises for one that is dead."""
        if self._group is not None:
            if self._broken is None and not at_once:
                with contextlib.suppress(WorkerError), self.together():
                    self._group.tell([_LEAVE])
            with contextlib.suppress(RuntimeError):
                self._group.leave()
            self._group = None
        for follower in self._followers:
            if self._broken is not None or at_once:
                follower.kill()
            follower.close()
        self._broken = self._broken or WorkerError(f"{self.role}: its ranks were closed")

    def _wait_for_followers(self) -> None:
        """Until they have imported what they need: from here on they answer quickly, or something is wrong."""
        while not self._store.check([_here(rank) for rank in range(1, len(self._followers) + 1)]):
            self.join()
            time.sleep(0.02)

    def _blame(self, error: Exception) -> WorkerError:
        """Who is at fault: we ourselves, a rank that died without a word, the first that failed for a reason of its
        own, or those that keep us waiting."""
        ours = describe(error)[:_WORDS]
        if not _OF_OTHERS.search(ours):
            return WorkerError(f"{self.role}, rank 0: {ours}")
        connection.wait([follower.sentinel for follower in self._followers], _BLAME_S)
        told = self._last_words()
        for rank, follower in enumerate(self._followers, start=1):
            try:
                follower.check()
            except WorkerError as death:
                if rank not in told:
                    return death
        for rank, words in told.items():
            if not _OF_OTHERS.search(words):
                return WorkerError(f"{self._followers[rank - 1].where}: {words}")
        silent = [follower.where for rank, follower in enumerate(self._followers, start=1) if rank not in told]
        return WorkerError(f"{', '.join(silent) or f'{self.role}, another rank'}: does not answer ({ours})")

    def _last_words(self) -> dict[int, str]:
        """By rank, the first to fail first."""
        if self._store is None:
            return {}
        told = {}
        for number in range(1, self._store.add("failures", 0) + 1):
            rank, _, words = self._store.get(f"failure {number}").decode().partition(" ")
            told[int(rank)] = words
        return told


class _Follower(Worker):
    """The process of a rank other than 0."""

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def check(self) -> None:
        """Raises WorkerError if the process has died or has nothing to do any more."""
        if self._dead is not None:
            raise self._dead
        if connection.wait([self._control], 0):
            self.join()
            raise WorkerError(f"{self.where}: has left")

    def kill(self) -> None:
        """To be closed at once, not when it has come to an end."""
        with contextlib.suppress(ValueError):  # closed already
            self._process.kill()


def _start(role: str, ranks: Sequence[tuple[Device, int]]) -> list[_Follower]:
    """All at the same time: what takes seconds is to import torch."""
    started: dict[int, _Follower] = {}

    def start(rank: int) -> None:
        device, threads = ranks[rank]
        started[rank] = _Follower(f"{role}, rank {rank}", device, threads, _begin, device.torch_name, threads)

    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(start, range(1, len(ranks))))
    except BaseException:
        for follower in started.values():
            follower.close()
        raise
    return [started[rank] for rank in sorted(started)]


@contextlib.contextmanager
def surroundings(device: Device) -> Iterator[None]:
    """The environment variables that torch and transformers look for while ranks meet and a model is dealt out: the
    number of our GPU, and loopback as the way to one another, where nothing else is set."""
    wanted = {"LOCAL_RANK": str(device.index)}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


# --- in a follower ---------------------------------------------------------------------------------------------------


def _begin(device: str, threads: int) -> str:
    set_up_torch(threads)
    return device


def _follow(
    device: str, port: Port, rank: int, size: int, store_port: int, program: Callable[[Group], None], hang_s: float
) -> None:
    """The conversation of a worker that is a rank: it lasts as long as the group does, and its port stays silent."""
    import torch.distributed as dist

    store = dist.TCPStore(HOST, store_port, size, False, datetime.timedelta(seconds=hang_s))
    store.set(_here(rank), "")
    index = int(device.partition(":")[2] or 0)
    try:
        with surroundings(Device("cuda", index=index)):
            group = Group(rank, size, device, store, hang_s)
            program(group)
        group.leave()
    except BaseException as error:  # noqa: BLE001 - rank 0 is told; the connections close with the process
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            store.set(f"failure {store.add('failures', 1)}", f"{rank} {describe(error)[:_WORDS]}")
        os._exit(1)


def _here(rank: int) -> str:
    return f"rank {rank} is here"
