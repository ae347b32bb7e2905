"""Which models can be streamed, and what must not have been changed on them; where their layers are.

This looks at configuration and modules alone. What a model's code does is found out by running it: `trace.py` for the
base, `layer_check.py` for the layers.

Layers of one structure are computed by one copy of the first of them (`engine/template.py`), and embedding and plain
head by their matmuls alone. So a hook or a forward attached to one instance would run for all layers or for none, and
the numbers would be wrong silently: whatever was attached to a module is refused.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from megatrain.errors import ConfigError
from megatrain.models.hf_config import refuse_kind, sees, text_config
from megatrain.models.meta_init import check_library
from megatrain.models.varlen_attention import NAME as VARLEN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """A supported model and where its parts are."""

    model: nn.Module
    """The causal language model, with its head."""
    config: Any
    """Its Hugging Face configuration."""
    base_name: str
    """Name of the base within the model."""
    base: nn.Module
    """The module that holds the layers, and the vision parts where there are some."""
    layers_name: str
    """Name of the list of decoder layers within the base."""
    layers: tuple[nn.Module, ...]
    vision: tuple[str, ...]
    """Names of the modules of the base that process images; empty for a model of text alone."""
    dtype: torch.dtype
    """Compute dtype."""

    @property
    def text_config(self) -> Any:
        """The configuration of the language part."""
        return text_config(self.config)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.text_config.hidden_size)

    @property
    def prefix(self) -> str:
        """What the names of tensors in the base start with."""
        return f"{self.base_name}." if self.base_name else ""

    def layer_name(self, index: int) -> str:
        """Full name of a layer."""
        return f"{self.prefix}{self.layers_name}.{index}"

    def is_vision(self, name: str) -> bool:
        """Whether a tensor, by its full name, belongs to a part that processes images."""
        return name.removeprefix(self.prefix).partition(".")[0] in self.vision


def find_parts(model: nn.Module, dtype: torch.dtype) -> ModelParts:
    """The parts of a model that is to compute in `dtype`.

    Raises ConfigError, with the reason, for a model that cannot be streamed exactly as it is.
    """
    check_library()
    config: Any = getattr(model, "config", None)
    _refuse_config(model, config)
    _refuse_alterations(model)
    base_name, base = _find_base(model)
    layers_name = _find_layers(model, base, config)
    layers = tuple(cast("nn.ModuleList", base.get_submodule(layers_name)))
    _refuse_lists_of_experts(model, layers)
    _refuse_repeated(base, layers_name)
    vision = _vision_parts(base, layers_name) if sees(config) else ()
    return ModelParts(
        model=model,
        config=config,
        base_name=base_name,
        base=base,
        layers_name=layers_name,
        layers=layers,
        vision=vision,
        dtype=dtype,
    )


# ------------------------------------------------------------------------------------------ configuration


def _refuse_config(model: nn.Module, config: Any) -> None:
    name = type(model).__name__
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"{name} has no Hugging Face config, so megatrain cannot tell its layers")
    refuse_kind(config, name)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{name} is quantized; full-precision training needs an unquantized checkpoint")
    if (getattr(config, "layerdrop", 0) or 0) > 0:
        raise ConfigError(f"layerdrop is {config.layerdrop}: layers that are skipped at random are not supported")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager", VARLEN):
        raise ConfigError(f"attention implementation {attention!r} is not supported: use sdpa or eager")
    if getattr(config, "_experts_implementation", None) == "batched_mm":
        raise ConfigError("experts implementation batched_mm gathers weights into activations: use grouped_mm or eager")


def check_rope(config: Any) -> None:
    """Raises ConfigError for a rotary scaling that the installed transformers does not know."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(text_config(config), "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type", "default"))
        if name not in ROPE_INIT_FUNCTIONS and name != "default":
            known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
            raise ConfigError(f"rope_type {name!r} is not known to the installed transformers, which knows {known}")


# ------------------------------------------------------------------------------------------------ modules

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def _refuse_alterations(model: nn.Module) -> None:
    """Raises ConfigError, with the module's name, for anything attached to an instance that would not be computed."""
    own_loss = vars(model).get("_loss_function", vars(model).get("loss_function"))
    if own_loss is not None:
        raise ConfigError(
            f"{type(model).__name__} has a loss of its own ({_name(own_loss)}), set on the instance as loss_function, "
            "which the engine does not compute: it trains the loss of the next token. Delete it, and give "
            "Engine.step a loss_fn for another loss"
        )
    for path, module in model.named_modules():
        where = path or type(model).__name__
        if parametrize.is_parametrized(module):
            raise ConfigError(
                f"{where} has a parametrized {next(iter(module.parametrizations))}, computed anew in each forward; "
                "make it a weight first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        if "forward" in vars(module):
            raise ConfigError(
                f"{where} has a forward of its own ({_name(vars(module)['forward'])}), set on the instance, which a "
                "streamed model would not run: put it into the module's class, or load the model without what sets it "
                "(device_map of several devices, patches of kernels)"
            )
        for hook in _hooks(module, _HOOKS):
            raise ConfigError(
                f"{where} has a hook ({_name(hook)}), which a streamed model would run for other layers too, or not at "
                "all: remove it, or put what it computes into the module's class"
            )
        for name, parameter in module.named_parameters(recurse=False):
            for hook in _hooks(parameter, _PARAMETER_HOOKS):
                raise ConfigError(
                    f"{where}.{name} has a hook ({_name(hook)}), but no parameter of a streamed model ever holds its "
                    "gradient: remove it, and read gradients with engine.gradient"
                )


def refuse_global_hooks() -> None:
    """Raises ConfigError where hooks of all modules are registered, as `FlopCounterMode`, `ModuleTracker` and some
    profilers do for as long as they are entered (torch.utils.module_tracker)."""
    for kind in _GLOBAL_HOOKS:
        for hook in getattr(torch_module, kind, {}).values():
            raise ConfigError(
                f"a hook of all modules is registered ({_name(hook)}; torch.utils.flop_counter.FlopCounterMode does "
                "that), which a streamed model would run for copies of its modules, and again when a layer is "
                "recomputed: leave it before the call; FLOPs are in engine.plan and in a run's metrics"
            )


def _refuse_lists_of_experts(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuses experts that are modules of their own: an expert that no token chose has no gradient in torch, which then
    skips its update, while the rows of a fused tensor have a gradient of 0."""
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2] and len(module) > 1:
                raise ConfigError(
                    f"{type(model).__name__} keeps its experts as a list of modules ({name}), each of which has a "
                    "gradient only where a token chose it; use the installed transformers' own code, which fuses them"
                )


def _refuse_repeated(base: nn.Module, layers_name: str) -> None:
    """Raises ConfigError for a layer, or a module with weights, that stands at two places of the base."""
    first: dict[int, str] = {}
    for name, module in base.named_modules(remove_duplicate=False):
        is_layer = name.rpartition(".")[0] == layers_name
        if not is_layer and not any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            continue
        before = first.setdefault(id(module), name)
        if before != name and (is_layer or f"{layers_name}." in name):
            raise ConfigError(
                f"{before} and {name} are one module, and here each layer has its own weights; copy it (copy.deepcopy)"
            )


def _hooks(owner: Any, kinds: Sequence[str]) -> Iterator[Any]:
    """Hooks other than those of transformers, which only record outputs."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            module = getattr(hook, "__module__", None) or type(hook).__module__
            if not module.startswith("transformers."):
                yield hook


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


# -------------------------------------------------------------------------------------------------- parts


def _find_base(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the base, which holds the layers, and the vision parts where there are some."""
    base: Any = (
        cast("Any", model).get_decoder() if hasattr(model, "get_decoder") else getattr(model, "base_model", None)
    )
    if sees(getattr(model, "config", None)):
        base = next((m for m in model.children() if any(part is base for part in m.modules())), base)
    if not isinstance(base, nn.Module) or base is model:
        embedding = cast("Any", model).get_input_embeddings()
        base = next((m for m in model.children() if any(part is embedding for part in m.modules())), None)
    if not isinstance(base, nn.Module) or base is cast("Any", model).get_input_embeddings():
        raise ConfigError(f"{type(model).__name__} has no base model under its head")
    return next(name for name, module in model.named_modules() if module is base), base


def _find_layers(model: nn.Module, base: nn.Module, config: Any) -> str:
    """The name of the list of decoder layers within the base."""
    depth = getattr(text_config(config), "num_hidden_layers", None)
    within = ""
    if sees(config) and (decoder := cast("Any", model).get_decoder()) is not base:
        within = next(name for name, module in base.named_modules() if module is decoder) + "."
    lists = [(name, m) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    matching = [(n, m) for n, m in lists if n.startswith(within) and (depth is None or len(m) == depth)]
    if not matching:
        raise ConfigError(f"{type(base).__name__} has no list of {depth} decoder layers")
    name, _ = max(matching, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return str(name)


def _vision_parts(base: nn.Module, layers_name: str) -> tuple[str, ...]:
    """Modules of the base with parameters, except the one that holds the language layers."""
    language = layers_name.partition(".")[0]
    return tuple(
        name for name, child in base.named_children() if name != language and any(True for _ in child.parameters())
    )
