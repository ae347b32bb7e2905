"""The templates of a plan: modules without storage of their own, and views, over the memory of a core."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

from megatrain import _core
from megatrain.engine.cuts import Cut
from megatrain.engine.device_memory import CastBuffer, Region
from megatrain.engine.embed_head import EmbedTemplate, HeadTemplate
from megatrain.engine.keyed_random import KeyedRandom
from megatrain.engine.layer_graphs import LayerGraphs
from megatrain.engine.profile import staged_bytes
from megatrain.engine.step import StepTemplates
from megatrain.engine.template import GradientViews, LayerTemplate, UnitLayout, cast_bytes, unit_layouts

_REGIONS: tuple[Literal["weights", "grads", "accumulators", "stage"], ...] = (
    "weights",
    "grads",
    "accumulators",
    "stage",
)


def step_templates(
    core: _core.Engine,
    request: dict[str, Any],  # that the plan was made for
    plan: dict[str, Any],
    cut: Cut,
    device: torch.device,
    grad_dtype: torch.dtype,  # in which gradients are sent to the host
    compiled: bool,  # whether layers are
) -> StepTemplates:
    """Templates and views over the core's regions."""
    decoder = cut.decoder
    layouts = unit_layouts(decoder, json.loads(core.layout()))

    def region(name: Literal["weights", "grads", "accumulators", "stage"]) -> Region | None:
        buffer = core.region(name)
        return Region(from_dlpack(buffer)) if len(buffer) else None

    places, grads, sums, stage = (region(n) for n in _REGIONS)
    assert places is not None
    size = cast_bytes(decoder)
    casts = CastBuffer(size, places.device) if size else None
    captured = captured_units(plan, cut.tiled)
    return StepTemplates(
        decoder=decoder,
        layouts=layouts,
        weights=places,
        casts=casts,
        stage=stage,
        staged_bytes=staged_bytes(request, plan),
        tiles=cut.tiled,
        embed=EmbedTemplate(decoder, layouts[0], places, casts),
        layers=_layer_templates(cut, layouts, places, casts, compiled),
        head=HeadTemplate(decoder, layouts[-1], places, layouts[0], casts),
        grads=[GradientViews(grads, layout, grad_dtype) for layout in layouts],
        sums=[GradientViews(sums, layout, torch.float32) for layout in layouts],
        random=KeyedRandom(device),
        group=max(int(plan["group"]), int(plan["large_group"])),
        keeps=any(unit["activation"] == "keep" for unit in plan["units"][1:-1]),
        torch_bytes=torch_bytes(plan),
        heap=None,
        graphs=LayerGraphs(captured) if captured else None,
        routed=_routed_units(request),
    )


def _layer_templates(
    cut: Cut, layouts: list[UnitLayout], weights: Region, casts: CastBuffer | None, compiled: bool
) -> dict[int, LayerTemplate]:
    """The template of each layer or half of one. A structure has several where its layers' frozen tensors are
    stored in several types."""
    made: dict[tuple[Any, ...], LayerTemplate] = {}
    templates: dict[int, LayerTemplate] = {}
    for number, unit in enumerate(cut.decoder.units):
        if unit.layer is None:
            continue
        if unit.weights_of is not None:
            templates[number] = templates[unit.weights_of]
            continue
        key = unit.structure, unit.half, unit.part, layouts[number].slices
        if key not in made:
            # the routes of a micro-batch are known to the host where experts are spread over units
            one = compiled and unit.part is None
            made[key] = LayerTemplate(cut.decoder, number, layouts[number], weights, casts, one, cut.least)
        templates[number] = made[key]
    return templates


def _routed_units(request: Mapping[str, Any]) -> dict[int, list[int]]:
    """By unit that routes: the units of which it decides what is sent."""
    routed: dict[int, list[int]] = {}
    for number, unit in enumerate(request["units"]):
        if "routed" in unit:
            routed.setdefault(unit["routed"]["by"], []).append(number)
    return routed


def captured_units(plan: dict[str, Any], tiled: Mapping[int, int]) -> frozenset[int]:
    """Units that are captured as CUDA graphs (`UnitPlan::can_be_captured` in the core); those in tiles are not."""
    return frozenset(
        number
        for number, unit in enumerate(plan["units"])
        if plan["graphs"] and 0 < number < len(plan["units"]) - 1 and number not in tiled
        if unit["state"] == "device" and unit["activation"] != "offload" and unit["input"] == "device"
        if unit.get("large_activation") is None
    )


def torch_bytes(plan: Mapping[str, Any]) -> int:
    """What a plan allows torch to allocate."""
    return sum(int(item["bytes"]) for item in plan["items"] if item["what"].endswith("(torch)"))
