"""Verification, sampling and noise: the parts that losslessness stands on."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from toys import Garbage, TableModel, decode

from specbench.errors import UsageError
from specbench.strategies import noise
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.base import Draft, Request, Row
from specbench.strategies.lookup import Lookup
from specbench.strategies.lookup import Options as LookupOptions
from specbench.strategies.sampling import Sampling, argmax
from specbench.strategies.speculative import Options as SpeculativeOptions
from specbench.strategies.speculative import Speculative, draft_and_verify
from specbench.strategies.verify import Verifier, residual, verify_coupled

# Every chi-square test below rejects a true hypothesis with this probability; their seeds are fixed, so a test that
# passes once passes always, and a change of code meets the odds once.
ALPHA = 1e-4


def row(ids=(1, 2, 3), key=7) -> Row:
    return Row(0, Request(key, list(ids), 16))


# Noise


def test_noise_depends_on_seed_prompt_position_stream_and_token_only():
    tokens = torch.arange(1000)
    base = noise.gumbel(noise.position_key(1, 2, 3, 0), tokens)
    assert torch.equal(base, noise.gumbel(noise.position_key(1, 2, 3, 0), tokens))
    assert torch.equal(base[500:600], noise.gumbel(noise.position_key(1, 2, 3, 0), tokens[500:600]))
    for other in [(9, 2, 3, 0), (1, 9, 3, 0), (1, 2, 9, 0), (1, 2, 3, 1)]:
        assert not torch.equal(base, noise.gumbel(noise.position_key(*other), tokens))


def test_noise_is_the_same_by_numpy_and_by_torch():
    """CPU and GPU have to agree; the logarithms may differ in the last place. Near 0 the outer one, of a number near 1,
    makes more places of that, so what counts there are places of 1."""
    for vocab in (1, 7, 50_000):
        for key in (0, 1, 2**32, 2**64 - 1, noise.position_key(1, 2, 3, 0)):
            by_torch = noise._by_torch(key, torch.arange(vocab)).numpy()
            by_numpy = noise._by_numpy(key, np.arange(vocab))
            assert (np.abs(by_numpy - by_torch) <= 2 * np.spacing(np.maximum(np.abs(by_torch), 1))).all()


def test_noise_is_gumbel_over_tokens_and_over_positions():
    """Kolmogorov-Smirnov on 20,000 draws each; each passes wrongly-rejected odds of 1e-4."""
    over_tokens = noise.gumbel(noise.position_key(0, 5, 17, 0), torch.arange(20_000)).numpy()
    token = torch.tensor([42])
    over_positions = np.array([float(noise.gumbel(noise.position_key(0, 5, i, 0), token)) for i in range(20_000)])
    for drawn in (over_tokens, over_positions):
        assert np.isfinite(drawn).all()
        assert stats.kstest(drawn, "gumbel_r").pvalue > ALPHA
    # Neighbours in either direction are not correlated: |r| below 4.5 standard errors.
    for drawn in (over_tokens, over_positions):
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4.5 / math.sqrt(len(drawn))


def test_uniform_is_uniform():
    drawn = [noise.uniform(3, 1, i) for i in range(20_000)]
    assert min(drawn) >= 0
    assert max(drawn) < 1
    assert stats.kstest(drawn, "uniform").pvalue > ALPHA


# Sampling


def test_lowest_index_wins_a_tie():
    """P15: one argmax everywhere."""
    assert argmax(torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])) == [1, 0]
    assert argmax(torch.tensor([[1.0, 5.0, 5.0]], dtype=torch.bfloat16)) == [1]
    wide = torch.zeros(3, 50_001)
    wide[:, 40_000] = wide[:, 123] = 1
    assert argmax(wide) == [123] * 3


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 9e-5])
def test_tiny_temperatures_are_greedy_and_never_nan(temperature):
    """D26: in every path, the drafter's too."""
    verifier = Verifier(Sampling(temperature=temperature, top_k=3, top_p=0.5))
    logits = torch.tensor([[1e4, -1e4, 9999.0, 0.0]])
    assert verifier.choose(logits, row()) == [0]
    assert verifier.choose_drafts(logits, [row()], [[]])[0] == (0, None)
    assert verifier.verify([row()], [Draft(())], logits)[0].tokens == (0,)


def test_small_but_real_temperature_gives_finite_scores():
    scores = Sampling(temperature=1e-4, top_p=0.9).scores(torch.tensor([[50.0, 49.0, -50.0]]))
    assert scores.softmax(-1).tolist()[0] == [1.0, 0.0, 0.0]


def test_top_k_and_top_p_keep_what_they_say_and_ties_whole():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])
    kept = lambda **how: torch.isfinite(Sampling(temperature=1.0, **how).scores(logits))[0].tolist()  # noqa: E731
    assert kept(top_k=1) == [True, False, False, False, False]
    assert kept(top_k=2) == [True, True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False, False]  # the first holds 0.53
    assert kept(top_p=0.6) == [True, True, True, False, False]
    assert kept(top_p=1.0) == [True] * 5
    assert kept(top_k=3, top_p=0.9) == [True, True, True, False, False]


def test_top_p_over_a_large_flat_vocabulary_looks_beyond_its_first_guess():
    scores = Sampling(temperature=1.0, top_p=0.9).scores(torch.arange(5000) * -1e-4 * torch.ones(1, 5000))
    p = torch.softmax(torch.arange(5000) * -1e-4, -1)
    kept = torch.isfinite(scores[0])
    assert float(p[kept].sum()) >= 0.9
    assert float(p[kept][:-1].sum()) < 0.9


@pytest.mark.parametrize(
    "bad",
    [dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=0), dict(top_p=1.1), dict(top_k=-1),
     dict(verify="typical"), dict(repetition_penalty=0), dict(min_new_tokens=-1)],
)  # fmt: skip
def test_nonsense_settings_are_refused(bad):
    with pytest.raises(UsageError):
        Sampling(**bad)


# The two rules


def test_coupled_takes_the_common_prefix_and_one_token_more():
    assert verify_coupled([5, 6, 7], [5, 6, 9, 1]).tokens == (5, 6, 9)
    assert verify_coupled([5, 6, 7], [5, 6, 7, 1]).tokens == (5, 6, 7, 1)
    assert verify_coupled([5], [4, 1]) == verify_coupled([3], [4, 2])
    assert verify_coupled([], [4]).accepted == 0
    with pytest.raises(ValueError, match="need 3 target tokens"):
        verify_coupled([1, 2], [1, 2])


def test_residual_is_what_p_has_over_q():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    assert residual(p, q, 1).tolist() == pytest.approx([0.3, 0.0, 0.1])
    assert residual(p, None, 0).tolist() == pytest.approx([0.0, 0.3, 0.2])
    assert residual(p, p, 0).tolist() == p.tolist()  # nothing left by rounding: p itself
    with pytest.raises(ValueError, match="differ in size"):
        residual(p, torch.ones(4) / 4, 0)


def test_a_draft_token_that_q_could_not_have_drawn_is_a_bug_not_a_ratio():
    verifier = Verifier(Sampling(temperature=1.0, verify="rejection"))
    with pytest.raises(ValueError, match="probability 0"):
        verifier.verify([row()], [Draft([1], torch.tensor([[1.0, 0.0]]))], torch.zeros(2, 2))


# Distributions


def exact_distribution(model: TableModel, prompt: list[int], sampling: Sampling, length: int) -> dict[tuple, float]:
    """The probability of every continuation of `length` tokens, from the table."""
    result = {}
    for tokens in product(range(model.vocab_size), repeat=length):
        probability = 1.0
        for i, token in enumerate(tokens):
            logits = model.advance([[*prompt, *tokens[:i]]], 1)
            probability *= float(sampling.scores(logits)[0].softmax(-1)[token])
        result[tokens] = probability
    return result


def chi_square(counts: dict[tuple, int], expected: dict[tuple, float], draws: int) -> float:
    """p-value; outcomes expected fewer than 5 times are pooled. An impossible outcome gives 0."""
    if any(expected[outcome] == 0 for outcome in counts):
        return 0.0
    often = [o for o, p in expected.items() if p * draws >= 5]
    seen = [counts.get(o, 0) for o in often] + [draws - sum(counts.get(o, 0) for o in often)]
    due = [expected[o] * draws for o in often] + [draws - sum(expected[o] for o in often) * draws]
    if due[-1] < 5:
        seen[-2:], due[-2:] = [sum(seen[-2:])], [sum(due[-2:])]
    return float(stats.chisquare(seen, np.array(due) * sum(seen) / sum(due)).pvalue)


class GarbageDrafted(Autoregressive):
    """Random one-hot drafts, verified: whatever is proposed, the output has the target's distribution."""

    def generate(self, requests, sampling):
        drafter = Garbage(self.target.vocab_size, seed=len(requests[0].ids) + requests[0].key % 1000)
        yield from draft_and_verify(self.target, drafter, Verifier(sampling), requests, 3)


SETTINGS = {
    "T=1": dict(temperature=1.0),
    "T=0.6 top-p 0.9": dict(temperature=0.6, top_p=0.9),
    "T=1.3 top-k 3": dict(temperature=1.3, top_k=3),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("strategy", ["autoregressive", "speculative", "lookup", "garbage"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_output_has_the_targets_distribution(rule, strategy, settings):
    """D22, D23, D24: 1,000 prompts' worth of three tokens on a vocabulary of 5, chi-square over all 125 outcomes.

    False-alarm odds: 24 tests at 1e-4, so 0.24 % in all, met once since the seeds are fixed.
    """
    target = TableModel(vocab=5, seed=3)
    draft = TableModel(vocab=5, seed=3, twist=1.5)
    models = {"target": target, "draft": draft}
    made = {
        "autoregressive": lambda: Autoregressive(models, PlainOptions()),
        "speculative": lambda: Speculative(models, SpeculativeOptions(draft_length=2)),
        "lookup": lambda: Lookup(models, LookupOptions(min_match=1, draft_length=2)),
        "garbage": lambda: GarbageDrafted(models, PlainOptions()),
    }[strategy]()
    sampling = Sampling(**settings, verify=rule, seed=11)
    prompt, draws = [1, 2, 3, 1, 2], 1000
    counts: dict[tuple, int] = {}
    for tokens in decode(made, [Request(key, prompt, 3) for key in range(draws)], sampling, batch=50):
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    assert chi_square(counts, exact_distribution(target, prompt, sampling, 3), draws) > ALPHA


def test_the_test_itself_catches_a_biased_rule():
    """Accept-if-equal at T > 0 with independent noise (D24) and q before truncation (D23) would be seen."""
    target = TableModel(vocab=5, seed=3)
    sampling = Sampling(temperature=1.0)
    prompt, draws = [1, 2, 3, 1, 2], 4000
    expected = exact_distribution(target, prompt, sampling, 1)
    random = np.random.default_rng(0)
    q = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
    p = np.array([expected[(t,)] for t in range(5)])
    counts: dict[tuple, int] = {}
    for _ in range(draws):
        token, own = random.choice(5, p=q), random.choice(5, p=p)
        out = (int(token if random.random() < min(1, 1.3 * p[token] / q[token]) else own),)
        counts[out] = counts.get(out, 0) + 1
    assert chi_square(counts, expected, draws) < ALPHA


def test_rejection_accepts_at_least_as_much_as_coupled_over_many_prompts():
    """What the literature's rule is for; not a theorem per prompt, so compared over 300 of them."""
    models = {"target": TableModel(vocab=8, seed=1), "draft": TableModel(vocab=8, seed=1, twist=1.0)}
    accepted = {}
    for rule in ("coupled", "rejection"):
        sampling = Sampling(temperature=1.0, verify=rule)
        strategy = Speculative(models, SpeculativeOptions(draft_length=4))
        total = 0
        for key in range(300):
            request = Request(key, [1, 2], 20)
            strategy.reset()
            emitted = 0
            for step in strategy.generate([request], sampling):
                emitted += len(step.tokens)
                total += step.accepted
                request.done = emitted >= 20
        accepted[rule] = total
    assert accepted["rejection"] > accepted["coupled"] > 0
