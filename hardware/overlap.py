"""What a draft and a target on two devices can reach together in the long run: closed forms, and when to verify.

Nothing here runs a model. Costs come in as functions of milliseconds, acceptance as a probability, and speeds come out
in tokens per millisecond; so one set of measured cost curves gives the policy of a controller, and a map of where which
protocol pays. Single texts are simulated in `hardware.overlap_simulator`.

The picture of both strategies: the draft writes on, one step after another; the target verifies what is there. The
draft's lead over the verified text is what counts: `lead` tokens are ready, the target takes k of them, and the draft
goes on meanwhile. If all k are accepted and the token that follows them is the draft's next one, the lead survives;
else the draft has to begin anew, unless it had prepared for that very outcome (`hit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cost_model import expected_tokens

PARTS = 4  # of a draft step that the lead is counted in
_MOST_ROUNDS = 100  # a handful is usual; rounding could make two policies take turns
ENDS = 1e-4  # chance that a text is over with a decision, and the next one begins without a lead
LATE = 2  # parts of a step that the draft works on in vain, on average, before it hears of a rejection


@dataclass(frozen=True)
class Costs:
    """Milliseconds of both sides.

    Attributes:
        target_ms: of one target forward, by the number of tokens it computes.
        draft_ms: of one draft step, by the number of rows in it.
        target_factor, draft_factor: how much slower each is while the other works too, at least 1.
    """

    target_ms: Callable[[float], float]
    draft_ms: Callable[[float], float]
    target_factor: float = 1.0
    draft_factor: float = 1.0


def plain_rate(costs: Costs) -> float:
    """Tokens per ms of the target alone."""
    return 1 / costs.target_ms(1)


def sequential_rate(costs: Costs, alpha: float, draft_length: int) -> float:
    """Tokens per ms of speculative decoding in turns: one side waits while the other works."""
    took = draft_length * costs.draft_ms(1) + costs.target_ms(draft_length + 1)
    return expected_tokens(alpha, draft_length) / took


def best_sequential(costs: Costs, alpha: float, longest: int = 16) -> tuple[float, int]:
    """The best of `sequential_rate` over draft lengths from 1, and the length."""
    return max((sequential_rate(costs, alpha, length), length) for length in range(1, longest + 1))


def overlap_gain(costs: Costs, draft_length: int) -> float:
    """The most that overlap can gain over turns at one draft length: (g d + T(g+1)) / max(g d, T(g+1)), at most 2."""
    drafting, verifying = draft_length * costs.draft_ms(1), costs.target_ms(draft_length + 1)
    return (drafting + verifying) / max(drafting, verifying)


def perfect_rate(costs: Costs, alpha: float, longest: int = 16) -> float:
    """The ceiling of any protocol that drafts one token per step and verifies one sequence: the target never waits
    for a draft, no draft token is made in vain, nothing slows the other side down, no message costs anything.

    A verification of k tokens makes 1 + alpha + ... + alpha^k final, and each of them but the last needs a draft step.
    """
    rates = [plain_rate(costs)]
    for length in range(1, longest + 1):
        tokens = expected_tokens(alpha, length)
        rates.append(tokens / max(costs.target_ms(length + 1), (tokens - 1) * costs.draft_ms(1)))
    return max(rates)


def ideal(costs: Costs) -> Costs:
    """The same without contention: what a measured run is held against."""
    return Costs(costs.target_ms, costs.draft_ms)


def published_tokens_per_pass(alpha: float, length: int, first: float | None = None) -> float:
    """Tokens per target pass of DuoDecoding's published protocol (and PEARL's), which has two states.

    A pass with no block in flight makes one token final, and finds its next token among the first tokens of the
    branches with probability `first` (alpha, where there is one branch); then the block of `length` tokens, the first
    of them verified already, is in flight. Such a pass makes 1 + alpha + ... + alpha^(length - 1) final, and keeps a
    block in flight with probability first * alpha^(length - 1).
    """
    first = alpha if first is None else first
    if first == 0:
        return 1.0
    stays = first * alpha ** (length - 1)
    in_flight = first / (first + 1 - stays)
    return (1 - in_flight) + in_flight * expected_tokens(alpha, length - 1)


@dataclass(frozen=True)
class Policy:
    """When to verify how much, and how fast that is.

    Attributes:
        rate: tokens per ms in the long run.
        need: draft tokens that have to be ready; 0 for a plain step where none is.
        most: draft tokens that one verification takes at most.
    """

    rate: float
    need: int
    most: int


def best_policy(
    costs: Costs,
    alpha: float,
    most: int = 12,
    lead: int = 16,
    hit: float = 0.0,
    rows: float = 1.0,
    in_turns: bool = False,
) -> Policy:
    """The policy with the highest rate: each is a Markov chain over the draft's lead, solved for its stationary state.

    Acceptance is independent from token to token, and the draft learns of a rejection half a step late.

    Args:
        alpha: probability that a draft token is the target's own, given that all before it were.
        most: draft tokens that one verification takes at most.
        lead: how far the draft may be ahead of the verified text.
        hit: probability that after a rejection the draft had prepared for the very token that replaced it.
        rows: rows of a draft step, the prepared outcomes among them.
        in_turns: the draft rests while the target works, and neither slows the other down.
    """
    most = min(most, lead)
    ms, tokens, chances = _decisions(costs, alpha, most, lead, hit, rows, in_turns)
    states = len(ms)
    at, ready = np.arange(states), np.maximum(np.arange(states) - PARTS, 0) // PARTS
    best = Policy(0.0, 0, most)
    for largest in sorted({1, 2, 3, 4, 6, 8, most} & set(range(1, most + 1)), reverse=True):
        for need in range(largest + 1):
            action = np.where(ready >= need, np.minimum(ready, largest) + 1, 0)
            # values = tokens - rate * ms + chances . values, with values[0] = 0 in the place of an unknown
            system = np.eye(states) - chances[at, action]
            system[:, 0] = ms[at, action]
            rate = float(np.linalg.solve(system, tokens[at, action])[0])
            if rate > best.rate * 1.001:  # of equals the longest
                best = Policy(rate, need, largest)
    return best


def _decisions(
    costs: Costs, alpha: float, most: int, lead: int, hit: float, rows: float, in_turns: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Milliseconds and expected tokens of every decision, (states, actions), and where it leads, (states, actions,
    states). State i is a lead of i / PARTS - 1 steps; action 0 waits, action k + 1 verifies k tokens.

    A draft that is behind by a part of a step has a token in the making that is verified already.
    """
    states = (lead + 1) * PARTS + 1
    target_factor, draft_factor = (1.0, 1.0) if in_turns else (costs.target_factor, costs.draft_factor)
    step_ms = costs.draft_ms(rows) * draft_factor
    ms = np.full((states, most + 2), np.inf)
    tokens = np.zeros((states, most + 2))
    chances = np.zeros((states, most + 2, states))
    for state in range(states):
        parts = state - PARTS
        ready = max(parts, 0) // PARTS
        done = (parts // PARTS + 1) * PARTS
        if done <= lead * PARTS:
            # waiting has the core for itself, while the target rests
            ms[state, 0] = (done - parts) / PARTS * costs.draft_ms(rows)
            chances[state, 0, done + PARTS] = 1
        for k in range(min(ready, most) + 1):
            took = costs.target_ms(k + 1) * target_factor
            made = 0 if in_turns else round(took / step_ms * PARTS)
            left = (
                min(parts + made, lead * PARTS) - (k + 1) * PARTS
            )  # the bonus token is the draft's next, if they agree
            follows = alpha ** (k + (left >= 0))
            if in_turns and k == ready:
                left = 0
            ms[state, k + 1], tokens[state, k + 1] = took, expected_tokens(alpha, k)
            for chance, lies in (
                (follows, left),
                ((1 - follows) * hit, made),
                ((1 - follows) * (1 - hit), 0 if in_turns else -LATE),
            ):
                chances[state, k + 1, min(max(lies + PARTS, 0), states - 1)] += chance
    # A draft just as fast as the target keeps any lead that it has, and there would be several long runs; texts end.
    chances *= 1 - ENDS
    chances[:, :, PARTS] += ENDS
    return ms, tokens, chances
