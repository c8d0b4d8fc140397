"""A completions server: a model somewhere else, which takes whole prompts and sends text.

It is asked for one answer per row, and what arrives is handed on piece by piece. Counts are never made of pieces: vLLM
sends several tokens in one, or an empty one for a token whose text is not whole yet; llama.cpp sends nothing for such a
token; an announcement of who speaks is none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections import deque
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..errors import ModelError
from .base import CachedModel, Ids
from .endpoint_client import Busy, Client, Refused
from .endpoint_options import EndpointOptions

if TYPE_CHECKING:
    from .info import ModelInfo
    from .tokenizer import TextCodec

T = TypeVar("T")

_MOST_ROWS = 1024
FIELDS = ("all", "most", "none")
_ENDS = {"length": "length", "stop": "eos"}
_TAIL_S = 5.0  # for what is told after an answer
# vLLM's counters of its own drafting, without the `_total` that newer exporters put behind a name.
_COUNTERS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens",
             "rounds": "vllm:spec_decode_num_drafts"}  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """What came for a row: a piece of text, how the answer ended, why there is none, or that it is asked for anew.

    Attributes:
        finish: `eos`, `stop` or `length` in the last piece, else None.
        go_on: set by the receiver of a restart once it has noted the time; nothing is sent before.
    """

    row: int
    text: str = ""
    finish: str | None = None
    error: str | None = None
    go_on: asyncio.Event | None = None


@dataclass(frozen=True)
class Sampled:
    """How tokens are chosen, as far as a server is told.

    Attributes:
        stop: strings that end an answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


def find_model(options: EndpointOptions) -> dict[str, Any]:
    """What the server says of the model. Raises ModelError: no server there, or it does not have the model."""

    async def ask() -> dict[str, Any]:
        client = Client(options)
        try:
            return await client.model()
        finally:
            await client.close()

    return asyncio.run(ask())


class Server(CachedModel):
    """A model behind a completions server; it has no cache that we could see, and computes no logits for us.

    Attributes:
        served: the model's name there.
        form: `ids` or `text`: how prompts are sent.
        loop: the event loop that all its requests run in, whenever somebody waits for one.
        fields: how many of our fields it takes: `all`, `most` (top-k and min-p are its own), `none` but those of the
            protocol, so that its own defaults hold for the rest.
    """

    runtime = "server"
    kernels = "server"
    device = "unknown"
    dtype = "unknown"

    def __init__(self, info: ModelInfo, options: EndpointOptions) -> None:
        self.options, self.info = options, info
        self.codec: TextCodec = info.codec
        self.name = options.base
        self.vocab_size, self.context_length, self.max_rows = info.vocab_size, info.context_length, _MOST_ROWS
        self.form = "ids" if options.prompts == "ids" else "text"
        self.fields = FIELDS[0]
        self.counts_drafts = False  # whether there are counters to read
        self._salts = itertools.count()
        self._run_salt = secrets.token_hex(4)
        self.loop = asyncio.new_event_loop()
        self._client: Client | None = None
        try:
            self.facts = self.wait(self.client.model())
        except BaseException:
            self.close()
            raise
        self.served = str(self.facts["id"])

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.options)
        return self._client

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; what else is under way goes on meanwhile."""
        return self.loop.run_until_complete(work)

    def record(self) -> dict[str, Any]:
        """Name and fingerprint are those of the model that the tokenizer came from."""
        return {
            "model": self.info.name, "device": None, "threads": None, "dtype": None, "runtime": self.runtime,
            "kernels": None, "fingerprint": self.info.fingerprint, "weight_bytes": None, "served": self.served,
            "host": self.options.host, "owned_by": self.facts.get("owned_by"), "software": self.client.software,
            "prompts": self.form, "fields": self.fields,
        }  # fmt: skip

    # Before the clock

    def try_out(self) -> None:
        """Finds out in what form the server takes a request: prompts as ids or as text, and which of the fields that
        are not of the protocol. Raises ModelError where it takes none."""
        forms = ("ids", "text") if self.options.prompts == "auto" else (self.options.prompts,)
        ids = [*self.codec.prefix, *self.codec.encode("one two three")]
        failed: ModelError | None = None
        for self.fields, self.form in itertools.product(FIELDS, forms):
            told: dict[str, Any] = {}
            try:
                self.wait(self._patiently(self.body(ids, 1, Sampled(temperature=1.0)), told))
            except (Refused, Busy) as error:  # some answer 500 to what they do not take
                failed = error
                continue
            read = told.get("prompt_tokens")
            if self.form == "ids" and len(forms) > 1 and read not in (None, len(ids)):
                continue  # it took them for something else
            self.counts_drafts = self.wait(self._counters()) is not None
            return
        raise failed or ModelError(f"{self.name}: takes prompts neither as token ids nor as text")

    def make_ready(self, rows: int) -> dict[str, int] | None:
        """Opens a connection for each row, and empties what a server keeps where `evict` asks for it; its counters of
        drafting as they stand, where it has any. Raises ModelError where `evict` fails."""

        async def ready() -> dict[str, int] | None:
            await asyncio.gather(*(self.client.get("models") for _ in range(rows)), return_exceptions=True)
            if self.options.evict:
                await self._patiently(self.body(self.codec.encode(".")[:1], 1, Sampled()), {})
            return await self._counters() if self.counts_drafts else None

        return self.wait(ready())

    async def _counters(self) -> dict[str, int] | None:
        try:
            text = await self.client.text(self.options.root, "metrics")
        except ModelError:
            return None
        found = {name: _counter(text, metric) for name, metric in _COUNTERS.items()}
        return None if None in found.values() else found  # type: ignore[return-value]

    async def drafting_since(self, before: dict[str, int] | None) -> dict[str, Any]:
        """What the server drafted since `before`, in all requests of all its clients; empty where it does not say."""
        after = await self._counters() if before is not None else None
        if before is None or after is None:
            return {}
        return {name: after[name] - before[name] for name in after} | {"of_call": True}

    # Answers

    def body(self, ids: Ids, limit: int, sampled: Sampled) -> dict[str, Any]:
        """A request. Everything that a server could fill in from defaults of its own is said, where it lets us."""
        body: dict[str, Any] = {
            "model": self.served, "prompt": list(map(int, ids)) if self.form == "ids" else self._text(ids),
            "max_tokens": limit, "temperature": sampled.temperature, "top_p": sampled.top_p, "stream": True,
        }  # fmt: skip
        if sampled.temperature:
            body["seed"] = sampled.seed
        if sampled.stop:
            body["stop"] = list(sampled.stop)
        if self.fields != "none":
            body |= {"stream_options": {"include_usage": True}, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
            if sampled.temperature and self.fields == "all":
                body |= {"top_k": -1, "min_p": 0.0}
            if not self.options.reuse:
                body |= {"cache_prompt": False, "cache_salt": f"specbench-{self._run_salt}-{next(self._salts)}"}
        return body | self.options.fields

    def _text(self, ids: Ids) -> str:
        """The prompt as text; without the special tokens that a tokenizer puts in front, which the server adds, too."""
        prefix, plain = self.codec.prefix, [int(token) for token in ids]
        if prefix and plain[: len(prefix)] == prefix:
            plain = plain[len(prefix) :]
        return self.codec.decode(plain)

    async def _complete(self, body: dict[str, Any], told: dict[str, Any]) -> None:
        async with aclosing(self.client.stream(body)) as chunks:
            async for chunk in chunks:
                _note(chunk, told)

    async def _patiently(self, body: dict[str, Any], told: dict[str, Any]) -> None:
        for attempt in range(self.options.retries + 1):
            try:
                return await self._complete(body, told)
            except Busy as busy:
                if attempt == self.options.retries:
                    raise
                await asyncio.sleep(busy.wait(attempt, self.options))

    def exchange(self) -> Exchange:
        return Exchange(self)

    # What a model of ours has

    def advance(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name}: a server computes whole answers, and shows no logits")

    def reset(self) -> None:
        """Does nothing: what a server keeps is its own; see `make_ready`."""

    def close(self) -> None:
        if self.loop.is_closed():
            return
        try:
            self.wait(self._leave())
        finally:
            self.loop.close()

    async def _leave(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        await self.loop.shutdown_asyncgens()

    @property
    def weight_bytes(self) -> int:
        return 0


class Exchange:
    """The answers of one call, all rows together, in the order in which they arrive."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._arrivals: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._held: asyncio.Event | None = None
        self._tasks: list[asyncio.Task] = []
        self._answering: set[asyncio.Task] = set()  # those whose answer has not ended

    def ask(self, row: int, ids: Ids, limit: int, sampled: Sampled) -> dict[str, Any]:
        """Sends a request as soon as somebody waits; returns where what the server tells of it will stand."""
        told: dict[str, Any] = {"prompts": self._server.form}
        body = self._server.body(ids, limit, sampled)
        task = self._server.loop.create_task(self._answer(row, body, sampled.stop, told))
        self._tasks.append(task)
        self._answering.add(task)
        return told

    def next(self) -> Arrival:
        """The next thing to arrive in any row; something has to be under way."""
        if self._held is not None:
            self._held.set()
        while not self._arrivals:
            self._arrived.clear()
            self._server.wait(self._arrived.wait())
        arrival = self._arrivals.popleft()
        self._held = arrival.go_on
        return arrival

    def end(self, before: dict[str, int] | None = None) -> dict[str, Any]:
        """Breaks off what has not ended, hears the rest of what has, and returns what was drafted meanwhile.

        Args:
            before: the server's counters before the first request.
        """
        self._arrived.set()  # whoever waits was interrupted
        for task in self._answering:
            task.cancel()

        async def rest() -> dict[str, Any]:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=_TAIL_S)
                for task in late:
                    task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return await self._server.drafting_since(before)

        return self._server.wait(rest())

    def _put(self, arrival: Arrival) -> None:
        """Hands on what the running task has heard, until its answer has ended: the row is another request's then."""
        task = asyncio.current_task()
        if task not in self._answering:
            return
        if arrival.finish is not None or arrival.error is not None:
            self._answering.discard(task)
        self._arrivals.append(arrival)
        self._arrived.set()

    async def _answer(self, row: int, body: dict[str, Any], stop: tuple[str, ...], told: dict[str, Any]) -> None:
        options = self._server.options
        for attempt in range(options.retries + 1):
            try:
                await self._hear(row, body, stop, told)
            except Busy as busy:
                if attempt == options.retries:
                    tried = f" (tried {attempt + 1} times)" if attempt else ""
                    self._put(Arrival(row, error=f"{busy}{tried}"))
                    return
                told["retries"] = attempt + 1
                await asyncio.sleep(busy.wait(attempt, options))
                go_on = asyncio.Event()
                self._put(Arrival(row, go_on=go_on))
                await go_on.wait()
            except ModelError as error:
                self._put(Arrival(row, error=str(error)))
                return
            except Exception as error:  # noqa: BLE001 - nobody awaits this task before its answer has come
                self._put(Arrival(row, error=f"{self._server.name}: {type(error).__name__}: {error}"))
                return
            else:
                return

    async def _hear(self, row: int, body: dict[str, Any], stop: tuple[str, ...], told: dict[str, Any]) -> None:
        ended = False
        async with aclosing(self._server.client.stream(body)) as chunks:
            async for chunk in chunks:
                _note(chunk, told)
                try:
                    piece = None if ended else _piece(chunk)
                except ValueError as error:
                    raise ModelError(f"{self._server.name}: {error}") from None
                if piece is None:
                    continue
                text, finish, matched = piece
                if finish == "eos" and stop:
                    finish, text = _stopped(text, stop, matched)
                ended = finish is not None
                self._put(Arrival(row, text, finish))
        if not ended:
            raise ModelError(f"{self._server.name}: the stream ended in the middle of the answer")


_NOTHING = object()


def _piece(chunk: dict[str, Any]) -> tuple[str, str | None, Any] | None:
    """Text, finish and the stop string that a chunk tells of; None for a chunk that stands for no token: usage alone,
    an announcement of who speaks, or one that says itself that no token has been made.

    Raises:
        ValueError: a choice of another shape, or an answer that the server broke off.
    """
    choices = chunk.get("choices")
    if not choices:
        return None
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else None
    if choice is None:
        raise ValueError(f"sent a choice of another shape: {json.dumps(choices)[:80]}")
    ended = choice.get("finish_reason")
    if ended and ended not in _ENDS:
        raise ValueError(f"ended the answer with finish_reason {json.dumps(ended)[:80]}")
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if not text and not ended and (isinstance(delta, dict) or text is None or _made(chunk) == 0):
        return None
    text = "" if text is None else text
    if not isinstance(text, str):
        raise ValueError(f"sent text that is none: {json.dumps(text)[:80]}")
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text
    return text, _ENDS[ended] if ended else None, choice.get("stop_reason", _NOTHING)


def _stopped(text: str, stop: tuple[str, ...], matched: Any) -> tuple[str, str]:
    """Which way an answer ended, and its text with the stop string that the server has cut off.

    vLLM says which one it was, and None for an end of text; of others nothing is known if there are several.
    """
    if matched is None:
        return "eos", text
    if isinstance(matched, str):
        return "stop", text + matched
    return "stop", text + (stop[0] if len(stop) == 1 else "")


def _made(chunk: dict[str, Any]) -> int | None:
    usage = chunk.get("usage")
    return usage.get("completion_tokens") if isinstance(usage, dict) else None


def _note(chunk: dict[str, Any], told: dict[str, Any]) -> None:
    """Counts that the server tells: usage as in the protocol, and llama.cpp's timings with its drafting."""
    usage, timings = chunk.get("usage"), chunk.get("timings")
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        _take(told, usage, completion_tokens="completion_tokens", prompt_tokens="prompt_tokens")
        _take(told, details if isinstance(details, dict) else {}, cached_tokens="cached_tokens")
    if isinstance(timings, dict):
        _take(told, timings, drafted="draft_n", accepted="draft_n_accepted", cached_tokens="cache_n")


def _take(told: dict[str, Any], given: dict[str, Any], **names: str) -> None:
    for name, key in names.items():
        if type(given.get(key)) is int:
            told[name] = given[key]


def _counter(text: str, name: str) -> int | None:
    """The sum of a Prometheus counter over its labels; None where it is not there."""
    found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:\{{[^}}]*\}})? +([\d.eE+]+)", text, re.MULTILINE)
    return int(sum(map(float, found))) if found else None
