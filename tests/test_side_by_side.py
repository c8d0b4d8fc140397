"""Costs of two devices: measured once for all strategies of a run, and the same after a way through JSON."""

from __future__ import annotations

import gc
import json

import pytest
from toys import TableModel

from specbench.hardware.overlap import Costs
from specbench.strategies import registry, side_by_side
from specbench.strategies.side_by_side import as_record, from_record, measure_costs

VOCAB = 12


@pytest.fixture
def measured(monkeypatch):
    """The pairs of models whose contention was measured."""
    found = []

    def contention(target, draft, counts, context):
        found.append((target, draft, context))
        return 1.2, 1.1

    monkeypatch.setattr(side_by_side, "_contention", contention)
    return found


def strategy(name, models):
    kind = registry.get(name)
    return kind(models, kind.Options())


def test_strategies_of_a_run_measure_contention_once(measured):
    models = {"target": TableModel(VOCAB, seed=1), "draft": TableModel(VOCAB, seed=2)}
    prepared = [strategy(name, models) for name in ("async", "duo", "async")]
    for one in prepared:
        one.prepare(1, 64)
    assert len(measured) == 1
    assert {one.costs.target_factor for one in prepared} == {1.2}


def test_other_models_and_other_lengths_are_measured_anew(measured):
    target, draft = TableModel(VOCAB, seed=1), TableModel(VOCAB, seed=2)
    measure_costs(target, draft, 64, 1)
    measure_costs(target, draft, 200, 1)
    measure_costs(TableModel(VOCAB, seed=3), draft, 64, 1)
    measure_costs(target, TableModel(VOCAB, seed=4), 64, 1)
    assert len(measured) == 4
    measure_costs(target, draft, 64, 4)
    assert len(measured) == 4


def test_a_draft_does_not_keep_targets_alive(measured):
    draft = TableModel(VOCAB, seed=2)
    measure_costs(TableModel(VOCAB, seed=1), draft, 64, 1)
    measured.clear()
    gc.collect()
    assert len(vars(draft)["known_contention"]) == 0


def test_factors_are_measured_and_within_reason():
    costs = measure_costs(TableModel(VOCAB, seed=1), TableModel(VOCAB, seed=2), 64, 2)
    assert 1 <= costs.target_factor <= side_by_side.MOST_FACTOR
    assert 1 <= costs.draft_factor <= side_by_side.MOST_FACTOR


def test_recorded_costs_come_back_through_json():
    costs = Costs(lambda n: 100 + 4 * (n - 1), lambda rows: 30 * (1 + 0.1 * (rows - 1)), 1.2, 1.1)
    again = from_record(json.loads(json.dumps(as_record(costs))))
    for tokens in (1, 2, 5, 7, 12, 13):
        assert again.target_ms(tokens) == pytest.approx(costs.target_ms(tokens))
    for rows in (1, 1.5, 3, 8):
        assert again.draft_ms(rows) == pytest.approx(costs.draft_ms(rows))
    assert (again.target_factor, again.draft_factor) == (1.2, 1.1)
