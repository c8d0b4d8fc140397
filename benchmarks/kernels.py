"""Our own kernels beside torch's operators, in one process and turn by turn: the section `kernels` of runtime.py.

    python benchmarks/runtime.py MODEL --sections kernels [--dtypes bfloat16] [--threads 2] [--rounds 9]

Both arms are the packed runtime with the same weights; one of them has SPECBENCH_NATIVE=0. Whole steps behind a short
context, a prompt, one matrix product over weights that are not in the caches, the attention of one layer alone, and
choosing the positions of a sparse cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from runtime import Report, interleave, load_packed, sample_ids, step_ms

from specbench.models.kv_cache import KeyValueCache
from specbench.models.packed_attention import Span, attend, make_plans
from specbench.models.packed_linear import multiply
from specbench.models.sparse_select import POOLED, snapkv

CONTEXT, PROMPT = 256, 512
ROWS, SLOTS = 8, 8192  # of the attention that is measured alone
WINDOW, BUDGET = 32, 512  # queries that choose, positions that are kept


def kernels(args: argparse.Namespace, report: Report) -> None:
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtypes:
            ours, theirs = load_packed(args.model, dtype), load_packed(args.model, dtype, native=False)
            if ours.kernels != "native":
                print("no kernels of our own here: they need AVX2 or AVX-512, a C compiler and OpenMP", file=sys.stderr)
                return
            at = f"{dtype}, {threads} threads"
            steps(args, report, at, ours, theirs)
            product(args, report, at, ours, theirs)
            attention(args, report, at, ours, theirs)
            choosing(args, report, at, ours)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        work()
    return (time.perf_counter() - began) * 1e3


def steps(args: argparse.Namespace, report: Report, at: str, ours: Any, theirs: Any) -> None:
    """Whole forwards, with their argmax on the host."""
    ids, counts = sample_ids(args.model, PROMPT + 64), (1, 2, 4, 8, 12, 16, 64)
    arms: dict[str, Callable[[], float]] = {}
    for name, model in (("native", ours), ("torch", theirs)):
        model.advance([ids[:CONTEXT]])
        for count in counts:
            arms[f"{name} {count}"] = lambda m=model, n=count: step_ms(m, ids, CONTEXT, n, 5)
    ms = interleave(arms, args.rounds)
    for count in counts:
        one, other = ms[f"native {count}"], ms[f"torch {count}"]
        report.add(f"{at}: {count} tokens", one, "ms", "torch", other, other / one)
    for name in ("native", "torch"):
        for count in counts[1:]:
            report.add(f"{at}: {name}, T({count})/T(1)", ms[f"{name} {count}"], "ms", "T(1)", ms[f"{name} 1"],
                       ms[f"{name} {count}"] / ms[f"{name} 1"])  # fmt: skip

    def prompt(model: Any) -> float:
        model.reset()
        return timed(lambda: model.advance([ids[:PROMPT]]))

    arms = {name: lambda m=model: prompt(m) for name, model in (("native", ours), ("torch", theirs))}
    ms = interleave(arms, args.rounds)
    report.add(f"{at}: a prompt of {PROMPT} tokens", ms["native"], "ms", "torch", ms["torch"],
               ms["torch"] / ms["native"])  # fmt: skip


def product(args: argparse.Namespace, report: Report, at: str, ours: Any, theirs: Any) -> None:
    """The gates and ups of all layers, one after the other, so that each is read from memory."""
    kernels, width = ours._decoder.native.kernels, ours._decoder.embedding.shape[1]
    own = [layer.gate_up for layer in ours._decoder.layers]
    plain = [layer.gate_up for layer in theirs._decoder.layers]
    rows = ours._decoder.native.inner * 2
    for count in (1, 4, 8, 16):
        x = torch.randn(count, width).to(kernels.dtype)
        arms = {
            "native": lambda x=x: timed(lambda: [kernels.product(x, matrix, rows) for matrix in own]),
            "torch": lambda x=x: timed(lambda: [multiply(x, matrix, 4) for matrix in plain]),
        }
        ms = interleave(arms, args.rounds)
        size = sum(matrix.nbytes for matrix in own)
        report.add(f"{at}: products of {count} tokens", size / ms["native"] / 1e6, "GB/s", "torch",
                   size / ms["torch"] / 1e6, ms["torch"] / ms["native"])  # fmt: skip


def attention(args: argparse.Namespace, report: Report, at: str, ours: Any, theirs: Any) -> None:
    """Of the first layer, on rows that fill a cache larger than the processor's."""
    decoder, room = ours._decoder, 16
    decoder.rotation.reach(SLOTS)
    cache = KeyValueCache(1, decoder.kv_heads, decoder.head_dim, decoder.dtype)
    cache.fit(ROWS, SLOTS, [0] * ROWS)
    cache.blocks.copy_(torch.randn(cache.blocks.shape))
    size, arms = cache.nbytes, {}
    counts = (1, 4, 8)
    for count in counts:
        spans = [Span(row, SLOTS - room, count) for row in range(ROWS)]
        positions = np.tile(np.arange(SLOTS - room, SLOTS - room + count), ROWS)
        heads = torch.randn(ROWS * count, decoder.heads + 2 * decoder.kv_heads, decoder.head_dim).to(decoder.dtype)
        plans = make_plans(cache, spans, decoder.heads)
        arms[f"native {count}"] = lambda h=heads, p=positions, s=spans: timed(
            lambda: decoder.native.attention(h, p, cache, s)
        )
        arms[f"torch {count}"] = lambda h=heads, p=plans: timed(
            lambda: attend(h, 0, p, decoder.heads, decoder.kv_heads)
        )
    ms = interleave(arms, args.rounds)
    for count in counts:
        one, other = ms[f"native {count}"], ms[f"torch {count}"]
        report.add(f"{at}: attention, {ROWS} rows of {SLOTS}, {count} tokens", size / one / 1e6, "GB/s", "torch",
                   size / other / 1e6, other / one)  # fmt: skip
    for name in ("native", "torch"):
        report.add(f"{at}: attention, {name}, 4 tokens against 1", ms[f"{name} 4"], "ms", "one token",
                   ms[f"{name} 1"], ms[f"{name} 4"] / ms[f"{name} 1"])  # fmt: skip


def choosing(args: argparse.Namespace, report: Report, at: str, ours: Any) -> None:
    """What is kept of one row, in all layers; the same keys and queries for both."""
    decoder = ours._decoder
    cache = KeyValueCache(len(decoder.layers), decoder.kv_heads, decoder.head_dim, decoder.dtype)
    cache.fit(1, SLOTS, [0])
    for layer in cache.blocks:
        layer.copy_(torch.randn(layer.shape))
    queries = torch.randn(cache.layers, WINDOW, decoder.heads, decoder.head_dim).to(decoder.dtype)
    keys = cache.blocks[:, 0, 0]
    arms = {
        "native": lambda: timed(lambda: decoder.native.choose(queries, cache, 0, SLOTS, BUDGET, WINDOW, POOLED)),
        "torch": lambda: timed(lambda: [snapkv(queries[i], keys[i], BUDGET, WINDOW) for i in range(cache.layers)]),
    }
    ms = interleave(arms, args.rounds)
    report.add(f"{at}: choosing {BUDGET} of {SLOTS} positions of a row", ms["native"], "ms", "torch", ms["torch"],
               ms["torch"] / ms["native"])  # fmt: skip
