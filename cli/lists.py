"""`specbench list ...`: what there is to choose from. Only `list drafts` imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import reports_errors
from .output import print_json, stderr, stdout

app = typer.Typer(help="List strategies, tasks, models, drafts or devices.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json/--no-json", help="Print one JSON document instead of a table.")]


@app.command("strategies")
@reports_errors
def strategies(json: Json = False) -> None:
    """Decoding strategies. Example: specbench list strategies"""
    from ..strategies.registry import entries

    _show(
        [{"name": e.name, "models": ", ".join(e.roles), "what": e.summary} for e in entries()],
        json,
    )


@app.command("tasks")
@reports_errors
def tasks(json: Json = False) -> None:
    """Data sets that prompts come from. Example: specbench list tasks"""
    from ..tasks import registry

    _show([{"name": name, "what": what} for name, what in registry.summaries()], json)


@app.command("models")
@reports_errors
def models(json: Json = False) -> None:
    """Built-in models, and how to name your own. Example: specbench list models"""
    from ..models.specs import BUILTIN

    rows = [{"name": name, "what": what} for name, what in BUILTIN.items()]
    rows += [
        {"name": "org/name, org/name@revision", "what": "a model on the Hugging Face hub, or in its local cache"},
        {"name": "./folder", "what": "a local transformers folder (config, tokenizer, safetensors)"},
        {"name": "self:int4, self:int8", "what": "as --draft: the target's own weights, quantised (packed runtime)"},
        {"name": "./file.gguf", "what": "a local GGUF file, unpacked when it is loaded"},
    ]
    _show(rows, json)


@app.command("drafts")
@reports_errors
def drafts(
    target: Annotated[str, typer.Option("--target", "-t", help="The model that is to be drafted for.")],
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="Look here for models, too; may be repeated.", show_default=False),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure", help="Measure cost and agreement of these drafts now, with commas.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target, for --measure.")] = "float32",
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads (default: the physical cores).", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """What could draft for a target here, with cost and agreement where they are known.

    Example: specbench list drafts --target org/big --measure self:int4
    """
    from ..hardware import devices
    from ..models.info import describe
    from ..models.specs import parse
    from ..results import drafts as found

    placement = devices.parse_placement("target=cpu", threads)
    info = describe(parse(target), "target", progress=lambda text: stderr().print(text, soft_wrap=True))
    if measure:
        devices.apply(placement)
        for draft in measure.split(","):
            found.measure(info, draft.strip(), dtype, placement.threads)
    rows = [one.record() for one in found.candidates(info, folder or (), dtype, placement.threads)]
    if not json:
        for row in rows:
            row |= {key: f"{row[key]:.3f}" for key in ("cost_ratio", "agreement") if row[key] is not None}
        rows = [{"--draft": row["draft"] or "(none)", **{k: v for k, v in row.items() if k != "draft"}} for row in rows]
    _show(rows, json)


@app.command("devices")
@reports_errors
def devices(json: Json = False) -> None:
    """Devices for --place. Example: specbench list devices"""
    from ..hardware.devices import available_cores, cgroup_cpu_limit, gpus, physical_cores
    from ..hardware.environment import environment

    facts, cores = environment(), available_cores()
    limit = cgroup_cpu_limit()
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB" if facts["memory_bytes"] else ""
    what = f"{facts['cpu']}, {len(cores)} cores ({physical_cores(cores)} physical)"
    if limit:
        what += f", limited to {limit:g} cores of time"
    rows = [{"device": "cpu", "what": what, "memory": memory}]
    rows += [{"device": f"cpu:{core}", "what": "one core; cpu:0-1 for several", "memory": ""} for core in cores]
    rows += [{"device": gpu["device"], "what": gpu["name"], "memory": gpu["memory"]} for gpu in gpus()]
    _show(rows, json)


def _show(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(rows)
        return
    from rich.table import Table

    console = stdout()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for at, column in enumerate(columns):
        longest = max(len(str(row.get(column) or "")) for row in rows)
        table.add_column(column, no_wrap=at == 0 and longest <= console.width // 3, overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(column) or "") for column in columns))
    console.print(table)
