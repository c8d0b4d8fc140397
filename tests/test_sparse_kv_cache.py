"""Small caches: what is chosen for them, that it is copied right, and that the forward over them is the model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specbench.errors import ModelError, UsageError
from specbench.models import native
from specbench.models.packed import PackedModel
from specbench.models.packed_linear import can_prepack
from specbench.models.sparse_select import Selection, attention_received, sinks_and_window, snapkv
from specbench.models.transformers_runtime import TransformersModel

VOCAB = 97
needs_bf16 = pytest.mark.skipif(
    not can_prepack(torch.bfloat16), reason="this processor has no bfloat16 kernels in oneDNN"
)
DTYPES = ["float32", pytest.param("bfloat16", marks=needs_bf16)]
needs_native = pytest.mark.skipif(native.load(torch.float32) is None, reason="our kernels cannot be had here")
STREAM = Selection("stream", sinks=4)
RATIOS = {1: (4, 4), 3: (6, 2), 4: (4, 1), 7: (7, 1)}  # query heads per key head: (heads, key heads)


def make(heads: int = 4, kv_heads: int = 2, dtype: str = "float32", family: str = "llama"):
    """A random model whose attention is sharp enough to matter."""
    torch.manual_seed(5)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 16 * heads, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 1024,
    }  # fmt: skip
    config, cls = (LlamaConfig, LlamaForCausalLM) if family == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    model = cls(config(**shape, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5 * 1.5)
    return model.to(getattr(torch, dtype))


def packed(model, dtype: str = "float32") -> PackedModel:
    return PackedModel.from_transformers(model, name="random", device="cpu", dtype=dtype, vocab_size=VOCAB)


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def watched(dense: PackedModel, rule: Selection = Selection(window=8)):  # noqa: B008 - frozen
    view = dense.sparse_view(rule)
    view.watch(True)
    return view


# What is chosen


def reference_scores(weights: torch.Tensor, kv_heads: int, window: int) -> torch.Tensor:
    """From all of a layer's attention, (heads, S, S): what every position before the window got, pooled. By loops."""
    heads, length, _ = weights.shape
    group, earlier = heads // kv_heads, length - window
    got = torch.zeros(kv_heads, earlier, dtype=torch.float64)
    for head in range(heads):
        for query in range(length - window, length):
            got[head // group] += weights[head, query, :earlier].double()
    pooled = torch.zeros_like(got)
    for at in range(earlier):
        pooled[:, at] = got[:, max(0, at - 2) : at + 3].sum(1) / 5
    return pooled


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("length", "budget", "window"), [(70, 24, 8), (33, 32, 8), (10, 9, 8), (40, 12, 1)])
def test_snapkv_is_what_all_of_the_attention_says(ratio, length, budget, window):
    """Against an O(S^2) reference in float64, written with loops; for every number of query heads per key head."""
    heads, kv_heads = RATIOS[ratio]
    generator = torch.Generator().manual_seed(ratio)
    queries = torch.randn(length, heads, 16, generator=generator) * 0.7
    keys = torch.randn(kv_heads, length, 16, generator=generator)
    scores = torch.einsum("qhd,hkd->hqk", queries.double(), keys.double().repeat_interleave(ratio, 0))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = reference_scores(weights, kv_heads, window).topk(budget - window).indices
    chosen = snapkv(queries[-window:], keys, budget, window)
    assert chosen.shape == (kv_heads, budget)
    assert (chosen.diff(dim=1) > 0).all()
    for head in range(kv_heads):
        assert set(chosen[head].tolist()) == {*expected[head].tolist(), *range(length - window, length)}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_prefills_own_queries_choose_what_transformers_attention_says(ratio, family):
    """The scale, the rotation, the normed queries and the order of heads are those of the model's attention."""
    heads, kv_heads = RATIOS[ratio]
    model, ids = make(heads, kv_heads, family=family), text(60)
    with torch.inference_mode():
        attention = model(torch.tensor([ids.tolist()]), output_attentions=True).attentions
    dense = packed(model)
    view = watched(dense)
    dense.advance([ids])
    chosen = view._choose(0, 60, 20)
    assert chosen.shape == (3, kv_heads, 20)
    for layer in range(3):
        scores = reference_scores(attention[layer][0], kv_heads, 8)
        for head in range(kv_heads):
            found = chosen[layer, head].tolist()
            assert found[-8:] == list(range(52, 60))
            # what is chosen got no less than what is not, up to rounding
            others = sorted(set(range(52)) - set(found[:-8]))
            assert scores[head, found[:-8]].min() >= scores[head, others].max() - 1e-5


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    ("known", "count", "budget", "window"), [(70, 8, 24, 8), (513, 32, 200, 32), (1000, 20, 33, 32), (700, 70, 128, 70)]
)
def test_our_kernels_choose_what_torch_chooses(ratio, dtype, known, count, budget, window):
    """Over the ends of pieces, with fewer queries than the window, with more than attend together; on one thread and
    two. In bfloat16 up to what weights are rounded to."""
    heads, kv_heads = RATIOS[ratio]
    dense = packed(make(heads, kv_heads, dtype), dtype)
    generator = torch.Generator().manual_seed(known + ratio)
    cache = dense._cache
    cache.fit(2, known + 9, [0, 0])
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=generator))
    cache.blocks[:, :, :, :, known:] = torch.nan
    queries = (torch.randn(3, count, heads, 16, generator=generator) * 0.7).to(cache.dtype)
    chosen = dense._decoder.native.choose(queries, cache, 1, known, budget, window, 5)
    keys = cache.blocks[:, 0, 1, :, :known]
    if dtype == "float32":
        expected = [snapkv(queries[layer], keys[layer], budget, window) for layer in range(3)]
        assert torch.equal(chosen, torch.stack(expected))
    for layer in range(3):
        received = attention_received(queries[layer], keys[layer])[:, : known - window]
        scores = F.avg_pool1d(received, 5, stride=1, padding=2)
        assert chosen[layer, :, budget - window :].tolist() == [list(range(known - window, known))] * kv_heads
        for head in range(kv_heads):
            kept = chosen[layer, head, : budget - window]
            assert (kept.diff() > 0).all()
            left = torch.ones(known - window, dtype=torch.bool)
            left[kept] = False
            assert scores[head, kept].min() >= scores[head, left].max() * (1 - 2**-6)
    torch.set_num_threads(2)
    assert torch.equal(dense._decoder.native.choose(queries, cache, 1, known, budget, window, 5), chosen)


def test_fewer_queries_than_the_window_choose_as_well():
    queries, keys = torch.randn(3, 4, 16), torch.randn(2, 50, 16)
    received = attention_received(queries, keys)
    assert torch.allclose(received.sum(1), torch.full((2,), 6.0), atol=1e-5)  # 3 queries of 2 heads each
    assert (received[:, -1] > 0).all()
    assert snapkv(queries, keys, 20, 8)[:, -8:].tolist() == [list(range(42, 50))] * 2


def test_a_query_gives_nothing_to_what_comes_after_it():
    queries, keys = torch.zeros(2, 2, 16), torch.zeros(1, 4, 16)
    assert torch.allclose(attention_received(queries, keys)[0], 2 * torch.tensor([7 / 12, 7 / 12, 7 / 12, 1 / 4]))


def test_sinks_and_window():
    assert sinks_and_window(20, 7, 3).tolist() == [0, 1, 2, 16, 17, 18, 19]
    assert sinks_and_window(8, 7, 0).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sinks_and_window(8, 7, 6).tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("wrong", [dict(kind="h2o"), dict(window=0), dict(sinks=-1)])
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        Selection(**wrong)


# The queries of the latest tokens


@pytest.mark.parametrize("seed", range(3))
def test_the_queries_kept_are_those_of_the_text_whatever_was_rejected_on_the_way(seed):
    random, model = np.random.default_rng(seed), make()
    dense, once = packed(model), packed(make())
    dense.watch_queries(8)
    once.watch_queries(200)
    contexts = [text(int(random.integers(1, 30)), row) for row in range(3)]
    for _ in range(12):
        for row, context in enumerate(contexts):
            keep = len(context) - int(random.integers(0, min(6, len(context))))
            contexts[row] = np.concatenate([context[:keep], random.integers(0, VOCAB, int(random.integers(1, 8)))])
        dense.advance(contexts)
    once.advance(contexts)
    for row, context in enumerate(contexts):
        found, expected = dense._queries.of(row, len(context)), once._queries.of(row, len(context))
        assert 1 <= found.shape[1] <= 8
        assert torch.allclose(found, expected[:, -found.shape[1] :], atol=1e-4)
        assert dense._queries.of(row, len(context) + 1) is None


def test_a_whole_window_of_queries_is_there_after_every_verification():
    random, dense, once = np.random.default_rng(1), packed(make()), packed(make())
    dense.watch_queries(8)
    once.watch_queries(500)
    verified = text(3)
    dense.advance([verified])
    for _ in range(30):
        draft = random.integers(0, VOCAB, int(random.integers(0, 7)))
        verified = np.append(verified, random.integers(0, VOCAB))
        dense.advance([np.append(verified, draft)], last=len(draft) + 1)
        verified = np.append(verified, draft[: random.integers(0, len(draft) + 1)])
        assert dense._queries.of(0, len(verified)).shape[1] == min(8, len(verified))
    once.advance([verified])
    expected = once._queries.of(0, len(verified))[:, -8:]
    assert torch.allclose(dense._queries.of(0, len(verified)), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeping_queries_changes_no_bit(dtype):
    plain, noted = packed(make(dtype=dtype), dtype), packed(make(dtype=dtype), dtype)
    noted.watch_queries(16)
    for contexts in ([text(300), text(40, 1)], [np.append(text(300), [1, 2, 3]), np.append(text(40, 1), [4])]):
        assert torch.equal(plain.advance(contexts), noted.advance(contexts))
    noted.watch_queries(0)
    assert torch.equal(plain.advance([text(9, 2)]), noted.advance([text(9, 2)]))


# The cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [Selection(window=8), STREAM], ids=["snapkv", "stream"])
def test_keys_and_values_of_the_chosen_positions_are_copied_as_they_are(dtype, rule):
    dense = packed(make(dtype=dtype), dtype)
    view = watched(dense, rule)
    contexts = [text(400, row) for row in range(3)]
    dense.advance(contexts)
    for row in (1, 0, 2):
        view.select(row, contexts[row], 24)
    for row in range(3):
        positions = view._choose(row, 400, 24)
        for layer in range(3):
            for head in range(2):
                expected = dense._cache.blocks[layer, :, row, head, positions[layer, head]]
                assert torch.equal(view._cache.blocks[layer, :, row, head, :24], expected)
    assert view.last_select_ns > 0
    assert view.row_bytes < dense.row_bytes


def test_the_forward_over_a_small_cache_is_the_models_over_a_text_with_gaps():
    """Against transformers with a mask: new tokens see the sinks, the window and each other, at their true positions.

    The model read the text itself with nothing hidden, as it does here.
    """
    model, ids, new = make(), text(60), text(5, 9)
    everything = np.concatenate([ids, new])
    seen = torch.ones(65, 65, dtype=torch.bool).tril()
    seen[60:, 4:44] = False  # 4 sinks and the last 16 of 60 are left
    mask = torch.zeros(1, 1, 65, 65).masked_fill(~seen, -torch.inf)
    with torch.inference_mode():
        expected = model(torch.tensor([everything.tolist()]), attention_mask=mask).logits[0, 60:]
    dense = packed(model)
    view = dense.sparse_view(STREAM)
    dense.advance([ids])
    view.select(0, ids, 20)
    single = torch.cat([view.advance([everything[:end]]) for end in range(61, 66)])
    assert (single - expected).abs().max() <= 1e-4 * expected.abs().max()
    view.select(0, ids, 20)
    view.trace = []
    assert (view.advance([everything], last=5) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert view.trace[0].new_tokens == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 19, 20])
def test_a_text_that_fits_the_budget_is_kept_whole(dtype, length):
    """Then the draft is the model itself, bit for bit in bfloat16."""
    dense = packed(make(dtype=dtype), dtype)
    view = watched(dense)
    ids = text(length)
    dense.advance([ids])
    view.select(0, ids, 20)
    view.trace = []
    logits, expected = view.advance([np.append(ids, 5)]), dense.advance([np.append(ids, 5)])
    assert torch.allclose(logits, expected, rtol=0, atol=0 if dtype == "bfloat16" else 1e-5)
    assert view.trace[0].new_tokens == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accepted", range(5))
def test_after_a_verification_the_draft_goes_on_from_full_attention(dtype, accepted):
    """Of a block of 4, any number accepted: what the target computed takes the place of the draft's own, the last
    draft token included, which the draft has never read; so one token is left to read, always."""
    dense = packed(make(dtype=dtype), dtype)
    view = watched(dense)
    ids, draft = text(90), [3, 1, 4, 1]
    dense.advance([ids[:-1]])
    view.select(0, ids, 24)
    for end in range(4):
        view.advance([[*ids, *draft[:end]]])
    own = view._cache.blocks[:, :, 0, :, 24:28].clone()
    dense.advance([[*ids, *draft]], last=5)
    verified = [*ids, *draft[:accepted], 77]
    view.follow(0, verified)
    cached = 90 + accepted
    assert view._lengths[0] == cached
    shift = 89 - 24
    assert torch.equal(view._cache.blocks[:, :, 0, :, 24 : cached - shift], dense._cache.blocks[:, :, 0, :, 89:cached])
    assert not torch.equal(own[:, :, :, :1], dense._cache.blocks[:, :, 0, :, 89:90])
    view.trace = []
    view.advance([verified])
    assert view.trace[0].new_tokens == 1


def test_rows_are_independent_of_each_other():
    """Ragged rows, chosen at different times and with different budgets, against each row alone."""
    contexts = [text(200, 0), text(30, 1), text(333, 2)]
    dense = packed(make())
    view = watched(dense)
    dense.advance(contexts)
    together: dict[int, torch.Tensor] = {}
    for row, budget in ((2, 64), (0, 30), (1, 40)):
        view.select(row, contexts[row], budget)
    longer = [np.append(context, [5] * (row + 1)) for row, context in enumerate(contexts)]
    logits = view.advance(longer, last=[1, 2, 3])
    for row, budget, part in zip(range(3), (30, 40, 64), logits.split([1, 2, 3]), strict=True):
        together[row] = part.clone()
        alone_dense = packed(make())
        alone = watched(alone_dense)
        alone_dense.advance([contexts[row]])
        alone.select(0, contexts[row], budget)
        assert torch.allclose(alone.advance([longer[row]], last=row + 1), together[row], atol=1e-4)
    view.forget(0)
    again = view.advance([longer[2]], last=3, rows=[2])
    assert torch.allclose(again, together[2], atol=1e-4)


def test_a_text_that_parts_from_the_selection_is_read_anew_with_nothing_left_out():
    """The contract of a model is kept: any context, at any time. Only following such a text makes no sense."""
    dense = packed(make())
    view = watched(dense)
    ids = text(90)
    dense.advance([ids])
    view.select(0, ids, 24)
    other = np.append(ids[:50], text(20, 3))
    expected = packed(make()).advance([other], last=4)
    assert torch.allclose(view.advance([other], last=4), expected, atol=1e-4)
    view.select(0, ids, 24)
    with pytest.raises(ValueError, match="50 of which agree"):
        view.follow(0, other)
    view.select(0, ids, 24)
    assert torch.allclose(view.advance([ids], last=3), packed(make()).advance([ids], last=3), atol=1e-4)


def test_a_selection_grows_without_a_limit():
    dense = packed(make())
    view = watched(dense)
    ids = text(600)
    dense.advance([ids[:100]])
    view.select(0, ids[:100], 24)
    for end in range(110, 600, 35):
        view.advance([ids[:end]], last=2)
        dense.advance([ids[: end + 1]])
        view.follow(0, ids[: end + 1])
    assert view._cache.slots < dense._cache.slots
    assert view._lengths[0] - view._shifts[0] == 24 + view._lengths[0] - 100


def test_what_a_selection_cannot_be_made_of():
    dense = packed(make())
    view = watched(dense)
    dense.advance([text(50)])
    with pytest.raises(ValueError, match="8 are fixed"):
        view.select(0, text(50), 8)
    with pytest.raises(NotImplementedError, match="cannot copy rows"):
        view.copy_row(0, 1)


def test_without_the_queries_of_the_rows_end_the_latest_positions_are_taken():
    dense = packed(make())
    view = dense.sparse_view(Selection(window=8))
    ids = text(60)
    dense.advance([ids])  # nobody was watching
    view.watch(True)
    view.select(0, ids, 20)
    assert view._choose(0, 60, 20)[0, 0].tolist() == [0, 1, 2, 3, *range(44, 60)]


def test_closing_a_view_leaves_the_model_as_it_was():
    dense = packed(make())
    expected = dense.advance([text(30)])
    view = dense.sparse_view(STREAM)
    view.select(0, text(30), 12)
    view.close()
    assert torch.allclose(dense.advance([text(30)]), expected, atol=1e-5)


def test_other_runtimes_say_that_they_have_no_small_cache():
    model = TransformersModel(make(), name="other", context_length=1024)
    with pytest.raises(ModelError, match="other: a sparse KV cache is made in the packed runtime on cpu.*transformers"):
        model.sparse_view(STREAM)
