"""Gradients of routed experts that are added to their sums in parts: the numbers of autograd, and less memory."""

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
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
from megatrain.models.modules import on_meta
from support.families import FAMILIES, build
from support.reference import batches, engine

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="grouped matmuls of CPUs and cards are alike only since"
)

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


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.experts])
def test_experts_of_every_architecture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their gates are, and however their weights lie."""
    monkeypatch.setattr(expert_grads, "PART_BYTES", 1)
    ours, stock = (next(expert_grads.grouped_experts(build(name, "grouped_mm").to(BF16))) for _ in range(2))
    first = ours.get_parameter("gate_up_proj" if ours.has_gate else "up_proj")
    number, width = first.shape[0], first.shape[1 if ours.is_transposed else 2]
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(number - 1, generator=generator)[:2] for _ in range(TOKENS)])
    rows, grad = (torch.randn(TOKENS, width, generator=generator).to(BF16) for _ in range(2))
    step = rows, chosen, torch.rand(TOKENS, 2, generator=generator).to(BF16), grad
    trained = list(ours.parameters())
    collector = WeightGradients(ours, trained)
    expert_grads.convert(ours, collector)
    assert isinstance(ours, expert_grads.SummedExperts)
    sums = [torch.full_like(p, torch.nan) for p in trained]
    collector.begin(sums, first=True, in_fp32=False)
    output, grads = backward(ours, trained, step)
    collector.finish(grads[2:])
    same, wanted = backward(stock, list(stock.parameters()), step)
    for a, b in zip([output, *grads[:2], *sums], [same, *wanted], strict=True):
        assert torch.equal(a, b)


def test_one_part_exists_at_a_time() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 8, dtype=BF16))
    module = nn.Module()
    module.weight = weight
    collector, total = WeightGradients(module, [weight]), torch.zeros(2, 3, 8)
    refs: list[Any] = []
    alive: list[int] = []

    def part() -> Tensor:
        alive.append(sum(ref() is not None for ref in refs))
        made = torch.ones(2, 3, 2, dtype=BF16)
        refs.append(weakref.ref(made))
        return made

    def parts() -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, 8, 2):
            yield slice(start, start + 2), part()

    collector.begin([total], first=True, in_fp32=True)
    collector.add_parts(0, parts())
    assert not collector.finish([None])
    assert alive == [0, 0, 0, 0]
    assert torch.equal(total, torch.ones(2, 3, 8))


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


def _of_a_subclass() -> nn.Module:
    class Scaled(MixtralExperts):
        def forward(self, *args: Tensor) -> Tensor:
            return 2 * super().forward(*args)

    module = experts("mixtral")
    module.__class__ = Scaled
    return module


def _of_an_instance() -> nn.Module:
    module = experts("mixtral")
    before = module.forward
    module.forward = lambda *args: 2 * before(*args)
    return module


def _of_the_class(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    before = MixtralExperts.forward
    monkeypatch.setattr(MixtralExperts, "forward", lambda *args: 2 * before(*args))
    return experts("mixtral")


def _of_the_registry(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from transformers.integrations import moe

    own = {
        **moe.ALL_EXPERTS_FUNCTIONS._global_mapping,
        "grouped_mm": lambda *args: 2 * moe.batched_mm_experts_forward(*args),
    }
    monkeypatch.setattr(type(moe.ALL_EXPERTS_FUNCTIONS), "_global_mapping", own)
    return experts("mixtral")


@pytest.mark.parametrize("where", ["subclass", "instance", "class", "registry"])
def test_a_forward_of_somebody_elses_is_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And planned as what it is."""
    made = {
        "subclass": _of_a_subclass,
        "instance": _of_an_instance,
        "class": lambda: _of_the_class(monkeypatch),
        "registry": lambda: _of_the_registry(monkeypatch),
    }
    module = made[where]()
    kind = type(module)
    expert_grads.convert(module, WeightGradients(module, list(module.parameters())))
    assert type(module) is kind
    assert expert_grads.spared_bytes(module) == 0


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
        layer_cost._KNOWN.clear()
        found = layer_cost.measure(decoder, unit, 2, 16, "cuda", compiled=compiled)
        return layer_cost.running_bytes(found, 0, layer_cost.gradient_bytes(unit, decoder))

    summed = running()
    part = expert_grads.part_bytes(layer)
    assert 0 < part < weights
    monkeypatch.setattr(expert_grads, "expert_weights", lambda _: iter(()))
    assert running() - summed >= 0.8 * (weights - part)


@pytest.mark.parametrize(
    ("kind", "number", "chosen"),
    [("qwen3_moe", 16, 8), ("qwen3_moe", 128, 8), ("qwen3_moe", 128, 2), ("gpt_oss", 16, 4)],
)
def test_a_plain_layers_backward_needs_no_more_than_is_planned(
    kind: str, number: int, chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the profiler's record of what is allocated and freed: the experts' half of a layer, 1,024 tokens."""
    monkeypatch.setattr(expert_grads, "PART_BYTES", 1)
    width, inner, seq = 256, 256 if kind == "gpt_oss" else 96, 1024
    sizes = {"hidden_size": width, "intermediate_size": inner, "moe_intermediate_size": inner, "head_dim": width // 4}
    sizes |= {"num_experts": number, "num_local_experts": number, "num_experts_per_tok": chosen, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **sizes, **heads, max_position_embeddings=seq)
    config._experts_implementation = "grouped_mm"
    decoder = Decoder.from_config(config, precision="bf16").halves
    unit = next(unit for unit in decoder.units if unit.half == "mlp")
    hidden = seq * width * 2
    measured = layer_cost.measure(decoder, unit, 1, seq, "cuda")
    planned = layer_cost.running_bytes(measured, hidden, layer_cost.gradient_bytes(unit, decoder))

    module = on_meta(decoder.module_of(unit)).to_empty(device="cpu").train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    trained = list(module.parameters())
    collector = WeightGradients(module, trained)
    expert_grads.convert(module, collector)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
    record = decoder.recorder.record(torch.zeros((1, seq), dtype=torch.int64))
    rows, grad = torch.randn(1, seq, width).to(BF16).requires_grad_(), torch.randn(1, seq, width).to(BF16)

    def step() -> None:
        collector.begin(sums, first=True, in_fp32=True)
        output = module(rows, *record.args[0], **record.kwargs[0])
        output = output[0] if isinstance(output, tuple) else output
        _, *grads = torch.autograd.grad(output, (rows, *trained), grad, allow_unused=True)
        del output
        collector.finish(grads)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    now = most = 0
    for event in events:
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0:
            now += event["args"]["Bytes"]
            most = max(most, now)
    assert 0.3 * planned < most <= planned
