"""Self-speculation with a sparse KV cache: the target drafts with a small cache and verifies with the whole one.

Source: MagicDec (Chen et al. 2024, arXiv 2408.11049, ICLR 2025) and its code; choosing positions after SnapKV (Li et
al. 2024) and StreamingLLM (Xiao et al. 2023). With long contexts and large batches reading keys and values is what
decoding costs, and a draft that reads few of them is cheap however large the model is. As published, the full-attention
keys and values of verified tokens replace the draft's own. Beyond the paper: any prompt and output length, exact
sampling under both rules, lengths per row, a small cache that can be chosen anew, an n-gram level below the draft,
lengths and budgets chosen online (`sparse_kv_schedule`), and plain decoding where none of it pays.

Left out: choosing positions anew for every draft token (top-k, product quantisation), which the paper only models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from ..errors import UsageError, unknown
from ..models.base import CachedModel
from ..models.sparse_cost import SparseCosts, measure_sparse_costs
from ..models.sparse_select import KINDS, Selection
from .base import Request, Step, Strategy
from .sampling import Sampling
from .sparse_kv_drafter import SparseDrafter
from .sparse_kv_schedule import BUDGETS, HOPE, LONGEST, OTHER_MODEL, ROUNDED, WORTH, Schedule
from .speculative import draft_and_verify
from .verify import Verifier

if TYPE_CHECKING:
    from ..models.packed_cpu import CpuPackedModel

DRAFTS = ("self", "model")
BOTTOMS = ("none", "ngram")
LONGEST_WITH_NGRAMS = 16


@dataclass(frozen=True)
class Options:
    """
    gamma: tokens drafted per round; `auto` chooses them online, down to none, by measured costs.
    budget: cached positions that the draft sees of the text it begins with; `auto` chooses among 128 to 1024.
    selection: which ones: `snapkv`, by the attention of the last tokens, or `stream`, the first and the latest.
    window: snapkv: the last tokens, whose attention chooses and which stay.
    sinks: stream: the first tokens, which stay.
    refresh: tokens after which the positions are chosen anew; 0 keeps those of the prompt, as published.
    draft: `self`, or `model` for the draft model with a small cache of its own; of a self-draft, which follows the
        target, that is a part of the target's cache.
    bottom: `ngram` has n-grams propose what the sparse draft then reviews in blocks.
    explain: measure costs even where nothing is to be chosen, and record predicted times beside the measured ones.
    """

    gamma: int | Literal["auto"] = "auto"
    budget: int | Literal["auto"] = "auto"
    selection: str = "snapkv"
    window: int = 32
    sinks: int = 4
    refresh: int = 0
    draft: str = "self"
    bottom: str = "none"
    explain: bool = False

    def __post_init__(self) -> None:
        for name, known in (("selection", KINDS), ("draft", DRAFTS), ("bottom", BOTTOMS)):
            if getattr(self, name) not in known:
                raise UsageError(unknown(f"sparse-kv.{name}", getattr(self, name), known))
        for name, least in (("gamma", 1), ("window", 1), ("sinks", 0), ("refresh", 0)):
            value = getattr(self, name)
            if value != "auto" and value < least:
                raise UsageError(f"sparse-kv.{name}={value}: has to be at least {least}")
        if self.budget != "auto" and self.budget < self.least_budget:
            fixed = "window" if self.selection == "snapkv" else "sinks"
            raise UsageError(
                f"sparse-kv.budget={self.budget}: has to be at least {self.least_budget}, or there is nothing to choose"
                f" beside the {self.least_budget - 1} positions of sparse-kv.{fixed}"
            )

    @property
    def rule(self) -> Selection:
        return Selection(self.selection, self.window, self.sinks)

    @property
    def least_budget(self) -> int:
        return self.rule.fixed + 1


class SparseKv(Strategy):
    name = "sparse-kv"
    summary = "the target drafts for itself with a small KV cache and verifies with the whole one; for long contexts"
    source = "Chen et al. 2024 (MagicDec)"
    roles = ("target",)
    optional_roles = ("draft",)
    continuous = True
    needs_packed = True
    Options = Options

    def __init__(self, models: Mapping[str, CachedModel], options: Options) -> None:
        if options.draft == "model" and "draft" not in models:
            raise UsageError("sparse-kv.draft=model needs a draft model; name one with --draft")
        drafter = models["target" if options.draft == "self" else "draft"]
        self.view = drafter.sparse_view(options.rule)
        super().__init__({**models, "sparse": self.view}, options)
        self.costs: SparseCosts | None = None
        self._most: tuple[int, int] | None = None  # rows of a batch and tokens of a row, as costs were measured for
        self._hopeless = False

    @property
    def longest(self) -> int:
        """The longest draft."""
        if self.options.gamma != "auto":
            return self.options.gamma
        return LONGEST_WITH_NGRAMS if self.options.bottom == "ngram" else LONGEST

    def prepare(self, rows: int, tokens: int) -> None:
        """Measures what forwards cost, where something is to be chosen by it or explained."""
        options = self.options
        if "auto" not in (options.gamma, options.budget) and not options.explain:
            return
        budgets = BUDGETS if options.budget == "auto" else (options.budget,)
        usable = [budget for budget in budgets if options.least_budget <= budget < tokens] or [options.least_budget]
        target = cast("CpuPackedModel", self.target)  # or there would be no view
        costs = measure_sparse_costs(target, self.view, rows, tokens, usable, self.longest)
        self.use_costs(costs, rows, tokens)

    def use_costs(self, costs: SparseCosts, rows: int, tokens: int) -> None:
        """Goes by these costs, for batches of so many rows of up to so many tokens."""
        self.costs, self._most = costs, (rows, tokens)
        self._hopeless = self.options.gamma == "auto" and self._schedule().gain(tokens, rows, HOPE) < WORTH

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        options, verifier = self.options, Verifier(sampling)
        drafter = SparseDrafter(
            self.view, verifier, self._schedule(), self._shared, options.bottom == "ngram", options.refresh
        )
        self.view.watch(not self._hopeless)
        try:
            for step in draft_and_verify(self.target, drafter, verifier, requests, self.longest):
                yield drafter.verified(step, self.target.last_forward_ns)
        finally:
            self.view.watch(False)
            self.facts = drafter.facts()
            if self.costs is not None:
                self.facts["explained"] = options.explain
                if self._most is not None:
                    self.facts["constant_ms"] = round(self.costs.constant_ms(self._most[0]), 3)
                    answer = sum(request.max_new_tokens for request in requests) / len(requests)
                    at = drafter.schedule.break_even(*self._most, answer)
                    self.facts["break_even_context"] = round(at) if at is not None else "beyond the longest row"
                if drafter.account.plain_rounds == drafter.account.rounds > 0:
                    self.facts["decoded_plainly"] = "below break-even"

    def close(self) -> None:
        self.view.close()

    @property
    def _shared(self) -> bool:
        """Whether the small cache is a part of the target's, also where a self-draft reads it."""
        return self.view.dense is self.target

    @property
    def _misses(self) -> float:
        if self.options.draft == "self":
            return 1.0
        return ROUNDED if self._shared else OTHER_MODEL

    def _schedule(self) -> Schedule:
        options = self.options
        return Schedule(
            self.costs,
            None if options.gamma == "auto" else options.gamma,
            None if options.budget == "auto" else options.budget,
            self.longest,
            options.least_budget,
            self._misses,
        )
