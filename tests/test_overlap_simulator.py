"""The simulator of two devices: traces worked out by hand, its agreement with the closed forms, and the controller."""

from __future__ import annotations

import math

import pytest

from specbench.hardware.overlap import Costs, best_policy, best_sequential, published_tokens_per_pass
from specbench.hardware.overlap_simulator import Fixed, in_turns, random_ranks, simulate, simulate_published
from specbench.strategies.controller import Controller, Way, ways

PLAIN = Fixed(0, 0, 0, "plain")


def flat(draft: float = 30.0, target_factor: float = 1.0, draft_factor: float = 1.0) -> Costs:
    """A target that takes 100 ms whatever it verifies."""
    return Costs(lambda n: 100.0, lambda rows: draft, target_factor, draft_factor)


def costs(draft: float = 30.0, target_factor: float = 1.0, draft_factor: float = 1.0) -> Costs:
    return Costs(lambda n: 100 + 4 * (n - 1), lambda rows: draft * (1 + 0.08 * (rows - 1)), target_factor, draft_factor)


# By hand


def test_plain_steps_take_a_forward_each():
    assert simulate(flat(), [0] * 6, PLAIN) == (5, 5, 500)
    assert simulate(flat(), [0], PLAIN) == (0, 0, 0)  # the first token is all there is


def test_turns_are_blocks_one_after_another_and_know_no_contention():
    """Two draft steps of 30 ms and a verification of three tokens, 108 ms, for three tokens; twice."""
    for given in (costs(), costs(30, 1.5, 1.4)):
        found = simulate(given, [0] * 7, in_turns(2))
        assert found == (6, 2, pytest.approx(336))


def test_a_block_is_no_longer_than_what_may_be_generated():
    """Seven tokens, one per step is the target's own: blocks of 4 and, where two more may come, of 1."""
    found = simulate(costs(), [0] * 8, in_turns(4), limit=8)
    assert found == (7, 2, pytest.approx(4 * 30 + 116 + 30 + 104))


def test_the_draft_goes_on_while_the_target_verifies():
    """One token is there at 30; by 130 three more are, of which the first is the bonus token; then two; then three."""
    assert simulate(flat(), [0] * 9, Fixed(1, 4), limit=100) == (8, 3, 330)


def test_contention_slows_both_sides_while_both_work():
    """The first token comes at 30, when the target still rests; the verification takes 150, a step of the draft 40."""
    found = simulate(flat(30, 1.5, 4 / 3), [0] * 3, Fixed(1, 4), limit=100)
    assert found == (2, 1, pytest.approx(30 + 150))
    assert simulate(flat(30, 1.5, 4 / 3), [0] * 3, PLAIN).ms == pytest.approx(200)


def test_a_rejection_costs_the_step_in_the_making_and_a_new_one():
    """At 130 the only token is rejected. The draft ends its step in vain at 150 and has a token at 180."""
    assert simulate(flat(), [0, 2, 0, 0], Fixed(1, 4), limit=100) == (3, 2, 280)


def test_a_rejection_that_was_prepared_for_costs_nothing():
    """Two whole steps fit into the rest of the verification: the second line has two tokens."""
    assert simulate(flat(), [0, 1, 0, 0, 0], Fixed(1, 4), limit=100, prepares=math.inf) == (4, 2, 230)
    assert simulate(flat(), [0, 2, 0, 0], Fixed(1, 4), limit=100, prepares=math.inf) == (3, 2, 280)  # for another token


def test_a_draft_that_has_read_the_prompt_is_ahead_from_the_beginning():
    """Its prefill was over 50 ms before the target's: it has guessed the first token, and has the second one ready."""
    right = simulate(flat(), [0, 0, 0], Fixed(1, 1), limit=100, first_at=-50.0, first_position=0)
    assert right == (2, 1, 100)
    wrong = simulate(flat(), [2, 0, 0], Fixed(1, 1), limit=100, first_at=-50.0, first_position=0)
    assert wrong == (2, 1, pytest.approx(10 + 30 + 100))


def test_the_target_takes_plain_steps_while_the_draft_still_reads():
    """Its prefill ends at 250, in vain; after three plain steps the target waits for a token that is there at 310."""
    found = simulate(flat(), [0] * 5, Fixed(1, 4), limit=100, first_at=250.0, first_position=0)
    assert found == (4, 4, 410)
    waited = simulate(flat(), [0] * 3, Fixed(1, 4), limit=100, first_at=250.0)
    assert waited == (2, 1, 350)  # a draft that begins after the target is waited for


def test_a_draft_rests_when_it_is_far_enough_ahead():
    """With a lead of two, blocks are of two tokens however cheap the draft is."""
    assert simulate(flat(1.0), [0] * 13, Fixed(2, 12, lead=2), limit=100).steps == 4
    assert simulate(flat(1.0), [0] * 13, Fixed(2, 12, lead=12), limit=100).steps < 4


# Against the closed forms


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("draft", [10.0, 30.0, 50.0])
def test_it_agrees_with_the_decision_process(alpha, draft):
    """Within 5 %: the process counts the lead in quarters of a step and takes the mean of what a rejection costs."""
    for given in (costs(draft), costs(draft, 1.1, 1.15)):
        policy = best_policy(given, alpha)
        found = simulate(given, random_ranks(alpha, 0.0, 60_000), Fixed(policy.need, policy.most))
        assert found.rate == pytest.approx(policy.rate, rel=0.05)


def test_no_fixed_policy_is_much_better_than_the_best_one():
    given, ranks = costs(), random_ranks(0.85, 0.0, 40_000)
    best = best_policy(given, 0.85)
    for need in range(0, 7):
        assert simulate(given, ranks, Fixed(need, 8)).rate <= best.rate * 1.04


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
def test_turns_have_their_closed_form(alpha):
    rate, length = best_sequential(costs(), alpha, 12)
    found = simulate(costs(30, 1.3, 1.2), random_ranks(alpha, 0.0, 60_000), in_turns(length))
    assert found.rate == pytest.approx(rate, rel=0.02)


def test_prepared_rejections_are_worth_something():
    ranks, policy = random_ranks(0.7, 0.6, 40_000), best_policy(costs(), 0.7)
    steering = Fixed(policy.need, policy.most)
    assert simulate(costs(), ranks, steering, prepares=math.inf).rate > 1.08 * simulate(costs(), ranks, steering).rate


@pytest.mark.parametrize("alpha", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_published_rounds_have_their_closed_form(alpha):
    """Tokens per round within 3 %, with one branch and with two."""
    ranks = random_ranks(alpha, 0.6, 200_000)
    found = simulate_published(flat(), ranks, 16)
    assert found.tokens / found.steps == pytest.approx(published_tokens_per_pass(alpha, 16), rel=0.03)
    branched = simulate_published(flat(), ranks, 32, branches=2)
    expected = published_tokens_per_pass(alpha, 16, alpha + 0.6 * (1 - alpha))
    assert branched.tokens / branched.steps == pytest.approx(expected, rel=0.03)


def test_a_published_round_takes_as_long_as_its_slower_side():
    """Nothing is in flight in the first round; its four draft steps take 120 ms. Then three tokens are verified."""
    found = simulate_published(flat(), [0] * 6, 4, limit=100)
    assert found == (5, 2, 240)
    assert simulate_published(flat(10.0), [0] * 6, 4, limit=100).ms == 200
    # Three sequences of eight: eight forwards for the first one, seven for each of the others, whose first is known.
    assert simulate_published(flat(), [0] * 2, 24, branches=3, limit=100).ms == 22 * 30


# The controller


def decoded(given: Costs, alpha: float, steering, texts: int = 12, tokens: int = 128) -> float:
    """Tokens per ms over some texts; `steering()` makes one for each."""
    found = [simulate(given, random_ranks(alpha, 0.0, tokens, seed), steering()) for seed in range(texts)]
    return sum(one.tokens for one in found) / sum(one.ms for one in found)


@pytest.mark.parametrize(
    ("draft", "slower"), [(10.0, 1.0), (35.0, 1.0), (35.0, 1.3), (70.0, 1.2)], ids=lambda value: f"{value:g}"
)
def test_the_controller_keeps_up_with_the_best_of_turns_and_plain_steps(draft, slower):
    """At any acceptance it is at least 0.97 times as fast as speculative decoding at the draft length that is best in
    hindsight, and where even that loses to plain decoding, at least 0.9 times as fast as that: it has to find out."""
    given = costs(draft, slower, slower)
    table = ways(given, 12, 16)
    for alpha in (0.0, 0.3, 0.6, 0.9, 1.0):
        ours = decoded(given, alpha, lambda: Controller(Way("overlap", 1, 12, 16), table))
        in_hindsight = max(decoded(given, alpha, lambda k=k: in_turns(k)) for k in range(1, 13))
        assert ours >= 0.97 * in_hindsight, alpha
        assert ours >= 0.9 * decoded(given, alpha, lambda: PLAIN), alpha


def test_the_controller_overlaps_where_that_gains_most():
    given = costs(35.0)
    table = ways(given, 12, 16)
    ours = decoded(given, 0.95, lambda: Controller(Way("overlap", 1, 12, 16), table))
    assert ours > 1.2 * max(decoded(given, 0.95, lambda k=k: in_turns(k)) for k in range(1, 13))
