"""Measures what a piece of code allocates through torch."""

import weakref
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Most bytes of new tensors that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in {*before, *self.alive}:
                storage = value.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def peaks_of(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """The peak of each call of a method from here on, in a list that grows."""
    peaks: list[int] = []
    method = getattr(owner, name)

    def measured(*args: Any) -> Any:
        with Peak() as peak:
            result = method(*args)
        peaks.append(peak.peak)
        return result

    monkeypatch.setattr(owner, name, measured)
    return peaks
