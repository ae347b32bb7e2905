"""One trial forward of every layer, before anything is loaded: which parameters get no gradient from it, so that torch
would not update them, and whether it does anything that a streamed layer cannot.
"""

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatrain.errors import ConfigError
from megatrain.models.autograd_graph import leaves_of
from megatrain.models.modules import on_meta, renew_parameters, to_meta
from megatrain.models.moe import Gates
from megatrain.models.recorder import Record, Recorder
from megatrain.models.state_changes import StateWatch, refusal
from megatrain.models.structure import index_attributes, structures
from megatrain.models.support import ModelParts

log: logging.Logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrials:
    """What the trials of all layers have shown."""

    untrained: tuple[str, ...]
    """Full names of the parameters that get no gradient, because the forward does not read them, or reads them under
    `detach` or `no_grad`: torch's optimizers skip such a parameter, decay included."""
    untried: frozenset[int]
    """Indices of the layers that could not be run: the first step checks them instead."""


def try_layers(parts: ModelParts, recorder: Recorder, gates: Sequence[Gates]) -> LayerTrials:
    """Runs every layer on two tokens: on meta, by one copy per structure with the layer's own index and arguments, as
    the engine runs it. A layer whose work depends on values (experts in a loop) is run on the CPU instead, on zeros,
    once per structure.

    Raises ConfigError, with the layer's name, for a layer whose forward changes state of its own, changes its input in
    place, does not pass the gradient on, or checkpoints reentrantly.
    """
    record = recorder.record(torch.zeros(1, 2, dtype=torch.int64))
    index_names = index_attributes(parts.layers)
    of, firsts = structures(parts.layers, index_names)
    untrained: list[str] = []
    untried: set[int] = set()
    for structure, first in enumerate(firsts):
        same = [index for index, own in enumerate(of) if own == structure]
        trial = _Trial(parts, first, recorder.tuple_output, gates[first])
        found: dict[int, list[str]] = {}
        try:
            for index in same:
                trial.take_index(index, index_names)
                found[index] = trial.run("meta", record, index)
        except ConfigError:
            raise
        except Exception as error:  # a layer may raise anything for tensors without values
            log.debug("%s does not run on meta: %s", parts.layer_name(first), error)
            names = _on_cpu(trial, record, first)
            found = dict.fromkeys(same, names or [])
            untried |= set(same) if names is None else set()
        untrained += [f"{parts.layer_name(index)}.{name}" for index, names in found.items() for name in names]
    return LayerTrials(untrained=tuple(untrained), untried=frozenset(untried))


def _on_cpu(trial: "_Trial", record: Record, first: int) -> list[str] | None:
    """Parameters without gradient; None where the layer does not run on the CPU either."""
    try:
        return trial.run("cpu", record, first)
    except ConfigError:
        raise
    except Exception as error:  # its kernels may exist for the card alone
        log.info("layer %d runs neither on meta nor on zeros, so the first step checks it instead: %s", first, error)
        return None


class _Trial:
    """A copy of a layer that can be run without its weights."""

    def __init__(self, parts: ModelParts, layer: int, tuple_output: bool, gates: Gates) -> None:
        self._parts = parts
        self._layer = layer
        self._tuple = tuple_output
        self._gates = gates
        self._module = on_meta(parts.layers[layer])
        renew_parameters(self._module)
        self._module.train()

    def take_index(self, index: int, index_names: frozenset[tuple[str, str]]) -> None:
        """Makes the copy layer number `index`, one of the same structure."""
        for path, name in index_names:
            module = dict(self._module.named_modules()).get(path)
            if module is not None and name in module.__dict__:
                setattr(module, name, index)

    def run(self, device: str, record: Record, index: int) -> list[str]:
        """Runs the layer on two tokens. Returns its parameters without gradient, by their names in the layer."""
        where = f"{self._parts.layer_name(index)} ({type(self._module).__name__})"
        module, args, kwargs = self._module, record.args[index], record.kwargs[index]
        if device == "meta":
            args, kwargs = to_meta(args), to_meta(kwargs)
        else:
            module = of_zeros(self._parts.layers[self._layer])
        shape = (1, 2, self._parts.hidden_size)
        hidden = torch.ones(shape, dtype=self._parts.dtype, device=device, requires_grad=True)
        routed: list[Tensor] = []
        hooks = [
            module.get_submodule(path).register_forward_hook(
                lambda _m, _a, output, at=at: routed.append(output[at] if isinstance(output, tuple) else output)
            )
            for path, at in self._gates
        ]
        watch = StateWatch(module)
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), watch:
                result = module(hidden, *args, **kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise ConfigError(
                    f"the forward of {where} changes its input or one of its weights in place, while its backward "
                    "needs both as they were; write the result to a new tensor"
                ) from error
            raise
        finally:
            for hook in hooks:
                hook.remove()
        if changed := watch.changed():
            raise ConfigError(refusal(where, changed))
        output = result[0] if self._tuple else result
        try:
            leaves = leaves_of([output, *routed])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if id(hidden) not in leaves:
            raise ConfigError(
                f"{where} returns hidden states that pass no gradient on to its input (detach, no_grad), so no layer "
                "before it would be trained"
            )
        return [name for name, parameter in module.named_parameters() if id(parameter) not in leaves]


def of_zeros(layer: nn.Module) -> nn.Module:
    """A copy of a layer on the CPU with zeros for weights, whose pages are not allocated as long as they are only
    read."""
    twin = on_meta(layer)
    renew_parameters(twin, "cpu")
    originals = dict(layer.named_modules())
    for path, module in twin.named_modules():
        for name, buffer in originals[path]._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.clone()
    return twin.train()
