"""Speaks with an OpenAI-compatible completions server: which models it has, and one answer as it is streamed.

httpx2 in an event loop of our own, without threads: what arrives waits in the socket until somebody asks for it. An
answer's events are parsed one by one, by the rules of server-sent events (a line ends at a line feed, never at the
other separators that a JSON text may hold). Every error is one line that names the server and no key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from ..errors import ModelError, unknown
from .endpoint_options import KEY, EndpointOptions, authorization

T = TypeVar("T")

_LONGEST_WAIT_S = 60.0
_TAIL_S = 1.0  # for what follows the end of an answer; nothing is lost without it but the connection
_MOST_NAMES = 8


class Busy(ModelError):
    """429 or 5xx: the request may be sent again.

    Attributes:
        wait_s: how long the server asks to wait; None where it does not say.
    """

    def __init__(self, text: str, wait_s: float | None) -> None:
        super().__init__(text)
        self.wait_s = wait_s

    def wait(self, attempt: int, options: EndpointOptions) -> float:
        """Seconds before the next attempt, which are at most 60."""
        asked = options.retry_s * 2**attempt if self.wait_s is None else self.wait_s
        return min(asked, _LONGEST_WAIT_S)


class Refused(ModelError):
    """400 or 422: the server does not take a request of this form."""


class Client:
    """One server. Not for two event loops.

    Attributes:
        name: the address, for messages.
        software: what it calls itself in its `Server` header; None before the first answer, or where it has none.
    """

    def __init__(self, options: EndpointOptions) -> None:
        import httpx2

        self._httpx, self._options = httpx2, options
        self.name, self.software = options.base, None
        header = authorization()
        self._has_key = header is not None
        self._secrets = [word for word in (header or "").split()[1:] if len(word) > 3]
        # Nothing on this machine is reached through a proxy.
        direct: dict[str, Any] = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
        self._http = httpx2.AsyncClient(
            headers={"accept-encoding": "identity"} | ({"authorization": header} if header else {}),
            verify=options.base.startswith("https"),  # without, no certificates are read, which takes a while
            timeout=httpx2.Timeout(None, connect=options.connect_s),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=None),
            mounts=direct,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> dict[str, Any]:
        """What the server says of the model that is asked for, or of its only one.

        Raises:
            ModelError: no server, no list of models, or no such model; with the names that it has.
        """
        found = await self.get("models")
        listed = found.get("data") if isinstance(found, dict) else None
        models = {str(one["id"]): one for one in listed or [] if isinstance(one, dict) and "id" in one}
        if not models:
            raise ModelError(f"{self.name}: names no model under /models; is it a completions server?")
        wanted = self._options.model
        if wanted is None and len(models) == 1:
            return next(iter(models.values()))
        names = sorted(models)
        told = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        if wanted is None:
            raise ModelError(f"{self.name}: has several models; name one with endpoint.model=NAME: {told}")
        if wanted not in models:
            raise ModelError(f"{self.name}: {unknown('model', wanted, names)} It has: {told}")
        return models[wanted]

    async def get(self, path: str) -> Any:
        """The JSON document at a path under the address. Raises ModelError."""
        text = await self.text(self.name, path)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise ModelError(f"{self.name}: /{path} is no JSON: {self._quoted(text)}") from None

    async def text(self, url: str, path: str) -> str:
        """What stands at a path under an address. Raises ModelError."""
        response = await self._send("GET", f"{url}/{path}", self._options.next_token_s, "in answer to /" + path)
        try:
            text = await self._body(response)
            if response.status_code != 200:
                self._refuse(response, text, f"/{path}")
        finally:
            await response.aclose()
        return text

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed completion, as they arrive, to the end of the stream.

        Raises:
            Busy: 429 or 5xx.
            Refused: 400 or 422.
            ModelError: anything else: another status, silence, a connection that breaks off, what is no JSON, an error
                that the server sends in its stream.
        """
        limit, what = self._options.first_token_s, "before the first token"
        response = await self._send("POST", f"{self.name}/completions", limit, what, body)
        try:
            if response.status_code != 200:
                self._refuse(response, await self._body(response), "/completions")
            async with aclosing(cast(Any, aiter(self._httpx.EventSource(response)))) as events:
                while True:
                    try:
                        event = await self._within(anext(events), limit, what)
                    except StopAsyncIteration:
                        return
                    if event.data.strip() == "[DONE]":
                        await self._read_tail(events)
                        return
                    yield self._chunk(event.data)
                    limit, what = self._options.next_token_s, "between two tokens"
        except self._httpx.HTTPError as error:
            raise ModelError(f"{self.name}: {self._told(error)}") from error
        finally:
            await response.aclose()

    async def _read_tail(self, events: AsyncIterator[Any]) -> None:
        """To the end of the body, after which the connection can be used again."""
        try:
            async with asyncio.timeout(_TAIL_S):
                async for _ in events:
                    pass
        except (TimeoutError, self._httpx.HTTPError):
            pass

    async def _send(self, method: str, url: str, limit: float, what: str, body: dict[str, Any] | None = None) -> Any:
        try:
            request = self._http.build_request(method, url, json=body)
            response = await self._within(self._http.send(request, stream=True), limit, what)
        except self._httpx.HTTPError as error:
            raise ModelError(f"{self.name}: {self._told(error)}") from error
        self.software = self.software or response.headers.get("server")
        return response

    async def _body(self, response: Any) -> str:
        try:
            await self._within(response.aread(), self._options.next_token_s, "in the middle of an answer")
        except self._httpx.HTTPError as error:
            raise ModelError(f"{self.name}: {self._told(error)}") from error
        return response.text

    async def _within(self, work: Awaitable[T], seconds: float, what: str) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise ModelError(f"{self.name}: silent for {seconds:g} s {what}") from None

    def _chunk(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            raise ModelError(f"{self.name}: sent what is no JSON: {self._quoted(data)}") from None
        if not isinstance(chunk, dict):
            raise ModelError(f"{self.name}: sent what is no completion: {self._quoted(data)}")
        if chunk.get("error"):
            raise ModelError(f"{self.name}: broke off with an error: {self._message(data)}")
        return chunk

    def _refuse(self, response: Any, text: str, path: str) -> None:
        """Raises what a status other than 200 means."""
        status, message = response.status_code, self._message(text)
        if status in (401, 403):
            way_out = f"does not take the key in {KEY}" if self._has_key else f"wants a key; set {KEY}"
            raise ModelError(f"{self.name}: {way_out} ({status})")
        told = f"{self.name}: answers {path} with {status}" + (f": {message}" if message else "")
        if status == 429 or status >= 500:
            raise Busy(told, _seconds(response.headers.get("retry-after")))
        raise (Refused if status in (400, 422) else ModelError)(told)

    def _message(self, text: str) -> str:
        """What a server says in an error of one of the usual shapes."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            return self._quoted(text) if text.strip() else ""
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        return self._clean(found if isinstance(found, str) else json.dumps(found))

    def _quoted(self, text: str) -> str:
        return repr(self._clean(text)[:80])

    def _clean(self, text: str) -> str:
        """On one line, of some length, without the key, which servers like to repeat."""
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return " ".join(text.split())[:300]

    def _told(self, error: Exception) -> str:
        http, text = self._httpx, self._clean(str(error))
        if isinstance(error, http.ConnectTimeout):
            return f"no connection within {self._options.connect_s:g} s"
        if isinstance(error, http.ConnectError):
            return f"cannot be connected to ({text}); is the server running there?"
        if isinstance(error, http.SSEError):
            return f"does not stream: {text}"
        if isinstance(error, http.TransportError):
            return f"the connection broke off ({text or type(error).__name__})"
        return f"{type(error).__name__}: {text}"


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header or ""))
    except ValueError:  # a date, or nothing
        return None
