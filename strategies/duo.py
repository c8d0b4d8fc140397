"""Two devices in rounds: while the target verifies a block, the draft prepares the next one for every likely outcome.

After DuoDecoding (Lv, Guo, Guo, Qiu 2025, arXiv 2503.00784), whose published protocol is `faithful`
(`strategies.duo_published`). Kept of it: the draft works during the verification, within a budget that comes from the
hardware, and branches at the token that follows the block, by its rule of how many first tokens are worth a branch.

Beyond it, each an option:

- `batched`: the branches are rows of one forward of the draft, which costs little more than one row;
- `anticipate`: branches where the block may be rejected, begun with the next-ranked tokens, so that a rejection that
  was foreseen finds its continuation ready and costs no empty round;
- `interrupt`: tokens are handed over as they are made, and the target takes what is there when it is done;
- `first_token=after_prefill`: the first token waits for nobody's draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ..errors import UsageError
from .ahead import Settings
from .base import Request, Step
from .branching import LEAST, UNKNOWN_ROW_COST
from .controller import Controller, Way
from .duo_published import MOST_BRANCHES, published_rounds
from .overlapped import MOST, Overlapped, not_default
from .sampling import Sampling

UNKNOWN_BUDGET = 4  # token-rows per round, where a round has an end and no costs were measured
PUBLISHED_GAMMA = 16  # for Vicuna-7b; 24 for Llama-2-7b


@dataclass(frozen=True)
class Options:
    """budget: token-rows that the draft computes per round at most; auto is what it can do while the target verifies.
    branches: lines that the draft keeps at most, the main one included.
    branch_rule: theta, or off for no branches at the token after the block.
    anticipate: branches inside the block.
    worth: the least probability of being needed that a branch is begun for, and then continued to its end; auto gives
        a branch a row only while that is expected to bring more tokens than it delays, by what a row costs and by how
        often the draft has been right when it was that sure.
    batched, interrupt, first_token: see the module.
    lead: tokens that a line may be ahead of the verified text.
    controller: whether overlap may be given up for turns or plain steps where these are expected to be faster, and
        branches where they have not paid.
    faithful: the published protocol, where the budget is its gamma (auto: 16); the other options must be left alone.
    """

    budget: int | Literal["auto"] = "auto"
    branches: int = 4
    branch_rule: Literal["theta", "off"] = "theta"
    anticipate: bool = True
    worth: float | Literal["auto"] = "auto"
    batched: bool = True
    interrupt: bool = True
    first_token: Literal["after_prefill", "after_round"] = "after_prefill"
    lead: int = 16
    controller: bool = True
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.budget != "auto" and self.budget < 1:
            raise UsageError(f"duo.budget={self.budget}: at least 1 token, or auto")
        if not 1 <= self.branches <= 8:
            raise UsageError(f"duo.branches={self.branches}: from 1 to 8")
        if self.worth != "auto" and not 0 <= self.worth <= 1:
            raise UsageError(f"duo.worth={self.worth}: a probability from 0 to 1, or auto")
        if self.lead < 1:
            raise UsageError(f"duo.lead={self.lead}: the draft has to be at least 1 token ahead")
        if self.faithful and not_default(self, "faithful", "budget"):
            raise UsageError("duo.faithful=true is a protocol with the option budget only; leave the others out")


class Duo(Overlapped):
    name = "duo"
    summary = "rounds on two devices: the draft prepares the next block for the likely outcomes of the verification"
    source = "DuoDecoding: Lv et al. 2025 (arXiv 2503.00784)"
    tells_rounds = True
    Options = Options

    def settings(self) -> Settings:
        options, worth = self.options, self.options.worth
        return Settings(
            lead=options.lead,
            branches=options.branches,
            first_tokens=options.branch_rule == "theta",
            anticipate=options.anticipate,
            worth=LEAST if worth == "auto" else worth,
            row_costs=self._row_costs() if worth == "auto" else (),
            batched=options.batched,
            budget=self._budget() if options.budget == "auto" else options.budget,
            interrupt=options.interrupt,
        )

    def _row_costs(self) -> tuple[float, ...]:
        """What forwards of the draft over 1, 2, ... rows take, as multiples of the first."""
        counts = range(1, self.options.branches + 1)
        if not self.options.batched:
            return tuple(map(float, counts))
        if self.costs is None:
            return tuple(1 + UNKNOWN_ROW_COST * (rows - 1) for rows in counts)
        one = self.costs.draft_ms(1)
        return tuple(accumulate((self.costs.draft_ms(rows) / one for rows in counts), max))

    def _budget(self) -> int:
        """Where the draft is interrupted, what comes in the way of the next round is the interruption: no bound."""
        if self.options.interrupt:
            return 0
        if self.costs is None:
            return UNKNOWN_BUDGET
        step_ms = self.costs.draft_ms(1) * self.costs.draft_factor
        made = 2  # the first of them is the one that the target finds by itself
        while made < MOST and (made + 1) * step_ms <= self.costs.target_ms(made + 2) * self.costs.target_factor:
            made += 1
        return made

    def prepare(self, rows: int, tokens: int) -> None:
        if self.options.faithful:
            draft = self.models["draft"]
            draft.reserve(min(MOST_BRANCHES, draft.max_rows), tokens)
        else:
            super().prepare(rows, tokens)

    def controller(self) -> Controller:
        start = Way("overlap", 1, MOST, self.options.lead)
        on = self.options.controller and self.options.interrupt
        _, *more = self._row_costs()  # most forwards that carry branches carry one
        row_cost = more[0] - 1 if more else 0.0
        return Controller(start, self.table, anticipates=bool(more), row_cost=row_cost, on=on)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Step]:
        if self.options.faithful:
            if len(requests) != 1:
                raise UsageError(f"{self.name}: runs one row at a time, not {len(requests)}")
            gamma = PUBLISHED_GAMMA if self.options.budget == "auto" else self.options.budget
            return published_rounds(self.target, self.models["draft"], requests[0], sampling, gamma, self.facts)
        return super().generate(requests, sampling)
