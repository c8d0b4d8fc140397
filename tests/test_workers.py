"""Workers, ports and the ring: messages come whole and in order, and whatever goes wrong comes out, soon."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from specbench.errors import ModelError, WorkerError
from specbench.hardware.devices import Device, available_cores
from specbench.hardware.ring import Message, Ring
from specbench.hardware.workers import ThreadHost, Worker

CORE = available_cores()[-1]
SOON_S = 5.0
ECHO, STOP = 1, 2


# --- what runs in a worker -------------------------------------------------------------------------------------------


def make(value):
    return {"value": value, "log": []}


def refuse(error):
    raise error


def facts(state):
    return state["value"], sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], "torch" in sys.modules


def log(state):
    return state["log"]


def raises(state, *args):
    raise ValueError("no such luck")


def naps(state, *args):
    time.sleep(args[-1])


def prints(state):
    print("from the worker", flush=True)
    os.write(1, b"straight to the file")


def dies(state, *args):
    os.kill(os.getpid(), signal.SIGKILL)


def echo(state, port):
    while (message := port.wait()).kind != STOP:
        port.send(*message)


def counts(state, port, count):
    for number in range(count):
        port.send(ECHO, number, ids=range(number % 50))


def waits(state, port):
    try:
        port.wait()
    finally:
        state["log"].append("left")


def waits_then_raises(state, port):
    port.wait()
    raise ValueError("no such luck")


def waits_then_dies(state, port):
    port.wait()
    dies(state)


def returns(state, port):
    port.send(ECHO, 1)


# --- the ring --------------------------------------------------------------------------------------------------------


def test_messages_come_whole_and_in_order_across_the_end_of_the_ring():
    ring, told, sent, written, chance = Ring(bytearray(8 * (32 + 61))), deque(), 0, 0, random.Random(1)
    queue: deque = deque()
    while written < 50_000:
        if not queue:
            ids = [chance.randrange(1 << 40) for _ in range(chance.choice((0, 1, 3, 9, 40)))]
            message = Message(chance.randrange(9), sent, -sent, tuple(ids), tuple(x / 7 for x in ids))
            queue.extend(ring.records(*message))
            told.append(message)
            sent += 1
        while queue and ring.write(queue[0]):
            written += len(queue.popleft())
        if chance.random() < 0.5:
            while (got := ring.read()) is not None:
                assert got == told.popleft()
    assert sent > 500


def test_a_full_ring_takes_nothing_and_loses_nothing():
    ring = Ring(bytearray(8 * (32 + 100)))
    accepted = 0
    while ring.write(next(ring.records(ECHO, accepted, 0, [7], ()))):
        accepted += 1
    assert accepted == 10
    assert [ring.read().epoch for _ in range(accepted)] == list(range(accepted))
    assert ring.read() is None


def test_a_reader_that_is_out_of_step_finds_out():
    ring = Ring(bytearray(8 * 200))
    for epoch in range(3):
        ring.write(next(ring.records(ECHO, epoch, 0, [1, 2], ())))
    ring.skip_to(4)
    with pytest.raises(WorkerError, match="out of step"):
        ring.read()


# --- both kinds of host ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process():
    host = Worker("draft", Device("cpu", (CORE,)), 1, make, 5)
    yield host
    host.close()


@pytest.fixture(params=["process", "thread"])
def host(request):
    if request.param == "process":
        yield request.getfixturevalue("process")
        return
    host = ThreadHost("draft", make(5))
    yield host
    host.close()


def test_messages_go_both_ways(host):
    port = host.start(echo)
    for ids in ([], [3], list(range(300)), list(range(200_000))):  # the last one is longer than the ring
        port.send(ECHO, 4, -5, ids, [i / 3 for i in ids])
        assert port.wait() == Message(ECHO, 4, -5, tuple(ids), tuple(i / 3 for i in ids))
    assert port.receive() is None
    port.send(STOP)
    host.join()


def test_a_flood_comes_in_order(host):
    port = host.start(counts, 20_000)
    for number in range(20_000):
        message = port.wait()
        assert (message.epoch, len(message.ids)) == (number, number % 50)
    host.join()


def test_waiting_ends_with_its_time(host):
    port = host.start(echo)
    began = time.monotonic()
    assert port.wait(0.1) is None
    assert 0.09 < time.monotonic() - began < 2
    port.send(ECHO, 1)
    assert port.wait(5).epoch == 1


def _go_on(whom, how, *args):
    """Asks again and again, as a strategy would, until something is raised or it has taken too long."""
    until = time.monotonic() + SOON_S
    while time.monotonic() < until:
        getattr(whom, how)(*args)


@pytest.mark.parametrize("how", ["wait", "receive", "join"])
def test_what_a_program_raises_comes_out_with_its_role(host, how):
    port = host.start(waits_then_raises)
    port.send(ECHO)
    with pytest.raises(WorkerError, match="draft.*ValueError: no such luck"):
        _go_on(host if how == "join" else port, how)
    assert host.call(log) is not None  # and it goes on


def test_what_a_call_raises_comes_out_with_its_role(host):
    with pytest.raises(WorkerError, match="draft.*ValueError: no such luck"):
        host.call(raises)


def test_a_program_that_returns_leaves_its_messages_and_nobody_waits_for_more(host):
    port = host.start(returns)
    assert port.wait().epoch == 1
    with pytest.raises(WorkerError, match="draft.*left"):
        port.wait()
    assert port.receive() is None
    host.join()


def test_an_open_conversation_is_hung_up_by_the_next_thing(host):
    before = len(host.call(log))
    stale = host.start(waits)
    stale.send(ECHO, 1)  # never read: the program ends with the first message
    host.start(waits)
    assert len(host.call(log)) == before + 2
    port = host.start(echo)
    port.send(ECHO, 9)
    assert port.wait().epoch == 9  # nothing of the earlier conversations is left
    host.settle()


def test_a_program_that_says_nothing_hangs(host):
    host.hang_timeout_s, before = 0.3, host.hang_timeout_s
    try:
        port = host.start(naps, 1.0)
        began = time.monotonic()
        with pytest.raises(WorkerError, match="draft.*hangs"):
            port.wait()
        assert time.monotonic() - began < SOON_S
        host.join()
    finally:
        host.hang_timeout_s = before


def test_joining_takes_no_longer_than_asked(host):
    host.start(naps, 0.7)
    with pytest.raises(WorkerError, match="draft.*still at work"):
        host.join(0.1)
    host.join()


# --- processes only --------------------------------------------------------------------------------------------------


def test_a_worker_has_its_cores_and_threads_and_no_torch_unless_asked(process):
    assert process.call(facts) == (5, [CORE], "1", False)


@pytest.mark.parametrize("how", ["wait", "receive", "send", "call", "join"])
def test_a_killed_worker_is_an_error_that_names_the_role(how):
    host = Worker("draft2", Device("cpu", (CORE,)), 1, make, 5)
    try:
        began = time.monotonic()
        port = host.start(waits_then_dies)
        port.send(ECHO)
        with pytest.raises(WorkerError, match="draft2.*died.*SIGKILL"):
            _go_on(host if how in ("call", "join") else port, how, *{"call": [log], "send": [ECHO]}.get(how, []))
        assert time.monotonic() - began < SOON_S
        assert not host.alive
        with pytest.raises(WorkerError, match="draft2.*died"):
            host.call(log)
    finally:
        host.close()
        host.close()


def test_what_goes_wrong_at_the_start_is_told():
    with pytest.raises(WorkerError, match="draft.*KeyError") as caught:
        Worker("draft", Device("cpu", (CORE,)), 1, refuse, KeyError("gone"))
    assert caught.value.__cause__ is None
    with pytest.raises(WorkerError, match="draft.*no such model") as caught:
        Worker("draft", Device("cpu", (CORE,)), 1, refuse, ModelError("no such model"))
    assert isinstance(caught.value.__cause__, ModelError)
    with pytest.raises(WorkerError, match="draft.*died"):
        Worker("draft", Device("cpu", (CORE,)), 1, dies, None)


def test_what_cannot_be_pickled_leaves_the_worker_as_it_was(process):
    with pytest.raises(Exception, match="pickle"):
        process.call(lambda state: 1)
    with pytest.raises(WorkerError, match="draft"):
        process.call(threading.Lock)  # the class is there, its instances cannot travel
    assert process.call(facts)[0] == 5


def test_a_call_that_was_left_does_not_answer_the_next_one(process):
    with pytest.raises(WorkerError, match="still at work"):
        process.call(naps, 0.4, timeout_s=0.05)
    assert process.call(facts)[0] == 5


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _held() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/dev/shm"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what /proc shows")
def test_a_thousand_conversations_leak_nothing(process):
    for round in range(1100):
        if round == 100:
            before, resident = _held(), _resident()
            there = process.call(_held_there)
        port = process.start(echo)
        port.send(ECHO, round, ids=range(500))
        assert port.wait().epoch == round
    process.settle()
    assert _held() == before
    assert process.call(_held_there) == there
    assert _resident() - resident < 4 << 20


def _held_there(state):
    return _held()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what /proc shows")
def test_workers_that_are_closed_leak_nothing():
    for round in range(4):
        host = Worker("draft", Device("cpu", (CORE,)), 1, make, 5)
        port = host.start(echo)
        port.send(ECHO)
        assert port.wait().kind == ECHO
        host.close()  # in the middle of a conversation
        if round == 1:
            before = _held()
    assert _held() == before


# --- the process that has workers ------------------------------------------------------------------------------------


def _parent(body: str, **more) -> subprocess.Popen:
    """A process group of its own with a worker, which tells the worker's number and then runs `body`."""
    code = """
        import os, signal, sys, time
        import test_workers as t
        from specbench.hardware.devices import Device
        from specbench.hardware.workers import Worker
        host = Worker("draft", Device("cpu", (t.CORE,)), 1, t.make, 5)
        print(host.call(t.number), flush=True)
    """
    source = textwrap.dedent(code) + textwrap.dedent(body)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path}, **more,
    )  # fmt: skip


def number(state):
    return os.getpid()


def _rest(parent: subprocess.Popen) -> tuple[str, str]:
    """What it says until its end (`communicate` would lose what `readline` has read ahead)."""
    said = parent.stdout.read(), parent.stderr.read()
    parent.wait(20)
    return said


def _is_gone(pid: int) -> bool:
    until = time.monotonic() + SOON_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    os.kill(pid, signal.SIGKILL)
    return False


IN_A_CONVERSATION = """
    port = host.start(t.naps, 60) if {busy} else host.start(t.echo)
    print("ready", flush=True)
    try:
        port.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_is_the_parents_and_leaves_no_process(busy):
    with _parent(IN_A_CONVERSATION.format(busy=busy)) as parent:
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.killpg(parent.pid, signal.SIGINT)
        out, err = _rest(parent)
    assert (parent.returncode, out, err) == (130, "interrupted\n", "")
    assert _is_gone(worker)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_goes_with_its_parent(busy, kind):
    with _parent(IN_A_CONVERSATION.format(busy=busy)) as parent:
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        os.kill(parent.pid, kind)
        _, err = _rest(parent)
    assert err == ""
    assert _is_gone(worker)


def test_a_worker_that_nobody_closed_ends_and_says_nothing_on_stdout():
    with _parent("host.call(t.prints); print('done')") as parent:
        worker = int(parent.stdout.readline())
        out, err = _rest(parent)
    assert (parent.returncode, out, err) == (0, "done\n", "")
    assert _is_gone(worker)
