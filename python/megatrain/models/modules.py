"""Surgery on module trees: copies that share tensors with the original, replaced parts, everything on meta."""

import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

M = TypeVar("M", bound=nn.Module)

_COPIED = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    # transformers installs hooks when outputs are first asked for; shared, each copy would add to those of all others
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def shallow_copy(module: M) -> M:
    """A module whose children, parameters and buffers can be replaced without touching the original.

    Gradient checkpointing of transformers is off in it: what is recomputed is the plan's decision, and a checkpointed
    layer within a recomputed one would be computed three times.
    """
    twin = copy.copy(module)
    for name in _COPIED:
        object.__setattr__(twin, name, copy.copy(getattr(module, name)))
    if getattr(twin, "gradient_checkpointing", False) is True:
        twin.gradient_checkpointing = False  # type: ignore[assignment]
    return twin


def copy_without(module: nn.Module, omit: nn.Module | None = None) -> nn.Module:
    """A copy of a module tree that shares tensors with the original, and `omit` itself. A module that stands at two
    places of the tree is one module in the copy too."""
    return _copy_tree(module, omit, {})


def _copy_tree(module: nn.Module, omit: nn.Module | None, made: dict[int, nn.Module]) -> nn.Module:
    if module is omit:
        return module
    if id(module) not in made:
        made[id(module)] = twin = shallow_copy(module)
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = _copy_tree(child, omit, made)
    return made[id(module)]


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` where `name` is."""
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = module


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module tree with every parameter and buffer on meta. One tensor at two places stays one."""
    twin = copy_without(module)
    made: dict[int, Any] = {}
    for child in twin.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    moved = tensor.detach().to("meta")
                    made[id(tensor)] = (
                        nn.Parameter(moved, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else moved
                    )
                held[name] = made[id(tensor)]
    return twin


def renew_parameters(twin: nn.Module, device: str = "meta") -> dict[int, nn.Parameter]:
    """Replaces every parameter of a copied tree by a new one on `device` that wants a gradient where it can have one.
    Returns the new ones by `id` of the old. On the CPU they are zeros that take no memory as long as they are only
    read."""
    made: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in made:
                    value = torch.empty(old.shape, dtype=old.dtype, device="meta") if device == "meta" else _zeros(old)
                    made[id(old)] = nn.Parameter(value, requires_grad=value.is_floating_point())
                module._parameters[name] = made[id(old)]
    return made


def _zeros(like: Tensor) -> Tensor:
    # numpy asks for zeroed pages, of which the kernel maps one and the same until they are written; torch writes zeros
    pages = np.zeros(like.numel() * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(pages).view(like.dtype).view(like.shape)


def to_meta(tree: Any) -> Any:
    """A tree of arguments with every tensor in it on meta."""
    return tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, tree)
