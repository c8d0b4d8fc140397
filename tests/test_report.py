"""The report page: what it says first, that it is whole and safe, that it stays small, and what it says when things
are missing."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import MS, arm, failed, manifest, role, run, sample
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import MeasurementError, RunFolderError, UsageError
from specbench.models import specs
from specbench.models.info import describe
from specbench.results import plots, report, report_figures, report_text
from specbench.results.records import RunFolder, Sample
from specbench.results.report_runs import Run, read, read_all
from specbench.results.report_words import headline, runner_up

HOSTILE = '"><script>alert(1)</script><img src=https://evil.example/x>$x_1$ & \u202e\x07'
VOID = {"meta", "link", "br", "img", "hr", "input"}


def folder(path: Path, samples: list[Sample], **facts: Any) -> Path:
    arms = facts.pop("arms", ())
    made = RunFolder(path)
    made.write_manifest(manifest(*arms, **facts))
    writer = made.writer()
    writer.append(samples)
    writer.close()
    return path


def exact(*arms: str, tasks: tuple[str, ...] = ("toy",), **counts: int) -> dict[str, Any]:
    one = {"exact": 12, "near_tie": 0, "different": 0, "compared": 12, "first": []} | counts
    return {task: dict.fromkeys(arms, one) for task in tasks}


def traced(name: str, overlap: bool = False, task: str = "toy") -> Sample:
    """A traced call: three steps of 30 ms after a prefill of 40 ms; with `overlap` the draft works while the target
    does."""
    made = sample(name, 0, steps=((3, 4, 2), (1, 4, 0), (5, 4, 4)), step_ms=30, kind="trace", task=task)
    target, draft = [[1 * MS, 39 * MS, 1, 10]], [[2 * MS if overlap else 40 * MS, 44 * MS, 1, 10]]
    for before in (40, 70, 100):
        start = before + (1 if overlap else 14)
        target.append([start * MS, (before + 28) * MS, 1, 5])
        draft += [[(before + 5 + 2 * n) * MS, (before + 6 + 2 * n) * MS, 1, 1] for n in range(4)]
    made.forwards = {"draft": draft, "target": target} if name != "autoregressive" else {"target": target}
    return made


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Run:
    samples = [*run(12, 2), traced("autoregressive"), traced("speculative")]
    path = tmp_path_factory.mktemp("report") / "ordinary"
    return read(folder(path, samples, lossless=exact("speculative", exact=24, compared=24)))


@pytest.fixture(scope="module")
def html(ordinary: Run) -> str:
    return report.page([ordinary])


def said(one: Run) -> str:
    return "".join(part.text for part in headline(one))


class Page(HTMLParser):
    """Checks that tags are balanced; gathers what the tests look at."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]

    @property
    def text(self) -> str:
        return " ".join(" ".join(text for _, text in self.texts).split())

    @property
    def links(self) -> dict[str, str]:
        found = {}
        for _, attrs in self.tags:
            if name := attrs.get("download"):
                head, _, data = (attrs["href"] or "").partition(";base64,")
                assert head.startswith("data:")
                assert name not in found
                found[name] = base64.b64decode(data).decode("utf-8")
        return found


# --- the first sentence ----------------------------------------------------------------------------------------------


def test_one_sentence_says_who_won_by_how_much_on_what_and_that_the_output_is_the_same(ordinary: Run) -> None:
    speedup = ordinary.summary.rows[1].decode_speedup
    assert speedup is not None
    assert said(ordinary) == (
        f"speculative was the fastest on toy: {speedup.value:.2f}x as fast as autoregressive in decoding "
        f"(95 % interval {speedup.low:.2f} to {speedup.high:.2f}, 12 prompts), with tiny (draft tiny-draft) in float32 "
        "on Test CPU (2 cores), and its output did not change (24 of 24 samples equal, token for token)."
    )


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"exact": 10, "near_tie": 2}, "and its output changed in near-ties only (2 of 12 samples)."),
        (
            {"exact": 9, "near_tie": 2, "different": 1},
            "but its output changed in 1 of 12 samples, and not by near-ties.",
        ),
        ({"exact": 0, "compared": 0}, "and whether its output changed was not compared."),
    ],
)
def test_the_first_sentence_does_not_call_a_changed_output_the_same(
    tmp_path: Path, counts: dict[str, int], words: str
) -> None:
    assert said(read(folder(tmp_path / "run", run(12), lossless=exact("speculative", **counts)))).endswith(words)


def test_no_difference_and_slower_are_said_as_such(tmp_path: Path) -> None:
    slow = read(folder(tmp_path / "slow", run(12, slow_draft=True)))
    assert said(slow).startswith("Nothing was faster than autoregressive on toy: the best, speculative, reached 0.5")
    same = [dataclasses.replace(one, arm="speculative", steps=one.steps) for one in run(12, seed=3, noise=0.1)
            if one.arm == "autoregressive"]  # fmt: skip
    both = [one for one in run(12, noise=0.1) if one.arm == "autoregressive"] + same
    assert said(read(folder(tmp_path / "same", both))).startswith("Nothing was measurably faster than autoregressive")


def test_too_few_prompts_are_not_called_a_win(tmp_path: Path) -> None:
    text = said(read(folder(tmp_path / "few", run(3))))
    assert text.startswith("speculative measured best on toy: ")
    assert "(too few prompts for an interval: 3)" in text
    assert "fastest" not in text


def test_a_lossy_arm_does_not_win_over_a_lossless_one(tmp_path: Path) -> None:
    arms = [arm("autoregressive"), arm("speculative"), arm("loose", lossless=False)]
    samples = [*run(12), *(dataclasses.replace(one, arm="loose", e2e_ns=one.e2e_ns and one.e2e_ns - 20 * MS)
                           for one in run(12) if one.arm == "speculative")]  # fmt: skip
    one = read(folder(tmp_path / "run", samples, arms=arms))
    assert said(one).startswith("speculative was the fastest")
    assert runner_up(one).startswith("Not lossless: loose; against it speculative reached 0.")
    assert "▲ LOSSY: loose" in Page(report.page([one])).text


def test_the_runner_up_is_compared_over_the_same_prompts(tmp_path: Path) -> None:
    arms = [arm("autoregressive"), arm("speculative"), arm("twin")]
    samples = [*run(12), *(dataclasses.replace(one, arm="twin") for one in run(12, seed=5) if one.arm == "speculative")]
    one = read(folder(tmp_path / "run", samples, arms=arms))
    assert re.match(r"\w+ and \w+, not told apart, were the fastest on toy: \w+ was 2\.\d\dx as fast as", said(one))
    text = runner_up(one)
    assert re.fullmatch(r"Next best is \w+; against it \w+ reached 1\.0\dx \[.*\]: not told apart from it\.", text)


def test_an_arm_whose_first_step_brings_several_tokens_is_ranked_end_to_end(tmp_path: Path) -> None:
    samples = run(12)
    for one in samples:
        if one.arm == "speculative":
            one.steps[0][1], one.steps[1][1], one.steps[1][3] = 3, 2, 2
    assert " end to end (95 % interval" in said(read(folder(tmp_path / "run", samples)))


def test_without_a_baseline_speeds_are_said_and_nothing_is_compared(tmp_path: Path) -> None:
    text = said(read(folder(tmp_path / "run", run(12), baseline=None)))
    assert text.startswith("No baseline was measured, so there is no speed-up: speculative decoded ")
    alone = read(folder(tmp_path / "alone", [one for one in run(12) if one.arm == "autoregressive"]))
    assert said(alone).startswith("Nothing to compare: autoregressive decoded ")
    for one in ("run", "alone"):
        assert "Speed-up by task" not in Page(report.page([read(tmp_path / one)])).text


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(html: str) -> None:
    page = Page(html)
    assert html.lower().startswith("<!doctype html>")
    assert "http" not in re.sub(r"http-equiv", "", html)
    assert "<script" not in html
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    for name in ("src", "href", "xlink:href"):
        assert all(value.startswith(("data:", "#")) for value in page.values(name))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.values("href") if value.startswith("#")} <= set(ids)
    assert ("html", {"lang": "en"}) in page.tags
    assert any("width=device-width" in value for value in page.values("content"))


@pytest.mark.parametrize(
    "heading",
    ["Speed-up by task", "Results", "Time to first token, toy", "Time per output token, toy",
     "Acceptance by position, toy", "Tokens per step over the output, toy", "Where the time of a step goes, toy",
     "Timeline of one prompt, toy: p0", "Predicted against measured", "One prompt, token by token",
     "Settings and environment"],
)  # fmt: skip
def test_everything_that_was_promised_is_there(html: str, heading: str) -> None:
    assert heading in Page(html).text


def test_charts_follow_the_theme_and_have_words_for_who_does_not_see_them(html: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) >= 16  # each for a desktop and a phone
    assert not any(re.search(r"#[0-9a-fA-F]{6}\b", chart) for chart in charts)
    assert "var(--arm1)" in html
    words = [attrs["aria-label"] for tag, attrs in Page(html).tags if attrs.get("role") == "img"]
    assert len(words) == len(charts) / 2
    assert all(text and re.search(r"\d", text) for text in words)
    assert any(text and "speculative decode 2." in text and "[" in text for text in words)


def _themes() -> dict[str, dict[str, str]]:
    css = (Path(report.__file__).parent / "report.css").read_text(encoding="utf-8")
    found = {}
    light, dark, paper = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)
    for name, block in (("light", light), ("dark", dark), ("print", paper)):
        found[name] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", block))
    return found


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_every_theme_has_every_colour_and_texts_stand_out(theme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for what has to be seen in a chart."""
    colours = _themes()[theme]
    assert set(plots.COLOURS) <= set(colours)
    grounds = {"ink": ("paper", "panel", "warn", "mark", "accepted", "target"), "soft": ("paper", "panel"),
               "link": ("paper",), "rejected": ("panel",)}  # fmt: skip
    pairs = {(text, ground): _contrast(colours[text], colours[ground]) for text, on in grounds.items() for ground in on}
    assert {pair: ratio for pair, ratio in pairs.items() if ratio < 4.5} == {}
    seen = [name for name in colours if re.fullmatch(r"arm\d|verify|accepted-line|target-line", name)]
    shown = {name: _contrast(colours[name], colours["paper"]) for name in seen}
    assert {name: ratio for name, ratio in shown.items() if ratio < 3} == {}


def test_every_table_can_be_downloaded_as_csv_and_json(ordinary: Run, html: str) -> None:
    links = Page(html).links
    assert {Path(name).stem for name in links if name.endswith(".csv")} == {Path(name).stem for name in links}
    for name, text in links.items():
        if name.endswith(".json"):
            data = json.loads(text, parse_constant=lambda number: pytest.fail(number))
            if name != "summary.json":
                lines = list(csv.reader(io.StringIO(links[name.replace(".json", ".csv")])))
                assert lines[0] == data["columns"]
                assert len(lines) == 1 + len(data["data"]) > 1
    assert json.loads(links["summary.json"]) == json.loads(json.dumps(ordinary.summary.to_dict()))
    rows = list(csv.DictReader(io.StringIO(links["speedup.csv"])))
    assert float(rows[0]["decode_value"]) == ordinary.summary.rows[1].decode_speedup.value  # type: ignore[union-attr]


def test_warnings_and_watermarks_stand_in_the_open(tmp_path: Path) -> None:
    """Not in something that has to be unfolded first."""
    one = read(folder(tmp_path / "run", run(3), settings={"ignore_eos": True}))
    page = Page(report.page([one]))
    for words in ("EOS ignored", "only 3 prompts", "every prompt was measured once"):
        assert any(words in text and "details" not in where for where, text in page.texts)


def test_of_many_warnings_the_gravest_are_in_the_open(tmp_path: Path) -> None:
    tasks = tuple(f"task {n}" for n in range(6))
    lossless = exact("speculative", tasks=tasks) | exact(
        "speculative", tasks=("task 5",), exact=2, different=1, compared=3
    )
    page = Page(report.page([read(folder(tmp_path / "run", run(3, tasks=tasks), lossless=lossless))]))
    (where,) = [where for where, text in page.texts if "1 of 3 outputs differ" in text]
    assert "details" not in where


def test_names_and_texts_of_others_are_text_and_nothing_else(tmp_path: Path) -> None:
    """Arm, task, prompt, model, error and note as an attacker would write them."""
    roles = {"target": role(model=HOSTILE), "draft": role(model=HOSTILE, device=HOSTILE)}
    arms = [arm("autoregressive", roles={"target": roles["target"]}), arm(HOSTILE, roles=roles, options={"x": HOSTILE})]
    samples = [
        dataclasses.replace(one, arm=HOSTILE if one.arm == "speculative" else one.arm, task=HOSTILE,
                            prompt_id=HOSTILE + one.prompt_id, category=HOSTILE)
        for one in [*run(12), traced("autoregressive"), traced("speculative"), failed(error=HOSTILE, prompt=99)]
    ]  # fmt: skip
    path = folder(tmp_path / "run", samples, arms=arms, notes=[HOSTILE], argv=[HOSTILE], settings={"target": HOSTILE})
    html = report.page([read(path)])
    page = Page(html)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert all(value.startswith(("data:", "#")) for name in ("src", "href") for value in page.values(name))
    assert "<script>alert(1)</script>" in page.text
    charts = " ".join(text for where, text in page.texts if "text" in where)
    assert "$x_1$" in charts  # not read as mathematics
    ids = page.values("id")
    assert len(ids) == len(set(ids))


def test_failed_samples_are_listed_and_an_arm_that_failed_everywhere_breaks_nothing(tmp_path: Path) -> None:
    samples = [sample("autoregressive", n) for n in range(12)] + [failed(prompt=n) for n in range(12)]
    page = Page(report.page([read(folder(tmp_path / "run", samples))]))
    assert "Failed samples" in page.text
    assert len(list(csv.reader(io.StringIO(page.links["failures.csv"])))) == 13
    assert "StrategyError: no more" in page.text


def test_what_is_not_defined_is_left_out_and_said(tmp_path: Path) -> None:
    """Answers of one token, nothing drafted, nothing traced: no zeros, no empty axes."""
    samples = [dataclasses.replace(one, steps=one.steps[:1], token_ids=[1], e2e_ns=one.ttft_ns) for one in run(12)]
    page = Page(report.page([read(folder(tmp_path / "run", samples))]))
    assert "Time to first token" in page.text
    assert "Time per output token" not in page.text
    for words in ("No arm of this run took a verification step", "Nothing was traced", "A prediction needs traces"):
        assert words in page.text
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b", page.text)


def test_several_runs_have_their_own_sections_and_their_differences_first(tmp_path: Path) -> None:
    folder(tmp_path / "a" / "run", run(12, 2))
    folder(tmp_path / "b" / "run", run(12), settings={"temperature": 0.7})
    runs = read_all([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [one.name for one in runs] == ["run", "run (2)"]
    page = Page(report.page(runs))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    rows = list(csv.reader(io.StringIO(page.links["differences.csv"])))
    assert ["temperature", "0.0", "0.7"] in rows
    assert page.text.index("What differs") < page.text.index("Speed-up by run") < page.text.index("Latency")


def test_a_sweep_stands_for_its_cells(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for name in ("cell-1", "cell-2"):
        folder(sweep / name, run(5))
    (sweep / "sweep.json").write_text("{}")
    assert [one.name for one in read_all([sweep])] == ["cell-1", "cell-2"]


# --- size ------------------------------------------------------------------------------------------------------------


def test_the_size_does_not_grow_with_the_records(tmp_path: Path) -> None:
    """100,000 records of five arms and five tasks make 1.4 MB; here the step from 240 to 4,800 must not be felt."""
    small, large = (read(folder(tmp_path / str(n), run(n, 2))) for n in (60, 1200))
    sizes = [len(report.page([one])) for one in (small, large)]
    assert sizes[1] < 1.15 * sizes[0]
    assert sizes[1] < 600_000


def test_many_tasks_and_arms_stay_below_5_mb(tmp_path: Path) -> None:
    """Charts are for the first ones; the table and its files have all."""
    names = ("autoregressive", *(f"arm-{n}" for n in range(9)))
    arms = [arm(name) for name in names]
    tasks = tuple(f"task {n}" for n in range(15))
    samples = []
    for task in tasks:
        for prompt in range(5):
            for name in names:
                steps = ((1, 4, 0), (3, 4, 2)) * 60 if name != "autoregressive" else ((1, 0, 0),) * 240
                samples.append(sample(name, prompt, task=task, steps=steps))
    html = report.page([read(folder(tmp_path / "run", samples, arms=arms))])
    assert len(html) < 5_000_000
    text = Page(html).text
    assert "Charts are drawn for the first 3 tasks; 12 more stand in the table" in text
    assert "task 14, 5 prompts" in text


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_tokens_per_step_are_pooled_by_the_place_where_a_step_began() -> None:
    """Two steps of 3 and 1 tokens begin at positions 1 and 4: with parts of three positions, one in each."""
    samples = [sample(prompt=n, steps=((3, 4, 2), (1, 4, 0), (1, 4, 0))) for n in range(6)]
    places = report_figures.tokens_by_place(samples, 3)
    assert [(p.first, p.last, p.steps, p.tokens_per_step) for p in places] == [(1, 3, 6, 3.0), (4, 6, 12, 1.0)]
    assert places[0].low == places[0].high == 3.0  # all prompts agree


def test_a_place_that_few_prompts_reach_is_left_out() -> None:
    samples = [sample(prompt=n, steps=((1, 0, 0),) * (20 if n < 4 else 4)) for n in range(8)]
    assert [place.first for place in report_figures.tokens_by_place(samples, 5)] == [1]
    assert len(report_figures.tokens_by_place(samples[:3], 5)) == 5  # with few prompts, where all of them are


def test_the_band_holds_the_truth_as_often_as_it_says() -> None:
    """20 prompts, 400 draws: 95 % intervals hold the true 2.5 in 92 to 98 %; fails by chance once in 1,000."""
    random, held = np.random.default_rng(4), 0
    for _ in range(400):
        steps = [tuple((int(kept), 4, 0) for kept in random.integers(1, 5, size=6)) for _ in range(20)]
        samples = [sample(prompt=n, steps=one) for n, one in enumerate(steps)]
        (place,) = report_figures.tokens_by_place(samples, 1000)
        assert place.low is not None
        assert place.high is not None
        held += place.low <= 2.5 <= place.high
    assert 0.92 <= held / 400 <= 0.98


def test_both_devices_stand_on_one_time_axis_and_overlap_is_told(tmp_path: Path) -> None:
    roles = {"target": role(device="cuda:0"), "draft": role(device="cpu:0-3")}
    arms = [arm("autoregressive"), arm("speculative", roles=roles)]
    samples = [*run(12), traced("autoregressive"), traced("speculative", overlap=True)]
    one = read(folder(tmp_path / "run", samples, arms=arms))
    figure = report_figures.timelines(one, "toy")[0]
    for words in ("target cuda:0", "draft cpu:0-3", "idle", "at once"):
        assert words in figure.wide
    assert figure.grid is not None
    kinds = {(row[0], row[1], row[2]) for row in figure.grid.rows}
    assert ("speculative", "draft", "draft-prefill") in kinds
    assert ("speculative", "target", "verify-prefill") in kinds
    assert ("autoregressive", "target", "verify") in kinds
    split = report_figures.step_split(one, "toy")
    assert split is not None
    assert split.grid is not None
    assert split.grid.rows[1][5] > 0  # overlap per step
    alone = read(folder(tmp_path / "alone", [*run(12), traced("autoregressive"), traced("speculative")]))
    assert "at once" not in report_figures.timelines(alone, "toy")[0].wide


def test_a_distribution_keeps_its_extremes_and_few_dots(tmp_path: Path) -> None:
    values = np.concatenate([np.linspace(5, 6, 5000), [0.5, 300.0]])
    dots = plots._by_rank(values)
    assert len(dots) == plots.MOST_DOTS
    assert (dots[0], dots[-1]) == (0.5, 300.0)


def test_charts_are_written_as_png_and_svg_with_what_was_measured_over_them(tmp_path: Path) -> None:
    samples = [dataclasses.replace(one, task="../../a task") for one in run(12)]
    one = read(folder(tmp_path / "run", samples, settings={"ignore_eos": True}))
    _, paths = report.write([one], tmp_path / "page.html", tmp_path / "charts")
    assert {path.parent for path in paths} == {tmp_path / "charts"}
    assert {path.suffix for path in paths} == {".png", ".svg"}
    for path in paths:
        if path.suffix == ".svg":
            xml.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "charts" / "ttft-a-task.png").is_file()


# --- the text of a prompt --------------------------------------------------------------------------------------------


def kinds(answer: report_text.Answer) -> list[tuple[str, str]]:
    return [(token.kind, token.text) for _, tokens in answer.steps for token in tokens]


def test_a_rejection_stands_where_it_happened() -> None:
    one = sample(steps=((3, 4, 2), (1, 4, 0), (3, 2, 2), (1, 0, 0)))
    assert kinds(report_text.answer(one, None)) == [
        ("plain", "0"), ("accepted", "1"), ("accepted", "2"), ("rejected", "✗2"), ("target", "3"),
        ("rejected", "✗4"), ("target", "4"), ("accepted", "5"), ("accepted", "6"), ("target", "7"), ("plain", "8"),
    ]  # fmt: skip


def test_rejected_tokens_are_shown_where_a_traced_pass_knows_them() -> None:
    """The ids come from the traced pass that took the same steps, as text where the tokenizer is at hand."""
    one = sample(steps=((3, 4, 2), (1, 4, 0)))
    traced = sample(steps=((3, 4, 2), (1, 4, 0)), kind="trace", rejected=[[], [66, 67], [68, 69, 70, 71]])
    other = sample(steps=((3, 4, 2), (2, 4, 1)), kind="trace", rejected=[[], [1, 2], [3]])
    assert report_text._rejected([other, traced], one) == traced.rejected
    assert report_text._rejected([other], one) == ()
    assert ("rejected", "✗66 67") in kinds(report_text.answer(one, None, rejected=traced.rejected or ()))
    codec = describe(specs.parse("tiny"), "target").codec
    lost = codec.encode("ab")
    shown = kinds(report_text.answer(one, codec, rejected=[[], lost, [*lost, *lost]]))
    assert [text for kind, text in shown if kind == "rejected"] == ["✗ab", "✗abab"]


def test_drafts_behind_the_end_of_an_answer_were_not_rejected() -> None:
    assert kinds(report_text.answer(sample(steps=((2, 4, 2),)), None))[1:] == [("accepted", "1"), ("accepted", "2")]


def test_wasted_drafts_and_unreported_ones_are_shown_as_such() -> None:
    one = sample(steps=((2, 2, 1),))
    one.steps[1][4] = 6
    assert kinds(report_text.answer(one, None))[-1] == ("wasted", "~6")
    unseen = report_text.answer(sample(steps=((3, 0, 0), (1, 0, 0))), None, reports_drafts=False)
    assert [kind for kind, _ in kinds(unseen)] == ["plain", "unknown", "unknown", "unknown", "plain"]


def test_a_letter_of_several_ids_is_written_once_and_nothing_gets_lost() -> None:
    codec = describe(specs.parse("tiny"), "target").codec
    text = "naïve 日本 🙂 end"
    ids = codec.encode(text)
    texts = report_text._texts(ids, codec)
    assert "".join(texts) == text
    assert len(texts) == len(ids)
    broken = [*ids, 0xF0, 0x9F]  # ends in the middle of a letter
    assert "".join(report_text._texts(broken, codec)) == codec.decode(broken)


def test_characters_that_would_turn_the_page_around_are_replaced() -> None:
    assert report_text.visible("a\nb\t\x00\u202ec\ud800") == "a↵\nb\t\ufffd\ufffdc\ufffd"


def test_text_is_shown_where_the_tokenizer_is_here_and_ids_where_it_is_not(tmp_path: Path) -> None:
    samples = [dataclasses.replace(one, token_ids=[65 + n % 26 for n in range(len(one.token_ids))]) for one in run(12)]
    page = Page(report.page([read(folder(tmp_path / "a", samples, plan={"target": "tiny"}))]))
    assert "ABCD" in "".join(text for where, text in page.texts if "bdi" in where)
    for target, why in (("org/nowhere", "not in this machine's hub cache"), ("/no/folder", "no model folder"),
                        ("", "names no target")):  # fmt: skip
        path = folder(tmp_path / why.replace(" ", ""), samples, plan={"target": target})
        text = Page(report.page([read(path)])).text
        assert "Ids are shown instead of text: " in text
        assert why in text
    text = Page(report.page([read(tmp_path / "a")], text=False)).text
    assert "Ids are shown instead of text: asked not to." in text


def test_another_tokenizer_of_that_name_is_not_used(tmp_path: Path) -> None:
    models = {"target": {"tokenizer_fingerprint": "0" * 16}}
    codec, why = report_text.find_codec(manifest(plan={"target": "tiny"}, models=models))
    assert codec is None
    assert why == "the tokenizer of tiny on this machine is not the one of the run"


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*words: str):
    return CliRunner().invoke(app, ["report", *words])


def test_the_command_writes_the_page_and_says_where_on_stderr(tmp_path: Path) -> None:
    folder(tmp_path / "run", run(5))
    done = invoke(str(tmp_path / "run"), "-o", str(tmp_path / "page.html"), "--plots", str(tmp_path / "charts"))
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert str(tmp_path / "page.html") in done.stderr
    assert "MB" in done.stderr
    assert (tmp_path / "page.html").is_file()
    assert (tmp_path / "charts" / "speedup.svg").is_file()


def _spoilt(path: Path, what: str) -> Path:
    made = folder(path, run(5))
    text = (made / "manifest.json").read_text()
    if what == "foreign":
        (made / "manifest.json").write_text('{"schema": 1, "arms": [{}]}')
    elif what == "truncated manifest":
        (made / "manifest.json").write_text(text[:100])
    elif what == "newer":
        (made / "manifest.json").write_text(text.replace('"schema": 1', '"schema": 99'))
    elif what == "no samples":
        (made / "samples.jsonl").unlink()
    elif what == "broken line":
        lines = (made / "samples.jsonl").read_text().splitlines(keepends=True)
        (made / "samples.jsonl").write_text("".join([lines[0], "{}\n", *lines[1:]]))
    elif what == "other arms":
        (made / "manifest.json").write_text(text.replace('"name": "speculative"', '"name": "other"'))
    return made


@pytest.mark.parametrize(
    ("what", "words", "kind"),
    [
        ("foreign", "its manifest is not as specbench writes them", RunFolderError),
        ("truncated manifest", "not valid JSON", RunFolderError),
        ("newer", "schema 99 is newer", RunFolderError),
        ("no samples", "nothing measured: no samples", MeasurementError),
        ("broken line", "line 2: not a sample", RunFolderError),
        ("other arms", 'the samples name the arm "speculative"', RunFolderError),
    ],
)
def test_a_spoilt_folder_is_one_clear_line(tmp_path: Path, what: str, words: str, kind: type[Exception]) -> None:
    path = _spoilt(tmp_path / "run", what)
    with pytest.raises(kind, match=re.escape(words)):
        read(path)
    done = invoke(str(path), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == kind.exit_code  # type: ignore[attr-defined]
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert str(path) in lines[0]
    assert not (tmp_path / "page.html").exists()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", run(5))
    with (path / "samples.jsonl").open("a") as file:
        file.write('{"arm": "specul')
    assert invoke(str(path), "-o", str(tmp_path / "page.html")).exit_code == 0


@pytest.mark.parametrize("words", [["/no/such/run"], []])
def test_no_run_is_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    assert invoke(*words, "-o", str(tmp_path / "page.html")).exit_code == 2


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    folder(tmp_path / "run", run(5))
    done = invoke(str(tmp_path / "run"), "-o", str(tmp_path / "nowhere" / "page.html"))
    assert done.exit_code == 2
    assert re.fullmatch(r"error: .*nowhere.*: cannot be written: No such file or directory", done.stderr.strip())


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "run", run(5))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = invoke(str(tmp_path / "run"), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 2
    assert 'a report needs matplotlib, which is not installed; run: pip install "specbench-llm[report]"' in done.stderr
    with pytest.raises(UsageError):
        plots.require_matplotlib()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['specbench', 'report', '--help']\n"
        "from specbench.cli import app\n"
        "try: app()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert not {'matplotlib', 'jinja2', 'numpy', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--plots" in done.stdout
