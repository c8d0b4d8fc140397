"""Grids on a Ray cluster: a real one of two nodes on this machine, and what can be told without any."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import manifest
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import UsageError
from specbench.hardware import devices
from specbench.results import machines, needs, ray_executor, sweep
from specbench.results.cell_folder import CellFolder
from specbench.results.listener import Grid, Listener
from specbench.results.plan import Plan
from specbench.results.ray_executor import RayExecutor
from specbench.results.ray_worker import Courier, Seat
from specbench.results.records import RunFolder, Sample

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

TINY = {"target": "tiny", "draft": "tiny-draft", "threads": 1, "trace": 0, "warmup": 0, "limit": 1, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a head without CPUs and two nodes of one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    devices._set_affinity(devices.available_cores())  # an earlier test may have bound us to some of them
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for number in range(2):
        made.add_node(num_cpus=1, resources={f"node{number}": 1})
    yield str(made.address)
    made.shutdown()


def run(
    out: Path, grid: dict[str, list[Any]], address: str | None, listener: Listener | None = None, **more: Any
) -> Any:
    """A sweep on the cluster, or on this machine."""
    resume, hardware = more.pop("resume", False), more.pop("hardware", None)
    executor = RayExecutor(address, hardware) if address else None
    return sweep.sweep(Plan(**{**TINY, **more}), grid, out, listener, (), resume, executor)


def records(folder: Path) -> list[dict[str, Any]]:
    """The samples without their times."""
    found = []
    for sample in RunFolder(folder).samples():
        fields = {name: value for name, value in vars(sample).items() if not name.endswith("_ns")}
        fields["steps"] = [step[1:] for step in sample.steps]
        fields["forwards"] = {role: [one[2:] for one in ones] for role, ones in (sample.forwards or {}).items()}
        found.append(fields)
    return found


def documents(out: Path) -> dict[str, dict[str, Any]]:
    return {cell["name"]: cell for cell in json.loads((out / "sweep.json").read_text())["cells"]}


def sorted_records(folder: Path) -> list[str]:
    """Of a cell that went on elsewhere, too: calls are numbered anew, and come in another order."""
    return sorted(json.dumps({**one, "group": 0}, sort_keys=True) for one in records(folder))


def whole_lines(out: Path) -> dict[Path, bytes]:
    texts = {path: path.read_bytes() for path in out.glob("*/samples.jsonl")}
    return {path: text[: text.rfind(b"\n") + 1] for path, text in texts.items()}


class Watching(Listener):
    """Does something once, when a cell has its first sample and lacks others."""

    def __init__(self, act: Any) -> None:
        self.act, self.acted_on, self.told = act, "", []
        self.grids: list[Grid] = []

    def note(self, text: str) -> None:
        self.told.append(text)

    warn = note

    def grid(self, grid: Grid) -> None:
        self.grids.append(grid)
        for one in grid.working:
            if not self.acted_on and 0 < one.samples < one.total:
                self.acted_on = one.cell
                self.act(one.cell)


# --- on a cluster ----------------------------------------------------------------------------------------------------


@with_ray
def test_a_grid_gives_the_records_of_one_machine_and_a_killed_worker_loses_nothing(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell of a killed worker goes on with the samples that are there, on another one, and says so.

    `benchmarks/ray_grid.py` is the same with 40 cells, with and without a kill.
    """
    kept: list[bytes] = []

    def kill(cell: str) -> None:
        folder = RunFolder(tmp_path / "ray" / cell)
        kept.append(folder.samples_path.read_bytes())
        os.kill(folder.manifest()["executor"]["attempts"][-1]["pid"], signal.SIGKILL)

    listener = Watching(kill)
    grid = {"strategy": ["lookup", "speculative"], "draft_length": [2, 3, 4]}
    more: dict[str, Any] = dict(limit=3, max_new_tokens=16, temperature=0.8)
    there, here = run(tmp_path / "ray", grid, cluster, listener, **more), run(tmp_path / "local", grid, None, **more)
    assert [(cell.name, cell.state) for cell in there.cells] == [(cell.name, "done") for cell in here.cells]
    for ours, theirs in zip(there.cells, here.cells, strict=True):
        assert sorted_records(ours.folder) == sorted_records(theirs.folder)
        mine, other = RunFolder(ours.folder).manifest(), RunFolder(theirs.folder).manifest()
        for name in ("settings", "models", "prompts", "baseline"):
            assert mine[name] == other[name]
        changed = {"out": str(ours.folder), "resume": ours.name == listener.acted_on}
        assert mine["plan"] == {**other["plan"], **changed}
        assert len(mine["environment"]["cores"]) == 1
        assert {path.name for path in ours.folder.iterdir()} == {path.name for path in theirs.folder.iterdir()}
        if ours.name != listener.acted_on:
            assert records(ours.folder) == records(theirs.folder)
            assert [attempt["how"] for attempt in ours.attempts] == ["done"]
    assert (listener.grids[-1].cells, listener.grids[-1].ended) == (6, 6)
    folder = RunFolder(tmp_path / "ray" / listener.acted_on)
    assert kept[0]
    assert folder.samples_path.read_bytes().startswith(kept[0])
    attempts = documents(tmp_path / "ray")[listener.acted_on]["attempts"]
    assert [attempt["how"] for attempt in attempts] == ["lost", "done"]
    assert attempts[0]["pid"] != attempts[1]["pid"]
    assert attempts[0]["why"].startswith("The actor died unexpectedly")
    assert folder.manifest()["executor"]["attempts"] == attempts
    assert any("was lost" in text and "another one goes on" in text for text in listener.told)
    assert capsys.readouterr().out == ""  # Ray tells of the dead worker there, where results belong
    if len(devices.available_cores()) > 1:  # no two workers had a core in common
        at = {cell.attempts[0]["worker"]: RunFolder(cell.folder).manifest()["environment"]["cores"][0]
              for cell in there.cells if len(cell.attempts) == 1}  # fmt: skip
        assert len(set(at.values())) == len(at)


@with_ray
def test_a_killed_driver_and_ctrl_c_lose_nothing(cluster: str, tmp_path: Path) -> None:
    """`kill -9` of the driver; the same with --resume on a node of one name, until Ctrl-C; the rest on this machine."""
    out = tmp_path / "s"
    words = ["sweep", "-t", "tiny", "-d", "tiny-draft", "-s", "speculative", "-n", "8", "--max-new-tokens", "48",
             "--threads", "1", "--trace", "0", "--warmup", "0", "-g", "draft-length=2,3,4",
             "--out", str(out)]  # fmt: skip
    driver = subprocess.Popen([sys.executable, "-m", "specbench", *words, "--executor", "ray", "--address", cluster],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 180
    while not any(path.stat().st_size for path in out.glob("*/samples.jsonl")):
        assert time.monotonic() < deadline, "no sample in three minutes"
        assert driver.poll() is None, driver.stderr and driver.stderr.read()
        time.sleep(0.02)
    driver.kill()
    driver.communicate()
    first = whole_lines(out)

    before = signal.getsignal(signal.SIGINT)
    listener = Watching(lambda cell: os.kill(os.getpid(), signal.SIGINT))
    grid, more = {"draft_length": [2, 3, 4]}, dict(strategy=("speculative",), limit=8, max_new_tokens=48)
    result = run(out, grid, cluster, listener, resume=True, hardware="node0", **more)
    assert result.interrupted
    assert signal.getsignal(signal.SIGINT) is before
    states = {name: cell["state"] for name, cell in documents(out).items()}
    assert states[listener.acted_on] == "interrupted"
    assert "waiting" in states.values()
    assert RunFolder(out / listener.acted_on).manifest()["interrupted"] is True
    assert (out / listener.acted_on / "summary.json").is_file()
    assert len({cell.attempts[-1]["worker"] for cell in result.cells if cell.state == "interrupted"}) == 1
    second = whole_lines(out)

    rest = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert rest.exit_code == 0, rest.output
    assert {cell["state"] for cell in json.loads(rest.stdout)["cells"]} == {"done"}
    for there in (first, second):
        assert any(there.values())
        for path, lines in there.items():
            assert path.read_bytes().startswith(lines)
    keys = [{sample.key for sample in RunFolder(out / name).samples()} for name in states]
    assert keys[0] == keys[1] == keys[2]
    assert [len(RunFolder(out / name).samples()) for name in states] == [len(keys[0])] * 3


@with_ray
def test_what_the_cluster_cannot_do_is_refused_before_anything_is_written(cluster: str, tmp_path: Path) -> None:
    grid = {"strategy": ["lookup"], "draft_length": [2, 3]}
    out, alone = tmp_path / "s", {"draft": None}
    with pytest.raises(UsageError, match=r"needs .* and the resource a100; the cluster has .*1 CPUs, 0 GPUs"):
        run(out, grid, cluster, hardware="a100", **alone)
    with pytest.raises(UsageError, match="needs 2 GPUs"):
        run(out, grid, cluster, place="target=cuda:1", dtype="float32", **alone)
    assert not out.exists()


# --- without one -----------------------------------------------------------------------------------------------------


def _invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["sweep", "-t", "tiny", "-g", "strategy=lookup", *words])


def test_without_ray_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_executor.importlib.util, "find_spec", lambda name: None)
    done = _invoke("--executor", "ray", "--out", str(tmp_path / "s"))
    assert done.exit_code == 2
    assert done.stderr == (
        'error: --executor ray: Ray is not installed; install it with: pip install "specbench-llm[ray]"\n'
    )
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--executor", "slurm"], 'unknown executor "slurm"; known: local, ray.'),
        (["--address", "host:1"], "--address host:1: goes with --executor ray"),
        (["--hardware", "a100"], "--hardware a100: goes with --executor ray"),
        (["--assume", "20"], "--assume 20: is a speed above 0, and goes with --dry-run"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    done = _invoke(*words)
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")


@with_ray
@pytest.mark.parametrize(
    ("address", "message"),
    [("ray://host:10001", "write auto, or host:port"), ("127.0.0.1:1", "nobody answers there"), ("x", "write auto")],
)
def test_an_address_that_leads_nowhere(address: str, message: str, tmp_path: Path) -> None:
    done = _invoke("--executor", "ray", "--address", address, "--out", str(tmp_path / "s"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("place", "tp", "gpus", "whole_node"),
    [
        ("target=cpu", 1, 0, True),
        ("cpu:0-3", 1, 0, True),
        ("cuda", 1, 1, False),
        ("target=cuda:0", 1, 1, False),
        ("target=cuda:0,draft=cuda:1", 1, 2, False),
        ("target=cuda:0,draft=cpu:0,2", 1, 1, True),
        ("target=cuda:1", 1, 2, False),
        ("draft=cuda:0", 1, 1, True),
        ("target=cuda:0", 4, 4, False),
        ("target=cpu", 2, 0, True),
    ],
)
def test_what_a_cell_needs_for_itself(place: str, tp: int, gpus: int, whole_node: bool) -> None:
    found = needs.needs(Plan(**{**TINY, "place": place}, tp=tp))
    assert (found.gpus, found.whole_node) == (gpus, whole_node)


def test_memory_is_asked_for_by_the_size_of_the_models() -> None:
    """Twice the weights while they are loaded, and a gibibyte, rounded up; nothing where a model is not known here."""
    small = Plan(target="smollm2-135m", dtype="bfloat16")
    assert needs.needs(small).memory_bytes == 2 * needs.GIB
    assert needs.needs(Plan(target="smollm2-135m", dtype="float32")).memory_bytes == 4 * needs.GIB
    assert needs.needs(Plan(target="/no/such/folder")).memory_bytes == 0


def test_workers_of_one_machine_have_no_core_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four physical cores with two threads each: 0 and 4, 1 and 5, ..."""
    monkeypatch.setattr(devices, "_siblings", lambda core: str(core % 4))
    cores = range(8)
    assert devices.divide(cores, [2, 4, 2]) == [(0, 4), (1, 2, 5, 6), (3, 7)]
    assert devices.divide(cores, [1, 1]) == [(0, 4), (1, 5)]
    assert devices.divide(cores, [6, 6]) == [(0, 1, 2, 4, 5, 6), (3, 7)]
    assert devices.divide(cores, [8, 8]) == [tuple(cores), ()]
    assert Seat((8,), 0).cores(cores, []) == tuple(cores)
    assert Seat((4, 4), 1).cores(cores, []) == (2, 3, 6, 7)
    shares = [Seat((8,), 0, gpus=2, number=9).cores(cores, [gpu]) for gpu in ("0", "1")]
    assert shares == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert Seat((8,), 0, gpus=4).cores(cores, ["1", "3"]) == (1, 3, 5, 7)
    assert Seat((8,), 0, gpus=2, number=1).cores(cores, ["GPU-8f2a"]) == (2, 3, 6, 7)


def test_cores_of_one_physical_core_are_told_apart_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_siblings", lambda core: "0-1")
    assert devices.divide([0, 1], [1, 1]) == [(0,), (1,)]


def test_a_courier_sends_each_line_once_and_says_where_a_file_was_replaced(tmp_path: Path) -> None:
    sent: list[tuple[str, Any]] = []
    folder = RunFolder(tmp_path / "run")
    courier = Courier(folder, lambda kind, value: sent.append((kind, value)))
    courier.ship()
    assert sent == []
    folder.write_manifest({"arms": []})
    folder.samples_path.write_bytes(b"one\ntwo\nhal")
    courier.ship()
    courier.ship()
    assert [kind for kind, _ in sent] == ["manifest", "lines"]
    assert sent[1][1] == b"one\ntwo\n"
    with folder.samples_path.open("ab") as file:
        file.write(b"f\n")
    courier.stage("on")
    assert sent[2:] == [("lines", b"half\n")]
    (tmp_path / "new").write_bytes(b"two\n")
    (tmp_path / "new").replace(folder.samples_path)
    courier.ship()
    assert sent[3:] == [("anew", b"two\n")]


def _cell(path: Path) -> sweep.Cell:
    return sweep.Cell(path.name, {}, Plan(out=path))


def _line(prompt: int, **fields: Any) -> Sample:
    from synthetic import sample

    return sample("speculative", prompt, **fields)


def test_a_worker_is_told_by_its_gpus_or_its_processor() -> None:
    gpus = [{"name": "H200", "memory": "141 GB"}] * 4
    assert machines.told({"gpus": gpus}, 1) == "H200"
    assert machines.told({"gpus": gpus}, 4) == "4 x H200"
    assert machines.told({"cpu": "Big CPU", "physical_cores": 64, "gpus": gpus}) == "Big CPU (64 cores)"
    assert machines.told({"cpu": "Big CPU"}) == "Big CPU"


def test_a_cell_never_goes_on_with_other_hardware(tmp_path: Path) -> None:
    """What there was is set aside, whole, and is no cell of the sweep any more."""
    cell, there = _cell(tmp_path / "s" / "k=2"), RunFolder(tmp_path / "s" / "k=2")
    there.write_manifest(manifest())
    there.rewrite([_line(1)])
    same, other = manifest()["environment"], {**manifest()["environment"], "cpu": "Other CPU"}
    assert CellFolder.fits(cell, {**same, "cores": []})
    assert not CellFolder.fits(cell, other)
    folder = CellFolder(cell, same, {"worker": "a"}, Listener())
    assert folder.content()[1] == there.samples_path.read_bytes()
    anew = CellFolder(cell, other, {"worker": "b"}, Listener())
    assert anew.content() == (None, b"")
    assert len(RunFolder(tmp_path / "s" / "set-aside" / "k=2-1").samples()) == 1
    assert not list((tmp_path / "s").glob("*/manifest.json"))
    assert [attempt["worker"] for attempt in cell.attempts] == ["a", "b"]


def test_the_drivers_folder_follows_the_workers(tmp_path: Path) -> None:
    from specbench.results.records import line_of

    cell = _cell(tmp_path / "k=2")
    folder = CellFolder(cell, {}, {"worker": "a"}, Listener())
    folder.take("manifest", json.dumps(manifest(plan={"out": "/scratch"})))
    folder.take("begin", (4, 0))
    folder.take("lines", "".join(line_of(_line(number)) for number in range(2)).encode())
    assert (folder.samples, folder.total) == (2, 4)
    on_disk = RunFolder(tmp_path / "k=2")
    assert [sample.prompt_id for sample in on_disk.samples()] == ["p0", "p1"]
    assert on_disk.manifest()["plan"]["out"] == str(tmp_path / "k=2")
    folder.take("anew", line_of(_line(1)).encode())
    folder.take("lines", line_of(_line(3)).encode())
    assert [sample.prompt_id for sample in on_disk.samples()] == ["p1", "p3"]
    folder.interrupt()
    assert on_disk.manifest()["interrupted"] is True
    (attempt,) = on_disk.manifest()["executor"]["attempts"]
    assert (attempt["worker"], attempt["how"]) == ("a", "interrupted")
    assert (tmp_path / "k=2" / "summary.json").is_file()
