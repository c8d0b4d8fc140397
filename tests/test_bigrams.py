"""The table of bigrams: what follows most often, from text of the user's, through the command line into a cascade."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from specbench.cli import app
from specbench.models.bigrams import learn


def test_the_most_frequent_follower_is_kept_if_it_is_frequent_enough():
    texts = [[1, 2, 1, 2, 1, 3], [4, 5], [5, 6, 5, 6, 5, 7, 5, 8, 5, 9, 5, 1, 5, 2]]
    # 1 is followed by 2, 2, 3 and 5; 5 by 6 in two of seven cases; 4, 7, 8 and 9 by 5 only once.
    assert learn(texts) == {1: 2, 2: 1, 6: 5}
    assert learn(texts, min_share=0.2) == {1: 2, 2: 1, 5: 6, 6: 5}
    assert learn(texts, min_count=1, min_share=0.2) == {1: 2, 2: 1, 4: 5, 5: 6, 6: 5, 7: 5, 8: 5, 9: 5}
    assert learn([[3, 9, 3, 4, 3, 9, 3, 4]])[3] == 4  # as frequent: the lower id
    assert learn([]) == learn([[1]]) == {}


def test_a_table_is_learned_and_used(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "ababab"}) + "\n" + json.dumps({"turns": ["ab", "cd"]}))
    out = tmp_path / "bigrams.json"
    words = ["bigrams", "-t", "tiny", "--data", str(tmp_path / "train.jsonl"), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == {str(ord("a")): ord("b"), str(ord("b")): ord("a")}
    run = [
        "run",
        "-t",
        "tiny",
        "-d",
        "tiny-draft",
        "-s",
        "cascade",
        "--limit",
        "1",
        "--max-new-tokens",
        "4",
        "--quiet",
        "--require-lossless",
    ]
    done = CliRunner().invoke(app, [*run, "--option", f"cascade.bigrams={out}", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output


def test_bad_input_is_one_line(tmp_path):
    data, out = tmp_path / "text.txt", tmp_path / "bigrams.json"
    data.write_text("abc")
    out.write_text("{}")
    for given, why in (
        ((data, out), "exists; choose another name"),
        ((data, tmp_path / "none" / "x.json"), "is no folder"),
        ((tmp_path / "none.txt", tmp_path / "x.json"), "cannot be read: No such file"),
        ((data, tmp_path / "x.json"), "no token is followed by another often enough"),
    ):
        done = CliRunner().invoke(app, ["bigrams", "-t", "tiny", "--data", str(given[0]), "--out", str(given[1])])
        assert done.exit_code != 0
        assert why in " ".join(done.output.split())
        assert not (tmp_path / "x.json").exists()
