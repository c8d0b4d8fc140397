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
        arms = {f"s{n}": {"predicted_over_measured": r, "exact": 1, "outputs": 1} for n, r in enumerate(ratios)}
        arms["auto"] = {"speedup": 1.5, "exact": 1, "outputs": 1}
        return {"arms": arms, "auto": {"over_best_single": 0.98}}

    found = benchmark("prediction").summary({"a": task(1.05, 0.8), "b": task(0.95, 1.2)}, 0.1)
    assert (found["cells"], found["share_within"], found["exact"]) == (4, 0.5, True)
    assert found["furthest"] == {"task": "a", "arm": "s1", "predicted_over_measured": 0.8}
    assert found["auto_worst_over_best_single"] == 0.98


def test_a_small_run_is_one_document_and_a_picture(benchmark, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    main = benchmark("prediction").main
    picture = tmp_path / "scatter.png"
    words = ["--target", "tiny", "--draft", "tiny-draft", "--dtype", "float32", "--threads", "1", "--tasks",
             "bundled=2", "--max-new-tokens", "12", "--lengths", "2", "--json", "--plot", str(picture)]  # fmt: skip
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    arms = document["tasks"]["bundled"]["arms"]
    assert list(arms) == ["autoregressive", "speculative 2", "lookup", "cascade", "auto"]
    assert all(arm["predicted"] > 0 for name, arm in arms.items() if name != "autoregressive")
    assert document["summary"]["cells"] == 4
    assert document["summary"]["exact"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
