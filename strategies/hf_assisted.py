"""A peer row: transformers' own generation loop, driven through the same clock.

`generate` runs in a thread and hands its tokens over as it makes them, so that its first token and its pauses are seen
like ours. It decodes plainly, with prompt lookup, or with an assistant model (assisted generation, Gante 2023). What
it drafted is not reported by transformers, so there is no acceptance rate, only tokens per step; its first step may
hold more than one token, since it drafts before the prefill.

Left out: sampling. transformers draws from torch's global generator, so its sampled tokens cannot be compared one by
one with anybody's.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..errors import UsageError
from .base import Request, Step, Strategy
from .sampling import Sampling

_METHODS = ("auto", "plain", "lookup", "draft")
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class Options:
    """
    method: `plain`, `lookup`, `draft`, or `auto`: `draft` where there is a draft model, else `lookup`.
    draft_length: tokens per round; held constant, unless schedule says otherwise.
    schedule: transformers' own `constant`, `heuristic` or `heuristic_transient`.
    confidence: the assistant stops drafting below this probability; 0 switches it off, transformers' default is 0.4.
    """

    method: str = "auto"
    draft_length: int = 4
    schedule: str = "constant"
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise UsageError(f'hf-assisted.method="{self.method}": not one of {", ".join(_METHODS)}')
        if self.schedule not in _SCHEDULES:
            raise UsageError(f'hf-assisted.schedule="{self.schedule}": not one of {", ".join(_SCHEDULES)}')
        if not 0 <= self.confidence < 1:
            raise UsageError(f"hf-assisted.confidence={self.confidence}: a probability below 1; 0 switches it off")
        if self.draft_length < 1:
            raise UsageError(f"hf-assisted.draft-length={self.draft_length}: at least 1 token has to be drafted")


class HfAssisted(Strategy):
    name = "hf-assisted"
    summary = "peer row: transformers' own prompt lookup or assisted generation, through the same clock"
    source = "transformers, generate()"
    roles = ("target",)
    optional_roles = ("draft",)
    max_batch = 1
    verifications = ()
    engine = "transformers"
    reports_drafts = False
    Options = Options

    @classmethod
    def check(cls, sampling: Sampling, batch: int) -> None:
        if not sampling.greedy:
            raise UsageError(f"{cls.name}: compared at --temperature 0 only; transformers draws its own random numbers")
        if sampling.edits_logits:
            raise UsageError(f"{cls.name}: penalties, --min-new-tokens and --suppress-tokens are not passed on to it")
        super().check(sampling, batch)

    def __init__(self, models: Any, options: Any) -> None:
        super().__init__(models, options)
        method = options.method
        if method == "auto":
            method = "draft" if "draft" in models else "lookup"
        if method == "draft" and "draft" not in models:
            raise UsageError("hf-assisted.method=draft needs a draft model; name one with --draft")
        self.method = method
        # Its assistant path warns about how transformers itself calls generate.
        transformers.logging.set_verbosity_error()
        self._thread: _Generation | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        (request,) = requests
        self._thread = generation = _Generation(self._arguments(request, sampling))
        generation.start()
        try:
            while not request.done and (tokens := generation.next()) is not None:
                yield Step(0, tuple(tokens))
        finally:
            generation.stop()
            self._thread = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _arguments(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        model = self.target.hf_model  # type: ignore[attr-defined]
        # Every field that a model's own generation config could fill in is said here (sampling, penalties, lengths);
        # None would be filled in from it, so "no end of text" is an id that does not exist.
        config = copy.deepcopy(model.generation_config)
        config.update(
            do_sample=False, num_beams=1, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0,
            no_repeat_ngram_size=0, min_new_tokens=None, min_length=0, max_length=None,
            max_new_tokens=request.max_new_tokens, eos_token_id=list(sampling.eos) or [-1], use_cache=True,
            num_assistant_tokens=self.options.draft_length,
        )  # fmt: skip
        if config.pad_token_id is None:
            config.pad_token_id = sampling.eos[0] if sampling.eos else 0
        ids = torch.as_tensor([list(request.ids)], device=model.device)
        arguments = dict(model=model, inputs=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        if self.method == "lookup":
            config.prompt_lookup_num_tokens = self.options.draft_length
        elif self.method == "draft":
            draft = self.models["draft"].hf_model  # type: ignore[attr-defined]
            # transformers reads the assistant's own config and moves its schedule on; set it anew for each prompt.
            draft.generation_config.num_assistant_tokens = self.options.draft_length
            draft.generation_config.num_assistant_tokens_schedule = self.options.schedule
            draft.generation_config.assistant_confidence_threshold = self.options.confidence
            arguments["assistant_model"] = draft
        return arguments


class _Generation(threading.Thread):
    """One call of `generate` in a thread, as a queue of token lists."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(name="hf-assisted", daemon=True)
        self._arguments = arguments
        self._chunks: queue.SimpleQueue = queue.SimpleQueue()
        self._asked_to_stop = threading.Event()
        self._prompt_seen = False

    def next(self) -> list[int] | None:
        """The next tokens; None at the end. Raises what `generate` raised."""
        chunk = self._chunks.get()
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk

    def stop(self) -> None:
        self._asked_to_stop.set()
        self.join()

    def run(self) -> None:
        model = self._arguments.pop("model")
        try:
            with torch.inference_mode():
                model.generate(**self._arguments, streamer=self, stopping_criteria=[self._stopping])
            self._chunks.put(None)
        except BaseException as error:  # noqa: BLE001 - travels to the caller
            self._chunks.put(error)

    # What `generate` calls: a streamer and a stopping criterion

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self._chunks.put(tokens.flatten().tolist())
        self._prompt_seen = True  # the prompt itself comes first

    def end(self) -> None:
        pass

    def _stopping(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), self._asked_to_stop.is_set(), dtype=torch.bool, device=ids.device)
