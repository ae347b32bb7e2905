"""A run goes on only with the model that its checkpoint was written with."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatrain import Trainer
from megatrain.cli import main
from megatrain.errors import ConfigError
from megatrain.models.hf_config import differences
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
    assert "another configuration of the model" in capsys.readouterr().err
    files = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in files] == ["step-2"], "nothing was written"


def test_what_computes_nothing_may_differ(tmp_path: Path) -> None:
    config = begun(tmp_path)
    file = tmp_path / "model" / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"transformers_version": "4.0.0", "use_cache": False, "eos_token_id": 7}))
    assert Trainer(config).fit().step == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_the_same_after_it_was_written(name: str, tmp_path: Path) -> None:
    config = build(name).config
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert differences(config, written) == []
    config.get_text_config().hidden_size += 1
    assert len(differences(config, written)) == 1
