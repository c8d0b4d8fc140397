"""The contract of a strategy, a drafter and a step. Read this before writing one.

A strategy yields `Step`s. It never reads a clock, never synchronises, never decides when to stop, never trims at
EOS and never rolls a cache back: the receiver in `results.measure` stops it and counts, the model rolls back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..errors import UsageError
from ..models.base import CachedModel, Ids, TokenBuffer

if TYPE_CHECKING:
    import torch

    from ..models.info import ModelInfo
    from .sampling import Sampling


@dataclass
class Request:
    """One prompt as a strategy sees it.

    Attributes:
        key: integer that stands for the prompt in the noise (same prompt, same key, in every arm).
        ids: the prompt's token ids, at least one.
        max_new_tokens: drafting beyond it is wasted work; the receiver enforces it.
        done: set by the receiver; a request that is done gets no more work, and another may take its row.
        stop: strings that end the answer, for an engine that has to be told; the receiver enforces them.
    """

    key: int
    ids: Ids
    max_new_tokens: int
    done: bool = False
    stop: tuple[str, ...] = ()


class Level(NamedTuple):
    """What one level below the target's draft did in one step.

    Attributes:
        drafted: tokens that it proposed to the level above.
        accepted: how many of them that level took.
        forwards: forward passes of its own model; 0 for a statistical drafter.
        time_ns: what they took together.
    """

    drafted: int
    accepted: int
    forwards: int = 0
    time_ns: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one round made final for one row.

    The first step of a row is its prefill: one token, nothing drafted. Every later step is one forward of the
    target over that row.

    Attributes:
        row: index of the request.
        tokens: what is now final, as Python ints, at least one.
        drafted: draft tokens that the target looked at in this step.
        accepted: how many of them it took, a prefix; `tokens` begins with them.
        levels: what each inner level of a cascade did, from the one below the target downwards, see `Level`.
        wasted: draft tokens thrown away without having been looked at (asynchronous strategies).
        rejected: the draft tokens that the target looked at and did not take, for reports; may be left empty.
    """

    row: int
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    levels: tuple[Level, ...] = ()
    wasted: int = 0
    rejected: tuple[int, ...] = ()


@dataclass
class Row:
    """The state of one request inside a strategy: its ids so far, verified ones only."""

    index: int
    request: Request
    tokens: TokenBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = TokenBuffer(self.request.ids, room=self.request.max_new_tokens + 64)

    @property
    def prompt_length(self) -> int:
        return len(self.request.ids)

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - len(self.request.ids)

    def room(self, *models: CachedModel) -> int:
        """How many tokens may be drafted now: a step adds one token of the target's own to what it accepts, so one
        less than what is missing, and nothing that would not fit a model's context."""
        left = self.request.max_new_tokens - self.new_tokens - 1
        for model in models:
            left = min(left, model.context_length - len(self.tokens))
        return max(0, left)


class Batch:
    """The rows of one call of `generate`, in which requests come and go.

    Where a request is done the receiver may put the next one in its place in `requests`. `next` notices: the target
    forgets what it has cached for that row, the drafter what it knows of it, and the prompt is read in a forward
    without drafts, by itself or with other prompts that are due, before any other row goes on. That is how a call
    begins anyway. So every strategy pays the same for a prompt, no row is padded to the length of one, and the forwards
    that verify keep their shape, on which the last bits depend on some devices.
    """

    def __init__(self, requests: Sequence[Request], target: CachedModel, drafter: Drafter | None = None) -> None:
        self._requests, self._target, self._drafter = requests, target, drafter
        self._rows = [self._begin(index, request) for index, request in enumerate(requests)]

    def next(self) -> list[Row]:
        """The rows of the target's next forward: those whose prompts are to be read (`new_tokens` is 0), if there are
        any, else all that are not done. Empty at the end."""
        for index, request in enumerate(self._requests):
            if self._rows[index].request is not request:
                self._rows[index] = self._begin(index, request)
        active = [row for row in self._rows if not row.request.done]
        return [row for row in active if not row.new_tokens] or active

    def _begin(self, index: int, request: Request) -> Row:
        row = Row(index, request)
        self._target.forget(index)
        if self._drafter is not None:
            self._drafter.begin(row)
        return row


@dataclass(frozen=True)
class Draft:
    """Proposed tokens for one row.

    Attributes:
        tokens: what is proposed, may be empty.
        probs: (len(tokens), vocab), the distribution each was drawn from, after temperature and truncation; None
            for a drafter that is certain of what it says (one-hot). Only the rejection rule reads it.
        levels: what the levels did that were asked for it, for a drafter that contains a drafter; see `Level`.
    """

    tokens: Sequence[int]
    probs: torch.Tensor | None = None
    levels: tuple[Level, ...] = ()


class Drafter(ABC):
    """Whatever proposes tokens."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """Proposes at most `limits[i]` tokens to follow `rows[i].tokens`; fewer or none where it has no idea."""

    def begin(self, row: Row) -> None:  # noqa: B027 - nothing to do for most
        """A request begins in a row: forgets what stood under `row.index` before, in its models' caches as well.

        Called for every request, before anything is drafted for it; more than once does no harm.
        """

    def reset(self) -> None:  # noqa: B027 - nothing to do for most
        """Forgets everything about the rows it has seen."""


class Strategy(ABC):
    """One way of decoding.

    Class attributes:
        name: lower case with hyphens, as on the command line.
        summary: one line for `specbench list strategies`.
        source: the paper or project it follows.
        roles: the models it needs, `target` first.
        optional_roles: models it can use.
        lossless: True where the output has the target's distribution (and, coupled, its very tokens).
        max_batch: the most rows it can run; None for any number.
        verifications: the rules it knows.
        engine: `specbench`, or the project whose own loop is driven here as a peer (`transformers`); a peer gets its
            own kind of model in place of a `CachedModel`.
        reports_drafts: False where only the tokens are known and not what was drafted for them.
        sends_text: True for an engine that sends text and no ids: its steps are `Piece`s, and its ids are those that
            `read` makes of the whole answer.
        apart: True where draft and target work at the same time, so that the draft has to be in a worker process.
        needs_packed: True where the target has to be in the packed runtime, on CPU.
        continuous: True where it takes up the request that the receiver puts in the place of one that is done, as
            `Batch` does (continuous batching). Others run rows in groups that begin together and end with the last one.
        Options: frozen dataclass; a field `draft_length` is set by `--option name.draft-length=4`.

    Attributes:
        facts: what a controller decided and a worker did in the latest sample (`{"draft_length": 4, "bypassed":
            "draft"}`), plain numbers and words; stored with the record. `reset` empties it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = ""
    roles: ClassVar[tuple[str, ...]] = ("target",)
    optional_roles: ClassVar[tuple[str, ...]] = ()
    lossless: ClassVar[bool] = True
    max_batch: ClassVar[int | None] = None
    verifications: ClassVar[tuple[str, ...]] = ("coupled", "rejection")
    engine: ClassVar[str] = "specbench"
    reports_drafts: ClassVar[bool] = True
    sends_text: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    needs_packed: ClassVar[bool] = False
    continuous: ClassVar[bool] = False
    Options: ClassVar[type]

    @classmethod
    def check(cls, sampling: Sampling, batch: int) -> None:
        """Refuses, before any model is loaded, what this strategy cannot do exactly as asked. Raises UsageError."""
        if cls.max_batch is not None and batch > cls.max_batch:
            raise UsageError(f"{cls.name}: runs at most {cls.max_batch} row(s) at a time, not --batch {batch}")
        if not sampling.greedy and sampling.verify not in cls.verifications:
            raise UsageError(f"{cls.name}: knows --verify {', '.join(cls.verifications)}, not {sampling.verify}")

    @classmethod  # noqa: B027 - nothing to do for most
    def reach(cls, options: Any) -> None:
        """Refuses, before any model is looked up, what is not there to be used: a server. Raises UsageError."""

    @classmethod
    def model_of_its_own(cls, info: ModelInfo, options: Any) -> CachedModel | None:
        """The target of a peer that brings it itself, in place of one that is loaded; None for everybody else.

        Args:
            info: of the run's target, whose tokenizer made the prompts.
        """
        return None

    def __init__(self, models: Mapping[str, CachedModel], options: Any) -> None:
        self.models = models
        self.target = models["target"]
        self.options = options
        self.facts: dict[str, Any] = {}

    def prepare(self, rows: int, tokens: int) -> None:  # noqa: B027 - nothing to do for most
        """Called once, before the warm-up, untimed: the place to measure cost curves for a controller.

        Args:
            rows: rows of a batch at most.
            tokens: the longest row that will come, prompt and output.
        """

    def practise(self, texts: Sequence[Ids]) -> None:  # noqa: B027 - nothing to do for most
        """Called once, after `prepare` and before the warm-up, untimed: the place to find out how well models agree.

        Args:
            texts: token ids of a few prompts that no task holds.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        """Decodes until every request is done. Rows may take turns in any order; each row's steps come in order.

        While it runs, the receiver may put another request in the place of one that is done, if the strategy is
        `continuous`; between two steps of a row such a strategy looks at `requests` again, as `Batch.next` does.
        """

    def facts_of(self, request: Request) -> dict[str, Any]:
        """What is stored with the record of a request: `facts`, where they are those of the whole call."""
        return dict(self.facts)

    def read(self, text: str, finish: str | None) -> list[int]:
        """The ids of an answer of an engine that `sends_text`, which it ended with `finish` (`eos` is a token, too)."""
        raise NotImplementedError(f"{self.name}: has ids, and sends no text")

    def reset(self) -> None:
        """Forgets everything learned from earlier prompts. Called before every sample."""
        self.facts = {}
        for model in self.models.values():
            model.reset()

    def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Ends workers and gives back what the strategy itself allocated; the models belong to the caller."""
