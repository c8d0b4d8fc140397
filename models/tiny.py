"""`tiny` and `tiny-draft`: random byte-level Llamas made on the spot, for trying things out and for tests.

Nothing is downloaded and nothing is learned: the text they write is noise. What matters is that greedy output varies,
that the best token leads clearly (so that float32 results do not hang on rounding), and that the draft agrees with
its target often, not always: both have the same embedding, first layer and head, and the target's second layer
changes its mind about some tokens. Only printable ASCII is ever written, and never an end of text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SEED = 20
BYTES = 256
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
CONTEXT = 32768
SECOND_LAYER = 0.3  # of the first layer's weight in the residual stream; sets the agreement of tiny-draft
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(name: str, folder: Path) -> None:
    """Writes `tiny` or `tiny-draft` as an ordinary transformers folder."""
    model = make_model(layers=2 if name == "tiny" else 1)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_model(layers: int) -> Any:
    """A Llama in float32 whose first layers do not depend on how many there are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=BYTES,
        eos_token_id=BYTES + 1,
        pad_token_id=BYTES + 1,
    )
    model: Any = LlamaForCausalLM(config).eval()
    source = torch.Generator().manual_seed(SEED)

    def draw(weight: Any, scale: float = 1.0) -> None:
        weight.copy_(torch.randn(weight.shape, generator=source) * (scale * weight.shape[-1] ** -0.5))

    with torch.no_grad():
        draw(model.model.embed_tokens.weight, 8.0)  # rows of length 8, one unit a channel
        draw(model.lm_head.weight, 4.0)
        silent = torch.ones(config.vocab_size, dtype=torch.bool)
        silent[_printable_ids()] = False
        model.lm_head.weight[silent] = 0
        for at, layer in enumerate(model.model.layers):
            out = 1.0 if at == 0 else SECOND_LAYER
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                draw(part.weight, 1.5)
            draw(layer.self_attn.v_proj.weight)
            draw(layer.self_attn.o_proj.weight, 3.0 * out)
            draw(layer.mlp.gate_proj.weight)
            draw(layer.mlp.up_proj.weight)
            draw(layer.mlp.down_proj.weight, 3.0 * out)
    return model


def make_tokenizer() -> Any:
    """One token per byte, a BOS before raw text, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(_alphabet())}
    vocabulary.update({special: BYTES + i for i, special in enumerate(SPECIAL)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    bos, eos = SPECIAL[:2]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BYTES)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, extra_special_tokens=list(SPECIAL[2:])
    )
    fast.chat_template = TEMPLATE
    return fast


def _alphabet() -> list[str]:
    """The letter that byte-level BPE writes for each byte, by byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]


def _printable_ids() -> list[int]:
    return [ord("\n"), *range(ord(" "), ord("~") + 1)]
