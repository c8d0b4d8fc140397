"""`async`: the tokens of plain decoding whatever the timing, AMUSD's protocol, the controller, and a real worker."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import toys
from toys import TableModel, TickingClock, decode, requests

from specbench.errors import UsageError, WorkerError
from specbench.hardware.clock import Drain
from specbench.hardware.devices import Device
from specbench.hardware.overlap import Costs
from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.remote import load_remote
from specbench.models.specs import parse
from specbench.options import build
from specbench.results.measure import Ending, measure
from specbench.strategies import registry
from specbench.strategies.base import Request
from specbench.strategies.controller import REST_TOKENS, Controller, Way, ways
from specbench.strategies.sampling import Sampling

VOCAB = 12
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=3),
    "T=0.7 top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=3),
    "penalties at T=1": Sampling(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
}
WAYS = {
    "async": ("async", {}),
    "async, no waiting": ("async", {"min_ready": 0}),
    "async, three at a time": ("async", {"min_ready": 3, "max_verify": 3, "lead": 5}),
    "async, as published": ("async", {"faithful": True}),
    "duo": ("duo", {}),
    "duo, no interruption": ("duo", {"interrupt": False}),
    "duo, one by one": ("duo", {"batched": False, "worth": 0.02}),
    "duo, wide": ("duo", {"branches": 8, "worth": 0.01}),
    "duo, after the round": ("duo", {"first_token": "after_round", "budget": 3}),
    "duo, as published": ("duo", {"faithful": True, "budget": 8}),
}


class Slow(TableModel):
    """Takes a random time for each forward."""

    def __init__(self, most_ms: float, **options) -> None:
        super().__init__(VOCAB, **options)
        self.most_ms, self.count = most_ms, 0

    def advance(self, contexts, last=1, rows=None):
        self.count += 1
        time.sleep(self.most_ms * (self.count * 7919 % 100) / 100 / 1000)
        return super().advance(contexts, last, rows)


def make(name, given=None, twist=0.3, target_ms=0.0, draft_ms=0.0):
    models = {
        "target": Slow(target_ms, seed=1) if target_ms else TableModel(VOCAB, seed=1),
        "draft": Slow(draft_ms, seed=1, twist=twist) if draft_ms else TableModel(VOCAB, seed=1, twist=twist),
    }
    found = registry.get(name)
    return found(models, build(found.Options, given or {}, name))


def plain(asked, sampling):
    return toys.plain(asked, sampling, VOCAB)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", SAMPLINGS)
def test_tokens_equal_plain_decodings(way, how):
    """Drafts that are always right, often right, and hardly ever right; limits of 1 to 40 tokens."""
    for twist in (0.0, 0.3, 50.0):
        for limit in (1, 2, 7, 40):
            asked = requests(3, VOCAB, limit=limit, seed=limit)
            strategy = make(WAYS[way][0], WAYS[way][1], twist)
            assert decode(strategy, asked, SAMPLINGS[how]) == plain(asked, SAMPLINGS[how])
            if limit > 3 and twist == 0.0 and how == "greedy":
                assert strategy.facts["drafts_posted"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("target_ms", "draft_ms"), [(3.0, 0.5), (0.5, 3.0), (2.0, 2.0)])
def test_delays_on_either_side_never_change_a_token(way, target_ms, draft_ms):
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=7)):
        asked = requests(2, VOCAB, limit=24, seed=1)
        strategy = make(WAYS[way][0], WAYS[way][1], 0.5, target_ms, draft_ms)
        assert decode(strategy, asked, sampling) == plain(asked, sampling)


@pytest.mark.parametrize("way", WAYS)
def test_an_end_of_text_at_any_place_ends_the_sample(way):
    (request,) = requests(1, VOCAB, limit=20, seed=3)
    (whole,) = plain([request], Sampling())
    for end in set(whole):
        request.done = False
        strategy = make(*WAYS[way])
        (row,) = measure(strategy, [request], Sampling(), Ending(frozenset({end})), TickingClock(), Drain())
        assert row.error is None
        assert row.token_ids == whole[: whole.index(end) + 1]


@pytest.mark.parametrize("way", WAYS)
def test_accounts_add_up(way):
    """What the draft says it posted is looked at, confirmed or wasted; steps tell the same story."""
    for twist in (0.0, 0.3, 50.0):
        (request,) = requests(1, VOCAB, limit=60, seed=4)
        strategy = make(WAYS[way][0], WAYS[way][1], twist)
        (row,) = measure(strategy, [request], Sampling(), Ending(), TickingClock(), Drain())
        facts = row.facts
        assert facts["drafts_posted"] == facts["drafts_looked_at"] + facts["drafts_confirmed"] + facts["drafts_wasted"]
        assert facts["drafts_looked_at"] == sum(step[2] for step in row.steps)
        assert sum(step[4] for step in row.steps) <= facts["drafts_wasted"]
        assert 0 <= facts["target_prefill_ns"] <= facts["target_busy_ns"]
        assert 0 <= facts["draft_prefill_ns"] <= facts["draft_busy_ns"]
        assert facts["messages_sent"] > 0 < facts["messages_received"]
        if way == "duo, as published":  # has a draft that ranks tokens it does not post, and no controller
            assert facts["drafts_confirmed"] > 0 or twist == 50.0
            continue
        assert facts["draft_token_rows"] + facts["branches"] == facts["drafts_posted"]
        assert sum(count for name, count in facts.items() if name.startswith("steps_")) == len(row.steps) - 1


def test_published_protocol_takes_two_drafts_or_more_and_drafts_after_the_prefill():
    """Every verification but the last ones, where the limit leaves less room, looks at two tokens at least."""
    (request,) = requests(1, VOCAB, limit=50, seed=5)
    strategy = make("async", {"faithful": True}, target_ms=0.5)
    (row,) = measure(strategy, [request], Sampling(), Ending(), TickingClock(), Drain())
    left = 50 - 1
    for _, tokens, drafted, _, _ in row.steps[1:]:
        assert drafted >= min(2, left - 1)
        left -= tokens
    assert strategy.models["draft"].forwards[0] == [len(request.ids) + 1]  # the first token was there


def test_no_more_steps_than_plain_decoding():
    for way in WAYS:
        asked = requests(5, VOCAB, limit=30, seed=6)
        strategy = make(*WAYS[way], twist=50.0)
        for request in asked:
            decode(strategy, [request], Sampling())
            assert len(strategy.target.forwards) <= 30
            strategy.target.forwards.clear()


def test_what_cannot_be_exact_or_is_no_option_is_refused():
    asynchronous = registry.get("async")
    asynchronous.check(Sampling(verify="rejection"), 1)
    with pytest.raises(UsageError, match="no draft probabilities travel"):
        asynchronous.check(Sampling(temperature=1.0, verify="rejection"), 1)
    with pytest.raises(UsageError, match="at most 1 row"):
        asynchronous.check(Sampling(), 2)
    for given, match in [
        ({"lead": 0}, "at least 1 token ahead"),
        ({"min_ready": 17}, "from 0 to the lead"),
        ({"max_verify": 0}, "at least 1 token"),
        ({"faithful": True, "lead": 4}, "leave the others out"),
        ({"min_ready": "soon"}, "min_ready"),
    ]:
        with pytest.raises(UsageError, match=match):
            make("async", given)


class Broken(TableModel):
    def advance(self, contexts, last=1, rows=None):
        if len(self.forwards) == 3:
            raise RuntimeError("the device is gone")
        return super().advance(contexts, last, rows)


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_on_either_side_is_an_error_and_leaves_nothing_running(way):
    before = threading.active_count()
    for role in ("target", "draft"):
        strategy = make(*WAYS[way], target_ms=2.0)
        strategy.models[role] = Broken(VOCAB, seed=1)
        strategy.target = strategy.models["target"]
        (request,) = requests(1, VOCAB, limit=40, seed=8)
        (row,) = measure(strategy, [request], Sampling(), Ending(), TickingClock(), Drain())
        assert "the device is gone" in row.error
        assert ("WorkerError" in row.error) == (role == "draft")
        assert threading.active_count() == before


def test_a_thousand_prompts_in_a_row_leave_nothing_behind():
    strategy, before = make("async"), threading.active_count()
    asked = requests(1000, VOCAB, limit=3, seed=9)
    assert decode(strategy, asked, Sampling()) == plain(asked, Sampling())
    assert threading.active_count() == before


# The controller

COSTS = Costs(lambda n: 100 + 4 * (n - 1), lambda r: 30 * (1 + 0.08 * (r - 1)), 1.08, 1.08)


def controlled(**options):
    return Controller(Way("overlap", 1, 12, 16), ways(COSTS, 12, 16), **options)


def drive(controller, steps, drafted, accepted, hit=False):
    for _ in range(steps):
        controller.observe(drafted, accepted, accepted + 1, hit)
    return controller.way


def test_controller_overlaps_while_drafts_are_taken():
    controller = controlled()
    assert drive(controller, 30, 4, 4).mode == "overlap"
    assert controller.alpha > 0.95


def test_controller_rests_the_draft_where_nothing_is_taken_and_tries_again():
    controller = controlled()

    def steps_until(mode, drafted):
        steps = 0
        while controller.way.mode != mode:
            controller.observe(drafted, 0, 1, False)
            steps += 1
        return steps

    assert 12 / 3 <= steps_until("plain", 3) <= 12
    assert controller.changes == 1
    assert steps_until("overlap", 0) == REST_TOKENS
    assert steps_until("plain", 3) <= 12
    assert steps_until("overlap", 0) == 2 * REST_TOKENS


def test_controller_takes_turns_where_overlap_is_expected_to_lose():
    dear = Costs(COSTS.target_ms, lambda r: 10.0, 1.5, 1.5)
    controller = Controller(Way("overlap", 1, 12, 16), ways(dear, 12, 16))
    way = drive(controller, 20, 3, 2)
    assert way.mode == "turns"
    assert way.need == way.most == way.lead >= 1


def test_controller_gives_up_a_draft_that_is_never_there_in_time():
    """Steps without a draft were once left out of the count, and a draft as slow as the target was kept for ever."""
    slow = Costs(COSTS.target_ms, lambda r: 110.0, 1.4, 1.4)
    controller = Controller(Way("overlap", 1, 12, 16), ways(slow, 12, 16), need=0)
    assert drive(controller, 20, 0, 0).mode == "plain"


def test_controller_keeps_to_the_limits_that_were_given_in_turns_too():
    dear = Costs(COSTS.target_ms, lambda r: 10.0, 1.5, 1.5)
    controller = Controller(Way("overlap", 1, 12, 16), ways(dear, 12, 16), most=2)
    way = drive(controller, 20, 2, 2)
    assert (way.mode, way.most, way.lead) == ("turns", 2, 2)


def test_controller_waits_for_a_minimum_and_can_be_switched_off():
    assert drive(controlled(), 3, 3, 0).mode == "overlap"
    assert drive(controlled(on=False), 40, 3, 0).mode == "overlap"
    way = drive(controlled(need=0, most=5), 3, 3, 3)
    assert (way.need, way.most) == (0, 5)


def test_controller_without_costs_keeps_what_it_was_given():
    start = Way("overlap", 1, 12, 16)
    assert drive(Controller(start, None), 50, 3, 0) == start


def test_prepared_strategy_measures_costs_and_says_what_it_did():
    strategy = make("async", target_ms=2.0, draft_ms=0.5)
    strategy.prepare(1, 64)
    assert strategy.costs.target_ms(1) > 0
    asked = requests(2, VOCAB, limit=30, seed=2)
    assert decode(strategy, asked, Sampling()) == plain(asked, Sampling())
    assert strategy.facts["mode"] in ("overlap", "turns", "plain")


# A real worker


@pytest.fixture(scope="module")
def pair():
    target = load(describe(parse("tiny"), "target"))
    draft = load_remote(describe(parse("tiny-draft"), "draft"), "draft", Device("cpu"), 1, vocab_size=target.vocab_size)
    yield {"target": target, "draft": draft}
    draft.close()


@pytest.mark.parametrize("way", ["async", "duo", "duo, no interruption", "duo, as published"])
def test_tokens_equal_plain_decodings_with_the_draft_in_a_worker(pair, way):
    name, given = WAYS[way]
    found = registry.get(name)
    # A controller would go by what a busy machine measures of models this small, and may never ask for a draft.
    steady = {} if given.get("faithful") else {"controller": False}
    strategy = found(pair, build(found.Options, {**given, **steady}, name))
    strategy.prepare(1, 64)
    reference = registry.get("autoregressive")({"target": pair["target"]}, None)
    posted = 0  # by all: where others keep the cores busy, a worker may miss a whole text of a target as fast as this
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=2)):
        for key in range(6):
            asked = [Request(key, [50 + key, 60, 70], 40)]
            assert decode(strategy, asked, sampling) == decode(reference, asked, sampling)
            posted += strategy.facts["drafts_posted"]
    assert posted > 0


def test_a_killed_worker_is_an_error_that_names_the_role_at_once():
    target = load(describe(parse("tiny"), "target"))
    draft = load_remote(describe(parse("tiny-draft"), "draft"), "draft", Device("cpu"), 1, vocab_size=target.vocab_size)
    found = registry.get("async")
    generation = found({"target": target, "draft": draft}, found.Options()).generate(
        [Request(1, [50, 60], 400)], Sampling()
    )
    next(generation)
    os.kill(draft.worker._process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="draft"):
        for _ in generation:
            pass
    assert time.monotonic() - began < 5
    draft.close()
