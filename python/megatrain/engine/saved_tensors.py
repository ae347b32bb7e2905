"""What autograd keeps between a layer's forward and its backward, and where: kept, offloaded or recomputed.

All three are one pair of hooks on saved tensors. Packing turns a saved tensor into a handle: a weight becomes its place
in the unit's image, since the slot will hold another unit by then; the layer's input becomes a reference to wherever
the input is; anything else stays as it is, goes to the stage, or is forgotten and made again. Recomputation follows
torch's non-reentrant checkpoint (docs.pytorch.org/docs/stable/checkpoint.html), which stops early in the same way.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.engine.device_memory import Region
from megatrain.engine.last_matmul import outputs_unwanted

log: logging.Logger = logging.getLogger(__name__)

STAGE_ALIGN = 256
"""Bytes to which everything on the stage is aligned."""
_SMALL_BYTES = 4096
"""Saved tensors below this are not worth a copy to the host."""


class _Stop(Exception):
    """Ends a recomputation at the last tensor that backward needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    cast: bool  # in the cast buffer, else in the unit's image
    byte: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    tensor: Tensor
    version: int


def _kept(tensor: Tensor) -> _Kept:
    """Autograd passes a function's own output with the function: held like that by the function, it would be a cycle
    that no collector sees, and a graph whose backward never runs would live for ever."""
    return _Kept(tensor.detach(), tensor._version)


@dataclasses.dataclass(frozen=True, slots=True)
class _Staged:
    byte: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class _Recomputed:
    index: int


class CheckpointedCall:
    """One layer with one micro-batch, from its forward until its backward has ended.

    Holds neither the layer's input nor its output when they are elsewhere: the graph is entered and left by edges.
    """

    __slots__ = (
        "_aux",
        "_casts",
        "_count",
        "_image",
        "_input",
        "_input_storage",
        "_layer",
        "_leaf",
        "_on_stage",
        "_out",
        "_region",
        "_rerun",
        "_reseed",
        "_shared",
        "_stage",
        "_stage_at",
        "_stage_bytes",
        "_staged",
        "_staged_input",
        "_storages",
        "aux",
    )

    def __init__(
        self,
        # the unit with this micro-batch's arguments, its weights bound; it may return a second tensor beside its output
        layer: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
        region: Region | None,  # `weights`; None where nothing will be unpacked
        storages: frozenset[int],  # those that hold weights
        image: int,  # byte of the unit's image in the region
        reseed: Callable[[], None],  # puts the random state where this call's forward found it
        casts: Region | None = None,  # copies of weights that are computed in another type than stored (`CastBuffer`)
    ) -> None:
        self._layer = layer
        self._casts = casts
        self._region = region
        self._storages = storages
        self._image = image
        self._reseed = reseed
        self.aux: Tensor | None = None
        """The second tensor that the layer returned, detached."""
        self._out: GradientEdge | None = None
        self._aux: GradientEdge | None = None
        self._count = 0
        self._rerun: list[Tensor | None] | None = None
        self._stage: Region | None = None
        self._stage_at: int | None = None
        self._stage_bytes = 0
        self._staged = 0
        self._staged_input: _Staged | None = None
        self._on_stage: dict[tuple[int, int, int], tuple[StorageWeakRef, _Staged, int]] = {}
        self._shared: frozenset[int] = frozenset()

    @property
    def staged_bytes(self) -> int:
        """Bytes put on the stage so far."""
        return self._staged

    def use_stage(self, stage: Region | None, at: int, capacity: int, shared: frozenset[int]) -> None:
        """Saved tensors (offloaded) and, where the input goes to the host, the input are copied to `stage` from byte
        `at` on. `capacity` is how many bytes from there the core copies to the host and back for this unit: what is
        beyond them is lost. `shared` are storages that stay on the device anyway (masks, rotary tables). With no
        stage, only the bytes are counted."""
        self._stage, self._stage_at, self._stage_bytes, self._shared = stage, at, capacity, shared

    def forward(self, hidden: Tensor, activation: str, input_on_host: bool) -> Tensor:
        """The layer's output (detached) for `hidden` (batch, seq, width), with what its backward needs."""
        leaf = hidden.detach().requires_grad_()
        self._leaf = leaf
        self._input = leaf.detach()
        self._input_storage = leaf.untyped_storage()._cdata
        if input_on_host:
            self._stage_input()
        pack = {"keep": self._keep, "offload": self._offload, "recompute": self._forget}[activation]
        self._reseed()
        with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack):
            result = self._layer(leaf)
        output, aux = result if isinstance(result, tuple) else (result, None)
        self._out = get_gradient_edge(output)
        if aux is not None:
            self.aux = aux.detach()
            self._aux = get_gradient_edge(aux) if aux.requires_grad else None
        self._on_stage.clear()
        if self._input_is_away:
            # the graph's leaf must not hold the memory that has gone to the host
            leaf.data = leaf.new_empty(0)
            self._input = leaf.new_empty(0)
        return output.detach()

    def backward(
        self,
        grad: Tensor,  # gradient of the output, (batch, seq, width)
        parameters: list[Tensor],  # what else gradients are wanted of
        image: int,  # where the unit's image is now
        stage_at: int | None,  # where on the stage its activations are now
        aux: Tensor | None = None,  # gradient of the layer's second tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of each parameter; None where there is none."""
        self._fetch_input(image, stage_at)
        assert self._out is not None
        outputs, grads = [self._out], [grad]
        if aux is not None and self._aux is not None:
            outputs, grads = [*outputs, self._aux], [*grads, aux]
        try:
            return torch.autograd.grad(outputs, (self._leaf, *parameters), grads, allow_unused=True)
        finally:
            del outputs
            self.release()

    def release(self) -> None:
        """Lets go of the graph, and so of all that it has saved."""
        self._out = self._aux = self._rerun = None

    def _stage_input(self) -> None:
        """Copies the input to the stage."""
        staged = self._copy_to_stage(self._input)
        self._staged_input = staged if isinstance(staged, _Staged) else None

    @property
    def _input_is_away(self) -> bool:
        """Whether the input is on the stage, so that it need not be kept."""
        return self._staged_input is not None and self._stage is not None

    def _fetch_input(self, image: int, stage_at: int | None) -> None:
        """Notes where the unit's image and its activations are now, and takes the input from the stage if it is
        there."""
        self._image, self._stage_at = image, stage_at
        if self._staged_input is not None and self._stage is not None:
            self._input = self._from_stage(self._staged_input)
            self._input_storage = self._stage.storage

    # -------------------------------------------------------------------------------------------- packing

    def _common(self, tensor: Tensor, storage: int) -> _Weight | _Input | None:
        cast = self._casts is not None and storage == self._casts.storage
        if cast or storage in self._storages:
            byte = int(tensor.storage_offset()) * tensor.element_size() - (0 if cast else self._image)
            return _Weight(cast, byte, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if storage == self._input_storage and tensor.dtype == self._input.dtype:
            offset = int(tensor.storage_offset()) - int(self._input.storage_offset())
            if offset >= 0 and offset + _extent(tensor) <= _extent(self._input):
                return _Input(offset, tuple(tensor.shape), tensor.stride())
        return None

    def _keep(self, tensor: Tensor) -> Any:
        return self._common(tensor, tensor.untyped_storage()._cdata) or _kept(tensor)

    def _offload(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        common = self._common(tensor, storage)
        if common is not None:
            return common
        small = tensor.numel() * tensor.element_size() < _SMALL_BYTES
        if small or storage in self._shared or tensor.device != self._leaf.device:
            return _kept(tensor)
        return self._copy_to_stage(tensor)

    def _forget(self, tensor: Tensor) -> Any:
        common = self._common(tensor, tensor.untyped_storage()._cdata)
        if common is not None:
            return common
        self._count += 1
        return _Recomputed(self._count - 1)

    def _copy_to_stage(self, tensor: Tensor) -> "_Staged | _Kept":
        """Copies a tensor to the stage, once however many views of the same elements are saved; of one with gaps (half
        of a fused projection) all that it is a view of. What no longer fits, since a kernel saves more than was
        measured, stays on the device."""
        storage = tensor.untyped_storage()
        if not is_dense(tensor):
            # a view with gaps is fetched with the same gaps: kernels round by strides, so a gapless copy would show
            whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            staged = self._copy_to_stage(whole)
            if isinstance(staged, _Kept):
                return _kept(tensor)
            byte = staged.byte + int(tensor.storage_offset()) * tensor.element_size()
            return _Staged(byte, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (storage._cdata, int(tensor.storage_offset()), tensor.numel())
        shape, stride = tuple(tensor.shape), tensor.stride()
        if key in self._on_stage:
            alive, staged, version = self._on_stage[key]
            expired = alive.expired()  # type: ignore[no-untyped-call]
            if not expired and version == tensor._version and staged.dtype == tensor.dtype:
                return _Staged(staged.byte, shape, stride, tensor.dtype)
        staged = _Staged(self._staged, shape, stride, tensor.dtype)
        end = self._staged + tensor.numel() * tensor.element_size()
        if self._stage is not None:
            if end > self._stage_bytes:
                _warn_overflow(self._stage_bytes)
                return _kept(tensor)
            assert self._stage_at is not None
            target = self._stage.view(self._stage_at + staged.byte, shape, tensor.dtype, stride)
            target.copy_(tensor)
        self._staged = -(-end // STAGE_ALIGN) * STAGE_ALIGN
        alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._on_stage[key] = (alive, staged, tensor._version)
        return staged

    # ------------------------------------------------------------------------------------------ unpacking

    def _unpack(self, handle: Any) -> Tensor:
        kind = type(handle)
        if kind is _Weight:
            region, start = (self._casts, 0) if handle.cast else (self._region, self._image)
            assert region is not None
            return region.view(start + handle.byte, handle.shape, handle.dtype, handle.stride)
        if kind is _Kept:
            if handle.tensor._version != handle.version:
                raise RuntimeError(
                    f"a tensor {tuple(handle.tensor.shape)} that a layer's backward needs was changed in place after "
                    f"it was saved (version {handle.tensor._version}, expected {handle.version})"
                )
            return cast("Tensor", handle.tensor)
        if kind is _Input:
            base = self._input
            return base.as_strided(handle.shape, handle.stride, int(base.storage_offset()) + handle.offset)
        if kind is _Staged:
            return self._from_stage(handle)
        return self._recomputed(handle.index)

    def _recomputed(self, index: int) -> Tensor:
        """The tensor that forward saved as its `index`-th. It is let go of here, since almost every backward asks once
        for it; one that asks again, as a function that reads `ctx.saved_tensors` twice, takes another recomputation."""
        rerun = self._rerun
        if rerun is None or rerun[index] is None:
            rerun = self._rerun = self._recompute()
        tensor, rerun[index] = rerun[index], None
        return cast("Tensor", tensor)

    def _from_stage(self, handle: _Staged) -> Tensor:
        assert self._stage is not None
        assert self._stage_at is not None
        return self._stage.view(self._stage_at + handle.byte, handle.shape, handle.dtype, handle.stride)

    def _recompute(self) -> list[Tensor | None]:
        """Runs the layer again up to the last tensor that its backward needs (its last matmul is not repeated)."""
        made: list[Tensor | None] = []

        def collect(tensor: Tensor) -> None:
            if self._common(tensor, tensor.untyped_storage()._cdata) is None:
                made.append(tensor)
                if len(made) == self._count:
                    raise _Stop

        leaf = self._input.detach().requires_grad_()
        self._reseed()
        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, _never), outputs_unwanted():
                self._layer(leaf)
        except _Stop:
            pass
        if len(made) != self._count:
            raise RuntimeError(f"a layer saved {self._count} tensors in forward and {len(made)} when recomputed")
        return made


@functools.cache
def _warn_overflow(capacity: int) -> None:
    log.warning(
        "a layer saves more activations than the %d bytes planned for one micro-batch of it on the host; the rest "
        "stays on the device",
        capacity,
    )


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation is never walked")


def _extent(tensor: Tensor) -> int:
    """Elements of storage from a tensor's first one to its last one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements are one gapless stretch of its storage, in whatever order."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != step:
            return False
        step *= size
    return True
