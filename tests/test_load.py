"""Loading: everything that can be refused is refused before weights are read, in one line that names the models."""

import json
import shutil
from typing import Any

import pytest
import torch
import transformers as hf

from specbench.errors import ModelError
from specbench.models import load as loading
from specbench.models.load import check_cache, check_context, check_pair, describe, load, load_transformers
from specbench.models.specs import parse
from specbench.models.tiny import BYTES, make_tokenizer
from specbench.models.transformers_runtime import TransformersModel

VOCAB = BYTES + 5
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    pad_token_id=0,
    bos_token_id=BYTES,
    eos_token_id=BYTES + 1,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "specbench-cache"))


@pytest.fixture
def folder(tmp_path):
    """Writes a model folder; without weights unless asked."""

    def write(config, name="model", weights=False, tokenizer=None):
        path = tmp_path / name
        config.save_pretrained(path)
        (tokenizer or make_tokenizer()).save_pretrained(path)
        if weights:
            torch.manual_seed(0)
            kind: Any = hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            kind(config).save_pretrained(path)
        return path

    return write


def described(path, role="target"):
    return describe(parse(str(path)), role)


def llama(**changes):
    return hf.LlamaConfig(**{**SMALL, **changes})


def test_description_needs_no_weights(folder):
    info = described(folder(llama()))
    assert (info.architecture, info.vocab_size, info.context_length) == ("LlamaForCausalLM", VOCAB, 96)
    assert info.layer_types == ("full_attention", "full_attention")
    assert (info.eos_ids, info.bos_id, info.adds_bos, info.chat_template) == ((BYTES + 1,), BYTES, True, True)
    assert info.parameters is None
    json.dumps(info.record(), allow_nan=False)


def test_parameters_are_counted_from_the_file_headers(folder):
    path = folder(llama(), weights=True)
    assert described(path).parameters == load_transformers(described(path)).num_parameters()


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [([3, 4], 5, (3, 4)), (7, 5, (7,)), (None, 5, (5,)), (None, None, (257,))],
)
def test_eos_ids_come_from_the_generation_config_first(folder, in_generation, in_config, expected):
    """P20: several ids; else those of the config, else of the tokenizer."""
    path = folder(llama(eos_token_id=in_config))
    if in_generation is not None:
        hf.GenerationConfig(eos_token_id=in_generation).save_pretrained(path)
    assert described(path).eos_ids == expected


def test_no_eos_at_all_is_allowed(folder):
    """D3."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert described(folder(llama(eos_token_id=None), tokenizer=tokenizer)).eos_ids == ()


def test_context_length_by_whatever_name(folder):
    assert described(folder(hf.GPT2Config(vocab_size=VOCAB, n_positions=77))).context_length == 77


def test_fingerprint_is_of_the_content(folder, tmp_path):
    path = folder(llama(), weights=True)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    assert described(path).fingerprint == described(copy).fingerprint
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert described(path).fingerprint != described(copy).fingerprint


SLIDING = "sliding_attention"
REFUSED = {
    "mistral": (lambda: hf.MistralConfig(sliding_window=8, **SMALL), SLIDING),
    "qwen2 with a window": (
        lambda: hf.Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **SMALL),
        f"1 {SLIDING}",
    ),
    "gemma3": (lambda: hf.Gemma3TextConfig(sliding_window=8, head_dim=8, **{**SMALL, "num_hidden_layers": 6}), SLIDING),
    "llama4": (lambda: hf.Llama4TextConfig(attention_chunk_size=8, **{**SMALL, "num_hidden_layers": 4}), "chunked_att"),
    "mamba": (lambda: hf.MambaConfig(vocab_size=VOCAB, num_hidden_layers=2), "linear_attention"),
    "jamba": (lambda: hf.JambaConfig(**{**SMALL, "num_hidden_layers": 8}), "linear_attention"),
    "recurrent_gemma": (lambda: hf.RecurrentGemmaConfig(vocab_size=VOCAB, num_hidden_layers=3), "linear_attention"),
    "falcon_h1": (lambda: hf.FalconH1Config(**SMALL), "hybrid"),
    "lfm2": (lambda: hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "1 conv"),
    "rwkv": (lambda: hf.RwkvConfig(vocab_size=VOCAB, num_hidden_layers=2), "recurrent"),
    "bart": (lambda: hf.BartConfig(vocab_size=VOCAB), "encoder-decoder"),
    "bert": (lambda: hf.BertConfig(vocab_size=VOCAB), "both directions"),
    "openai-gpt": (lambda: hf.OpenAIGPTConfig(vocab_size=VOCAB), "without a KV cache"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_cache_that_cannot_be_rolled_back_is_refused_before_weights(folder, family):
    """D12, D13, D14, D15: no weights exist here, so nothing can have loaded them."""
    config, reason = REFUSED[family]
    info = described(folder(config()), "draft")
    with pytest.raises(ModelError, match=reason) as caught:
        check_cache(info)
    assert "draft" in str(caught.value)
    assert info.name in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=reason):
        load(info)


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.MistralConfig(sliding_window=None, **SMALL),
        lambda: hf.MistralConfig(sliding_window=96, **SMALL),  # as long as the context: it never fills
        lambda: hf.Qwen2Config(use_sliding_window=False, sliding_window=8, **SMALL),
        lambda: hf.Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=2, **SMALL),
        lambda: hf.GPT2Config(vocab_size=VOCAB, n_positions=96),
        lambda: hf.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    ],
)
def test_full_attention_is_accepted_whatever_the_config_mentions(folder, config):
    check_cache(described(folder(config())))


def test_window_as_long_as_the_context_computes_right(folder):
    path = folder(hf.MistralConfig(sliding_window=96, **SMALL), weights=True)
    model = load(described(path), runtime="transformers")
    assert isinstance(model, TransformersModel)
    contexts = [list(range(90)), list(range(40))]
    got = model.advance(contexts)
    with torch.inference_mode():
        expected = torch.cat([model.hf_model(torch.tensor([ids]), use_cache=False).logits[0, -1:] for ids in contexts])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_padded_heads_are_cut_to_the_common_size(folder):
    """D17, D19: the tokenizers are equal, the longer head has rows that no token uses."""
    target = described(folder(llama(vocab_size=320), "big", weights=True))
    draft = described(folder(llama(vocab_size=288), "small", weights=True), "draft")
    assert check_pair(target, draft, 96) == 288
    assert check_pair(draft, target, 96) == 288
    model = load(target, vocab_size=288)
    assert model.vocab_size == 288
    assert model.advance([[1, 2, 3]]).shape == (1, 288)


def test_unrelated_vocabularies_are_refused_by_the_first_token_that_differs(folder):
    """D18."""
    other = make_tokenizer()
    other.add_tokens(["<|tool|>"])
    target = described(folder(llama(), "a"))
    draft = described(folder(llama(vocab_size=300), "b", tokenizer=other), "draft")
    with pytest.raises(ModelError, match=r"261 and 262 tokens; id 261 is nothing and '<\|tool\|>'") as caught:
        check_pair(target, draft, 10)
    assert target.name in str(caught.value)
    assert draft.name in str(caught.value)


def test_same_size_is_not_the_same_vocabulary(folder):
    """D18: as many tokens, two of them exchanged."""
    path = folder(llama(), "b")
    text = (path / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    tokens = vocabulary["model"]["vocab"]
    tokens["A"], tokens["B"] = tokens["B"], tokens["A"]
    (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelError, match="id 65 is 'A' and 'B'"):
        check_pair(described(folder(llama(), "a")), described(path, "draft"), 10)


def test_head_smaller_than_the_vocabulary_is_refused(folder):
    target, draft = described(folder(llama(), "a")), described(folder(llama(vocab_size=200), "b"), "draft")
    with pytest.raises(ModelError, match="heads of 261 and 200 rows"):
        check_pair(target, draft, 10)


def test_draft_with_a_shorter_context_is_refused_with_both_limits(folder):
    """D32, D33, D34, D35: only where the run needs more; the target's limit stays its own."""
    target = described(folder(llama(), "a"))
    draft = described(folder(llama(max_position_embeddings=48), "b"), "draft")
    assert check_pair(target, draft, 48) == VOCAB
    with pytest.raises(ModelError, match=r"holds 48 tokens and target .* 96, .* need 49"):
        check_pair(target, draft, 49)
    check_context(target, 96)
    with pytest.raises(ModelError, match="holds 96 tokens, .* need 97"):
        check_context(target, 97)


def test_load_is_silent_and_ready(folder, capfd):
    path = folder(llama(), weights=True)
    capfd.readouterr()
    model = load(described(path), runtime="transformers", dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    assert isinstance(model, TransformersModel)
    assert (model.dtype, model.device, model.context_length) == ("bfloat16", "cpu", 96)
    assert not model.hf_model.training
    assert not any(w.requires_grad for w in model.hf_model.parameters())
    assert model.hf_model.config._attn_implementation == "sdpa"


def test_auto_takes_packed_where_it_is_supported(folder):
    from specbench.models import packed

    path = folder(llama(), weights=True)
    model = load(described(path))
    assert isinstance(model, packed.PackedModel)
    assert model.context_length == 96
    reference = load(described(path), runtime="transformers")
    context = [5, 6, 7, 8]
    torch.testing.assert_close(model.advance([context]), reference.advance([context]), atol=1e-4, rtol=1e-4)
    gpt2 = described(folder(hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4), "gpt2", weights=True))
    assert load(gpt2).runtime == "transformers"
    with pytest.raises(ModelError, match="packed runtime does not support"):
        load(gpt2, runtime="packed")


def test_quantised_weights_need_the_packed_runtime(folder):
    info = described(folder(llama(), weights=True))
    with pytest.raises(ModelError, match="int4 needs the packed runtime"):
        load(info, runtime="transformers", quant="int4")


def test_missing_weights_are_not_made_up(folder):
    """transformers fills what is missing with random numbers and says so in a log line only."""
    from safetensors.torch import load_file, save_file

    path = folder(llama(), weights=True)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the weights, first model\.layers\.1\.mlp\.up_proj"):
        load(described(path))


def test_folder_without_weights_and_unknown_families_are_one_line(folder, tmp_path):
    path = folder(llama())
    with pytest.raises(ModelError, match="transformers cannot load it") as caught:
        load(described(path))
    assert "\n" not in str(caught.value)
    (path / "config.json").write_text('{"model_type": "hovercraft"}')
    with pytest.raises(ModelError, match="hovercraft"):
        described(path)
    hf.ViTConfig().save_pretrained(path)
    with pytest.raises(ModelError, match="vit is no causal language model"):
        described(path)


def test_model_with_code_of_its_own_is_refused_and_never_asked_about(folder):
    path = folder(llama())
    settings = json.loads((path / "config.json").read_text())
    settings.update(model_type="own", auto_map={"AutoConfig": "own.Config"})
    (path / "config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text("raise SystemExit('ran foreign code')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        described(path)


def test_unknown_dtype_and_runtime_name_the_near_one(folder):
    info = described(folder(llama(), weights=True))
    with pytest.raises(ModelError, match='unknown dtype "bfloat"; did you mean "bfloat16"'):
        load(info, dtype="bfloat", runtime="transformers")
    with pytest.raises(ModelError, match='did you mean "packed"'):
        load(info, runtime="pack")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and a token that must never be printed; the suite runs with HF_HUB_OFFLINE."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    return tmp_path / "hub"


def test_hub_model_that_is_not_there_offline(hub_cache):
    with pytest.raises(ModelError, match="target org/name: not in the hub cache, and HF_HUB_OFFLINE is set") as caught:
        describe(parse("org/name"), "target")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_hub_model_from_the_cache_needs_no_network(hub_cache, folder):
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = hub_cache / "models--org--name"
    shutil.copytree(folder(llama(), weights=True), stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    said = []
    info = describe(parse("org/name"), "target", said.append)
    assert said == ["org/name: asking the hub"]
    assert info.revision == commit
    assert info.parameters
    assert load(info, runtime="transformers").advance([[1, 2, 3]]).shape == (1, VOCAB)
    with pytest.raises(ModelError, match="not in the hub cache"):
        describe(parse("org/name@v2"), "target")


def test_hub_errors_are_told_apart():
    """The hub cannot be asked here: what its client raises is made by hand."""
    from huggingface_hub import errors as hub

    for kind, reason in (
        (hub.GatedRepoError, "on request only"),
        (hub.RepositoryNotFoundError, "no such model"),
        (hub.RevisionNotFoundError, "no such revision"),
    ):
        error = kind.__new__(kind, "403\nbearer hf_secretsecret")
        with pytest.raises(ModelError, match=reason) as caught, loading.explained(parse("org/name"), "target"):
            raise OSError("wrapped") from error
        assert "secret" not in str(caught.value)


def test_quantised_copy_is_no_model_of_its_own():
    with pytest.raises(ModelError, match="no files of its own"):
        describe(parse("self:int4"), "draft")


def test_builtin_pair_fits():
    target, draft = describe(parse("tiny"), "target"), describe(parse("tiny-draft"), "draft")
    check_cache(target)
    assert check_pair(target, draft, 4096) == VOCAB
    assert target.fingerprint != draft.fingerprint
    assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint
