"""A run on disk survives what happens to files: kills, torn lines, other people's folders, other versions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from synthetic import failed, manifest, run, sample

from specbench.errors import RunFolderError
from specbench.results import records
from specbench.results.records import RunFolder, Sample


def _folder(path: Path, samples: list[Sample]) -> RunFolder:
    folder = RunFolder(path)
    folder.write_manifest(manifest())
    writer = folder.writer()
    writer.append(samples)
    writer.close()
    return folder


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    samples = [*run(3), failed(), sample(kind="trace", forwards={"target": [[0, 5, 1, 10]]}, levels=[[[2, 1]]])]
    folder = _folder(tmp_path / "run", samples)
    assert folder.samples() == samples
    assert folder.manifest() == manifest()
    assert folder.exists()


def test_a_killed_run_keeps_every_finished_sample(tmp_path: Path) -> None:
    """C1: kill -9 in the middle; what was finished is on the disk and readable, and a resumed run goes on from it."""
    script = (
        "import sys; from pathlib import Path; from synthetic import manifest, sample\n"
        "from specbench.results.records import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.write_manifest(manifest()); writer = folder.writer()\n"
        "number = 0\n"
        "while True:\n"
        "    writer.append([sample(prompt=number, tokens=50)]); number += 1; print(number, flush=True)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout is not None
    with child.stdout:
        told = 0
        while told < 25:
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        told = max([told, *map(int, child.stdout.read().split())])
    assert child.wait() == -signal.SIGKILL

    folder = RunFolder(tmp_path / "run")
    assert folder.manifest()["baseline"] == "autoregressive"
    found = folder.samples()
    assert len(found) in (told, told + 1)  # the last one may have been written and not yet told
    assert [one.prompt_id for one in found] == [f"p{number}" for number in range(len(found))]
    writer = folder.writer()
    writer.append([sample(prompt="next")])
    writer.close()
    assert [one.prompt_id for one in folder.samples()][-1] == "pnext"


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_torn_last_line_is_dropped_and_cut_off_before_the_next(tmp_path: Path, cut: int) -> None:
    """C1: wherever in the line the kill hit."""
    folder = _folder(tmp_path, run(2))
    size = folder.samples_path.stat().st_size
    os.truncate(folder.samples_path, size - cut)
    assert folder.samples() == run(2)[:-1]
    writer = folder.writer()
    writer.append([sample(prompt=9)])
    writer.close()
    assert folder.samples() == [*run(2)[:-1], sample(prompt=9)]


def test_a_torn_multibyte_character_is_a_torn_line(tmp_path: Path) -> None:
    folder = _folder(tmp_path, [sample(), sample(prompt=1, category="日本")])
    raw = folder.samples_path.read_bytes()
    folder.samples_path.write_bytes(raw[: raw.index("本".encode()) + 1])
    assert folder.samples() == [sample()]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"arm": "a", "ta', "line 2: not a sample"),
        ('{"arm": "a"}', "line 2: not a sample: missing"),
        ("[1, 2]", "line 2: not a sample: a JSON list"),
        ("\x00\x00\x00", "line 2: not a sample"),
        ("{}", "line 2: not a sample: missing"),
    ],
)
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    """C10: it is never skipped, or a damaged run would pass for a shorter one."""
    folder = _folder(tmp_path, run(2))
    lines = folder.samples_path.read_text(encoding="utf-8").splitlines()
    lines[1] = line
    folder.samples_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(RunFolderError, match=reason) as caught:
        folder.samples()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"steps": [[1, 2, 3]]}, "a step has not five numbers"),
        ({"ttft_ns": float("nan")}, "NaN is not a number"),
    ],
)
def test_a_line_of_another_kind_says_what_is_wrong_with_it(tmp_path: Path, change: dict, reason: str) -> None:
    folder = _folder(tmp_path, [sample()])
    fields = json.loads(folder.samples_path.read_text(encoding="utf-8")) | change
    folder.samples_path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    with pytest.raises(RunFolderError, match=reason):
        folder.samples()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "not a run folder"),
        ('{"schema": 99}', "schema 99 is newer than this specbench knows"),
        ("{}", "no schema number"),
        ("[]", "no schema number"),
        ('{"schema": "1"}', "no schema number"),
        ("arms:\n  - a", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_foreign_newer_and_empty_folders_are_one_clear_line(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / records.MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=reason) as caught:
        RunFolder(tmp_path).manifest()
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_manifest_that_is_not_text_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / records.MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunFolderError, match="cannot be read"):
        RunFolder(tmp_path).manifest()


def test_samples_that_cannot_be_opened_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / records.SAMPLES).mkdir()
    with pytest.raises(RunFolderError, match="cannot be read"):
        RunFolder(tmp_path).samples()


def test_a_run_that_has_not_begun_has_no_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.exists()
    folder.write_manifest(manifest())
    assert folder.samples() == []
    folder.samples_path.touch()
    assert folder.samples() == []


def test_nan_and_infinity_are_never_written(tmp_path: Path) -> None:
    """M8: null, or an error here and now; never a token that strict readers refuse later."""
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            records.dumps({"value": value})


def test_bytes_that_are_no_text_do_not_stop_a_run(tmp_path: Path) -> None:
    """A path with bytes of an old code page, in a message: the record is written and read back."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    folder = _folder(tmp_path, [failed(error=f"OSError: {name}")])
    folder.write_manifest(manifest(notes=[name]))
    assert folder.samples()[0].error == f"OSError: {name}"
    assert folder.manifest()["notes"] == [name]


def test_an_interrupted_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    records.write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        records.write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"


def test_the_key_of_a_sample_is_unique_in_a_run() -> None:
    samples = [*run(3, 2, tasks=("toy", "other")), sample(kind="trace"), sample(kind="check")]
    assert len({one.key for one in samples}) == len(samples)


def test_pandas_loads_a_run_in_one_line(tmp_path: Path) -> None:
    """The line of docs/files.md."""
    _folder(tmp_path, [*run(3), failed()])
    frame = pandas.read_json(tmp_path / "samples.jsonl", lines=True)
    assert len(frame) == 7
    assert frame.groupby("arm")["e2e_ns"].count().to_dict() == {"autoregressive": 3, "speculative": 3}
