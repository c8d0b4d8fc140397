"""The command line as a user meets it: exit codes, streams, narrow and poor terminals, wrong words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from specbench import __version__
from specbench.cli import app, running
from specbench.errors import UsageError
from specbench.results.plan import Plan
from specbench.results.tables import digits

RUN = ["run", "-s", "lookup", "-t", "tiny", "-n", "2", "--max-new-tokens", "8", "--threads", "1", "--trace", "0"]


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def process(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "specbench", *words], capture_output=True, env={**os.environ, **env}, timeout=300
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    done = invoke(*RUN, "--out", str(out))
    assert done.exit_code == 0, done.output
    return out


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path):
    done = invoke(*RUN, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0
    assert "lookup" in done.stdout
    assert "exact" in done.stdout
    assert "measuring" not in done.stdout
    assert f"run folder: {tmp_path / 'run'}" in done.stderr.replace("\n", "")


def test_json_is_one_document_and_nothing_else(tmp_path):
    done = invoke(*RUN, "--json", "--quiet", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0
    document = json.loads(done.stdout, parse_constant=pytest.fail)
    assert {row["arm"] for row in document["rows"]} == {"autoregressive", "lookup"}
    assert done.stderr == "" or "warning" in done.stderr


def test_dry_run_and_validate_check_and_run_nothing(tmp_path):
    for words in (["run", "--dry-run"], ["validate"]):
        done = invoke(*words, *RUN[1:], "--out", str(tmp_path / "run"), "--json")
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert facts["strategies"] == ["autoregressive", "lookup"]
        assert facts["tasks"] == {"bundled": 2}
        assert facts["turns"] == {"bundled": 3}
        assert facts["runtime"] == {"target": "packed"}
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["strategies", "tasks", "models", "devices"])
def test_lists(name):
    table, document = invoke("list", name), invoke("list", name, "--json")
    assert table.exit_code == document.exit_code == 0
    rows = json.loads(document.stdout)
    assert rows
    for row in rows:
        assert str(next(iter(row.values()))) in table.stdout


def test_version():
    assert invoke("--version").stdout.strip() == f"specbench {__version__}"


# Wrong usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-s", "lokup"], 'unknown strategy "lokup"; did you mean "lookup"?'),
        (["-s", "speculative", "--runtime", "transformers"], "speculative: needs a draft model; name one with --draft"),
        (["--task", "nope"], 'unknown task "nope"'),
        (["-t", "tinny"], "tinny"),
        (["-t", "/no/such/folder"], "/no/such/folder"),
        (["-s", "lookup", "-o", "lookup.min-match=many"], "min-match"),
        (["-o", "nonsense"], "write name.key=value"),
        (["--top-p", "7"], "--top-p 7.0: not above 0"),
        (["--place", "target=cpu:0,draft=cpu:0"], "no strategy of this run uses a draft model"),
        (["--dtype", "float31"], 'did you mean "float32"?'),
        (["--preset", "smok"], 'did you mean "smoke"?'),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: cannot be read"),
        (["--resume"], "--resume needs --out"),
        (["--batch", "0"], "--batch 0: at least 1"),
    ],
)  # fmt: skip
def test_a_known_error_is_one_line_on_stderr_and_exit_2(words, message):
    done = invoke("run", "-t", "tiny", "--quiet", *words) if "-t" not in words else invoke("run", "--quiet", *words)
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_an_unknown_flag_is_refused():
    """D30, C16: no grammar, no guided decoding; a flag that is not known is not ignored."""
    done = invoke("run", "--guided-json", "{}")
    assert done.exit_code == 2
    assert "--guided-json" in done.stderr


def test_traceback_is_shown_when_asked_for():
    assert isinstance(invoke("--traceback", "run", "-s", "lokup").exception, UsageError)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "a mapping of settings"), ("limit: [1\n", "not valid YAML"), ("limt: 3\n", "limt"),
     ("limit: many\n", "limit")],
)  # fmt: skip
def test_a_bad_config_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    done = invoke("run", "--config", str(path))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_config_file_and_flags(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "strategy: lookup\ntarget: tiny\nlimit: 5\nmax-new-tokens: 4\noptions:\n  lookup:\n    min-match: 3\n"
    )
    done = invoke("validate", "--config", str(path), "--limit", "2", "--json")
    assert json.loads(done.stdout)["tasks"] == {"bundled": 2}


def test_a_failed_sample_is_exit_1(tmp_path):
    """M9: and the number that failed is printed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "word " * 9000}) + "\n" + json.dumps({"prompt": "hi"}) + "\n")
    done = invoke(*RUN, "--task", "jsonl", "-o", f"jsonl.path={prompts}", "--out", str(tmp_path / "run"))
    assert done.exit_code == 1
    assert "2 sample(s) failed" in done.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "not a run folder"),
        (lambda path: None, "not a run folder"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("{")), "not valid JSON"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text('{"a": 1}')), "no schema number"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text('{"schema": 99}')), "newer than this"),
    ],
    ids=["empty", "missing", "truncated", "foreign", "newer"],
)  # fmt: skip
def test_what_is_not_a_run_folder_is_one_line(tmp_path, make, message):
    make(tmp_path / "x")
    done = invoke("show", str(tmp_path / "x"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# Terminals, pipes, encodings


@pytest.mark.parametrize("format", ["table", "md", "csv", "json", "latex"])
def test_show_in_every_format(folder, format):
    done = invoke("show", str(folder), "--format", format)
    assert done.exit_code == 0, done.output
    assert "lookup" in done.stdout
    assert "autoregressive" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_poor_encodings_do_not_break_a_table(folder, encoding):
    """C12."""
    for words in (["show", str(folder)], ["show", str(folder), "--format", "md"], ["list", "strategies"], ["--help"],
                  ["run", "--help"]):  # fmt: skip
        done = process(*words, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
        done.stdout.decode(encoding)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?x", text))


@pytest.mark.parametrize("columns", ["40", "80", "120", "200"])
def test_numbers_are_never_cut_at_any_width(folder, columns):
    """C13, C14: no line is wider than the terminal, and every speed-up is there whole."""
    done = process("show", str(folder), COLUMNS=columns, PYTHONIOENCODING="utf-8")
    text = done.stdout.decode()
    # Only the path of the run folder stays whole at any width.
    assert max(len(line) for line in text.splitlines() if "summary.md" not in line) <= int(columns)
    row = next(r for r in json.loads(invoke("show", str(folder), "--json").stdout)["rows"] if r["arm"] == "lookup")
    assert numbers(text)
    assert digits(row["decode_speedup"]["value"], "x") in text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specbench", "show", str(folder)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: output: No space left on device\n"


def test_names_in_square_brackets_are_no_markup(tmp_path):
    out = tmp_path / "a[b]c" / "z[" / "q]"
    done = invoke(*RUN, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert str(out) in done.stderr.replace("\n", "")


def test_resume_needs_no_settings_again(folder, tmp_path):
    """What is not given goes on as it was; what is given and differs is refused."""
    import shutil

    out = tmp_path / "run"
    shutil.copytree(folder, out)
    assert invoke("run", "--out", str(out), "--resume").exit_code == 0
    refused = invoke("run", "--out", str(out), "--resume", "--max-new-tokens", "9")
    assert refused.exit_code == 2
    assert "max_new_tokens: 8 there, 9 now" in refused.stderr


def test_a_reader_that_goes_away_is_no_error(folder):
    command = f'"{sys.executable}" -m specbench show "{folder}" --format csv | head -n 1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_no_colour_without_a_terminal(folder):
    assert b"\x1b[" not in process("show", str(folder)).stdout


# Presets and help


def test_smoke_preset_runs_every_strategy_that_one_device_is_enough_for_losslessly(tmp_path):
    done = invoke("run", "--preset", "smoke", "--threads", "1", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    from specbench.strategies import registry

    for name in registry.names():
        needs_more = registry.get(name).apart or registry.get(name).sends_text
        assert (name in done.stdout.split()) != needs_more


def test_help_tells_the_defaults_that_a_plan_has():
    """The help text is written out, so that reading it imports nothing; here it is held against the code."""
    hints = get_type_hints(running.run, include_extras=True)
    told = {
        name: re.search(r"\(default: ([^)]*)\)", hint.__metadata__[0].help)
        for name, hint in hints.items()
        if hasattr(hint, "__metadata__")
    }
    named = {name: found[1] for name, found in told.items() if found}
    assert len(named) > 15
    for name, text in named.items():
        default = Plan.__dataclass_fields__[name].default
        if isinstance(default, tuple):
            default = ",".join(default)
        if name in ("max_new_tokens", "threads", "batch_prompts", "out", "baseline"):  # said in words
            continue
        assert text == (f"{default:g}" if isinstance(default, float) else str(default)), name


def test_every_setting_of_a_plan_has_a_flag():
    import inspect

    flags = set(inspect.signature(running.run).parameters) - {
        "config",
        "preset",
        "all_prompts",
        "dry_run",
        "json",
        "quiet",
    }
    flags.remove("tokenizer")  # a part of --target endpoint:URL
    assert {"options" if name == "option" else name for name in flags} == set(Plan.__dataclass_fields__)
