"""A grid of runs: which cells there are, what is skipped, what a failure or Ctrl-C leaves, and the best setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import manifest, run, sample
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import RunFolderError, StrategyError, UsageError
from specbench.models import load as loading
from specbench.results import best, sweep
from specbench.results import run as runs
from specbench.results.listener import Listener
from specbench.results.plan import Plan
from specbench.results.records import RunFolder
from specbench.results.runs import load
from specbench.strategies.lookup import Lookup

TINY = {"target": "tiny", "limit": 2, "max_new_tokens": 6, "threads": 1, "trace": 0, "warmup": 0}
FLAGS = ["-t", "tiny", "-n", "2", "--max-new-tokens", "6", "--threads", "1", "--trace", "0", "--warmup", "0", "-q"]


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, ["sweep", *(str(word) for word in words)])


def _names(grid: dict[str, Sequence[Any]], **plan: Any) -> list[str]:
    return [cell.name for cell in sweep.cells(Plan(**{**TINY, **plan}), grid, Path("x"))]


# --- the grid --------------------------------------------------------------------------------------------------------


def test_every_combination_is_a_cell() -> None:
    grid = {"strategy": ["lookup"], "lookup.min-match": ["1", "2"], "task": ["bundled:qa", "bundled:code"]}
    assert _names(grid) == [
        "lookup_lookup.min-match=1_bundled-qa", "lookup_lookup.min-match=1_bundled-code",
        "lookup_lookup.min-match=2_bundled-qa", "lookup_lookup.min-match=2_bundled-code",
    ]  # fmt: skip


def test_what_does_not_concern_a_strategy_is_not_measured_twice() -> None:
    """`autoregressive` has no draft length, `speculative` no min-match: 2 x 2 x 3 combinations, 1 + 4 + 2 cells."""
    grid = {
        "strategy": ["autoregressive", "lookup", "speculative"],
        "draft-length": ["2", "4"],
        "lookup.min-match": ["1", "2"],
    }
    names = _names(grid, draft="tiny-draft")
    assert len(names) == 7
    assert names.count("autoregressive") == 1
    assert "speculative_draft-length=2" in names
    assert "lookup_draft-length=4_lookup.min-match=2" in names


def test_a_draft_model_that_nobody_uses_is_left_out_of_a_cell() -> None:
    base = Plan(**TINY, draft="tiny-draft", place="target=cpu:0,draft=cpu:1", options={"lookup": {"min-match": "3"}})
    one, two = sweep.cells(base, {"strategy": ["lookup", "speculative"]}, Path("x"))
    assert (one.plan.draft, one.plan.place, dict(one.plan.options)) == (
        None,
        "target=cpu:0",
        {"lookup": {"min-match": "3"}},
    )
    assert (two.plan.draft, two.plan.place, dict(two.plan.options)) == ("tiny-draft", "target=cpu:0,draft=cpu:1", {})


def test_cells_without_a_draft_get_the_targets_own_int4_copy_and_say_so_once(tmp_path: Path) -> None:
    cells = sweep.cells(Plan(**TINY), {"strategy": ["lookup", "speculative"], "draft-length": ["2", "4"]}, Path("x"))
    assert [cell.plan.draft for cell in cells] == [None, None, "self:int4", "self:int4"]
    (note,) = sweep.notes_of(cells)
    words = ("-t", "tiny", "-s", "speculative", "-g", "draft-length=2,4", "--dry-run", "--out", tmp_path / "s")
    assert invoke(*words).stderr.count(note) == 1
    elsewhere = Plan(**TINY, place="target=cpu:98,draft=cpu:99")
    assert [cell.plan.draft for cell in sweep.cells(elsewhere, {"strategy": ["speculative"]}, Path("x"))] == [
        "self:int4"
    ]
    grid = {"strategy": ["speculative"], "draft": ["none", "tiny-draft"]}
    assert [cell.plan.draft for cell in sweep.cells(Plan(**TINY), grid, Path("x"))] == [None, "tiny-draft"]


def test_how_a_draft_is_made_is_a_setting_like_any_other() -> None:
    base = Plan(**TINY, options={"draft": {"group-size": "64"}})
    cells = sweep.cells(base, {"strategy": ["lookup", "speculative"], "draft.head-vocab": ["0", "auto"]}, Path("x"))
    assert [cell.name for cell in cells] == [
        "lookup", "speculative_draft.head-vocab=0", "speculative_draft.head-vocab=auto",
    ]  # fmt: skip
    assert dict(cells[2].plan.options) == {"draft": {"group-size": "64", "head-vocab": "auto"}}


def test_cells_that_need_the_same_models_are_neighbours() -> None:
    grid = {"strategy": ["lookup", "autoregressive"], "dtype": ["float32", "bfloat16"]}
    assert _names(grid) == ["lookup_dtype=float32", "autoregressive_dtype=float32", "lookup_dtype=bfloat16",
                            "autoregressive_dtype=bfloat16"]  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["draft-length"], "write key=a,b"),
        (["draft-lenth=2"], 'unknown key in --grid "draft-lenth"; did you mean "draft-length"?'),
        (["draft-length=two"], '"draft-length" of the sweep must be a whole number or none'),
        (["strategy=lokup"], 'unknown strategy "lokup"; did you mean "lookup"?'),
        (["strategy=autoregressive", "draft-length=2,4"], "no strategy or task of this sweep has it"),
        (["strategy=autoregressive", "lookup.min-match=2,4"], "no strategy or task of this sweep has it"),
        (["strategy=lookup", "lookup.min-mach=2,4"], "min-match"),
        (["out=a,b"], 'unknown key in --grid "out"'),
        (["strategy=lookup", "dtype=float31"], 'did you mean "float32"?'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_grid_is_one_line_before_anything_runs(
    tmp_path: Path, texts: list[str], message: str
) -> None:
    """C16: no setting is quietly ignored."""
    done = invoke(*FLAGS, *(word for text in texts for word in ("--grid", text)), "--out", tmp_path / "s")
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_no_grid_is_a_usage_error(tmp_path: Path) -> None:
    assert "no grid; name what varies" in invoke(*FLAGS, "--out", tmp_path / "s").stderr


def test_lists_in_the_config_and_flags_over_them(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "target: tiny\nlimit: 2\nsweep:\n  strategy: [lookup]\n  draft_length: [2, 4]\n  dtype: [float32]\n"
    )
    done = invoke("--config", path, "--grid", "draft-length=8", "--dry-run", "--json", "--out", tmp_path / "s")
    assert done.exit_code == 0, done.output
    assert [cell["name"] for cell in json.loads(done.stdout)["cells"]] == ["lookup_draft-length=8_dtype=float32"]
    assert not (tmp_path / "s").exists()
    path.write_text("target: tiny\nsweep: [1]\n")
    assert "sweep: is a mapping" in invoke("--config", path).stderr


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("sweep") / "s"
    return out, invoke(*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2", "--json", "--out", out)


def test_every_cell_is_a_run_folder_with_its_own_manifest(done: tuple[Path, Any]) -> None:
    out, result = done
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert [cell["state"] for cell in document["cells"]] == ["done", "done"]
    for cell in document["cells"]:
        assert RunFolder(Path(cell["folder"])).manifest()["settings"]["target"] == "tiny"
    assert [one["task"] for one in document["best"]] == ["bundled"]
    assert {row["own_name"] for row in document["rows"]} == {"lookup"}
    assert json.loads((out / "sweep.json").read_text())["grid"]["lookup.min-match"] == ["1", "2"]


def test_a_sweep_is_compared_like_its_runs(done: tuple[Path, Any]) -> None:
    out, _ = done
    assert len(load([out])) == 2
    text = CliRunner().invoke(app, ["compare", str(out)]).stdout
    assert "lookup [min-match=1]" in text


def test_done_cells_are_skipped_and_new_ones_are_run(done: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: with nothing left, no weights are loaded."""
    out, _ = done
    again = invoke(*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2", "--out", out)
    assert again.exit_code == 2
    assert "holds a sweep already; go on with --resume" in again.stderr
    monkeypatch.setattr(runs, "load", lambda *a, **k: pytest.fail("weights were loaded"))
    before = (out / "lookup_lookup.min-match=1" / "manifest.json").read_bytes()
    again = invoke(*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2", "--out", out, "--resume")
    assert again.exit_code == 0, again.output
    assert (out / "lookup_lookup.min-match=1" / "manifest.json").read_bytes() == before
    monkeypatch.undo()
    more = invoke(*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2,3", "--out", out, "--resume", "--json")
    assert more.exit_code == 0, more.output
    assert len(json.loads(more.stdout)["cells"]) == 3
    other = invoke(
        *FLAGS, "--seed", "3", "-g", "strategy=lookup", "-g", "lookup.min-match=1,2", "--out", out, "--resume"
    )
    assert other.exit_code == 2
    assert "was made with other settings (seed: 0 there, 3 now)" in other.stderr


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    base, grid = Plan(**TINY), {"strategy": ["lookup"]}
    with pytest.raises(RunFolderError, match="holds other files"):
        sweep.prepare(base, grid, tmp_path)
    with pytest.raises(RunFolderError, match="no sweep to resume"):
        sweep.prepare(base, grid, tmp_path / "new", resume=True)


def test_a_failed_cell_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is run again when the sweep is resumed."""
    real = Lookup.__init__

    def broken(self: Lookup, models: Any, options: Any) -> None:
        if options.min_match == 1:
            raise RuntimeError("out of memory,\nor so")
        real(self, models, options)

    monkeypatch.setattr(Lookup, "__init__", broken)
    words = [*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2", "--out", tmp_path / "s"]
    done = invoke(*words, "--json")
    assert done.exit_code == 1
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["state"], cell["error"]) for cell in cells] == [
        ("failed", "RuntimeError: out of memory, or so"),
        ("done", None),
    ]
    assert "failed: lookup_lookup.min-match=1: RuntimeError: out of memory, or so" in done.stderr
    monkeypatch.undo()
    assert invoke(*words, "--resume").exit_code == 0


def test_all_cells_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "generate", lambda *a: (_ for _ in ()).throw(StrategyError("no more")))
    monkeypatch.setattr(runs, "load", lambda *a, **k: (_ for _ in ()).throw(MemoryError("none left")))
    done = invoke(*FLAGS, "-g", "strategy=lookup", "--out", tmp_path / "s", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"] == []


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: the first cell is done, the second was interrupted, the third never begun; exit 130; then it goes on."""
    calls = 0
    real = Lookup.generate

    def interrupted(self: Lookup, *args: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        if calls == 5:  # two prompts and the repeated first one in the first cell
            raise KeyboardInterrupt
        yield from real(self, *args)

    monkeypatch.setattr(Lookup, "generate", interrupted)
    words = [*FLAGS, "-g", "strategy=lookup", "-g", "lookup.min-match=1,2,3", "--out", tmp_path / "s"]
    done = invoke(*words, "--json")
    assert done.exit_code == 130, done.output
    document = json.loads(done.stdout)
    assert [cell["state"] for cell in document["cells"]] == ["done", "interrupted", "waiting"]
    assert document["interrupted"]
    assert json.loads((tmp_path / "s/sweep.json").read_text())["interrupted"]
    monkeypatch.undo()
    again = invoke(*words, "--json", "--resume")
    assert again.exit_code == 0, again.output
    assert {cell["state"] for cell in json.loads(again.stdout)["cells"]} == {"done"}


def test_models_are_loaded_once_and_give_way_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str]] = []
    closed: list[int] = []

    def load_once(info: Any, **how: Any) -> Any:
        model = loading.load(info, **how)
        loaded.append((info.role, how["dtype"]))
        number = len(loaded)
        monkeypatch.setattr(model, "close", lambda: closed.append(number), raising=False)
        return model

    monkeypatch.setattr(runs, "load", load_once)
    base = Plan(**TINY, draft="tiny-draft")
    grid = {"strategy": ["speculative"], "draft_length": [2, 3], "dtype": ["float32", "bfloat16"]}
    result = sweep.sweep(base, grid, tmp_path / "s")
    assert [cell.state for cell in result.cells] == ["done"] * 4
    assert loaded == [("target", "float32"), ("draft", "float32"), ("target", "bfloat16"), ("draft", "bfloat16")]
    assert sorted(closed) == [1, 2, 3, 4]


def test_a_reused_model_says_what_a_fresh_one_says(tmp_path: Path) -> None:
    """Nothing of one cell's prompts is left in the next: the same tokens as in runs of their own."""
    base = Plan(**TINY, draft="tiny-draft")
    result = sweep.sweep(base, {"strategy": ["speculative"], "draft_length": [2, 3]}, tmp_path / "s")
    for cell in result.cells:
        alone = runs.run(Plan(**TINY, strategy=("speculative",), draft="tiny-draft",
                              draft_length=cell.plan.draft_length, out=tmp_path / f"alone {cell.name}"))  # fmt: skip
        ours = [(one.arm, one.prompt_id, one.kind, one.token_ids) for one in RunFolder(cell.folder).samples()]
        assert ours == [(one.arm, one.prompt_id, one.kind, one.token_ids) for one in RunFolder(alone.folder).samples()]


def test_two_roles_of_the_same_weights_have_a_cache_each(tmp_path: Path) -> None:
    base = Plan(**{**TINY, "require_lossless": True}, draft="tiny")
    result = sweep.sweep(base, {"strategy": ["speculative"], "draft_length": [2, 3]}, tmp_path / "s")
    assert result.failures == []


def test_somebody_else_may_run_the_cells(tmp_path: Path) -> None:
    """The seam for other executors: they get cells, and say how each ended, in any order."""

    class Backwards:
        elsewhere = False

        def run(self, cells: Sequence[sweep.Cell], listener: Listener, argv: Sequence[str]) -> Iterator[sweep.Cell]:
            for cell in reversed(cells):
                _put(cell.folder)
                cell.state = "done"
                yield cell

    result = sweep.sweep(Plan(**TINY), {"strategy": ["lookup", "autoregressive"]}, tmp_path / "s", executor=Backwards())
    assert [cell.state for cell in result.cells] == ["done", "done"]


# --- the best setting ------------------------------------------------------------------------------------------------


def _put(path: Path, samples: Any = None) -> None:
    folder = RunFolder(path)
    folder.write_manifest(manifest(finished="now"))
    writer = folder.writer()
    writer.append(samples or run(12))
    writer.close()


def _result(
    tmp_path: Path, step_ms: dict[str, float], axis: str = "draft_length", noise: float = 0.05
) -> sweep.SweepResult:
    """Cells whose arm takes so many ms per step, on prompts of different lengths."""
    random = np.random.default_rng(1)
    cells = []
    for value, ms in step_ms.items():
        samples = []
        for prompt in range(20):
            length = 10 + prompt
            base_ms, arm_ms = (ms * (1 + noise * random.standard_normal()) for ms in (20, ms))
            samples.append(sample("autoregressive", prompt, tokens=length, step_ms=base_ms))
            samples.append(sample("speculative", prompt, tokens=length, step_ms=arm_ms))
        _put(tmp_path / value, samples)
        cells.append(sweep.Cell(value, {axis: value}, Plan(out=tmp_path / value), "done"))
    return sweep.SweepResult(tmp_path, cells, False)


def test_the_best_setting_is_named_with_its_interval(tmp_path: Path) -> None:
    summary, (found,) = best.findings(_result(tmp_path, {"2": 12.0, "4": 8.0, "8": 16.0}))
    assert (found.cell, found.task, found.separable) == ("4", "toy", True)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(2.5, rel=0.03)
    assert found.ratio == pytest.approx(1.5, rel=0.03)
    assert "toy: best is speculative in 4, 2.5" in found.text
    assert "better than the second, speculative in 2, by 1." in found.text
    assert summary is not None
    assert [row.run for row in summary.compared] == ["4", "2", "8"]


def test_a_best_that_cannot_be_told_from_the_second_says_so(tmp_path: Path) -> None:
    _, (found,) = best.findings(_result(tmp_path, {"2": 8.0, "4": 8.02}))
    assert found.separable is False
    assert "cannot be told from the second" in found.text
    _, (found,) = best.findings(_result(tmp_path / "x", {"2": 30.0, "4": 50.0}))
    assert "slower than the baseline all the same" in found.text


def test_cells_of_different_dtypes_are_ranked_by_their_speed(tmp_path: Path) -> None:
    """A speed-up over a slow baseline is no reason to choose the slow dtype."""
    result = _result(tmp_path, {"float32": 10.0, "bfloat16": 9.0}, axis="dtype")
    path = tmp_path / "float32"
    samples = RunFolder(path).samples()
    for one in samples:  # a baseline twice as slow
        if one.arm == "autoregressive" and one.e2e_ns is not None and one.ttft_ns is not None:
            one.e2e_ns += one.e2e_ns - one.ttft_ns
    (path / "samples.jsonl").unlink()
    _put(path, samples)
    _, (found,) = best.findings(result)
    assert (found.cell, found.by) == ("bfloat16", "decode tok/s")
    assert "tok/s, 2." in found.text


def test_few_prompts_do_not_separate(tmp_path: Path) -> None:
    for name, ms in (("2", 8.0), ("4", 12.0)):
        samples = [sample(arm, n, tokens=9, step_ms=20.0 if arm == "autoregressive" else ms)
                   for n in range(3) for arm in ("autoregressive", "speculative")]  # fmt: skip
        _put(tmp_path / name, samples)
    cells = [sweep.Cell(name, {"draft_length": name}, Plan(out=tmp_path / name), "done") for name in ("2", "4")]
    _, (found,) = best.findings(sweep.SweepResult(tmp_path, cells, False))
    assert "too few prompts in common to tell it from speculative in 4" in found.text


def test_a_plan_that_no_cell_can_keep_is_refused() -> None:
    with pytest.raises(UsageError, match="--draft: no strategy of this sweep uses it"):
        sweep.cells(Plan(**TINY, draft="tiny-draft"), {"strategy": ["lookup"]}, Path("x"))


def test_the_best_setting_is_named_for_each_kind_of_hardware(tmp_path: Path) -> None:
    """Times of two machines are never set against each other: the slower one's best is not the faster one's second."""
    result = _result(tmp_path, {"2": 12.0, "4": 8.0, "8": 16.0, "16": 10.0})
    other = {"cpu": "Other CPU", "physical_cores": 2, "gpus": []}
    for name in ("8", "16"):
        RunFolder(tmp_path / name).write_manifest(manifest(finished="now", environment=other))
    summary, found = best.findings(result)
    assert [(one.cell, one.hardware, one.second) for one in found] == [
        ("4", "Test CPU (2 cores)", "speculative in 2"),
        ("16", "Other CPU (2 cores)", "speculative in 8"),
    ]
    assert found[1].text.startswith("toy on Other CPU (2 cores): best is speculative in 16, ")
    assert summary is not None
    assert [row.run for row in summary.compared] == ["4", "2", "16", "8"]
