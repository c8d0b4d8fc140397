"""What a watcher of a run sees on stderr: a live table on a terminal, a few lines elsewhere, warnings always."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..results.listener import Grid, Listener
from ..results.live import Running, Standing
from ..results.records import Sample
from ..results.tables import digits
from . import grid as grids
from .output import stderr


def listener_for(quiet: bool) -> Listener:
    console = stderr()
    if quiet:
        return _Lines(console, quiet=True)
    return _Table(console) if console.is_terminal else _Lines(console)


class _Lines(Listener):
    """Without a terminal: a line per phase, none per sample."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet

    def stage(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", soft_wrap=True)

    def begin(self, total: int, done: int) -> None:
        self.note(f"{total - done} samples to measure" + (f", {done} are there already" if done else ""))


class _Table(Listener):
    """On a terminal: how far it got, how long it will take, and per arm speed, acceptance and speed-up so far.

    It is drawn between samples only, by whoever has just finished one, and not more often than costs a twentieth of the
    time: a thread that draws while a sample runs would take time from what is being measured.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.spinner = console.status("")
        self.live: Live | None = None
        self.over = False
        self.shown: Grid | None = None
        atexit.register(self.close)  # an error while loading must not leave the cursor hidden

    def stage(self, text: str) -> None:
        if self.live is not None:
            self.text = text
            self.draw(at_once=True)
        elif self.over:  # nobody says when what follows has ended, so nothing is left turning
            self.note(text)
        else:
            self.spinner.update(text)
            self.spinner.start()

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def begin(self, total: int, done: int) -> None:
        self.text, self.total, self.done, self.before = "measuring", total, done, done
        self.running = Running()
        self._open()
        self.draw(at_once=True)

    def sample(self, samples: Sequence[Sample]) -> None:
        if self.live is None:
            return
        self.done += sum(sample.kind == "measure" for sample in samples)
        self.running.add(samples)
        self.draw()

    def grid(self, grid: Grid) -> None:
        if self.over:  # what still arrives after an interrupt
            return
        self.shown = grid
        if self.live is None:
            self._open()
        self.draw()

    def _open(self) -> None:
        self.close()
        self.started, self.next = time.monotonic(), 0.0
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.live.start()

    def end(self) -> None:
        self.close()
        self.over = True

    def close(self) -> None:
        self.spinner.stop()
        if self.live is not None:
            self.live.stop()
            self.live = None

    def draw(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.live is None or (now < self.next and not at_once):
            return
        self.live.update(self.view(now), refresh=True)
        after = time.monotonic()
        self.next = after + max(0.2, 20 * (after - now))

    def view(self, now: float) -> RenderableType:
        if self.shown is not None:
            return grids.view(self.shown, now - self.started, self.console.height - 3)
        total = max(self.total, self.done)  # later turns of a conversation are not known in advance
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=max(total, 1), completed=self.done, width=20)
        left = grids.left(now - self.started, self.done - self.before, total - self.done)
        line.add_row(self.text, bar, f"{self.done}/{total}", left)
        return Group(line, standings(self.running.standings(), self.console.width, self.console.height - 3))


_NAME, _REST = 12, 58  # cells that the name of an arm has at least, and those that the other columns take


def standings(arms: Sequence[Standing], width: int, height: int) -> Table:
    """One line per arm: those that fit the screen, the baseline always among them. Names give way, numbers do not."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("arm", no_wrap=True, overflow="ellipsis", max_width=max(_NAME, width - _REST))
    narrow = width < _NAME + _REST
    names = ("tok/s", "speed-up so far") if narrow else ("samples", "tok/s", "accepted", "speed-up so far")
    for name in names:
        table.add_column(name, justify="left" if name == names[-1] else "right", no_wrap=True, overflow="crop")
    shown = arms if len(arms) <= max(height, 2) else [arms[0], *arms[1 - max(height, 2) :]]
    for one in shown:
        rate = "-" if one.acceptance_rate is None else f"{one.acceptance_rate:.2f}"
        samples = f"{one.samples}" + (f" ({one.failed} failed)" if one.failed else "")
        speed = digits(one.decode_tokens_per_s)
        cells = (speed, _speedup(one)) if narrow else (samples, speed, rate, _speedup(one))
        table.add_row(one.arm, *cells)
    return table


def _speedup(one: Standing) -> Text:
    if one.speedup is None:
        return Text("1.00x" if one.baseline else "-", style="dim")
    if one.low is None or one.high is None:
        return Text(digits(one.speedup, "x"))
    style = "green" if one.low > 1 else "red" if one.high < 1 else ""
    return Text(f"{digits(one.speedup, 'x')} [{digits(one.low)}, {digits(one.high)}]", style=style)
