"""Our own kernels: against float64, against torch's operators, bit for bit against themselves, and where they are not.

What is asked of the packed runtime whatever computes it stands in `test_packed`.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_packed import (  # noqa: F401 - the tests among them run here with our kernels
    FAMILIES,
    VOCAB,
    dequantised,
    forward,
    make,
    packed,
    test_a_cached_context_is_not_computed_again,
    test_a_copied_row_goes_on_as_the_row_it_was_copied_from,
    test_a_failed_forward_leaves_no_stale_cache,
    test_any_sequence_of_accepting_and_rejecting_equals_fresh_forwards,
    test_logits_are_cut_to_the_common_vocabulary,
    test_long_prompts_are_computed_in_chunks_with_the_same_result,
    test_quantised_weights_are_smaller,
    text,
)
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.hardware.environment import environment
from specbench.models import native
from specbench.models.kv_cache import KeyValueCache
from specbench.models.native import Packer
from specbench.models.packed_attention import Span, make_plans
from specbench.models.packed_layers import Watch
from specbench.models.packed_linear import INT8, NATIVE
from specbench.models.packed_native import parts_of

HERE = pytest.mark.skipif(native.load(torch.float32) is None, reason="no AVX2, C compiler or OpenMP here")
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(params=["as it is", "avx2"] if "avx512f" in environment()["cpu_flags"] else ["as it is"])
def instructions(request, monkeypatch):
    """What the processor can do, and on one with AVX-512 also what one without it would."""
    if request.param == "avx2":
        monkeypatch.setenv("SPECBENCH_NATIVE", "avx2")


EITHER = pytest.mark.usefixtures("instructions")


def kernels(dtype: str) -> native.Kernels:
    found = native.kernels(getattr(torch, dtype))
    assert found is not None
    return found


def with_torch(monkeypatch, model, dtype: str, **options):
    """The same runtime without our kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("SPECBENCH_NATIVE", "0")
        runtime = packed(model, dtype, **options)
    assert runtime.kernels == "torch"
    return runtime


def attending(heads: int, kv_heads: int, head_dim: int, dtype: str):
    """A packed model of so many heads, whose attention can be called by itself."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, intermediate_size=32, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(3)
    runtime = packed(LlamaForCausalLM(config).to(getattr(torch, dtype)), dtype)
    assert runtime.kernels == "native"
    return runtime._decoder


# The parts against float64.


@HERE
@EITHER
@DTYPES
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
@pytest.mark.parametrize("width", [2, 46, 47, 300, 2100])
def test_products_are_right_whatever_the_shape(dtype, rows, width):
    """Up to a tile of tokens and beyond it, with and without a bias."""
    ours = kernels(dtype)
    source = torch.Generator().manual_seed(rows * width)
    weight, bias = (torch.randn(shape, generator=source).to(ours.dtype) for shape in ((rows, width), (rows,)))
    for offset in (None, bias):
        matrix = Packer(ours, 10_000).pack(weight, offset)
        assert matrix.kind == NATIVE
        for tokens in (1, 2, 3, 4, 5, 6, 7, 12, 13, 40):
            x = torch.randn(tokens, width, generator=source).to(ours.dtype)
            expected = linear(x.double(), weight.double(), None if offset is None else offset.double())
            room = linear(x.double().abs(), weight.double().abs()) * 1e-6
            if dtype == "bfloat16":
                room += expected.abs() * 2**-8
            assert ((ours.product(x, matrix, rows).double() - expected).abs() <= room + 1e-6).all()


@HERE
@EITHER
@DTYPES
def test_bits_of_a_product_depend_on_neither_tokens_nor_threads(dtype):
    ours = kernels(dtype)
    weight, x = torch.randn(100, 1400).to(ours.dtype), torch.randn(64, 1400).to(ours.dtype)
    matrix = Packer(ours, 0).pack(weight)
    single = torch.cat([ours.product(x[i : i + 1], matrix, 100) for i in range(64)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for tokens in range(1, 65):
            assert torch.equal(ours.product(x[:tokens], matrix, 100), single[:tokens]), (threads, tokens)


@HERE
@EITHER
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [16, 80])
def test_int4_products_are_those_of_the_weights_that_levels_and_scales_stand_for(rows, group_size):
    ours, width = kernels("bfloat16"), 384
    weight, bias = torch.randn(rows, width).bfloat16(), torch.randn(rows).bfloat16()
    stands_for = dequantised(weight, "int4", group_size).double()
    for offset in (None, bias):
        matrix = Packer(ours, 0).pack_int4(weight, offset, group_size)
        assert matrix.weight.nbytes == -(-rows // 32) * 32 * (width // 2 + 4 * width // group_size)
        single = None
        for tokens in (40, 13, 12, 7, 2, 1):
            x = torch.randn(40, width, generator=torch.Generator().manual_seed(5)).bfloat16()[:tokens]
            expected = linear(x.double(), stands_for, None if offset is None else offset.double())
            room = linear(x.double().abs(), stands_for.abs()) * 1e-5 + expected.abs() * 2**-8
            done = ours.product(x, matrix, rows)
            assert ((done.double() - expected).abs() <= room + 1e-5).all()
            single = done if single is None else single
            assert torch.equal(done, single[:tokens])


def reference(heads: torch.Tensor, past: torch.Tensor, group: int, rotation: torch.Tensor) -> torch.Tensor:
    """Attention in float64 of (tokens, query heads + 2 kv_heads, head_dim) behind (2, kv_heads, slots, head_dim)."""
    tokens, all_heads, head_dim = heads.shape
    kv_heads = past.shape[1]
    query_heads = all_heads - 2 * kv_heads
    pairs = torch.view_as_complex(heads.double().view(tokens, all_heads, -1, 2))
    turned = torch.view_as_real(pairs * rotation).view(heads.shape).to(heads.dtype).double()
    queries = turned[:, :query_heads].view(tokens, kv_heads, group, head_dim)
    keys, values = turned[:, query_heads:].view(tokens, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
    keys, values = torch.cat([past[0].double(), keys], 1), torch.cat([past[1].double(), values], 1)
    scores = torch.einsum("tkgd,ksd->kgts", queries, keys)
    scores += torch.full(scores.shape[2:], -torch.inf).triu(past.shape[2] + 1)
    return torch.einsum("kgts,ksd->tkgd", torch.softmax(scores, -1), values).reshape(tokens, -1)


@HERE
@EITHER
@DTYPES
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim"), [(1, 2, 16), (3, 1, 64), (4, 2, 24), (7, 1, 80), (3, 2, 128)]
)
def test_attention_is_right_and_reads_no_further_than_a_query_sees(dtype, group, kv_heads, head_dim):
    """Around the ends of blocks and pieces, and of several rows at once; what lies behind is not even a number."""
    decoder = attending(group * kv_heads, kv_heads, head_dim, dtype)
    ours, number = decoder.native, getattr(torch, dtype)
    source = torch.Generator().manual_seed(group)
    decoder.rotation.reach(1024)
    cases = (((0,), 1), ((31,), 1), ((32, 5), 4), ((255,), 3), ((0, 300), 70), ((700,), 1), ((511, 0, 90), 7))
    for starts, count in cases:
        cache = KeyValueCache(1, kv_heads, head_dim, number)
        cache.fit(len(starts), max(starts) + count, [0] * len(starts))
        cache.blocks.fill_(torch.nan)
        spans, expected, given = [], [], []
        for row, start in enumerate(starts):
            past = torch.randn(2, kv_heads, start, head_dim, generator=source).to(number)
            cache.blocks[0, :, row, :, :start] = past
            heads = torch.randn(count, (group + 2) * kv_heads, head_dim, generator=source).to(number)
            rotation = decoder.rotation.at(torch.arange(start, start + count))
            expected.append(reference(heads, past, group, rotation))
            given.append(heads)
            spans.append(Span(row, start, count))
        positions = np.concatenate([np.arange(span.start, span.start + count) for span in spans])
        done = ours.attention(torch.cat(given), positions, cache, spans).double()
        room = 0.02 if dtype == "bfloat16" else 2e-5
        assert (done - torch.cat(expected)).abs().max() <= room * torch.cat(expected).abs().max(), (starts, count)
        written = cache.blocks[0, :, 0, :, spans[0].start : spans[0].start + count]
        assert written.isfinite().all()


@HERE
@EITHER
@DTYPES
def test_bits_of_attention_do_not_depend_on_how_its_work_is_shared_out(dtype):
    """One row's pieces over two threads, whole heads over two, one thread; alone and with others."""
    decoder = attending(6, 2, 64, dtype)
    decoder.rotation.reach(1024)
    number = getattr(torch, dtype)
    cache = KeyValueCache(1, 2, 64, number)
    cache.fit(6, 1000, [0] * 6)
    cache.blocks.copy_(torch.randn(cache.blocks.shape))
    heads = torch.randn(6, 9, 10, 64).to(number)
    starts = [900, 256, 255, 3, 700, 511]

    def attend(rows: list[int], count: int) -> torch.Tensor:
        spans = [Span(row, starts[row] + i, count) for row in rows for i in ([0] if count > 1 else range(9))]
        results = []
        for part in [spans] if count > 1 else [[span] for span in spans]:
            given = torch.cat([heads[s.row, s.start - starts[s.row] :][: s.count] for s in part])
            positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in part])
            results.append(decoder.native.attention(given, positions, cache, part))
        return torch.cat(results)

    alone = torch.cat([attend([row], 1) for row in range(6)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat([attend([row], 9) for row in range(6)]), alone), threads
        assert torch.equal(attend(list(range(6)), 9), alone), threads
        assert torch.equal(torch.cat([attend([row], 1) for row in range(6)]), alone), threads


# Whole models.


@HERE
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_models_agree_with_transformers(family):
    """1e-5 relative: a prompt, token by token, and a prompt of more tokens than one call takes."""
    model = make(family)
    ids = text(700)
    expected = forward(model, ids)
    runtime = packed(model)
    assert runtime.kernels == "native"
    logits = runtime.advance([ids], last=len(ids))
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    runtime.reset()
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(80)])
    assert torch.equal(single, logits[:80])


@HERE
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_models_are_as_close_to_float32_as_with_torch(monkeypatch, family):
    ids = text(300)
    expected = forward(make(family), ids)
    errors = []
    ours = packed(make(family, "bfloat16"), "bfloat16")
    for runtime in (ours, with_torch(monkeypatch, make(family, "bfloat16"), "bfloat16")):
        logits = runtime.advance([ids], last=len(ids))
        assert torch.equal(logits, logits.bfloat16().float())
        errors.append((logits - expected).pow(2).mean().sqrt())
    assert errors[0] <= 1.15 * errors[1]


@HERE
@DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bits_of_a_model_do_not_depend_on_tokens_rows_or_threads(dtype, family):
    """1 to 64 new tokens and a whole prompt; 1 to 16 ragged rows; boundaries of the cache's slots; 1 and 2 threads."""
    runtime = packed(make(family, dtype), dtype)
    ids = text(600)
    single = torch.cat([runtime.advance([ids[: i + 1]]) for i in range(len(ids))])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 3, 5, 8, 12, 13, 16, 33, 64):
            runtime.reset()
            runtime.advance([ids[:200]])
            blocks = [runtime.advance([ids[: i + count]], last=count) for i in range(200, 290 - count, count)]
            together = torch.cat(blocks)
            assert torch.equal(together, single[200 : 200 + len(together)]), (threads, count)
        runtime.reset()
        assert torch.equal(runtime.advance([ids], last=len(ids)), single), threads
        for rows in (1, 2, 7, 16):
            runtime.reset()
            ends = [20 + 37 * row % 570 for row in range(rows)]
            runtime.advance([ids[: end - 9 + row % 4] for row, end in enumerate(ends)])
            ragged = runtime.advance([ids[:end] for end in ends], last=[1 + row % 3 for row in range(rows)])
            wanted = torch.cat([single[end - 1 - row % 3 : end] for row, end in enumerate(ends)])
            assert torch.equal(ragged, wanted), (threads, rows)


@HERE
@DTYPES
def test_greedy_text_is_the_same_with_and_without_drafts(dtype):
    """In float32 as well, which torch's products do not promise."""
    runtime = packed(make("llama", dtype), dtype)
    plain = list(text(30))
    while len(plain) < 160:
        plain.append(int(runtime.advance([plain])[0].argmax()))
    runtime.reset()
    random, drafted = np.random.default_rng(1), plain[:30]
    while len(drafted) < 160:
        right = plain[len(drafted) : len(drafted) + int(random.integers(0, 12))]
        draft = right + [int(random.integers(0, VOCAB))] * int(random.integers(0, 3))
        tokens = runtime.advance([drafted + draft], last=len(draft) + 1).argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
        drafted += tokens[: accepted + 1]
    assert drafted[:160] == plain


@HERE
@EITHER
@DTYPES
def test_a_head_of_fewer_tokens_and_states_are_those_of_the_torch_path(monkeypatch, dtype):
    ids, head, room = text(40), [3, 7, 50], 1e-4 if dtype == "float32" else 0.1
    ours = packed(make(dtype=dtype), dtype, head_ids=head)
    theirs = with_torch(monkeypatch, make(dtype=dtype), dtype, head_ids=head)
    logits, expected = (runtime.advance([ids], last=4).float() for runtime in (ours, theirs))
    assert torch.equal(logits.isinf(), expected.isinf())
    assert torch.allclose(logits[:, head], expected[:, head], atol=room)
    several = np.stack([text(30, seed=1), text(30, seed=2)])
    found = ours.states(several)
    assert found.dtype == getattr(torch, dtype)
    assert found.shape == (2, 30, 64)
    assert torch.allclose(found.float(), theirs.states(several).float(), atol=room, rtol=room)


@HERE
@DTYPES
def test_slots_need_not_be_positions_and_queries_are_noted(monkeypatch, dtype):
    """As a sparse cache wants it: later positions in earlier slots, and the queries of some tokens of several rows."""
    model = make("qwen3", dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ours = packed(model, dtype)._decoder
    again = make("qwen3", dtype)
    again.load_state_dict(state)
    theirs = with_torch(monkeypatch, again, dtype)._decoder
    ids = text(9)
    positions = np.concatenate([np.arange(500, 504), np.arange(90, 95)])
    spans, noted = [Span(0, 40, 4), Span(1, 0, 5)], torch.tensor([1, 3, 7, 8])
    caches = [KeyValueCache(3, ours.kv_heads, ours.head_dim, ours.dtype) for _ in range(2)]
    for cache in caches:
        cache.fit(2, 64, [0, 0])
        cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(2)))
    watches = [Watch(noted, torch.empty(3, 4, ours.heads, ours.head_dim, dtype=ours.dtype)) for _ in range(2)]
    for decoder in (ours, theirs):
        decoder.rotation.reach(504)
    with torch.inference_mode():
        logits = ours.native.logits(ids, positions, caches[0], spans, range(9), watches[0])
        rotation = theirs.rotation.at(torch.from_numpy(positions))
        plans = make_plans(caches[1], spans, theirs.heads)
        expected = theirs.logits(theirs.hidden(torch.from_numpy(ids), rotation, plans, watches[1])).float()
    room = 0.06 if dtype == "bfloat16" else 1e-5
    assert (logits - expected).abs().max() <= room * expected.abs().max()
    for mine, other in ((watches[0].queries, watches[1].queries), (caches[0].blocks, caches[1].blocks)):
        assert (mine.float() - other.float()).abs().max() <= room * other.float().abs().max()


@HERE
def test_queries_are_noted_over_all_calls_of_a_long_prompt(monkeypatch):
    ids = text(700)
    noted = torch.arange(480, 700)
    ours = packed(make())
    decoder = ours._decoder
    queries = torch.zeros(3, len(noted), decoder.heads, decoder.head_dim)
    decoder.rotation.reach(700)
    ours._cache.fit(1, 700, [0])
    decoder.native.logits(ids, np.arange(700), ours._cache, [Span(0, 0, 700)], [699], Watch(noted, queries))
    several = torch.zeros_like(queries)
    for begin in range(0, 700, 100):
        part = noted[(noted >= begin) & (noted < begin + 100)]
        watch = Watch(part - begin, torch.zeros(3, len(part), decoder.heads, decoder.head_dim))
        positions = np.arange(begin, begin + 100)
        decoder.native.logits(ids[positions], positions, ours._cache, [Span(0, begin, 100)], [99], watch)
        several[:, (noted >= begin) & (noted < begin + 100)] = watch.queries
    assert queries.abs().sum() > 0
    assert torch.equal(queries, several)


def test_forwards_are_cut_into_calls_of_a_bounded_number_of_tokens():
    assert list(parts_of([Span(2, 7, 5)])) == [(0, 5, [(2, 7, 5)])]
    assert list(parts_of([Span(0, 0, 500), Span(3, 10, 600)])) == [
        (0, 512, [(0, 0, 500), (3, 10, 12)]), (512, 1024, [(3, 22, 512)]), (1024, 1100, [(3, 534, 76)]),
    ]  # fmt: skip
    assert list(parts_of([Span(0, 3, 512)])) == [(0, 512, [(0, 3, 512)])]


@HERE
@DTYPES
def test_weights_stand_in_memory_once_in_the_order_in_which_they_are_read(dtype):
    runtime = packed(make("qwen2", dtype), dtype)
    decoder = runtime._decoder
    parts = [part for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    at = parts[0].weight.data_ptr()
    for part in [*parts, decoder.head]:
        assert part.kind == NATIVE
        assert part.weight.data_ptr() == at
        at += part.weight.nbytes
    weights = make("qwen2", dtype).named_parameters()
    plain = sum(weight.nbytes for name, weight in weights if "proj" in name or "head" in name)
    assert plain <= runtime.weight_bytes <= 1.1 * plain


@HERE
@EITHER
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_in_int4_computes_what_its_weights_stand_for_and_the_same_bits_at_once(family):
    plain = make(family)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            quantised = "proj" in name and weight.dim() == 2
            weight.copy_(dequantised(weight, "int4", 32) if quantised else weight.bfloat16())
    ids = text(150)
    runtime = packed(make(family), quant="int4")
    assert (runtime.kernels, runtime.dtype) == ("native", "int4")
    logits = runtime.advance([ids], last=150)
    expected = forward(plain, ids)
    assert (logits - expected).pow(2).mean().sqrt() <= 0.03 * expected.pow(2).mean().sqrt()
    runtime.reset()
    assert torch.equal(torch.cat([runtime.advance([ids[: i + 1]]) for i in range(150)]), logits)


@HERE
def test_int8_and_shapes_that_do_not_fit_keep_torchs_operators():
    quantised = packed(make(), quant="int8")
    assert quantised.kernels == "torch"
    assert quantised._decoder.layers[0].down.kind == INT8
    odd = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4
    )  # fmt: skip
    assert packed(LlamaForCausalLM(odd)).kernels == "torch"


# Where there are none.


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that takes a moment and hands out the library that is there already; `ran` lists its runs."""
    with native.built(native._compilers([])[0], torch.float32, native._processor() or "") as path:
        library = path
        (tmp_path / "ready.so").write_bytes(library.read_bytes())
    script = tmp_path / "bin" / "cc"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo pretended; exit;; esac\n'
        f"echo run >> {tmp_path}/ran\n"
        "sleep 0.4\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {tmp_path}/ready.so "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return script


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "ran").read_text().split())


load_anew = native.load.__wrapped__


@HERE
def test_the_library_is_compiled_once_for_a_machine(compiler, tmp_path):
    assert load_anew(torch.float32) is not None
    assert load_anew(torch.float32) is not None
    assert runs(tmp_path) == 1
    assert [path.name.split("-")[:2] for path in (tmp_path / "cache").iterdir()] == [["native", "float32"]]


@HERE
def test_two_processes_may_build_at_once(compiler, tmp_path):
    code = "import torch; from specbench.models.native import load; print(load(torch.float32).agree())"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["True", "True"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@HERE
def test_a_cache_that_cannot_be_written_costs_a_compilation_and_nothing_else(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file"))
    assert load_anew(torch.float32) is not None
    assert runs(tmp_path) == 1


@HERE
def test_a_compiler_that_fails_leaves_it_to_the_next_one_or_to_torch(compiler, tmp_path, monkeypatch):
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) exit 1;; esac\n')
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert load_anew(torch.float32) is None
    assert list((tmp_path / "cache").glob("*")) == []


def test_without_a_compiler_there_are_no_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert load_anew(torch.float32) is None


@HERE
def test_kernels_that_come_out_wrong_are_not_used(monkeypatch):
    monkeypatch.setattr(native.Kernels, "product", lambda self, x, matrix, rows: torch.zeros(len(x), rows))
    assert load_anew(torch.float32) is None


@pytest.mark.parametrize("missing", ["_processor", "_openmp"])
def test_without_the_instructions_or_openmp_there_are_no_kernels(monkeypatch, missing):
    monkeypatch.setattr(native, missing, lambda: None)
    assert load_anew(torch.bfloat16) is None


def test_a_model_without_kernels_computes_the_same(monkeypatch):
    monkeypatch.setattr(native, "load", lambda dtype, avx2=False: None)
    model, ids = make(), text(40)
    expected = forward(model, ids)
    runtime = packed(model)
    assert runtime.kernels == "torch"
    assert torch.allclose(runtime.advance([ids], last=40), expected, atol=1e-3)


@HERE
def test_the_threads_are_those_of_torchs_own_openmp():
    """A second runtime in the process would bring a second pool of threads."""
    code = """
import re, torch
from pathlib import Path
from specbench.models import native
def loaded():
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if native.OPENMP.search(line)}
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
torch.set_num_threads(2)
torch.randn(2000, 2000).add_(1)
before, count = loaded(), threads()
kernels = native.load(torch.float32)
x, matrix = torch.randn(8, 512), native.Packer(kernels, 0).pack(torch.randn(4096, 512))
kernels.product(x, matrix, 4096)
assert loaded() == before, (before, loaded())
assert threads() == count, (count, threads())
print("one")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "one", done.stderr


def test_every_part_of_the_source_is_in_the_name_of_what_is_built_from_it():
    assert set(native.PARTS) == {path.name for path in native.SOURCE.parent.glob("native*.[ch]")}


@HERE
def test_memory_is_read_whole_for_the_bandwidth_probe():
    """Every word of the buffer takes part, and a buffer that is not in whole stretches is left to others."""
    words = torch.arange(7 * native.STRETCH // 8)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found = native.reads(words.view(torch.float32))
        assert [read() for read in found.values()] == 2 * [int(words.sum())]
    assert native.reads(words[:-1].view(torch.float32)) == {}


@HERE
@DTYPES
def test_products_for_the_probe_are_whole_and_only_of_types_that_there_are_kernels_for(dtype):
    torch.manual_seed(1)
    (multiply,) = native.products(dtype, 70).values()
    torch.manual_seed(1)
    x, weight = torch.randn(2, 70, 70).to(getattr(torch, dtype)).double()
    assert torch.allclose(multiply().double(), linear(x, weight), rtol=1e-2, atol=1e-3)
    assert native.products("float16", 70) == native.products("int8", 70) == {}
