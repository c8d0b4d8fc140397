"""How a grid on several workers stands, as it is shown on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..results.listener import Grid


def left(seconds: float, done: float, left: float) -> str:
    """How long what is left will take, if it goes on as it went."""
    if not done:
        return ""
    minutes, rest = divmod(round(seconds / done * left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


def view(grid: Grid, seconds: float, height: int) -> RenderableType:
    """A line for the whole grid and one for each worker, as many as fit."""
    done = grid.ended + sum(one.samples / one.total for one in grid.working if one.total)
    line = Table.grid(padding=(0, 2, 0, 0))
    failed = f" ({grid.failed} failed)" if grid.failed else ""
    bar = ProgressBar(total=grid.cells, completed=done, width=20)
    line.add_row("cells", bar, f"{grid.ended}/{grid.cells}{failed}", left(seconds, done, grid.cells - done))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("cell", no_wrap=True, overflow="ellipsis")
    table.add_column("samples", no_wrap=True, justify="right")
    shown = grid.working[: max(1, height)]
    for one in shown:
        table.add_row(one.worker, one.cell, f"{one.samples}/{one.total}" if one.total else "loading")
    if len(shown) < len(grid.working):
        table.add_row(f"and {len(grid.working) - len(shown)} more")
    return Group(line, table)
