"""One prompt of a report, token by token: what was drafted and accepted, what the target chose, what it rejected.

Records hold the ids of what was emitted; traced ones also those of rejected draft tokens, of which the others hold how
many there were. The ids become text where the target's tokenizer lies on this machine; nothing is fetched for that.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import metrics
from .records import Sample
from .report_figures import MOST_ARMS, traced_prompt
from .report_runs import Grid, Run, count

MOST_TOKENS = 300  # of an answer that is shown as text
_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@dataclass(frozen=True)
class Token:
    """A piece of an answer: `accepted`, `target` (bonus or correction), `plain` from a step that drafted nothing,
    `unknown` where drafts are not reported, `rejected` and `wasted` for counts of what was drafted in vain."""

    kind: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What an arm wrote, step by step: (what the step did, its tokens)."""

    arm: str
    note: str
    steps: Sequence[tuple[str, Sequence[Token]]]


@dataclass(frozen=True)
class Prompt:
    """One prompt with the answers of all arms, and their steps as a table."""

    title: str
    answers: Sequence[Answer]
    grid: Grid


def find_codec(manifest: dict[str, Any]) -> tuple[Any, str]:
    """The target's tokenizer as it lies on this machine, or None and why not. Uses no network."""
    from ..models import builtin, info, specs

    plan, record = manifest.get("plan") or {}, (manifest.get("models") or {}).get("target") or {}
    text = str(plan.get("target") or record.get("spec") or "")
    if not text:
        return None, "the manifest names no target"
    try:
        spec = specs.parse(text)
        if spec.kind == "builtin" and spec.location not in ("tiny", "tiny-draft") and not builtin.is_cached(text):
            return None, f"{text} is not in this machine's cache"
        if spec.kind == "hub":
            folder = _cached_snapshot(spec.location, record.get("revision") or spec.revision)
            if folder is None:
                return None, f"{text} is not in this machine's hub cache"
            spec = specs.ModelSpec(text, "folder", str(folder))
        found = info.describe(spec, "target")
    except ModelError as error:
        return None, str(error).rstrip(".")
    known = record.get("tokenizer_fingerprint")
    if known and known != found.tokenizer_fingerprint:
        return None, f"the tokenizer of {text} on this machine is not the one of the run"
    return found.codec, ""


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _texts(ids: Sequence[int], codec: Any) -> list[str]:
    """The text that each id adds. Where a letter is made of several ids the last of them has it."""
    if codec is None:
        return [str(token) for token in ids]
    texts, start, before = [], 0, ""
    for at in range(len(ids)):
        text = codec.decode(ids[start : at + 1])
        if text.endswith("\ufffd") and at + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start = max(0, at - 7)  # some tokenizers drop a space before the first id, so a few stay in front
        before = codec.decode(ids[start : at + 1])
    return texts


def visible(text: str) -> str:
    """The text with line ends marked, and without characters that a page cannot hold or that would turn it around."""
    out = []
    for letter in text:
        if letter == "\n":
            out.append("\u21b5\n")
        elif letter != "\t" and unicodedata.category(letter) in ("Cc", "Cs", "Co", "Cn"):
            out.append("\ufffd")
        else:
            out.append("\ufffd" if unicodedata.bidirectional(letter) in _TURNING else letter)
    return "".join(out)


def answer(sample: Sample, codec: Any, reports_drafts: bool = True, rejected: Sequence[Sequence[int]] = ()) -> Answer:
    """The tokens of an answer by where they came from.

    Within a step the accepted draft tokens come first, then the target's own token: the correction after a rejection,
    the bonus after a draft that was accepted whole.

    Args:
        rejected: per step, the ids of the draft tokens that were not taken, from a traced pass over the same prompt;
            without them there is only their number to show.
    """
    ids = sample.token_ids[:MOST_TOKENS]
    texts, left = iter(_texts(ids, codec)), len(ids)
    steps: list[tuple[str, list[Token]]] = []
    for number, (_, kept, drafted, accepted, wasted) in enumerate(sample.steps):
        if left <= 0:
            break
        good = min(kept, accepted) if number else 0
        own = "unknown" if number and kept > 1 and not reports_drafts else "target" if drafted else "plain"
        kinds = ["accepted"] * good + [own] * (kept - good)
        tokens = [Token(kind, visible(next(texts))) for kind in kinds[:left]]
        if number and drafted > accepted and kept > good:  # else the answer ended inside the draft: nobody rejected it
            lost = rejected[number] if number < len(rejected) else ()
            text = "".join(visible(text) for text in _texts(lost, codec)) if codec else " ".join(map(str, lost))
            tokens.insert(good, Token("rejected", f"✗{text}" if lost else f"✗{drafted - accepted}"))
        if wasted:
            tokens.append(Token("wasted", f"~{wasted}"))
        what = f"step {number}: {drafted} drafted, {accepted} accepted" if number else "prefill"
        steps.append((f"{what}, {wasted} thrown away unseen" if wasted else what, tokens))
        left -= kept
    note = f"{count(len(sample.token_ids), 'token')} in {count(len(sample.steps) - 1, 'step')}"
    note += f", finish: {sample.finish}"
    note += f"; the first {MOST_TOKENS} are shown" if len(sample.token_ids) > MOST_TOKENS else ""
    return Answer(sample.arm, note, steps)


def _rejected(samples: Sequence[Sample], measured: Sample) -> Sequence[Sequence[int]]:
    """What was rejected at each step, from the traced pass that took the very same steps."""
    for sample in samples:
        same = (sample.arm, sample.task, sample.prompt_hash) == (measured.arm, measured.task, measured.prompt_hash)
        if same and sample.rejected and [s[1:] for s in sample.steps] == [s[1:] for s in measured.steps]:
            return sample.rejected
    return ()


def answers(run: Run, task: str, codec: Any) -> Prompt | None:
    """One prompt of a task, as each arm answered it: the traced one if there is one, else the first that most have."""
    traced = traced_prompt(run, task)
    wanted = (traced[0].prompt_id, traced[0].turn) if traced else None
    found: dict[tuple[str, int], list[Sample]] = {}
    for row in run.rows(task)[:MOST_ARMS]:
        for sample in run.measured(task, row.arm):
            ours = found.setdefault((sample.prompt_id, sample.turn), [])
            if all(other.arm != sample.arm for other in ours):
                ours.append(sample)
    most = max(map(len, found.values()), default=0)
    chosen = found.get(wanted, []) if wanted else []
    if len(chosen) < most:
        chosen = next((ours for ours in found.values() if len(ours) == most), [])
    if not chosen:
        return None
    rows = [
        [sample.arm, number, ns / 1e6, kept, drafted, accepted, wasted,
         " ".join(map(str, sample.token_ids[before : before + kept]))]
        for sample in chosen
        for number, ((ns, kept, drafted, accepted, wasted), before)
        in enumerate(zip(sample.steps, accumulate((s[metrics.KEPT] for s in sample.steps), initial=0), strict=False))
        if before < MOST_TOKENS
    ]  # fmt: skip
    columns = ["arm", "step", "ms", "kept", "drafted", "accepted", "wasted", "token_ids"]
    one = chosen[0]
    kind = f", {one.category}" if one.category else ""
    title = f"{task}, prompt {one.prompt_id}{kind}, {one.prompt_tokens} prompt tokens"
    reports = {arm["name"]: arm.get("reports_drafts", True) for arm in run.manifest.get("arms") or []}
    shown = [answer(sample, codec, reports.get(sample.arm, True), _rejected(run.samples, sample)) for sample in chosen]
    return Prompt(title, shown, Grid(f"{run.prefix}steps-{run.slug(task)}", columns, rows))
