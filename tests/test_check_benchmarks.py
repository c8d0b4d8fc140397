"""The benchmarks that hold our own figures against something: what they make of given numbers, and a small run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import MS, sample

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are not part of the wheel")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


# --- hardware_check --------------------------------------------------------------------------------------------------


def rate(name: str, kind: str, ratio: float | None, against: str = "C") -> dict[str, Any]:
    return {"rate": name, "threads": 1, "kind": kind, "against": against, "ratio": ratio}


def test_a_figure_is_held_against_its_fastest_peer_and_below_its_limit(benchmark):
    judged = benchmark("hardware_check").judged
    good = [rate("float32", "peer", 0.97, "BLAS"), rate("float32", "peer", 1.3, "slow"), rate("float32", "limit", 0.87)]
    assert judged(good, 0.1) == []
    (text,) = judged([rate("float32", "peer", 0.85, "BLAS"), *good[1:]], 0.1)
    assert text == "float32, 1 threads: 0.85 of BLAS, further from it than 10%"
    assert "limit" in judged([rate("int8", "limit", 1.1)], 0.1)[0]
    # A slow peer is no reproach where a limit says how much there is to be had, and the only measure where none does.
    assert judged([rate("int8", "peer", 1.6), rate("int8", "limit", 0.9)], 0.1) == []
    assert "read" in judged([rate("read", "peer", 1.6)], 0.1)[0]
    assert judged([rate("int8", "peer", None)], 0.1) == []  # there is no such product here


# --- prediction ------------------------------------------------------------------------------------------------------


def test_what_auto_spends_on_trying_is_the_time_of_its_first_rounds(benchmark):
    """Two rounds of 30 ms that made three tokens, where plain decoding takes 20 ms for each: nothing lost, nor won."""
    choosing = benchmark("prediction").choosing
    base = [sample("autoregressive", tokens=8, step_ms=20)]
    facts = {"choice": "lookup", "trial_rounds": 2, "switches": 1, "calibration_ms": 12.0}
    ours = [sample("auto", steps=((1, 0, 0), (2, 4, 1), (4, 4, 3)), step_ms=30, facts=facts)]
    found = choosing(ours, base)
    assert found == {"chosen": {"lookup": 1}, "switches": 1, "trials_lost_share": 0.0, "calibration_ms": 12.0}
    assert ours[0].e2e_ns - ours[0].ttft_ns == 90 * MS


def test_the_summary_counts_cells_and_names_the_furthest(benchmark):
    def task(*ratios: float) -> dict[str, Any]:
        plain = {"exact": 1, "outputs": 1, "speedup": 1.0}
        arms = {f"s{n}": {**plain, "predicted": r, "from_other_half": [1.0, 1.3]} for n, r in enumerate(ratios)}
        return {"arms": {**arms, "auto": {**plain, "speedup": 1.5}},
                "auto": {"over_best_single": 0.98, "calibration_ms": 900.0}}  # fmt: skip

    module = benchmark("prediction_cells")
    tasks = {"a": task(1.05, 0.8), "b": task(0.95, 1.2)}
    others = [{"task": "a", "arm": "duo", "predicted": 2.0, "speedup": 2.1}]
    found = module.summary(module.cells_of({"tasks": tasks, "also": others}), tasks, 0.1)
    assert (found["cells"], found["share_within"], found["exact"]) == (5, 0.6, True)
    assert found["share_within_by_strategy"] == {"s0": 1.0, "s1": 0.0, "duo": 1.0}
    assert found["share_within_from_other_half"] == 0.5
    assert (found["furthest"]["task"], found["furthest"]["arm"]) == ("a", "s1")
    assert found["furthest"]["predicted_over_measured"] == 0.8
    assert (found["auto_worst_over_best_single"], found["auto_worst_over_plain"]) == (0.98, 1.5)


def test_cells_of_other_benchmarks_are_speedups_over_plain_decoding(benchmark, tmp_path):
    also = benchmark("prediction_cells").also
    simulated = {
        name: {"predicted_tokens_per_s": 22.0, "measured_tokens_per_s": 20.0} for name in ("duo", "speculative 2")
    }
    two = {"benchmark": "two-devices", "tasks": {"toy": {"arms": {"autoregressive": {"decode_tokens_per_s": 10.0}},
                                                         "model": {"simulated": simulated}}}}  # fmt: skip
    arms = {"sparse-kv 8": {"predicted_speedup": 1.2, "speedup": 1.1}, "lookup": {"speedup": 1.0}}
    sparse = {"benchmark": "sparse-kv", "cells": [{"context": 4096, "batch": 2, "arms": arms}]}
    for name, document in (("two", two), ("sparse", sparse), ("none", [])):
        (tmp_path / name).write_text(json.dumps(document))
    assert also(f"{tmp_path / 'two'},{tmp_path / 'sparse'}") == [
        {"task": "toy", "arm": "duo", "predicted": 2.2, "speedup": 2.0},
        {"task": "4096 tokens, 2 row(s)", "arm": "sparse-kv 8", "predicted": 1.2, "speedup": 1.1},
    ]
    for name, words in (("none", "not a document of two-devices or sparse-kv"), ("missing", "cannot be read")):
        with pytest.raises(SystemExit, match=words):
            also(str(tmp_path / name))


def test_prices_are_the_medians_of_rounds(benchmark):
    def round_of(ms: float) -> dict[str, Any]:
        record = {"new_tokens": [1, 2], "contexts": [64, 384], "rows": [1], "median_ms": [[[ms], [2 * ms]]] * 2}
        read = {"new_tokens": [30, 50], "contexts": [1], "rows": [1], "median_ms": [[[10 * ms]], [[20 * ms]]]}
        return {"curves": {"target": record, "draft": record}, "reading": {"draft": read}}

    known = benchmark("prediction_costs").prices([round_of(ms) for ms in (1.0, 5.0, 2.0)], 30)
    assert (known.curves["target"].ms(1, 64), known.curves["draft"].ms(2, 384)) == (2.0, 4.0)
    assert known.reading == {"draft": (30.0, 20.0)}


def test_a_small_run_is_one_document_and_a_picture_and_goes_on_where_it_stopped(
    benchmark, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    prediction = benchmark("prediction")
    picture, out = tmp_path / "scatter.png", tmp_path / "found.json"
    words = ["--target", "tiny", "--draft", "tiny-draft", "--dtype", "float32", "--threads", "1",
             "--max-new-tokens", "12", "--lengths", "2", "--json", "--out", str(out)]  # fmt: skip
    assert prediction.main([*words, "--tasks", "bundled:code-writing=2"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert prediction.main([*words, "--tasks", "bundled:code-writing=2,bundled:chat=2", "--plot", str(picture)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert list(document["tasks"]) == ["bundled:code-writing", "bundled:chat"]
    for found in document["tasks"].values():
        arms = found["arms"]
        assert set(arms) == {"autoregressive", "speculative 2", "lookup", "cascade", "auto"}
        assert all(
            arm["predicted"] > 0 and len(arm["from_other_half"]) == 2 for name, arm in arms.items() if "low" in arm
        )
    speeds = [one["tasks"]["bundled:code-writing"]["arms"]["lookup"]["speedup"] for one in (first, document)]
    assert speeds[0] == speeds[1]  # not measured again
    assert set(document["beside_ms"]) == set(arms)
    assert document["summary"]["cells"] == 8
    assert document["summary"]["exact"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(prediction, "load_models", lambda prepared: pytest.fail("there is nothing left to measure"))
    assert prediction.main([*words, "--tasks", "bundled:chat=2"]) == 0
    with pytest.raises(SystemExit, match="another lengths; name another file"):
        prediction.main([*words, "--lengths", "3"])
