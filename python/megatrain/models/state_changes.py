"""What a forward changes of its module's own state: parameters, buffers, attributes.

A streamed layer is computed by one module for all layers of its structure, twice where it is recomputed, and its
buffers are copied to the device again for each use. So state that a forward changes (running statistics of a batch
norm, a counter, a weight normalised in place) would be neither kept nor that of plain PyTorch.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.models.structure import attributes, content
from megatrain.names import format_names

_WRITES_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Operations whose schema does not declare that they write their fourth and fifth argument, running mean and variance,
where the sixth (`training`) is true."""


@functools.cache
def _written_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    """Index and name of the arguments that an operation writes into, by its schema."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class StateSnapshot:
    """The state of a module at one time, to be compared with its later state."""

    def __init__(self, module: nn.Module) -> None:
        """Copies the values of buffers, if they have any; parameters are known by their version counters."""
        self._module = module
        self._tensors = {name: _identity(tensor) for name, tensor in tensors_of(module)}
        self._values = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
        self._versions = {name: parameter._version for name, parameter in module.named_parameters()}
        self._attributes = _attributes(module)

    def changed(self) -> list[str]:
        """Names, within the module, of what has changed since."""
        module = self._module
        names = _differing(self._tensors, {name: _identity(tensor) for name, tensor in tensors_of(module)})
        names += _differing(self._attributes, _attributes(module))
        now = dict(module.named_buffers())
        names += [
            name
            for name, old in self._values.items()
            if name not in names and (name not in now or not torch.equal(old, now[name]))
        ]
        # views of one region of the engine share a version counter, so it shows a parameter only where nothing else did
        return names or [name for name, p in module.named_parameters() if p._version != self._versions[name]]


class StateWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes every operation that writes into a tensor of a module: views and `.data`, which version
    counters do not show, included."""

    def __init__(self, module: nn.Module) -> None:
        """`module` may be on meta: what is noted is that a tensor is written, not its values."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._snapshot = StateSnapshot(module)
        self._written: set[str] = set()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors_of(module)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, name in _written_arguments(func):
            self._note(args[index] if index < len(args) else kwargs.get(name))
        if func._schema.name in _WRITES_STATISTICS and args[5]:
            self._note(args[3:5])
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self._written.add(name)

    def changed(self) -> list[str]:
        """Names, within the module, of the tensors that were written or replaced and the attributes that differ."""
        return sorted({*self._written, *self._snapshot.changed()})


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, buffer and plain tensor attribute of a module tree, by name."""
    found = []
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for held in (child._parameters, child._buffers, child.__dict__):
            found += [(prefix + name, value) for name, value in held.items() if isinstance(value, Tensor)]
    return found


def _identity(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor.untyped_storage()._cdata


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before | after if name not in before or name not in after or before[name] != after[name]]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Every other attribute, by content."""
    return {f"{path}.{name}" if path else name: content(value) for path, name, value in attributes(module)}


def refusal(where: str, names: list[str]) -> str:
    """The message for a module whose forward changes `names`."""
    return (
        f"the forward of {where} changes state of its own ({format_names(names)}), which a streamed model does not "
        "keep, and would change again where it recomputes: take what changes it out of the forward (for a batch norm: "
        "track_running_stats=False, or another norm)"
    )
