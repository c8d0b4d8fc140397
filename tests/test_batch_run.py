"""A run in batches: prompts go through the rows of a call one after another, and nothing measured is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_run import Interrupting, keys, plan

from specbench.errors import UsageError
from specbench.results import metrics, tables
from specbench.results import run as runs
from specbench.results.listener import Listener
from specbench.results.plan import Plan
from specbench.results.records import RunFolder, Sample
from specbench.strategies.lookup import Lookup

# Single letters end an answer, so that the random models stop after other lengths than their limit.
BATCH = dict(batch=2, limit=9, max_new_tokens=12, stop=("e", "t", "A"))


def measured(folder: Path, arm: str | None = None) -> list[Sample]:
    samples = RunFolder(folder).samples()
    return [one for one in samples if one.kind == "measure" and arm in (None, one.arm)]


def by_prompt(samples: Sequence[Sample]) -> dict[tuple[str, int], list[int]]:
    return {(one.prompt_id, one.turn): one.token_ids for one in samples}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> runs.RunResult:
    out = tmp_path_factory.mktemp("batches") / "run"
    names = ("speculative", "lookup", "cascade")
    return runs.run(plan(out, strategy=names, draft="tiny-draft", trace=1, warmup=1, **BATCH))


def test_every_output_is_the_one_of_a_run_without_batches(finished, tmp_path):
    """Second turns included, which follow the baseline's first answer."""
    alone = runs.run(plan(tmp_path / "alone", **(BATCH | {"batch": 1})))
    one_by_one = by_prompt(measured(alone.folder, "autoregressive"))
    assert len({len(ids) for ids in one_by_one.values()}) > 3
    for arm in ("autoregressive", "speculative", "lookup", "cascade"):
        assert by_prompt(measured(finished.folder, arm)) == one_by_one, arm
    assert finished.failures == []


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.7, seed=4)], ids=["greedy", "sampled"])
def test_outputs_are_exact_in_bfloat16(tmp_path, how):
    names = ("speculative", "lookup", "cascade")
    result = runs.run(
        plan(tmp_path / "run", strategy=names, draft="tiny-draft", dtype="bfloat16", **(BATCH | {"batch": 3} | how))
    )
    counts = result.manifest["lossless"]["bundled"]
    assert all(counts[arm]["exact"] == counts[arm]["compared"] == 11 for arm in names)


def test_rows_are_taken_up_by_the_next_prompts_and_the_records_say_when(finished):
    for arm in ("autoregressive", "speculative", "lookup", "cascade"):
        firsts = [one for one in measured(finished.folder, arm) if one.turn == 0]
        calls = metrics.calls(firsts)
        assert sorted(len(rows) for rows in calls) == [1, 8]  # four prompts a row, then what is left
        (rows,) = (rows for rows in calls if len(rows) == 8)
        assert {one.batch_rows for one in rows} == {2}
        assert sum(one.admitted_ns is None for one in rows) == 2
        ends = [(one.admitted_ns or 0) + metrics.e2e_ns(one) for one in rows]
        assert {one.admitted_ns for one in rows} - {None} <= set(ends)
        assert {one.call_ns for one in rows} == {max(ends)}
        assert {one.call_tokens for one in rows} == {sum(map(metrics.emitted, rows))}
        assert all(metrics.defects(one) == [] for one in rows)
        (single,) = (rows[0] for rows in calls if len(rows) == 1)
        assert (single.batch_rows, single.call_ns, single.admitted_ns) == (1, None, None)


def test_arms_take_turns_call_by_call(finished):
    firsts = [one for one in measured(finished.folder) if one.turn == 0]
    calls = list(dict.fromkeys((one.group, one.arm) for one in firsts))
    assert len(calls) == 8
    assert {arm for _, arm in calls[:4]} == {arm for _, arm in calls[4:]}
    assert calls[0][1] != calls[4][1]


def test_traced_calls_replace_no_rows(finished):
    """So the split of time is that of decoding."""
    traced = [one for one in RunFolder(finished.folder).samples() if one.kind == "trace"]
    assert len(traced) == 2 * 4
    assert all(one.admitted_ns is None and one.forwards for one in traced)


def test_the_table_gives_throughput_and_the_latency_of_a_row(finished):
    summary = finished.summary
    names = [column.name for column in tables.build(summary).columns]
    assert {"throughput tok/s", "throughput speed-up", "row latency p50 / p90 s"} <= set(names)
    assert "latency p50 / p90 s" not in names
    assert "batching" not in names  # all of them replace rows
    assert "batch 2 (8 prompts a call)" in summary.title[-2]
    for row in summary.rows:
        samples = measured(finished.folder, row.arm)
        assert row.continuous
        assert row.throughput_tokens_per_s == pytest.approx(metrics.throughput_tokens_per_s(samples))
        assert row.throughput_tokens_per_s > row.e2e_tokens_per_s  # rows work side by side
        if row.baseline:
            base = row.throughput_tokens_per_s
        else:
            assert row.throughput_speedup.value == pytest.approx(row.throughput_tokens_per_s / base)


def test_a_strategy_that_replaces_no_rows_runs_in_groups_and_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Lookup, "continuous", False)
    result = runs.run(plan(tmp_path / "run", **BATCH))
    groups = metrics.calls([one for one in measured(result.folder, "lookup") if one.turn == 0])
    assert sorted(len(rows) for rows in groups) == [1, 2, 2, 2, 2]
    assert all(one.admitted_ns is None for rows in groups for one in rows)
    assert by_prompt(measured(result.folder, "lookup")) == by_prompt(measured(result.folder, "autoregressive"))
    table = tables.build(result.summary)
    at = [column.name for column in table.columns].index("batching")
    assert [cells[at] for cells in table.groups[0].cells] == ["continuous", "in groups"]


def test_how_many_prompts_a_call_takes_up_can_be_said(tmp_path):
    result = runs.run(plan(tmp_path / "run", batch_prompts=3, **BATCH))
    calls = metrics.calls([one for one in measured(result.folder, "lookup") if one.turn == 0])
    assert [len(rows) for rows in calls] == [3, 3, 3]
    assert result.manifest["settings"]["batch_prompts"] == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(batch=4, batch_prompts=3), "--batch-prompts 3: at least --batch 4"),
        (dict(batch_prompts=8), "--batch-prompts 8: is of a batch; give --batch, too"),
        (dict(batch=2, batch_prompts=0), "--batch-prompts 0: at least 1"),
    ],
)
def test_nonsense_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Plan(**settings)


# Nothing is lost


def breaking(error: BaseException, after: int, times: int = 1) -> Callable:
    """A `generate` that breaks off after so many steps, the first few times."""
    generate, calls = Lookup.generate, []

    def broken(self, requests, sampling):
        calls.append(1)
        for number, step in enumerate(generate(self, requests, sampling)):
            if number == after and len(calls) <= times:
                raise error
            yield step

    return broken


def test_a_failure_in_the_middle_fails_what_was_in_a_row_and_the_rest_runs(tmp_path, monkeypatch):
    """Two prompts fail, those before them are kept, those behind them get a call of their own; all are counted."""
    whole = by_prompt(measured(runs.run(plan(tmp_path / "whole", **BATCH)).folder, "lookup"))
    with monkeypatch.context() as patch:
        patch.setattr(Lookup, "generate", breaking(RuntimeError("out of memory"), after=30))
        result = runs.run(plan(tmp_path / "run", **BATCH))
    samples = measured(result.folder, "lookup")
    failed = [one for one in samples if not one.ok]
    assert [one.error for one in failed] == ["RuntimeError: out of memory"] * 2
    assert len({one.group for one in failed}) == 1
    before = [one for one in samples if one.ok and one.group == failed[0].group]
    assert before
    assert all(one.drain_ns is None and one.call_ns for one in before)
    assert {one.group for one in samples if one.turn == 0} > {failed[0].group}
    assert all(whole[key] == ids for key, ids in by_prompt([one for one in samples if one.ok]).items())
    assert len([one for one in samples if one.turn == 0]) == 9
    assert result.summary.n_failed == 2
    again = runs.run(plan(tmp_path / "run", resume=True, **BATCH))
    assert again.summary.n_failed == 0
    assert by_prompt(measured(again.folder, "lookup")) == whole
    assert max(keys(again.folder).values()) == 1


def test_a_strategy_that_always_fails_ends_and_every_prompt_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(Lookup, "generate", breaking(RuntimeError("no"), after=0, times=99))
    result = runs.run(plan(tmp_path / "run", **BATCH))
    samples = measured(result.folder, "lookup")
    assert all(one.error == "RuntimeError: no" for one in samples)
    assert len([one for one in samples if one.turn == 0]) == 9


def test_ctrl_c_in_the_middle_of_a_call_keeps_what_had_ended(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Lookup, "generate", breaking(KeyboardInterrupt(), after=30))
        result = runs.run(plan(tmp_path / "run", **BATCH))
    assert result.interrupted
    kept = measured(result.folder, "lookup")
    assert 0 < len(kept) < 8
    assert all(one.ok for one in kept)
    again = runs.run(plan(tmp_path / "run", resume=True, **BATCH))
    assert not again.interrupted
    assert Counter(one.ok for one in measured(again.folder)) == {True: 2 * len(measured(again.folder, "lookup"))}
    assert max(keys(again.folder).values()) == 1
    assert by_prompt(measured(again.folder, "lookup")) == by_prompt(measured(again.folder, "autoregressive"))
    # What was on record stays as it was measured; its call's time and tokens are with it.
    stays = {one.prompt_id: one for one in measured(again.folder, "lookup") if one.turn == 0}
    assert all(stays[one.prompt_id] == one for one in kept)


def test_resume_in_the_middle_measures_the_rest_in_the_company_it_would_have_had(tmp_path):
    out = tmp_path / "run"
    whole = runs.run(plan(out, **BATCH))
    complete, tokens = keys(out), by_prompt(measured(out, "lookup"))
    samples = RunFolder(out).samples()
    dropped = [one for one in samples if one.arm == "lookup" and one.kind == "measure" and one.turn == 0][2:5]
    RunFolder(out).rewrite([one for one in samples if one.key not in {gone.key for gone in dropped}])
    again = runs.run(plan(out, resume=True, **BATCH))
    assert keys(out) == complete
    assert by_prompt(measured(out, "lookup")) == tokens
    fresh = [one for one in measured(out, "lookup") if one.key in {gone.key for gone in dropped}]
    assert len({one.group for one in fresh}) == 1
    # They ran beside the others of their call, whose second measurement is not on record; what it came to is.
    call = [one for one in samples if one.arm == "lookup" and one.group == dropped[0].group and one.kind == "measure"]
    assert len(call) == 8
    assert {one.call_tokens for one in fresh} == {sum(map(metrics.emitted, call))}
    assert again.manifest["lossless"] == whole.manifest["lossless"]


def test_interrupted_between_calls_a_run_goes_on(tmp_path):
    out = tmp_path / "run"
    first = runs.run(plan(out, **BATCH), Interrupting(after=3))
    assert first.interrupted
    there = keys(out)
    runs.run(plan(out, resume=True, **BATCH))
    assert there.items() <= keys(out).items()
    assert len(measured(out, "lookup")) == len(measured(out, "autoregressive")) > 9


def test_a_prompt_that_does_not_fit_takes_no_row(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["hello", "word " * 9000, "hi", "good day", "how are you", "so long"]
    lines = [f'{{"id": "{number}", "prompt": "{text}"}}\n' for number, text in enumerate(texts)]
    file.write_text("".join(lines))
    settings = BATCH | dict(task=("jsonl",), options={"jsonl": {"path": str(file)}})
    result = runs.run(plan(tmp_path / "run", **settings))
    for arm in ("autoregressive", "lookup"):
        samples = measured(result.folder, arm)
        assert [one.prompt_id for one in samples if not one.ok] == ["1"]
        (rows,) = metrics.calls([one for one in samples if one.ok])
        assert sorted(one.prompt_id for one in rows) == ["0", "2", "3", "4", "5"]


def test_progress_hears_of_every_sample_once(tmp_path):
    heard: list[Sample] = []

    class Hearing(Listener):
        def sample(self, samples):
            assert samples
            heard.extend(samples)

    runs.run(plan(tmp_path / "run", **BATCH), Hearing())
    assert [one.key for one in heard] == [one.key for one in RunFolder(tmp_path / "run").samples()]
