"""Finds out how a model is put together, by running its own code on stubs, and cuts it into units.

Nothing is decided by the name of an architecture. Each step takes the results of earlier ones and returns its own;
`inspect_model` puts them into a frozen `Decoder`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from megatrain.config.constraints import check_matmul
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.halves import Split, find_splits
from megatrain.models.layer_check import try_layers
from megatrain.models.lm_head import HeadKind, probe_head
from megatrain.models.moe import find_router_loss
from megatrain.models.own_loss import find_other_loss
from megatrain.models.packing import use_varlen_attention
from megatrain.models.per_document import layers_mixing_documents
from megatrain.models.recorder import Recorder
from megatrain.models.structure import index_attributes, structures
from megatrain.models.support import ModelParts, find_parts
from megatrain.models.taken_weights import TakenWeights
from megatrain.models.trace import Probe, probe
from megatrain.models.types import CORE_DTYPES, PRECISIONS, TensorRef, Unit
from megatrain.models.vision import VisionSpec, stub_out, trace_vision
from megatrain.names import format_names, match, patterns
from megatrain.weights.hf_layout import library, published

log: logging.Logger = logging.getLogger(__name__)

Place = Literal["embed", "head"] | int
"""Where a tensor belongs: embed, head, or the index of a layer."""


def inspect_model(
    model: nn.Module,
    *,
    freeze: Sequence[str] = (),
    precision: str = "fp32",
    matmul: str = "bf16",
    frozen_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Decoder:
    """The map of a model that follows Hugging Face's layout of a causal language model: a base with one list of layers,
    and a head. Its parameters may be on meta or real; real ones are in `values` of the result until the engine has
    taken them.

    `freeze` are patterns of names (`*`, `?`, `[…]`) that are not trained; `precision` is bf16 or fp32, `matmul` bf16 or
    fp8 (with bf16 precision). `frozen_dtypes` gives the exact dtype of frozen tensors by name where it differs from the
    model's (a checkpoint in another precision).

    Raises ConfigError, with the reason, for a model that cannot be streamed exactly; it is then left as it was.
    """
    check_matmul(matmul, precision)
    parts = find_parts(model, PRECISIONS[precision])
    taken = TakenWeights(model)
    try:
        taken.take(parts.dtype)
        return _inspect(parts, taken, precision, matmul, patterns("freeze", freeze), frozen_dtypes or {})
    except BaseException:
        taken.give_back()
        raise


def _inspect(
    parts: ModelParts,
    taken: TakenWeights,
    precision: str,
    matmul: str,
    freeze: tuple[str, ...],
    frozen_dtypes: Mapping[str, torch.dtype],
) -> Decoder:
    recorder, found = _probe(parts)
    vision = trace_vision(recorder, parts.vision, parts.config, len(found.tables)) if parts.vision else None
    head = probe_head(parts)
    router, gates = find_router_loss(parts)
    places = _Places(parts, recorder, found, taken.aliases)
    tied = head.weight is not None and places.of(head.weight) == "embed"
    if not head.plain and any(places.of(name) == "embed" for name in head.used):
        raise ConfigError(f"{type(parts.model).__name__} ties its embedding to a head that is not a plain matmul")
    trials = try_layers(parts, recorder, gates)
    untrained = [
        *trials.untrained,
        *_untrained_outside_layers(parts, recorder, found, vision, head, places),
    ]
    _freeze(parts.model, freeze, untrained, taken.aliases)
    index_names = index_attributes(parts.layers)
    structure_of, firsts = structures(parts.layers, index_names)
    splits = find_splits(parts, recorder, firsts)
    of_layers = [splits[structure] for structure in structure_of]
    units = _cut(parts, places, taken, structure_of, of_layers, head, _by_own_names(parts.model, frozen_dtypes))
    packing = use_varlen_attention(parts, recorder, firsts)
    return Decoder.from_fields(
        model=parts.model,
        config=parts.config,
        precision=precision,
        matmul=matmul,
        base_name=parts.base_name,
        base=parts.base,
        layers_name=parts.layers_name,
        layers=parts.layers,
        vision_parts=parts.vision,
        taken=taken,
        recorder=recorder,
        probe=found,
        vision_spec=vision,
        head=head,
        other_loss=find_other_loss(parts, head),
        tied=tied,
        router=router,
        gates=gates,
        untried=trials.untried,
        index_names=index_names,
        structure_of=structure_of,
        structures=firsts,
        splits=splits,
        experts=(),
        units=units,
        tensors=_in_model_order(parts.model, units),
        tables=_tables(parts, recorder, found, units[0]),
        packing=packing,
        mixing_layers=_mixing_layers(parts, recorder),
    )


def _probe(parts: ModelParts) -> tuple[Recorder, Probe]:
    """Runs the base on stubs: with layers that return a tensor, then with layers that return a tuple."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    failure: Exception | None = None
    for tuple_output in (False, True):
        recorder = Recorder(parts.base, parts.layers_name, parts.dtype, tuple_output)
        stub_out(recorder, parts.vision)
        try:
            found = probe(recorder, ids)
        except (ConfigError, RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            failure = failure or error
            continue
        only_tokens = all(looked_up is None for looked_up in found.record.embedding_ids)
        recorder.side = found.side
        recorder.places_by_layer = only_tokens and "position_ids" not in recorder.accepts
        return recorder, found
    if isinstance(failure, ConfigError):
        raise failure
    raise ConfigError(f"{type(parts.base).__name__} could not be run on stubs: {failure}") from failure


class _Places:
    """Which unit each tensor belongs to."""

    def __init__(self, parts: ModelParts, recorder: Recorder, found: Probe, aliases: Mapping[str, str]) -> None:
        self._parts, self._recorder, self._probe, self._aliases = parts, recorder, found, aliases

    def of(self, name: str) -> Place:
        """The place of a tensor by its full name. Raises ConfigError for one used on both sides of the layers."""
        name = self._aliases.get(name, name)
        parts = self._parts
        if not name.startswith(parts.prefix):
            return "head"
        local = name[len(parts.prefix) :]
        if local.startswith(f"{parts.layers_name}."):
            return int(local[len(parts.layers_name) + 1 :].split(".", 1)[0])
        if parts.is_vision(name):
            return "embed"
        owner, _, leaf = local.rpartition(".")
        module = self._recorder.base.get_submodule(owner)
        tensor = module._parameters.get(leaf, module._buffers.get(leaf))
        before, after = id(tensor) in self._probe.before, id(tensor) in self._probe.after
        if before and after:
            raise ConfigError(f"{name} is used both before the first layer and after the last one")
        return "head" if after else "embed"


def _untrained_outside_layers(
    parts: ModelParts,
    recorder: Recorder,
    found: Probe,
    vision: VisionSpec | None,
    head: HeadKind,
    places: _Places,
) -> Iterable[str]:
    """Parameters of embed and head that get no gradient: torch does not update them."""
    trained = found.trained | (vision.before if vision is not None else frozenset())
    for name, _ in parts.model.named_parameters():
        if isinstance(places.of(name), int) or name in head.trained:
            continue
        local = name[len(parts.prefix) :]
        if name.startswith(parts.prefix):
            if vision is not None and local in vision.trained:
                continue
            owner, _, leaf = local.rpartition(".")
            if not parts.is_vision(name) and id(recorder.base.get_submodule(owner)._parameters[leaf]) in trained:
                continue
        yield name


def _freeze(model: nn.Module, freeze: tuple[str, ...], untrained: list[str], aliases: Mapping[str, str]) -> None:
    """Switches `requires_grad` off for what is frozen and for what gets no gradient."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in freeze:
        hits = [n for n in [*names, *aliases] if match(pattern, n)]
        if not hits:
            raise ConfigError(f"freeze: {pattern!r} matches no parameter of the model")
        for name in hits:
            model.get_parameter(aliases.get(name, name)).requires_grad_(False)
    for name in untrained:
        model.get_parameter(name).requires_grad_(False)
    if untrained:
        log.warning(
            "these parameters get no gradient from the loss, so they are not trained: %s",
            format_names(untrained),
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"freeze: {list(freeze)} leaves no parameter to train")


def _by_own_names(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
    """Dtypes by the library's names of tensors, where they are given by those of a published checkpoint, or with or
    without the base model's prefix. A tensor made from several has the dtype that holds the values of all."""
    shapes = {name: tuple(tensor.shape) for name, tensor, _ in _stored_tensors(model)}
    if dtypes.keys() <= shapes.keys():
        return dtypes
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, torch.dtype] = {}
    for layout in (published(model, shapes), library(shapes)):
        of_layout: dict[str, torch.dtype] = {}
        for theirs, stored in layout.items():
            spellings = (theirs, prefix + theirs, theirs.removeprefix(prefix))
            dtype = next((dtypes[name] for name in spellings if name in dtypes), None)
            if dtype is not None:
                for name in stored.names:
                    of_layout[name] = torch.promote_types(of_layout.get(name, dtype), dtype)
        found |= of_layout
    return found


def _cut(
    parts: ModelParts,
    places: _Places,
    taken: TakenWeights,
    structure_of: Sequence[int],
    splits: Sequence[Split | str],  # by layer
    head: HeadKind,
    frozen_dtypes: Mapping[str, torch.dtype],
) -> tuple[Unit, ...]:
    """Sorts every parameter and persistent buffer into its unit: in model order, and in a layer that can be split half
    by half, so that gradient norms are summed in one order whether it is or not."""
    for alias, canonical in taken.aliases.items():
        if places.of(canonical) != "embed" or canonical != head.weight:
            raise ConfigError(f"{alias} and {canonical} are one tensor; only embedding and head may share theirs")
    last = len(parts.layers) + 1
    held: list[list[TensorRef]] = [[] for _ in range(last + 1)]
    placed = [(name, tensor, is_buffer, places.of(name)) for name, tensor, is_buffer in _stored_tensors(parts.model)]
    for name, tensor, is_buffer, place in sorted(placed, key=lambda stored: _half_of(parts, splits, *stored[::3])):
        unit = {"embed": 0, "head": last}[place] if isinstance(place, str) else place + 1
        dtype = frozen_dtypes.get(name, taken.values[name].dtype if name in taken.values else tensor.dtype)
        if dtype not in CORE_DTYPES:
            raise ConfigError(f"{name} is {dtype}, which megatrain does not store")
        trainable = not is_buffer and tensor.requires_grad
        held[unit].append(
            TensorRef(
                name=name,
                unit=unit,
                tensor=len(held[unit]),
                shape=tuple(tensor.shape),
                dtype=parts.dtype if trainable else dtype,
                role="trainable" if trainable else "frozen",
                is_buffer=is_buffer,
            )
        )
    layers = (
        Unit(name=f"layers.{i}", role="layer", tensors=tuple(held[i + 1]), structure=structure, layer=i)
        for i, structure in enumerate(structure_of)
    )
    return (
        Unit(name="embed", role="embed", tensors=tuple(held[0]), structure=None),
        *layers,
        Unit(name="head", role="head", tensors=tuple(held[last]), structure=None),
    )


def _in_model_order(model: nn.Module, units: Sequence[Unit]) -> dict[str, TensorRef]:
    """Every tensor by its name: unit by unit, and in the model's own order within each."""
    order = {name: number for number, (name, _, _) in enumerate(_stored_tensors(model))}
    return {t.name: t for unit in units for t in sorted(unit.tensors, key=lambda t: order[t.name])}


def _half_of(parts: ModelParts, splits: Sequence[Split | str], name: str, place: Place) -> int:
    """0 or 1: the half of its layer that a tensor belongs to; 0 where the layer cannot be split, and outside layers."""
    split = splits[place] if isinstance(place, int) else ""
    return 0 if isinstance(split, str) else split.half_of(name.removeprefix(f"{parts.layer_name(cast('int', place))}."))


def _stored_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor, bool]]:
    """(name, tensor, whether it is a buffer) of every parameter and persistent buffer."""
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer, True


def _tables(parts: ModelParts, recorder: Recorder, found: Probe, embed: Unit) -> tuple[tuple[int, int | None], ...]:
    """For each embedding call before the layers: index of its weight in unit 0, and its padding index."""
    names = {id(p): parts.prefix + n for n, p in recorder.base.named_parameters()}
    index = {t.name: t.tensor for t in embed.tensors}
    if any(weight not in names for weight, _ in found.tables):
        raise ConfigError(
            f"{type(recorder.base).__name__} looks tokens up in a tensor that it computes from parameters, as adapters "
            "of an embedding do, and not in a parameter; leave the embedding out of the adapter's target_modules and "
            "trainable_token_indices"
        )
    return tuple((index[names[weight]], padding) for weight, padding in found.tables)


def _mixing_layers(parts: ModelParts, recorder: Recorder) -> frozenset[int]:
    """Layers that would let a document of a packed row see another."""
    if "position_ids" not in recorder.accepts and not recorder.places_by_layer:
        return frozenset()
    positions = torch.tensor([[0, 1, 0, 1]])
    record = recorder.record(torch.zeros(1, 4, dtype=torch.int64), None, positions)
    return layers_mixing_documents(parts.layers, positions == 0, record, recorder.places_by_layer)
