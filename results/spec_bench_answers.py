"""Spec-Bench's answer files as extra rows of a comparison (`--import spec-bench FILE`).

One JSON object per line: question_id, category, model_id and choices, of which each holds lists with an entry per turn:
`new_tokens`, `decoding_steps`, `wall_time` in seconds. Only the wall time of a turn is known, prefill included, so
there is no TTFT and no decode time; tokens were counted by whoever wrote the file, those behind the end of text too.
Rows say that they were imported, and are compared with other imported ones only.

Source: https://github.com/hemingkx/Spec-Bench, evaluation/eval.py and evaluation/speed.py.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError, unknown
from ..tasks.spec_bench import GROUPS, MT_BENCH
from . import metrics, statistics
from .comparison import ComparedRow, Comparison
from .paired import TestedSpeedup, sign_flip
from .records import Sample
from .statistics import Pair

FORMATS = ("spec-bench",)
NS_PER_S = metrics.NS_PER_S


@dataclass
class Answers:
    """One answer file: a sample per choice and turn, and how many target steps each took."""

    name: str
    path: Path
    samples: list[Sample]
    steps: list[int]


def load(format: str, path: Path) -> list[Answers]:
    """Reads an answer file, or every `.jsonl` file of a folder.

    Raises:
        UsageError: another format, or a line that is not an answer, with file and number.
    """
    if format not in FORMATS:
        raise UsageError(unknown("format to import", format, FORMATS))
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path}: holds no .jsonl file")
    found = [_read(file) for file in files]
    names = [answers.name for answers in found]
    for answers in found:
        if names.count(answers.name) > 1:
            answers.name = f"{answers.name} ({answers.path.stem})"
    return found


def _read(path: Path) -> Answers:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--import {path}: cannot be read: {error}") from None
    answers = Answers(path.stem, path, [], [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            for repeat, choice in enumerate(row["choices"]):
                _add(answers, row, choice, repeat)
            answers.name = str(row["model_id"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"--import {path}, line {number}: not a Spec-Bench answer: {_reason(error)}") from None
    if not answers.samples:
        raise UsageError(f"--import {path}: holds no answer")
    return answers


def _reason(error: Exception) -> str:
    return f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


def _add(answers: Answers, row: dict[str, Any], choice: dict[str, Any], repeat: int) -> None:
    category, question = str(row["category"]), str(row["question_id"])
    group = "mt_bench" if category in MT_BENCH else category
    turns = list(zip(choice["new_tokens"], choice["decoding_steps"], choice["wall_time"], strict=True))
    for turn, (tokens, steps, seconds) in enumerate(turns):
        if int(tokens) < 0 or int(steps) < 0 or not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"{tokens} tokens in {steps} steps and {seconds} s")
        answers.samples.append(
            Sample(
                answers.name, f"spec-bench:{group}", question, f"spec-bench {question}", category, turn, repeat,
                "measure", len(answers.samples), 1, 0, 0, token_ids=[0] * int(tokens),
                e2e_ns=round(seconds * NS_PER_S),
            )
        )  # fmt: skip
        answers.steps.append(int(steps))


def has(answers: Iterable[Answers], name: str | None) -> bool:
    """Whether one of the files is called so."""
    return any(one.name == name for one in answers)


def add(answers: Iterable[Answers], found: Comparison | None, baseline: str | None, by: str) -> Comparison:
    """The comparison with the imported rows at its end; of nothing but them where there is no comparison.

    Args:
        baseline: `model_id` of the file that the others are compared with, if it is one of theirs.

    Raises:
        UsageError: there is nothing but answers, and the baseline is none of them.
    """
    answers = list(answers)
    if found is None:
        if baseline is not None and not has(answers, baseline):
            raise UsageError(unknown("baseline", baseline, [one.name for one in answers]))
        found = Comparison([], [], None, {}, {}, [], [], [], by=by)
    reference = next((one for one in answers if one.name == baseline), None)
    groups = dict.fromkeys(_group(sample, by) for one in answers for sample in one.samples)
    order = {f"spec-bench:{group}": number for number, group in enumerate(GROUPS)}
    for group in sorted(groups, key=lambda name: order.get(name, len(order))):
        for one in sorted(answers, key=lambda one: one is not reference):
            row = _row(one, group, reference, by)
            if row is not None:
                found.rows.append(row)
    names = ", ".join(one.path.name for one in answers)
    found.title = found.title or ["answers of Spec-Bench"]
    found.watermarks.append(
        f"IMPORTED: {names}: wall time and token counts as that file has them, of unknown hardware, prefill included"
    )
    found.notes.append("imported rows: tokens/step is new tokens / decoding steps, as Spec-Bench counts them")
    return found


def _group(sample: Sample, by: str) -> str:
    inner = {"task": "", "category": f", {sample.category}", "prompt": f", {sample.prompt_id}"}[by]
    return f"{sample.task}{inner}, imported"


def _row(answers: Answers, group: str, reference: Answers | None, by: str) -> ComparedRow | None:
    chosen = [at for at, sample in enumerate(answers.samples) if _group(sample, by) == group]
    if not chosen:
        return None
    samples, steps = [answers.samples[at] for at in chosen], sum(answers.steps[at] for at in chosen)
    latencies, tokens = [metrics.e2e_ns(sample) for sample in samples], sum(map(metrics.emitted, samples))
    row = ComparedRow(
        task=group, arm=answers.name, strategy=answers.name, engine="imported", baseline=answers is reference,
        reference=False, lossless=True, prompts=len({sample.prompt_id for sample in samples}), n_ok=len(samples),
        n_failed=0, tokens=tokens, tokens_per_sample=metrics.ratio(tokens, len(samples)),
        e2e_tokens_per_s=metrics.e2e_tokens_per_s(samples), throughput_tokens_per_s=metrics.e2e_tokens_per_s(samples),
        tokens_per_step=metrics.ratio(tokens, steps), run=answers.path.name, own_name=answers.name, metric="e2e",
        sums={"e2e_ns": sum(latencies), "steps": steps}, imported=str(answers.path),
    )  # fmt: skip
    for percent in (50, 90, 99):
        setattr(row, f"latency_p{percent}_ns", metrics.percentile(latencies, percent))
    if reference is not None and answers is not reference:
        theirs = [sample for sample in reference.samples if _group(sample, by) == group]
        row.compared_with = reference.name
        row.e2e_speedup = row.speedup = found = _tested(statistics.pair(theirs, samples).pairs)
        if found is not None:
            row.verdict, row.p_value = found.verdict, found.p_value
    return row


def _tested(pairs: Sequence[Pair]) -> TestedSpeedup | None:
    found = statistics.e2e_speedup(pairs, per_token=True)
    if found is None:
        return None
    sums = np.zeros((found.prompts, 4))
    sides = [(pair.baseline, pair.other) for pair in pairs]
    values = [[*map(metrics.e2e_ns, both), *map(metrics.emitted, both)] for both in sides]
    np.add.at(sums, np.asarray(statistics._units(pairs)), np.asarray(values, dtype=float))
    p_value = sign_flip(sums, functools.partial(statistics._ratio_of_sums, per_token=True))
    return TestedSpeedup(**vars(found), p_value=p_value)
