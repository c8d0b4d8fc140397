"""The cost curve: what is measured, in which order, and what lies between the points."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from specbench.hardware.clock import Clock
from specbench.models.base import CachedModel
from specbench.models.cost_curve import CostCurve, measure_cost


class Priced(CachedModel):
    """A model whose forward takes 10 ms, 1 ms more per new token and 1 microsecond per cached one."""

    name, runtime, device, dtype = "priced", "toy", "cpu", "float32"
    vocab_size, context_length, max_rows = 11, 4096, 8
    weight_bytes = 0  # type: ignore[assignment]

    def __init__(self) -> None:
        self.now_ns = 0
        self.calls: list[tuple[int, int, int]] = []
        self.cached = 0

    def advance(self, contexts, last=1, rows=None):
        length = len(contexts[0])
        new = max(length - self.cached, last) if self.cached < length else last
        before = length - new
        self.now_ns += int(10e6 + 1e6 * new * len(contexts) + 1e3 * before)
        self.calls.append((last, before, len(contexts)))
        self.cached = length
        return torch.zeros(last * len(contexts), self.vocab_size)

    def reset(self) -> None:
        self.cached = 0


class ToyClock(Clock):
    def __init__(self, model: Priced) -> None:
        self.model = model

    def now(self) -> int:
        return self.model.now_ns


def measured(**grid) -> tuple[Priced, CostCurve]:
    model = Priced()
    return model, measure_cost(model, clock=ToyClock(model), **grid)


def test_every_point_of_the_grid_is_measured():
    _, curve = measured(new_tokens=(1, 4, 2), context=(100, 300), rows=(1, 3), repeats=3)
    assert curve.new_tokens == (1, 2, 4)
    assert curve.median_ms.shape == (3, 2, 2)
    assert curve.ms(4, 100, 1) == pytest.approx(14.1)
    assert curve.ms(4, 300, 3) == pytest.approx(22.3)


def test_with_logits_of_the_last_token_alone_all_new_ones_are_still_read_every_time():
    model, curve = measured(new_tokens=(1, 8), context=50, repeats=2, last=1)
    assert curve.ms(8) == pytest.approx(18.05)
    assert curve.ms(1) == pytest.approx(11.05)
    assert {call[0] for call in model.calls} == {1}
    model, curve = measured(new_tokens=(2, 8), context=50, rows=(1, 3), repeats=2, last=4)
    assert curve.ms(8, 50, 3) == pytest.approx(34.05)
    assert {call[0] for call in model.calls if call[1] == 50} == {2, 4}
    with pytest.raises(ValueError, match="at least its last token, not 0"):
        measured(last=0)


class Queued(Priced):
    """A device that goes on by itself: what a forward takes passes when somebody waits for what came out of it."""

    def advance(self, contexts, last=1, rows=None):
        before = self.now_ns
        logits = super().advance(contexts, last, rows)
        self.queued, self.now_ns = getattr(self, "queued", 0) + self.now_ns - before, before
        return Result(self, logits)


class Result:
    def __init__(self, model: Queued, values: torch.Tensor) -> None:
        self.model, self.values = model, values

    def argmax(self, dim: int) -> Result:
        return Result(self.model, self.values.argmax(dim))

    def tolist(self) -> list:
        self.model.now_ns, self.model.queued = self.model.now_ns + self.model.queued, 0
        return self.values.tolist()


def test_what_a_device_still_does_is_not_charged_to_the_forward_that_is_timed():
    model = Queued()
    curve = measure_cost(model, clock=ToyClock(model), new_tokens=(8,), context=50, repeats=2, last=1)
    assert curve.ms(8) == pytest.approx(18.05)


def test_numbers_of_new_tokens_take_turns():
    model, _ = measured(new_tokens=(1, 2), context=50, repeats=2)
    assert [call[0] for call in model.calls[1:]] == [1, 2, 1, 2, 1, 2]
    assert all(before == 50 for _, before, _ in model.calls[1:])


def test_between_points_the_curve_is_linear_and_beyond_them_it_never_becomes_free():
    curve = CostCurve((1, 4, 8), (100, 200), (1, 2), np.arange(12.0).reshape(3, 2, 2))
    assert curve.ms(1) == 0
    assert curve.ms(2.5, 100, 1) == 2
    assert curve.ms(4, 150, 1.5) == 5.5
    assert curve.ms(1, 50, 1) == curve.ms(1, 100, 1)
    assert curve.ms(1, 900, 9) == 3
    assert curve.ms(12, 100, 1) == 12  # one unit a token, as between 4 and 8


def test_ratio_is_relative_to_one_token():
    _, curve = measured(new_tokens=(1, 8), context=1000, repeats=1)
    assert curve.ratio(8) == pytest.approx(19 / 12)
    assert curve.ratio(1) == 1


def test_curve_survives_json():
    _, curve = measured(new_tokens=(1, 2), context=10, repeats=1)
    again = CostCurve.from_record(json.loads(json.dumps(curve.as_record())))
    assert again.ms(2) == curve.ms(2)
    assert again.new_tokens == curve.new_tokens


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"new_tokens": ()}, "counted from 1"),
        ({"new_tokens": (0, 1)}, "counted from 1"),
        ({"rows": 9}, "at most 8 rows"),
        ({"context": 4090}, "context of 4096"),
        ({"repeats": 0}, "at least one repeat"),
    ],
)
def test_impossible_grids_are_refused(grid, message):
    with pytest.raises(ValueError, match=message):
        measured(**grid)
