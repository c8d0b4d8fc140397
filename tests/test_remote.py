"""A draft in a worker: the same tokens as with the draft beside the target, and as plain decoding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from toys import TableModel, decode, requests

from specbench.errors import ModelError, PlacementError, UsageError, WorkerError
from specbench.hardware import devices
from specbench.hardware.clock import Clock, Drain
from specbench.hardware.devices import Device, available_cores
from specbench.models.cost_curve import CostCurve
from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.remote import cost_of, host_of, load_remote
from specbench.models.specs import parse
from specbench.results import plan as plans
from specbench.results import run as runs
from specbench.results.listener import Listener
from specbench.results.measure import Ending, measure
from specbench.results.plan import Plan, check
from specbench.results.records import RunFolder
from specbench.results.sweep import sweep
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.base import Draft, Drafter, Level, Request, Row, Step
from specbench.strategies.remote import RemoteDrafter, drafter_for
from specbench.strategies.sampling import Sampling
from specbench.strategies.speculative import Speculative

pytestmark = pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
FIRST, LAST = available_cores()[0], available_cores()[-1]
APART = f"target=cpu:{FIRST},draft=cpu:{LAST}"
GREEDY = Sampling()
SAMPLED = [
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=12, top_p=0.9, seed=4, repetition_penalty=1.2),
]


@pytest.fixture(autouse=True)
def all_cores_afterwards():
    yield
    devices._set_affinity(available_cores())


@pytest.fixture(scope="module")
def target():
    return load(describe(parse("tiny"), "target"))


@pytest.fixture(scope="module")
def here():
    return load(describe(parse("tiny-draft"), "draft"))


@pytest.fixture(scope="module")
def there():
    model = load_remote(describe(parse("tiny-draft"), "draft"), "draft", Device("cpu", (LAST,)), 1)
    yield model
    model.close()
    assert not model.worker.alive


# --- the model -------------------------------------------------------------------------------------------------------


def test_it_says_what_the_model_says(here, there):
    names = "name runtime device dtype vocab_size context_length max_rows one_row_because weight_bytes"
    for name in names.split():
        assert getattr(there, name) == getattr(here, name), name


def test_its_logits_are_the_models(here, there):
    here.reset()
    there.reset()
    there.reserve(2, 40)
    for contexts, last, rows in (([[40, 41, 42]], 2, None), ([[50, 60], [40, 41, 42, 43]], [1, 3], [1, 0])):
        assert torch.equal(there.advance(contexts, last, rows), here.advance(contexts, last, rows))
    with pytest.raises(ValueError, match="empty"):
        there.advance([[]])


def test_its_trace_is_in_our_time(there):
    assert there.trace is None
    there.reset()
    there.trace = []
    before = Clock().now()
    there.advance([[40, 41, 42]])
    (forward,) = there.trace
    assert before < forward.start_ns < forward.end_ns < Clock().now()
    assert (forward.rows, forward.new_tokens) == (1, 3)
    there.trace = None
    assert there.trace is None


def test_it_forgets_a_row_where_it_is(there):
    there.reset()
    there.advance([[40, 41, 42]])
    there.forget(0)
    there.trace = []
    there.advance([[40, 41, 42, 43]])
    assert there.trace[0].new_tokens == 4
    there.trace = None


def test_its_costs_are_measured_where_it_is(there, here):
    for model in (there, here):
        curve = cost_of(model, new_tokens=(1, 2), context=8, repeats=1)
        assert isinstance(curve, CostCurve)
        assert curve.median_ms.shape == (2, 1, 1)


def program(model, port, factor):
    while (message := port.wait()).kind:
        logits = model.advance([message.ids])
        port.send(1, ids=[int(logits.argmax()) * factor])


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_program_runs_beside_its_model(where, request, here):
    host, ids = host_of(request.getfixturevalue(where)), [40, 41, 42]
    port = host.start(program, 3)
    port.send(1, ids=ids)
    assert port.wait().ids == (int(here.advance([ids]).argmax()) * 3,)
    port.send(0)
    host.join()
    assert host.call(name_of) == "tiny-draft"
    host.close()


def name_of(model):
    return model.name


def test_two_models_of_a_device_share_its_worker(there):
    second = load_remote(describe(parse("tiny"), "draft2"), "draft2", there.worker.device, 1, worker=there.worker)
    assert second.worker is there.worker
    assert second.weight_bytes > there.weight_bytes
    second.close()
    assert there.worker.alive
    there.reset()


def test_a_model_that_cannot_be_loaded_is_the_same_error_as_here(there):
    info = describe(parse("tiny"), "draft")
    with pytest.raises(ModelError, match="unknown dtype"):
        load_remote(info, "draft", there.worker.device, 1, dtype="float8", runtime="transformers", worker=there.worker)
    assert there.worker.alive


# --- the drafter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLED], ids=["greedy", "sampled", "truncated"])
def test_a_draft_elsewhere_changes_nothing(target, here, there, sampling, batch):
    asked = requests(4, 100, limit=20) + [Request((1 << 64) - 5, [60, 61, 62], 20)]
    plain = decode(Autoregressive({"target": target}, Autoregressive.Options()), asked, sampling, batch)
    local = decode(Speculative({"target": target, "draft": here}, Speculative.Options()), asked, sampling, batch)
    apart = decode(Speculative({"target": target, "draft": there}, Speculative.Options()), asked, sampling, batch)
    assert apart == local == plain
    assert there.last_forward_ns > 0


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLED], ids=["greedy", "sampled", "truncated"])
def test_a_draft_elsewhere_hears_who_takes_a_row(target, here, there, sampling):
    """Nine prompts through three rows: tokens, drafts and what was accepted are those of a draft beside the target."""
    made = []
    for draft in (here, there):
        asked = [Request(key, [60 + key, 61, 62][: 1 + key % 3], 4 + 3 * (key % 4)) for key in range(9)]
        strategy = Speculative({"target": target, "draft": draft}, Speculative.Options())
        outcomes = measure(strategy, asked, sampling, Ending(), Clock(), Drain(), rows=3)
        assert [outcome.error for outcome in outcomes] == [None] * 9
        made.append([(outcome.token_ids, [step[1:] for step in outcome.steps]) for outcome in outcomes])
    assert made[0] == made[1]
    plain = decode(Autoregressive({"target": target}, Autoregressive.Options()), asked, sampling)
    assert [ids for ids, _ in made[1]] == plain


def test_the_steps_are_those_of_a_draft_beside_the_target(target, here, there):
    steps: list[list[Step]] = []
    for draft in (here, there):
        strategy = Speculative({"target": target, "draft": draft}, Speculative.Options(draft_length=3))
        strategy.reset()
        request, made = Request(5, [60, 61, 62], 30), []
        for step in strategy.generate([request], GREEDY):
            made.append(step)
            request.done = sum(len(step.tokens) for step in made) >= 30
        steps.append(made)
    assert steps[0] == steps[1]
    assert sum(step.accepted for step in steps[1]) > 3


@dataclass(frozen=True)
class Memory:
    """Options of `Parrot`."""

    lag: int


class Parrot(Drafter):
    """Repeats what stood `lag` tokens ago; says what it knows of a row in its levels."""

    def __init__(self, options: Memory) -> None:
        self.lag = options.lag

    def propose(self, rows, limits):
        return [
            Draft(row.tokens.view()[-self.lag :].tolist()[:limit], levels=(Level(len(row.tokens), row.index),))
            for row, limit in zip(rows, limits, strict=True)
        ]


def parrot(models, sampling, options):
    assert set(models) == {"draft"}
    return Parrot(options)


def test_only_what_is_new_travels(there):
    """What a round costs must not grow with the context."""
    drafter = drafter_for({"draft": there}, ("draft",), parrot, GREEDY, Memory(2))
    assert isinstance(drafter, RemoteDrafter)
    rows = [Row(index, Request(index, list(range(1000)), 50)) for index in (3, 1)]
    there.reset()
    first = drafter.propose(rows, [5, 1])
    assert first == [Draft([998, 999], levels=(Level(1000, 3),)), Draft([998], levels=(Level(1000, 1),))]
    rows[1].tokens.extend([7, 8, 9])
    assert len(drafter._question(rows, [5, 5])) == 1 + 4 + 4 + 3
    rows[1].tokens.extend([5])  # the three above count as sent, and were not
    drafter.reset()
    there.reset()
    assert drafter.propose(rows[1:], [5]) == [Draft([9, 5], levels=(Level(1004, 1),))]


def test_models_that_are_not_together_cannot_draft_together(here, there):
    with pytest.raises(UsageError, match="one device"):
        drafter_for({"draft": here, "draft2": there}, ("draft", "draft2"), parrot, GREEDY, Memory(1))
    with pytest.raises(UsageError, match="rejection"):
        drafter_for({"draft": there}, ("draft",), parrot, Sampling(temperature=1.0, verify="rejection"), Memory(1))
    local = drafter_for({"draft": TableModel()}, ("draft",), parrot, GREEDY, Memory(1))
    assert isinstance(local, Parrot)


# --- whole runs ------------------------------------------------------------------------------------------------------


def plan(**more):
    given = dict(strategy=("speculative",), target="tiny", draft="tiny-draft", limit=2, max_new_tokens=12, trace=1)
    return Plan(**{**given, "place": APART, **more})


class Notes(Listener):
    def __init__(self):
        self.notes, self.warnings, self.stages, self.at = [], [], [], None

    def note(self, text):
        self.notes.append(text)

    def warn(self, text):
        self.warnings.append(text)

    def stage(self, text):
        self.stages.append(text)

    def sample(self, samples):
        if self.at is not None:
            self.at(samples)


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "batch": 2}], ids=["greedy", "sampled, in batches"])
def test_a_run_with_the_draft_elsewhere(tmp_path, changes):
    result = runs.run(plan(out=tmp_path / "run", require_lossless=True, **changes))
    assert result.failures == []
    arms = {arm["name"]: arm["roles"] for arm in result.manifest["arms"]}
    where = {role: (facts["device"], facts["threads"]) for role, facts in arms["speculative"].items()}
    assert where == {"target": (f"cpu:{FIRST}", 1), "draft": (f"cpu:{LAST}", 1)}
    peaks = result.manifest["peak_memory_bytes"]
    assert peaks["speculative"] > peaks["autoregressive"] + (100 << 20)  # torch is there twice
    samples = RunFolder(tmp_path / "run").samples()
    assert all(sample.ok for sample in samples)
    traced = [sample for sample in samples if sample.arm == "speculative" and sample.kind == "trace"]
    assert traced
    for sample in traced:
        times = [(start, end) for role in ("target", "draft") for start, end, *_ in sample.forwards[role]]
        assert len(sample.forwards["draft"]) > len(sample.forwards["target"])
        whole = max(other.e2e_ns for other in traced if other.group == sample.group)
        assert all(0 <= start < end <= whole for start, end in times)
        ordered = sorted(times)  # nothing overlaps: here the two take turns, on one clock
        assert all(end <= start for (_, end), (start, _) in zip(ordered, ordered[1:], strict=False))


def test_a_killed_worker_ends_the_run_and_keeps_what_was_measured(tmp_path, monkeypatch):
    listener, made = Notes(), []
    monkeypatch.setattr(runs, "load_remote", lambda *args, **how: made.append(load_remote(*args, **how)) or made[-1])

    def kill(samples):
        if samples[0].arm == "speculative":
            os.kill(made[0].worker._process.pid, signal.SIGKILL)

    listener.at = kill
    with pytest.raises(WorkerError, match=r"draft.*died.*SIGKILL.*--resume --out"):
        runs.run(plan(out=tmp_path / "run", limit=6), listener)
    folder = RunFolder(tmp_path / "run")
    measured = [sample for sample in folder.samples() if sample.kind == "measure"]
    assert sum(sample.ok for sample in measured) >= 1
    assert sum(not sample.ok for sample in measured) <= 1
    assert folder.manifest()["interrupted"]
    assert not made[0].worker.alive

    result = runs.run(plan(out=tmp_path / "run", limit=6, resume=True))
    assert result.failures == []


def test_the_command_line_with_the_draft_elsewhere(tmp_path):
    words = "run --target tiny --draft tiny-draft -s speculative --limit 1 --max-new-tokens 8 --trace 0 --json -q"
    done = subprocess.run(
        [sys.executable, "-m", "specbench", *words.split(), "--place", APART, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(tmp_path / "run")
    assert "resource_tracker" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_keeps_the_worker_while_it_is_needed(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(runs, "load_remote", lambda *args, **how: made.append(load_remote(*args, **how)) or made[-1])
    result = sweep(plan(limit=1, max_new_tokens=4, trace=0, warmup=0), {"draft-length": [2, 3]}, tmp_path / "sweep")
    assert result.failures == []
    assert [cell.state for cell in result.cells] == ["done", "done"]
    assert len(made) == 1
    assert not made[0].worker.alive


# --- what is refused or said before anything is loaded ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 1.0, "verify": "rejection"}, "--verify rejection"),
        ({"strategy": ("speculative", "hf-assisted")}, "hf-assisted: runs both models in one process"),
        ({"place": APART + f",draft2=cpu:{LAST}"}, "no strategy of this run uses a draft2 model"),
        ({"strategy": ("lookup",), "draft": None}, "no strategy of this run"),
    ],
)
def test_what_cannot_be_done_apart_is_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        check(plan(**changes))


def test_a_peer_that_needs_no_draft_runs_beside_one_that_is_apart():
    checked = check(plan(strategy=("speculative", "hf-assisted"), options={"hf-assisted": {"method": "lookup"}}))
    assert [checked.in_worker(arm, "draft") for arm in checked.arms] == [True, True, True]


def test_models_that_work_at_the_same_time_get_half_of_the_cores_each(monkeypatch):
    monkeypatch.setattr(Speculative, "apart", True)
    for module in (devices, plans):
        monkeypatch.setattr(module, "available_cores", lambda: (0, 1, 2, 3, 4))
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: None)
    monkeypatch.setattr(devices, "_siblings", str)
    listener = Notes()
    checked = runs.validate(plan(place="target=cpu"), listener).checked
    assert {role: str(checked.placement.of(role)) for role in ("target", "draft")} == {
        "target": "cpu:0-2",
        "draft": "cpu:3-4",
    }
    assert any("--place target=cpu:0-2,draft=cpu:3-4, so autoregressive uses 3 of 5" in note for note in listener.notes)
    with pytest.raises(PlacementError, match="cores of their own, as in --place target=cpu:0-2,draft=cpu:3-4"):
        check(plan(place="target=cpu:0-3"))
    with pytest.raises(PlacementError, match="cores of their own"):
        check(plan(place="target=cpu:1,draft=cpu:1"))
    for module in (devices, plans):
        monkeypatch.setattr(module, "available_cores", lambda: (0,))
    with pytest.raises(PlacementError, match="two cores"):
        check(plan(place="target=cpu"))


def test_a_draft_that_works_beside_a_gpus_target_is_in_a_worker_even_on_the_same_gpu(monkeypatch):
    monkeypatch.setattr(Speculative, "apart", True)
    monkeypatch.setattr(plans, "check_gpus", lambda placement: None)
    checked = check(plan(place="target=cuda:0,draft=cuda:0"))
    assert [(arm.name, checked.in_worker(arm, "draft")) for arm in checked.arms if arm.name == "speculative"] == [
        ("speculative", True)
    ]
    monkeypatch.setattr(Speculative, "apart", False)
    assert not checked.in_worker(checked.arms[-1], "draft")
