"""The receiver: times, counts, trims, and turns whatever a strategy does wrong into a failed record."""

from __future__ import annotations

import pytest
from toys import TableModel, TickingClock, requests

from specbench.hardware.clock import Drain
from specbench.results import metrics
from specbench.results.lossless import Divergence, first_difference, report, violations
from specbench.results.measure import Ending, Outcome, measure
from specbench.results.records import Sample
from specbench.strategies.autoregressive import Autoregressive, Options
from specbench.strategies.base import Request, Step
from specbench.strategies.sampling import Sampling
from specbench.strategies.speculative import Options as SpeculativeOptions
from specbench.strategies.speculative import Speculative

MS = 1_000_000


class Scripted(Autoregressive):
    """Yields the steps it was given, then ends or raises."""

    def __init__(self, steps, error: BaseException | None = None):
        super().__init__({"target": TableModel(8)}, Options())
        self.steps, self.error, self.resets, self.closed = steps, error, 0, False

    def reset(self):
        self.resets += 1

    def generate(self, requests, sampling):
        try:
            yield from self.steps
            if self.error:
                raise self.error
        finally:
            self.closed = True


def outcome(steps, limit=100, ending=None, error=None, drain=None, clock=None) -> Outcome:
    strategy = Scripted(steps, error)
    (row,) = measure(
        strategy, [Request(1, [1], limit)], Sampling(), ending or Ending(), clock or TickingClock(), drain or Drain()
    )
    assert strategy.closed
    assert strategy.resets == 1
    return row


def test_times_are_of_tokens_on_the_host():
    """The clock ticks by 10 ms per reading: once at the start, then once per step."""
    row = outcome([Step(0, (5,)), Step(0, (6, 7), 2, 1), Step(0, (1, 2, 3), 2, 2)], limit=6)
    assert row.ttft_ns == 10 * MS
    assert row.e2e_ns == 30 * MS
    assert row.token_ids == [5, 6, 7, 1, 2, 3]
    assert row.steps == [[10 * MS, 1, 0, 0, 0], [20 * MS, 2, 2, 1, 0], [30 * MS, 3, 2, 2, 0]]


def test_tpot_times_n_minus_1_is_the_decode_time():
    """M4: a step's interval is never counted as one token's latency."""
    row = outcome([Step(0, (5,)), Step(0, (6, 7), 2, 1), Step(0, (1, 2, 3), 2, 2)], limit=6)
    sample = Sample("a", "t", "p", "h", "", 0, 0, "measure", 0, 1, 1, 6, row.token_ids, row.finish, row.ttft_ns,
                    row.e2e_ns, row.drain_ns, row.steps)  # fmt: skip
    assert metrics.tpot_ns(sample) * 5 == pytest.approx(metrics.decode_ns(sample)) == 20 * MS


def test_devices_are_drained_before_the_start_and_after_the_end():
    """P5, P6: a fake asynchronous device that works on for 70 ms; its work is seen as drain time, not hidden."""
    clock = TickingClock()
    calls = []

    def wait():
        calls.append(clock.time)
        clock.time += 70 * MS if len(calls) == 2 else 0

    row = outcome([Step(0, (5,))], limit=1, drain=Drain((wait,)), clock=clock)
    assert calls == [0, 30 * MS]  # before the first reading; after the reading at the end
    assert row.drain_ns == 80 * MS
    assert row.e2e_ns == 10 * MS


def test_a_failing_strategy_leaves_an_error_and_no_times():
    """M8, M9, P34: not a number that can be mistaken for one."""
    row = outcome([Step(0, (5,))], error=RuntimeError("out of\n memory"))
    assert row.error == "RuntimeError: out of memory"
    assert (row.ttft_ns, row.e2e_ns, row.drain_ns, row.token_ids, row.steps) == (None, None, None, [], [])


def test_ctrl_c_is_not_a_failed_sample():
    with pytest.raises(KeyboardInterrupt):
        outcome([Step(0, (5,))], error=KeyboardInterrupt())


@pytest.mark.parametrize(
    "step",
    [Step(0, ()), Step(1, (5,)), Step(-1, (5,)), Step(0, (5,), 1, 2), Step(0, (5,), 3, 2), Step(0, (5.0,)),  # type: ignore[arg-type]
     Step(0, (True,))],
)  # fmt: skip
def test_an_invalid_step_is_an_error(step):
    assert outcome([step]).error.startswith("StrategyError")


def test_a_strategy_that_stops_by_itself_has_failed():
    assert "stopped by itself after 1 tokens" in outcome([Step(0, (5,))], limit=3).error


def test_one_failing_sample_does_not_spoil_the_next():
    """D36."""
    strategy = Scripted([], error=RuntimeError("boom"))
    assert measure(strategy, [Request(1, [1], 4)], Sampling(), Ending(), TickingClock(), Drain())[0].error
    strategy.error, strategy.steps = None, [Step(0, (1,)), Step(0, (2, 3, 4), 2, 2)]
    assert measure(strategy, [Request(1, [1], 4)], Sampling(), Ending(), TickingClock(), Drain())[0].error is None


# Trimming


def test_the_limit_cuts_inside_a_block():
    row = outcome([Step(0, (5,)), Step(0, (1, 2, 3, 4), 3, 3)], limit=3)
    assert row.token_ids == [5, 1, 2]
    assert row.finish == "length"
    assert row.steps[1] == [20 * MS, 2, 2, 2, 0]


def test_any_of_several_end_of_text_ids_ends_and_is_kept():
    """P20."""
    row = outcome([Step(0, (5,)), Step(0, (1, 9, 8, 4), 5, 3)], ending=Ending(frozenset({8, 9})))
    assert (row.token_ids, row.finish) == ([5, 1, 9], "eos")
    assert row.steps[1][1:4] == [2, 2, 2]


def test_end_of_text_as_the_last_allowed_token_is_called_so():
    assert outcome([Step(0, (9,))], limit=1, ending=Ending(frozenset({9}))).finish == "eos"


def test_a_stop_string_over_several_tokens_and_steps():
    words = {1: "def ", 2: "f", 3: "():", 4: "\n", 5: "\nclass", 6: " X"}
    decode = lambda ids: "".join(words[token] for token in ids)  # noqa: E731
    ending = Ending(stop=("\n\nclass", "never"), decode=decode)
    row = outcome([Step(0, (1,)), Step(0, (2, 3, 4), 2, 2), Step(0, (5, 6), 1, 1)], ending=ending)
    assert (row.token_ids, row.finish) == ([1, 2, 3, 4, 5], "stop")
    assert row.steps[2][1:4] == [1, 1, 1]


def test_rows_of_a_batch_end_one_by_one():
    steps = [Step(0, (1,)), Step(1, (2,)), Step(0, (9,)), Step(1, (3,)), Step(0, (7,)), Step(1, (4,))]
    asked = [Request(1, [1], 5), Request(2, [1], 3)]
    rows = measure(Scripted(steps), asked, Sampling(), Ending(frozenset({9})), TickingClock(), Drain())
    assert [row.token_ids for row in rows] == [[1, 9], [2, 3, 4]]
    assert [row.finish for row in rows] == ["eos", "length"]
    assert rows[0].e2e_ns == 30 * MS
    assert rows[1].e2e_ns == 60 * MS


def test_the_receiver_counts_for_itself():
    """M2, P1: the same counter for all arms. Ten thousand tokens claimed in one step are cut at the limit."""
    row = outcome([Step(0, tuple(range(10_000)), 9_999, 9_999)], limit=7)
    assert len(row.token_ids) == 7
    assert row.steps[0][1:4] == [7, 7, 7]


def test_a_real_strategy_through_the_loop():
    (request,) = requests(1, 8, limit=20)
    strategy = Autoregressive({"target": TableModel(8)}, Options())
    (row,) = measure(strategy, [request], Sampling(), Ending(), TickingClock(), Drain())
    assert len(row.token_ids) == len(row.steps) == 20
    assert row.e2e_ns == 200 * MS


class Costed(TableModel):
    """A table whose forwards take time on a fake clock: a share per forward, a share per token and cached token."""

    def __init__(self, clock: TickingClock, base_ms: float, per_token_ms: float, per_cell_ms: float, **more):
        super().__init__(context_length=8192, **more)
        self.clock, self.costs = clock, (base_ms, per_token_ms, per_cell_ms)

    def advance(self, contexts, last=1, rows=None):
        out = super().advance(contexts, last, rows)
        new, cached = sum(self.forwards[-1]), len(contexts[0])
        base, per_token, per_cell = self.costs
        self.clock.time += round((base + per_token * new + per_cell * new * cached) * MS)
        return out


def test_a_sweep_over_contexts_shows_where_speculation_stops_paying():
    """M10: where attention makes a verified token dear, the gain shrinks with the context and crosses 1."""
    speedups = []
    for context in (32, 512, 4096):
        seconds = {}
        for strategy, options in ((Autoregressive, Options()), (Speculative, SpeculativeOptions(draft_length=4))):
            clock = TickingClock(step=0)
            models = {
                "target": Costed(clock, 10, 0.2, 0.02, vocab=8, seed=1),
                "draft": Costed(clock, 1, 0.1, 0.001, vocab=8, seed=1, twist=2.0),
            }
            prompt = [number * number % 8 for number in range(context)]
            asked = [Request(1, prompt, 60)]
            (row,) = measure(strategy(models, options), asked, Sampling(), Ending(), clock, Drain())
            assert row.e2e_ns is not None
            # The draft's prefill comes after the first token; what is compared here is the steady state.
            seconds[strategy.name] = row.e2e_ns - row.steps[1][0]
        speedups.append(seconds["autoregressive"] / seconds["speculative"])
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 1 > speedups[-1]


# Lossless report


def sample(arm: str, ids: list[int], prompt="p", repeat=0, error=None, kind="measure") -> Sample:
    return Sample(
        arm, "t", prompt, "h" + prompt, "", 0, repeat, kind, 0, 1, 3, 9, ids, "length", 1, 2, 0, [], error=error
    )


def judge_with(gap: float, tolerance: float = 0.1):
    return lambda reference, index, token, other: Divergence(index, gap, gap, tolerance)


def never(*_):
    raise AssertionError("nothing to judge")


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_exact_outputs_are_counted_without_asking_the_model():
    found = report(
        [sample("base", [1, 2]), sample("x", [1, 2]), sample("x", [1, 2], kind="check")], "base", ["x"], never
    )
    assert found == {"t": {"x": {"exact": 1, "near_tie": 0, "different": 0, "compared": 1, "first": []}}}
    assert violations(found) == []


def test_a_divergence_within_rounding_is_a_near_tie_and_beyond_it_a_difference():
    """D9, D11, D39, P14: classified with its gap, not simply failed."""
    samples = [sample("base", [1, 2, 3]), sample("x", [1, 5, 3])]
    tie = report(samples, "base", ["base", "x"], judge_with(0.05))["t"]["x"]
    assert (tie["exact"], tie["near_tie"], tie["different"], tie["compared"]) == (0, 1, 0, 1)
    assert tie["first"] == [{"prompt_id": "p", "turn": 0, "index": 1, "top_gap": 0.05, "gap": 0.05, "near_tie": True}]
    real = report(samples, "base", ["x"], judge_with(0.5))["t"]["x"]
    assert (real["near_tie"], real["different"]) == (0, 1)
    assert "0 of 1 outputs exact, 0 near-tie(s), 1 different" in violations({"t": {"x": real}})[0]


def test_an_output_cut_short_is_a_difference_whatever_the_gap():
    """C10: a truncated result is not equal to what it is a prefix of."""
    found = report([sample("base", [1, 2, 3]), sample("x", [1, 2])], "base", ["x"], never)["t"]["x"]
    assert (found["different"], found["first"][0]["index"]) == (1, 2)


def test_failed_samples_leave_both_arms():
    """P34."""
    samples = [sample("base", [1], "p"), sample("x", [], "p", error="boom"), sample("base", [], "q", error="boom"),
               sample("x", [1], "q"), sample("base", [4], "r"), sample("x", [4], "r")]  # fmt: skip
    assert report(samples, "base", ["x"], never)["t"]["x"]["compared"] == 1


def test_nothing_compared_is_not_lossless():
    assert violations({}) != []
    assert violations(None) != []
