"""Modules without storage of their own: their parameters are views of wherever a unit's image is.

`LayerTemplate` is one module for all layers of a structure. Binding it to an image is one assignment a parameter; the
views of each place are made once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.engine.compile import OneGraph
from megatrain.engine.device_memory import Region
from megatrain.engine.weight_grads import WeightGradients
from megatrain.models.decoder import Decoder
from megatrain.models.moe import RoutedLayer, gates_of
from megatrain.models.recorder import copy_without


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor lies in its unit."""

    element: int
    """First element in the trainable plane (trainable tensors)."""
    byte: int
    """First byte in the unit's image."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class UnitLayout:
    """Where everything of one unit lies, as the core has laid it out."""

    elements: int
    """Elements of the trainable plane, padding included."""
    image_bytes: int
    slices: tuple[Slice, ...]


def unit_layouts(decoder: Decoder, core_layout: list[dict[str, Any]]) -> list[UnitLayout]:
    """The core's layout (the JSON of `Engine.layout`) with torch's types."""
    layouts = []
    for unit, laid in zip(decoder.units, core_layout, strict=True):
        slices = tuple(
            Slice(where["element"], where["byte"], ref.shape, ref.dtype, ref.role == "trainable")
            for ref, where in zip(unit.tensors, laid["tensors"], strict=True)
        )
        layouts.append(UnitLayout(laid["elements"], laid["image_bytes"], slices))
    return layouts


class GradientViews:
    """Views of one unit layout in a region of gradients, each place's made once."""

    def __init__(self, region: Region | None, layout: UnitLayout, dtype: torch.dtype) -> None:
        self._region = region
        self._layout = layout
        self.dtype = dtype
        self._made: dict[int, list[Tensor | None]] = {}
        self._flat: dict[int, Tensor] = {}

    def at(self, byte: int) -> list[Tensor | None]:
        """A view for each tensor of the unit, None for a frozen one, of the plane that starts at `byte`."""
        views = self._made.get(byte)
        if views is None:
            assert self._region is not None
            size = self.dtype.itemsize
            views = self._made[byte] = [
                self._region.view(byte + s.element * size, s.shape, self.dtype) if s.trainable else None
                for s in self._layout.slices
            ]
        return views

    def flat(self, byte: int) -> Tensor:
        """The whole plane that starts at `byte`, padding included."""
        plane = self._flat.get(byte)
        if plane is None:
            assert self._region is not None
            plane = self._flat[byte] = self._region.view(byte, (self._layout.elements,), self.dtype)
        return plane


class BoundTensors:
    """Parameters and persistent buffers of a unit's module, as views of its image."""

    def __init__(self, places: Sequence[tuple[nn.Module, str] | None], layout: UnitLayout, region: Region) -> None:
        """`places` gives, a tensor of the unit each, the module and attribute that hold it (None: nothing does)."""
        self._layout = layout
        self._region = region
        self._views: dict[int, list[Tensor]] = {}
        self._bound: int | None = None
        self.tensors: list[Tensor] = []
        self._casts = False
        for place, cut in zip(places, layout.slices, strict=True):
            view = region.view(cut.byte, cut.shape, cut.dtype)
            if place is None:
                self.tensors.append(view)
                continue
            module, name = place
            old = module._parameters.get(name)
            if old is None:
                module._buffers[name] = view
                self.tensors.append(view)
                continue
            wanted = old.dtype
            self._casts |= wanted != cut.dtype
            parameter = nn.Parameter(view.to(wanted), requires_grad=cut.trainable)
            module._parameters[name] = parameter
            self.tensors.append(parameter)
        self._wanted = [t.dtype for t in self.tensors]

    @property
    def trainable(self) -> list[Tensor]:
        """What gradients are wanted of, in the unit's order."""
        return [t for t, cut in zip(self.tensors, self._layout.slices, strict=True) if cut.trainable]

    def bind(self, image: int) -> None:
        """Makes every tensor a view of the image at byte `image` of region `weights`.

        A tensor stored in another type than its module computes with is converted, so it is a copy; the others cost
        an assignment each.
        """
        if image == self._bound and not self._casts:
            return
        views = self._views.get(image)
        if views is None:
            views = self._views[image] = [
                self._region.view(image + cut.byte, cut.shape, cut.dtype) for cut in self._layout.slices
            ]
        self._bound = None  # until all are: what is cut off here must not pass for bound
        for tensor, view, dtype in zip(self.tensors, views, self._wanted, strict=True):
            tensor.data = view if view.dtype == dtype else view.to(dtype)
        self._bound = image


def places_of(module: nn.Module, names: dict[str, int]) -> list[tuple[nn.Module, str] | None]:
    """Module and attribute of each tensor of a unit, by its local name."""
    places: list[tuple[nn.Module, str] | None] = [None] * len(names)
    for name, index in names.items():
        owner, _, leaf = name.rpartition(".")
        try:
            places[index] = (module.get_submodule(owner), leaf)
        except AttributeError:
            continue
    return places


def move_shared_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves the buffers that no checkpoint holds (rotary frequencies, scales) to the device, once a run."""
    for child in module.modules():
        for name in child._non_persistent_buffers_set:
            buffer = child._buffers.get(name)
            if buffer is not None:
                child._buffers[name] = buffer.to(device)


class LayerTemplate:
    """One module for every layer of a structure."""

    def __init__(
        self, decoder: Decoder, structure: int, layout: UnitLayout, region: Region, compiled: bool = False
    ) -> None:
        first = decoder.structures[structure]
        self.module = copy_without(decoder.layers[first])
        self.bound = BoundTensors(places_of(self.module, decoder.local_names(first + 1)), layout, region)
        self.layout = layout
        self.parameters = self.bound.trainable
        self.weight_grads = WeightGradients(self.module, self.parameters)
        move_shared_buffers(self.module, region.device)
        self._index = [
            (self.module.get_submodule(path), name)
            for path, name in sorted(decoder.index_names)
            if _has_attribute(self.module, path, name)
        ]
        self._tuple = decoder.recorder.tuple_output
        name = f"{type(self.module).__name__} ({decoder.units[first + 1].name})"
        self._run = OneGraph(self.module, name) if compiled else self.module
        gates = gates_of(decoder, first) if decoder.router is not None else []
        self._routed = RoutedLayer(self.module, decoder.router, gates) if decoder.router is not None and gates else None
        self._run_routed = OneGraph(self._routed, name) if compiled and self._routed is not None else self._routed

    def bind(self, image: int, layer: int) -> None:
        """Makes this the `layer`-th layer, whose image is at byte `image` of region `weights`."""
        self.bound.bind(image)
        for module, name in self._index:
            setattr(module, name, layer)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool = True) -> "LayerCall":
        """The layer as a function of its input alone; uncompiled on request, for shapes of which there are many."""
        return LayerCall(self._run if compiled else self.module, args, kwargs, self._tuple)

    def training_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        counted: Tensor | None,  # (tokens, 1) fp32, 0 for padding
        *,
        compiled: bool = True,
    ) -> "LayerCall | RoutedCall":
        """The same, with the sums of the layer's routers where an auxiliary loss is taken of them."""
        if self._routed is None:
            return self.call(args, kwargs, compiled=compiled)
        module = self._run_routed if compiled else self._routed
        return RoutedCall(module, counted, args, kwargs, self._tuple)

    def train(self, training: bool) -> None:
        """Switches dropout on or off."""
        if self.module.training != training:
            self.module.train(training)


class LayerCall:
    """A layer with a micro-batch's arguments."""

    __slots__ = ("_args", "_kwargs", "_module", "_tuple")

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tuple_output: bool) -> None:
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._tuple = tuple_output

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states (batch, seq, width) in and out."""
        output = self._module(hidden, *self._args, **self._kwargs)
        return cast("Tensor", output[0] if self._tuple else output)


class RoutedCall:
    """A layer with routers, with a micro-batch's arguments."""

    __slots__ = ("_args", "_counted", "_kwargs", "_module", "_tuple")

    def __init__(
        self, module: Any, counted: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any], tuple_output: bool
    ) -> None:
        self._module = module
        self._counted = counted
        self._args = args
        self._kwargs = kwargs
        self._tuple = tuple_output

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (batch, seq, width) in and out, and the (2, E) sums of the layer's routers."""
        output, sums = self._module(hidden, self._counted, *self._args, **self._kwargs)
        return cast("Tensor", output[0] if self._tuple else output), cast("Tensor", sums)


def _has_attribute(module: nn.Module, path: str, name: str) -> bool:
    try:
        return name in module.get_submodule(path).__dict__
    except AttributeError:
        return False
