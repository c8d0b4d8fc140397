"""Measured samples as arrays, one number per sample and column: what comparing 100,000 of them takes.

A `Sample` is a few hundred Python objects. Here a line is cut at its ids and steps, which are most of it: the ids stay
the bytes they are (they are only compared), and of the steps what was drafted and accepted is kept, not when. A line
that was not written by specbench, or is broken, goes the slow way through `records`, which names the line.
"""

from __future__ import annotations

import json
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RunFolderError
from .metrics import Drafting
from .records import RunFolder, Sample, dumps, without_collector

TEXTS = ("arm", "task", "prompt_id", "prompt_hash", "category")
_OF_CALL = ("admitted_ns", "call_ns", "call_tokens")  # absent where a sample ran alone
NUMBERS = (
    "turn", "repeat", "group", "batch_rows", *_OF_CALL, "tokens", "ttft_ns", "e2e_ns", "drain_ns", "failed",
    "first_kept", "wasted", "broken",
)  # fmt: skip
_MOST_ACCEPTED = 1 << 20
_PARSED_AT_ONCE = 1 << 22  # bytes
_PLAIN = b", 1, 0, 0, 0]"  # a step that drafted nothing and brought one token, as our own writer spells it


class Names:
    """Text to number and back; one for all runs that are compared, so that equal texts have equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        found = self.numbers.get(text)
        if found is None:
            found = self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return found


@dataclass
class Columns:
    """The `measure` samples of one run in the order they were made.

    Attributes:
        names: per column of TEXTS, what its numbers stand for.
        data: the columns of TEXTS and NUMBERS. `failed` and `broken` are 0 or 1; a failed sample has no times: its
            numbers are 0, as are `admitted_ns`, `call_ns` and `call_tokens` where a record has none. `drain_ns` is -1
            where it is not known.
        ids: the token ids of each sample as they stand in the file.
        outcomes: of all steps after the prefill, one sample after the other: what was drafted and accepted, in one
            number; those of sample i stand at starts[i] to starts[i + 1].
        levels: [drafted, accepted, forwards, ns] of a cascade's levels per step, of the samples that have any.
        errors: of the failed samples.
        rest: the samples of all other kinds, whole.
    """

    names: dict[str, Names]
    data: dict[str, np.ndarray] = field(default_factory=dict)
    ids: list[bytes] = field(default_factory=list)
    outcomes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    levels: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    rest: list[Sample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.data[column]

    def text(self, column: str, at: int) -> str:
        return self.names[column].texts[self.data[column][at]]

    def drafting(self, chosen: np.ndarray) -> Drafting:
        """What the steps of the chosen samples did; the same counts as `metrics.drafting` finds."""
        starts, ends = self.starts[chosen], self.starts[chosen + 1]
        lengths = ends - starts
        first = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
        values, counts = np.unique(self.outcomes[first + np.arange(len(first))], return_counts=True)
        outcomes = {divmod(int(value), _MOST_ACCEPTED): int(n) for value, n in zip(values, counts, strict=True)}
        levels = Drafting()
        for at in [at for at in self.levels if at in set(chosen.tolist())] if self.levels else ():
            for step in self.levels[at]:
                levels += Drafting(levels=step)
        tokens = int((self["tokens"][chosen] - 1).sum())
        return Drafting(Counter(outcomes), tokens, int(self["wasted"][chosen].sum()), levels.levels)

    def steps(self, at: int) -> list[tuple[int, int]]:
        """(drafted, accepted) of the steps of one sample after the prefill."""
        return [divmod(step, _MOST_ACCEPTED) for step in self.outcomes[self.starts[at] : self.starts[at + 1]].tolist()]

    def token_ids(self, at: int) -> list[int]:
        return json.loads(b"[" + self.ids[at] + b"]")

    def samples(self, chosen: np.ndarray) -> list[Sample]:
        """The chosen samples as records with two steps each, the first and all others: times, tokens and errors are
        true, drafting is not."""
        texts = zip(
            *([self.names[name].texts[at] for at in self[name][chosen].tolist()] for name in TEXTS), strict=True
        )
        numbers = zip(*(self[name][chosen].tolist() for name in NUMBERS), strict=True)
        made = []
        for at, text, number in zip(chosen.tolist(), texts, numbers, strict=True):
            turn, repeat, group, batch_rows, *of_call, n, ttft, e2e, drain, failed, first, _, _ = number
            sample = Sample(
                **dict(zip(TEXTS, text, strict=True)), turn=turn, repeat=repeat, kind="measure", group=group,
                batch_rows=batch_rows, prompt_tokens=0, max_new_tokens=0,
            )  # fmt: skip
            if failed:
                sample.error = self.errors[at]
            else:
                sample.token_ids = [0] * n
                sample.ttft_ns, sample.e2e_ns, sample.drain_ns = ttft, e2e, None if drain < 0 else drain
                sample.steps = [[ttft, first, 0, 0, 0], [e2e, n - first, 0, 0, 0]]
                for name, value in zip(_OF_CALL, of_call, strict=True):
                    setattr(sample, name, value or None)
            made.append(sample)
        return made


def read(folder: RunFolder, names: dict[str, Names]) -> Columns:
    """The samples of a run folder.

    Args:
        names: an empty dict, or the one that was filled while other runs were read.

    Raises:
        RunFolderError: one clear line, naming file and line where there is one.
    """
    for name in TEXTS:
        names.setdefault(name, Names())
    reader = _Reader(folder, names)
    if folder.samples_path.exists():
        with without_collector():
            for number, line in folder.lines():
                if not reader.quick(number, line):
                    reader.slow(number, line)
    return reader.columns()


class _Reader:
    def __init__(self, folder: RunFolder, names: dict[str, Names]) -> None:
        self.folder = folder
        self.made = Columns(names)
        self.number = [names[name].number for name in TEXTS]
        self.rows = array("q")  # the columns before `first_kept`, and whether the sample failed
        self.counts = array("q")  # steps of each sample, the first one included
        self.plain = bytearray()  # whether they all brought one token and drafted nothing
        self.texts: list[bytes] = []  # the steps of the others, since they were last parsed
        self.lines: list[tuple[int, bytes]] = []
        self.waiting = 0
        self.steps: list[np.ndarray] = []

    def quick(self, number: int, line: bytes) -> bool:
        """Takes a line apart without making an object of every number in it; False where that cannot be done."""
        ids_at = line.find(b'"token_ids": [')
        ids_end = line.find(b"]", ids_at)
        steps_at = line.find(b'"steps": [[', ids_end)
        steps_end = line.find(b"]], ", steps_at)
        if ids_at < 0 or steps_at < 0 or steps_end < 0 or line[ids_end + 1 : ids_end + 3] != b", ":
            return False
        ids, steps = line[ids_at + 14 : ids_end], line[steps_at + 9 : steps_end + 2]
        count = steps.count(b"]") - 1
        try:
            head = json.loads(line[:ids_at] + line[ids_end + 3 : steps_at] + line[steps_end + 4 :])
            if head["kind"] != "measure" or head["error"] is not None or not ids or steps.count(b",") != 5 * count - 1:
                return False
            drain = head.get("drain_ns")
            row = (
                *[number(head[name]) for number, name in zip(self.number, TEXTS, strict=True)],
                head["turn"], head["repeat"], head["group"], head["batch_rows"],
                *(head.get(name) or 0 for name in _OF_CALL), ids.count(b",") + 1,
                head["ttft_ns"], head["e2e_ns"], -1 if drain is None else drain, 0,
            )  # fmt: skip
            self.rows.extend(array("q", row))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return False
        if head.get("levels"):
            self.made.levels[len(self.made.ids)] = head["levels"]
        self.add(number, line, ids, steps, count)
        return True

    def slow(self, number: int, line: bytes) -> None:
        """Takes a line for what it is: another kind, a failed sample, one that somebody else wrote, or an error."""
        sample = self.folder.sample(number, line)
        if sample.kind != "measure":
            self.made.rest.append(sample)
            return
        if not sample.ok:
            self.made.errors[len(self.made.ids)] = str(sample.error)
        if sample.levels:
            self.made.levels[len(self.made.ids)] = sample.levels
        drain = -1 if sample.drain_ns is None else sample.drain_ns
        try:
            self.rows.extend(array("q", (
                *[number(getattr(sample, name)) for number, name in zip(self.number, TEXTS, strict=True)], sample.turn,
                sample.repeat, sample.group, sample.batch_rows, *(getattr(sample, name) or 0 for name in _OF_CALL),
                len(sample.token_ids), sample.ttft_ns or 0,
                sample.e2e_ns or 0, drain, not sample.ok,
            )))  # fmt: skip
        except (TypeError, OverflowError) as error:
            raise RunFolderError(f"{self.folder.samples_path}, line {number}: not a sample: {error}") from None
        ids, steps = dumps(sample.token_ids)[1:-1].encode(), dumps(sample.steps).encode()
        self.add(number, line, ids, steps if sample.ok else b"", len(sample.steps) if sample.ok else 0)

    def add(self, number: int, line: bytes, ids: bytes, steps: bytes, count: int) -> None:
        self.made.ids.append(ids)
        self.counts.append(count)
        self.plain.append(steps.count(_PLAIN) == count)
        if not self.plain[-1]:
            self.texts.append(steps)
            self.lines.append((number, line))
            self.waiting += len(steps)
            if self.waiting > _PARSED_AT_ONCE:
                self.parse()

    def parse(self) -> None:
        """The steps that wait, all at once, which is several times faster than one by one."""
        text = b",".join(self.texts).translate(None, b"[]").decode("ascii", "replace")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # text that is no number is a mere deprecation to numpy
            try:
                numbers = np.fromstring(text, dtype=np.int64, sep=",")
            except (DeprecationWarning, ValueError):
                numbers = np.zeros(0, dtype=np.int64)
        if len(numbers) != sum(5 * (text.count(b"]") - 1) for text in self.texts):
            for number, line in self.lines:
                self.folder.sample(number, line)  # raises for the broken one
            raise RunFolderError(f"{self.folder.samples_path}: holds steps that are not five whole numbers each")
        self.steps.append(numbers.reshape(-1, 5))
        self.texts, self.lines, self.waiting = [], [], 0

    def columns(self) -> Columns:
        if self.texts:
            self.parse()
        made, counts = self.made, np.array(self.counts, dtype=np.int64)
        table = np.array(self.rows, dtype=np.int64).reshape(len(made), len(TEXTS) + len(NUMBERS) - 3)
        names = [name for name in (*TEXTS, *NUMBERS) if name not in ("first_kept", "wasted", "broken")]
        made.data = dict(zip(names, np.ascontiguousarray(table.T), strict=True))
        plain = np.frombuffer(bytes(self.plain), dtype=np.uint8).astype(bool)
        kept, first, wasted = counts.copy(), np.minimum(counts, 1), np.zeros_like(counts)
        sound = np.ones(len(counts), dtype=bool)
        after = np.maximum(counts - 1, 0)
        made.starts = np.concatenate([[0], np.cumsum(after)])
        made.outcomes = np.zeros(made.starts[-1], dtype=np.int64)
        if self.steps:
            steps, drawn = np.concatenate(self.steps), counts[~plain]
            begin = np.cumsum(drawn) - drawn
            now, brought, drafted, accepted, thrown = steps.T
            kept[~plain], first[~plain] = np.add.reduceat(brought, begin), brought[begin]
            wasted[~plain] = np.add.reduceat(thrown, begin)
            backwards = np.diff(now, prepend=0) < 0
            backwards[begin] = False
            wrong = (accepted > drafted) | (accepted < 0) | backwards
            sound[~plain] = ~np.logical_or.reduceat(wrong, begin)
            outcomes = _MOST_ACCEPTED * drafted + np.minimum(accepted, brought)
            made.outcomes[np.repeat(~plain, after)] = np.delete(outcomes, begin)
        made.data |= {"first_kept": first, "wasted": wasted}
        in_order = (made["ttft_ns"] >= 0) & (made["ttft_ns"] <= made["e2e_ns"])
        good = sound & in_order & (kept == made["tokens"]) & (counts > 0)
        made.data["broken"] = (~good & (made["failed"] == 0)).astype(np.int64)
        return made


def join(parts: Sequence[Columns]) -> tuple[Columns, np.ndarray]:
    """Columns that were read with the same names as one, and for every sample the number of the part it came from."""
    if len(parts) == 1:
        return parts[0], np.zeros(len(parts[0]), dtype=np.int64)
    whole = Columns(parts[0].names)
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    steps = np.cumsum([0, *(len(part.outcomes) for part in parts)])
    whole.data = {name: np.concatenate([part.data[name] for part in parts]) for name in (*TEXTS, *NUMBERS)}
    whole.outcomes = np.concatenate([part.outcomes for part in parts])
    ends: list[Any] = [part.starts[1:] + offset for part, offset in zip(parts, steps, strict=False)]
    whole.starts = np.concatenate([[0], *ends]).astype(np.int64)
    for part, offset in zip(parts, offsets.tolist(), strict=False):
        whole.ids += part.ids
        whole.levels |= {at + offset: levels for at, levels in part.levels.items()}
        whole.errors |= {at + offset: error for at, error in part.errors.items()}
    return whole, np.repeat(np.arange(len(parts)), [len(part) for part in parts])
