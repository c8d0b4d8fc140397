"""The cost model of sparse caches against hand values and the paper's own tables, and what is chosen by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_sparse_kv import costs

from specbench.hardware.cost_model import expected_tokens
from specbench.hardware.sparse_cost import Roofline, best_lengths, break_even_context, sparse_speedup, spread
from specbench.strategies.base import Request, Row
from specbench.strategies.sparse_kv_schedule import ASSUMED, BUDGET, GAMMA, Schedule

# Llama-3.1-8B in bfloat16 on A100s: parameters without the embedding, cache of 32 layers and 8 heads of 128.
A100 = Roofline(parameters=7.5e9, cache_bytes=32 * 2 * 8 * 128 * 2, flops=312e12, bandwidth=2.039e12)


def test_the_formula_by_hand():
    """Omega(2, 0.5) = 1.75; a round takes 2 x 1 + 6 ms; plain decoding 5 ms a token."""
    assert expected_tokens(0.5, 2) == 1.75
    assert sparse_speedup(0.5, 2, draft_ms=1, verify_ms=6, target_ms=5) == pytest.approx(5 * 1.75 / 8)
    # a selection of 100 ms over 50 tokens adds 2 ms to each
    slower = sparse_speedup(0.5, 2, draft_ms=1, verify_ms=6, target_ms=5, select_ms=100, tokens=50)
    assert slower == pytest.approx(5 / (8 / 1.75 + 2))
    # two rows of 50 tokens, each begun with 100 ms, at 0.5 tokens per ms: 200 ms of rounds and 200 of beginning
    assert spread(0.5, 100, 50) == pytest.approx(100 / 400)


@pytest.mark.parametrize(
    ("gamma", "drafting", "verifying", "omega", "target", "published"),
    [(7, 34.34, 28.50, 5.61, 25.96, 11.35), (11, 53.90, 29.89, 7.93, 25.90, 10.64),
     (11, 53.98, 29.93, 8.21, 25.83, 10.29)],
)  # fmt: skip
def test_the_papers_table_within_what_its_loop_adds(gamma, drafting, verifying, omega, target, published):
    """MagicDec's headline rows, 100k tokens, 41 rows: ms per token within 5 %, of which the loop itself is a part."""
    alpha = next(a for a in np.arange(0.85, 0.95, 1e-4) if expected_tokens(a, gamma) >= omega)
    per_token = target / sparse_speedup(alpha, gamma, drafting / gamma, verifying, target)
    assert per_token == pytest.approx(published, rel=0.05)
    assert per_token < published


def test_the_roofline_breaks_even_where_its_speedup_is_one():
    for alpha, gamma, budget in product((0.7, 0.8, 0.95), (1, 3, 7), (128, 512)):
        context = A100.break_even(alpha, gamma, budget)
        assert A100.speedup(alpha, gamma, budget, context) == pytest.approx(1)
        assert A100.speedup(alpha, gamma, budget, 1e12) == pytest.approx(expected_tokens(alpha, gamma), rel=1e-4)
    assert A100.balanced_context == pytest.approx(748, abs=2)
    assert A100.break_even(0.8, 3, 512) == pytest.approx(2340, abs=20)


def test_the_context_at_which_it_breaks_even():
    assert break_even_context(lambda context: context / 1000, 8192) == pytest.approx(1000, abs=0.01)
    assert break_even_context(lambda context: 0.9, 8192) is None
    assert break_even_context(lambda context: 2.0, 8192) == 64
    assert break_even_context(lambda context: 2.0, 40) == 40


def brute(alphas, limits, draft_ms, verify_ms):
    """The best rate over all lengths."""
    best = 0.0
    for lengths in product(*(range(limit + 1) for limit in limits)):
        ms = verify_ms(1 + sum(lengths) / len(lengths))
        ms += sum(draft_ms(sum(length >= place for length in lengths)) for place in range(1, max(lengths) + 1))
        best = max(best, sum(map(expected_tokens, alphas, lengths)) / ms)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_lengths_are_close_to_the_best_of_all(seed):
    """At most 5 % below an exhaustive search over the lengths of three rows, and usually the same."""
    random = np.random.default_rng(seed)
    alphas, limits = random.uniform(0, 1, 3).tolist(), random.integers(0, 6, 3).tolist()
    draft, verify = random.uniform(0.05, 1), random.uniform(0, 0.3)
    draft_ms = lambda rows: draft * (1 + 0.1 * rows)  # noqa: E731
    verify_ms = lambda tokens: 1 + verify * (tokens - 1)  # noqa: E731
    found = best_lengths(alphas, limits, draft_ms, verify_ms)
    assert found.rate >= 0.95 * brute(alphas, limits, draft_ms, verify_ms)
    assert all(length <= limit for length, limit in zip(found.lengths, limits, strict=True))


def test_one_row_drafts_what_the_cost_model_for_one_row_says():
    draft_ms, verify_ms = lambda rows: 0.2, lambda tokens: 1 + 0.05 * (tokens - 1)
    for alpha in (0.1, 0.5, 0.9, 1.0):
        rates = [expected_tokens(alpha, k) / (verify_ms(k + 1) + 0.2 * k) for k in range(9)]
        found = best_lengths([alpha], [8], draft_ms, verify_ms)
        assert found.lengths == (int(np.argmax(rates)),)
        assert found.rate == pytest.approx(max(rates))


def test_what_rows_cost_beside_forwards_is_counted_for_those_that_draft():
    """A row that is always right, and one that never is: 2 tokens and 1 in 10.5 + 1 + 1 ms, or 2 in 10."""
    draft_ms, verify_ms = lambda rows: 1, lambda tokens: 9 + tokens
    assert best_lengths([1.0, 0.0], [1, 1], draft_ms, verify_ms, 1.0).rate == pytest.approx(3 / 12.5)
    assert best_lengths([1.0, 0.0], [1, 1], draft_ms, verify_ms, 9.0).lengths == (0, 0)


def test_a_step_in_the_cost_of_the_first_draft_token_does_not_hide_what_lies_behind_it():
    """Two tokens may cost nearly as much as eight where kernels change."""
    found = best_lengths([0.95], [8], lambda rows: 0.05, lambda tokens: 1 if tokens == 1 else 1.9)
    assert found.lengths == (8,)


# The schedule


def row(length: int, limit: int = 500, index: int = 0) -> Row:
    return Row(index, Request(index, [1] * length, limit))


def test_without_costs_lengths_and_budget_are_what_is_given_or_the_defaults():
    schedule = Schedule()
    rows = [row(5000, index=at) for at in range(2)]
    states = [schedule.begin(one.request) for one in rows]
    assert schedule.lengths(rows, states, [8, 2]) == [GAMMA, 2]
    assert schedule.budget_for(5000, 2) == BUDGET
    assert Schedule(least_budget=2001).budget_for(5000, 1) == 2001
    assert Schedule(gamma=5, budget=77).lengths(rows, states, [8, 8]) == [5, 5]
    assert Schedule(gamma=5, budget=77).budget_for(5000, 1) == 77


def test_the_break_even_has_the_sign_of_the_decision():
    schedule = Schedule(costs(), longest=8)
    for rows in (1, 8):
        context = schedule.break_even(rows, 8192)
        assert context is not None
        for factor, drafts in ((0.8, False), (1.25, True)):
            batch = [row(int(context * factor), 10**6, at) for at in range(rows)]
            states = [schedule.begin(one.request) for one in batch]
            for state in states:  # as acceptance is assumed for the budget that is chosen
                budget = schedule.budget_for(int(context * factor), rows)
                schedule.chosen(state, int(context * factor), budget)
            assert any(schedule.lengths(batch, states, [8] * rows)) is drafts
    assert schedule.break_even(8, 8192) < schedule.break_even(1, 8192)  # more rows, earlier
    assert Schedule(costs(per_slot=0.0)).break_even(8, 8192) is None


def test_what_choosing_costs_is_in_the_break_even():
    """Spread over a short answer it moves it up, and out of reach; over a long one hardly."""
    free, dear = Schedule(costs()), Schedule(costs(select_ms=0.2))
    without = free.break_even(8, 8192, 100)
    assert without == free.break_even(8, 8192)
    assert without == pytest.approx(dear.break_even(8, 8192, 1e9), rel=1e-3)
    assert without * 1.2 < dear.break_even(8, 8192, 100)
    assert dear.break_even(8, 8192, 8) is None
    assert dear.gain(8192, 8, answer=8) == pytest.approx(1)  # plain decoding, then


def test_a_fixed_length_may_be_worse_than_none():
    """Three draft tokens of 20 ms, and a verification 15 % dearer than a step of 20, make no more than four tokens."""
    schedule = Schedule(costs(), gamma=3, budget=1024)
    assert schedule.gain(1024, 1) < 1
    assert schedule.break_even(1, 1024) is None
    assert schedule.break_even(1, 8192) == pytest.approx(
        next(context for context in range(1024, 8192, 8) if schedule.gain(context, 1) > 1.02), rel=0.02
    )


def test_larger_budgets_for_longer_contexts_and_worse_acceptance():
    schedule = Schedule(costs())
    assert [schedule.budget_for(context, 8) for context in (200, 1000)] == [128, 256]
    cheap = [schedule.budget_for(context, 8) for context in (2000, 4000, 8000)]
    assert cheap == sorted(cheap)
    state = schedule.begin(Request(1, [1], 9))
    schedule.chosen(state, 4000, 256)
    for _ in range(40):
        schedule.learn(state, 4, 1)
    assert schedule.acceptance(256) < ASSUMED[256] - 0.2
    assert schedule.budget_for(4000, 8) >= cheap[1]


def test_acceptance_is_learned_from_what_was_judged_only():
    """Three of four accepted: three right ones and a wrong one; none of four: one wrong one, the rest was not seen."""
    schedule = Schedule(costs())
    state = schedule.begin(Request(1, [1], 9))
    schedule.chosen(state, 1000, 128)
    before = state.share.seen
    schedule.learn(state, 4, 3)
    assert state.share.seen - before == pytest.approx(1 + 0.97 + 0.97**2 + 0.97**3)
    value = state.share.value
    schedule.learn(state, 4, 0)
    assert state.share.seen == pytest.approx(1 + 0.97 * (1 + 0.97 + 0.97**2 + 0.97**3))
    assert state.share.value < value
    schedule.learn(state, 0, 0)
    assert state.share.seen == pytest.approx(1 + 0.97 * (1 + 0.97 + 0.97**2 + 0.97**3))


def test_reviews_in_blocks_make_a_draft_token_cheaper():
    """At seven tenths of the context from which drafting pays token by token, it pays in blocks of four."""
    alone, blocks = Schedule(costs()), Schedule(costs())
    for _ in range(60):
        blocks.reviewed(4, 1)
    context = alone.break_even(1, 8192) * 0.7
    assert alone.gain(context, 1) < 1.02 < blocks.gain(context, 1)


def test_predictions_are_the_costs_of_what_is_decided():
    schedule = Schedule(costs(), gamma=4, budget=256)
    batch = [row(4000, index=at) for at in range(2)]
    states = [schedule.begin(one.request) for one in batch]
    for state in states:
        schedule.chosen(state, 4000, 256)
    drafting, verifying, following, plain = schedule.predicted(batch, states, [4, 2])
    # 4,096 slots and two rows: 10 + 2 x 40.96 ms; 320 slots of the draft: two forwards of two rows, two of one
    assert plain == pytest.approx(10 + 2 * 40.96)
    assert verifying == pytest.approx((10 + 2 * 40.96) * 1.15)
    assert drafting == pytest.approx(2 * (10 + 2 * 3.2) + 2 * (10 + 3.2))
    assert following == 0
    schedule.costs = replace(costs(), follow_ms=0.5)
    assert schedule.predicted(batch, states, [4, 0]).follow == 0.5


def test_a_small_cache_that_is_not_full_yet_holds_what_there_was():
    schedule = Schedule(costs(), gamma=4, budget=256)
    state = schedule.begin(Request(1, [1] * 100, 99))
    schedule.chosen(state, 101, 256)
    assert state.held(150) == 150
    schedule.chosen(state, 400, 256)
    assert state.held(410) == 266
