"""vLLM's names: what they mean there, and null for what has no meaning here."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from synthetic import failed, manifest, run, sample
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import MeasurementError
from specbench.results import export
from specbench.results.records import RunFolder

# What benchmarks/serve.py of vLLM writes, and benchmarks/latency.py.
SERVE = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "std", "p99")),
}  # fmt: skip
LATENCY = {"avg_latency", "latencies", "percentiles"}


def test_one_object_per_task_and_arm_with_every_key() -> None:
    found = export.vllm(manifest(), run(12, tasks=("toy", "other")))
    assert [(one["task"], one["arm"]) for one in found] == [
        ("toy", "autoregressive"), ("toy", "speculative"), ("other", "autoregressive"), ("other", "speculative")
    ]  # fmt: skip
    for one in found:
        assert set(one) >= SERVE | LATENCY
    assert set(export.vllm(manifest(), run(12))[0]) - SERVE - LATENCY == {"task", "arm", "dtype", "temperature"}


def test_values_by_hand() -> None:
    """Two requests: 40 ms to the first token; 2 steps of 20 ms and 4 of 10 ms."""
    samples = [
        sample("speculative", 0, steps=((3, 4, 2), (1, 4, 0)), step_ms=20),
        sample("speculative", 1, steps=((1, 4, 0), (1, 0, 0), (5, 4, 4), (1, 4, 0)), step_ms=10),
    ]
    (one,) = export.vllm(manifest(), samples)
    assert one["duration"] == pytest.approx(0.160)
    assert one["total_output_tokens"] == 5 + 9
    assert one["output_throughput"] == pytest.approx(14 / 0.160)
    assert one["total_token_throughput"] == pytest.approx((14 + 20) / 0.160)
    assert one["mean_ttft_ms"] == 40
    assert one["mean_tpot_ms"] == pytest.approx((40 / 4 + 40 / 8) / 2)
    assert one["mean_itl_ms"] == pytest.approx((20 * 2 + 10 * 4) / 6)  # M4: steps, not tokens
    assert one["median_itl_ms"] == 10
    assert one["mean_e2el_ms"] == 80
    assert one["spec_decode_num_drafts"] == 5  # one step drafted nothing
    assert one["spec_decode_acceptance_rate"] == pytest.approx(100 * 6 / 20)
    assert one["spec_decode_acceptance_length"] == pytest.approx(1 + 6 / 5)
    assert one["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.4, 0.4, 0.2, 0.2])
    assert one["avg_latency"] == pytest.approx(0.080)


def test_null_for_what_has_no_meaning() -> None:
    """P26, P27: no peak, no 99th percentile of twelve requests, no acceptance of plain decoding."""
    plain, drafted = export.vllm(manifest(), run(12))
    for name in (
        "request_rate",
        "burstiness",
        "request_goodput",
        "max_output_tokens_per_s",
        "p99_ttft_ms",
        "p99_e2el_ms",
    ):
        assert plain[name] is None
    assert plain["percentiles"]["99"] is None
    assert plain["spec_decode_acceptance_rate"] is None
    assert drafted["spec_decode_acceptance_rate"] == 75
    (many,) = export.vllm(manifest(), run(120, arms=("autoregressive",)))
    assert many["p99_ttft_ms"] == 40


def test_failed_requests_are_counted_and_have_no_times() -> None:
    """M9."""
    one = export.vllm(manifest(), [*run(3, arms=("speculative",)), failed(prompt=9)])[0]
    assert (one["num_prompts"], one["completed"], one["failed"]) == (4, 3, 1)
    assert len(one["latencies"]) == 3
    nothing = export.vllm(manifest(), [*run(1, arms=("autoregressive",)), failed()])[1]
    assert (nothing["completed"], nothing["mean_ttft_ms"], nothing["request_throughput"]) == (0, None, None)
    with pytest.raises(MeasurementError, match="no sample finished"):
        export.vllm(manifest(), [failed()])


def test_show_prints_it_as_one_document_that_pandas_reads(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_manifest(manifest())
    writer = folder.writer()
    writer.append(run(12))
    writer.close()
    done = CliRunner().invoke(app, ["show", str(folder.path), "--format", "vllm"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout, parse_constant=pytest.fail)
    assert pandas.DataFrame(rows)["median_tpot_ms"].notna().all()
