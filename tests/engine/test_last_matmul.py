"""A compiled layer that is recomputed leaves its last matmul out, and makes the bits that it made in forward."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from megatrain.engine import last_matmul
from megatrain.engine.compile import OneGraph, keeping_least
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.engine.tiles import TiledCall
from support.small_layers import decoder, real_layer

ROWS, SEQ = 2, 16
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def layer_of(family: str, precision: str) -> tuple[nn.Module, Callable[[Any], Callable[[Tensor], Tensor]], Tensor]:
    """A layer, what makes a function of hidden states from it or from what it was compiled to, and hidden states."""
    model = decoder(family, precision, **(GPT2 if family == "gpt2" else {}))
    record = model.recorder.record(torch.zeros((ROWS, SEQ), dtype=torch.int64))
    args, kwargs = record.args[0], record.kwargs[0]

    def of(run: Any) -> Callable[[Tensor], Tensor]:
        def call(hidden: Tensor) -> Tensor:
            output = run(hidden, *args, **kwargs)
            return output[0] if model.recorder.tuple_output else output

        return call

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, SEQ, model.hidden_size, generator=generator).to(model.dtype)
    return real_layer(model), of, hidden


@functools.cache
def no_compiler() -> str | None:
    """Why torch can compile nothing for this processor: that takes a C++ compiler and Python's headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(3))
    except Exception as error:  # whatever a missing compiler raises
        return str(error).strip().splitlines()[0]
    return None


@pytest.fixture
def compiler() -> None:
    """Skips where there is none."""
    if why := no_compiler():
        pytest.skip(f"torch compiles nothing here: {why}")


def uncached() -> contextlib.ExitStack:
    """Within it, torch makes every graph, also one that it has stored."""
    import torch._functorch.config

    stack = contextlib.ExitStack()
    stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
    stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
    return stack


def gradients(layer: nn.Module, call: Callable[[Tensor], Tensor], hidden: Tensor, activation: str) -> list[Tensor]:
    """The output, the gradient of the input and those of the parameters."""
    turn = CheckpointedCall(call, None, frozenset(), 0, lambda: None)
    output = turn.forward(hidden, activation, False)
    found = turn.backward(torch.full_like(output, 0.5), list(layer.parameters()), 0, None)
    return [output, *(tensor for tensor in found if tensor is not None)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("family", "precision", "left_out"),
    [("qwen2", "bf16", 1), ("gpt2", "fp32", 1), ("gemma2", "bf16", 0)],  # a norm follows Gemma's last matmul
)
def test_recomputation_makes_the_bits_of_the_usual_graph_without_the_last_matmul(
    family: str, precision: str, left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[int] = []
    replace = last_matmul.replace
    monkeypatch.setattr(last_matmul, "replace", lambda *about: replaced.append(replace(*about)))
    layer, of, hidden = layer_of(family, precision)
    torch._dynamo.reset()
    with uncached():
        with keeping_least():
            wanted = gradients(layer, of(torch.compile(layer, fullgraph=True)), hidden, "keep")
        ours = of(OneGraph(layer, family))
        for activation in ("keep", "recompute"):
            found = gradients(layer, ours, hidden, activation)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), activation
    assert replaced == [left_out]
    torch.use_deterministic_algorithms(True)  # what is left out is filled with NaN
    try:
        with last_matmul.outputs_unwanted():
            assert torch.equal(ours(hidden.requires_grad_()), wanted[0]) == (left_out == 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(ours(hidden), wanted[0])


@pytest.mark.usefixtures("compiler")
def test_a_layer_in_tiles_goes_back_without_its_output() -> None:
    layer, of, hidden = layer_of("qwen2", "fp32")
    layer.self_attn = Nothing()
    torch._dynamo.reset()
    ours = of(OneGraph(layer, "qwen2"))
    found = []
    for tiles in (1, 2):
        turn = TiledCall(ours, None, frozenset(), 0, lambda: None)
        turn.use_tiles(tiles)
        output = turn.forward(hidden, "recompute", False)
        parameters = list(layer.mlp.parameters())
        sums = [torch.zeros_like(p) for p in parameters]
        of_input = turn.backward_by_tile(
            torch.ones_like(output),
            parameters,
            0,
            None,
            lambda _: None,
            lambda grads, sums=sums: torch._foreach_add_(sums, list(grads)),
        )
        found.append([output, of_input, *sums])
    stock = hidden.clone().requires_grad_()
    output = of(layer)(stock)
    wanted = [output, *torch.autograd.grad(output.sum(), (stock, *layer.mlp.parameters()))]
    for one in found:
        for ours_, theirs in zip(one, wanted, strict=True):
            torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-4)


class Nothing(nn.Module):
    """Attention that adds nothing."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    graph: fx.GraphModule = make_fx(function)(*inputs)
    return graph


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "mm" in str(node.target)]


def test_only_what_no_saved_tensor_depends_on_is_replaced() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 4)

    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        saved = a @ b
        early = saved.relu() @ b
        return early @ b + a, torch.addmm(a, early, b), saved, None  # two outputs, two for backward

    graph = traced(forward, a, b)
    wanted = graph(a, b)
    assert last_matmul.replace(graph, 2) == 3
    assert targets(graph) == [
        "aten.mm.default",
        "megatrain.mm_if_wanted.default",
        "megatrain.mm_if_wanted.default",
        "megatrain.addmm_if_wanted.default",
    ]
    assert all(torch.equal(x, y) for x, y in zip(graph(a, b)[:3], wanted[:3], strict=True))
    with last_matmul.outputs_unwanted():
        found = graph(a, b)
    assert torch.equal(found[2], wanted[2])
    assert [t.shape for t in found[:2]] == [t.shape for t in wanted[:2]]
    assert last_matmul.replace(traced(forward, a, b), 0) == 0, "every result is needed"


def test_what_a_graph_changes_is_computed() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 4)

    def forward(a: Tensor, b: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        kept.copy_(a @ b)
        return b @ b, a

    graph = traced(forward, a, b, torch.zeros(3, 4))
    assert last_matmul.replace(graph, 1) == 1
    kept = torch.zeros(3, 4)
    with last_matmul.outputs_unwanted():
        graph(a, b, kept)
    assert torch.equal(kept, a @ b)


def test_another_thread_wants_its_outputs() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 4)
    graph = traced(lambda a, b: (a @ b, a), a, b)
    assert last_matmul.replace(graph, 1) == 1
    found: list[Tensor] = []
    torch.use_deterministic_algorithms(True)
    try:
        with last_matmul.outputs_unwanted():
            thread = threading.Thread(target=lambda: found.append(graph(a, b)[0]))
            thread.start()
            thread.join()
            found.append(graph(a, b)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0], a @ b)
    assert found[1].isnan().all()
