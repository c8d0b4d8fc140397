"""Machine hours of a grid before it runs: from a profile, from an assumed speed, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completions_server import serving
from typer.testing import CliRunner

from specbench.cli import app
from specbench.models.cost_curve import CostCurve
from specbench.models.info import describe
from specbench.models.specs import parse
from specbench.results import forecasts, sweep
from specbench.results.estimate import estimate
from specbench.results.plan import Plan
from specbench.strategies import registry

PLAN = {"target": "tiny", "draft": "tiny-draft", "task": ("bundled:question-answering",), "limit": 2,
        "max_new_tokens": 6, "trace": 0, "warmup": 0, "repeats": 3}  # fmt: skip
GRID = {"strategy": ["speculative"], "draft_length": [2, 3]}
SAMPLES = 2 * 3 + 1  # of one arm: two prompts three times, and the first once more
FORWARD_MS = 20.0


def cells(**changes: Any) -> list[sweep.Cell]:
    return sweep.cells(Plan(**{**PLAN, **changes}), GRID, Path("x"))


@pytest.fixture(scope="module")
def fingerprint() -> str:
    return describe(parse("tiny"), "target").fingerprint


def keep(folder: Path, mark: str, exact: bool = False, **changes: Any) -> Path:
    """A profile of `tiny` by which every forward takes 20 ms, and speculation is twice as fast at 0.7."""
    curve = CostCurve((1, 2), (64,), (1,), np.full((2, 1, 1), FORWARD_MS)).as_record()
    target = {"fingerprint": mark, "dtype": "float32", "device": "cpu", "runtime": "packed", "curve": curve}
    document = {
        "format": forecasts.FORMAT, "made": "2030-01-02T03:04:05", "quick": False, "together": None,
        "identity": {
            "hardware": {"cpu": "Big CPU", "architecture": "x86_64", "cores": [*range(64)], "cgroup_cpu_limit": None,
                         "memory_bytes": 1 << 38, "gpus": [{"device": "cuda:0", "name": "H200", "memory": "141 GB"}]},
            "exact": exact,
        },
        "models": {"target": target | changes},
        "predicted": {"strategies": [
            {"strategy": "speculative", "at": [{"acceptance": 0.5, "speedup": 1.5},
                                               {"acceptance": 0.7, "speedup": 2.0}]}
        ]},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "one.json").write_text(json.dumps(document))
    return folder


def test_a_profile_tells_the_hours(tmp_path: Path, fingerprint: str) -> None:
    """By hand: a prompt is one forward, six tokens are six; the drafting arm takes half of that."""
    found = estimate(cells(), folder=keep(tmp_path / "p", fingerprint))
    plain_ms = SAMPLES * (1 + 6) * FORWARD_MS
    assert found.hours == pytest.approx(2 * 1.5 * plain_ms / 3_600_000)
    assert (found.samples, found.tokens) == (2 * 2 * 6, 2 * 2 * SAMPLES * 6)
    assert found.basis == [
        "by the profile of 2030-01-02 (Big CPU), strategies at an acceptance of 0.7"
    ]  # fmt: skip


def test_done_cells_cost_nothing_and_a_strategy_without_a_formula_costs_plain_decoding(
    tmp_path: Path, fingerprint: str
) -> None:
    made = sweep.cells(Plan(**PLAN), {"strategy": ["speculative", "auto"]}, Path("x"))
    made[0].state = "done"
    found = estimate(made, folder=keep(tmp_path / "p", fingerprint))
    assert [cell.name for cell in found.cells] == ["auto"]
    assert found.hours == pytest.approx(2 * SAMPLES * 7 * FORWARD_MS / 3_600_000)
    assert "auto as slow as plain decoding" in found.basis[0]


def test_warm_up_and_traces_are_counted(tmp_path: Path, fingerprint: str) -> None:
    folder = keep(tmp_path / "p", fingerprint)
    less, more = (estimate(cells(warmup=given, trace=given), folder=folder) for given in (0, 1))
    forwards = (1 + 16) + (1 + 6)  # of one arm: a warm-up of 16 tokens, one traced prompt
    assert more.hours - less.hours == pytest.approx(2 * 1.5 * forwards * FORWARD_MS / 3_600_000)
    assert more.samples == less.samples


@pytest.mark.parametrize(("continuous", "rows"), [(True, [1, 3]), (False, [1, 2])])
def test_an_arm_that_takes_up_waiting_requests_is_warmed_up_with_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continuous: bool, rows: list[int]
) -> None:
    """As `run` does, in a batch: one to take the row of another."""
    monkeypatch.setattr(registry.get("lookup"), "continuous", continuous)
    plans = [Plan(**{**PLAN, "draft": None, "strategy": ("lookup",), "baseline": False, "warmup": given})
             for given in (0, 1)]  # fmt: skip
    less, more = (estimate(sweep.cells(plan, {"batch": [1, 2]}, Path("x")), 12.0, tmp_path) for plan in plans)
    added = [after.tokens - before.tokens for before, after in zip(less.cells, more.cells, strict=True)]
    assert added == [16 * count for count in rows]


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"dtype": "bfloat16"}, {"device": "cuda:0"}])
def test_a_profile_of_something_else_tells_nothing(tmp_path: Path, fingerprint: str, change: dict[str, str]) -> None:
    found = estimate(cells(), folder=keep(tmp_path / "p", fingerprint, **change))
    assert found.hours is None
    assert found.samples == 24
    assert (
        "no profile of tiny in float32 is kept here; make one with: specbench profile-hardware -t tiny"
        in found.basis[0]
    )


def test_an_assumed_speed_is_said_to_be_one(tmp_path: Path) -> None:
    found = estimate(cells(), 12.0, tmp_path)
    assert found.hours == pytest.approx(2 * 2 * SAMPLES * 6 / 12 / 3600)
    assert found.basis == ["assuming 12 tok/s in every arm, and no time for prompts"]


def test_a_grid_for_gpus_is_estimated_where_there_are_none(tmp_path: Path, fingerprint: str) -> None:
    """The cells run elsewhere; a profile from there is enough."""
    folder = keep(tmp_path / "p", fingerprint, dtype="bfloat16", device="cuda:0")
    found = estimate(cells(place="target=cuda:0"), folder=folder)
    assert found.hours is not None
    assert found.basis[0].startswith("by the profile of 2030-01-02 (H200), ")
    assert estimate(cells(place="target=cuda:0", target="/no/such/model"), folder=folder).hours is None


@pytest.mark.parametrize(
    ("place", "on_gpu"),
    [("CUDA", True), ("target = cuda:1,draft=cpu", True), ("target=cpu,draft=cuda:0", False), ("draft=cuda:0", False)],
)
def test_the_device_of_the_target_decides_which_profile_it_is(
    tmp_path: Path, fingerprint: str, place: str, on_gpu: bool
) -> None:
    """A draft on a GPU once made a target on a CPU one in bfloat16 on a GPU."""
    gpu = keep(tmp_path / "gpu", fingerprint, dtype="bfloat16", device="cuda:0")
    cpu = keep(tmp_path / "cpu", fingerprint)
    told = [estimate(cells(place=place), folder=folder).hours is not None for folder in (gpu, cpu)]
    assert told == [on_gpu, not on_gpu]


def test_a_profile_of_a_quantised_target_is_found_by_its_quantisation(tmp_path: Path, fingerprint: str) -> None:
    """Its dtype is `int4` in a profile, whatever the plan says of the rest of the model."""
    int4, whole = keep(tmp_path / "q", fingerprint, dtype="int4"), keep(tmp_path / "w", fingerprint)
    assert estimate(cells(target_quant="int4"), folder=int4).hours is not None
    found = estimate(cells(target_quant="int4"), folder=whole)
    assert found.hours is None
    assert "no profile of tiny in int4 is kept here" in found.basis[0]
    assert estimate(cells(), folder=int4).hours is None


def test_a_profile_is_of_an_exact_target_or_not(tmp_path: Path, fingerprint: str) -> None:
    exact, fast = keep(tmp_path / "e", fingerprint, exact=True), keep(tmp_path / "f", fingerprint)
    told = [estimate(cells(exact=given), folder=folder).hours is not None
            for given in (True, False) for folder in (exact, fast)]  # fmt: skip
    assert told == [True, False, False, True]


def test_a_target_in_parts_has_no_profile_and_making_one_is_not_advised(tmp_path: Path, fingerprint: str) -> None:
    folder = keep(tmp_path / "p", fingerprint)
    found = estimate(cells(tp=2), folder=folder)
    assert found.hours is None
    assert found.basis == [
        "profiles are of a target on one device, and this one is in 2 parts; a speed can be assumed with "
        "--assume TOK_PER_S"
    ]
    assert estimate(cells(tp=2), 12.0, folder).hours is not None


def test_a_run_of_a_server_alone_is_not_estimated_from_a_profile(tmp_path: Path, monkeypatch: Any) -> None:
    """It ended in a KeyError: no runtime of ours is chosen for it."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    with serving() as server:
        words = ["sweep", "--target", f"endpoint:{server.url}#toy", "--tokenizer", "tiny", "--task",
                 "bundled:question-answering", "-n", "1", "--grid", "batch=1,2", "--dry-run", "--json",
                 "--out", str(tmp_path / "s")]  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)["estimate"]
        assert (found["machine_hours"], len(found["cells"])) == (None, 2)
        assert found["samples"] > 0
        assert found["basis"] == [
            "how fast a server is stands in no profile; a speed can be assumed with --assume TOK_PER_S"
        ]
        done = CliRunner().invoke(app, [*words, "--assume", "10"])
    assert json.loads(done.stdout)["estimate"]["machine_hours"] > 0


def test_a_server_in_one_cell_does_not_hide_the_runtime_of_another(tmp_path: Path, fingerprint: str) -> None:
    """Both share prompts and target, but only one of them has a runtime."""
    folder = keep(tmp_path / "p", fingerprint)
    with serving() as server:
        plan = Plan(**{**PLAN, "draft": None, "baseline": False, "options": {"endpoint": {"url": server.url}}})
        found = estimate(sweep.cells(plan, {"strategy": ["endpoint", "lookup"]}, Path("x")), folder=folder)
    assert [cell.hours is None for cell in found.cells] == [True, False]


def test_a_dry_run_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    words = ["sweep", "-t", "tiny", "-s", "lookup", "-g", "draft-length=2,3", "-n", "1", "--max-new-tokens", "4",
             "--dry-run", "--out", str(tmp_path / "s"), "--executor", "ray"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "machine hours: not known" in done.stdout
    assert "2 to run: 8 samples, at most " in done.stdout  # of two turns
    done = CliRunner().invoke(app, [*words, "--assume", "10", "--json"])
    found = json.loads(done.stdout)["estimate"]
    assert found["machine_hours"] == pytest.approx(found["tokens"] / 10 / 3600)
    assert not (tmp_path / "s").exists()
