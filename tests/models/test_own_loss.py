"""A model whose own forward has another loss than that of the next token is not trained without a word."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM

import megatrain
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.training.setup import prepare_run
from support.families import FAMILIES
from support.families import build as build_family
from support.reference import batches, build, engine
from support.runs import MODEL, settings
from support.vision import SEEING

Loss = Callable[[Any, Any], Any]

OTHERS: dict[str, tuple[Loss, str]] = {
    "all weights": (
        lambda model, out: out.loss + 1e-3 * sum(p.square().sum() for p in model.parameters()),
        r"it reads model\.layers\.\*\.\* \(36\), .*which the logits do not read",
    ),
    "weights of a layer": (
        lambda model, out: out.loss + model.model.layers[1].mlp.up_proj.weight.square().sum(),
        r"it reads model\.layers\.1\.mlp\.up_proj\.weight, which",
    ),
    "weights of the head": (lambda model, out: out.loss + model.lm_head.weight.square().sum(), "it is .* where that"),
    "logits": (lambda _, out: out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean(), "it is .* where that is"),
    "states of layers": (lambda _, out: out.loss + out.hidden_states[-2].norm(), "it is .* where that is"),
    "in training": (lambda model, out: out.loss + (1.0 if model.training else 0.0), "it is .* where that is"),
    "a factor": (lambda _, out: 2 * out.loss, "it is .* where that is"),
}


def with_loss(change: Loss) -> Any:
    """A model of a class whose forward changes its loss."""

    class Penalised(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = change(self, output)
            return output

    model = build()
    model.__class__ = Penalised
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_a_class_that_adds_to_its_loss_is_refused_unless_a_loss_is_given(name: str) -> None:
    change, words = OTHERS[name]
    ours, data = engine(with_loss(change).eval()), batches(2)
    with pytest.raises(ConfigError, match=rf"^the forward of Penalised has another loss .*trains: {words}.*loss_fn"):
        ours.step(data)
    with pytest.raises(ConfigError, match="another loss"):
        ours.forward_backward(data)

    def nll(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        return -head.logprobs(hidden, batch["labels"]).sum()

    stock = engine(build())
    assert ours.evaluate(data) == stock.evaluate(data)
    assert ours.step(data, loss_fn=nll) == stock.step(data, loss_fn=nll)


def test_a_class_that_leaves_its_loss_alone_is_trained() -> None:
    data = batches(2)
    assert engine(with_loss(lambda _, out: out.loss)).step(data) == engine(build()).step(data)


def test_a_class_without_a_loss_is_trained() -> None:
    class Bare(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            kwargs.pop("labels", None)
            return super().forward(input_ids, **kwargs)

    class Strict(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, use_cache: bool = False, position_ids: Tensor | None = None) -> Any:
            return super().forward(input_ids, use_cache=use_cache, position_ids=position_ids)

    for kind in (Bare, Strict):
        model = build()
        model.__class__ = kind
        assert Decoder(model).other_loss is None


def test_a_loss_that_cannot_be_tried_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = with_loss(lambda _, out: out.loss + out.attentions[-1].norm())
    assert Decoder(model).other_loss is None
    assert "Penalised: its own forward could not be run with labels on stubs ('NoneType'" in caplog.text


def test_trying_the_loss_changes_nothing_of_the_model() -> None:
    model = with_loss(lambda _, out: 2 * out.loss).eval()
    before = copy.copy(vars(model))
    assert Decoder(model).other_loss is not None
    assert not any(module.training for module in model.modules())
    assert {name for name in vars(model) if vars(model)[name] is not before.get(name)} == {
        "_megatrain_has_taken_the_weights"
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_every_architecture_is_the_one_that_is_trained(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Decoder(build_family(name)).other_loss is None
    assert "own forward could not be run" not in caplog.text


@pytest.mark.parametrize("name", SEEING)
def test_the_loss_of_every_architecture_that_sees_is_the_one_that_is_trained(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = SEEING[name]
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family.kind, **family.config))
    assert Decoder(model).other_loss is None
    assert "own forward could not be run" not in caplog.text


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "olmoe", "granitemoe", "phimoe"])
def test_the_routers_loss_is_none_of_the_class(name: str) -> None:
    model = build_family(name)
    for part in (model.config, model.config.get_text_config()):
        part.output_router_logits = True
    found = Decoder(model)
    assert found.router is not None
    assert found.other_loss is None


CODE = """
from transformers import LlamaForCausalLM


class Penalised(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + self.lm_head.weight.square().sum()
        return output
"""


def test_a_run_of_such_a_model_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    AutoConfig.for_model(**MODEL, vocab_size=300).save_pretrained(folder)
    (folder / "penalised.py").write_text(CODE)
    written = json.loads((folder / "config.json").read_text())
    written["auto_map"] = {"AutoModelForCausalLM": "penalised.Penalised"}
    (folder / "config.json").write_text(json.dumps(written))
    config = settings(tmp_path)
    config["model"] = config["model"] | {"path": str(folder), "init": "random", "trust_remote_code": True}
    del config["model"]["config"]
    with pytest.raises(ConfigError, match="the forward of Penalised has another loss"):
        prepare_run(Config.from_dict(config), folder=tmp_path / "run")
    prepare_run(Config.from_dict(config), folder=None).close()  # for an evaluation, which has no other terms


def test_a_trainer_refuses_such_a_model_when_it_is_made(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate: pip install 'megatrain[trl]'")
    from support.hf_trainers import OnEngine, trainer

    model = megatrain.Engine(with_loss(lambda _, out: 2 * out.loss), device="cpu")
    with pytest.raises(ConfigError, match="the forward of Penalised has another loss"):
        trainer(OnEngine, model, tmp_path)
