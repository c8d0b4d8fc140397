"""The packed runtime against transformers' own forward, against itself alone, and bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specbench.errors import ModelError
from specbench.hardware.environment import environment
from specbench.models.kv_cache import LARGE, KeyValueCache, slots_for, zeros
from specbench.models.packed import PackedModel, supports
from specbench.models.packed_linear import PLAIN, can_prepack, multiply, pack
from specbench.models.quantised import quantise_int4, quantise_int8

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, tied head": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama, llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama, yarn rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "llama, one head per group": lambda: LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_key_value_heads": 4})),
    "llama, wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2, tied head": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
}
needs_bf16 = pytest.mark.skipif(
    not can_prepack(torch.bfloat16), reason="this processor has no bfloat16 kernels in oneDNN"
)


def make(family: str = "llama", dtype: str = "float32"):
    """A random model of the family whose attention, norms and biases all matter."""
    torch.manual_seed(7)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5 * 1.5)
    return model.to(getattr(torch, dtype))


def packed(model, dtype: str = "float32", **options) -> PackedModel:
    return PackedModel.from_transformers(model, name="random", device="cpu", dtype=dtype, vocab_size=VOCAB, **options)


def forward(model, ids) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


@pytest.fixture(autouse=True)
def torchs_operators(monkeypatch):
    """Here they compute; our own kernels are asked the same in `test_native`."""
    monkeypatch.setenv("SPECBENCH_NATIVE", "0")


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_agrees_with_transformers(family):
    """1e-4 relative, in one pass and token by token."""
    model = make(family)
    ids = text(75)
    expected = forward(model, ids)
    runtime = packed(model)
    logits = runtime.advance([ids], last=len(ids))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    runtime.reset()
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(len(ids))])
    assert (single - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(family):
    ids = text(80)
    expected = forward(make(family), ids)
    theirs = (forward(make(family, "bfloat16"), ids).float() - expected).pow(2).mean().sqrt()
    logits = packed(make(family, "bfloat16"), "bfloat16").advance([ids], last=len(ids))
    ours = (logits.float() - expected).pow(2).mean().sqrt()
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert ours <= 1.15 * theirs


def test_long_prompts_are_computed_in_chunks_with_the_same_result():
    model = make()
    ids = text(700)
    expected = forward(model, ids)
    runtime = packed(model)
    logits = runtime.advance([ids], last=300)
    assert (logits - expected[-300:]).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.allclose(runtime.advance([ids[:650]], last=2), expected[648:650], rtol=0, atol=1e-3)


def test_uneven_heads_and_threads_do_not_change_the_result(monkeypatch):
    """In float32 long caches are cut in pieces where the threads would otherwise wait for the last head."""
    monkeypatch.setattr("specbench.models.packed_attention.PIECED_SLOTS", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = make()
    ids = text(230)
    expected = forward(model, ids)
    runtime = packed(model)
    runtime.advance([ids[:200]])
    for end in (201, 202, 210, 230):
        logits = runtime.advance([ids[:end]], last=1)
        assert (logits[0] - expected[end - 1]).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_accepting_and_rejecting_equals_fresh_forwards(seed):
    """Ragged rows that grow, shrink, start anew, are named in any order, or are left out of a call."""
    random = np.random.default_rng(seed)
    model = make("qwen2")
    reference = FAMILIES["qwen2"]().eval()
    reference.load_state_dict(model.state_dict())
    runtime = packed(model)
    contexts = [text(int(random.integers(1, 90)), seed=row) for row in range(5)]
    for _ in range(25):
        rows = [int(row) for row in random.permutation(5)[: random.integers(1, 6)]]
        if random.random() < 0.5:
            rows.sort()
        for row in rows:
            keep = (
                len(contexts[row]) - int(random.integers(0, 6)) if random.random() < 0.9 else int(random.integers(0, 9))
            )
            added = random.integers(0, VOCAB, int(random.integers(1, 10)))
            contexts[row] = np.concatenate([contexts[row][: max(keep, 0)], added])
        lasts = [int(random.integers(1, min(6, len(contexts[row])) + 1)) for row in rows]
        logits = runtime.advance([contexts[row] for row in rows], last=lasts, rows=rows)
        expected = torch.cat([forward(reference, contexts[row])[-n:] for row, n in zip(rows, lasts, strict=True)])
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_a_cached_context_is_not_computed_again():
    runtime = packed(make())
    runtime.trace = []
    ids = text(50)
    runtime.advance([ids])
    runtime.advance([ids])
    runtime.advance([ids], last=3)
    runtime.advance([np.append(ids[:40], [1, 2])])
    assert [forward.new_tokens for forward in runtime.trace] == [50, 1, 3, 2 if ids[40] != 1 else 1]
    runtime.reset()
    runtime.advance([ids.tolist()])
    assert runtime.trace[-1].new_tokens == 50
    assert runtime.last_forward_ns == runtime.trace[-1].end_ns - runtime.trace[-1].start_ns > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bf16)])
def test_a_copied_row_goes_on_as_the_row_it_was_copied_from(dtype):
    """Into a row that is new, a row that holds another text, and one that shares a part; only the tail is computed."""
    runtime = packed(make("qwen2", dtype), dtype)
    ids, other = text(70), text(40, seed=1)
    runtime.advance([ids])
    runtime.copy_row(0, 2)
    runtime.trace = []
    continued = runtime.advance([np.append(ids, [3, 4])], last=2, rows=[2])
    assert runtime.trace[0].new_tokens == 2
    assert torch.equal(runtime.advance([np.append(ids, [3, 4])], last=2), continued)
    runtime.advance([other], rows=[1])
    runtime.copy_row(0, 1)
    assert torch.equal(runtime.advance([np.append(ids, [3, 4, 5])], rows=[1]), runtime.advance([[*ids, 3, 4, 5]]))
    runtime.advance([np.append(ids[:50], other)], rows=[1])
    runtime.copy_row(0, 1)
    runtime.trace.clear()
    both = [np.append(ids, [3, 4, 5, 6])] * 2
    first, second = runtime.advance(both)
    assert torch.equal(first, second)
    assert runtime.trace[0].new_tokens == 2
    with pytest.raises(ValueError, match="at most 256 row"):
        runtime.copy_row(0, 256)


def test_a_failed_forward_leaves_no_stale_cache():
    runtime = packed(make())
    ids = text(20)
    expected = runtime.advance([ids]).clone()
    with pytest.raises(IndexError):
        runtime.advance([np.append(ids[:10], VOCAB + 5)])
    assert torch.allclose(runtime.advance([ids]), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("contexts", "last", "rows", "message"),
    [
        ([[]], 1, None, "empty context"),
        ([[1, 2]], 3, None, "last 3 of 2"),
        ([[1]], 0, None, "last 0 of 1"),
        ([[1], [2]], 1, [0, 0], "named twice"),
        ([[1]], 1, [-1], "at most"),
        ([[1]], 1, [100000], "at most"),
        ([[1] * 1025], 1, None, "context of 1024"),
        ([[1], [1]], [1], None, "do not match"),
    ],
)
def test_wrong_calls_are_refused(contexts, last, rows, message):
    with pytest.raises(ValueError, match=message):
        packed(make()).advance(contexts, last=last, rows=rows)


def test_logits_are_cut_to_the_common_vocabulary():
    model = make("llama, tied head")
    ids = text(9)
    expected = forward(model, ids)[:, :90]
    runtime = PackedModel.from_transformers(model, name="cut", device="cpu", dtype="float32", vocab_size=90)
    assert torch.allclose(runtime.advance([ids], last=9), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "knows llama"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "not full attention"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_what_cannot_run_packed_is_named(change, message):
    config = LlamaConfig(**SHAPE)
    assert supports(config, "cpu", "float32") is None
    for name, value in change.items():
        object.__setattr__(config, name, value)
    assert message in (supports(config, "cpu", "float32") or "")


def test_a_mistral_window_shorter_than_its_context_is_refused():
    assert "sliding window of 64" in (supports(MistralConfig(**SHAPE, sliding_window=64), "cpu", "float32") or "")
    assert supports(MistralConfig(**SHAPE, sliding_window=1024), "cpu", "float32") is None


def test_float16_is_refused_on_cpu_only():
    config = LlamaConfig(**SHAPE)
    assert "float16" in (supports(config, "cpu", "float16") or "")
    assert supports(config, "cuda:0", "float16") is None


# Row invariance: the bits of a token's logits.


@needs_bf16
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_bits_do_not_depend_on_how_many_tokens_are_computed_at_once(family):
    """1 to 64 new tokens and a whole prompt, across boundaries of the cache's slots, against one by one.

    Without bfloat16 instructions torch sums products of many hundred rows in another order, so the prompt is shorter.
    """
    ids = text(400 if "avx512_bf16" in environment()["cpu_flags"] else 300)
    runtime = packed(make(family, "bfloat16"), "bfloat16")
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(len(ids))])
    for count in (2, 3, 4, 5, 7, 8, 13, 16, 31, 33, 64):
        runtime.reset()
        blocks = [runtime.advance([ids[: i + count]], last=count) for i in range(0, len(ids) - count + 1, count)]
        together = torch.cat(blocks)
        assert torch.equal(together, single[: len(together)]), count
    runtime.reset()
    assert torch.equal(runtime.advance([ids], last=len(ids)), single)


@needs_bf16
def test_bfloat16_bits_do_not_depend_on_the_other_rows():
    """1 to 16 rows, level and ragged, against each row alone."""
    runtime = packed(make("qwen2", "bfloat16"), "bfloat16")
    contexts = [text(20 + 19 * row, seed=row) for row in range(16)]
    alone = [runtime.advance([context], last=3).clone() for context in contexts]
    for count in (2, 3, 8, 16):
        runtime.reset()
        runtime.advance([context[: 10 + i] for i, context in enumerate(contexts[:count])])
        ragged = runtime.advance(contexts[:count], last=3)
        assert torch.equal(ragged, torch.cat(alone[:count])), count
        level = runtime.advance([context[:-2] for context in contexts[:count]])
        assert torch.equal(level, torch.stack([logits[0] for logits in alone[:count]])), count
    picked = runtime.advance([contexts[9], contexts[2], contexts[5]], last=3, rows=[9, 2, 5])
    assert torch.equal(picked, torch.cat([alone[9], alone[2], alone[5]]))


@needs_bf16
def test_bfloat16_greedy_text_is_the_same_with_and_without_drafts():
    """A draft of n tokens, right or wrong, changes nothing about what is generated."""
    runtime = packed(make("llama", "bfloat16"), "bfloat16")
    ids = list(text(30))
    plain = list(ids)
    while len(plain) < 200:
        plain.append(int(runtime.advance([plain])[0].argmax()))
    runtime.reset()
    random = np.random.default_rng(1)
    drafted = list(ids)
    while len(drafted) < 200:
        right = plain[len(drafted) : len(drafted) + int(random.integers(0, 12))]
        draft = right + [int(random.integers(0, VOCAB))] * int(random.integers(0, 3))
        tokens = runtime.advance([drafted + draft], last=len(draft) + 1).argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
        drafted += tokens[: accepted + 1]
    assert drafted[:200] == plain


# The parts.


def test_cache_keeps_every_row_when_it_grows_shrinks_and_gets_more_rows():
    cache = KeyValueCache(layers=2, heads=2, head_dim=4, dtype=torch.float32)
    random = np.random.default_rng(3)
    held: list[torch.Tensor] = [torch.randn(2, 2, 2, 10, 4)]
    cache.blocks[:, :, 0, :, :10] = held[0]
    for _ in range(40):
        lengths = [block.shape[3] for block in held]
        rows = len(held) + int(random.integers(0, 2)) if len(held) < 6 else len(held)
        longest = max(*lengths, int(random.integers(1, 700)))
        if random.random() < 0.2:
            cache.reserve(rows + 1, longest * 2)
        cache.fit(rows, longest, lengths)
        assert cache.slots >= longest
        assert cache.slots % 64 == 0
        assert cache.rows >= rows
        for row, block in enumerate(held):
            assert torch.equal(cache.blocks[:, :, row, :, : block.shape[3]], block)
        assert bool(cache.blocks.isfinite().all())
        held += [torch.zeros(2, 2, 2, 0, 4) for _ in range(rows - len(held))]
        row = int(random.integers(0, len(held)))
        length = int(random.integers(0, cache.slots + 1))
        held[row] = torch.randn(2, 2, 2, length, 4)
        cache.blocks[:, :, row, :, :length] = held[row]


def test_slots_shrink_after_a_long_text_but_not_after_a_rejected_draft():
    cache = KeyValueCache(layers=1, heads=1, head_dim=4, dtype=torch.float32)
    cache.fit(1, 4000, [0])
    slots = cache.slots
    cache.fit(1, 3940, [3930])
    assert cache.slots == slots
    cache.fit(1, 1500, [0])
    assert cache.slots == slots_for(1500)


def test_large_caches_are_zeros_like_small_ones_and_can_be_written():
    for count in (10, LARGE // 4 - 1, LARGE // 4, LARGE // 4 + 1):
        memory = zeros(count, torch.float32)
        assert (len(memory), memory.dtype) == (count, torch.float32)
        assert not memory.any()
        memory[-1] = 3
        assert float(memory.sum()) == 3


def test_slots_follow_the_longest_row_in_small_steps():
    assert [slots_for(n) for n in (1, 64, 65, 1024, 1025, 8192, 8193)] == [64, 64, 128, 1024, 1152, 8192, 9216]
    assert all(slots_for(n) <= n + max(64, n // 8) for n in range(1, 40000, 97))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_matrices_multiply_like_plain_ones(dtype, bias):
    weight = torch.randn(48, 40).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    matrix = pack(weight, offset)
    assert matrix.nbytes == (48 * 40 + 48 * bias) * dtype.itemsize
    room = 2e-2 if dtype.itemsize == 2 else 1e-5
    for filled in (1, 2, 4):
        for rows in (1, 2, 3, 4, 9):
            x = torch.randn(rows, 40).to(dtype)
            expected = torch.nn.functional.linear(x, weight, offset)
            assert torch.allclose(multiply(x, matrix, filled).float(), expected.float(), rtol=2e-2, atol=room)


def test_without_the_private_operators_the_result_is_right(monkeypatch):
    """Another torch build, or a processor without bfloat16 instructions."""
    monkeypatch.setattr("specbench.models.packed_linear.can_prepack", lambda dtype: False)
    model = make()
    ids = text(40)
    expected = forward(model, ids)
    runtime = packed(model)
    assert runtime._decoder.head.kind == PLAIN
    assert torch.allclose(runtime.advance([ids], last=40), expected, atol=1e-3)


# Quantised forms: different models, each equal to what its levels and scales stand for.


def dequantised(weight: torch.Tensor, quant: str, group_size: int) -> torch.Tensor:
    weight = weight.bfloat16()
    if quant == "int8":
        levels, scales = quantise_int8(weight)
        return levels.float() * scales.float()[:, None]
    levels, pairs = quantise_int4(weight, group_size)
    scales, zeros = pairs.float().unbind(2)
    grouped = levels.view(len(weight), -1, group_size).float() - 8
    return (grouped * scales.t()[..., None] + zeros.t()[..., None]).view(weight.shape)


@pytest.mark.parametrize(("quant", "group_size"), [("int8", 32), ("int4", 32)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_quantised_form_computes_what_its_weights_stand_for(family, quant, group_size):
    reference = make(family)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "proj" in name and weight.dim() == 2:
                weight.copy_(dequantised(weight, quant, group_size))
            else:
                weight.copy_(weight.bfloat16())
    ids = text(60)
    runtime = packed(make(family), "float32", quant=quant, group_size=group_size)
    logits = runtime.advance([ids], last=60).float()
    expected = forward(reference, ids)
    assert runtime.dtype == quant
    assert (logits - expected).pow(2).mean().sqrt() <= 0.03 * expected.pow(2).mean().sqrt()


def test_quantised_rows_are_invariant_too():
    runtime = packed(make(), "bfloat16", quant="int4")
    ids = text(100)
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(100)])
    runtime.reset()
    assert torch.equal(runtime.advance([ids], last=100), single)


def test_quantisation_error_is_at_most_half_a_step():
    weight = torch.randn(32, 128).bfloat16()
    for quant, group_size, steps in (("int8", 32, 127 * 2), ("int4", 32, 15), ("int4", 128, 15)):
        width = group_size if quant == "int4" else 128
        groups = weight.float().view(32, -1, width)
        reach = 2 * groups.abs().amax(2) if quant == "int8" else groups.amax(2) - groups.amin(2)
        error = (dequantised(weight, quant, group_size) - weight.float()).view(32, -1, width).abs().amax(2)
        assert (error <= reach / steps * 0.5 + 0.02 * groups.abs().amax(2)).all()


def test_quantised_weights_are_smaller():
    full, int8, int4 = (packed(make("llama"), "bfloat16", quant=q).weight_bytes for q in (None, "int8", "int4"))
    assert int8 < 0.55 * full
    assert int4 < 0.45 * full


@pytest.mark.parametrize(
    ("quant", "group_size", "message"), [("int3", 32, "int3"), ("int4", 48, "48"), ("int4", 256, "256")]
)
def test_quantised_forms_that_cannot_be_had_are_named(quant, group_size, message):
    with pytest.raises(ModelError, match=message):
        packed(make(), quant=quant, group_size=group_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_torchscript_the_same_functions_compute_the_same_bits(monkeypatch, dtype):
    """TorchScript is deprecated; a torch without it runs the layers as Python."""
    ids = text(300)
    compiled = packed(make("qwen3", dtype), dtype)
    assert compiled._decoder._run is not None

    def gone(*args):
        raise AttributeError("module 'torch.jit' has no attribute 'script'")

    monkeypatch.setattr(torch.jit, "script", gone)
    interpreted = packed(make("qwen3", dtype), dtype)
    assert interpreted._decoder._run is None
    for ends in ([280], [290], [300, 50], [297, 51, 3]):
        contexts = [ids[:end] for end in ends]
        assert torch.equal(compiled.advance(contexts, last=2), interpreted.advance(contexts, last=2))
