"""What a forward changes of its module's own state: parameters, buffers, attributes.

A streamed layer is computed by one module for all layers of its structure, twice where it is recomputed, and its
buffers are copied to the device again for each use. So state that a forward changes (running statistics of a batch
norm, a counter, a weight normalised in place) would be neither kept nor that of plain PyTorch.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.models.structure import attributes, content
from megatrain.names import format_names

_WRITES_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Operations whose schema does not declare that they write their fourth and fifth argument, running mean and variance,
where the sixth (`training`) is true."""


class StateWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes every operation that writes into a tensor of a module, views and `.data` included."""

    def __init__(self, module: nn.Module) -> None:
        """`module` may be on meta: what is noted is that a tensor is written, not its values."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._written: dict[str, None] = {}
        self._tensors = dict(_tensors(module))
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in self._tensors.items()}
        self._attributes = _attributes(module)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note(args[index] if index < len(args) else kwargs.get(argument.name))
        if func._schema.name in _WRITES_STATISTICS and args[5]:
            self._note(args[3:5])
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                self._written[name] = None

    def changed(self) -> list[str]:
        """Names, within the module, of the tensors that were written or replaced and the attributes that differ."""
        now, attributes_now = dict(_tensors(self._module)), _attributes(self._module)
        names = dict(self._written)
        for name, tensor in {**self._tensors, **now}.items():
            before, after = self._tensors.get(name), now.get(name)
            same_memory = before is after is tensor and tensor.untyped_storage()._cdata in self._names
            if not same_memory:
                names[name] = None
        for name in self._attributes.keys() | attributes_now.keys():
            if name not in self._attributes or self._attributes[name] != attributes_now.get(name, _ABSENT):
                names[name] = None
        return sorted(names)


_ABSENT = object()


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, buffer and plain tensor attribute of a module tree, by name."""
    found = []
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for held in (child._parameters, child._buffers, child.__dict__):
            found += [(prefix + name, value) for name, value in held.items() if isinstance(value, Tensor)]
    return found


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
