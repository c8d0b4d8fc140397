"""`specbench distill`: a small draft for a target that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import INTERRUPTED, reports_errors
from .output import print_json, stderr, stdout

DISTILL_HELP = """Train a small draft for a target, on text that the target itself writes.

The draft starts from layers of the target, shares its embedding and head, and learns its distribution. Ctrl-C keeps
the best draft so far; --resume goes on, also with more minutes.

Example: specbench distill --target org/big --layers 2 --minutes 60 --out my-draft
"""


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@reports_errors
def distill(
    target: Annotated[str, _option("Target model, as for run", "--target", "-t")],
    out: Annotated[Path, _option("Folder of the draft; name it with --draft afterwards", "--out")],
    layers: Annotated[int, _option("Layers of the draft (default: 2)", "--layers")] = 2,
    head_vocab: Annotated[int, _option("Tokens that it may draft (default: 16384)", "--head-vocab")] = 16384,
    minutes: Annotated[float, _option("Time for writing and training, in minutes (default: 60)", "--minutes")] = 60.0,
    data: Annotated[
        Path | None,
        _option("Text file, or JSON lines with text, turns or messages, in place of the target's own text", "--data"),
    ] = None,
    seed: Annotated[int, _option("Of the text and of the training (default: 0)", "--seed")] = 0,
    store: Annotated[str, _option("How weights are stored: bfloat16 or int8 (default: bfloat16)", "--store")] = (
        "bfloat16"
    ),
    resume: Annotated[bool, _option("Go on in --out", "--resume/--no-resume")] = False,
    place: Annotated[str, _option("Device: cpu, cpu:0-3, cuda:0 (default: cpu)", "--place")] = "cpu",
    threads: Annotated[int | None, _option("CPU threads (default: the physical cores)", "--threads")] = None,
    json: Annotated[bool, _option("One JSON document on stdout", "--json/--no-json")] = False,
    quiet: Annotated[bool, _option("No progress", "--quiet/--no-quiet", "-q")] = False,
) -> None:
    from ..hardware import devices
    from ..models import distill as distilling
    from ..models.info import describe
    from ..models.specs import parse

    settings = distilling.Settings(layers, head_vocab, minutes, data, seed, store)
    placement = devices.parse_placement(f"target={place}", threads)
    devices.check_gpus(placement)
    device = placement.of("target").torch_name
    watch = _watch(quiet)
    info = describe(parse(target), "target", progress=watch.note)
    distilling.check(info, settings, out, resume, device)
    devices.apply(placement)
    try:
        made = distilling.distill(info, settings, out, resume, device, watch.show)
    finally:
        watch.close()
    if json:
        print_json({"folder": str(out), "interrupted": made.interrupted, **made.card})
    else:
        best = made.progress.best
        assert best is not None
        stdout().print(f"{out}: {_quality(best)}", soft_wrap=True)
        stdout().print(f"use it with: specbench run -s speculative -t {target} -d {out}", soft_wrap=True)
    if made.interrupted:
        raise typer.Exit(INTERRUPTED)


def _quality(found: Any) -> str:
    steps = ", ".join(f"{value:.2f} at {length}" for length, value in found.tokens_per_step.items())
    return f"agreement {found.agreement:.3f}, tokens per step by draft length {steps}"


def _line(progress: Any) -> str:
    text = f"{progress.spent_s / 60:.1f} of {progress.total_s / 60:g} min"
    text += f", {progress.text_tokens} tokens of text, {progress.steps} steps"
    if progress.loss is not None:
        text += f", loss {progress.loss:.3f}"
    return text


def _watch(quiet: bool) -> Any:
    console = stderr()
    if quiet:
        return _Silent()
    return _Live(console) if console.is_terminal else _Lines(console)


class _Silent:
    def note(self, text: str) -> None:
        pass

    def show(self, progress: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines(_Silent):
    """A line whenever something else is done that takes long, and for every look at held-out text."""

    def __init__(self, console: Any) -> None:
        self.console, self.seen, self.doing = console, None, ""

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def show(self, progress: Any) -> None:
        if progress.latest is not self.seen:
            self.seen = progress.latest
            self.note(f"{_line(progress)}: {_quality(progress.latest)}")
        elif self.seen is None and progress.doing not in (self.doing, "training"):
            self.doing = progress.doing
            self.note(progress.doing)


class _Live(_Lines):
    """The same, and below it a line that moves."""

    def __init__(self, console: Any) -> None:
        super().__init__(console)
        self.status = console.status("loading")
        self.status.start()

    def show(self, progress: Any) -> None:
        super().show(progress)
        self.status.update(f"{_line(progress)}: {progress.doing}")

    def close(self) -> None:
        self.status.stop()
