"""What a watcher of a run sees on stderr: a bar on a terminal, a few lines elsewhere, warnings always."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..results.listener import Listener
from ..results.records import Sample
from .output import stderr


def listener_for(quiet: bool) -> Listener:
    console = stderr()
    if quiet:
        return _Lines(console, quiet=True)
    return _Bar(console) if console.is_terminal else _Lines(console)


class _Lines(Listener):
    """Without a terminal: a line per phase, none per sample."""

    def __init__(self, console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet

    def stage(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", soft_wrap=True, markup=False)

    def begin(self, total: int, done: int) -> None:
        self.note(f"{total - done} samples to measure" + (f", {done} are there already" if done else ""))


class _Bar(Listener):
    """On a terminal: one line that says which arm, how fast, how much was accepted, and how long it will take."""

    def __init__(self, console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[latest]}"),
            console=console,
            transient=True,
        )
        self.bar: TaskID | None = None
        self.stages = console.status("")

    def stage(self, text: str) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, description=text)
        else:
            self.stages.update(text)
            self.stages.start()

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True, markup=False)

    def begin(self, total: int, done: int) -> None:
        self.stages.stop()
        self.bar = self.progress.add_task("measuring", total=total, completed=done, latest="")
        self.progress.start()

    def sample(self, samples: Sequence[Sample]) -> None:
        if self.bar is None:
            return
        measured = [sample for sample in samples if sample.kind == "measure"]
        self.progress.update(self.bar, advance=len(measured), latest=_latest(samples))

    def end(self) -> None:
        self.stages.stop()
        self.progress.stop()
        self.bar = None


def _latest(samples: Sequence[Sample]) -> str:
    from ..results import metrics

    ok = [sample for sample in samples if sample.ok]
    if not ok:
        return ""
    text = samples[0].arm
    speed = metrics.decode_tokens_per_s(ok)
    if speed is not None:
        text += f" {speed:.3g} tok/s"
    rate = metrics.drafting(ok).acceptance_rate
    if rate is not None:
        text += f", {rate:.0%} accepted"
    return text
