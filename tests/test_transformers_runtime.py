"""The generic runtime: whatever is accepted, rejected or batched, a row computes what it would compute afresh."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from specbench.errors import ModelError
from specbench.models.transformers_runtime import TransformersModel

VOCAB, CONTEXT = 64, 96
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2_LIKE: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=1, eos_token_id=2
)
GPT_NEO: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    max_position_embeddings=CONTEXT,
    bos_token_id=1,
    eos_token_id=2,
)

RAGGED = {
    "llama": lambda: hf.LlamaConfig(num_key_value_heads=2, **SMALL),
    "qwen2": lambda: hf.Qwen2Config(num_key_value_heads=2, **SMALL),
    "qwen3": lambda: hf.Qwen3Config(num_key_value_heads=2, head_dim=8, **SMALL),
    "gpt2": lambda: hf.GPT2Config(**GPT2_LIKE),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SMALL),
    "phi3": lambda: hf.Phi3Config(num_key_value_heads=2, **SMALL),
    "mixtral": lambda: hf.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL),
    "gpt_neo": lambda: hf.GPTNeoConfig(attention_types=[[["global"], 2]], **GPT_NEO),  # eager attention only
}
ONE_ROW = {
    "bloom": (lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "no position_ids"),
    "gpt_neo": (lambda: hf.GPTNeoConfig(attention_types=[[["global", "local"], 1]], window_size=8, **GPT_NEO), "slots"),
}


def make(config, **settings):
    """A random model whose weights are large enough for a wrong mask to show."""
    torch.manual_seed(1)
    kind: Any = hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind._from_config(config, attn_implementation="sdpa" if kind._supports_sdpa else "eager").eval()
    model.requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.3)
    return TransformersModel(model, name=config.model_type, **{"context_length": CONTEXT, **settings})


@pytest.fixture(scope="module")
def llama():
    return make(RAGGED["llama"]())


def afresh(model, context, last=1):
    with torch.inference_mode():
        ids = torch.tensor([[int(token) for token in context]])
        return model.hf_model(ids, use_cache=False).logits[0, -last:, : model.vocab_size]


def agrees(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def fuzz(model, rows, steps, seed):
    """Grows, keeps, cuts and replaces rows at random, several at a time or one, in any order."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(0, VOCAB, rng.integers(1, 20)) for _ in range(rows)]
    for _ in range(steps):
        chosen = rng.permutation(rows)[: rng.integers(1, rows + 1)].tolist()
        for row in chosen:
            kept = contexts[row][: rng.integers(1, len(contexts[row]) + 1)]
            contexts[row] = np.concatenate([kept, rng.integers(0, VOCAB, rng.integers(0, 8))])[:CONTEXT]
        lasts = [int(rng.integers(1, min(6, len(contexts[row])) + 1)) for row in chosen]
        got = model.advance([contexts[row] for row in chosen], lasts, chosen)
        agrees(got, torch.cat([afresh(model, contexts[row], last) for row, last in zip(chosen, lasts, strict=True)]))


@pytest.mark.parametrize("architecture", RAGGED)
def test_each_row_of_a_ragged_batch_equals_its_own_single_run(architecture):
    """D8, D38: random accepting, rejecting and rolling back, over rows of different lengths, prefills among them."""
    model = make(RAGGED[architecture]())
    assert model.one_row_because == ""
    fuzz(model, rows=4, steps=25, seed=3)
    model.reset()
    fuzz(model, rows=3, steps=5, seed=4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_copied_row_goes_on_as_the_row_it_was_copied_from(architecture):
    model = make(RAGGED[architecture]())
    model.copy_row(0, 1)  # nothing is cached yet, and nothing is copied
    ids = np.random.default_rng(1).integers(0, VOCAB, 30)
    model.advance([ids])
    model.advance([ids[::-1].copy()], rows=[1])
    for to in (1, 4):
        model.copy_row(0, to)
        model.trace = []
        first, second = model.advance([np.append(ids, [3, 4, 5])] * 2, 3, [0, to]).split(3)
        assert model.trace[0].new_tokens == 6
        assert torch.equal(first, second)
        agrees(first, afresh(model, np.append(ids, [3, 4, 5]), 3))
        model.advance([ids])
    assert make(ONE_ROW["bloom"][0]()).max_rows == 1
    with pytest.raises(ValueError, match=r"at most 1 row"):
        make(ONE_ROW["bloom"][0]()).copy_row(0, 1)


@pytest.mark.parametrize("architecture", ONE_ROW)
def test_architecture_that_cannot_be_ragged_says_so(architecture):
    """D37: no silent loop and no wrong row; one row at a time is right."""
    config, reason = ONE_ROW[architecture]
    model = make(config())
    assert model.max_rows == 1
    assert reason in model.one_row_because
    fuzz(model, rows=1, steps=20, seed=5)
    with pytest.raises(ValueError, match="at most 1 row"):
        model.advance([[1, 2], [3, 4]])


def test_dynamic_rope_would_let_rows_influence_each_other():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic" in make(hf.LlamaConfig(rope_parameters=rope, **SMALL)).one_row_because


def test_probe_finds_what_no_rule_knows(monkeypatch):
    """A forward that ignores the mask of the batch is found by trying, not by its name."""
    real = hf.LlamaForCausalLM.forward

    def forgetful(self, input_ids, attention_mask=None, position_ids=None, cache=None, **rest):
        return real(self, input_ids, position_ids=position_ids, cache=cache, **rest)

    monkeypatch.setattr(hf.LlamaForCausalLM, "forward", forgetful)
    assert "influence each other" in make(RAGGED["llama"]()).one_row_because


def test_prompt_of_one_token_and_its_continuation(llama):
    """D7."""
    llama.reset()
    context = [10]
    for _ in range(12):
        logits = llama.advance([context])
        agrees(logits, afresh(llama, context))
        context.append(int(logits.argmax()))


@pytest.mark.parametrize("last", [1, 3, 9])
def test_context_that_is_cached_already_is_computed_again_as_far_as_asked(llama, last):
    llama.reset()
    context = list(range(9))
    llama.advance([context])
    agrees(llama.advance([context], last), afresh(llama, context, last))
    agrees(llama.advance([context[:4]], 2), afresh(llama, context[:4], 2))


def test_only_what_is_missing_is_computed(llama):
    llama.reset()
    llama.trace = []
    llama.advance([[1, 2, 3, 4, 5]])
    llama.advance([[1, 2, 3, 9, 9, 9]])
    llama.advance([[1, 2, 3, 9], [7, 7, 7]])
    trace, llama.trace = llama.trace, None
    assert [(forward.rows, forward.new_tokens) for forward in trace] == [(1, 5), (1, 3), (2, 4)]
    assert all(forward.end_ns > forward.start_ns for forward in trace)
    assert llama.last_forward_ns == trace[-1].end_ns - trace[-1].start_ns


def test_rows_not_named_stay_as_they_are(llama):
    llama.reset()
    first, second, third = [1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]
    llama.advance([first, second, third])
    llama.advance([[20, 21, 22, 23, 24, 25]], rows=[1])
    llama.trace = []
    agrees(llama.advance([[*third, 13], [*first, 14]], rows=[2, 0]),
           torch.cat([afresh(llama, [*third, 13]), afresh(llama, [*first, 14])]))  # fmt: skip
    trace, llama.trace = llama.trace, None
    assert trace[0].new_tokens == 2


def test_equal_rows_need_no_mask_and_are_right(llama):
    llama.reset()
    contexts = np.random.default_rng(0).integers(0, VOCAB, (3, 12))
    for end, rows in ((8, [0, 1, 2]), (9, [0, 1, 2]), (12, [0, 1, 2]), (10, [2, 0, 1])):
        got = llama.advance([context[:end] for context in contexts], 2, rows)
        agrees(got, torch.cat([afresh(llama, context[:end], 2) for context in contexts]))


def test_memory_grows_and_is_kept_and_reserved(llama):
    llama.reset()
    llama.reserve(2, CONTEXT)
    long = np.random.default_rng(1).integers(0, VOCAB, CONTEXT)
    agrees(llama.advance([long[:40], long], [1, 3]), torch.cat([afresh(llama, long[:40]), afresh(llama, long, 3)]))
    grown = make(RAGGED["llama"](), context_length=600)
    long = np.random.default_rng(1).integers(0, VOCAB, 600)
    grown.advance([long[:200], long[:5]])
    agrees(grown.advance([long]), afresh(grown, long))  # row 0 outgrew the first 256 slots


def test_logits_are_cut_to_the_common_vocabulary():
    """D17."""
    model = make(RAGGED["qwen2"](), vocab_size=50)
    assert model.vocab_size == 50
    logits = model.advance([[1, 2, 3], [4, 5]], [2, 1])
    assert logits.shape == (3, 50)
    agrees(logits, torch.cat([afresh(model, [1, 2, 3], 2), afresh(model, [4, 5])]))


@pytest.mark.parametrize(
    ("contexts", "last", "rows"),
    [
        ([[]], 1, None),
        ([], 1, None),
        ([[1, 2]], 0, None),
        ([[1, 2]], 3, None),
        ([[1], [2]], 1, [0, 0]),
        ([[1], [2]], [1], None),
        ([[1]], 1, [-1]),
        ([[1]], 1, [256]),
        ([[1] * (CONTEXT + 1)], 1, None),
    ],
)
def test_calls_that_cannot_be_answered_are_refused(llama, contexts, last, rows):
    with pytest.raises(ValueError):
        llama.advance(contexts, last, rows)


def test_contexts_are_neither_changed_nor_kept(llama):
    llama.reset()
    context = np.arange(1, 9)
    llama.advance([context])
    assert context.tolist() == list(range(1, 9))
    context[:] = 0
    agrees(llama.advance([[1, 2, 3, 4, 5, 6, 7, 8, 9]]), afresh(llama, list(range(1, 10))))


def test_forward_that_failed_leaves_only_what_is_true(llama):
    llama.reset()
    llama.advance([[1, 2, 3, 4]])
    with pytest.raises(IndexError):
        llama.advance([[1, 2, VOCAB + 5]])
    agrees(llama.advance([[1, 2, 3, 4, 5]]), afresh(llama, [1, 2, 3, 4, 5]))


def test_layer_that_keeps_another_state_is_an_error(llama):
    """D13, D16: a rollback that would not happen is never passed over."""
    model = make(RAGGED["llama"]())
    model._cache.row_layers.append(type(model._cache.row_layers[0])(model._cache.window, [1, 1]))
    with pytest.raises(ModelError, match="ignored the KV cache"):
        model.advance([[1, 2, 3]])


def test_model_without_a_cache_is_refused():
    with pytest.raises(ModelError, match="no KV cache"):
        make(hf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT))


def test_weight_bytes_are_what_one_token_reads():
    tied = make(hf.LlamaConfig(tie_word_embeddings=True, **SMALL))
    apart = make(hf.LlamaConfig(tie_word_embeddings=False, **SMALL))
    assert tied.weight_bytes == apart.weight_bytes == 4 * tied.hf_model.num_parameters()
    sparse = make(RAGGED["mixtral"]())  # two of four experts a token
    experts = sum(w.numel() for name, w in sparse.hf_model.named_parameters() if ".experts." in name)
    rest = sparse.hf_model.num_parameters() - experts - VOCAB * 32
    assert sparse.weight_bytes == 4 * (rest + experts // 2)


def test_bfloat16_rows_are_close():
    model = make(RAGGED["llama"]())
    half = TransformersModel(model.hf_model.to(torch.bfloat16), name="half", context_length=CONTEXT)
    assert (half.dtype, half.max_rows) == ("bfloat16", 256)
    got = half.advance([[1, 2, 3, 4, 5], [6, 7]], [2, 1])
    expected = torch.cat([afresh(half, [1, 2, 3, 4, 5], 2), afresh(half, [6, 7])])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=0.05 * float(expected.abs().max()), rtol=0)
