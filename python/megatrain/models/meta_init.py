"""Builds a model by its own constructors without memory for parameters: those are on meta, buffers are real.

`torch.device("meta")` and transformers' own empty initialisation put buffers on meta too, and those that are in no
checkpoint (rotary frequencies) would be lost.
"""

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
    """Creates a tensor on meta where it has no values yet (`torch.empty`) or is as large as only parameters are."""

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
"""Elements; no buffer that a model computes for itself is larger."""


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which parameters are on meta as soon as a module registers them. Modules are built by their own
    constructors, buffers with real values included, and no memory is allocated for a parameter."""
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
    """The model of a configuration, in training mode: parameters on meta in `dtype`, every buffer real.

    `attention` is auto, sdpa or eager; `experts` is an experts implementation of transformers, None for its default.
    Raises ConfigError for a configuration whose model cannot be built.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    check_library()
    if attention not in ("auto", "sdpa", "eager"):
        raise ConfigError(f"model.attention: {attention!r} must be auto, sdpa or eager")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if experts is not None:
        options["experts_implementation"] = experts
    if attention != "auto":
        options["attn_implementation"] = attention
    with parameters_on_meta():
        try:
            maker: Any = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
            model: nn.Module = maker.from_config(config, **options)
        except Exception as error:  # a model's constructor may raise anything for values it refuses
            kind = getattr(config, "model_type", type(config).__name__)
            why = f"a value of its configuration is unknown: {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"model: {kind} cannot be built: {why or type(error).__name__}") from error
    return model.train()


def check_library() -> None:
    """Raises ConfigError for a transformers release that was not tried, since the arguments of layers change between
    releases, and for a torch release that is too old."""
    import transformers

    for name, version in (("transformers", transformers.__version__), ("torch", torch.__version__)):
        if reason := package_refusal(name, version):
            raise ConfigError(reason)
