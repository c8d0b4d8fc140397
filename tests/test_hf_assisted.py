"""The peer row: transformers' own loop through our clock."""

from __future__ import annotations

import threading

import pytest
from toys import TickingClock

from specbench.errors import UsageError
from specbench.hardware.clock import Drain
from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.specs import parse
from specbench.results.measure import Ending, measure
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.base import Request
from specbench.strategies.hf_assisted import HfAssisted, Options
from specbench.strategies.sampling import Sampling


@pytest.fixture(scope="module")
def models():
    return {role: load(describe(parse(name), role), runtime="transformers") for role, name in
            (("target", "tiny"), ("draft", "tiny-draft"))}  # fmt: skip


def ids(strategy, limit=24, eos=frozenset()) -> list[int]:
    request = Request(1, [60, 70, 80, 60, 70], limit)
    (row,) = measure(strategy, [request], Sampling(eos=tuple(eos)), Ending(frozenset(eos)), TickingClock(), Drain())
    assert row.error is None, row.error
    return row.token_ids


@pytest.mark.parametrize("method", ["plain", "lookup", "draft"])
def test_its_greedy_tokens_are_those_of_plain_decoding(models, method):
    plain = ids(Autoregressive(models, PlainOptions()))
    peer = HfAssisted(models, Options(method=method))
    assert ids(peer) == plain
    assert ids(peer, eos={plain[5]}) == plain[: plain.index(plain[5]) + 1]
    assert ids(peer, limit=1) == plain[:1]


def test_the_models_own_generation_defaults_are_not_used(models):
    """P13: a repetition penalty, an end of text or sampling that a model's files ask for would change one arm only."""
    plain = ids(Autoregressive(models, PlainOptions()))
    config = models["target"].hf_model.generation_config
    before = config.to_dict()
    config.update(repetition_penalty=3.0, do_sample=True, temperature=2.0, eos_token_id=plain[2], min_new_tokens=3)
    try:
        assert ids(HfAssisted(models, Options(method="plain"))) == plain
    finally:
        config.update(**before)


def test_leaving_early_ends_its_thread(models):
    before = threading.active_count()
    steps = HfAssisted(models, Options(method="plain")).generate([Request(1, [60, 70], 500)], Sampling())
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_what_generate_raises_reaches_the_caller(models):
    request = Request(1, [10**9], 4)  # no such token
    (row,) = measure(HfAssisted(models, Options()), [request], Sampling(), Ending(), TickingClock(), Drain())
    assert row.error


def test_auto_takes_the_draft_where_there_is_one(models):
    assert HfAssisted(models, Options()).method == "draft"
    alone = {"target": models["target"]}
    assert HfAssisted(alone, Options()).method == "lookup"
    with pytest.raises(UsageError, match="--draft"):
        HfAssisted(alone, Options(method="draft"))


def test_what_it_cannot_do_alike_is_refused():
    """C16: not accepted and ignored."""
    for sampling in (Sampling(temperature=1.0), Sampling(presence_penalty=1.0), Sampling(min_new_tokens=3)):
        with pytest.raises(UsageError, match="hf-assisted"):
            HfAssisted.check(sampling, 1)
    with pytest.raises(UsageError, match="at most 1 row"):
        HfAssisted.check(Sampling(), 2)
