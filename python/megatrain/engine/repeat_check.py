"""A step's gradients computed twice and compared bit for bit: finds races, and memory that does not keep its contents.

Every plan computes the same bits, so a pass with nothing beside it (the core's `synchronous`) must find what the
overlapped one found. The first pass's gradients are kept as one checksum and one norm per tensor.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatrain.models.decoder import Decoder
from megatrain.weights.planes import read_plane

if TYPE_CHECKING:
    from megatrain import _core
    from megatrain.engine.step import Pass

_ELEMENTS = 1 << 22
"""Of a gradient that are read at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassRecord:
    """What one gradient pass found."""

    losses: tuple[float, ...]
    """Sum of losses by micro-batch."""
    aux_loss: float | None
    gradients: dict[str, tuple[bytes, float]]
    """By trained tensor: a checksum of its gradient's bits, and its norm."""


def record(decoder: Decoder, core: "_core.Engine", run: "Pass", check: Callable[[], None]) -> PassRecord:
    """Reads what a pass has left, before its update. `check` may raise between two reads."""
    gradients: dict[str, tuple[bytes, float]] = {}
    for name, ref in decoder.tensors.items():
        if ref.role != "trainable":
            continue
        checksum, squares = hashlib.blake2b(digest_size=16), 0.0
        size = torch.Size(ref.shape).numel()
        for start in range(0, size, _ELEMENTS):
            check()
            part = torch.empty(min(_ELEMENTS, size - start))
            read_plane(core, ref, "gradient", part, start)
            checksum.update(part.numpy().data)
            squares += float(part.double().square().sum())
        gradients[name] = checksum.digest(), math.sqrt(squares)
    losses = tuple(float(run.losses[number]) for number in sorted(run.losses))
    return PassRecord(losses, None if run.aux_loss is None else float(run.aux_loss), gradients)


def difference(decoder: Decoder, first: PassRecord, second: PassRecord) -> str:
    """What differs between two records of one step, in words: losses, else the unit, tensor and norms of the first
    gradient that differs in model order, and how many others do. Empty where nothing does."""
    for index, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        if not _same(one, other):
            return f"the loss of micro-batch {index} was {one!r} in the first pass and {other!r} in the second"
    differing = [name for name, (bits, _) in first.gradients.items() if second.gradients[name][0] != bits]
    if differing:
        name = differing[0]
        norms = first.gradients[name][1], second.gradients[name][1]
        others = f", and so do {len(differing) - 1} other tensors" if len(differing) > 1 else ""
        unit = decoder.units[decoder.tensors[name].unit].name
        return (
            f"the gradient of {name} (unit {unit}) differs: its norm was {norms[0]!r} in the first pass and "
            f"{norms[1]!r} in the second{others}"
        )
    if not _same(first.aux_loss, second.aux_loss):
        return f"the router's auxiliary loss was {first.aux_loss!r} in the first pass and {second.aux_loss!r} then"
    return ""


def _same(one: float | None, other: float | None) -> bool:
    """Whether two values are equal, NaN included."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))
