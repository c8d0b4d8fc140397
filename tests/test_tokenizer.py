"""Prompts: one rendering for all arms, special tokens neither doubled nor missing."""

import hashlib

import pytest

from specbench.errors import ModelError
from specbench.models.tiny import BYTES, make_tokenizer
from specbench.models.tokenizer import TextCodec

BOS, EOS, USER, ASSISTANT = range(BYTES, BYTES + 4)
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def codec():
    return TextCodec(make_tokenizer(), "tiny")


def test_text_is_encoded_without_special_tokens_and_decoded_exactly(codec):
    assert codec.encode("Hi ") == list(b"Hi ")
    assert codec.decode(list("é , don 't".encode())) == "é , don 't"  # no cleaning up of spaces
    assert codec.decode([BOS, 72, EOS]) == "<|bos|>H<|eos|>"
    assert codec.decode([BOS, 72, EOS], skip_special=True) == "H"


def test_chat_template_has_one_bos_and_a_generation_prompt(codec):
    """P18, D20, D21: the template writes the BOS; encoding adds no second one."""
    rendered = codec.render(HELLO)
    assert rendered.ids == [BOS, USER, *b"Hi\n", ASSISTANT]
    assert rendered.text == "<|bos|><|user|>Hi\n<|assistant|>"
    assert (rendered.template, rendered.sha256) == ("chat", hashlib.sha256(rendered.text.encode()).hexdigest())


def test_raw_prompt_gets_the_bos_that_the_tokenizer_adds(codec):
    """P19."""
    rendered = codec.render(HELLO, raw=True)
    assert (rendered.ids, rendered.text, rendered.template) == ([BOS, *b"Hi"], "Hi", "raw")


def test_without_a_template_the_prompt_is_raw(codec):
    codec.hf_tokenizer.chat_template = None
    assert codec.render(HELLO).template == "raw"


def test_tokenizer_that_adds_nothing_gets_nothing(codec):
    from tokenizers import processors

    codec.hf_tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    assert codec.prefix == []
    assert codec.render(HELLO, raw=True).ids == list(b"Hi")


def test_end_of_text_that_a_tokenizer_appends_is_not_part_of_a_prompt(codec):
    from tokenizers import processors

    codec.hf_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)]
    )
    assert codec.render(HELLO, raw=True).ids == [BOS, *b"Hi"]


@pytest.mark.parametrize("raw", [True, False])
def test_two_leading_bos_are_an_error(codec, raw):
    """P18: in chats a template that writes it twice, in raw text one that the user wrote."""
    if not raw:
        codec.hf_tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"
    with pytest.raises(ModelError, match="two BOS"):
        codec.render([{"role": "user", "content": "<|bos|>Hi"}], raw=raw)


def test_raw_conversation_is_joined_plainly(codec):
    turns = [*HELLO, {"role": "assistant", "content": " there."}, {"role": "user", "content": "Bye"}]
    assert codec.render(turns, raw=True).text == "Hi there.\nBye"


def test_template_that_refuses_is_one_line(codec):
    codec.hf_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ModelError, match=r"refuses the messages \(System role not supported\)"):
        codec.render(HELLO)


def test_empty_prompt_is_an_error(codec):
    codec.hf_tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(ModelError, match="empty"):
        codec.render(HELLO)


def test_fingerprint_follows_tokens_and_template(codec):
    assert codec.fingerprint == TextCodec(make_tokenizer()).fingerprint
    other = TextCodec(make_tokenizer())
    other.hf_tokenizer.chat_template += " "
    assert codec.fingerprint != other.fingerprint
    assert codec.token_map["<|bos|>"] == BOS
    assert len(codec.token_map) == BYTES + 5
