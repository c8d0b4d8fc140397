"""Every metric against its formula, on records made by hand and on records made by chance."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import MS, arm, failed, role, sample

from specbench.results import metrics
from specbench.results.records import Sample

# No deadline, which a busy machine misses, and the same examples every time.
PROPERTY = settings(
    deadline=None, derandomize=True, database=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sound finished sample: times never run back, accepted <= drafted, the last step may be trimmed."""
    now = draw(st.integers(0, 10**9))
    steps = [[now, 1, 0, 0, draw(st.integers(0, 3))]]
    for _ in range(draw(st.integers(0, 12))):
        drafted = draw(st.integers(0, 6))
        accepted = draw(st.integers(0, drafted))
        now += draw(st.integers(0, 10**8))
        steps.append([now, accepted + 1, drafted, accepted, draw(st.integers(0, 3))])
    if len(steps) > 1:
        steps[-1][metrics.KEPT] = draw(st.integers(1, steps[-1][metrics.KEPT]))
    emitted = sum(step[metrics.KEPT] for step in steps)
    return dataclasses.replace(sample(), token_ids=[7] * emitted, ttft_ns=steps[0][0], e2e_ns=now, steps=steps)


@PROPERTY
@given(samples())
def test_time_per_output_token_times_tokens_is_decode_time(one: Sample) -> None:
    """M4: a step's interval is never taken for one token's latency."""
    tpot = metrics.tpot_ns(one)
    n = len(one.token_ids)
    assert (tpot is None) == (n < 2)
    if tpot is not None:
        assert tpot * (n - 1) == pytest.approx(metrics.decode_ns(one))
    assert metrics.ttft_ns(one) + metrics.decode_ns(one) == metrics.e2e_ns(one)


@PROPERTY
@given(samples())
def test_gaps_add_up_to_decode_time_and_there_are_n_minus_1(one: Sample) -> None:
    """M4: both series of gaps have one value per token after the first."""
    for gaps in (metrics.step_gaps_ns(one), metrics.amortised_gaps_ns(one)):
        assert len(gaps) == len(one.token_ids) - 1
        assert sum(gaps) == pytest.approx(metrics.decode_ns(one))
        assert min(gaps, default=0) >= 0


@PROPERTY
@given(st.lists(samples(), min_size=1, max_size=5))
def test_drafting_counts_are_consistent(some: list[Sample]) -> None:
    """M3: all definitions of acceptance follow from the same stored sums."""
    counts = metrics.drafting(some)
    assert counts.steps == sum(len(one.steps) - 1 for one in some)
    assert counts.tokens == sum(len(one.token_ids) - 1 for one in some)
    assert 0 <= counts.accepted <= counts.drafted
    assert sum(counts.accepted_at_least) == counts.accepted
    assert sum(counts.drafted_at_least) == counts.drafted
    assert counts.accepted_at_least == sorted(counts.accepted_at_least, reverse=True)
    assert all(0 <= share <= 1 for share in counts.conditional_acceptance_by_position)
    if counts.steps and counts.drafted:
        assert sum(counts.acceptance_by_position) == pytest.approx(counts.accepted_per_step)
        assert counts.acceptance_rate == pytest.approx(counts.accepted / counts.drafted)
    if counts.steps:
        # Every step adds at most one token to those it accepted; trimming takes only that one away.
        assert counts.accepted <= counts.tokens <= counts.accepted + counts.steps


@PROPERTY
@given(st.lists(samples(), max_size=4), st.lists(samples(), max_size=4))
def test_counts_of_two_sets_add_up(some: list[Sample], more: list[Sample]) -> None:
    both, apart = metrics.drafting(some + more), metrics.drafting(some) + metrics.drafting(more)
    assert both == apart


@PROPERTY
@given(samples())
def test_a_sound_record_has_no_defects(one: Sample) -> None:
    assert metrics.defects(one) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [1, 2, 3]}, "kept 8 tokens, its ids are 3"),
        ({"ttft_ns": 10**12}, "its first token came at"),
        ({"steps": [[40 * MS, 1, 0, 0, 0], [50 * MS, 7, 2, 3, 0]]}, "accepted more than it drafted"),
        ({"steps": [[40 * MS, 1, 0, 0, 0], [30 * MS, 7, 6, 6, 0]]}, "backwards"),
        ({"ttft_ns": None}, "no times"),
        ({"error": "boom"}, "it failed, yet has"),
    ],
)
def test_a_record_that_contradicts_itself_is_found_out(change: dict, words: str) -> None:
    """M2: a token counted in the steps and not in the ids (or the other way) cannot slip into a speed."""
    assert words in metrics.defects(dataclasses.replace(sample(tokens=8), **change))[0]


def test_failed_samples_are_sound_and_belong_to_no_mean() -> None:
    assert metrics.defects(failed()) == []
    assert metrics.finished([failed(), sample(), sample(kind="trace")]) == [sample()]


def test_speeds_of_one_sample_by_hand() -> None:
    """11 tokens: the first after 40 ms, ten more in 200 ms."""
    one = sample(tokens=11, step_ms=20, ttft_ms=40)
    assert metrics.decode_ns(one) == 200 * MS
    assert metrics.tpot_ns(one) == 20 * MS
    assert metrics.decode_tokens_per_s([one]) == pytest.approx(50)
    assert metrics.e2e_tokens_per_s([one]) == pytest.approx(11 / 0.240)


def test_pooling_divides_sums_and_never_averages_ratios() -> None:
    """M3: 2 tokens at 10 ms and 100 at 20 ms are 101 decode steps in 2.01 s, not the mean of 100 and 50 tok/s."""
    short, long = sample(tokens=2, step_ms=10), sample(tokens=101, step_ms=20)
    assert metrics.decode_tokens_per_s([short, long]) == pytest.approx(101 / 2.01)
    assert metrics.pooled_tpot_ns([short, long]) == pytest.approx(2010 / 101 * MS)


def test_one_token_has_no_time_per_output_token_and_no_decode_speed() -> None:
    one = dataclasses.replace(sample(), token_ids=[1], steps=[[40 * MS, 1, 0, 0, 0]], e2e_ns=40 * MS)
    assert metrics.tpot_ns(one) is None
    assert metrics.pooled_tpot_ns([one]) is None
    assert metrics.decode_tokens_per_s([one]) is None
    assert metrics.e2e_tokens_per_s([one]) == pytest.approx(25)
    assert metrics.drafting([one]).tokens_per_step is None


def test_rows_of_a_batch_share_their_time() -> None:
    """Two rows of 11 and 6 tokens in one call of 240 ms: 17 tokens in 240 ms, while one request sees fewer."""
    rows = [sample(tokens=11, group=3, batch_rows=2), sample(prompt=1, tokens=6, group=3, batch_rows=2)]
    assert metrics.wall_ns(rows) == 240 * MS
    assert metrics.throughput_tokens_per_s(rows) == pytest.approx(17 / 0.240)
    assert metrics.e2e_tokens_per_s(rows) == pytest.approx(17 / (0.240 + 0.140))
    alone = [sample(tokens=11), sample(prompt=1, tokens=6)]  # a resumed run may count its calls from 0 again
    assert metrics.throughput_tokens_per_s(alone) == metrics.e2e_tokens_per_s(alone)


def test_drain_counts_once_per_call() -> None:
    call = {"group": 3, "batch_rows": 2, "drain_ns": 24 * MS}
    rows = [sample(tokens=11, **call), sample(prompt=1, tokens=6, **call)]
    assert metrics.drain_share(rows) == pytest.approx(0.1)
    assert metrics.drain_share([]) is None


def test_percentiles_interpolate_and_the_99th_needs_100_values() -> None:
    """C15: a 99th percentile of 20 values would be their maximum under another name."""
    assert metrics.percentile([1, 2, 3, 4], 50) == 2.5
    assert metrics.percentile([1, 2, 3, 4], 90) == pytest.approx(3.7)
    assert metrics.percentile(range(99), 99) is None
    assert metrics.percentile(range(101), 99) == 99
    assert metrics.percentile([], 50) is None


def test_drafting_by_hand() -> None:
    """M3: three steps: 2 of 4 accepted, all 4 accepted, nothing drafted."""
    one = sample(steps=((3, 4, 2), (5, 4, 4), (1, 0, 0)))
    counts = metrics.drafting([one])
    assert (counts.steps, counts.empty_steps, counts.drafted, counts.accepted) == (3, 1, 8, 6)
    assert counts.tokens_per_step == 3
    assert counts.accepted_per_step == 2
    assert counts.acceptance_rate == 0.75
    assert counts.acceptance_by_position == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert counts.conditional_acceptance_by_position == [1, 1, 0.5, 0.5]


def test_accepted_tokens_behind_the_end_of_text_do_not_count() -> None:
    """M2: EOS as the second of four accepted tokens: two were emitted, two were accepted."""
    counts = metrics.drafting([sample(steps=((2, 4, 4),))])
    assert (counts.tokens, counts.accepted) == (2, 2)


def test_plain_decoding_has_no_acceptance_and_one_token_per_step() -> None:
    counts = metrics.drafting([sample(tokens=8)])
    assert counts.tokens_per_step == 1
    assert counts.acceptance_rate is None
    assert counts.accepted_per_step is None
    assert counts.acceptance_by_position == []


def test_levels_of_a_cascade_and_wasted_drafts_are_counted_apart() -> None:
    one = sample(steps=((3, 4, 2), (1, 0, 0)), levels=[[[6, 4], [8, 6]], [[2, 0]]])
    one.steps[0][metrics.WASTED] = 5
    one.steps[1][metrics.WASTED] = 3
    counts = metrics.drafting([one])
    assert counts.levels == [[8, 4, 0, 0], [8, 6, 0, 0]]
    assert counts.acceptance_by_level == [0.5, 0.75]
    assert counts.wasted == 8
    assert counts.drafted == 4
    with_times = sample(steps=((3, 4, 2),), levels=[[[6, 4, 2, 900], [8, 6, 0, 0]]])
    assert metrics.drafting([one, with_times]).levels == [[14, 8, 2, 900], [16, 12, 0, 0]]


def test_standardized_improvement_counts_forwards_and_no_time() -> None:
    """8 tokens, 3 forwards of the target, prefill included, and 4 of a draft of a quarter of its size: 8 / (3 + 1)."""
    one = sample(steps=((4, 4, 3), (3, 4, 2)))
    assert metrics.standardized_improvement([one], [4, 0], [0.25, 0.0]) == 2.0
    assert metrics.standardized_improvement([], [], []) is None


def _traced() -> Sample:
    """Prefill to 40 ms; draft prefill to 50; two steps of draft 4 x 2 ms, verify 20 ms and 2 ms of nothing."""
    draft = [[40, 50, 1, 11]]
    target = [[0, 39, 1, 10]]
    for start in (50, 80):
        draft += [[start + 2 * k, start + 2 * k + 2, 1, 1] for k in range(4)]
        target += [[start + 8, start + 28, 1, 5]]
    steps = [[40 * MS, 1, 0, 0, 0], [80 * MS, 3, 4, 2, 0], [110 * MS, 1, 4, 0, 0]]
    forwards = {
        name: [[a * MS, b * MS, rows, new] for a, b, rows, new in passes]
        for name, passes in {"target": target, "draft": draft}.items()
    }
    return dataclasses.replace(sample(kind="trace"), token_ids=[1] * 5, steps=steps, e2e_ns=110 * MS, forwards=forwards)


def test_time_of_a_step_is_split_and_draft_prefill_stands_apart() -> None:
    """M1: drafting, verifying and the rest add up to the decode time."""
    split = metrics.time_split([_traced()])
    assert split is not None
    assert (split.steps, split.decode_ns) == (2, 70 * MS)
    assert (split.draft_ns, split.verify_ns, split.draft_prefill_ns) == (16 * MS, 40 * MS, 10 * MS)
    assert split.rest_ns == 4 * MS
    assert split.overlap_ns == 0
    assert split.target_prefill_ns == 39 * MS
    parts = split.draft_ns + split.verify_ns + split.draft_prefill_ns + split.rest_ns - split.overlap_ns
    assert parts == split.decode_ns
    assert split.draft_ns_per_step == 8 * MS
    assert split.draft_share == pytest.approx(16 / 70)


def test_overlapping_forwards_are_not_counted_as_rest_twice() -> None:
    """An asynchronous strategy drafts while the target verifies."""
    one = _traced()
    assert one.forwards is not None
    one.forwards["draft"] = [[58 * MS, 78 * MS, 1, 1], [88 * MS, 108 * MS, 1, 1]]
    split = metrics.time_split([one])
    assert split is not None
    assert (split.draft_ns, split.verify_ns, split.overlap_ns) == (40 * MS, 40 * MS, 40 * MS)
    assert split.rest_ns == 30 * MS


def test_rows_of_a_traced_batch_count_their_forwards_once() -> None:
    one = _traced()
    rows = [dataclasses.replace(one, prompt_id=prompt, batch_rows=2, prompt_tokens=5) for prompt in ("p0", "p1")]
    assert metrics.time_split(rows) == metrics.time_split([one])
    apart = dataclasses.replace(one, group=1)
    both = metrics.time_split([one, apart])
    assert both is not None
    assert (both.steps, both.draft_ns) == (4, 32 * MS)


def test_a_view_of_the_targets_cache_has_no_prefill_of_its_own() -> None:
    one = _traced()
    assert one.forwards is not None
    one.forwards["draft"] = one.forwards["draft"][1:]
    split = metrics.time_split([one])
    assert split is not None
    assert split.draft_prefill_ns == 0
    assert split.draft_forwards == 8
    assert split.rest_ns == 14 * MS


def test_nothing_traced_gives_no_split() -> None:
    assert metrics.time_split([sample()]) is None
    assert metrics.predicted_speedup(2.0, None, None) is None


def test_predicted_speedup_is_tokens_per_step_over_the_cost_of_a_step() -> None:
    """2 tokens in a step of 32 ms against one token in 22 ms."""
    plain = metrics.TimeSplit(steps=10, decode_ns=220, verify_ns=200, rest_ns=20)
    split = metrics.TimeSplit(steps=2, decode_ns=64, verify_ns=40, draft_ns=16, rest_ns=8)
    assert metrics.predicted_speedup(2.0, split, plain) == pytest.approx(2 * 22 / 32)


def test_devices_and_threads_of_an_arm() -> None:
    """Roles on one device take turns; two core sets work at once."""
    shared = arm("a", roles={"draft": role(device="cpu", threads=1), "target": role(threads=2)})
    assert (metrics.devices(shared), metrics.threads(shared)) == (["cpu"], 2)
    apart = arm("b", roles={"draft": role(device="cpu:0", threads=1), "target": role(device="cpu:1-3", threads=3)})
    assert (metrics.devices(apart), metrics.threads(apart)) == (["cpu:1-3", "cpu:0"], 4)
    assert metrics.threads(arm("c", roles={"target": role(device="cuda:0", threads=None)})) is None


def test_a_draft_that_never_reads_its_prompt_has_no_prefill_whatever_it_reviews():
    reviews = [[0, 1, 1, 6], [1, 2, 1, 6]]
    assert metrics.prompt_forwards(reviews, [100]) == 0
    assert metrics.prompt_forwards([[0, 1, 1, 100], *reviews], [100]) == 1
    assert metrics.prompt_forwards([[0, 1, 1, 50], [1, 2, 1, 100], [2, 3, 2, 2]], [100, 50]) == 2
