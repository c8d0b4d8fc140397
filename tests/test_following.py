"""Self-drafts that take over what their target has read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_drafts import plan
from test_packed import make, packed, text
from toys import decode

from specbench.errors import ModelError
from specbench.hardware.clock import Clock, Drain
from specbench.models import load as loading
from specbench.models.base import CachedModel
from specbench.models.draft_options import DraftOptions
from specbench.models.drafts import describe_draft
from specbench.models.info import describe
from specbench.models.sparse_select import Selection, sinks_and_window
from specbench.models.specs import parse
from specbench.results import forecasts
from specbench.results import run as runs
from specbench.results.measure import Ending, measure
from specbench.strategies import registry
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.base import Request
from specbench.strategies.sampling import Sampling
from specbench.strategies.sparse_kv import Options as SparseOptions
from specbench.strategies.sparse_kv import SparseKv


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "specbench-cache"))


def pair(dtype: str = "float32", family: str = "llama", **options) -> tuple[CachedModel, CachedModel]:
    """A target, and a form of the same weights that follows it."""
    target, draft = packed(make(family, dtype), dtype), packed(make(family, dtype), dtype, **options)
    draft.original = target
    return target, draft


def reads(model: CachedModel, ids: np.ndarray, row: int = 0) -> int:
    """New tokens of the model's next forward."""
    model.trace = []
    model.advance([ids], rows=[row])
    (forward,) = model.trace
    model.trace = None
    return forward.new_tokens


def test_only_the_latest_token_is_left_to_read():
    target, draft = pair(quant="int4")
    ids = text(50)
    target.advance([ids[:40]])
    draft.follow(0, ids[:41])
    assert reads(draft, ids[:41]) == 1
    assert reads(draft, ids[:43]) == 2, "what it drafted itself stays"
    target.advance([ids[:48]])
    draft.follow(0, ids[:49])
    assert reads(draft, ids[:49]) == 1, "after a draft that was accepted whole as well"


def test_what_was_rejected_is_dropped_and_nothing_stale_is_left():
    target, draft = pair()
    ids, other = text(50), text(50, seed=1)
    target.advance([ids[:40]])
    draft.follow(0, ids[:40])
    draft.advance([np.concatenate([ids[:40], other[:6]])])
    target.advance([np.concatenate([ids[:40], other[:6]])])
    truth = np.concatenate([ids[:40], other[:2], ids[40:44]])
    target.advance([truth[:-1]])
    draft.follow(0, truth)
    assert reads(draft, truth) == 1
    fresh = packed(make()).advance([truth])
    assert torch.allclose(draft.advance([truth]), fresh, atol=1e-5)


def test_following_again_in_the_middle_of_a_draft_keeps_it():
    target, draft = pair()
    ids = text(30)
    target.advance([ids[:20]])
    for end in range(21, 26):
        draft.follow(0, ids[:end])
        assert reads(draft, ids[:end]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_and_values_are_the_targets(family, dtype):
    """So the same weights go on with the same bits as the target itself, and rounded ones with bfloat16's of them."""
    target, draft = pair(dtype, family)
    ids = text(33)
    target.advance([ids[:32]])
    draft.follow(0, ids)
    assert torch.equal(draft.advance([ids]), target.advance([ids]))


def test_values_are_taken_over_into_channels_that_were_renumbered():
    target, draft = pair(group_offset=3)
    ids = text(33)
    target.advance([ids[:32]])
    draft.follow(0, ids)
    assert reads(draft, ids) == 1
    assert torch.allclose(draft.advance([ids]), target.advance([ids]), atol=1e-4)


def test_every_row_follows_its_own():
    target, draft = pair(quant="int8")
    ids, other = text(30), text(50, seed=1)
    target.advance([ids, other])
    draft.follow(1, other)
    assert reads(draft, other, row=1) == 1
    draft.follow(0, ids)
    assert reads(draft, ids, row=0) == 1
    target.forget(1)
    draft.forget(1)
    draft.follow(1, ids)
    assert reads(draft, ids, row=1) == len(ids), "the target has forgotten the row"


def test_a_model_without_an_original_follows_nobody():
    target, draft = pair(quant="int4")
    draft.original = None
    ids = text(30)
    target.advance([ids])
    draft.follow(0, ids)
    assert reads(draft, ids) == len(ids)


def test_a_copied_row_holds_what_it_was_copied_from():
    target, draft = pair()
    ids, other = text(30), text(30, seed=1)
    target.advance([ids, other])
    for row, tokens in enumerate((ids, other)):
        draft.follow(row, tokens)
    draft.copy_row(0, 1)
    target.forget(1)
    target.advance([ids[:20]], rows=[1])
    draft.follow(1, ids)
    assert torch.allclose(draft.advance([ids], rows=[1]), target.advance([ids], rows=[0]), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("options", [{"quant": "int8"}, {"quant": "int4", "head_quant": "int8"}, {"quant": "int4"}])
def test_other_kernels_and_another_dtype_hold_the_same_numbers(family, options):
    target, draft = pair("float32", family, **options)
    ids = text(40)
    target.advance([ids])
    draft.follow(0, ids)
    ours, theirs = draft._cache.blocks, target._cache.blocks
    assert torch.equal(ours[:, :, 0, :, :40], theirs[:, :, 0, :, :40].to(torch.bfloat16))


@pytest.mark.parametrize("name", ["speculative", "cascade", "auto"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, verify="rejection")]
)
def test_no_draft_reads_what_its_target_has_read(name, sampling):
    target, draft = pair("bfloat16", quant="int4")
    kind = registry.get(name)
    strategy = kind({"target": target, "draft": draft}, kind.Options())
    strategy.prepare(1, 100)
    strategy.practise([text(30, seed=5), text(40, seed=6)])
    strategy.reset()
    request = Request(1, text(60).tolist(), 24)
    read, made = [], 0
    draft.trace = []
    for step in strategy.generate([request], sampling):
        read += [forward.new_tokens for forward in draft.trace]
        draft.trace.clear()
        made += len(step.tokens)
        request.done = made >= request.max_new_tokens
    draft.trace = None
    assert max(read, default=0) < 20, "never the prompt"
    if name == "speculative":
        assert set(read) == {1}


def test_a_run_says_who_follows_and_the_output_stays(tmp_path):
    done = runs.run(plan(tmp_path / "run", draft="self:int4", require_lossless=True))
    assert done.failures == []
    arm = next(arm for arm in done.manifest["arms"] if arm["strategy"] == "speculative")
    assert arm["roles"]["draft"]["follows"] is True
    assert arm["roles"]["target"]["follows"] is False
    assert forecasts.following(arm["roles"]) == ["draft"]


def test_it_can_be_switched_off(tmp_path):
    done = runs.run(plan(tmp_path / "run", "draft.follow=false", draft="self:int4", require_lossless=True))
    assert done.failures == []
    arm = next(arm for arm in done.manifest["arms"] if arm["strategy"] == "speculative")
    assert arm["roles"]["draft"]["follows"] is False
    assert done.manifest["models"]["draft"]["spec"] == "self:int4 [reads itself]"
    assert done.manifest["models"]["draft"]["fingerprint"].endswith(":apart")


def test_only_a_self_draft_can_be_told_not_to():
    target = describe(parse("tiny"), "target")
    with pytest.raises(ModelError, match="give --draft self:int4"):
        describe_draft(parse("tiny-draft"), target, options=DraftOptions(follow=False))


def test_a_draft_that_is_not_beside_its_target_reads_itself():
    target = describe(parse("tiny"), "target")
    info = describe_draft(parse("self:int4"), target)
    draft = loading.load(info, quant="int4")
    generic = loading.load(target, runtime="transformers")
    loading.connect({"target": target, "draft": info}, {"target": generic, "draft": draft})
    assert draft.original is None
    ours = loading.load(target)
    loading.connect({"target": target, "draft": info}, {"target": ours, "draft": draft})
    assert draft.original is ours
    loading.connect({"target": target, "draft": info}, {"target": generic, "draft": draft})
    assert draft.original is None, "the target that it followed is gone"
    other = describe_draft(parse("tiny-draft"), target)
    plain = loading.load(other)
    loading.connect({"target": target, "draft": other}, {"target": ours, "draft": plain})
    assert plain.original is None


# A small cache of the target's, read by a draft's weights


@pytest.mark.parametrize("options", [{}, {"group_offset": 3}], ids=["as they are", "channels renumbered"])
@pytest.mark.parametrize("kind", ["snapkv", "stream"])
def test_a_view_of_a_draft_that_follows_is_chosen_from_what_the_target_has_read(kind, options):
    """The same weights over it go on as the target's own view does, and the draft itself reads nothing."""
    target, draft = pair(**options)
    rule, ids = Selection(kind, window=8), text(70)
    views = [target.sparse_view(rule), draft.sparse_view(rule)]
    views[0].watch(True)
    draft.trace = []
    target.advance([ids[:60]])
    for view in views:
        view.select(0, ids[:61], 24)
        assert reads(view, ids[:61]) == 1
        view.advance([ids[:64]])
    target.advance([ids[:66]])
    for view in views:
        view.follow(0, ids[:67])
    if kind == "snapkv":
        assert not torch.equal(views[1]._choose(0, 60, 24)[0, 0], sinks_and_window(60, 24, 4)), "queries were kept"
    ours, expected = (view.advance([ids[:67]]) for view in reversed(views))
    assert torch.allclose(ours, expected, atol=1e-4)
    assert draft.trace == []


@pytest.mark.parametrize(("quant", "budget", "accepted"), [("int4", 48, 0.0), ("int8", 48, 0.0), ("int8", 128, 0.8)])
def test_rounded_weights_over_a_small_cache_keep_the_output_and_read_no_prompt(quant, budget, accepted):
    """The largest budget keeps all of the prompt; random weights agree little over a part of it."""
    ids = [int(token) for token in np.tile(text(40), 3)]
    target, draft = pair(quant=quant)
    given = SparseOptions(draft="model", gamma=3, budget=budget, window=8)
    strategy = SparseKv({"target": target, "draft": draft}, given)
    draft.trace = []
    asked = [Request(at, ids[: 100 + 7 * at], 30) for at in range(2)]
    outcomes = measure(strategy, asked, Sampling(), Ending(), Clock(), Drain())
    steps = [step for outcome in outcomes for step in outcome.steps]
    assert sum(step[2] for step in steps) > 20
    assert sum(step[3] for step in steps) > accepted * sum(step[2] for step in steps)
    assert draft.trace == []
    assert strategy.view.weight_bytes == draft.weight_bytes < target.weight_bytes
    plain = Autoregressive({"target": packed(make())}, PlainOptions())
    again = [Request(one.key, one.ids, 30) for one in asked]
    assert [outcome.token_ids for outcome in outcomes] == decode(plain, again, Sampling())


def test_a_view_of_a_draft_that_follows_is_charged_for_following_and_not_for_reading():
    target, draft = pair(quant="int4")
    given = SparseOptions(draft="model", gamma=3, budget=48, window=8, explain=True)
    strategy = SparseKv({"target": target, "draft": draft}, given)
    strategy.prepare(2, 160)
    assert strategy.costs.follow_ms > 0
    assert strategy.costs.read_ms == 0
    own = SparseKv({"target": target, "draft": draft}, SparseOptions(gamma=3, budget=48, window=8))
    draft.original = None
    other = SparseKv({"target": target, "draft": draft}, given)
    assert own._misses < strategy._misses < other._misses
