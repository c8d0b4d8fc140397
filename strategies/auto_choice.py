"""Which way of decoding `auto` takes next, for each row: costs, running acceptance, and a budget for trials.

Every way that is at hand makes an offer, in tokens per millisecond:

- `autoregressive`: one token for the time of one;
- `lookup`: what it would have made of the text so far, with drafts as long as they pay. It asks no model, so its rounds
  are played through beside whatever decodes, and cost no forward (`Shadow`);
- `speculative`: the formula of Leviathan et al. at the best length, for the share of draft tokens that was right;
- `cascade`: the best of these, since it chooses among them round by round, bypassing a draft model that does not pay;
  offered where that could pay at all.

The two ways that use a draft model are corrected by what they delivered of what they had promised before. What the
draft model has not read yet is charged to the tokens that the reading will serve. The best offer is taken, a cascade
unless another is clearly better, and another than the way in use only after a few rounds and if it is clearly better;
speculative rounds have to be better than a cascade by more than that, since they are among its own. A way that is worse
than plain decoding is left at once when the row has lost more time than its budget allows. Offers are made anew when
something was learned, and every few rounds.

Times are those of the cost curves and never the clock's, so that the same tokens meet the same decisions. Decisions
depend on tokens that are final, never on drafts that nobody has looked at: under the rejection rule the noise of a
position that is still open is then independent of them, and what comes out stays exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .auto_rates import Rates
from .auto_shadow import Shadow
from .base import Row
from .cascade_schedule import HOPE, KEPT, Share, pays_over, rate_with, tokens_left

PLAIN, LOOKUP, CASCADE, SPECULATIVE = "autoregressive", "lookup", "cascade", "speculative"
CANDIDATES = (PLAIN, LOOKUP, CASCADE, SPECULATIVE)  # of equal offers the first is taken
WITH_DRAFT = (CASCADE, SPECULATIVE)
BETTER = 1.05  # by which another way has to be
CONTAINED = 1.15  # by which speculative rounds have to be better than a cascade, which can go on in such rounds itself
WORTH = 1.03  # how much faster than plain decoding a draft model has to promise to be
DOUBT, AT_RISK = 0.1, 0.97  # were so much less right, a prompt is not read that would slow the row down below this
FEWEST_ROUNDS = 6  # in one way, before it is left for a better one
TRIAL_ROUNDS, TRIAL_TOKENS = 8, 12  # a trial ends with so many rounds, or draft tokens of a model judged
REST_TOKENS = 32  # without the draft model before it is tried again; doubled each time
LOOKUP_PRIOR, LOOKUP_ROUNDS = 1.04, 3.0  # times plain decoding, and how many rounds that assumption weighs
TRUST_TOKENS = 64.0  # tokens that the trust in a promise weighs: a handful of rounds says little about a few per cent
KNOWN_TOKENS = 24  # draft tokens of a model judged, before a promise is made by what is known of it
DECIDE_ROUNDS = 8  # after which offers are made anew, if nothing was learned before


class Offer(NamedTuple):
    """How to go on.

    Attributes:
        name: of the way.
        length: draft tokens that one round may have.
        rate: tokens per millisecond that are expected, all told.
        promise: of rounds that ask the draft model, before reading and experience are counted in; what their deliveries
            are held against.
    """

    name: str
    length: int
    rate: float
    promise: float = 0.0


class Told(NamedTuple):
    """What a round came to.

    Attributes:
        made: tokens that became final.
        drafted: draft tokens that the target looked at.
        draft_ms: of drafting, by the curves, reading aside.
        judged: of the draft model's own tokens, in order, those that were looked at up to the first wrong one.
        right: how many of them were right.
        asked: whether the draft model ran.
    """

    made: int
    drafted: int = 0
    draft_ms: float = 0.0
    judged: int = 0
    right: int = 0
    asked: bool = False


@dataclass
class Trust:
    """Tokens delivered over tokens promised, begun at one."""

    delivered: float = 0.0
    promised: float = 0.0

    def add(self, delivered: float, promised: float) -> None:
        self.delivered = KEPT * self.delivered + delivered
        self.promised = KEPT * self.promised + promised

    @property
    def value(self) -> float:
        return (TRUST_TOKENS + self.delivered) / (TRUST_TOKENS + self.promised)


@dataclass
class State:
    """What is known of one row.

    Attributes:
        name: the way in use, empty before the first choice.
        since: rounds in it.
        read: tokens of the row that the draft model has read.
        spent_ms, made: time by the curves, and tokens after the first.
        idle, rest: tokens since the draft model was last asked, and after how many it is tried again.
        trial_rounds, trial_tokens, trial_lost_ms: rounds before anything was known of this row, what they made, and the
            time that plain decoding would have saved.
        rounds: by way.
        offers: of the latest decision; `chosen` is the one that was taken, and `undecided` says how many rounds there
            were since.
    """

    alpha: Share
    shadow: Shadow | None = None
    name: str = ""
    since: int = 0
    read: int = 0
    spent_ms: float = 0.0
    made: int = 0
    judged: int = 0
    idle: int = 0
    rest: int = REST_TOKENS
    switches: int = 0
    trial_rounds: int = 0
    trial_tokens: int = 0
    trial_lost_ms: float = 0.0
    trust: dict[str, Trust] = field(default_factory=lambda: {name: Trust() for name in WITH_DRAFT})
    rounds: Counter[str] = field(default_factory=Counter)
    offers: tuple[Offer, ...] = ()
    chosen: Offer | None = None
    undecided: int = 0

    @property
    def on_trial(self) -> bool:
        return self.judged < TRIAL_TOKENS and self.rounds.total() < TRIAL_ROUNDS


class Chooser:
    """Decides for every row of a call.

    Args:
        rates: what the ways cost.
        names: the ways at hand, of CANDIDATES.
        alpha: share of the draft model's tokens that is right, before anything is known of a row.
        budget: share of a row's plain decoding time that may be lost on trials.
        eos: ends of text, behind which `lookup` drafts nothing.
    """

    def __init__(
        self, rates: Rates, names: Sequence[str], alpha: float, budget: float, eos: Sequence[int] = ()
    ) -> None:
        self.rates, self.alpha, self.budget, self.eos = rates, alpha, budget, eos
        self.names = tuple(name for name in CANDIDATES if name in names)
        self.states: dict[int, State] = {}
        self.ended: list[State] = []  # of rows whose place another request has taken

    def begin(self, row: Row) -> None:
        """A row that nothing is known of, perhaps in the place of another."""
        if row.index in self.states:
            self.ended.append(self.states.pop(row.index))

    def shadow(self, row: Row) -> Shadow:
        """Of a row that has been chosen for; begun where it stands, if there is none yet."""
        state = self.states[row.index]
        if state.shadow is None:
            state.shadow = Shadow(row, self.rates.most, self.eos)
        return state.shadow

    def choose(self, row: Row, limit: int, rows: int) -> Offer:
        """How the row goes on.

        Args:
            limit: the longest draft that can be used now.
            rows: rows that share the forward.
        """
        state = self.states.get(row.index)
        if state is None:
            state = self.states[row.index] = State(Share(self.alpha))
        if limit < 1:
            return Offer(PLAIN, 0, self.rates.plain(rows))
        if state.chosen is None or state.undecided >= DECIDE_ROUNDS:
            state.chosen, state.undecided = self._decide(state, row, rows), 0
        return state.chosen

    def observe(self, row: Row, offer: Offer, told: Told, rows: int) -> None:
        """Takes note of what a round came to. `offer` is what was chosen for it, `row` how it stands now."""
        state, times = self.states[row.index], self.rates.target.of(rows)
        on_trial = state.on_trial
        ms = times[told.drafted + 1] + told.draft_ms
        # A cascade that did not ask the draft judged for itself; a promise made by what was only assumed binds nobody.
        if told.asked and offer.name in WITH_DRAFT and state.judged >= KNOWN_TOKENS:
            state.trust[offer.name].add(told.made, offer.promise * ms)
        if told.asked:
            ms += self.rates.reading(len(row.tokens) - told.made - state.read - 1, rows)
            state.read, state.idle = len(row.tokens) - 1, 0
        else:
            state.idle += told.made
        for at in range(told.judged):
            state.alpha.add(at < told.right)
        state.judged += told.judged
        state.spent_ms += ms
        state.made += told.made
        state.since += 1
        state.undecided += 1
        state.rounds[offer.name] += 1
        if on_trial:
            state.trial_rounds, state.trial_tokens = state.trial_rounds + 1, state.trial_tokens + told.made
            state.trial_lost_ms += ms - told.made * times[1]
        news = told.asked or self._rested(state)
        if LOOKUP in self.names and offer.name != CASCADE:  # which has an index of its own over the same text
            shadow = self.shadow(row)
            before = shadow.drafts
            shadow.follow(row.tokens.view(), times)
            news = news or shadow.drafts > before
        if news:
            state.chosen = None

    def offers(self, state: State, row: Row, rows: int) -> list[Offer]:
        """What every way at hand promises, in the order of CANDIDATES; plain decoding always does.

        A way with the draft model is offered while that model is worth its time, a cascade where it may become so, and
        either to a row that is in it already.
        """
        rates, plain = self.rates, self.rates.plain(rows)
        found = [Offer(PLAIN, 0, plain)]
        if LOOKUP in self.names:
            found.append(Offer(LOOKUP, rates.most, _lookup_rate(state.shadow, 1 / plain)))
        if rates.draft is None:
            return found
        others = max(offer.rate for offer in found)
        for name, least in ((CASCADE, others), (SPECULATIVE, 0.0)):
            if name not in self.names:
                continue
            length, bare = rates.best(name, state.alpha.value, rows)
            rate = self._after_reading(state, row, bare, rows)
            if name == CASCADE:
                offered = self._could_pay(name, rows)
            else:
                offered = rate >= WORTH * plain and self._is_safe(state, row, rows)
            if offered or state.name == name:
                worth = max(rate, least) * state.trust[name].value
                found.append(Offer(name, rates.most if name == CASCADE else length, worth, bare))
        return found

    # What stands in the way of a change, and what of none

    def _decide(self, state: State, row: Row, rows: int) -> Offer:
        plain = self.rates.plain(rows)
        self._try_again(state, row, rows)
        offers = {offer.name: offer for offer in self.offers(state, row, rows)}
        best = max(offers.values(), key=lambda offer: offer.rate)
        cascade = offers.get(CASCADE)
        if cascade and state.name not in (best.name, CASCADE) and best.rate <= _edge(CASCADE, best) * cascade.rate:
            best = cascade  # does better than promised: it stops where the draft is not sure, and adds n-grams
        state.offers = tuple(offers.values())
        if not state.name:
            state.name = best.name
        elif best.name != state.name and self._leaves(state, row, offers[state.name], best, plain):
            state.name, state.since, state.switches = best.name, 0, state.switches + 1
        return offers[state.name]

    def _leaves(self, state: State, row: Row, now: Offer, best: Offer, plain: float) -> bool:
        if now.rate < plain and self._is_spent(state, row, plain):
            return True
        return state.since >= FEWEST_ROUNDS and best.rate > _edge(now.name, best) * now.rate

    def _is_spent(self, state: State, row: Row, plain: float) -> bool:
        """Whether the row has lost more time against plain decoding than it may."""
        lost = state.spent_ms * plain - state.made  # in tokens of plain decoding
        return lost > self.budget * (row.new_tokens + tokens_left(row))

    def _is_safe(self, state: State, row: Row, rows: int) -> bool:
        """Whether speculative rounds, which cannot do without the draft model, would hardly slow the row down if that
        were somewhat worse on it than is assumed: then its prompt may be read for them."""
        if state.read:
            return True
        _, doubtful = self.rates.best(SPECULATIVE, state.alpha.value - DOUBT, rows)
        return self._after_reading(state, row, doubtful, rows) >= AT_RISK * self.rates.plain(rows)

    def _could_pay(self, name: str, rows: int) -> bool:
        return self.rates.best(name, HOPE, rows)[1] > BETTER * self.rates.plain(rows)

    def _rested(self, state: State) -> bool:
        """Whether the row has been without the draft model long enough for it to be tried again."""
        return state.idle >= state.rest and self.rates.draft is not None and state.name not in WITH_DRAFT

    def _try_again(self, state: State, row: Row, rows: int) -> None:
        """After a while without the draft model most of what speaks against it is forgotten, if it could pay at all."""
        if not self._rested(state):
            return
        state.idle, state.rest = 0, 2 * state.rest
        plain = self.rates.plain(rows)
        hoped = max((self.rates.best(name, HOPE, rows)[1] for name in WITH_DRAFT if name in self.names), default=0.0)
        pays = hoped > 0 and self._after_reading(state, row, hoped, rows) > BETTER * plain
        if pays and not self._is_spent(state, row, plain):
            state.alpha.right, state.alpha.seen = state.alpha.right / 4, state.alpha.seen / 4
            state.trust = {name: Trust() for name in WITH_DRAFT}

    # What the draft model has not read

    def _after_reading(self, state: State, row: Row, rate: float, rows: int) -> float:
        """The rate when the time is counted in which the draft model reads what it has not read yet."""
        reading = self.rates.reading(len(row.tokens) - state.read - 1, rows)
        return rate_with(reading, rate, pays_over(row, bool(state.read)))


def _edge(now: str, best: Offer) -> float:
    """Times the rate of one way that another has to promise to be taken in its place."""
    return CONTAINED if (now, best.name) == (CASCADE, SPECULATIVE) else BETTER


def _lookup_rate(shadow: Shadow | None, plain_ms: float) -> float:
    """Tokens per millisecond of the rounds that were played through, begun at what is assumed of them."""
    tokens, ms = (shadow.tokens, shadow.ms) if shadow else (0.0, 0.0)
    return (LOOKUP_ROUNDS * LOOKUP_PRIOR + tokens) / (LOOKUP_ROUNDS * plain_ms + ms)
