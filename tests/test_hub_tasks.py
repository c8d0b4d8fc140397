"""Tasks from the hub, tested without it: local copies, the real exceptions, and a real offline call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback

import pytest

from specbench import options
from specbench.errors import TaskError, UsageError
from specbench.tasks import registry
from specbench.tasks.hub import HubTask
from specbench.tasks.hub_errors import redact

datasets = pytest.importorskip("datasets", reason="the hub tasks need the package datasets")
httpx = pytest.importorskip("huggingface_hub.utils").httpx  # the client goes by several names
hub_errors = pytest.importorskip("huggingface_hub.errors", reason="the hub tasks need huggingface_hub")

TOKEN = "hf_" + "aBcDeFgH1234" * 3
HUB_TASKS = [name for name in registry.names() if issubclass(registry.get(name), HubTask)]

# One row of each data set, with the columns that it has on the hub.
ROWS = {
    "mt-bench": {"prompt": ["One?", "Two?"], "category": "writing", "prompt_id": 81, "reference": []},
    "gsm8k": {"question": "How many?", "answer": "#### 3"},
    "mbpp": {"task_id": 11, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() is None"]},
    "mbpp:sanitized": {"task_id": 11, "prompt": "Write f.", "test_list": ["assert f() is None"]},
    "wmt14": {"translation": {"de": "Guten Tag.", "en": "Good day."}},
    "wmt14:en-de": {"translation": {"de": "Guten Tag.", "en": "Good day."}},
    "cnn-dailymail": {"article": "It rained.", "highlights": "Rain.", "id": "abc"},
    "nq-open": {"question": "who wrote it", "answer": ["x"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
    "pg19": {"short_book_title": "A Book", "text": "Once upon a time there was. " * 400},
    "longbench:qasper": {"context": "Read this: text.", "question": "What?", "answer_prefix": "Answer:"},
    "longbench:trec": {"context": "Type: x", "input": "Type:", "answers": ["y"]},
}
EXPECTED = {
    "mt-bench": ("One?", "Two?"),
    "gsm8k": ("How many?\n\nSolve this step by step, and put the final number in \\boxed{}.",),
    "mbpp": (
        "Write f.\n\nAnswer with one Python code block. The code has to pass these tests:\n\n"
        "```python\nassert f() is None\n```",
    ),
    "wmt14": ("Translate German to English: Guten Tag.",),
    "wmt14:en-de": ("Translate English to German: Good day.",),
    "cnn-dailymail": ("Summarize:\nIt rained.",),
    "nq-open": ("who wrote it",),
    "longbench:qasper": ("Read this: text.What?Answer:",),
    "longbench:trec": ("Type: x\n\nType:",),
}
EXPECTED["mbpp:sanitized"] = EXPECTED["mbpp"]


class ByteTokenizer:
    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(text, **given):
    task, subtask = registry.parse(text)
    return task(options.build(task.Options, given, f'task "{text}"'), subtask)


def folder_of(tmp_path, row, split="test", config="", suffix="parquet"):
    """A folder as `hf download` makes it."""
    folder = tmp_path / "copy" / config
    folder.mkdir(parents=True)
    data = datasets.Dataset.from_list([row])
    name = str(folder / f"{split}-00000-of-00001.{suffix}")
    {"parquet": data.to_parquet, "json": data.to_json, "csv": data.to_csv}[suffix](name)
    return tmp_path / "copy"


@pytest.fixture
def failing(monkeypatch):
    """Lets `datasets.load_dataset` raise, and gives the message that the user sees."""

    def fail(error, task="gsm8k", **given):
        def load_dataset(*args, **kwargs):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(TaskError) as caught:
            make(task, **given).check()
        printed = "".join(traceback.format_exception(caught.value))
        assert TOKEN not in printed
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return fail


# Rows to prompts


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_prompt(tmp_path, name):
    task, _ = registry.parse(name)
    given = {"prompt-tokens": 1000} if name == "pg19" else {}
    path = folder_of(tmp_path, ROWS[name], split=task.source.split)
    task = make(name, path=path, **given)
    task.check()
    (prompt,) = task.prompts(ByteTokenizer())
    assert prompt.turns == EXPECTED.get(name, prompt.turns)
    assert prompt.max_new_tokens > 0
    assert prompt.category


def test_every_hub_task_is_covered_here():
    assert {name.partition(":")[0] for name in ROWS} == set(HUB_TASKS)


def test_mt_bench_takes_its_categories_in_turn(tmp_path):
    rows = [{"prompt": ["a", "b"], "category": c, "prompt_id": i} for i, c in enumerate("xxyyzz")]
    path = tmp_path / "mt.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [p.id for p in make("mt-bench", path=path).prompts(ByteTokenizer(), limit=4)] == ["0", "2", "4", "1"]


def test_pg19_prompts_have_the_length_asked_for_and_short_books_are_left_out(tmp_path):
    path = tmp_path / "books.jsonl"
    rows = [{"text": "short"}, {"text": "Zwölf Bücher über Äpfel. " * 200}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (prompt,) = make("pg19", path=path, prompt_tokens=1001).prompts(ByteTokenizer())
    assert 991 <= len(prompt.turns[0].encode()) <= 1001
    assert (prompt.id, prompt.raw) == ("1", True)
    with pytest.raises(TaskError, match="no book has 100000 tokens"):
        make("pg19", path=path, prompt_tokens=100_000).prompts(ByteTokenizer())


def test_longbench_keeps_head_and_tail_and_uses_no_template_for_code(tmp_path):
    row = {"context": "HEAD " + "x" * 5000, "question": "y" * 50 + " TAIL"}
    path = folder_of(tmp_path, row, config="lcc")
    (prompt,) = make("longbench:lcc", path=path, prompt_tokens=400).prompts(ByteTokenizer())
    assert len(prompt.turns[0]) == 400
    assert prompt.turns[0].startswith("HEAD ")
    assert prompt.turns[0].endswith(" TAIL")
    assert (prompt.raw, prompt.max_new_tokens, prompt.category) == (True, 64, "lcc")


def test_longbench_without_a_subtask_says_that_it_needs_one():
    with pytest.raises(TaskError, match="longbench needs a subtask, for example longbench:qasper"):
        make("longbench").check()
    with pytest.raises(UsageError, match='did you mean "qasper"'):
        registry.parse("longbench:qaspr")


# Local copies


@pytest.mark.parametrize("suffix", ["parquet", "json", "csv"])
def test_a_folder_is_read_in_each_format_and_by_split(tmp_path, suffix):
    path = folder_of(tmp_path, ROWS["gsm8k"], config="main", suffix=suffix)
    (path / "main" / f"train-00000-of-00001.{suffix}").write_bytes(b"must not be read")
    assert make("gsm8k", path=path).prompts(ByteTokenizer())[0].turns == EXPECTED["gsm8k"]
    with pytest.raises(TaskError, match='no file for the split "validation"'):
        make("gsm8k", path=path, split="validation").check()


def test_a_file_or_what_save_to_disk_wrote_is_read(tmp_path):
    data = datasets.Dataset.from_list([ROWS["gsm8k"]])
    data.to_parquet(str(tmp_path / "any-name.parquet"))
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(test=data).save_to_disk(str(tmp_path / "splits"))
    for name in ("any-name.parquet", "one", "splits"):
        assert make("gsm8k", path=tmp_path / name).prompts(ByteTokenizer())[0].turns == EXPECTED["gsm8k"]
    with pytest.raises(TaskError, match='has no split "train"'):
        make("gsm8k", path=tmp_path / "splits", split="train").check()


def test_what_is_no_copy_is_refused(tmp_path):
    """C5"""
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    (tmp_path / "test.parquet").write_bytes(b"not parquet")
    (tmp_path / "empty").mkdir()
    for name, expected in [
        ("a.txt", "cannot read this kind of file"),
        ("absent", "no such file or folder"),
        ("empty", "there: no data files"),
        ("test.parquet", "cannot read .*test.parquet"),
    ]:
        with pytest.raises(TaskError, match=expected) as caught:
            make("gsm8k", path=tmp_path / name).check()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, name):
    """C5"""
    task, _ = registry.parse(name)
    path = folder_of(tmp_path, {"other": "x", "more": "y"}, split=task.source.split)
    with pytest.raises(TaskError, match=r'no column "\w+"; the columns there are: other, more.'):
        make(name, path=path).check()


# What the hub answers


@pytest.mark.parametrize("name", [name for name in ROWS if ":" not in name])
def test_the_configuration_is_always_named(monkeypatch, name):
    """C7: with several configurations in the cache, a call that names none fails offline."""
    asked = {}

    def load_dataset(path, config, split, revision):
        asked.update(path=path, config=config, split=split, revision=revision)
        return datasets.Dataset.from_list([ROWS[name]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    make(name, revision="v2").check()
    source = registry.get(name).source
    assert asked == {"path": source.id, "config": source.config, "split": source.split, "revision": "v2"}
    assert source.config


def test_the_defaults_are_not_the_data_sets_that_need_a_script():
    """C8: these ids fail with datasets 4 and later."""
    assert not {"deepmind/pg19", "THUDM/LongBench"} & {registry.get(name).source.id for name in HUB_TASKS}


def response(status):
    request = httpx.Request("GET", "https://huggingface.co", headers={"authorization": f"Bearer {TOKEN}"})
    return httpx.Response(status, request=request)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        lambda: caused(
            datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."),
            hub_errors.GatedRepoError(f"403 with Bearer {TOKEN}", response=response(403)),
        ),
        lambda: datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."),
        lambda: hub_errors.GatedRepoError(f"401 Client Error. token={TOKEN}", response=response(401)),
    ],
)
def test_a_gated_data_set_says_how_to_log_in(failing, error):
    """C9"""
    message = failing(error())
    assert "openai/gsm8k (main) is Gated: log in with `hf auth login`" in message
    assert "https://huggingface.co/datasets/openai/gsm8k" in message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."),
            "no data set openai/gsm8k (main) on the hub",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("Revision 'v9' doesn't exist for dataset 'a/b' on the Hub."),
            'openai/gsm8k (main) has no revision "v9"',
        ),
        (
            RuntimeError("Dataset scripts are no longer supported, but found gsm8k.py"),
            "needs a loading script, which datasets 4 and later refuses; use a parquet mirror",
        ),
        (
            ValueError("BuilderConfig 'main' not found. Available: ['a', 'b']"),
            "split test: BuilderConfig 'main' not found. Available: ['a', 'b']",
        ),
        (ValueError("Unknown split \"test\". Should be one of ['train']."), "Should be one of ['train']"),
        (
            ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)"),
            "run: hf download --repo-type dataset openai/gsm8k --local-dir DIR, and pass DIR with the option path",
        ),
        (
            ValueError("Couldn't find cache for openai/gsm8k for config 'main'\nAvailable configs in the cache: ['a']"),
            "is not in the local cache",
        ),
        (hub_errors.OfflineModeIsEnabled("Offline mode is enabled."), "is not in the local cache"),
        (httpx.ConnectTimeout("timed out"), "is not in the local cache"),
        (OSError(f"[Errno 28] No space left on device; https://user:{TOKEN}@host/x"), "No space left on device"),
        (
            hub_errors.HfHubHTTPError(f"403 for Bearer {TOKEN}", response=response(403)),
            "does not let this user read openai/gsm8k (main): log in with `hf auth login`. It said: 403 for Bearer ***",
        ),
        (hub_errors.HfHubHTTPError(f"500 for Bearer {TOKEN}", response=response(500)), "500 for Bearer ***"),
    ],
)
def test_other_answers_say_what_and_the_way_out(failing, error, expected):
    """C6 and C8: no silent fallback, no traceback, no token."""
    assert expected in failing(error, revision="v9")


def test_tokens_of_every_shape_are_cut_out(monkeypatch):
    """C9"""
    monkeypatch.setenv("HF_TOKEN", "mine-without-prefix")
    text = f"a {TOKEN} b Bearer abcdefgh12345 c https://u:p@host/x d mine-without-prefix e token={TOKEN}"
    assert redact(text) == "a *** b Bearer *** c https://***@host/x d *** e token=***"


OFFLINE = """
import json, shutil, socket
from pathlib import Path

def refuse(*args, **kwargs):
    raise AssertionError("connects, although offline")

socket.socket.connect = socket.getaddrinfo = refuse
import datasets
from specbench.errors import TaskError
from specbench.tasks import registry

home = Path({home!r})
for config in ("main", "socratic"):  # as an earlier run online would have left them
    rows = home / "rows.jsonl"
    rows.write_text(json.dumps({{"question": config, "answer": "1"}}) + "\\n")
    datasets.load_dataset("json", data_files={{"test": str(rows)}}, cache_dir=home / "make" / config)
    made = next((home / "make" / config).rglob("dataset_info.json")).parent
    kept = home / "datasets" / "openai___gsm8k" / config / "0.0.0" / "abc"
    shutil.copytree(made, kept)
    (kept / "json-test.arrow").rename(kept / "gsm8k-test.arrow")
    info = json.loads((kept / "dataset_info.json").read_text())
    info.update(config_name=config, dataset_name="gsm8k")
    (kept / "dataset_info.json").write_text(json.dumps(info))

task = registry.get("gsm8k")
print(task(task.Options()).prompts(None)[0].turns[0].split()[0])
task = registry.get("nq-open")
try:
    task(task.Options()).check()
except TaskError as error:
    print(error)
"""


@pytest.mark.parametrize("flag", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_flags_are_honoured_and_the_cache_is_used(tmp_path, flag):
    """C6, C7: a real offline call. It opens no connection, reads the right one of two cached configurations, and
    for what is not cached says what to download."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env.update({flag: "1", "HF_HOME": str(tmp_path)})
    command = [sys.executable, "-c", OFFLINE.format(home=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    cached, message = done.stdout.splitlines()
    assert cached == "main"
    assert message.startswith(
        "google-research-datasets/nq_open (nq_open) is not in the local cache, and the hub is off"
    )
    assert "hf download --repo-type dataset google-research-datasets/nq_open" in message
