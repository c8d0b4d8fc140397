"""The hardware profile: curves within a time, bounds, predictions, the cache, the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import ModelError, PlacementError, UsageError
from specbench.hardware import devices, environment, probe, probe_workers
from specbench.hardware.cost_model import expected_tokens
from specbench.hardware.devices import available_cores
from specbench.hardware.probe_timing import Budget
from specbench.models.cost_curve import CostCurve
from specbench.results import calibration, prediction, profile, profile_models, profile_report
from specbench.results.plan import Plan
from specbench.strategies import registry

RATES = {"rate": 10.0, "low": 9.0, "high": 11.0, "best": 11.0, "operation": "torch.sum", "rounds": 3}
HARDWARE: dict[str, Any] = {
    "cpu": {
        "model": "toy", "architecture": "toy", "cores": [0], "cores_of_machine": 4, "physical_cores": 1,
        "threads_per_core": 1.0, "numa_nodes": 1, "cgroup_cpu_limit": 0.5, "instructions": ["AVX2"], "governor": None,
        "memory_bytes": 1 << 30, "memory_limit_bytes": 1 << 30,
        "caches": [{"level": 3, "kind": "unified", "bytes": 1 << 20, "shared_by": 1, "count": 1}],
    },
    "openmp": {"backend": "OpenMP", "libraries": ["libgomp"], "threads": 1, "interop_threads": 1, "variables": {}},
    "energy": {"rapl": None, "nvml": None, "why_not": {"rapl": "none"}},
    "busy_cores_before": 0.0,
    "memory": {"buffer_bytes": 1 << 24,
               "rates": [{"threads": 1, "read": RATES, "copy": RATES, "cache": {**RATES, "rate": 40.0}}]},
    "matrix": [{"dtype": "float32", "threads": 1, **RATES}, {"dtype": "int8", "threads": 1, "rate": None}],
    "gpus": [],
    "warnings": ["this machine is a toy"],
}  # fmt: skip
WORKERS = {
    "reason": None, "cores": [[0], [1]], "message": {"round_trip_us": 20.0, "p90_us": 30.0, "ids": 10, "samples": 99},
    "pairs": [{"first": "read", "second": "read", "alone": [1.0, 1.0], "together": [0.5, 0.5], "slower": [2.0, 2.0]}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """One cache folder for the models, emptied of profiles for each test."""
    folder = tmp_path_factory.getbasetemp() / "profile-cache"
    shutil.rmtree(folder / "profiles", ignore_errors=True)
    monkeypatch.setenv("SPECBENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def toy_machine(monkeypatch):
    """A machine whose rates are known; `probes` counts how often it was measured."""
    counted = SimpleNamespace(probes=0)

    def measured(*given):
        counted.probes += 1
        return json.loads(json.dumps(HARDWARE))

    monkeypatch.setattr(probe, "probe", measured)
    monkeypatch.setattr(probe_workers, "side_by_side", lambda *given: WORKERS)
    monkeypatch.setattr(profile_models, "QUICK_COUNTS", (1, 2, 4))
    monkeypatch.setattr(profile_models, "CONTEXT", 16)
    return counted


def curve(*milliseconds: float) -> CostCurve:
    """T(1), T(2), ..."""
    counts = tuple(range(1, len(milliseconds) + 1))
    return CostCurve(counts, (256,), (1,), np.array(milliseconds, dtype=float).reshape(-1, 1, 1))


FLAT = curve(*[10.0] * 17)  # verification is free


# --- predictions -----------------------------------------------------------------------------------------------------


def rows_of(pair: prediction.Pair, *names: str) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in prediction.predict(pair, names)}


def test_speculative_is_leviathans_formula_at_its_best_draft_length():
    row = rows_of(prediction.Pair(FLAT, [curve(1.0)]), "speculative")["speculative"]
    for cell in row["at"]:
        alpha, best = (
            cell["acceptance"],
            max((expected_tokens(cell["acceptance"], k) * 10 / (k + 10), k) for k in range(1, 17)),
        )
        assert cell["speedup"] == pytest.approx(best[0], abs=1e-4), alpha
        assert cell["setting"] == {"draft-length": best[1]}
    # one token of a tenth of the target's cost: 1 + alpha > 1.1
    assert row["break_even"] == pytest.approx(0.1, abs=0.01)
    assert row["pays"]


def test_lookup_drafts_for_nothing():
    row = rows_of(prediction.Pair(FLAT), "lookup")["lookup"]
    assert row["at"][0]["speedup"] == pytest.approx(expected_tokens(0.5, 16), abs=1e-4)
    assert row["break_even"] <= 0.001
    assert "finds a draft" in row["note"]


def test_a_dear_draft_never_pays_and_that_is_said():
    pair = prediction.Pair(curve(10.0, 20.0, 30.0, 40.0), [curve(10.0)])
    row = rows_of(pair, "speculative")["speculative"]
    assert row["break_even"] is None
    assert row["pays"] is False
    predicted = {"acceptances": [0.5, 0.7, 0.9], "strategies": [row], "context": 256, "rows": 1}
    assert any("will not pay here" in line for line in profile_report.predicted_lines(predicted))


def test_a_draft_longer_than_what_was_measured_is_not_advised():
    row = rows_of(prediction.Pair(curve(10.0, 10.0, 10.0), [curve(0.001)]), "speculative")["speculative"]
    assert row["at"][-1]["setting"] == {"draft-length": 2}


def test_two_devices_only_where_there_are_two():
    together, apart = (prediction.Pair(FLAT, [curve(4.0)], apart=apart) for apart in (False, True))
    assert "--place" in rows_of(together, "async")["async"]["note"]
    assert rows_of(together, "async")["async"]["at"] == []
    row = rows_of(apart, "async")["async"]
    assert row["at"][-1]["speedup"] > rows_of(apart, "speculative")["speculative"]["at"][-1]["speedup"]
    slowed = prediction.Pair(FLAT, [curve(4.0)], apart=True, factors=(1.5, 1.5))
    assert rows_of(slowed, "async")["async"]["at"][-1]["speedup"] < row["at"][-1]["speedup"]


def test_a_draft_as_slow_as_the_target_can_be_predicted_too():
    """Its lead neither grows nor shrinks, whatever it is: there must still be one answer."""
    row = rows_of(prediction.Pair(FLAT, [curve(10.0)], apart=True), "async")["async"]
    assert all(0.5 < cell["speedup"] < 2 for cell in row["at"])


def test_disturbed_curves_are_predicted_in_finite_time():
    """The search for the best policy once went round in circles on a curve that fell."""
    generator = np.random.default_rng(0)
    for _ in range(8):
        ms = 10 * np.exp(generator.normal(0, 0.5, 13))
        pair = prediction.Pair(curve(*ms), [curve(10 ** generator.uniform(-1, 1.3))], apart=True)
        for row in prediction.predict(pair, ("async", "duo")):
            assert all(cell["speedup"] > 0 for cell in row["at"])


def test_cascade_without_acceptance_below_is_dearer_and_without_drafts_is_not_there():
    assert rows_of(prediction.Pair(FLAT), "cascade", "speculative")["cascade"]["at"] == []
    row = rows_of(prediction.Pair(FLAT, [FLAT]), "cascade")["cascade"]
    # the draft costs what the target costs, but reviews what a lookup drafts for nothing
    assert row["at"][-1]["speedup"] > 1


def test_only_strategies_that_exist_are_predicted():
    assert rows_of(prediction.Pair(FLAT), "nothing-of-the-kind") == {}
    names = [row["strategy"] for row in prediction.predict(prediction.Pair(FLAT, [FLAT]), registry.names())]
    assert names == [name for name in registry.names() if name in prediction.FORECASTS]
    assert "speculative" in names


@pytest.mark.parametrize(("even", "found"), [(0.37, 0.37), (0.0, 0.0), (1.0, 1.0)])
def test_break_even_is_where_the_speedup_is_one(even, found):
    assert prediction.break_even(lambda alpha: 1 + alpha - even) == pytest.approx(found, abs=0.001)


def test_what_never_breaks_even_has_none():
    assert prediction.break_even(lambda alpha: 0.5 + alpha / 3) is None


# --- curves and bounds -----------------------------------------------------------------------------------------------


class Slow:
    """A model of 5 ms per forward, on a clock that only it moves."""

    name, context_length, max_rows, vocab_size = "slow", 8192, 4, 7

    def __init__(self, ms: float = 5.0) -> None:
        self.ms, self.ns, self.asked = ms, 0, []
        self.last: int | None = None

    def now(self) -> int:
        return self.ns

    def cost(self, new_tokens, context=256, rows=1, repeats=7, last=None) -> CostCurve:
        self.asked.append((context, rows))
        self.last = last
        self.ns += int((repeats + 1) * len(new_tokens) * self.ms * rows * (1 + context / 1000) * 1e6)
        values = np.full((len(new_tokens), 1, 1), self.ms * rows) + np.reshape(new_tokens, (-1, 1, 1)) / 100
        return CostCurve(tuple(new_tokens), (context,), (rows,), values)


@pytest.fixture
def slow(monkeypatch) -> Slow:
    model = Slow()
    monkeypatch.setattr(profile_models, "cost_of", lambda model, **grid: model.cost(**grid))
    return model


def test_a_prompt_is_read_with_no_more_logits_than_the_longest_block_has(slow):
    """Its cost and the block's lie on one line; with logits after all of it the head is a third of a small draft."""
    assert profile_models.reading(slow, 32) == {"tokens": profile_models.PROMPT, "ms": 5 + profile_models.PROMPT / 100}
    assert slow.last == 32


def test_with_time_the_whole_grid_is_measured(slow):
    found, further, left_out = profile_models.curve_within(slow, 1e6, Budget(1e6, clock=slow))
    assert (found.contexts, found.rows, further, left_out) == ((256, 1024, 4096), (1, 4), [], [])
    assert found.new_tokens == profile_models.FULL_COUNTS
    assert found.ms(2, 1024, 4) == pytest.approx(20.02)


def test_a_quick_curve_has_one_context_and_a_short_model_a_shorter_one(slow):
    found, _, _ = profile_models.curve_within(slow, 1e6, Budget(1e6, quick=True, clock=slow))
    assert (found.contexts, found.rows) == ((256,), (1,))
    slow.context_length = 100
    assert profile_models.curve_within(slow, 1e6, Budget(1e6, quick=True, clock=slow))[0].contexts == (84,)


def test_it_stops_early_with_what_is_there_and_says_so(slow):
    found, _, left_out = profile_models.curve_within(slow, 5.5, Budget(20.0, clock=slow))
    assert found.contexts == (256, 1024)
    assert found.rows == (1,)
    assert "4096 tokens of context" in left_out[0]
    assert slow.ns < 6e9
    slow.ms, slow.ns = 5000.0, 0
    found, _, left_out = profile_models.curve_within(slow, 3.0, Budget(10.0, clock=slow))
    assert found.new_tokens == (1, 2, 4, 8, 16)
    assert "5000 ms" in left_out[0] or "5040 ms" in left_out[0]


def test_rows_that_were_not_measured_for_every_context_are_a_curve_of_their_own():
    """They do not fit into the grid, and were once dropped with it."""
    parts = {(256, 1): curve(1.0, 2.0), (1024, 1): curve(3.0, 4.0), (256, 4): curve(5.0, 6.0)}
    joined, further = profile_models._joined(parts)
    assert (joined.contexts, joined.rows) == ((256, 1024), (1,))
    assert joined.ms(2, 1024) == 4
    (more,) = further
    assert (more.contexts, more.rows, more.ms(2, 256, 4)) == ((256,), (4,), 6)


def test_what_there_was_no_time_for_costs_nothing_that_was_measured(slow):
    """Everything that was asked of the model is in what comes back."""
    for seconds in (3.0, 6.0, 12.0, 25.0, 60.0, 200.0):
        slow.ns, slow.asked = 0, []
        found, further, _ = profile_models.curve_within(slow, seconds, Budget(1e6, clock=slow))
        told = {(context, rows) for one in (found, *further) for context in one.contexts for rows in one.rows}
        assert told == set(slow.asked[1:]), seconds  # the first forward is only to see how slow it is


def test_rows_beyond_the_grid_are_in_the_table_and_in_the_chart():
    record = curve(1.0, 2.0).as_record()
    more = {**record, "contexts": [256], "rows": [4], "median_ms": [[[5.0]], [[6.0]]]}
    model = {"spec": "toy", "curve": {**record, "contexts": [256]}, "further": [more]}
    table = profile_report.curves_table({"target": model})
    assert [list(column.cells) for column in table.columns[1:4]] == [["256", "256"], ["1", "4"], ["1.00", "5.00"]]
    pytest.importorskip("matplotlib")
    panel = profile_report._panel("target", model)
    assert [line.label for line in panel.curves] == ["256 tokens of context", "256 tokens of context, 4 rows"]


def test_a_curve_that_falls_is_doubtful_and_one_that_is_level_is_not():
    (text,) = profile_models.cautions(curve(10.0, 12.0, 6.0, 20.0))
    assert "3 new tokens took 0.60 times" in text
    assert profile_models.cautions(curve(10.0, 9.8, 12.0)) == []


def test_bytes_of_a_cached_token():
    """SmolLM2-135M: 30 layers of 3 KV heads of 64, keys and values, bfloat16."""
    config = SimpleNamespace(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    config.get_text_config = lambda decoder: config
    assert profile_models.kv_bytes_per_token(config, "bfloat16") == 2 * 30 * 3 * 64 * 2
    assert (
        profile_models.kv_bytes_per_token(SimpleNamespace(get_text_config=lambda decoder: object()), "float32") is None
    )


def test_the_bound_is_bytes_over_bandwidth_of_where_they_fit():
    rates = profile_models.bandwidth(HARDWARE, "cpu", 1)
    assert rates == {"memory": 10.0, "cache": 40.0, "cache_bytes": 1 << 20}
    big = profile_models.bound(curve(20.0), 100, 90_000_000, 100_000, rates)
    assert big == {"context": 100, "bytes": 100_000_000, "from": "memory", "bound_ms": 10.0, "measured_ms": 20.0,
                   "fraction": 0.5}  # fmt: skip
    small = profile_models.bound(curve(1.0), 100, 400_000, None, rates)
    assert (small["from"], small["bound_ms"]) == ("cache", 0.01)
    gpu = {**HARDWARE, "gpus": [{"device": "cuda:0", "read": {"rate": 4000.0}}]}
    assert profile_models.bandwidth(gpu, "cuda:0", None)["memory"] == 4000.0


def test_energy_is_null_where_there_is_no_counter(slow):
    if profile_models.EnergyMeter("cpu").joules() is None:
        assert profile_models.joules_per_token(slow, "cpu", curve(5.0), Budget(10.0, clock=slow)) is None


# --- the profile and its cache ---------------------------------------------------------------------------------------

TINY = Plan(target="tiny", draft="tiny-draft", threads=1)


def test_a_profile_holds_what_the_documentation_says(toy_machine):
    found = profile.profile(TINY, True, quick=True)
    document = found.document
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(found.path.read_text())
    assert set(document) == {
        "format", "specbench", "made", "quick", "took_s", "identity", "hardware", "models", "together", "cost_ratio",
        "predicted",
    }  # fmt: skip
    target, draft = document["models"]["target"], document["models"]["draft"]
    assert target["weight_bytes"] > draft["weight_bytes"] > 0
    assert target["curve"]["new_tokens"] == [1, 2, 4]
    assert target["bound"][0]["bytes"] == target["weight_bytes"] + 16 * target["kv_bytes_per_token"]
    assert target["bound"][0]["fraction"] > 0
    assert document["cost_ratio"] == {"draft": round(draft["one_token_ms"] / target["one_token_ms"], 4)}
    assert document["together"] is None
    assert document["predicted"]["label"].startswith("predicted")
    assert str(document["identity"]).count("/") == 0  # no path of this machine


def test_the_second_time_nothing_is_measured(toy_machine):
    first = profile.profile(TINY, True, quick=True)
    second = profile.profile(TINY, True, quick=True)
    assert (first.cached, second.cached, toy_machine.probes) == (False, True, 1)
    assert second.document == json.loads(json.dumps(first.document))
    assert not profile.profile(TINY, True, quick=True, fresh=True).cached
    assert toy_machine.probes == 2


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"draft": None}, {"draft": "self:int8"}, {"runtime": "transformers"}], ids=str
)
def test_other_models_or_precision_are_another_profile(toy_machine, change):
    profile.profile(TINY, True, quick=True)
    settings = {"target": "tiny", "draft": "tiny-draft", "threads": 1, **change}
    assert not profile.profile(Plan(**settings), True, quick=True).cached
    assert toy_machine.probes == 2


def test_a_full_profile_serves_a_quick_question_and_not_the_other_way(toy_machine, monkeypatch):
    monkeypatch.setattr(profile_models, "FULL_COUNTS", (1, 2))
    hardware = Plan(threads=1)
    profile.profile(hardware, False, quick=True)
    assert not profile.profile(hardware, False).cached
    found = profile.profile(hardware, False, quick=True)
    assert found.cached
    assert not found.document["quick"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": {}}'])
def test_a_file_that_is_no_profile_is_measured_again(toy_machine, text):
    path = profile.profile(Plan(threads=1), False, quick=True).path
    path.write_text(text)
    assert not profile.profile(Plan(threads=1), False, quick=True).cached
    assert profile.profile(Plan(threads=1), False, quick=True).cached


def test_an_unwritable_cache_costs_the_file_and_nothing_else(toy_machine, own_cache):
    own_cache.mkdir(exist_ok=True)
    (own_cache / "profiles").write_text("in the way")
    try:
        found = profile.profile(Plan(threads=1), False, quick=True)
    finally:
        (own_cache / "profiles").unlink()
    assert found.path is None
    assert found.document["hardware"]["cpu"]["model"] == "toy"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"place": "cpu:9999"}, PlacementError, "not there"),
        ({"place": "gpu"}, PlacementError, "not a device"),
        ({"place": "target=cpu,judge=cpu"}, PlacementError, "not a role"),
        ({"threads": 4096}, PlacementError, "threads"),
        ({"place": "target=cpu,draft=cpu"}, UsageError, "no model for draft"),
        ({"draft_quant": "int4", "draft": "tiny-draft", "runtime": "transformers"}, UsageError, "packed"),
        ({"target": "smol"}, ModelError, "unknown model"),
        ({"draft": "./nowhere"}, ModelError, "nowhere"),
    ],
    ids=str,
)
def test_nonsense_is_refused_before_anything_is_measured(toy_machine, settings, error, words):
    with pytest.raises(error, match=words):
        profile.profile(Plan(**{"target": "tiny", **settings}), True, quick=True)
    assert toy_machine.probes == 0


def test_a_gpu_that_is_not_there_is_refused(toy_machine):
    with pytest.raises(PlacementError, match="not there"):
        profile.profile(Plan(place="cuda:63"), False)
    assert toy_machine.probes == 0


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*words: str):
    return CliRunner().invoke(app, ["profile-hardware", *words], env={"COLUMNS": "200"})


def test_json_is_one_document_and_the_rest_goes_to_stderr(toy_machine):
    done = invoke("-t", "tiny", "-d", "tiny-draft", "--threads", "1", "--quick", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["models"]["draft"]["spec"] == "tiny-draft"
    assert "looking up target tiny" in done.stderr
    again = invoke("-t", "tiny", "-d", "tiny-draft", "--threads", "1", "--quick", "--json")
    assert json.loads(again.stdout)["made"] == json.loads(done.stdout)["made"]
    assert "--fresh measures anew" in again.stderr


def test_the_report_ends_with_predictions_that_say_so(toy_machine):
    done = invoke("-t", "tiny", "-d", "tiny-draft", "--threads", "1", "--quick", "-q")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    for words in ("limited to the time of 0.5", "no counter can be read", "T(n)/T(1)", "predicted at 0.7",
                  "breaks even at", "predicted, not measured", "needs the draft on a device of its own",
                  "warning: this machine is a toy", "read memory, GB/s"):  # fmt: skip
        assert words in done.stdout, words


def test_hardware_alone_has_no_models_in_its_report(toy_machine):
    done = invoke("--threads", "1", "--quick")
    assert done.exit_code == 0
    assert "a message of 10 ids" in done.stdout
    assert "predicted" not in done.stdout


def test_out_gets_the_document_and_the_curves(toy_machine, tmp_path):
    pytest.importorskip("matplotlib")
    done = invoke("-t", "tiny", "--threads", "1", "--quick", "--out", str(tmp_path / "new" / "folder"))
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {"profile.json", "cost-curves.png", "cost-curves.svg"}
    assert (tmp_path / "new/folder/cost-curves.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_curves_are_refused_before_measuring(toy_machine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = invoke("-t", "tiny", "--threads", "1", "--quick", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "matplotlib" in done.stderr
    assert toy_machine.probes == 0
    assert invoke("--threads", "1", "--quick", "--out", str(tmp_path)).exit_code == 0  # there are no curves


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--place", "cpu:9999"], "not there"),
        (["--draft", "tiny-draft"], "needs --target"),
        (["-t", "tiny", "-o", "draft.head-vocab=8"], "draft"),
        (["-t", "tiny", "--dtype", "float8"], "float8"),
    ],
    ids=str,
)
def test_usage_errors_are_one_line(toy_machine, words, said):
    done = invoke("--quick", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert toy_machine.probes == 0


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['specbench', 'profile-hardware', '--help']\n"
        "from specbench.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def on_cores(cores: list[int], code: str) -> subprocess.CompletedProcess[bytes]:
    """Runs Python code on these cores only: under `taskset` where there is one, else with the affinity that it sets."""
    words = [sys.executable, "-c", code]
    if shutil.which("taskset"):
        words = ["taskset", "-c", ",".join(map(str, cores)), *words]
    else:
        words[-1] = f"import os; os.sched_setaffinity(0, {cores})\n{code}"
    return subprocess.run(words, capture_output=True, timeout=300)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_on_one_core_for_real(own_cache):
    """Rates of one thread, nothing side by side, and no more cores than that."""
    code = (
        "import sys\n"
        "from specbench.hardware import probe_rates, probe_timing\n"
        "probe_timing.QUICK_SECONDS, probe_rates._SMALLEST = 3.0, 4 << 20\n"
        "probe_rates.buffer_bytes = lambda caches, memory: 4 << 20\n"
        "sys.argv = ['specbench', 'profile-hardware', '-t', 'tiny', '-d', 'tiny-draft', '--quick', '--json', '-q']\n"
        "from specbench.cli import app\n"
        "app()"
    )
    done = on_cores([available_cores()[-1]], code)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["hardware"]["cpu"]["cores"] == [available_cores()[-1]]
    assert [row["threads"] for row in document["hardware"]["memory"]["rates"]] == [1]
    assert "two cores" in document["hardware"]["workers"]["reason"]
    assert document["models"]["target"]["threads"] == 1


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_with_fewer_cores_a_place_on_the_others_is_refused():
    ours, other = available_cores()[:2]
    code = (
        "import sys; sys.argv = ['specbench', 'profile-hardware', '-t', 'tiny', '-d', 'tiny-draft', '--quick',\n"
        f"    '--place', 'target=cpu:{ours},draft=cpu:{other}']\n"
        "from specbench.cli import app\n"
        "app()"
    )
    done = on_cores([ours], code)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"cpu:{other}" in done.stderr.decode()


def test_in_a_container_its_share_of_time_is_what_threads_go_by(toy_machine, monkeypatch, tmp_path):
    """A cgroup that allows the time of one core: one thread, and another profile than without it."""
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    limited = devices.cgroup_cpu_limit(tmp_path)
    profile.profile(Plan(), False, quick=True)
    for module in (devices, environment):
        monkeypatch.setattr(module, "cgroup_cpu_limit", lambda: limited)
    found = profile.profile(Plan(), False, quick=True)
    assert not found.cached or len(available_cores()) == 1
    assert found.document["identity"]["hardware"]["cgroup_cpu_limit"] == 1.0
    assert found.document["identity"]["threads"] == {"target": 1}
    if len(available_cores()) > 1:
        first, second = available_cores()[:2]
        place = f"target=cpu:{first},draft=cpu:{second}"
        with pytest.raises(PlacementError, match="cores"):
            profile.profile(Plan(target="tiny", draft="tiny-draft", place=place), True)


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_draft_on_cores_of_its_own_for_real(toy_machine):
    first, second = available_cores()[:2]
    plan = Plan(target="tiny", draft="tiny-draft", place=f"target=cpu:{first},draft=cpu:{second}")
    before = os.sched_getaffinity(0)
    try:
        document = profile.profile(plan, True, quick=True).document
    finally:
        os.sched_setaffinity(0, before)
    assert document["models"]["draft"]["device"] == f"cpu:{second}"
    assert document["together"]["target_factor"] >= 1
    rows = {row["strategy"]: row for row in document["predicted"]["strategies"]}
    if "async" in rows:
        assert rows["async"]["at"]


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch):
    """Answers of twelve tokens."""
    monkeypatch.setattr(calibration, "NEW_TOKENS", 12)


def test_calibration_ends_in_one_recommendation(toy_machine, brief):
    words = ("-t", "tiny", "-d", "tiny-draft", "--threads", "1", "--quick", "--calibrate", "bundled", "--limit", "5")
    done = invoke(*words, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["calibration"]
    assert (found["task"], found["prompts"], found["max_new_tokens"]) == ("bundled", 5, 12)
    rows = {row["strategy"]: row for row in found["strategies"]}
    assert set(rows) == {"lookup", "speculative", "cascade"}
    speculative = rows["speculative"]
    assert 0 < speculative["acceptance"] < 1
    assert speculative["judged"] > 10
    assert speculative["predicted"]["low"] <= speculative["predicted"]["speedup"] <= speculative["predicted"]["high"]
    assert speculative["setting"]["draft-length"] in (1, 2, 3)  # no longer block was measured
    assert speculative["measured"]["speedup"] > 0
    assert "draft tokens were judged" in speculative["doubt"]
    assert found["recommended"]["strategy"] in {"autoregressive", *rows}
    report = invoke(*words, "-q").stdout
    assert "Recommended for bundled, 5 prompts:" in report
    assert report.count("Recommended") == 1


def test_calibration_is_not_kept_in_the_cache(toy_machine, brief):
    words = ("-t", "tiny", "--threads", "1", "--quick", "--json")
    assert invoke(*words, "--calibrate", "bundled", "--limit", "1").exit_code == 0
    assert "calibration" not in json.loads(invoke(*words).stdout)
    assert toy_machine.probes == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--calibrate", "bundled"], "needs --target"),
        (["-t", "tiny", "--calibrate", "bundeld"], 'did you mean "bundled"'),
        (["-t", "tiny", "--calibrate", "bundled", "--limit", "0"], "at least 1"),
        (["-t", "tiny", "--calibrate", "bundled", "-o", "humaneval.path=x"], "humaneval"),
    ],
    ids=str,
)
def test_calibrations_that_cannot_be_are_refused_before_anything_is_measured(toy_machine, words, said):
    done = invoke("--quick", *words)
    assert (done.exit_code, toy_machine.probes) == (2, 0)
    assert said in done.stderr


def test_the_calibrations_run_has_every_strategy_that_the_places_allow():
    cores = available_cores()
    plain = calibration.plan_of(Plan(target="tiny"), "bundled", 3)
    assert (plain.strategy, plain.limit, plain.trace) == (("lookup",), 3, 0)
    paired = calibration.plan_of(TINY, "bundled", 3)
    assert paired.strategy == ("lookup", "speculative", "cascade")
    assert paired.options["speculative"] == {"draft-length": calibration.KNOWN_LENGTH}
    if len(cores) > 1:
        apart = Plan(target="tiny", draft="tiny-draft", place=f"target=cpu:{cores[0]},draft=cpu:{cores[1]}")
        assert {"async", "duo"} < set(calibration.plan_of(apart, "bundled", 3).strategy)


def row(strategy: str, speedup: float, low: Any = None, high: Any = None, **more: Any) -> dict[str, Any]:
    predicted = {"speedup": speedup, "low": low, "high": high}
    return {"strategy": strategy, "setting": {}, "predicted": predicted, "doubt": None, **more}


def lines(rows: list[dict[str, Any]]) -> str:
    found = {"task": "toy", "prompts": 8, "recommended": calibration.recommend(rows)}
    return " ".join(profile_report.calibration_lines(found))


def test_the_best_is_recommended_with_its_interval():
    text = lines([row("lookup", 1.2, 1.1, 1.3), row("speculative", 1.9, 1.7, 2.1, setting={"draft-length": 5})])
    assert "speculative (draft-length 5), predicted 1.90x [1.70, 2.10]" in text
    assert "told apart" not in text


def test_overlapping_intervals_cannot_be_told_apart():
    text = lines([row("lookup", 1.8, 1.1, 2.4), row("speculative", 1.9, 1.7, 2.1), row("cascade", 1.2, 1.1, 1.3)])
    assert "cannot be told apart from lookup:" in text
    text = lines([row("speculative", 1.2, 0.9, 1.6)])
    assert "cannot be told apart from plain decoding" in text


def test_plain_decoding_is_recommended_where_nothing_pays():
    text = lines([row("lookup", 1.0, 0.98, 1.02), row("speculative", 0.8, 0.7, 0.9)])
    assert "plain decoding" in text
    assert "rule out" not in text
    assert "rule out speculative" in lines([row("speculative", 1.0, 0.7, 1.4)])
    nothing = {"strategy": "lookup", "setting": {}, "predicted": None, "doubt": "nothing was drafted"}
    assert "plain decoding" in lines([nothing])


def test_a_doubtful_recommendation_says_so():
    text = lines([row("speculative", 1.9, 1.7, 2.1, doubt="only 40 draft tokens were judged")])
    assert "Not to be trusted yet: only 40 draft tokens were judged" in text


@pytest.mark.parametrize(
    ("judged", "alpha", "predicted", "words"),
    [
        (0, None, None, "nothing was drafted"),
        (500, 0.8, None, "costs"),
        (99, 0.8, {"low": 1.0}, "only 99 draft tokens"),
        (500, 0.8, {"low": None}, "fewer than 5 prompts"),
        (500, 0.8, {"low": 1.0}, None),
    ],
)
def test_what_makes_a_calibration_doubtful(judged, alpha, predicted, words):
    doubt = calibration._doubt(judged, alpha, predicted)
    assert doubt is None if words is None else words in doubt


def test_the_length_that_is_advised_follows_the_acceptance_that_was_measured():
    known = prediction.Prices({"target": FLAT, "draft": curve(1.0)}, {})
    longer, gain = calibration.best_length(0.9, 2, known, 256)
    assert longer > 6
    assert gain > 1.3
    assert calibration.best_length(0.0, 1, known, 256) == (1, 1.0)
    assert calibration.best_length(None, 1, known, 256) == (1, 1.0)
