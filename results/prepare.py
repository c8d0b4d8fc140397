"""From a checked plan to prompts as token ids and models that fit together: everything but the weights.

Templates and tokenisation run here, once, untimed; every arm gets the same ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import MeasurementError, ModelError, UsageError
from ..models.drafts import describe_draft
from ..models.info import ModelInfo, describe
from ..models.load import check_cache, check_pair, check_ranks, check_runtime
from ..models.specs import parse
from ..models.tokenizer import TextCodec
from ..tasks.base import Prompt
from . import servers
from .listener import Listener
from .plan import Checked, Plan

_TURN_TOKENS = 32  # what a chat template may put around one more question and its answer


@dataclass(frozen=True)
class Turn:
    """One turn of a prompt, ready to be decoded.

    Attributes:
        ids: what the target reads.
        hash: of the ids; the same for the same words under the same template and tokenizer.
        template: `chat` or `raw`.
        key: integer for the noise, from the hash alone.
        max_new_tokens: the limit after the context length was respected.
        error: why it cannot be run at all, or None.
    """

    task: str
    prompt: Prompt
    number: int
    ids: tuple[int, ...]
    hash: str
    template: str
    max_new_tokens: int
    error: str | None = None

    @property
    def key(self) -> int:
        return int(self.hash[:16], 16)


@dataclass
class Prepared:
    """All that a run needs, before weights are read."""

    checked: Checked
    infos: dict[str, ModelInfo]
    codec: TextCodec
    vocab_size: int
    prompts: list[tuple[str, Prompt]]
    first_turns: list[Turn]
    dtype: str
    runtimes: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.checked.plan

    @property
    def eos(self) -> tuple[int, ...]:
        return tuple(self.infos["target"].eos_ids)

    @property
    def needed_tokens(self) -> int:
        """The longest row that will be asked for, prompt and answer; for a conversation with all its turns, whose
        answers are not known yet, the most it can come to."""
        longest = max((self._tokens_of(turn) for turn in self.first_turns if turn.error is None), default=0)
        return min(longest, self.infos["target"].context_length)

    def _tokens_of(self, first: Turn) -> int:
        later = first.prompt.turns[1:]
        asked = sum(len(self.codec.encode(said)) + _TURN_TOKENS for said in later)
        return len(first.ids) + asked + first.max_new_tokens * (1 + len(later))

    def quant(self, role: str) -> str | None:
        """The weight-only quantisation that a role runs in."""
        return self.infos[role].spec.quant or (self.plan.target_quant if role == "target" else self.plan.draft_quant)

    def turn(self, task: str, prompt: Prompt, answers: Sequence[str] = ()) -> Turn:
        """Renders the turn that follows the given answers."""
        return render(self.plan, self.codec, self.infos["target"].context_length, task, prompt, answers)


def render(
    plan: Plan, codec: TextCodec, context_length: int, task: str, prompt: Prompt, answers: Sequence[str] = ()
) -> Turn:
    number = len(answers)
    messages = []
    for said, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[number]})
    rendered = codec.render(messages, raw=plan.raw or prompt.raw)
    limit = plan.max_new_tokens or prompt.max_new_tokens
    room = context_length - len(rendered.ids)
    error = None
    if room < 1:
        error = f"prompt of {len(rendered.ids)} tokens does not fit the target's context of {context_length}"
    digest = hashlib.sha256(",".join(map(str, rendered.ids)).encode()).hexdigest()
    return Turn(task, prompt, number, tuple(rendered.ids), digest, rendered.template, max(1, min(limit, room)), error)


def prepare(checked: Checked, listener: Listener) -> Prepared:
    """Finds the models, refuses what does not fit together, reads the tasks and renders every first turn.

    Raises:
        ModelError, TaskError: one clear line, before any weights are read.
        MeasurementError: the tasks hold no prompt.
    """
    plan = checked.plan
    for note in checked.notes:
        listener.note(note)
    for arm in checked.arms:
        arm.strategy.reach(arm.options)
    specs = {"target": plan.target, **plan.drafts}
    only_servers = servers.only_servers(checked.arms)
    infos = {}
    for role in (role for role in specs if role in checked.roles):
        name = specs[role]
        listener.stage(f"looking up {role} {name}")
        spec = parse(name)
        if role == "target":
            infos[role] = describe(spec, role, progress=listener.note)
        else:
            options = plan.draft_options(role)
            infos[role] = describe_draft(spec, infos["target"], role, options, plan.draft_quant, listener.note)
        if not only_servers:
            check_cache(infos[role])
        if role == "target":
            check_ranks(infos[role], plan.tp)
    listener.stage("reading tasks")
    codec = infos["target"].codec
    target = infos["target"]
    prompts, turns = [], []
    for name, task in checked.tasks:
        for prompt in task.prompts(codec, plan.limit):
            prompts.append((name, prompt))
            turns.append(render(plan, codec, target.context_length, name, prompt))
    if not prompts:
        raise MeasurementError(f"nothing to measure: no prompt in {', '.join(plan.task)}")
    vocab_size = target.vocab_size
    prepared = Prepared(checked, infos, codec, vocab_size, prompts, turns, _dtype(plan, checked))
    for draft in (info for role, info in infos.items() if role != "target"):
        prepared.vocab_size = min(prepared.vocab_size, check_pair(target, draft, prepared.needed_tokens))
    for role, info in infos.items() if not only_servers else ():
        device = checked.placement.of(role).torch_name
        asked = plan.runtime_of(role)
        packed = check_runtime(info, device, prepared.dtype, asked, prepared.quant(role), plan.exact)
        prepared.runtimes[role] = "packed" if packed else "transformers"
    for arm in checked.arms:
        if arm.strategy.needs_packed and prepared.runtimes["target"] != "packed":
            raise ModelError(f"{arm.name}: needs the packed runtime, which does not support target {target.name}")
    wanted = sum(turn.max_new_tokens < (plan.max_new_tokens or turn.prompt.max_new_tokens) for turn in turns)
    if wanted:
        listener.note(
            f"{wanted} answer(s) may be shorter than asked: the target's context is {target.context_length} tokens"
        )
    if outside := [token for token in plan.suppress_tokens if not 0 <= token < prepared.vocab_size]:
        raise UsageError(f"--suppress-tokens {outside[0]}: the vocabulary goes from 0 to {prepared.vocab_size - 1}")
    return prepared


def _dtype(plan: Plan, checked: Checked) -> str:
    """`auto`: exact where that costs little, what people run where it does not: float32 on CPU, bfloat16 on GPU."""
    if plan.dtype != "auto":
        return plan.dtype
    return "bfloat16" if checked.placement.of("target").kind == "cuda" else "float32"
