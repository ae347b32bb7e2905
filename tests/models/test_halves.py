"""Which layers are split into attention and MLP, that this is found right, and that it shows in no number."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.errors import ConfigError
from megatrain.models.halves import Form, Nothing, Split
from support.families import CASES, FAMILIES, build
from support.reference import batches, engine
from support.vision import SEEING, see, seeing_steps

WHOLE = {
    "bloom": "does not add",  # its attention adds the hidden states itself
    "cohere": "does not add",  # attention and MLP side by side
    "cohere2": "does not add",
    "falcon": "does not add",
    "gpt-neox": "does not add",
    "mpt": "does not add",
    "opt": "does not add",
    "phi": "does not add",
    "phimoe": "draws random numbers",
}
"""Families whose layers stay whole, and words of the reason."""


def bits(model: Any, steps: list[list[dict[str, Any]]], **plan: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """How many units the model was cut into, and losses, norms, gradients, weights and moments of these steps."""
    ours = engine(model, plan={"threads": 1, "poison": True, **plan})
    outs = [ours.step(step) for step in steps]
    found = {"losses and norms": torch.tensor([(out.loss, out.grad_norm) for out in outs], dtype=torch.float64)}
    for name, ref in ours.decoder.tensors.items():
        found[name] = ours.weight(name)
        if ref.role == "trainable":
            state = ours.optimizer_state(name)
            found |= {f"{name}: {plane}": state[plane] for plane in ("exp_avg", "exp_avg_sq")}
            found[f"{name}: gradient"] = ours.gradient(name)
    units = len(ours.decoder.units)
    ours.close()
    return units, found


def steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    return [batches(2, seed=seed, rows=2, seq=16, padded=True, vocab=96) for seed in range(number)]


def different(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(("name", "experts"), [case for case in CASES if case[0] not in WHOLE])
def test_halves_give_the_bits_of_whole_layers(name: str, experts: str | None) -> None:
    units, wanted = bits(build(name, experts), steps(2), fragments="whole")
    layers = units - 2
    for activation in ("keep", "recompute"):
        units, found = bits(build(name, experts), steps(2), fragments="halves", activation=activation)
        assert units == 2 * layers + 2
        assert not different(found, wanted), (activation, different(found, wanted)[:4])


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_cannot_be_split_stay_whole_by_name(name: str) -> None:
    decoder = megatrain.Decoder(build(name))
    assert decoder.halves is decoder
    assert all(isinstance(split, str) and WHOLE[name] in split for split in decoder.splits)
    with pytest.raises(ConfigError, match=f"fragments is halves, but no layer .* can be split: it {WHOLE[name]}"):
        engine(build(name), plan={"fragments": "halves"}).core  # noqa: B018


@pytest.mark.parametrize("name", [name for name in SEEING if name != "aya-vision"])  # a Cohere in its language part
def test_halves_of_models_that_see_give_the_same_bits(name: str) -> None:
    whole, wanted = bits(see(name), seeing_steps(name, 2), fragments="whole")
    units, found = bits(see(name), seeing_steps(name, 2), fragments="halves")
    assert units > whole
    assert not different(found, wanted)


def test_a_layer_with_dropout_stays_whole() -> None:
    decoder = megatrain.Decoder(build("gpt2", resid_pdrop=0.1))
    assert decoder.halves is decoder
    assert "draws random numbers" in decoder.splits[0]
    assert megatrain.Decoder(build("gpt2")).halves.units[2].name == "layers.0.mlp"


def test_units_hold_their_half_and_are_in_the_order_of_whole_layers() -> None:
    decoder = megatrain.Decoder(build("gemma3"))
    halves = decoder.halves
    assert [unit.name for unit in halves.units[:4]] == [
        "embed",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
    ]
    assert list(halves.tensors) == list(decoder.tensors)
    assert [t for t in halves.tensors if t.startswith("model.layers.0.")] == [
        f"model.layers.0.{name}" for name, _ in decoder.layers[0].named_parameters()
    ]
    assert [t.name for unit in halves.units for t in unit.tensors] == [
        t.name for unit in decoder.units for t in unit.tensors
    ]
    attention, mlp = halves.units[1:3]
    assert {name.split(".")[0] for name in halves.local_names(1)} == {
        "self_attn", "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip
    assert {name.split(".")[0] for name in halves.local_names(2)} == {
        "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    }  # fmt: skip
    assert [t.tensor for t in mlp.tensors] == list(range(len(mlp.tensors)))
    assert {t.unit for t in attention.tensors} == {1}
    assert (attention.ends_layer, mlp.ends_layer) == (False, True)
    assert halves.halves is halves


def test_routers_belong_to_the_half_that_has_them() -> None:
    decoder = megatrain.Decoder(build("mixtral", output_router_logits=True)).halves
    attention, mlp = decoder.units[1:3]
    assert decoder.gates_of(attention) == ()
    assert decoder.gates_of(mlp) == decoder.gates[0] != ()
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    _, wanted = bits(build("mixtral", **routed), steps(2), fragments="whole")
    _, found = bits(build("mixtral", **routed), steps(2), fragments="halves", activation="recompute")
    assert not different(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_leaves_every_number_as_it_is(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4, float("inf")]
    hidden = torch.tensor(special, dtype=dtype)[None, :, None].expand(2, 7, 3)
    for form, given in itertools.product((None, 0, 1), (0, "x")):
        child = Nothing(Form(given, form, 2, False))
        out = child(hidden) if given == 0 else child(x=hidden)
        nothing = out if form is None else out[form]
        assert form is None or out[1 - form] is None
        added = hidden + nothing
        assert torch.equal(added, hidden)
        assert torch.equal(added.signbit(), hidden.signbit())


class Changed(nn.Module):
    """A layer of Llama's whose forward is written otherwise."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        layer: Any = self
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        middle = self.between(hidden_states, attended)
        return self.after(middle, layer.mlp(layer.post_attention_layernorm(middle)))

    def between(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return hidden + attended

    def after(self, middle: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return middle + out


class Scaled(Changed):
    def between(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return hidden + 0.5 * attended


class ScaledAfter(Changed):
    def after(self, middle: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (middle + out) * 0.5  # the first half would halve its output too


class Negated(Changed):
    def between(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return hidden + -1.0 * attended  # of nothing this makes +0.0, which changes the sign of -0.0


class Gated(Changed):
    def between(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return hidden + attended * hidden.sigmoid()


class Normed(Changed):
    def between(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(hidden + attended, hidden.shape[-1:])


class Remembering(Changed):
    def after(self, middle: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        return middle + out + layer.input_layernorm(middle)  # a weight of the first half in the second


@pytest.mark.parametrize(
    ("kind", "splits"),
    [(Changed, True), (Scaled, True)] + [(kind, False) for kind in (ScaledAfter, Negated, Gated, Normed, Remembering)],
)
def test_only_a_forward_that_adds_two_halves_is_split(kind: type[Changed], splits: bool) -> None:
    model = build("llama3", num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.__class__ = type(kind.__name__, (kind, type(layer)), {})
    assert isinstance(megatrain.Decoder(model).splits[0], Split) == splits


def test_every_family_is_either_split_or_named() -> None:
    assert WHOLE.keys() <= FAMILIES.keys()
