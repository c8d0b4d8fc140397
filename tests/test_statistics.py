"""Pairs, speed-ups, intervals, spread, drift, warnings.

Statistical tests draw with fixed seeds, so they pass or fail for good; the odds given are those of the choice of seed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats
from synthetic import MS, failed, run, sample

from specbench.errors import MeasurementError
from specbench.results import metrics, statistics
from specbench.results.records import Sample


def _arms(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    return [one for one in samples if one.arm == "autoregressive"], [one for one in samples if one.arm == "speculative"]


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_only_what_both_arms_finished_is_compared() -> None:
    """M9: a sample that failed in one arm leaves both, and is counted."""
    base = [sample("autoregressive", n, tokens=8) for n in range(4)]
    other = [sample(prompt=0, tokens=8), failed(prompt=1), sample(prompt=2, tokens=8), sample(prompt=3, tokens=8)]
    base[3] = failed("autoregressive", 3)
    pairing = statistics.pair(base, other)
    assert [pair.baseline.prompt_id for pair in pairing.pairs] == ["p0", "p2"]
    assert (pairing.failed, pairing.missing) == (2, 0)


def test_a_truncated_file_does_not_pass_for_equal() -> None:
    """C10: a comparison that stops at the end of the shorter file is an error, not a pass."""
    base, other = _arms(run(12))
    pairing = statistics.pair(base, other[:5])
    assert pairing.missing == 7
    with pytest.raises(MeasurementError, match="7 of 12 samples were measured with one arm only"):
        pairing.require_complete("a, b")
    statistics.pair(base, other).require_complete("a, b")
    assert statistics.pair(base[:5], other).missing == 7


def test_pairs_are_made_by_the_hash_of_what_the_model_saw() -> None:
    base = [sample("autoregressive", 0), sample("autoregressive", 1)]
    other = [sample(prompt=0, prompt_hash="another template"), sample(prompt=1)]
    pairing = statistics.pair(base, other)
    assert len(pairing.pairs) == 1
    assert pairing.missing == 2


def test_prompts_that_occur_twice_are_paired_one_to_one() -> None:
    base = [sample("autoregressive", n, prompt_hash="same") for n in range(3)]
    other = [sample(prompt=n, prompt_hash="same") for n in (2, 0, 1)]
    pairs = statistics.pair(base, other).pairs
    assert [pair.baseline.prompt_id for pair in pairs] == ["p0", "p1", "p2"]
    assert [pair.other.prompt_id for pair in pairs] == ["p0", "p1", "p2"]


def test_traces_and_checks_are_never_compared() -> None:
    """Rule: a traced pass is slower and never feeds a speed."""
    base = [sample("autoregressive", 0), sample("autoregressive", 0, kind="trace")]
    assert len(statistics.pair(base, [sample(), sample(kind="trace"), sample(kind="check")]).pairs) == 1


# --- the speed-up ----------------------------------------------------------------------------------------------------


def test_headline_is_sum_over_sum_and_the_geometric_mean_stands_beside_it() -> None:
    """M3: two prompts, 4x on a short one and 1x on a long one: 1.3x in total time, 2x as the typical ratio."""
    base = [sample("autoregressive", 0, tokens=11, step_ms=40), sample("autoregressive", 1, tokens=101, step_ms=9)]
    other = [sample(prompt=0, tokens=11, step_ms=10), sample(prompt=1, tokens=101, step_ms=9)]
    speedup = statistics.decode_speedup(statistics.pair(base, other).pairs)
    assert speedup is not None
    assert speedup.value == pytest.approx(1300 / 1000)
    assert speedup.geometric_mean == pytest.approx(2)
    assert (speedup.baseline_ns, speedup.arm_ns) == (1300 * MS, 1000 * MS)
    assert speedup.low is None
    assert speedup.verdict is None


def test_per_token_speedup_is_fair_to_lengths_and_the_same_for_equal_ones() -> None:
    """M2: an arm that stops early is not faster for it."""
    base = [sample("autoregressive", n, tokens=21, step_ms=20) for n in range(6)]
    early = [sample(prompt=n, tokens=11, step_ms=20) for n in range(6)]
    pairing = statistics.pair(base, early)
    assert pairing.unequal == 6
    assert pairing.matched == []
    fair = statistics.decode_speedup(pairing.pairs, per_token=True)
    assert fair is not None
    assert fair.value == pytest.approx(1)
    pairs = statistics.pair(*_arms(run(8))).pairs
    plain, same = statistics.decode_speedup(pairs), statistics.decode_speedup(pairs, per_token=True)
    assert plain is not None and same is not None  # noqa: PT018
    assert plain.value == pytest.approx(same.value)
    assert plain.low == pytest.approx(same.low)


def test_end_to_end_speedup_contains_the_prefill() -> None:
    base = [sample("autoregressive", 0, tokens=11, step_ms=20, ttft_ms=100)]
    other = [sample(prompt=0, tokens=11, step_ms=10, ttft_ms=100)]
    pairs = statistics.pair(base, other).pairs
    decode, whole = statistics.decode_speedup(pairs), statistics.e2e_speedup(pairs)
    assert decode is not None
    assert whole is not None
    assert (decode.value, whole.value) == (2, 1.5)


def test_no_decode_time_gives_no_speedup_and_no_division_by_zero() -> None:
    """M8: one token per answer: there is nothing to divide."""
    one = dataclasses.replace(sample(), token_ids=[1], steps=[[40 * MS, 1, 0, 0, 0]], e2e_ns=40 * MS)
    pairs = statistics.pair([dataclasses.replace(one, arm="autoregressive")], [one]).pairs
    assert statistics.decode_speedup(pairs) is None
    assert statistics.decode_speedup(pairs, per_token=True) is None
    assert statistics.e2e_speedup(pairs) is not None
    assert statistics.decode_speedup([]) is None


def test_the_same_records_give_the_same_interval() -> None:
    pairs = statistics.pair(*_arms(run(20))).pairs
    assert statistics.decode_speedup(pairs) == statistics.decode_speedup(pairs)


def test_identical_times_have_an_interval_of_exactly_one() -> None:
    base = [one for one in run(12) if one.arm == "autoregressive"]
    same = [dataclasses.replace(one, arm="speculative") for one in base]
    speedup = statistics.decode_speedup(statistics.pair(base, same).pairs)
    assert speedup is not None
    assert (speedup.low, speedup.value, speedup.high) == (1, 1, 1)
    assert speedup.verdict == "no difference"


def test_repeats_and_turns_do_not_narrow_the_interval() -> None:
    """Five copies of the same measurements hold no more information about other prompts."""
    base, other = _arms(run(12, noise=0.2))
    copies = (
        [dataclasses.replace(one, repeat=n) for n in range(5) for one in base],
        [dataclasses.replace(one, repeat=n) for n in range(5) for one in other],
    )
    once = statistics.decode_speedup(statistics.pair(base, other).pairs)
    often = statistics.decode_speedup(statistics.pair(*copies).pairs)
    assert once is not None
    assert often is not None
    assert often.prompts == 12
    assert often.pairs == 60
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_rows_of_a_batch_are_resampled_together() -> None:
    """Rows that ran in one call share its time: 12 prompts in 6 calls are 6 independent measurements."""
    base, other = _arms(run(12))
    base = [dataclasses.replace(one, group=at // 2, batch_rows=2) for at, one in enumerate(base)]
    speedup = statistics.decode_speedup(statistics.pair(base, other).pairs)
    assert speedup is not None
    assert speedup.prompts == 6


def test_rows_that_took_each_others_places_are_resampled_by_as_many_as_ran_at_a_time() -> None:
    """12 prompts through a call of 3 rows: three that were admitted one after another share most of their time."""
    base, other = _arms(run(12))
    base = [
        dataclasses.replace(one, group=7, batch_rows=3, admitted_ns=at // 3 * 100 * MS or None)
        for at, one in enumerate(base)
    ]
    pairs = statistics.pair(base, other).pairs
    assert statistics._units(pairs) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert statistics._units(pairs[::-1]) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    apart = [
        statistics.Pair(dataclasses.replace(one.baseline, group=at % 2), one.other) for at, one in enumerate(pairs)
    ]
    assert statistics._units(apart) == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]


def test_throughput_speedup_is_that_of_the_tokens_of_all_rows() -> None:
    """17 tokens of two rows in 240 ms against 140 ms; a row that has no partner does not change it."""
    calls = {"autoregressive": (20, 240), "speculative": (10, 140)}
    base, other = (
        [
            sample(
                name, prompt, tokens=tokens, step_ms=step_ms, group=1, batch_rows=2, call_ns=wall * MS, call_tokens=17
            )
            for prompt, tokens in enumerate((11, 6))
        ]
        for name, (step_ms, wall) in calls.items()
    )
    pairs = statistics.pair(base, other).pairs
    speedup = statistics.throughput_speedup(pairs)
    assert speedup is not None
    assert speedup.value == pytest.approx(240 / 140)
    assert (speedup.baseline_ns, speedup.arm_ns, speedup.arm_tokens) == (240 * MS, 140 * MS, 17)
    assert (speedup.prompts, speedup.low) == (1, None)
    single = statistics.throughput_speedup(pairs[:1])
    assert single is not None
    assert single.value == pytest.approx(240 / 140)
    assert statistics.throughput_speedup([]) is None


def test_fewer_than_five_prompts_have_no_interval() -> None:
    """C15: simulated, a 95 % interval from three prompts holds the truth in 75 % of cases."""
    for prompts, known in ((4, False), (5, True)):
        speedup = statistics.decode_speedup(statistics.pair(*_arms(run(prompts))).pairs)
        assert speedup is not None
        assert (speedup.low is not None) == known


def _noisy(prompts: int, truth: float, random: np.random.Generator) -> list[statistics.Pair]:
    """Prompts of very different lengths; each ratio scatters by 10 % around the truth."""
    pairs = []
    for prompt in range(prompts):
        base_ms = 20 * random.lognormal(0, 0.5)
        other_ms = base_ms / truth * random.lognormal(-0.005, 0.1)
        base = sample("autoregressive", prompt, tokens=11, step_ms=base_ms * random.lognormal(-0.0002, 0.02))
        pairs.append(statistics.Pair(base, sample(prompt=prompt, tokens=11, step_ms=other_ms)))
    return pairs


@pytest.mark.parametrize("truth", [1.0, 1.5])
def test_interval_holds_the_truth_and_a_against_a_is_no_difference(truth: float) -> None:
    """400 runs of 20 prompts: 95 % are expected to hold the truth (380, standard deviation 4.4).

    False alarm: an interval that really holds it in 94.5 % stays within 91.5 and 98.5 % but for 1 seed in 200.
    """
    random = np.random.default_rng(7)
    held = told = 0
    for _ in range(400):
        speedup = statistics.decode_speedup(_noisy(20, truth, random))
        assert speedup is not None
        assert speedup.low is not None
        assert speedup.high is not None
        held += speedup.low <= truth <= speedup.high
        told += speedup.verdict == ("no difference" if truth == 1 else "faster")
    assert 0.915 <= held / 400 <= 0.985
    assert told / 400 >= (0.915 if truth == 1 else 0.999)


def test_slower_is_said_plainly() -> None:
    """M6."""
    speedup = statistics.decode_speedup(statistics.pair(*_arms(run(12, slow_draft=True))).pairs)
    assert speedup is not None
    assert speedup.value == pytest.approx(20 / 35, rel=0.02)
    assert speedup.verdict == "slower"


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 29, 199])
def test_students_quantiles(degrees: int) -> None:
    for p in (0.6, 0.9, 0.975, 0.995):
        assert statistics.student_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-5)


def test_bootstrap_of_a_mean_agrees_with_the_textbook_interval() -> None:
    """The expanded percentile interval of a symmetric sample's mean is Student's, within the noise of 10,000 draws."""
    values = 10 + stats.norm.ppf((np.arange(15) + 0.5) / 15)
    sums = np.stack([values, np.ones(15)], axis=1)
    low, high = statistics.bootstrap_interval(sums, lambda drawn: drawn[:, 0] / drawn[:, 1])
    expected = stats.t.interval(0.95, 14, values.mean(), values.std(ddof=1) / np.sqrt(15))
    assert (low, high) == pytest.approx(expected, abs=0.06)


# --- spread and drift ------------------------------------------------------------------------------------------------


def test_spread_is_the_variation_of_repeats_not_of_prompts() -> None:
    one = [sample(prompt=0, repeat=n, step_ms=ms) for n, ms in enumerate((18, 22))]
    two = [sample(prompt=1, repeat=n, step_ms=ms) for n, ms in enumerate((180, 220))]
    # Each: mean 20, standard deviation 2 * sqrt(2): 14.1 %, although the prompts differ tenfold.
    assert statistics.spread(one + two) == pytest.approx(0.1 * np.sqrt(2))
    assert statistics.spread([one[0], two[0]]) is None


def test_drift_compares_repeats_of_the_same_prompts_where_there_are_any() -> None:
    """The second pass is 10 % slower; that the prompts differ among each other does not matter."""
    early = [sample("autoregressive", n, step_ms=20 + n) for n in range(8)]
    late = [sample("autoregressive", n, repeat=1, step_ms=1.1 * (20 + n)) for n in range(8)]
    drift = statistics.drift(early + late)
    assert drift is not None
    assert drift.same_prompts
    assert drift.change == pytest.approx(0.1)
    assert drift.beyond_noise
    (caution,) = statistics.drift_caution("toy", "autoregressive", early + late)
    assert caution.code == "drift"
    assert "10 % slower than its first (the same prompts)" in caution.text


def test_drift_without_repeats_compares_other_prompts_and_is_not_fooled_by_their_scatter() -> None:
    random = np.random.default_rng(0)
    steady = [sample("autoregressive", n, step_ms=20 * random.lognormal(0, 0.5)) for n in range(12)]
    drift = statistics.drift(steady)
    assert drift is not None
    assert not drift.same_prompts
    assert not drift.beyond_noise
    assert statistics.drift_caution("toy", "a", steady) == []
    slowed = [sample("autoregressive", n, step_ms=20 if n < 6 else 23) for n in range(12)]
    assert [caution.code for caution in statistics.drift_caution("toy", "a", slowed)] == ["drift"]
    assert statistics.drift(slowed[:2]) is None


def test_warnings_name_what_is_wrong_with_an_arm() -> None:
    """M7, M9, P22: failures, spread, work left behind, an early block of tokens, a record that contradicts itself."""
    good = [sample(prompt=n, repeat=r, step_ms=20 + 10 * r) for n in range(3) for r in range(2)]
    good = [dataclasses.replace(one, drain_ns=one.e2e_ns // 20) for one in good if one.e2e_ns]
    good[0].steps[0][1], good[0].steps[1][1] = 2, 1
    good[0].token_ids.append(9)
    cautions = statistics.arm_cautions("toy", "speculative", good, [failed(prompt=4)])
    by_code = {caution.code: caution for caution in cautions}
    assert set(by_code) == {"failed", "spread", "drain", "first-step"}
    assert "1 of 7 samples failed" in by_code["failed"].text
    assert "StrategyError: no more" in by_code["failed"].text
    assert by_code["drain"].value == pytest.approx(0.05, rel=0.01)
    assert "5.0 %" in by_code["drain"].text
    good[1].token_ids.append(9)
    assert "broken" in {caution.code for caution in statistics.arm_cautions("toy", "speculative", good, [])}
    assert statistics.arm_cautions("toy", "speculative", [sample()], []) == []


def test_unequal_lengths_are_flagged_where_tokens_should_be_the_same() -> None:
    base = [sample("autoregressive", n, tokens=8) for n in range(3)]
    other = [sample(prompt=n, tokens=8 + (n == 2)) for n in range(3)]
    pairing = statistics.pair(base, other)
    (caution,) = statistics.pairing_cautions("toy", "speculative", "autoregressive", pairing, same_tokens=True)
    assert caution.code == "length"
    assert "1 of 3 outputs differ in length" in caution.text
    assert "left out" in caution.text
    (caution,) = statistics.pairing_cautions("toy", "speculative", "autoregressive", pairing, same_tokens=False)
    assert caution.code == "per-token"


def test_steps_that_something_else_delayed_are_warned_of():
    """P29: other tenants. One step of 400 ms among 10 ms ones is not a property of the strategy."""
    steady = sample(tokens=40, step_ms=10)
    late = [[ns + (400 * MS if at > 20 else 0), *rest] for at, (ns, *rest) in enumerate(steady.steps)]
    stalled = dataclasses.replace(steady, steps=late, e2e_ns=late[-1][0])
    assert metrics.stall_share([steady]) == 0
    assert metrics.stall_share([stalled]) == pytest.approx(410 / 780)
    assert metrics.stall_share([sample(tokens=2)]) is None
    codes = {name: [c.code for c in statistics.arm_cautions("t", "a", [one], [])] for name, one in
             (("steady", steady), ("stalled", stalled))}  # fmt: skip
    assert "stall" in codes["stalled"]
    assert "stall" not in codes["steady"]
