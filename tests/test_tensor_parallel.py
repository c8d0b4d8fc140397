"""A target over several ranks: the tokens of one process, from one command, and no process left behind.

Two ranks of `tiny` on two cores serve the whole file; what kills one of them comes last.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal

import late
import pytest
import torch
from transformers import GPT2Config
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import ModelError, PlacementError, UsageError, WorkerError
from specbench.hardware import devices
from specbench.hardware.devices import Device, available_cores, check_gpus, parse_placement
from specbench.hardware.ranks import Ranks, launched
from specbench.models.info import describe
from specbench.models.load import check_ranks, load
from specbench.models.remote import peak_memory_bytes
from specbench.models.specs import parse
from specbench.results import run as runs
from specbench.results.listener import Listener
from specbench.results.plan import Plan, check
from specbench.results.ranks import follow_rank_0
from specbench.results.records import RunFolder
from specbench.results.sweep import Shelf

CORES = available_cores()
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on CPU need the GPUs out of sight")
ranks_of_cpu = [(Device("cpu", CORES[:1]), 1), (Device("cpu", CORES[-1:]), 1)]
PLAN = Plan(
    strategy=("speculative",), target="tiny", draft="tiny-draft", limit=3, max_new_tokens=16, warmup=0, trace=1,
    runtime="transformers", threads=1, tp=2, place=f"target=cpu:{CORES[0]},{CORES[-1]}",
)  # fmt: skip


def processes_of_ranks() -> list[str]:
    return [child.name for child in multiprocessing.active_children() if "rank" in child.name]


@pytest.fixture(autouse=True)
def all_cores_afterwards():
    yield
    devices._set_affinity(CORES)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "--tp 0: at least 1"),
        ({"runtime": "packed"}, "--tp 2: runs in the transformers runtime; leave --runtime packed out"),
        ({"target_quant": "int8", "runtime": "auto"}, "--target-quant: needs the packed runtime, and --tp 2 the"),
        ({"exact": True, "runtime": "auto"}, "--exact: needs the packed runtime, and --tp 2 the transformers one"),
        ({"strategy": ("sparse-kv",), "runtime": "auto"}, "sparse-kv: needs the packed runtime, not --tp 2"),
        ({"strategy": ("hf-assisted",)}, "hf-assisted: runs transformers' own loop, in one process; leave it out"),
        (
            {"tp": len(CORES) + 1},
            f"--tp {len(CORES) + 1}: {len(CORES) + 1} ranks need a core each, and of those of cpu",
        ),
        ({"threads": 2}, "--threads 2: from 1 to 1, the cores"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(UsageError, match=message):
        check(dataclasses.replace(PLAN, **settings))


@needs_two_cores
def test_ranks_on_gpus_follow_the_targets_and_have_cores_of_their_own():
    placement = parse_placement("target=cuda:1", None, ranks=2)
    assert [str(device) for device in placement.all_of("target")] == ["cuda:1", "cuda:2"]
    assert placement.of("draft") == placement.of("target") == placement.ranks[0][0]
    assert not set(placement.main_cores) & set(placement.followers[0].cores)
    with pytest.raises(PlacementError, match="cuda:2 is taken by a rank of the target"):
        parse_placement("target=cuda:1,draft=cuda:2", None, ranks=2)
    if torch.cuda.device_count() < 3:
        with pytest.raises(PlacementError, match="--tp 2: cuda:.: not there"):
            check_gpus(placement)


@needs_two_cores
def test_ranks_on_cpu_share_the_cores_and_none_twice():
    placement = parse_placement("cpu", None, ranks=2)
    shares = [set(device.cores) for device, _ in placement.ranks]
    assert len(shares[0]) == len(shares[1]) > 0
    assert not shares[0] & shares[1]
    assert all(1 <= threads <= len(device.cores) for device, threads in placement.ranks)
    assert placement.of("draft") == placement.ranks[0][0]
    assert parse_placement("cpu").ranks == ()


def test_heads_that_cannot_be_dealt_out_and_families_without_a_plan_are_refused():
    info = describe(parse("tiny"), "target")
    check_ranks(info, 2)
    with pytest.raises(ModelError, match=r"--tp 3: target tiny has 2 KV head\(s\), which 3 ranks .* takes --tp 2$"):
        check_ranks(info, 3)
    other = dataclasses.replace(info, config=GPT2Config(), model_type="gpt2")
    with pytest.raises(ModelError, match="is a gpt2, for which transformers has no tensor-parallel plan"):
        check_ranks(other, 2)


def test_the_command_line_refuses_in_one_line():
    result = CliRunner().invoke(app, ["run", "-s", "lookup", "-t", "tiny", "--tp", "2", "--runtime", "packed"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --tp 2: runs in the transformers runtime; leave --runtime packed out\n"


def test_torchruns_number_of_processes_has_to_be_ours(monkeypatch):
    assert launched() is None
    assert not follow_rank_0(PLAN)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == (0, 2)
    assert not follow_rank_0(PLAN)
    with pytest.raises(UsageError, match="--tp 1: torchrun started 2 processes"):
        follow_rank_0(dataclasses.replace(PLAN, tp=1))
    monkeypatch.setenv("RANK", "1")
    assert follow_rank_0(PLAN, dry_run=True)


# --- ranks -----------------------------------------------------------------------------------------------------------


@needs_two_cores
@needs_no_gpu
def test_a_rank_that_keeps_the_others_waiting_is_named():
    ranks = Ranks("target", ranks_of_cpu, late.follow, hang_s=1)
    with ranks.together():
        ranks.group.tell([0, *range(1000)])
    ranks.drain()
    assert ranks.call(peak_memory_bytes) > 1_000_000
    ranks.join()
    with ranks.together():
        ranks.group.tell([0])
    with pytest.raises(WorkerError, match=r"^target, rank 1 \(worker on cpu:\d+\): does not answer"), ranks.together():
        torch.distributed.all_reduce(torch.zeros(1))
    with pytest.raises(WorkerError, match="does not answer"):
        ranks.drain()
    ranks.close()
    ranks.close()
    assert not torch.distributed.is_initialized()
    assert not processes_of_ranks()


# --- a model over two ranks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf():
    """Holds the pair between runs."""
    shelf = Shelf()
    yield shelf
    shelf.close()
    assert not torch.distributed.is_initialized()
    assert not processes_of_ranks()


@pytest.fixture
def shared(shelf, tmp_path):
    """The model over two ranks; loaded by the first who asks."""
    if not shelf.kept:
        runs.run(dataclasses.replace(PLAN, limit=1, max_new_tokens=2, trace=0, out=tmp_path / "first"), models=shelf)
    return next(model for model in shelf.kept.values() if model.worker is not None)


@pytest.fixture(scope="module")
def alone():
    return load(describe(parse("tiny"), "target"), runtime="transformers")


def tokens(result) -> dict:
    found = {}
    for sample in RunFolder(result.folder).samples():
        assert sample.ok, sample.error
        found[sample.arm, sample.prompt_id, sample.turn, sample.kind] = sample.token_ids
    return found


@needs_two_cores
@needs_no_gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.0, "seed": 3, "batch": 2, "trace": 0}],
    ids=["greedy", "sampled"],
)
def test_two_ranks_give_the_tokens_of_one_process(settings, shelf, tmp_path):
    """The criterion: autoregressive and speculative, the draft on rank 0 alone, float32."""
    two = dataclasses.replace(PLAN, **settings)
    one = runs.run(dataclasses.replace(two, tp=1, out=tmp_path / "one"))
    both = runs.run(dataclasses.replace(two, out=tmp_path / "two"), models=shelf)
    assert tokens(both) == tokens(one)
    assert {arm for arm, *_ in tokens(both)} == {"autoregressive", "speculative"}
    assert not both.failures
    (report,) = both.manifest["lossless"].values()
    assert report["speculative"]["exact"] == report["speculative"]["compared"] > 0

    assert both.manifest["settings"]["tp"] == 2
    plain, speculative = both.manifest["arms"]
    where = [f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"]
    assert plain["roles"]["target"]["devices"] == where
    assert speculative["roles"]["draft"]["devices"] == where[:1]
    whole = one.manifest["arms"][0]["roles"]["target"]
    assert plain["roles"]["target"]["weight_bytes"] == whole["weight_bytes"]
    assert ", tp 2, " in both.summary.title[0]
    assert f"{where[0]} + {where[1]}, 2 threads" in both.summary.title[0]
    assert "tp" not in one.summary.title[0]
    assert both.summary.rows[0].devices == where
    peaks = [result.manifest["peak_memory_bytes"]["autoregressive"] for result in (one, both)]
    assert peaks[1] > peaks[0] + 50_000_000  # another interpreter with torch


@needs_two_cores
@needs_no_gpu
def test_rows_are_kept_cut_copied_and_mixed_in_all_ranks(shared, alone):
    shared.reset()
    alone.reset()
    long = [40 + i % 60 for i in range(300)]  # more than a command's head, and than the room there is at first
    for contexts, last, rows in (
        ([[40, 41, 42]], 2, None),
        ([[40, 41, 43, 44]], 1, None),
        ([[50, 60], long], [1, 3], [2, 0]),
        ([[50, 60, 61], [*long, 70]], 1, [2, 0]),
    ):
        ours, theirs = shared.advance(contexts, last, rows), alone.advance(contexts, last, rows)
        assert torch.allclose(ours, theirs, atol=1e-3)
    for model in (shared, alone):
        model.copy_row(0, 1)
    ours, theirs = (model.advance([[*long[:250], 99]], 1, [1]) for model in (shared, alone))
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert shared.last_forward_ns > 0
    with pytest.raises(ValueError, match="empty"):
        shared.advance([[]])


@needs_two_cores
@needs_no_gpu
def test_ctrl_c_waits_until_the_ranks_are_in_step(shared, alone):
    shared.reset()
    hook = shared.hf_model.register_forward_pre_hook(lambda module, given: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        shared.advance([[40, 41, 42]])
    hook.remove()
    assert torch.allclose(shared.advance([[40, 41, 43]]), alone.advance([[40, 41, 43]]), atol=1e-3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Killer(Listener):
    """Kills a process after the first sample."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def begin(self, total, done) -> None:
        self.alive = True

    def sample(self, samples) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        self.alive = False


@needs_two_cores
@needs_no_gpu
def test_a_rank_that_dies_is_named_and_what_was_measured_stays(shelf, shared, tmp_path):
    out = tmp_path / "killed"
    with pytest.raises(WorkerError, match=rf"target, rank 1 .*killed by SIGKILL.*--resume --out {re.escape(str(out))}"):
        runs.run(dataclasses.replace(PLAN, out=out), Killer(shared.worker._followers[0]._process.pid), models=shelf)
    assert RunFolder(out).samples()[0].ok
    with pytest.raises(WorkerError, match="rank 1"):
        shared.advance([[1, 2]])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_tokens_of_one(tmp_path):
    two = dataclasses.replace(PLAN, place="target=cuda:0", dtype="float32", threads=None)
    one = runs.run(dataclasses.replace(two, tp=1, out=tmp_path / "one"))
    both = runs.run(dataclasses.replace(two, out=tmp_path / "two"))
    assert tokens(both) == tokens(one)
    assert both.summary.rows[0].devices == ["cuda:0", "cuda:1"]
