"""Keys of a model's own configuration replaced by `model.config` beside `model.path`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.config import Config
from megatrain.config.default_length import max_positions
from megatrain.data.train_tokenizer import train_bpe
from megatrain.errors import ConfigError
from megatrain.models.hf_config import load_config
from megatrain.system import hardware
from megatrain.training.run_dir import read_status
from megatrain.training.setup import assemble, prepare_model
from support import reference, runs
from support.trainer import fit, stopped_after_two_steps

THETA = 10_000.0

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def saved(folder: Path, kind: str = "llama", **changes: Any) -> Any:
    """A stock model of 64 positions with its tokenizer, in a folder."""
    model = reference.build(kind, vocab_size=300, num_hidden_layers=2, rope_parameters=rope({}), **changes)
    model.save_pretrained(folder)
    train_bpe(runs.WORDS, 300).save_pretrained(folder)
    return model


def rope(scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": THETA, **scaling}


def settings(tmp_path: Path, overrides: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A run from `tmp_path / "model"`."""
    made = runs.settings(tmp_path, **sections)
    made["model"] = {"path": str(tmp_path / "model"), "config": overrides}
    return made


def older_spelling(folder: Path) -> None:
    """Writes a `config.json` as before transformers 5."""
    path = folder / "config.json"
    described = json.loads(path.read_text())
    described["rope_theta"] = described.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(described | {"rope_scaling": None}))


@pytest.mark.parametrize("older", [False, True], ids=["newer file", "older file"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"max_position_embeddings": 256, "rope_parameters": YARN}, rope(YARN)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256}, rope(YARN)),
        (
            {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            rope({"rope_type": "linear", "factor": 4.0}),
        ),
        ({"max_position_embeddings": 256, "rope_scaling": LLAMA3}, rope(LLAMA3)),
        (
            {"max_position_embeddings": 256, "rope_theta": 5e5, "rope_scaling": YARN},
            rope(YARN | {"rope_theta": 5e5}),
        ),
        ({"max_position_embeddings": 256, "rope_theta": 1_000_000.0}, rope({"rope_theta": 1e6})),
    ],
    ids=["yarn", "yarn, by its older name", "linear", "llama3", "yarn and a base", "a base"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_with_other_positions_learns_as_stock_transformers_with_the_same_configuration(
    kind: str, overrides: dict[str, Any], expected: dict[str, Any], older: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    own = saved(tmp_path / "model", kind)
    if older:
        older_spelling(tmp_path / "model")
    stock = AutoModelForCausalLM.from_config(
        reference.config(
            kind, vocab_size=300, num_hidden_layers=2, max_position_embeddings=256, rope_parameters=dict(expected)
        ),
        attn_implementation="sdpa",
    )
    stock.load_state_dict(own.state_dict())
    steps = [reference.batches(2, rows=2, seq=200, vocab=300)]
    exact = reference.run_reference(stock, steps, dtype=torch.float64)
    plain = reference.run_reference(stock, steps)
    unscaled = reference.run_reference(own, steps, dtype=torch.float64)
    parts = assemble(Config.of(settings(tmp_path, overrides)), folder=None)
    try:
        loss = parts.engine.forward_backward(steps[0])
        gradients = {name: parts.engine.gradient(name) for name in exact.gradients}
        parts.engine.save_pretrained(tmp_path / "export")
    finally:
        parts.close()
    assert loss == pytest.approx(exact.losses[0], rel=1e-5)
    reference.assert_equal(gradients, exact.gradients, [plain.gradients], "gradient")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert reference.error(unscaled.gradients[name], exact.gradients[name]) > 1e-2, "the scaling is seen"

    described = json.loads((tmp_path / "export/config.json").read_text())
    assert described["max_position_embeddings"] == 256
    assert described["rope_parameters"] == expected
    assert described["rope_theta"] == expected["rope_theta"]
    scaling = {key: value for key, value in expected.items() if key != "rope_theta"}
    assert described.get("rope_scaling", {"rope_type": "default"}) == scaling
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="sdpa")
    ids = steps[0][0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, stock.float().eval()(ids).logits)


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3", "phi3", "gpt_oss", "gpt_neox", "deepseek_v3", "gpt2", "falcon"])
def test_only_what_is_given_is_replaced(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    own = load_config(tmp_path)
    nested = own.get_text_config() is not own
    given = {"max_position_embeddings": 12345}
    replaced = load_config(tmp_path, overrides={"text_config": given} if nested else given)
    own.get_text_config().max_position_embeddings = 12345
    assert replaced.to_dict() == own.to_dict()
    assert replaced.name_or_path == own.name_or_path == str(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3", "llava"])
@pytest.mark.parametrize("key", ["max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"])
def test_keys_of_the_text_part_are_refused_beside_it(kind: str, key: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    value = {"rope_type": "linear", "factor": 2.0} if key.startswith("rope_s") or key.endswith("rs") else 4096
    with pytest.raises(ConfigError, match=rf"text part of {kind}; write model\.config\.text_config\.{key}"):
        load_config(tmp_path, overrides={key: value})


def test_a_text_part_that_is_written_flat_keeps_what_is_not_replaced(tmp_path: Path) -> None:
    """As the first files of Qwen2-VL are."""
    described = {"model_type": "qwen2_vl", "hidden_size": 128, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(described))
    replaced = load_config(tmp_path, overrides={"text_config": {"max_position_embeddings": 4096}}).text_config
    assert (replaced.hidden_size, replaced.num_hidden_layers, replaced.rms_norm_eps) == (128, 2, 1e-5)
    assert replaced.max_position_embeddings == 4096


def test_windows_follow_the_keys_that_are_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "model", "qwen2")
    own = load_config(tmp_path / "model")
    assert set(own.layer_types) == {"full_attention"}
    windowed = load_config(
        tmp_path / "model", overrides={"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    )
    assert (windowed.sliding_window, windowed.layer_types) == (8, ["full_attention", "sliding_attention"])


def test_what_is_not_replaced_stays_though_a_default_would_follow_what_is(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    path = tmp_path / "model/config.json"
    described = json.loads(path.read_text())
    described["rope_parameters"] = rope({"rope_type": "yarn", "factor": 2.0})  # trained with 64 positions, unsaid
    path.write_text(json.dumps(described))
    replaced = load_config(tmp_path / "model", overrides={"max_position_embeddings": 128})
    assert replaced.rope_parameters["original_max_position_embeddings"] == 64
    further = load_config(tmp_path / "model", overrides={"rope_parameters": {"factor": 8.0}})
    assert further.rope_parameters == rope(YARN | {"factor": 8.0})
    plain = load_config(tmp_path / "model", overrides={"rope_scaling": None})
    assert plain.rope_parameters == rope({})


def test_positions_of_each_kind_of_layer_are_replaced_by_kind(tmp_path: Path) -> None:
    config = reference.config("gemma3_text", head_dim=16, sliding_window=8)
    config.save_pretrained(tmp_path)
    own = load_config(tmp_path).rope_parameters
    replaced = load_config(
        tmp_path, overrides={"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}
    )
    theta = own["full_attention"]["rope_theta"]
    assert replaced.rope_parameters == own | {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": theta}
    }
    for overrides in ({"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}):
        with pytest.raises(ConfigError, match=r"gemma3_text has rotary positions .*write model\.config\.rope_param"):
            load_config(tmp_path, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 32}, "model.config.hidden_size is 32 and the model's own 64"),
        ({"num_hidden_layers": 3}, "model.config.num_hidden_layers is 3 and the model's own 2"),
        ({"rope_theta": 5e5, "vocab_size": 512}, "model.config.vocab_size is 512 and the model's own 300"),
        ({"tie_word_embeddings": True}, "model.config.tie_word_embeddings is True and the model's own False"),
        ({"rope_thet": 5e5}, "model.config.rope_thet is not a key of llama; did you mean model.config.rope_theta?"),
        (
            {"max_position_embedings": 256},
            "model.config.max_position_embedings is not a key of llama; did you mean model.config.max_position_embedd",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "facter": 4.0}},
            "rope_scaling.facter is not a key of rotary positions; did you mean model.config.rope_scaling.factor?",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "model.config: llama: "),
        ({"rope_scaling": 4.0}, "model.config.rope_scaling is 4.0; write its keys"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "are both given, two spellings of one setting"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}},
            "model.config.rope_theta and model.config.rope_parameters.rope_theta are both given",
        ),
        ({"torch_dtype": "float16"}, "model.config.torch_dtype cannot replace that of model.path"),
        ({"max_position_embeddings": "many"}, "model.config: llama: "),
        ({"model_type": "qwen2"}, "leave model_type out of model.config"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_key(
    overrides: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model")
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(settings(tmp_path, overrides)))
    assert main(["plan", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_key_that_the_models_own_rules_undo_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError, match=r"model\.config\.sliding_window: 8 has no effect: qwen2 makes None of it"):
        load_config(tmp_path / "model", overrides={"sliding_window": 8})


def test_a_model_that_starts_at_random_may_have_other_shapes(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    asked = settings(tmp_path, {"hidden_size": 32})
    asked["model"]["init"] = "random"
    assert prepare_model(Config.of(asked), hardware.read()).decoder.hidden_size == 32


def test_the_length_of_rows_follows_the_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model")

    def length(overrides: dict[str, Any]) -> int:
        asked = settings(tmp_path, overrides)
        del asked["data"]["seq_len"]
        return Config.of(asked).data.seq_len

    assert length({}) == 64
    assert length({"max_position_embeddings": 512}) == 512
    assert length({"rope_scaling": {"type": "yarn", "factor": 4.0}}) == 256
    assert length({"max_position_embeddings": 8192}) == 4096

    path = tmp_path / "config.yml"
    path.write_text(json.dumps(settings(tmp_path, {}, data={"seq_len": 128})))
    assert main(["plan", str(path)]) == 2
    assert "the model has positions for 64 tokens; lower data.seq_len, or raise model.config.max_position" in (
        capsys.readouterr().err
    )
    for command in (["plan"], ["train", "--dry-run"]):
        capsys.readouterr()
        assert main([*command, str(path), "model.config.max_position_embeddings=128"]) == 0, capsys.readouterr().err


def test_a_run_is_that_of_its_positions(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    asked = settings(tmp_path, {"max_position_embeddings": 256, "rope_scaling": YARN})
    stopped_after_two_steps(asked)
    assert Config.load(tmp_path / "run/config.yaml").model.config == asked["model"]["config"]
    before = read_status(tmp_path / "run")
    other = settings(tmp_path, {"max_position_embeddings": 256, "rope_scaling": YARN | {"factor": 8.0}})
    with pytest.raises(ConfigError, match=r"belongs to another run.*model\.config\.rope_scaling\.factor: 4\.0 → 8\.0"):
        fit(other)
    with pytest.raises(ConfigError, match=r"belongs to another run.*model\.config\.rope_scaling\.factor: 4\.0 → null"):
        fit(settings(tmp_path, {}))
    assert read_status(tmp_path / "run") == before
    result = fit(settings(tmp_path, asked["model"]["config"], output={"export": "auto"}))
    assert result.step == 6
    assert max_positions(load_config(result.export)) == 256


def test_the_command_line_replaces_a_model_and_adds_to_one(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(settings(tmp_path, {"rope_theta": 5e5})))
    longer = Config.load(path, ["model.config.max_position_embeddings=128"]).model
    assert longer.config == {"rope_theta": 5e5, "max_position_embeddings": 128}
    assert longer.init == "pretrained"
    moved = Config.load(path, [f"model.path={tmp_path / 'model'}"]).model
    assert moved.config == {"rope_theta": 5e5}
    path.write_text(json.dumps(runs.settings(tmp_path)))
    assert Config.load(path, [f"model.path={tmp_path / 'model'}"]).model.config is None
