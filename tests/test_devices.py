"""Devices, placement, threads."""

from __future__ import annotations

import pytest

from specbench.errors import PlacementError
from specbench.hardware import devices
from specbench.hardware.devices import Device, cgroup_cpu_limit, default_threads, parse_device, parse_placement
from specbench.hardware.environment import environment, peak_memory_bytes


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(devices, "available_cores", lambda: tuple(range(8)))


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
    assert placement.threads == 4
    assert str(parse_placement("cpu:1").of("draft")) == "cpu:1"  # a role that is not named follows the target


@pytest.mark.parametrize(
    ("text", "threads", "words"),
    [
        ("target=cpu:0,target=cpu:1", None, "placed twice"),
        ("judge=cpu:0", None, "not a role"),
        ("target=cpu:0,draft=cpu:1", None, "worker process"),
        ("target=cpu:0-1", 3, "from 1 to 2"),
        ("cpu", 0, "from 1 to 8"),
    ],
)
def test_placements_that_cannot_be(text, threads, words):
    with pytest.raises(PlacementError, match=words):
        parse_placement(text, threads)


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
