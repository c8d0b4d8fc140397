"""Cascade speculative drafting: a drafter's own drafts are drafted by a smaller one, down to one that costs nothing.

Source: Chen, Yang, Lin, Sun, Chang, Huang 2023 (CS Drafting, arXiv 2312.11462, NeurIPS 2024) and its released code.
Vertical cascade: every model reviews what the level below it says. Horizontal cascade: early positions of a draft come
from larger drafters than late ones. Beyond the paper: exact sampling (the released code decodes greedily only), drafts
cut to what is asked, batches, a statistical level that knows when to be silent, and lengths chosen online
(`cascade_schedule`). `faithful` brings the released code's block rules back.

`docs/strategies/cascade.md` describes the options; `cascade_levels` and `statistical` hold the drafters.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown
from ..models.base import CachedModel, Ids
from ..models.cost_curve import CostCurve
from ..models.remote import fastest_costs
from .base import Draft, Drafter, Level, Request, Row, Step, Strategy
from .cascade_levels import Accounts, CascadeDrafter, Feed, Stages
from .cascade_schedule import NGRAM, PLAIN, WAYS, Assumed, Scheduled, Times
from .practice import practised
from .proposal import Proposal
from .remote import drafter_for
from .sampling import Sampling
from .speculative import draft_and_verify
from .statistical import MaxGram, Ngram, read_bigrams
from .verify import Verifier

STATISTICAL = ("ngram", "mag")
SCHEDULES = ("auto", "static")
# The named configurations of the released code, which counts each stage for itself, in the paper's cumulative form.
PRESETS = {
    "ms": ("5,19,29;0,1,11;0,0,10", 2.0),
    "pw": ("5,13,23;0,1,11;0,0,10", 5.0),
    "llama": ("13,23;0,10", 3.0),
    "example": ("5,15;0,10", 1.0),
}
STATIC_LENGTH, MOST = 4, 16
MIN_MATCH, PER_MATCH, PROBE = 2, 2.0, 32
MEASURED_COUNTS, MEASURED_PROMPT = (1, 2, 3, 4, 6, 8, 12, 16), 128
MEASURED_CONTEXT = 512
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Options:
    """
    levels: drafters from large to small: `draft` or `draft:1` for the first of `--draft A,B`, `draft:2` for the second,
        `draft:TEXT` for the one with TEXT in its name; `ngram` or `mag` only as the last. All drafts, then ngram.
    schedule: `auto` chooses lengths online, `static` keeps them; static where k, preset or faithful is given.
    draft_length: the block that the target reviews: with `static` (4), with `auto` at most (16).
    k: the K matrix of the paper in cumulative form, `13,23;0,10`: row i drafts for the i-th reviewer, column j says how
        far its draft reaches once drafter j is done.
    preset: K and lenience of a named configuration: ms, pw (three levels), llama, example (two).
    lenience: how lenient drafters are with each other, from 1; the target never is.
    faithful: block rules of the released code.
    min_match, per_match: as for `lookup` (2, 2), for the ngram level with fixed lengths.
    bigrams: JSON file of `{"token id": following id}`, for the statistical level where nothing matches.
    probe: rounds after which `auto` tries a bypassed draft model again (32).
    confidence: whether `auto` ends a draft by how sure the draft model is (true).
    tail: whether `auto` lets the ngram level add to a draft model's draft (true).
    """

    levels: tuple[str, ...] = ()
    schedule: str | None = None
    draft_length: int | None = None
    k: str = ""
    preset: str | None = None
    lenience: float | None = None
    faithful: bool = False
    min_match: int | None = None
    per_match: float | None = None
    bigrams: Path | None = None
    probe: int | None = None
    confidence: bool | None = None
    tail: bool | None = None

    def __post_init__(self) -> None:
        for name in ("draft_length", "lenience", "min_match", "per_match", "probe"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"cascade.{name.replace('_', '-')}={value}: has to be at least 1")
        if self.schedule not in (None, *SCHEDULES):
            raise UsageError(unknown("cascade.schedule", str(self.schedule), SCHEDULES))
        if self.preset not in (None, *PRESETS):
            raise UsageError(unknown("cascade.preset", str(self.preset), PRESETS))
        if self.preset and self.k:
            raise UsageError("cascade.preset and cascade.k both say how long drafts are; give one of them")
        fixed = "faithful" if self.faithful else "preset" if self.preset else "k" if self.k else ""
        by_schedule = not (fixed or self.schedule == "static" or "mag" in self.levels)
        for name in ("min_match", "per_match") if by_schedule else ("probe", "confidence", "tail"):
            if getattr(self, name) is not None:
                kind = "fixed lengths; give cascade.schedule=static" if by_schedule else "cascade.schedule=auto"
                raise UsageError(f"cascade.{name.replace('_', '-')}: is of {kind}, or leave it out")
        if fixed and self.schedule == "auto":
            raise UsageError(f"cascade.schedule=auto: lengths are fixed by cascade.{fixed}; leave one of them out")
        if self.faithful and not (self.k or self.preset):
            raise UsageError("cascade.faithful=true: needs lengths, cascade.k or cascade.preset")
        if self.draft_length is not None and (self.k or self.preset):
            raise UsageError(
                "cascade.draft-length: the lengths are those of cascade.k or cascade.preset; leave one out"
            )
        for level in self.levels[:-1]:
            if level in STATISTICAL:
                raise UsageError(f"cascade.levels: {level} asks no model, so it can only be the last level")
        for level in self.levels:
            if level not in STATISTICAL and level.partition(":")[0] != "draft":
                raise UsageError(unknown("level in cascade.levels:", level, ("draft", "draft:2", *STATISTICAL)))
        if self.levels and self.levels[0] in STATISTICAL:
            raise UsageError(f"cascade.levels={self.levels[0]}: needs a draft model above it; see the strategy lookup")
        if "mag" in self.levels and self.schedule == "auto":
            raise UsageError(
                "cascade.levels: mag does not know when to be silent; use ngram, or cascade.schedule=static"
            )
        if self.matrix and self.levels and len(self.matrix) != len(self.levels):
            raise UsageError(f"cascade: K has {len(self.matrix)} rows and there are {len(self.levels)} levels")

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """K, cumulative, or () where lengths are not given by it. Raises UsageError."""
        text = PRESETS[self.preset][0] if self.preset else self.k
        if not text:
            return ()
        what = f'cascade.k="{text}"'
        try:
            rows = tuple(tuple(int(number) for number in row.split(",")) for row in text.split(";"))
        except ValueError:
            raise UsageError(f"{what}: rows of whole numbers, as in 13,23;0,10") from None
        if any(len(row) != len(rows) for row in rows):
            raise UsageError(f"{what}: as many numbers in each row as there are rows, as in 13,23;0,10")
        for at, row in enumerate(rows):
            if any(row[:at]) or row[at] < 0 or list(row[at:]) != sorted(row[at:]):
                raise UsageError(
                    f"{what}: row {at + 1} needs {at} zeros and then lengths that do not fall (cumulative)"
                )
        if rows[0][-1] < 1:
            raise UsageError(f"{what}: the first row drafts nothing")
        return rows

    @property
    def leniency(self) -> float:
        """Lenience as it is used: what was given, else the preset's, else 1."""
        return self.lenience or (PRESETS[self.preset][1] if self.preset else 1.0)


@dataclass(frozen=True)
class Settings:
    """What a cascade's drafter is made by; it may have to travel to a worker.

    Attributes:
        levels: roles of the draft models from large to small, then perhaps a statistical level.
        curves: cost of the target and of every draft model by role; empty for fixed lengths.
        assumed: of the first draft model's tokens.
    """

    options: Options
    levels: tuple[str, ...]
    bigrams: dict[int, int]
    curves: dict[str, CostCurve]
    assumed: Assumed = Assumed()


class TargetDrafter(Drafter):
    """The whole cascade as the target sees it.

    `Draft.levels` holds, for `settle`: what each level did for the levels above it, what each level has in the draft
    itself, and in a last entry the way that was chosen.
    """

    def __init__(self, feed: Feed, accounts: Accounts) -> None:
        self.feed, self.accounts = feed, accounts
        self._latest: dict[int, tuple[int, Proposal]] = {}  # per row, how long it was, and what was drafted then

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        for row in rows:
            length, proposal = self._latest.get(row.index, (len(row.tokens), None))
            if proposal is not None:
                self.feed.learn(row, proposal, row.tokens.view()[length:].tolist())
        drafts = []
        for row, proposal in zip(rows, self.feed.propose(rows, limits), strict=True):
            self._latest[row.index] = (len(row.tokens), proposal)
            counts = Counter(proposal.origins)
            direct = tuple(Level(counts[level], 0) for level in range(self.accounts.levels))
            way = Level(self.feed.ways.get(row.index, PLAIN) if isinstance(self.feed, Scheduled) else 0, 0)
            drafts.append(Draft(proposal.tokens, proposal.probs, (*self.accounts.take(row), *direct, way)))
        return drafts

    def begin(self, row: Row) -> None:
        self._latest.pop(row.index, None)
        self.accounts.begin(row)
        self.feed.begin(row)

    def reset(self) -> None:
        self._latest.clear()
        self.feed.reset()


def settle(step: Step) -> tuple[tuple[Level, ...], int]:
    """The levels of a step with their part of what the target looked at and took, and the way that was chosen."""
    count = len(step.levels) // 2
    levels, accepted = [], step.accepted
    for inner, direct in zip(step.levels[:count], step.levels[count : 2 * count], strict=True):
        taken = min(accepted, direct.drafted)  # the levels' tokens stand in a draft in their own order
        accepted -= taken
        levels.append(inner._replace(drafted=inner.drafted + direct.drafted, accepted=inner.accepted + taken))
    return tuple(levels), step.levels[-1].drafted


def cascade_drafter(models: Mapping[str, CachedModel], sampling: Sampling, settings: Settings) -> TargetDrafter:
    """Made where the draft models are, see `remote.drafter_for`."""
    names, options = settings.levels, settings.options
    verifier, accounts = Verifier(sampling), Accounts(len(names))
    neural = [name for name in names if name not in STATISTICAL]
    if not settings.curves:
        return TargetDrafter(_static_feed(models, neural, verifier, accounts, settings), accounts)
    most = options.draft_length or MOST
    ngram = Ngram(len(neural), bigrams=settings.bigrams) if len(names) > len(neural) else None
    level, times = None, None
    for number in range(len(neural), 0, -1):  # from small to large: each level is fed by all that stands below it
        model = models[neural[number - 1]]
        reviewer = Times(settings.curves[neural[number - 1]], most, follows=model.original is not None)
        feed = _scheduled(reviewer, level, times, ngram, most, sampling, options) if level or ngram else None
        level = CascadeDrafter(model, feed, verifier, accounts, number - 1, options.leniency, signs=True)
        times = reviewer
    target = Times(settings.curves["target"], most)
    feed = _scheduled(target, level, times, ngram, most, sampling, options, settings.assumed)
    return TargetDrafter(feed, accounts)


def _scheduled(
    times: Times, level: Any, level_times: Any, ngram: Ngram | None, most: int, sampling: Sampling, options: Options,
    assumed: Assumed = Assumed(),  # noqa: B008 - immutable
) -> Scheduled:  # fmt: skip
    how = {
        "probe": options.probe or PROBE,
        "confidence": options.confidence is not False,
        "tail": options.tail is not False,
        "eos": sampling.eos,
        "assumed": assumed,
    }
    return Scheduled(times, level, level_times, ngram, most, **how)


def _static_feed(
    models: Mapping[str, CachedModel], neural: Sequence[str], verifier: Verifier, accounts: Accounts, settings: Settings
) -> Stages:
    """Fixed lengths: by K, or each level drafting as much as the one above asks for."""
    options, names = settings.options, settings.levels
    drafters: list[Drafter] = []
    feeds: list[Stages] = []
    for number in range(len(names), -1, -1):  # reviewer `number` is fed by the drafters from `number` on
        below = drafters[::-1]
        row = options.matrix[number][number:] if options.matrix and number < len(names) else [_NO_LIMIT] * len(below)
        stages = list(zip(below if options.matrix else below[:1], row, strict=False))
        feeds.append(Stages(stages, options.faithful))
        if number == 0:
            break
        if number > len(neural):
            drafters.append(_statistical(names[-1], number - 1, settings))
        else:
            inner = feeds[-1] if stages else None
            drafters.append(
                CascadeDrafter(models[neural[number - 1]], inner, verifier, accounts, number - 1, options.leniency,
                               overshoot=options.faithful)
            )  # fmt: skip
    return feeds[-1]


def _statistical(name: str, level: int, settings: Settings) -> Drafter:
    options = settings.options
    if name == "mag":
        return MaxGram(level, faithful=options.faithful, bigrams=settings.bigrams)
    return Ngram(level, options.min_match or MIN_MATCH, options.per_match or PER_MATCH, settings.bigrams)


class Cascade(Strategy):
    name = "cascade"
    summary = "drafters that draft for each other, down to an n-gram level; the target verifies"
    source = "Chen et al. 2023 (CS Drafting)"
    roles = ("target", "draft")
    optional_roles = ("draft2", "draft3")
    continuous = True
    Options = Options

    def __init__(self, models: Mapping[str, CachedModel], options: Options) -> None:
        super().__init__(models, options)
        names = choose_levels(options, {role: model.name for role, model in models.items() if role != "target"})
        bigrams = read_bigrams(options.bigrams, self.target.vocab_size) if options.bigrams else {}
        self.settings = Settings(options, names, bigrams, {})
        self.drafts = [name for name in names if name not in STATISTICAL]

    @property
    def auto(self) -> bool:
        fixed = self.options.matrix or "mag" in self.settings.levels
        return not fixed and self.options.schedule != "static"

    def prepare(self, rows: int, tokens: int) -> None:
        """Measures the cost curves for `auto`. Without it there is nothing to choose lengths by: they stay fixed."""
        if self.auto:
            models = {role: self.models[role] for role in ("target", *self.drafts)}
            self.settings = dataclasses.replace(self.settings, curves=cost_curves(models, rows, tokens))

    def practise(self, texts: Sequence[Ids]) -> None:
        """Measures how often the largest draft model's first choice is the target's: what `auto` begins with."""
        if self.auto and self.drafts and texts:
            _, assumed = practised(self.target, self.models[self.drafts[0]], texts)
            self.settings = dataclasses.replace(self.settings, assumed=assumed)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        auto = bool(self.settings.curves)
        drafter = drafter_for(self.models, self.drafts, cascade_drafter, sampling, self.settings)
        ways: Counter[int] = Counter()
        lengths: Counter[int] = Counter()
        drafted = [0] * len(self.settings.levels)
        try:
            for step in draft_and_verify(self.target, drafter, Verifier(sampling), requests, self._most(auto)):
                levels: tuple[Level, ...] = ()
                if step.levels:
                    levels, way = settle(step)
                    ways[way] += 1
                    lengths[way] += step.drafted
                    drafted = [total + level.drafted for total, level in zip(drafted, levels, strict=True)]
                idle = not any(any(level) for level in levels)
                yield Step(step.row, step.tokens, step.drafted, step.accepted, () if idle else levels, 0, step.rejected)
        finally:
            self.facts = _facts(self.settings.levels, drafted, auto, ways, lengths)

    def _most(self, auto: bool) -> int:
        if self.options.matrix:
            return _NO_LIMIT if self.options.faithful else self.options.matrix[0][-1]
        return self.options.draft_length or (MOST if auto else STATIC_LENGTH)


def _facts(
    levels: Sequence[str], drafted: Sequence[int], auto: bool, ways: Counter[int], lengths: Counter[int]
) -> dict[str, Any]:
    """What the record says of the schedule's decisions, see docs/strategies/cascade.md."""
    facts: dict[str, Any] = {"levels": ",".join(levels), "schedule": "auto" if auto else "static"}
    if not auto:
        return facts
    for way, name in enumerate(WAYS):
        if way == NGRAM and "ngram" not in levels:
            continue
        facts[f"{name}_rounds"] = ways[way]
        if way != PLAIN:
            facts[f"{name}_mean_length"] = round(lengths[way] / ways[way], 2) if ways[way] else 0
    facts["bypassed"] = ",".join(name for name, count in zip(levels, drafted, strict=True) if not count)
    return facts


def choose_levels(options: Options, drafts: Mapping[str, str]) -> tuple[str, ...]:
    """The roles that `cascade.levels` means, and the statistical level.

    Args:
        drafts: names of the draft models by role, from large to small.

    Raises:
        UsageError: one clear line.
    """
    roles = list(drafts)
    if not options.levels:
        chosen = [*roles, "mag" if options.faithful else "ngram"]
    else:
        chosen = [level if level in STATISTICAL else _role(level, drafts) for level in options.levels]
    if twice := [role for role in chosen if chosen.count(role) > 1]:
        raise UsageError(f"cascade.levels: {drafts.get(twice[0], twice[0])} is named twice")
    if options.matrix and len(options.matrix) != len(chosen):
        raise UsageError(
            f"cascade: K has {len(options.matrix)} rows and there are {len(chosen)} levels ({', '.join(chosen)}); give "
            f"as many drafts with --draft, or name the levels with cascade.levels"
        )
    return tuple(chosen)


def _role(level: str, drafts: Mapping[str, str]) -> str:
    roles, wanted = list(drafts), level.partition(":")[2]
    if not wanted:
        return roles[0]
    if wanted.isdigit():
        if not 1 <= int(wanted) <= len(roles):
            raise UsageError(f"cascade.levels: {level}, but --draft names {len(roles)} model(s)")
        return roles[int(wanted) - 1]
    found = [role for role in roles if wanted.lower() in drafts[role].lower()]
    if len(found) != 1:
        why = "none" if not found else "more than one"
        raise UsageError(f'cascade.levels: {level}: {why} of the drafts ({", ".join(drafts.values())}) has "{wanted}"')
    return found[0]


def cost_curves(models: Mapping[str, CachedModel], rows: int, tokens: int) -> dict[str, CostCurve]:
    """The models' cost curves near rows of so many tokens."""
    return fastest_costs(models, {role: _grid(model, rows, tokens, role != "target") for role, model in models.items()})


def _grid(model: CachedModel, rows: int, tokens: int, reads: bool) -> dict[str, Any]:
    """Blocks as drafts are; for a model that may have to catch up with a prompt, also one as long as a prompt, with no
    more logits than the longest draft has."""
    counts = (*MEASURED_COUNTS, MEASURED_PROMPT) if reads else MEASURED_COUNTS
    context = max(1, min(tokens, model.context_length - counts[-1], MEASURED_CONTEXT))
    counts = [count for count in counts if count + context <= model.context_length]
    batches = sorted({1, min(rows, model.max_rows)})
    return {"new_tokens": counts, "context": context, "rows": batches, "last": MEASURED_COUNTS[-1]}
