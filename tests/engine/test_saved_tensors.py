"""Kept, offloaded and recomputed activations: one mechanism, the same bits, and nothing held that was given away."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.device_memory import Region
from megatrain.engine.saved_tensors import CheckpointedCall, is_dense

WIDTH = 32
STAGE_BYTES = 1 << 20


class Layer(nn.Module):
    """A layer whose weights are views of a region, as a template's are."""

    def __init__(self, region: Region, image: int) -> None:
        super().__init__()
        size = WIDTH * WIDTH * 4
        self.up = nn.Parameter(region.view(image, (WIDTH, WIDTH), torch.float32))
        self.down = nn.Parameter(region.view(image + size, (WIDTH, WIDTH), torch.float32))
        self.drop = nn.Dropout(0.25)

    def bind(self, region: Region, image: int) -> None:
        size = WIDTH * WIDTH * 4
        self.up.data = region.view(image, (WIDTH, WIDTH), torch.float32)
        self.down.data = region.view(image + size, (WIDTH, WIDTH), torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(hidden @ self.up.t())
        return hidden + self.drop(inner * hidden) @ self.down.t()


class Matmuls(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


IMAGE = 2 * WIDTH * WIDTH * 4


def region_with_weights() -> Region:
    region = Region(torch.zeros(2 * IMAGE, dtype=torch.uint8))
    weights = torch.randn(2 * WIDTH * WIDTH, generator=torch.Generator().manual_seed(0)) * 0.3
    region.view(0, (2 * WIDTH * WIDTH,), torch.float32).copy_(weights)
    return region


def hidden_states() -> Tensor:
    return torch.randn(2, 48, WIDTH, generator=torch.Generator().manual_seed(1))


def run(activation: str, input_on_host: bool) -> tuple[Tensor, ...]:
    """Forward in one slot, backward in another, the stage moved in between and everything old overwritten."""
    region, stage = region_with_weights(), Region(torch.zeros(2 * STAGE_BYTES, dtype=torch.uint8))
    layer = Layer(region, 0)
    turn = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: torch.manual_seed(5))
    turn.use_stage(stage, 0, STAGE_BYTES, frozenset())
    output = turn.forward(hidden_states(), activation, input_on_host)
    region.view(IMAGE, (IMAGE,), torch.uint8).copy_(region.view(0, (IMAGE,), torch.uint8))
    region.view(0, (IMAGE,), torch.uint8).fill_(255)
    stage.view(STAGE_BYTES, (STAGE_BYTES,), torch.uint8).copy_(stage.view(0, (STAGE_BYTES,), torch.uint8))
    stage.view(0, (STAGE_BYTES,), torch.uint8).fill_(255)
    layer.bind(region, IMAGE)
    with torch.no_grad():
        grads = turn.backward(torch.ones_like(output), [layer.up, layer.down], IMAGE, STAGE_BYTES)
    return output, *(g for g in grads if g is not None)


@pytest.mark.parametrize("activation", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("input_on_host", [False, True])
def test_backward_gives_the_same_bits_wherever_activations_went(activation: str, input_on_host: bool) -> None:
    region = region_with_weights()
    layer, leaf = Layer(region, 0), hidden_states().requires_grad_()
    torch.manual_seed(5)
    output = layer(leaf)
    wanted = (output, *torch.autograd.grad(output, (leaf, layer.up, layer.down), torch.ones_like(output)))
    found = run(activation, input_on_host)
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_recomputation_stops_before_the_last_matmul() -> None:
    region = region_with_weights()
    layer = Layer(region, 0)
    turn = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: torch.manual_seed(5))
    output = turn.forward(hidden_states(), "recompute", False)
    with torch.no_grad(), Matmuls() as matmuls:
        turn.backward(torch.ones_like(output), [layer.up, layer.down], 0, None)
    assert matmuls.count == 1 + 4  # the first of two matmuls again, then two gradients of each


@pytest.mark.parametrize(("activation", "input_on_host"), [("recompute", True), ("offload", True)])
def test_an_input_that_went_to_the_host_is_not_held(activation: str, input_on_host: bool) -> None:
    region, stage = region_with_weights(), Region(torch.zeros(STAGE_BYTES, dtype=torch.uint8))
    turn = CheckpointedCall(Layer(region, 0), region, frozenset((region.storage,)), 0, lambda: None)
    turn.use_stage(stage, 0, STAGE_BYTES, frozenset())
    hidden = hidden_states()
    alive = StorageWeakRef(hidden.untyped_storage())
    output = turn.forward(hidden, activation, input_on_host)
    of_output = StorageWeakRef(output.untyped_storage())
    del hidden, output
    gc.collect()
    assert alive.expired()
    assert of_output.expired()


def test_offloading_holds_nothing_but_what_is_small() -> None:
    region, stage = region_with_weights(), Region(torch.zeros(STAGE_BYTES, dtype=torch.uint8))
    layer, made = Layer(region, 0), []
    layer.drop.register_forward_pre_hook(lambda _, args: made.append(StorageWeakRef(args[0].untyped_storage())))
    turn = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: None)
    turn.use_stage(stage, 0, STAGE_BYTES, frozenset())
    turn.forward(hidden_states(), "offload", False)
    gc.collect()
    assert made[0].expired()
    # tanh's output, the dropout's mask and output: three tensors, each once
    assert turn.staged_bytes == 3 * 2 * 48 * WIDTH * 4


def test_what_the_stage_has_no_room_for_stays_on_the_device() -> None:
    region, stage = region_with_weights(), Region(torch.zeros(STAGE_BYTES, dtype=torch.uint8))
    layer = Layer(region, 0)
    turn = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: torch.manual_seed(5))
    turn.use_stage(stage, 0, 2 * 48 * WIDTH * 4 + 1, frozenset())
    output = turn.forward(hidden_states(), "offload", False)
    with torch.no_grad():
        grads = turn.backward(torch.ones_like(output), [layer.up, layer.down], 0, 0)
    assert all(torch.equal(a, b) for a, b in zip((output, *grads), run("keep", False), strict=True))


def test_changing_a_kept_tensor_in_place_is_an_error() -> None:
    region, made = region_with_weights(), []

    class Careless(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            inner = torch.tanh(hidden @ self.up.t())
            made.append(inner)
            return inner @ self.down.t()

    layer = Careless(region, 0)
    turn = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: None)
    output = turn.forward(hidden_states(), "keep", False)
    with torch.no_grad():
        made[0].add_(1.0)
        with pytest.raises(RuntimeError, match="changed in place after it was saved"):
            turn.backward(torch.ones_like(output), [layer.up, layer.down], 0, None)


class Twice(torch.autograd.Function):
    """A square whose backward reads what was saved twice, as autograd allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (one,), (other,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (one + other) / 2


@pytest.mark.parametrize("activation", ["keep", "recompute"])
def test_a_saved_tensor_may_be_read_twice(activation: str) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    hidden, grad = torch.randn(1, 4, 8), torch.randn(1, 4, 8)

    def layer(x: Tensor) -> Tensor:
        return last(torch.tanh(Twice.apply(first(x))))

    leaf = hidden.clone().requires_grad_()
    parameters = [*first.parameters(), *last.parameters()]
    wanted = torch.autograd.grad(layer(leaf), (leaf, *parameters), grad)
    call = CheckpointedCall(layer, None, frozenset(), 0, lambda: None)
    call.use_stage(None, 0, 0, frozenset())
    call.forward(hidden, activation, input_on_host=False)
    found = call.backward(grad, parameters, 0, None)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_density_is_told_from_strides() -> None:
    base = torch.zeros(4, 5, 6)
    assert is_dense(base)
    assert is_dense(base.permute(2, 0, 1))
    assert is_dense(base[1:3])
    assert not is_dense(base[:, :2])
    assert not is_dense(torch.zeros(1).expand(3))


@pytest.mark.parametrize("activation", ["offload", "recompute"])
def test_an_input_that_is_no_contiguous_tensor_comes_back_from_the_host_as_it_was(activation: str) -> None:
    found = []
    for host in (False, True):
        region, stage = region_with_weights(), Region(torch.zeros(STAGE_BYTES, dtype=torch.uint8))
        layer = Layer(region, 0)
        call = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: torch.manual_seed(5))
        call.use_stage(stage, 0, STAGE_BYTES, frozenset())
        hidden = torch.randn(WIDTH, 48, 2, generator=torch.Generator().manual_seed(2)).permute(2, 1, 0)
        output = call.forward(hidden, activation, host)
        with torch.no_grad():
            found.append((output, *call.backward(torch.ones_like(output), [layer.up, layer.down], 0, 0)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_that_the_stage_has_no_room_for_stays_on_the_device() -> None:
    region, stage = region_with_weights(), Region(torch.zeros(STAGE_BYTES, dtype=torch.uint8))
    layer = Layer(region, 0)
    call = CheckpointedCall(layer, region, frozenset((region.storage,)), 0, lambda: torch.manual_seed(5))
    call.use_stage(stage, 0, 100, frozenset())
    output = call.forward(hidden_states(), "recompute", True)
    stage.view(0, (STAGE_BYTES,), torch.uint8).fill_(255)
    with torch.no_grad():
        grads = call.backward(torch.ones_like(output), [layer.up, layer.down], 0, 0)
    assert all(torch.equal(a, b) for a, b in zip((output, *grads), run("keep", False), strict=True))
