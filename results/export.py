"""A run in the words of vLLM's benchmarks, for scripts that read those: `specbench show RUN --format vllm`.

One object per task and arm, with the keys that `vllm bench serve --save-result` writes, and `avg_latency`, `latencies`
and `percentiles` of `vllm bench latency`. What a run in one process has no value for is null: there is no request rate,
no concurrency beyond the rows of a batch, no goodput. Where the two tools mean different things by a word, this follows
vLLM, as far as its code says:

- `mean_tpot_ms` is a mean over requests of decode time / (n - 1); in our own tables TPOT pools.
- `itl` is the time between two chunks as a streaming client sees them, so a step that brings three tokens is one value.
  It is no time per token, and its mean grows with the draft length.
- `duration` is the time in which calls ran, one after another; there is no time between requests in it.
- 99th percentiles need 100 values, as everywhere here.
- `spec_decode_acceptance_rate` is in percent; `spec_decode_acceptance_length` has the bonus token in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MeasurementError
from . import metrics
from .records import Sample, without_collector

NS_PER_MS = 1_000_000
PERCENTILES = (10, 25, 50, 75, 90, 99)


@without_collector()
def vllm(manifest: dict[str, Any], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One object per task and arm, in the order of the run.

    Raises:
        MeasurementError: not one sample finished.
    """
    by_cell: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.kind == "measure":
            by_cell.setdefault((sample.task, sample.arm), []).append(sample)
    if not any(sample.ok for ours in by_cell.values() for sample in ours):
        raise MeasurementError("nothing measured: no sample finished")
    return [_result(manifest, task, arm, ours) for (task, arm), ours in by_cell.items()]


def to_json(manifest: dict[str, Any], samples: Sequence[Sample]) -> str:
    return json.dumps(vllm(manifest, samples), allow_nan=False, indent=2, default=str) + "\n"


def _result(manifest: dict[str, Any], task: str, arm: str, ours: Sequence[Sample]) -> dict[str, Any]:
    settings = manifest.get("settings") or {}
    ok = metrics.finished(ours)
    seconds = metrics.wall_ns(ok) / metrics.NS_PER_S
    drafting = metrics.drafting(ok)
    read, written = sum(sample.prompt_tokens for sample in ok), sum(map(metrics.emitted, ok))
    latencies = [metrics.e2e_ns(sample) / metrics.NS_PER_S for sample in ok]
    drafts = drafting.steps - drafting.empty_steps if drafting.drafted else None
    result: dict[str, Any] = {
        "date": manifest.get("started"),
        "endpoint_type": None,
        "backend": "specbench",
        "label": f"{task}, {arm}",
        "model_id": settings.get("target"),
        "tokenizer_id": settings.get("target"),
        "num_prompts": len(ours),
        "request_rate": None,
        "burstiness": None,
        "max_concurrency": settings.get("batch"),
        "duration": seconds if ok else None,
        "completed": len(ok),
        "failed": len(ours) - len(ok),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": metrics.ratio(len(ok), seconds),
        "request_goodput": None,
        "output_throughput": metrics.throughput_tokens_per_s(ok),
        "total_token_throughput": metrics.ratio(read + written, seconds),
        "max_output_tokens_per_s": None,  # a peak over one second; there is no peak throughput here
        "max_concurrent_requests": max((sample.batch_rows for sample in ok), default=None),
    }
    series = {
        "ttft": [metrics.ttft_ns(sample) / NS_PER_MS for sample in ok],
        "tpot": [tpot / NS_PER_MS for sample in ok if (tpot := metrics.tpot_ns(sample)) is not None],
        "itl": [gap / NS_PER_MS for sample in ok for gap in chunk_gaps_ns(sample)],
        "e2el": [seconds * 1000 for seconds in latencies],
    }
    for name, values in series.items():
        result |= {
            f"mean_{name}_ms": float(np.mean(values)) if values else None,
            f"median_{name}_ms": metrics.percentile(values, 50),
            f"std_{name}_ms": float(np.std(values)) if values else None,
            f"p99_{name}_ms": metrics.percentile(values, 99),
        }
    return result | {
        "spec_decode_acceptance_rate": None if drafts is None else 100 * (drafting.acceptance_rate or 0),
        "spec_decode_acceptance_length": None if not drafts else 1 + drafting.accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafting.drafted if drafts is not None else None,
        "spec_decode_accepted_tokens": drafting.accepted if drafts is not None else None,
        "spec_decode_per_position_acceptance_rates": (
            [count / drafts for count in drafting.accepted_at_least] if drafts else None
        ),
        "avg_latency": float(np.mean(latencies)) if latencies else None,
        "latencies": latencies,
        "percentiles": {str(percent): metrics.percentile(latencies, percent) for percent in PERCENTILES},
        # Not vLLM's: what a lone row has to say to mean something.
        "task": task,
        "arm": arm,
        "dtype": settings.get("dtype"),
        "temperature": settings.get("temperature"),
    }


def chunk_gaps_ns(sample: Sample) -> list[int]:
    """Times between steps that brought tokens; the chunks of a streaming client."""
    times = [step[metrics.NS] for step in sample.steps if step[metrics.KEPT]]
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
