"""What the user asked of sampling, and the distribution that follows from it.

Everything here is a function of the logits and the context alone, so nothing has to be rolled back when a draft is
rejected: the state of a penalty is the context itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UsageError

GREEDY_BELOW = 1e-4  # a temperature this small is greedy in every path; dividing by it could overflow
VERIFICATIONS = ("coupled", "rejection")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the same for target and draft, and for every arm of a run.

    Attributes:
        temperature: 0 for greedy decoding.
        top_k: keep the k most likely tokens, 0 for all; a tie at the border is kept whole.
        top_p: then keep the smallest set of tokens that holds this probability, 1 for all; ties kept whole.
        seed: of the noise.
        verify: `coupled` or `rejection`, see `strategies.verify`.
        presence_penalty, frequency_penalty: taken from a token's logit if it was generated, or per time it was.
        repetition_penalty: divides a positive logit, multiplies a negative one, of every token of the context.
        min_new_tokens: no end-of-text token before so many tokens were generated.
        suppress: ids that are never emitted.
        eos: the target's end-of-text ids, for `min_new_tokens`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    verify: str = "coupled"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppress: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: not a number from 0 upwards")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: not a count; 0 switches it off")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: not above 0 and at most 1; 1 switches it off")
        if self.repetition_penalty <= 0:
            raise UsageError(f"--repetition-penalty {self.repetition_penalty}: not above 0; 1 switches it off")
        if self.min_new_tokens < 0:
            raise UsageError(f"--min-new-tokens {self.min_new_tokens}: not a count")
        if self.verify not in VERIFICATIONS:
            raise UsageError(f'--verify "{self.verify}": not one of {", ".join(VERIFICATIONS)}')

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def edits_logits(self) -> bool:
        """Whether `penalise` changes anything."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.min_new_tokens
            or self.suppress
        )

    def penalise(self, logits: torch.Tensor, contexts: Sequence[np.ndarray], prompt_length: int) -> torch.Tensor:
        """The logits after penalties and bans; a new tensor if anything changes.

        Args:
            logits: (m, vocab); row i follows `contexts[i]`.
            contexts: all ids before each position, draft tokens included.
            prompt_length: how many of them are the prompt's.
        """
        if not self.edits_logits:
            return logits
        logits = logits.float().clone()
        for row, context in zip(logits, contexts, strict=True):
            if self.repetition_penalty != 1:
                seen = torch.from_numpy(np.unique(context)).to(row.device)
                at = row[seen]
                row[seen] = torch.where(at > 0, at / self.repetition_penalty, at * self.repetition_penalty)
            if self.presence_penalty or self.frequency_penalty:
                ids, counts = np.unique(context[prompt_length:], return_counts=True)
                penalty = self.presence_penalty + self.frequency_penalty * torch.from_numpy(counts)
                row[torch.from_numpy(ids).to(row.device)] -= penalty.to(row)
            if len(context) - prompt_length < self.min_new_tokens:
                row[list(self.eos)] = -torch.inf
            if self.suppress:
                row[list(self.suppress)] = -torch.inf
        return logits

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over temperature, with -inf for what top-k and top-p drop. (m, vocab) float32.

        The softmax of it is the distribution that tokens are drawn from. Not for greedy sampling.
        """
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            border = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < border, -torch.inf)
        if self.top_p < 1:
            scores = scores.masked_fill(scores < _nucleus_border(scores, self.top_p), -torch.inf)
        return scores


def argmax(logits: torch.Tensor) -> list[int]:
    """The one argmax of specbench: the lowest index wins a tie. (m, vocab) to m ints."""
    # torch documents the first maximal index, and it is what CPU and CUDA kernels return.
    return logits.argmax(dim=-1).tolist()


def _nucleus_border(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """(m, 1): the score of the last token inside the smallest set that holds `top_p`.

    Looks at the most likely few hundred first: a full sort of a large vocabulary costs more than many a forward.
    """
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    vocab = scores.shape[-1]
    few = min(512, vocab)
    while True:
        best = scores.topk(few, dim=-1).values
        held = (best - log_total).exp().cumsum(dim=-1)
        if few == vocab or bool((held[:, -1] >= top_p).all()):
            break
        few = vocab
    # The first position where the mass held reaches top_p is the last one kept.
    last = (held < top_p).sum(dim=-1, keepdim=True).clamp(max=few - 1)
    return best.gather(-1, last)
