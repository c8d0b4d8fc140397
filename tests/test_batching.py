"""Continuous batching: rows whose request ends take up the next one, and nothing of it shows in any output or count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import Garbage, TableModel, TickingClock, requests

from specbench.errors import StrategyError
from specbench.hardware.clock import Drain
from specbench.models.base import CachedModel
from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.specs import parse
from specbench.options import build
from specbench.results import metrics
from specbench.results.measure import Call, Ending, Outcome, measure
from specbench.results.records import Sample
from specbench.strategies import registry
from specbench.strategies.autoregressive import Autoregressive, Options
from specbench.strategies.base import Batch, Request, Row, Step, Strategy
from specbench.strategies.sampling import Sampling
from specbench.strategies.speculative import draft_and_verify
from specbench.strategies.verify import Verifier

MS = 1_000_000
VOCAB = 12
NAMES = ("autoregressive", "speculative", "lookup", "cascade")
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=5),
    "T=0.6 top-p 0.9": Sampling(temperature=0.6, top_p=0.9, seed=5),
    "penalties": Sampling(presence_penalty=1.5, repetition_penalty=1.2),
    "rejection": Sampling(temperature=1.0, seed=5, verify="rejection"),
}
PROPERTY = settings(
    deadline=None, derandomize=True, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)


def models(twist: float = 1.0) -> dict[str, TableModel]:
    return {"target": TableModel(VOCAB, seed=1), "draft": TableModel(VOCAB, seed=1, twist=twist)}


def make(name: str, length: int = 4, **which) -> Strategy:
    strategy = registry.get(name)
    fields = {field.name for field in dataclasses.fields(strategy.Options)}
    given = {"draft_length": length} if "draft_length" in fields else {}
    return strategy(models(**which), build(strategy.Options, given, name))


def again(asked: Sequence[Request]) -> list[Request]:
    return [dataclasses.replace(request, done=False) for request in asked]


def run(
    strategy: Strategy, asked: Sequence[Request], sampling: Sampling, rows: int, ending: Ending | None = None
) -> list[Outcome]:
    outcomes = measure(strategy, again(asked), sampling, ending or Ending(), TickingClock(), Drain(), rows)
    assert [outcome.error for outcome in outcomes] == [None] * len(asked)
    return outcomes


def alone(
    strategy: Strategy, asked: Sequence[Request], sampling: Sampling, ending: Ending | None = None
) -> list[Outcome]:
    return [run(strategy, [request], sampling, 1, ending)[0] for request in asked]


def said(outcomes: Sequence[Outcome]) -> list[tuple[list[int], str | None]]:
    return [(outcome.token_ids, outcome.finish) for outcome in outcomes]


# Tokens


@PROPERTY
@given(
    name=st.sampled_from(NAMES),
    how=st.sampled_from(list(SAMPLINGS)),
    limits=st.lists(st.integers(1, 14), min_size=1, max_size=9),
    rows=st.integers(1, 5),
    length=st.integers(1, 6),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    seed=st.integers(0, 3),
)
def test_every_answer_is_the_one_that_its_prompt_gets_alone(name, how, limits, rows, length, eos, seed):
    """Whoever ends when, whose row is taken by whom, whatever the drafts are: the same tokens and the same end; under
    the coupled rule those of plain decoding."""
    sampling, ending = SAMPLINGS[how], Ending(frozenset(eos))
    asked = [
        dataclasses.replace(request, max_new_tokens=limit)
        for request, limit in zip(requests(len(limits), VOCAB, seed=seed), limits, strict=True)
    ]
    outcomes = run(make(name, length), asked, sampling, rows, ending)
    reference = name if how == "rejection" else "autoregressive"
    assert said(outcomes) == said(alone(make(reference, length), asked, sampling, ending))
    _check_times(outcomes, min(rows, len(asked)))


def _check_times(outcomes: Sequence[Outcome], rows: int) -> None:
    ends = [outcome.admitted_ns + (outcome.e2e_ns or 0) for outcome in outcomes]
    admitted = [outcome.admitted_ns for outcome in outcomes]
    assert admitted == sorted(admitted)  # nobody overtakes
    assert admitted[:rows] == [0] * rows
    assert set(admitted[rows:]) <= set(ends)  # a row is taken the moment it is free
    assert len(set(admitted[rows:])) == len(admitted[rows:])
    for at in admitted:
        assert sum(begin <= at < end for begin, end in zip(admitted, ends, strict=True)) <= rows
    for outcome in outcomes:
        assert outcome.call_ns == max(ends)
        assert outcome.call_tokens == sum(len(other.token_ids) for other in outcomes)
        assert [step[0] for step in outcome.steps] == sorted(step[0] for step in outcome.steps)
        assert (outcome.steps[0][1:], outcome.steps[0][0]) == ([1, 0, 0, 0], outcome.ttft_ns)  # the prefill


@pytest.mark.parametrize("how", ["greedy", "T=1", "rejection"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_knows_nothing_of_who_was_there_before(name, how):
    """Steps, drafts and what was accepted of them are those of the prompt alone, which an index, a cache or a count
    that is left over would change."""
    asked = [
        dataclasses.replace(request, max_new_tokens=4 + number % 7)
        for number, request in enumerate(requests(14, VOCAB, seed=3))
    ]
    steps = [[step[1:] for step in one.steps] for one in run(make(name), asked, SAMPLINGS[how], 3)]
    assert steps == [[step[1:] for step in one.steps] for one in alone(make(name), asked, SAMPLINGS[how])]


def test_drafts_of_any_kind_are_judged_row_by_row():
    class Careless(Autoregressive):
        def generate(self, requests, sampling):
            yield from draft_and_verify(self.target, Garbage(VOCAB, seed=1), Verifier(sampling), requests, 5)

    asked = [
        dataclasses.replace(request, max_new_tokens=1 + number % 9)
        for number, request in enumerate(requests(20, VOCAB))
    ]
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T=1"]):
        plain = said(alone(make("autoregressive"), asked, sampling))
        assert said(run(Careless(models(), Options()), asked, sampling, 4)) == plain


@pytest.fixture(scope="module", params=["packed float32", "packed bfloat16", "transformers float32"])
def real(request):
    runtime, dtype = request.param.split()
    return {
        role: load(describe(parse(name), role), runtime=runtime, dtype=dtype)
        for role, name in (("target", "tiny"), ("draft", "tiny-draft"))
    }


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=2)], ids=["greedy", "sampled"])
def test_real_models_say_the_same_in_any_company(real, sampling):
    """Tiny transformers, where rounding is real; 24 prompts through 4 rows, beside each prompt alone."""
    random = np.random.default_rng(1)
    asked = [
        Request(key, random.integers(32, 127, random.integers(1, 40)).tolist(), int(random.integers(1, 20)))
        for key in range(24)
    ]
    plain = said(alone(Autoregressive(real, Options()), asked, sampling))
    for name in NAMES:
        strategy = registry.get(name)(real, registry.get(name).Options())
        assert said(run(strategy, asked, sampling, 4)) == plain, name


# Forwards


def forwards(name: str, asked: Sequence[Request], rows: int) -> list[list[int]]:
    """New tokens per row of every forward of the target."""
    strategy = make(name)
    run(strategy, asked, Sampling(), rows)
    return strategy.target.forwards  # type: ignore[attr-defined]


def test_rows_that_end_in_the_same_step_are_replaced_together_and_read_in_one_forward():
    asked = [Request(key, [1, 2, 3, 4, 5], 3) for key in range(4)]
    assert forwards("autoregressive", asked, 2) == [[5, 5], [1, 1], [1, 1]] * 2


def test_a_prompt_is_read_by_itself_while_the_other_rows_wait():
    """The first row ends after two tokens, so the third prompt is read between two forwards of the second row."""
    asked = [Request(0, [1, 2, 3], 2), Request(1, [4, 5, 6, 7], 4), Request(2, [8, 9], 2)]
    assert forwards("autoregressive", asked, 2) == [[3, 4], [1, 1], [2], [1, 1], [1]]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_read_whole_even_where_the_row_holds_the_very_same(name):
    """Fresh caches for every request: a repeated prompt, or a common beginning, is no faster than the first."""
    prompt = list(range(11))
    asked = [Request(key, prompt, 3 + key % 4) for key in range(9)]
    strategy = make(name)
    run(strategy, asked, Sampling(), 3)
    seen = strategy.target.forwards  # type: ignore[attr-defined]
    assert sum(new >= len(prompt) for forward in seen for new in forward) == len(asked)
    for forward in seen:
        assert set(forward) == {len(prompt)} or max(forward) < len(prompt)


def test_the_draft_model_reads_every_prompt_anew():
    prompt = list(range(11))
    asked = [Request(key, prompt, 6) for key in range(9)]
    strategy = make("speculative")
    run(strategy, asked, Sampling(), 3)
    read = [new for forward in strategy.models["draft"].forwards for new in forward]  # type: ignore[attr-defined]
    assert sum(new >= len(prompt) for new in read) == len(asked)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_a_row_costs_one_forward_of_it(name):
    """Steps after the first are verifications, in which no token of the context is computed twice."""
    asked = [
        dataclasses.replace(request, max_new_tokens=2 + number % 6)
        for number, request in enumerate(requests(11, VOCAB, seed=4))
    ]
    strategy = make(name)
    outcomes = run(strategy, asked, Sampling(), 3)
    new = sum(sum(forward) for forward in strategy.target.forwards)  # type: ignore[attr-defined]
    steps = [step for outcome in outcomes for step in outcome.steps[1:]]
    # What was trimmed at the end of an answer is not in its last step's count, and there is no end of text here.
    assert new == sum(len(request.ids) for request in asked) + sum(step[2] + 1 for step in steps)


@pytest.mark.parametrize("runtime", ["packed", "transformers"])
def test_a_model_forgets_one_row_and_keeps_the_others(runtime):
    model, fresh = (load(describe(parse("tiny"), "target"), runtime=runtime) for _ in range(2))
    contexts = [[40, 41, 42, 43], [50, 51, 52, 53, 54], [60, 61, 62]]
    model.forget(3)  # never used
    model.advance(contexts)
    model.trace = []
    model.forget(1)
    together = model.advance([[*ids, 70] for ids in contexts])
    assert [(forward.rows, forward.new_tokens) for forward in model.trace] == [(3, 1 + 6 + 1)]
    for ids, logits in zip(contexts, together, strict=True):
        fresh.reset()
        torch.testing.assert_close(logits, fresh.advance([[*ids, 70]])[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_forget_a_row_says_so():
    class Stubborn(TableModel):
        forget = CachedModel.forget

    with pytest.raises(NotImplementedError, match="table-0: the table runtime cannot forget a single row"):
        Stubborn().forget(0)


# The batch as a strategy sees it


def test_a_batch_notices_who_takes_a_row():
    begun: list[tuple[int, int]] = []

    class Noting(Garbage):
        def begin(self, row: Row) -> None:
            begun.append((row.index, row.request.key))

    asked = [Request(key, [1, 2], 9) for key in range(4)]
    seen = asked[:2]
    batch = Batch(seen, TableModel(VOCAB), Noting(VOCAB))
    assert begun == [(0, 0), (1, 1)]
    first, second = batch.next()
    first.tokens.extend([5])
    assert batch.next() == [second]  # its prompt is still to be read
    second.tokens.extend([6])
    assert batch.next() == [first, second]
    asked[1].done = True
    seen[1] = asked[2]
    (third,) = batch.next()
    assert (third.index, third.request, third.new_tokens) == (1, asked[2], 0)
    assert begun == [(0, 0), (1, 1), (1, 2)]
    third.tokens.extend([7])
    asked[0].done = True
    assert batch.next() == [third]
    asked[2].done = True
    assert batch.next() == []


# Times


class Scripted(Autoregressive):
    """Yields the steps that it was given, then ends or raises."""

    def __init__(self, steps: Sequence[Step], error: BaseException | None = None) -> None:
        super().__init__({"target": TableModel(VOCAB)}, Options())
        self.steps, self.error = steps, error

    def generate(self, requests, sampling):
        yield from self.steps
        if self.error:
            raise self.error


STEPS = [Step(0, (5,)), Step(1, (6,)), Step(0, (7,)), Step(1, (8,)), Step(0, (1,)), Step(1, (9,)), Step(0, (2,))]


def scripted(error: BaseException | None = None, cut: int | None = None, drain=None) -> Call:
    """Two rows and three requests, of two, three and two tokens; the clock ticks by 10 ms with every step."""
    asked = [Request(1, [1], 2), Request(2, [1], 3), Request(3, [1], 2)]
    return Call(Scripted(STEPS[:cut], error), asked, Sampling(), Ending(), TickingClock(), drain or Drain(), rows=2)


def sample_of(number: int, outcome: Outcome) -> Sample:
    return Sample(
        "a", "t", f"p{number}", f"h{number}", "", 0, 0, "measure", 4, 2, 1, 9, outcome.token_ids, outcome.finish,
        outcome.ttft_ns, outcome.e2e_ns, outcome.drain_ns, outcome.steps, admitted_ns=outcome.admitted_ns or None,
        call_ns=outcome.call_ns, call_tokens=outcome.call_tokens,
    )  # fmt: skip


def test_a_requests_times_count_from_when_it_got_its_row():
    """The first ends with the third step, at 30 ms; the third request has its row from then on."""
    first, second, third = scripted().run()
    assert (first.admitted_ns, first.ttft_ns, first.e2e_ns) == (0, 10 * MS, 30 * MS)
    assert (second.admitted_ns, second.ttft_ns, second.e2e_ns) == (0, 20 * MS, 60 * MS)
    assert (third.admitted_ns, third.ttft_ns, third.e2e_ns) == (30 * MS, 20 * MS, 40 * MS)
    assert [outcome.token_ids for outcome in (first, second, third)] == [[5, 7], [6, 8, 9], [1, 2]]
    assert third.steps == [[20 * MS, 1, 0, 0, 0], [40 * MS, 1, 0, 0, 0]]
    assert {(one.call_ns, one.call_tokens, one.drain_ns) for one in (first, second, third)} == {(70 * MS, 7, 10 * MS)}


def test_throughput_is_all_tokens_over_the_time_of_the_call_and_latency_a_rows_own():
    """7 tokens in 70 ms are 100 tok/s, of which one request sees (1 + 2 + 1) tokens in (20 + 40 + 20) ms."""
    samples = [sample_of(number, outcome) for number, outcome in enumerate(scripted().run())]
    assert metrics.wall_ns(samples) == 70 * MS
    assert metrics.throughput_tokens_per_s(samples) == 100
    assert metrics.decode_tokens_per_s(samples) == 50
    assert metrics.e2e_tokens_per_s(samples) == pytest.approx(7 / 0.130)
    assert metrics.drain_share(samples) == pytest.approx(1 / 7)
    assert all(metrics.defects(sample) == [] for sample in samples)
    # A row of the call that is on record from an earlier one takes nothing from the throughput.
    assert metrics.throughput_tokens_per_s(samples[:1]) == 100


def test_more_rows_than_requests_are_as_many_as_requests():
    asked = [Request(key, [1, 2], 2) for key in range(3)]
    strategy = make("autoregressive")
    run(strategy, asked, Sampling(), rows=8)
    assert strategy.target.forwards == [[2, 2, 2], [1, 1, 1]]  # type: ignore[attr-defined]


def test_a_strategy_that_replaces_no_rows_gets_as_many_requests_as_rows():
    class Grouped(Autoregressive):
        continuous = False

    strategy, asked = Grouped(models(), Options()), requests(3, VOCAB, limit=5)
    with pytest.raises(ValueError, match=r"3 requests in 2 row\(s\)"):
        Call(strategy, asked, Sampling(), Ending(), TickingClock(), Drain(), rows=2)
    assert said(run(strategy, asked, Sampling(), rows=3)) == said(alone(strategy, asked, Sampling()))


def test_what_ends_a_row_may_differ_from_request_to_request():
    asked = [Request(1, [1], 9), Request(2, [1], 9), Request(3, [1], 9)]
    endings = [Ending(frozenset({7})), Ending(frozenset({9})), Ending(frozenset({2}))]
    outcomes = measure(Scripted(STEPS), asked, Sampling(), endings, TickingClock(), Drain(), rows=2)
    assert said(outcomes) == [([5, 7], "eos"), ([6, 8, 9], "eos"), ([1, 2], "eos")]


# Failures


def test_a_failure_costs_what_was_in_a_row_and_nothing_else():
    """It comes after the fourth step: the first request has ended, the second and third are in the rows."""
    first, second, third = scripted(RuntimeError("out of\nmemory"), cut=4).run()
    assert (first.token_ids, first.finish, first.error) == ([5, 7], "length", None)
    assert (first.call_ns, first.call_tokens, first.drain_ns) == (40 * MS, 4, None)  # what the call did until then
    for failed in (second, third):
        assert failed.error == "RuntimeError: out of memory"
        assert (failed.token_ids, failed.finish, failed.ttft_ns, failed.e2e_ns) == ([], None, None, None)


def test_what_still_waits_when_a_call_breaks_off_has_neither_failed_nor_ended():
    first, second, third = scripted(RuntimeError("no"), cut=1).run()
    assert first.error == second.error == "RuntimeError: no"
    assert (third.error, third.finish, third.token_ids) == (None, None, [])


def test_a_strategy_that_stops_early_has_failed_in_the_rows_it_left():
    first, second, third = scripted(cut=5).run()
    assert first.error is None
    assert second.error == third.error
    assert "stopped by itself after 1 tokens of row 0" in str(second.error)


def test_an_error_after_the_last_token_fails_the_last_ones():
    """Devices tell of their errors late: nothing vouches for what came just before."""
    calls = []

    def drain():
        calls.append(1)
        if len(calls) == 2:
            raise StrategyError("the device is gone")

    first, second, third = scripted(drain=drain).run()
    assert first.error is None
    assert second.error == third.error == "StrategyError: the device is gone"


def test_ctrl_c_leaves_what_had_ended():
    call = scripted(KeyboardInterrupt(), cut=4)
    with pytest.raises(KeyboardInterrupt):
        call.run()
    first, second, third = call.outcomes
    assert (first.token_ids, first.finish, first.call_tokens) == ([5, 7], "length", 4)
    assert [(one.finish, one.error) for one in (second, third)] == [(None, None)] * 2


# Stalls


def test_a_gap_in_which_another_row_read_its_prompt_is_no_stall():
    """Two rows with steps of 10 ms; at 100 ms the second row gets a new request, whose prompt takes 300 ms."""
    times = [10, *range(20, 110, 10), *range(400, 500, 10)]
    steady = [[at * MS, 1, 0, 0, 0] for at in times]
    first = Sample("a", "t", "p0", "h0", "", 0, 0, "measure", 1, 2, 5, 99, [1] * len(times), "length", times[0] * MS,
                   times[-1] * MS, 0, steady)  # fmt: skip
    second = dataclasses.replace(
        first, prompt_id="p1", token_ids=[1] * 3, steps=[[290 * MS, 1, 0, 0, 0], [300 * MS, 1, 0, 0, 0],
        [310 * MS, 1, 0, 0, 0]], ttft_ns=290 * MS, e2e_ns=310 * MS, admitted_ns=100 * MS,
    )  # fmt: skip
    assert max(after - before for before, after in pairwise(times)) == 300
    assert metrics.stall_share([first, second]) == 0
    assert metrics.stall_share([dataclasses.replace(first, batch_rows=1)]) == pytest.approx(300 / 470)
