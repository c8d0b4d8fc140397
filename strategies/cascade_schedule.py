"""Online lengths for a cascade: who drafts for a reviewer, and how far, so that most tokens come out per second.

Every round there are three ways for a reviewer to go on: decode one token without a draft; review what the n-gram level
says right now; review what the neural level below it says, which is itself fed in the best of these ways. What each is
worth follows from the formulas of `hardware.cost_model`, the measured cost curves of the models, and running shares of
right tokens: of the n-gram level by how it matched, of the neural level over all and by how sure it was of a token. The
best one is taken. Within the neural way, drafting goes on while the next token is worth its time:

    (chance that everything drafted so far is accepted) * (chance of the next) >= (time it takes) * (tokens per ms of
    the best way), the rule by which a ratio of sums is largest,

and whatever the n-gram level can add behind it is taken by the same rule, where the time is only that of a longer
review: a horizontal cascade. A level that does not pay is thereby bypassed. What the n-gram level would have said is
compared with what came in every round, so its shares stay current for nothing; the neural level is tried again after
`probe` rounds without it, if it could pay at all. A draft model that has not read a row yet has to read all of it
first; that is set against the tokens that the row may still get. Where it does not promise to be far better, two rounds
first show how fast the row gets on without it: where the text repeats, the n-gram level says so at once.

All of this is kept per row and forgotten between prompts. Times are the curves', not those of the moment, so that the
same tokens always meet the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ..hardware.cost_model import best_draft_length, expected_tokens
from ..models.cost_curve import CostCurve
from .base import Row
from .cascade_levels import CONFIDENCES, CascadeDrafter, Feed
from .proposal import NOTHING, Proposal, ahead_of, joined
from .statistical import Ngram, share_of

PLAIN, NGRAM, NEURAL = range(3)
WAYS = ("plain", "ngram", "draft")
ALPHA = 0.75  # share of a draft model's tokens that is right, before anything was seen
SURE = (0.35, 0.5, 0.62, 0.78, 0.9, 0.96, 0.99)  # the same by class of its own probability, see CONFIDENCES
WEIGHT = 4.0  # observations that what is assumed at first counts for
KEPT = 0.97  # of the weight of an observation, with every later one of its kind: some thirty are remembered
WORTH = 1.02  # how much faster than plain decoding a draft has to promise to be: making one takes time of its own
LEAST = 0.01  # of a one-token forward, what one more token costs at the least
PAYS_BACK = 32  # tokens over which it pays to read what a level has missed
TYPICAL_TOKENS = 200.0  # of an answer, whatever its limit: what is counted on of a long one
PATIENCE = 2  # rounds before a draft model reads a row for the first time
EAGER = 1.2  # times the best way without it: a draft model that promises more need not wait for that
LATELY = 0.8  # of the weight of a round in the running speed without a draft model, with every later round
HOPE = 0.9  # share of right tokens with which a bypassed draft model has to pay to be tried again
assert len(SURE) == len(CONFIDENCES) + 1


class Assumed(NamedTuple):
    """What is taken for granted of a draft model's tokens before anything was seen of a row.

    Attributes:
        alpha: share that is right.
        sure: the same by class of the model's own probability.
    """

    alpha: float = ALPHA
    sure: tuple[float, ...] = SURE


class Share:
    """A running share of right tokens: an exponential average that begins at `assumed`."""

    __slots__ = ("assumed", "right", "seen")

    def __init__(self, assumed: float) -> None:
        self.assumed, self.right, self.seen = assumed, 0.0, 0.0

    def add(self, right: bool) -> None:
        self.right = KEPT * self.right + right
        self.seen = KEPT * self.seen + 1

    @property
    def value(self) -> float:
        return (WEIGHT * self.assumed + self.right) / (WEIGHT + self.seen)


@dataclass
class _State:
    """What is known of one row."""

    sure: list[Share]
    alpha: Share
    ngram: dict[int, Share] = field(default_factory=dict)
    rounds: int = 0
    since_neural: int = 0
    said: Proposal = NOTHING  # what the n-gram level said at the row's end in the latest round
    made: float = 0.0  # tokens of the latest rounds without the neural level, and
    spent_ms: float = 0.0  # what their reviews took

    def right(self, sign: int) -> Share:
        if sign not in self.ngram:
            self.ngram[sign] = Share(share_of(sign))
        return self.ngram[sign]

    def without_draft(self, plain_ms: float) -> float:
        """Tokens per millisecond of late without the neural level; one plain round is taken for granted."""
        return (1 + self.made) / (plain_ms + self.spent_ms)


def tokens_left(row: Row) -> float:
    """Tokens that a row is expected to get, at least 1: each may be the last, with probability 1 / TYPICAL_TOKENS."""
    allowed = max(1, row.request.max_new_tokens - row.new_tokens)
    return max(1.0, TYPICAL_TOKENS * -math.expm1(-allowed / TYPICAL_TOKENS))


def pays_over(row: Row, begun: bool) -> float:
    """Tokens over which a draft model's reading has to pay.

    What is read once serves every later round: a prompt all that the row is expected to get; what other ways made
    meanwhile, where the model has begun with the row, the next `PAYS_BACK` tokens, until it is read again.
    """
    left = tokens_left(row)
    return min(left, PAYS_BACK) if begun else left


def rate_with(reading_ms: float, rate: float, tokens: float) -> float:
    """Tokens per millisecond where so many tokens, which come at `rate`, pay for reading beforehand."""
    return tokens / (tokens / rate + reading_ms)


@dataclass(frozen=True)
class Plan:
    """How a reviewer goes on.

    Attributes:
        way: PLAIN, NGRAM or NEURAL.
        length: draft tokens that it is best with.
        rate: tokens per millisecond that are expected of it.
    """

    way: int
    length: int
    rate: float


class Times:
    """Milliseconds of one forward of a model over n new tokens per row, looked up instead of interpolated.

    From two tokens on they never fall: what looks slower than more tokens was measured in a bad moment. And no token is
    quite free, or there would be no end to adding hopeless ones. One token may really be slower than two, where a
    kernel is.

    Args:
        most: the longest draft.
        follows: of a draft model that takes over what the target has read: what is left for it to read is the draft so
            far, which does not count.
    """

    def __init__(self, curve: CostCurve, most: int, follows: bool = False) -> None:
        self.curve, self.follows, self._most = curve, follows, most
        self._known: dict[int, list[float]] = {}

    def of(self, rows: int) -> list[float]:
        """By n, from 0 (which costs nothing) to the longest draft and one more."""
        if rows not in self._known:
            measured = [self.curve.ms(n, None, rows) for n in range(1, self._most + 2)]
            smooth = list(accumulate(reversed(measured[1:]), min))[::-1]
            rising = accumulate(smooth, lambda before, ms: max(ms, before + LEAST * measured[0]))
            self._known[rows] = [0.0, measured[0], *rising]
        return self._known[rows]

    def reading(self, behind: int, rows: int) -> float:
        """What the next forward takes more where so many tokens are to be read beside the latest."""
        if self.follows or behind < 1:
            return 0.0
        return max(0.0, self.curve.ms(behind + 1, None, rows) - self.of(rows)[1])


class Scheduled(Feed):
    """Makes the drafts for one reviewer as it pays best.

    Args:
        times: of the reviewer.
        level: the neural level below it, or None; `level_times` are its times.
        ngram: the n-gram level, or None.
        most: the longest draft.
        probe: rounds after which a bypassed neural level is tried again.
        confidence: whether drafting stops early by how sure the level is of its tokens.
        tail: whether the n-gram level may add to what the neural level drafted.
        eos: ends of text, behind which nothing is drafted.
        assumed: of the neural level.
    """

    def __init__(
        self,
        times: Times,
        level: CascadeDrafter | None,
        level_times: Times | None,
        ngram: Ngram | None,
        most: int,
        probe: int = 32,
        confidence: bool = True,
        tail: bool = True,
        eos: Sequence[int] = (),
        assumed: Assumed = Assumed(),  # noqa: B008 - immutable
    ) -> None:
        self.times, self.level, self.level_times, self.ngram = times, level, level_times, ngram
        self.most, self.probe, self.confidence, self.tail = most, probe, confidence, tail
        self.eos, self.assumed = frozenset(eos), assumed
        self.ways: dict[int, int] = {}  # the way that was taken latest, by row
        self._states: dict[int, _State] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]:
        limits = [min(limit, self.most) for limit in limits]
        plans = [self.plan(row, limit, len(rows), choose=True) for row, limit in zip(rows, limits, strict=True)]
        made = [NOTHING] * len(rows)
        neural = []
        for i, (row, plan) in enumerate(zip(rows, plans, strict=True)):
            state = self._state(row)
            self.ways[row.index] = plan.way
            state.since_neural = 0 if plan.way == NEURAL else state.since_neural + 1
            if plan.way == NGRAM:
                made[i] = joined([state.said], plan.length)
            elif plan.way == NEURAL:
                neural.append(i)
        if neural:
            drafted = self._draft([rows[i] for i in neural], [limits[i] for i in neural], [plans[i] for i in neural])
            for i, proposal in zip(neural, drafted, strict=True):
                made[i] = proposal
        times = self.times.of(len(rows))
        for row, plan, proposal in zip(rows, plans, made, strict=True):
            if plan.way != NEURAL:
                state = self._state(row)
                state.spent_ms = LATELY * state.spent_ms + times[len(proposal.tokens) + 1]
        return made

    def begin(self, row: Row) -> None:
        self._states.pop(row.index, None)
        self.ways.pop(row.index, None)
        if self.level is not None:
            self.level.begin(row)
        if self.ngram is not None:
            self.ngram.begin(row)

    def reset(self) -> None:
        self._states.clear()
        self.ways.clear()
        if self.level is not None:
            self.level.reset()
        if self.ngram is not None:
            self.ngram.reset()

    def learn(self, row: Row, proposal: Proposal, said: Sequence[int]) -> None:
        state = self._state(row)
        state.rounds += 1
        if self.ways.get(row.index) != NEURAL:
            state.made = LATELY * state.made + len(said)
        for token, sign, truth in zip(state.said.tokens, state.said.signs, said, strict=False):
            state.right(sign).add(token == truth)
            if token != truth:
                break
        for at, (token, truth) in enumerate(zip(proposal.tokens, said, strict=False)):
            sign, right = proposal.signs[at], token == truth
            if self.level is not None and proposal.origins[at] == self.level.level:
                state.sure[sign].add(right)
                state.alpha.add(right)
            elif proposal.origins[0] != proposal.origins[at]:  # a tail; a draft all of n-grams was counted above
                state.right(sign).add(right)
            if not right:
                break
        state.said = NOTHING

    # Planning

    def plan(self, row: Row, limit: int, rows: int, choose: bool = False) -> Plan:
        """The way that yields most tokens per millisecond for a row as it stands.

        Args:
            limit: the longest draft that can be used.
            rows: rows of the batch, which share the time of a forward.
            choose: it is going to be taken, so a probe may be due, and what the n-gram level says is noted.
        """
        state, times = self._state(row), self.times.of(rows)
        best = Plan(PLAIN, 0, 1 / times[1])
        if limit < 1:
            return best
        if self.ngram is not None:
            said = self._until_end(self.ngram.propose([row], [limit])[0])
            if choose:
                state.said = said
            alphas = [state.right(sign).value for sign in said.signs]
            length, rate = best_draft_length(alphas, lambda k: 0.0, times.__getitem__)
            if rate > WORTH * best.rate:
                best = Plan(NGRAM, length, rate)
        if self.level is None:
            return best
        assert self.level_times is not None
        token_ms = self.token_ms(row, limit, rows)
        length, rate = best_draft_length([state.alpha.value] * limit, lambda k: k * token_ms, times.__getitem__)
        rate = self._after_reading(row, rate, expected_tokens(state.alpha.value, length), rows)
        beaten = best.rate
        if row.index not in self.level.known and not self.level_times.follows:
            patient = state.rounds < PATIENCE
            beaten = EAGER * beaten if patient else max(beaten, state.without_draft(times[1]))
        if length and rate > beaten and rate * times[1] > WORTH:
            return Plan(NEURAL, length, rate)
        if choose and state.since_neural >= self.probe:
            hoped, rate = best_draft_length([HOPE] * limit, lambda k: k * token_ms, times.__getitem__)
            if hoped and self._after_reading(row, rate, expected_tokens(HOPE, hoped), rows) > best.rate:
                return Plan(NEURAL, 1, best.rate)
            state.since_neural = 0
        return best

    def token_ms(self, row: Row, limit: int, rows: int) -> float:
        """What a token of the neural level takes, drafted in the way that is best for it as the row stands."""
        assert self.level is not None
        assert self.level_times is not None
        inner = self.level.inner
        if isinstance(inner, Scheduled):
            return 1 / inner.plan(row, limit - 1, rows).rate
        return self.level_times.of(rows)[1]

    def _after_reading(self, row: Row, rate: float, tokens: float, rows: int) -> float:
        """The rate when the time is counted in which the level reads what it has not read yet.

        Args:
            tokens: that the round is expected to make.
        """
        assert self.level is not None
        assert self.level_times is not None
        known = self.level.known.get(row.index, 0)
        reading = self.level_times.reading(len(row.tokens) - known - 1, rows)
        return rate_with(reading, rate, max(tokens, pays_over(row, bool(known)))) if reading else rate

    # Drafting

    def _draft(self, rows: Sequence[Row], limits: Sequence[int], plans: Sequence[Plan]) -> list[Proposal]:
        """Lets the neural level draft while it pays, then adds what the n-gram level can."""
        assert self.level is not None
        ahead = [ahead_of(row) for row in rows]
        parts: list[list[Proposal]] = [[] for _ in rows]
        done, survive = [0] * len(rows), [1.0] * len(rows)
        live = list(range(len(rows)))
        while live:
            made = self.level.propose([ahead[i] for i in live], [limits[i] - done[i] for i in live])
            going = []
            for i, part in zip(live, made, strict=True):
                ahead[i].tokens.extend(part.tokens)
                parts[i].append(part)
                done[i] += len(part.tokens)
                survive[i] *= self._chance(rows[i], part)
                open_ended = part.tokens and done[i] < limits[i] and self.eos.isdisjoint(part.tokens)
                if open_ended and self._goes_on(ahead[i], plans[i], limits[i], done[i], survive[i], len(rows)):
                    going.append(i)
            live = going
        if self.tail and self.ngram is not None:
            for i, row in enumerate(ahead):
                if parts[i] and self.eos.isdisjoint(parts[i][-1].tokens):
                    parts[i].append(self._tail(row, plans[i], limits[i] - done[i], done[i], survive[i], len(rows)))
        return [joined(found) for found in parts]

    def _chance(self, row: Row, part: Proposal) -> float:
        """The chance that all tokens of a part are accepted."""
        state, chance = self._state(row), 1.0
        for sign in part.signs:
            chance *= state.sure[sign].value if self.confidence else state.alpha.value
        return chance

    def _goes_on(self, row: Row, plan: Plan, limit: int, done: int, survive: float, rows: int) -> bool:
        """Whether one more token of the neural level is worth its time."""
        if not self.confidence:
            return done < plan.length
        times = self.times.of(rows)
        ms = self.token_ms(row, limit - done, rows) + times[done + 2] - times[done + 1]
        return survive * self._state(row).alpha.value >= ms * plan.rate

    def _tail(self, row: Row, plan: Plan, limit: int, done: int, survive: float, rows: int) -> Proposal:
        """What the n-gram level adds: each token while it is worth the longer review."""
        assert self.ngram is not None
        state, times = self._state(row), self.times.of(rows)
        found = self._until_end(self.ngram.propose([row], [limit])[0])
        count = 0
        for sign in found.signs:
            survive *= state.right(sign).value
            if survive < plan.rate * (times[done + count + 2] - times[done + count + 1]):
                break
            count += 1
        return joined([found], count) if count else NOTHING

    def _until_end(self, proposal: Proposal) -> Proposal:
        """Without what stands behind an end of text: in a conversation the next turn's question would be copied."""
        ends = (at + 1 for at, token in enumerate(proposal.tokens) if token in self.eos)
        kept = next(ends, len(proposal.tokens))
        return proposal if kept == len(proposal.tokens) else joined([proposal], kept)

    def _state(self, row: Row) -> _State:
        state = self._states.get(row.index)
        if state is None:
            state = _State([Share(value) for value in self.assumed.sure], Share(self.assumed.alpha))
            self._states[row.index] = state
        return state
