"""A Hugging Face causal language model without storage, cut into units: embed, decoder layers, head.

`Decoder` is the map that everything else reads: which tensor belongs to which unit, which layers share a template, what
runs before and after the layers. It is found by running the model's own code on stubs (`recorder.py`), never by the
name of an architecture.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from megatrain.config.default_length import max_positions
from megatrain.errors import ConfigError
from megatrain.models import alterations, packing
from megatrain.models.hf_config import check, load_config, sees, text_config
from megatrain.models.lm_head import HeadKind, probe_head
from megatrain.models.meta_init import build_without_storage
from megatrain.models.moe import RouterLoss, find_router_loss
from megatrain.models.per_document import layers_mixing_documents
from megatrain.models.recorder import Recorder
from megatrain.models.structure import index_attributes, structures
from megatrain.models.support import check_rope, find_base, find_layers, refuse, refuse_lists_of_experts
from megatrain.models.trace import Probe, probe, untouched
from megatrain.models.types import CORE_DTYPES, PRECISIONS, TensorRef, Unit
from megatrain.models.vision import VisionSpec, part_names, stub_out, trace_vision
from megatrain.names import format_names, match, patterns
from megatrain.weights.hf_layout import library, published

if TYPE_CHECKING:
    from megatrain.weights.hf_layout import Layout

log = logging.getLogger(__name__)


_TAKEN = "_megatrain_has_taken_the_weights"
"""Marks a model whose weights were moved out; it would be drawn at random if it were taken for one on meta."""


class Decoder:
    """A causal language model, cut into units. Parameters stay on meta, buffers are real and on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        *,
        freeze: Sequence[str] = (),
        precision: str = "fp32",
        frozen_dtypes: dict[str, torch.dtype] | None = None,
    ) -> None:
        """`model` follows Hugging Face's layout of a causal language model: a base with one list of layers, and a head.
        Its parameters may be on meta or real; real ones are in `values` until the engine has taken them.

        `freeze` are patterns of names (`*`, `?`, `[…]`) that are not trained. `frozen_dtypes` gives the exact type of
        frozen tensors by name where it differs from the model's (a checkpoint in another precision).

        Raises ConfigError for a model that cannot be streamed exactly, with the reason.
        """
        self.model = model
        self.config: Any = getattr(model, "config", None)
        self.precision = precision
        self.dtype = PRECISIONS[precision]
        refuse(model, self.config)
        alterations.refuse(model)
        self.base_name, self.base = find_base(model)
        self.layers_name = find_layers(model, self.base, self.config)
        self.layers = list(cast("nn.ModuleList", self.base.get_submodule(self.layers_name)))
        refuse_lists_of_experts(model, self.layers)
        alterations.refuse_repeated(self.layers, self.layers_name)
        self.layout: Layout | None = None
        self.values: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._places: list[tuple[dict[str, Any], str, str]] = []
        """Where the model's own tensors were: the dict of the module, the name there, and the name in `values`."""
        try:
            self._take_values()
            self._examine(freeze, frozen_dtypes or {})
        except BaseException:
            self.give_back()
            raise

    def _examine(self, freeze: Sequence[str], frozen_dtypes: dict[str, torch.dtype]) -> None:
        """Finds out, on stubs, how the model is put together, and cuts it into units."""
        model = self.model
        self.recorder, self.probe = self._probe()
        self.recorder.side = self.probe.side
        self.vision_spec = self._trace_vision()
        only_tokens = all(ids is None for ids in self.probe.record.embedding_ids)
        self.recorder.places_by_layer = only_tokens and "position_ids" not in self.recorder.accepts
        self.head: HeadKind = probe_head(self)
        self.router: RouterLoss | None = find_router_loss(self)
        self.tied = self.head.weight is not None and self._unit_of(self.head.weight) == "embed"
        if not self.head.plain and any(self._unit_of(name) == "embed" for name in self.head.used):
            raise ConfigError(f"{type(model).__name__} ties its embedding to a head that is no plain matmul")
        self._freeze(patterns("freeze", freeze), frozen_dtypes)
        self.index_names = index_attributes(self.layers)
        self.structure_of, self.structures = structures(self.layers, self.index_names)
        self.units = self._cut()
        self.tensors: dict[str, TensorRef] = {t.name: t for unit in self.units for t in unit.tensors}
        self.tables = self._tables()
        self.packing = packing.adopt(self)
        self.mixing_layers = self._mixing_layers()
        """Layers that are given the documents of packed rows one by one (`per_document.py`)."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        precision: str = "fp32",
        freeze: Sequence[str] = (),
        attention: str = "auto",
        experts: str | None = None,
        trust_remote_code: bool = False,
        frozen_dtypes: dict[str, torch.dtype] | None = None,
    ) -> "Decoder":
        """From a Hugging Face configuration, a dict of one (`model_type` named), or the folder or hub id of a model."""
        config = load_config(config, trust_remote_code)
        check(config)
        check_rope(config)
        model = build_without_storage(config, PRECISIONS[precision], attention, experts, trust_remote_code)
        return cls(model, freeze=freeze, precision=precision, frozen_dtypes=frozen_dtypes)

    @property
    def num_layers(self) -> int:
        """Decoder layers; the units are two more."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head, which may be more than the tokenizer has tokens."""
        return int(self.head.vocab)

    @property
    def num_embeddings(self) -> int:
        """Rows of the token embedding: every token id must be below it."""
        return int(cast("Any", self.model).get_input_embeddings().weight.shape[0])

    @property
    def text_config(self) -> Any:
        """The configuration of the language part."""
        return text_config(self.config)

    @property
    def attention(self) -> str | None:
        """transformers' name of how attention is computed where no row is packed."""
        name = getattr(self.config, "_attn_implementation", None)
        return "sdpa" if name == packing.NAME else name

    def packed_rows(self, device: str) -> str:
        """How documents of packed rows are kept apart on a kind of device."""
        attention = self.packing.how(device, self.dtype)
        if not self.mixing_layers:
            return attention
        rows = "a row for each document"
        return (
            rows
            if len(self.mixing_layers) == self.num_layers
            else f"{attention}; {len(self.mixing_layers)} layers {rows}"
        )

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model has positions for, rotary scaling included; None where it names no limit."""
        return max_positions(self.text_config)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once, buffers not counted."""
        return sum(_numel(t.shape) for t in self.tensors.values() if not t.is_buffer)

    @property
    def num_trainable(self) -> int:
        """Parameters that are trained."""
        return sum(_numel(t.shape) for t in self.tensors.values() if t.role == "trainable")

    def local_names(self, unit: int) -> dict[str, int]:
        """Tensors of a unit by their names relative to the layer (or, for embed and head, to the model)."""
        return self._local[unit]

    def convolves(self, layer: int) -> bool:
        """Whether a layer convolves over tokens, as linear attention and state spaces do."""
        return any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in self.layers[layer].modules())

    def _mixing_layers(self) -> frozenset[int]:
        begins = torch.tensor([[True, False, True, False]])
        recorder = self.recorder
        if "position_ids" not in recorder.accepts and not recorder.places_by_layer:
            return frozenset()
        positions = torch.tensor([[0, 1, 0, 1]])
        return layers_mixing_documents(
            self, begins, recorder.record(torch.zeros(1, 4, dtype=torch.int64), None, positions)
        )

    def _take_values(self) -> None:
        """Moves real parameters and persistent buffers into `values`, and notes which names are one tensor."""
        first: dict[int, str] = {}
        for module_name, module in self.model.named_modules():
            prefix = f"{module_name}." if module_name else ""
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                canonical = first.setdefault(id(parameter), prefix + name)
                if canonical != prefix + name:
                    self.aliases[prefix + name] = canonical
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                persistent = name not in module._non_persistent_buffers_set
                if buffer.device.type != "meta":
                    if persistent:
                        self.values[prefix + name] = buffer
                        self._places.append((module._buffers, name, prefix + name))
                elif not persistent:
                    raise ConfigError(
                        f"buffer {prefix}{name} has no values: build the model on the CPU or let megatrain build it"
                    )
        if getattr(self.model, _TAKEN, False):
            raise ConfigError(
                f"the weights of this {type(self.model).__name__} were moved into an earlier engine, and none are left "
                "in it; load or build the model again"
            )
        for name, parameter in list(self.model.named_parameters()):
            if parameter.device.type != "meta":
                self.values[name] = parameter
                setattr(self.model, _TAKEN, True)
        common = cast("Any", self.model).get_input_embeddings().weight.dtype
        replaced: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter.device.type != "meta":
                        self._places.append((module._parameters, name, first[id(parameter)]))
                    if id(parameter) not in replaced:
                        dtype = self.dtype if parameter.dtype == common else parameter.dtype
                        replaced[id(parameter)] = nn.Parameter(
                            torch.empty(parameter.shape, dtype=dtype, device="meta"),
                            requires_grad=parameter.requires_grad and parameter.is_floating_point(),
                        )
                    module._parameters[name] = replaced[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type not in ("cpu", "meta"):
                    module._buffers[name] = buffer.cpu()

    def give_back(self) -> None:
        """Puts the model's own tensors back where they were, as long as none has been moved on: for a caller whose
        model came to nothing here."""
        if all(name in self.values for *_, name in self._places):
            for holder, attribute, name in self._places:
                holder[attribute] = self.values[name]
            self.model.__dict__.pop(_TAKEN, None)
        self._places = []

    def _probe(self) -> tuple[Recorder, Probe]:
        """Runs the base on stubs, first with layers that return a tensor, then with tuples."""
        ids = torch.zeros(1, 2, dtype=torch.int64)
        failure: Exception | None = None
        for tuple_output in (False, True):
            recorder = Recorder(self.base, self.layers_name, self.dtype, tuple_output)
            stub_out(recorder, self._parts())
            try:
                return recorder, probe(recorder, ids)
            except (ConfigError, RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
                failure = failure or error
        if isinstance(failure, ConfigError):
            raise failure
        raise ConfigError(f"{type(self.base).__name__} could not be run on stubs: {failure}") from failure

    def _trace_vision(self) -> VisionSpec | None:
        """What the model does with images; None for a model of text alone."""
        parts = self._parts()
        return trace_vision(self.recorder, parts, self.config, len(self.probe.tables)) if parts else None

    def sees_with(self, name: str) -> bool:
        """Whether a tensor belongs to a part that sees images."""
        local = name.removeprefix(f"{self.base_name}." if self.base_name else "")
        return local.partition(".")[0] in self._parts()

    def _parts(self) -> tuple[str, ...]:
        return part_names(self.base, self.layers_name) if sees(self.config) else ()

    def _unit_of(self, name: str) -> Literal["embed", "head"] | int:
        """Which unit a tensor outside the head module belongs to, by the model's name of it."""
        name = self.aliases.get(name, name)
        prefix = f"{self.base_name}." if self.base_name else ""
        if not name.startswith(prefix):
            return "head"
        local = name[len(prefix) :]
        if local.startswith(f"{self.layers_name}."):
            return int(local[len(self.layers_name) + 1 :].split(".", 1)[0])
        if self.sees_with(name):
            return "embed"
        owner, _, leaf = local.rpartition(".")
        module = self.recorder.base.get_submodule(owner)
        tensor = module._parameters.get(leaf, module._buffers.get(leaf))
        before, after = id(tensor) in self.probe.before, id(tensor) in self.probe.after
        if before and after:
            raise ConfigError(f"{name} is used both before the first layer and after the last one")
        return "head" if after else "embed"

    def _tables(self) -> tuple[tuple[int, int | None], ...]:
        """For each embedding call before the layers: index of its weight in unit 0, and its padding index."""
        prefix = f"{self.base_name}." if self.base_name else ""
        names = {id(p): prefix + n for n, p in self.recorder.base.named_parameters()}
        return tuple((self._local[0][names[weight]], padding) for weight, padding in self.probe.tables)

    def _freeze(self, patterns: Sequence[str], dtypes: dict[str, torch.dtype]) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        for pattern in patterns:
            hits = [n for n in [*names.values(), *self.aliases] if match(pattern, n)]
            if not hits:
                raise ConfigError(f"freeze: {pattern!r} matches no parameter of the model")
            for name in hits:
                self.model.get_parameter(self.aliases.get(name, name)).requires_grad_(False)
        unused = self._unused()
        for name in unused:
            self.model.get_parameter(name).requires_grad_(False)
        if unused:
            log.warning(
                "what the model returns depends on none of these, so they are left as they are: %s",
                format_names(unused),
            )
        self._frozen_dtypes = self._by_own_names(dtypes)
        self._trainable_names = {n for n, p in self.model.named_parameters() if p.requires_grad}
        if not self._trainable_names:
            raise ConfigError(f"freeze: {list(patterns)} leaves no parameter to train")

    def _by_own_names(self, dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Types by the library's names of tensors, where they are by those of a published checkpoint, or with or
        without the base model's prefix. A tensor made from several has the type that holds the values of all."""
        shapes = {name: tuple(tensor.shape) for name, tensor in (*self.model.named_parameters(), *self._persistent())}
        if dtypes.keys() <= shapes.keys():
            return dtypes
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        found: dict[str, torch.dtype] = {}
        for layout in (published(self.model, shapes), library(shapes)):
            of_layout: dict[str, torch.dtype] = {}
            for theirs, stored in layout.items():
                spellings = (theirs, prefix + theirs, theirs.removeprefix(prefix))
                dtype = next((dtypes[name] for name in spellings if name in dtypes), None)
                if dtype is not None:
                    for name in stored.names:
                        of_layout[name] = torch.promote_types(of_layout.get(name, dtype), dtype)
            found |= of_layout
        return found

    def _persistent(self) -> list[tuple[str, Tensor]]:
        """Buffers that belong to the model's state, by name."""
        return [
            (f"{m}.{n}" if m else n, buffer)
            for m, module in self.model.named_modules()
            for n, buffer in module._buffers.items()
            if buffer is not None and n not in module._non_persistent_buffers_set
        ]

    def _unused(self) -> list[str]:
        """Parameters that no part of the forward touches: torch gives them no gradient and does not update them."""
        unused = self._unused_in_layers()
        used = self.probe.before | self.probe.after | (self.vision_spec.before if self.vision_spec else set())
        seen = self.vision_spec.trained if self.vision_spec else frozenset()
        prefix = f"{self.base_name}." if self.base_name else ""
        for name, _ in self.model.named_parameters():
            unit = self._unit_of(name)
            if isinstance(unit, int) or name in self.head.used:
                continue
            if name.startswith(prefix):
                owner, _, leaf = name[len(prefix) :].rpartition(".")
                if name[len(prefix) :] in seen:
                    continue
                if (
                    owner.partition(".")[0] not in self._parts()
                    and id(self.recorder.base.get_submodule(owner)._parameters[leaf]) in used
                ):
                    continue
            unused.append(name)
        return unused

    def _unused_in_layers(self) -> list[str]:
        """The same inside the layers, by running one of each structure on meta."""
        record = self.recorder.record(torch.zeros(1, 2, dtype=torch.int64))
        of, first = structures(self.layers, index_attributes(self.layers))
        prefix = ".".join(p for p in (self.base_name, self.layers_name) if p)
        unused = []
        for structure, layer in enumerate(first):
            names = untouched(
                self.layers[layer], record.args[layer], record.kwargs[layer], self.hidden_size, self.dtype
            )
            same = [index for index, own in enumerate(of) if own == structure]
            unused += [f"{prefix}.{index}.{name}" for index in same for name in names]
        return unused

    def _cut(self) -> tuple[Unit, ...]:
        """Sorts every parameter and persistent buffer into its unit, in model order."""
        held: dict[int, list[tuple[str, str, Tensor, bool]]] = {i: [] for i in range(self.num_layers + 2)}
        layer_prefix = ".".join(p for p in (self.base_name, self.layers_name) if p) + "."
        for names, is_buffer in ((list(self.model.named_parameters()), False), (self._persistent(), True)):
            for name, tensor in names:
                place = self._unit_of(name)
                unit = {"embed": 0, "head": self.num_layers + 1}[place] if isinstance(place, str) else place + 1
                local = name if isinstance(place, str) else name[len(layer_prefix) :].split(".", 1)[1]
                held[unit].append((name, local, tensor, is_buffer))
        self._local = [{local: i for i, (_, local, _, _) in enumerate(held[u])} for u in sorted(held)]
        for alias, canonical in self.aliases.items():
            if self._unit_of(canonical) != "embed" or canonical != self.head.weight:
                raise ConfigError(f"{alias} and {canonical} are one tensor; only embedding and head may share theirs")
        units = []
        for u in sorted(held):
            tensors = tuple(self._ref(u, i, name, t, buf) for i, (name, _, t, buf) in enumerate(held[u]))
            if u == 0:
                units.append(Unit(name="embed", role="embed", tensors=tensors, structure=None))
            elif u == self.num_layers + 1:
                units.append(Unit(name="head", role="head", tensors=tensors, structure=None))
            else:
                structure = self.structure_of[u - 1]
                units.append(Unit(name=f"layers.{u - 1}", role="layer", tensors=tensors, structure=structure))
        return tuple(units)

    def _ref(self, unit: int, index: int, name: str, tensor: Tensor, is_buffer: bool) -> TensorRef:
        trainable = name in self._trainable_names
        dtype = self._frozen_dtypes.get(name, self.values[name].dtype if name in self.values else tensor.dtype)
        if dtype not in CORE_DTYPES:
            raise ConfigError(f"{name} is {dtype}, which megatrain does not store")
        return TensorRef(
            name=name,
            unit=unit,
            tensor=index,
            shape=tuple(tensor.shape),
            dtype=self.dtype if trainable else dtype,
            role="trainable" if trainable else "frozen",
            is_buffer=is_buffer,
        )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
