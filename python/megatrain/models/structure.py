"""Which layers of a model compute the same from their inputs and weights, so that one template serves them all.

Equal shapes are not enough: windows, layer types and other attributes differ between layers of one shape. Everything
that is neither a tensor nor the layer's own index counts.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def _attributes(layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """`(module, attribute, value)` of everything in a layer that is neither tensor nor child."""
    ignored = set(nn.Module().__dict__)
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if name not in ignored and not isinstance(value, (Tensor, nn.Module)):
                yield path, name, value


def index_attributes(layers: list[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that hold nothing but the layer's index, wherever they occur."""
    always: dict[tuple[str, str], bool] = {}
    for index, layer in enumerate(layers):
        for path, name, value in _attributes(layer):
            is_index = type(value) is int and value == index
            always[path, name] = always.get((path, name), True) and is_index
    return {key for key, value in always.items() if value}


def structures(layers: list[nn.Module], index_names: set[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """For each layer the index of its structure, and for each structure the first layer that has it."""
    known: dict[Any, int] = {}
    of: list[int] = []
    first: list[int] = []
    for index, layer in enumerate(layers):
        key = _signature(layer, index_names)
        if key not in known:
            known[key] = len(first)
            first.append(index)
        of.append(known[key])
    return of, first


def _signature(layer: nn.Module, index_names: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Everything that decides what a layer computes from its inputs and weights."""
    modules = tuple((path, f"{type(m).__module__}.{type(m).__qualname__}") for path, m in layer.named_modules())
    parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    shared = {f"{m}.{n}" if m else n for m, module in layer.named_modules() for n in module._non_persistent_buffers_set}
    buffers = tuple((n, tuple(b.shape), b.dtype, _digest(b) if n in shared else None) for n, b in layer.named_buffers())
    attributes = tuple(
        (path, name, "index" if (path, name) in index_names else _value(value))
        for path, name, value in _attributes(layer)
    )
    return modules, parameters, buffers, attributes, tuple(_plain_tensors(layer))


def _plain_tensors(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Tensors that are neither parameters nor buffers, by their values where they have any."""
    for path, module in layer.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor):
                yield path, name, tuple(value.shape), value.dtype, None if value.is_meta else _digest(value)


def _digest(buffer: Tensor) -> bytes:
    return buffer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _content(cell: Any) -> Any:
    """What a closure holds in a cell; nothing, where it was not given it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _value(value: Any) -> Any:
    """Something hashable that is equal only where the attribute means the same."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        return (type(value).__name__, tuple(_value(v) for v in value))
    if isinstance(value, dict):
        return ("dict", tuple((_value(k), _value(v)) for k, v in value.items()))
    if isinstance(value, functools.partial):
        return ("partial", _value(value.func), _value(value.args), _value(value.keywords))
    if inspect.isfunction(value):
        # one piece of code may stand for several functions: what it closes over tells them apart
        cells = tuple(id(c) if inspect.isfunction(c) else _value(c) for c in map(_content, value.__closure__ or ()))
        return ("function", id(value.__code__), cells, _value(value.__defaults__), _value(value.__kwdefaults__))
    if inspect.ismethod(value):
        return ("method", _value(value.__func__), None if isinstance(value.__self__, nn.Module) else id(value.__self__))
    if inspect.isroutine(value) or isinstance(value, type):
        return getattr(value, "__qualname__", repr(value))
    return id(value)
