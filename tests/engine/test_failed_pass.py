"""What a pass that fails leaves: none of the activations that its layers had saved."""

import gc
import weakref
from typing import Any

import pytest
import torch

from megatrain.engine import saved_tensors, step
from support.reference import batches, build, engine


class Failed(Exception):
    """What the tests raise."""


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[torch.Tensor]"]:
    """The tensors that layers' graphs have saved since the fixture was made."""
    seen: list[weakref.ref[torch.Tensor]] = []
    keep = saved_tensors.CheckpointedCall._keep

    def noted(self: saved_tensors.CheckpointedCall, tensor: torch.Tensor) -> Any:
        handle = keep(self, tensor)
        if isinstance(handle, saved_tensors._Kept):
            seen.append(weakref.ref(handle.tensor))
        return handle

    monkeypatch.setattr(saved_tensors.CheckpointedCall, "_keep", noted)
    return seen


def alive(seen: list["weakref.ref[torch.Tensor]"]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in seen)


def test_a_step_frees_all_that_its_layers_saved(saved: list["weakref.ref[torch.Tensor]"]) -> None:
    ours = engine(build(), plan={"activation": "keep"})
    ours.step(batches(2))
    assert len(saved) > 0
    assert alive(saved) == 0


def test_a_loss_that_fails_leaves_nothing(saved: list["weakref.ref[torch.Tensor]"]) -> None:
    ours = engine(build(), plan={"activation": "keep"})

    def fails(*_: Any) -> torch.Tensor:
        raise Failed

    with pytest.raises(Failed):
        ours.forward_backward(batches(2), loss_fn=fails, normalizer=1.0)
    assert len(saved) > 0
    assert alive(saved) == 0


@pytest.mark.parametrize("method", ["_forward", "_backward"])
def test_a_layer_that_fails_leaves_nothing(
    method: str, saved: list["weakref.ref[torch.Tensor]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layer's forward, and after a first backward."""
    ours = engine(build(), plan={"activation": "keep"})
    original, calls = getattr(step.Pass, method), 0

    def fails(self: step.Pass, op: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Failed
        original(self, op)

    monkeypatch.setattr(step.Pass, method, fails)
    with pytest.raises(Failed):
        ours.step(batches(2))
    assert len(saved) > 0
    assert alive(saved) == 0


def test_a_backward_that_fails_leaves_nothing(
    saved: list["weakref.ref[torch.Tensor]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within autograd, where the graph has been taken from the pass already."""
    ours = engine(build(), plan={"activation": "keep"})

    def fails(*_: Any, **__: Any) -> Any:
        raise Failed

    monkeypatch.setattr(saved_tensors.CheckpointedCall, "_unpack", fails)
    with pytest.raises(Failed):
        ours.step(batches(2))
    assert len(saved) > 0
    assert alive(saved) == 0
