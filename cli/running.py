"""`specbench run` and `specbench validate`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import INTERRUPTED, reports_errors
from .output import print_json, stderr, stdout

RUN_HELP = """Measure strategies against plain decoding, on the same prompts, with the same clock.

The autoregressive baseline is added by itself. Results go to a run folder, the table to stdout.

Example: specbench run --strategy speculative,lookup --target org/big --draft org/small --task humaneval --limit 32
"""

VALIDATE_HELP = """Check everything that a run would check before it reads weights, and say what it would do.

Takes the options of run. Example: specbench validate --config grid.yaml
"""

Text = str | None
Number = int | None
Real = float | None
Switch = bool | None

_WHAT, _HOW, _WHERE, _OUT = "What to measure", "How tokens are chosen", "Where it runs", "What comes out"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


@reports_errors
def run(
    strategy: Annotated[
        list[str] | None,
        _option(_WHAT, "Strategies, with commas between them. See: specbench list strategies", "--strategy", "-s"),
    ] = None,
    target: Annotated[
        Text,
        _option(
            _WHAT,
            "Target model: hub id, folder, .gguf file, built-in name, or endpoint:URL#model (default: smollm2-135m)",
            "--target",
            "-t",
        ),
    ] = None,
    tokenizer: Annotated[
        Text,
        _option(_WHAT, "With --target endpoint:URL: the model whose tokenizer makes the prompts", "--tokenizer"),
    ] = None,
    draft: Annotated[Text, _option(_WHAT, "Draft model, named like the target", "--draft", "-d")] = None,
    task: Annotated[
        list[str] | None,
        _option(_WHAT, "Tasks, with commas between them; name:subtask for a part of one (default: bundled)", "--task"),
    ] = None,
    limit: Annotated[Number, _option(_WHAT, "Prompts per task (default: 16)", "--limit", "-n")] = None,
    all_prompts: Annotated[
        Switch, _option(_WHAT, "All prompts of each task, whatever --limit says", "--all/--no-all")
    ] = None,
    max_new_tokens: Annotated[
        Number, _option(_WHAT, "Tokens per answer (default: the task's own)", "--max-new-tokens")
    ] = None,
    draft_length: Annotated[
        Number,
        _option(_WHAT, "Draft tokens per round, for every strategy that has such an option", "--draft-length", "-k"),
    ] = None,
    option: Annotated[
        list[str] | None,
        _option(_WHAT, "Option of a strategy or task, name.key=value; may be repeated", "--option", "-o"),
    ] = None,
    config: Annotated[
        Path | None, _option(_WHAT, "YAML file with any of these settings; flags go over it", "--config")
    ] = None,
    preset: Annotated[
        Text,
        _option(_WHAT, "smoke (tiny models, every strategy, must be lossless) or demo (the README's run)", "--preset"),
    ] = None,
    temperature: Annotated[Real, _option(_HOW, "0 for greedy decoding (default: 0)", "--temperature")] = None,
    top_k: Annotated[Number, _option(_HOW, "Keep the k most likely tokens; 0 for all (default: 0)", "--top-k")] = None,
    top_p: Annotated[
        Real, _option(_HOW, "Keep the likeliest tokens that hold this mass (default: 1)", "--top-p")
    ] = None,
    seed: Annotated[Number, _option(_HOW, "Of the sampling noise (default: 0)", "--seed")] = None,
    verify: Annotated[
        Text,
        _option(
            _HOW,
            "coupled (token-identical at any temperature) or rejection (the papers' rule) (default: coupled)",
            "--verify",
        ),
    ] = None,
    presence_penalty: Annotated[
        Real, _option(_HOW, "Taken from the logit of every token generated before (default: 0)")
    ] = None,
    frequency_penalty: Annotated[Real, _option(_HOW, "The same, per time it was generated (default: 0)")] = None,
    repetition_penalty: Annotated[
        Real, _option(_HOW, "Divides the logit of every token of the context (default: 1)")
    ] = None,
    min_new_tokens: Annotated[
        Number, _option(_HOW, "No end of text before so many tokens (default: 0)", "--min-new-tokens")
    ] = None,
    suppress_tokens: Annotated[Text, _option(_HOW, "Token ids never to emit, with commas", "--suppress-tokens")] = None,
    stop: Annotated[list[str] | None, _option(_HOW, "String that ends an answer; may be repeated", "--stop")] = None,
    ignore_eos: Annotated[
        Switch,
        _option(_HOW, "Go on to the token limit; marks every output as not comparable", "--ignore-eos/--no-ignore-eos"),
    ] = None,
    raw: Annotated[Switch, _option(_HOW, "Continue the prompt's text, no chat template", "--raw/--no-raw")] = None,
    dtype: Annotated[
        Text,
        _option(
            _WHERE, "float32, bfloat16, float16 or auto: float32 on CPU, bfloat16 on GPU (default: auto)", "--dtype"
        ),
    ] = None,
    runtime: Annotated[
        Text,
        _option(
            _WHERE, "packed (fast), transformers, or auto: packed where the model allows (default: auto)", "--runtime"
        ),
    ] = None,
    draft_quant: Annotated[
        Text, _option(_WHERE, "Weight-only quantisation of the draft: int8 or int4 (packed runtime)", "--draft-quant")
    ] = None,
    target_quant: Annotated[
        Text,
        _option(
            _WHERE, "Weight-only quantisation of the target: another model, which all arms decode", "--target-quant"
        ),
    ] = None,
    exact: Annotated[
        Switch,
        _option(
            _WHERE, "On GPU, compute so that drafts change no bits, at a price (packed runtime)", "--exact/--no-exact"
        ),
    ] = None,
    place: Annotated[
        Text, _option(_WHERE, "Roles to devices, as in target=cuda:0,draft=cpu:0-7 (default: target=cpu)", "--place")
    ] = None,
    threads: Annotated[
        Number, _option(_WHERE, "CPU threads (default: the physical cores that may be used)", "--threads")
    ] = None,
    tp: Annotated[
        Number,
        _option(_WHERE, "Ranks that share the target, a device each (transformers runtime) (default: 1)", "--tp"),
    ] = None,
    batch: Annotated[Number, _option(_WHERE, "Rows that run together (default: 1)", "--batch", "-b")] = None,
    batch_prompts: Annotated[
        Number, _option(_WHERE, "Prompts that one call takes through its batch (default: 4 per row)", "--batch-prompts")
    ] = None,
    repeats: Annotated[Number, _option(_WHERE, "Times each prompt is measured (default: 1)", "--repeats", "-r")] = None,
    warmup: Annotated[
        Number, _option(_WHERE, "Unmeasured answers per arm and task, on text of no task (default: 1)", "--warmup")
    ] = None,
    trace: Annotated[
        Number, _option(_WHERE, "Prompts per task traced afterwards for the split of time (default: 2)", "--trace")
    ] = None,
    baseline: Annotated[
        Switch,
        _option(
            _WHERE,
            "Add plain decoding as the row that speed-ups are measured against (default: on)",
            "--baseline/--no-baseline",
        ),
    ] = None,
    out: Annotated[Path | None, _option(_OUT, "Run folder (default: a new one under runs/)", "--out")] = None,
    resume: Annotated[Switch, _option(_OUT, "Go on with the run in --out", "--resume/--no-resume")] = None,
    overwrite: Annotated[Switch, _option(_OUT, "Replace the run in --out", "--overwrite/--no-overwrite")] = None,
    require_lossless: Annotated[
        Switch,
        _option(_OUT, "Exit with 1 if a lossless strategy changed an output", "--require-lossless/--allow-changes"),
    ] = None,
    dry_run: Annotated[
        bool, _option(_OUT, "Check everything, say what would run, and stop", "--dry-run/--no-dry-run")
    ] = False,
    json: Annotated[
        bool, _option(_OUT, "One JSON document on stdout instead of the table", "--json/--no-json")
    ] = False,
    quiet: Annotated[
        bool, _option(_OUT, "No progress and no notes; warnings stay", "--quiet/--no-quiet", "-q")
    ] = False,
) -> None:
    flags = {
        key: value
        for key, value in locals().items()
        if value is not None and value != [] and key not in _OF_THE_COMMAND
    }
    plan = _plan(flags, option or [], config, preset, all_prompts)
    from ..results.ranks import follow_rank_0
    from .progress import listener_for

    if follow_rank_0(plan, dry_run):
        return
    listener = listener_for(quiet)
    from ..results import run as runs
    from ..results.plan import with_own_draft

    plan, note = with_own_draft(plan)
    if note:
        listener.note(note)
    if dry_run:
        prepared = runs.validate(plan, listener)
        _say_what_would_run(prepared, json)
        return
    result = runs.run(plan, listener, sys.argv[1:])
    _report(result, json, quiet)


_OF_THE_COMMAND = {"option", "config", "preset", "all_prompts", "dry_run", "json", "quiet"}


@functools.wraps(run)
def validate(**options: Any) -> None:
    run(**{**options, "dry_run": True})


def _plan(
    flags: dict[str, Any], options: list[str], config: Path | None, preset_name: str | None, all_prompts: bool | None
) -> Any:
    from ..results.plan import parse_option, resolve
    from .presets import preset

    settings: dict[str, Any] = dict(preset(preset_name)) if preset_name else {}
    where = f"preset {preset_name}" if preset_name else "command line"
    if flags.get("resume") and "out" in flags:
        settings |= _settings_of(flags["out"])
    if config is not None:
        settings |= {key.replace("-", "_"): value for key, value in _read_yaml(config).items()}
        where = str(config)
    for name in ("strategy", "task"):
        if name in flags:
            flags[name] = tuple(part.strip() for text in flags[name] for part in text.split(",") if part.strip())
    if "stop" in flags:
        flags["stop"] = tuple(flags["stop"])
    by_name: dict[str, dict[str, str]] = {}
    for text in options:
        name, key, value = parse_option(text)
        by_name.setdefault(name, {})[key] = value
    if all_prompts:
        flags["limit"] = None
    return resolve({**flags, "options": by_name}, settings, where)


def _settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a run folder was made with: what is not given again goes on as it was."""
    from ..results.records import RunFolder

    run = RunFolder(folder)
    stored = run.manifest().get("plan") or {} if run.exists() else {}
    return {key: value for key, value in stored.items() if key not in ("out", "resume", "overwrite")}


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    from ..errors import UsageError

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"--config {path}: a mapping of settings is expected, not a {type(found).__name__}")
    return {str(key): value for key, value in found.items()}


def _say_what_would_run(prepared: Any, json: bool) -> None:
    plan, checked = prepared.plan, prepared.checked
    failing = [turn for turn in prepared.first_turns if turn.error]
    facts = {
        "strategies": [arm.name for arm in checked.arms],
        "models": {role: info.name for role, info in prepared.infos.items()},
        "dtype": prepared.dtype,
        "runtime": prepared.runtimes,
        "devices": {role: " + ".join(map(str, checked.placement.all_of(role))) for role in prepared.infos},
        "threads": checked.placement.threads,
        "vocabulary": prepared.vocab_size,
        "tasks": {name: sum(task == name for task, _ in prepared.prompts) for name, _ in checked.tasks},
        "turns": {name: sum(len(p.turns) for task, p in prepared.prompts if task == name) for name, _ in checked.tasks},
        "longest_row_tokens": prepared.needed_tokens,
        "prompts_that_do_not_fit": [f"{t.task} {t.prompt.id}: {t.error}" for t in failing],
        "samples": sum(len(prompt.turns) for _, prompt in prepared.prompts) * len(checked.arms) * plan.repeats,
    }
    if json:
        print_json({"ok": True, **facts})
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {what}" for name, what in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        table.add_row(key.replace("_", " "), str(value))
    console = stdout()
    console.print(table)
    console.print("all checks passed; nothing was run")


def _report(result: Any, json: bool, quiet: bool) -> None:
    from ..results.tables import print_cautions, print_summary

    if json:
        print_cautions(result.summary, stderr())
        print_json(result.summary.to_dict() | {"folder": str(result.folder), "interrupted": result.interrupted})
    else:
        print_summary(result.summary, stdout(), result.folder)
    console = stderr()
    if not quiet:
        console.print(f"run folder: {result.folder}", soft_wrap=True)
    for reason in result.failures:
        console.print(f"failed: {reason}", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.failures:
        raise typer.Exit(1)
