"""What the parts of a run are made from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.runs import settings
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
