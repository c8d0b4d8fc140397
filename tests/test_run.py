"""A run from plan to folder, on the tiny models: what is written when, resumed how, and lost never."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from specbench.errors import ModelError, RunFolderError, UsageError
from specbench.results import run as runs
from specbench.results.listener import Listener
from specbench.results.manifest import redact
from specbench.results.plan import Plan, check, parse_option, resolve
from specbench.results.records import RunFolder
from specbench.strategies.cascade import Cascade
from specbench.strategies.lookup import Lookup


def plan(out: Path | None, **changes) -> Plan:
    settings = dict(
        strategy=("lookup",), target="tiny", task=("bundled",), limit=2, max_new_tokens=8, threads=1, trace=0, warmup=0,
        out=out,
    )  # fmt: skip
    return Plan(**(settings | changes))


def keys(folder: Path) -> Counter:
    return Counter(sample.key for sample in RunFolder(folder).samples())


# A whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> runs.RunResult:
    out = tmp_path_factory.mktemp("finished") / "run"
    return runs.run(plan(out, strategy=("lookup", "speculative"), draft="tiny-draft", limit=3, trace=1, warmup=1))


def test_a_run_leaves_manifest_samples_and_summaries(finished):
    names = {path.name for path in finished.folder.iterdir()}
    assert {"manifest.json", "samples.jsonl", "summary.json", "summary.md", "summary.csv", "summary.tex"} <= names
    assert not [name for name in names if name.endswith(".part")]
    manifest = json.loads((finished.folder / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["baseline"] == "autoregressive"
    assert {arm["name"]: arm["roles"]["target"]["dtype"] for arm in manifest["arms"]} == {
        "autoregressive": "float32", "lookup": "float32", "speculative": "float32"}  # fmt: skip
    assert manifest["environment"]["packages"]["torch"]
    assert manifest["interrupted"] is False
    assert manifest["plan"]["limit"] == 3


def test_every_arm_sees_the_same_ids_and_every_output_is_exact(finished):
    """D21, and the promise of the whole tool."""
    samples = [sample for sample in RunFolder(finished.folder).samples() if sample.kind == "measure"]
    by_prompt: dict = {}
    for sample in samples:
        by_prompt.setdefault((sample.prompt_id, sample.turn), set()).add((sample.prompt_hash, tuple(sample.token_ids)))
    assert all(len(seen) == 1 for seen in by_prompt.values())
    for counts in finished.manifest["lossless"]["bundled"].values():
        assert counts["exact"] == counts["compared"] > 0
    assert finished.failures == []


def test_only_strategies_that_practise_are_given_questions_and_raw_ones_in_a_raw_run(tmp_path, monkeypatch):
    """Which a chat template may refuse that a raw run, or one of plain decoding, has no use for."""
    asked, practised = [], []
    make = runs.drafts.questions
    monkeypatch.setattr(runs.drafts, "questions", lambda *given: asked.append(given[1]) or make(*given))
    monkeypatch.setattr(Cascade, "practise", lambda self, texts: practised.append(texts))
    runs.run(plan(tmp_path / "plain", limit=1))
    assert asked == []
    for raw in (False, True):
        runs.run(plan(tmp_path / str(raw), strategy=("cascade",), draft="tiny-draft", limit=1, raw=raw))
    assert asked == [False, True]
    templated, raw_ones = practised
    assert all(len(one) < len(other) for one, other in zip(raw_ones, templated, strict=True))


def test_arms_are_interleaved_and_take_turns_at_going_first(finished):
    samples = [sample for sample in RunFolder(finished.folder).samples() if sample.kind == "measure"]
    firsts = [samples[at].arm for at in range(0, len(samples), 3)]
    assert len(set(firsts)) > 1
    for at in range(0, len(samples), 3):
        assert {sample.arm for sample in samples[at : at + 3]} == {"autoregressive", "lookup", "speculative"}


def test_later_turns_replay_the_baselines_answer(finished):
    """Both arms read the same second prompt, and the manifest says whose answer it holds."""
    turns = [s for s in RunFolder(finished.folder).samples() if s.kind == "measure" and s.turn == 1]
    assert turns
    assert len({s.prompt_hash for s in turns if s.prompt_id == turns[0].prompt_id}) == 1
    assert finished.manifest["replayed_answers_of"] == "autoregressive"


def test_check_and_trace_passes_are_kept_apart(finished):
    samples = RunFolder(finished.folder).samples()
    kinds = Counter(sample.kind for sample in samples)
    assert kinds["check"] == kinds["trace"] == 3
    for sample in samples:
        assert (sample.forwards is not None) == (sample.kind == "trace")
    traced = next(s for s in samples if s.kind == "trace" and s.arm == "speculative")
    assert traced.forwards["target"]
    assert traced.forwards["draft"]
    for row in finished.summary.rows:
        assert row.n_ok == 4 or row.task != "bundled"  # three prompts, one of them with two turns


def test_nothing_is_not_a_number_in_any_file(finished):
    """Rule 11: null, never NaN or Infinity."""

    def refuse(word):
        raise AssertionError(word)

    for path in finished.folder.glob("*.json*"):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line, parse_constant=refuse)


# Sampling


@pytest.mark.parametrize("how", [dict(temperature=1.0), dict(temperature=0.6, top_p=0.9)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_sampled_output_is_token_identical_in_float32(tmp_path, how, batch):
    result = runs.run(
        plan(
            tmp_path / "r", strategy=("lookup", "speculative"), draft="tiny-draft", limit=4, batch=batch, seed=3, **how
        )
    )
    counts = result.manifest["lossless"]["bundled"]
    assert all(arm["exact"] == arm["compared"] == 5 for arm in counts.values())


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_target_drafts_for_itself_in_a_quantised_form(tmp_path, form):
    """Another model, which the table calls by its dtype; whatever it proposes, the output stays that of the target."""
    result = runs.run(plan(tmp_path / "r", strategy=("speculative", "hf-assisted"), draft=f"self:{form}"))
    counts = result.manifest["lossless"]["bundled"]
    assert all(arm["exact"] == arm["compared"] > 0 for arm in counts.values())
    arms = {arm["name"]: arm["roles"] for arm in result.manifest["arms"]}
    assert arms["speculative"]["draft"]["dtype"] == form
    assert arms["speculative"]["target"]["dtype"] == "float32"
    assert set(arms["hf-assisted"]) == {"target"}  # transformers has no such form; it looks up instead


def test_under_the_rejection_rule_tokens_are_not_compared(tmp_path):
    result = runs.run(plan(tmp_path / "r", temperature=1.0, verify="rejection"))
    assert result.manifest["lossless"] is None
    assert result.failures == []


# Folders


def test_an_existing_run_is_refused_then_resumed_then_replaced(tmp_path):
    out = tmp_path / "run"
    runs.run(plan(out))
    before = keys(out)
    with pytest.raises(RunFolderError, match="holds a run already"):
        runs.run(plan(out))
    with pytest.raises(RunFolderError, match="max_new_tokens: 8 there, 9 now"):
        runs.run(plan(out, resume=True, max_new_tokens=9))
    summary = runs.run(plan(out, resume=True)).summary  # C2: nothing is left; it only summarises
    assert keys(out) == before
    assert summary.n_failed == 0
    runs.run(plan(out, overwrite=True))
    assert keys(out) == before


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for changes in ({}, {"overwrite": True}):
        with pytest.raises(RunFolderError, match="other files"):
            runs.run(plan(tmp_path, **changes))
    with pytest.raises(RunFolderError, match="nothing to resume"):
        runs.run(plan(tmp_path / "new", resume=True))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_resume_measures_only_what_is_missing(tmp_path):
    out = tmp_path / "run"
    whole = runs.run(plan(out, limit=3))
    complete = keys(out)
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(lines[:3]) + lines[3][:40])  # torn in the middle of a line
    again = runs.run(plan(out, limit=3, resume=True))
    assert keys(out) == complete
    assert max(complete.values()) == 1
    assert again.manifest["lossless"] == whole.manifest["lossless"]
    assert len(again.manifest["resumed"]) == 1


class Interrupting(Listener):
    def __init__(self, after: int):
        self.left = after

    def sample(self, samples):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_ctrl_c_leaves_a_summary_of_what_there_is(tmp_path):
    """C3."""
    result = runs.run(plan(tmp_path / "run", limit=4), Interrupting(after=5))
    assert result.interrupted
    assert len(RunFolder(result.folder).samples()) == 5
    assert (result.folder / "summary.md").exists()
    assert sum(row.n_ok for row in result.summary.rows if row.task == "bundled") == 5
    assert runs.run(plan(tmp_path / "run", limit=4, resume=True)).interrupted is False


def test_ctrl_c_before_the_first_sample_is_an_interruption_not_a_table(tmp_path):
    class AtOnce(Listener):
        def begin(self, total, done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(plan(tmp_path / "run"), AtOnce())
    assert not list(tmp_path.glob("run/summary*"))


def test_resuming_a_finished_run_keeps_all_that_it_knows(tmp_path):
    """C2: the lossless report, the arms with their devices, the peaks, the warm-up."""
    out = tmp_path / "run"
    first = runs.run(plan(out, trace=1, warmup=1))
    again = runs.run(plan(out, trace=1, warmup=1, resume=True, require_lossless=True))
    for key in ("lossless", "arms", "peak_memory_bytes", "warmup", "started", "load_ns", "environment"):
        assert again.manifest[key] == first.manifest[key], key
    assert again.failures == []


def test_resuming_after_a_kill_in_the_last_passes_finishes_them(tmp_path):
    out = tmp_path / "run"

    class InCheck(Listener):
        def sample(self, samples):
            if samples[0].kind == "check":
                raise RuntimeError("killed")  # as abrupt as a kill: nothing is summarised

    with pytest.raises(RuntimeError):
        runs.run(plan(out, trace=1), InCheck())
    assert RunFolder(out).manifest()["lossless"] is None
    result = runs.run(plan(out, trace=1, resume=True))
    assert result.manifest["lossless"]["bundled"]["lookup"]["exact"] == 3
    assert Counter(sample.kind for sample in RunFolder(out).samples())["trace"] == 2
    assert max(keys(out).values()) == 1


def test_an_early_ctrl_c_after_resuming_still_compares_what_there_is(tmp_path, monkeypatch):
    """A difference on record is judged although its prompt was not reached again."""
    out, generate = tmp_path / "run", Lookup.generate
    with monkeypatch.context() as patch:
        patch.setattr(Lookup, "generate", lambda self, requests, sampling: _shifted(generate(self, requests, sampling)))
        runs.run(plan(out, limit=4), Interrupting(after=4))

    class AtOnce(Listener):
        def begin(self, total, done):
            raise KeyboardInterrupt

    result = runs.run(plan(out, limit=4, resume=True), AtOnce())
    assert result.interrupted
    assert result.manifest["lossless"]["bundled"]["lookup"]["different"] > 0


def _shifted(steps):
    for step in steps:
        yield type(step)(step.row, tuple((token + 1) % 250 for token in step.tokens), step.drafted, step.accepted)


@pytest.mark.parametrize("how", [dict(temperature=0.6, top_p=0.9), dict(temperature=1.0, top_k=1)], ids=str)
def test_a_difference_under_truncated_sampling_is_reported_in_valid_json(tmp_path, monkeypatch, how):
    """Dropped tokens have no finite value; the report says null, and how far they are from the border."""
    generate = Lookup.generate
    monkeypatch.setattr(
        Lookup, "generate", lambda self, requests, sampling: _shifted(generate(self, requests, sampling))
    )
    result = runs.run(plan(tmp_path / "run", **how))
    found = result.manifest["lossless"]["bundled"]["lookup"]
    assert found["different"] == found["compared"] > 0
    json.loads((result.folder / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_resume_refuses_other_prompts_under_the_same_names(tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    settings = dict(task=("jsonl",), options={"jsonl": {"path": str(file)}})
    file.write_text(json.dumps({"id": "a", "prompt": "hello"}) + "\n")
    runs.run(plan(out, **settings))
    file.write_text(json.dumps({"id": "a", "prompt": "goodbye"}) + "\n")
    with pytest.raises(RunFolderError, match="jsonl a is not the prompt that was measured"):
        runs.run(plan(out, resume=True, **settings))


def test_failed_samples_are_measured_again_on_resume(tmp_path, monkeypatch):
    out, generate = tmp_path / "run", Lookup.generate

    def broken(self, requests, sampling):
        raise RuntimeError("out of memory")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(Lookup, "generate", broken)
        assert runs.run(plan(out)).summary.n_failed
    assert Lookup.generate is generate
    result = runs.run(plan(out, resume=True))
    assert result.summary.n_failed == 0
    assert max(keys(out).values()) == 1


def test_overwrite_leaves_nothing_of_the_old_run_and_loses_nothing_when_refused(tmp_path, monkeypatch):
    out = tmp_path / "run"
    runs.run(plan(out))
    before = (out / "samples.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "load", lambda *a, **k: (_ for _ in ()).throw(ModelError("no such weights")))
        with pytest.raises(ModelError):
            runs.run(plan(out, overwrite=True))
        with pytest.raises(ModelError):
            runs.run(plan(tmp_path / "new"))
    assert (out / "samples.jsonl").read_bytes() == before
    assert not (tmp_path / "new").exists()

    class InWarmUp(Listener):
        def stage(self, text):
            if text == "warm-up":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(plan(out, overwrite=True), InWarmUp())
    assert {path.name for path in out.iterdir()} == {"manifest.json", "samples.jsonl"}


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    out = tmp_path / "run"
    runs.run(plan(out), Interrupting(after=2))
    writer = RunFolder(out).writer()
    with pytest.raises(RunFolderError, match="another run is writing"):
        runs.run(plan(out, resume=True))
    writer.close()


def test_a_conversation_is_reserved_with_all_its_turns(tmp_path):
    prepared = runs.validate(plan(None, task=("bundled:chat",), limit=4, max_new_tokens=30))
    result = runs.run(plan(tmp_path / "run", task=("bundled:chat",), limit=4, max_new_tokens=30))
    longest = max(s.prompt_tokens + len(s.token_ids) for s in RunFolder(result.folder).samples() if s.turn == 1)
    assert longest <= prepared.needed_tokens


# Failures


def test_failed_samples_are_records_and_the_run_goes_on(tmp_path, monkeypatch):
    """M8, M9, D36."""
    generate, calls = Lookup.generate, []

    def failing(self, requests, sampling):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("worker died")
        return generate(self, requests, sampling)

    monkeypatch.setattr(Lookup, "generate", failing)
    result = runs.run(plan(tmp_path / "run", limit=3))
    failed = [sample for sample in RunFolder(result.folder).samples() if sample.error]
    assert [sample.error for sample in failed] == ["RuntimeError: worker died"]
    assert (failed[0].e2e_ns, failed[0].token_ids) == (None, [])
    assert result.summary.n_failed == 1
    assert result.failures
    assert "1 sample" in result.failures[0]


def test_a_prompt_that_does_not_fit_fails_alone(tmp_path):
    """D35, D36: its sample has a status; the limit is the target's own and the next prompt runs."""
    file = tmp_path / "prompts.jsonl"
    long = "word " * 9000
    file.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in [("a", long), ("b", "hi")]))
    result = runs.run(plan(tmp_path / "run", task=("jsonl",), options={"jsonl": {"path": str(file)}}))
    samples = RunFolder(result.folder).samples()
    assert {(s.prompt_id, s.ok) for s in samples if s.kind == "measure"} == {("a", False), ("b", True)}
    assert "does not fit the target's context" in next(s.error for s in samples if not s.ok)


def test_an_empty_task_is_an_error(tmp_path):
    """M8: no summary row of zeros."""
    file = tmp_path / "empty.jsonl"
    file.write_text("")
    with pytest.raises(Exception, match=r"(?i)no prompt|empty|nothing"):
        runs.run(plan(tmp_path / "run", task=("jsonl",), options={"jsonl": {"path": str(file)}}))
    assert not (tmp_path / "run").exists()


def test_state_carried_over_between_prompts_is_found(tmp_path, monkeypatch):
    """A strategy whose tokens depend on how often it was called gives another answer to the first prompt."""
    generate, calls = Lookup.generate, []

    def drifting(self, requests, sampling):
        calls.append(1)
        for step in generate(self, requests, sampling):
            yield step if len(calls) < 3 else type(step)(step.row, tuple((t + 1) % 250 for t in step.tokens))

    monkeypatch.setattr(Lookup, "generate", drifting)
    result = runs.run(plan(tmp_path / "run", limit=2))
    assert [(caution.code, caution.arm) for caution in result.summary.cautions if caution.code == "state"] == [
        ("state", "lookup")
    ]


# Refusals before anything expensive


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(strategy=("lokup",)), 'did you mean "lookup"'),
        (dict(strategy=("speculative",)), "needs a draft model"),
        (dict(draft="tiny-draft"), "no strategy of this run uses a draft model"),
        (dict(draft_length=4, strategy=()), "drafts a fixed length"),
        (dict(options={"lookup": {"min-mach": "3"}}), "min-match"),
        (dict(options={"speculative": {"draft-length": "3"}}), "not part of this run"),
        (dict(options={"nonsense": {"a": "3"}}), "unknown name"),
        (dict(task=("bundeld",)), 'did you mean "bundled"'),
        (dict(place="target=cpu:97"), "core 97 is not there"),
        (dict(place="target=gpu"), "not a device"),
        (dict(place="target=cuda:93"), "cuda:93: not there"),
        (dict(threads=4096), "cores that may be used"),
        (dict(strategy=("hf-assisted",), temperature=1.0), "temperature 0 only"),
        (dict(strategy=("hf-assisted",), batch=2), "at most 1 row"),
        (dict(target="tinny"), "tiny"),
        (dict(target="self:int4"), "self"),
        (dict(strategy=("speculative",), draft="self:int3"), "int4"),
        (dict(strategy=("speculative",), draft="self:int4", draft_quant="int8"), "leave --draft-quant out"),
        (dict(strategy=("speculative",), draft="self:int4", runtime="transformers"), "--runtime transformers out"),
        (dict(draft_quant="int4"), "there is no draft model"),
        (dict(suppress_tokens=(999_999,)), "the vocabulary goes from 0 to"),
        (dict(suppress_tokens=(-1,)), "--suppress-tokens -1"),
        (dict(exact=True), "--exact: bits are kept in bfloat16"),
        (dict(require_lossless=True, temperature=1.0, verify="rejection"), "cannot be compared"),
        (dict(require_lossless=True, strategy=(), baseline=True), "nothing to be compared with"),
        (dict(strategy=("hf-assisted",), options={"hf-assisted": {"schedule": "foo"}}), "heuristic"),
        (dict(exact=True, runtime="transformers"), "needs the packed runtime"),
        (dict(strategy=("lookup", "lookup")), "named twice"),
    ],
)
def test_wrong_plans_are_refused_in_one_line_before_a_folder_is_made(tmp_path, changes, words):
    with pytest.raises(UsageError) as caught:
        runs.run(plan(tmp_path / "run", **changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "bad",
    [dict(batch=0), dict(limit=0), dict(dtype="float31"), dict(runtime="fast"), dict(task=()), dict(repeats=0),
     dict(resume=True, out=None), dict(max_new_tokens=-1)],
    ids=str,
)  # fmt: skip
def test_nonsense_in_a_plan_is_refused(bad):
    with pytest.raises(UsageError):
        Plan(**bad)


def test_a_draft_whose_context_is_too_short_is_refused_before_weights_load(tmp_path, monkeypatch):
    """D32, D33, D34, P35: both limits are named."""
    from specbench.models import drafts

    real = drafts.describe

    def short(spec, role, progress=None):
        import dataclasses

        info = real(spec, role, progress)
        return dataclasses.replace(info, context_length=16) if role == "draft" else info

    monkeypatch.setattr(drafts, "describe", short)
    monkeypatch.setattr(runs, "load", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(ModelError, match="16"):
        runs.run(plan(tmp_path / "run", strategy=("speculative",), draft="tiny-draft"))


# Plans


def test_flags_go_over_yaml_over_defaults():
    config = {"limit": 9, "batch": 2, "strategy": "lookup", "options": {"lookup": {"min-match": 2, "draft-length": 6}}}
    found = resolve({"limit": 3, "options": {"lookup": {"min-match": "4"}}}, config)
    assert (found.limit, found.batch, found.seed, found.strategy) == (3, 2, 0, ("lookup",))
    assert found.options == {"lookup": {"min-match": "4", "draft-length": 6}}
    (_, arm) = check(found).arms
    assert (arm.options.min_match, arm.options.draft_length) == (4, 6)


def test_unknown_keys_and_wrong_types_of_a_config_are_refused():
    with pytest.raises(UsageError, match="limit"):
        resolve({}, {"limt": 3}, "plan.yaml")
    with pytest.raises(UsageError, match="plan.yaml"):
        resolve({}, {"limit": "many"}, "plan.yaml")
    with pytest.raises(UsageError, match="mapping"):
        resolve({}, {"options": [1]}, "plan.yaml")


def test_options_are_name_key_value():
    assert parse_option("jsonl.path=a=b.jsonl") == ("jsonl", "path", "a=b.jsonl")
    for text in ("lookup", "lookup.k", "k=3", ".k=3"):
        with pytest.raises(UsageError, match=r"name\.key=value"):
            parse_option(text)


def test_secrets_do_not_reach_the_manifest():
    assert "abc" not in redact("hf_abcdefghijk")
    assert redact("--option=api_key=s3cret") == "--option=api_key=[redacted]"
    assert redact("--target=org/model") == "--target=org/model"


# Processes


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "specbench", "run", "-s", "lookup", "-t", "tiny", "--limit", "40", "--max-new-tokens",
            "64", "--threads", "1", "--trace", "0", "--out", str(out), *more]  # fmt: skip


def wait_for_samples(out: Path, count: int, process: subprocess.Popen) -> None:
    path = out / "samples.jsonl"
    for _ in range(1200):
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no samples in a minute")


def test_kill_9_in_the_middle_loses_at_most_the_sample_in_flight(tmp_path):
    """C1: and the run can be resumed."""
    out = tmp_path / "run"
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_samples(out, 5, process)
    process.kill()
    process.communicate()
    found = RunFolder(out).samples()
    assert len(found) >= 5
    assert all(sample.ok for sample in found)
    assert RunFolder(out).manifest()["arms"][1]["roles"]["target"]["model"] == "tiny"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_twice_leaves_at_once(tmp_path):
    """C3: nothing that was measured is lost. What Python says if it is hit in a clean-up of its own is not checked."""
    out = tmp_path / "run"
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_samples(out, 4, process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert len(RunFolder(out).samples()) >= 4


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_once_prints_the_summary_and_exits_130(tmp_path):
    """C3."""
    out = tmp_path / "run"
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_samples(out, 4, process)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "lookup" in printed
    assert "Traceback" not in said
    assert RunFolder(out).manifest()["interrupted"] is True
