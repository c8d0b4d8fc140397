"""The formulas against simulation: each prediction within four standard errors of its mean, with a fixed seed (the odds
that a true formula fails are 6e-5 each)."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.hardware import cost_model as model

DRAWS = 40_000


def leading(random: np.random.Generator, alphas, draws: int = DRAWS) -> np.ndarray:
    """How many draft tokens are accepted, `draws` times, position i with probability alphas[i]."""
    hits = random.random((draws, len(alphas))) < np.asarray(alphas)
    return np.cumprod(hits, axis=1).sum(axis=1)


def close(seen: np.ndarray, expected: float) -> bool:
    return abs(seen.mean() - expected) < 4 * seen.std() / np.sqrt(len(seen)) + 1e-9


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_tokens_per_round(alpha, k):
    assert close(1 + leading(np.random.default_rng(1), [alpha] * k), model.expected_tokens(alpha, k))
    assert model.speculative_speedup(alpha, k, 0.2) == pytest.approx(model.expected_tokens(alpha, k) / (1 + 0.2 * k))


@pytest.mark.parametrize("alphas", [[0.9, 0.7, 0.2], [0.5] * 4, []])
def test_horizontal_cascade(alphas):
    assert close(1 + leading(np.random.default_rng(2), alphas), model.horizontal_tokens(alphas))
    assert model.horizontal_speedup(alphas, [0.1] * len(alphas)) == pytest.approx(
        model.horizontal_tokens(alphas) / (1 + 0.1 * len(alphas))
    )


def test_the_best_drafter_belongs_in_front():
    """More acceptance at the first position is worth more than at the last."""
    base = model.horizontal_tokens([0.6, 0.6, 0.6])
    assert model.horizontal_tokens([0.7, 0.6, 0.6]) - base > model.horizontal_tokens([0.6, 0.6, 0.7]) - base > 0


@pytest.mark.parametrize(("inner", "k"), [(0.0, 3), (0.6, 3), (0.9, 8), (1.0, 2)])
def test_generating_function_of_a_review(inner, k):
    tokens = 1 + leading(np.random.default_rng(3), [inner] * k)
    for x in (0.0, 0.4, 0.8, 1.0):
        assert close(x**tokens, model.review_pgf(x, inner, k))


@pytest.mark.parametrize(
    ("alpha", "inner", "reviews", "k"), [(0.8, 0.6, 2, 3), (0.6, 0.9, 3, 5), (1.0, 0.5, 2, 2), (0.9, 0.0, 4, 3)]
)
def test_vertical_cascade(alpha, inner, reviews, k):
    random = np.random.default_rng(4)
    drafted = reviews + sum(leading(random, [inner] * k) for _ in range(reviews))
    accepted = np.array([leading(random, [alpha] * n, 1)[0] for n in drafted[:10_000]])
    assert close(1 + accepted, model.vertical_tokens(alpha, inner, reviews, k))


def test_a_free_level_at_the_bottom_always_helps():
    """The corollary of the paper: as the smaller drafter's cost goes to 0."""
    for alpha in (0.5, 0.8, 0.95):
        for reviews in (1, 3, 6):
            plain = model.speculative_speedup(alpha, reviews, 0.3)
            assert model.vertical_speedup(alpha, 0.0, reviews, 4, 0.3, 0.0) == pytest.approx(plain)
            assert model.vertical_speedup(alpha, 0.4, reviews, 4, 0.3, 0.0) > plain


def test_best_draft_length_is_the_best_of_all():
    target_ms, draft_ms = (lambda n: 10 + 0.4 * (n - 1)), (lambda k: 3.0 * k)
    for alpha in (0.1, 0.5, 0.8, 0.95):
        length, rate = model.best_draft_length([alpha] * 12, draft_ms, target_ms)
        rates = [1 / 10] + [model.expected_tokens(alpha, k) / (target_ms(k + 1) + draft_ms(k)) for k in range(1, 13)]
        assert (rate, length) == (pytest.approx(max(rates)), int(np.argmax(rates)))
    assert model.best_draft_length([0.2], lambda k: 9.0, lambda n: 10.0) == (0, 0.1)
    assert model.best_draft_length([], draft_ms, target_ms) == (0, 0.1)


def simulate(random, alphas, lengths, forward_ms, rounds=4000) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and milliseconds of rounds of a cascade, step by step."""

    def draft(level: int, wanted: int) -> float:
        if wanted == 0 or level + 1 >= len(forward_ms):
            return 0.0
        made, time = 0, 0.0
        while made < wanted:
            asked = min(lengths[level + 1], wanted - made - 1) if level + 1 < len(lengths) else 0
            time += draft(level + 1, asked) + forward_ms[level + 1](asked + 1)
            made += 1 + (int(leading(random, [alphas[level + 1]] * asked, 1)[0]) if asked else 0)
        assert made == wanted
        return time

    tokens = 1 + leading(random, [alphas[0]] * lengths[0], rounds)
    return tokens, np.array([draft(0, lengths[0]) + forward_ms[0](lengths[0] + 1) for _ in range(rounds)])


@pytest.mark.parametrize(
    ("alphas", "lengths", "models"),
    [([0.8], [4], 2), ([0.8, 0.5], [6, 4], 2), ([0.8, 0.7, 0.4], [8, 3, 5], 3), ([0.6], [5], 1)],
)
def test_tokens_per_second_of_a_cascade(alphas, lengths, models):
    """Down to a draft model, or to a statistical level, which costs nothing; times within 2 %."""
    forward_ms = [lambda n, ms=ms: ms * (1 + 0.05 * (n - 1)) for ms in (10.0, 3.0, 1.0)[:models]]
    tokens, ms = simulate(np.random.default_rng(5), alphas, lengths, forward_ms)
    assert model.cascade_tokens_per_s(alphas, lengths, forward_ms) == pytest.approx(
        1000 * tokens.mean() / ms.mean(), rel=0.02
    )
