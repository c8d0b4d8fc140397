"""Records of runs that never took place: a manifest, and samples with the times that a test wants them to have."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.results.records import Sample

MS = 1_000_000


def sample(
    arm: str = "speculative",
    prompt: int | str = 0,
    *,
    steps: tuple[tuple[int, int, int], ...] = (),
    step_ms: float = 20.0,
    ttft_ms: float = 40.0,
    tokens: int | None = None,
    **fields: Any,
) -> Sample:
    """One sample whose steps are given as (kept, drafted, accepted) after the prefill, each `step_ms` long.

    Without steps, `tokens` of them one by one, as plain decoding does.
    """
    if not steps:
        steps = ((1, 0, 0),) * ((tokens or 8) - 1)
    now = round(ttft_ms * MS)
    rows = [[now, 1, 0, 0, 0]]
    for kept, drafted, accepted in steps:
        now += round(step_ms * MS)
        rows.append([now, kept, drafted, accepted, 0])
    emitted = sum(row[1] for row in rows)
    values: dict[str, Any] = {
        "arm": arm, "task": "toy", "prompt_id": f"p{prompt}", "prompt_hash": f"h{prompt}", "category": "", "turn": 0,
        "repeat": 0, "kind": "measure", "group": 0, "batch_rows": 1, "prompt_tokens": 10, "max_new_tokens": 64,
        "token_ids": list(range(emitted)), "finish": "length", "ttft_ns": rows[0][0], "e2e_ns": now, "drain_ns": 0,
        "steps": rows, "levels": None, "forwards": None, "error": None,
    }  # fmt: skip
    return Sample(**(values | fields))


def failed(arm: str = "speculative", prompt: int | str = 0, **fields: Any) -> Sample:
    """One sample that ended with an error: no ids, no times."""
    nothing = {"token_ids": [], "finish": None, "ttft_ns": None, "e2e_ns": None, "drain_ns": None, "steps": []}
    return sample(arm, prompt, **{**nothing, "error": "StrategyError: no more", **fields})


def role(**facts: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "device": "cpu", "threads": 2, "dtype": "float32", "runtime": "packed", "fingerprint": "0f"
    } | facts  # fmt: skip


def arm(name: str, **facts: Any) -> dict[str, Any]:
    plain = {"strategy": name, "options": {}, "roles": {"target": role()}, "lossless": True, "engine": "specbench"}
    return {"name": name, **plain, **facts}


def manifest(*arms: dict[str, Any], **facts: Any) -> dict[str, Any]:
    drafts = {"target": role(), "draft": role(model="tiny-draft")}
    settings = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "verify": "coupled", "max_new_tokens": 64, "batch": 1,
        "repeats": 1, "raw": False, "ignore_eos": False,
    }  # fmt: skip
    return {
        "schema": 1,
        "arms": list(arms) or [arm("autoregressive"), arm("speculative", roles=drafts)],
        "baseline": "autoregressive",
        "settings": settings | facts.pop("settings", {}),
        "environment": {"cpu": "Test CPU", "physical_cores": 2, "gpus": []},
        "peak_memory_bytes": {"autoregressive": 812_345_678, "speculative": None},
        "lossless": None,
        "notes": [],
    } | facts


def run(
    prompts: int = 12,
    repeats: int = 1,
    *,
    tasks: tuple[str, ...] = ("toy",),
    arms: tuple[str, ...] = ("autoregressive", "speculative"),
    slow_draft: bool = False,
    noise: float = 0.02,
    seed: int = 0,
) -> list[Sample]:
    """An interleaved run. Plain decoding takes 20 ms a token; speculation drafts 4 tokens, of which 3 are accepted in
    30 ms, or none in 35 ms with `slow_draft`."""
    random = np.random.default_rng(seed)
    samples = []
    for task in tasks:
        for repeat in range(repeats):
            for prompt in range(prompts):
                for name in arms:
                    steps = ((1, 4, 0),) * 12 if slow_draft else ((4, 4, 3),) * 3
                    timing = {"step_ms": 20.0, "tokens": 13}
                    if name == "speculative":
                        timing = {"step_ms": 35.0 if slow_draft else 30.0, "steps": steps}
                    timing["step_ms"] *= 1 + noise * random.standard_normal()
                    samples.append(sample(name, prompt, task=task, repeat=repeat, group=len(samples), **timing))
    return samples
