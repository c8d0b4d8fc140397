"""Options from words: what is converted, and what is refused with which message."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import pytest

from specbench.errors import TaskError, UsageError
from specbench.options import build


@dataclass(frozen=True)
class Options:
    draft_tokens: int = 4
    ratio: float = 0.5
    adaptive: bool = True
    label: str = "a"
    path: Path | None = None
    window: Optional[int] = None  # noqa: UP045 - the older spelling has to work too
    mode: Literal["fast", "exact"] = "fast"
    budgets: tuple[int, ...] = ()
    width: int | str = 1


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("draft-tokens", "7", 7),
        ("draft_tokens", 7, 7),
        ("ratio", "0.25", 0.25),
        ("ratio", 1, 1.0),
        ("adaptive", "off", False),
        ("adaptive", "True", True),
        ("adaptive", False, False),
        ("label", "12", "12"),
        ("path", "some/file", Path("some/file")),
        ("path", "none", None),
        ("window", "64", 64),
        ("window", None, None),
        ("mode", "exact", "exact"),
        ("budgets", "4, 2,1", (4, 2, 1)),
        ("budgets", [4, 2], (4, 2)),
        ("width", "auto", "auto"),
        ("width", "3", 3),
    ],
)
def test_a_value_takes_the_type_of_its_field(key, given, expected):
    value = getattr(build(Options, {key: given}, 'task "x"'), key.replace("-", "_"))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("draft-tokens", "four", "must be a whole number, not 'four'"),
        ("draft-tokens", "1.5", "must be a whole number"),
        ("draft-tokens", 1.5, "must be a whole number"),
        ("draft-tokens", True, "must be a whole number"),
        ("ratio", "nan", "must be a number"),
        ("ratio", float("inf"), "must be a number"),
        ("adaptive", "perhaps", "must be true or false"),
        ("adaptive", 1, "must be true or false"),
        ("label", 3, "must be text"),
        ("window", "wide", "must be a whole number or none"),
        ("mode", "slow", "must be fast or exact, not 'slow'"),
        ("budgets", "4,x", "must be a comma-separated list, each a whole number"),
        ("path", "", "must be a path or none"),
    ],
)
def test_a_value_of_another_type_is_refused_and_named(key, given, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        build(Options, {key: given}, 'strategy "x"')
    assert str(caught.value).startswith(f'option "{key}" of strategy "x"')


def test_an_unknown_key_names_the_near_one_and_lists_all():
    with pytest.raises(UsageError) as caught:
        build(Options, {"draft-token": "4"}, 'strategy "x"')
    assert 'did you mean "draft-tokens"?' in str(caught.value)
    assert "Known: adaptive, budgets, draft-tokens, label, mode, path, ratio, width, window." in str(caught.value)
    with pytest.raises(UsageError, match="known: adaptive, budgets"):
        build(Options, {"zzz": "4"}, 'strategy "x"')


def test_one_key_in_two_spellings_is_refused():
    with pytest.raises(UsageError, match="given twice"):
        build(Options, {"draft-tokens": "4", "draft_tokens": "5"}, 'strategy "x"')


def test_a_field_without_default_is_asked_for():
    @dataclass(frozen=True)
    class Needs:
        draft_model: str

    with pytest.raises(UsageError, match='strategy "x" needs the option draft-model'):
        build(Needs, {}, 'strategy "x"')


def test_a_class_without_fields_takes_no_options():
    @dataclass(frozen=True)
    class Nothing:
        pass

    assert build(Nothing, {}, "x") == Nothing()
    with pytest.raises(UsageError, match="known: none"):
        build(Nothing, {"a": "1"}, "x")


def test_what_post_init_refuses_is_a_usage_error():
    @dataclass(frozen=True)
    class Bad:
        kind: str = "value"

        def __post_init__(self) -> None:
            raise ValueError("k must be 1 or more") if self.kind == "value" else TaskError("own words")

    with pytest.raises(UsageError, match='task "x": k must be 1 or more'):
        build(Bad, {}, 'task "x"')
    with pytest.raises(TaskError, match="^own words$"):
        build(Bad, {"kind": "task"}, 'task "x"')
