"""From records to the rows of a table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import MS, arm, failed, manifest, role, run, sample
from work import calls

from specbench.errors import MeasurementError, RunFolderError
from specbench.results.records import Sample
from specbench.results.statistics import Caution
from specbench.results.summary import ALL_TASKS, Row, Summary, summarise


def _row(summary: Summary, name: str, task: str = "toy") -> Row:
    return next(row for row in summary.rows if (row.arm, row.task) == (name, task))


def _codes(summary: Summary) -> set[str]:
    return {caution.code for caution in summary.cautions}


def test_a_run_becomes_one_row_per_task_and_arm_and_one_for_all_tasks() -> None:
    summary = summarise(manifest(), run(12, 2, tasks=("toy", "other")))
    assert [(row.task, row.arm) for row in summary.rows] == [
        (task, name) for task in ("toy", "other", ALL_TASKS) for name in ("autoregressive", "speculative")
    ]
    row = _row(summary, "speculative")
    assert (row.prompts, row.n_ok, row.n_failed) == (12, 24, 0)
    assert row.decode_speedup is not None
    assert row.decode_speedup.value == pytest.approx(12 * 20 / 90, rel=0.02)
    assert row.decode_speedup.low is not None
    assert row.decode_speedup.low < row.decode_speedup.value
    assert row.e2e_speedup is not None
    assert row.e2e_speedup.value == pytest.approx(280 / 130, rel=0.02)
    assert row.tokens_per_step == 4
    assert row.accepted_per_step == 3
    assert row.acceptance_rate == 0.75
    assert row.acceptance_by_position == [1, 1, 1, 0]
    assert row.ttft_p50_ns == 40 * MS
    assert row.latency_p99_ns is None
    assert row.models == {"target": "tiny", "draft": "tiny-draft"}
    together = _row(summary, "speculative", ALL_TASKS)
    assert (together.prompts, together.n_ok) == (24, 48)
    assert together.sums["decode_ns"] == sum(
        _row(summary, "speculative", task).sums["decode_ns"] for task in ("toy", "other")
    )
    baseline = _row(summary, "autoregressive")
    assert baseline.baseline
    assert baseline.decode_speedup is None
    assert _codes(summary) == set()


def test_the_baseline_comes_first_whatever_the_order_of_the_arms() -> None:
    names = ("lookup", "autoregressive", "speculative")
    summary = summarise(manifest(*map(arm, names)), run(12, 2, arms=names))
    assert [row.arm for row in summary.rows] == ["autoregressive", "lookup", "speculative"]


def test_one_task_has_no_row_for_all_tasks() -> None:
    assert {row.task for row in summarise(manifest(), run(12)).rows} == {"toy"}


def test_all_definitions_and_their_sums_are_stored() -> None:
    """M3: whoever counts differently can: every ratio follows from sums that are in the file."""
    row = _row(summarise(manifest(), run(12)), "speculative")
    sums = row.sums
    assert row.tokens_per_step == sums["decode_tokens"] / sums["steps"]
    assert row.accepted_per_step == sums["accepted"] / sums["steps"]
    assert row.acceptance_rate == sums["accepted"] / sums["drafted"]
    assert row.tpot_ns == sums["decode_ns"] / sums["decode_tokens"]
    assert {"empty_steps", "wasted", "ttft_ns", "e2e_ns", "wall_ns"} <= set(sums)


def test_acceptance_needs_no_trace_and_no_verbosity() -> None:
    """M5: acceptance comes from the records that every run writes."""
    samples = [one for one in run(12) if one.kind == "measure"]
    assert _row(summarise(manifest(), samples), "speculative").acceptance_rate == 0.75


@pytest.mark.parametrize("samples", [[], [failed("autoregressive"), failed()], [sample(kind="trace")]])
def test_nothing_measured_is_an_error_and_never_a_row_of_zeros(samples: list[Sample]) -> None:
    """M8."""
    with pytest.raises(MeasurementError, match="nothing measured"):
        summarise(manifest(), samples)


def test_the_first_error_is_named_when_everything_failed() -> None:
    """M8."""
    with pytest.raises(MeasurementError, match="all 2 samples failed, the first with: StrategyError: no more"):
        summarise(manifest(), [failed("autoregressive"), failed()])


def test_an_arm_that_failed_everywhere_has_a_row_of_nulls_and_a_count() -> None:
    """M8, M9: never 0 tok/s, never NaN."""
    samples = [sample("autoregressive", n) for n in range(12)] + [failed(prompt=n) for n in range(12)]
    summary = summarise(manifest(), samples)
    row = _row(summary, "speculative")
    assert (row.n_ok, row.n_failed, summary.n_failed) == (0, 12, 12)
    numbers = (row.decode_tokens_per_s, row.ttft_p50_ns, row.decode_speedup, row.acceptance_rate, row.tokens_per_step)
    assert numbers == (None,) * 5
    assert "failed" in _codes(summary)
    assert "NaN" not in json.dumps(summary.to_dict(), allow_nan=False)


def test_a_failed_sample_leaves_both_arms() -> None:
    """M9: the prompt that failed was the slow one; the speed-up must not profit from it."""
    samples = [sample("autoregressive", n, tokens=9, step_ms=20) for n in range(11)]
    samples += [sample(prompt=n, tokens=9, step_ms=20) for n in range(11)]
    samples += [sample("autoregressive", 11, tokens=9, step_ms=2000), failed(prompt=11)]
    summary = summarise(manifest(), samples)
    row = _row(summary, "speculative")
    assert row.decode_speedup is not None
    assert row.decode_speedup.value == 1
    assert (row.n_ok, row.n_failed) == (11, 1)
    assert summary.n_failed == 1


def test_a_slower_arm_says_why() -> None:
    """M1, M6: more tokens per step than plain decoding, and yet slower: the trace shows where the time went."""
    samples = run(12, slow_draft=True) + [_traced("autoregressive", 20, 0), _traced("speculative", 35, 15)]
    row = _row(summarise(manifest(), samples), "speculative")
    assert row.decode_speedup is not None
    assert row.decode_speedup.value < 1
    assert row.decode_speedup.verdict == "slower"
    assert row.cause is not None
    assert "a step takes 1.75 times a plain one (draft 0.75, verify 0.90, other 0.10)" in row.cause
    assert "drafting took 43 % of the time" in row.cause
    assert "acceptance 0.00" in row.cause
    assert row.trace is not None
    assert row.trace["draft_ns_per_step"] == 15 * MS
    assert row.trace["verify_ns_per_step"] == 18 * MS
    assert row.predicted_decode_speedup == pytest.approx(20 / 35)
    assert row.trace["cost_ratio"] == pytest.approx(15 / 18)


def _traced(name: str, step_ms: int, draft_ms: int) -> Sample:
    one = sample(name, steps=((1, 4, 0),) * 4, step_ms=step_ms, ttft_ms=40, kind="trace")
    starts = [step[0] - step_ms * MS for step in one.steps[1:]]
    forwards = {"target": [[0, 39 * MS, 1, 10]]}
    forwards["target"] += [[at + draft_ms * MS, at + (draft_ms + 18) * MS, 1, 5] for at in starts]
    if draft_ms:
        forwards["draft"] = [[at, at + draft_ms * MS, 1, 1] for at in starts]
    return dataclasses.replace(one, forwards=forwards)


def test_a_slower_arm_without_a_trace_says_what_its_counts_say() -> None:
    """M6."""
    row = _row(summarise(manifest(), run(12, slow_draft=True)), "speculative")
    assert row.cause == "1.00 tokens per step; acceptance 0.00"


def test_traced_samples_never_feed_a_speed() -> None:
    plain = summarise(manifest(), run(12))
    traced = summarise(manifest(), [*run(12), _traced("speculative", 3500, 15)])
    assert _row(plain, "speculative").decode_speedup == _row(traced, "speculative").decode_speedup
    assert _row(plain, "speculative").n_ok == _row(traced, "speculative").n_ok


def test_outputs_of_unequal_length_are_left_out_and_flagged() -> None:
    """M2: greedy arms should emit the same tokens; one that ends early is not faster for it."""
    samples = run(12)
    short = next(at for at, one in enumerate(samples) if one.arm == "speculative")
    samples[short] = sample(prompt=0, steps=((4, 4, 3),), step_ms=1)
    summary = summarise(manifest(), samples)
    row = _row(summary, "speculative")
    assert row.decode_speedup is not None
    assert row.decode_speedup.prompts == 11
    assert not row.decode_speedup.per_token
    assert "length" in _codes(summary)


@pytest.mark.parametrize(
    ("facts", "settings", "per_token"),
    [
        ({}, {}, False),
        ({}, {"temperature": 1.0}, False),  # coupled: the very tokens of plain decoding
        ({}, {"temperature": 1.0, "verify": "rejection"}, True),
        ({"lossless": False}, {}, True),
        ({"engine": "transformers"}, {"temperature": 1.0}, True),
        ({"engine": "transformers"}, {}, False),
    ],
)
def test_times_are_compared_per_token_where_other_tokens_are_expected(
    facts: dict[str, Any], settings: dict[str, Any], per_token: bool
) -> None:
    summary = summarise(manifest(arm("autoregressive"), arm("speculative", **facts), settings=settings), run(12))
    speedup = _row(summary, "speculative").decode_speedup
    assert speedup is not None
    assert speedup.per_token == per_token


def test_losslessness_is_counted_and_added_over_tasks() -> None:
    first = {"prompt_id": "p3", "turn": 0, "index": 5, "top_gap": 0.001, "gap": 0.001, "near_tie": True}
    counts = {"exact": 11, "near_tie": 1, "different": 0, "compared": 12, "first": [first]}
    report = {"toy": {"speculative": counts}, "other": {"speculative": counts | {"exact": 10, "different": 1}}}
    summary = summarise(manifest(lossless=report), run(12, tasks=("toy", "other")))
    assert _row(summary, "speculative").exactness == counts
    together = _row(summary, "speculative", ALL_TASKS).exactness
    assert together is not None
    assert (together["exact"], together["near_tie"], together["different"], together["compared"]) == (21, 2, 1, 24)
    assert len(together["first"]) == 2
    (caution,) = [caution for caution in summary.cautions if caution.code == "different-tokens"]
    assert (caution.task, caution.value) == ("other", 1)


def test_outputs_that_were_not_all_compared_are_not_called_exact_in_silence() -> None:
    """C10: 5/5 exact of 12 samples is not 12/12."""
    counts = {"exact": 5, "near_tie": 0, "different": 0, "compared": 5, "first": []}
    summary = summarise(manifest(lossless={"toy": {"speculative": counts}}), run(12))
    (caution,) = [caution for caution in summary.cautions if caution.code == "not-compared"]
    assert "only 5 of 12 outputs were compared" in caution.text


def test_a_run_cut_short_says_that_its_arms_were_not_measured_alike() -> None:
    """C10."""
    summary = summarise(manifest(), run(12)[:-1])
    (caution,) = [caution for caution in summary.cautions if caution.code == "missing"]
    assert caution.value == 1


def test_few_prompts_and_single_repeats_are_warned_of() -> None:
    """C15: numbers from too few samples carry their n and a warning."""
    assert {"few-prompts", "one-repeat"} <= _codes(summarise(manifest(), run(9)))
    assert not {"few-prompts", "one-repeat"} & _codes(summarise(manifest(), run(10, 2)))


def test_more_threads_than_cores_are_warned_of_with_the_number() -> None:
    """M7."""
    roles = {"target": role(), "draft": role(device="cpu:1", threads=6)}
    arms = [arm("autoregressive"), arm("speculative", roles=roles)]
    (caution,) = [c for c in summarise(manifest(*arms), run(12)).cautions if c.code == "threads"]
    assert "8 threads on 2 physical cores" in caution.text
    assert caution.arm == "speculative"


def test_a_machine_that_was_busy_beforehand_is_warned_of() -> None:
    """M7: others' work on the same cores decides who wins, and is not in the times."""
    assert "busy" in _codes(summarise(manifest(load_at_start=1.6), run(12)))
    assert "busy" not in _codes(summarise(manifest(load_at_start=0.4), run(12)))


def test_an_arm_that_uses_two_devices_has_its_speedup_per_device() -> None:
    roles = {"target": role(device="cuda:0"), "draft": role(device="cpu:0")}
    arms = [arm("autoregressive", roles={"target": role(device="cuda:0")}), arm("speculative", roles=roles)]
    gpus = [{"device": "cuda:0", "name": "GPU X"}, {"device": "cuda:1", "name": "GPU Y"}]
    environment = {"cpu": "Test CPU", "physical_cores": 8, "gpus": gpus}
    summary = summarise(manifest(*arms, environment=environment), run(12))
    row = _row(summary, "speculative")
    assert row.devices == ["cuda:0", "cpu:0"]
    assert row.decode_speedup is not None
    assert row.decode_speedup_per_device == row.decode_speedup.value / 2
    assert "GPU X + Test CPU (8 cores)" in summary.title[0]
    assert "GPU Y" not in summary.title[0]


def test_a_check_that_says_something_else_betrays_state_between_prompts() -> None:
    check = sample("speculative", 0, steps=((4, 4, 3),) * 3, kind="check")
    assert "state" not in _codes(summarise(manifest(), [*run(12), check]))
    other = dataclasses.replace(check, token_ids=[99] * 13)
    assert "state" in _codes(summarise(manifest(), [*run(12), other]))


def test_what_makes_numbers_incomparable_is_a_watermark() -> None:
    arms = [arm("autoregressive"), arm("speculative", lossless=False)]
    watermarks = summarise(manifest(*arms, settings={"ignore_eos": True}), run(12)).watermarks
    assert [line.split()[0] for line in watermarks] == ["EOS", "LOSSY:"]
    assert summarise(manifest(), run(12)).watermarks == []


def test_without_a_baseline_there_are_no_speedups() -> None:
    summary = summarise(manifest(arm("speculative"), baseline=None), run(12, arms=("speculative",)))
    row = _row(summary, "speculative")
    assert row.decode_speedup is None
    assert row.decode_tokens_per_s is not None


def test_samples_of_an_arm_that_the_manifest_does_not_name_are_refused() -> None:
    with pytest.raises(RunFolderError, match='the arm "stranger", the manifest does not'):
        summarise(manifest(), [sample("stranger")])


def test_an_interrupted_run_says_so() -> None:
    assert "interrupted" in _codes(summarise(manifest(interrupted=True), run(12)))


def test_an_arm_that_cannot_report_its_drafts_is_not_said_to_have_drafted_nothing() -> None:
    arms = [arm("autoregressive"), arm("speculative", engine="transformers", reports_drafts=False)]
    samples = [sample("autoregressive", n, tokens=9) for n in range(12)]
    samples += [sample(prompt=n, tokens=9, step_ms=30) for n in range(12)]
    row = _row(summarise(manifest(*arms), samples), "speculative")
    assert row.cause == "1.00 tokens per step"


def test_title_says_what_was_measured_on_what() -> None:
    title = summarise(manifest(), run(12)).title
    assert title[0] == "tiny, float32, packed, Test CPU (2 cores), cpu, 2 threads"
    assert title[1] == "draft: tiny-draft"
    assert title[2] == "greedy, at most 64 new tokens, batch 1, 1 repeat, chat template"
    sampled = summarise(manifest(settings={"temperature": 0.6, "top_p": 0.9, "raw": True}), run(12)).title
    assert sampled[2].startswith("temperature 0.6, top-p 0.9, coupled verification, seed 0")
    assert sampled[2].endswith("raw prompts")
    turns = summarise(manifest(replayed_answers_of="autoregressive"), run(12)).title
    assert turns[-1] == "later turns of a conversation follow the answers of autoregressive in all arms"


def test_a_summary_takes_the_same_work_per_record_however_many_there_are_and_stays_small() -> None:
    """C4: the summary does not grow with the run (100,000 records take about 5 s)."""
    proto = {one.arm: one for one in run(1, noise=0)}
    work = []
    for prompts in (50, 500):
        samples = [
            dataclasses.replace(proto[name], task=task, prompt_id=f"p{prompt}", prompt_hash=f"h{prompt}", repeat=repeat)
            for task in ("toy", "other")
            for repeat in range(5)
            for prompt in range(prompts)
            for name in proto
        ]
        summary, count = calls(lambda samples=samples: summarise(manifest(), samples))
        work.append(count / len(samples))
        assert len(json.dumps(summary.to_dict())) < 50_000
    assert work[1] <= 1.05 * work[0] < 300


def test_every_field_of_a_summary_and_of_a_sample_is_documented() -> None:
    """docs/files.md is complete: whoever adds a field describes it."""
    path = Path(__file__).parents[1] / "docs" / "files.md"
    if not path.exists():
        pytest.skip("the documentation is not beside the tests")
    text = path.read_text(encoding="utf-8")
    traced = [*run(12), _traced("autoregressive", 20, 0), _traced("speculative", 35, 15)]
    data = summarise(manifest(), traced).to_dict()
    names = set(data) | set(data["rows"][1]) | set(data["rows"][1]["decode_speedup"]) | set(data["rows"][1]["sums"])
    names |= {name for name in data["rows"][1]["trace"] if not name.endswith(("_share", "_per_step"))}
    names |= {field.name for kind in (Sample, Caution) for field in dataclasses.fields(kind)}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_warning_is_documented() -> None:
    folder = Path(__file__).parents[1]
    path = folder / "docs" / "metrics.md"
    if not path.exists():
        pytest.skip("the documentation is not beside the tests")
    codes = set(re.findall(r"`([a-z-]+)`", str(Caution.__doc__)))
    assert len(codes) > 10
    assert [code for code in sorted(codes) if f"`{code}`" not in path.read_text(encoding="utf-8")] == []
