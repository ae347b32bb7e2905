"""A run goes on only with the model that its checkpoint was written with."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatrain import Trainer
from megatrain.cli import main
from megatrain.config import ModelConfig
from megatrain.errors import ConfigError
from megatrain.models.hf_config import differences
from megatrain.training.setup import as_before
from megatrain.weights.source import ModelFiles
from support.families import FAMILIES, build
from support.runs import MODEL, settings


def begun(folder: Path) -> dict[str, Any]:
    """A run from a model's folder that has taken half of its steps; its configuration."""
    model = folder / "model"
    AutoConfig.for_model(**MODEL, vocab_size=300).save_pretrained(model)
    config = settings(folder, train={"steps": 4}, output={"export": "never"})
    config["model"] = {"path": str(model), "init": "random", "tokenizer": {"train": "bpe", "vocab_size": 300}}
    Trainer(config | {"train": config["train"] | {"steps": 2}}).fit()
    return config


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 0.5), ("hidden_act", "gelu"), ("attention_dropout", 0.5), ("rope_theta", 99.0)]
)
def test_a_resume_with_another_configuration_of_the_model_is_refused(
    tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = begun(tmp_path)
    file = tmp_path / "model" / "config.json"
    written = json.loads(file.read_text())
    if key == "rope_theta":
        written["rope_parameters"][key] = value
    else:
        written[key] = value
    file.write_text(json.dumps(written))
    with pytest.raises(
        ConfigError, match=rf"another configuration of the model: .*{key}: .* → .*Put the config.json of"
    ):
        Trainer(config).fit()
    assert main(["eval", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "another configuration of the model" in said
    assert "output.dir" not in said, "an evaluation begins no run"
    files = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in files] == ["step-2"], "nothing was written"


def test_what_computes_nothing_may_differ(tmp_path: Path) -> None:
    config = begun(tmp_path)
    file = tmp_path / "model" / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"transformers_version": "4.0.0", "use_cache": False, "eos_token_id": 7}))
    assert Trainer(config).fit().step == 4


def test_what_is_to_be_put_back_is_what_holds_the_configuration(tmp_path: Path) -> None:
    own, overrides = ModelConfig(path="of/hub"), ModelConfig(path="of/hub", config={"rms_norm_eps": 0.5})
    folder, gguf = ModelFiles(str(tmp_path), tmp_path), ModelFiles(str(tmp_path), tmp_path, tmp_path / "own.gguf")
    hub = ModelFiles("of/hub", tmp_path)
    for model, files, words in (
        (own, None, "Put model.config back"),
        (own, folder, f"Put the config.json of {tmp_path} back"),
        (overrides, folder, f"Put the config.json of {tmp_path} and model.config back"),
        (own, gguf, f"Put the file {tmp_path / 'own.gguf'}, which holds it, back"),
        (own, hub, "Name the revision of of/hub that it was written with (model.revision)"),
        (overrides, hub, "that it was written with (model.revision), and put model.config back"),
    ):
        assert as_before(model, files).endswith(words)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_the_same_after_it_was_written(name: str, tmp_path: Path) -> None:
    config = build(name).config
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert differences(config, written) == []
    config.get_text_config().hidden_size += 1
    assert len(differences(config, written)) == 1
