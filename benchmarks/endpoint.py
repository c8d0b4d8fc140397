"""llama.cpp beside our own arms: one table of both on the same prompts, over HTTP and in process.

    python benchmarks/endpoint.py --gguf FILE.gguf --target FOLDER [--server-python PYTHON] [--draft self:int4]
        [--task bundled] [--limit 16] [--max-new-tokens 64] [--dtype float32] [--threads 2] [--out FOLDER] [--json]

Starts llama-cpp-python's server on loopback twice, plain and with its prompt-lookup drafting, and measures for each a
run of `autoregressive`, `speculative`, `lookup` and `endpoint`, interleaved prompt by prompt. The two runs are then
compared as `specbench compare` does it, every arm with the baseline of its own run. --server-python is an interpreter
with `llama-cpp-python[server]`; by default this one. --target holds the weights of the same file as transformers reads
them, so both sides run one model; llama.cpp computes in the file's own quantisation, our arms in --dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbench.errors import ModelError
from specbench.hardware.environment import environment
from specbench.models.endpoint import find_model
from specbench.models.endpoint_options import EndpointOptions
from specbench.results import compare, runs
from specbench.results import run as measuring
from specbench.results.comparison import Comparison, print_comparison
from specbench.results.plan import Plan

FORMS: dict[str, tuple[str, ...]] = {
    "llama.cpp": (),
    "llama.cpp prompt lookup": ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", "10"),
}
START_S = 120.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--draft", default="self:int4")
    parser.add_argument("--task", default="bundled")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args(argv)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def server(args: argparse.Namespace, name: str, port: int, log: Path) -> Iterator[EndpointOptions]:
    """A server under the name, from when it answers until the block is left."""
    words = [
        args.server_python, "-m", "llama_cpp.server", "--model", str(args.gguf), "--model_alias", name, "--host",
        "127.0.0.1", "--port", str(port), "--n_ctx", "2048", "--n_threads", str(args.threads), "--n_threads_batch",
        str(args.threads), "--verbose", "false", *FORMS[name],
    ]  # fmt: skip
    options = EndpointOptions(url=f"http://127.0.0.1:{port}/v1", model=name, evict=True)
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    find_model(options)
                    break
                except ModelError as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        said = log.read_text(errors="replace").strip().splitlines()[-1:]
                        raise SystemExit(f"{name}: the server did not start ({error}); it said: {said}") from None
                    time.sleep(0.2)
            yield options
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def plan(args: argparse.Namespace, options: EndpointOptions, out: Path) -> Plan:
    return Plan(
        strategy=("speculative", "lookup", "endpoint"), target=args.target, draft=args.draft, task=(args.task,),
        limit=args.limit, max_new_tokens=args.max_new_tokens, dtype=args.dtype, threads=args.threads, trace=0, out=out,
        options={"endpoint": {"url": options.url, "model": options.model, "evict": options.evict}},
    )  # fmt: skip


def version(python: str) -> str:
    code = "import llama_cpp; print(llama_cpp.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]


def measure(args: argparse.Namespace, folder: Path) -> tuple[Comparison, list[dict[str, Any]]]:
    """The table of both runs, and each run by itself."""
    port, found = free_port(), []
    for name in FORMS:
        print(f"measuring beside {name}", file=sys.stderr)
        out = folder / name.replace(" ", "-")
        with server(args, name, port, folder / f"{out.name}.log") as options:
            found.append(measuring.run(plan(args, options, out)))
    table = compare.compare(runs.load([result.folder for result in found]))
    return table, [result.summary.to_dict() for result in found]


def main(argv: list[str] | None = None) -> int:
    args, load_before = parse(argv), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        table, alone = measure(args, folder)
    if args.json:
        document = {
            "benchmark": "endpoint", "gguf": args.gguf.name, "llama_cpp_python": version(args.server_python),
            "draft": args.draft, "task": args.task, "limit": args.limit, "max_new_tokens": args.max_new_tokens,
            "dtype": args.dtype, "threads": args.threads, "cpu": environment()["cpu"], "load_before": load_before,
            "table": table.to_dict(), "runs": alone,
        }  # fmt: skip
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        from specbench.cli.output import stdout

        print_comparison(table, stdout())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is not left behind
    sys.exit(main())
