"""What a branch is worth: chances that are learned, rows that pay, and an account that switches branches off."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.strategies.branching import ENOUGH, MARGIN, REST_TOKENS, BranchAccount, Calibration, rows_that_pay
from specbench.strategies.controller import Controller, Way


def test_a_chance_is_what_the_draft_says_until_the_target_has_said_otherwise():
    calibration = Calibration()
    assert calibration.chance(0.3, first=True) == pytest.approx(0.3)
    for _ in range(200):
        calibration.observe(0.3, True, True)
    assert calibration.chance(0.3, first=True) > 0.95
    assert calibration.chance(0.31, first=True) > 0.95  # the same bin
    assert calibration.chance(0.3, first=False) == pytest.approx(0.3)  # other choices are apart
    assert calibration.chance(0.7, first=True) == pytest.approx(0.7)


def test_chances_approach_how_often_the_draft_is_right():
    """A draft that says 0.9 and is right in 60 %: within 0.05 after 400 tokens; it fails by chance once in 25."""
    calibration, random = Calibration(), np.random.default_rng(3)
    for right in random.random(400) < 0.6:
        calibration.observe(0.9, True, bool(right))
    assert calibration.chance(0.9, first=True) == pytest.approx(0.6, abs=0.05)


COSTS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)


def test_rows_are_given_while_tokens_of_use_per_time_grow():
    assert rows_that_pay(0.5, [0.3, 0.02], COSTS) == 1
    assert rows_that_pay(0.5, [0.3, 0.2, 0.2], COSTS) == 3
    assert rows_that_pay(0.9, [0.1], COSTS) == 0
    assert rows_that_pay(0.2, [0.1], COSTS) == 1  # the main line is far ahead, and hardly needed
    assert rows_that_pay(0.5, [], COSTS) == 0
    assert rows_that_pay(0.9, [0.01, 0.001], ()) == 2  # rows that cost nothing
    assert rows_that_pay(0.9, [0.01, 0.001], (1.0, 1.0, 1.0)) == 2


def test_a_second_branch_may_pay_for_the_first_one():
    """The first row beside the main one makes the forward a fifth longer, the second one no longer at all."""
    assert rows_that_pay(0.6, [0.2], (1.0, 1.2, 1.2)) == 0
    assert rows_that_pay(0.6, [0.2, 0.2], (1.0, 1.2, 1.2)) == 2


def test_a_branch_beside_a_main_line_that_rests_delays_nobody():
    assert rows_that_pay(None, [0.05], (1.0, 2.0)) == 1
    assert rows_that_pay(None, [0.05, 0.04], (1.0, 2.0)) == 1  # but the second one delays the first


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_rows_makes_more_tokens_of_use_per_time(seed):
    random = np.random.default_rng(seed)
    main, others = random.random(), sorted(random.random(6) ** 3, reverse=True)
    costs = np.cumsum([1, *0.3 * random.random(6)])
    rates = [(main + sum(others[:rows])) / (1 + MARGIN * (costs[rows] - 1)) for rows in range(7)]
    assert rates[rows_that_pay(main, others, costs.tolist())] == pytest.approx(max(rates))


def steps_until(account: BranchAccount, on: bool, **step) -> int:
    steps = 0
    while account.on != on:
        account.observe(0.9, **step)
        steps += 1
        assert steps < 1000
    return steps


def test_branches_that_rescue_nothing_are_switched_off_and_tried_again():
    account = BranchAccount(row_cost=0.2)
    idle = {"drafted": 0, "new_tokens": 4, "branched": 3, "rescued": 0}
    assert ENOUGH / 0.6 <= steps_until(account, False, **idle) <= ENOUGH / 0.6 + 1
    assert steps_until(account, True, **idle) == REST_TOKENS / 4
    steps_until(account, False, **idle)
    assert steps_until(account, True, **idle) == 2 * REST_TOKENS / 4
    assert account.switches == 4


def test_branches_that_pay_stay():
    """Three rows of a fifth of a step each, and two tokens rescued in every other step."""
    account = BranchAccount(row_cost=0.2)
    for step in range(200):
        assert not account.observe(0.9, drafted=2, new_tokens=3, branched=3, rescued=2 * (step % 2))
    assert account.on


def test_rows_cost_little_where_the_block_was_long_anyway():
    """With twelve tokens in a block of which half are right one after another, a thirteenth brings nothing."""
    account = BranchAccount(row_cost=0.2)
    for _ in range(200):
        account.observe(0.5, drafted=12, new_tokens=2, branched=12, rescued=0)
    assert account.on


def test_the_controller_switches_branches_and_says_so():
    start = Way("overlap", 1, 12, 16)
    controller = Controller(start, None, anticipates=True, row_cost=0.5)
    assert controller.branching
    changed = [controller.observe(2, 2, 3, True, branched=4) for _ in range(4)]
    assert changed.count(True) == 1
    assert not controller.branching
    assert controller.branch_switches == 1
    kept = Controller(start, None, anticipates=True, row_cost=0.5, on=False)
    assert not any(kept.observe(2, 2, 3, True, branched=4) for _ in range(20))
    assert kept.branching
    assert not Controller(start, None).branching  # who does not anticipate has no branches
