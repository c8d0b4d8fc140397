"""Which strategies there are. Built-in ones stand in this table; other people's come through entry points.

A plug-in package declares, in the group `specbench.strategies`, `my-name = my_package.my_module:MyStrategy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from ..errors import UsageError, unknown
from .base import Strategy

GROUP = "specbench.strategies"


@dataclass(frozen=True)
class Entry:
    """What can be said about a strategy without importing torch."""

    name: str
    target: str
    summary: str
    roles: tuple[str, ...] = ("target",)

    def load(self) -> type[Strategy]:
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module, __package__), attribute)


BUILT_IN = {
    entry.name: entry
    for entry in (
        Entry(
            "autoregressive", ".autoregressive:Autoregressive", "plain decoding, one token per forward; the baseline"
        ),
        Entry(
            "speculative",
            ".speculative:Speculative",
            "a draft model proposes a few tokens, the target verifies them in one forward",
            ("target", "draft"),
        ),
        Entry(
            "lookup",
            ".lookup:Lookup",
            "drafts by continuing an earlier occurrence of the latest tokens; no draft model",
        ),
        Entry(
            "async",
            ".asynchronous:Asynchronous",
            "draft and target run at the same time on two devices; the target verifies whatever is ready",
            ("target", "draft"),
        ),
        Entry(
            "duo",
            ".duo:Duo",
            "rounds on two devices: the draft prepares the next block for the likely outcomes of the verification",
            ("target", "draft"),
        ),
        Entry(
            "cascade",
            ".cascade:Cascade",
            "drafters that draft for each other, down to an n-gram level; the target verifies",
            ("target", "draft"),
        ),
        Entry(
            "auto",
            ".auto:Auto",
            "chooses among plain decoding, lookup, speculative and cascade by measured costs and running acceptance",
        ),
        Entry(
            "sparse-kv",
            ".sparse_kv:SparseKv",
            "the target drafts for itself with a small KV cache and verifies with the whole one; for long contexts",
        ),
        Entry(
            "hf-assisted",
            ".hf_assisted:HfAssisted",
            "peer row: transformers' own prompt lookup or assisted generation, through the same clock",
        ),
        Entry(
            "endpoint",
            ".endpoint:Endpoint",
            "peer row: a completions server (vLLM, SGLang, llama.cpp), through the same clock",
        ),
    )
}


def _plug_ins() -> Iterable[EntryPoint]:
    return (point for point in entry_points(group=GROUP) if point.name not in BUILT_IN)


def names() -> list[str]:
    return [*BUILT_IN, *sorted(point.name for point in _plug_ins())]


def entries() -> list[Entry]:
    """All strategies for a listing. A plug-in is not imported; its summary says where it comes from."""
    plug_ins = [
        Entry(point.name, point.value, f"plug-in from {point.dist.name if point.dist else point.value}")
        for point in sorted(_plug_ins(), key=lambda point: point.name)
    ]
    return [*BUILT_IN.values(), *plug_ins]


def get(name: str) -> type[Strategy]:
    """Raises UsageError for a name that is not known, or a plug-in that cannot be loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name].load()
    for point in _plug_ins():
        if point.name == name:
            return _load_plug_in(point)
    raise UsageError(unknown("strategy", name, names(), "See: specbench list strategies"))


def _load_plug_in(point: EntryPoint) -> type[Strategy]:
    try:
        found = point.load()
    except Exception as error:
        raise UsageError(f'strategy "{point.name}" ({point.value}) cannot be loaded: {error!r}') from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(f'strategy "{point.name}" ({point.value}) is not a specbench Strategy class')
    if found.name != point.name:
        raise UsageError(f'strategy "{point.name}" ({point.value}) calls itself "{found.name}"; the names must agree')
    return found
