"""How fast the packed runtime is, beside transformers and llama.cpp: the table of docs/performance.md.

    python benchmarks/runtime.py MODEL [--gguf FILE] [--sections decode,context,...] [--threads 2,1] [--json]

MODEL is a transformers folder of a Llama-family model (SmolLM2-135M for the targets below). Arms are interleaved in
rounds within one process and medians are compared, so a busy moment hits all of them. With `--gguf`, any GGUF file of
the same model, llama.cpp runs beside (`pip install llama-cpp-python`); its bfloat16 and Q4_0 files are made from it.
Every figure is a line with what it is compared with, the ratio, and the target if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench.models.packed import PackedModel
from specbench.models.quiet import quiet
from specbench.models.transformers_runtime import TransformersModel

SECTIONS = ("decode", "kernels", "context", "batch", "load", "bits", "run")
DTYPES = ("bfloat16", "float32")


class Report:
    """Figures with their comparison; printed as they come, or all at the end as one JSON document."""

    def __init__(self, as_json: bool, about: dict[str, Any]) -> None:
        self.as_json, self.about, self.figures = as_json, about, []

    def add(
        self,
        figure: str,
        value: float,
        unit: str,
        compared_with: str = "",
        other: float | None = None,
        ratio: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        met = None
        if ratio is not None and (at_least is not None or at_most is not None):
            met = (at_least is None or ratio >= at_least) and (at_most is None or ratio <= at_most)
        self.figures.append({
            "figure": figure, "value": value, "unit": unit, "compared_with": compared_with or None, "other": other,
            "ratio": ratio, "at_least": at_least, "at_most": at_most, "met": met,
        })  # fmt: skip
        if not self.as_json:
            beside = f"  {compared_with} {other:.4g}" if other is not None else ""
            goal = f" (at least {at_least})" if at_least is not None else ""
            goal += f" (at most {at_most})" if at_most is not None else ""
            verdict = {True: "  met", False: "  MISSED", None: ""}[met]
            times = f"  ratio {ratio:.3f}{goal}{verdict}" if ratio is not None else ""
            print(f"{figure:64s} {value:9.4g} {unit}{beside}{times}", flush=True)

    def close(self) -> None:
        if self.as_json:
            print(json.dumps({"about": self.about, "figures": self.figures}, indent=1, allow_nan=False))


def interleave(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median milliseconds of every arm; each call times itself, and a first round does not count."""
    took: dict[str, list[float]] = {name: [] for name in arms}
    for at in range(rounds + 1):
        for name, arm in arms.items():
            ms = arm()
            if at:
                took[name].append(ms)
    return {name: statistics.median(times) for name, times in took.items()}


def read_bandwidth() -> float:
    """GB/s of reading 1 GB with torch's sum: a bound to compare with, a little below the hardware's."""
    numbers = torch.zeros(1 << 28)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - began)
    return numbers.numel() * 4 / best / 1e9


def load_hf(folder: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def load_packed(folder: str, dtype: str, native: bool = True, **options: Any) -> PackedModel:
    """With our own kernels where they are to be had, or with torch's operators."""
    hf_model = load_hf(folder, dtype)
    vocab_size = hf_model.config.vocab_size
    before = os.environ.get("SPECBENCH_NATIVE", "1")
    os.environ["SPECBENCH_NATIVE"] = before if native else "0"
    try:
        return PackedModel.from_transformers(
            hf_model, name=folder, device="cpu", dtype=dtype, vocab_size=vocab_size, **options
        )
    finally:
        os.environ["SPECBENCH_NATIVE"] = before


def sample_ids(folder: str, count: int) -> np.ndarray:
    """Real text where there is a tokenizer: this file and its neighbours, repeated to the length."""
    from transformers import AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    root = Path(__file__).resolve().parent.parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("models/*.py")))
    ids = np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)
    return np.tile(ids, -(-count // len(ids)))[:count]


def step_ms(model: Any, ids: np.ndarray, context: int, count: int, repeats: int = 7) -> float:
    """One forward over `count` new tokens with their argmax on the host, on `context` cached ones."""
    took = []
    model.advance([ids[: context + count]], last=count)
    for _ in range(repeats):
        began = time.perf_counter()
        model.advance([ids[: context + count]], last=count).argmax(-1).tolist()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def generate_ms(hf_model: Any, ids: np.ndarray, tokens: int = 16) -> float:
    """transformers' own greedy generate, per token: a long run minus a short one, so that the prompt cancels."""
    prompt = torch.from_numpy(ids)[None]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ends = []
    with torch.inference_mode(), quiet():
        for count in (1, tokens + 1):
            began = time.perf_counter()
            hf_model.generate(prompt, max_new_tokens=count, **options)
            ends.append(time.perf_counter() - began)
    return (ends[1] - ends[0]) * 1e3 / tokens


class LlamaCpp:
    """A GGUF model in llama.cpp, with logits after every new token, as verification needs them."""

    def __init__(self, path: str, threads: int, room: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = room, 512, 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def fill(self, ids: np.ndarray) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        for begin in range(0, len(ids), 512):
            self._decode(ids[begin : begin + 512], begin, every=False)

    def step_ms(self, ids: np.ndarray, context: int, count: int, repeats: int = 7) -> float:
        took = []
        for _ in range(repeats + 1):
            self._lib.llama_memory_seq_rm(self._memory, 0, context, -1)
            began = time.perf_counter()
            self._decode(ids[context : context + count], context, every=True)
            for i in range(count):
                logits = self._lib.llama_get_logits_ith(self._context, i)
                np.ctypeslib.as_array(logits, (self._vocab,)).argmax()
            took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took[1:])

    def _decode(self, ids: np.ndarray, position: int, every: bool) -> None:
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(ids) - 1
        assert self._lib.llama_decode(self._context, batch) == 0
        self._lib.llama_synchronize(self._context)
        self._lib.llama_batch_free(batch)


def make_gguf(source: str, target: str, kind: str) -> str:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = {"bf16": 32, "q4_0": 2}[kind]
    options.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp cannot make {kind} of {source}")
    return target


def decode(args: argparse.Namespace, report: Report) -> None:
    """One token and short drafts on a 256-token context."""
    context, counts = 256, (1, 2, 3, 4, 6, 8, 16)
    ids = sample_ids(args.model, context + 64)
    targets = {("bfloat16", 2): 2.5, ("float32", 2): 2.2, ("bfloat16", 1): 2.8} if args.targets else {}
    with tempfile.TemporaryDirectory() as folder:
        gguf = {}
        if args.gguf:
            gguf = {kind: make_gguf(args.gguf, f"{folder}/{kind}.gguf", kind) for kind in ("bf16", "q4_0")}
        for threads in args.threads:
            torch.set_num_threads(threads)
            bandwidth = read_bandwidth()
            report.add(f"{threads} threads: read bandwidth (torch sum)", bandwidth, "GB/s")
            for dtype in args.dtypes:
                at = f"{dtype}, {threads} threads"
                hf_model, packed = load_hf(args.model, dtype), load_packed(args.model, dtype)
                generic = TransformersModel(load_hf(args.model, dtype), name="generic", context_length=2048)
                arms: dict[str, Callable[[], float]] = {"generate": lambda m=hf_model: generate_ms(m, ids[:context])}
                for count in counts:
                    arms[f"packed {count}"] = lambda m=packed, n=count: step_ms(m, ids, context, n)
                for count in (1, 2, 3, 8):
                    arms[f"generic {count}"] = lambda m=generic, n=count: step_ms(m, ids, context, n, 3)
                if dtype == "bfloat16" and gguf:
                    llama = LlamaCpp(gguf["bf16"], threads, 512)
                    llama.fill(ids[:context])
                    for count in (1, 8, 16):
                        arms[f"llama {count}"] = lambda m=llama, n=count: m.step_ms(ids, context, n)
                for model in (packed, generic):
                    model.advance([ids[:context]])
                ms = interleave(arms, args.rounds)
                one = ms["packed 1"]
                report.add(
                    f"{at}: one token", one, "ms", "transformers generate", ms["generate"], ms["generate"] / one,
                    at_least=targets.get((dtype, threads)),
                )  # fmt: skip
                bound = packed.weight_bytes / bandwidth / 1e6
                report.add(f"{at}: one token against the bound", one, "ms", "weights / bandwidth", bound, bound / one)
                for count in counts[1:]:
                    most = {8: 1.35, 16: 1.6}.get(count) if args.targets and threads == 2 else None
                    report.add(
                        f"{at}: T({count})/T(1)", ms[f"packed {count}"], "ms", "T(1)", one, ms[f"packed {count}"] / one,
                        at_most=most,
                    )  # fmt: skip
                for count in (2, 3, 8):
                    report.add(
                        f"{at}: transformers runtime T({count})/T(1)", ms[f"generic {count}"], "ms", "its T(1)",
                        ms["generic 1"], ms[f"generic {count}"] / ms["generic 1"],
                    )  # fmt: skip
                if "llama 1" in ms:
                    limits = (1.15, 1.1) if args.targets else (None, None)
                    report.add(f"{at}: one token beside llama.cpp BF16", one, "ms", "llama.cpp", ms["llama 1"],
                               one / ms["llama 1"], at_most=limits[0])  # fmt: skip
                    report.add(f"{at}: 8 tokens beside llama.cpp BF16", ms["packed 8"], "ms", "llama.cpp",
                               ms["llama 8"], ms["llama 8"] / ms["packed 8"], at_least=limits[1])  # fmt: skip
                    report.add(f"{at}: 16 tokens beside llama.cpp BF16", ms["packed 16"], "ms", "llama.cpp",
                               ms["llama 16"], ms["llama 16"] / ms["packed 16"])  # fmt: skip
            if args.quants:
                quantised(args, report, ids, context, threads, gguf)


def quantised(
    args: argparse.Namespace, report: Report, ids: np.ndarray, context: int, threads: int, gguf: dict[str, str]
) -> None:
    arms: dict[str, Callable[[], float]] = {}
    for quant in ("int4", "int8"):
        model = load_packed(args.model, "bfloat16", quant=quant)
        model.advance([ids[:context]])
        for count in (1, 4, 8):
            arms[f"{quant} {count}"] = lambda m=model, n=count: step_ms(m, ids, context, n)
    if gguf:
        llama = LlamaCpp(gguf["q4_0"], threads, 512)
        llama.fill(ids[:context])
        for count in (1, 8):
            arms[f"llama {count}"] = lambda m=llama, n=count: m.step_ms(ids, context, n)
    ms = interleave(arms, args.rounds)
    for quant in ("int4", "int8"):
        for count in (4, 8):
            report.add(f"{quant}, {threads} threads: T({count})/T(1)", ms[f"{quant} {count}"], "ms", "T(1)",
                       ms[f"{quant} 1"], ms[f"{quant} {count}"] / ms[f"{quant} 1"])  # fmt: skip
    if gguf:
        limits = (1.1, 1.4) if args.targets else (None, None)
        report.add(f"int4, {threads} threads: one token beside llama.cpp Q4_0", ms["int4 1"], "ms", "llama.cpp",
                   ms["llama 1"], ms["int4 1"] / ms["llama 1"], at_most=limits[0])  # fmt: skip
        report.add(f"int4, {threads} threads: 8 tokens beside llama.cpp Q4_0", ms["int4 8"], "ms", "llama.cpp",
                   ms["llama 8"], ms["llama 8"] / ms["int4 8"], at_least=limits[1])  # fmt: skip


def context(args: argparse.Namespace, report: Report) -> None:
    """One token at long contexts, against transformers' own forward with its own cache."""
    from transformers import DynamicCache

    torch.set_num_threads(args.threads[0])
    bandwidth = read_bandwidth()
    for dtype in args.dtypes:
        hf_model, packed = load_hf(args.model, dtype), load_packed(args.model, dtype)
        config = hf_model.config
        short = None
        for length in (64, 2048, 8192 - 32):
            ids = sample_ids(args.model, length + 16)
            packed.advance([ids[:length]])
            arms: dict[str, Callable[[], float]] = {}
            for count in (1, 4, 8):
                arms[f"packed {count}"] = lambda m=packed, i=ids, n=length, c=count: step_ms(m, i, n, c, 5)
            if length > 64:
                with torch.inference_mode():
                    cache = DynamicCache(config=config)
                    for begin in range(0, length, 1024):
                        piece = torch.from_numpy(ids[begin : min(begin + 1024, length)])[None]
                        hf_model(piece, cache=cache, logits_to_keep=1)

                def theirs(hf_model: Any = hf_model, cache: Any = cache, token: int = int(ids[length])) -> float:
                    took = []
                    for _ in range(3):
                        began = time.perf_counter()
                        with torch.inference_mode():
                            hf_model(torch.tensor([[token]]), cache=cache).logits[0, -1].argmax().item()
                        took.append((time.perf_counter() - began) * 1e3)
                        cache.crop(-1)
                    return statistics.median(took)

                arms["transformers"] = theirs
            ms = interleave(arms, args.rounds)
            one = ms["packed 1"]
            if short is None:
                short = one
                continue
            at = f"{dtype}, context {length}"
            report.add(f"{at}: one token", one, "ms", "transformers", ms["transformers"], ms["transformers"] / one,
                       at_least=2.0 if args.targets else None)  # fmt: skip
            for count in (4, 8):
                report.add(f"{at}: T({count})/T(1)", ms[f"packed {count}"], "ms", "T(1)", one,
                           ms[f"packed {count}"] / one)  # fmt: skip
            size = 2 * config.num_hidden_layers * config.num_key_value_heads * packed._decoder.head_dim * length
            size *= getattr(torch, dtype).itemsize
            attention = max(one - short, 1e-6)
            report.add(f"{at}: attention's share of the time", attention / one, "of T(1)")
            rate = size / attention / 1e6
            report.add(f"{at}: attention reads", rate, "GB/s", "bandwidth", bandwidth, rate / bandwidth)


# Table of section 7 of the measurements that the runtime was designed on: (rows, context) -> n=1, 4, 7 in ms.
PROTOTYPE_BATCH = {
    ("bfloat16", 8, 4096): (59.1, 91.2, 121.2), ("bfloat16", 8, 8192): (102.7, 153.8, 210.2),
    ("bfloat16", 16, 4096): (96.9, 157.8, 204.5), ("bfloat16", 16, 8192): (195.8, 293.1, 398.2),
    ("float32", 8, 4096): (94.5, 148.0, 213.2), ("float32", 8, 8192): (168.4, 266.0, 386.4),
}  # fmt: skip


def batch(args: argparse.Namespace, report: Report) -> None:
    """Batches at long contexts. All rows hold the same text: one prefill, copied, since cost does not depend on it."""
    torch.set_num_threads(args.threads[0])
    for dtype in args.dtypes:
        packed: Any = load_packed(args.model, dtype)
        for rows in (8, 16):
            for length in (4096 - 64, 8192 - 64):
                key = (dtype, rows, length + 64)
                if key not in PROTOTYPE_BATCH:
                    continue
                ids = sample_ids(args.model, length + 8)
                packed.reset()
                packed.reserve(rows, length + 8)
                packed.advance([ids[:length]])
                packed._lengths = [length] + [0] * (rows - 1)
                packed._cache.fit(rows, length + 8, packed._lengths)
                blocks = packed._cache.blocks
                blocks[:, :, 1:rows] = blocks[:, :, :1]
                packed._ids[:rows, :length] = ids[:length]
                packed._lengths = [length] * rows

                def step(
                    count: int, packed: Any = packed, ids: np.ndarray = ids, rows: int = rows, length: int = length
                ) -> float:
                    contexts = [ids[: length + count]] * rows
                    began = time.perf_counter()
                    packed.advance(contexts, last=count).argmax(-1).tolist()
                    return (time.perf_counter() - began) * 1e3

                ms = interleave({str(n): lambda n=n: step(n) for n in (1, 4, 7)}, max(3, args.rounds // 2))
                short = 64 / length
                for count, known in zip((1, 4, 7), PROTOTYPE_BATCH[key], strict=True):
                    one = ms[str(count)]
                    report.add(f"{dtype}, {rows} rows at {length + 64}: {count} tokens", one, "ms",
                               "prototype on Zen 5", known, one / known)  # fmt: skip
                size = packed._cache.blocks.numel() * packed._cache.blocks.element_size() * (1 - short)
                report.add(f"{dtype}, {rows} rows at {length + 64}: cache read by one step", size / ms["1"] / 1e6,
                           "GB/s, all of the step's time")  # fmt: skip
        packed.close()


LOAD_SCRIPT = """
import json, sys, time
import psutil, torch
sys.path.insert(0, {here!r})
from runtime import load_hf
folder, dtype, wants = sys.argv[1:4]
load_hf({small!r} or folder, dtype)  # imports and file cache
rss = psutil.Process().memory_info().rss
began = time.perf_counter()
model = load_hf(folder, dtype)
loaded = time.perf_counter() - began
weights = sum(p.numel() * p.element_size() for p in model.parameters())
packing = 0.0
if wants == "packed":
    from specbench.models.packed import PackedModel
    began = time.perf_counter()
    size = model.config.vocab_size
    packed = PackedModel.from_transformers(model, name="x", device="cpu", dtype=dtype, vocab_size=size)
    packing = time.perf_counter() - began
    packed.advance([[1, 2, 3]])
    del model
print(json.dumps({{"loaded": loaded, "packing": packing, "weights": weights,
                  "rss": psutil.Process().memory_info().rss - rss}}))
"""


def load(args: argparse.Namespace, report: Report) -> None:
    """Seconds and memory of loading, in processes of their own."""
    script = LOAD_SCRIPT.format(here=str(Path(__file__).resolve().parent), small="")
    for dtype in args.dtypes:
        runs = []
        for _ in range(5):
            out = subprocess.run(
                [sys.executable, "-c", script, args.model, dtype, "packed"], capture_output=True, text=True, check=True
            )
            runs.append(json.loads(out.stdout.splitlines()[-1]))
        loaded, packing = (statistics.median(run[name] for run in runs) for name in ("loaded", "packing"))
        report.add(f"{dtype}: packing", packing, "s", "transformers loads in", loaded, packing / loaded,
                   at_most=2.0 if args.targets else None)  # fmt: skip
        rss, weights = statistics.median(run["rss"] for run in runs), runs[0]["weights"]
        report.add(f"{dtype}: memory after packing (resident, over an empty process)", rss / 1e6, "MB", "weights",
                   weights / 1e6, rss / weights, at_most=1.2 if args.targets else None)  # fmt: skip


def bits(args: argparse.Namespace, report: Report) -> None:
    """Several tokens at once against one by one: bits in bfloat16, the best token in float32."""
    torch.set_num_threads(args.threads[0])
    for dtype in args.dtypes:
        packed = load_packed(args.model, dtype)
        for start, count in ((0, 512), (1024, 512)):
            ids = sample_ids(args.model, start + count)
            if start:
                packed.advance([ids[:start]])
            single = torch.cat([packed.advance([ids[: i + 1]]) for i in range(start, start + count)])
            for together in (8, 64):
                packed.reset()
                if start:
                    packed.advance([ids[:start]])
                blocks = [packed.advance([ids[: i + together]], last=together)
                          for i in range(start, start + count, together)]  # fmt: skip
                several = torch.cat(blocks)
                same = int((several == single).all(-1).sum())
                best = int((several.argmax(-1) == single.argmax(-1)).sum())
                at = f"{dtype}, from {start}, {together} at once"
                exact = (dtype == "bfloat16" or packed.kernels == "native") and args.targets
                report.add(f"{at}: positions with the same bits", same, f"of {count}", "positions", count,
                           same / count, at_least=1.0 if exact else None)  # fmt: skip
                report.add(f"{at}: positions with the same best token", best, f"of {count}", "positions", count,
                           best / count, at_least=1.0 if args.targets else None)  # fmt: skip
            packed.reset()
        ids = sample_ids(args.model, 1024)
        ours = packed.advance([ids], last=len(ids)).float()
        reference = load_hf(args.model, "float32")
        with torch.inference_mode():
            theirs = reference(torch.from_numpy(ids)[None]).logits[0]
        gap = theirs.topk(2, -1).values.diff(dim=-1).abs()[:, 0]
        differs = ours.argmax(-1) != theirs.argmax(-1)
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        report.add(f"{dtype}: largest difference to transformers float32, relative", error, "")
        report.add(f"{dtype}: best token differs from transformers float32", int(differs.sum()), "of 1024 positions")
        if dtype != "float32":
            with torch.inference_mode():
                rounded = load_hf(args.model, dtype)(torch.from_numpy(ids)[None]).logits[0]
            count = int((rounded.argmax(-1) != theirs.argmax(-1)).sum())
            report.add(f"{dtype}: best token of transformers {dtype} differs from it", count, "of 1024 positions")
        if dtype == "float32" and differs.any():
            report.add(f"{dtype}: largest lead among those", float(gap[differs].max()), "logits")


def run(args: argparse.Namespace, report: Report) -> None:
    """The autoregressive strategy against the bare runtime, 128 tokens after 256."""
    from specbench.strategies.autoregressive import Autoregressive
    from specbench.strategies.base import Request
    from specbench.strategies.sampling import Sampling

    torch.set_num_threads(args.threads[0])
    ids = sample_ids(args.model, 256)
    count = 64
    for dtype in args.dtypes:
        packed = load_packed(args.model, dtype)

        def bare(packed: PackedModel = packed) -> float:
            context = list(ids)
            context.append(int(packed.advance([ids])[0].argmax()))
            began = time.perf_counter()
            for _ in range(count):
                context.append(int(packed.advance([np.array(context)])[0].argmax()))
            return (time.perf_counter() - began) * 1e3 / count

        def strategy(packed: PackedModel = packed) -> float:
            arm = Autoregressive({"target": packed}, Autoregressive.Options())
            steps = arm.generate([Request(0, ids, count + 1)], Sampling())
            next(steps)
            began = time.perf_counter()
            for _ in range(count):
                next(steps)
            return (time.perf_counter() - began) * 1e3 / count

        ms = interleave({"bare": bare, "strategy": strategy}, args.rounds)
        report.add(f"{dtype}: autoregressive strategy, one token", ms["strategy"], "ms", "bare runtime", ms["bare"],
                   ms["bare"] / ms["strategy"], at_least=0.95 if args.targets else None)  # fmt: skip


def kernels(args: argparse.Namespace, report: Report) -> None:
    """Our own kernels against torch's operators."""
    from kernels import kernels

    kernels(args, report)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="transformers folder")
    parser.add_argument("--gguf", help="GGUF file of the same model: llama.cpp runs beside")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--threads", default="2,1", help="numbers of threads, the first for all sections")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-quants", dest="quants", action="store_false", help="leave int4 and int8 out")
    parser.add_argument("--no-targets", dest="targets", action="store_false", help="for models without targets")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    args.threads = [int(count) for count in args.threads.split(",")]
    args.dtypes = args.dtypes.split(",")
    about = {
        "model": Path(args.model).name, "torch": torch.__version__, "processor": processor(), "cores": os.cpu_count(),
        "threads": args.threads, "rounds": args.rounds, "load_before": os.getloadavg()[0],
    }  # fmt: skip
    report = Report(args.json, about)
    sections = {
        "decode": decode, "kernels": kernels, "context": context, "batch": batch, "load": load, "bits": bits,
        "run": run,
    }  # fmt: skip
    for name in args.sections.split(","):
        sections[name](args, report)
    report.close()
    return 0 if all(figure["met"] is not False for figure in report.figures) else 1


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
