"""Tasks that need no network: the registry, our own prompts, local files, lengths in tokens."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from specbench import options
from specbench.errors import TaskError, UsageError
from specbench.tasks import lengths, registry, warmup
from specbench.tasks.base import Task

SPEC_BENCH = Path(__file__).parents[2] / "shared" / "data" / "spec_bench" / "question.jsonl"
OFFLINE = ("bundled", "python-docs")


class ByteTokenizer:
    """A token is a byte of UTF-8, so that a cut can fall inside a character."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class WordTokenizer:
    """A token is a word; what was between words is lost, as with tokenizers that normalise their text."""

    def __init__(self):
        self.words = []

    def encode(self, text):
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)


def make(text, **given):
    task, subtask = registry.parse(text)
    return task(options.build(task.Options, given, f'task "{text}"'), subtask)


def write(path, *rows):
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return path


# The registry


@pytest.mark.parametrize("name", registry.names())
def test_every_task_has_card_summary_and_options(name):
    task = registry.get(name)
    assert issubclass(task, Task)
    assert task.name == name
    assert "\n" not in task.summary
    assert all(vars(task.card).values())
    assert task.Options() == task.Options()
    for subtask in task.subtasks:
        assert registry.parse(f"{name}:{subtask}") == (task, subtask)


def test_listing_the_tasks_imports_nothing_heavy():
    code = (
        "import sys; from specbench.tasks import registry; registry.summaries(); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_task_or_subtask_names_the_near_one():
    with pytest.raises(UsageError) as caught:
        registry.parse("spec-bensh")
    assert str(caught.value) == 'unknown task "spec-bensh"; did you mean "spec-bench"? See: specbench list tasks'
    with pytest.raises(UsageError, match='did you mean "mt_bench"'):
        registry.parse("spec-bench:mt-bench")
    with pytest.raises(UsageError, match="known: none"):
        registry.parse("jsonl:x")
    with pytest.raises(UsageError, match="unknown subtask"):
        registry.parse("bundled:")


@pytest.fixture
def plug_ins(monkeypatch, tmp_path):
    """Makes modules importable and lists them as entry points."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(**modules):
        points = []
        for name, source in modules.items():
            (tmp_path / f"plug_{name}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, f"plug_{name}", raising=False)
            points.append(EntryPoint(name, f"plug_{name}:Plug", registry.GROUP))
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return install


GOOD = """
from dataclasses import dataclass
from specbench.tasks.base import Card, Prompt, Task
class Plug(Task):
    name, summary, card = "good", "one prompt", Card("here", "1", "none", "none", "none")
    Options = dataclass(frozen=True)(type("Options", (), {}))
    def prompts(self, tokenizer, limit=None):
        return [Prompt("1", ("Hello",))][:limit]
"""


def test_a_plug_in_is_a_task_like_any_other(plug_ins):
    plug_ins(good=GOOD)
    assert registry.names()[-1] == "good"
    assert make("good").prompts(ByteTokenizer())[0].turns == ("Hello",)
    assert ("good", "one prompt") in registry.summaries()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise RuntimeError('no\\nlicence')", "cannot be loaded: RuntimeError: no licence"),
        ("import a_module_that_is_not_there", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("Plug = 3", "is not a subclass of specbench.tasks.base.Task"),
        ("from specbench.tasks.base import Task as Plug", "lacks the attributes name, summary, card, Options"),
    ],
)
def test_a_broken_plug_in_is_one_line_and_leaves_the_others_alone(plug_ins, source, expected):
    plug_ins(bad=source, good=GOOD)
    with pytest.raises(TaskError, match=expected) as caught:
        registry.get("bad")
    assert "\n" not in str(caught.value)
    lines = dict(registry.summaries())
    assert expected in lines["bad"]
    assert lines["good"] == "one prompt"
    assert lines["bundled"] == registry.get("bundled").summary


def test_a_plug_in_cannot_take_the_name_of_one_of_ours(plug_ins):
    plug_ins(jsonl=GOOD)
    assert registry.get("jsonl").__module__ == "specbench.tasks.jsonl"
    assert any(name == "jsonl" and "is hidden" in line for name, line in registry.summaries())


# Our own prompts, and the text for warming up


def test_bundled_has_eight_prompts_of_each_kind_and_spreads_a_limit():
    task = make("bundled")
    everything = task.prompts(ByteTokenizer())
    assert len(everything) == 64
    assert len({prompt.id for prompt in everything}) == len({prompt.turns for prompt in everything}) == 64
    assert [prompt.category for prompt in task.prompts(ByteTokenizer(), limit=8)] == list(task.subtasks)
    for category in task.subtasks:
        chosen = make(f"bundled:{category}").prompts(ByteTokenizer())
        assert len(chosen) == 8
        assert {prompt.category for prompt in chosen} == {category}
        assert {len(prompt.turns) for prompt in chosen} == {2 if category == "chat" else 1}


def test_bundled_prompts_have_real_lengths():
    words = {prompt.id: len(prompt.turns[0].split()) for prompt in make("bundled").prompts(ByteTokenizer())}
    assert all(150 <= count <= 620 for name, count in words.items() if name.startswith("summarisation"))
    for prompt in make("bundled:code-editing").prompts(ByteTokenizer()):
        snippet = prompt.turns[0].split("```")[1].splitlines()
        assert 15 <= len(snippet) - 1 <= 60
    for prompt in make("bundled:retrieval-qa").prompts(ByteTokenizer()):
        assert 3 <= prompt.turns[0].count("\n\n[") <= 5


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()])
@pytest.mark.parametrize("tokens", [1, 7, 300, 5000])
def test_warm_up_text_has_the_length_asked_for(tokenizer, tokens):
    assert len(tokenizer.encode(warmup.text(tokens, tokenizer))) == tokens


def test_warm_up_text_is_used_by_no_task():
    paragraphs = [" ".join(part.split()) for part in warmup.PROSE.split("\n\n")]
    prompts = [turn for name in OFFLINE for prompt in make(name).prompts(ByteTokenizer()) for turn in prompt.turns]
    assert not [part for part in paragraphs for turn in prompts if part[:60] in turn]


# Lengths


@pytest.mark.parametrize("text", ["plain words of text " * 9, "Zwölf Boxkämpfer jagen Viktor. 一二三 😀 " * 4])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 17, 30])
def test_head_and_tail_are_parts_of_the_text_with_as_many_tokens_as_fit(text, tokenizer, tokens):
    start, end = lengths.head(text, tokens, tokenizer), lengths.tail(text, tokens, tokenizer)
    assert text.startswith(start)
    assert text.endswith(end)
    whole = lengths.count(text, tokenizer)
    for part in (start, end):
        # a character of the byte tokenizer has up to four tokens, of which none can be left out
        assert min(tokens, whole) - 3 <= lengths.count(part, tokenizer) <= tokens
        assert part == text or whole > tokens


def test_a_cut_in_the_middle_keeps_both_ends():
    text = "instruction " + "filler " * 1000 + "question"
    cut = lengths.head_and_tail(text, 100, ByteTokenizer())
    assert len(cut) == 100
    assert cut.startswith("instruction")
    assert cut.endswith("question")
    assert lengths.head_and_tail("short", 100, ByteTokenizer()) == "short"


def test_filling_a_frame_makes_up_for_tokens_that_merge_with_it():
    words = " ".join(f"w{i}" for i in range(200))
    filled = lengths.fill(lambda part: f"in{part}out", words, 50, WordTokenizer())
    assert lengths.count(filled, WordTokenizer()) == 50
    assert filled.startswith("inw0 w1")
    assert lengths.fill(lambda part: f"in{part}out", words, 300, WordTokenizer()) is None
    assert lengths.fill(lambda part: "frame " * 60 + part, words, 50, WordTokenizer()) is None


# python-docs


@pytest.mark.parametrize("tokens", [512, 2048, 8000])
@pytest.mark.parametrize("subtask", ["continuation", "needle", "summary"])
def test_python_docs_prompts_have_the_length_asked_for_within_one_per_cent(subtask, tokens):
    prompts = make(f"python-docs:{subtask}", prompt_tokens=tokens).prompts(ByteTokenizer(), limit=9)
    assert len({prompt.turns for prompt in prompts}) == 9
    for prompt in prompts:
        assert 0.99 * tokens <= len(ByteTokenizer().encode(prompt.turns[0])) <= tokens
        assert prompt.raw == (subtask == "continuation")


def test_python_docs_are_the_same_every_time_and_differ_by_seed():
    task = make("python-docs")
    first = task.prompts(ByteTokenizer(), limit=6)
    assert first == make("python-docs").prompts(ByteTokenizer(), limit=6)
    assert first == task.prompts(ByteTokenizer())[:6]
    assert [prompt.category for prompt in first[:3]] == ["continuation", "needle", "summary"]
    other = make("python-docs", seed="1").prompts(ByteTokenizer(), limit=6)
    assert not {prompt.turns for prompt in first} & {prompt.turns for prompt in other}
    assert len(make("python-docs").prompts(ByteTokenizer(), limit=40)) == 40


def test_the_needle_is_in_the_text_once_and_the_question_asks_for_it():
    for prompt in make("python-docs:needle").prompts(ByteTokenizer(), limit=12):
        text, _, question = prompt.turns[0].rpartition("\n\n")
        place = question.removeprefix("Which number opens ").partition("?")[0]
        assert text.count(f"The number that opens {place} is ") == 1


def test_python_docs_refuse_a_length_they_cannot_make():
    with pytest.raises(TaskError, match="prompt-tokens must be 1 or more"):
        make("python-docs", prompt_tokens=0)
    with pytest.raises(TaskError, match="cannot make a prompt of 40 tokens"):
        make("python-docs:needle", prompt_tokens=40).prompts(ByteTokenizer())
    with pytest.raises(TaskError, match="longer than all the text"):
        make("python-docs:summary", prompt_tokens=10_000_000).prompts(ByteTokenizer())


# Spec-Bench

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 101, "category": "reasoning", "turns": ["Think.", "Again."], "reference": ["x", "y"]},
    {"question_id": 82, "category": "writing", "turns": ["Write more.", "Again."], "further": {"key": None}},
    {"question_id": 161, "category": "translation", "turns": ["Translate: Straße, „Grüße“, 雪"], "reference": ["s"]},
    {"question_id": 321, "category": "qa", "turns": ["a line separator\u2028and a form\u000bfeed"]},
    {"question_id": 481, "category": "rag", "turns": ["Passage\nQuestion"], "reference": [["a", "b"], ["c"]]},
]


def test_spec_bench_groups_categories_and_takes_them_in_turn(tmp_path):
    """C11: nested references, rows without one, unknown keys, unusual line separators, a part of the rows."""
    path = write(tmp_path / "question.jsonl", *ROWS)
    prompts = make("spec-bench", path=path).prompts(ByteTokenizer())
    assert [(prompt.id, prompt.category) for prompt in prompts] == [
        ("81", "mt_bench"),
        ("161", "translation"),
        ("321", "qa"),
        ("481", "rag"),
        ("101", "mt_bench"),
        ("82", "mt_bench"),
    ]
    assert prompts[1].turns == ("Translate: Straße, „Grüße“, 雪",)
    assert prompts[2].turns == ("a line separator\u2028and a form\u000bfeed",)
    assert {prompt.max_new_tokens for prompt in prompts} == {1024}
    assert [prompt.id for prompt in make("spec-bench:mt_bench", path=path).prompts(ByteTokenizer(), 2)] == ["81", "101"]
    assert [prompt.id for prompt in make("spec-bench:writing", path=path).prompts(ByteTokenizer())] == ["81", "82"]
    with pytest.raises(TaskError, match="no rows of summarization; the categories there are: qa, rag, reasoning"):
        make("spec-bench:summarization", path=path).check()


def test_spec_bench_without_a_file_says_where_it_is_to_be_had():
    with pytest.raises(TaskError, match="hemingkx/Spec-Bench.*--option spec-bench.path=question.jsonl"):
        make("spec-bench").check()


def test_the_real_question_file_gives_all_480_rows():
    """C11: the file of Spec-Bench as it is published."""
    if not SPEC_BENCH.is_file():
        pytest.skip("the question file of Spec-Bench is not beside the repository (../shared/data/spec_bench)")
    task = make("spec-bench", path=SPEC_BENCH)
    task.check()
    prompts = task.prompts(ByteTokenizer())
    assert sorted(int(prompt.id) for prompt in prompts) == list(range(81, 561))
    assert [prompt.category for prompt in prompts[:6]] == list(task.subtasks[:6])
    assert sum(len(prompt.turns) for prompt in prompts) == 560
    for subtask in task.subtasks:
        chosen = make(f"spec-bench:{subtask}", path=SPEC_BENCH).prompts(ByteTokenizer())
        assert len(chosen) == (80 if subtask in task.subtasks[:6] else 10)


def test_files_are_utf8_under_every_locale(tmp_path):
    """C11: Python would read files as ASCII here; nothing may depend on that."""
    path = write(tmp_path / "question.jsonl", *ROWS)
    code = (
        "from pathlib import Path; from specbench.tasks import registry; import locale\n"
        "print(locale.getpreferredencoding(False))\n"
        "for name in ('spec-bench', 'bundled'):\n"
        "    task = registry.get(name)\n"
        f"    options = task.Options(path=Path({str(path)!r})) if name == 'spec-bench' else task.Options()\n"
        "    print(len(task(options).prompts(None)), any('ß' in p.turns[0] for p in task(options).prompts(None)))\n"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-W", "error", "-c", code.replace("ß", "\\xdf")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    encoding, *rest = done.stdout.splitlines()
    assert rest == ["6 True", "64 True"]
    assert encoding.upper() not in ("UTF-8", "UTF8") or sys.platform != "linux"


@pytest.mark.parametrize("task", ["spec-bench", "jsonl", "humaneval"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"question_id": 1, "turns": [', "question.jsonl:3: not valid JSON: Expecting value (column "),
        (b'{"prompt": "Stra\xdfe"}', "question.jsonl:3: not UTF-8 (byte 17 of the line)"),
        (b'["a list"]', "question.jsonl:3: expected a JSON object, found a list."),
        (b"[" * 100_000, "question.jsonl:3: "),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(tmp_path, task, line, expected):
    """C5: no traceback, but where and why."""
    good = b'{"question_id": 0, "category": "qa", "turns": ["x"], "prompt": "x", "task_id": "x"}\n'
    path = tmp_path / "question.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n")
    with pytest.raises(TaskError) as caught:
        make(task, path=path).check()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"category": "qa", "turns": ["x"]}, 'no column "question_id"; the columns there are: category, turns.'),
        ({"question_id": 1, "turns": ["x"]}, 'no column "category"'),
        ({"question_id": 1, "category": "qa"}, 'no column "turns"; the columns there are: question_id, category.'),
        ({"question_id": 1, "category": "qa", "turns": "x"}, '"turns" must be a list of texts, not text.'),
        ({"question_id": 1, "category": "qa", "turns": []}, '"turns" must be a list of texts, not an empty list.'),
        ({"question_id": 1, "category": "qa", "turns": ["x", 3]}, 'turn 2 of "turns" must be text, not 3.'),
        ({"question_id": 1, "category": "qa", "turns": [" "]}, 'turn 1 of "turns" is empty.'),
        ({"question_id": 0, "category": "qa", "turns": ["x"]}, 'the id "0" stands at'),
    ],
)
def test_a_row_of_another_shape_is_named_with_its_line(tmp_path, row, expected):
    """C5"""
    path = write(tmp_path / "q.jsonl", {"question_id": 0, "category": "qa", "turns": ["x"]}, row)
    with pytest.raises(TaskError) as caught:
        make("spec-bench", path=path).check()
    assert str(caught.value).startswith(f"{path}:2: ")
    assert expected in str(caught.value)


def test_half_a_surrogate_pair_is_refused_before_a_tokenizer_chokes_on_it(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x \\ud83d"}\n', encoding="utf-8")
    with pytest.raises(TaskError, match=r"p.jsonl:1: \"prompt\" holds half of a surrogate pair"):
        make("jsonl", path=path).check()


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_obstacle(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n\n')
    assert [prompt.turns for prompt in make("jsonl", path=path).prompts(ByteTokenizer())] == [("one",), ("two",)]


@pytest.mark.parametrize("task", ["spec-bench", "jsonl"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, task):
    """C5"""
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "no.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 99)[:-12])
    for name, expected in [
        ("absent.jsonl", "no such file"),
        (".", "is a folder"),
        ("empty.jsonl", "holds no rows"),
        ("no.jsonl.gz", "cannot read"),
        ("cut.jsonl.gz", "cannot read|no column"),
    ]:
        with pytest.raises(TaskError, match=expected):
            make(task, path=tmp_path / name).check()


# jsonl


def test_jsonl_reads_the_columns_it_is_told(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"text": "one", "key": "a", "kind": "x", "tokens": 5},
        {"text": "two", "key": "b", "kind": "x", "tokens": 6},
        {"text": ["three", "four"], "key": "c", "kind": "y", "tokens": 7},
    )
    given = {"path": path, "prompt": "text", "id": "key", "category": "kind", "max-new-tokens": "tokens", "raw": "yes"}
    prompts = make("jsonl", **given).prompts(ByteTokenizer())
    assert [(p.id, p.turns, p.category, p.max_new_tokens) for p in prompts] == [
        ("a", ("one",), "x", 5),
        ("c", ("three", "four"), "y", 7),
        ("b", ("two",), "x", 6),
    ]
    assert all(prompt.raw for prompt in prompts)


def test_jsonl_has_defaults_for_what_is_not_there(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "one"}, {"turns": ["two", "three"], "id": 9, "max_new_tokens": 3})
    first, second = make("jsonl", path=path).prompts(ByteTokenizer())
    assert (first.id, first.turns, first.max_new_tokens, first.raw) == ("1", ("one",), 256, False)
    assert (second.id, second.turns, second.max_new_tokens) == ("9", ("two", "three"), 3)


@pytest.mark.parametrize(
    ("given", "row", "expected"),
    [
        ({}, {"question": "x"}, 'no column "prompt"; the columns there are: question.'),
        ({"prompt": "q"}, {"prompt": "x"}, 'no column "q"; the columns there are: prompt.'),
        ({"category": "kind"}, {"prompt": "x"}, 'no column "kind"'),
        ({}, {"prompt": 5}, '"prompt" must be text, not 5.'),
        ({}, {"prompt": None}, '"prompt" must be text, not null.'),
        ({}, {"prompt": "x", "max_new_tokens": 0}, '"max_new_tokens" must be a whole number of 1 or more, not 0.'),
        ({}, {"prompt": "x", "max_new_tokens": True}, "not True"),
    ],
)
def test_jsonl_names_file_line_and_the_columns_there_are(tmp_path, given, row, expected):
    """C5: guidellm answered this with a traceback."""
    path = write(tmp_path / "p.jsonl", row)
    with pytest.raises(TaskError) as caught:
        make("jsonl", path=path, **given).check()
    assert str(caught.value).startswith(f"{path}:1: ")
    assert expected in str(caught.value)


def test_jsonl_without_a_path_says_how_to_pass_one():
    with pytest.raises(TaskError, match="--option jsonl.path="):
        make("jsonl").check()


# HumanEval from a file

PROBLEM = {"task_id": "HumanEval/0", "prompt": 'def f(x: int) -> int:\n    """Twice x."""\n', "entry_point": "f"}


@pytest.mark.parametrize("name", ["HumanEval.jsonl", "HumanEval.jsonl.gz"])
def test_humaneval_reads_its_file_and_wraps_or_continues_the_code(tmp_path, name):
    path = write(tmp_path / name, PROBLEM)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    (chat,) = make("humaneval", path=path).prompts(ByteTokenizer())
    assert chat.turns[0].endswith('```python\ndef f(x: int) -> int:\n    """Twice x."""\n```')
    assert (chat.id, chat.raw, chat.stop) == ("HumanEval/0", False, ())
    (raw,) = make("humaneval", path=path, style="completion").prompts(ByteTokenizer())
    assert raw.turns == (PROBLEM["prompt"],)
    assert raw.raw
    assert raw.stop == ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")


def test_humaneval_names_the_line_that_lacks_a_column(tmp_path):
    """C5"""
    path = write(tmp_path / "h.jsonl", PROBLEM, {"task_id": "x", "code": "y"})
    with pytest.raises(TaskError, match=r'h.jsonl:2: no column "prompt"; the columns there are: task_id, code.'):
        make("humaneval", path=path).check()


def test_every_task_and_option_is_documented():
    path = Path(__file__).parents[1] / "docs" / "tasks.md"
    if not path.is_file():
        pytest.skip("the documentation is not beside the tests")
    page = path.read_text(encoding="utf-8")
    for name in registry.names():
        task = registry.get(name)
        section = page.partition(f"# {name}\n")[2]
        assert section, name
        assert not [subtask for subtask in task.subtasks if f"`{subtask}`" not in section]
        keys = [field.name.replace("_", "-") for field in dataclasses.fields(task.Options)]
        assert not [key for key in keys if f"| `{key}` |" not in page]
