"""What observes the caller's thread sees the step's operations, and what is kept for each thread changes no bit."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megatrain
from megatrain.errors import ConfigError, EngineBroken
from support.interrupts import Interrupted
from support.reference import batches, build, engine


class SeenFunctions(TorchFunctionMode):
    """Names of the functions of torch that were called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class SeenOperations(TorchDispatchMode):
    """Names of the operations that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def steps(around: Callable[[], Any], update: str = "just_in_time") -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Results and weights of three steps, the second of them within `around()`; an evaluation too."""
    clip = None if update == "immediate" else 1.0
    ours = engine(build(), update=update, max_grad_norm=clip)
    data = [batches(2, seed=k) for k in range(3)]
    found = [ours.step(data[0])]
    with around():
        found += [ours.step(data[1]), ours.evaluate(data[0])]
    return [*found, ours.step(data[2])], dict(ours.state_dict())


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
@pytest.mark.parametrize(
    "around",
    [
        torch.profiler.profile,
        SeenFunctions,
        SeenOperations,
        lambda: saved_tensors_hooks(torch.clone, torch.clone),
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["profiler", "functions", "operations", "saved", "no_grad", "inference", "autocast", "device"],
)
def test_what_torch_keeps_for_a_thread_changes_no_bit(around: Callable[[], Any], update: str) -> None:
    (found, weights), (wanted, reference) = steps(around, update), steps(torch.enable_grad, update)
    assert found == wanted
    assert all(torch.equal(value, reference[name]) for name, value in weights.items())


def test_a_profiler_sees_the_operations_of_a_step() -> None:
    ours = engine(build())
    ours.step(batches(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.step(batches(1))
    names = {event.key for event in profile.key_averages()}
    assert {"aten::mm", "aten::silu", "aten::silu_backward", "aten::scaled_dot_product_attention"} <= names


def test_modes_and_hooks_see_the_operations_of_a_step() -> None:
    ours = engine(build())
    saved: list[torch.Size] = []

    def loss_fn(hidden: Any, head: Any, _: Any) -> Any:
        return head(hidden).float().square().sum()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with SeenFunctions() as functions, SeenOperations() as operations, saved_tensors_hooks(pack, lambda x: x):
        ours.step(batches(1), loss_fn=loss_fn)
    assert "silu" in functions.names
    assert "silu_backward" in operations.names
    assert saved, "of the loss function's own graph"


def test_an_interrupt_under_a_profiler_leaves_an_engine_that_says_so(
    interrupt_after: Callable[[float], None],
) -> None:
    ours, data = engine(build()), batches(1)

    def interrupted(*_: Any) -> Any:
        interrupt_after(0.05)
        time.sleep(5)

    with torch.profiler.profile(), pytest.raises(Interrupted):
        ours.step(data, loss_fn=interrupted)
    for call in (lambda: ours.step(data), lambda: ours.num_steps, lambda: ours.evaluate(data)):
        with pytest.raises(EngineBroken, match=r"cut off under a torch profiler.*load a checkpoint"):
            call()
    ours.close()


def test_a_refusal_under_a_profiler_leaves_the_engine_as_it_was() -> None:
    ours, wanted = (engine(build()) for _ in range(2))

    def wrong(hidden: Any, *_: Any) -> Any:
        assert ours.num_steps == 0  # may be asked within a pass
        return hidden.detach().sum()

    with torch.profiler.profile(), pytest.raises(ConfigError):
        ours.step(batches(1), loss_fn=wrong)
    assert ours.step(batches(1)) == wanted.step(batches(1))


def test_an_interrupt_after_a_refused_call_within_a_pass_still_leaves_an_engine_that_says_so() -> None:
    ours = engine(build())

    def interrupted(*_: Any) -> Any:
        with pytest.raises(ConfigError, match="another pass of this engine is under way"):
            ours.evaluate(batches(1))
        raise KeyboardInterrupt

    with torch.profiler.profile(), pytest.raises(KeyboardInterrupt):
        ours.step(batches(1), loss_fn=interrupted)
    with pytest.raises(EngineBroken, match="cut off under a torch profiler"):
        ours.step(batches(1))


def test_a_loss_function_has_the_callers_default_device_and_all_else_has_none(tmp_path: Path) -> None:
    data, seen = batches(2), []

    def loss_fn(hidden: Any, head: Any, _: Any) -> Any:
        seen.append(torch.empty(1).device.type)
        return head(hidden).float().square().sum()

    model = build()
    with torch.device("meta"):
        ours = engine(model, plan={"accumulate": True})
        ours.forward_backward(data, loss_fn=loss_fn, normalizer=10.0)
        ours.forward_backward(data, loss_fn=loss_fn, normalizer=10.0)
        out = ours.optimizer_step()
        ours.save(tmp_path / "one")
        ours.load(tmp_path / "one")
        ours.save_pretrained(tmp_path / "model")
        weights, scores = dict(ours.state_dict()), ours.logprobs(data)
        again = megatrain.Engine.from_pretrained(tmp_path / "model", precision="fp32")
        assert again.evaluate(data) == ours.evaluate(data)
        assert ours.logits(data[0]["input_ids"][:1]).device.type == "cpu"
    assert set(seen) == {"meta"}
    wanted = engine(build(), plan={"accumulate": True})
    wanted.forward_backward(data, loss_fn=loss_fn, normalizer=10.0)
    wanted.forward_backward(data, loss_fn=loss_fn, normalizer=10.0)
    assert out == wanted.optimizer_step()
    assert all(torch.equal(value, weights[name]) for name, value in wanted.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(scores, wanted.logprobs(data), strict=True))
