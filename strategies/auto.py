"""`auto`: decodes in whichever way is expected to be the fastest for the text at hand, and changes it while it runs.

The ways are the other strategies over the same models: plain decoding, `lookup` with drafts as long as they pay,
`speculative` at its best length, and `cascade`, as far as there are models for them. Costs are measured once, before
the first prompt, and so is how often the draft model's first choice is the target's, on texts that no task holds;
`strategies.auto_choice` decides by them and by what a row has shown so far. Nothing is carried from one prompt to the
next.

All ways are exact and only propose: every round ends in the same verification. Under the coupled rule the tokens are
those of plain decoding whoever drafts, so a change in the middle of a text changes no token; under the rejection rule
their distribution is the target's. Not among the ways are `async` and `duo`, whose draft goes on by itself and could
not be handed over from round to round.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UsageError, unknown
from ..models.base import CachedModel, Ids
from ..models.cost_curve import CostCurve
from ..models.remote import RemoteModel, timed
from .auto_choice import (
    CANDIDATES,
    CASCADE,
    LOOKUP,
    PLAIN,
    SPECULATIVE,
    WITH_DRAFT,
    Chooser,
    Offer,
    State,
    Told,
)
from .auto_rates import Rates
from .base import Draft, Drafter, Level, Request, Row, Step, Strategy
from .cascade import STATISTICAL, Settings, cascade_drafter, choose_levels, cost_curves, settle
from .cascade import Options as CascadeOptions
from .cascade_schedule import Assumed, Times
from .lookup import LookupDrafter
from .lookup import Options as LookupOptions
from .practice import extra_ms, practised
from .remote import drafter_for
from .sampling import Sampling
from .speculative import draft_and_verify, model_drafter
from .verify import Verifier

UNKNOWN_LENGTH = 4  # of drafts, where no costs were measured
_NOTHING = Draft(())


@dataclass(frozen=True)
class Options:
    """
    candidates: strategies to choose from; those that need a model that is not there are left out.
    draft_length: the longest draft.
    budget: share of a row's plain decoding time that trials may cost before a way that is slower is left at once.
    """

    candidates: tuple[str, ...] = CANDIDATES
    draft_length: int = 16
    budget: float = 0.02

    def __post_init__(self) -> None:
        for name in self.candidates:
            if name not in CANDIDATES:
                raise UsageError(unknown("strategy in auto.candidates:", name, CANDIDATES))
        if self.draft_length < 1:
            raise UsageError(f"auto.draft-length={self.draft_length}: at least 1 token has to be drafted")
        if not 0 <= self.budget <= 1:
            raise UsageError(f"auto.budget={self.budget}: a share from 0 to 1")


class Latest(NamedTuple):
    """What was last proposed for a row: for how many rows at once, how, what, and how long that took."""

    row: Row
    rows: int
    offer: Offer
    draft: Draft
    took_ns: int


class Switching(Drafter):
    """Hands each row to the drafter of the way that is chosen for it.

    Args:
        drafters: by the name of the way.
        levels: names of the draft models and the statistical level, from large to small; may be empty.
        curves: of the models by role.
    """

    def __init__(
        self, chooser: Chooser, drafters: Mapping[str, Drafter], levels: Sequence[str], curves: Mapping[str, CostCurve]
    ) -> None:
        self.chooser, self.drafters, self.levels, self.curves = chooser, drafters, levels, curves
        self._latest: dict[int, Latest] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        offers = [self.chooser.choose(row, limit, len(rows)) for row, limit in zip(rows, limits, strict=True)]
        made, took = [_NOTHING] * len(rows), [0] * len(rows)
        chosen = {offer.name for offer in offers}
        for name in self.drafters if chosen != {PLAIN} else ():
            if name not in chosen:
                continue
            mine = [i for i, offer in enumerate(offers) if offer.name == name]
            lengths = [min(limits[i], offers[i].length) for i in mine]
            drafts, took_ns = timed(self.drafters[name].propose, [rows[i] for i in mine], lengths)
            for i, draft in zip(mine, drafts, strict=True):
                made[i], took[i] = draft, took_ns // len(mine)
        for i, row in enumerate(rows):
            self._latest[row.index] = Latest(row, len(rows), offers[i], made[i], took[i])
        return made

    def begin(self, row: Row) -> None:
        self._latest.pop(row.index, None)
        self.chooser.begin(row)
        for drafter in self.drafters.values():
            drafter.begin(row)

    def settle(self, step: Step) -> Step:
        """Learns from a step of a row that was drafted for, and says in `levels` who drafted."""
        latest = self._latest.pop(step.row, None)
        if latest is None:  # the prompt
            return step
        self.chooser.observe(latest.row, latest.offer, self._told(step, latest), latest.rows)
        if not (step.drafted or step.levels):
            return step
        levels = self._levels(step, latest)
        return dataclasses.replace(step, levels=levels if any(map(any, levels)) else ())

    def _told(self, step: Step, latest: Latest) -> Told:
        name, made = latest.offer.name, len(step.tokens)
        if name not in WITH_DRAFT:
            return Told(made, step.drafted)
        rates, own, forwards = self.chooser.rates, step.drafted, step.drafted
        if name == CASCADE:
            count = len(latest.draft.levels) // 2
            inner, direct = latest.draft.levels[:count], latest.draft.levels[count : 2 * count]
            own, forwards = direct[0].drafted, sum(level.forwards for level in inner)
            if not forwards:
                return Told(made, step.drafted)
            ms = forwards_ms(inner, [self.curves.get(name) for name in self.levels], latest.rows)
            ms += forwards * rates.extra_ms.get(name, 0.0)
        else:
            ms = forwards * rates.token_ms(name, latest.rows)
        right = min(step.accepted, own)
        return Told(made, step.drafted, ms, min(right + 1, own), right, forwards > 0)

    def _levels(self, step: Step, latest: Latest) -> tuple[Level, ...]:
        if not self.levels:
            return ()
        nothing = (Level(0, 0),) * (len(self.levels) - 1)
        if latest.offer.name == CASCADE:
            return settle(step)[0]
        if latest.offer.name == SPECULATIVE:
            return (Level(step.drafted, step.accepted, step.drafted, latest.took_ns), *nothing)
        return (*nothing, Level(step.drafted, step.accepted))


class FromShadow(Drafter):
    """Lookup's drafts, out of the index by which the chooser follows what lookup would do."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        times = self.chooser.rates.target.of(len(rows))
        return [self.chooser.shadow(row).draft(row, limit, times) for row, limit in zip(rows, limits, strict=True)]


def forwards_ms(levels: Sequence[Level], curves: Sequence[CostCurve | None], rows: int = 1) -> float:
    """Milliseconds of the forwards of a cascade's levels by their curves, each over what the level below proposed to it
    and one token more; None stands for a level without a model."""
    total, below = 0.0, [*(level.drafted for level in levels[1:]), 0]
    for level, reviewed, curve in zip(levels, below, curves, strict=True):
        if curve is not None and level.forwards:
            total += level.forwards * curve.ms(1 + reviewed / level.forwards, None, rows)
    return total


class Auto(Strategy):
    name = "auto"
    summary = "chooses among plain decoding, lookup, speculative and cascade by measured costs and running acceptance"
    source = "the cost model of specbench profile-hardware"
    roles = ("target",)
    optional_roles = ("draft", "draft2", "draft3")
    continuous = True
    Options = Options

    def __init__(self, models: Mapping[str, CachedModel], options: Options) -> None:
        super().__init__(models, options)
        self.drafts = [role for role in models if role != "target"]
        self.names = [name for name in CANDIDATES if name in options.candidates and self._at_hand(name)]
        if not set(WITH_DRAFT) & set(self.names):
            self.drafts = []
        self.levels: tuple[str, ...] = ()
        if self.drafts:
            self.levels = choose_levels(CascadeOptions(), {role: models[role].name for role in self.drafts})
        self.curves: dict[str, CostCurve] = {}
        self.extra_ms: dict[str, float] = {}
        self.assumed, self.calibration_ms = Assumed(), 0.0
        self._rates: Rates | None = None

    def _at_hand(self, name: str) -> bool:
        """A worker holds one conversation at a time: of the two ways that use the draft model, there it is one."""
        both = set(WITH_DRAFT) <= set(self.options.candidates)
        if name == SPECULATIVE and both and any(isinstance(self.models[role], RemoteModel) for role in self.drafts):
            return False
        return bool(self.drafts) or name not in WITH_DRAFT

    def prepare(self, rows: int, tokens: int) -> None:
        """Measures the cost curves."""
        models = {role: self.models[role] for role in ("target", *self.drafts)}
        self.curves, took_ns = timed(cost_curves, models, rows, tokens)
        self.calibration_ms, self._rates = took_ns / 1e6, None

    def practise(self, texts: Sequence[Ids]) -> None:
        """Measures how often the draft's first choice is the target's, and what drafting takes beside forwards."""
        if self.drafts and texts:
            _, took_ns = timed(self._practise, texts)
            self.calibration_ms, self._rates = self.calibration_ms + took_ns / 1e6, None

    def _practise(self, texts: Sequence[Ids]) -> None:
        given, self.assumed = practised(self.target, self.models["draft"], texts)
        drafts = [self.models[role] for role in self.drafts]
        for name in WITH_DRAFT if self.curves else ():
            if name in self.names:
                asked = drafts[:1] if name == SPECULATIVE else drafts
                self.extra_ms[name] = extra_ms(self._drafter(name, Sampling()), asked, given[-1])

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        drafters = {name: self._drafter(name, sampling) for name in self.names if name in WITH_DRAFT}
        if not self.curves:
            yield from self._unprepared(drafters, requests, sampling)
            return
        chooser = Chooser(self._rates_now(), self.names, self.assumed.alpha, self.options.budget, sampling.eos)
        drafters[LOOKUP] = FromShadow(chooser)
        switching = Switching(chooser, drafters, self.levels, self.curves)
        try:
            for step in draft_and_verify(
                self.target, switching, Verifier(sampling), requests, self.options.draft_length
            ):
                yield switching.settle(step)
        finally:
            self.facts = self._facts(chooser)

    def _rates_now(self) -> Rates:
        """Costs are the same for all prompts, so their tables are."""
        if self._rates is None:
            most = self.options.draft_length
            draft = None
            if self.drafts:
                draft = Times(self.curves["draft"], most, follows=self.models["draft"].original is not None)
            self._rates = Rates(Times(self.curves["target"], most), draft, most, self.extra_ms)
        return self._rates

    def _unprepared(
        self, drafters: Mapping[str, Drafter], requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[Step]:
        """Without costs there is nothing to choose by: speculative at a fixed length, else lookup."""
        name = next((name for name in (SPECULATIVE, LOOKUP) if name in self.names), PLAIN)
        self.facts = {"choice": name, "why": "no costs were measured"}
        length = min(UNKNOWN_LENGTH, self.options.draft_length) if name != PLAIN else 0
        lookup = LookupOptions()
        drafter = drafters.get(name) or LookupDrafter(lookup.min_match, lookup.per_match)
        yield from draft_and_verify(self.target, drafter, Verifier(sampling), requests, length)

    def _drafter(self, name: str, sampling: Sampling) -> Drafter:
        if name == SPECULATIVE:
            return drafter_for(self.models, ("draft",), model_drafter, sampling, None)
        options = CascadeOptions(draft_length=self.options.draft_length)
        settings = Settings(options, self.levels, {}, self.curves, self.assumed)
        return drafter_for(
            self.models, [role for role in self.levels if role not in STATISTICAL], cascade_drafter, sampling, settings
        )

    def _facts(self, chooser: Chooser) -> dict[str, Any]:
        """What the record says of the choice, see docs/strategies/auto.md."""
        states = [*chooser.ended, *chooser.states.values()]
        if not states:
            return {}
        latest = states[-1]
        facts: dict[str, Any] = {
            "choice": Counter(state.name or PLAIN for state in states).most_common(1)[0][0],
            "why": why(latest),
            "switches": sum(state.switches for state in states),
            "trial_rounds": sum(state.trial_rounds for state in states),
            "trial_tokens": sum(state.trial_tokens for state in states),
            "trial_lost_ms": round(sum(state.trial_lost_ms for state in states), 3),
            "calibration_ms": round(self.calibration_ms, 1),
        }
        for name in (PLAIN, *self.names):
            facts[f"{name}_rounds"] = sum(state.rounds[name] for state in states)
        if self.levels:
            facts |= {"alpha": round(latest.alpha.value, 4), "alpha_assumed": round(self.assumed.alpha, 4)}
            facts["levels"] = ",".join(self.levels)
            facts |= {f"{name}_extra_ms": round(ms, 4) for name, ms in self.extra_ms.items()}
        return facts


def why(state: State) -> str:
    """The offers of the latest choice, in words; the first of them is that of plain decoding."""
    if not state.offers:
        return "too short to choose"
    promised = sorted(state.offers, key=lambda offer: -offer.rate)
    plain = state.offers[0].rate
    said = ", ".join(f"{offer.name} {offer.rate / plain:.2f}x" for offer in promised)
    right = f"; {state.alpha.value:.0%} of the draft's tokens right" if state.judged else ""
    return f"by the costs {said}{right}"
