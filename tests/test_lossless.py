"""Token-identical output on real (tiny, random) transformers in float32, for every strategy.

200 prompts with the packed runtime, 40 with the slower one of transformers.

`test_contract.py` shows the same without any rounding; here rounding is real, and nothing may depend on it.
"""

from __future__ import annotations

import numpy as np
import pytest
from toys import batch_of, decode

from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.specs import parse
from specbench.strategies import registry
from specbench.strategies.base import Request
from specbench.strategies.sampling import Sampling

NAMES = [name for name in registry.names() if registry.get(name).engine == "specbench"]


@pytest.fixture(scope="module", params=["packed", "transformers"])
def models(request):
    return {
        role: load(describe(parse(name), role), runtime=request.param)
        for role, name in (("target", "tiny"), ("draft", "tiny-draft"))
    }


def prompts(count: int, limit: int) -> list[Request]:
    random = np.random.default_rng(0)
    return [Request(key, random.integers(32, 127, random.integers(1, 30)).tolist(), limit) for key in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.6, top_p=0.9, seed=1)],
    ids=["greedy", "T=1", "T=0.6 top-p 0.9"],
)
def test_every_strategy_emits_the_tokens_of_plain_decoding(models, sampling):
    """Plain decoding one by one, the strategies in ragged batches of 20, and 10 prompts one by one."""
    asked = prompts(200 if models["target"].runtime == "packed" else 40, limit=12)
    make = lambda name: registry.get(name)(models, registry.get(name).Options())  # noqa: E731
    plain = decode(make("autoregressive"), asked, sampling)
    assert len({tuple(ids) for ids in plain}) > 0.75 * len(plain)  # the model does not say the same thing to everybody
    for name in NAMES:
        if registry.get(name).needs_packed and models["target"].runtime != "packed":
            continue
        some = asked[:20] if registry.get(name).apart else asked  # two threads get in each other's way here
        assert decode(make(name), some, sampling, batch_of(registry.get(name), 20)) == plain[: len(some)], name
        assert decode(make(name), asked[:10], sampling) == plain[:10], name
