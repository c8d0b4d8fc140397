"""Cascades: exact in every shape, counted level by level, reviewed in blocks, and scheduled by what pays."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from test_verify import ALPHA, chi_square, exact_distribution
from toys import TableModel, TickingClock, decode, requests

from specbench.errors import UsageError
from specbench.hardware.clock import Drain
from specbench.models.cost_curve import CostCurve
from specbench.options import build
from specbench.results.measure import Ending, measure
from specbench.strategies import cascade_schedule as schedule
from specbench.strategies.base import Draft, Level, Request, Row, Step
from specbench.strategies.cascade import Cascade, Options, choose_levels, settle
from specbench.strategies.cascade_levels import Accounts, CascadeDrafter, Feed, Stages
from specbench.strategies.proposal import Proposal, ahead_of, joined
from specbench.strategies.sampling import Sampling
from specbench.strategies.statistical import AGREE, DIFFER, SINGLE, MaxGram, Ngram, leftmost, read_bigrams
from specbench.strategies.verify import Verifier, accept_probability, lenient_proposal, residual

VOCAB = 12
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=5),
    "T=0.6 top-p 0.9": Sampling(temperature=0.6, top_p=0.9, seed=5),
    "penalties at T=1": Sampling(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7, seed=2),
    "held back": Sampling(min_new_tokens=9, eos=(3, 4), suppress=(5, 6)),
}
SHAPES = {
    "two levels": dict(),
    "three levels": dict(levels="draft,draft:2,ngram", draft_length=6),
    "no statistical level": dict(levels="draft,draft:2", draft_length=5),
    "K": dict(levels="draft,draft:2,ngram", k="3,5,8;0,2,4;0,0,3"),
    "lenient": dict(lenience=3),
    "published": dict(levels="draft,draft:2,mag", preset="ms", faithful=True),
    "published, two levels": dict(levels="draft,mag", preset="llama", faithful=True),
}


def models(vocab: int = VOCAB, drafts: int = 2, twist: float = 1.0, **how) -> dict[str, TableModel]:
    made = {"target": TableModel(vocab, seed=1, **how)}
    for number in range(1, drafts + 1):
        made["draft" if number == 1 else f"draft{number}"] = TableModel(vocab, seed=1, twist=twist * number, **how)
        made["draft" if number == 1 else f"draft{number}"].name = f"org/small-{number}b"
    return made


def curve(ms: float, slope: float = 0.05) -> CostCurve:
    """A forward of one token takes `ms`, every further one `slope` of it more; 8 rows cost as one."""
    times = ms * (1 + slope * np.array([0.0, 15.0]))
    return CostCurve((1, 16), (64,), (1, 8), np.repeat(times[:, None, None], 2, axis=2))


def make(given: dict | None = None, costs: dict[str, float] | None = None, **which) -> Cascade:
    """A cascade; with `costs`, milliseconds per model, on the automatic schedule."""
    strategy = Cascade(models(**which), build(Options, given or {}, "cascade"))
    if costs:
        curves = {role: curve(ms) for role, ms in costs.items()}
        strategy.settings = dataclasses.replace(strategy.settings, curves=curves)
    return strategy


def plain(asked, sampling):
    return toys.plain(asked, sampling, VOCAB)


def run(strategy: Cascade, request: Request, sampling: Sampling = Sampling()) -> list[Step]:  # noqa: B008 - frozen
    strategy.reset()
    steps, emitted, request.done = [], 0, False
    for step in strategy.generate([request], sampling):
        steps.append(step)
        emitted += len(step.tokens)
        request.done = emitted >= request.max_new_tokens
    return steps


# Exactness


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 7])
def test_tokens_equal_plain_decodings_in_every_shape(shape, how, batch):
    asked = requests(8, VOCAB, limit=24, seed=3)
    assert decode(make(SHAPES[shape]), asked, SAMPLINGS[how], batch) == plain(asked, SAMPLINGS[how])


AUTO = {
    "cheap draft": {"target": 10.0, "draft": 2.0, "draft2": 0.5},
    "dear draft": {"target": 10.0, "draft": 30.0, "draft2": 30.0},
    "cheap at the bottom": {"target": 10.0, "draft": 9.0, "draft2": 0.1},
}


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("costs", AUTO)
@pytest.mark.parametrize("batch", [1, 7])
def test_tokens_equal_plain_decodings_whatever_the_schedule_decides(costs, how, batch):
    asked = requests(8, VOCAB, limit=40, seed=4)
    assert decode(make(costs=AUTO[costs]), asked, SAMPLINGS[how], batch) == plain(asked, SAMPLINGS[how])


def test_a_short_context_of_a_draft_ends_its_drafts_and_nothing_else():
    asked = [Request(r.key, r.ids, 40) for r in requests(20, VOCAB, seed=5)]
    for given, costs in (
        (dict(), None),
        (SHAPES["K"], None),
        (SHAPES["published"], None),
        (dict(), AUTO["cheap draft"]),
    ):
        strategy = make(given, costs)
        strategy.models["draft"].context_length = 20
        strategy.models["draft2"].context_length = 17
        assert decode(strategy, asked, Sampling(), batch=5) == plain(asked, Sampling())


def test_the_target_is_asked_once_per_step_and_never_for_more_than_it_may_emit():
    for given, costs in (
        (dict(), None),
        (SHAPES["published"], None),
        (SHAPES["K"], None),
        (dict(), AUTO["cheap draft"]),
    ):
        for request in requests(20, VOCAB, limit=25, seed=6):
            strategy = make(given, costs)
            steps = run(strategy, request)
            emitted = 0
            for step, new in zip(steps, strategy.target.forwards, strict=True):  # type: ignore[attr-defined]
                assert step.drafted <= max(0, 25 - emitted - 1)
                assert emitted == 0 or new == [step.drafted + 1]
                emitted += len(step.tokens)


def test_a_lenient_draft_is_what_its_distribution_says():
    """q' of appendix A5: by adding up every way in which a token can come out, and against q' = p where l = 1."""
    generator = torch.Generator().manual_seed(0)
    for lenience in (1.0, 1.5, 2.0, 3.0, 5.0):
        for _ in range(20):
            p, q = torch.randn(2, 6, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
            for certain in (None, 2):
                drawn = q if certain is None else torch.eye(6, dtype=torch.float64)[certain]
                out = torch.zeros(6, dtype=torch.float64)
                for x in range(6):
                    given = q if certain is None else None
                    if drawn[x] == 0:
                        continue
                    accept = accept_probability(p, given, x, lenience)
                    rest = residual(p, given, x, lenience)
                    out[x] += drawn[x] * accept
                    out += drawn[x] * (1 - accept) * rest / rest.sum()
                said = lenient_proposal(p, q if certain is None else None, certain or 0, lenience)
                assert torch.allclose(out, said, atol=1e-12)
                assert lenience > 1 or torch.allclose(said, p, atol=1e-12)


LEVELS = {
    "one": dict(levels="draft", draft_length=3),
    "two, statistical": dict(levels="draft,ngram", draft_length=3, min_match=1, schedule="static"),
    "two, neural": dict(levels="draft,draft:2", draft_length=3),
    "three": dict(levels="draft,draft:2,ngram", draft_length=4, min_match=1, schedule="static"),
    "three, horizontal": dict(levels="draft,draft:2,ngram", k="1,2,3;0,1,2;0,0,2", min_match=1),
}


def distribution_of(strategy: Cascade, sampling: Sampling, draws: int = 1000) -> float:
    """p-value of the first three tokens against the target's own distribution, over all outcomes."""
    prompt = [1, 2, 3, 1, 2]
    counts: dict[tuple, int] = {}
    # More tokens are asked for than are looked at: there is room for whole drafts where the three are made.
    for tokens in decode(strategy, [Request(key, prompt, 5) for key in range(draws)], sampling, batch=50):
        counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
    return chi_square(counts, exact_distribution(strategy.target, prompt, sampling, 3), draws)  # type: ignore[arg-type]


@pytest.mark.parametrize("lenience", [1.0, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("shape", LEVELS)
def test_rejection_keeps_the_targets_distribution_through_the_levels(shape, lenience):
    """1,000 prompts' worth of three tokens on a vocabulary of five, chi-square over all 125 outcomes.

    False-alarm odds: with the one below 26 tests at 1e-4, so 0.26 % in all, met once since the seeds are fixed.
    """
    strategy = make(LEVELS[shape] | {"lenience": lenience}, vocab=5, twist=1.5)
    for settings in (dict(temperature=1.0), dict(temperature=0.7, top_p=0.9))[: 2 if lenience == 3 else 1]:
        assert distribution_of(strategy, Sampling(**settings, verify="rejection", seed=11)) > ALPHA


def test_rejection_keeps_the_distribution_on_the_automatic_schedule():
    strategy = make(dict(lenience=2), {"target": 10.0, "draft": 1.0, "draft2": 0.2}, vocab=5, twist=1.5)
    assert distribution_of(strategy, Sampling(temperature=1.0, verify="rejection", seed=11)) > ALPHA


def test_the_distribution_test_would_see_a_lenient_draft_passed_off_as_its_reviewers_own(monkeypatch):
    """The bias of using p instead of q' one level up (A5): total variation of 0.1 and more."""
    monkeypatch.setattr("specbench.strategies.cascade_levels.lenient_proposal", lambda p, q, token, lenience: p)
    strategy = make(LEVELS["two, neural"] | {"lenience": 5.0}, vocab=5, twist=1.5)
    assert distribution_of(strategy, Sampling(temperature=1.0, verify="rejection", seed=11), 4000) < ALPHA


# Reviews instead of tokens


class Oracle(Feed):
    """Knows what the model that reviews it will say, `right` tokens of it, and then errs."""

    def __init__(self, model: TableModel, right: int) -> None:
        self.model, self.right, self.heard = model, right, []

    def propose(self, rows, limits):
        made = []
        for row, limit in zip(rows, limits, strict=True):
            tokens: list[int] = []
            while len(tokens) < limit:
                before = np.concatenate([[0], row.tokens.view(tokens)])
                best = int(self.model.table[before[-2], before[-1]].argmax())
                tokens.append(best if len(tokens) < self.right else (best + 1) % self.model.vocab_size)
            made.append(Proposal(tokens, None, (), (1,) * len(tokens)))
        return made

    def learn(self, row, proposal, said):
        self.heard.append((len(proposal.tokens), len(said)))


@pytest.mark.parametrize(("right", "forwards"), [(99, 1), (3, 3), (0, 12)])
def test_no_model_drafts_token_by_token_while_a_level_below_it_is_right(right, forwards):
    """12 tokens are drafted by reviews: one if all is right, one per 4 tokens if three are, 12 only if nothing is."""
    model = TableModel(VOCAB, seed=1)
    oracle, accounts = Oracle(model, right), Accounts(2)
    drafter = CascadeDrafter(model, oracle, Verifier(Sampling()), accounts)
    row = Row(0, Request(1, [1, 2, 3], 99))
    (draft,) = Stages([(drafter, 12)]).propose([row], [12])
    assert len(draft.tokens) == 12
    assert len(model.forwards) == forwards
    assert len(row.tokens) == 3
    expected = ahead_of(row)
    for token in draft.tokens:  # what the model alone would have drafted
        before = np.concatenate([[0], expected.tokens.view()])
        assert token == int(model.table[before[-2], before[-1]].argmax())
        expected.tokens.extend([token])
    levels = accounts.take(row)
    assert levels[0].forwards == forwards
    assert levels[1].forwards == 0
    assert levels[1].accepted == 12 - forwards


def test_every_neural_level_reviews_what_stands_below_it():
    """On a text that repeats, drafts of both models cost fewer forwards than they have tokens."""
    strategy = make(dict(levels="draft,draft:2,ngram", draft_length=8), twist=0.0)
    (request,) = requests(1, VOCAB, limit=120, seed=8)
    drafted = sum(step.drafted for step in run(strategy, request))
    large, small = (len(strategy.models[role].forwards) for role in ("draft", "draft2"))  # type: ignore[attr-defined]
    assert drafted > 60
    assert large < drafted / 2
    assert small < drafted / 2


def test_a_draft_is_cut_to_what_is_asked_before_it_is_looked_at():
    """The reviewer never sees more of the inner draft than it may hand on, so acceptance cannot decide what is cut."""
    model = TableModel(VOCAB, seed=1)
    drafter = CascadeDrafter(model, Oracle(model, 99), Verifier(Sampling()), Accounts(2))
    for limit in (1, 2, 5):
        model.reset()
        model.forwards.clear()
        (draft,) = drafter.propose([Row(0, Request(1, [1, 2, 3], 99))], [limit])
        assert len(draft.tokens) == limit
        assert model.forwards == [[3 + limit - 1]]


# Levels in the record


def test_levels_add_up_to_the_steps_and_to_the_forwards():
    for given, costs in (
        (dict(), None),
        (SHAPES["three levels"], None),
        (SHAPES["K"], None),
        (dict(), AUTO["cheap draft"]),
    ):
        strategy = make(given, costs)
        (request,) = requests(1, VOCAB, limit=80, seed=9)
        steps = run(strategy, request)
        neural = [name for name in strategy.settings.levels if name.startswith("draft")]
        totals = np.sum([step.levels for step in steps if step.levels], axis=0)
        for at, role in enumerate(neural):
            assert totals[at][2] == len(strategy.models[role].forwards)  # type: ignore[attr-defined]
        assert totals[len(neural) :, 2].sum() == 0
        assert (totals[:, 1] <= totals[:, 0]).all()
        if given.get("k") is None and costs is None:  # all that the target looks at comes from the first level
            assert totals[0][0] == sum(step.drafted for step in steps)
            assert totals[0][1] == sum(step.accepted for step in steps)


def test_settling_gives_each_level_its_part_of_the_targets_draft():
    inner = (Level(0, 0, 2, 50), Level(6, 4, 0, 0))
    direct = (Level(3, 0), Level(2, 0))
    for accepted, expected in [(0, (0, 4)), (2, (2, 4)), (3, (3, 4)), (4, (3, 5)), (5, (3, 6))]:
        step = Step(0, (1,) * (accepted + 1), 5, accepted, (*inner, *direct, Level(2, 0)))
        levels, way = settle(step)
        assert levels == (Level(3, expected[0], 2, 50), Level(8, expected[1], 0, 0))
        assert way == 2


def test_a_forward_that_rows_share_is_each_rows_forward_and_its_time_is_shared():
    accounts, rows = Accounts(1), [Row(at, Request(at, [1], 9)) for at in range(4)]
    accounts.forward(rows, 0, 1000)
    accounts.forward(rows[:1], 0, 40)
    assert accounts.take(rows[0]) == (Level(0, 0, 2, 290),)
    assert accounts.take(rows[3]) == (Level(0, 0, 1, 250),)
    assert accounts.take(rows[3]) == (Level(0, 0, 0, 0),)


# The schedule


def looping(limit: int = 60) -> Request:
    return Request(1, [1, 2, 3, 4, 5, 6, 7, 8] * 4, limit)


class LoopModel(TableModel):
    """Says 1 2 3 ... 8 for ever."""

    def __init__(self, name: str, wrong: bool = False) -> None:
        super().__init__(VOCAB, seed=0)
        self.name = name
        self.table.zero_()
        for token in range(VOCAB):
            follows = token % 8 + 1
            self.table[:, token, (follows + 1) % VOCAB if wrong else follows] = 9.0


def loop(costs: dict[str, float], wrong: bool = False, given: dict | None = None) -> Cascade:
    made = Cascade({"target": LoopModel("t"), "draft": LoopModel("d", wrong)}, build(Options, given or {}, "cascade"))
    made.settings = dataclasses.replace(made.settings, curves={role: curve(ms) for role, ms in costs.items()})
    return made


def test_a_text_that_repeats_is_drafted_by_its_own_past_and_the_draft_model_never_reads_it():
    strategy = loop({"target": 10.0, "draft": 5.0})
    steps = run(strategy, looping())
    assert strategy.models["draft"].forwards == []  # type: ignore[attr-defined]
    assert strategy.facts["bypassed"] == "draft"
    assert len(steps) < 8
    assert strategy.facts["ngram_rounds"] == len(steps) - 1


def test_a_draft_model_that_cannot_pay_is_bypassed_for_good():
    strategy = loop({"target": 10.0, "draft": 12.0}, given={"levels": "draft", "probe": 2})
    steps = run(strategy, looping())
    assert strategy.models["draft"].forwards == []  # type: ignore[attr-defined]
    assert all(step.drafted == 0 for step in steps)
    assert strategy.facts == {"levels": "draft", "schedule": "auto", "plain_rounds": 59, "draft_rounds": 0,
                              "draft_mean_length": 0, "bypassed": "draft"}  # fmt: skip


def test_a_draft_model_that_missed_a_copied_passage_reads_it_and_drafts_again():
    """Reading was once charged to the one round after it, which shut the draft model out for the rest of the text."""
    counts = (1, 2, 4, 8, 16, 32)

    def times(ms: float, slope: float) -> schedule.Times:
        values = np.array([ms * (1 + slope * (count - 1)) for count in counts]).reshape(-1, 1, 1)
        return schedule.Times(CostCurve(counts, (1,), (1,), values), 8)

    def way(read: int) -> int:
        level = SimpleNamespace(known={0: read}, inner=None, level=0)
        feed = schedule.Scheduled(times(34, 0.04), level, times(13, 0.24), None, 8)  # type: ignore[arg-type]
        return feed.plan(Row(0, Request(1, [1] * 60, 200)), 8, 1).way

    assert [way(read) for read in (59, 55, 40)] == [schedule.NEURAL] * 3
    assert way(-3000) == schedule.PLAIN  # more than the next tokens can pay for


def test_a_prompt_is_read_at_once_for_a_draft_model_that_promises_much_and_else_two_rounds_later():
    """Two plain rounds cost a tenth of the time of a short answer; but where the text repeats, so does the reading."""
    counts = (1, 2, 4, 8, 16, 32)
    costs = [np.array([ms * (1 + 0.04 * (count - 1)) for count in counts]).reshape(-1, 1, 1) for ms in (34, 13)]
    target, draft = (schedule.Times(CostCurve(counts, (1,), (1,), values), 8) for values in costs)
    row = Row(0, Request(1, [1] * 60, 200))
    ways = {}
    for alpha in (0.65, 0.97):
        level = SimpleNamespace(known={}, inner=None, level=0)
        assumed = schedule.Assumed(alpha)
        feed = schedule.Scheduled(target, level, draft, None, 8, assumed=assumed)  # type: ignore[arg-type]
        for rounds in range(4):
            feed._state(row).rounds = rounds
            ways[alpha, rounds] = feed.plan(row, 8, 1).way
    assert [ways[0.65, rounds] for rounds in range(4)] == [schedule.PLAIN] * 2 + [schedule.NEURAL] * 2
    assert [ways[0.97, rounds] for rounds in range(4)] == [schedule.NEURAL] * 4


def test_a_draft_model_that_is_always_wrong_is_dropped_and_tried_again_now_and_then():
    strategy = loop({"target": 10.0, "draft": 2.0}, wrong=True, given={"levels": "draft", "probe": 10})
    run(strategy, looping(120))
    rounds = strategy.facts["plain_rounds"] + strategy.facts["draft_rounds"]
    assert rounds == 119
    assert 3 <= strategy.facts["draft_rounds"] <= 3 + 119 // 10 + 6


def test_a_good_cheap_draft_model_drafts_long_and_a_dear_one_short():
    lengths = []
    (request,) = requests(1, VOCAB, limit=200, seed=14)
    for ms in (0.1, 1.0, 3.0):
        strategy = make({"levels": "draft"}, {"target": 10.0, "draft": ms}, twist=0.5)
        run(strategy, request)
        lengths.append(strategy.facts["draft_mean_length"])
    assert lengths[0] > lengths[1] > lengths[2] >= 1


def test_reading_the_prompt_is_set_against_what_is_left_to_gain():
    """A prompt of 400 tokens for an answer of 4 is not worth reading twice; for an answer of 100 it is."""
    for limit, expected in ((4, 0), (100, 1)):
        strategy = loop({"target": 10.0, "draft": 1.0}, given={"levels": "draft"})
        run(strategy, Request(1, list(range(1, 9)) * 50, limit))
        assert (strategy.facts["draft_rounds"] > 0) == bool(expected)


def test_the_same_prompt_is_decided_the_same_way_whatever_came_before():
    strategy = make(costs=AUTO["cheap draft"])
    asked = requests(12, VOCAB, limit=40, seed=9)
    first = {request.key: run(strategy, request) for request in asked}
    again = {request.key: run(strategy, request) for request in reversed(asked)}
    assert first == again


def test_decisions_do_not_depend_on_batch_neighbours_where_costs_do_not():
    """Rows of a batch learn each for itself."""
    asked = requests(4, VOCAB, limit=40, seed=10)
    alone = [run(make(costs=AUTO["cheap draft"]), request) for request in asked]
    together: list[list[Step]] = [[] for _ in asked]
    rows = measure_rows(make(costs=AUTO["cheap draft"]), asked)
    for at, outcome in enumerate(rows):
        together[at] = outcome
    assert [[(s.drafted, s.accepted) for s in steps] for steps in alone] == [
        [(drafted, accepted) for drafted, accepted in steps] for steps in together
    ]


def measure_rows(strategy: Cascade, asked: list[Request]) -> list[list[tuple[int, int]]]:
    for request in asked:
        request.done = False
    outcomes = measure(strategy, asked, Sampling(), Ending(), TickingClock(), Drain())
    assert outcomes[0].error is None, outcomes[0].error
    return [[(step[2], step[3]) for step in outcome.steps] for outcome in outcomes]


def test_an_unsure_draft_model_stops_early():
    """With confidence it drafts fewer tokens that are thrown away, and as many that are kept, within a tenth."""
    asked = requests(30, VOCAB, limit=60, seed=11)
    rejected, accepted = {}, {}
    for confidence in (True, False):
        rejected[confidence] = accepted[confidence] = 0
        for request in asked:
            strategy = make({"levels": "draft", "confidence": confidence}, {"target": 10.0, "draft": 1.0}, twist=0.7)
            steps = run(strategy, request)
            rejected[confidence] += sum(step.drafted - step.accepted for step in steps)
            accepted[confidence] += sum(step.accepted for step in steps)
    share = {c: accepted[c] / (accepted[c] + rejected[c]) for c in (True, False)}
    assert share[True] > share[False]


def test_shares_begin_at_what_is_assumed_and_end_at_what_is_seen():
    share = schedule.Share(0.8)
    assert share.value == 0.8
    for _ in range(200):
        share.add(False)
    assert share.value < 0.1
    for _ in range(200):
        share.add(True)
    assert share.value > 0.85


def test_a_bad_moment_of_the_measurement_does_not_make_a_short_forward_dearer_than_a_long_one():
    measured = CostCurve((1, 2, 4, 8), (64,), (1,), np.array([5.0, 9.0, 6.0, 7.0])[:, None, None])
    times = schedule.Times(measured, 7).of(1)
    assert times[:5] == pytest.approx([0.0, 5.0, 6.0, 6.05, 6.1])
    assert times[8] == 7.0


def test_prepare_measures_each_model_once_for_all_strategies():
    made = models(drafts=1)
    first, second = (Cascade(made, Options()) for _ in range(2))
    first.prepare(2, 40)
    forwards = len(made["target"].forwards)
    second.prepare(2, 40)
    assert forwards == len(made["target"].forwards)
    assert set(first.settings.curves) == {"target", "draft"}
    assert first.settings.curves["target"] is second.settings.curves["target"]
    Cascade(made, Options(schedule="static")).prepare(2, 100)
    assert forwards == len(made["target"].forwards)


# The statistical level


def said(drafter, ids: list[int], limit: int, prompt: int | None = None, ahead: tuple[int, ...] = ()) -> Proposal:
    row = Row(0, Request(0, ids if prompt is None else ids[:prompt], 99))
    if prompt is not None:
        row.tokens.extend(ids[prompt:])
    behind = ahead_of(row)
    behind.tokens.extend(ahead)
    return drafter.propose([behind if ahead else row], [limit])[0]


def test_ngram_says_how_it_matched():
    sign = lambda ids: said(Ngram(), ids, 1).signs  # noqa: E731
    assert sign([1, 2, 3, 1, 2]) == [3 * 1 + SINGLE]
    assert sign([1, 2, 3, 9, 1, 2, 3, 8, 1, 2]) == [3 * 1 + AGREE]
    assert sign([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]) == [3 * 1 + DIFFER]
    assert sign([1, 2, 3]) == []


def test_ngram_behind_a_draft_says_what_it_would_say_if_the_draft_were_text():
    random = np.random.default_rng(0)
    for _ in range(300):
        ids = random.integers(0, 4, 30).tolist()
        cut = int(random.integers(20, 30))
        whole = said(Ngram(), ids, 1).tokens
        behind = said(Ngram(), ids[:cut], 1, ahead=tuple(ids[cut:]))
        # The draft itself is not searched; where the match lies in the text before it, both agree.
        match = said(Ngram(min_match=5), ids, 1).tokens
        if match and ids[cut - 1 :] == ids[cut - 1 :][:1]:
            assert behind.tokens == whole
    assert said(Ngram(), [1, 2, 3, 4, 5], 3, ahead=(1, 2)).tokens == [3, 4, 5]
    assert said(Ngram(), [1, 2, 1, 2], 4, ahead=(1,)).tokens == [2, 1, 2, 1]
    assert said(Ngram(), [7, 8, 9], 4, ahead=(5,)).tokens == []


def test_ngram_forgets_a_draft_that_was_not_taken():
    drafter, row = Ngram(), Row(0, Request(0, [1, 2, 3, 4], 99))
    behind = ahead_of(row)
    behind.tokens.extend([1, 2])
    assert drafter.propose([behind], [2])[0].tokens == [3, 4]
    row.tokens.extend([2])
    assert drafter.propose([row], [2])[0].tokens == [3, 4]


def test_ngram_stops_instead_of_inventing_and_a_table_helps_it_on():
    assert said(Ngram(), [1, 2, 3], 3).tokens == []
    assert said(Ngram(bigrams={3: 7, 7: 1}), [1, 2, 3], 4).tokens == [7, 1, 2, 3]


def test_max_gram_takes_the_leftmost_longest_match():
    assert leftmost(np.array([1, 2, 3, 9, 1, 2, 4]), np.array([5, 1, 2])).tolist() == [3, 9, 1, 2, 4]
    assert leftmost(np.array([1, 2, 3]), np.array([9])).tolist() == []
    found = said(MaxGram(block=2, faithful=False), [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2)
    assert found.tokens == [3, 9]  # the newer 4 8 is not taken


def test_max_gram_keeps_its_quirks_when_faithful():
    """A match runs across the seam of the prompt that stands twice; a second search may overshoot the block."""
    # Prompt 5 6 7, then 5: the text searched is 5 6 7 5 6 7, and what follows the first 5 reaches into the copy.
    assert said(MaxGram(block=4), [5, 6, 7, 5], 1, prompt=3).tokens == [6, 7, 5, 6]
    # Only 3 tokens follow the match, so there is a second search, which adds 3 more to a block of 4.
    assert said(MaxGram(block=4), [1, 2, 3, 4, 1], 1, prompt=4).tokens == [2, 3, 4, 1, 2, 3]
    assert said(MaxGram(block=4, faithful=False), [1, 2, 3, 4, 1], 2, prompt=4).tokens == [2, 3]
    assert said(MaxGram(block=3), [1, 2, 3], 1, prompt=2).tokens == []  # no match and no table: silent
    assert said(MaxGram(block=3, bigrams={3: 7, 7: 5, 5: 5}), [1, 2, 3], 1, prompt=2).tokens == [7, 5, 5]


@pytest.mark.parametrize(("seed", "least", "most"), [(1, 0.95, 1.0), (7, 0.1, 0.3)])
def test_what_auto_assumes_of_a_draft_model_is_measured_on_texts_of_no_task(seed, least, most):
    """The target's own copy, and a model that has nothing to do with it: 48 answers' tokens, 8 more at 75 %."""
    both = {"target": TableModel(VOCAB, seed=1), "draft": TableModel(VOCAB, seed=seed)}
    strategy = Cascade(both, Options())
    strategy.practise([[1, 2, 3], [4, 5], [6], [7, 8, 9, 1]])
    assert least < strategy.settings.assumed.alpha < most
    assert list(strategy.settings.assumed.sure) == sorted(strategy.settings.assumed.sure)
    assert all(not model.cache for model in both.values())
    again = Cascade(both, Options())
    forwards = len(both["target"].forwards)
    again.practise([[1, 2, 3], [4, 5], [6], [7, 8, 9, 1]])  # as in a sweep that keeps its models, or beside auto
    assert again.settings == strategy.settings
    assert len(both["target"].forwards) == forwards
    fixed = Cascade(both, Options(schedule="static"))
    fixed.practise([[1, 2, 3]])
    assert fixed.settings.assumed == schedule.Assumed()


def test_bigrams_are_read_and_refused_in_one_line(tmp_path):
    file = tmp_path / "bigrams.json"
    file.write_text(json.dumps({"3": 7, "7": 1}))
    assert read_bigrams(file, 12) == {3: 7, 7: 1}
    assert Cascade(models(drafts=1), Options(bigrams=file)).settings.bigrams == {3: 7, 7: 1}
    with pytest.raises(UsageError, match="goes from 0 to 4"):
        read_bigrams(file, 5)
    file.write_text("[1, 2]")
    with pytest.raises(UsageError, match="not a JSON object"):
        read_bigrams(file, 12)
    with pytest.raises(UsageError, match="No such file"):
        read_bigrams(tmp_path / "none.json", 12)


# Horizontal cascades and the released code


def test_stages_reach_as_far_as_k_says():
    """K = [[3, 5]]: three tokens of the first drafter, two of the second, and no more than is asked."""
    model = TableModel(VOCAB, seed=1)
    first = CascadeDrafter(model, None, Verifier(Sampling()), Accounts(2))
    second = Ngram(1, bigrams={token: token for token in range(VOCAB)})
    row = Row(0, Request(0, [1, 2, 3], 99))
    for limit, origins in ((99, [0, 0, 0, 1, 1]), (4, [0, 0, 0, 1]), (2, [0, 0])):
        (draft,) = Stages([(first, 3), (second, 5)]).propose([row], [limit])
        assert list(draft.origins) == origins


def test_the_released_code_hands_out_more_than_k_and_the_clean_form_does_not():
    (request,) = requests(1, VOCAB, limit=100, seed=12)
    longest = {}
    for faithful in (False, True):
        strategy = make(dict(levels="draft,mag", k="3,5;0,10", faithful=faithful), twist=0.0)
        longest[faithful] = max(step.drafted for step in run(strategy, request))
    assert longest[False] == 5
    assert longest[True] > 10  # a review of 10 or more tokens of MaG, then MaG again


@pytest.mark.parametrize(("preset", "levels"), [("ms", 3), ("pw", 3), ("llama", 2), ("example", 2)])
def test_presets_are_the_papers(preset, levels):
    options = Options(preset=preset, faithful=True)
    assert len(options.matrix) == levels
    assert Options(preset=preset, lenience=1.0).leniency == 1.0
    strategy = Cascade(models(drafts=levels - 1), options)
    assert strategy.settings.levels[-1] == "mag"
    asked = requests(10, VOCAB, limit=40)
    assert decode(strategy, asked, Sampling()) == plain(asked, Sampling())


def test_lenience_two_changes_nothing_greedily_and_three_does():
    """p above 1/2 is the argmax already (A5): the published lenience of 2 has no effect under greedy decoding."""
    asked = requests(10, VOCAB, limit=60, seed=13)
    counts = {}
    for lenience in (1.0, 2.0, 3.0, 5.0):
        strategy = make(dict(levels="draft,draft:2", draft_length=8, lenience=lenience), twist=0.5)
        counts[lenience] = [
            sum(step.levels[1].accepted for step in run(strategy, request) if step.levels) for request in asked
        ]
    assert counts[1.0] == counts[2.0]
    assert sum(counts[5.0]) > sum(counts[3.0]) > sum(counts[1.0])


def test_proposals_with_and_without_distributions_are_joined_as_one_hot_rows():
    drawn = Proposal([1, 2], torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]), (), (0, 0))
    certain = Proposal([0], None, (), (1,))
    whole = joined([drawn, certain])
    assert isinstance(whole, Draft)
    assert whole.probs is not None
    assert whole.probs.tolist()[2] == [1.0, 0.0, 0.0]
    assert list(whole.origins) == [0, 0, 1]
    assert joined([certain, certain]).probs is None
    assert list(joined([drawn, certain], 1).tokens) == [1]


# What is refused


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(levels="ngram,draft"), "only be the last level"),
        (dict(levels="ngram"), "needs a draft model above it"),
        (dict(levels="draft,ngrm"), 'did you mean "ngram"'),
        (dict(schedule="atuo"), 'did you mean "auto"'),
        (dict(preset="lama"), 'did you mean "llama"'),
        (dict(k="13,23;0"), "as many numbers in each row"),
        (dict(k="13,10;0,10"), "do not fall"),
        (dict(k="13,23;1,10"), "needs 1 zeros"),
        (dict(k="a,b;0,1"), "rows of whole numbers"),
        (dict(k="0,0;0,1"), "drafts nothing"),
        (dict(k="1,2;0,1", preset="llama"), "give one of them"),
        (dict(k="1,2;0,1", schedule="auto"), "lengths are fixed by cascade.k"),
        (dict(k="1,2;0,1", levels="draft,draft:2,ngram"), "2 rows and there are 3 levels"),
        (dict(k="1,2;0,1", draft_length="3"), "leave one out"),
        (dict(faithful=True), "needs lengths"),
        (dict(levels="draft,mag", schedule="auto"), "does not know when to be silent"),
        (dict(lenience=0.5), "at least 1"),
        (dict(draft_length="0"), "at least 1"),
        (dict(probe=0), "at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(given, why):
    with pytest.raises(UsageError, match=why):
        build(Options, given, "cascade")


def test_levels_are_chosen_by_number_or_by_name():
    drafts = {"draft": "Qwen/Qwen2.5-1.5B", "draft2": "self:int4"}
    choose = lambda *levels: choose_levels(Options(levels=levels), drafts)  # noqa: E731
    assert choose_levels(Options(), drafts) == ("draft", "draft2", "ngram")
    assert choose("draft:1.5b", "draft:int4", "ngram") == ("draft", "draft2", "ngram")
    assert choose("draft:2") == ("draft2",)
    assert choose("draft:2", "draft:1", "mag") == ("draft2", "draft", "mag")
    for levels, why in [(("draft:7b",), "none of the drafts"), (("draft:e",), "more than one"),
                        (("draft:3",), "names 2 model"), (("draft", "draft:1"), "named twice")]:  # fmt: skip
        with pytest.raises(UsageError, match=why):
            choose(*levels)
    with pytest.raises(UsageError, match="K has 2 rows and there are 3 levels"):
        choose_levels(Options(k="1,2;0,1"), drafts)
