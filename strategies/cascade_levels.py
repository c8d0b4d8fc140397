"""The drafters that a cascade is made of: one that reviews what a smaller one says, and stages one after the other.

All of them are `Drafter`s whose drafts are `Proposal`s, so any of them may stand inside any other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from ..models.base import CachedModel
from . import noise
from .base import Draft, Drafter, Level, Row
from .proposal import NOTHING, Proposal, ahead_of, joined
from .statistical import Ngram
from .verify import Verifier, lenient_proposal

CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # lower bounds of the upper classes of a drafter's own probability


def confidence_classes(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """The class of the probability that a model itself gives to each token; logits (at least len(tokens), vocab)."""
    block = logits[: len(tokens)].float()
    own = block[range(len(tokens)), list(tokens)]
    sure = (own - block.logsumexp(dim=-1)).exp().tolist()
    return [sum(probability >= least for least in CONFIDENCES) for probability in sure]


class Accounts:
    """What every level did for each row since `take` was last called, in the fields of `Level`."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self._rows: dict[int, list[list[int]]] = {}

    def of(self, row: Row) -> list[list[int]]:
        return self._rows.setdefault(row.index, [[0] * len(Level._fields) for _ in range(self.levels)])

    def judged(self, row: Row, proposal: Proposal, accepted: int) -> None:
        """Counts a proposal by the levels that its tokens come from."""
        levels = self.of(row)
        for at, origin in enumerate(proposal.origins):
            levels[origin][0] += 1
            levels[origin][1] += at < accepted

    def forward(self, rows: Sequence[Row], level: int, time_ns: int) -> None:
        """Counts a forward for each row; rows that share it share its time."""
        for row in rows:
            counts = self.of(row)[level]
            counts[2] += 1
            counts[3] += time_ns // len(rows)

    def take(self, row: Row) -> tuple[Level, ...]:
        return tuple(Level(*counts) for counts in self._rows.pop(row.index, [[0] * 4] * self.levels))

    def begin(self, row: Row) -> None:
        """Drops what was counted for another request of that row and never asked for."""
        self._rows.pop(row.index, None)


class Feed(Drafter):
    """What makes the drafts for one reviewer, the target or a level of a cascade, out of the levels below it."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]: ...

    def learn(self, row: Row, proposal: Proposal, said: Sequence[int]) -> None:
        """Hears what the reviewer made of the latest proposal for a row; fixed lengths learn nothing from it.

        Args:
            said: what now follows the row where the proposal began; the last token of it is the reviewer's own.
        """


class CascadeDrafter(Drafter):
    """A draft model that reviews the drafts of a smaller drafter: one call of `propose`, one forward.

    A review takes what the model would have said itself of the smaller drafter's draft, and adds a token of its own:
    1 to `limit` tokens come out, and the one who asks asks again for more. Where the smaller drafter has nothing to
    say, or only one token is wanted, a forward yields that one token; no other way is open to it then.

    The inner draft is cut to what is wanted before anything is looked at, so that no token is dropped because of what
    it is. Under the rejection rule every call draws with noise of its own, and `probs` says as what its tokens are
    distributed: this model's p, with lenience the mixture of `lenient_proposal`.

    Args:
        inner: makes the drafts that are reviewed, or None.
        level: its number in the cascade, 0 for the one whose drafts the target reviews.
        lenience: how lenient the review is, at least 1.
        signs: whether to say how sure the model is of each token (a softmax over the vocabulary each).
        overshoot: hand out all that was accepted even beyond `limit`, as the released code of CS Drafting does.
        follow: take over what the model's `original` has read; not where that is seen to already.
    """

    def __init__(
        self,
        model: CachedModel,
        inner: Feed | None,
        verifier: Verifier,
        accounts: Accounts,
        level: int = 0,
        lenience: float = 1.0,
        signs: bool = False,
        overshoot: bool = False,
        follow: bool = True,
    ) -> None:
        self.model, self.inner, self.verifier, self.accounts, self.level = model, inner, verifier, accounts, level
        self.lenience, self.signs, self.overshoot, self.follow = lenience, signs, overshoot, follow
        self.known: dict[int, int] = {}  # tokens of each row that the model has read
        self._calls: dict[int, int] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]:
        made: list[Proposal] = [NOTHING] * len(rows)
        # To draft a token the model has to read the row: past its context it drafts no more.
        able = [
            i for i, row in enumerate(rows) if limits[i] > 0 and len(row.tokens) <= self.model.context_length
        ]  # fmt: skip
        if not able:
            return made
        live = [self._own(rows[i]) for i in able]
        rooms = [self.model.context_length - len(row.tokens) for row in live]
        asked = [room if self.overshoot else min(room, limits[i] - 1) for i, room in zip(able, rooms, strict=True)]
        drafts = [NOTHING] * len(live) if self.inner is None else self.inner.propose(live, asked)
        for row in live if self.follow else ():
            self.model.follow(row.index, row.tokens.view())
        logits = self.model.advance(
            [row.tokens.view(draft.tokens) for row, draft in zip(live, drafts, strict=True)],
            [len(draft.tokens) + 1 for draft in drafts],
            [row.index for row in live],
        )
        self.accounts.forward(live, self.level, self.model.last_forward_ns)
        verdicts = self.verifier.verify(live, drafts, logits, self.lenience)
        blocks = logits.split([len(draft.tokens) + 1 for draft in drafts])
        for i, row, draft, verdict, block in zip(able, live, drafts, verdicts, blocks, strict=True):
            self.known[row.index] = len(row.tokens) + len(draft.tokens)
            self.accounts.judged(row, draft, verdict.accepted)
            if self.inner is not None:
                self.inner.learn(row, draft, verdict.tokens)
            count = len(verdict.tokens)
            made[i] = Proposal(
                verdict.tokens,
                None if self.verifier.coupled else self._distributions(row, draft, block, count),
                (),
                (self.level,) * count,
                confidence_classes(block, verdict.tokens) if self.signs else (),
            )
        return made

    def begin(self, row: Row) -> None:
        self.model.forget(row.index)
        self.known.pop(row.index, None)
        self._calls.pop(row.index, None)
        if self.inner is not None:
            self.inner.begin(row)

    def reset(self) -> None:
        self.known.clear()
        self._calls.clear()
        if self.inner is not None:
            self.inner.reset()

    def _own(self, row: Row) -> Row:
        """The row, to draft behind; under the rejection rule with noise that no other draw sees.

        A position may be drafted again after a rejection, when lengths were chosen by what came out the first time: the
        same noise would then not be independent of the choice.
        """
        if self.verifier.coupled:
            return ahead_of(row)
        calls = self._calls[row.index] = self._calls.get(row.index, 0) + 1
        return ahead_of(row, noise.position_key(self.level + 1, row.request.key, calls, noise.DRAFT))

    def _distributions(self, row: Row, draft: Draft, logits: torch.Tensor, count: int) -> torch.Tensor:
        """(count, vocab): what each of the tokens handed out is distributed as."""
        p = self.verifier.distributions(logits, row, draft.tokens)[:count]
        if self.lenience > 1:
            for i, token in enumerate(draft.tokens[:count]):
                q = None if draft.probs is None else draft.probs[i]
                p[i] = lenient_proposal(p[i], q, token, self.lenience)
        return p


class Stages(Feed):
    """Drafters one after the other, each up to a fixed length of the whole draft: the horizontal cascade.

    Args:
        stages: (drafter, how far the draft reaches when it is done), in the order in which they draft.
        overshoot: let drafters hand out more than is asked, and cut only what does not fit `limits`.
    """

    def __init__(self, stages: Sequence[tuple[Drafter, int]], overshoot: bool = False) -> None:
        self.stages, self.overshoot = stages, overshoot

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Proposal]:
        ahead = [ahead_of(row) for row in rows]
        parts: list[list[Proposal]] = [[] for _ in rows]
        done = [0] * len(rows)
        for drafter, reach in self.stages:
            reaches = [min(reach, limit) for limit in limits]
            live = [i for i in range(len(rows)) if done[i] < reaches[i]]
            while live:
                made = drafter.propose([ahead[i] for i in live], [reaches[i] - done[i] for i in live])
                for i, part in zip(live, made, strict=True):
                    ahead[i].tokens.extend(part.tokens)
                    parts[i].append(part)  # type: ignore[arg-type]
                    done[i] += len(part.tokens)
                if isinstance(drafter, Ngram):  # asked again, it would go on behind its own words
                    break
                live = [i for i, part in zip(live, made, strict=True) if part.tokens and done[i] < reaches[i]]
        return [joined(found, limit) if found else NOTHING for found, limit in zip(parts, limits, strict=True)]

    def begin(self, row: Row) -> None:
        for drafter, _ in self.stages:
            drafter.begin(row)

    def reset(self) -> None:
        for drafter, _ in self.stages:
            drafter.reset()
