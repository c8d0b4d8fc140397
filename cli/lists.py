"""`specbench list ...`: what there is to choose from. None of it imports torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .errors import reports_errors
from .output import print_json, stdout

app = typer.Typer(help="List strategies, tasks, models or devices.", no_args_is_help=True)

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
        table.add_column(column, no_wrap=at == 0, overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(column) or "") for column in columns))
    console.print(table)
