"""Linear layers that multiply in float8: what they compute, by hand; what they do with numbers that do not fit; and
which layers they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain import Engine
from megatrain.config import constraints
from megatrain.engine import float8, layer_cost, profile
from megatrain.engine.device_memory import Region
from megatrain.engine.float8 import Float8Linear, quantize
from megatrain.engine.template import LayerTemplate
from megatrain.engine.weight_grads import WeightGradients
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from support.layouts import lay_out
from support.reference import build, config

BF16 = torch.bfloat16


def layer(inner: int = 64, outer: int = 48, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.ModuleDict({"one": nn.Linear(inner, outer, bias=bias).to(BF16)})
    float8.convert(made, "fp8")
    one = made["one"]
    assert type(one) is Float8Linear
    return one


def by_hand(rows: Tensor) -> Tensor:
    """Rows rounded to e4m3 with the smallest power of two as their scale that brings them within 448, in fp64."""
    rounded = torch.empty(rows.shape, dtype=torch.float64)
    for number, row in enumerate(rows.double()):
        scale = 2.0**-126
        while row.abs().max() / scale > 448:
            scale *= 2
        # steps of an eighth of a number's own power of two, of which the smallest counted is 2^-6
        step = torch.exp2(torch.floor(torch.log2((row / scale).abs().clamp(min=2.0**-6))) - 3)
        rounded[number] = torch.round(row / scale / step) * step * scale
    return rounded


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_rows_are_rounded_as_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 64, generator=generator) * torch.logspace(-30, 30, 40)[:, None]
    for values in (rows, rows.to(BF16)):
        numbers, scale = quantize(values)
        assert numbers.dtype == torch.float8_e4m3fn
        assert scale.shape == (40, 1)
        assert torch.equal(numbers.double() * scale.double(), by_hand(values))


@pytest.mark.parametrize("largest", [448.0, 449.0, 464.0, 480.0, 1.0, 1.75, 1.7578125, 3.3e38, 2.0**-126, 2.0**-133])
def test_the_largest_number_of_a_row_is_never_beyond_e4m3(largest: float) -> None:
    rows = torch.zeros(1, 16, dtype=BF16)
    rows[0, 3] = largest
    numbers, scale = quantize(rows)
    back = numbers.double() * scale.double()
    assert float(numbers.float().max()) <= 448
    assert float(back[0, 3]) == pytest.approx(float(rows[0, 3]), rel=1 / 16)
    assert int((back != 0).sum()) == 1


def test_forward_and_both_gradients_are_those_of_rounded_numbers() -> None:
    one = layer()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 64, generator=generator).to(BF16).requires_grad_()
    grad = torch.randn(2, 8, 48, generator=generator).to(BF16)
    output = one(x)
    of_x, of_weight, of_bias = torch.autograd.grad(output, (x, one.weight, one.bias), grad)
    weight, rows, down = by_hand(one.weight.detach()), x.detach().flatten(0, 1), grad.flatten(0, 1)
    expected = by_hand(rows) @ weight.t() + one.bias.detach().double()
    assert error(output.detach().flatten(0, 1), expected) < 3e-3  # one rounding to bf16
    scale = quantize(one.weight.detach())[1].double()
    assert error(of_x.flatten(0, 1), by_hand(down.double() * scale.t()) @ (weight / scale)) < 3e-3
    assert error(of_weight, down.double().t() @ rows.double()) < 3e-3
    assert error(of_bias, down.double().sum(0)) < 3e-3
    # what the rounding costs, beside what bf16 would have given
    exact = one.weight.detach().double()
    assert 0.01 < error(output.detach().flatten(0, 1), rows.double() @ exact.t() + one.bias.detach().double()) < 0.06
    assert 0.01 < error(of_x.flatten(0, 1), down.double() @ exact) < 0.06


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True)


@pytest.mark.parametrize("run", [lambda module: module, compiled], ids=["eager", "compiled"])
def test_no_infinity_or_nan_becomes_a_number(run: Callable[[nn.Module], Any]) -> None:
    one = layer(bias=False)
    called = run(one)
    x = torch.ones(6, 64, dtype=BF16)
    x[0, 3], x[1, 3], x[2, 3] = torch.inf, -torch.inf, torch.nan
    x[3] = 0
    x[4] *= 2.0**-130
    leaf = x.requires_grad_()
    output = called(leaf)
    assert output[:3].isnan().all()
    assert (output[3] == 0).all()
    assert output[4:].isfinite().all()
    grad = torch.ones(6, 48, dtype=BF16)
    grad[4, 7], grad[5, 7] = torch.inf, torch.nan
    (of_x,) = torch.autograd.grad(output, leaf, grad)
    assert of_x[4:].isnan().all()
    assert of_x[:4].isfinite().all()
    with torch.no_grad():
        one.weight[5, 0] = torch.inf
        one.weight[6, 0] = torch.nan
    assert called(leaf)[4][[5, 6]].isnan().all()
    assert called(leaf)[4][[0, 1, 2]].isfinite().all()


def test_a_compiled_layer_rounds_alike_and_adds_the_same_weight_gradients() -> None:
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    found = []
    for run in (lambda module: module, compiled):
        one = layer()
        called = run(one)
        collector = WeightGradients(one, [one.weight, one.bias])
        sums = [torch.full_like(p, torch.nan, dtype=torch.float32) for p in (one.weight, one.bias)]
        for number in range(2):
            collector.begin(sums, first=number == 0, in_fp32=True)
            leaf = x.clone().requires_grad_()
            output = called(leaf)
            grads = torch.autograd.grad(output, (leaf, one.weight, one.bias), output.detach(), allow_unused=True)
            assert grads[1] is None
            collector.finish(grads[1:])
        found.append((output.detach(), grads[0], *sums))
    for eager, other in zip(*found, strict=True):
        assert torch.equal(eager, other)
    output = found[0][0].flatten(0, 1)
    assert error(found[0][2], 2 * output.double().t() @ x.flatten(0, 1).double()) < 1e-6


def test_frozen_weights_have_no_gradient_and_pass_one_on() -> None:
    one = layer()
    one.requires_grad_(False)
    x = torch.randn(3, 64).to(BF16).requires_grad_()
    (of_x,) = torch.autograd.grad(one(x).sum(), x)
    assert of_x.shape == (3, 64)
    assert one(torch.empty(0, 64, dtype=BF16)).shape == (0, 48)


def test_saved_for_backward_is_what_a_bf16_layer_saves_and_a_scale_per_channel() -> None:
    one = layer()
    saved: list[Tensor] = []
    x = torch.randn(3, 64).to(BF16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        one(x)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(BF16, (3, 64)), (BF16, (48, 64)), (torch.float32, (48, 1))]


def test_a_template_converts_its_layer_and_leaves_the_model_alone() -> None:
    decoder = Decoder.from_config(config("qwen2"), precision="bf16", matmul="fp8")
    layout = lay_out(decoder, 1)
    region = Region(torch.zeros(layout.image_bytes, dtype=torch.uint8))
    template = LayerTemplate(decoder, 1, layout, region)
    converted = {name for name, child in template.module.named_modules() if type(child) is Float8Linear}
    assert converted == set(float8.choose(decoder.layers[0]).chosen)
    assert len(converted) == 7
    assert not any(isinstance(child, Float8Linear) for child in decoder.layers[0].modules())


def test_what_stays_in_bf16_is_named() -> None:
    odd = Decoder.from_config(config("llama", intermediate_size=120), precision="bf16", matmul="fp8")
    choice = float8.choose(odd.layers[0])
    assert set(choice.left) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert choice.left["mlp.up_proj"] == "64 x 120, not multiples of 16"
    routed = config("qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    choice = float8.choose(Decoder.from_config(routed, precision="bf16", matmul="fp8").layers[1])
    assert set(choice.chosen) == {f"self_attn.{part}_proj" for part in "qkvo"}
    assert all("expert" in name for name in choice.left)
    assert choice.left

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(64, 16)
            self.gate_proj = nn.Linear(64, 16)

    assert float8.choose(Routed()) == (("gate_proj",), {"router": "a router"})


def test_without_fp8_nothing_is_converted() -> None:
    decoder = Decoder.from_config(config("llama"), precision="bf16")
    layout = lay_out(decoder, 1)
    template = LayerTemplate(decoder, 1, layout, Region(torch.zeros(layout.image_bytes, dtype=torch.uint8)))
    assert not any(isinstance(child, Float8Linear) for child in template.module.modules())


def test_the_planner_counts_less_time_and_about_as_much_memory() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    plain, converted = (
        Decoder.from_config(config("llama", **sizes), precision="bf16", matmul=kind) for kind in ("bf16", "fp8")
    )
    bf16, fp8 = (layer_cost.measure(d, d.units[1], 2, 64, "cuda", compiled=True) for d in (plain, converted))
    assert fp8.flops == bf16.flops
    assert fp8.float8_flops == fp8.flops - fp8.attention_flops
    assert bf16.float8_flops == 0
    assert bf16.kept_bytes < fp8.kept_bytes < 1.1 * bf16.kept_bytes
    eager = layer_cost.measure(converted, converted.units[1], 2, 64, "cuda")
    assert eager.converting_bytes == 12 * (128 * 512 + 256 * 512)
    assert profile.float8_share({"matmul_tflops": 600, "float8_tflops": 1200}, "cuda") == pytest.approx(2 / 3)
    assert profile.float8_share({}, "cuda") == pytest.approx(2 / 3)
    assert profile.float8_share({}, "cpu") == 1


def test_refusals_say_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"matmul must be bf16 or fp8, not 'fp4'"):
        Engine(build("llama"), device="cpu", precision="bf16", matmul="fp4")
    with pytest.raises(ConfigError, match=r"matmul: fp8 is for bf16 compute.* precision: bf16"):
        Engine(build("llama"), device="cpu", matmul="fp8")
    with pytest.raises(ConfigError, match=r"train\.matmul is fp8, and RTX 3090 \(compute capability 8\.6\).* 8\.9"):
        constraints.refuse_float8((8, 6), "RTX 3090", "train.")
    constraints.refuse_float8((8, 9), "RTX 4090")
    decoder = Decoder.from_config(config("llama"), precision="bf16")
    with pytest.raises(ConfigError, match="precision belongs to the Decoder"):
        Engine(Decoder(build(), precision="fp32"), device="cpu", precision="bf16")
    with pytest.raises(ConfigError, match="matmul belongs to the Decoder"):
        Engine(decoder, device="cpu", matmul="fp8")


def test_few_rows_are_followed_by_ones_up_to_the_fewest_that_a_card_multiplies() -> None:
    rows, scale = float8.quantize(torch.randn(3, 32))
    for values in (rows, scale):
        padded = float8.with_rows(values, 64)
        assert padded.shape == (64, values.shape[1])
        assert padded.dtype == values.dtype
        assert torch.equal(padded[:3].float(), values.float())
        assert bool((padded[3:].float() == 1).all())
