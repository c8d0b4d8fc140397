"""The packed runtime's static buffers: the bookkeeping everywhere, graphs and kernels where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specbench.errors import ModelError
from specbench.models.packed import PackedModel
from specbench.models.packed_cuda import NEW_TOKENS, StaticPackedModel

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda:0", marks=gpu)]


def make(kind: str = "llama"):
    torch.manual_seed(3)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=weight.shape[-1] ** -0.5 * 1.5)
    return model.eval()


def static(model, device: str, dtype: str = "float32", **options) -> StaticPackedModel:
    return StaticPackedModel(model, name="random", device=device, dtype=dtype, vocab_size=VOCAB, **options)


def forward(model, ids) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_static_buffers_agree_with_transformers(kind, device):
    """A prompt in pieces, then drafts of every size, over the boundaries of the slots."""
    reference = make(kind)
    ids = text(900)
    expected = forward(reference, ids)
    runtime = static(make(kind), device)
    room = (1e-4 if device == "cpu" else 5e-3) * expected.abs().max()
    logits = runtime.advance([ids[:620]], last=530).cpu()
    assert (logits - expected[90:620]).abs().max() <= room
    at = 620
    for count in NEW_TOKENS:
        at += count
        assert (runtime.advance([ids[:at]], last=count).cpu() - expected[at - count : at]).abs().max() <= room


@pytest.mark.parametrize("device", DEVICES)
def test_static_copied_row_goes_on_as_the_row_it_was_copied_from(device):
    runtime = static(make(), device)
    ids = text(300)
    runtime.advance([ids])
    runtime.advance([text(40, seed=1)], rows=[1])
    for to in (1, 3):
        runtime.copy_row(0, to)
        runtime.trace = []
        first, second = runtime.advance([np.append(ids, [3, 4])] * 2, rows=[0, to]).clone()
        assert (first - second).abs().max() <= 1e-4 * first.abs().max()
        assert runtime.trace[0].new_tokens == 4
        runtime.advance([ids])
    alone = runtime.advance([np.append(ids, [5])]).cpu()
    assert (alone - forward(make(), np.append(ids, [5]))[-1]).abs().max() <= 5e-3 * alone.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [False, True])
def test_static_ragged_rows_equal_fresh_forwards(device, exact):
    """Rows that are not named compute padding and must not be disturbed by it."""
    random = np.random.default_rng(5)
    reference = make()
    runtime = static(make(), device, exact=exact)
    contexts = [text(int(random.integers(1, 90)), seed=row) for row in range(4)]
    for _ in range(20):
        rows = [int(row) for row in random.permutation(4)[: random.integers(1, 5)]]
        for row in rows:
            keep = max(len(contexts[row]) - int(random.integers(0, 6)), 0)
            contexts[row] = np.concatenate([contexts[row][:keep], random.integers(0, VOCAB, random.integers(1, 10))])
        lasts = [int(random.integers(1, min(6, len(contexts[row])) + 1)) for row in rows]
        logits = runtime.advance([contexts[row] for row in rows], last=lasts, rows=rows).cpu()
        expected = torch.cat([forward(reference, contexts[row])[-n:] for row, n in zip(rows, lasts, strict=True)])
        assert (logits - expected).abs().max() <= (2e-4 if device == "cpu" else 5e-3) * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_that_takes_a_row_and_rows_that_go_on_do_not_disturb_each_other(device):
    """In one forward: the prompt is read in pieces, the others go on as a graph, whichever row it is."""
    reference, runtime = make(), static(make(), device)
    contexts = [text(40 + row, seed=row) for row in range(3)]
    runtime.advance(contexts)
    for taken in (0, 2, 1):
        runtime.forget(taken)
        contexts = [np.append(context, [5, row]) for row, context in enumerate(contexts)]
        contexts[taken] = text(NEW_TOKENS[-1] + 30, seed=10 + taken)
        lasts = [1 if row == taken else 2 for row in range(3)]
        logits = runtime.advance(contexts, last=lasts).cpu()
        expected = torch.cat([forward(reference, ids)[-n:] for ids, n in zip(contexts, lasts, strict=True)])
        assert (logits - expected).abs().max() <= (2e-4 if device == "cpu" else 5e-3) * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_logits_stay_valid_after_the_next_forward(device):
    """A graph's output buffer is written again by its next replay."""
    runtime = static(make(), device)
    ids = text(20)
    first = runtime.advance([ids[:10]])
    kept = first.clone()
    runtime.advance([ids[:11]])
    runtime.advance([ids[:12]])
    assert torch.equal(first, kept)


def test_growing_the_cache_keeps_what_it_holds():
    runtime = static(make(), "cpu")
    reference = make()
    ids = text(40)
    runtime.advance([ids])
    runtime.reserve(3, 1200)
    assert runtime._lengths[0] == 40
    longer = np.append(ids, [1, 2, 3])
    assert torch.allclose(runtime.advance([longer], last=2), forward(reference, longer)[-2:], atol=1e-3)


def test_quantised_forms_are_refused_on_cuda():
    with pytest.raises(ModelError, match="CPU only"):
        PackedModel.from_transformers(
            make(), name="x", device="cuda:0", dtype="bfloat16", vocab_size=VOCAB, quant="int4"
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_compute_what_eager_computes():
    ids = text(60)
    eager, replayed = (static(make(), "cuda:0", "bfloat16", graphs=graphs) for graphs in (False, True))
    for end in (30, 31, 33, 34, 40, 48, 49, 50):
        assert torch.equal(eager.advance([ids[:end]]), replayed.advance([ids[:end]]))
    assert replayed.last_forward_ns > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exact_graphs_give_a_token_the_same_bits_alone_and_in_a_draft(dtype):
    ids = text(200)
    runtime = static(make(), "cuda:0", dtype, exact=True)
    runtime.advance([ids[:100]])
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(100, 200)])
    for count in (2, 5, 10):
        runtime.reset()
        runtime.advance([ids[:100]])
        blocks = [runtime.advance([ids[: i + count]], last=count) for i in range(100, 200, count)]
        assert torch.equal(torch.cat(blocks), single)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_transformers_chooses_static_buffers_on_cuda():
    runtime = PackedModel.from_transformers(make(), name="x", device="cuda:0", dtype="bfloat16", vocab_size=VOCAB)
    assert isinstance(runtime, StaticPackedModel)
    assert runtime.advance([text(5)]).device.type == "cuda"
