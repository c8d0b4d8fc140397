"""Drafts for targets that have none: smaller heads, other grids, and the list of what there is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_packed import FAMILIES, VOCAB, forward, make, packed, text
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import ModelError, UsageError
from specbench.models import head_vocab, tiny
from specbench.models.draft_options import DraftOptions
from specbench.models.drafts import describe_draft
from specbench.models.info import describe
from specbench.models.packed_cuda import StaticPackedModel
from specbench.models.quantised import shift_channels
from specbench.models.quiet import quiet
from specbench.models.specs import parse
from specbench.results import drafts as known
from specbench.results import run as runs
from specbench.results.plan import Plan, check, parse_option, resolve, with_own_draft


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "specbench-cache"))


def target(name: str = "tiny"):
    return describe(parse(name), "target")


def plan(out: Path | None, *options: str, **changes) -> Plan:
    by_name: dict = {}
    for name, key, value in map(parse_option, options):
        by_name.setdefault(name, {})[key] = value
    settings = dict(
        strategy=("speculative",), target="tiny", draft="tiny-draft", task=("bundled",), limit=3, max_new_tokens=16,
        threads=1, trace=0, warmup=0, out=out,
    )  # fmt: skip
    return resolve({**settings, **changes, "options": by_name})


# Heads with fewer rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_tokens_have_the_logits_of_the_whole_head_and_others_have_none(dtype):
    ids, kept = text(30), [1, 5, 40, 96]
    whole = packed(make("qwen2", dtype), dtype).advance([ids], last=3)
    cut = packed(make("qwen2", dtype), dtype, head_ids=kept)
    logits = cut.advance([ids], last=3)
    assert logits.shape == (3, VOCAB)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits[:, kept], whole[:, kept], atol=2e-2)
    others = [token for token in range(VOCAB) if token not in kept]
    assert torch.isneginf(logits[:, others]).all()
    assert cut.weight_bytes < packed(make("qwen2", dtype), dtype).weight_bytes
    before = logits.clone()
    cut.advance([ids[:9]], last=3)
    assert torch.equal(logits, before), "the next forward must not write into what was returned"


def test_the_static_runtime_cuts_its_head_as_well():
    ids, kept = text(30), [1, 5, 40, 96]
    options = {"name": "static", "device": "cpu", "dtype": "float32", "vocab_size": VOCAB}
    whole = StaticPackedModel(make(), **options).advance([ids], last=2)
    logits = StaticPackedModel(make(), head_ids=kept, **options).advance([ids], last=2)
    assert torch.allclose(logits[:, kept], whole[:, kept], atol=1e-4)
    assert torch.isneginf(logits).sum() == 2 * (VOCAB - len(kept))


def test_states_of_the_static_runtime_are_what_its_head_multiplies():
    model = make()
    ids = np.stack([text(20, seed=n) for n in range(18)])
    expected = torch.stack([forward(model, row) for row in ids])
    head = model.lm_head.weight.detach().clone()
    static = StaticPackedModel(model, name="static", device="cpu", dtype="float32", vocab_size=VOCAB)
    assert torch.allclose(static.states(ids) @ head.T, expected, atol=1e-3)
    assert torch.allclose(static.advance([ids[3]], last=20), expected[3], atol=1e-3)


@pytest.mark.parametrize("draft", ["tiny-draft", "self:int4"])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8}])
def test_a_smaller_head_changes_the_draft_and_not_the_output(tmp_path, draft, sampled):
    """Tokens outside of it are never drafted; under the coupled rule the output is that of plain decoding."""
    letters = tmp_path / "letters.json"
    letters.write_text(json.dumps([*range(97, 123), 32, 10]))
    done = runs.run(
        plan(tmp_path / "run", f"draft.head-vocab-file={letters}", draft=draft, require_lossless=True, **sampled)
    )
    assert done.failures == []
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(ids for sample in samples if sample["arm"] == "autoregressive" for ids in sample["token_ids"])
    model = done.manifest["models"]["draft"]
    assert model["head_vocab"] == 29  # the letters, and the end of text
    assert model["spec"] == f"{draft} [head 29]"
    assert ":head-" in model["fingerprint"]
    counts = done.manifest["lossless"]["bundled"]["speculative"]
    assert counts["exact"] == counts["compared"] > 0


def test_auto_keeps_a_third_of_the_vocabulary():
    info = describe_draft(parse("self:int4"), target(), options=DraftOptions(head_vocab="auto"))
    assert len(info.head_ids) == target().vocab_size // 3
    assert info.name == f"self:int4 [head {len(info.head_ids)}]"
    assert set(target().eos_ids) < set(info.head_ids)


def test_the_rejection_rule_draws_from_the_smaller_head(tmp_path):
    done = runs.run(plan(tmp_path / "run", "draft.head-vocab=200", temperature=0.8, verify="rejection"))
    assert done.failures == []
    row = next(row for row in done.summary.rows if row.strategy == "speculative")
    assert 0 < row.acceptance_rate < 1


def test_what_a_draft_comes_with_is_used_unless_something_else_is_asked_for(tmp_path):
    folder = tmp_path / "draft"
    tiny.make_tokenizer().save_pretrained(folder)
    with quiet():
        tiny.make_model(1).save_pretrained(folder)
    spec = parse(str(folder))
    assert describe_draft(spec, target()).head_ids is None
    head_vocab.write(folder, [101, 116, 32, 97], "letters")
    eos = tiny.BYTES + 1
    own = describe_draft(spec, target())
    assert own.head_ids == (32, 97, 101, 116, eos)
    assert describe_draft(spec, target(), options=DraftOptions(head_vocab=3)).head_ids == (101, 116, eos)
    assert describe_draft(spec, target(), options=DraftOptions(head_vocab=0)).head_ids is None
    assert describe_draft(spec, target(), options=DraftOptions(head_vocab="auto")).head_ids == own.head_ids
    with pytest.raises(ModelError, match="lists 5 tokens only"):
        describe_draft(spec, target(), options=DraftOptions(head_vocab=30))
    other = tmp_path / "other.json"
    other.write_text("[1, 2, 3]")
    assert describe_draft(spec, target(), options=DraftOptions(head_vocab_file=other)).head_ids == (1, 2, 3, eos)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("[]", "a JSON list"), ('["a"]', "a JSON list"), ("[999]", "token id 999")],
)
def test_a_bad_list_of_tokens_is_named(tmp_path, content, message):
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        describe_draft(parse("tiny-draft"), target(), options=DraftOptions(head_vocab_file=path))


def test_without_frequencies_special_and_single_symbols_come_first():
    class Codec:
        prefix = [3]
        token_map = {"in": 0, "the": 1, "x": 2, "<s>": 3, "of": 4, "y": 5}

        class hf_tokenizer:
            all_special_ids = [3]

    assert head_vocab.by_tokenizer(Codec(), first=[4]) == [4, 3, 2, 5, 0, 1]
    assert head_vocab.choose([4, 3, 2, 5, 0, 1], 3, 5, always=[1]) == (1, 3, 4)


# Grids


@pytest.mark.parametrize("family", FAMILIES)
def test_renumbered_channels_compute_the_same_function(family):
    model, ids = make(family), text(40)
    expected = forward(model, ids)
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    shift_channels(model, 12)
    assert (forward(model, ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight[0, 0], before[12, 12])


def test_another_grid_rounds_other_weights():
    ids = text(40)
    whole = packed(make(), "bfloat16").advance([ids], last=40)
    forms = [packed(make(), "bfloat16", quant="int4", **grid).advance([ids], last=40) for grid in (
        {}, {"group_offset": 16}, {"group_offset": 8}, {"head_quant": "int8"})]  # fmt: skip
    for at, form in enumerate(forms):
        assert (form - whole).pow(2).mean().sqrt() < 0.7 * whole.pow(2).mean().sqrt()
        assert all(not torch.equal(form, other) for other in forms[:at])


def test_options_of_a_quantised_draft_are_in_its_name_and_reach_the_model(tmp_path):
    done = runs.run(
        plan(
            tmp_path / "run",
            "draft.group-size=64",
            "draft.group-offset=16",
            "draft.head=int8",
            "draft.head-vocab=200",
            draft="self:int4",
            require_lossless=True,
        )  # fmt: skip
    )
    assert done.failures == []
    assert done.manifest["models"]["draft"]["spec"] == "self:int4 [head 200, head int8, groups of 64 from 16]"
    arm = next(arm for arm in done.manifest["arms"] if arm["name"] == "speculative")
    assert arm["roles"]["draft"]["dtype"] == "int4"
    info = describe_draft(parse("tiny-draft"), target(), options=DraftOptions(head_vocab=64), quant="int4")
    assert info.name == "tiny-draft [int4, head 64]"


# What is refused


@pytest.mark.parametrize(
    ("option", "changes", "message"),
    [
        ("draft.head-vocab=-1", {}, "a number of tokens"),
        ("draft.head-vocab=many", {}, "must be a whole number or auto or none"),
        ("draft.head-vocab-file=nowhere.json", {}, "no such file"),
        ("draft.head=int4", {}, "bfloat16 or int8"),
        ("draft.group-size=48", {}, "one of 32, 64"),
        ("draft.group-offset=32", {}, "from 0 to 31"),
        ("draft.heads=3", {}, 'did you mean "head"'),
        ("draft.head-vocab=64", {"runtime": "transformers"}, "needs the packed runtime"),
        ("draft.head-vocab=64", {"strategy": ("lookup",), "draft": None}, "not part of this run"),
        ("draft.head-vocab=64", {"strategy": ("hf-assisted",)}, "do not touch"),
        ("draft2.head-vocab=64", {}, "unknown name in --option"),
    ],
)
def test_wrong_options_of_a_draft_are_refused_without_a_model(option, changes, message):
    with pytest.raises(UsageError, match=message):
        check(plan(None, option, **changes))


def test_grids_are_of_quantised_drafts():
    with pytest.raises(ModelError, match="are of quantised drafts"):
        describe_draft(parse("tiny-draft"), target(), options=DraftOptions(group_size=64))


# The list


def invoke(*words: str):
    narrow = {"COLUMNS": "80"}  # a long path must leave room for the other columns
    return CliRunner().invoke(app, ["list", "drafts", "--target", "tiny", "--threads", "1", *words], env=narrow)


def test_list_drafts_says_what_there_is_and_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    for name, tokenizer in (("small", tiny.make_tokenizer()), ("foreign", tiny.make_tokenizer())):
        folder = tmp_path / "models" / name
        if name == "foreign":
            tokenizer.add_tokens(["another"])
        tokenizer.save_pretrained(folder)
        with quiet():
            tiny.make_model(1).save_pretrained(folder)
    words = ["--folder", str(tmp_path / "models"), "--json"]
    rows = {row["draft"]: row for row in json.loads(invoke(*words).stdout)}
    small = str(tmp_path / "models" / "small")
    assert set(rows) == {"self:int4", "self:int8", small, ""}
    assert "the same vocabulary, 0." in rows[small]["how"]
    assert "lookup" in rows[""]["how"]
    assert all(row["agreement"] is None for row in rows.values())

    done = invoke(*words, "--measure", f"self:int4,{small}")
    assert done.exit_code == 0, done.output
    rows = {row["draft"]: row for row in json.loads(done.stdout)}
    for draft in ("self:int4", small):
        assert 0.3 < rows[draft]["agreement"] <= 1
        assert rows[draft]["cost_ratio"] > 0
        assert rows[draft]["measured"].startswith("float32")
    assert rows["self:int8"]["agreement"] is None
    table = invoke("--folder", str(tmp_path / "models"))
    assert f"{rows['self:int4']['agreement']:.3f}" in table.stdout
    assert all(row["agreement"] is None for row in json.loads(invoke("--dtype", "bfloat16", *words).stdout))


def test_siblings_in_the_hub_cache_are_found(tmp_path, monkeypatch):
    repo = tmp_path / "models--org--small"
    snapshot = repo / "snapshots" / "abc"
    tiny.make_tokenizer().save_pretrained(snapshot)
    with quiet():
        tiny.make_model(1).save_pretrained(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = [draft for draft, _ in known._found(target(), [])]
    assert found == ["self:int4", "self:int8", "org/small"]


def test_a_broken_file_of_measurements_is_started_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    (tmp_path / known.FILE).write_text("{")
    info = target()
    known.remember(info, info, "float32", "here", 0.5, 0.75)
    stored = json.loads((tmp_path / known.FILE).read_text())
    assert list(stored.values()) == [{"cost_ratio": 0.5, "agreement": 0.75}]


def test_a_folder_that_is_not_there_is_one_line():
    done = invoke("--folder", "nowhere")
    assert done.exit_code == 2
    assert "--folder nowhere: no such folder" in done.stderr


# Where no draft is named


def test_a_strategy_without_a_draft_gets_the_targets_own_int4_copy_and_says_so(tmp_path):
    out = tmp_path / "run"
    words = "run -s speculative -t tiny --limit 1 --max-new-tokens 8 --trace 0 --warmup 0 --require-lossless --out"
    done = CliRunner().invoke(app, [*words.split(), str(out)])
    assert done.exit_code == 0, done.output
    assert "no --draft for speculative: the target drafts for itself, in int4 (--draft self:int4)" in done.stderr
    assert "as well" not in done.stderr
    assert json.loads((out / "manifest.json").read_text())["plan"]["draft"] == "self:int4"


@pytest.mark.parametrize(
    "changes",
    [
        dict(strategy=("lookup",)),
        dict(draft="tiny-draft"),
        dict(runtime="transformers"),
        dict(draft_quant="int8"),
        dict(target_quant="int4"),
        dict(tp=2),
        dict(place="target=cuda:0"),
        dict(place="target=cpu,draft=cuda:0"),
        dict(strategy=("lookup", "auto")),
    ],
)
def test_nothing_is_chosen_where_a_draft_is_named_not_needed_or_not_to_be_had(changes):
    plan = Plan(**(dict(target="tiny", strategy=("speculative",)) | changes))
    assert with_own_draft(plan) == (plan, None)
