"""Predicted beside measured: which profile fits a run, what its prices make of counted steps, where that is shown."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import arm, manifest, role, run, sample

from specbench.models.cost_curve import CostCurve
from specbench.results import compare as comparing
from specbench.results import comparison, forecasts, runs, tables
from specbench.results.metrics import Drafting
from specbench.results.prediction import Asked, Prices, Work, conditional_acceptance, replay
from specbench.results.records import RunFolder
from specbench.results.summary import ALL_TASKS, summarise

# three rounds of five; three drafts of four; eleven tokens read, on the line from two (3 ms) to 100 (50 ms)
SPECULATIVE = 12 * 20.0 / (3 * 28.0 + 3 * 4 * 2.0 + (3.0 + 9 * 47 / 98) - 2.0)


def curve(*milliseconds: float) -> CostCurve:
    """T(1), T(2), ..."""
    counts = tuple(range(1, len(milliseconds) + 1))
    return CostCurve(counts, (64,), (1,), np.array(milliseconds, dtype=float).reshape(-1, 1, 1))


def document(**changes: Any) -> dict[str, Any]:
    """A profile of the synthetic run's models: 20 ms a token, 28 ms for five; the draft 2 ms a token and half a
    millisecond for each token of a prompt."""
    target = {**role(), "spec": "tiny", "head_vocab": None, "reading": None,
              "curve": curve(20.0, 22.0, 24.0, 26.0, 28.0).as_record()}  # fmt: skip
    draft = {**role(), "spec": "tiny-draft", "head_vocab": None, "reading": {"tokens": 100, "ms": 50.0},
             "curve": curve(2.0, 3.0).as_record()}  # fmt: skip
    plain = {
        "format": forecasts.FORMAT, "made": "2030-01-02T03:04:05", "quick": False, "together": None,
        "identity": {"specbench": "1", "exact": False, "hardware": {"cpu": "Test CPU", "gpus": []}, "packages": {}},
        "models": {"target": target, "draft": draft},
    }  # fmt: skip
    return {**plain, **changes}


def facts(**changes: Any) -> dict[str, Any]:
    """The manifest of the synthetic run with what a real one has."""
    return {**manifest(), "prompts": [{"task": "toy", "id": "p0", "tokens": 10}], **changes}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache folder of profiles."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / forecasts.FOLDER
    folder.mkdir(parents=True)
    return folder


def keep(folder: Path, name: str = "one", **changes: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(document(**changes)))


# --- what the prices make of counted steps ---------------------------------------------------------------------------


def work(
    outcomes: dict[tuple[int, int], int], levels: list[list[int]] | None = None, asked: Asked | None = None, **more: Any
) -> Work:
    drafting = Drafting(
        Counter(outcomes), sum((accepted + 1) * count for (_, accepted), count in outcomes.items()), 0, levels or []
    )
    given: dict[str, Any] = dict(samples=1, prompt_tokens=10.0) | more
    return Work(drafting, asked=asked or forecasts.asked("speculative", drafting, 1, ()), **given)


PRICES = Prices({"target": curve(20.0, 22.0, 24.0, 26.0, 28.0), "draft": curve(2.0, 3.0)}, {"draft": (100.0, 50.0)})
PROMPT = 3.0 + 9 * 47 / 98 - 2.0  # eleven tokens at once, on the line from 2 to 100 tokens, beside a forward of one


def test_speculative_pays_for_its_drafts_its_blocks_and_the_prompt():
    """Two rounds of four tokens, one accepted whole, after which the draft reads two tokens at once."""
    found = replay("speculative", work({(4, 4): 1, (4, 1): 1}), PRICES)
    assert found == (7 * 20.0, pytest.approx(2 * 28.0 + 8 * 2.0 + (3.0 - 2.0) + PROMPT))


def test_a_draft_that_follows_its_target_pays_for_its_drafts_and_blocks_only():
    found = replay("speculative", work({(4, 4): 1, (4, 1): 1}, follows=["draft"]), PRICES)
    assert found == (7 * 20.0, pytest.approx(2 * 28.0 + 8 * 2.0))
    levels = [[4, 3, 3, 0], [4, 3, 0, 0]]
    asked = forecasts.asked("cascade", Drafting(), 1, [([(5, 4)], [levels])])
    roles: dict[str, Any] = {"level_roles": ["draft", None], "follows": ["draft"]}
    found = replay("cascade", work({(5, 4): 1}, levels, asked, **roles), PRICES)
    assert found is not None
    assert found[1] == pytest.approx(30.0 + 3 * 3.0)


def test_plain_decoding_is_predicted_to_be_itself_and_lookup_pays_for_its_blocks_only():
    assert replay("autoregressive", work({(0, 0): 5}), PRICES) == (100.0, 100.0)
    assert replay("lookup", work({(0, 0): 2, (4, 3): 1}), PRICES) == (6 * 20.0, 2 * 20.0 + 28.0)


def test_a_cascade_pays_for_the_forwards_of_its_levels():
    """Three forwards of the draft, which looked at three tokens of the n-grams; one n-gram token went to the target."""
    levels = [[4, 3, 3, 0], [4, 3, 0, 0]]
    asked = forecasts.asked("cascade", Drafting(), 1, [([(5, 4)], [levels])])
    found = replay("cascade", work({(5, 4): 1}, levels, asked, level_roles=["draft", None]), PRICES)
    assert found is not None
    assert found[1] == pytest.approx(30.0 + 3 * 3.0 + PROMPT)


def test_a_cascade_that_never_asked_its_draft_does_not_pay_for_the_prompt():
    levels = [[0, 0, 0, 0], [4, 3, 0, 0]]
    assert replay("cascade", work({(4, 3): 1}, levels, Asked(), level_roles=["draft", None]), PRICES) == (80.0, 28.0)
    assert replay("auto", work({(4, 3): 1}), PRICES) == (80.0, 28.0)  # without a draft there are no levels


def test_two_devices_are_predicted_by_the_policy_that_is_best_for_the_acceptance():
    plain, ours = replay("async", work({(4, 4): 9, (4, 2): 1}), PRICES)
    assert 1 < plain / ours < 5
    slowed = Prices(PRICES.curves, {}, (1.5, 1.5))
    assert replay("async", work({(4, 4): 9, (4, 2): 1}), slowed)[1] > ours
    assert replay("async", work({(0, 0): 4}), PRICES) is None  # nothing was drafted


@pytest.mark.parametrize("strategy", ["hf-assisted", "sparse-kv", "mine"])
def test_what_has_no_formula_has_no_prediction(strategy):
    assert replay(strategy, work({(4, 4): 1}), PRICES) is None


def test_no_prediction_without_costs_or_steps():
    assert replay("speculative", work({(4, 4): 1}), Prices({"target": curve(20.0)}, {})) is None
    assert replay("speculative", work({}), PRICES) is None
    assert replay("cascade", work({(4, 4): 1}, [[4, 4, 1, 0], [0, 0, 0, 0]]), PRICES) is None  # levels of nobody


def test_conditional_acceptance_ends_at_the_first_wrong_token():
    assert conditional_acceptance(work({(4, 4): 1, (4, 0): 1}).drafting) == 4 / 5
    assert conditional_acceptance(work({(0, 0): 3}).drafting) is None


# --- which profile ---------------------------------------------------------------------------------------------------


def test_a_profile_of_these_models_is_found_and_has_nothing_to_remark(cache):
    assert forecasts.find(facts()) is None
    keep(cache)
    kept = forecasts.find(facts())
    assert kept is not None
    assert kept.note == "predicted by the profile of 2030-01-02"


@pytest.mark.parametrize(
    "change", [{"fingerprint": "aa"}, {"dtype": "bfloat16"}, {"runtime": "transformers"}, {"threads": 1},
               {"device": "cuda:0"}, {"head_vocab": 8}], ids=str,
)  # fmt: skip
def test_another_target_dtype_runtime_or_place_does_not_fit(cache, change):
    plain = document()
    keep(cache, models={**plain["models"], "target": {**plain["models"]["target"], **change}})
    assert forecasts.find(facts()) is None


def test_a_profile_with_another_draft_still_tells_of_arms_without_one(cache):
    plain = document()
    keep(cache, models={**plain["models"], "draft": {**plain["models"]["draft"], "fingerprint": "aa"}})
    arms = [arm("autoregressive"), arm("lookup"),
            arm("speculative", roles={"target": role(), "draft": role(model="tiny-draft")})]  # fmt: skip
    names = tuple(one["name"] for one in arms)
    rows = {row.arm: row for row in summarise(facts(arms=arms), run(12, arms=names)).rows}
    assert rows["lookup"].profile_decode_speedup == 1.0  # it drafted nothing here
    assert rows["speculative"].profile_decode_speedup is None


def test_one_of_another_machine_or_other_versions_is_used_with_a_remark(cache):
    identity = document()["identity"]
    keep(cache, identity={**identity, "hardware": {"cpu": "Old CPU", "gpus": []}})
    kept = forecasts.find(facts())
    assert kept is not None
    assert "of another machine (Old CPU, the run on Test CPU)" in kept.note
    keep(cache, "two", made="2029-01-01", identity={**identity, "packages": {"torch": "2.0"}})
    environment = {"cpu": "Test CPU", "gpus": [], "packages": {"torch": "2.9"}, "cores": [0, 1]}
    found = forecasts._differences(document(identity={**identity, "packages": {"torch": "2.0"}}),
                                   facts(environment=environment, specbench="2"))  # fmt: skip
    assert list(found) == ["it was made with other cores of this machine",
                           "it was made with specbench 1, the run with 2, torch 2.0, the run with 2.9"]  # fmt: skip


def test_of_several_the_one_that_fits_best_is_taken(cache):
    identity = document()["identity"]
    keep(cache, "old", made="2020-01-01")
    keep(cache, "quick", made="2035-01-01", quick=True)
    keep(cache, "new", made="2031-01-01")
    keep(cache, "foreign", made="2039-01-01", identity={**identity, "hardware": {"cpu": "Other", "gpus": []}})
    kept = forecasts.find(facts())
    assert kept is not None
    assert kept.document["made"] == "2031-01-01"


def test_a_profile_that_knows_the_draft_as_well_comes_before_one_of_the_target_alone(cache):
    keep(cache, "pair", made="2020-01-01", quick=True)
    keep(cache, "target", made="2035-01-01", models={"target": document()["models"]["target"]})
    kept = forecasts.find(facts())
    assert kept is not None
    assert kept.document["made"] == "2020-01-01"


def test_what_is_no_profile_of_this_layout_is_passed_over(cache):
    keep(cache, format=forecasts.FORMAT - 1)
    (cache / "broken.json").write_text("{")
    (cache / "list.json").write_text("[]")
    (cache / "hardware.json").write_text(json.dumps(document(models={})))
    assert forecasts.find(facts()) is None


def test_batches_and_exact_runs_are_not_predicted_by_a_profile_of_something_else(cache):
    keep(cache)
    assert forecasts.find(facts(settings={**manifest()["settings"], "batch": 4})) is None
    assert forecasts.find(facts(plan={"exact": True})) is None


def test_levels_are_told_by_the_options():
    roles = {"target": role(), "draft": role(), "draft2": role()}
    assert forecasts.level_roles(arm("cascade", roles=roles), 3) == ["draft", "draft2", None]
    named = arm("cascade", roles=roles, options={"levels": ["draft:2", "ngram"]})
    assert forecasts.level_roles(named, 2) == ["draft2", None]
    assert forecasts.level_roles(arm("cascade", roles=roles, options={"levels": ["draft:small"]}), 1) is None
    assert forecasts.level_roles(arm("lookup"), 0) == []


def test_how_the_draft_model_was_asked_is_told_by_levels_where_it_may_be_bypassed():
    """Plain; a draft of two that is accepted whole; three tokens of n-grams; again a draft, of one forward that looked
    at two tokens of n-grams, with one more n-gram token behind it that is accepted, too."""
    steps = [(0, 0), (2, 2), (3, 1), (4, 4), (0, 0), (1, 0)]
    nothing = [0, 0, 0, 0]
    levels = [[[2, 2, 2, 9], nothing], [nothing, [3, 1, 0, 0]], [[3, 3, 1, 9], [3, 3, 0, 0]], [[1, 0, 1, 9], nothing]]
    found = forecasts.asked("cascade", Drafting(), 2, [(steps, levels), ([(3, 1)], None)])
    assert found == Asked(1, Counter({3: 2}), Counter({(2, 0): 1, (1, 2): 1, (1, 0): 1}))
    assert forecasts.asked("cascade", Drafting(), 1, [([(2, 1)], [[[2, 1]]])]) == Asked()  # an older record


def test_every_draft_token_is_asked_for_where_it_cannot_be_bypassed():
    drafting = work({(4, 4): 2, (4, 1): 1, (0, 0): 3}).drafting
    assert forecasts.asked("speculative", drafting, 2, ()) == Asked(2, Counter({1: 2}), Counter({(4, 0): 3}))


def test_what_a_strategy_does_beside_its_forwards_is_counted_with_every_forward():
    """Half a millisecond with each of the two reviews and eight draft tokens, a tenth with each plain token."""
    lean, busy = PRICES, Prices(PRICES.curves, PRICES.reading, beside_ms={"autoregressive": 0.1, "speculative": 0.5})
    rounds = work({(4, 4): 1, (4, 1): 1})
    (plain, ours), (more_plain, more) = replay("speculative", rounds, lean), replay("speculative", rounds, busy)
    assert more_plain - plain == pytest.approx(7 * 0.1)
    assert more - ours == pytest.approx(10 * 0.5)


# --- where it is shown -----------------------------------------------------------------------------------------------


def test_a_run_shows_it_beside_the_measured_speedup_in_every_output(cache):
    keep(cache)
    summary = summarise(facts(), run(12))
    rows = {row.arm: row for row in summary.rows}
    assert rows["speculative"].profile_decode_speedup == pytest.approx(SPECULATIVE)
    assert rows["autoregressive"].profile_decode_speedup is None
    assert "predicted by the profile of 2030-01-02" in summary.notes
    text = tables.to_markdown(summary)
    assert "predicted by profile" in text
    assert f"{SPECULATIVE:.2f}x" in text
    (line,) = [line for line in csv.DictReader(io.StringIO(tables.to_csv(summary))) if line["arm"] == "speculative"]
    assert float(line["profile_decode_speedup"]) == pytest.approx(SPECULATIVE)
    (row,) = [row for row in json.loads(tables.to_json(summary))["rows"] if row["arm"] == "speculative"]
    assert row["profile_decode_speedup"] == pytest.approx(SPECULATIVE)


def test_without_a_profile_nothing_is_shown(cache):
    summary = summarise(facts(), run(12))
    assert "predicted by profile" not in tables.to_markdown(summary)
    assert summary.notes == []


def test_all_tasks_together_are_predicted_too(cache):
    keep(cache)
    prompts = [{"task": task, "id": "p0", "tokens": 10} for task in ("one", "two")]
    rows = summarise(facts(prompts=prompts), run(12, tasks=("one", "two"))).rows
    (row,) = [row for row in rows if (row.task, row.arm) == (ALL_TASKS, "speculative")]
    assert row.profile_decode_speedup == pytest.approx(SPECULATIVE)


def put(path: Path, samples: list, **changes: Any) -> Path:
    folder = RunFolder(path)
    folder.write_manifest(facts(**changes))
    writer = folder.writer()
    writer.append(samples)
    writer.close()
    return path


def test_compare_shows_the_same_number_and_whose_profile_it_is(cache, tmp_path):
    keep(cache, identity={**document()["identity"], "hardware": {"cpu": "Old CPU", "gpus": []}})
    found = comparing.compare(runs.load([put(tmp_path / "one", run(12))]))
    (row,) = [row for row in found.rows if row.arm == "speculative"]
    assert row.profile_decode_speedup == pytest.approx(SPECULATIVE)
    assert any("of another machine" in note for note in found.notes)
    assert "predicted by profile" in comparison.render(found, "md")
    two = runs.load([put(tmp_path / "two", run(12)), tmp_path / "one"])
    assert [note.partition(":")[0] for note in comparing.compare(two).notes] == ["two", "one"]


def test_compare_predicts_against_plain_decoding_only(cache, tmp_path):
    """Against another arm the number would be of something else than the speed-up beside it."""
    keep(cache)
    found = comparing.compare(runs.load([put(tmp_path / "one", run(12))]), baseline="speculative")
    assert all(row.profile_decode_speedup is None for row in found.rows)


def test_a_sample_with_levels_is_counted_in_a_comparison_as_in_a_run(cache, tmp_path):
    keep(cache)
    arms = [arm("autoregressive"), arm("cascade", roles={"target": role(), "draft": role(model="tiny-draft")})]
    samples = [sample("autoregressive", number, tokens=9) for number in range(6)]
    for number in range(6):
        levels = [[[4, 3, 2, 100], [2, 2, 0, 0]]] * 2 if number % 2 else [[[0, 0, 0, 0], [4, 3, 0, 0]]] * 2
        samples.append(sample("cascade", number, steps=((4, 4, 3),) * 2, levels=levels))
    (ours,) = [row for row in summarise(facts(arms=arms), samples).rows if row.arm == "cascade"]
    found = comparing.compare(runs.load([put(tmp_path / "one", samples, arms=arms)]))
    (theirs,) = [row for row in found.rows if row.arm == "cascade"]
    assert ours.profile_decode_speedup == pytest.approx(theirs.profile_decode_speedup)
    # 12 rounds of 28 ms; 12 forwards of the draft over two tokens on average; three prompts
    assert ours.profile_decode_speedup == pytest.approx(6 * 8 * 20 / (12 * 28 + 12 * 3.0 + 3 * PROMPT), rel=0.02)
