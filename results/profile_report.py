"""A hardware profile in words, tables and charts: pure functions of its document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..models.cost_curve import CostCurve
from .prediction import PAYS
from .records import BASELINE
from .tables import digits

_KINDS = {"read": "reading memory", "cache": "reading a cache", "matrix": "multiplying"}
_SHOWN = (1, 2, 4, 8, 16, 32)  # new tokens of the curves
_WORDS = ("verdict", "remark")  # columns that hold them


def print_profile(document: Mapping[str, Any], console: Console) -> None:
    """The whole report on a console."""
    hardware = document["hardware"]
    for line in machine_lines(hardware):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(rates_table(hardware))
    for lines in (gpu_lines(hardware["gpus"]), worker_lines(hardware["workers"])):
        for line in lines:
            console.print(line, soft_wrap=True)
    if document["models"]:
        console.print()
        console.print(models_table(document["models"]))
        console.print(curves_table(document["models"]))
        for line in model_lines(document):
            console.print(line, soft_wrap=True)
        console.print()
        console.print(predicted_table(document["predicted"]))
        for line in predicted_lines(document["predicted"]):
            console.print(line, soft_wrap=True)
    if document.get("calibration"):
        console.print()
        console.print(calibration_table(document["calibration"]))
        for line in calibration_lines(document["calibration"]):
            console.print(line, soft_wrap=True)
    for warning in hardware["warnings"]:
        console.print(f"warning: {warning}", soft_wrap=True)


# --- hardware --------------------------------------------------------------------------------------------------------


def machine_lines(hardware: Mapping[str, Any]) -> Iterator[str]:
    cpu, energy, openmp = hardware["cpu"], hardware["energy"], hardware["openmp"]
    cores = f"{len(cpu['cores'])} of {cpu['cores_of_machine']} cores may be used, {cpu['physical_cores']} physical"
    if cpu["cgroup_cpu_limit"]:
        cores += f", limited to the time of {cpu['cgroup_cpu_limit']:g}"
    yield f"{cpu['model']} ({cpu['architecture']}); {cores}"
    caches = ", ".join(
        f"L{c['level']} {c['count']} x {_bytes(c['bytes'])}" for c in cpu["caches"] if c["kind"] != "instruction"
    )
    nodes = cpu["numa_nodes"]
    yield f"caches: {caches or 'not known'}; memory {_bytes(cpu['memory_limit_bytes'])}" + (
        f" in {nodes} nodes" if (nodes or 1) > 1 else ""
    )
    yield f"instructions: {', '.join(cpu['instructions']) or 'not known'}"
    libraries = ", ".join(openmp["libraries"] or ["library not known"])
    yield f"threads: {openmp['threads']} by {openmp['backend']} ({libraries})"
    counters = [*(energy["rapl"] or []), *(energy["nvml"] or [])]
    yield f"energy: {', '.join(counters) or 'no counter can be read'}"


def rates_table(hardware: Mapping[str, Any]) -> Table:
    """What memory and arithmetic units give, by threads."""
    table = _table("measured", *(f"{row['threads']} thread{'s' * (row['threads'] > 1)}" for row in _rows(hardware)))
    for name, what in (
        ("read", "read memory, GB/s"),
        ("copy", "copy memory, GB/s"),
        ("cache", "read last cache, GB/s"),
    ):
        table.add_row(what, *(digits(row[name] and row[name]["rate"]) for row in _rows(hardware)))
    for dtype in dict.fromkeys(row["dtype"] for row in hardware["matrix"]):
        rates = [row["rate"] for row in hardware["matrix"] if row["dtype"] == dtype]
        table.add_row(f"multiply {dtype}, G{'' if dtype == 'int8' else 'FL'}OP/s", *map(digits, rates))
    return table


def gpu_lines(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for gpu in gpus:
        matrix = ", ".join(f"{row['dtype']} {digits(row['rate'] and row['rate'] / 1000)}" for row in gpu["matrix"])
        host = gpu["host"]
        yield (
            f"{gpu['device']} {gpu['name']}, {_bytes(gpu['memory_bytes'])}: reads {digits(gpu['read']['rate'])} GB/s, "
            f"copies {digits(gpu['copy']['rate'])}; products in TFLOP/s: {matrix}; a launch {digits(gpu['launch_us'])} "
            f"us, round trip {digits(gpu['round_trip_us'])} us"
        )
        if "pinned_to_device" in host:
            ways = ("pinned_to_device", "pageable_to_device", "pinned_to_host", "pageable_to_host")
            there, pageable, back, pageable_back = (digits(host[way]["rate"]) for way in ways)
            yield f"  host to device {there} GB/s pinned, {pageable} pageable; back {back}, {pageable_back}"
        for peer in gpu["peers"]:
            how = "directly" if peer["direct"] else "through the host"
            yield f"  to {peer['device']} {digits(peer['rate'])} GB/s, {how}"


def worker_lines(workers: Mapping[str, Any]) -> Iterator[str]:
    if workers["reason"]:
        yield f"two processes side by side: not measured, {workers['reason']}"
        return
    first, second = (",".join(map(str, cores)) for cores in workers["cores"])
    message = workers["message"]
    yield (
        f"two processes on cores {first} and {second}: a message of {message['ids']} ids there and back takes "
        f"{digits(message['round_trip_us'])} us (p90 {digits(message['p90_us'])})"
    )
    for pair in workers["pairs"]:
        slower = [digits(factor, "x") for factor in pair["slower"]]
        first, second = _KINDS[pair["first"]], _KINDS[pair["second"]]
        yield f"  {first} beside {second}: {slower[0]} and {slower[1]} slower than alone"


# --- models ----------------------------------------------------------------------------------------------------------


def models_table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("model", "where", "runtime", "dtype", "weights", "ms/token", "tok/s", "reading alone, ms", "reached")
    for role, model in models.items():
        first = model["bound"][0]
        threads = f", {model['threads']} threads" if model["threads"] else ""
        table.add_row(
            f"{role} {model['spec']}",
            f"{model['device']}{threads}",
            model["runtime"],
            model["dtype"],
            _bytes(model["weight_bytes"]),
            digits(model["one_token_ms"]),
            digits(model["tokens_per_s"]),
            f"{digits(first['bound_ms'])} ({first['from']})",
            digits(first["fraction"]),
        )
    return table


def curves_table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    """T(n)/T(1), by context and rows."""
    curves = {role: list(measured_curves(model)) for role, model in models.items()}
    last = max(curve.new_tokens[-1] for found in curves.values() for _, _, curve in found)
    shown = [count for count in _SHOWN if count <= last]
    table = _table("T(n)/T(1)", "context", "rows", "T(1), ms", *(f"n={count}" for count in shown if count > 1))
    for role, found in curves.items():
        for context, rows, curve in found:
            ratios = (digits(curve.ratio(count, context, rows)) for count in shown if count > 1)
            table.add_row(role, str(context), str(rows), digits(curve.ms(1, context, rows)), *ratios)
    return table


def measured_curves(model: Mapping[str, Any]) -> Iterator[tuple[int, int, CostCurve]]:
    """(context, rows, the curve that has them) of all that was measured of a model."""
    for record in (model["curve"], *model["further"]):
        curve = CostCurve.from_record(record)
        for rows in curve.rows:
            for context in curve.contexts:
                yield context, rows, curve


def model_lines(document: Mapping[str, Any]) -> Iterator[str]:
    for role, ratio in (document["cost_ratio"] or {}).items():
        yield f"cost ratio c of the {role}: {digits(ratio)} target forwards per draft token"
    if document["together"]:
        target, draft = document["together"]["target_factor"], document["together"]["draft_factor"]
        yield f"side by side the target takes {digits(target, 'x')} as long, the draft {digits(draft, 'x')}"
    for role, model in document["models"].items():
        if model["joules_per_token"] is not None:
            yield f"energy of the {role}: {digits(model['joules_per_token'])} J per token, the whole processor or GPU"
        for what in model["left_out"]:
            yield f"not measured of the {role}: {what}"
        for what in model["cautions"]:
            yield f"warning: {role}: {what}"


def predicted_table(predicted: Mapping[str, Any]) -> Table:
    names = [f"predicted at {alpha:g}" for alpha in predicted["acceptances"]]
    table = _table("strategy", *names, "breaks even at", "verdict")
    for row in predicted["strategies"]:
        if not row["at"]:
            table.add_row(row["strategy"], *("-" for _ in names), "-", row["note"])
            continue
        cells = [digits(cell["speedup"], "x") + _setting(cell["setting"]) for cell in row["at"]]
        even = "never" if row["break_even"] is None else digits(row["break_even"])
        verdict = "can pay" if row["pays"] else "speculation will not pay here"
        table.add_row(row["strategy"], *cells, even, verdict)
    return table


def predicted_lines(predicted: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Speed-ups are predicted, not measured: {predicted['context']} tokens of context, {predicted['rows']} row(s), "
        "draft tokens accepted independently with that probability, each strategy at its best setting."
    )
    for row in predicted["strategies"]:
        if row["at"] and row["note"]:
            yield f"{row['strategy']}: {row['note']}."
    if not any(row["pays"] for row in predicted["strategies"]):
        yield "Speculation will not pay here: no strategy is predicted to be faster, even at the highest acceptance."


def _setting(setting: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in setting.items())})" if setting else ""


# --- calibration -----------------------------------------------------------------------------------------------------


def calibration_table(found: Mapping[str, Any]) -> Table:
    table = _table("strategy", "acceptance", "tokens/step", "predicted", "measured", "remark")
    for row in found["strategies"]:
        length = row["measured_with"].get("draft_length")
        table.add_row(
            row["strategy"] + (f" (draft-length {length})" if length else ""),
            digits(row["acceptance"]),
            digits(row["tokens_per_step"]),
            _speedup(row["predicted"]) + _setting(row["setting"]),
            _speedup(row["measured"]),
            row["doubt"] or "",
        )
    return table


def calibration_lines(found: Mapping[str, Any]) -> Iterator[str]:
    best, task = found["recommended"], f"{found['task']}, {found['prompts']} prompts"
    if best["strategy"] == BASELINE:
        yield f"Recommended for {task}: plain decoding. No strategy is predicted to be faster by {PAYS - 1:.0%}."
        if best["not_told_apart_from"]:
            yield f"Too little was measured to rule out {', '.join(best['not_told_apart_from'])}."
        return
    yield f"Recommended for {task}: {best['strategy']}{_setting(best['setting'])}, predicted {_speedup(best)}."
    if best["doubt"]:
        yield f"Not to be trusted yet: {best['doubt']}; raise --limit."
    if best["not_told_apart_from"]:
        others = ["plain decoding" if name == BASELINE else name for name in best["not_told_apart_from"]]
        yield f"It cannot be told apart from {', '.join(others)}: the intervals overlap."
    yield (
        "Predicted: the steps that were counted on these prompts, at the prices of the cost curves; measured: the "
        "clock, on the same prompts. Intervals are 95 % bootstrap over prompts."
    )


def _speedup(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["low"] is None:
        return digits(found["speedup"], "x")
    return f"{digits(found['speedup'], 'x')} [{digits(found['low'])}, {digits(found['high'])}]"


# --- charts ----------------------------------------------------------------------------------------------------------


def save_plots(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """`cost-curves.png` and `.svg`: a panel per model, a line per context. Raises UsageError without matplotlib."""
    from . import plots

    plots.require_matplotlib()
    panels = [_panel(role, model) for role, model in document["models"].items()]
    lines = (f"{curve.label}: {', '.join(map(digits, curve.y))} ms" for panel in panels for curve in panel.curves)
    plot = plots.Plot(
        name="cost-curves",
        title="Milliseconds of one forward by the number of new tokens",
        caption="",
        alt="; ".join(lines),
        draw=lambda width, heading: plots.curves(panels, width, heading),
    )
    cpu = document["hardware"]["cpu"]
    places = "; ".join(
        f"{role} {model['spec']}, {model['dtype']}, {model['runtime']} on {model['device']}"
        for role, model in document["models"].items()
    )
    return plots.save(plot, folder, "cost-curves", [places, f"{cpu['model']}, {len(cpu['cores'])} cores"])


def _panel(role: str, model: Mapping[str, Any]) -> Any:
    """A colour per context, a dash per number of rows beyond one."""
    from . import plots

    lines, contexts = [], model["curve"]["contexts"]
    for context, row, curve in measured_curves(model):
        label = f"{context} tokens of context" + (f", {row} rows" if row > 1 else "")
        y = [curve.ms(count, context, row) for count in curve.new_tokens]
        colour = 1 + contexts.index(context) + len(contexts) * (row > 1)
        lines.append(plots.Curve(label, colour, curve.new_tokens, y))
    return plots.Panel(f"{role} {model['spec']}", "new tokens", lines)


# --- words -----------------------------------------------------------------------------------------------------------


def _rows(hardware: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return hardware["memory"]["rates"]


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(names):
        table.add_column(name, no_wrap=at == 0, justify="left" if at == 0 or name in _WORDS else "right")
    return table


def _bytes(count: int | None) -> str:
    if not count:
        return "not known"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
