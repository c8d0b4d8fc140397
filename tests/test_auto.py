"""`auto`: what it chooses by which costs, that no change of ways changes a token, and what trying may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from test_verify import ALPHA, chi_square, exact_distribution
from toys import TableModel, decode, requests

from specbench.errors import UsageError
from specbench.models.cost_curve import CostCurve
from specbench.options import build
from specbench.results import choices
from specbench.results import run as runs
from specbench.results.plan import Plan
from specbench.strategies import auto, auto_choice, auto_shadow, practice
from specbench.strategies.auto import Auto, Options, forwards_ms
from specbench.strategies.auto_choice import (
    CASCADE,
    LOOKUP,
    PLAIN,
    REST_TOKENS,
    SPECULATIVE,
    Chooser,
    Offer,
    Told,
)  # fmt: skip
from specbench.strategies.auto_rates import Rates
from specbench.strategies.auto_shadow import Shadow
from specbench.strategies.base import Draft, Drafter, Level, Request, Row, Step
from specbench.strategies.cascade_schedule import SURE, Assumed, Times, tokens_left
from specbench.strategies.practice import answers, assumed_of, extra_ms
from specbench.strategies.sampling import Sampling

VOCAB = 12
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=5),
    "T=0.6 top-p 0.9": Sampling(temperature=0.6, top_p=0.9, seed=5),
    "held back": Sampling(min_new_tokens=9, eos=(3, 4), suppress=(5, 6)),
}
COSTS = {
    "cheap draft": {"target": 10.0, "draft": 1.0},
    "dear draft": {"target": 10.0, "draft": 12.0},
    "steep target": {"target": 10.0, "draft": 1.0, "slope": 0.9},
}


def models(vocab: int = VOCAB, twist: float = 1.0, context_length: int = 512) -> dict[str, TableModel]:
    made = {
        "target": TableModel(vocab, seed=1, context_length=context_length),
        "draft": TableModel(vocab, seed=1, twist=twist, context_length=context_length),
    }
    made["draft"].name = "org/small"
    return made


def curve(ms: float, slope: float = 0.05) -> CostCurve:
    """A forward of one token takes `ms`, every further one `slope` of it more; rows cost nothing."""
    times = ms * (1 + slope * np.array([0.0, 127.0]))
    return CostCurve((1, 128), (64,), (1, 8), np.repeat(times[:, None, None], 2, axis=2))


def make(
    costs: dict[str, float] | None = None, given: dict[str, Any] | None = None, alpha: float = 0.75, **which
) -> Auto:
    """A strategy that has been prepared with these costs and this acceptance; without costs, one that has not."""
    strategy = Auto(models(**which), build(Options, given or {}, "auto"))
    if costs:
        slope = costs.get("slope", 0.05)
        strategy.curves = {"target": curve(costs["target"], slope), "draft": curve(costs["draft"], 0.02)}
        strategy.assumed = Assumed(alpha)
    return strategy


def plain(asked, sampling, vocab: int = VOCAB):
    return toys.plain(asked, sampling, vocab)


def steps_of(strategy: Any, request: Request, sampling: Sampling = Sampling()) -> list[Step]:  # noqa: B008 - frozen
    strategy.reset()
    steps, emitted, request.done = [], 0, False
    for step in strategy.generate([request], sampling):
        steps.append(step)
        emitted += len(step.tokens)
        request.done = emitted >= request.max_new_tokens
    return steps


def spent_ms(strategy: Auto, steps: list[Step]) -> float:
    """What the steps after the prefill take by the curves, reading of the prompt by the draft included."""
    draft = strategy.curves["draft"]
    total, read = 0.0, False
    for step in steps[1:]:
        total += strategy.curves["target"].ms(step.drafted + 1)
        total += forwards_ms(step.levels, [draft, None]) if step.levels else 0.0
        if not read and any(level.forwards for level in step.levels):
            total, read = total + draft.ms(12) - draft.ms(1), True
    return total


# Exactness


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("batch", [1, 5])
def test_tokens_equal_plain_decodings_whatever_is_chosen(costs, how, batch):
    asked = requests(8, VOCAB, limit=40, seed=3)
    for twist in (0.3, 50.0):
        made = decode(make(COSTS[costs], twist=twist), asked, SAMPLINGS[how], batch)
        assert made == plain(asked, SAMPLINGS[how])


@pytest.fixture
def restless(monkeypatch):
    """Another way in every round; `used` counts them."""
    used = dict.fromkeys(auto_choice.CANDIDATES, 0)

    def choose(self: Chooser, row: Row, limit: int, rows: int) -> Offer:
        state = self.states.setdefault(row.index, auto_choice.State(auto_choice.Share(self.alpha)))
        names = [name for name in auto_choice.CANDIDATES if name == PLAIN or name in self.names]
        name = names[(sum(state.rounds.values()) + row.index) % len(names)]
        used[name] += 1
        return Offer(name, 0 if name == PLAIN else 5, 0.1, 0.1)

    monkeypatch.setattr(Chooser, "choose", choose)
    return used


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_change_of_ways_in_every_round_changes_no_token(restless, how, batch):
    asked = requests(15, VOCAB, limit=40, seed=4)
    assert decode(make(COSTS["cheap draft"]), asked, SAMPLINGS[how], batch) == plain(asked, SAMPLINGS[how])
    assert all(restless.values())


@pytest.mark.parametrize("changing", [False, True], ids=["as it chooses", "another way in every round"])
def test_rejection_keeps_the_targets_distribution_while_ways_change(changing, request):
    """1,000 prompts' worth of three tokens on a vocabulary of five, chi-square over all 125 outcomes, at 1e-4 each."""
    if changing:
        request.getfixturevalue("restless")
    strategy = make(COSTS["cheap draft"], vocab=5, twist=1.5)
    for settings in (dict(temperature=1.0), dict(temperature=0.7, top_p=0.9)):
        sampling, prompt = Sampling(**settings, verify="rejection", seed=11), [1, 2, 3, 1, 2]
        counts: dict[tuple, int] = {}
        for tokens in decode(strategy, [Request(key, prompt, 5) for key in range(1000)], sampling, batch=50):
            counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
        assert chi_square(counts, exact_distribution(strategy.target, prompt, sampling, 3), 1000) > ALPHA


def test_steps_are_what_the_contract_wants_in_every_way(restless):
    """One forward of the target per step, no token of the context computed twice, and levels that add up."""
    strategy = make(COSTS["cheap draft"], twist=0.3)
    for request in requests(10, VOCAB, limit=40, seed=5):
        strategy.target.forwards.clear()  # type: ignore[attr-defined]
        steps = steps_of(strategy, request)
        assert (len(steps[0].tokens), steps[0].drafted, steps[0].levels) == (1, 0, ())
        for step, new in zip(steps[1:], strategy.target.forwards[1:], strict=True):  # type: ignore[attr-defined]
            assert new == [step.drafted + 1]
            assert len(step.tokens) == step.accepted + 1
            assert not step.levels or len(step.levels) == 2
            assert sum(level.drafted for level in step.levels) >= step.drafted
            assert sum(level.accepted for level in step.levels) >= step.accepted


# What is chosen


def test_a_cheap_draft_that_is_right_is_taken_and_beats_plain_decoding():
    strategy = make(COSTS["cheap draft"], twist=0.3)
    (request,) = requests(1, VOCAB, limit=200, seed=6)
    steps = steps_of(strategy, request)
    assert strategy.facts["choice"] == CASCADE
    assert spent_ms(strategy, steps) < 0.6 * 10 * 199
    assert strategy.facts["alpha"] > 0.75
    assert "cascade" in strategy.facts["why"]


def test_a_draft_that_costs_more_than_the_target_is_never_asked():
    strategy = make(COSTS["dear draft"], twist=0.0)
    (request,) = requests(1, VOCAB, limit=100, seed=6)
    steps_of(strategy, request)
    assert strategy.models["draft"].forwards == []  # type: ignore[attr-defined]
    assert strategy.facts["cascade_rounds"] == strategy.facts["speculative_rounds"] == 0


def test_speculative_alone_drafts_the_length_that_is_best_for_the_acceptance():
    strategy = make(COSTS["cheap draft"], {"candidates": "speculative"}, twist=0.0, alpha=0.5)
    (request,) = requests(1, VOCAB, limit=200, seed=6)
    lengths = [step.drafted for step in steps_of(strategy, request)[1:]]
    assert strategy.facts["choice"] == SPECULATIVE
    assert lengths[0] < 5  # best at one half
    assert max(lengths) > 8  # best where nearly everything is right


def test_without_a_draft_model_it_chooses_between_lookup_and_plain_decoding():
    strategy = Auto({"target": TableModel(4, seed=1)}, Options())
    strategy.curves = {"target": curve(10.0)}
    (request,) = requests(1, 4, limit=120, seed=7)  # four tokens: the greedy text soon goes round
    steps = steps_of(strategy, request)
    assert strategy.facts["choice"] == LOOKUP
    assert len(steps) < 60
    assert "levels" not in strategy.facts
    assert all(step.levels == () for step in steps)


def test_a_draft_model_is_not_made_to_read_a_prompt_for_a_short_answer():
    """Reading 12 tokens takes as long as 24 forwards of the target here, which 16 tokens cannot bring in."""
    strategy = make(COSTS["cheap draft"], {"candidates": "speculative"}, twist=0.0)
    strategy.curves["draft"] = curve(1.0, 20.0)
    short, long = Request(1, list(range(12)), 16), Request(1, list(range(12)), 400)
    steps_of(strategy, short)
    assert strategy.models["draft"].forwards == []  # type: ignore[attr-defined]
    steps_of(strategy, long)
    assert strategy.models["draft"].forwards  # type: ignore[attr-defined]


@pytest.mark.parametrize("alpha", [0.4, 0.9])
@pytest.mark.parametrize("twist", [0.3, 3.0, 50.0])
@pytest.mark.parametrize("costs", COSTS)
def test_it_is_never_much_slower_than_plain_decoding_by_its_own_costs(costs, twist, alpha):
    """Whatever was assumed of the draft and whatever it turns out to be: at least 0.97 of plain decoding's speed over
    a handful of prompts."""
    strategy, made, spent = make(COSTS[costs], twist=twist, alpha=alpha), 0, 0.0
    for request in requests(6, VOCAB, limit=250, seed=8):
        steps = steps_of(strategy, request, Sampling(temperature=1.0, seed=3))
        made += sum(len(step.tokens) for step in steps[1:])
        spent += spent_ms(strategy, steps)
    assert 10 * made / spent > 0.97


def test_it_keeps_up_with_the_best_single_way():
    """By its own costs: at least 0.95 of speculative at its best length, and of lookup, on the same texts."""
    asked = requests(6, VOCAB, limit=250, seed=9)

    def speed(candidates: str, twist: float) -> float:
        strategy, made, spent = make(COSTS["cheap draft"], {"candidates": candidates}, twist=twist), 0, 0.0
        for request in asked:
            steps = steps_of(strategy, request)
            made, spent = made + sum(len(step.tokens) for step in steps[1:]), spent + spent_ms(strategy, steps)
        return made / spent

    for twist in (0.0, 0.3, 3.0):
        every = speed(",".join(auto_choice.CANDIDATES), twist)
        assert every > 0.95 * max(speed(SPECULATIVE, twist), speed(LOOKUP, twist), speed(CASCADE, twist)), twist


# Drift


def chooser(
    names=auto_choice.CANDIDATES, alpha: float = 0.8, budget: float = 0.02, draft_ms: float = 1.0, **extra: float
) -> Chooser:
    rates = Rates(Times(curve(10.0), 16), Times(curve(draft_ms, 0.02), 16), 16, extra)
    return Chooser(rates, names, alpha, budget)


def played(made: Chooser, row: Row, rounds: int, right: float, token: int = 0) -> list[str]:
    """Rounds in which so large a part of the draft's tokens is right, evenly spread; what was chosen in each."""
    chosen, due = [], 0.0
    for number in range(rounds):
        offer = made.choose(row, 16, 1)
        chosen.append(offer.name)
        drafted = offer.length if offer.name in auto_choice.WITH_DRAFT else 0
        accepted = 0
        while accepted < drafted:
            due += right
            if due < 1:
                break
            due, accepted = due - 1, accepted + 1
        row.tokens.extend([token + number % 7 + position for position in range(accepted + 1)])
        judged = min(accepted + 1, drafted)
        made.observe(row, offer, Told(accepted + 1, drafted, 1.0 * drafted, judged, accepted, drafted > 0), 1)
    return chosen


def test_when_the_draft_goes_wrong_it_is_left_and_when_it_comes_right_it_is_found_again():
    made, row = chooser((PLAIN, SPECULATIVE)), Row(0, Request(1, [1, 2, 3], 4000))
    assert set(played(made, row, 30, 0.9)) == {SPECULATIVE}
    gone = played(made, row, 60, 0.0)
    left = gone.index(PLAIN)
    assert left < 55  # some thirty tokens are remembered, and a wrong draft is short by then
    assert set(gone[left : left + REST_TOKENS - 1]) == {PLAIN}
    assert played(made, row, 400, 0.95)[-1] == SPECULATIVE
    assert made.states[0].switches >= 2


def test_a_cascade_that_takes_longer_beside_its_forwards_is_still_begun_with():
    """Speculative rounds are among its own; they have to promise 15 % more. What it delivers decides later."""
    ratios = []
    for extra in (0.0, 0.2, 0.4, 0.6, 1.0, 2.0, 4.0):
        made, row = chooser((PLAIN, SPECULATIVE, CASCADE), alpha=0.9, cascade=extra), Row(0, Request(1, [1, 2, 3], 400))
        first = made.choose(row, 16, 1).name
        rates = {offer.name: offer.rate for offer in made.states[0].offers}
        ratios.append(rates[SPECULATIVE] / rates[CASCADE])
        assert first == (CASCADE if ratios[-1] <= auto_choice.CONTAINED else SPECULATIVE)
    assert any(auto_choice.BETTER < ratio <= auto_choice.CONTAINED for ratio in ratios)
    assert max(ratios) > auto_choice.CONTAINED


def test_it_does_not_go_to_and_fro_where_two_ways_are_as_good():
    """Half of the tokens right, at costs where that is hardly worth it: at most a few changes in 300 rounds."""
    made, row = chooser((PLAIN, SPECULATIVE), alpha=0.3, draft_ms=3.5), Row(0, Request(1, [1, 2, 3], 4000))
    played(made, row, 300, 0.35)
    assert made.states[0].switches <= 4


def test_a_row_that_has_lost_its_budget_leaves_at_once():
    """A draft token costs half a target's here, and not one is right."""

    def first_rounds(budget: float) -> list[str]:
        made = chooser((PLAIN, SPECULATIVE), alpha=0.9, budget=budget, draft_ms=5.0)
        row = Row(0, Request(1, [1, 2, 3], 60))
        return played(made, row, auto_choice.FEWEST_ROUNDS, 0.0)

    assert first_rounds(0.02)[0] == SPECULATIVE
    assert first_rounds(0.02)[-1] == PLAIN
    assert set(first_rounds(1.0)) == {SPECULATIVE}


def test_a_cascade_that_delivers_less_than_it_promised_is_left_for_speculative():
    made, row = chooser((PLAIN, CASCADE, SPECULATIVE)), Row(0, Request(1, [1, 2, 3], 4000))
    names = []
    for _ in range(60):
        offer = made.choose(row, 16, 1)
        names.append(offer.name)
        row.tokens.extend([1, 2])
        # The draft's tokens are right, yet the cascade makes little of them.
        told = Told(2, 16, 60.0, 8, 8, True) if offer.name == CASCADE else Told(9, 8, 8.0, 8, 8, True)
        made.observe(row, offer, told._replace(made=2), 1)
    assert names[0] == CASCADE
    assert SPECULATIVE in names


# Lookup, played through


def test_the_shadow_makes_the_rounds_that_lookup_makes(monkeypatch):
    """The same text, decoded by lookup and followed by a shadow: as many rounds, tokens and milliseconds."""
    monkeypatch.setattr(auto_shadow, "KEPT", 1.0)

    def choose(self: Chooser, row: Row, limit: int, rows: int) -> Offer:
        self.states.setdefault(row.index, auto_choice.State(auto_choice.Share(self.alpha)))
        return Offer(LOOKUP, 16, 0.1)

    monkeypatch.setattr(Chooser, "choose", choose)
    times = Times(curve(10.0), 16).of(1)
    for request in requests(20, 4, limit=80, seed=10):
        strategy = Auto({"target": TableModel(4, seed=1)}, Options(candidates=(LOOKUP,)))
        strategy.curves = {"target": curve(10.0)}
        lookup = steps_of(strategy, request)
        assert strategy.facts["lookup_rounds"] == len(lookup) - 1
        row = Row(0, Request(request.key, request.ids, 80))
        row.tokens.extend(lookup[0].tokens)
        shadow, told = Shadow(row), list(lookup[0].tokens)
        for step in lookup[1:]:
            for token in step.tokens:  # however the tokens come
                row.tokens.extend([token])
                told.append(token)
                shadow.follow(row.tokens.view(), times)
        assert shadow.rounds == len(lookup) - 1
        assert shadow.drafts == sum(step.drafted > 0 for step in lookup)
        assert shadow.tokens == len(told) - 1
        assert shadow.ms == pytest.approx(sum(times[step.drafted + 1] for step in lookup[1:]))


def test_lookup_drafts_no_further_than_a_longer_review_pays():
    """Where each token of a review costs nearly a forward, a wrong guess is dear: hardly anything is drafted."""
    asked = requests(6, 64, limit=60, seed=15)

    def drafted(slope: float) -> int:
        strategy = Auto({"target": TableModel(64, seed=1)}, Options(candidates=(LOOKUP,)))
        strategy.curves = {"target": curve(10.0, slope)}
        sampling = Sampling(temperature=1.0, seed=2)
        return sum(step.drafted for request in asked for step in steps_of(strategy, request, sampling))

    assert drafted(0.9) < 0.2 * drafted(0.02)


def test_a_text_that_repeats_itself_makes_lookups_offer_and_noise_does_not():
    made = chooser((PLAIN, LOOKUP))
    loop, noise = Row(0, Request(1, [1, 2, 3], 400)), Row(1, Request(2, [1, 2, 3], 400))
    random = np.random.default_rng(0)
    for number in range(60):
        for row, token in ((loop, 1 + number % 3), (noise, int(random.integers(1000)))):
            offer = made.choose(row, 16, 1)
            row.tokens.extend([token])
            made.observe(row, offer, Told(1), 1)
    offers = {row.index: {o.name: o.rate for o in made.offers(made.states[row.index], row, 1)} for row in (loop, noise)}
    assert offers[0][LOOKUP] > 3 * offers[0][PLAIN]
    assert offers[1][LOOKUP] == pytest.approx(offers[1][PLAIN], rel=0.02)


# Calibration

TEXTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_agreement_is_the_share_of_the_targets_tokens_that_are_the_drafts_first_choice():
    made = models(twist=0.0)
    given = answers(made["target"], TEXTS, 512)
    assert [answer.asked for answer in given] == [3, 2, 4]
    seen = 3 * practice.TOKENS
    assert assumed_of(made["target"], made["draft"], given).alpha == pytest.approx((8 * 0.75 + seen) / (8 + seen))
    other = models(twist=50.0)["draft"]
    assert assumed_of(made["target"], other, given).alpha < 0.6
    assert not made["target"].cache
    assert not made["draft"].cache


def test_questions_and_answers_count_the_same_and_what_a_template_wrote_does_not():
    """A draft that is right on the answers alone: 12 tokens each, against 31 of a question between its margins."""

    class Says(TableModel):
        def __init__(self, right_from: int) -> None:
            super().__init__(VOCAB)
            self.right_from = right_from

        def advance(self, contexts, last=1, rows=None):
            logits = torch.zeros(last, VOCAB)
            logits[: self.right_from, 2] = logits[self.right_from :, 1] = 2.0
            return logits

    given = [practice.Answer(np.arange(60), 48)] * 4
    found = assumed_of(Says(0), Says(47), given)
    assert found.alpha == pytest.approx((8 * 0.75 + 48 * (0 + 1)) / (8 + 2 * 48))
    # All of them at a probability of 0.40: right in 48 of 172 cases, but no less than what is less sure.
    assert found.sure == pytest.approx((0.35, 0.35, *SURE[2:]))


def test_answers_are_the_targets_own_greedy_ones_and_fit_a_short_context():
    made = models(context_length=15)
    (first, *_) = answers(made["target"], TEXTS, 15)
    assert first.ids.tolist()[3:] == plain([Request(1, [1, 2, 3], practice.TOKENS)], Sampling())[0]
    (cut,) = answers(made["target"], [list(range(10))], 15)
    assert (cut.ids.tolist()[: cut.asked], len(cut.ids)) == ([7, 8, 9], 15)


def test_what_drafting_takes_beside_its_forwards_is_told_per_forward(monkeypatch):
    """Rounds of four forwards take 10 ms, and to ask for a forward takes half a millisecond, which curves know."""
    made = models()

    class Asking(Drafter):
        def propose(self, rows, limits):
            for _ in range(limits[0]):
                made["draft"].advance([row.tokens.view() for row in rows])
            return [Draft(())]

    def timed(function, *args):
        return function(*args), 10_000_000 if args else 500_000

    monkeypatch.setattr(practice, "timed", timed)
    (answer, *_) = answers(made["target"], TEXTS, 512)
    assert extra_ms(Asking(), [made["draft"]], answer) == pytest.approx(2.0, rel=1e-5)
    assert made["draft"].trace is None
    assert not made["draft"].cache


def test_a_cascade_that_takes_long_beside_its_forwards_is_not_begun_with():
    """A little is made up for by what the formula does not know of a cascade."""
    row = Row(0, Request(1, [1, 2, 3], 400))
    chosen = [chooser(cascade=ms).choose(row, 16, 1).name for ms in (0.0, 0.05, 9.0)]
    assert chosen == [CASCADE, CASCADE, SPECULATIVE]


def test_preparing_measures_costs_and_agreement_and_says_how_long_it_took():
    strategy = Auto(models(twist=0.0), Options())
    strategy.prepare(2, 64)
    assert set(strategy.curves) == {"target", "draft"}
    assert strategy.assumed.alpha == 0.75  # of any pair, until it has practised
    costs_ms = strategy.calibration_ms
    strategy.practise(TEXTS)
    seen = len(TEXTS) * practice.TOKENS
    assert strategy.assumed.alpha == pytest.approx((8 * 0.75 + seen) / (8 + seen))
    assert set(strategy.extra_ms) == {CASCADE, SPECULATIVE}
    asked = requests(3, VOCAB, limit=24, seed=11)
    assert decode(strategy, asked, Sampling()) == plain(asked, Sampling())
    assert strategy.facts["calibration_ms"] > costs_ms > 0
    assert strategy.facts["alpha_assumed"] == round(strategy.assumed.alpha, 4)


def test_a_draft_that_is_not_among_the_candidates_is_not_measured(monkeypatch):
    monkeypatch.setattr(auto, "practised", lambda *models: pytest.fail("it was"))
    strategy = Auto(models(), build(Options, {"candidates": "autoregressive,lookup"}, "auto"))
    strategy.prepare(1, 64)
    strategy.practise(TEXTS)
    steps_of(strategy, Request(1, [1, 2, 3], 20))
    assert set(strategy.curves) == {"target"}
    assert strategy.models["draft"].forwards == []  # type: ignore[attr-defined]


def test_without_costs_it_does_one_thing_and_says_so():
    strategy = make()
    steps_of(strategy, Request(1, [1, 2, 3], 20))
    assert strategy.facts == {"choice": SPECULATIVE, "why": "no costs were measured"}
    alone = Auto({"target": TableModel(4, seed=1)}, Options())
    steps_of(alone, Request(1, [1, 2, 3], 20))
    assert alone.facts["choice"] == LOOKUP


def test_a_draft_in_a_worker_has_one_way_to_it(monkeypatch):
    """A worker holds one conversation at a time, so it cannot serve two drafters in turns."""
    monkeypatch.setattr(auto, "RemoteModel", TableModel)
    assert Auto(models(), Options()).names == [PLAIN, LOOKUP, CASCADE]
    assert Auto(models(), Options(candidates=(SPECULATIVE,))).names == [SPECULATIVE]


def test_the_cascade_inside_begins_with_the_agreement_that_was_measured():
    drafter = make(COSTS["cheap draft"], alpha=0.93)._drafter(CASCADE, Sampling())
    row = Row(0, Request(1, [1, 2, 3], 400))
    feed = drafter.feed  # type: ignore[attr-defined]
    assert feed._state(row).alpha.value == pytest.approx(0.93)


def test_nearly_all_of_a_short_limit_is_expected_and_never_more_than_a_typical_answer():
    def left(limit: int) -> float:
        return tokens_left(Row(0, Request(1, [1], limit)))

    assert left(16) == pytest.approx(15.4, abs=0.1)
    assert 0.8 * 64 < left(64) < 64
    assert left(100_000) == pytest.approx(200)


# Records


def test_facts_tell_what_was_chosen_and_what_trying_cost_and_are_forgotten():
    strategy = make(COSTS["cheap draft"], twist=0.3)
    (request,) = requests(1, VOCAB, limit=100, seed=12)
    steps = steps_of(strategy, request)
    facts = strategy.facts
    assert sum(facts[f"{name}_rounds"] for name in auto_choice.CANDIDATES) == len(steps) - 1
    assert 0 < facts["trial_rounds"] <= auto_choice.TRIAL_ROUNDS
    assert facts["trial_tokens"] >= facts["trial_rounds"]
    assert facts["levels"] == "draft,ngram"
    strategy.reset()
    assert strategy.facts == {}


def test_every_row_of_a_batch_has_a_state_of_its_own_and_a_new_request_a_new_one():
    strategy = make(COSTS["cheap draft"], twist=0.3)
    asked = requests(3, VOCAB, limit=30, seed=13)
    later = requests(2, VOCAB, limit=30, seed=14)
    strategy.reset()
    ids: dict[int, list[int]] = {}
    rows, queue = list(asked), list(later)
    for step in strategy.generate(rows, Sampling()):
        request = rows[step.row]
        ids.setdefault(request.key, []).extend(step.tokens)
        if len(ids[request.key]) >= request.max_new_tokens:
            request.done = True
            if queue:
                rows[step.row] = queue.pop(0)
    everyone = [*asked, *later]
    for request in everyone:
        request.done = False
    assert [ids[request.key][:30] for request in everyone] == plain(everyone, Sampling())
    assert strategy.facts["trial_rounds"] <= 5 * auto_choice.TRIAL_ROUNDS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"candidates": "autoregressive,duo"}, 'unknown strategy in auto.candidates: "duo"'),
        ({"draft_length": 0}, "at least 1 token"),
        ({"budget": 1.5}, "from 0 to 1"),
    ],
    ids=str,
)
def test_options_that_cannot_be(given, words):
    with pytest.raises(UsageError, match=words):
        build(Options, given, 'strategy "auto"')


def test_levels_cost_their_forwards_over_what_was_reviewed():
    levels = [Level(6, 4, 3), Level(6, 2)]
    assert forwards_ms(levels, [curve(10.0, 0.1), None]) == pytest.approx(3 * 10 * (1 + 0.1 * 2))
    assert forwards_ms([Level(0, 0), Level(4, 2)], [curve(10.0), None]) == 0


def test_a_run_says_what_was_chosen_and_what_it_cost(tmp_path: Path):
    """On the tiny models, for real: the same tokens, a record with its facts, a line under the table."""
    plan = Plan(
        strategy=("auto", "cascade"), target="tiny", draft="tiny-draft", task=("bundled",), limit=2, max_new_tokens=24,
        threads=1, trace=1, warmup=0, out=tmp_path / "run",
    )  # fmt: skip
    result = runs.run(plan)
    assert result.failures == []
    (exactness,) = [row.exactness for row in result.summary.rows if row.arm == "auto"]
    assert exactness
    assert exactness["exact"] == exactness["compared"] > 0
    (note,) = [note for note in result.summary.notes if "auto: chose" in note]
    assert "samples; " in note
    assert "calibrated for" in note


def test_choices_are_counted_and_trials_are_part_of_the_decode_time():
    from synthetic import MS, sample

    facts = {"choice": LOOKUP, "switches": 1, "trial_lost_ms": 28.0, "calibration_ms": 1500.0}
    made = [sample("auto", 0, tokens=8, facts=facts), sample("auto", 1, tokens=8, facts={**facts, "choice": CASCADE})]
    assert made[0].e2e_ns - made[0].ttft_ns == 140 * MS
    text = choices.told("toy", "auto", made)
    assert text == (
        "toy, auto: chose lookup in 1, cascade in 1 of 2 samples; changed its way 2 times within them; calibrated for "
        "1.5 s before the first prompt, which is in no speed; its first rounds on a prompt cost 20 % of its decode "
        "time against plain decoding, by the cost curves"
    )
    assert choices.told("toy", "lookup", [sample("lookup", 0)]) is None
