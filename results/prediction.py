"""What each strategy should bring on measured cost curves, if draft tokens are accepted with a given probability.

These are predictions and say so wherever they are shown. They assume independent acceptance; an acceptance that was
measured on real text turns them into a forecast for that text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hardware.cost_model import cascade_tokens_per_s
from ..hardware.overlap import Costs, best_policy, best_sequential, plain_rate
from ..models.cost_curve import CostCurve
from .metrics import Drafting
from .records import BASELINE

ALPHAS = (0.5, 0.7, 0.9)
PAYS = 1.03  # by which a strategy has to be faster at the highest acceptance, for it to be worth trying
LONGEST = 16
LEAD, MOST = 16, 12  # of the strategies with two devices, as their options have it by default
HIT = 0.25  # how often duo has prepared for a rejection, before anybody has measured it

Forecast = Callable[[float], tuple[float, dict[str, Any]]]  # acceptance -> speed-up over plain decoding, setting


@dataclass(frozen=True)
class Pair:
    """What a prediction starts from.

    Attributes:
        target: its cost curve.
        drafts: cost curves of the drafts, from large to small; may be empty.
        context, rows: where on the curves.
        apart: whether the first draft is on a device of its own.
        factors: how much slower target and draft are while the other works too.
    """

    target: CostCurve
    drafts: Sequence[CostCurve] = ()
    context: int = 256
    rows: int = 1
    apart: bool = False
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def costs(self) -> Costs:
        return Costs(self._target_ms, self._draft_ms, *self.factors)

    @property
    def longest(self) -> int:
        """The longest draft whose verification was measured."""
        return max(1, min(LONGEST, self.target.new_tokens[-1] - 1))

    def _target_ms(self, new_tokens: float) -> float:
        return self.target.ms(new_tokens, self.context, self.rows)

    def _draft_ms(self, rows: float) -> float:
        return self.drafts[0].ms(1, self.context, max(rows, self.rows)) if self.drafts else 0.0


def predict(pair: Pair, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """One row per strategy that there is a formula for, in the order given.

    Returns:
        `strategy`, `at` (per acceptance of ALPHAS: `speedup` over plain decoding and `setting`), `break_even` (the
        least acceptance at which it is faster than plain decoding; None if none is), `pays`, and a `note` on what was
        assumed or why there is no number (`at` is then empty).
    """
    rows = []
    for name in strategies:
        make = FORECASTS.get(name)
        if make is None:
            continue
        forecast, note = make(pair)
        row: dict[str, Any] = {"strategy": name, "at": [], "break_even": None, "pays": None, "note": note}
        if forecast is not None:
            for alpha in ALPHAS:
                speedup, setting = forecast(alpha)
                row["at"].append({"acceptance": alpha, "speedup": round(speedup, 4), "setting": setting})
            row["break_even"] = break_even(lambda alpha, forecast=forecast: forecast(alpha)[0])
            row["pays"] = row["at"][-1]["speedup"] >= PAYS
        rows.append(row)
    return rows


def break_even(speedup: Callable[[float], float], digits: int = 3) -> float | None:
    """The least acceptance at which a speed-up that grows with it reaches 1; None where it never does."""
    low, high = 0.0, 1.0
    if speedup(high) < 1:
        return None
    while high - low > 10**-digits / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle) >= 1 else (middle, high)
    return round(high, digits)


def _speculative(pair: Pair) -> tuple[Forecast | None, str]:
    if not pair.drafts:
        return None, "needs a draft model"
    return _in_turns(pair.costs, pair.longest), ""


def _lookup(pair: Pair) -> tuple[Forecast | None, str]:
    costs = Costs(pair.costs.target_ms, lambda rows: 0.0)
    return _in_turns(costs, pair.longest), "if every step finds a draft; where none is found it is plain decoding"


def _in_turns(costs: Costs, longest: int) -> Forecast:
    """Leviathan et al. 2023: expected tokens over k T_draft(1) + T_target(k + 1), at the best k."""

    def forecast(alpha: float) -> tuple[float, dict[str, Any]]:
        rate, length = best_sequential(costs, alpha, longest)
        return rate / plain_rate(costs), {"draft-length": length}

    return forecast


def _overlapped(hit: float, note: str, tunable: bool = False) -> Callable[[Pair], tuple[Forecast | None, str]]:
    def make(pair: Pair) -> tuple[Forecast | None, str]:
        if not pair.drafts:
            return None, "needs a draft model"
        if not pair.apart:
            return None, "needs the draft on a device of its own, as in --place target=cpu:0,draft=cpu:1"
        costs, most = pair.costs, min(MOST, pair.longest)

        def forecast(alpha: float) -> tuple[float, dict[str, Any]]:
            policy = best_policy(costs, alpha, most, LEAD, hit)
            setting = {"min-ready": policy.need, "max-verify": policy.most} if tunable else {}
            return policy.rate / plain_rate(costs), setting

        return forecast, note

    return make


def _cascade(pair: Pair) -> tuple[Forecast | None, str]:
    """Two levels: the first draft reviews what the second one, or a lookup, proposes; the same acceptance at both."""
    if not pair.drafts:
        return None, "needs a draft model"
    curves = [pair.target, *pair.drafts[:2]]

    def ms_of(curve: CostCurve) -> Callable[[int], float]:
        return lambda count: curve.ms(count, pair.context, pair.rows)

    forwards = [ms_of(curve) for curve in curves]
    plain = 1000 / forwards[0](1)

    def forecast(alpha: float) -> tuple[float, dict[str, Any]]:
        lengths = [(outer, inner) for outer in range(1, min(8, pair.longest) + 1) for inner in range(1, 7)]
        rate, best = max((cascade_tokens_per_s([alpha, alpha], both, forwards), both) for both in lengths)
        return rate / plain, {"draft-length": best[0]}

    below = "the second draft" if len(pair.drafts) > 1 else "a lookup that finds a draft in every step"
    return forecast, f"below the first draft {below}, with the same acceptance at both levels"


FORECASTS: Mapping[str, Callable[[Pair], tuple[Forecast | None, str]]] = {
    "speculative": _speculative,
    "lookup": _lookup,
    "cascade": _cascade,
    "async": _overlapped(0.0, "", tunable=True),
    "duo": _overlapped(HIT, f"if {HIT:.0%} of the rejections were prepared for"),
}


# --- from the drafting that was measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """What forwards cost.

    Attributes:
        curves: by role.
        reading: by role of a draft, so many tokens that it read at once, as a prompt, and the milliseconds of that.
        factors: how much slower target and draft are while the other works too.
        beside_ms: what a strategy does beside a forward that its curve has not counted, by name; in plain decoding too.
    """

    curves: Mapping[str, CostCurve]
    reading: Mapping[str, tuple[float, float]]
    factors: tuple[float, float] = (1.0, 1.0)
    beside_ms: Mapping[str, float] = field(default_factory=dict)

    def read(self, role: str, tokens: float) -> float:
        """Milliseconds in which a draft reads so many tokens at once: by its curve as far as that goes, then in a line
        towards what a prompt took."""
        curve = self.curves[role]
        last, (length, ms) = curve.new_tokens[-1], self.reading.get(role, (0, 0.0))
        if tokens <= last or length <= last:
            return curve.ms(tokens)
        begin = curve.ms(last)
        return begin + max(0.0, ms - begin) * (tokens - last) / (length - last)

    def behind(self, role: str, tokens: float) -> float:
        """Milliseconds that a forward of a draft takes more where it has so many tokens to read beside the latest."""
        return max(0.0, self.read(role, 1 + tokens) - self.read(role, 1))


@dataclass(frozen=True)
class Asked:
    """How the first draft model was asked in some samples, whoever else drafted.

    Attributes:
        samples: in how many of them it ran.
        behind: rounds that asked it again, by the tokens that it had missed: the last one of a draft that was accepted
            whole, and what was made without it.
        reviews: rounds that asked it, by its forwards and the tokens of the level below that it looked at in them.
    """

    samples: int = 0
    behind: Counter[int] = field(default_factory=Counter)
    reviews: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Work:
    """What an arm did in some samples of one row each.

    Attributes:
        drafting: its steps after the prefill.
        samples: how many there were.
        asked: how the first draft model was.
        prompt_tokens: of a prompt, on average.
        level_roles: of a cascade's levels from large to small, None for one without a model.
        follows: roles of drafts that take over what the target has read, and so have nothing to read themselves.
    """

    drafting: Drafting
    samples: int
    asked: Asked
    prompt_tokens: float
    level_roles: Sequence[str | None] = ()
    follows: Collection[str] = ()

    @property
    def context(self) -> float:
        """Tokens in the middle of a sample, on average."""
        return self.prompt_tokens + self.drafting.tokens / self.samples / 2 if self.samples else 0.0


def replay(strategy: str, work: Work, prices: Prices) -> tuple[float, float] | None:
    """Milliseconds of plain decoding for the tokens that were made, and of the steps that made them, by the curves.

    Every step is charged the target's forward over its draft and one token more, every forward of a draft model what it
    looked at; one that does not follow the target also what it had missed, and in every sample that asked it the
    prompt; all of them what is known to be done beside forwards. None for a strategy without a formula, or with a model
    whose costs are not known.
    """
    target, context, drafting = prices.curves.get("target"), work.context, work.drafting
    if target is None or not drafting.steps:
        return None
    plain = drafting.tokens * (target.ms(1, context) + prices.beside_ms.get(BASELINE, 0.0))
    if strategy in ("async", "duo"):
        rate = _overlapped_rate(strategy, work, prices)
        return None if rate is None else (plain, plain / rate)
    drafted = _drafting_ms(strategy, work, prices)
    if drafted is None:
        return None
    steps = sum(count * target.ms(d + 1, context) for (d, _), count in drafting.outcomes.items())
    forwards = drafting.steps + _draft_forwards(strategy, work)
    return plain, steps + drafted + forwards * prices.beside_ms.get(strategy, 0.0)


def conditional_acceptance(drafting: Drafting) -> float | None:
    """Accepted / looked at up to the first wrong one: the probability that a draft token is accepted given that those
    before it were, taken for the same at every position. None where nothing was drafted."""
    rejections = sum(count for (drafted, accepted), count in drafting.outcomes.items() if accepted < drafted)
    looked = drafting.accepted + rejections
    return drafting.accepted / looked if looked else None


def _drafting_ms(strategy: str, work: Work, prices: Prices) -> float | None:
    if strategy in ("autoregressive", "lookup"):
        return 0.0
    if strategy == "speculative":
        return _first_ms("draft", work, prices)
    if strategy not in ("cascade", "auto"):
        return None
    levels = work.drafting.levels
    if len(levels) != len(work.level_roles):
        return None
    total, reviewed = 0.0, _reviewed(work)
    for at, (role, (_, _, forwards, *_), below) in enumerate(zip(work.level_roles, levels, reviewed, strict=True)):
        if role is None or not forwards:
            continue
        if role not in prices.curves:
            return None
        if at == 0:
            total += _first_ms(role, work, prices) or 0.0
            continue
        total += forwards * prices.curves[role].ms(1 + below / forwards, work.context)
        if role not in work.follows:
            total += work.asked.samples * prices.behind(role, work.prompt_tokens)
    return total


def _draft_forwards(strategy: str, work: Work) -> int:
    if strategy == "speculative":
        return work.drafting.drafted
    return sum(forwards for _, _, forwards, *_ in work.drafting.levels)


def _first_ms(role: str, work: Work, prices: Prices) -> float | None:
    """Milliseconds of the first draft model, round by round."""
    curve, asked = prices.curves.get(role), work.asked
    if curve is None:
        return None
    total = 0.0
    if role not in work.follows:
        total += asked.samples * prices.behind(role, work.prompt_tokens)
        total += sum(count * prices.behind(role, tokens) for tokens, count in asked.behind.items())
    for (forwards, reviewed), count in asked.reviews.items():
        total += count * forwards * curve.ms(1 + reviewed / forwards, work.context)
    return total


def _reviewed(work: Work) -> list[float]:
    """How many tokens of the level below each level looked at. What the target got from lower levels than the first is
    taken to be the last one's."""
    levels = work.drafting.levels
    below = [float(drafted) for drafted, *_ in levels[1:]]
    if below:
        below[-1] = max(0.0, below[-1] - max(0, work.drafting.drafted - levels[0][0]))
    return [*below, 0.0] if levels else []


def _overlapped_rate(strategy: str, work: Work, prices: Prices) -> float | None:
    """Times plain decoding, from the policy that is best for the acceptance that was measured."""
    alpha = conditional_acceptance(work.drafting)
    if alpha is None or "draft" not in prices.curves:
        return None
    pair = Pair(prices.curves["target"], [prices.curves["draft"]], round(work.context), 1, True, prices.factors)
    forecast, _ = FORECASTS[strategy](pair)
    return None if forecast is None else forecast(alpha)[0]
