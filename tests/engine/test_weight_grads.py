"""Gradients of linear weights that their matmul adds to the sum: exact, whatever uses a weight and however often."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.engine import numerics, weight_grads
from megatrain.engine.device_memory import Region
from megatrain.engine.template import LayerTemplate
from megatrain.engine.weight_grads import SummedLinear, WeightGradients
from megatrain.models.decoder import Decoder
from megatrain.weights.state_format import StateFormat
from support.layouts import fill, lay_out
from support.reference import batches, build, config, engine

BF16 = torch.bfloat16


class Mixed(nn.Module):
    """Weights that a linear layer uses once, twice, with and without bias; that something else uses too; that nothing
    uses; and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(16, 24)
        self.twice = nn.Linear(24, 24, bias=False)
        self.shared = nn.Linear(24, 16, bias=False)
        self.frozen = nn.Linear(16, 16)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(F.silu(self.twice(self.once(x))))
        return self.frozen(self.shared(y) + F.linear(y, self.shared.weight)) * self.scale


def mixed(dtype: torch.dtype) -> Mixed:
    torch.manual_seed(0)
    return Mixed().to(dtype)


def rows(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Per micro-batch: input (2, 8, 16) and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 8, 16, generator=generator), torch.randn(2, 8, 16, generator=generator)) for _ in range(count)
    ]


def gradients(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """The trained parameters; and the gradients of the input and of each of them."""
    trained = [p for p in module.parameters() if p.requires_grad]
    leaf = x.clone().requires_grad_()
    return trained, torch.autograd.grad(module(leaf), (leaf, *trained), grad, allow_unused=True)


def total(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Sums over all micro-batches in `dtype`, with what autograd returns for each."""
    sums: list[Tensor] = []
    for x, grad in rows():
        trained, found = gradients(module, x.to(trained_dtype(module)), grad.to(trained_dtype(module)))
        sums = sums or [torch.zeros_like(p, dtype=dtype) for p in trained]
        for into, part in zip(sums, found[1:], strict=True):
            if part is not None:
                into += part
    return sums


def trained_dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def summed(module: nn.Module, run: Any, *, in_fp32: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same with sums in fp32, through `WeightGradients`. `run` is the module, or the module compiled."""
    trained = [p for p in module.parameters() if p.requires_grad]
    collector = WeightGradients(module, trained)
    targets = [torch.full_like(p, torch.nan, dtype=dtype) for p in trained]
    for number, (x, grad) in enumerate(rows()):
        collector.begin(targets, first=number == 0, in_fp32=in_fp32)
        leaf = x.to(BF16).requires_grad_()
        found = torch.autograd.grad(run(leaf), (leaf, *trained), grad.to(BF16), allow_unused=True)
        assert found[0] is not None
        collector.finish(found[1:])
    return targets


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((f.double() - e).norm() / e.norm().clamp_min(1e-300)) for f, e in zip(found, exact, strict=True)]


def names(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def test_sums_are_closer_to_fp64_than_those_of_rounded_gradients() -> None:
    """One linear layer over many micro-batches: the only rounding is fp32's."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False).to(BF16)
    inputs = [(torch.randn(64, 32).to(BF16), torch.randn(64, 48).to(BF16)) for _ in range(16)]
    exact = sum((g.double().t() @ x.double() for x, g in inputs), torch.zeros(48, 32, dtype=torch.float64))
    rounded = torch.zeros(48, 32)
    for x, g in inputs:
        leaf = x.clone().requires_grad_()
        rounded += torch.autograd.grad(layer(leaf), layer.weight, g)[0]
    ours = torch.full((48, 32), torch.nan)
    collector = WeightGradients(layer, [layer.weight])
    for number, (x, g) in enumerate(inputs):
        collector.begin([ours], first=number == 0, in_fp32=True)
        leaf = x.clone().requires_grad_()
        of_input, of_weight = torch.autograd.grad(layer(leaf), (leaf, layer.weight), g, allow_unused=True)
        assert torch.equal(of_input, g @ layer.weight)
        collector.finish([of_weight])
    [error], [before] = errors([ours], [exact]), errors([rounded], [exact])
    assert error < 1e-6
    assert before > 1e-3


def test_every_use_of_a_weight_is_in_its_sum() -> None:
    exact = total(mixed(BF16).double(), torch.float64)
    today = errors(total(mixed(BF16), torch.float32), exact)
    ours = mixed(BF16)
    found = errors(summed(ours, ours), exact)
    for name, error, before in zip(names(ours), found, today, strict=True):
        assert error <= 1.1 * before + 1e-7, name
    assert float(sum(found)) < float(sum(today))


def test_a_parameter_that_nothing_uses_starts_at_zero() -> None:
    ours = mixed(BF16)
    found = dict(zip(names(ours), summed(ours, ours), strict=True))
    assert torch.equal(found["unused.weight"], torch.zeros(4, 4))


def test_gradients_of_one_micro_batch_are_rounded_as_ever() -> None:
    """In steps of a single micro-batch the sums are those of autograd's gradients, bit for bit."""
    ours = mixed(BF16)
    found = summed(ours, ours, in_fp32=False)
    for name, a, b in zip(names(ours), found, total(mixed(BF16), torch.float32), strict=True):
        assert torch.equal(a, b), name


def test_bf16_sums_are_those_of_autograds_gradients() -> None:
    """A matmul writes the first gradient of a weight to its place; every later use is added with the same rounding."""
    ours = mixed(BF16)
    found = summed(ours, ours, in_fp32=False, dtype=BF16)
    for name, a, b in zip(names(ours), found, total(mixed(BF16), BF16), strict=True):
        assert torch.equal(a, b), name


def test_the_first_gradient_is_written_by_its_matmul() -> None:
    """And copied nowhere: what is left to copy is the gradient of the bias."""
    layer = nn.Linear(16, 24).to(BF16)
    collector = WeightGradients(layer, [layer.weight, layer.bias])
    targets = [torch.full_like(p, torch.nan) for p in layer.parameters()]
    collector.begin(targets, first=True, in_fp32=False)
    x = torch.randn(8, 16, dtype=BF16, requires_grad=True)
    _, *rest = torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias), allow_unused=True)
    assert torch.equal(targets[0], torch.ones(24, 8, dtype=BF16) @ x)
    assert targets[1].isnan().all()
    collector.finish(rest)
    assert torch.equal(targets[1], torch.full((24,), 8.0, dtype=BF16))


def test_only_trained_bf16_linear_layers_take_part() -> None:
    ours = mixed(BF16)

    class Own(nn.Linear):
        pass

    ours.own = Own(4, 4).to(BF16)
    ours.odd = nn.Linear(4, 4).to(BF16)
    ours.odd.forward = lambda x: x
    WeightGradients(ours, [p for p in ours.parameters() if p.requires_grad])
    taking = {name for name, child in ours.named_modules() if type(child) is SummedLinear}
    assert taking == {"once", "twice", "shared", "unused"}
    plain = mixed(torch.float32)
    assert not WeightGradients(plain, list(plain.parameters())).indices
    assert not any(isinstance(child, SummedLinear) for child in plain.modules())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_module_sums_the_same(backend: str) -> None:
    """Through the whole of torch.compile, so that nothing on the way drops or repeats the operation."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    exact = total(mixed(BF16).double(), torch.float64)
    ours = mixed(BF16)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    found = summed(ours, compiled)
    plain = mixed(BF16)
    eager = summed(plain, plain)
    if backend == "aot_eager":
        for name, a, b in zip(names(ours), found, eager, strict=True):
            assert torch.equal(a, b), name
    today = errors(total(mixed(BF16), torch.float32), exact)
    for name, error, before in zip(names(ours), errors(found, exact), today, strict=True):
        assert error <= 1.1 * before + 1e-7, name
    assert counters["stats"]["unique_graphs"] == 1


def test_one_compiled_graph_adds_to_the_sums_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    stock = build("qwen2", dtype=BF16)
    decoder = Decoder.from_config(config("qwen2"), precision="bf16")
    layout = lay_out(decoder, 1)
    region = Region(torch.zeros(2 * layout.image_bytes, dtype=torch.uint8))
    eager, compiled = (LayerTemplate(decoder, 1, layout, region, compiled=c) for c in (False, True))
    assert type(decoder.layers[0].mlp.up_proj) is nn.Linear, "the model's own layers are not changed"
    assert len(compiled.weight_grads.indices) == 7
    record = decoder.recorder.record(torch.zeros(2, 16, dtype=torch.int64))
    grad = torch.randn(2, 16, 64).to(BF16)
    counters.clear()
    for layer in range(4):
        image = layer % 2 * layout.image_bytes
        fill(region, layout, image, stock.model.layers[layer], decoder.local_names(layer + 1))
        sums = {}
        for template in (eager, compiled):
            template.bind(image, layer + 1)
            made = sums[template] = [torch.full(p.shape, torch.nan) for p in template.parameters]
            template.weight_grads.begin(made, first=True, in_fp32=True)
            hidden = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(layer)).to(BF16).requires_grad_()
            output = template.call(record.args[layer], record.kwargs[layer])(hidden)
            found = torch.autograd.grad(output, (hidden, *template.parameters), grad, allow_unused=True)
            template.weight_grads.finish(found[1:])
        for a, b in zip(sums[eager], sums[compiled], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            assert float(a.abs().max()) > 0
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("activation", ["keep", "offload", "recompute"])
def test_neither_groups_nor_activations_show_in_steps_of_several_micro_batches(activation: str) -> None:
    def run(plan: dict[str, Any]) -> list[tuple[float, float | None]]:
        ours = engine(build(), precision="bf16", plan=plan)
        outs = [ours.step(batches(3, seed=seed)) for seed in range(2)]
        ours.close()
        return [(out.loss, out.grad_norm) for out in outs]

    plain = run({"activation": "keep", "group": 3})
    for group in (1, 3):
        assert run({"activation": activation, "group": group, "inputs": "host"}) == plain


def test_the_numerics_key_names_the_rule() -> None:
    def key(precision: str) -> Any:
        decoder = Decoder.from_config(config(), precision=precision)
        made = numerics.key(
            decoder,
            torch.device("cpu"),
            micro_batch=None,
            micro_batches=None,
            grad_precision=precision,
            state_format=StateFormat(),
            loss_chunk=None,
            compiled=False,
            deterministic=True,
        )
        return made["weight_gradients"]

    assert key("bf16") == "summed in fp32"
    assert key("fp32") is None, "so a checkpoint of an earlier version has the same key"


def test_an_engine_that_is_gone_leaves_no_sums() -> None:
    before = len(weight_grads._OPEN)
    made = WeightGradients(mixed(BF16), [])
    assert len(weight_grads._OPEN) == before + 1
    del made
    assert len(weight_grads._OPEN) == before
