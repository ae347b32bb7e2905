"""What the parts of a run are made from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

import megatrain
from megatrain.checkpoint.hf_folder import MODEL_FILES
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.training.setup import prepare_run
from support.reference import build
from support.runs import MODEL, settings
from support.tiny_tokenizer import tiny_tokenizer
from support.trainer import fit

OWN = ("generation_config.json", "preprocessor_config.json", "own_code.py")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's folder with a generation config, a processor and code of its own."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"tokenizer": {"train": "bpe", "vocab_size": 330}}  # with room for the other tokenizer of the test
    fit(settings(folder, model=vocabulary, train={"steps": 2}, data={"eval": []}, output={"export": "auto"}))
    export = folder / "run" / "export"
    (export / "generation_config.json").write_text('{"temperature": 0.55,   "max_new_tokens": 3}')
    (export / "preprocessor_config.json").write_text('{"size": 14}')
    (export / "own_code.py").write_text("# the model's")
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own_code.Config"}}))
    return export


@pytest.mark.parametrize("changed", ["nothing", "template", "tokenizer", "both"])
def test_an_export_has_what_belongs_to_its_model_whatever_its_tokenizer(
    tmp_path: Path, model: Path, changed: str
) -> None:
    other, asked = tmp_path / "other", {"path": str(model), "tokenizer": None}
    shutil.copytree(model, other, ignore=shutil.ignore_patterns("*.safetensors"))
    tiny_tokenizer(specials=("<|other|>",)).save_pretrained(other)
    for name in OWN:
        (other / name).write_text('{"temperature": 0.1}')
    (other / "only_theirs.py").write_text("# of another model")
    if changed in ("template", "both"):
        asked["chat_template"] = TEMPLATE
    if changed in ("tokenizer", "both"):
        asked["tokenizer"] = str(other)
    config: dict[str, Any] = settings(tmp_path, train={"steps": 2}, data={"eval": []}, output={"export": "auto"}) | {
        "model": asked
    }
    fit(config)
    for folder in (tmp_path / "run/export", tmp_path / "run/checkpoints/step-2"):
        for name in OWN:
            assert (folder / name).read_bytes() == (model / name).read_bytes(), f"{name} of {folder.name}"
        assert not (folder / "only_theirs.py").exists()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert ("<|other|>" in tokenizer.get_vocab()) == (changed in ("tokenizer", "both"))
        assert (tokenizer.chat_template == TEMPLATE) == (changed in ("template", "both"))


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{bad", r"is not JSON \(.*\); it is copied into every checkpoint and export"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds no JSON object but a list"),
        (b'"x"', "holds no JSON object but a str"),
    ],
    ids=["cut off", "not UTF-8", "too deep", "list", "text"],
)
def test_a_file_that_is_copied_into_exports_is_read_before_the_run(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    AutoConfig.for_model(**MODEL, vocab_size=300).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    config = settings(tmp_path)
    config["model"] = {"path": str(tmp_path / "model"), "init": "random", "tokenizer": config["model"]["tokenizer"]}
    message = rf"{name} {words}"
    with pytest.raises(ConfigError, match=message):
        prepare_run(Config.from_dict(config), folder=tmp_path / "run")
    for options in ({"model_dir": tmp_path / "model"}, {"tokenizer_dir": str(tmp_path / "model")}):
        with pytest.raises(ConfigError, match=message):
            megatrain.Engine(build(), device="cpu", **options)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")  # whose folder is taken where the model has none
    (tmp_path / "tokenizer" / name).write_bytes(content)
    config["model"] = {"config": MODEL, "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(ConfigError, match=message):
        prepare_run(Config.from_dict(config), folder=tmp_path / "run")
