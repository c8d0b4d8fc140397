"""What a watcher sees: a table that fits, lines where there is no terminal, and numbers that agree with the result."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic import failed, run, sample

from specbench.cli import progress
from specbench.results import metrics, statistics
from specbench.results.listener import Grid, Working
from specbench.results.live import Running, linear_interval


def _terminal(width: int = 80, height: int = 24, **more: Any) -> tuple[progress._Table, io.StringIO]:
    stream = io.StringIO()
    return progress._Table(Console(file=stream, width=width, height=height, force_terminal=True, **more)), stream


def _seen(table: progress._Table, width: int, now: float) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table.view(now))
    return stream.getvalue()


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_the_table_fits_and_numbers_stay_whole(width: int) -> None:
    table, _ = _terminal(width)
    table.begin(60, 0)
    for one in run(12):
        table.sample([one])
    text = _seen(table, width, table.started + 24)
    table.end()
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert re.search(r"2\.\d\dx \[2\.\d\d, 2\.\d\d\]", text)
    assert "24/60" in text
    assert "0:36 left" in text
    assert ("0.75" in text) == (width >= 80)


def test_long_names_give_way_and_many_arms_do_not_run_off_the_screen() -> None:
    table, _ = _terminal(80, 8)
    table.begin(60, 0)
    for number in range(12):
        arm = "autoregressive" if number == 0 else f"a-strategy-with-a-rather-long-name-{number}"
        table.sample([sample(arm, n, tokens=9) for n in range(6)])
    lines = _seen(table, 80, table.started + 1).splitlines()
    table.end()
    assert len(lines) <= 8
    assert lines[2].startswith("autoregressive")
    assert max(map(len, lines)) <= 80
    assert any("…" in line and "x [" in line for line in lines)


def test_it_is_drawn_rarely_and_without_a_thread() -> None:
    """Drawing must not take time from what is measured."""
    table, _ = _terminal()
    drawn = []
    table.begin(10_000, 0)
    assert table.live is not None
    assert not table.live.auto_refresh
    table.live.update = lambda *a, **k: drawn.append(1)  # type: ignore[method-assign]
    for one in run(1000):
        table.sample([one])
    table.end()
    assert len(drawn) < 50


def test_everything_is_given_back_at_the_end() -> None:
    table, stream = _terminal()
    table.stage("loading")
    table.begin(4, 2)
    table.warn("speculative, toy p1: no more")
    table.stage("tracing")
    table.end()
    table.sample([sample()])
    table.stage("comparing outputs")
    text = stream.getvalue()
    assert "warning: speculative, toy p1: no more" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor
    assert table.live is None


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=stream, width=80))
    listener = progress.listener_for(quiet=False)
    listener.stage("measuring")
    listener.begin(24, 3)
    for one in run(12):
        listener.sample([one])
    listener.end()
    assert stream.getvalue() == "measuring\n21 samples to measure, 3 are there already\n"
    quiet = progress.listener_for(quiet=True)
    quiet.note("nothing")
    assert "nothing" not in stream.getvalue()
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=stream, force_terminal=True))
    assert isinstance(progress.listener_for(quiet=False), progress._Table)


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_standings_are_the_metrics_of_what_was_measured() -> None:
    samples = [*run(12, 2), failed(prompt=3), sample("speculative", 0, kind="trace", step_ms=900)]
    running = Running()
    for one in samples:
        running.add([one])
    base, arm = running.standings()
    ok = [one for one in metrics.finished(samples) if one.arm == "speculative"]
    assert (base.arm, base.baseline, base.speedup, base.acceptance_rate) == ("autoregressive", True, None, None)
    assert (arm.samples, arm.failed) == (25, 1)
    assert arm.decode_tokens_per_s == metrics.decode_tokens_per_s(ok)
    assert arm.acceptance_rate == metrics.drafting(ok).acceptance_rate
    pairs = statistics.pair([one for one in samples if one.arm == "autoregressive"], ok).pairs
    assert arm.speedup == pytest.approx(statistics.decode_speedup(pairs, per_token=True).value)  # type: ignore[union-attr]


@pytest.mark.parametrize("prompts", [10, 40, 200])
def test_running_interval_is_close_to_that_of_the_table(prompts: int) -> None:
    random = np.random.default_rng(prompts)
    rows = []
    for _ in range(prompts):
        tokens, base = int(random.integers(20, 200)), 20e6 * random.lognormal(0, 0.1)
        rows.append((round(base * tokens), tokens, round(base * tokens / 1.5 * random.lognormal(0, 0.1)), tokens))
    value, low, high = linear_interval(rows)
    sums = np.array(rows, dtype=float)[:, [0, 2, 1, 3]]
    expected = statistics.bootstrap_interval(sums, lambda d: d[:, 0] / d[:, 1] * d[:, 3] / d[:, 2])
    assert value is not None
    assert low is not None
    assert high is not None
    assert low < value < high
    assert high - low == pytest.approx(expected[1] - expected[0], rel=0.15)  # type: ignore[operator]


def test_nothing_is_told_before_it_can_be() -> None:
    """C15, M8."""
    assert linear_interval([]) == (None, None, None)
    assert linear_interval([(0, 0, 5, 5)]) == (None, None, None)
    value, low, high = linear_interval([(30, 3, 10, 3)] * 4)
    assert (value, low, high) == (3, None, None)
    running = Running()
    running.add([dataclasses.replace(one, arm="other") for one in run(1, arms=("speculative",))])
    assert running.standings()[0].speedup is None


def test_what_arrives_after_an_interrupt_does_not_open_the_table_again() -> None:
    """Workers still send while they are stopped; the cursor stayed hidden then."""
    table, stream = _terminal()
    table.grid(Grid(2, 0, 0, [Working("node0/ab12cd", "lookup", 1, 12)]))
    table.end()
    table.grid(Grid(2, 1, 0, []))
    assert table.live is None
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")


def test_a_grid_shows_all_its_cells_and_as_many_workers_as_fit() -> None:
    table, _ = _terminal(60, 8)
    working = [Working(f"node{number}/ab12cd", f"speculative_draft-length={number}", 3, 12) for number in range(9)]
    table.grid(Grid(40, 9, 1, [Working("node0/ab12cd", "lookup", 0, 0)]))
    assert "loading" in _seen(table, 60, table.started)
    table.grid(Grid(40, 9, 1, working))
    text = _seen(table, 60, table.started + 45)
    table.end()
    assert "9/40 (1 failed)" in text
    assert "1:55 left" in text  # 9 cells and 9 quarters in 45 s, 28.75 of 40 left
    assert "3/12" in text
    assert "and 4 more" in text
    assert len(text.splitlines()) <= 8
    assert table.live is None
