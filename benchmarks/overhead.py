"""What our loop costs: `autoregressive` against transformers' own `generate`, on the same model, dtype and threads.

    python benchmarks/overhead.py [--target smollm2-135m] [--dtype float32] [--threads 2] [--rounds 5] [--json]

Three arms, interleaved round by round, medians: transformers' `generate`; our `autoregressive` over the transformers
runtime, through the whole measuring loop; the same over the packed runtime, where the model allows it. Prefill is in
no number: a first call that makes one token is taken off. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

from specbench.hardware import devices
from specbench.hardware.clock import Clock, Drain
from specbench.hardware.environment import environment
from specbench.models.base import CachedModel
from specbench.models.info import ModelInfo, describe
from specbench.models.load import load
from specbench.models.specs import parse
from specbench.results.measure import Ending, measure
from specbench.strategies.autoregressive import Autoregressive, Options
from specbench.strategies.base import Request
from specbench.strategies.sampling import Sampling
from specbench.tasks import warmup


def ours(model: CachedModel, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    """(ms per token after the first, ids)."""
    strategy = Autoregressive({"target": model}, Options())
    (row,) = measure(strategy, [Request(0, ids, tokens)], Sampling(), Ending(), Clock(), Drain())
    assert row.error is None, row.error
    assert row.e2e_ns is not None
    assert row.ttft_ns is not None
    return (row.e2e_ns - row.ttft_ns) / 1e6 / (tokens - 1), row.token_ids


def theirs(model, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    def generate(count: int) -> tuple[float, list[int]]:
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=[-1],
                pad_token_id=0,
                repetition_penalty=1.0,
            )
        return time.perf_counter() - start, out[0, len(ids) :].tolist()

    first, _ = generate(1)
    whole, out = generate(tokens)
    return (whole - first) * 1e3 / (tokens - 1), out


def arms(info: ModelInfo, dtype: str) -> dict[str, CachedModel]:
    models = {"transformers runtime": load(info, dtype=dtype, runtime="transformers")}
    packed = load(info, dtype=dtype, runtime="auto")
    if packed.runtime == "packed":
        models["packed runtime"] = packed
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    placement = devices.parse_placement("target=cpu", args.threads)
    devices.apply(placement)
    info = describe(parse(args.target), "target", progress=lambda text: print(text, file=sys.stderr))
    models = arms(info, args.dtype)
    hf_model = models["transformers runtime"].hf_model  # type: ignore[attr-defined]
    ids = info.codec.encode(warmup.text(args.prompt_tokens, info.codec))
    times: dict[str, list[float]] = {"transformers generate": [], **{name: [] for name in models}}
    outputs: dict[str, list[int]] = {}
    for number in range(args.rounds + 1):  # the first round is the warm-up
        for name in times:
            if name == "transformers generate":
                ms, out = theirs(hf_model, ids, args.tokens)
            else:
                ms, out = ours(models[name], ids, args.tokens)
            outputs[name] = out
            if number:
                times[name].append(ms)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    reference = medians["transformers generate"]
    result = {
        "benchmark": "overhead",
        "target": info.name,
        "dtype": args.dtype,
        "threads": placement.threads,
        "prompt_tokens": len(ids),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "ms_per_token": medians,
        "speed_against_generate": {name: reference / ms for name, ms in medians.items()},
        "same_tokens_as_generate": {name: out == outputs["transformers generate"] for name, out in outputs.items()},
        "cpu": environment()["cpu"],
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{info.name}, {args.dtype}, {placement.threads} thread(s), {len(ids)} prompt tokens, {result['cpu']}")
    for name, ms in medians.items():
        same = "same tokens" if result["same_tokens_as_generate"][name] else "other tokens"
        print(f"  {name:24} {ms:8.2f} ms/token   {reference / ms:.3f}x   {same}")


if __name__ == "__main__":
    main()
