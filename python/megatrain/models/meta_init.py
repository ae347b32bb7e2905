"""A model built by its own constructors without memory for its parameters: those are on meta, buffers are real."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain.compat import package_refusal
from megatrain.errors import ConfigError
from megatrain.models.hf_config import sees


class _LargeOnMeta(TorchFunctionMode):
    """Creates on meta what has no values yet (`torch.empty`) or is as large as only parameters are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty or made.numel() > _LARGE:
                return made
        return func(*args, **kwargs)


_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
_LARGE = 1 << 22
"""Elements; no buffer that a model computes for itself is as large."""


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, parameters are on meta from the moment a module registers them: modules are built by their own
    constructors, buffers with real values included, and no parameter's memory is ever asked for."""
    register = nn.Module.register_parameter

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = to_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_without_storage(
    config: Any,
    dtype: torch.dtype,
    attention: str = "auto",
    experts: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model of a configuration: parameters on meta, every buffer real."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    check_library()
    if attention not in ("auto", "sdpa", "eager"):
        raise ConfigError(f"model.attention: {attention!r} is none of auto, sdpa, eager")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if experts is not None:
        options["experts_implementation"] = experts
    if attention != "auto":
        options["attn_implementation"] = attention
    with parameters_on_meta():
        try:
            maker: Any = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
            model: nn.Module = maker.from_config(config, **options)
        except Exception as error:  # a model's constructor may raise anything for a configuration it cannot have
            kind = getattr(config, "model_type", type(config).__name__)
            raise ConfigError(f"model: {kind} cannot be built: {str(error) or type(error).__name__}") from error
    return model.train()


def check_library() -> None:
    """Refuses a transformers whose models were not tried: what layers are called with changes between its versions.

    And a torch too old for what is asked of it.
    """
    import transformers

    for name, version in (("transformers", transformers.__version__), ("torch", torch.__version__)):
        if reason := package_refusal(name, version):
            raise ConfigError(reason)
