"""What every strategy has to keep, run over the registry: a new strategy is covered without an edit here.

The models are tables in float64, so no difference can be rounding. Peers that drive another project's loop need a
real model and are covered in `test_hf_assisted.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import threading
from pathlib import Path

import pytest
from toys import TableModel, TickingClock, batch_of, decode, plain, requests

import specbench.strategies
from specbench.errors import UsageError
from specbench.hardware.clock import Drain
from specbench.options import build
from specbench.results import metrics
from specbench.results.measure import Ending, measure
from specbench.results.records import Sample
from specbench.strategies import registry
from specbench.strategies.base import Request, Step, Strategy
from specbench.strategies.sampling import Sampling

VOCAB = 12
NAMES = [name for name in registry.names() if registry.get(name).engine == "specbench"]
BATCHING = [name for name in NAMES if registry.get(name).max_batch is None]
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, rejection rule": Sampling(verify="rejection"),
    "T=1": Sampling(temperature=1.0, seed=5),
    "T=0.6 top-p 0.9": Sampling(temperature=0.6, top_p=0.9, seed=5),
    "T=0.8 top-k 4": Sampling(temperature=0.8, top_k=4, seed=5),
    "penalties": Sampling(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2),
    "penalties at T=1": Sampling(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7, seed=2),
    "held back": Sampling(min_new_tokens=9, eos=(3, 4), suppress=(5, 6)),
    "held back at T=1": Sampling(temperature=1.0, min_new_tokens=9, eos=(3, 4), suppress=(5, 6)),
}


def models(twist: float = 1.0, context_length: int = 512, draft_context: int = 512) -> dict:
    return {
        "target": TableModel(VOCAB, seed=1, context_length=context_length),
        "draft": TableModel(VOCAB, seed=1, twist=twist, context_length=draft_context),
    }


def make(name: str, given: dict | None = None, **which) -> Strategy:
    strategy = registry.get(name)
    return strategy(models(**which), build(strategy.Options, given or {}, name))


def with_draft_length(name: str, length: int) -> dict:
    fields = {field.name for field in dataclasses.fields(registry.get(name).Options)}
    return {"draft_length": length} if "draft_length" in fields else {}


def steps_of(strategy: Strategy, request: Request, sampling: Sampling) -> list[Step]:
    """All steps of one request, as many tokens as it asks for at most to the end of the step that reaches it."""
    strategy.reset()
    steps, emitted = [], 0
    request.done = False
    for step in strategy.generate([request], sampling):
        steps.append(step)
        emitted += len(step.tokens)
        request.done = emitted >= request.max_new_tokens
    return steps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 7])
def test_tokens_equal_plain_decodings(name, how, batch):
    """D6, D8, D25, D27, D28, D29, D38: prompts of 1 to 12 tokens, greedy and coupled sampling, alone and in a batch.

    200 prompts for greedy decoding, 24 for the others; `test_lossless.py` has 200 sampled ones.
    """
    sampling = SAMPLINGS[how]
    asked = requests(200 if how == "greedy" and batch == 1 else 24, VOCAB, limit=16)
    batch = batch_of(registry.get(name), batch)
    assert decode(make(name), asked, sampling, batch) == plain(asked, sampling, VOCAB)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("twist", [0.0, 0.3, 50.0])
def test_tokens_do_not_depend_on_how_good_the_draft_is(name, twist):
    asked = requests(16, VOCAB, limit=20, seed=2)
    sampling = Sampling(temperature=1.0)
    assert decode(make(name, twist=twist), asked, sampling) == plain(asked, sampling, VOCAB)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [1, 2, 3, 6])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_never_more_tokens_than_asked_and_no_draft_beyond_them(name, limit, rule):
    """D4, D5: the budget is in tokens, and a draft that cannot be used is not made."""
    sampling = Sampling(temperature=0.7, verify=rule)
    for request in requests(30, VOCAB, limit=limit, seed=3):
        steps = steps_of(make(name, with_draft_length(name, 5)), request, sampling)
        emitted = 0
        for step in steps:
            assert step.drafted <= max(0, limit - emitted - 1)
            emitted += len(step.tokens)
        assert emitted == limit


@pytest.mark.parametrize("name", NAMES)
def test_prompt_of_one_token(name):
    """D7."""
    asked = [Request(1, [10], 12), Request(2, [0], 12)]
    assert decode(make(name), asked, Sampling()) == plain(asked, Sampling(), VOCAB)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_valid_and_begin_with_a_prefill(name):
    """D40: accepted tokens are a prefix of what is emitted, never more than drafted; one token more per step."""
    for request in requests(20, VOCAB, limit=25, seed=4):
        steps = steps_of(make(name), request, Sampling())
        assert (len(steps[0].tokens), steps[0].drafted) == (1, 0)
        for step in steps[1:]:
            assert 0 <= step.accepted <= step.drafted
            assert len(step.tokens) == step.accepted + 1
            assert len(step.rejected) == step.drafted - step.accepted
            assert not step.rejected or step.rejected[0] != step.tokens[-1]


@pytest.mark.parametrize("name", NAMES)
def test_one_target_forward_per_step(name):
    """What is called a step is one forward of the target, so tokens per step mean what they say."""
    strategy = make(name)
    (request,) = requests(1, VOCAB, limit=30, seed=5)
    steps = steps_of(strategy, request, Sampling())
    assert len(strategy.target.forwards) == len(steps)  # type: ignore[attr-defined]
    for step, new in zip(steps[1:], strategy.target.forwards[1:], strict=True):  # type: ignore[attr-defined]
        assert new == [step.drafted + 1]  # no token of the context is computed twice


@pytest.mark.parametrize("name", [n for n in NAMES if "draft" in registry.get(n).roles])
def test_draft_that_is_the_target_is_always_accepted(name):
    """D10."""
    for rule in registry.get(name).verifications:
        sampling = Sampling(temperature=1.0, verify=rule)
        for request in requests(10, VOCAB, limit=30, seed=6):
            steps = steps_of(make(name, twist=0.0), request, sampling)
            assert all(step.accepted == step.drafted for step in steps)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        for request in requests(10, VOCAB, limit=30, seed=6):
            steps = steps_of(make(name, twist=0.0), request, sampling)
            assert all(step.accepted == step.drafted for step in steps)
            # Where both work at once, a target as quick as this one may be done before anything is drafted.
            assert any(step.drafted for step in steps) or registry.get(name).apart


@pytest.mark.parametrize("length", [1, 2, 5])
def test_draft_length_asked_is_draft_length_drafted(length):
    """D31."""
    (request,) = requests(1, VOCAB, limit=40, seed=7)
    steps = steps_of(make("speculative", {"draft_length": length}), request, Sampling())
    emitted = 1
    for step in steps[1:]:
        assert step.drafted == min(length, 40 - emitted - 1)
        emitted += len(step.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_stops_at_the_end_of_a_context(name):
    """D32, D33, D34: the target's last position is reached, and a shorter draft model falls silent before its own."""
    for request in requests(10, VOCAB, limit=20, seed=8, longest=12):
        room = 32 - len(request.ids)
        asked = [Request(request.key, request.ids, min(20, room + 1))]
        expected = plain(asked, Sampling(), VOCAB)
        assert decode(make(name, context_length=32), asked, Sampling()) == expected
        assert decode(make(name, draft_context=16), asked, Sampling()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_no_state_is_carried_between_prompts(name):
    """P8, P9: any order, and a second time, gives the same steps; the same tokens, where steps depend on timing."""
    strategy, asked = make(name), requests(12, VOCAB, limit=20, seed=9)

    def outcome(request: Request) -> list:
        steps = steps_of(strategy, request, Sampling())
        return [token for step in steps for token in step.tokens][:20] if strategy.apart else steps

    first = {request.key: outcome(request) for request in asked}
    again = {request.key: outcome(request) for request in reversed(asked)}
    assert first == again


@pytest.mark.parametrize("name", NAMES)
def test_closing_in_the_middle_leaves_nothing_running(name):
    before = threading.active_count()
    strategy = make(name)
    generation = strategy.generate(requests(batch_of(type(strategy), 3), VOCAB, limit=50), Sampling())
    for _ in range(5):
        next(generation)
    generation.close()  # type: ignore[attr-defined]
    strategy.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("name", BATCHING)
def test_rows_that_are_done_get_no_more_work(name):
    strategy, asked = make(name), requests(4, VOCAB, limit=30)
    strategy.reset()
    steps = dict.fromkeys(range(4), 0)
    for step in strategy.generate(asked, Sampling()):
        steps[step.row] += 1
        if step.row == 2:
            asked[2].done = True
        if steps[0] == 8:
            for request in asked:
                request.done = True
    assert steps[2] == 1
    assert steps[0] == 8


def record(name: str, ending: Ending, limit: int = 24, given: dict | None = None, seed: int = 0) -> Sample:
    (request,) = requests(1, VOCAB, limit=limit, seed=seed)
    (row,) = measure(make(name, given, twist=0.0), [request], Sampling(), ending, TickingClock(), Drain())
    assert row.error is None
    return Sample(
        name, "t", "p", "h", "", 0, 0, "measure", 0, 1, len(request.ids), limit, row.token_ids, row.finish, row.ttft_ns,
        row.e2e_ns, row.drain_ns, row.steps,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_output_ends_at_the_first_end_of_text_inside_a_block(name):
    """D1, D2: run greedy first, then declare one produced token to be the end of text; at every place in turn."""
    plain = record("autoregressive", Ending()).token_ids
    for end in set(plain):
        sample = record(name, Ending(frozenset({end})), given=with_draft_length(name, 6))
        assert sample.token_ids == plain[: plain.index(end) + 1]
        assert sample.finish == "eos"
        assert metrics.defects(sample) == []  # what was cut off counts neither as a token nor as drafted or accepted
        assert sum(step[1] for step in sample.steps) == len(sample.token_ids)
        assert all(step[3] <= step[2] for step in sample.steps)


@pytest.mark.parametrize("name", NAMES)
def test_without_an_end_of_text_it_runs_to_the_limit(name):
    """D3."""
    sample = record(name, Ending())
    assert (len(sample.token_ids), sample.finish) == (24, "length")


@pytest.mark.parametrize("name", NAMES)
def test_acceptance_is_counted_without_any_switch(name):
    """M5: the counts are in every record."""
    sample = record(name, Ending(), limit=60)
    assert all(len(step) == 5 for step in sample.steps)
    drafting = metrics.drafting([sample])
    assert sum(drafting.accepted_at_least) == drafting.accepted
    if "draft" in registry.get(name).roles:
        assert drafting.acceptance_rate == 1.0 or (registry.get(name).apart and not drafting.drafted)


def test_a_batch_that_a_strategy_cannot_run_is_refused():
    """D37: no silent loop."""

    class Single(registry.get("lookup")):
        max_batch = 1

    Single.check(Sampling(), 1)
    with pytest.raises(UsageError, match="at most 1 row"):
        Single.check(Sampling(), 2)


def test_a_rule_that_a_strategy_does_not_know_is_refused_unless_greedy():
    """C16, D41: nothing is accepted and then ignored."""

    class CoupledOnly(registry.get("lookup")):
        verifications = ("coupled",)

    CoupledOnly.check(Sampling(verify="rejection"), 1)
    with pytest.raises(UsageError, match="not rejection"):
        CoupledOnly.check(Sampling(temperature=1.0, verify="rejection"), 1)


def test_no_strategy_reads_a_clock_or_synchronises():
    """The receiver does both; a strategy that could would be able to hide work."""
    folder = Path(specbench.strategies.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not {"time", "timeit"} & {module.split(".")[0] for module in modules}, path.name
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("synchronize", "perf_counter", "perf_counter_ns", "monotonic"), path.name


def test_the_table_of_built_in_strategies_says_what_the_classes_say():
    """`specbench list strategies` reads the table, so that it need not import torch."""
    for name, entry in registry.BUILT_IN.items():
        found = registry.get(name)
        assert (found.name, found.summary, found.roles) == (name, entry.summary, entry.roles)
        assert dataclasses.is_dataclass(found.Options)
        assert found.Options.__dataclass_params__.frozen


def test_unknown_strategy_names_the_near_one():
    with pytest.raises(UsageError, match='unknown strategy "speculativ"; did you mean "speculative"'):
        registry.get("speculativ")


class _Point:
    """An entry point as `importlib.metadata` gives it."""

    dist = None

    def __init__(self, name, found):
        self.name, self.value, self._found = name, "plug_in:Found", found

    def load(self):
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_plug_ins_are_found_and_broken_ones_are_one_line(monkeypatch):
    class Mine(registry.get("autoregressive")):
        name = "mine"

    points = [_Point("mine", Mine), _Point("broken", ImportError("no module named fast")), _Point("odd", dict),
              _Point("other", Mine), _Point("lookup", Mine)]  # fmt: skip
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert registry.get("mine") is Mine
    assert registry.get("lookup") is not Mine  # ours come first
    assert [entry.name for entry in registry.entries()].count("lookup") == 1
    for name, why in [("broken", "no module named fast"), ("odd", "not a specbench Strategy"), ("other", "must agree")]:
        with pytest.raises(UsageError, match=why):
            registry.get(name)
