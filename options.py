"""Options of strategies and tasks: from words on the command line or in YAML to a frozen dataclass.

A leaf beside `errors`: it knows dataclasses and nothing of specbench, so that the rules are the same for every
strategy and task, built in or not.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UsageError, unknown

T = TypeVar("T")

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def build(cls: type[T], given: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `cls`; fields that are not given keep their defaults.

    Hyphens in keys stand for underscores. Text is converted to the field's type: int, float, bool, str, Path,
    Literal, `tuple[X, ...]` (comma-separated) and unions of these, where "none" is None; values that have the type
    already, as those from YAML, are kept. Numbers must be finite, since records hold no NaN or Infinity.

    Args:
        where: what the options belong to, as it should stand in a message: 'task "jsonl"'.

    Raises:
        UsageError: an unknown, repeated or missing key, a value of another type, or a ValueError of `__post_init__`.
            Errors of specbench that `__post_init__` raises pass through.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise UsageError(_unknown_key(key, fields, where))
        if name in values:
            raise UsageError(f'option "{key}" of {where} is given twice, with a hyphen and with an underscore.')
        values[name] = convert(value, hints[name], f'option "{key}" of {where}')
    missing = [_hyphens(name) for name, field in fields.items() if name not in values and not _has_default(field)]
    if missing:
        raise UsageError(f"{where} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}.")
    try:
        return cls(**values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def convert(value: Any, kind: Any, what: str) -> Any:
    """`value` as the type `kind`; `what` names it in the UsageError."""
    try:
        return _convert(value, kind)
    except ValueError:
        raise UsageError(f"{what} must be {_describe(kind)}, not {value!r}.") from None


def _convert(value: Any, kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, args)
    if origin is Literal:
        matches = [choice for choice in args if choice == value or str(choice) == value]
        if not matches:
            raise ValueError
        return matches[0]
    if origin is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            raise ValueError
        return tuple(_convert(part, args[0]) for part in parts)
    if kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        raise ValueError
    return _scalar(value, kind)


def _scalar(value: Any, kind: Any) -> Any:
    if kind is bool:
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        if isinstance(value, bool):
            return value
    elif kind in (int, float):
        # To Python a YAML bool is an int. 1.5 is no int, but 3 is a float.
        accepted = (str, int, float) if kind is float else (str, int)
        if isinstance(value, accepted) and not isinstance(value, bool) and math.isfinite(number := kind(value)):
            return number
    elif kind is str:
        if isinstance(value, str):
            return value
    elif kind is Path:
        if isinstance(value, (str, Path)) and str(value):
            return Path(value).expanduser()
    elif isinstance(value, kind):
        return value
    raise ValueError


def _first_that_fits(value: Any, kinds: tuple[Any, ...]) -> Any:
    # None and numbers before text, to which every word converts.
    for kind in sorted(kinds, key=lambda kind: (kind in (str, Path), kind is not type(None))):
        try:
            return _convert(value, kind)
        except ValueError:
            continue
    raise ValueError


def _describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is tuple:
        return f"a comma-separated list, each {_describe(args[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return "none" if kind is type(None) else names.get(kind, getattr(kind, "__name__", str(kind)))


def _unknown_key(key: str, fields: Mapping[str, Any], where: str) -> str:
    known = [_hyphens(name) for name in fields]
    message = unknown(f"option for {where}:", _hyphens(key), known)
    return message if "; known:" in message else f"{message} Known: {', '.join(sorted(known))}."


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
