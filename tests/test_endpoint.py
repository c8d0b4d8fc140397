"""A completions server as a row: what it sends and tells, well or badly, and what never gets into a file."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from completions_server import CompletionsServer, in_turn, piece, refuse, say, serving, usage
from toys import TickingClock
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import ModelError, UsageError
from specbench.hardware.clock import Drain
from specbench.hardware.devices import available_cores
from specbench.models.endpoint import Server, find_model
from specbench.models.endpoint_options import KEY, EndpointOptions, without_secrets
from specbench.models.info import describe
from specbench.models.load import load
from specbench.models.specs import parse
from specbench.options import build
from specbench.results import compare, lossless, served, tables
from specbench.results import run as runs
from specbench.results.manifest import redact
from specbench.results.measure import Ending, Outcome, measure
from specbench.results.plan import Plan, check, resolve
from specbench.results.records import RunFolder, Sample
from specbench.results.runs import load as load_runs
from specbench.results.transcripts import shares
from specbench.strategies.base import Request
from specbench.strategies.endpoint import Endpoint
from specbench.strategies.sampling import Sampling

SECRET = "sk-nobody-may-see-this"
PROMPT = (60, 70, 80)
TICK = 10_000_000


@pytest.fixture
def server():
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def info():
    found = describe(parse("tiny"), "target")
    gc.collect()
    gc.freeze()  # what that imported need not be looked at before every sample
    return found


@pytest.fixture
def endpoint(server, info, monkeypatch):
    """Makes strategies for the server, and closes them."""
    monkeypatch.delenv(KEY, raising=False)
    made = []

    def make(**options: Any) -> Endpoint:
        quick = dict(retry_s=0.01, connect_s=2.0, first_token_s=2.0, next_token_s=2.0, prompts="ids")
        chosen = EndpointOptions(url=server.url, **(quick | options))  # type: ignore[arg-type]
        made.append(Endpoint({"target": Server(info, chosen)}, chosen))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def ask(strategy: Endpoint, count: int = 1, rows: int | None = None, limit: int = 16, stop: tuple[str, ...] = (),
        sampling: Sampling | None = None, ids: tuple[int, ...] = PROMPT) -> list[Outcome]:  # fmt: skip
    asked = [Request(number, ids, limit, stop=stop) for number in range(count)]
    info = strategy._server.info
    ending = Ending(frozenset(info.eos_ids), stop, info.codec.decode)
    return measure(strategy, asked, sampling or Sampling(), ending, TickingClock(TICK), Drain(), rows)


def one(strategy: Endpoint, **how: Any) -> Outcome:
    (outcome,) = ask(strategy, **how)
    return outcome


# What is counted


def test_tokens_are_those_of_the_text_however_many_pieces_it_came_in(server, endpoint):
    """P24: a piece is not a token. The tokenizer here has one token per byte."""
    for parts in (["abcdef"], ["abc", "def"], ["a", "b", "c", "d", "e", "f"], ["ab", "", "cdef"]):
        server.answer = say(*map(piece, parts[:-1]), piece(parts[-1], "length"))
        outcome = one(endpoint())
        assert bytes(outcome.token_ids) == b"abcdef"
        assert outcome.finish == "length"
        assert [step[1] for step in outcome.steps] == list(map(len, parts))
        assert (outcome.ttft_ns, outcome.e2e_ns) == (TICK, len(parts) * TICK)


def test_the_first_token_is_the_first_piece_that_stands_for_one(server, endpoint):
    """P25: a token whose text comes later is one (vLLM); an announcement, a heartbeat, or usage alone is none."""
    server.answer = say(piece(""), piece("ab"), piece("c", "length"))
    assert [step[:2] for step in one(endpoint()).steps] == [[TICK, 1], [2 * TICK, 1], [3 * TICK, 1]]
    announced = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    nothing = piece("") | {"usage": {"completion_tokens": 0}}
    server.answer = say(announced, {"choices": []}, nothing, usage(0, 3), piece("abc"), piece("", "length"))
    outcome = one(endpoint())
    assert [step[:2] for step in outcome.steps] == [[TICK, 3], [2 * TICK, 0]]


def test_an_end_of_text_is_a_token_and_a_limit_is_none(server, endpoint, info):
    server.answer = say(piece("abc"), piece("", "stop"))
    outcome = one(endpoint())
    assert outcome.token_ids == [*b"abc", info.eos_ids[0]]
    assert (outcome.finish, [step[1] for step in outcome.steps]) == ("eos", [3, 1])
    server.answer = say(piece("", "stop"))
    assert one(endpoint()).token_ids == [info.eos_ids[0]]
    server.answer = say(piece("abcdefgh", "length"))
    assert len(one(endpoint(), limit=5).token_ids) == 5  # it sent more than was asked


def test_a_stop_string_that_the_server_cut_off_is_put_back(server, endpoint, info):
    """Our arms keep the token that completes it."""
    for last in (piece("d", "stop"), piece("d", "stop", stop_reason="xy")):
        server.answer = say(piece("abc"), last)
        outcome = one(endpoint(), stop=("xy",))
        assert (bytes(outcome.token_ids), outcome.finish) == (b"abcdxy", "stop")
    assert server.asked[-1]["stop"] == ["xy"]
    server.answer = say(piece("abc"), piece("d", "stop", stop_reason=None))
    assert one(endpoint(), stop=("xy",)).token_ids[-1] == info.eos_ids[0]
    server.answer = say(piece("abcd", "stop"))
    assert one(endpoint(), stop=("xy", "z")).finish == "stop"


@pytest.mark.parametrize("text", ["a b\u2028c\x85d", "half \ud83d", "\u00e9\u00df\U0001f600"])
def test_odd_text_comes_through(server, endpoint, text):
    """Line separators inside a JSON text end no event; half a surrogate pair is no text."""
    content = json.dumps(piece(text, "length"), ensure_ascii="\ud83d" in text)
    server.answer = say(content)
    got = bytes(one(endpoint(), limit=64).token_ids).decode()
    assert got == text.replace("\ud83d", "?")


def test_shares_add_up_and_never_run_backwards():
    assert shares([1, 1, 1], 3) == [1, 1, 1]
    assert shares([0, 4, 0], 4) == [1, 3, 0]
    assert shares([3, 3], 5) == [2, 3]
    assert shares([0, 0], 0) == [0, 0]
    assert shares([2], 7) == [7]


# What goes to the server


def test_a_request_says_what_a_server_could_fill_in_itself(server, endpoint):
    """P13, and prompts kept from earlier: both would be in one row only."""
    strategy = endpoint(extra='{"min_tokens": 0}')
    one(strategy, limit=9)
    body = server.asked[-1]
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("toy", list(PROMPT), 9, 0.0)
    assert (body["top_p"], body["repetition_penalty"], body["repeat_penalty"]) == (1.0, 1.0, 1.0)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["cache_prompt"] is False
    assert body["min_tokens"] == 0
    assert "seed" not in body
    one(strategy, sampling=Sampling(temperature=0.7, top_p=0.9, seed=4))
    assert body["cache_salt"] != server.asked[-1]["cache_salt"]
    assert {key: server.asked[-1][key] for key in ("temperature", "top_p", "seed", "top_k", "min_p")} == {
        "temperature": 0.7, "top_p": 0.9, "seed": 4, "top_k": -1, "min_p": 0.0}  # fmt: skip
    one(endpoint(reuse=True))
    assert "cache_salt" not in server.asked[-1]


def test_prompts_go_as_text_where_ids_are_not_taken(server, endpoint, info):
    """Without the special tokens that the server's tokenizer puts in front as well."""

    def only_text(handler, body):
        taken = isinstance(body["prompt"], str)
        (say(piece("x", "length")) if taken else refuse(422, {"detail": "a string is expected"}))(handler, body)

    server.answer = only_text
    strategy = endpoint(prompts="auto")
    strategy.prepare(1, 64)
    assert strategy._server.record()["prompts"] == "text"
    one(strategy, ids=(*info.codec.prefix, *b"hello"))
    assert server.asked[-1]["prompt"] == "hello"
    with pytest.raises(ModelError, match="a string is expected"):
        endpoint(prompts="ids").prepare(1, 64)


def test_ids_that_the_server_takes_for_something_else_are_not_sent(server, endpoint):
    """Its own count of the prompt shows it."""
    server.answer = lambda handler, body: say(
        piece("x", "length"), usage(1, 99 if isinstance(body["prompt"], list) else 3)
    )(handler, body)
    strategy = endpoint(prompts="auto")
    strategy.prepare(1, 64)
    assert strategy._server.form == "text"


@pytest.mark.parametrize(("refused", "fields"), [("top_k", "most"), ("repetition_penalty", "none")])
def test_fields_that_a_server_refuses_are_left_out_and_recorded(server, endpoint, refused, fields):
    good = say(piece("x", "length"))
    server.answer = lambda handler, body: (refuse(400, "no") if refused in body else good)(handler, body)
    strategy = endpoint()
    strategy.prepare(1, 64)
    assert strategy._server.record()["fields"] == fields
    assert one(strategy, sampling=Sampling(temperature=1.0)).error is None


def test_what_servers_read_in_different_ways_is_refused():
    for sampling in (Sampling(top_k=5), Sampling(presence_penalty=1.0), Sampling(min_new_tokens=3)):
        with pytest.raises(UsageError, match="not passed on"):
            Endpoint.check(sampling, 1)
    Endpoint.check(Sampling(temperature=1.0, verify="rejection"), 8)


def test_eviction_asks_for_one_token_before_the_clock(server, endpoint):
    one(endpoint(evict=True))
    before, body = server.asked
    assert (before["max_tokens"], len(before["prompt"])) == (1, 1)
    assert body["prompt"] == list(PROMPT)


def test_an_eviction_that_fails_is_a_failed_sample_and_not_a_warm_cache(server, endpoint):
    """It was passed over in silence, and took the counters of drafting with it."""
    good = say(piece("x", "length"))
    server.answer = lambda handler, body: (refuse(400, "no") if len(body["prompt"]) == 1 else good)(handler, body)
    strategy = endpoint(evict=True)
    assert "answers /completions with 400: 'no'" in (one(strategy).error or "")
    server.answer = good
    assert one(strategy).error is None


# What the server tells


def test_drafting_that_llama_cpp_tells_is_in_the_record(server, endpoint):
    timings = {"timings": {"draft_n": 20, "draft_n_accepted": 15, "cache_n": 2}}
    server.answer = say(piece("abc", "length"), usage(3, 3) | timings)
    facts = one(endpoint()).facts
    assert facts == {"prompts": "ids", "completion_tokens": 3, "prompt_tokens": 3, "cached_tokens": 2, "drafted": 20,
                     "accepted": 15}  # fmt: skip


def test_vllms_counters_are_read_before_and_after_a_call(server, endpoint):
    def counters(rounds: int, drafted: int, accepted: int) -> str:
        return (
            f'# HELP x\nvllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}.0\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0"}} 7.0\n'
        )

    def answer(handler, body):
        server.metrics = counters(14, 50, 36)
        say(piece("abc", "length"))(handler, body)

    server.metrics = counters(10, 40, 30)
    strategy = endpoint()
    strategy.prepare(1, 64)
    server.answer = answer
    facts = one(strategy).facts
    assert {name: facts[name] for name in ("rounds", "drafted", "accepted", "of_call")} == {
        "rounds": 4, "drafted": 10, "accepted": 6, "of_call": True}  # fmt: skip
    samples = [sample(facts=facts, group=1, batch_rows=2), sample(facts=facts, group=1, batch_rows=2)]
    assert served.drafting(samples) == {"drafted": 10, "accepted": 6, "rounds": 4}  # of both rows together


def sample(ids: str = "abc", arm: str = "endpoint", **more: Any) -> Sample:
    values: dict[str, Any] = dict(
        arm=arm, task="t", prompt_id="p", prompt_hash="h", category="", turn=0, repeat=0, kind="measure", group=0,
        batch_rows=1, prompt_tokens=3, max_new_tokens=16, token_ids=list(ids.encode()), finish="length", ttft_ns=1,
        e2e_ns=len(ids), drain_ns=0, steps=[[1, len(ids), 0, 0, 0]],
    )  # fmt: skip
    return Sample(**(values | more))


def test_counts_that_are_not_ours_are_told():
    facts = {"prompts": "text", "prompt_tokens": 4, "completion_tokens": 9, "cached_tokens": 2, "retries": 2}
    text = served.told("t", "endpoint", [sample(facts=facts)]) or ""
    for part in ("sent again (2 times", "4 tokens for the 3 of p", "counts 9 tokens where its text is 3", "2 of 4"):
        assert part in text
    assert served.told("t", "endpoint", [sample(facts={"prompts": "ids", "prompt_tokens": 3})]) is None
    assert served.told("t", "lookup", [sample(facts={"drafted": 3})]) is None


def test_answers_are_compared_as_text():
    """The baseline's ids may spell the same text in another way."""
    base = sample("xy", arm="autoregressive")
    judge = lambda *_: lossless.Divergence(0, 1.0, 1.0, 0.1)  # noqa: E731
    found = lossless.report(
        [base, sample("abc")], "autoregressive", ["endpoint"], judge, {"endpoint": lambda ids: [*b"abc"]}
    )
    counts = found["t"]["endpoint"]
    assert (counts["exact"], counts["text_only"]) == (1, True)
    assert (
        lossless.report([base, sample("abc")], "autoregressive", ["endpoint"], judge)["t"]["endpoint"]["different"] == 1
    )


# What goes wrong: one line that names the server


def cut_off(handler, body):
    handler.begin()
    handler.event(piece("ab"))
    handler.cut()


def ends_early(handler, body):
    handler.begin()
    handler.event(piece("ab"))
    handler.end()


def silent(handler, body):
    handler.silence()


def silent_later(handler, body):
    handler.begin()
    handler.event(piece("ab"))
    handler.silence()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (cut_off, "the connection broke off"),
        (ends_early, "ended in the middle of the answer"),
        (silent, "silent for 0.2 s before the first token"),
        (silent_later, "silent for 0.2 s between two tokens"),
        (say(piece("a"), "{not json"), "no JSON: '{not json'"),
        (say("[1, 2]"), "no completion"),
        (say({"choices": "many"}), "choice of another shape"),
        (say({"choices": [{"text": 3}]}), "text that is none"),
        (say(piece("a", "abort")), 'finish_reason "abort"'),
        (say(piece("a"), {"error": {"message": "out of memory", "code": 500}}), "an error: out of memory"),
        (say(piece("", "length")), "the answer holds no text"),
        (refuse(200, {"choices": [{"text": "whole"}]}), "does not stream"),
        (refuse(500, {"error": {"message": "worker\ndied"}}), "500: worker died (tried 2 times)"),
        (refuse(429, "slow down"), "429: 'slow down' (tried 2 times)"),
        (refuse(404, {"detail": "Not Found"}), "404: Not Found"),
        (refuse(400, {"message": "prompt too long"}), "400: prompt too long"),
        (refuse(401), f"wants a key; set {KEY} (401)"),
        (refuse(307, "", Location="http://elsewhere/"), "with 307"),
    ],
)  # fmt: skip
def test_a_failed_request_is_one_line_without_times_and_the_next_one_runs(server, endpoint, answer, message):
    strategy = endpoint(first_token_s=0.2, next_token_s=0.2, retries=1)
    server.answer = answer
    failed = one(strategy)
    assert message in (failed.error or "")
    assert "\n" not in failed.error
    assert failed.error.startswith(server.url)
    assert (failed.ttft_ns, failed.e2e_ns, failed.token_ids, failed.steps) == (None, None, [], [])
    server.answer = say(piece("fine", "length"))
    assert bytes(one(strategy).token_ids) == b"fine"


def test_what_follows_a_whole_answer_may_fail(server, endpoint):
    def answer(handler, body):
        handler.begin()
        handler.event(piece("abc", "length"))
        handler.cut()

    server.answer = answer
    assert bytes(one(endpoint()).token_ids) == b"abc"


def test_what_fails_after_a_whole_answer_is_no_matter_of_the_next_request(server, endpoint):
    """Only errors of the protocol were passed over; any other one ended the request that had the row by then."""
    too_deep = "[" * 100_000  # a RecursionError, and no ValueError

    def next_one(handler, body):
        handler.begin()
        time.sleep(0.1)  # until what follows the first answer has been read
        handler.event(piece("def", "length"))
        handler.end()

    server.answer = in_turn(say(piece("abc", "length"), too_deep), next_one)
    first, second = ask(endpoint(), count=2, rows=1)
    assert (first.error, second.error) == (None, None)
    assert (bytes(first.token_ids), bytes(second.token_ids)) == (b"abc", b"def")


def test_ctrl_c_while_a_server_is_waited_for_leaves_nothing_under_way(server, endpoint):
    def interrupt(handler, body):
        handler.begin()
        handler.event(piece("a"))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        handler.silence()

    strategy, before = endpoint(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        server.answer = interrupt
        with pytest.raises(KeyboardInterrupt):
            one(strategy)
    finally:
        signal.signal(signal.SIGINT, before)
    assert asyncio.all_tasks(strategy._server.loop) == set()
    server.answer = say(piece("fine", "length"))
    assert bytes(one(strategy).token_ids) == b"fine"


def test_a_request_that_is_sent_again_is_timed_from_then_on_and_says_so(server, endpoint):
    server.answer = in_turn(refuse(503), refuse(429, "", Retry_After="0"), say(piece("a"), piece("b", "length")))
    outcome = one(endpoint())
    assert outcome.error is None
    assert outcome.facts["retries"] == 2
    assert (outcome.ttft_ns, outcome.e2e_ns, outcome.call_ns) == (TICK, 2 * TICK, 2 * TICK)
    assert outcome.start_ns > 2 * TICK  # later than without


def test_no_server_no_model_and_several_models_are_told_before_anything_else(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(ModelError, match=f"{nobody}: cannot be connected to .* is the server running there"):
        find_model(EndpointOptions(url=nobody))
    server.models = ["big", "small"]
    assert find_model(EndpointOptions(url=server.url, model="big"))["id"] == "big"
    with pytest.raises(ModelError, match=r'did you mean "small"\? It has: big, small'):
        find_model(EndpointOptions(url=server.url, model="smal"))
    with pytest.raises(ModelError, match=r"several models; name one with endpoint.model=NAME: big, small"):
        find_model(EndpointOptions(url=server.url))
    server.models = []
    with pytest.raises(ModelError, match="names no model"):
        find_model(EndpointOptions(url=server.url))
    with pytest.raises(ModelError, match=r"/models with 404"):
        find_model(EndpointOptions(url=server.url.replace("/v1", "/v2")))


# Several at a time


def test_requests_of_a_batch_are_under_way_together_and_fail_alone(server, endpoint):
    """Five prompts through three rows; the first three have to meet, and one of them fails."""
    meeting, lock, seen = threading.Barrier(3), threading.Lock(), []

    def answer(handler, body):
        with lock:
            seen.append(body)
            number = len(seen)
        if number <= 3:
            meeting.wait(10)
        if number == 2:
            handler.document(400, {"message": "not this one"})
        else:
            say(piece("ab"), piece("c", "length"), usage(3, 3))(handler, body)

    server.answer = answer
    outcomes = ask(endpoint(), count=5, rows=3)
    assert sorted(outcome.error is None for outcome in outcomes) == [False, True, True, True, True]
    good = [outcome for outcome in outcomes if outcome.error is None]
    assert all(bytes(outcome.token_ids) == b"abc" for outcome in good)
    assert all(outcome.facts["completion_tokens"] == 3 for outcome in good)
    assert sum(outcome.admitted_ns > 0 for outcome in outcomes) == 2
    assert good[0].call_tokens == 12


# Secrets


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@127.0.0.1:1/v1", f"http://{SECRET}@host/v1", f"http://host/v1?key={SECRET}",
        f"http://me:{SECRET}@host:port/v1", f"ftp://me:{SECRET}@host/v1", f"me:{SECRET}@host/v1", "http:///v1", "",
        "http://ho st/v1",
    ],
)  # fmt: skip
def test_an_address_with_a_secret_or_without_a_host_is_refused_and_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        build(EndpointOptions, {"url": url}, 'strategy "endpoint"')
    assert SECRET not in str(caught.value)
    assert SECRET not in without_secrets(url)
    if "://" in url:  # what else is refused is never stored
        assert SECRET not in redact(f"--target=endpoint:{url}")


def test_options_that_cannot_be_used_are_refused():
    good = {"url": "http://host/v1"}
    for given, message in (
        ({"connect-s": "0"}, "connect-s"), ({"retries": "-1"}, "retries"), ({"extra": "[1]"}, "object"),
        ({"extra": "{"}, "not valid JSON"), ({"extra": '{"prompt": "x"}'}, "prompt is said by the run itself"),
        ({"prompts": "words"}, "ids"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            build(EndpointOptions, good | given, 'strategy "endpoint"')
    with pytest.raises(UsageError, match="needs the option url"):
        build(EndpointOptions, {}, 'strategy "endpoint"')


def test_the_key_is_sent_and_never_repeated(server, endpoint, monkeypatch):
    without = endpoint()
    monkeypatch.setenv(KEY, SECRET)
    with_key = endpoint()
    one(without)
    assert "authorization" not in server.headers[-1]
    one(with_key)
    assert server.headers[-1]["authorization"] == f"Bearer {SECRET}"
    server.answer = lambda handler, body: handler.document(
        400, {"message": f"wrong: {handler.headers['authorization']}"}
    )
    assert one(with_key).error == f"{server.url}: answers /completions with 400: wrong: Bearer [key]"
    server.answer = refuse(403)
    assert f"does not take the key in {KEY} (403)" in (one(with_key).error or "")
    monkeypatch.setenv(KEY, "Basic bWU6cGFzc3dvcmQ=")
    one(endpoint())
    assert server.headers[-1]["authorization"] == "Basic bWU6cGFzc3dvcmQ="
    monkeypatch.setenv(KEY, "sk-\u00e9\u00e9\u00e9")
    with pytest.raises(UsageError) as caught:
        endpoint()
    assert "\u00e9" not in str(caught.value)


# Whole runs


@pytest.fixture(scope="module")
def honest(info):
    """Answers as the tiny model does, three tokens a piece, with drafting told as llama.cpp tells it."""
    model, lock = load(info), threading.Lock()

    def answer(handler, body):
        ids, text = list(body["prompt"]), ""
        with lock:
            model.reset()
            for _ in range(body["max_tokens"]):
                ids.append(int(model.advance([ids], 1)[0].argmax()))
                text += chr(ids[-1])
        parts = [text[at : at + 3] for at in range(0, len(text), 3)]
        told = usage(len(text), len(body["prompt"])) | {"timings": {"draft_n": 8, "draft_n_accepted": 4}}
        say(*map(piece, parts[:-1]), piece(parts[-1], "length"), told)(handler, body)

    yield answer
    model.close()


def settings(out: Path | None, server: CompletionsServer, **changes: Any) -> Plan:
    plain = dict(
        strategy=("lookup", "endpoint"), target="tiny", limit=3, max_new_tokens=8, threads=1, trace=1, out=out,
        options={"endpoint": {"url": server.url, "retry-s": "0.01", "first-token-s": "5"}},
    )  # fmt: skip
    return Plan(**(plain | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, honest):
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, SECRET)
        server.answer = honest
        yield runs.run(settings(tmp_path_factory.mktemp("beside") / "run", server), argv=["run", f"--key={SECRET}"])


def test_a_server_stands_beside_our_arms_in_one_table(finished):
    row = next(row for row in finished.summary.rows if row.strategy == "endpoint")
    assert (row.engine, row.runtime, row.n_ok) == ("endpoint", "server", 4)
    assert row.exactness["exact"] == row.exactness["compared"] == 4
    assert tables.exactness(row) == "4/4 exact,\ntext only"
    assert (row.acceptance_rate, row.tokens_per_step, row.peak_memory_bytes) == (0.5, None, None)
    assert row.decode_speedup.per_token
    assert row.tokens == 32
    assert row.tpot_ns == pytest.approx(row.sums["decode_ns"] / 28)
    title = "\n".join(finished.summary.title)
    assert re.search(r"endpoint: toy at 127\.0\.0\.1:\d+, another engine; .* prompts sent as token ids", title)
    ours = {caution.code for caution in finished.summary.cautions if caution.arm == "endpoint"}
    assert ours.isdisjoint({"state", "different-tokens", "stall"})
    assert finished.failures == []


def test_the_record_says_what_it_ran_on(finished):
    arm = next(arm for arm in finished.manifest["arms"] if arm["name"] == "endpoint")
    role = arm["roles"]["target"]
    assert (arm["sends_text"], role["served"], role["owned_by"], role["prompts"]) == (True, "toy", "tests", "ids")
    assert role["dtype"] is None
    assert role["device"] is None
    assert re.fullmatch(r"127\.0\.0\.1:\d+", role["host"])
    row = next(row for row in finished.summary.rows if row.strategy == "endpoint")
    assert (row.devices, row.decode_speedup_per_device) == ([], None)  # on how many devices, nobody knows
    kinds = {(one.arm, one.kind) for one in RunFolder(finished.folder).samples()}
    assert ("endpoint", "check") in kinds
    assert ("endpoint", "trace") not in kinds


def test_no_file_holds_the_key(finished):
    for path in finished.folder.rglob("*"):
        assert SECRET not in path.read_text(encoding="utf-8"), path.name


def test_a_prompt_that_fails_is_a_record_and_the_run_goes_on(tmp_path, server, honest):
    calls = []

    def answer(handler, body):
        calls.append(body)
        # the first two try out and warm up
        (refuse(500, {"error": {"message": "no memory"}}) if len(calls) in (3, 4, 5) else honest)(handler, body)

    server.answer = answer
    result = runs.run(settings(tmp_path / "run", server, strategy=("endpoint",), trace=0))
    samples = [one for one in RunFolder(result.folder).samples() if one.arm == "endpoint" and one.kind == "measure"]
    assert [one.error is None for one in samples].count(False) == 1
    failed = next(one for one in samples if one.error)
    assert "answers /completions with 500: no memory (tried 3 times)" in failed.error
    assert (failed.ttft_ns, failed.e2e_ns, failed.token_ids) == (None, None, [])
    assert result.failures
    rows = json.loads((result.folder / "summary.json").read_text())["rows"]
    assert {row["strategy"]: row["n_failed"] for row in rows} == {"autoregressive": 0, "endpoint": 1}


def test_a_server_alone_and_our_arms_are_compared_afterwards(tmp_path, server, honest, finished):
    server.answer = honest
    flags = dict(
        target=f"endpoint:{server.url}#toy", tokenizer="tiny", limit=3, max_new_tokens=8, out=tmp_path / "alone",
        trace=0, dtype="bfloat16",
    )  # fmt: skip
    plan = resolve(flags)
    assert (plan.strategy, plan.target, plan.baseline) == (("endpoint",), "tiny", False)
    alone = runs.run(plan)
    assert alone.manifest["load_ns"] == []  # no weights were read
    assert "which nobody recorded" in alone.summary.title[0]
    table = compare.compare(load_runs([finished.folder, alone.folder]))
    rows = {row.own_name: row for row in table.compared if row.run == "alone"}
    assert tables.exactness(rows["endpoint"]) == "4/4 exact,\ntext only"
    assert rows["endpoint"].decode_speedup is not None


@pytest.mark.parametrize(
    ("strategies", "baseline", "reference"),
    [
        (("endpoint", "lookup"), True, "autoregressive"),
        (("endpoint", "lookup"), False, "lookup"),
        (("endpoint", "hf-assisted"), False, "hf-assisted"),
        (("endpoint",), False, "endpoint"),
    ],
)
def test_a_server_is_the_reference_only_where_it_is_alone(server, strategies, baseline, reference):
    assert check(settings(None, server, strategy=strategies, baseline=baseline)).reference == reference


def test_without_a_baseline_a_server_is_compared_with_ours_and_not_ours_with_it(tmp_path, server, honest):
    """It was named first, so that its answers were replayed, and ids of ours were compared with those of its text."""
    server.answer = honest
    plan = settings(tmp_path / "run", server, strategy=("endpoint", "lookup"), baseline=False, trace=0)
    result = runs.run(plan)
    assert (result.manifest["lossless_reference"], result.manifest["replayed_answers_of"]) == ("lookup", "lookup")
    rows = {row.arm: row for row in result.summary.rows}
    assert (rows["lookup"].reference, rows["endpoint"].reference) == (True, False)
    assert tables.exactness(rows["endpoint"]) == "4/4 exact,\ntext only"
    table = compare.compare(load_runs([result.folder]), baseline="endpoint")
    ours = next(row for row in table.compared if row.own_name == "lookup")
    assert ours.decode_speedup.per_token
    assert tables.exactness(ours) == "4/4 exact,\ntext only"
    assert not any(caution.code == "other-lengths" for caution in table.cautions)


@pytest.mark.skipif(len(available_cores()) < 2, reason="two ranks need two cores")
def test_ranks_are_of_our_target_whatever_a_server_runs_on(server):
    """It was refused, as a loop in one process."""
    cores = available_cores()
    shared = dict(tp=2, runtime="transformers", place=f"target=cpu:{cores[0]},{cores[-1]}")
    names = [arm.name for arm in check(settings(None, server, strategy=("endpoint",), **shared)).arms]
    assert names == ["autoregressive", "endpoint"]
    with pytest.raises(UsageError, match="endpoint: --tp 2 shares a target of ours among ranks, and here a server"):
        check(settings(None, server, strategy=("endpoint",), baseline=False, **shared))


# The command line


def invoke(*words: str):
    return CliRunner().invoke(app, ["run", *words, "--threads", "1", "-n", "2", "--max-new-tokens", "6"])


def test_a_server_is_named_as_a_target(tmp_path, server, honest):
    server.answer = honest
    target = ["--target", f"endpoint:{server.url}#toy", "--tokenizer", "tiny"]
    done = invoke(*target, "--out", str(tmp_path / "run"), "--batch", "2")
    assert done.exit_code == 0, done.output
    assert "toy at 127.0.0.1" in " ".join(done.stdout.split())
    assert invoke(*target, "--out", str(tmp_path / "run"), "--batch", "2", "--resume").exit_code == 0
    assert invoke(*target, "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --tokenizer"),
        (["--tokenizer", "tiny", "-s", "lookup"], "without lookup"),
        (["--tokenizer", "tiny", "-d", "tiny-draft"], "without --draft"),
        (["--tokenizer", "tiny", "--baseline"], "without --baseline"),
        (["--tokenizer", "tiny", "--ignore-eos"], "leave --ignore-eos out"),
        (["--tokenizer", "tiny", "--top-k", "4"], "not passed on"),
        (["--tokenizer", "tiny", "--option", "endpoint.url=http://other/v1"], "already what --option endpoint.url"),
        (["--tokenizer", "tiny", "--option", "endpoint.model=x"], "says already what --option endpoint.model would"),
        (["--tokenizer", "tiny", "--dry-run"], "has the model"),
    ],
)
def test_wrong_words_are_one_line_before_anything_runs(server, words, message):
    server.models = ["other"]
    done = invoke("--target", f"endpoint:{server.url}#toy", *words)
    assert done.exit_code == 2
    if message == "has the model":
        message = 'unknown model "toy"; known: other. It has: other'
    assert message in " ".join(done.stderr.split())
    assert server.asked == []


def test_the_command_line_keeps_a_password_to_itself(server):
    secret = server.url.replace("//", f"//me:{SECRET}@")
    for words in (["--tokenizer", "tiny"], []):
        done = invoke("--target", f"endpoint:{secret}#toy", *words)
        assert done.exit_code == 2
        assert SECRET not in done.output
    assert "user and password in an address" in invoke("--target", f"endpoint:{secret}", "--tokenizer", "tiny").stderr
    done = invoke("--target", "tiny", "--tokenizer", "tiny")
    assert "goes with --target endpoint:URL" in done.stderr


# A real one


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.skipif(not os.environ.get("SPECBENCH_TEST_GGUF"), reason="SPECBENCH_TEST_GGUF names no GGUF file")
def test_a_real_llama_cpp_server_beside_our_arms(monkeypatch, capsys):
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    if not folder.is_dir():
        pytest.skip("the benchmarks are not part of the wheel")
    monkeypatch.syspath_prepend(str(folder))
    main = importlib.import_module("endpoint").main
    gguf = os.environ["SPECBENCH_TEST_GGUF"]
    words = ["--gguf", gguf, "--target", gguf, "--limit", "2", "--max-new-tokens", "16", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = [row for row in document["table"]["rows"] if row["strategy"] == "endpoint"]
    assert len(rows) == 2
    assert all(row["n_ok"] and not row["n_failed"] for row in rows)
