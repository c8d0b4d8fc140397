"""The benchmarks of two devices: what they make of recorded samples, and the map of where overlap pays."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toys import TableModel, requests

from specbench.hardware.clock import Clock, Drain
from specbench.hardware.overlap import Costs
from specbench.results.measure import Ending, measure
from specbench.results.records import Sample, line_of
from specbench.strategies.sampling import Sampling
from specbench.strategies.side_by_side import as_record

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not part of the wheel", allow_module_level=True)
sys.path.append(str(BENCHMARKS))

import overlap_arms  # noqa: E402
import overlap_map  # noqa: E402
import overlap_model  # noqa: E402
import two_devices  # noqa: E402
from overlap_traces import acceptance, observed, traces  # noqa: E402

MS = 1_000_000


def sample(steps, ids=None, arm="async", prompt="p", **more) -> Sample:
    """Steps as (ms since the one before, kept, drafted, accepted)."""
    now, rows = 0, []
    for ms, kept, drafted, accepted in steps:
        now += int(ms * MS)
        rows.append([now, kept, drafted, accepted, 0])
    count = sum(step[1] for step in rows)
    return Sample(
        arm=arm, task="t", prompt_id=prompt, prompt_hash=prompt, category="", turn=0, repeat=0, kind="measure", group=0,
        batch_rows=1, prompt_tokens=5, max_new_tokens=100, token_ids=list(ids or range(count)), finish="length",
        ttft_ns=rows[0][0], e2e_ns=now, drain_ns=0, steps=rows, **more,
    )  # fmt: skip


def curves(target_factor: float = 1.0, draft_factor: float = 1.0) -> Costs:
    return Costs(lambda n: 100 + 4 * (n - 1), lambda rows: 30 * (1 + 0.1 * (rows - 1)), target_factor, draft_factor)


# Traces


def test_steps_tell_where_the_draft_was_right():
    """A bonus token was not looked at; behind a rejection nothing is known of the draft."""
    seen = observed(sample([(10, 1, 0, 0), (10, 3, 2, 2), (10, 2, 3, 1), (10, 1, 0, 0)]))
    assert seen == {1: True, 2: True, 4: True, 5: False}
    assert acceptance({"a": [sample([(10, 1, 0, 0), (10, 2, 3, 1)])], "b": []}) == 0.5
    assert acceptance({"a": [sample([(10, 1, 0, 0)])]}) is None


def test_arms_complete_each_others_traces_as_far_as_their_texts_agree():
    own = sample([(10, 1, 0, 0), (10, 3, 2, 2), (10, 2, 2, 1)])  # knows of 1, 2, 4 and that 5 is wrong
    same = sample([(10, 1, 0, 0), (10, 4, 3, 3), (10, 2, 2, 1)], arm="b")  # knows of 3
    other = sample([(10, 1, 0, 0), (10, 4, 3, 0)], ids=[0, 9, 9, 9, 9], arm="c")  # another text from token 1 on
    (trace,) = traces([own], {"a": [own], "b": [same], "c": [other]})
    assert trace[1:].tolist() == [0, 0, 0, 0, 2]
    (prepared,) = traces([own], {"a": [own], "b": [same]}, prepared=1.0)
    assert prepared[5] == 1


def test_what_nobody_has_looked_at_is_drawn_with_the_acceptance_of_the_rest():
    own = [sample([(10, 1, 0, 0), *[(10, 2, 1, 1)] * 99], prompt=str(n)) for n in range(4)]
    trace = np.concatenate(traces(own, {"a": own}))
    assert (trace == 0).all()  # all of those seen were right
    half = [sample([(10, 1, 0, 0), *[(10, 2, 1, 1), (10, 1, 1, 0)] * 60], prompt=str(n)) for n in range(4)]
    unseen = [value for trace in traces(half, {"a": half}) for value in trace[2::3]]
    assert 0.3 < np.mean(np.array(unseen) == 0) < 0.7


# Step times


def test_curves_are_scaled_to_the_steps_of_the_plain_and_the_speculative_arms():
    """1.2 and 1.5 times slower than the curves; the draft's prefill and a cut last step are left out."""
    plain = sample([(500, 1, 0, 0), *[(120, 1, 0, 0)] * 9], arm="autoregressive")
    step = 1.2 * 108 + 2 * 1.5 * 30
    turns = sample([(500, 1, 0, 0), (step + 400, 3, 2, 2), *[(step, 3, 2, 2)] * 5, (7, 1, 2, 1)], arm="speculative 2")
    found = overlap_model.alone(curves(), {"autoregressive": [plain], "speculative 2": [turns]})
    assert found.target_ms(5) == pytest.approx(1.2 * 116)
    assert found.draft_ms(2) == pytest.approx(1.5 * 33)
    assert overlap_model.alone(curves(), {"autoregressive": [plain]}).draft_ms(1) == pytest.approx(1.2 * 30)


def test_an_arm_is_simulated_with_what_its_own_forwards_took():
    steps = [(500, 1, 0, 0), *[(150, 3, 2, 2)] * 4]
    facts = {"target_busy_ns": 1020 * MS, "target_prefill_ns": 500 * MS, "draft_busy_ns": 460 * MS,
             "draft_prefill_ns": 100 * MS, "draft_forwards": 10, "draft_token_rows": 10}  # fmt: skip
    own = overlap_model.own_times(curves(), curves(), [sample(steps, facts=facts)])
    assert own.costs.target_ms(3) == pytest.approx(130)
    assert own.costs.draft_ms(1) == pytest.approx(40)
    assert own.costs.target_factor == own.costs.draft_factor == own.rows == 1
    assert own.first_at == [-400]
    older = {name: value for name, value in facts.items() if "prefill" not in name and name != "draft_token_rows"}
    own = overlap_model.own_times(curves(), curves(1.2, 1.1), [sample(steps, facts=older)])
    assert own.costs.draft_ms(1) == pytest.approx(1.1 * 30)
    assert own.first_at == [pytest.approx(0.3 * 500 - 500)]


# Predictions and ceilings


class Timed(TableModel):
    """Sleeps as long as a forward is to take: `ms`, and more for every further token of a row, or row."""

    def __init__(self, ms: float, per_token: float = 0.0, per_row: float = 0.0, twist: float = 0.0) -> None:
        super().__init__(vocab=12, seed=1, twist=twist)
        self.ms, self.per_token, self.per_row = ms, per_token, per_row

    def advance(self, contexts, last=1, rows=None):
        began = time.perf_counter_ns()
        logits = super().advance(contexts, last, rows)
        new = self.forwards[-1]
        ms = self.ms * (1 + self.per_token * (max(new) - 1) + self.per_row * (len(new) - 1))
        time.sleep(max(0.0, ms / 1e3 - (time.perf_counter_ns() - began) / 1e9))
        self.last_forward_ns = time.perf_counter_ns() - began
        return logits


ARMS = ("autoregressive", "speculative 2", "speculative 4", "async", "duo", "async as published", "duo as published")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run over models that sleep, so that both sides really work at once on any machine: samples, costs, the file."""
    models = {"target": Timed(16.0, per_token=0.04), "draft": Timed(5.0, per_row=0.1, twist=0.4)}
    costs = Costs(lambda n: 16 * (1 + 0.04 * (n - 1)), lambda rows: 5 * (1 + 0.1 * (rows - 1)))
    strategies = {name: overlap_arms.strategy_of(name, models) for name in ARMS}
    overlap_arms.share_costs(list(strategies.values()), costs)
    samples: dict[str, list[Sample]] = {name: [] for name in ARMS}
    for number, request in enumerate(requests(3, 12, limit=40, seed=2)):
        for name, strategy in strategies.items():
            request.done = False
            (found,) = measure(strategy, [request], Sampling(), Ending(), Clock(), Drain())
            assert found.error is None, found.error
            one = sample([(1, 1, 0, 0)], arm=name, prompt=str(number), facts=found.facts)
            one.max_new_tokens, one.steps, one.token_ids = 40, found.steps, found.token_ids
            one.ttft_ns, one.e2e_ns = found.ttft_ns, found.e2e_ns
            samples[name].append(one)
    path = tmp_path_factory.mktemp("run") / "run.json"
    arms = [SimpleNamespace(name=name, cores=(0,), samples={"t": ours}) for name, ours in samples.items()]
    document = {
        "benchmark": "two-devices", "target": "slow", "draft": "quick", "dtype": "float64",
        "costs": as_record(costs), "tasks": {"t": two_devices.report_task("t", arms)},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    lines = [line_of(one) for ours in samples.values() for one in ours]
    path.with_suffix(".samples.jsonl").write_text("".join(lines + lines[:3]))  # some were measured again
    return samples, costs, path


@pytest.fixture(scope="module")
def model(recorded):
    samples, costs, _ = recorded
    strategies = {name: overlap_arms.strategy_of(name, {}) for name in samples}
    overlap_arms.share_costs(list(strategies.values()), costs)
    return overlap_model.model_of(samples, strategies, costs, "speculative 4")


def test_simulated_speeds_are_those_of_a_real_run(model):
    """Within a fifth here, where steps are so short that a busy machine shows in them."""
    for arm in ("speculative 2", "speculative 4", "async", "duo", "async as published"):
        assert model["simulated"][arm]["ratio"] == pytest.approx(1, abs=0.2), arm
    assert model["target_ms"] > 15.9
    assert model["cost_ratio"] == pytest.approx(2.5 / 8, rel=0.4)


def test_ceilings_are_above_what_was_reached(model):
    for kind in ("speculative", "async", "duo"):
        assert 0.5 < model[kind]["of_ceiling"] < 1.1
        assert model[kind]["goal"] == (model[kind]["of_ceiling"] >= 0.9)
        assert model[kind]["of_ceiling_with_contention"] >= model[kind]["of_ceiling"]
        assert model[kind]["ceiling_tokens_per_s"] <= 1.05 * model["perfect_anticipation_tokens_per_s"]
    assert model["async"]["ceiling_tokens_per_s"] > model["speculative"]["ceiling_tokens_per_s"]


def test_a_recorded_run_is_modelled_again_from_its_files(recorded, model, capsys):
    _, _, path = recorded
    overlap_model.main([str(path), "--json"])
    document = json.loads(capsys.readouterr().out)
    again = document["tasks"]["t"]["model"]
    assert again["alpha"] == model["alpha"]
    for arm, entry in model["simulated"].items():
        assert again["simulated"][arm]["ratio"] == pytest.approx(entry["ratio"], rel=0.02)  # the curve has few points
    assert document["simulator"]["cells"] == len(ARMS) - 1
    overlap_model.main([str(path)])
    said = capsys.readouterr().out
    assert "ceiling of duo" in said
    assert "simulated within 10 %" in said


def test_the_check_counts_the_cells_within_ten_percent():
    tasks = {
        "one": {"model": {"simulated": {"async": {"ratio": 1.09}, "duo": {"ratio": 0.7}}}},
        "two": {"model": {"simulated": {"async": {"ratio": 0.95}, "duo": {"ratio": 1.0}}}},
        "three": {"model": {}},
    }
    found = overlap_model.check(tasks)
    assert (found["cells"], found["within_10_percent"]) == (4, 0.75)
    assert found["worst"] == {"cell": "one, duo", "ratio": 0.7}
    assert overlap_model.check({})["within_10_percent"] is None
    assert overlap_model.line_of_check(overlap_model.check({})) == "nothing to simulate"


def test_what_is_not_such_a_run_is_refused_in_one_line(tmp_path):
    path = tmp_path / "run.json"
    for text in ("no json", "[]", '{"benchmark": "drafts"}', '{"benchmark": "two-devices", "costs": null}'):
        path.write_text(text)
        with pytest.raises(SystemExit, match=r"run\.json"):
            overlap_model.main([str(path)])
    path.write_text(json.dumps({"benchmark": "two-devices", "costs": as_record(curves()), "tasks": {}}))
    with pytest.raises(SystemExit, match=r"run\.samples\.jsonl: cannot be read"):
        overlap_model.main([str(path)])


# two_devices.py


def test_arms_are_what_their_names_say():
    pair = SimpleNamespace(target=None, draft=None, remote=None, cores=(0, 1))
    arms = two_devices.make_arms(pair, SimpleNamespace(lengths="2,4", switches=True, arms=""))
    names = [arm.name for arm in arms]
    assert names[:5] == ["autoregressive", "speculative 2", "speculative 4", "async", "duo"]
    assert len(names) == len(set(names)) == 10 + len(overlap_arms.SWITCHES)
    by_name = {arm.name: arm for arm in arms}
    assert by_name["speculative 4 on both cores"].strategy.options.draft_length == 4
    assert by_name["speculative 4 on both cores"].cores == (0, 1)
    assert by_name["duo as published"].strategy.options.faithful
    assert by_name["duo, first token after the round"].strategy.options.first_token == "after_round"
    assert by_name["async without waiting"].strategy.options.min_ready == 0
    few = two_devices.make_arms(pair, SimpleNamespace(lengths="2,4", switches=False, arms="duo"))
    assert [arm.name for arm in few] == ["autoregressive", "duo", "duo as published"]
    exact = two_devices.make_arms(pair, SimpleNamespace(lengths="2,4", switches=True, arms="=duo,=speculative 4"))
    assert [arm.name for arm in exact] == ["autoregressive", "speculative 4", "duo"]


def test_acceptance_is_told_for_every_position_of_a_block():
    """Of three blocks all first tokens but one were taken, and of the two second ones that were reached, one."""
    found = two_devices.acceptance([sample([(1, 1, 0, 0), (1, 3, 2, 2), (1, 2, 2, 1), (1, 1, 2, 0)])])
    assert found["alpha"] == pytest.approx(3 / 5)
    assert found["alpha_by_position"] == pytest.approx([2 / 3, 1 / 2])
    assert "alpha" not in two_devices.acceptance([sample([(1, 1, 0, 0)])])


# The map


def test_overlap_pays_where_the_draft_is_dear_and_right():
    found = overlap_map.draw_map(curves(1.05, 1.05), overlap_map.Prepared(0.6), cells=4, tokens=1500)
    asynchronous, duo = found.gains["async"], found.gains["duo"]
    assert asynchronous.shape == duo.shape == (4, 4)
    assert (duo >= asynchronous).all()
    assert asynchronous[-1, 2] > 1.2  # acceptance 0.99, cost ratio 0.27
    assert asynchronous[0, 0] < 1  # acceptance 0.3, cost ratio 0.02: nothing to hide, and contention
    assert asynchronous.max() < 2


def test_measured_points_come_from_the_files(recorded, capsys):
    _, _, path = recorded
    document = overlap_model.remodel(path)
    (point,) = overlap_map.points_of(document)
    assert point.task == "t"
    assert point.gains["async"] == document["tasks"]["t"]["arms"]["async"]["over_speculative"][0]
    assert overlap_map.points_of({"tasks": {"t": {"arms": {}, "model": {}}}}) == []
    how = overlap_map.measured_hits(document)
    assert 0 <= how.hit <= 1 <= how.rows
    assert overlap_map.measured_hits({"tasks": {}}) == overlap_map.Prepared()
    path.write_text(json.dumps(document))
    overlap_map.main([str(path), "--cells", "3", "--tokens", "200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"][0]["cost_ratio"] == point.cost_ratio
    assert (found["hit"], found["ready"], found["rows"]) == (how.hit, how.ready, how.rows)
    assert np.shape(found["gains"]["duo"]) == (3, 3)


def test_a_map_of_curves_given_by_hand_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    given = ["--curve", "1:1,4:1.12,8:1.3,13:1.6", "--factors", "1.1,1.05", "--cells", "5", "--tokens", "300"]
    overlap_map.main([*given, "--hit", "0.4", "--plot", str(tmp_path / "map.png")])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    assert (tmp_path / "map.svg").exists()
    assert "duo: gain over speculative in turns" in capsys.readouterr().out


def test_a_map_cannot_be_made_of_nothing(capsys):
    for given, said in [
        ([], "give either files"),
        (["run.json", "--curve", "1:1"], "give either files"),
        (["--curve", "1:1,2"], "write points as"),
        (["--curve", "2:1.1"], "begins at 1"),
        (["--curve", "1:1", "--cells", "1"], "at least 2 cells"),
        (["--curve", "1:1", "--plot", "map.jpg"], "has to end in .png"),
    ]:
        with pytest.raises(SystemExit):
            overlap_map.parse(given)
        assert said in capsys.readouterr().err
    for factors, said in (("1.1", "two numbers"), ("0.9,1", "at least 1")):
        with pytest.raises(SystemExit, match=said):
            overlap_map.main(["--curve", "1:1", "--factors", factors])
