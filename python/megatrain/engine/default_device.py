"""The engine computes where it says, whatever `torch.set_default_device` or a `with torch.device(…)` says; a loss
function of the caller's sees what the caller set."""

import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Tensors made without a device are on the CPU, as torch makes them where no default is set. Also a decorator."""
    if torch.get_default_device().type == "cpu":
        yield  # a default that is set, even to this, is a mode that every call of torch passes through
        return
    with torch.device("cpu"):
        yield


def on_present_default(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, called with the default device of now."""
    place = torch.get_default_device()
    if place.type == "cpu":
        return function

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with place:
            return function(*args, **kwargs)

    return call
