"""A Hugging Face causal language model without storage, cut into units: embed, decoder layers, head.

`Decoder` is the map that everything else reads: which tensor belongs to which unit, which layers share a template, what
runs before and after the layers. `inspect_model.py` fills it in, by running the model's own code on stubs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatrain.config.default_length import max_positions
from megatrain.errors import ConfigError
from megatrain.models import expert_groups
from megatrain.models.expert_groups import Experts
from megatrain.models.halves import HALVES, Split
from megatrain.models.hf_config import check, load_config, text_config
from megatrain.models.lm_head import HeadKind
from megatrain.models.meta_init import build_without_storage
from megatrain.models.modules import copy_without, on_meta
from megatrain.models.moe import Gates, RouterLoss
from megatrain.models.packing import Packing
from megatrain.models.recorder import Recorder
from megatrain.models.support import check_rope
from megatrain.models.taken_weights import TakenWeights
from megatrain.models.token_wise import TOKENS, why_not_token_wise
from megatrain.models.trace import Probe
from megatrain.models.types import PRECISIONS, TensorRef, Unit
from megatrain.models.varlen_attention import NAME
from megatrain.models.vision import VisionSpec

if TYPE_CHECKING:
    from megatrain.weights.hf_layout import Layout


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Decoder:
    """A causal language model, cut into units. Parameters stay on meta, buffers are real and on the CPU."""

    model: nn.Module
    """The whole model, its parameters on meta."""
    config: Any
    """Its Hugging Face configuration."""
    precision: str
    """Compute precision: bf16 or fp32."""
    matmul: str
    """In what the linear layers within decoder layers multiply: fp8, or bf16 for the compute precision."""
    base_name: str
    """Name of the base within the model."""
    base: nn.Module
    """The module that holds the layers, and the vision parts where there are some."""
    layers_name: str
    """Name of the list of decoder layers within the base."""
    layers: tuple[nn.Module, ...]
    """The decoder layers."""
    vision_parts: tuple[str, ...]
    """Names of the modules of the base that process images."""
    taken: TakenWeights
    """Real tensors of the model until the engine has them, and names of tied tensors."""
    recorder: Recorder
    """Records what the layers are called with."""
    probe: Probe
    """What runs before and after the layers."""
    vision_spec: VisionSpec | None
    """What is done with images; None for a model of text alone."""
    head: HeadKind
    """How logits are computed."""
    other_loss: str | None
    """In what the loss of the model's own forward differs from the one that is trained; None where it does not."""
    tied: bool
    """Whether the head's weight is the embedding's."""
    router: RouterLoss | None
    """The router's auxiliary loss; None where the model has none, or does not add it."""
    gates: tuple[Gates, ...]
    """Per layer: its routers; empty without an auxiliary loss."""
    untried: frozenset[int]
    """Layers that `layer_check.py` could not run: the first step checks that their forward changes no state."""
    index_names: frozenset[tuple[str, str]]
    """`(module, attribute)` within a layer of attributes that hold the layer's index."""
    structure_of: tuple[int, ...]
    """Per layer: the index of its structure. Layers of one structure compute the same function."""
    structures: tuple[int, ...]
    """Per structure: its first layer."""
    splits: tuple[Split | str, ...]
    """Per structure: the two halves of its layers, or why they have none."""
    experts: tuple[Experts | None, ...]
    """Per structure: the experts of its layers where they are spread over several units; empty where none are."""
    units: tuple[Unit, ...]
    """Embed, the layers or parts of them, head."""
    tensors: Mapping[str, TensorRef]
    """Every parameter and persistent buffer by its name, tied ones once."""
    tables: tuple[tuple[int, int | None], ...]
    """Per embedding call before the layers: index of its weight in unit 0, and its padding index."""
    packing: Packing
    """How attention keeps the documents of packed rows apart."""
    mixing_layers: frozenset[int]
    """Layers that get the documents of packed rows as rows of their own (`per_document.py`)."""

    def __new__(
        cls,
        model: nn.Module,
        *,
        freeze: Sequence[str] = (),
        precision: str = "fp32",
        matmul: str = "bf16",
        frozen_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> "Decoder":
        """Inspects `model` (see `inspect_model`)."""
        # inspect_model fills in a Decoder, so it is the one that imports this module
        from megatrain.models.inspect_model import inspect_model

        return inspect_model(model, freeze=freeze, precision=precision, matmul=matmul, frozen_dtypes=frozen_dtypes)

    @classmethod
    def from_fields(cls, **fields: Any) -> "Decoder":
        """A decoder of known fields, all of which must be given."""
        names = {field.name for field in dataclasses.fields(cls)}
        if fields.keys() != names:
            raise TypeError(f"Decoder: fields {sorted(fields.keys() ^ names)} are missing or unknown")
        made = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        precision: str = "fp32",
        matmul: str = "bf16",
        freeze: Sequence[str] = (),
        attention: str = "auto",
        experts: str | None = None,
        trust_remote_code: bool = False,
        frozen_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> "Decoder":
        """From a Hugging Face configuration, a dict of one (with `model_type`), or the folder or hub id of a model.

        `attention` is auto, sdpa or eager, `experts` an implementation of transformers. The rest is as for
        `inspect_model`. Raises ConfigError.
        """
        config = load_config(config, trust_remote_code)
        check(config)
        check_rope(config)
        model = build_without_storage(config, PRECISIONS[precision], attention, experts, trust_remote_code)
        return cls(model, freeze=freeze, precision=precision, matmul=matmul, frozen_dtypes=frozen_dtypes)

    def refuse_other_loss(self) -> None:
        """Raises ConfigError where the model's own forward has another loss than the cross-entropy of the next token,
        which is what is trained unless a step is given a `loss_fn`."""
        if self.other_loss is not None:
            raise ConfigError(
                f"the forward of {type(self.model).__name__} has another loss than the cross-entropy of the next "
                f"token, which the engine trains: {self.other_loss}. Give a model of the stock class (with PEFT: LoRA "
                "rather than AdaLoRA), or give Engine.step a loss_fn, whose sum is then all that is trained"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return PRECISIONS[self.precision]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, whole ones also where they are split into two units."""
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
        """Rows of the token embedding: every token id must be below this."""
        return int(cast("Any", self.model).get_input_embeddings().weight.shape[0])

    @property
    def text_config(self) -> Any:
        """The configuration of the language part."""
        return text_config(self.config)

    @property
    def attention(self) -> str | None:
        """transformers' name of how attention is computed where no row is packed."""
        name = getattr(self.config, "_attn_implementation", None)
        return "sdpa" if name == NAME else name

    def packed_rows(self, device: str) -> str:
        """A phrase for plans and the numerics key: how documents of packed rows are kept apart on a kind of device."""
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
        """Number of parameters, tied ones once, without buffers."""
        return sum(torch.Size(t.shape).numel() for t in self.tensors.values() if not t.is_buffer)

    @property
    def num_trainable(self) -> int:
        """Number of parameters that are trained."""
        return sum(torch.Size(t.shape).numel() for t in self.tensors.values() if t.role == "trainable")

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, each to the name in `tensors`."""
        return self.taken.aliases

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Real tensors of the model by name, for the engine to take."""
        return self.taken.values

    def give_back(self) -> None:
        """Puts the model's own tensors back where they were (see `TakenWeights.give_back`)."""
        self.taken.give_back()

    @property
    def layout(self) -> "Layout | None":
        """How the source of the weights stores them, so that an export can do the same; None where it is not known."""
        return self.taken.layout

    def set_layout(self, layout: "Layout | None") -> None:
        """For whoever opens the source of the weights."""
        self.taken.layout = layout

    def local_names(self, unit: int) -> dict[str, int]:
        """Index of each tensor of a unit by its name relative to the layer (for embed and head, to the model)."""
        of = self.units[unit]
        skipped = 0 if of.layer is None else len(self._layer_name(of.layer)) + 1
        return {t.name[skipped:]: t.tensor for t in of.tensors}

    def _layer_name(self, layer: int) -> str:
        return ".".join(p for p in (self.base_name, self.layers_name, str(layer)) if p)

    @functools.cached_property
    def halves(self) -> "Decoder":
        """The same model with every layer that can be split cut into two units; this one where none can."""
        units = [part for unit in self.units for part in self._halves_of(unit)]
        return self if len(units) == len(self.units) else self._cut_into(units)

    def in_expert_groups(self, experts: Sequence[Experts | None], groups: int) -> "Decoder":
        """The same model, whose layers are halves already, with the experts of each spread over `groups` units.
        `experts`, by structure, are those of its layers."""
        units: list[Unit] = []
        for unit in self.units:
            found = experts[unit.structure] if unit.structure is not None and unit.half == "mlp" else None
            if found is None or unit.layer is None:
                units.append(unit)
            else:
                units += expert_groups.spread(unit, found, groups, len(self._layer_name(unit.layer)) + 1)
        return self._cut_into(units, experts=tuple(experts))

    def _cut_into(self, units: Sequence[Unit], **changed: Any) -> "Decoder":
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        numbered, tensors = expert_groups.numbered(units, self.tensors)
        return Decoder.from_fields(**{**fields, "units": numbered, "tensors": tensors, **changed})

    def _halves_of(self, unit: Unit) -> list[Unit]:
        split = self.splits[unit.structure] if unit.structure is not None else ""
        if isinstance(split, str) or unit.layer is None or unit.half is not None:
            return [unit]
        skipped = len(self._layer_name(unit.layer)) + 1
        return [
            dataclasses.replace(
                unit,
                name=f"{unit.name}.{half}",
                half=half,
                tensors=tuple(t for t in unit.tensors if split.half_of(t.name[skipped:]) == index),
            )
            for index, half in enumerate(HALVES)
        ]

    @functools.cached_property
    def untiled(self) -> dict[int, str]:
        """By structure whose layers' MLP cannot be computed in tiles of tokens: why. The others' can."""
        found: dict[int, str] = {}
        record = self.recorder.record(torch.zeros(1, TOKENS, dtype=torch.int64))
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, TOKENS, self.hidden_size, generator=generator).to(self.dtype)
        for structure, (first, split) in enumerate(zip(self.structures, self.splits, strict=True)):
            if isinstance(split, str):
                found[structure] = split
                continue
            if any(split.half_of(path) == 1 for path, _ in self.gates[first]):
                found[structure] = "its router has an auxiliary loss"
                continue
            half = split.module(self.layers[first], "mlp")
            reason = why_not_token_wise(half, record.args[first], record.kwargs[first], hidden)
            if reason is not None:
                found[structure] = reason
        return found

    @functools.cached_property
    def tail_is_token_wise(self) -> bool:
        """Whether what is between the last layer and the head (the final norm) computes each token by itself, keeps the
        width, and draws no random numbers, so that it can be computed in pieces, and again."""
        tail = nn.Sequential(*(self.base.get_submodule(name) for name in self.probe.tail))
        if any(isinstance(module, nn.modules.dropout._DropoutNd) for module in tail.modules()):
            return False
        hidden = torch.randn(1, TOKENS, self.hidden_size, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        if why_not_token_wise(tail, (), {}, hidden) is not None:
            return False
        with torch.no_grad():
            return bool(on_meta(tail)(hidden.to("meta")).shape == hidden.shape)

    @functools.cached_property
    def tail_kept_bytes(self) -> int | None:
        """Bytes that what is between the last layer and the head keeps of each token for its backward, beside its input
        and its result; None where it cannot be run without its weights."""
        tail = on_meta(nn.Sequential(*(self.base.get_submodule(name) for name in self.probe.tail)))
        tokens = 2**16  # so many that what is kept of the weights counts for nothing
        hidden = torch.empty(1, tokens, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        try:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                result = tail(hidden)
        except Exception:  # a module may raise anything for tensors without values
            return None
        for tensor in (hidden, result, *tail.parameters(), *tail.buffers()):
            kept.pop(tensor.untyped_storage()._cdata, None)
        return -(-sum(storage.nbytes() for storage in kept.values()) // tokens)

    def is_tiled(self, unit: Unit) -> bool:
        """Whether a unit is an MLP that can be computed in tiles of tokens."""
        return unit.half == "mlp" and unit.part is None and unit.structure not in self.untiled

    def module_of(self, unit: Unit) -> nn.Module:
        """A copy, which shares tensors with the model, of the layer or half of a layer that a unit is."""
        assert unit.layer is not None
        assert unit.structure is not None
        layer, split = self.layers[unit.layer], self.splits[unit.structure]
        if unit.half is None or isinstance(split, str):
            return copy_without(layer)
        half = split.module(layer, unit.half)
        return half if unit.part is None else self.experts_of(unit).module(half, unit)

    def experts_of(self, unit: Unit) -> Experts:
        """The experts of the layer that a unit is a part of, which are spread over several units."""
        experts = self.experts[unit.structure] if unit.structure is not None else None
        assert experts is not None
        return experts

    def gates_of(self, unit: Unit) -> Gates:
        """The routers of the layer or half of a layer that a unit is."""
        assert unit.layer is not None
        assert unit.structure is not None
        gates, split = self.gates[unit.layer], self.splits[unit.structure]
        if unit.part == "experts":
            return ()
        if unit.half is None or isinstance(split, str):
            return gates
        return tuple((path, at) for path, at in gates if HALVES[split.half_of(path)] == unit.half)

    def is_vision(self, name: str) -> bool:
        """Whether a tensor belongs to a part that processes images."""
        prefix = f"{self.base_name}." if self.base_name else ""
        return name.removeprefix(prefix).partition(".")[0] in self.vision_parts
