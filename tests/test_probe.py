"""The hardware probe: its arithmetic with clocks and files of our own, its parts on small sizes for real."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from specbench.hardware import (
    devices,
    probe,
    probe_cpu,
    probe_energy,
    probe_gpu,
    probe_rates,
    probe_workers,
)
from specbench.hardware.clock import Clock
from specbench.hardware.devices import Device, available_cores
from specbench.hardware.probe_timing import Budget, budget_for, fastest

MIB = 1 << 20


class Handmade(Clock):
    """Shows what it was put to."""

    def __init__(self) -> None:
        self.ns = 0

    def now(self) -> int:
        return self.ns

    def takes(self, *milliseconds: float):
        """An operation that takes so long, each time the next duration."""
        durations = iter(milliseconds * 1000)

        def operation() -> None:
            self.ns += int(next(durations) * 1e6)

        return operation


# --- timing ----------------------------------------------------------------------------------------------------------


def test_the_operation_with_the_best_median_is_the_rate():
    """One lucky round does not make an operation the fastest."""
    clock = Handmade()
    found = fastest({"steady": clock.takes(10), "lucky": clock.takes(20, 20, 1, 20)}, 1e9, 0.5, clock)
    assert found["operation"] == "steady"
    assert found["rate"] == pytest.approx(1e11)
    assert found["low"] <= found["rate"] <= found["high"] <= found["best"]


def test_it_ends_with_the_time_but_not_before_three_rounds():
    clock = Handmade()
    assert fastest({"slow": clock.takes(1000)}, 1, 0.1, clock)["rounds"] == 3
    assert 9 <= fastest({"quick": clock.takes(10)}, 1, 0.1, clock)["rounds"] <= 11


def test_a_clock_too_coarse_for_an_operation_is_no_division_by_zero():
    assert fastest({"nothing": lambda: None}, 1.0, 0.0, Handmade())["rate"] == pytest.approx(1e9)


def test_no_part_takes_more_than_half_of_what_is_left():
    clock = Handmade()
    budget = Budget(10.0, quick=True, clock=clock)
    assert budget.share(2.0, 99.0) == 2.0
    clock.ns += 9_000_000_000
    assert budget.share(2.0, 99.0) == 0.5
    clock.ns += 9_000_000_000
    assert (budget.left, budget.share(2.0, 99.0)) == (0.0, 0.0)
    assert budget_for(True).seconds < 60
    assert budget_for(False).seconds < 300


# --- what the kernel says --------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of four cores, two of which share a last level, in a container of one and a half cores and 1 GiB."""
    for core in range(4):
        for index, (level, kind, size, shared) in enumerate(
            [(1, "Data", "48K", f"{core}"), (1, "Instruction", "32K", f"{core}"), (2, "Unified", "2048K", f"{core}"),
             (3, "Unified", "32M", "0-1" if core < 2 else "2-3")]
        ):  # fmt: skip
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    for path, text in {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": f"{1 << 30}\n",
        "proc/cpuinfo": "processor : 0\nflags\t: sse avx2 avx512f avx512_bf16 amx_bf16\n",
        "proc/stat": "cpu  9 9 9 9\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu2 9 9 9 9 9 9 9 9\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_caches_are_counted_among_the_cores_that_may_be_used(root):
    found = {(cache["level"], cache["kind"]): cache for cache in probe_cpu.caches([0, 1, 2], root)}
    assert found[1, "data"] == {"level": 1, "kind": "data", "bytes": 48 << 10, "shared_by": 1, "count": 3}
    assert found[3, "unified"] == {"level": 3, "kind": "unified", "bytes": 32 << 20, "shared_by": 2, "count": 2}
    assert probe_cpu.last_level(list(found.values()))["level"] == 3
    assert probe_cpu.caches([0], root.parent / "nowhere") == []


def test_facts_come_from_the_container(root):
    facts = probe_cpu.facts([0, 1], root)
    assert facts["cgroup_cpu_limit"] == 1.5
    assert facts["memory_limit_bytes"] == 1 << 30
    assert facts["numa_nodes"] == 1
    assert facts["instructions"] == ["AVX2", "AVX-512", "AVX-512 bfloat16", "AMX bfloat16"]
    json.dumps(facts, allow_nan=False)


def test_the_buffer_is_cold_and_fits_the_container(root):
    found = probe_cpu.caches([0, 1, 2, 3], root)
    assert probe_rates.buffer_bytes(found, 64 << 30) == 512 * MIB  # 8 x 2 x 32 MiB
    assert probe_rates.buffer_bytes(found, 1 << 30) == 128 * MIB
    assert probe_rates.buffer_bytes([], None) == 512 * MIB


def test_who_else_keeps_the_cores_busy(root, monkeypatch):
    """Half of the time of core 0 and a quarter of core 1's, stolen time among it; core 2 is not ours."""

    def sleep(seconds):
        (root / "proc/stat").write_text(
            "cpu0 30 0 10 50 0 0 0 10 0 0\ncpu1 25 0 0 70 5 0 0 0 0 0\ncpu2 100 0 0 0 0 0 0\n"
        )

    monkeypatch.setattr(time, "sleep", sleep)
    assert probe_cpu.busy_cores([0, 1], root=root) == 0.75
    assert probe_cpu.busy_cores([0, 1], root=root.parent / "nowhere") is None


def test_warnings_say_what_is_wrong_and_nothing_else(root):
    facts = probe_cpu.facts([0, 1], root) | {"physical_cores": 2, "cgroup_cpu_limit": None, "governor": None}
    openmp = {"backend": "OpenMP", "libraries": ["libgomp"], "variables": {}}
    assert probe_cpu.warnings(facts, openmp, 2, 0.0) == []

    def one(facts: dict, openmp: dict, threads: int = 2, busy: float | None = 0.0) -> str:
        (text,) = probe_cpu.warnings(facts, openmp, threads, busy)
        return text

    assert "OMP_NUM_THREADS=8 is more than the 2 core(s)" in one(
        facts, {**openmp, "variables": {"OMP_NUM_THREADS": "8"}}
    )
    assert "hyper-threads" in one({**facts, "physical_cores": 1}, openmp)
    assert "allows the time of 1 core(s)" in one({**facts, "cgroup_cpu_limit": 1.0}, openmp)
    assert "1.5 of 2 cores" in one({**facts, "cgroup_cpu_limit": 1.5}, openmp, threads=1)
    assert "libgomp, libiomp5" in one(facts, {**openmp, "libraries": ["libgomp", "libiomp5"]})
    assert "native" in one(facts, {**openmp, "backend": "native thread pool"})
    assert "others kept 1.0 of 2" in one(facts, openmp, busy=1.0)
    assert "powersave" in one({**facts, "governor": "powersave"}, openmp)


def test_openmp_is_named():
    found = probe_cpu.openmp()
    assert found["threads"] == torch.get_num_threads()
    assert found["backend"]


# --- energy ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rapl(tmp_path: Path) -> Path:
    for name, uj in (("intel-rapl:0", 900_000), ("intel-rapl:0:0", 5), ("intel-rapl:1", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"package-{name[-1]}\n")
        (tmp_path / name / "energy_uj").write_text(f"{uj}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000000\n")
    return tmp_path


def test_joules_of_all_packages_and_of_a_counter_that_starts_again(rapl):
    meter = probe_energy.EnergyMeter("cpu", rapl)
    assert meter.joules() == 0
    (rapl / "intel-rapl:0" / "energy_uj").write_text("400000")  # past its end: 100,000 + 400,000
    (rapl / "intel-rapl:0:0" / "energy_uj").write_text("999999")  # a part of package 0
    (rapl / "intel-rapl:1" / "energy_uj").write_text("250100")
    assert meter.joules() == pytest.approx(0.75)
    assert probe_energy.sources(rapl)["rapl"] == ["package-0", "package-1"]


def test_energy_is_null_where_it_cannot_be_read(tmp_path):
    assert probe_energy.EnergyMeter("cpu", tmp_path).joules() is None
    found = probe_energy.sources(tmp_path)
    assert found["rapl"] is None
    assert "no counter" in found["why_not"]["rapl"]
    if not torch.cuda.is_available():
        assert probe_energy.EnergyMeter("cuda").joules() is None


# --- rates -----------------------------------------------------------------------------------------------------------


def test_reading_and_multiplying_for_real():
    budget = Budget(1.0, quick=True)
    buffer = torch.ones(MIB)
    read = probe_rates.read_bandwidth(buffer, 1, 0.01, budget)
    assert 0.05 < read["rate"] < 10_000
    assert read["bytes"] == 4 * MIB
    assert probe_rates.copy_bandwidth(buffer, 0.01, budget)["rate"] > 0.05
    product = probe_rates.matrix_rate("float32", 0.02, budget)
    assert product["rate"] > 0.05
    assert product["size"] >= 256


def test_all_operations_that_read_see_the_whole_buffer():
    """The one that left half of it out would be the fastest."""
    buffer = torch.arange(1000, dtype=torch.float32)
    reads = probe_rates._reads(buffer, 1)
    assert float(reads["torch.sum"]()) == 499500
    assert float(reads["torch.linalg.vector_norm"]()) == pytest.approx(float(buffer.double().norm()))
    assert [float(end) for end in reads["torch.aminmax"]()] == [0, 999]
    words = buffer.numpy().view("u8")
    everything = 0
    for word in words.tolist():
        everything |= word
    assert int(reads["numpy.bitwise_or.reduce"]()) == everything


def test_a_product_that_torch_does_not_have_is_null_with_the_reason(monkeypatch):
    def products(*given):
        raise RuntimeError("no such\nkernel here")

    monkeypatch.setattr(probe_rates, "_products", products)
    assert probe_rates.matrix_rate("int8", 0.01, Budget(1.0)) == {"rate": None, "reason": "no such kernel here"}


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with probe_rates.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_what_is_measured_of_a_gpu_runs_on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(probe_gpu, "_DTYPES", ("float32",))
    found = probe_gpu.measure("cpu", MIB, Budget(0.05, quick=True))
    assert found["read"]["rate"] > 0
    assert found["matrix"][0]["rate"] > 0
    assert found["launch_us"] > 0
    assert found["round_trip_us"] > 0
    assert found["host"]["pageable_to_device"]["rate"] > 0
    json.dumps(found, allow_nan=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_no_error():
    assert probe_gpu.gpus(Budget(1.0), lambda text: None) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_for_real():
    found = probe_gpu.gpus(Budget(20.0, quick=True), lambda text: None)
    assert len(found) == torch.cuda.device_count()
    assert found[0]["read"]["rate"] > 50
    assert found[0]["host"]["pinned_to_device"]["rate"] > 0.5


# --- side by side ----------------------------------------------------------------------------------------------------


def test_one_core_has_no_sides():
    found = probe_workers.side_by_side(available_cores()[:1], MIB, None, Budget(60.0))
    assert "two cores" in found["reason"]
    assert found["message"] is None


def test_without_time_nothing_is_started(monkeypatch):
    monkeypatch.setattr(probe_workers, "_measured", None)
    apart = Device("cpu", (0,)), Device("cpu", (1,))
    assert probe_workers.side_by_side((0, 1), MIB, None, Budget(1.0), apart)["reason"] == "no time was left"


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_two_workers_side_by_side(monkeypatch):
    monkeypatch.setattr(probe_workers, "PAIRS", (("read", "cache"),))
    monkeypatch.setattr(probe_workers, "ROUNDS", 1)
    before = os.sched_getaffinity(0)
    found = probe_workers.side_by_side(available_cores(), 8 * MIB, MIB, Budget(60.0, quick=True))
    assert found["reason"] is None
    assert not set(found["cores"][0]) & set(found["cores"][1])
    assert found["message"]["round_trip_us"] > 0
    (pair,) = found["pairs"]
    assert len(pair["slower"]) == 2
    assert all(factor > 0 for factor in pair["slower"])
    assert os.sched_getaffinity(0) == before


# --- the whole -------------------------------------------------------------------------------------------------------


def test_a_probe_of_this_machine_is_plain_data(monkeypatch):
    monkeypatch.setattr(probe_rates, "_SMALLEST", 4 * MIB)
    monkeypatch.setattr(probe_rates, "buffer_bytes", lambda caches, memory: 4 * MIB)
    said: list[str] = []
    threads = devices.default_threads(available_cores())
    found = probe.probe([threads], available_cores(), Budget(0.2, quick=True), said.append)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [row["threads"] for row in found["memory"]["rates"]] == sorted({1, threads})
    assert {row["dtype"] for row in found["matrix"]} == set(probe_rates.DTYPES)
    assert said
