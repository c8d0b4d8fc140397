"""What a reader sees: on terminals wide and narrow, in pipes of any encoding, and in the exported files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic import arm, failed, manifest, role, run, sample

from specbench.errors import UsageError
from specbench.results import tables
from specbench.results.statistics import Speedup
from specbench.results.summary import Summary, summarise

WIDTHS = (200, 120, 80, 60, 40, 30)


def _summary(**facts: Any) -> Summary:
    counts = {"exact": 20, "near_tie": 3, "different": 1, "compared": 24, "first": []}
    report = {task: {"speculative": counts} for task in ("toy", "other")}
    return summarise(manifest(**{"lossless": report, **facts}), run(12, 2, tasks=("toy", "other")))


def _shown(summary: Summary, width: int, folder: Path | None = None, **console: Any) -> str:
    stream = io.StringIO()
    tables.print_summary(summary, Console(file=stream, width=width, **console), folder)
    return stream.getvalue()


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (1.5, "1.50"), (45.23, "45.2"), (1234.5, "1230"), (0.07123, "0.0712"), (9.996, "10.0"),
        (0.9996, "1.00"), (0.997, "0.997"), (99.96, "100"), (123456.0, "123000"), (-2.345, "-2.35"), (1e-4, "0.000100"),
    ],
)  # fmt: skip
def test_three_significant_digits_and_never_an_exponent(value: float | None, text: str) -> None:
    assert tables.digits(value) == text


def test_a_speedup_carries_its_interval() -> None:
    speedup = Speedup(1.4849, 1.42, 1.5512, 1.5, 12, 24, False, 1, 1, 1, 1)
    assert tables.interval(speedup) == "1.48x [1.42, 1.55]"
    assert tables.interval(dataclasses.replace(speedup, low=None, high=None)) == "1.48x"
    assert tables.interval(None) == "-"
    # M6: not rounded up to 1.00x
    assert tables.interval(dataclasses.replace(speedup, value=0.996, low=0.99, high=0.999)) == "0.996x [0.990, 0.999]"


@pytest.mark.parametrize(
    ("counts", "text"),
    [((32, 0, 0), "32/32 exact"), ((29, 3, 0), "29/32, 3 near-ties"), ((31, 1, 0), "31/32, 1 near-tie"),
     ((28, 3, 1), "28/32, 3 near-ties,\n1 different"), ((30, 0, 2), "30/32, 2 different")],
)  # fmt: skip
def test_losslessness_in_words(counts: tuple[int, int, int], text: str) -> None:
    report = dict(zip(("exact", "near_tie", "different"), counts, strict=True)) | {"compared": 32, "first": []}
    row = summarise(manifest(lossless={"toy": {"speculative": report}}), run(12)).rows[1]
    assert tables.exactness(row) == text


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    """C13: every number of the exported table that a narrow terminal shows is shown whole."""
    summary = _summary()
    table = tables.build(summary)
    text = _shown(summary, width, Path("runs/x"))
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    whole = set(_numbers(" ".join(cell for group in table.groups for cells in group.cells for cell in cells)))
    whole |= set(_numbers(" ".join([*table.title, *table.cautions, *table.causes])))
    whole |= set(_numbers(" ".join(group.title for group in table.groups)))
    whole |= set(_numbers(" ".join(column.meaning + column.name for column in table.columns)))
    assert set(_numbers(text)) <= whole


@pytest.mark.parametrize("width", WIDTHS)
def test_what_matters_most_is_there_at_every_width(width: int) -> None:
    """C13: arm, speed-up with interval, speed and losslessness never give way."""
    summary = _summary()
    text = " ".join(_shown(summary, width).split())
    for row in summary.rows:
        assert row.arm in text
        assert tables.digits(row.decode_tokens_per_s) in text
        if row.decode_speedup is not None:
            assert tables.interval(row.decode_speedup) in text
    assert "20/24, 3 near-ties," in text


def test_columns_that_gave_way_are_named_with_the_file_that_has_them() -> None:
    """C13."""
    text = " ".join(_shown(_summary(), 80, Path("runs/x")).split())
    left_out = text.partition("not shown for lack of room (see runs/x/summary.md): ")[2]
    assert "threads" in left_out
    assert "peak memory GB" in left_out
    assert "not shown" not in _shown(_summary(), 400)


def test_rows_are_stacked_where_even_the_important_columns_do_not_fit() -> None:
    """C13."""
    lines = _shown(_summary(), 40).splitlines()
    assert any(re.fullmatch(r"  decode tok/s +\d+(\.\d+)?", line.rstrip()) for line in lines)


def test_width_comes_from_the_data() -> None:
    """C14: a long name moves the columns, all of them, and is not cut."""
    long = "speculative-with-a-name-that-nobody-expected"
    arms = [arm("autoregressive"), arm(long)]
    samples = [dataclasses.replace(one, arm=long) if one.arm == "speculative" else one for one in run(12, 2)]
    lines = _shown(summarise(manifest(*arms), samples), 120).splitlines()
    head = next(line for line in lines if line.startswith("arm "))
    rows = [line for line in lines if line.startswith(("autoregressive ", long))][:2]
    where = head.index("speed-up")
    assert where == len(long) + tables.GAP
    assert rows[0][where:].startswith("1.00x")
    assert re.match(r"2\.\d\dx \[", rows[1][where:])


def test_wide_characters_are_measured_in_cells() -> None:
    """C14."""
    name = "推测解码"
    samples = [dataclasses.replace(one, arm=name) if one.arm == "speculative" else one for one in run(12, 2)]
    lines = _shown(summarise(manifest(arm("autoregressive"), arm(name)), samples), 120).splitlines()
    row = next(line for line in lines if line.startswith(name))
    other = next(line for line in lines if line.startswith("autoregressive"))
    assert cell_len(row[: row.index("x [")]) == other.index("1.00x") + 4


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8"])
@pytest.mark.parametrize("width", [120, 40])
def test_any_stream_encoding_takes_the_table(encoding: str, width: int) -> None:
    """C12: redirected output with a legacy code page, with names that it cannot spell."""
    roles = {"target": role(model="modèle-日本語"), "draft": role(model="draft ± 1 → 2")}
    arms = [arm("autoregressive", roles={"target": roles["target"]}), arm("speculative", roles=roles)]
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    summary = summarise(manifest(*arms, notes=["naïve – “quoted”"]), run(12, slow_draft=True))
    tables.print_summary(summary, Console(file=stream, width=width), Path("läufe/x"))
    tables.print_cautions(summary, Console(file=stream, width=width))
    stream.write(tables.to_json(summary))
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "speculative" in text
    assert ("──" in text) == (encoding == "utf-8")
    assert max(cell_len(line) for line in text.partition("{")[0].splitlines()) <= width
    if encoding == "ascii":
        assert "draft +- 1 -> 2" in " ".join(text.split())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_whole_process_with_a_legacy_encoding_exits_0(encoding: str) -> None:
    """C12: with PYTHONIOENCODING set, as in a pipe on an old system."""
    script = (
        "from rich.console import Console; from synthetic import manifest, run\n"
        "from specbench.results import summary, tables\n"
        "made = summary.summarise(manifest(notes=['größer ± 1 日本']), run(12))\n"
        "tables.print_summary(made, Console()); print(tables.to_json(made))"
    )
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, sys.path)])
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "speculative" in done.stdout.decode(encoding)


def test_no_colour_without_a_terminal_and_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b[" not in _shown(_summary(), 120)
    assert "\x1b[32m" in _shown(_summary(), 120, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in _shown(_summary(), 120, force_terminal=True, color_system="standard")


def test_slower_is_shown_plainly_with_its_cause() -> None:
    """M1, M6."""
    text = " ".join(_shown(summarise(manifest(), run(12, slow_draft=True)), 120).split())
    assert re.search(r"0\.5\d\dx \[0\.5\d\d, 0\.5\d\d\]", text)
    assert re.search(r"speculative is slower on toy \(0\.5\d\dx\): 1\.00 tokens per step; acceptance 0\.00", text)


def test_draft_and_verify_time_per_step_stand_in_the_table() -> None:
    """M1."""
    traced = sample(kind="trace", steps=((1, 4, 0),), step_ms=35)
    start = traced.steps[0][0]
    verified = [start + 15_000_000, start + 33_000_000, 1, 5]
    forwards = {"draft": [[start, start + 15_000_000, 1, 1]], "target": [verified]}
    summary = summarise(manifest(), [*run(12), dataclasses.replace(traced, forwards=forwards)])
    assert "15.0 + 18.0 + 2.00" in _shown(summary, 200)


def test_wasted_drafts_and_steps_without_a_draft_are_shown() -> None:
    """Asynchronous drafting is not free, and a lookup that finds nothing is not hidden by its acceptance."""
    samples = [sample("autoregressive", n, tokens=9) for n in range(12)]
    for n in range(12):
        samples.append(sample(prompt=n, steps=((4, 4, 3), (1, 0, 0), (1, 0, 0), (2, 4, 1))))
        samples[-1].steps[1][4] = 6
    table = tables.build(summarise(manifest(), samples))
    cells = dict(zip((column.name for column in table.columns), table.groups[0].cells[1], strict=True))
    assert cells["wasted draft tokens/step"] == "1.50"
    assert cells["steps without a draft"] == "0.500"


def test_failed_samples_are_counted_in_the_table() -> None:
    """M9."""
    samples = run(12)
    samples[-1] = failed(prompt=11)
    for width in WIDTHS:
        text = " ".join(_shown(summarise(manifest(), samples), width).split())
        assert "11 ok, 1 failed" in text
        assert "warning: toy, speculative: 1 of 12 samples failed" in text


def test_nothing_but_dashes_for_an_arm_that_failed_everywhere() -> None:
    """M8: no zeros."""
    samples = [sample("autoregressive", n) for n in range(12)] + [failed(prompt=n) for n in range(12)]
    lines = _shown(summarise(manifest(), samples), 200).splitlines()
    cells = next(line for line in lines if line.startswith("speculative")).replace("0 ok, 12 failed", "").split()
    assert set(cells[1:]) <= {"-", "not", "compared", "cpu", "2"}


def test_n_and_warnings_stand_with_the_numbers() -> None:
    """C15."""
    text = _shown(summarise(manifest(), run(3)), 80)
    assert "toy, 3 prompts, 3 samples per arm" in text
    assert "warning: toy: only 3 prompts" in text
    stream = io.StringIO()
    tables.print_cautions(summarise(manifest(), run(3)), Console(file=stream, width=80))
    assert stream.getvalue().startswith("warning: toy: only 3 prompts")


def test_watermarks_are_in_every_output() -> None:
    arms = [arm("autoregressive"), arm("speculative", lossless=False)]
    summary = summarise(manifest(*arms, settings={"ignore_eos": True}), run(12))
    for text in (_shown(summary, 80), tables.to_markdown(summary), tables.to_csv(summary), tables.to_latex(summary)):
        assert "EOS ignored" in text
        assert "LOSSY: speculative" in text
    assert len(json.loads(tables.to_json(summary))["watermarks"]) == 2
    assert "speculative (lossy)" in _shown(summary, 80)


def test_columns_appear_where_arms_differ_in_them() -> None:
    names = [column.name for column in tables.build(_summary()).columns]
    assert not {"dtype", "runtime", "decode speed-up per device", "samples", "throughput tok/s"} & set(names)
    roles = {"target": role(device="cuda:0", dtype="bfloat16"), "draft": role(device="cpu", dtype="int4")}
    arms = [arm("autoregressive"), arm("speculative", roles=roles)]
    summary = summarise(manifest(*arms, settings={"batch": 4}), run(12))
    names = [column.name for column in tables.build(summary).columns]
    assert {"dtype", "decode speed-up per device", "throughput tok/s"} <= set(names)
    assert "bfloat16/int4" in tables.to_markdown(summary)


def test_a_format_that_does_not_exist_is_a_usage_error_with_the_near_name() -> None:
    with pytest.raises(UsageError, match='unknown format "latx"; did you mean "latex"'):
        tables.render(_summary(), "latx")
    assert tables.render(_summary(), "md").startswith("**tiny")


def test_arms_are_compared_with_another_one_where_there_is_no_baseline() -> None:
    report = {"toy": {"speculative": {"exact": 12, "near_tie": 0, "different": 0, "compared": 12, "first": []}}}
    facts = {"baseline": None, "lossless": report, "lossless_reference": "lookup"}
    names = ("lookup", "speculative")
    text = _shown(summarise(manifest(*map(arm, names), **facts), run(12, arms=names)), 120)
    assert "12/12 exact" in text
    assert "reference" in text
    assert "speed-up" not in text


# --- files -----------------------------------------------------------------------------------------------------------


def test_exports_are_written_whole_and_small(tmp_path: Path) -> None:
    """C4: no sample and no text in them."""
    paths = tables.write_exports(_summary(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(tables.EXPORTS)
    assert all(path.stat().st_size < 50_000 for path in paths)


def test_json_holds_raw_values_and_null() -> None:
    summary = _summary()
    data = json.loads(tables.to_json(summary), parse_constant=lambda name: pytest.fail(name))
    first, second = data["rows"][:2]
    assert first["decode_speedup"] is None
    assert second["decode_speedup"]["value"] == summary.rows[1].decode_speedup.value  # type: ignore[union-attr]
    assert second["decode_speedup"]["verdict"] == "faster"
    assert isinstance(second["ttft_p50_ns"], float)
    assert data["schema"] == 1


def test_csv_has_one_flat_line_per_row_that_means_something_alone(tmp_path: Path) -> None:
    summary = _summary()
    tables.write_exports(summary, tmp_path)
    with (tmp_path / "summary.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(summary.rows)
    assert lines[0]["decode_speedup"] == ""
    assert float(lines[1]["decode_speedup"]) == summary.rows[1].decode_speedup.value  # type: ignore[union-attr]
    assert lines[1]["lossless_near_tie"] == "3"
    assert lines[1]["target"] == "tiny"
    assert "Test CPU" in lines[1]["title"]
    frame = pandas.read_csv(tmp_path / "summary.csv")
    assert frame["decode_speedup"].isna().sum() == 3
    assert not any(name.startswith("Unnamed") for name in frame.columns)


def test_markdown_is_one_table_with_everything() -> None:
    text = tables.to_markdown(_summary())
    grid = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in grid}) == 1
    assert len(grid) == 2 + 6
    assert "20/24, 3 near-ties, 1 different" in text
    assert text.startswith("**tiny, float32")


def test_a_pipe_in_a_name_does_not_break_markdown() -> None:
    samples = [dataclasses.replace(one, arm="a|b") if one.arm == "speculative" else one for one in run(12)]
    text = tables.to_markdown(summarise(manifest(arm("autoregressive"), arm("a|b")), samples))
    grid = [re.sub(r"\\\|", "", line) for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in grid}) == 1


def test_latex_escapes_what_latex_would_take_for_commands() -> None:
    samples = [dataclasses.replace(one, arm="50%_a&b#") if one.arm == "speculative" else one for one in run(12)]
    roles = {"target": role(model="org/model_1")}
    text = tables.to_latex(summarise(manifest(arm("autoregressive", roles=roles), arm("50%_a&b#")), samples))
    assert r"50\%\_a\&b\#" in text
    assert r"org/model\_1" in text
    assert text.count("\\begin{") == text.count("\\end{") == 2
    assert r"\toprule" in text


def _cascade() -> Summary:
    """Two prompts, each of two steps: the draft proposed 8 tokens in 4 forwards of 5 ms, and the n-grams 6."""
    roles = {"target": role(weight_bytes=4000), "draft": role(model="small", weight_bytes=1000)}
    levels = [[[4, 3, 2, 10_000_000], [6, 2, 0, 0]], [[4, 2, 2, 10_000_000], [0, 0, 0, 0]]]
    facts = {"levels": "draft,ngram"}
    samples = [sample("autoregressive", prompt) for prompt in range(2)]
    samples += [
        sample("cascade", prompt, steps=((4, 4, 3), (3, 4, 2)), levels=levels, facts=facts) for prompt in range(2)
    ]
    return summarise(manifest(arm("autoregressive"), arm("cascade", roles=roles)), samples)


def test_levels_of_a_cascade_have_a_small_table_of_their_own() -> None:
    summary = _cascade()
    plain, cascade = summary.rows
    assert (plain.levels, plain.standardized_improvement) == ([], None)
    assert [level["name"] for level in cascade.levels] == ["draft", "ngram"]
    assert cascade.levels[0] == {
        "name": "draft", "model": "small", "drafted": 16, "accepted": 10, "acceptance_rate": 0.625, "forwards": 8,
        "time_ns": 40_000_000, "cost": 0.25,
    }  # fmt: skip
    assert cascade.levels[1]["cost"] == 0.0
    assert cascade.standardized_improvement == 16 / (6 + 8 * 0.25)
    lines = _shown(summary, 120).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("task"))
    assert lines[at + 1].split() == ["toy", "cascade", "draft", "small", "16", "10", "0.625", "2.00", "5.00", "2.00x"]
    assert lines[at + 2].split() == ["ngram", "-", "12", "4", "0.333", "-", "-"]
    assert "a count of forwards and not a time" in " ".join(lines)
    assert "level" not in _shown(_summary(), 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_levels_cuts_no_number(width: int) -> None:
    text = _shown(_cascade(), width)
    assert {"0.625", "0.333", "5.00"} <= set(_numbers(text))
    assert all(cell_len(line) <= max(width, 40) for line in text.splitlines())


def test_levels_are_in_every_export() -> None:
    summary = _cascade()
    assert "| ngram" in tables.to_markdown(summary)
    line = list(csv.DictReader(io.StringIO(tables.to_csv(summary))))[1]
    assert (line["level1_name"], line["level1_forwards"], line["level2_drafted"]) == ("draft", "8", "12")
    assert json.loads(tables.to_json(summary))["rows"][1]["levels"][0]["time_ns"] == 40_000_000
