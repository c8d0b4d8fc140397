"""What decoding with drafts should cost and bring, as formulas: pure functions, checked by simulation in the tests.

They assume that draft tokens are accepted independently, with one probability per position. Real acceptance comes in
runs and differs from text to text, so a formula explains a measured number, chooses between settings, and tells where
the ceiling is; it does not replace a measurement.

Notation: alpha, probability that a draft token is accepted given that those before it were; k, draft tokens per
round; c, time of one forward of a drafter over one of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per round of k draft tokens, the target's own one included: (1 - alpha^(k+1)) / (1 - alpha).

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def speculative_speedup(alpha: float, k: int, c: float) -> float:
    """Expected walltime improvement over plain decoding where verification costs one forward.

    Source: Leviathan et al. 2023, theorem 3.8: expected tokens / (c k + 1).
    """
    return expected_tokens(alpha, k) / (c * k + 1)


def review_pgf(x: float, alpha: float, k: int) -> float:
    """E[x^N] of the tokens N that one review of k draft tokens yields, 1 to k + 1: the probability generating function.

    phi(x) = 1 + (x - 1) (1 - (alpha x)^(k+1)) / (1 - alpha x). Used by the vertical cascade.
    """
    y = alpha * x
    return 1 + (x - 1) * (k + 1 if y == 1 else (1 - y ** (k + 1)) / (1 - y))


def vertical_tokens(alpha: float, inner_alpha: float, reviews: int, k: int) -> float:
    """Tokens per target forward when the draft is what `reviews` reviews by a drafter yield, each of k tokens of a
    smaller one: (1 - alpha phi(alpha)^n) / (1 - alpha).

    Args:
        alpha: of the drafter's tokens by the target.
        inner_alpha: of the smaller drafter's tokens by the drafter.

    Source: Chen et al. 2023, Cascade Speculative Drafting (arXiv 2312.11462), theorem on the vertical cascade.
    """
    if alpha == 1:
        return 1 + reviews * expected_tokens(inner_alpha, k)
    return (1 - alpha * review_pgf(alpha, inner_alpha, k) ** reviews) / (1 - alpha)


def vertical_speedup(alpha: float, inner_alpha: float, reviews: int, k: int, c: float, inner_c: float) -> float:
    """Expected walltime improvement of a vertical cascade: its tokens / (1 + n c + n k c').

    With a statistical drafter (inner_c = 0) it costs what n drafted tokens cost, and yields more. Source: as above.
    """
    return vertical_tokens(alpha, inner_alpha, reviews, k) / (1 + reviews * c + reviews * k * inner_c)


def horizontal_tokens(alphas: Sequence[float]) -> float:
    """Tokens per round when position i is accepted with alphas[i]: 1 + sum of the products alpha_1 ... alpha_i.

    Source: arXiv 2312.11462, the horizontal cascade.
    """
    return 1 + sum(accumulate(alphas, mul))


def horizontal_speedup(alphas: Sequence[float], costs: Sequence[float]) -> float:
    """Expected walltime improvement when position i costs costs[i] target forwards to draft. Source: as above."""
    return horizontal_tokens(alphas) / (1 + sum(costs))


def best_draft_length(
    alphas: Sequence[float], draft_ms: Callable[[int], float], target_ms: Callable[[int], float]
) -> tuple[int, float]:
    """The draft length that yields most tokens per millisecond, from 0 to len(alphas), and that rate.

    Args:
        alphas: acceptance of each position, given those before it.
        draft_ms: time to draft k tokens; draft_ms(0) is not asked for.
        target_ms: time of one forward of the target over n tokens.
    """
    best, rate = 0, 1 / target_ms(1)
    tokens = survive = 1.0
    for k, alpha in enumerate(alphas, 1):
        survive *= alpha
        tokens += survive
        if (here := tokens / (target_ms(k + 1) + draft_ms(k))) > rate:
            best, rate = k, here
    return best, rate


def cascade_tokens_per_s(
    alphas: Sequence[float], lengths: Sequence[int], forward_ms: Sequence[Callable[[int], float]]
) -> float:
    """Expected tokens per second of a vertical cascade with fixed lengths.

    Level 0 drafts for the target, level i for level i - 1; a level drafts exactly what is asked of it, by reviews of at
    most `lengths[i + 1]` tokens of the level below and never more than it still needs. A level that has no forward time
    of its own is statistical: it drafts in no time, and it is the last one.

    Args:
        alphas: acceptance of each level's tokens by the model above it.
        lengths: tokens that each level proposes at a time.
        forward_ms: one forward over n tokens, of the target and then of each level that is a model.
    """

    @cache
    def drafting_ms(level: int, tokens: int) -> float:
        """Expected time in which a level drafts so many tokens."""
        if tokens == 0 or level + 1 >= len(forward_ms):
            return 0.0
        asked = min(lengths[level + 1], tokens - 1) if level + 1 < len(lengths) else 0
        time = drafting_ms(level + 1, asked) + forward_ms[level + 1](asked + 1)
        reached = 1.0
        for accepted in range(asked + 1):
            stops = 1 - alphas[level + 1] if accepted < asked else 1.0
            time += reached * stops * drafting_ms(level, tokens - accepted - 1)
            reached *= 1 - stops
        return time

    round_ms = forward_ms[0](lengths[0] + 1) + drafting_ms(0, lengths[0])
    return 1000 * expected_tokens(alphas[0], lengths[0]) / round_ms
