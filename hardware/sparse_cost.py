"""When a sparse KV cache pays: the cost model of MagicDec (arXiv 2408.11049), as pure functions of times.

A round drafts gamma tokens with the small cache and verifies them with the whole one. Per token it takes
(gamma T_draft + T_verify) / Omega, where Omega are the tokens it is expected to make, against T_target of plain
decoding. What a selection costs is spread over the tokens that it serves (`spread`), and bringing small caches up to
date counts in every round. Other times are those of one forward of the whole batch, with everything in it that does not
depend on the context, so a constant per forward needs no term of its own where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cost_model import expected_tokens

_FIRST_CONTEXT, _STEPS = 64, 20


def sparse_speedup(
    alpha: float,
    gamma: int,
    draft_ms: float,
    verify_ms: float,
    target_ms: float,
    select_ms: float = 0.0,
    tokens: float = float("inf"),
) -> float:
    """T_AR / T_SD = Omega T_target / (gamma T_draft + T_verify), less what selecting costs.

    Args:
        alpha: probability that a draft token is accepted given that those before it were.
        draft_ms, verify_ms, target_ms: one forward of the draft, of the target over gamma + 1 tokens, over one.
        select_ms: choosing the small cache, once for `tokens` tokens per row.
    """
    rate = expected_tokens(alpha, gamma) / (gamma * draft_ms + verify_ms)
    return target_ms * spread(rate, select_ms, tokens)


def spread(rate: float, begin_ms: float, tokens: float) -> float:
    """Tokens per ms of all rows together, once what it takes until a row can be drafted for is in it.

    The other rows wait meanwhile, so a token of any row takes `begin_ms` / tokens longer.

    Args:
        rate: tokens per ms without it.
        begin_ms: for one row.
        tokens: that a row gets.
    """
    return 1 / (1 / rate + begin_ms / tokens)


def break_even_context(gain: Callable[[float], float], longest: float) -> float | None:
    """The context, in tokens, from which `gain(context)` stays above 1; None where it is not above 1 at `longest`.

    A gain that is above 1 everywhere from 64 tokens on breaks even there.
    """
    if gain(longest) <= 1:
        return None
    below, above = None, longest
    context = longest
    while below is None and context > _FIRST_CONTEXT:
        context = max(context / 2, _FIRST_CONTEXT)
        if gain(context) <= 1:
            below = context
        else:
            above = context
    if below is None:
        return above
    for _ in range(_STEPS):
        middle = (below + above) / 2
        below, above = (below, middle) if gain(middle) > 1 else (middle, above)
    return above


@dataclass(frozen=True)
class Roofline:
    """A machine and a model, at a batch so large that weights cost arithmetic and the cache costs bandwidth.

    Attributes:
        parameters: that a token is multiplied by: layers and head, without the embedding.
        cache_bytes: keys and values of one token, all layers.
        flops: per second.
        bandwidth: bytes per second.
    """

    parameters: float
    cache_bytes: float
    flops: float
    bandwidth: float

    @property
    def balanced_context(self) -> float:
        """S0: the length at which reading a row's cache takes as long as its products."""
        return 2 * self.parameters * self.bandwidth / (self.flops * self.cache_bytes)

    def speedup(self, alpha: float, gamma: int, budget: float, context: float) -> float:
        """Omega (1 + S/S0) / (2 gamma + 1 + gamma K/S0 + S/S0); Omega as the context grows."""
        scale = self.balanced_context
        round_cost = 2 * gamma + 1 + gamma * budget / scale + context / scale
        return expected_tokens(alpha, gamma) * (1 + context / scale) / round_cost

    def break_even(self, alpha: float, gamma: int, budget: float) -> float:
        """S* = (S0 (2 gamma + 1 - Omega) + gamma K) / (Omega - 1), the context at which the speed-up is 1.

        Real ones are longer: the constant cost of a forward is not in it.
        """
        omega = expected_tokens(alpha, gamma)
        return (self.balanced_context * (2 * gamma + 1 - omega) + gamma * budget) / (omega - 1)


@dataclass(frozen=True)
class Lengths:
    """How much to draft for each row, and the tokens per ms that all rows together are expected to make of it."""

    lengths: tuple[int, ...]
    rate: float


def best_lengths(
    alphas: Sequence[float],
    limits: Sequence[int],
    draft_ms: Callable[[int], float],
    verify_ms: Callable[[float], float],
    row_ms: float = 0.0,
) -> Lengths:
    """The draft lengths with which a batch makes most tokens per ms; all 0 where plain decoding does.

    Rows share their forwards: drafting takes as many as the longest draft has tokens, each over the rows that still
    draft, and verification one. For every depth of the longest draft, a row drafts on while the chance that all its
    tokens are accepted is worth what one more token adds to the verification.

    Args:
        alphas: of each row.
        limits: the longest draft of each row.
        draft_ms: one forward of the draft over so many rows.
        verify_ms: one forward of the target over so many tokens per row, on average over the rows.
        row_ms: what a round takes for each row with a draft beside forwards.
    """
    rows = len(alphas)
    plain_ms = verify_ms(1)
    best = Lengths((0,) * rows, rows / plain_ms)
    for depth in range(1, max(limits, default=0) + 1):
        added_ms = (verify_ms(depth + 1) - plain_ms) / depth / rows
        worth = rows / plain_ms * added_ms
        lengths = [_worthwhile(alpha, min(depth, limit), worth) for alpha, limit in zip(alphas, limits, strict=True)]
        if max(lengths) < depth:
            continue
        ms = verify_ms(1 + sum(lengths) / rows)
        ms += sum(draft_ms(sum(length >= place for length in lengths)) for place in range(1, depth + 1))
        ms += row_ms * sum(length > 0 for length in lengths)
        tokens = sum(expected_tokens(alpha, length) for alpha, length in zip(alphas, lengths, strict=True))
        if tokens / ms > best.rate:
            best = Lengths(tuple(lengths), tokens / ms)
    return best


def _worthwhile(alpha: float, most: int, worth: float) -> int:
    """How many tokens, at most, have a chance of at least `worth` that all up to them are accepted."""
    length, chance = 0, alpha
    while length < most and chance >= worth:
        length, chance = length + 1, chance * alpha
    return length
