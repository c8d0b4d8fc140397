"""Distilling a draft: it learns, it can be interrupted and gone on with, and it serves its own target only."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import TickingClock
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import ModelError, UsageError
from specbench.models import tiny
from specbench.models.distill import Progress, Settings, distill, starts
from specbench.models.distill_data import Template, Texts, Writer, read_file
from specbench.models.distill_student import Layers, head_loss, tokens_per_step
from specbench.models.drafts import describe_draft
from specbench.models.head_vocab import FILE
from specbench.models.info import describe
from specbench.models.load import load, load_transformers
from specbench.models.packed_cuda import StaticPackedModel
from specbench.models.quiet import quiet
from specbench.models.specs import parse
from specbench.results import run as runs
from specbench.results.plan import Plan

LETTERS = b"abcdefghijklmnopqrst "
QUICK = dict(layers=1, head_vocab=120, rows=16, tokens=64, batch=8, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "specbench-cache"))


def toy_text(chance: random.Random, length: int) -> list[int]:
    """A language of 21 letters: the next one follows from the last one and the one before that, nine times in ten."""
    ids = [chance.choice(LETTERS), chance.choice(LETTERS)]
    while len(ids) < length:
        follows = (LETTERS.index(ids[-1]) * 5 + 7 * (LETTERS.index(ids[-2]) % 3) + 3) % len(LETTERS)
        ids.append(LETTERS[follows] if chance.random() < 0.9 else chance.choice(LETTERS))
    return ids


@pytest.fixture(scope="module")
def toy_target(tmp_path_factory) -> Path:
    """A tiny Llama that was trained for seconds to chat in the toy language.

    As in a large model, its first layer by itself says nothing: what that layer would say is made worse in training.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = tiny.make_model(layers=2).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.7 * weight.shape[-1] ** -0.5)
    user, assistant = tiny.BYTES + 2, tiny.BYTES + 3
    chance, steps, rate = random.Random(0), 120, 5e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        rows = [
            [tiny.BYTES, user, *toy_text(chance, chance.randrange(8, 30)), 10, assistant, *toy_text(chance, 48)][:48]
            for _ in range(16)
        ]
        ids = torch.tensor(rows)
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        early = model.lm_head(model.model.norm(out.hidden_states[1]))[:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        (out.loss - 0.3 * torch.nn.functional.cross_entropy(early, ids[:, 1:].flatten()).clamp(max=5)).backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("toy") / "target"
    tiny.make_tokenizer().save_pretrained(folder)
    with quiet():
        model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(toy_target, tmp_path_factory):
    """A draft distilled for the toy target, and the progress that was shown on the way."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("toy") / "draft"
    seen: list[str] = []
    result = distill(
        describe(parse(str(toy_target)), "target"),
        Settings(minutes=0.4, **QUICK),
        out,
        watch=lambda progress: seen.append(progress.doing),
        clock=TickingClock(),  # by it a forward takes 20 ms and a step of training 40: the same work on any machine
    )
    return result, seen


def test_agreement_rises_from_chance_to_above_six_tenths(made):
    """The goal of the tool, on a language that a model of this size can know."""
    result, seen = made
    assert not result.interrupted
    before, best = result.progress.before, result.progress.best
    assert before.agreement < 0.4
    assert best.agreement > 0.6
    assert best.tokens_per_step[2] > before.tokens_per_step[2]
    assert 1 <= best.tokens_per_step[2] <= best.tokens_per_step[4] <= best.tokens_per_step[8] <= 9
    assert "writing text" in seen
    assert "training" in seen


def test_the_folder_holds_layers_and_a_pointer_but_no_tables(made, toy_target):
    result, _ = made
    from safetensors.torch import load_file

    names = set(load_file(result.folder / "model.safetensors"))
    assert "model.norm.weight" in names
    assert not any("embed" in name or "lm_head" in name for name in names)
    card = json.loads((result.folder / "draft.json").read_text())
    assert card["target"] == toy_target.name
    assert card["held_out"]["agreement"] == result.progress.best.agreement
    assert card["text_tokens"] == result.progress.text_tokens > 0
    words = (result.folder / "README.md").read_text()
    for fact in (f"{result.progress.best.agreement:.3f}", card["hardware"], str(card["seen_tokens"])):
        assert fact in words
    assert str(toy_target.parent) not in words
    assert len(json.loads((result.folder / FILE).read_text())["ids"]) == 120


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9}, {"temperature": 0.9, "verify": "rejection"}])
def test_a_distilled_draft_drafts_and_changes_nothing(made, toy_target, tmp_path, sampled):
    result, _ = made
    plan = Plan(
        strategy=("speculative",), target=str(toy_target), draft=str(result.folder), limit=3, max_new_tokens=24,
        threads=1, trace=0, warmup=0, out=tmp_path / "run", **sampled,
    )  # fmt: skip
    done = runs.run(plan)
    assert done.failures == []
    row = next(row for row in done.summary.rows if row.strategy == "speculative")
    assert row.acceptance_rate > 0.2
    if "verify" not in sampled:
        counts = done.manifest["lossless"]["bundled"]["speculative"]
        assert counts["exact"] == counts["compared"] > 0


def test_another_target_is_refused_in_one_line(made):
    result, _ = made
    other = describe(parse("tiny"), "target")
    with pytest.raises(ModelError, match="was distilled for target, whose embeddings it shares"):
        describe_draft(parse(str(result.folder)), other)
    with pytest.raises(ModelError, match="only be read together with its target"):
        describe(parse(str(result.folder)), "target")


def test_a_target_that_changed_after_it_was_described_is_refused_too(made, toy_target, tmp_path):
    result, _ = made
    copy = tmp_path / "target"
    shutil.copytree(toy_target, copy)
    info = describe_draft(parse(str(result.folder)), describe(parse(str(copy)), "target"))
    shutil.copy(describe(parse("tiny"), "x").path + "/model.safetensors", copy / "model.safetensors")
    with pytest.raises(ModelError, match="distilled for another target"):
        load_transformers(info)


def test_it_loads_with_the_tables_of_the_target(made, toy_target):
    result, _ = made
    target = describe(parse(str(toy_target)), "target")
    info = describe_draft(parse(str(result.folder)), target)
    assert len(info.head_ids) == 120
    whole, small = load_transformers(target), load_transformers(info)
    assert torch.equal(whole.model.embed_tokens.weight, small.model.embed_tokens.weight)
    assert torch.equal(whole.lm_head.weight, small.lm_head.weight)
    assert len(small.model.layers) == 1
    ids = [3, 97, 98, 99]
    expected = small(torch.tensor([ids])).logits[0, -1]
    logits = load(info).advance([ids])[0]
    kept = list(info.head_ids)
    assert torch.allclose(logits[kept], expected[kept], atol=1e-3)
    assert torch.isinf(logits).sum() == info.vocab_size - 120


def test_int8_storage_is_half_the_size_and_nearly_the_same(made, toy_target, tmp_path):
    from specbench.models.distilled_file import read_layers, write_layers

    weights = read_layers(made[0].folder)
    write_layers(tmp_path, weights, "int8")
    size, before = ((folder / "model.safetensors").stat().st_size for folder in (tmp_path, made[0].folder))
    assert size < 0.65 * before
    for name, weight in read_layers(tmp_path).items():
        assert (weight.float() - weights[name].float()).abs().max() <= 0.01 * weights[name].float().abs().max() + 1e-6


# Interruptions


def test_ctrl_c_keeps_the_best_so_far_and_resume_goes_on(toy_target, tmp_path):
    info, out = describe(parse(str(toy_target)), "target"), tmp_path / "draft"

    def interrupt(progress: Progress) -> None:
        if progress.steps > 12 and progress.best is not None and progress.doing == "training":
            raise KeyboardInterrupt

    first = distill(info, Settings(minutes=5, **QUICK), out, watch=interrupt)
    assert first.interrupted
    assert (out / "model.safetensors").is_file()
    steps, text = first.progress.steps, first.progress.text_tokens
    with pytest.raises(UsageError, match="holds files; go on with --resume"):
        distill(info, Settings(minutes=5, **QUICK), out)
    with pytest.raises(UsageError, match="other settings .seed: 0 there, 1 now"):
        distill(info, Settings(minutes=5, seed=1, **QUICK), out, resume=True)
    slower = QUICK | dict(learning_rate=2e-3)
    again = distill(info, Settings(minutes=(first.progress.spent_s + 2) / 60, **slower), out, resume=True)
    assert not again.interrupted
    assert again.start == first.start
    assert again.progress.steps > steps
    assert again.progress.text_tokens >= text
    assert again.progress.before == first.progress.before
    assert again.progress.best.agreement >= first.progress.best.agreement


def test_an_interruption_before_there_is_a_draft_passes_through(toy_target, tmp_path):
    def interrupt(progress: Progress) -> None:
        if progress.doing == "writing text":
            raise KeyboardInterrupt

    info, out = describe(parse(str(toy_target)), "target"), tmp_path / "draft"
    with pytest.raises(KeyboardInterrupt):
        distill(info, Settings(minutes=5, **QUICK), out, watch=interrupt)
    done = distill(info, Settings(minutes=0.02, **QUICK), out, resume=True)
    assert done.progress.best is not None


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "0"], "--layers 0: at least 1"),
        (["--layers", "9"], "--layers 9: tiny has 2"),
        (["--minutes", "0"], "--minutes 0.0: more than 0"),
        (["--store", "int3"], "--store int3"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--resume"], "nothing to resume"),
        (["--place", "tpu"], "not a device"),
        (["--target", "self:int4"], "no files of its own"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_is_loaded(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr("specbench.models.distill.load_transformers", lambda *a: pytest.fail("weights were read"))
    done = CliRunner().invoke(app, ["distill", "--target", "tiny", "--out", str(tmp_path / "draft"), *words])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "draft").exists()


def test_a_target_that_the_packed_runtime_does_not_know_is_one_line(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    tiny.make_tokenizer().save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=261)).save_pretrained(folder)
    done = CliRunner().invoke(app, ["distill", "--target", str(folder), "--out", str(tmp_path / "draft")])
    assert done.exit_code == 2
    assert "cannot be distilled: the packed runtime knows llama" in done.stderr


def test_the_command_distils_from_a_file_and_says_how_good_it_is(toy_target, tmp_path):
    data = tmp_path / "text.jsonl"
    chance = random.Random(5)
    lines = [{"text": bytes(toy_text(chance, 300)).decode()} for _ in range(60)]
    data.write_text("\n".join(map(json.dumps, lines)))
    words = ["distill", "--target", str(toy_target), "--out", str(tmp_path / "draft"), "--layers", "1"]
    done = CliRunner().invoke(
        app, [*words, "--head-vocab", "64", "--minutes", "0.1", "--data", str(data), "--threads", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout)
    assert card["data"] == "text.jsonl"
    assert card["head_vocab"] == 64
    assert 0 < card["held_out"]["agreement"] <= 1
    assert "reading text" in done.stderr
    assert "agreement 0." in done.stderr


# The parts


def test_conversations_follow_the_template(toy_target):
    info = describe(parse(str(toy_target)), "target")
    template = Template.of(info.codec)
    user, assistant = tiny.BYTES + 2, tiny.BYTES + 3
    assert template.first == [tiny.BYTES, user]
    assert template.answer == [10, assistant]
    assert template.again == [10, user]
    target = load(info)
    written, again = (Writer(target, info.codec, info.eos_ids, rows=3, tokens=160).write(1, 1.0) for _ in range(2))
    ids, answers = written.ids, written.answers
    assert np.array_equal(ids, again.ids)
    for row, answer in zip(ids.tolist(), answers, strict=True):
        assert row[:2] == [tiny.BYTES, user]
        at = int(answer.argmax())
        assert row[at - 2 : at] == template.answer
        assert answer[at:].sum() > 30


def test_answers_of_held_out_text_are_greedy(toy_target):
    info = describe(parse(str(toy_target)), "target")
    target = load(info)
    written = Writer(target, info.codec, info.eos_ids, rows=2, tokens=150).write(3, 1.0, greedy_answers=True)
    ids, answers = written.ids, written.answers
    target.reset()
    for row, answer in zip(ids, answers, strict=True):
        best = target.advance([row[:-1]], last=149, rows=[0]).argmax(-1).numpy()
        assert (best == row[1:])[answer[1:]].all()
        assert not (best == row[1:])[~answer[1:]].all()


@pytest.mark.parametrize("kernels", [True, False])
def test_states_come_with_the_text(toy_target, monkeypatch, kernels):
    """From the forwards that wrote it; reading it once more, as a runtime without them does, gives the same."""
    if not kernels:
        monkeypatch.setenv("SPECBENCH_NATIVE", "0")
    info = describe(parse(str(toy_target)), "target")
    target = load(info)
    written = Writer(target, info.codec, info.eos_ids, rows=3, tokens=60).write(1, 1.0)
    assert written.states.dtype is torch.bfloat16
    assert torch.allclose(written.states.float(), target.states(written.ids).float(), rtol=2**-7, atol=2e-3)
    assert target.last_states is None
    options = {"name": "static", "device": "cpu", "dtype": "float32", "vocab_size": info.vocab_size}
    static = StaticPackedModel(load_transformers(info), **options)
    again = Writer(static, info.codec, info.eos_ids, rows=3, tokens=60).write(1, 1.0)
    assert np.array_equal(again.ids, written.ids)
    assert torch.allclose(again.states.float(), written.states.float(), rtol=2**-7, atol=2e-3)


def test_states_are_what_the_head_multiplies(toy_target):
    info = describe(parse(str(toy_target)), "target")
    target, whole = load(info), load_transformers(info)
    ids = np.array([toy_text(random.Random(n), 40) for n in range(3)])
    states = target.states(ids)
    expected = whole(torch.from_numpy(ids)).logits
    assert torch.allclose(states @ whole.lm_head.weight.T, expected, atol=1e-3)
    assert torch.allclose(target.advance([ids[0]], last=40), expected[0], atol=1e-3)


def test_the_gradient_made_on_the_way_is_that_of_the_loss():
    torch.manual_seed(0)
    states = torch.randn(2100, 8, requires_grad=True)
    teacher, head = torch.randn(2100, 8), torch.randn(30, 8)
    expected = -((teacher @ head.T).softmax(-1) * (states @ head.T).log_softmax(-1)).sum(-1).mean()
    expected.backward()
    loss, gradient = head_loss(states.detach(), teacher, head)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(gradient, states.grad, atol=1e-7)


def test_tokens_per_step_play_the_accepted_drafts():
    agree = np.array([[1, 1, 0, 1, 1, 1, 1, 0]], dtype=bool)
    everywhere = np.ones_like(agree)
    assert tokens_per_step(agree, everywhere, 2) == 8 / 3  # 3 (two and the target's own), 3, 2
    assert tokens_per_step(agree, everywhere, 8) == 8 / 2
    assert tokens_per_step(~agree, ~everywhere, 4) == 0
    assert tokens_per_step(np.zeros_like(agree), everywhere, 4) == 1


def test_texts_are_found_again(tmp_path):
    ids = np.arange(24).reshape(4, 6)
    states = torch.randn(4, 6, 5)
    Texts(tmp_path).add(ids[:3], states[:3])
    texts = Texts(tmp_path)
    texts.add(ids[3:], states[3:])
    assert (len(texts), texts.files, texts.tokens) == (4, 2, 24)
    found, kept = texts.batch([3, 0], "cpu")
    assert found.tolist() == ids[[3, 0]].tolist()
    assert torch.equal(kept, states[[3, 0]].bfloat16())
    texts.add(np.full((1, 6), 7), states[:1])
    assert texts.frequent()[0] == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "short", "at least 128"),
        ("a.jsonl", '{"story": 1}', "a.jsonl:1: a line needs text"),
        ("a.jsonl", "{", "Expecting"),
    ],
)
def test_a_file_that_holds_no_text_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        read_file(path, describe(parse("tiny"), "target").codec, 64)


def test_layers_to_start_from():
    assert starts(2, 30) == [(0, 1), (0, 29), (28, 29)]
    assert starts(1, 30) == [(0,), (29,)]
    assert starts(3, 9) == [(0, 1, 2), (0, 1, 8), (0, 4, 8), (6, 7, 8)]
    assert starts(2, 2) == [(0, 1)]


def test_a_student_starts_as_the_layers_that_it_was_made_from(toy_target):
    whole = load_transformers(describe(parse(str(toy_target)), "target"))
    student = Layers(whole, (0, 1), "cpu", torch.float32).student((0, 1))
    ids = torch.tensor([toy_text(random.Random(1), 20)])
    with torch.no_grad():
        expected = whole.model(ids).last_hidden_state.flatten(0, 1)
    assert torch.allclose(student.states(ids).detach(), expected, atol=1e-4)
