"""The cost model of two devices: its limits, its closed forms, and what may only grow."""

from __future__ import annotations

import pytest

from specbench.hardware.overlap import (
    Costs,
    best_policy,
    best_sequential,
    ideal,
    overlap_gain,
    perfect_rate,
    plain_rate,
    published_tokens_per_pass,
    sequential_rate,
)


def target_ms(tokens: float) -> float:
    return 100 + 4 * (tokens - 1)


def costs(draft: float = 30.0, target_factor: float = 1.0, draft_factor: float = 1.0) -> Costs:
    return Costs(target_ms, lambda rows: draft * (1 + 0.08 * (rows - 1)), target_factor, draft_factor)


def test_a_draft_that_is_never_right_leaves_plain_decoding():
    policy = best_policy(costs(), alpha=0.0)
    assert policy.rate == pytest.approx(1 / 100)
    assert policy.need == 0
    assert perfect_rate(costs(), 0.0) == plain_rate(costs())
    assert sequential_rate(costs(), 0.0, 3) == pytest.approx(1 / (90 + 112))


def test_a_draft_that_is_always_right_is_as_fast_as_the_slower_side():
    """The draft makes a token in 30 ms; twelve tokens of a target's verification take 144 ms, 12 ms each."""
    assert best_policy(costs(), alpha=1.0, lead=24).rate == pytest.approx(1 / 30, rel=0.02)
    assert best_policy(costs(draft=2.0), alpha=1.0, most=11, lead=40).rate == pytest.approx(12 / 144, rel=0.02)


def test_a_free_draft_makes_overlap_worth_nothing():
    free = costs(draft=1e-3)
    for alpha in (0.5, 0.8, 0.95):
        sequential, length = best_sequential(free, alpha, 12)
        assert best_policy(free, alpha, most=12, in_turns=True).rate == pytest.approx(sequential, rel=0.01)
        assert perfect_rate(free, alpha, 12) == pytest.approx(sequential, rel=0.01)
        assert overlap_gain(free, length) == pytest.approx(1.0, abs=0.001)


def test_overlap_gains_at_most_a_factor_of_two():
    gains = [overlap_gain(costs(draft), length) for draft in (5, 30, 60, 120) for length in range(1, 17)]
    assert max(gains) <= 2
    assert overlap_gain(Costs(lambda n: 100.0, lambda r: 25.0), 4) == 2


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9, 0.95])
def test_in_turns_the_best_policy_is_speculative_decoding(alpha):
    """The decision process, restricted to turns, finds the best draft length by itself."""
    found = best_policy(costs(), alpha, most=12, in_turns=True)
    assert found.rate == pytest.approx(best_sequential(costs(), alpha, 12)[0], rel=0.002)


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, 1.33), (0.6, 1.56), (0.7, 1.96), (0.8, 2.74), (0.9, 4.75)])
def test_published_protocol_has_its_closed_form(alpha, expected):
    """Two states, a block of 16 in flight or not."""
    assert published_tokens_per_pass(alpha, 16) == pytest.approx(expected, abs=0.01)
    assert published_tokens_per_pass(alpha, 16, alpha + 0.6 * (1 - alpha)) > published_tokens_per_pass(alpha, 16)


def test_published_protocol_without_a_right_first_token_is_plain_decoding():
    assert published_tokens_per_pass(0.0, 16) == 1
    assert published_tokens_per_pass(1.0, 16) == 16


def test_what_is_better_is_not_slower():
    """More acceptance, more hits, a longer lead, a cheaper draft, less contention."""
    rates = [best_policy(costs(), alpha).rate for alpha in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    assert rates == sorted(rates)
    rates = [best_policy(costs(), 0.7, hit=hit).rate for hit in (0.0, 0.3, 0.6, 1.0)]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] * 1.1
    rates = [round(best_policy(costs(), 0.9, lead=lead).rate, 9) for lead in (2, 4, 8, 16)]
    assert rates == sorted(rates)
    rates = [best_policy(costs(draft), 0.9).rate for draft in (90, 60, 30, 10, 3)]
    assert rates == sorted(rates)
    loaded = costs(30, 1.2, 1.2)
    assert best_policy(loaded, 0.9).rate < best_policy(ideal(loaded), 0.9).rate


def test_nothing_beats_the_ceiling():
    for draft in (5, 20, 30, 60):
        for alpha in (0.5, 0.8, 0.95):
            ceiling = perfect_rate(costs(draft), alpha, 12)
            for hit in (0.0, 1.0):
                assert best_policy(costs(draft), alpha, hit=hit).rate <= ceiling * 1.001
