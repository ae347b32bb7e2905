"""State that a forward changes, parameters without gradient, and other things that a streamed layer cannot do: each is
what plain PyTorch makes of it, or refused by name before anything is loaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import megatrain
from megatrain.errors import ConfigError
from support.families import build as build_family
from support.reference import batches, build, check_training, config, engine


def steps(number: int = 2) -> list[list[dict[str, Tensor]]]:
    return [batches(2, seed=seed) for seed in range(number)]


def with_activation(make: Callable[[int], nn.Module], kind: str = "llama") -> Any:
    """A model whose feed-forward activations are replaced, by the index of the layer."""
    model = build(kind)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = make(index)
    return model


# ------------------------------------------------------------------------------------------------- state


class Normed(nn.Module):
    """A batch norm over the channels of the feed-forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(128, **options)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Running(nn.Module):
    """Running statistics without the counter that `BatchNorm` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(128))
        self.register_buffer("spread", torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.transpose(1, 2), self.mean, self.spread, training=self.training).transpose(1, 2)


class Counting(nn.Module):
    """Counts its calls, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden_seen", torch.zeros(()), persistent=False)
        self.count = 0
        self.calls: list[int] = []
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "seen":
            self.seen.add_(1)
        elif self.how == "seen by assignment":
            self.seen = self.seen + 1
        elif self.how == "hidden_seen":
            self.hidden_seen += 1
        elif self.how == "count":
            self.count += 1
        elif self.how == "calls":
            self.calls.append(1)
        elif self.how == "total":
            self.total += 1
        elif self.how == "last":
            self.last = x.detach()
        return F.silu(x)


class Renormed(nn.Module):
    """A scale that the forward normalises in place, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.full((128,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
        elif self.how == "data":
            self.weight.data.div_(self.weight.norm())
        elif self.how == "view":
            self.weight.data[:3].mul_(0.5)
        elif self.how == "new data":
            self.weight.data = self.weight.data / self.weight.norm()
        return F.silu(x) * self.weight


CHANGING: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "batch norm": (lambda _: Normed(), r"norm\.num_batches_tracked.*norm\.running_mean.*norm\.running_var"),
    "running statistics": (lambda _: Running(), r"act_fn\.mean, .*act_fn\.spread"),
    **{
        how: (lambda _, how=how: Counting(how), rf"act_fn\.{how.partition(' ')[0]}\b")
        for how in ("seen", "seen by assignment", "hidden_seen", "count", "calls", "total", "last")
    },
    **{how: (lambda _, how=how: Renormed(how), r"act_fn\.weight") for how in ("no_grad", "data", "view", "new data")},
}


@pytest.mark.parametrize("case", CHANGING)
def test_a_layer_that_changes_state_of_its_own_is_refused_by_name(case: str) -> None:
    make, names = CHANGING[case]
    model = with_activation(make)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ConfigError, match=rf"model\.layers\.0 \(LlamaDecoderLayer\) changes state of its own .*{names}"
    ):
        engine(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_the_layer_that_changes_state_is_named() -> None:
    model = build()
    model.model.layers[2].mlp.act_fn = Counting("count")
    with pytest.raises(ConfigError, match=r"model\.layers\.2 \(LlamaDecoderLayer\) changes state.*mlp\.act_fn\.count"):
        engine(model)


def test_state_that_no_forward_changes_is_kept() -> None:
    check_training(with_activation(lambda _: Normed(track_running_stats=False)), steps())
    check_training(with_activation(lambda _: Counting("nothing")), steps())


def test_a_layer_that_cannot_run_without_values_is_tried_on_zeros() -> None:
    class Valued(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.detach().sum()) < 1e30 else x

    with pytest.raises(ConfigError, match=r"model\.layers\.0 .*changes state.*act_fn\.seen"):
        engine(with_activation(lambda _: Valued("seen")))
    model = build_family("mixtral", "eager")
    model.model.layers[1].mlp.gate.register_buffer("seen", torch.zeros(()))
    forward = type(model.model.layers[1].mlp.gate).forward

    class Gate(type(model.model.layers[1].mlp.gate)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.seen.add_(1)
            return forward(self, *args, **kwargs)

    model.model.layers[1].mlp.gate.__class__ = Gate
    with pytest.raises(ConfigError, match=r"model\.layers\.1 .*changes state.*mlp\.gate\.seen"):
        engine(model)


class Untriable(Counting):
    """Runs only on values that are not all zero, as kernels that exist for the card alone do not run on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) == 0:
            raise RuntimeError("no kernel")
        return super().forward(x)


@pytest.mark.parametrize("how", ["seen", "count", "last"])
def test_a_layer_that_cannot_be_tried_before_is_checked_in_the_first_step(how: str) -> None:
    data = batches(2)
    ours = engine(with_activation(lambda _: Untriable(how)))
    before = dict(ours.state_dict())
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"layers\.0 changes state of its own .*act_fn\.{how}"):
            ours.step(data)
    assert all(torch.equal(ours.weight(name), value) for name, value in before.items())
    check_training(with_activation(lambda _: Untriable("nothing")), steps())


def test_a_head_and_a_base_must_not_change_state_either() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel

    class Head(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Counted(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().forward(*args, **kwargs)

    model = build()
    model.lm_head.__class__ = Head
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM changes state of its own \(lm_head\.calls\)"):
        engine(model)
    model = LlamaForCausalLM(config())
    model.model.__class__ = Counted
    model.model.register_buffer("seen", torch.zeros(()))
    with pytest.raises(ConfigError, match=r"Counted changes state of its own \(seen\)"):
        engine(model)


@pytest.mark.parametrize("place", ["norm", "embed_tokens"])
def test_what_runs_outside_the_layers_must_not_change_state_either(place: str) -> None:
    model = build()
    module = getattr(model.model, place)
    module.register_buffer("seen", torch.zeros(()))

    class Counted(type(module)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            output: Tensor = super().forward(x)
            return output

    module.__class__ = Counted
    with pytest.raises(ConfigError, match=rf"LlamaModel changes state of its own \({place}\.seen\)"):
        engine(model)


# -------------------------------------------------------------------------------------- without gradient


class Scaled(nn.Module):
    """An activation with one scale that gets a gradient and one that gets none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.trained = nn.Parameter(torch.full((128,), 1.5))
        self.fixed = nn.Parameter(torch.full((128,), 0.75))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x) * self.trained
        if self.how == "detach":
            return x * self.fixed.detach()
        if self.how == "data":
            return x * self.fixed.data
        with torch.no_grad():
            scale = self.fixed * 1.0
        return x * scale


@pytest.mark.parametrize("how", ["detach", "data", "no_grad"])
def test_a_parameter_that_gets_no_gradient_is_neither_decayed_nor_counted(how: str) -> None:
    ours, exact = check_training(with_activation(lambda _: Scaled(how)), steps(3))
    names = {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert set(exact.gradients) == names
    for index in range(4):
        assert f"model.layers.{index}.mlp.act_fn.trained" in names
        assert torch.equal(ours.weight(f"model.layers.{index}.mlp.act_fn.fixed"), torch.full((128,), 0.75))


@pytest.mark.parametrize("by", ["flag", "index"])
def test_a_layer_that_is_the_identity_is_left_as_it_is(by: str) -> None:
    model = build()

    class Skipping(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.skip if by == "flag" else self.self_attn.layer_idx == 2:
                return hidden_states
            return super().forward(hidden_states, *args, **kwargs)

    for index, layer in enumerate(model.model.layers):
        layer.__class__ = Skipping
        layer.skip = index == 2 and by == "flag"
    before = {name: value.clone() for name, value in model.state_dict().items() if ".layers.2." in name}
    ours, exact = check_training(model, steps(3))
    assert set(exact.gradients) == {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert not any(".layers.2." in name for name in exact.gradients)
    assert all(torch.equal(ours.weight(name), value) for name, value in before.items())


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_an_embedding_that_gets_no_gradient_is_left_as_it_is(how: str) -> None:
    model = build("gpt2")

    class Fixed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            if how == "detach":
                return super().forward(ids).detach()
            with torch.no_grad():
                return super().forward(ids)

    model.transformer.wpe.__class__ = Fixed
    before = model.transformer.wpe.weight.detach().clone()
    ours, exact = check_training(model, steps(3))
    assert set(exact.gradients) == {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert torch.equal(ours.weight("transformer.wpe.weight"), before)


def test_a_token_embedding_that_gets_no_gradient_is_left_as_it_is() -> None:
    model = build()

    class Fixed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).detach()

    model.model.embed_tokens.__class__ = Fixed
    ours, exact = check_training(model, steps(3))
    assert set(exact.gradients) == {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert "model.embed_tokens.weight" not in exact.gradients


def test_parameters_of_norm_and_head_that_get_no_gradient_are_left_as_they_are() -> None:
    model = build()

    class Fixed(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.weight.detach() * F.normalize(x, dim=-1)

    class Biased(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias.detach())

    model.model.norm.__class__ = Fixed
    head = Biased(64, 256)
    head.weight = model.lm_head.weight
    model.lm_head = head
    ours, exact = check_training(model, steps(3))
    assert set(exact.gradients) == {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert "lm_head.weight" in exact.gradients
    assert not {"model.norm.weight", "lm_head.bias"} & set(exact.gradients)


class Sometimes(nn.Module):
    """An activation with a scale that is used for some inputs alone."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.scale = nn.Parameter(torch.full((128,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        return x * self.scale if self.always or float(x.detach().abs().sum()) == 0 else x


def test_a_parameter_that_a_step_gives_no_gradient_is_refused_by_name() -> None:
    ours, data = engine(with_activation(lambda index: Sometimes(index != 2))), batches(2)
    before = dict(ours.state_dict())
    with pytest.raises(ConfigError, match=r"no gradient to model\.layers\.2\.mlp\.act_fn\.scale"):
        ours.step(data)
    assert all(torch.equal(ours.weight(name), value) for name, value in before.items())
    check_training(with_activation(lambda _: Sometimes(True)), steps())


def test_an_argument_of_layers_that_depends_on_weights_without_gradient_is_refused() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel

    class Biased(LlamaModel):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bias = nn.Linear(16, 16)

        def forward(self, input_ids: Any, **_: Any) -> Any:
            hidden = self.embed_tokens(input_ids)
            cos, sin = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
            with torch.no_grad():
                cos = self.bias(cos)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=(cos, sin))
            return (self.norm(hidden),)

    model = LlamaForCausalLM(config())
    model.model = Biased(config())
    with pytest.raises(
        ConfigError, match=r"passes layer 0 a second input computed from weights \(position_embeddings\)"
    ):
        megatrain.Decoder(model)


def test_a_layer_that_passes_no_gradient_on_is_refused() -> None:
    model = build()

    class Cutting(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states.detach(), *args, **kwargs)

    model.model.layers[1].__class__ = Cutting
    with pytest.raises(ConfigError, match=r"model\.layers\.1 \(Cutting\) returns hidden states that pass no gradient"):
        engine(model)


def test_a_gradient_cut_between_layers_or_before_the_head_is_refused() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel

    class Cutting(LlamaModel):
        cut = 0

        def forward(self, input_ids: Any, **_: Any) -> Any:
            hidden = self.embed_tokens(input_ids)
            places = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
            for index, layer in enumerate(self.layers):
                hidden = layer(hidden.detach() if index == self.cut else hidden, position_embeddings=places)
            return (self.norm(hidden.detach() if self.cut == 4 else hidden),)

    for cut, words in ((2, "cuts the gradient between its layers"), (4, "passes no gradient on to its last layer")):
        model = LlamaForCausalLM(config())
        model.model = Cutting(config())
        model.model.cut = cut
        with pytest.raises(ConfigError, match=words):
            megatrain.Decoder(model)


# ------------------------------------------------------------------------------- modules, checkpoints, modes


def test_a_module_that_is_called_twice_trains_as_in_plain_pytorch() -> None:
    model = build()

    class Twice(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(super().forward(x) + x)
            return output

    for layer in model.model.layers:
        layer.mlp.__class__ = Twice
    for activation in ("keep", "recompute", "offload"):
        check_training(model, steps(), plan={"activation": activation})


def test_a_module_at_two_places_is_refused_by_both_names() -> None:
    model = build()
    model.model.layers[1].again = model.model.layers[1].mlp
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\S* and layers\.1\.again\S* are one module.*deepcopy"):
        engine(model)
    model = build()
    model.model.layers[2].mlp.up_proj = model.model.layers[1].mlp.up_proj
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj and layers\.2\.mlp\.up_proj are one module"):
        engine(model)


def test_a_module_without_weights_may_stand_at_many_places() -> None:
    shared = nn.SiLU()
    check_training(with_activation(lambda _: shared), steps(1))


def test_a_parameter_of_two_modules_of_a_layer_is_refused() -> None:
    model = build()
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    with pytest.raises(ConfigError, match=r"up_proj\.weight and .*gate_proj\.weight are one tensor"):
        engine(model)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_changes_no_bit(reentrant: bool) -> None:
    plain, checkpointed = build(), build()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = []
    for model in (plain, checkpointed):
        ours = engine(model, plan={"activation": "keep"})
        outputs = [ours.step(step) for step in steps()]
        found.append(([(o.loss, o.grad_norm) for o in outputs], dict(ours.state_dict())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


class Checkpointed(nn.Module):
    """Recomputes an activation itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(F.silu, x, use_reentrant=self.reentrant)
        return output


def test_reentrant_checkpointing_within_a_layer_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0 \(LlamaDecoderLayer\).*use_reentrant=False"):
        engine(with_activation(lambda _: Checkpointed(True)))
    for activation in ("keep", "recompute", "offload"):
        check_training(with_activation(lambda _: Checkpointed(False)), steps(), plan={"activation": activation})


def test_a_layer_that_changes_its_input_in_place_is_refused() -> None:
    model = build()

    class Adding(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden_states += 1.0
            return super().forward(hidden_states, *args, **kwargs)

    model.model.layers[3].__class__ = Adding
    with pytest.raises(
        ConfigError, match=r"model\.layers\.3 \(Adding\) changes its input or one of its weights in place"
    ):
        engine(model)


def test_a_flop_counter_around_a_step_is_refused_and_nothing_has_changed() -> None:
    ours, data = engine(build()), batches(2)
    before = dict(ours.state_dict())
    for call in (lambda: ours.step(data), lambda: ours.evaluate(data)):
        with FlopCounterMode(display=False), pytest.raises(ConfigError, match="FlopCounterMode"):
            call()
    assert all(torch.equal(ours.weight(name), value) for name, value in before.items())
    assert ours.step(data).loss == engine(build()).step(data).loss


def test_a_model_whose_weights_were_taken_is_refused_each_time() -> None:
    model = build()
    memory = {"gpu": "1GiB", "host": "1GiB"}
    megatrain.Engine(model, device="cpu", memory=memory).step(batches(1))
    for _ in range(3):
        with pytest.raises(ConfigError, match="were moved into an earlier engine"):
            megatrain.Engine(model, device="cpu", memory=memory)
