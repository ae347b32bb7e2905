"""What somebody put onto a model's modules besides their classes: hooks, forwards of instances, parametrizations.

Layers of one structure are computed by one copy of the first of them (`engine/template.py`), and embedding and plain
head by their matmuls alone. So what is attached to one instance would run for all of them or for none, and the numbers
would be wrong silently.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from megatrain.errors import ConfigError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def refuse(model: nn.Module) -> None:
    """Raises ConfigError, with the module's name, for what would not be computed as it is there."""
    for path, module in model.named_modules():
        where = path or type(model).__name__
        if parametrize.is_parametrized(module):
            raise ConfigError(
                f"{where} has a parametrized {next(iter(module.parametrizations))}, made anew in each forward; "
                "make it a weight first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        if "forward" in vars(module):
            raise ConfigError(
                f"{where} has a forward of its own ({_name(vars(module)['forward'])}), set on the instance, which a "
                "streamed model would not run: put it into the module's class, or load the model without what sets it "
                "(device_map of several devices, patches of kernels)"
            )
        for hook in _hooks(module, _HOOKS):
            raise ConfigError(
                f"{where} has a hook ({_name(hook)}), which a streamed model would run for other layers too, or not at "
                "all: remove it, or put what it computes into the module's class"
            )
        for name, parameter in module.named_parameters(recurse=False):
            for hook in _hooks(parameter, _OF_PARAMETERS):
                raise ConfigError(
                    f"{where}.{name} has a hook ({_name(hook)}), but gradients of a streamed model are no parameter's: "
                    "remove it, and read gradients with engine.gradient"
                )


def refuse_repeated(layers: Sequence[nn.Module], name: str) -> None:
    """Raises ConfigError for a layer that stands at two places."""
    first: dict[int, int] = {}
    for index, layer in enumerate(layers):
        before = first.setdefault(id(layer), index)
        if before != index:
            raise ConfigError(
                f"{name}.{before} and {name}.{index} are one module, and here each layer has its own weights; copy it "
                "(copy.deepcopy)"
            )


def _hooks(owner: Any, kinds: Sequence[str]) -> Iterator[Any]:
    """Hooks that are not transformers' own, which only take down what passes."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            module = getattr(hook, "__module__", None) or type(hook).__module__
            if not module.startswith("transformers."):
                yield hook


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__
