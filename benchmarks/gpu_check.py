"""T(n), CUDA graph against eager, the price of `exact`, and the bandwidth reached, on models of random weights.

    python benchmarks/gpu_check.py [--shapes 1b,8b] [--device cuda:0] [--dtype bfloat16] [--out FILE]

Called by gpu_check.sh. Prints lines, and with --out writes one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench.models.packed_cuda import StaticPackedModel

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
COUNTS = (1, 2, 4, 8, 16)


def make(shape: str, device: str, dtype: str, **options: Any) -> StaticPackedModel:
    """A Llama of that shape whose weights are drawn on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    size = config.vocab_size
    return StaticPackedModel(model, name=shape, device=device, dtype=dtype, vocab_size=size, **options)


def step_ms(model: StaticPackedModel, ids: np.ndarray, context: int, count: int, repeats: int = 20) -> float:
    """One forward of `count` new tokens until their argmax is on the host."""
    took = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        model.advance([ids[: context + count]], last=count).argmax(-1).tolist()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[3:])


def copy_bandwidth(device: str) -> float:
    """GB/s of a device-to-device copy, reads and writes together."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() * 4 / best / 1e9


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def check(shape: str, device: str, dtype: str, bandwidth: float, contexts: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": shape, "dtype": dtype, "contexts": {}}
    model = make(shape, device, dtype)
    found["weight_bytes"] = model.weight_bytes
    ids = np.random.default_rng(0).integers(0, model.vocab_size, max(*contexts, 256) + 64)
    model.reserve(1, len(ids))
    for context in contexts:
        model.advance([ids[:context]])
        graph = {count: step_ms(model, ids, context, count) for count in COUNTS}
        wanted, model._graphs_wanted = model._graphs_wanted, False
        eager = {count: step_ms(model, ids, context, count, 8) for count in (1, 8)}
        model._graphs_wanted = wanted
        rate = model.weight_bytes / graph[1] / 1e6
        found["contexts"][context] = {"graph_ms": graph, "eager_ms": eager, "weights_gb_per_s": rate}
        print(f"{shape} {dtype}, context {context}:")
        print("  T(n) ms, ratio: " + ", ".join(f"{n}: {ms:.2f} ({ms / graph[1]:.2f})" for n, ms in graph.items()))
        print(f"  eager / graph: {eager[1] / graph[1]:.2f} at 1 token, {eager[8] / graph[8]:.2f} at 8")
        print(f"  weights at {rate:.0f} GB/s, {rate / bandwidth:.2f} of a copy's {bandwidth:.0f} GB/s", flush=True)
    same = bits_agree(model, ids)
    model.close()
    exact = make(shape, device, dtype, exact=True)
    exact.reserve(1, len(ids))
    exact.advance([ids[: contexts[0]]])
    price = step_ms(exact, ids, contexts[0], 1) / found["contexts"][contexts[0]]["graph_ms"][1]
    found["exact"] = {"price": price, "bits_agree": bits_agree(exact, ids), "bits_agree_without": same}
    print(f"  exact: {price:.3f} times the time of one token; same bits at "
          f"{found['exact']['bits_agree']:.3f} of positions, {same:.3f} without", flush=True)  # fmt: skip
    exact.close()
    return found


def bits_agree(model: StaticPackedModel, ids: np.ndarray, context: int = 128, count: int = 8) -> float:
    """Share of positions whose logits are the same alone and in a draft of `count` tokens."""
    ends = range(context, context + 4 * count)
    model.reset()
    model.advance([ids[:context]])
    single = torch.cat([model.advance([ids[: end + 1]]) for end in ends])
    model.reset()
    model.advance([ids[:context]])
    several = torch.cat([model.advance([ids[: end + count]], last=count) for end in ends[::count]])
    return float((single == several).all(-1).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--contexts", default="256,4096")
    parser.add_argument("--out", help="write a JSON document here")
    args = parser.parse_args()
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else args.device
    bandwidth = copy_bandwidth(args.device)
    print(f"{name}, torch {torch.__version__}: copy {bandwidth:.0f} GB/s", flush=True)
    contexts = tuple(int(length) for length in args.contexts.split(","))
    results = [check(shape, args.device, args.dtype, bandwidth, contexts) for shape in args.shapes.split(",")]
    document = {"device": name, "torch": torch.__version__, "copy_gb_per_s": bandwidth, "models": results}
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
