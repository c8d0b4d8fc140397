"""`sparse-kv`: exact whatever it drafts, in every shape; chosen, followed and chosen anew as it should be; counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toys
from synthetic import sample
from test_packed import needs_bf16
from test_verify import ALPHA, chi_square, exact_distribution
from toys import SparseTable, TableModel, decode, requests

from specbench.errors import ModelError, UsageError
from specbench.hardware.clock import Clock, Drain
from specbench.models import tiny
from specbench.models.base import common_prefix
from specbench.models.cost_curve import CostCurve
from specbench.models.packed import PackedModel
from specbench.models.sparse_cost import SparseCosts
from specbench.models.transformers_runtime import TransformersModel
from specbench.options import build
from specbench.results.measure import Ending, measure
from specbench.results.plan import Plan, check
from specbench.results.rounds import told
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.base import Request, Step
from specbench.strategies.sampling import Sampling
from specbench.strategies.sparse_kv import Options, SparseKv

VOCAB = 12
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=5),
    "T=0.6 top-p 0.9": Sampling(temperature=0.6, top_p=0.9, seed=5),
    "penalties at T=1": Sampling(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7, seed=2),
    "held back": Sampling(min_new_tokens=9, eos=(3, 4), suppress=(5, 6)),
}
SHAPES = {
    "as it comes": dict(),
    "published": dict(gamma=3, budget=33),
    "sinks and window": dict(selection="stream", budget=5, gamma=6),
    "chosen anew": dict(gamma=2, refresh=5, budget=9, window=4),
    "reviews of n-grams": dict(bottom="ngram", gamma=6),
    "reviews, chosen anew": dict(bottom="ngram", gamma=5, refresh=3, budget=9, window=4),
    "another model": dict(draft="model", gamma=4),
    "another model, chosen anew": dict(draft="model", gamma=3, refresh=4, bottom="ngram"),
}


def models(vocab: int = VOCAB, **how) -> dict[str, TableModel]:
    return {"target": TableModel(vocab, seed=1, **how), "draft": TableModel(vocab, seed=1, twist=0.7, **how)}


def make(given: dict | None = None, costs: SparseCosts | None = None, **which) -> SparseKv:
    strategy = SparseKv(models(**which), build(Options, given or {}, "sparse-kv"))
    strategy.costs = costs
    return strategy


def plain(asked, sampling):
    return toys.plain(asked, sampling, VOCAB)


def curve(ms_of_one: float, per_slot: float, per_token: float = 0.05) -> CostCurve:
    """Milliseconds of a forward: a constant, something per slot, and a share of both for each token after the first."""
    counts, slots, rows = (1, 2, 5, 9, 17), (64, 8192), (1, 8)
    ms = np.zeros((len(counts), len(slots), len(rows)))
    for i, count in enumerate(counts):
        for j, size in enumerate(slots):
            for k, batch in enumerate(rows):
                ms[i, j, k] = (ms_of_one + per_slot * size * batch) * (1 + per_token * (count - 1))
    return CostCurve(counts, slots, rows, ms)


def costs(per_slot: float = 0.01, select_ms: float = 0.0) -> SparseCosts:
    """10 ms and 1 ms per hundred slots and row, of the target and the draft alike."""
    return SparseCosts(curve(10, per_slot), curve(10, per_slot), select_ms)


def run(strategy: SparseKv, asked: list[Request], sampling: Sampling = Sampling()) -> list[Step]:  # noqa: B008 - frozen
    strategy.reset()
    steps, emitted = [], [0] * len(asked)
    for request in asked:
        request.done = False
    for step in strategy.generate(asked, sampling):
        steps.append(step)
        emitted[step.row] += len(step.tokens)
        asked[step.row].done = emitted[step.row] >= asked[step.row].max_new_tokens
    return steps


# Exactness over tables


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 7])
def test_tokens_equal_plain_decodings_in_every_shape(shape, how, batch):
    asked = requests(8, VOCAB, limit=30, seed=3)
    assert decode(make(SHAPES[shape]), asked, SAMPLINGS[how], batch) == plain(asked, SAMPLINGS[how])


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("per_slot", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("bottom", ["none", "ngram"])
def test_tokens_equal_plain_decodings_whatever_the_schedule_decides(per_slot, how, bottom):
    asked = requests(14, VOCAB, limit=40, seed=4, longest=200)
    strategy = make(dict(bottom=bottom, refresh=7), costs(per_slot))
    assert decode(strategy, asked, SAMPLINGS[how], batch=7) == plain(asked, SAMPLINGS[how])


class Faces(SparseTable):
    """Right in row 0, wrong in row 1, as it comes in the others."""

    def advance(self, contexts, last=1, rows=None):
        rows = range(len(contexts)) if rows is None else rows
        logits = super().advance(contexts, last, rows)
        assert set(last) == {1}
        for at, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            before = np.concatenate([[0], np.array(context)])
            own = self.dense.table[before[-2], before[-1]]
            if row < 2:
                logits[at] = own if row == 0 else -own
        return logits


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_a_row_that_takes_all_goes_on_beside_one_that_takes_nothing(monkeypatch, temperature, rule):
    monkeypatch.setattr(TableModel, "sparse_view", lambda self, selection: Faces(self, selection))
    strategy = make(dict(gamma=4))
    asked = [Request(at, [1 + at, 2, 3], 25) for at in range(3)]
    sampling = Sampling(temperature=temperature, verify=rule)
    steps = run(strategy, asked, sampling)
    drafted = {row: [step for step in steps if step.row == row and step.drafted] for row in range(3)}
    assert all(step.accepted == step.drafted for step in drafted[0])
    if temperature == 0:
        assert all(step.accepted == 0 for step in drafted[1])
    assert len(drafted[0]) <= 6
    assert len(drafted[1]) >= 15
    for row in range(3):
        tokens = [token for step in steps if step.row == row for token in step.tokens][:25]
        if rule == "coupled" or temperature == 0:
            assert [tokens] == plain([asked[row]], sampling)


def test_the_end_of_one_row_is_none_of_the_others_business():
    """EOS in one row of four, in the middle of a block; and the next request takes its place."""
    asked = requests(7, VOCAB, limit=30, seed=8)
    expected = plain(asked, Sampling())
    end = expected[1][4]
    kept = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    assert len({len(tokens) for tokens in kept}) > 1
    for request in asked:
        request.done = False
    outcomes = measure(
        make(dict(gamma=5, refresh=6)), asked, Sampling(), Ending(frozenset({end})), Clock(), Drain(), rows=4
    )
    assert [outcome.token_ids for outcome in outcomes] == kept


LEVELS = {
    "self": dict(gamma=3),
    "model": dict(draft="model", gamma=3),
    "n-grams below": dict(bottom="ngram", gamma=4),
    "chosen anew": dict(gamma=2, refresh=2),
}


@pytest.mark.parametrize("shape", LEVELS)
@pytest.mark.parametrize("settings", [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9)], ids=str)
def test_rejection_keeps_the_targets_distribution(shape, settings):
    """1,000 prompts' worth of three tokens on a vocabulary of five, chi-square over all 125 outcomes.

    False-alarm odds: 8 tests and the one below at 1e-4, so 0.09 % in all, met once since the seeds are fixed.
    """
    strategy, prompt, sampling = make(LEVELS[shape], vocab=5), [1, 2, 3, 1, 2], Sampling(**settings, verify="rejection")
    counts: dict[tuple, int] = {}
    for tokens in decode(strategy, [Request(key, prompt, 5) for key in range(1000)], sampling, batch=50):
        counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
    law = exact_distribution(strategy.target, prompt, sampling, 3)  # type: ignore[arg-type]
    assert chi_square(counts, law, 1000) > ALPHA


def test_rejection_keeps_the_distribution_when_lengths_follow_the_acceptance():
    strategy, prompt = make(dict(), costs(0.5), vocab=5, context_length=2000), [1, 2, 3, 1, 2] * 200
    sampling = Sampling(temperature=1.0, verify="rejection", seed=3)
    counts: dict[tuple, int] = {}
    for tokens in decode(strategy, [Request(key, prompt, 24) for key in range(600)], sampling, batch=50):
        counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
    law = exact_distribution(strategy.target, prompt, sampling, 3)  # type: ignore[arg-type]
    assert chi_square(counts, law, 600) > ALPHA


# What the draft's cache goes through


def test_a_selection_is_made_once_after_the_first_token_and_followed_from_then_on():
    strategy = make(dict(gamma=3, budget=40))
    asked = [Request(at, [1, 2, 3, 4 + at] * 20, 30) for at in range(3)]
    steps = run(strategy, asked)
    view, target = strategy.view, strategy.target
    assert view.chosen == [(row, 80, 40) for row in range(3)]  # the prompt, as the prefill left it
    assert view.watches == [True, False]
    assert target.forwards[0] == [80] * 3  # one prefill, the target's
    assert all(new <= 4 for forward in target.forwards[1:] for new in forward)
    assert all(new == 1 for forward in view.forwards for new in forward)  # nothing is ever read twice or in pairs
    drafted = sum(step.drafted for step in steps)
    assert drafted == sum(len(forward) for forward in view.forwards)


@pytest.mark.parametrize("refresh", [5, 12])
def test_positions_are_chosen_anew_every_so_many_tokens(refresh):
    strategy = make(dict(gamma=3, budget=40, refresh=refresh))
    run(strategy, [Request(1, [1, 2, 3, 4] * 20, 60)])
    at = [tokens for _, tokens, _ in strategy.view.chosen]
    assert at[0] == 80
    gaps = np.diff(at)
    assert len(at) > 60 // (refresh + 4)
    assert (gaps >= refresh).all()
    assert (gaps < refresh + 4).all()  # at the first round after they are due
    assert strategy.facts["selections"] == len(at)


def test_n_grams_save_the_sparse_model_forwards():
    class Loop(TableModel):
        """Says 1 2 ... 8 for ever; so does its view."""

        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            self.table[:] = 0
            for token in range(self.vocab_size):
                self.table[:, token, token % 8 + 1] = 50.0

    target = Loop(VOCAB)
    request = Request(1, [*range(1, 9)] * 4, 100)
    counts = {}
    for bottom in ("none", "ngram"):
        strategy = SparseKv({"target": target}, Options(gamma=8, bottom=bottom))
        steps = run(strategy, [request])
        drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
        assert drafted == accepted > 80
        counts[bottom] = len(strategy.view.forwards)
        totals = np.sum([step.levels for step in steps if step.levels], axis=0)
        assert totals[0].tolist()[:3] == [drafted, accepted, counts[bottom]]
        assert strategy.facts["levels"] == ("sparse,ngram" if bottom == "ngram" else "sparse")
        if bottom == "ngram":
            assert totals[1][0] == totals[1][1] == drafted - counts[bottom]
    assert counts["ngram"] < counts["none"] / 4


def test_a_model_of_its_own_reads_the_prompt_after_the_first_token_and_anew_when_it_is_due():
    strategy = make(dict(draft="model", gamma=2, refresh=8, budget=40))
    (request,) = [Request(1, [1, 2, 3, 4] * 20, 30)]
    steps = run(strategy, [request])
    draft = strategy.models["draft"]
    assert strategy.view.dense is draft
    assert draft.forwards[0] == [80]
    assert 2 <= len(draft.forwards) <= 4
    assert all(8 <= new < 11 for (new,) in draft.forwards[1:])  # what came since
    assert len(strategy.target.forwards) == len(steps)


def test_a_request_that_takes_a_row_gets_a_selection_of_its_own():
    strategy = make(dict(gamma=3, budget=40))
    asked = [Request(at, [1, 2, 3, 4 + at] * (10 + at), 12) for at in range(5)]
    outcomes = measure(strategy, asked, Sampling(), Ending(), Clock(), Drain(), rows=2)
    assert [outcome.token_ids for outcome in outcomes] == plain(asked, Sampling())
    assert sorted(tokens for _, tokens, _ in strategy.view.chosen) == [4 * (10 + at) for at in range(5)]


def test_a_short_context_of_a_draft_ends_its_drafts_and_nothing_else():
    asked = [Request(r.key, r.ids, 40) for r in requests(20, VOCAB, seed=5)]
    which = models()
    which["draft"].context_length = 20
    strategy = SparseKv(which, Options(draft="model", gamma=3))
    assert decode(strategy, asked, Sampling(), batch=5) == plain(asked, Sampling())


# Lengths and budgets by cost


def test_below_break_even_it_decodes_plainly_and_says_so():
    """Short text: a forward costs the draft what it costs the target, so there is nothing to be won."""
    strategy = make()
    strategy.use_costs(costs(), 1, 8192)
    expected = strategy._schedule().break_even(1, 8192, 40)
    steps = run(strategy, [Request(1, [1, 2, 3], 40)])
    assert all(step.drafted == 0 for step in steps)
    assert strategy.view.chosen == []
    assert strategy.facts["decoded_plainly"] == "below break-even"
    assert expected is not None
    assert strategy.facts["break_even_context"] == round(expected)
    assert strategy.facts["constant_ms"] == pytest.approx(10, abs=1e-3)
    assert strategy.facts["plain_rounds"] == strategy.facts["rounds"] == 39


def test_above_it_drafts_as_far_as_the_acceptance_allows(monkeypatch):
    monkeypatch.setattr(SparseTable, "twist", 0.0)
    strategy = make(costs=costs(), context_length=9000)
    steps = run(strategy, [Request(1, [1, 2, 3, 4] * 1500, 100)])
    assert steps[-5].drafted > 4
    assert all(step.accepted == step.drafted for step in steps)
    assert "decoded_plainly" not in strategy.facts
    assert strategy.view.chosen[0][2] in (128, 256, 512, 1024)

    monkeypatch.setattr(SparseTable, "twist", 50.0)  # always wrong
    strategy = make(costs=costs(), context_length=9000)
    steps = run(strategy, [Request(1, [1, 2, 3, 4] * 1500, 100)])
    assert sum(step.drafted for step in steps) < 70
    assert sum(not step.drafted for step in steps[20:]) > 45


def test_a_selection_that_cannot_be_won_back_is_not_made():
    for limit, chosen in ((400, 1), (8, 0)):
        strategy = make(costs=costs(select_ms=0.05), context_length=9000)
        run(strategy, [Request(1, [1, 2, 3, 4] * 1500, limit)])
        assert len(strategy.view.chosen) == chosen


def test_each_row_has_a_length_of_its_own(monkeypatch):
    monkeypatch.setattr(TableModel, "sparse_view", lambda self, selection: Faces(self, selection))
    strategy = make(costs=costs(), context_length=9000)
    steps = run(strategy, [Request(at, [1 + at, 2, 3, 4] * 1500, 80) for at in range(3)])
    drafted = [np.mean([step.drafted for step in steps if step.row == row]) for row in range(2)]
    assert drafted[0] > 5
    assert drafted[1] < 2


# Real models, tiny ones


@pytest.fixture(scope="module")
def real():
    def load(layers: int, dtype: str) -> PackedModel:
        model = tiny.make_model(layers)
        return PackedModel.from_transformers(
            model.to(getattr(torch, dtype)), name="tiny", device="cpu", dtype=dtype, vocab_size=261
        )

    return {(role, dtype): load(layers, dtype) for role, layers in (("target", 2), ("draft", 1))
            for dtype in ("float32", "bfloat16")}  # fmt: skip


REAL = {
    "published": dict(gamma=3, budget=64),
    "sinks and window": dict(selection="stream", budget=24, gamma=5),
    "chosen anew": dict(gamma=4, refresh=10, budget=40, window=8),
    "a window of one": dict(gamma=4, refresh=6, budget=20, window=1),
    "reviews of n-grams": dict(bottom="ngram", gamma=6, budget=64),
    "another model": dict(draft="model", gamma=3, budget=64, refresh=16),
}
# Shorter than sinks and window, of one token, of the budget and one more, and longer.
LENGTHS = (1, 3, 33, 64, 65, 66, 200, 610)


def real_requests(limit: int = 40) -> list[Request]:
    """Prompts that are in part repetitive, as text is."""
    random, asked = np.random.default_rng(7), []
    for at, length in enumerate(LENGTHS):
        piece = random.integers(32, 127, 50)
        asked.append(Request(at, np.tile(piece, -(-length // 50))[:length].tolist(), limit))
    return asked


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bf16)])
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=1)], ids=["greedy", "sampled"]
)
def test_ragged_batches_of_real_models_are_exact(real, shape, dtype, sampling):
    """Every row of batches of prompts of very different length, replaced as they end, against plain decoding alone."""
    which = {role: real[role, dtype] for role in ("target", "draft")}
    strategy, asked = SparseKv(which, build(Options, REAL[shape], "sparse-kv")), real_requests()
    expected = decode(Autoregressive({"target": which["target"]}, PlainOptions()), asked, sampling)
    end = expected[3][6]
    kept = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    for request in asked:
        request.done = False
    outcomes = measure(strategy, asked, sampling, Ending(frozenset({end})), Clock(), Drain(), rows=3)
    assert [outcome.error for outcome in outcomes] == [None] * len(asked)
    assert [outcome.token_ids for outcome in outcomes] == kept
    steps = [step for outcome in outcomes for step in outcome.steps[1:]]
    accepted = [step[3] for step in steps if step[2]]
    assert max(accepted) > 1
    strategy.close()


def test_a_prompt_that_fits_the_budget_is_drafted_by_the_target_itself(real):
    strategy = SparseKv({"target": real["target", "float32"]}, Options(gamma=4, budget=128))
    for length in (1, 30, 64):
        steps = run(strategy, [Request(1, list(range(32, 32 + length)) * 2, 40)])
        assert all(step.accepted == step.drafted for step in steps)
    strategy.close()


def test_acceptance_with_a_small_cache_is_what_full_attention_left_to_it(real):
    """Verified keys and values replace the draft's own: drafting again from a fresh selection says the same tokens."""
    target = real["target", "float32"]
    strategy = SparseKv({"target": target}, Options(gamma=4, budget=60, window=16))
    request = real_requests(60)[-1]
    run(strategy, [request])
    view = strategy.view
    cached = target._ids[0, : target._lengths[0]]
    followed = common_prefix(view._ids[0, : view._lengths[0]], cached)
    exact = view._exact[0]
    assert exact > len(request.ids) + 40
    assert followed >= exact
    shift = view._shifts[0]
    assert torch.equal(
        view._cache.blocks[:, :, 0, :, 60 : exact - shift],
        target._cache.blocks[:, :, 0, :, len(request.ids) : exact],
    )
    strategy.close()


def test_memory_and_times_stand_in_the_facts(real):
    strategy = SparseKv({"target": real["target", "float32"]}, Options(gamma=3, budget=64, explain=True))
    strategy.prepare(2, 700)
    assert strategy.costs is not None
    asked = real_requests(20)[-2:]
    run(strategy, asked)
    facts = strategy.facts
    small, whole = (model._cache.slots for model in (strategy.view, strategy.target))
    assert 87 <= small < 300 < 630 <= whole  # 64 and 20 that came, of 610 and 20
    slot_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, numbers, bytes
    assert facts["sparse_bytes_per_row"] == small * slot_bytes
    assert facts["cache_bytes_per_row"] == whole * slot_bytes
    assert facts["selections"] == 2
    assert facts["budgets"] == "64"
    assert 1 <= facts["omega"] <= 4
    assert facts["mean_gamma"] <= 3
    for name in ("select_ms", "draft_ms", "verify_ms", "follow_ms", "predicted_select_ms", "predicted_draft_ms",
                 "predicted_verify_ms", "predicted_follow_ms", "predicted_plain_ms"):  # fmt: skip
        assert facts[name] > 0
    strategy.close()


def test_measuring_costs_leaves_nothing_cached_and_choosing_by_them_is_exact(real):
    target = real["target", "float32"]
    strategy = SparseKv({"target": target}, Options())
    strategy.prepare(3, 700)
    assert not any(target._lengths)
    assert not any(strategy.view._lengths)
    assert target._queries is None
    curve = strategy.costs.target
    assert (curve.rows, curve.new_tokens) == ((1, 3), (1, 2, 3, 4, 5, 6, 8, 9))
    assert curve.contexts[-1] >= 700
    assert (curve.median_ms > 0).all()
    assert strategy.costs.draft.contexts[0] < 300
    assert strategy.costs.begin_ms(600) > 0
    assert strategy.costs.follow_ms > 0
    assert strategy.costs.read_ms == 0
    asked = real_requests(30)
    expected = decode(Autoregressive({"target": target}, PlainOptions()), asked, Sampling())
    assert decode(strategy, asked, Sampling(), batch=3) == expected
    strategy.close()


def test_a_draft_model_is_charged_for_reading_and_for_nothing_that_follows(real):
    """Its small cache is never brought up to date by the target: a round of it used to be said to take that as well."""
    both = {"target": real["target", "float32"], "draft": real["draft", "float32"]}
    strategy = SparseKv(both, Options(draft="model", gamma=3, budget=64, explain=True))
    strategy.prepare(2, 700)
    assert strategy.costs is not None
    assert strategy.costs.follow_ms == 0
    assert strategy.costs.read_ms > 0
    run(strategy, real_requests(20)[-2:])
    assert strategy.facts["selections"] == 2
    assert strategy.facts["follow_ms"] == strategy.facts["predicted_follow_ms"] == 0
    strategy.close()


def test_a_records_levels_tell_what_drafting_took(real):
    strategy = SparseKv({"target": real["target", "float32"]}, Options(gamma=3, budget=64))
    (outcome,) = measure(strategy, real_requests(30)[-1:], Sampling(), Ending(), Clock(), Drain())
    assert len(outcome.levels) == sum(step[2] > 0 for step in outcome.steps)
    drafted, accepted, forwards, time_ns = np.sum([levels[0] for levels in outcome.levels], axis=0)
    assert drafted == forwards >= sum(step[2] for step in outcome.steps)
    assert accepted <= drafted
    assert 0 < time_ns < outcome.e2e_ns
    strategy.close()


# Refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(gamma="0"), "sparse-kv.gamma=0: has to be at least 1"),
        (dict(gamma="some"), "must be"),
        (dict(selection="h2o"), 'sparse-kv.selection "h2o"'),
        (dict(draft="other"), 'sparse-kv.draft "other"'),
        (dict(bottom="mag"), 'sparse-kv.bottom "mag"'),
        (dict(budget="32"), "sparse-kv.budget=32: has to be at least 33"),
        (dict(budget="4", selection="stream"), "has to be at least 5.*sparse-kv.sinks"),
        (dict(refresh="-1"), "sparse-kv.refresh=-1"),
        (dict(window="0"), "sparse-kv.window=0"),
        (dict(speed="9"), "unknown option"),
    ],
)
def test_options_that_make_no_sense_are_one_line(given, message):
    with pytest.raises(UsageError, match=message):
        build(Options, given, 'strategy "sparse-kv"')


def test_options_are_read_as_they_are_written():
    read = build(Options, dict(gamma="5", budget="auto", refresh="64", explain="true"), "x")
    assert (read.gamma, read.budget, read.refresh, read.explain) == (5, "auto", 64, True)
    assert Options().gamma == Options().budget == "auto"


def test_a_draft_model_that_is_not_there_and_a_runtime_without_small_caches_are_named():
    with pytest.raises(UsageError, match="needs a draft model; name one with --draft"):
        SparseKv({"target": TableModel(VOCAB)}, Options(draft="model"))
    other = TransformersModel(tiny.make_model(1), name="tiny", context_length=512)
    with pytest.raises(ModelError, match="packed runtime on cpu"):
        SparseKv({"target": other}, Options())


def test_an_arm_that_explains_itself_says_what_a_round_took_and_was_to_take():
    """Four rounds, one of them plain: 3 x 20 ms of drafts, 4 x 30 of verification, 8 of choosing."""
    facts = {
        "rounds": 4, "plain_rounds": 1, "draft_ms": 20.0, "verify_ms": 30.0, "select_ms": 8.0, "follow_ms": 0.4,
        "predicted_draft_ms": 16.0, "predicted_verify_ms": 32.0, "predicted_select_ms": 4.0, "predicted_follow_ms": 0.8,
        "predicted_plain_ms": 30.0, "omega": 3.0, "constant_ms": 9.0, "explained": True,
    }  # fmt: skip
    assert told("docs", "sparse-kv", [sample(facts=facts)] * 2) == (
        "docs, sparse-kv: a round took 47.3 ms (predicted 45.6): draft 15.0 (12.0), verification 30.0 (32.0), choosing "
        "2.0 (1.0), following 0.3 (0.6); it made 2.50 tokens a row, and a plain step would take 30.0: 1.64x predicted. "
        "Every forward takes 9.0 before it reads any of the cache"
    )
    assert told("docs", "sparse-kv", [sample(facts=facts | {"explained": False}), sample()]) is None


def test_other_runtimes_and_devices_are_refused_before_anything_is_loaded():
    with pytest.raises(UsageError, match="sparse-kv: needs the packed runtime, not --runtime transformers"):
        check(Plan(strategy=("sparse-kv",), target="tiny", runtime="transformers"))
