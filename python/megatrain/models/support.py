"""Which models can be cut into units at all, and where their layers are. What their code does is found out by running
it on stubs; this looks at configuration and modules alone.
"""

from typing import Any, cast

from torch import nn

from megatrain.errors import ConfigError
from megatrain.models import packing
from megatrain.models.hf_config import refuse_parts, sees, text_config
from megatrain.models.meta_init import check_library


def refuse(model: nn.Module, config: Any) -> None:
    """Refusals that need only the configuration."""
    check_library()
    name = type(model).__name__
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"{name} has no Hugging Face config, so megatrain cannot tell its layers")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; only decoders can be trained")
    refuse_parts(config, name)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{name} is quantized; full-precision training needs an unquantized checkpoint")
    if (getattr(config, "layerdrop", 0) or 0) > 0:
        raise ConfigError(f"layerdrop is {config.layerdrop}: layers that are skipped at random are not supported")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager", packing.NAME):
        raise ConfigError(f"attention implementation {attention!r} is not supported: use sdpa or eager")
    if getattr(config, "_experts_implementation", None) == "batched_mm":
        raise ConfigError("experts implementation batched_mm gathers weights into activations: use grouped_mm or eager")


def refuse_lists_of_experts(model: nn.Module, layers: list[nn.Module]) -> None:
    """Refuses experts that are modules of their own: one that no token chose has no gradient in torch, which then
    leaves it as it is, while a fused tensor's rows have a gradient of 0."""
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2] and len(module) > 1:
                raise ConfigError(
                    f"{type(model).__name__} keeps its experts as a list of modules ({name}), each of which has a "
                    "gradient only where a token chose it; use the installed transformers' own code, which fuses them"
                )


def check_rope(config: Any) -> None:
    """Refuses a rotary scaling that the installed transformers does not know."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(text_config(config), "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type", "default"))
        if name not in ROPE_INIT_FUNCTIONS and name != "default":
            known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
            raise ConfigError(f"rope_type {name!r} is not known to the installed transformers, which knows {known}")


def find_base(model: nn.Module) -> tuple[str, nn.Module]:
    """The module that holds the layers, and the parts that see images where there are some, and its name."""
    base: Any = (
        cast("Any", model).get_decoder() if hasattr(model, "get_decoder") else getattr(model, "base_model", None)
    )
    if sees(getattr(model, "config", None)):
        base = next((m for m in model.children() if any(part is base for part in m.modules())), base)
    if not isinstance(base, nn.Module) or base is model:
        embedding = cast("Any", model).get_input_embeddings()
        base = next((m for m in model.children() if any(part is embedding for part in m.modules())), None)
    if not isinstance(base, nn.Module) or base is cast("Any", model).get_input_embeddings():
        raise ConfigError(f"{type(model).__name__} has no base model beneath its head")
    return next(name for name, module in model.named_modules() if module is base), base


def find_layers(model: nn.Module, base: nn.Module, config: Any) -> str:
    """The name of the list of decoder layers inside the base."""
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
