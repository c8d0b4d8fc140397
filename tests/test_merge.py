"""`specbench merge`: which runs become one, which are refused and why, and that nothing is counted twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import arm, failed, manifest, role, run
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import RunFolderError, UsageError
from specbench.results import merge as merging
from specbench.results.records import RunFolder, Sample
from specbench.results.runs import SWEEP, load
from specbench.results.summary import summarise

PLAN = {"target": "tiny", "strategy": ["speculative"], "task": ["toy"], "limit": 16, "repeats": 1, "options": {}}


def site(path: Path, samples: list[Sample] | None = None, prompts: range = range(12), **facts: Any) -> Path:
    """A run folder as a site sends it: by default a run of 12 prompts, with other times for each folder."""
    seed = sum(map(ord, path.name))
    samples = samples if samples is not None else shifted(run(len(prompts), seed=seed), prompts.start)
    listed = [{"task": "toy", "id": f"p{number}", "hash": f"h{number}", "tokens": 10} for number in prompts]
    given = {"plan": PLAN, "prompts": listed, "specbench": "1", "started": f"2030-01-0{1 + seed % 9}", "finished": "x",
             **facts}  # fmt: skip
    folder = RunFolder(path)
    folder.write_manifest(manifest(**given))
    folder.rewrite(samples)
    return path


def shifted(samples: list[Sample], by: int) -> list[Sample]:
    for one in samples:
        number = int(one.prompt_id[1:]) + by
        one.prompt_id, one.prompt_hash = f"p{number}", f"h{number}"
    return samples


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


# --- one run ---------------------------------------------------------------------------------------------------------


def test_disjoint_prompts_of_one_plan_become_one_run(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b", prompts=range(12, 20))
    done = invoke("merge", tmp_path / "all", one, two, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == {".": 2}
    folder = RunFolder(tmp_path / "all")
    (speculative,) = [row for row in summarise(folder.manifest(), folder.samples()).rows if not row.baseline]
    assert (speculative.prompts, speculative.n_ok) == (20, 20)
    assert len(folder.manifest()["prompts"]) == 20
    assert folder.manifest()["settings"]["repeats"] == 1
    assert [origin["run"] for origin in folder.manifest()["merged"]] == ["a", "b"]
    groups = [sample.group for sample in folder.samples()]
    assert groups == list(range(40))  # a call of one site is no call of another
    assert (tmp_path / "all" / "summary.json").is_file()
    assert RunFolder(one).samples() == RunFolder(tmp_path / "a").samples()


def test_what_both_have_measured_becomes_repeats_and_stays_in_pairs(tmp_path: Path) -> None:
    """The arms of a site were measured in turns; a repeat of one site is never paired with another site's."""
    ours, theirs = site(tmp_path / "a"), site(tmp_path / "b", prompts=range(6, 18))
    merging.merge(tmp_path / "all", [ours, theirs])
    samples = RunFolder(tmp_path / "all").samples()
    assert len({sample.key for sample in samples}) == len(samples) == 48
    assert {sample.repeat for sample in samples if sample.prompt_id == "p0"} == {0}
    assert {sample.repeat for sample in samples if sample.prompt_id == "p7"} == {0, 1}
    assert RunFolder(tmp_path / "all").manifest()["settings"]["repeats"] == 2
    there = {(sample.arm, sample.prompt_id, sample.e2e_ns) for sample in RunFolder(theirs).samples()}
    moved = {(sample.arm, sample.prompt_id, sample.e2e_ns) for sample in samples[24:]}
    assert moved == there
    pairs = {(sample.prompt_id, sample.repeat): sample for sample in samples if sample.arm == "autoregressive"}
    for one in samples:
        assert (samples.index(one) < 24) == (samples.index(pairs[one.prompt_id, one.repeat]) < 24)


def test_other_tasks_are_added_and_reports_of_losslessness_are_summed(tmp_path: Path) -> None:
    counts = {"exact": 11, "near_tie": 1, "different": 0, "compared": 12, "first": [{"prompt_id": "p3"}]}
    one = site(tmp_path / "a", lossless={"toy": {"speculative": counts}})
    two = site(tmp_path / "b", run(5, tasks=("other",)), plan={**PLAN, "task": ["other"]},
               lossless={"other": {"speculative": {**counts, "compared": 5, "exact": 4}}})  # fmt: skip
    three = site(tmp_path / "c", prompts=range(20, 24), lossless={"toy": {"speculative": counts}})
    merging.merge(tmp_path / "all", [one, two, three])
    found = RunFolder(tmp_path / "all").manifest()
    assert found["plan"]["task"] == ["toy", "other"]
    assert found["lossless"]["toy"]["speculative"] == {
        "exact": 22, "near_tie": 2, "different": 0, "compared": 24, "first": [{"prompt_id": "p3"}] * 2
    }  # fmt: skip
    assert found["lossless"]["other"]["speculative"]["compared"] == 5


def test_a_server_whose_text_alone_was_compared_is_one_in_the_whole(tmp_path: Path) -> None:
    """`text_only` is no count: it was added up like one, or was a KeyError where one site had it."""
    counts = {"exact": 2, "near_tie": 0, "different": 1, "compared": 3, "first": [{"prompt_id": "p3"}]}
    reports = [counts | {"text_only": True}, counts, counts | {"text_only": True}]
    runs = [site(tmp_path / name, prompts=range(at, at + 4), lossless={"toy": {"speculative": report}})
            for name, at, report in zip("abc", (0, 4, 8), reports, strict=True)]  # fmt: skip
    merging.merge(tmp_path / "all", runs)
    assert RunFolder(tmp_path / "all").manifest()["lossless"]["toy"]["speculative"] == {
        "exact": 6, "near_tie": 0, "different": 3, "compared": 9, "text_only": True, "first": [{"prompt_id": "p3"}] * 3
    }  # fmt: skip


def test_who_ran_a_cell_is_said_of_each_run_and_not_of_the_whole(tmp_path: Path) -> None:
    attempts = {"kind": "ray", "attempts": [{"worker": "node0"}]}
    one, two = site(tmp_path / "a", executor=attempts), site(tmp_path / "b", prompts=range(12, 20))
    merging.merge(tmp_path / "all", [one, two])
    found = RunFolder(tmp_path / "all").manifest()
    assert "executor" not in found
    assert [origin.get("executor") for origin in found["merged"]] == [attempts, None]


def test_a_run_that_did_not_end_leaves_its_mark_on_the_whole(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b", prompts=range(12, 20), interrupted=True)
    merging.merge(tmp_path / "all", [one, two])
    assert RunFolder(tmp_path / "all").manifest()["interrupted"] is True


def test_show_compare_and_report_take_the_result(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b", prompts=range(12, 20))
    merging.merge(tmp_path / "all", [one, two])
    shown = invoke("show", tmp_path / "all")
    assert shown.exit_code == 0, shown.output
    assert "toy, 20 prompts" in shown.stdout
    assert "merged from 2 runs: a, b" in shown.stdout
    assert invoke("compare", tmp_path / "all", one).exit_code == 0
    page = tmp_path / "page.html"
    assert invoke("report", tmp_path / "all", "-o", page, "--no-text").exit_code == 0
    assert page.stat().st_size > 10_000


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"environment": {"cpu": "Other CPU", "physical_cores": 2, "gpus": []}}, "cpu: Test CPU and Other CPU"),
        ({"environment": {"cpu": "Test CPU", "physical_cores": 4, "gpus": []}}, "physical_cores: 2 and 4"),
        (
            {"environment": {"cpu": "Test CPU", "physical_cores": 2, "gpus": [{"name": "H100", "memory": "80 GB"}]}},
            "gpus: none and H100 80 GB",
        ),
        ({"settings": {"temperature": 0.7}}, "temperature: 0.0 and 0.7"),
        ({"settings": {"dtype": "bfloat16"}}, "dtype: none and bfloat16"),
        ({"specbench": "2"}, "specbench: 1 and 2"),
        ({"plan": {**PLAN, "strategy": ["lookup"]}}, 'strategy: ["speculative"] and ["lookup"]'),
        ({"vocab_size": 99}, "vocab_size: none and 99"),
    ],
)
def test_unlike_runs_are_not_averaged(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Each difference is named, with the way out; nothing is written."""
    one, two = site(tmp_path / "a"), site(tmp_path / "b", **change)
    done = invoke("merge", tmp_path / "all", one, two)
    assert done.exit_code == 2
    assert (
        f"a and b cannot be one run, since their records would be averaged, and they differ in {named}" in done.stderr
    )
    assert "--apart" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "all").exists()


def test_other_weights_and_another_option_are_named(tmp_path: Path) -> None:
    one = site(tmp_path / "a", arms=[arm("autoregressive"), arm("speculative", options={"draft_length": 4})])
    two = site(tmp_path / "b", arms=[arm("autoregressive", roles={"target": role(fingerprint="99")}),
                                     arm("speculative", options={"draft_length": 8})])  # fmt: skip
    with pytest.raises(UsageError, match="autoregressive's target, by fingerprint: 0f and 99") as caught:
        merging.merge(tmp_path / "all", [one, two])
    assert 'arm speculative: {"draft_length": 4} and {"draft_length": 8}' in str(caught.value)


def test_another_prompt_of_the_same_name_is_no_repeat(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), RunFolder(site(tmp_path / "b"))
    changed = two.manifest()
    changed["prompts"][3]["hash"] = "of another template"
    two.write_manifest(changed)
    with pytest.raises(UsageError, match="differ in prompt toy p3: h3 and of another t"):
        merging.merge(tmp_path / "all", [one, two.path])


def test_the_same_records_do_not_count_twice(tmp_path: Path) -> None:
    """A site that sends its run again under another name, or a merge that already holds it."""
    one, copy = site(tmp_path / "a"), site(tmp_path / "b", RunFolder(site(tmp_path / "a")).samples())
    with pytest.raises(UsageError, match="a and b hold the same records"):
        merging.merge(tmp_path / "all", [one, copy])
    two = site(tmp_path / "c", prompts=range(12, 20))
    merging.merge(tmp_path / "all", [one, two])
    with pytest.raises(UsageError, match="all and c hold the same records"):
        merging.merge(tmp_path / "more", [tmp_path / "all", two])
    with pytest.raises(UsageError, match="named twice"):
        merging.merge(tmp_path / "more", [one, one])


def test_folders_that_cannot_be_merged(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b", prompts=range(12, 20))
    with pytest.raises(UsageError, match="name two or more runs"):
        merging.merge(tmp_path / "all", [one])
    with pytest.raises(RunFolderError, match="holds something already"):
        merging.merge(one, [one, two])
    with pytest.raises(RunFolderError, match="not a run folder"):
        merging.merge(tmp_path / "all", [one, tmp_path / "nothing"])


# --- side by side ----------------------------------------------------------------------------------------------------


def test_apart_keeps_other_hardware_in_rows_of_its_own(tmp_path: Path) -> None:
    one, two, three = site(tmp_path / "x/a"), site(tmp_path / "y/a", prompts=range(12, 20)), tmp_path / "z/a"
    site(three, environment={"cpu": "Other CPU", "physical_cores": 2, "gpus": []})
    found = merging.merge(tmp_path / "all", [one, two, three], apart=True)
    assert found.runs == {"x--a": 2, "z--a": 1}
    both = load([tmp_path / "all"])
    assert [(loaded.name, loaded.hardware, len(loaded.columns)) for loaded in both] == [
        ("x--a", "Test CPU (2 cores)", 40), ("z--a", "Other CPU (2 cores)", 24)
    ]  # fmt: skip
    shown = invoke("show", tmp_path / "all")
    assert shown.exit_code == 0
    assert shown.stdout.count("toy, ") == 2
    table = json.loads(invoke("compare", tmp_path / "all", "--json").stdout)
    rows = [(row["run"], row["hardware"]) for row in table["rows"] if row["own_name"] == "speculative"]
    assert rows == [("x--a", "Test CPU (2 cores)"), ("z--a", "Other CPU (2 cores)")]
    assert "json is for one of them" in invoke("show", tmp_path / "all", "--json").stderr


def test_cells_of_sweeps_are_merged_by_name(tmp_path: Path) -> None:
    """Two sites did a part of a grid each, and one cell both."""
    for place, cells in (("x", ("k=2", "k=4")), ("y", ("k=4", "k=8"))):
        for cell in cells:
            samples = shifted(run(6, seed=len(place + cell) + ord(place)), 6 * (place == "y"))
            site(tmp_path / place / cell, samples, prompts=range(12))
        (tmp_path / place / SWEEP).write_text(json.dumps({"schema": 1, "cells": []}))
    found = merging.merge(tmp_path / "all", [tmp_path / "x", tmp_path / "y"])
    assert found.runs == {"k=2": 1, "k=4": 2, "k=8": 1}
    assert [loaded.name for loaded in load([tmp_path / "all"])] == ["k=2", "k=4", "k=8"]
    cells = json.loads((tmp_path / "all" / SWEEP).read_text())["cells"]
    assert [(cell["name"], cell["state"]) for cell in cells] == [("k=2", "done"), ("k=4", "done"), ("k=8", "done")]
    assert (tmp_path / "all/k=2/samples.jsonl").read_bytes() == (tmp_path / "x/k=2/samples.jsonl").read_bytes()


def test_a_failed_sample_is_merged_as_what_it_is(tmp_path: Path) -> None:
    broken = failed("speculative", 30)
    one = site(tmp_path / "a")
    two = site(tmp_path / "b", [*shifted(run(4, seed=5), 12), broken], prompts=range(12, 31))
    merging.merge(tmp_path / "all", [one, two])
    folder = RunFolder(tmp_path / "all")
    assert summarise(folder.manifest(), folder.samples()).n_failed == 1
