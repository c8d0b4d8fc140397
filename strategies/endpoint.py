"""A peer row: a completions server (vLLM, SGLang, llama.cpp, ...) on the same prompts, under the same clock.

Prompts go as token ids where the server takes them, else as text; what comes back is text. Its ids are those of the
text tokenised again, so they are compared as text, and a token that shows no text is not among them. Time to first
token is that of the first piece that stands for one, whatever it holds; HTTP, JSON and the network are in all times.

What a server drafts is its own business: acceptance is shown where it tells (llama.cpp with each answer, vLLM under
/metrics), as counts of whole answers and not per step.

Left out: fields of requests that servers read in different ways (top-k, penalties, suppressed tokens, no end of text);
a server's own random numbers, which nobody's noise can match, so sampled answers are compared by speed only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ModelError, UsageError
from ..models.endpoint import Arrival, Sampled, Server, find_model
from ..models.endpoint_options import EndpointOptions
from ..models.info import ModelInfo
from .base import Request, Step, Strategy
from .pieces import Piece
from .sampling import Sampling


class Endpoint(Strategy):
    name = "endpoint"
    summary = "peer row: a completions server (vLLM, SGLang, llama.cpp), through the same clock"
    source = "the completions protocol of OpenAI"
    roles = ("target",)
    engine = "endpoint"
    reports_drafts = False
    sends_text = True
    continuous = True
    Options = EndpointOptions

    @classmethod
    def check(cls, sampling: Sampling, batch: int) -> None:
        if sampling.top_k or sampling.edits_logits:
            raise UsageError(
                f"{cls.name}: --top-k, penalties, --min-new-tokens and --suppress-tokens are not passed on to a server"
            )
        super().check(sampling, batch)

    @classmethod
    def reach(cls, options: EndpointOptions) -> None:
        find_model(options)

    @classmethod
    def model_of_its_own(cls, info: ModelInfo, options: EndpointOptions) -> Server:
        return Server(info, options)

    def __init__(self, models: Any, options: EndpointOptions) -> None:
        super().__init__(models, options)
        self._server: Server = models["target"]
        self._rows = 1
        self._before: dict[str, int] | None = None
        self._unready: ModelError | None = None
        self._told: dict[int, dict[str, Any]] = {}

    def prepare(self, rows: int, tokens: int) -> None:
        self._rows = rows
        self._server.try_out()

    def reset(self) -> None:
        super().reset()
        self._told, self._before, self._unready = {}, None, None
        try:
            self._before = self._server.make_ready(self._rows)
        except ModelError as error:
            self._unready = error  # of the requests that follow, which are records; of a reset it would end the run

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        if self._unready is not None:
            raise self._unready
        exchange, asked = self._server.exchange(), dict[int, Request]()
        try:
            while True:
                for row, request in enumerate(requests):
                    if not request.done and asked.get(row) is not request:
                        asked[row] = request
                        how = Sampled(sampling.temperature, sampling.top_p, sampling.seed, request.stop)
                        told = exchange.ask(row, request.ids, request.max_new_tokens, how)
                        self._told[id(request)] = told
                if all(request.done for request in requests):
                    return
                yield _piece(exchange.next())
        finally:
            self.facts = exchange.end(self._before)

    def facts_of(self, request: Request) -> dict[str, Any]:
        return self.facts | self._told.get(id(request), {})

    def read(self, text: str, finish: str | None) -> list[int]:
        ids = self._server.codec.encode(text)
        return [*ids, self._server.info.eos_ids[0]] if finish == "eos" and self._server.info.eos_ids else ids

    def close(self) -> None:
        self._server.close()


def _piece(arrival: Arrival) -> Piece:
    return Piece(
        arrival.row, (), text=arrival.text, finish=arrival.finish, error=arrival.error,
        restarted=arrival.go_on is not None,
    )  # fmt: skip
