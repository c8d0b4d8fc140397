"""Devices, placement, threads."""

from __future__ import annotations

import pytest

from specbench.errors import PlacementError
from specbench.hardware import devices
from specbench.hardware.devices import (
    Device,
    cgroup_cpu_limit,
    default_threads,
    parse_device,
    parse_placement,
    share_a_core,
    split,
)
from specbench.hardware.environment import environment, peak_memory_bytes


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(devices, "available_cores", lambda: tuple(range(8)))
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: None)
    monkeypatch.setattr(devices, "_siblings", str)


@pytest.mark.parametrize(
    ("text", "device", "spelled"),
    [
        ("cpu", Device("cpu"), "cpu"),
        ("cpu:3", Device("cpu", (3,)), "cpu:3"),
        ("CPU:0-2,5", Device("cpu", (0, 1, 2, 5)), "cpu:0-2,5"),
        ("cpu:4,4,3", Device("cpu", (3, 4)), "cpu:3-4"),
        ("cuda", Device("cuda"), "cuda:0"),
        ("cuda:1", Device("cuda", index=1), "cuda:1"),
    ],
)
def test_device_words(text, device, spelled):
    assert parse_device(text) == device
    assert str(device) == spelled


@pytest.mark.parametrize("text", ["gpu", "cpu:", "cpu:a", "cpu:3-1", "cpu:8", "cpu:0-9", "cuda:0-1", "", "cpu:,1"])
def test_nonsense_devices_are_refused_in_one_line(text):
    with pytest.raises(PlacementError) as caught:
        parse_device(text)
    assert "\n" not in str(caught.value)


def test_placement_of_roles():
    placement = parse_placement("target=cuda:0,draft=cpu:0-2,5")
    assert str(placement.of("target")) == "cuda:0"
    assert str(placement.of("draft")) == "cpu:0-2,5"
    assert (placement.threads_of("target"), placement.threads_of("draft")) == (4, 4)
    assert placement.main_cores == (3, 4, 6, 7)
    assert str(parse_placement("cpu:1").of("draft")) == "cpu:1"  # a role that is not named follows the target
    three = parse_placement("target=cpu:0-3,draft=cpu:4-5,draft3=cpu:6")
    assert [str(three.of(f"draft{number}")) for number in ("", 2, 3, 4)] == ["cpu:4-5", "cpu:4-5", "cpu:6", "cpu:4-5"]
    assert [three.threads_of(role) for role in ("target", "draft", "draft2", "draft3")] == [4, 2, 2, 1]
    assert three.main_cores == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "target", "draft"),
    [
        ("target=cuda:0,draft=cuda:1", "cuda:0", "cuda:1"),
        ("target=cuda:0,draft=cuda:0", "cuda:0", "cuda:0"),
        ("target=cuda:0,draft=cpu", "cuda:0", "cpu:1-7"),  # one core is left to launch kernels from
        ("draft=cpu:4,target=cpu:0-3", "cpu:0-3", "cpu:4"),
        ("draft=cuda:0", "cpu", "cuda:0"),
    ],
)
def test_two_devices(text, target, draft):
    placement = parse_placement(text)
    assert (str(placement.of("target")), str(placement.of("draft"))) == (target, draft)
    assert placement.main_cores


def test_the_threads_flag_is_the_targets_or_where_that_is_on_a_gpu_the_drafts():
    on_cpu = parse_placement("target=cpu:0-3,draft=cpu:4-5", threads=3)
    assert (on_cpu.threads_of("target"), on_cpu.threads_of("draft")) == (3, 2)
    on_gpu = parse_placement("target=cuda:0,draft=cpu:4-5", threads=1)
    assert (on_gpu.threads_of("target"), on_gpu.threads_of("draft")) == (6, 1)
    assert parse_placement("cuda:0", threads=2).threads == 2


def test_cores_that_work_at_once_must_fit_the_container(monkeypatch):
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: 3.5)
    with pytest.raises(PlacementError, match=r"cpu:0-1 and cpu:2-3: 2 \+ 2 threads at once.* 3.5 cores"):
        parse_placement("target=cpu:0-1,draft=cpu:2-3")
    assert parse_placement("target=cpu:0-1,draft=cpu:2").threads == 2
    assert [str(device) for device in split(range(8))] == ["cpu:0-1", "cpu:2"]
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: 1.5)
    with pytest.raises(PlacementError, match="two cores; there is 1 here .*1.5 cores of time"):
        split(range(8))


def test_splitting_keeps_siblings_together(monkeypatch):
    assert [str(device) for device in split((0, 1))] == ["cpu:0", "cpu:1"]
    assert [str(device) for device in split(range(5))] == ["cpu:0-2", "cpu:3-4"]
    monkeypatch.setattr(devices, "_siblings", lambda core: str(core % 4))  # 0 and 4, 1 and 5, ...
    assert [str(device) for device in split(range(8))] == ["cpu:0-1,4-5", "cpu:2-3,6-7"]
    assert [str(device) for device in split((0, 4))] == ["cpu:0", "cpu:4"]  # better than nothing
    assert share_a_core((0, 1), (2, 4))
    assert not share_a_core((0, 4), (1, 2))
    with pytest.raises(PlacementError, match="there is 1 here"):
        split((0,))


@pytest.mark.parametrize(
    ("text", "threads", "words"),
    [
        ("target=cpu:0,target=cpu:1", None, "placed twice"),
        ("judge=cpu:0", None, "not a role"),
        ("target=cpu:0,draft2=cpu:1,draft1=cpu:2", None, "not a role"),
        ("target=cpu:0-3,draft=cpu:2-5", None, "target=cpu:0-3 and draft=cpu:2-5 share core 2-3"),
        ("target=cpu:0,draft=cpu", None, "share core 0"),
        ("target=cpu:0-1", 3, "from 1 to 2"),
        ("target=cpu:0-1,draft=cpu:2-5", 3, "from 1 to 2"),
        ("target=cuda:0,draft=cpu:0-7", None, r"every core \(8\) is placed.*draft=cpu:1-7"),
        ("target=cuda:0,draft=cpu:0-3,draft2=cpu:4-7", None, "none is left to launch"),
        ("cuda:0", 9, "from 1 to 8"),
        ("cpu", 0, "from 1 to 8"),
    ],
)
def test_placements_that_cannot_be(text, threads, words):
    with pytest.raises(PlacementError, match=words):
        parse_placement(text, threads)


def test_parts_of_a_placement_are_told_without_looking_for_their_devices():
    """Those of a machine of a cluster, which is not here."""
    assert devices.named("cuda:7") == [("target", "cuda:7")]
    assert devices.named(" target = cpu:900,902 , draft2=cuda:1") == [("target", "cpu:900,902"), ("draft2", "cuda:1")]
    assert devices.named("") == []


def test_cgroup_limits_of_both_versions(tmp_path):
    """P30: a container's share of time counts, not the machine's cores."""
    assert cgroup_cpu_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_cpu_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_cpu_limit(tmp_path) == 1.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_cpu_limit(tmp_path) == 2


def test_threads_respect_siblings_and_the_cgroup(monkeypatch):
    monkeypatch.setattr(devices, "physical_cores", lambda cores: len(cores) // 2)
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: None)
    assert default_threads(range(8)) == 4
    monkeypatch.setattr(devices, "cgroup_cpu_limit", lambda: 1.5)
    assert default_threads(range(8)) == 1


def test_the_environment_is_plain_data():
    import json

    facts = json.loads(json.dumps(environment(), allow_nan=False))
    assert facts["cores"]
    assert facts["packages"]["torch"]
    assert peak_memory_bytes() is None or peak_memory_bytes() > 10_000_000
