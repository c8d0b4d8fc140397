"""Verification: how much of a draft the target takes, and which token follows. Two rules.

`coupled` (default). The target's token at absolute position i is argmax(log p_i + g_i), where the Gumbel noise g_i is
a hash of (seed, prompt, i, token). That is an exact draw from p_i (the Gumbel-max trick), and it is the same draw
whoever asks. A draft token is accepted while it equals the target's own; the first that differs is replaced by it. So
every strategy emits the very tokens that plain decoding emits, at any temperature, whatever the drafter did, and
drafters that draw with the same noise agree more often. Temperature 0 is the same with g = 0.

`rejection`. Leviathan et al. 2023 (Algorithm 1) and Chen et al. 2023 (Algorithm 2): accept a token x drawn from q with
probability min(1, p(x)/q(x)); on the first rejection draw from the residual max(0, p - q), normalised; if all were
taken, draw from p. Same distribution as plain decoding, other tokens. At temperature 0 both rules are one.

Drafters that judge each other may be lenient (CS Drafting, arXiv 2312.11462): with lenience l they accept as if l p
stood for p. What comes out is then no longer distributed as p; `lenient_proposal` says as what. A target never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import noise
from .base import Draft, Row
from .sampling import Sampling, argmax

SMALL_VOCABULARY = 4096  # tokens; noise for all of them costs no more than finding out which can be drawn


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` draft tokens, followed by one token of the target's own."""

    tokens: tuple[int, ...]
    accepted: int


def verify_coupled(draft: Sequence[int], target: Sequence[int]) -> Verdict:
    """Takes the draft while it equals the target's own tokens.

    Args:
        draft: k tokens.
        target: k + 1 tokens; `target[i]` is the target's own after the first i draft tokens.
    """
    if len(target) != len(draft) + 1:
        raise ValueError(f"{len(draft)} draft tokens need {len(draft) + 1} target tokens, not {len(target)}")
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    return Verdict(tuple(target[: accepted + 1]), accepted)


def accept_probability(p: torch.Tensor, q: torch.Tensor | None, token: int, lenience: float = 1.0) -> float:
    """min(1, l p(x)/q(x)); q None is one-hot on `token`. p, q: (vocab,)."""
    if q is None:
        return min(1.0, lenience * float(p[token]))
    drawn = float(q[token])
    if drawn <= 0:
        raise ValueError(f"draft token {token} has probability 0 under the distribution it is said to be drawn from")
    return min(1.0, lenience * float(p[token]) / drawn)


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int, lenience: float = 1.0) -> torch.Tensor:
    """max(0, p - q/l), not normalised. (vocab,) A new tensor."""
    if q is None:
        rest = p.clone()
        rest[token] = max(0.0, float(p[token]) - 1 / lenience)
    else:
        if p.shape != q.shape:
            raise ValueError(f"the two vocabularies differ in size: {tuple(p.shape)} and {tuple(q.shape)}")
        rest = (p - q.to(p.device) / lenience).clamp_(min=0.0)
    # Rounding can leave nothing where p equals q; a rejection there has probability 0 up to rounding.
    return rest if bool((rest > 0).any()) else p


def lenient_proposal(p: torch.Tensor, q: torch.Tensor | None, token: int, lenience: float) -> torch.Tensor:
    """What a token is distributed as that was drawn from q and judged by p with lenience. (vocab,)

    A token x comes out either accepted, with q(x) min(1, l p(x)/q(x)) = min(q, l p)(x), or as the draw r from the
    residual after a rejection: min(q, l p) + (1 - sum of it) r. With l = 1 that is p. What a reviewer passes on upwards
    has to be this, or the level above accepts the wrong share of it.
    """
    rest = residual(p, q, token, lenience)
    if q is None:
        kept = torch.zeros_like(p)
        kept[token] = min(1.0, lenience * float(p[token]))
    else:
        kept = torch.minimum(q.to(p.device), lenience * p)
    return kept + (1 - kept.sum()).clamp(min=0.0) * rest / rest.sum()


class Verifier:
    """Sampling and a rule, bound to the noise: the only place where tokens are chosen."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.coupled = sampling.verify == "coupled" or sampling.greedy
        self._ids: dict[torch.device, torch.Tensor] = {}
        self._noise: dict[int, torch.Tensor] = {}  # full-vocabulary noise of the latest positions

    # Choosing tokens

    def choose(self, logits: torch.Tensor, row: Row, draft: Sequence[int] = ()) -> list[int]:
        """The target's own tokens at consecutive positions of one row.

        Args:
            logits: (m, vocab), m = len(draft) + 1; row i follows the row's tokens and the first i of the draft.
        """
        logits = self._penalise(logits, row, draft)
        if self.sampling.greedy:
            return argmax(logits)
        scores = self.sampling.scores(logits)
        return [self._draw(scores[i], row, len(row.tokens) + i, noise.TARGET) for i in range(len(scores))]

    def choose_drafts(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Sequence[int]]
    ) -> list[tuple[int, torch.Tensor | None]]:
        """One draft token per row from a draft model's logits, and what it was drawn from.

        Args:
            logits: (len(rows), vocab); entry i follows the tokens of row i and the whole of `drafts[i]`.

        Returns:
            Per row the token, and its distribution q (vocab,) under the rejection rule, else None.
        """
        if self.sampling.greedy and not self.sampling.edits_logits:
            return [(token, None) for token in argmax(logits)]
        return [self._choose_draft(*one) for one in zip(logits, rows, drafts, strict=True)]

    def _choose_draft(self, logits: torch.Tensor, row: Row, draft: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        logits = self._penalise(logits[None], row, draft, last_only=True)
        if self.sampling.greedy:
            return argmax(logits)[0], None
        scores = self.sampling.scores(logits)[0]
        position = len(row.tokens) + len(draft)
        if self.coupled:
            return self._draw(scores, row, position, noise.TARGET), None
        return self._draw(scores, row, position, noise.DRAFT), scores.softmax(dim=-1)

    def values(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        """What the target's next token is the argmax of: logits, or log-probabilities with noise. (vocab,) float64.

        For reports about a choice, not for making one.
        """
        logits = self._penalise(logits[None], row, ())
        if self.sampling.greedy:
            return logits[0].double()
        scores = self.sampling.scores(logits)[0]
        key = noise.position_key(self.sampling.seed, row.request.key, len(row.tokens), noise.TARGET)
        return scores + self._full_noise(key, scores)

    def distance_to_border(self, logits: torch.Tensor, row: Row, token: int) -> float:
        """How little would have to change for a token that top-k or top-p dropped to be kept: the smaller of its
        distance in score from the last token kept, and (top-p) the mass kept beyond what was asked for. (vocab,)"""
        logits = self._penalise(logits[None], row, ())
        kept = torch.isfinite(self.sampling.scores(logits)[0])
        plain = logits[0].float() / self.sampling.temperature
        distance = float(plain[kept].min() - plain[token])
        if self.sampling.top_p < 1:
            distance = min(distance, float(plain.softmax(-1)[kept].sum()) - self.sampling.top_p)
        return max(distance, 0.0)

    # Judging drafts

    def verify(
        self, rows: Sequence[Row], drafts: Sequence[Draft], logits: torch.Tensor, lenience: float = 1.0
    ) -> list[Verdict]:
        """Judges one draft per row.

        Args:
            logits: the rows' blocks one after another, (sum of len(draft) + 1, vocab), as `advance` returns them.
            lenience: above 1 for a drafter that judges another. Greedy and coupled, where a draft token is no draw, it
                takes a token other than its own if its probability is above 1 / lenience.
        """
        sizes = [len(draft.tokens) + 1 for draft in drafts]
        if self.sampling.greedy and not self.sampling.edits_logits and lenience == 1:
            own = argmax(logits)  # one kernel and one copy to the host for the whole batch
            verdicts, at = [], 0
            for draft, size in zip(drafts, sizes, strict=True):
                verdicts.append(verify_coupled(draft.tokens, own[at : at + size]))
                at += size
            return verdicts
        blocks = logits.split(sizes)
        judge = self._verify_coupled if self.coupled else self._verify_rejection
        return [judge(row, draft, block, lenience) for row, draft, block in zip(rows, drafts, blocks, strict=True)]

    def distributions(self, logits: torch.Tensor, row: Row, draft: Sequence[int] = ()) -> torch.Tensor:
        """p at consecutive positions of one row, after penalties, temperature and truncation; for greedy sampling at
        temperature 1. Arguments as for `choose`; (m, vocab) float32."""
        logits = self._penalise(logits, row, draft)
        return (logits.float() if self.sampling.greedy else self.sampling.scores(logits)).softmax(dim=-1)

    def _verify_coupled(self, row: Row, draft: Draft, logits: torch.Tensor, lenience: float) -> Verdict:
        own = self.choose(logits, row, draft.tokens)
        if lenience > 1:
            p = self.distributions(logits, row, draft.tokens)
            for i, token in enumerate(draft.tokens):
                if own[i] != token and float(p[i, token]) > 1 / lenience:
                    own[i] = token
        return verify_coupled(draft.tokens, own)

    def _verify_rejection(self, row: Row, draft: Draft, logits: torch.Tensor, lenience: float) -> Verdict:
        scores = self.sampling.scores(self._penalise(logits, row, draft.tokens))
        start = len(row.tokens)
        for i, token in enumerate(draft.tokens):
            p = scores[i].softmax(dim=-1)
            q = None if draft.probs is None else draft.probs[i]
            luck = noise.uniform(self.sampling.seed, row.request.key, start + i)
            if luck >= accept_probability(p, q, token, lenience):
                own = self._draw(residual(p, q, token, lenience).log(), row, start + i, noise.RESIDUAL)
                return Verdict((*draft.tokens[:i], own), i)
        own = self._draw(scores[-1], row, start + len(draft.tokens), noise.TARGET)
        return Verdict((*draft.tokens, own), len(draft.tokens))

    # Noise

    def _penalise(self, logits: torch.Tensor, row: Row, draft: Sequence[int], last_only: bool = False) -> torch.Tensor:
        if not self.sampling.edits_logits:
            return logits
        context = row.tokens.view(draft)
        start = len(context) if last_only else len(row.tokens)
        contexts = [context[:end] for end in range(start, len(context) + 1)]
        return self.sampling.penalise(logits, contexts, row.prompt_length)

    def _draw(self, scores: torch.Tensor, row: Row, position: int, stream: int) -> int:
        """argmax(scores + Gumbel noise), over the tokens that are still possible. (vocab,)"""
        key = noise.position_key(self.sampling.seed, row.request.key, position, stream)
        # Draft and target share the noise of a position, unless there is much of it and little that can be drawn.
        whole = not self.sampling.top_k and self.sampling.top_p == 1
        if stream == noise.TARGET and (whole or len(scores) <= SMALL_VOCABULARY):
            return int((scores + self._full_noise(key, scores)).argmax())
        candidates = torch.nonzero(scores > -torch.inf).squeeze(-1)
        best = (scores[candidates] + noise.gumbel(key, candidates)).argmax()
        return int(candidates[best])

    def _full_noise(self, key: int, scores: torch.Tensor) -> torch.Tensor:
        made = self._noise.get(key)
        if made is None or made.device != scores.device or len(made) < len(scores):
            ids = self._ids.get(scores.device)
            if ids is None or len(ids) < len(scores):
                ids = self._ids[scores.device] = torch.arange(len(scores), device=scores.device)
            made = noise.gumbel(key, ids[: len(scores)])
            while len(self._noise) >= 64:
                self._noise.pop(next(iter(self._noise)))
            self._noise[key] = made
        return made[: len(scores)]
