"""A completions server on loopback that does as it is told: well, slowly, wrongly, or not at all."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = Callable[["Handler", Body], None]


class CompletionsServer(ThreadingHTTPServer):
    """
    Attributes:
        answer: what it does with a completion request.
        models: what it lists under /v1/models.
        metrics: what stands under /metrics; None for nothing.
        asked: the completion requests so far, and their headers.
        over: set when the test is over, for handlers that keep silent until then.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Answer = say(piece("hello", "length"))
        self.models: list[str] = ["toy"]
        self.metrics: str | None = None
        self.asked: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CompletionsServer
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.document(200, {"data": [{"id": name, "owned_by": "tests"} for name in self.server.models]})
        elif self.path == "/metrics" and self.server.metrics is not None:
            self.document(200, self.server.metrics)
        else:
            self.document(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.answer(self, body)

    def document(self, status: int, content: Any, **headers: str) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data: Any) -> None:
        """One event, which travels by itself; text goes as it is."""
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        self.raw(f"data: {text}\n\n".encode())

    def raw(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end(self) -> None:
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def silence(self) -> None:
        self.server.over.wait(20)

    def cut(self) -> None:
        """Hangs up in the middle."""
        self.close_connection = True


def piece(text: str, finish: str | None = None, **more: Any) -> Body:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish} | more]}


def usage(completion: int, prompt: int, **more: Any) -> Body:
    return {"choices": [], "usage": {"completion_tokens": completion, "prompt_tokens": prompt} | more}


def say(*chunks: Any) -> Answer:
    """Streams chunks and ends well."""

    def answer(handler: Handler, body: Body) -> None:
        handler.begin()
        for chunk in chunks:
            handler.event(chunk)
        handler.end()

    return answer


def refuse(status: int, content: Any = "", **headers: str) -> Answer:
    return lambda handler, body: handler.document(status, content, **headers)


def in_turn(*answers: Answer) -> Answer:
    """One after another; the last one for all that follow."""
    left = list(answers)
    lock = threading.Lock()

    def answer(handler: Handler, body: Body) -> None:
        with lock:
            chosen = left.pop(0) if len(left) > 1 else left[0]
        chosen(handler, body)

    return answer


@contextlib.contextmanager
def serving() -> Iterator[CompletionsServer]:
    server = CompletionsServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
