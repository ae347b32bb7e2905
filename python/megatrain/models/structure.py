"""Which layers of a model compute the same function of their inputs and weights, so that one template serves them all.

Equal shapes are not enough: windows, layer types and other attributes differ between layers of one shape. Everything
in a layer counts, except the values of its weights and its own index.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def attributes(layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """`(module, attribute, value)` of everything in a layer that is neither a tensor nor a child module."""
    ignored = set(nn.Module().__dict__)
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if name not in ignored and not isinstance(value, (Tensor, nn.Module)):
                yield path, name, value


def index_attributes(layers: Sequence[nn.Module]) -> frozenset[tuple[str, str]]:
    """`(module, attribute)` of the attributes that hold the layer's index in every layer that has them."""
    always: dict[tuple[str, str], bool] = {}
    for index, layer in enumerate(layers):
        for path, name, value in attributes(layer):
            is_index = type(value) is int and value == index
            always[path, name] = always.get((path, name), True) and is_index
    return frozenset(key for key, value in always.items() if value)


def structures(
    layers: Sequence[nn.Module], index_names: frozenset[tuple[str, str]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each layer the index of its structure, and for each structure the first layer of it."""
    known: dict[Any, int] = {}
    of: list[int] = []
    first: list[int] = []
    for index, layer in enumerate(layers):
        key = _signature(layer, index_names)
        if key not in known:
            known[key] = len(first)
            first.append(index)
        of.append(known[key])
    return tuple(of), tuple(first)


def _signature(layer: nn.Module, index_names: frozenset[tuple[str, str]]) -> tuple[Any, ...]:
    """Everything that decides what a layer computes from its inputs and weights."""
    modules = tuple((path, f"{type(m).__module__}.{type(m).__qualname__}") for path, m in layer.named_modules())
    parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    shared = {f"{m}.{n}" if m else n for m, module in layer.named_modules() for n in module._non_persistent_buffers_set}
    buffers = tuple((n, tuple(b.shape), b.dtype, _digest(b) if n in shared else None) for n, b in layer.named_buffers())
    others = tuple(
        (path, name, "index" if (path, name) in index_names else content(value))
        for path, name, value in attributes(layer)
    )
    return modules, parameters, buffers, others, tuple(_plain_tensors(layer))


def _plain_tensors(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Tensors that are neither parameters nor buffers, with their values where they have any."""
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor):
                yield path, name, tuple(value.shape), value.dtype, None if value.is_meta else _digest(value)


def _digest(buffer: Tensor) -> bytes:
    return buffer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _cell(cell: Any) -> Any:
    """The content of a closure's cell; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def content(value: Any) -> Any:
    """A hashable value that is equal for two attributes only where they mean the same."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        return (type(value).__name__, tuple(content(v) for v in value))
    if isinstance(value, dict):
        return ("dict", tuple((content(k), content(v)) for k, v in value.items()))
    if isinstance(value, functools.partial):
        return ("partial", content(value.func), content(value.args), content(value.keywords))
    if inspect.isfunction(value):
        # one piece of code may stand for several functions: what it closes over tells them apart
        cells = tuple(id(c) if inspect.isfunction(c) else content(c) for c in map(_cell, value.__closure__ or ()))
        return ("function", id(value.__code__), cells, content(value.__defaults__), content(value.__kwdefaults__))
    if inspect.ismethod(value):
        return (
            "method",
            content(value.__func__),
            None if isinstance(value.__self__, nn.Module) else id(value.__self__),
        )
    if inspect.isroutine(value) or isinstance(value, type):
        return getattr(value, "__qualname__", repr(value))
    return id(value)
