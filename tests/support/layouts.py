"""A unit laid out by hand, and filled, where no core is wanted."""

import torch

from megatrain.engine.device_memory import Region
from megatrain.engine.template import Slice, UnitLayout
from megatrain.models.decoder import Decoder


def lay_out(decoder: Decoder, unit: int) -> UnitLayout:
    """Tensors one after another, as the core aligns them."""
    slices, element = [], 0
    for ref in decoder.units[unit].tensors:
        slices.append(Slice(element, element * 4, ref.shape, ref.dtype, ref.role == "trainable"))
        element += -(-torch.Size(ref.shape).numel() // 128) * 128
    return UnitLayout(element, element * 4, tuple(slices))


def fill(region: Region, layout: UnitLayout, image: int, layer: torch.nn.Module, names: dict[str, int]) -> None:
    for name, parameter in layer.named_parameters():
        cut = layout.slices[names[name]]
        region.view(image + cut.byte, cut.shape, cut.dtype).copy_(parameter.detach())
