"""Modules without storage of their own: their parameters are views of wherever a unit's image is.

`LayerTemplate` is one module for all layers of a structure. Binding it to an image is one assignment a parameter; the
views of each place are made once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.engine import expert_grads, float8
from megatrain.engine.compile import OneGraph
from megatrain.engine.device_memory import CastBuffer, Region
from megatrain.engine.weight_grads import WeightGradients
from megatrain.models.decoder import Decoder
from megatrain.models.expert_groups import Boundary, boundary_of
from megatrain.models.moe import RoutedLayer


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor is stored in its unit."""

    element: int
    """First element in the trainable plane (trainable tensors)."""
    byte: int
    """First byte in the unit's image."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class UnitLayout:
    """Where the tensors of one unit are stored, as laid out by the core."""

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


CAST_ALIGN = 256
"""Bytes to which everything in the cast buffer is aligned."""


def cast_bytes(decoder: Decoder) -> int:
    """Bytes of the cast buffer: for the unit with most of them, its weights that are computed in another type than
    they are stored in, in the type they are computed in. The head's include a tied weight of the embedding."""
    most = 0
    parameters = dict(decoder.model.named_parameters(remove_duplicate=False))
    for unit in decoder.units:
        refs = [ref for ref in unit.tensors if not ref.is_buffer]
        wanted = [parameters[ref.name].dtype for ref in refs]
        if unit.role == "head" and decoder.tied and decoder.head.weight is not None:
            refs.append(decoder.tensors[decoder.head.weight])
            wanted.append(decoder.dtype)
        sizes = (
            _aligned(torch.Size(ref.shape).numel() * dtype.itemsize)
            for ref, dtype in zip(refs, wanted, strict=True)
            if dtype != ref.dtype
        )
        most = max(most, sum(sizes))
    return most


def _aligned(size: int) -> int:
    return -(-size // CAST_ALIGN) * CAST_ALIGN


class BoundTensors:
    """Parameters and persistent buffers of a unit's module, as views of its image."""

    def __init__(
        self,
        places: Sequence[tuple[nn.Module, str] | None],
        layout: UnitLayout,
        region: Region,
        casts: CastBuffer | None,
    ) -> None:
        """`places` gives, per tensor of the unit, the module and attribute that hold it (None: nothing does). `casts`
        is None where every tensor is computed in the type it is stored in."""
        self._layout = layout
        self._region = region
        self._casts = casts
        self._views: dict[int, list[Tensor]] = {}
        self._bound: int | None = None
        self.tensors: list[Tensor] = []
        self._cast: dict[int, Tensor] = {}
        """By index of the tensor: where its copy in the type of its module is, for those stored in another one."""
        self._cast_end = 0
        for index, (place, cut) in enumerate(zip(places, layout.slices, strict=True)):
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
            if old.dtype != cut.dtype:
                view = self._cast[index] = self.reserve_cast(cut.shape, old.dtype)
            parameter = nn.Parameter(view, requires_grad=cut.trainable)
            module._parameters[name] = parameter
            self.tensors.append(parameter)

    def reserve_cast(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The place in the cast buffer of another copy of this unit's."""
        assert self._casts is not None
        view = self._casts.region.view(self._cast_end, shape, dtype)
        self._cast_end += _aligned(view.numel() * dtype.itemsize)
        return view

    @property
    def trainable(self) -> list[Tensor]:
        """What gradients are wanted of, in the unit's order."""
        return [t for t, cut in zip(self.tensors, self._layout.slices, strict=True) if cut.trainable]

    def bind(self, image: int, unit: int, more: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Makes every tensor a view of the image of the `unit`-th unit at byte `image` of region `weights`.

        A tensor stored in another type than its module computes with is a view of the cast buffer, into which it is
        copied, `more` (target, source) with it; the others cost an assignment per tensor.
        """
        views = self._views.get(image)
        if views is None:
            views = self._views[image] = [
                self._region.view(image + cut.byte, cut.shape, cut.dtype) for cut in self._layout.slices
            ]
        if self._casts is not None and (self._cast or more):
            self._casts.fill(unit, [*((target, views[index]) for index, target in self._cast.items()), *more])
        if image == self._bound:
            return
        self._bound = None  # until all are: what is cut off here must not pass for bound
        for index, (tensor, view) in enumerate(zip(self.tensors, views, strict=True)):
            if index not in self._cast:
                tensor.data = view
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


def has_dropout(module: nn.Module) -> bool:
    """Whether some part of a module draws random numbers in training by its kind, though it may not run every time."""
    return any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in module.modules())


def move_shared_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves the buffers that no checkpoint holds (rotary frequencies, scales) to the device, once a run."""
    for child in module.modules():
        for name in child._non_persistent_buffers_set:
            buffer = child._buffers.get(name)
            if buffer is not None:
                child._buffers[name] = buffer.to(device)


class LayerTemplate:
    """One module for every layer, or half of one, of a structure whose tensors are laid out alike."""

    def __init__(
        self,
        decoder: Decoder,
        number: int,  # of a unit of the structure
        layout: UnitLayout,
        region: Region,
        casts: CastBuffer | None = None,
        compiled: bool = False,
        least: bool = True,  # whether it keeps as little as it can, where it is compiled
    ) -> None:
        self._units = decoder.units
        unit = decoder.units[number]
        self.module: nn.Module = decoder.module_of(unit)
        self.bound: BoundTensors = BoundTensors(
            places_of(self.module, decoder.local_names(number)), layout, region, casts
        )
        float8.convert(self.module, decoder.matmul)
        self.layout = layout
        self.compiled = compiled
        self.draws: bool | None = None
        """Whether it draws random numbers in training; None before its first call."""
        self.parameters: list[Tensor] = self.bound.trainable
        self.weight_grads: WeightGradients = WeightGradients(self.module, self.parameters)
        expert_grads.convert(self.module, self.weight_grads)
        spread = decoder.experts_of(unit) if unit.part is not None else None
        self.num_experts: int = spread.count if spread is not None else 0
        """Experts of a layer whose experts are spread over several units."""
        self.boundary: Boundary | None = boundary_of(self.module) if spread is not None and not unit.experts else None
        """What stands in their place in the unit that is computed before and after them."""
        self.experts: expert_grads.SummedExperts | None = None
        """The experts of a unit that is a group of them."""
        if spread is not None and unit.experts is not None:
            self.experts = expert_grads.as_group(self.module.get_submodule(spread.path))
        move_shared_buffers(self.module, region.device)
        self.tried: bool = unit.layer not in decoder.untried
        """Whether it is known that the forward changes no state of the module."""
        self._index = [
            (self.module.get_submodule(path), name)
            for path, name in sorted(decoder.index_names)
            if _has_attribute(self.module, path, name)
        ]
        self._tuple = decoder.recorder.tuple_output
        name = f"{type(self.module).__name__} ({unit.name})"
        self._run = OneGraph(self.module, name, least=least) if compiled else self.module
        gates = decoder.gates_of(unit)
        self._routed = RoutedLayer(self.module, decoder.router, gates) if decoder.router is not None and gates else None
        self._run_routed = (
            OneGraph(self._routed, name, least=least) if compiled and self._routed is not None else self._routed
        )

    def bind(self, image: int, number: int) -> int:
        """Makes this the `number`-th unit, whose image is at byte `image` of region `weights`. Returns the number of
        its layer, from 0."""
        layer = self._units[number].layer
        assert layer is not None
        self.bound.bind(image, number)
        for module, name in self._index:
            setattr(module, name, layer)
        return layer

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
