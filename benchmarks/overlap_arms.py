"""The arms of `two_devices.py` by name: the strategy that a name stands for, its options, the costs that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.hardware.overlap import Costs
from specbench.options import build
from specbench.strategies import registry
from specbench.strategies.base import Strategy
from specbench.strategies.overlapped import Overlapped

PLAIN, BOTH, PUBLISHED = "autoregressive", " on both cores", " as published"
SWITCHES: dict[str, dict[str, Any]] = {
    "duo without anticipation": {"anticipate": False},
    "duo without first-token branches": {"branch_rule": "off"},
    "duo without branches": {"branches": 1},
    "duo with branches that need not pay": {"worth": 0.1},
    "duo one by one": {"batched": False},
    "duo without interruption": {"interrupt": False},
    "duo, first token after the round": {"first_token": "after_round"},
    "duo without controller": {"controller": False},
    "async without controller": {"controller": False},
    "async without waiting": {"min_ready": 0},
}


def kind_of(name: str) -> tuple[str, dict[str, Any]]:
    """The strategy and the options that an arm's name stands for: `speculative 4 on both cores`, `duo as published`."""
    name = name.removesuffix(BOTH)
    strategy = name.split()[0].strip(",")
    if name in SWITCHES:
        return strategy, SWITCHES[name]
    if name.endswith(PUBLISHED):
        return strategy, {"faithful": True}
    length = name.removeprefix(strategy).strip()
    return strategy, {"draft_length": int(length)} if length else {}


def strategy_of(name: str, models: Mapping[str, Any]) -> Strategy:
    """The strategy of an arm over models by role; over none, for what it decides and not for decoding."""
    strategy, options = kind_of(name)
    kind = registry.get(strategy)
    return kind({role: models.get(role) for role in kind.roles}, build(kind.Options, options, strategy))


def that_go_by_costs(strategies: Sequence[Strategy]) -> list[Overlapped]:
    """Those with a controller, the one with the most branches first: what is measured for it holds for all."""
    ours = [one for one in strategies if isinstance(one, Overlapped) and not one.options.faithful]
    return sorted(ours, key=lambda one: -one.settings().branches)


def share_costs(strategies: Sequence[Strategy], costs: Costs) -> None:
    """All arms decide by the same numbers."""
    ours = that_go_by_costs(strategies)
    for one in ours[:1]:
        one.go_by(costs)
    for one in ours[1:]:
        one.costs, one.table = ours[0].costs, ours[0].table
