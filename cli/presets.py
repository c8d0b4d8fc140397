"""Named settings; flags and a config file go over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import UsageError, unknown


def preset(name: str) -> dict[str, Any]:
    """The settings of a preset by `Plan` field. Raises UsageError."""
    if name == "smoke":
        return _smoke()
    if name == "demo":
        return dict(_DEMO)
    raise UsageError(unknown("preset", name, ("smoke", "demo")))


def _smoke() -> dict[str, Any]:
    """Every strategy that one device is enough for, on tiny random models that are built on the spot; the output must
    not change."""
    return {
        "strategy": tuple(_runnable()),
        "target": "tiny",
        "draft": "tiny-draft",
        "task": ("bundled",),
        "limit": 3,
        "max_new_tokens": 32,
        "dtype": "float32",
        "trace": 1,
        "require_lossless": True,
    }


def _runnable() -> Iterator[str]:
    """Our own strategies, and every plug-in that can be loaded and needs no model, device or server that the preset
    does not have."""
    from ..strategies import registry

    for name in registry.names():
        try:
            strategy = registry.get(name)
        except UsageError:
            if name in registry.BUILT_IN:
                raise
            continue
        if set(strategy.roles) <= {"target", "draft"} and not strategy.apart and not strategy.sends_text:
            yield name


# A real model on its own: what drafts for it has to be at hand without another download.
_DEMO = {
    "strategy": ("speculative", "lookup"),
    "target": "smollm2-135m",
    "draft": "self:int4",
    "task": ("bundled",),
    "limit": 16,
    "max_new_tokens": 96,
    "dtype": "float32",
    "repeats": 1,
    "require_lossless": True,
}
