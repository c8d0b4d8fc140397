"""Which way of decoding `auto` takes next, for each row: costs, running acceptance, and a budget for trials.

Every way that is at hand makes an offer, in tokens per millisecond:

- `autoregressive`: one token for the time of one;
- `lookup`: what it would have made of the text so far. It asks no model, so its rounds are played through beside
  whatever decodes, and cost no forward (`Shadow`);
- `speculative`: the formula of Leviathan et al. at the best length, for the share of draft tokens that was right;
- `cascade`: the best of these, since it chooses among them round by round; offered while the draft is worth its time.

The two ways that use a draft model are corrected by what they delivered of what they had promised before. What the
draft model has not read yet is charged to the tokens that the reading will serve. The best offer is taken, but only
after a few rounds and if it is clearly better than the way in use; a way that is worse than plain decoding is left at
once when the row has lost more time than its budget allows.

Times are those of the cost curves and never the clock's, so that the same tokens meet the same decisions. Decisions
depend on tokens that are final, never on drafts that nobody has looked at: under the rejection rule the noise of a
position that is still open is then independent of them, and what comes out stays exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..hardware.cost_model import best_draft_length, expected_tokens
from .base import Draft, Row
from .cascade_schedule import HOPE, KEPT, PAYS_BACK, Share, Times
from .lookup import LookupDrafter
from .lookup import Options as LookupOptions

PLAIN, LOOKUP, CASCADE, SPECULATIVE = "autoregressive", "lookup", "cascade", "speculative"
CANDIDATES = (PLAIN, LOOKUP, CASCADE, SPECULATIVE)  # of equal offers the first is taken
WITH_DRAFT = (CASCADE, SPECULATIVE)
BETTER = 1.05  # by which another way has to be
WORTH = 1.03  # how much faster than plain decoding a draft model has to promise to be
FEWEST_ROUNDS = 6  # in one way, before it is left for a better one
TRIAL_ROUNDS, TRIAL_TOKENS = 8, 12  # a trial ends with so many rounds, or draft tokens of a model judged
REST_TOKENS = 32  # without the draft model before it is tried again; doubled each time
HALF_OF_LEFT = 0.5  # share of the tokens still allowed that is counted on: texts end early
LOOKUP_PRIOR, LOOKUP_ROUNDS = 1.04, 3.0  # times plain decoding, and how many rounds that assumption weighs
TRUST_TOKENS = 64.0  # tokens that the trust in a promise weighs: a handful of rounds says little about a few per cent
KNOWN_TOKENS = 24  # draft tokens of a model judged, before a promise is made by what is known of it
_LOOKUP = LookupOptions()


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


@dataclass(frozen=True)
class Told:
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


class Shadow:
    """The rounds that `lookup` would make of a row, played through on the text as it comes; and its drafts, where they
    are wanted.

    A round is counted once the text tells how it ends, so the shadow stays behind by less than one draft.
    """

    def __init__(self, row: Row) -> None:
        self._row = Row(row.index, row.request)
        self._drafter = LookupDrafter(_LOOKUP.min_match, _LOOKUP.per_match)
        self._draft: Draft | None = None
        self.rounds, self.tokens, self.ms = 0, 0.0, 0.0
        self._catch_up(row)

    def draft(self, row: Row, limit: int) -> Draft:
        """What lookup says at the end of the row; the round that it is in begins there."""
        self._catch_up(row)
        (self._draft,) = self._drafter.propose([self._row], [min(limit, _LOOKUP.draft_length)])
        return self._draft

    def follow(self, text: np.ndarray, times: Sequence[float]) -> None:
        """Plays as many rounds as the text decides.

        Args:
            text: prompt and output so far.
            times: milliseconds of a forward of the target by its number of tokens.
        """
        while (at := len(self._row.tokens)) < len(text):
            if self._draft is None:
                room = self._row.request.max_new_tokens - self._row.new_tokens - 1
                limit = max(0, min(_LOOKUP.draft_length, room, len(times) - 2))
                (self._draft,) = self._drafter.propose([self._row], [limit])
            drafted = self._draft.tokens
            came = text[at : at + len(drafted) + 1].tolist()
            pairs = enumerate(zip(drafted, came, strict=False))
            accepted = next((i for i, (said, true) in pairs if said != true), min(len(drafted), len(came)))
            if accepted == len(came):  # the rest of it may still be right
                return
            self._row.tokens.extend(came[: accepted + 1])
            self._draft, self.rounds = None, self.rounds + 1
            self.tokens = KEPT * self.tokens + accepted + 1
            self.ms = KEPT * self.ms + times[len(drafted) + 1]

    def _catch_up(self, row: Row) -> None:
        self._row.tokens.extend(row.tokens.view()[len(self._row.tokens) :].tolist())


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

    @property
    def on_trial(self) -> bool:
        return self.judged < TRIAL_TOKENS and sum(self.rounds.values()) < TRIAL_ROUNDS


class Chooser:
    """Decides for every row of a call.

    Args:
        target: times of the target.
        draft: times of the draft model, or None.
        names: the ways at hand, of CANDIDATES.
        most: the longest draft.
        alpha: share of the draft model's tokens that is right, before anything is known of a row.
        budget: share of a row's plain decoding time that may be lost on trials.
    """

    def __init__(
        self, target: Times, draft: Times | None, names: Sequence[str], most: int, alpha: float, budget: float
    ) -> None:
        self.target, self.draft, self.most, self.alpha, self.budget = target, draft, most, alpha, budget
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
            state.shadow = Shadow(row)
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
        plain = Offer(PLAIN, 0, 1 / self.target.of(rows)[1])
        if limit < 1:
            return plain
        self._try_again(state, row, rows)
        offers = {offer.name: offer for offer in self.offers(state, row, rows)}
        best = max(offers.values(), key=lambda offer: offer.rate)
        state.offers = tuple(offers.values())
        if not state.name:
            state.name = best.name
        elif best.name != state.name and self._leaves(state, row, offers[state.name], best, plain):
            state.name, state.since, state.switches = best.name, 0, state.switches + 1
        return offers[state.name]

    def observe(self, row: Row, offer: Offer, told: Told, rows: int) -> None:
        """Takes note of what a round came to. `offer` is what was chosen for it, `row` how it stands now."""
        state, times = self.states[row.index], self.target.of(rows)
        on_trial = state.on_trial
        ms = times[told.drafted + 1] + told.draft_ms
        # A cascade that did not ask the draft judged for itself; a promise made by what was only assumed binds nobody.
        if offer.name in WITH_DRAFT and told.asked and state.judged >= KNOWN_TOKENS:
            state.trust[offer.name].add(told.made, offer.promise * ms)
        before = len(row.tokens) - told.made
        if told.asked:
            ms += self._reading_ms(before - state.read - 1, rows)
            state.read, state.idle = len(row.tokens) - 1, 0
        else:
            state.idle += told.made
        for at in range(told.judged):
            state.alpha.add(at < told.right)
        state.judged += told.judged
        state.spent_ms += ms
        state.made += told.made
        state.since += 1
        state.rounds[offer.name] += 1
        if on_trial:
            state.trial_rounds, state.trial_tokens = state.trial_rounds + 1, state.trial_tokens + told.made
            state.trial_lost_ms += ms - told.made * times[1]
        if LOOKUP in self.names and offer.name != CASCADE:  # which has an index of its own over the same text
            self.shadow(row).follow(row.tokens.view(), times)

    def offers(self, state: State, row: Row, rows: int) -> list[Offer]:
        """What every way at hand promises, in the order of CANDIDATES; plain decoding always does.

        A way with the draft model is offered while that model is worth its time, and to a row that is in it already.
        """
        times = self.target.of(rows)
        plain = 1 / times[1]
        found = [Offer(PLAIN, 0, plain)]
        if LOOKUP in self.names:
            found.append(Offer(LOOKUP, min(_LOOKUP.draft_length, self.most), _lookup_rate(state.shadow, times[1])))
        if self.draft is None:
            return found
        alpha, token_ms = state.alpha.value, self.draft.of(rows)[1]
        length, bare = best_draft_length([alpha] * self.most, lambda k: k * token_ms, times.__getitem__)
        if not length:
            length, bare = 1, expected_tokens(alpha, 1) / (token_ms + times[2])
        rate = self._after_reading(state, row, bare, rows)
        others = max(offer.rate for offer in found)
        for name, longest, least in ((CASCADE, self.most, others), (SPECULATIVE, length, 0.0)):
            if name in self.names and (rate >= WORTH * plain or state.name == name):
                worth = max(rate, least) * state.trust[name].value
                found.append(Offer(name, longest, worth, bare))
        return found

    # What stands in the way of a change, and what of none

    def _leaves(self, state: State, row: Row, now: Offer, best: Offer, plain: Offer) -> bool:
        if now.rate < plain.rate and self._is_spent(state, row, plain):
            return True
        return state.since >= FEWEST_ROUNDS and best.rate > BETTER * now.rate

    def _is_spent(self, state: State, row: Row, plain: Offer) -> bool:
        """Whether the row has lost more time against plain decoding than it may."""
        lost = state.spent_ms * plain.rate - state.made  # in tokens of plain decoding
        return lost > self.budget * (row.new_tokens + HALF_OF_LEFT * (row.request.max_new_tokens - row.new_tokens))

    def _try_again(self, state: State, row: Row, rows: int) -> None:
        """After a while without the draft model most of what speaks against it is forgotten, if it could pay at all."""
        if self.draft is None or state.name in WITH_DRAFT or state.idle < state.rest:
            return
        state.idle, state.rest = 0, 2 * state.rest
        times, token_ms = self.target.of(rows), self.draft.of(rows)[1]
        _, hoped = best_draft_length([HOPE] * self.most, lambda k: k * token_ms, times.__getitem__)
        plain = Offer(PLAIN, 0, 1 / times[1])
        pays = self._after_reading(state, row, hoped, rows) > BETTER * plain.rate
        if pays and not self._is_spent(state, row, plain):
            state.alpha.right, state.alpha.seen = state.alpha.right / 4, state.alpha.seen / 4
            state.trust = {name: Trust() for name in WITH_DRAFT}

    # What the draft model has not read

    def _reading_ms(self, behind: int, rows: int) -> float:
        if self.draft is None or behind < 1:
            return 0.0
        return max(0.0, self.draft.reading(behind + 1, rows) - self.draft.of(rows)[1])

    def _after_reading(self, state: State, row: Row, rate: float, rows: int) -> float:
        """The rate when the time is counted in which the draft model reads what it has not read yet: a prompt against
        what the row may still get, what it missed meanwhile against the next `PAYS_BACK` tokens."""
        reading = self._reading_ms(len(row.tokens) - state.read - 1, rows)
        left = max(1.0, HALF_OF_LEFT * (row.request.max_new_tokens - row.new_tokens))
        tokens = min(left, PAYS_BACK) if state.read else left
        return tokens / (tokens / rate + reading)


def _lookup_rate(shadow: Shadow | None, plain_ms: float) -> float:
    """Tokens per millisecond of the rounds that were played through, begun at what is assumed of them."""
    tokens, ms = (shadow.tokens, shadow.ms) if shadow else (0.0, 0.0)
    return (LOOKUP_ROUNDS * LOOKUP_PRIOR + tokens) / (LOOKUP_ROUNDS * plain_ms + ms)
