"""Random initial weights by transformers' own rules, written to the store one unit at a time.

The rule (`_init_weights` of the model's class) runs on a copy of each module with real memory. Random numbers are keyed
by seed and module name, so they depend neither on order nor on the plan, only on the kind of device that draws them. A
card is used where there is one: it draws billions of numbers in the time in which a processor core draws millions. It
draws at most `DRAWN` numbers at a time, so that it needs no memory that the plan has not: values are kept on the host.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.errors import ConfigError
from megatrain.weights.planes import write_plane
from megatrain.weights.types import Core, Decoder, TensorRef

DRAWN = 2**27
"""Random numbers that a card draws at a time. Part of what a seed means there: larger tensors are drawn in pieces."""


def initialize(
    decoder: Decoder,
    core: Core,
    seed: int,
    *,
    device: str = "cpu",  # what draws: cpu or cuda
    progress: Callable[[int, int], None] | None = None,  # tensors done, tensors in all
) -> None:
    """Writes the initial value of every parameter; persistent buffers get the values that the model was built with.

    Raises ConfigError for a parameter that the model's class does not initialise.
    """
    done = 0
    for root, refs in _roots(decoder):
        values = _draw(decoder.model, root, seed, device)
        for ref in refs:
            value = values[ref.name]
            if ref.role == "trainable":
                write_plane(core, ref, "master", value)
            else:
                write_plane(core, ref, "weights", value.to(ref.dtype).contiguous().view(-1))
        done += len(refs)
        if progress is not None:
            progress(done, len(decoder.tensors))
    if device == "cuda":
        # the plan counts this memory as free for layers
        torch.cuda.empty_cache()


def _roots(decoder: Decoder) -> Iterator[tuple[str, list[TensorRef]]]:
    """The modules to initialise, one after another, each with its tensors: that of a layer, embedding or head where
    there is one, else the modules that own its tensors. Into how many units a layer is cut makes no difference: a
    model's rules may be about modules that hold both halves."""
    layers: dict[int | str, list[TensorRef]] = {}
    for ref in sorted(decoder.tensors.values(), key=lambda ref: ref.unit):
        unit = decoder.units[ref.unit]
        layers.setdefault(unit.name if unit.layer is None else unit.layer, []).append(ref)
    for refs in layers.values():
        root = _common([ref.name.split(".")[:-1] for ref in refs])
        inside = {name for name in decoder.tensors if name.startswith(root + ".")} if root else set(decoder.tensors)
        if root and inside == {ref.name for ref in refs}:
            yield root, refs
            continue
        owners: dict[str, list[TensorRef]] = {}
        for ref in refs:
            owners.setdefault(ref.name.rpartition(".")[0], []).append(ref)
        yield from owners.items()


def _common(paths: list[list[str]]) -> str:
    shared = paths[0]
    for path in paths[1:]:
        same = [a == b for a, b in zip(shared, path, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return ".".join(shared)


@torch.no_grad()
def _draw(model: nn.Module, root: str, seed: int, device: str) -> dict[str, Tensor]:
    """Values of every parameter and buffer below `root`, flat, by full name, on the CPU; parameters in fp32."""
    module = copy.deepcopy(model.get_submodule(root))
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                # NaN, so that a parameter that no rule initialises is found
                values = torch.full(parameter.shape, torch.nan)
                owner._parameters[name] = nn.Parameter(values, requires_grad=False)
    rule = _rule(model, root)
    # children first, as transformers does: a parent may initialise its children's weights again
    modules = [(f"{root}.{name}" if name else root, part) for name, part in module.named_modules()]
    for name, part in sorted(modules, key=lambda item: -item[0].count(".")):
        if any(True for _ in part.parameters()):
            with _seeded(seed, name, device):
                rule(part)
    for name, part in modules:
        if any(bool(p.isnan().any()) for p in part.parameters(recurse=False)):
            _draw_by_constructor(rule, part, name, seed, device)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {f"{root}.{name}": tensor.detach().contiguous().view(-1) for name, tensor in named}


def _draw_by_constructor(rule: Callable[[nn.Module], None], part: nn.Module, name: str, seed: int, device: str) -> None:
    """Initialises a module that the model's class has no rule for as torch's constructor would."""
    with _seeded(seed, name, device):
        if callable(getattr(part, "reset_parameters", None)):
            part.reset_parameters()  # type: ignore[operator]
            rule(part)
    for leaf, parameter in part.named_parameters(recurse=False):
        if bool(parameter.isnan().any()):
            raise ConfigError(
                f"the model's class has no initial values for {name}.{leaf}; start from pretrained weights "
                "(model.init: pretrained) instead"
            )


def _rule(model: nn.Module, root: str) -> Callable[[nn.Module], None]:
    """`_init_weights` of the innermost model that contains `root`."""
    parts = root.split(".")
    for end in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:end]))
        rule = getattr(owner, "_init_weights", None)
        if callable(rule):
            return rule  # type: ignore[no-any-return]
    raise ConfigError(
        f"{type(model).__name__} has no rule for initial weights; start from pretrained ones (model.init: pretrained)"
    )


@contextlib.contextmanager
def _seeded(seed: int, name: str, device: str) -> Iterator[None]:
    """Seeds random numbers by (seed, name), and has tensors filled with them by `device`. Restores the generators'
    states afterwards."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    cards = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=cards), DrawnBy(device) if cards else contextlib.nullcontext():
        for generator in [torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)]:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


class DrawnBy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a device draw the random numbers that tensors on the host are filled with, `most` at a time."""

    def __init__(self, device: str, most: int = DRAWN) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._most = device, most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fills = func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        if not fills or args[0].device.type != "cpu" or (kwargs or {}).get("generator") is not None:
            return func(*args, **(kwargs or {}))
        target, *given = args
        values = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
        for piece in values.split(self._most):
            drawn = torch.empty_like(piece, device=self._device)
            piece.copy_(func(drawn, *given, **(kwargs or {})))
        return target if target.is_contiguous() else target.copy_(values.view(target.shape))
