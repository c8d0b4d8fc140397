"""Where a completions server is and how it is spoken to: `--option endpoint.url=http://127.0.0.1:8080/v1` and its kin.

A key comes from the environment alone. An address that holds one is refused, since options are stored with the results.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from ..errors import UsageError

KEY = "SPECBENCH_ENDPOINT_KEY"
_OURS = {"model", "prompt", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "n",
         "echo", "best_of", "logprobs"}  # fmt: skip


@dataclass(frozen=True)
class EndpointOptions:
    """
    url: base address of an OpenAI-compatible server, up to and with `/v1`.
    model: as the server calls it; None for the only one it has.
    prompts: `ids` or `text`; `auto` finds out before the first prompt whether the server takes token ids.
    reuse: let the server reuse what it keeps of earlier prompts. Ours start from empty caches, so the default asks it
        not to (`cache_prompt` for llama.cpp, a `cache_salt` for vLLM).
    evict: before every call, outside the clock, one token is asked for after a prompt of no use, so that a server that
        keeps its latest prompt and cannot be asked not to forgets it.
    retries: how often a request is sent again that was answered with 429 or 5xx.
    retry_s: wait before that, doubled each time; a server's own Retry-After goes before it. At most 60 s.
    connect_s, first_token_s, next_token_s: how long to wait for a connection, the first token, and each next one.
    extra: JSON object with fields that are added to every request, for what a server has of its own.
    """

    url: str
    model: str | None = None
    prompts: Literal["auto", "ids", "text"] = "auto"
    reuse: bool = False
    evict: bool = False
    retries: int = 2
    retry_s: float = 1.0
    connect_s: float = 10.0
    first_token_s: float = 300.0
    next_token_s: float = 60.0
    extra: str = ""

    def __post_init__(self) -> None:
        _check_address(self.url)
        for name in ("connect_s", "first_token_s", "next_token_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"endpoint.{name.replace('_', '-')}={getattr(self, name):g}: seconds, above 0")
        if self.retries < 0 or self.retry_s < 0:
            raise UsageError(f"endpoint.retries={self.retries}, endpoint.retry-s={self.retry_s:g}: 0 or more")
        self.fields  # noqa: B018 - refuses what cannot be read

    @property
    def base(self) -> str:
        """The address without a slash at its end."""
        return self.url.rstrip("/")

    @property
    def host(self) -> str:
        """Host and port, for titles."""
        return urlsplit(self.url).netloc

    @property
    def root(self) -> str:
        """The address of the server itself, where its `/metrics` is."""
        return self.base.removesuffix("/v1")

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What `extra` holds. Raises UsageError."""
        if not self.extra.strip():
            return {}
        try:
            found = json.loads(self.extra)
        except json.JSONDecodeError as error:
            raise UsageError(f"endpoint.extra: not valid JSON ({error.msg}); write an object with fields") from None
        if not isinstance(found, dict):
            raise UsageError('endpoint.extra: a JSON object is expected, as in {"min_p": 0}')
        if taken := sorted(_OURS & found.keys()):
            raise UsageError(f"endpoint.extra: {', '.join(taken)} is said by the run itself, for all arms alike")
        return found


def without_secrets(url: str) -> str:
    """An address as it may be shown: without user, password, query and fragment."""
    plain = re.sub(r"^(\w[\w+.-]*://)?[^/?#]*@", r"\1", url)
    return re.split(r"[?#]", plain, maxsplit=1)[0]


def authorization() -> str | None:
    """The header that the key in the environment makes: as a bearer token, or as it is where it names its scheme
    ("Basic ..."). None without one.

    Raises:
        UsageError: it holds characters that no header can; it is not shown.
    """
    key = os.environ.get(KEY, "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"{KEY}: holds characters that cannot be sent; set it to the key alone")
    return key if " " in key else f"Bearer {key}"


def _check_address(url: str) -> None:
    shown = without_secrets(url)
    parts = _split(url, shown)
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise UsageError(
            f"endpoint.url={shown}: user and password in an address would be stored with the results; leave them out "
            f'and set {KEY} (to "Basic ..." for a server that wants both)'
        )
    if parts.query:
        raise UsageError(f"endpoint.url={shown}: leave out what follows the ?; a key belongs in {KEY}")
    if parts.fragment:
        raise UsageError(f"endpoint.url={shown}: leave out what follows the #; the model is endpoint.model=NAME")


def _split(url: str, shown: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = False
    if not usable or re.search(r"\s", url):
        raise UsageError(f"endpoint.url={shown}: write http://host:port/v1, or https")
    return parts
