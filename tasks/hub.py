"""Data sets from the Hugging Face hub, or from a local copy of them.

`datasets` is imported when rows are asked for. The configuration is always named, since a cache that holds several
cannot be read offline otherwise, and the ids are those of parquet copies where the original needs a script, which
`datasets` 4 and later refuses. HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are left to `datasets`, which honours them.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from ..errors import TaskError
from .base import Prompt, Task, Tokenizer
from .hub_errors import explain
from .reading import field, json_lines, unique

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".gz": "json"}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class HubOptions:
    """`path` is a local file or folder to read in place of the hub; `split` and `revision` overrule the task's own."""

    path: Path | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Source:
    """Where a data set lies, and the columns that its task reads."""

    id: str
    config: str
    split: str
    columns: tuple[str, ...]


class HubTask(Task):
    """A task over rows of one split; a subclass says where they lie and turns a row into a prompt."""

    Options = HubOptions
    source: ClassVar[Source]
    _loaded: Sequence[Mapping[str, Any]] | None = None

    @abstractmethod
    def prompt(self, index: int, row: Mapping[str, Any], where: str) -> Prompt:
        """The prompt for row `index`; TaskError, beginning with `where`, if the row is not as it should be."""

    def selected(self) -> Source:
        """The source; a task whose subtasks are configurations overrides this."""
        return self.source

    def check(self) -> None:
        self.rows()

    def prompts(self, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
        return unique(islice(self.pairs(), limit))

    def pairs(self) -> Iterator[tuple[str, Prompt]]:
        """(where, prompt) for each row in turn."""
        rows = self.rows()
        for index in range(len(rows)):
            where = f"{self.options.path or self.selected().id} row {index}"
            yield where, self.prompt(index, rows[index], where)

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows, loaded once. Raises TaskError: what is missing, and what to do about it."""
        if self._loaded is None:
            self._loaded = load(self.selected(), self.options)
        return self._loaded


def load(source: Source, options: HubOptions) -> Sequence[Mapping[str, Any]]:
    """The rows of `source`, or of the local copy that `options` names, with the task's columns in them."""
    split = options.split or source.split
    if options.path is not None and options.path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = []
        for where, row in json_lines(options.path):
            for column in source.columns:
                field(row, column, where)
            rows.append(row)
        return rows
    found = _datasets_rows(source, options, split)
    origin = f"{options.path or source.id}, split {split}"
    for column in source.columns:
        if column not in found.column_names:
            there = ", ".join(found.column_names) or "none"
            raise TaskError(f'{origin}: no column "{column}"; the columns there are: {there}.')
    if not len(found):
        raise TaskError(f"{origin}: no rows.")
    return found


def _datasets_rows(source: Source, options: HubOptions, split: str) -> Any:
    files = options.path and local_files(options.path, source.config, split)
    try:
        import datasets
    except ImportError:
        raise TaskError(f"{options.path or source.id} needs the package datasets: pip install datasets") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if files is None:
            return datasets.load_dataset(source.id, source.config, split=split, revision=options.revision)
        if isinstance(files, Path):
            saved = datasets.load_from_disk(str(files))
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        names = [str(file) for file in files]
        return datasets.load_dataset(FORMATS[files[0].suffix], data_files=names, split="train")
    except Exception as error:  # noqa: BLE001 - datasets lets through what httpx, pyarrow and fsspec raise
        # `from None`: what the original says may hold a token, and --traceback would print it.
        raise TaskError(explain(error, source.id, source.config, split, options)) from None


def local_files(path: Path, config: str, split: str) -> Path | list[Path]:
    """What to read of a local copy: the folder itself if `save_to_disk` wrote it, else its data files.

    A folder named after the configuration comes first, then files with the split in their name, then a lone file.
    """
    if path.is_file():
        if path.suffix not in FORMATS:
            raise TaskError(f"{path}: cannot read this kind of file; use one of {', '.join(sorted(FORMATS))}.")
        return [path]
    if not path.is_dir():
        raise TaskError(f"no such file or folder: {path}")
    if (path / config).is_dir():
        path = path / config
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return path
    found = sorted(file for file in path.rglob("*") if file.suffix in FORMATS and not file.name.startswith("."))
    chosen = [file for file in found if split in re.split(r"[^a-z0-9]+", file.relative_to(path).as_posix().lower())]
    if not chosen and len(found) == 1 and not set(re.split(r"[^a-z0-9]+", found[0].name.lower())) & set(SPLITS):
        chosen = found
    if not chosen:
        there = ", ".join(file.relative_to(path).as_posix() for file in found[:8]) or "no data files"
        raise TaskError(f'{path}: no file for the split "{split}" (in its name); there: {there}.')
    if len({FORMATS[file.suffix] for file in chosen}) > 1:
        raise TaskError(f"{path}: files of several formats for the split {split}; give one of them with path.")
    return chosen
