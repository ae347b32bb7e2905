"""What hangs on an instance of a module is refused by name, and the model left as it was."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import megatrain
from megatrain.errors import ConfigError
from support.reference import batches, build, engine, run_reference

PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "model.layers.1": lambda model: model.model.layers[1],
    "model.layers.2.self_attn.q_proj": lambda model: model.model.layers[2].self_attn.q_proj,
    "model.norm": lambda model: model.model.norm,
    "model.embed_tokens": lambda model: model.model.embed_tokens,
    "lm_head": lambda model: model.lm_head,
    "LlamaForCausalLM": lambda model: model,
}


def refused(model: nn.Module, words: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=words):
        megatrain.Engine(model, device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_a_hook_is_refused_by_its_name_and_its_modules(place: str, register: str) -> None:
    def doubled(*_: Any) -> None:
        return None

    model = build()
    getattr(PLACES[place](model), register)(doubled)
    refused(model, f"^{place} has a hook .*doubled")


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_of_one_instance_is_refused(place: str) -> None:
    model = build()
    module = PLACES[place](model)

    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    module.forward = types.MethodType(halved, module)  # type: ignore[method-assign]
    refused(model, f"^{place} has a forward of its own .*halved")


def test_a_parametrized_weight_is_refused() -> None:
    model = build()
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", nn.Identity())
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj has a parametrized weight"):
        megatrain.Engine(model, device="cpu")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_refused(register: str) -> None:
    model = build()
    getattr(model.model.layers[1].mlp.up_proj.weight, register)(lambda *_: None)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight has a hook .*engine\.gradient"):
        megatrain.Engine(model, device="cpu")


def test_one_layer_at_two_places_is_refused() -> None:
    model = build()
    model.model.layers[3] = model.model.layers[1]
    with pytest.raises(ConfigError, match=r"layers\.1 and layers\.3 are one module"):
        megatrain.Engine(model, device="cpu")


def test_what_transformers_hangs_on_a_model_itself_changes_nothing() -> None:
    model, data = build(), batches(2)
    wanted = run_reference(model, [data]).losses[0]
    model.enable_input_require_grads()
    model(input_ids=data[0]["input_ids"], output_hidden_states=True, use_cache=False)
    assert engine(model).step(data).loss == pytest.approx(wanted, rel=1e-6)


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.silu(x) * factor


class Tempered(nn.Module):
    """An activation with a factor that is neither parameter nor buffer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.tensor(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * self.factor


class Calling(nn.Module):
    """An activation given as a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("make", [Tempered, lambda factor: Calling(scaled(factor))], ids=["tensor", "closure"])
def test_layers_that_differ_in_a_tensor_or_a_closure_are_not_taken_for_one(make: Callable[[float], nn.Module]) -> None:
    model, data = build(), batches(2)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = make(1.0 + index)
    wanted = run_reference(model, [data])
    out = engine(model).step(data)
    assert out.loss == pytest.approx(wanted.losses[0], rel=1e-6)
    assert out.grad_norm == pytest.approx(wanted.norms[0], rel=1e-5)


def test_layers_that_are_alike_share_one_template() -> None:
    model = build()
    for layer in model.model.layers:
        layer.mlp.act_fn = Calling(scaled(2.0))
    assert len(megatrain.Decoder(model).structures) == 1
