"""A run on disk: `manifest.json`, then one line of `samples.jsonl` per prompt turn, repeat and arm.

Written so that `kill -9` at any moment loses at most the sample in flight: the manifest comes first and is replaced
atomically, every line is flushed to the disk before the next sample starts, and a torn last line is dropped when the
folder is read (a torn line anywhere else is an error). Raw integers only: nanoseconds, counts, token ids.

Schema 1, one sample (`docs/files.md` describes every field):

    arm, task, prompt_id, prompt_hash, category, turn, repeat   which measurement
    kind        "measure"; "trace" (split of time, never in a table's speed); "check" (first prompt once more)
    group       number of the `generate` call; what ran in it shares it
    batch_rows  rows that ran together in that call; with more requests than rows, they took each other's places
    prompt_tokens, max_new_tokens
    token_ids   what was emitted, trimmed; empty on error
    finish      "eos" | "stop" | "length"; null on error
    admitted_ns from the start of the call until there was a row for this request; absent where it began with the call
    ttft_ns, e2e_ns   from then to the first / last token on the host
    drain_ns    how long the devices still worked after the last token of the call; null where the call broke off
    steps       [[ns since it was admitted, tokens kept, drafted, accepted, wasted], ...]; the first is the prefill
    call_ns, call_tokens   of the whole call, to its last token in any row, and all its tokens; absent for one request
    levels      per step [[drafted, accepted, forwards, ns], ...] of a cascade's inner levels; or absent
    forwards    trace only: {role: [[start ns, end ns, rows, new tokens], ...]}, from the start of the call
    rejected    trace only: per step, the ids of the draft tokens that the target looked at and did not take
    facts       what the strategy's controller decided and its workers did, by name; absent where there is nothing
    error       null, or one line; then no times and no ids
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

from ..errors import RunFolderError

BASELINE = "autoregressive"  # the arm that all others of a run are compared with
SCHEMA = 1
MANIFEST = "manifest.json"
SAMPLES = "samples.jsonl"

# Bytes that were no text (in a path, an error message) reach us as lone surrogates, which UTF-8 cannot hold; written
# as \udc80 they are valid JSON.
_SURROGATES = "backslashreplace"


@dataclass
class Sample:
    arm: str
    task: str
    prompt_id: str
    prompt_hash: str
    category: str
    turn: int
    repeat: int
    kind: str
    group: int
    batch_rows: int
    prompt_tokens: int
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    drain_ns: int | None = None
    steps: list[list[int]] = field(default_factory=list)
    levels: list[list[list[int]]] | None = None
    forwards: dict[str, list[list[int]]] | None = None
    rejected: list[list[int]] | None = None
    facts: dict[str, Any] | None = None
    admitted_ns: int | None = None
    call_ns: int | None = None
    call_tokens: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ended(self) -> bool:
        """Whether it ran to its end or failed: a sample that did neither is never written."""
        return self.finish is not None or self.error is not None

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        """What `--resume` looks up: the same key is never measured twice."""
        return (self.arm, self.task, self.prompt_id, self.turn, self.repeat, self.kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON without NaN or Infinity, which no strict reader takes."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain, indent=indent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file in one step; a crash leaves the old or the new one, never half of either."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", errors=_SURROGATES, newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def without_collector() -> Iterator[None]:
    """While many records are made or read, the cyclic garbage collector would look through millions of lists again and
    again, and find nothing: reading 100,000 records took three times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RunFolder:
    """A folder that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST

    @property
    def samples_path(self) -> Path:
        return self.path / SAMPLES

    def exists(self) -> bool:
        return self.manifest_path.exists() or self.samples_path.exists()

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        with _writing(self.manifest_path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.manifest_path, dumps({"schema": SCHEMA, **manifest}, indent=2) + "\n")

    def manifest(self) -> dict[str, Any]:
        """Raises RunFolderError with one clear line for anything that is not a run of a known schema."""
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunFolderError(f"{self.path}: not a run folder (no {MANIFEST})") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{self.manifest_path}: cannot be read: {error}") from None
        except json.JSONDecodeError as error:
            raise RunFolderError(
                f"{self.manifest_path}: not valid JSON (line {error.lineno}); written by something else?"
            ) from None
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if not isinstance(schema, int):
            raise RunFolderError(f"{self.manifest_path}: not a specbench manifest (no schema number)")
        if schema > SCHEMA:
            raise RunFolderError(
                f"{self.manifest_path}: schema {schema} is newer than this specbench knows ({SCHEMA}); update specbench"
            )
        return manifest

    def samples(self) -> list[Sample]:
        """Every finished sample, in the order they were made. A torn last line is dropped.

        Raises RunFolderError naming file and line for a broken line that is not the last, or an unknown field.
        """
        if not self.samples_path.exists():
            return []
        with without_collector():
            return list(self._read())

    def _read(self) -> Iterator[Sample]:
        for number, line in self.lines():
            yield self.sample(number, line)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The whole lines of the samples with their numbers; blank ones and a torn last one are left out.

        Raises RunFolderError where the file cannot be read.
        """
        try:
            with self.samples_path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):  # torn by a kill: only the last line can lack its end
                        return
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise RunFolderError(f"{self.samples_path}: cannot be read: {error}") from None

    def sample(self, number: int, line: bytes) -> Sample:
        """One line as a sample. Raises RunFolderError naming file and line for anything else."""
        try:
            return _sample(line)
        except (ValueError, TypeError) as error:
            reason = str(error).replace("Sample.__init__() ", "")
            raise RunFolderError(f"{self.samples_path}, line {number}: not a sample: {reason}") from None

    def rewrite(self, samples: Iterable[Sample]) -> None:
        """Replaces all samples in one step."""
        write_atomically(self.samples_path, "".join(line_of(sample) for sample in samples))

    def clear(self, exports: Iterable[str]) -> None:
        """Deletes what a run writes, and nothing else."""
        for name in (SAMPLES, MANIFEST, *exports):
            (self.path / name).unlink(missing_ok=True)

    def writer(self) -> SampleWriter:
        return SampleWriter(self.samples_path)


def _sample(line: bytes) -> Sample:
    """Raises ValueError or TypeError for anything else."""
    fields = json.loads(line, parse_constant=_refuse)
    if not isinstance(fields, dict):
        raise TypeError(f"a JSON {type(fields).__name__}, where an object is expected")
    sample = Sample(**fields)
    if not set(map(len, sample.steps)) <= {5}:
        raise ValueError("a step has not five numbers")
    return sample


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class SampleWriter:
    """Appends samples; each is on the disk when `append` returns. Cuts a torn last line off first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors=_SURROGATES, newline="\n")
            self._lock()
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def append(self, samples: Iterable[Sample]) -> None:
        """Raises RunFolderError where the disk takes no more."""
        with _writing(self._path):
            self._file.write("".join(line_of(sample) for sample in samples))
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        """One run at a time writes here, where the system has locks; they end with the process, however it ends."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunFolderError(f"{self._path.parent}: another run is writing there; name another --out") from None


def line_of(sample: Sample) -> str:
    """A sample as one line of JSON. Fields that are null and may be absent are left out."""
    fields = {key: value for key, value in asdict(sample).items() if value is not None or key in _NULLABLE}
    return dumps(fields) + "\n"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror or error}") from error


_NULLABLE = ("finish", "ttft_ns", "e2e_ns", "drain_ns", "error")
