"""The small model that is trained: a few of the target's layers and its final norm, between tables that stay fixed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .packed_linear import can_prepack

DRAFT_LENGTHS = (2, 4, 8)
_CHUNK = 1024  # tokens whose logits exist at the same time


def compute_dtype(device: str) -> str:
    """bfloat16 where this processor or GPU computes in it, else float32."""
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if can_prepack(torch.bfloat16) else "float32"


class Layers:
    """What is taken out of a target before its own weights are packed: tables, and the layers that drafts start from.

    Args:
        hf_model: the target as transformers loads it; not changed.
        wanted: numbers of the layers that a draft may start from.
    """

    def __init__(self, hf_model: Any, wanted: Sequence[int], device: str, dtype: torch.dtype) -> None:
        self.config, self.device = hf_model.config, device
        embedding, head = hf_model.model.embed_tokens.weight, hf_model.lm_head.weight
        self.embedding = embedding.detach().to(device, dtype, copy=True)
        self.head = self.embedding if head is embedding else head.detach().to(device, dtype, copy=True)
        self._norm = _copy(hf_model.model.norm)
        self._layers = {at: _copy(hf_model.model.layers[at]) for at in wanted}

    def student(self, start: Sequence[int]) -> Student:
        return Student(self, start)


def _copy(module: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().float().clone() for name, weight in module.state_dict().items()}


class Student:
    """Float32 weights; products in bfloat16 where the device has them."""

    def __init__(self, source: Layers, start: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(source.config)
        config.num_hidden_layers = len(start)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * len(start)
        self.config, self.source, self.start = config, source, tuple(start)
        without_tables = copy.deepcopy(config)
        without_tables.vocab_size, without_tables.pad_token_id = 1, None
        made = AutoModelForCausalLM.from_config(without_tables, dtype=torch.float32, attn_implementation="sdpa")
        self.model: Any = made.model.to(source.device).train()
        self.model.embed_tokens.requires_grad_(False)
        for layer, at in zip(self.model.layers, start, strict=True):
            layer.load_state_dict(source._layers[at])
        self.model.norm.load_state_dict(source._norm)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def weights(self) -> dict[str, torch.Tensor]:
        """Named as in a transformers folder; tables are not among them."""
        return {
            f"model.{name}": weight
            for name, weight in self.model.state_dict().items()
            if not name.startswith("embed_tokens")
        }

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()}, strict=False)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """(texts, tokens) to (texts x tokens, width), after the final norm."""
        embedded = self.source.embedding[ids].float()
        low = self.source.embedding.dtype
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=low is torch.bfloat16):
            return self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.flatten(0, 1)


def head_loss(
    states: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, gradient: bool = True
) -> tuple[float, torch.Tensor | None]:
    """Mean cross-entropy, in nats, of the student's distribution to the teacher's, both over the rows of the head.

    The head is fixed, so the gradient at the states is made on the way, chunk by chunk, and logits never exist all at
    once.

    Args:
        states, teacher: (tokens, width).
        head: (kept tokens, width).

    Returns:
        The loss, and its gradient with respect to `states`.
    """
    total, count = 0.0, len(states)
    out = torch.empty_like(states) if gradient else None
    with torch.no_grad():
        for at in range(0, count, _CHUNK):
            part = slice(at, at + _CHUNK)
            own = (states[part].to(head.dtype) @ head.T).float().log_softmax(-1)
            wanted = (teacher[part].to(head.dtype) @ head.T).float().softmax(-1)
            total -= float((wanted * own).sum())
            if out is not None:
                out[part] = ((own.exp_() - wanted) / count).to(head.dtype) @ head
    return total / count, out


@dataclass(frozen=True)
class Quality:
    """How a draft does on held-out text.

    Attributes:
        loss: nats per token, to the target's distribution over the kept tokens.
        agreement: share of positions where its likeliest token is the target's.
        tokens_per_step: by draft length, what greedy speculative decoding would make per verification.
    """

    loss: float
    agreement: float
    tokens_per_step: dict[int, float]


class HeldOut:
    """Text that no draft is trained on, with the target's own choice after every token.

    Args:
        ids: (texts, tokens); states: (texts, tokens, width).
        counts: (texts, tokens), whether the choice after this token counts.
    """

    def __init__(self, ids: np.ndarray, states: torch.Tensor, counts: np.ndarray, source: Layers) -> None:
        self.ids, self.states, self.counts, self.source = torch.from_numpy(ids), states, counts, source
        flat = states.to(source.device, source.head.dtype).flatten(0, 1)
        own = [(part @ source.head.T).argmax(-1) for part in flat.split(_CHUNK)]
        self.own = torch.cat(own).view(ids.shape).cpu().numpy()

    @torch.no_grad()
    def judge(self, student: Student, kept: torch.Tensor) -> Quality:
        """kept: the ids of the head's rows, on the device."""
        head, device = self.source.head[kept], self.source.device
        agrees, losses = [], []
        for ids, states in zip(self.ids.split(8), self.states.split(8), strict=True):
            mine = student.states(ids.to(device))
            losses.append(head_loss(mine, states.to(device).flatten(0, 1), head, gradient=False)[0] * len(ids))
            best = [(part.to(head.dtype) @ head.T).argmax(-1) for part in mine.split(_CHUNK)]
            agrees.append(kept[torch.cat(best)].view(ids.shape).cpu().numpy())
        agree = np.concatenate(agrees) == self.own
        return Quality(
            loss=sum(losses) / len(self.ids),
            agreement=float(agree[self.counts].mean()),
            tokens_per_step={length: tokens_per_step(agree, self.counts, length) for length in DRAFT_LENGTHS},
        )


def tokens_per_step(agree: np.ndarray, counts: np.ndarray, length: int) -> float:
    """Plays speculative decoding through stretches of text: a step takes the draft while it agrees, and one token more.

    Args:
        agree, counts: (texts, tokens); whether the draft agrees there, and whether the position is looked at.
        length: tokens drafted per step.
    """
    tokens = steps = 0
    for row, looked_at in zip(agree, counts, strict=True):
        for use, stretch in itertools.groupby(range(len(row)), key=lambda at, seen=looked_at: bool(seen[at])):
            positions = list(stretch)
            at = 0
            while use and at < len(positions):
                taken = 0
                while taken < length and at + taken < len(positions) and row[positions[at + taken]]:
                    taken += 1
                made = min(taken + 1, len(positions) - at)
                tokens, steps, at = tokens + made, steps + 1, at + made
    return tokens / max(steps, 1)
