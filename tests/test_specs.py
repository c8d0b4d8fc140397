"""What `--target` and `--draft` may say."""

import subprocess
import sys

import pytest

from specbench.errors import ModelError
from specbench.models.specs import BUILTIN, ModelSpec, parse


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_names_are_themselves(name):
    assert parse(name) == ModelSpec(name, "builtin", name)


def test_hub_id_with_and_without_revision():
    assert parse("org/name") == ModelSpec("org/name", "hub", "org/name")
    assert parse("org/name-1.5B@v1.0") == ModelSpec("org/name-1.5B@v1.0", "hub", "org/name-1.5B", revision="v1.0")


def test_quantised_copy_of_the_target():
    assert parse("self:int4") == ModelSpec("self:int4", "self", "", quant="int4")
    with pytest.raises(ModelError, match='unknown quantisation "fp8"; known: int4, int8'):
        parse("self:fp8")


def test_folder_comes_before_a_hub_id_of_the_same_spelling(tmp_path, monkeypatch):
    model = tmp_path / "org" / "name"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse("org/name").kind == "hub"
    (model / "config.json").write_text("{}")
    assert parse("org/name") == ModelSpec("org/name", "folder", "org/name")
    assert parse(str(model)).kind == "folder"


def test_gguf_file(tmp_path):
    file = tmp_path / "model.Q4_0.gguf"
    with pytest.raises(ModelError, match="no file"):
        parse(str(file))
    file.write_bytes(b"GGUF")
    assert parse(str(file)) == ModelSpec(str(file), "gguf", str(file))


def test_unknown_name_is_answered_with_the_near_one():
    with pytest.raises(ModelError, match='unknown model "tinny"; did you mean "tiny"'):
        parse("tinny")
    with pytest.raises(ModelError, match="known: smollm2-135m, tiny, tiny-draft"):
        parse("gpt2")


def test_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="no config.json in"):
        parse(str(tmp_path))
    with pytest.raises(ModelError, match="no model folder"):
        parse(str(tmp_path / "absent"))


def test_specs_and_the_builtin_table_do_not_import_torch():
    code = (
        "import sys, specbench.models.specs, specbench.models.builtin, specbench.models.load;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
