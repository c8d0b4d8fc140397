"""`duo`: what is prepared is found, the published protocol's counts, and its options. Exactness: test_asynchronous."""

from __future__ import annotations

import time

import pytest
from toys import TableModel, TickingClock, decode, requests

from specbench.errors import UsageError
from specbench.hardware.clock import Drain
from specbench.hardware.overlap import Costs
from specbench.options import build
from specbench.results.measure import Ending, measure
from specbench.strategies.branching import LEAST, UNKNOWN_ROW_COST
from specbench.strategies.duo import Duo, Options
from specbench.strategies.duo_published import _branches
from specbench.strategies.sampling import Sampling

VOCAB = 12


class Confident(TableModel):
    """A draft whose first choice is the target's, or, after some tokens, the target's second choice."""

    def __init__(self, wrong_after: tuple[int, ...] = ()) -> None:
        super().__init__(VOCAB, seed=1)
        for token in wrong_after:
            best = self.table[:, token].topk(2, dim=-1)
            self.table[:, token] = -20.0
            self.table[:, token].scatter_(-1, best.indices, best.values.new_tensor([5.0, 5.2]).expand(VOCAB, 2))


class Unhurried(TableModel):
    """A target that leaves the draft time for a few steps, on a slow and busy machine as well."""

    def advance(self, contexts, last=1, rows=None):
        time.sleep(0.01)
        return super().advance(contexts, last, rows)


def run(given=None, draft=None, limit=60, seed=4, costs=None, target=None):
    models = {"target": target or TableModel(VOCAB, seed=1), "draft": draft or Confident()}
    strategy = Duo(models, build(Options, given or {}, "duo"))
    strategy.costs = costs
    (request,) = requests(1, VOCAB, limit=limit, seed=seed)
    (row,) = measure(strategy, [request], Sampling(), Ending(), TickingClock(), Drain())
    assert row.error is None, row.error
    return strategy, row


def test_rejections_that_were_foreseen_find_their_continuation():
    """The draft is wrong after half of the tokens, and always has the right token as its close second choice. In
    lock-step, with room for it, every rejection inside a block is prepared for; without it, none is."""
    given = {"interrupt": False, "budget": 40, "branches": 8, "worth": 0.0, "lead": 6}
    wrong = Confident(tuple(range(0, VOCAB, 2)))
    _, row = run(given, wrong)
    assert row.facts["rejections"] > 5
    assert row.facts["rejections_anticipated"] >= 0.8 * row.facts["rejections"]
    _, without = run({**given, "anticipate": False}, Confident(tuple(range(0, VOCAB, 2))))
    assert without.facts["rejections_anticipated"] < row.facts["rejections_anticipated"]
    assert row.token_ids == without.token_ids
    assert len(row.steps) < len(without.steps)


def test_first_token_branches_find_the_bonus_token():
    given = {"interrupt": False, "budget": 40, "branches": 8, "worth": 0.0, "lead": 6, "anticipate": False}
    _, row = run(given, Confident(tuple(range(0, VOCAB, 2))))
    _, without = run({**given, "branch_rule": "off"}, Confident(tuple(range(0, VOCAB, 2))))
    assert without.facts["branches"] == 0
    assert row.facts["branches"] > 0
    assert row.facts["bonus_tokens_hit"] >= without.facts["bonus_tokens_hit"]
    assert row.token_ids == without.token_ids


def test_no_branches_where_the_draft_is_sure():
    strategy, row = run()
    sure = TableModel(VOCAB, seed=1)
    sure.table *= 1e4
    _, row = run(draft=sure)
    assert row.facts["branches"] == 0
    assert row.facts["rejections"] == 0


def test_batched_branches_take_fewer_forwards():
    given = {"interrupt": False, "budget": 12, "branches": 4, "worth": 0.0}
    wrong = tuple(range(VOCAB))
    _, together = run(given, Confident(wrong))
    _, apart = run({**given, "batched": False}, Confident(wrong))
    assert together.facts["draft_forwards"] < together.facts["draft_token_rows"]
    assert apart.facts["draft_forwards"] == apart.facts["draft_token_rows"]


def test_a_round_spends_its_budget_and_no_more():
    for budget in (1, 3, 8):
        _, row = run({"interrupt": False, "budget": budget, "branches": 4})
        assert row.facts["draft_token_rows"] <= budget * (len(row.steps) + 1)


def test_first_token_does_not_wait_for_the_draft_unless_it_is_asked_to():
    for given, posted in (({}, 0), ({"first_token": "after_round"}, 1)):
        draft = Confident()
        strategy = Duo({"target": TableModel(VOCAB, seed=1), "draft": draft}, build(Options, given, "duo"))
        (request,) = requests(1, VOCAB, seed=1)
        generation = strategy.generate([request], Sampling())
        next(generation)
        assert len(draft.forwards) >= posted
        generation.close()


def test_budget_and_row_costs_follow_the_measured_costs():
    costs = Costs(lambda n: 100 + 5 * n, lambda r: 30 * (1 + 0.2 * (r - 1)), 1.0, 1.0)
    strategy, _ = run({"interrupt": False}, costs=costs)
    assert strategy.settings().budget == 4  # 4 steps take 120 ms, and so does a verification of 4 drafts and a token
    assert strategy.settings().row_costs == pytest.approx((1, 1.2, 1.4, 1.6))
    assert strategy.settings().worth == LEAST
    strategy, _ = run({}, costs=costs)
    assert strategy.settings().budget == 0  # what interrupts it is the target
    strategy, _ = run({"budget": 6, "worth": 0.3}, costs=costs)
    settings = strategy.settings()
    assert (settings.budget, settings.worth, settings.row_costs) == (6, 0.3, ())  # by a number, none needs to pay
    strategy, _ = run({"batched": False}, costs=costs)
    assert strategy.settings().row_costs == (1, 2, 3, 4)
    strategy, _ = run({"branches": 2})
    assert strategy.settings().row_costs == (1, 1 + UNKNOWN_ROW_COST)
    noisy = Costs(lambda n: 100.0, lambda r: {1: 30.0, 2: 36.0, 3: 33.0, 4: 45.0}[r])
    strategy, _ = run({}, costs=noisy)
    assert strategy.settings().row_costs == (1, 1.2, 1.2, 1.5)  # more rows take no less


def test_a_dear_row_is_given_to_fewer_branches():
    """In lock-step, where nothing depends on timing: rows that cost nothing, and rows that cost a forward each."""
    rows = []
    for more in (0.0, 1.0):
        costs = Costs(lambda n: 100.0, lambda r, more=more: 30 * (1 + more * (r - 1)))
        draft = TableModel(VOCAB, seed=1, twist=0.5)
        _, row = run({"interrupt": False, "budget": 8}, draft, costs=costs)
        rows.append(row.facts["draft_token_rows"] - row.facts["draft_forwards"])
    assert rows[0] > 2 * rows[1]


def test_branches_that_are_never_needed_are_switched_off():
    """The draft wavers at every token and is always right, so that its branches bring nothing."""
    wavering = Confident()
    for token in range(VOCAB):
        best = wavering.table[:, token].topk(2, dim=-1)
        wavering.table[:, token] = -20.0
        wavering.table[:, token].scatter_(-1, best.indices, best.values.new_tensor([5.2, 5.0]).expand(VOCAB, 2))
    given = {"branch_rule": "off", "worth": 0.02}
    _, row = run(given, wavering, limit=400, target=Unhurried(VOCAB, seed=1))
    assert row.facts["rejections"] == 0
    assert row.facts["branch_switches"] >= 1
    _, kept = run({**given, "controller": False}, wavering, limit=400, target=Unhurried(VOCAB, seed=1))
    assert kept.facts["branch_switches"] == 0
    assert row.facts["branch_tokens"] < kept.facts["branch_tokens"]


# As published


def test_published_rounds_make_one_pass_less_per_branch():
    """gamma - k + 1 passes per round of k branches; the two tokens of the prefill's round are one here."""
    gamma = 8
    _, row = run({"faithful": True, "budget": gamma}, Confident((1, 2, 3)), limit=200)
    facts, rounds = row.facts, row.facts["rounds"]
    drafted_rounds = rounds - 1
    assert rounds == len(row.steps)
    assert facts["branches"] > 0
    full = [1 + drafted_rounds * gamma - facts["branches"], 1 + (drafted_rounds + 1) * gamma - facts["branches"]]
    assert full[0] - 3 * gamma <= facts["draft_forwards"] <= full[1]  # the last rounds end at the token limit


def test_published_rounds_are_at_most_the_steps_of_plain_decoding():
    for twist in (0.0, 0.5, 50.0):
        draft = TableModel(VOCAB, seed=1, twist=twist)
        _, row = run({"faithful": True}, draft, limit=40)
        assert row.facts["rounds"] <= 40
        if twist == 0.0:
            assert row.facts["rounds"] < 8
            assert all(step[2] == step[3] for step in row.steps)


def test_published_rounds_emit_verified_tokens_only():
    """After a block that was rejected comes an empty one: the bubble."""
    _, row = run({"faithful": True}, TableModel(VOCAB, seed=1, twist=0.5), limit=80)
    for before, after in zip(row.steps[1:], row.steps[2:], strict=False):
        assert before[1] == before[3] + 1 or before is row.steps[-1]
        if before[3] < before[2]:
            assert after[2] == 0


@pytest.mark.parametrize(
    ("gamma", "likely", "expected"),
    [(24, 5, 4), (24, 7, 6), (24, 8, 8), (16, 3, 2), (16, 7, 4), (12, 5, 4), (12, 7, 6), (6, 3, 3), (7, 5, 1)],
)
def test_published_number_of_branches_divides_the_budget(gamma, likely, expected):
    first = [(token, 0.2 if token < likely else 0.01) for token in range(8)]
    assert _branches(first, [(0, 0.5)], gamma) == expected


def test_published_rule_counts_from_the_top_and_stops_at_the_first_failure():
    assert _branches([(0, 0.6), (1, 0.2), (2, 0.1)], [(0, 0.5)], 24) == 1
    assert _branches([(0, 0.4), (1, 0.3), (2, 0.25)], [(0, 0.7)], 24) == 2


def test_options_that_cannot_be_meant_are_refused():
    for given, match in [
        ({"budget": 0}, "at least 1 token"),
        ({"branches": 9}, "from 1 to 8"),
        ({"worth": 2}, "a probability"),
        ({"lead": 0}, "at least 1 token ahead"),
        ({"faithful": True, "anticipate": False}, "budget only"),
        ({"branch_rule": "sometimes"}, "theta or off"),
    ]:
        with pytest.raises(UsageError, match=match):
            build(Options, given, "duo")


def test_a_draft_that_computes_one_row_has_no_branches():
    draft = TableModel(VOCAB, seed=1, twist=0.5, max_rows=1)
    for given in ({}, {"faithful": True}):
        _, row = run(given, draft)
        assert row.facts["branches"] == 0


def test_sampled_text_is_the_same_with_every_switch():
    asked = requests(5, VOCAB, limit=30, seed=12)
    outputs = []
    for given in ({}, {"anticipate": False}, {"branch_rule": "off"}, {"batched": False}, {"interrupt": False},
                  {"branches": 1}, {"controller": False}, {"faithful": True}):  # fmt: skip
        models = {"target": TableModel(VOCAB, seed=1), "draft": TableModel(VOCAB, seed=1, twist=0.4)}
        outputs.append(decode(Duo(models, build(Options, given, "duo")), asked, Sampling(temperature=0.9, seed=1)))
    assert all(output == outputs[0] for output in outputs)
