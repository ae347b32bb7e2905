"""Random numbers of layers (dropout, noise of routers) from a generator of the engine's own.

Torch's operations draw from one default generator of the process. Any other thread that draws from it while a step runs
(a loader that shuffles, a second engine) would change masks, and recomputation would find others than forward did. In
`KeyedRandom` every operation is given the engine's generator instead, seeded by what is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.models.random_draws import argument_names, draws

_aten = torch.ops.aten

_WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "Tensor": "Tensor_generator",
    "low_dtype": "low_generator_dtype",
}
"""By overload of an operation that takes no generator: the overload that does."""


class KeyedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, this thread's operations draw from the engine's generators.

    An operation that takes no generator (fused attention with dropout on a card) finds the default one freshly seeded
    from ours: another thread would have to draw between that and its launch. Costs some microseconds per operation, so
    it is entered for what draws only; see `drew`. Not for compiled code, which draws one seed per graph, as it begins,
    from the default generator (`seed` seeds that too).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._generators = {place.type: torch.Generator(place) for place in (torch.device("cpu"), device)}
        self.drew: bool = False
        """Whether anything was drawn since it was last set to False."""

    def seed(self, key: int) -> None:
        """Seeds our generators and, for what cannot be given them, the default one of the device."""
        for generator in self._generators.values():
            generator.manual_seed(key)
        self._seed_default(key)

    def _seed_default(self, key: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generators[_place(args, kwargs).type]
        if func is _aten.native_dropout.default:
            return _dropout(*args, generator=generator)
        if "generator" not in argument_names(func):
            other = getattr(func.overloadpacket, _WITH_GENERATOR.get(func._overloadname, ""), None)
            if other is None:
                self._seed_default(int(torch.randint(1 << 62, (), generator=self._generators["cpu"])))
                return func(*args, **kwargs)
            func = other
        return func(*args, **{**kwargs, "generator": generator})


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device that an operation draws on."""
    for value in args:
        if isinstance(value, Tensor):
            return torch.device(kwargs.get("device") or value.device)
    return torch.device(kwargs.get("device") or "cpu")


def _dropout(values: Tensor, p: float, *_: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`native_dropout`, which takes no generator: the values, and the mask of those that stay."""
    kept = torch.empty_like(values, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return (values * scale).masked_fill_(~kept, 0.0), kept
