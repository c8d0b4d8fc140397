"""`specbench report`: one page of HTML for people who would rather look.

Everything stands in the one file: style, charts as inline SVG, tables, and each table once more as CSV and JSON behind
a `data:` link. It has no script, and a content security policy that lets a browser fetch nothing, so it can be mailed
and opened anywhere. Charts hold aggregates and at most a few hundred dots, so its size does not grow with the records.

Numbers come from `results.summary`, `results.metrics` and `results.statistics`; the modules `report_*` choose what is
said and drawn, `results.plots` draws, `report_template.html` and `report.css` lay out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from .. import __version__
from ..errors import UsageError
from . import plots, statistics, tables
from .records import dumps, write_atomically
from .report_figures import (
    MOST_ARMS,
    Figure,
    acceptance,
    latency,
    over_output,
    overview,
    predicted,
    speedups,
    step_split,
    timelines,
)  # fmt: skip
from .report_runs import (
    Grid,
    Link,
    Run,
    differences,
    environment_grid,
    failures_grid,
    settings_grid,
    slug,
)  # fmt: skip
from .report_text import Prompt, answers, find_codec
from .report_words import Fragment, headline, runner_up

MOST_CELLS = 32  # arms x tasks of all runs that get charts of their own; tables hold all
GRAVE = ("broken", "different-tokens", "state", "failed", "not-compared", "interrupted", "few-prompts", "first-step")
MOST_RUNS = 8  # that get more than their sentence and their table


@dataclass(frozen=True)
class Block:
    """The charts of one task; a page folds all but the first of a section."""

    title: str
    figures: Sequence[Figure]


@dataclass
class Section:
    """A run as the template sees it."""

    run: Run
    headline: list[Fragment]
    runner_up: str
    table: tables.Table
    table_links: list[Link]
    speedups: Figure | None
    predicted: Figure | None
    latency: list[Block]
    drafting: list[Block]
    time: list[Block]
    texts: list[Prompt]
    no_text: str
    tasks_shown: int
    tasks_left_out: int
    settings: Grid
    environment: Grid
    failures: Grid | None

    @property
    def cautions(self) -> list[str]:
        """The gravest first: a page shows five of them unfolded."""
        found = self.run.summary.cautions
        rank = {code: place for place, code in enumerate(GRAVE)}
        return [one.text for one in sorted(found, key=lambda one: rank.get(one.code, len(GRAVE)))]

    @property
    def figures(self) -> list[Figure]:
        blocks = [*self.latency, *self.drafting, *self.time]
        found = [self.speedups, *(figure for block in blocks for figure in block.figures), self.predicted]
        return [figure for figure in found if figure is not None]


def charted(run: Run, cells: int = MOST_CELLS) -> list[str]:
    """The tasks that get charts: as many as make so many arms, at least one; none for no cells."""
    return run.tasks[: max(1, cells // min(len(run.arms), MOST_ARMS))] if cells else []


def section(run: Run, text: bool = True, cells: int = MOST_CELLS) -> Section:
    """Everything that the page says about one run, with charts for so many arms x tasks."""
    shown = charted(run, cells)
    codec, why = find_codec(run.manifest) if text and shown else (None, "asked not to")
    drafting = [(task, [acceptance(run, task), over_output(run, task)]) for task in shown]
    time = [(task, [step_split(run, task), *timelines(run, task)]) for task in shown]
    name = f"{run.prefix}summary"
    return Section(
        run=run,
        headline=headline(run),
        runner_up=runner_up(run),
        table=tables.build(run.summary),
        table_links=[
            Link("CSV", f"{name}.csv", "text/csv", tables.to_csv(run.summary)),
            Link("JSON", f"{name}.json", "application/json", dumps(run.summary.to_dict())),
        ],
        speedups=speedups(run, shown),
        predicted=predicted(run, shown),
        latency=_blocks((task, latency(run, task)) for task in shown),
        drafting=_blocks(drafting),
        time=_blocks(time),
        texts=[block for task in shown if (block := answers(run, task, codec)) is not None],
        no_text=why,
        tasks_shown=len(shown),
        tasks_left_out=len(run.tasks) - len(shown),
        settings=settings_grid(run),
        environment=environment_grid(run),
        failures=failures_grid(run),
    )


def _blocks(found: Iterable[tuple[str, Sequence[Figure | None]]]) -> list[Block]:
    blocks = [Block(task, [figure for figure in figures if figure is not None]) for task, figures in found]
    return [block for block in blocks if block.figures]


def page(runs: Sequence[Run], text: bool = True) -> str:
    """The whole report as HTML.

    Args:
        text: decode the answers with the target's tokenizer where it lies on this machine; else ids are shown.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    sections = _sections(runs, text)
    return _render(runs, sections)


def _sections(runs: Sequence[Run], text: bool) -> list[Section]:
    cells = max(1, MOST_CELLS // len(runs))
    return [section(run, text, cells if number < MOST_RUNS else 0) for number, run in enumerate(runs)]


def _render(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    plots.require_matplotlib()
    try:
        import jinja2
    except ImportError:
        raise UsageError(f"a report needs jinja2, which is not installed; run: {plots.EXTRA}") from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    folder = resources.files("specbench.results")
    template = environment.from_string(folder.joinpath("report_template.html").read_text(encoding="utf-8"))
    several = len(runs) > 1
    html = template.render(
        version=__version__,
        title=", ".join(run.name for run in runs),
        sections=sections,
        overview=overview(runs) if several else None,
        differences=differences(runs) if several else None,
        few=statistics.LEAST_PROMPTS,
        level_columns=tables.LEVEL_COLUMNS,
        levels_meaning=tables.LEVELS_MEANING,
    )
    html, rules = plots.share_styles(html.lstrip())
    css = folder.joinpath("report.css").read_text(encoding="utf-8")
    return html.replace("<style></style>", f"<style>\n{css}{rules}\n</style>", 1)


def write(
    runs: Sequence[Run], out: Path, plots_folder: Path | None = None, text: bool = True
) -> tuple[Path, list[Path]]:
    """Writes the page, replaced in one step, and on request every chart as PNG and SVG; returns their paths.

    Raises:
        UsageError: a package of the extra is missing, or a file cannot be written.
    """
    sections = _sections(runs, text)
    html = _render(runs, sections)
    try:
        write_atomically(out, html)
        written = write_plots(sections, plots_folder) if plots_folder else []
    except OSError as error:
        raise UsageError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return out, written


def write_plots(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Every chart as a PNG and an SVG file, with the run's title and watermarks over it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    together = overview([one.run for one in sections]) if len(sections) > 1 else None
    if together is not None:
        written += plots.save(together.plot, folder, together.plot.name)
    for one in sections:
        lead = f"{slug(one.run.name)}-" if len(sections) > 1 else ""
        for figure in one.figures:
            heading = [*one.run.summary.title[:1], *one.run.summary.watermarks]
            written += plots.save(figure.plot, folder, f"{lead}{figure.plot.name}", heading)
    return written
