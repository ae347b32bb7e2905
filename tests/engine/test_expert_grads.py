"""Gradients of routed experts that are added to their sums in parts: the numbers of autograd, and less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from megatrain.engine import expert_grads, layer_cost
from megatrain.engine.weight_grads import WeightGradients
from megatrain.models.decoder import Decoder
from support.families import build
from support.reference import batches, engine

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="CPUs have had grouped matmuls only since")

BF16 = torch.bfloat16
KINDS = {"gpt_oss": GptOssExperts, "mixtral": MixtralExperts, "qwen3_moe": Qwen3MoeExperts}
TOKENS, WIDTH, INNER = 40, 64, 96


def experts(kind: str, implementation: str = "grouped_mm", dtype: torch.dtype = BF16) -> nn.Module:
    """Five experts, the last of which no token meets."""
    sizes = {"num_local_experts": 5, "num_experts": 5, "hidden_size": WIDTH}
    config = AutoConfig.for_model(kind, intermediate_size=INNER, moe_intermediate_size=INNER, **sizes)
    config._experts_implementation = implementation
    made = KINDS[kind](config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return made


def steps(count: int = 3) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per micro-batch: rows, the two experts of each, their weights, and the gradient of the output."""
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(TOKENS, WIDTH, generator=g).to(BF16),
            torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(TOKENS)]),
            torch.rand(TOKENS, 2, generator=g).to(BF16),
            torch.randn(TOKENS, WIDTH, generator=g).to(BF16),
        )
        for _ in range(count)
    ]


Step = tuple[Tensor, Tensor, Tensor, Tensor]


def backward(run: Callable[..., Tensor], trained: list[Tensor], step: Step) -> tuple[Tensor, list[Tensor | None]]:
    """The output; and gradients of rows, of the weights of their experts, and of the parameters."""
    rows, chosen, weights, grad = step
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    output = run(rows, chosen, weights)
    return output, list(torch.autograd.grad(output, (rows, weights, *trained), grad, allow_unused=True))


def summed(module: nn.Module, run: Callable[..., Tensor], dtype: torch.dtype) -> list[Any]:
    """Outputs and gradients of every step, and the sums at the end."""
    trained = [p for p in module.parameters() if p.requires_grad]
    sums, seen = [torch.full_like(p, torch.nan, dtype=dtype) for p in trained], []
    collector = WeightGradients(module, trained)
    expert_grads.convert(module, collector)
    for number, step in enumerate(steps()):
        collector.begin(sums, first=number == 0, in_fp32=dtype == torch.float32)
        output, grads = backward(run, trained, step)
        assert not collector.finish(grads[2:])
        seen += [output, *grads[:2]]
    return [*seen, *sums]


def wanted(module: nn.Module, dtype: torch.dtype) -> list[Any]:
    """The same by autograd, whose gradients are added afterwards."""
    trained = [p for p in module.parameters() if p.requires_grad]
    sums, seen = [torch.zeros_like(p, dtype=dtype) for p in trained], []
    for step in steps():
        output, grads = backward(module, trained, step)
        seen += [output, *grads[:2]]
        for total, grad in zip(sums, grads[2:], strict=True):
            assert grad is not None
            total += grad
    return [*seen, *sums]


@pytest.mark.parametrize("part", [1, 2**40])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_autograd(
    kind: str, dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, gradients and sums, to the bit, in many parts and in one; of an expert that no token met too."""
    monkeypatch.setattr(expert_grads, "PART_BYTES", part)
    module = experts(kind)
    found = summed(module, module, dtype)
    assert isinstance(module, expert_grads.SummedExperts)
    for a, b in zip(found, wanted(experts(kind), dtype), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_they_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_grads, "PART_BYTES", 1)
    torch._dynamo.reset()
    module = experts(kind)
    found = summed(module, torch.compile(module, fullgraph=True, backend="aot_eager"), torch.float32)
    for a, b in zip(found, wanted(experts(kind), torch.float32), strict=True):
        assert torch.equal(a, b)


def test_torch_returns_no_gradient_of_their_weights() -> None:
    module = experts("gpt_oss")
    trained = [p for p in module.parameters() if p.requires_grad]
    collector = WeightGradients(module, trained)
    expert_grads.convert(module, collector)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
    collector.begin(sums, first=True, in_fp32=True)
    _, grads = backward(module, trained, steps(1)[0])
    names = [name for name, _ in module.named_parameters()]
    assert {name for name, grad in zip(names, grads[2:], strict=True) if grad is None} == {"gate_up_proj", "down_proj"}


def test_only_trained_weights_are_summed() -> None:
    module = experts("mixtral")
    module.get_parameter("down_proj").requires_grad_(False)
    found = summed(module, module, torch.float32)
    other = experts("mixtral")
    other.get_parameter("down_proj").requires_grad_(False)
    for a, b in zip(found, wanted(other, torch.float32), strict=True):
        assert torch.equal(a, b)
    frozen = experts("mixtral").requires_grad_(False)
    expert_grads.convert(frozen, WeightGradients(frozen, []))
    assert type(frozen) is MixtralExperts


@pytest.mark.parametrize(("implementation", "dtype"), [("eager", BF16), ("grouped_mm", torch.float32)])
def test_others_stay_as_they_are(implementation: str, dtype: torch.dtype) -> None:
    """A loop over experts, and weights in fp32, whose gradients lose nothing."""
    module = experts("mixtral", implementation, dtype)
    expert_grads.convert(module, WeightGradients(module, list(module.parameters())))
    assert type(module) is MixtralExperts
    assert expert_grads.spared_bytes(module) == expert_grads.part_bytes(module) == 0


def test_neither_groups_nor_halves_show() -> None:
    """Steps of an engine with experts in bf16, whole layers and halves, in parts of one width and another."""

    def run(**plan: Any) -> list[tuple[float, float | None]]:
        ours = engine(build("mixtral", "grouped_mm"), precision="bf16", plan=plan)
        outs = [ours.step(batches(3, seed=seed, vocab=96)) for seed in range(2)]
        ours.close()
        return [(out.loss, out.grad_norm) for out in outs]

    plain = run(activation="keep", group=3)
    for plan in ({"group": 1}, {"group": 3, "fragments": "halves"}, {"group": 1, "activation": "recompute"}):
        assert run(**plan) == plain


@pytest.mark.parametrize("compiled", [False, True])
def test_plans_count_one_part(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build("mixtral", "grouped_mm").to(BF16), precision="bf16")
    unit = decoder.units[1]
    layer = decoder.module_of(unit)
    weights = sum(layer.get_parameter(f"mlp.experts.{name}").nbytes for name in ("gate_up_proj", "down_proj"))

    def running() -> int:
        layer_cost._COMPILED.clear()
        found = layer_cost.measure(decoder, unit, 2, 16, "cuda", compiled=compiled)
        return layer_cost.running_bytes(found, 0, layer_cost.gradient_bytes(unit, decoder))

    summed = running()
    part = expert_grads.part_bytes(layer)
    assert 0 < part < weights
    monkeypatch.setattr(expert_grads, "expert_weights", lambda _: iter(()))
    assert running() - summed >= 0.8 * (weights - part)
