"""`specbench profile-hardware`: what the machine and the models can do, before anything is compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..results.listener import Listener
from .errors import reports_errors
from .output import print_json, stderr, stdout

PROFILE_HELP = """Measure this machine and, with models, what a forward costs; predict which strategy pays.

The result is kept in the cache folder and read from there until hardware, software or models change. With --calibrate
a few prompts are decoded as well, and the table of predictions becomes one recommendation.

Example: specbench profile-hardware --target smollm2-135m --draft self:int4 --quick
"""

_WHAT, _WHERE, _OUT = "What to measure", "Where it runs", "What comes out"


def _option(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


@reports_errors
def profile_hardware(
    target: Annotated[
        str | None, _option(_WHAT, "Target model, as for run; without it the hardware alone", "--target", "-t")
    ] = None,
    draft: Annotated[
        str | None, _option(_WHAT, "Draft model, as for run; commas between several", "--draft", "-d")
    ] = None,
    option: Annotated[
        list[str] | None,
        _option(
            _WHAT, "Option of the draft or the task, as in draft.head-vocab=16384; may be repeated", "--option", "-o"
        ),
    ] = None,
    quick: Annotated[
        bool, _option(_WHAT, "Less than a minute, with fewer points (default: up to five)", "--quick/--full")
    ] = False,
    fresh: Annotated[
        bool, _option(_WHAT, "Measure anew, whatever the cache folder holds", "--fresh/--no-fresh")
    ] = False,
    calibrate: Annotated[
        str | None,
        _option(_WHAT, "Measure the acceptance on a few prompts of this task, and recommend a strategy", "--calibrate"),
    ] = None,
    limit: Annotated[int, _option(_WHAT, "Prompts for --calibrate (default: 8)", "--limit")] = 8,
    place: Annotated[
        str | None, _option(_WHERE, "Roles to devices, as in target=cpu:0,draft=cpu:1 (default: target=cpu)", "--place")
    ] = None,
    threads: Annotated[
        int | None, _option(_WHERE, "CPU threads (default: the physical cores that may be used)", "--threads")
    ] = None,
    dtype: Annotated[
        str | None, _option(_WHERE, "float32, bfloat16, float16 or auto (default: auto, as for run)", "--dtype")
    ] = None,
    runtime: Annotated[str | None, _option(_WHERE, "packed, transformers or auto (default: auto)", "--runtime")] = None,
    target_quant: Annotated[
        str | None, _option(_WHERE, "Weight-only quantisation of the target: int8 or int4", "--target-quant")
    ] = None,
    draft_quant: Annotated[
        str | None, _option(_WHERE, "Weight-only quantisation of the draft: int8 or int4", "--draft-quant")
    ] = None,
    out: Annotated[
        Path | None, _option(_OUT, "Folder for profile.json and, with models, the cost curves as PNG and SVG", "--out")
    ] = None,
    json: Annotated[
        bool, _option(_OUT, "One JSON document on stdout instead of the report", "--json/--no-json")
    ] = False,
    quiet: Annotated[bool, _option(_OUT, "No progress; warnings stay", "--quiet/--no-quiet", "-q")] = False,
) -> None:
    from ..results import profile as profiles
    from ..results.plan import parse_option, resolve
    from ..results.profile_report import print_profile

    names = ("target", "draft", "place", "threads", "dtype", "runtime", "target_quant", "draft_quant")
    given = locals()
    options: dict[str, dict[str, str]] = {}
    for text in option or []:
        name, key, value = parse_option(text)
        options.setdefault(name, {})[key] = value
    plan = resolve({**{name: given[name] for name in names if given[name] is not None}, "options": options})
    _check(plan, out, target is not None, calibrate, limit)
    watch = _Lines(quiet)
    found = profiles.profile(plan, target is not None, quick, fresh, watch)
    if found.cached:
        watch.note(f"measured {found.document['made']}, read from {found.path}; --fresh measures anew")
    if calibrate is not None:
        from ..results import calibration

        watch.stage(f"decoding {limit} prompts of {calibrate}")
        found.document["calibration"] = calibration.calibrate(plan, calibrate, limit, found.document, watch)
    if json:
        print_json(found.document)
    else:
        print_profile(found.document, stdout())
    if out is not None:
        for path in profiles.save(found, out):
            watch.note(f"wrote {path}")


def _check(plan: Any, out: Path | None, with_models: bool, calibrate: str | None, limit: int) -> None:
    """What can be refused before anything is measured."""
    from ..errors import UsageError, unknown

    known = {*plan.drafts, *([] if calibrate is None else [calibrate.partition(":")[0]])}
    for name in plan.options:
        if name not in known:
            raise UsageError(unknown("name in --option", name, known or {"draft"}))
    if calibrate is not None:
        if not with_models:
            raise UsageError(f"--calibrate {calibrate}: needs --target, the model that decodes")
        from ..results.calibration import plan_of

        plan_of(plan, calibrate, limit)
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    if with_models:
        from ..results.plots import require_matplotlib

        require_matplotlib()


class _Lines(Listener):
    """A line per part on stderr. Nothing is drawn while something is measured: that would take time from it."""

    def __init__(self, quiet: bool) -> None:
        self.console, self.quiet, self.began = stderr(), quiet, time.monotonic()

    def stage(self, text: str) -> None:
        if not self.quiet:
            self.console.print(f"{time.monotonic() - self.began:5.0f} s  {text}", soft_wrap=True)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", soft_wrap=True)
