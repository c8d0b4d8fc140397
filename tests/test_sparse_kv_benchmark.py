"""The benchmark of `sparse-kv`: a grid that is measured bit by bit, and what it makes of given times."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not part of the wheel")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("sparse_kv")


def test_cells_are_added_to_what_is_there_and_what_is_there_is_kept(benchmark, tmp_path, capsys):
    out = tmp_path / "grid.json"
    words = ["--target", "tiny", "--dtype", "float32", "--threads", "1", "--max-new-tokens", "8", "--budgets", "64",
             "--gammas", "2", "--selections", "snapkv", "--arms", "snapkv", "--json", "--out", str(out)]  # fmt: skip
    assert benchmark.main([*words, "--cells", "150x1"]) == 0
    (first,) = json.loads(capsys.readouterr().out)["cells"]
    assert benchmark.main([*words, "--cells", "150x1,200x2"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert "150 x 1: measured before" in said.err
    assert document == json.loads(out.read_text())
    assert document["cells"][0] == first
    assert [(cell["context"], cell["batch"]) for cell in document["cells"]] == [(150, 1), (200, 2)]
    arm = document["cells"][1]["arms"]["sparse-kv snapkv 64 x2"]
    assert arm["exact"] == arm["outputs"] == 2
    measured = arm["measured_terms_ms"]
    assert sum(measured.values()) == pytest.approx(arm["step_ms"])
    assert min(measured[name] for name in ("draft", "verify", "select", "follow")) > 0
    assert arm["terms_ms"]["select"] > 0
    samples = (tmp_path / "grid.samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * (1 + 2)  # arms, rows
    assert {json.loads(line)["batch_rows"] for line in samples} == {1, 2}

    before = out.read_text()
    assert benchmark.main([*words, "--cells", "150x1,90x1", "--max-new-tokens", "9"]) == 2
    assert "another max_new_tokens; name another --out" in capsys.readouterr().err
    assert out.read_text() == before
    assert benchmark.main([*words, "--cells", "150x1", "--max-new-tokens", "9"]) == 2  # though there is nothing to add
    assert "another max_new_tokens; name another --out" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["8000", "8000x", "x1", "8000x1x1", "0x1", "8000x0", "8000x1,"])
def test_cells_that_are_none_are_refused(benchmark, wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(["--target", "tiny", "--cells", wrong])
    assert "--cells" in capsys.readouterr().err


def test_without_cells_every_context_goes_with_every_batch(benchmark):
    args = benchmark.parse(["--target", "tiny", "--contexts", "10,20", "--batches", "1,2"])
    assert args.cells == [(10, 1), (10, 2), (20, 1), (20, 2)]


def test_a_self_draft_plays_over_a_small_cache_as_well(benchmark, tmp_path, capsys):
    out = tmp_path / "cell.json"
    words = ["--target", "tiny", "--draft", "self:int8", "--dtype", "float32", "--threads", "1", "--budgets", "64,512"]
    words += ["--gammas", "2", "--selections", "snapkv", "--refresh", "8", "--ngram", "--arms", "draft model"]
    assert benchmark.main([*words, "--max-new-tokens", "8", "--cells", "150x1", "--json", "--out", str(out)]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    fixed = "sparse-kv draft model snapkv 64 x2"
    others = [f"{fixed} refresh", f"{fixed} ngram", "sparse-kv draft model auto"]
    assert list(cell["arms"]) == ["autoregressive", fixed, *others]
    assert cell["arms"][f"{fixed} ngram"]["exact"] == 1
    assert cell["arms"][fixed]["exact"] == 1
    assert cell["arms"][fixed]["measured_terms_ms"]["follow"] > 0, "of the target's cache"
    told = benchmark.table(json.loads(out.read_text()))
    assert len({line.index(" tok/s") for line in told.splitlines() if " tok/s" in line}) == 1
