"""What a model's own forward passes to its layers, found out by running it with the layers replaced by stubs.

Masks, rotary tables and per-layer arguments are the model's business: they differ between architectures and library
versions. So its base runs on the CPU, on stubs that note their arguments and return their input, and the real layers
are replayed with those arguments later. Nothing here knows a model by name, and nothing touches a device.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from megatrain.errors import ConfigError
from megatrain.models.packing import Documents, is_documents

NO_MASK = "megatrain_no_mask"
"""Attention implementation for which transformers builds no mask: what runs on the device needs none of its own."""


class EmbeddingCalls(TorchFunctionMode):
    """Answers every `torch.nn.functional.embedding` call itself, and tells `seen` which tensors any call touches."""

    def __init__(
        self,
        answer: Callable[[Tensor, Tensor, int | None], Tensor],  # (ids, weight, padding_idx) -> rows
        seen: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.answer = answer
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.seen is not None:
            for value in tree_flatten((args, kwargs))[0]:
                if isinstance(value, Tensor):
                    self.seen(value)
        if func is not F.embedding:
            return func(*args, **kwargs)
        given = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            raise ConfigError("an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be trained")
        return self.answer(given["input"], given["weight"], given.get("padding_idx"))


class Stub(nn.Module):
    """Stands for layer `index`: hands its arguments to `take` and returns what that returns."""

    def __init__(
        self, layer: nn.Module, index: int, take: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not registered: its parameters are not the stub's
        self._index = index
        self._take = take

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hands everything over."""
        return self._take(self._index, args, kwargs)


class Replay(nn.Module):
    """Stands for a module that does not see the hidden states: returns what it returned when it was recorded."""

    def __init__(self, module: nn.Module, outputs: list[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_module"), name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """The next recorded output."""
        return self.outputs.pop(0)


@dataclasses.dataclass(slots=True)
class Record:
    """Everything a micro-batch's layers are called with, beside the hidden states."""

    args: list[tuple[Any, ...]]
    """A layer each: positional arguments after the hidden states."""
    kwargs: list[dict[str, Any]]
    """A layer each."""
    embedding_ids: list[Tensor | None]
    """An embedding call each: what was looked up; None: the token ids themselves."""
    side: dict[str, list[Any]]
    """Outputs of the modules that do not see the hidden states, by module name, in the order of their calls."""
    positions: Tensor | None = None
    """Position ids that the model made for images, as it hands them to its language part."""
    visual: Tensor | None = None
    """Tokens whose hidden states get features of images behind a layer, counted over the batch (T,)."""
    _storages: frozenset[int] | None = None

    def to(self, device: torch.device) -> "Record":
        """The same on `device`: copied asynchronously, and one copy of whatever several layers share."""
        if device.type == "cpu":
            return self
        moved: dict[int, Tensor | Documents] = {}

        def move(value: Any) -> Any:
            if not isinstance(value, (Tensor, Documents)):
                return value
            if id(value) not in moved:
                moved[id(value)] = (
                    value.to(device)
                    if isinstance(value, Documents)
                    else value.contiguous().pin_memory().to(device, non_blocking=True)
                )
            return moved[id(value)]

        return Record(
            args=[tree_map(move, a, is_leaf=is_documents) for a in self.args],
            kwargs=[tree_map(move, k, is_leaf=is_documents) for k in self.kwargs],
            embedding_ids=[tree_map(move, ids) for ids in self.embedding_ids],
            side=tree_map(move, self.side),
            positions=tree_map(move, self.positions),
            visual=tree_map(move, self.visual),
        )

    def storages(self) -> frozenset[int]:
        """Identities of the memory of everything that layers are called with."""
        if self._storages is None:
            tensors = (t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, Tensor))
            self._storages = frozenset(t.untyped_storage()._cdata for t in tensors)
        return self._storages


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module whose children, parameters and buffers can be replaced without touching the original."""
    twin = copy.copy(module)
    for name in _OWN:
        object.__setattr__(twin, name, copy.copy(getattr(module, name)))
    return twin


_OWN = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    # transformers installs hooks when outputs are first asked for; shared, each copy would add to those of all others
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def copy_without(module: nn.Module, omit: nn.Module | None = None) -> nn.Module:
    """A copy of a module tree that shares tensors with the original, and `omit` itself."""
    if module is omit:
        return module
    twin = shallow_copy(module)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = copy_without(child, omit)
    return twin


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` where `name` is."""
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = module


class _Stop(Exception):
    """EmbedHead a forward whose rest is of no use."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


def forward_until_layers(base: nn.Module, layers: str, call: dict[str, Any]) -> Tensor:
    """What reaches the first layer of `base`, whose `layers` must be `stopping_layers`."""
    try:
        base(**call)
    except _Stop as stop:
        return cast("Tensor", stop.value)
    raise AssertionError(f"{layers} was not reached")


def stopping_layers(layers: nn.ModuleList) -> nn.ModuleList:
    """Stubs of which the first ends the forward with its hidden states."""

    def take(_: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Stop(args[0] if args else kwargs["hidden_states"])

    return nn.ModuleList([Stub(layer, i, take) for i, layer in enumerate(layers)])


class Recorder:
    """Runs the base of a model on the CPU with stubs for layers."""

    def __init__(self, base: nn.Module, layers: str, dtype: torch.dtype, tuple_output: bool = False) -> None:
        """`base` has its buffers on the CPU and its parameters anywhere; `layers` names its layer list; `dtype` is that
        of the hidden states; `tuple_output` whether a layer's output is a tuple that starts with the hidden states."""
        real = base.get_submodule(layers)
        assert isinstance(real, nn.ModuleList)
        self.layers = layers
        self.num_layers = len(real)
        self.dtype = dtype
        self.tuple_output = tuple_output
        self.base = copy_without(base, real)
        self.stubs = nn.ModuleList([Stub(layer, i, self._take) for i, layer in enumerate(real)])
        replace_module(self.base, layers, self.stubs)
        for module in self.base.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(
                        torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), requires_grad=False
                    )
        self.base.eval()
        self.accepts = set(inspect.signature(type(self.base).forward).parameters)
        self._language = self.base.get_submodule(layers.rpartition(".")[0])
        self._caches = bool(
            {"use_cache"} & {*self.accepts, *inspect.signature(type(self._language).forward).parameters}
        )
        self.side: tuple[str, ...] = ()
        self._state = [
            (m, dict(m.__dict__), dict(m._buffers)) for m in self.base.modules() if m._buffers or m is self.base
        ]
        self.places_by_layer = False
        """Whether only the layers know places, and the base takes no positions, so that it can do without them."""
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: list[Tensor] = []
        self._tail = False
        self.language: dict[str, Any] = {}
        """What the module that holds the layers was last called with."""
        if self._language is not self.base:
            self._language.register_forward_pre_hook(lambda _m, _a, k: self.language.update(k), with_kwargs=True)

    @property
    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What each layer that was reached was called with, beside the hidden states."""
        return self._calls

    @property
    def hidden(self) -> list[Tensor]:
        """The hidden states that each layer got."""
        return self._hidden

    def begin(self, *, to_the_end: bool = False) -> None:
        """Forgets the last run. The next one ends at the last layer, or behind it."""
        self.reset()
        self._calls, self._hidden, self._tail = [], [], to_the_end
        self.language.clear()

    def reset(self) -> None:
        """Puts every buffer and cached length back, so that a record depends on its own batch alone (dynamic rotary
        scalings keep what they saw, and a resumed run would not have seen it)."""
        for module, attributes, buffers in self._state:
            for name in [n for n in module.__dict__ if n not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            object.__setattr__(module, "_buffers", {k: v.clone() if v is not None else v for k, v in buffers.items()})

    def _take(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if index != len(self._calls):
            raise ConfigError(
                f"layer {index} of {type(self.base).__name__} is called in place {len(self._calls)}: layers that do "
                "not run once each, in order, cannot be streamed"
            )
        self._calls.append((tuple(args[1:]), kwargs))
        self._hidden.append(hidden)
        if index == self.num_layers - 1 and not self._tail:
            raise _Stop
        return (hidden,) if self.tuple_output else hidden

    def call(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        images: dict[str, Any] | None = None,  # what the model takes beside the tokens, by its names
    ) -> dict[str, Any]:
        """Keyword arguments for the base. Raises ConfigError for what the base does not take."""
        call: dict[str, Any] = {"input_ids": input_ids, **(images or {})}
        for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if value is not None:
                if name == "position_ids" and self.places_by_layer:
                    continue
                if name not in self.accepts:
                    raise ConfigError(f"{type(self.base).__name__} takes no {name}: do without padding or packing")
                call[name] = value
        if self._caches:
            call["use_cache"] = False
        return call

    @torch.no_grad()
    def record(
        self,
        input_ids: Tensor,  # (batch, seq), int64, on the CPU
        attention_mask: Tensor | None = None,  # (batch, seq)
        position_ids: Tensor | None = None,  # (batch, seq)
        images: dict[str, Any] | None = None,  # pixels, grids and token types, by the model's names
    ) -> Record:
        """What the layers of this micro-batch are called with."""
        self.begin()
        looked_up: list[Tensor | None] = []
        side: dict[str, list[Any]] = {name: [] for name in self.side}

        def answer(ids: Tensor, weight: Tensor, _: int | None) -> Tensor:
            looked_up.append(None if is_same(ids, input_ids) else ids)
            return torch.zeros((), dtype=self.dtype).expand(*ids.shape, weight.shape[1])

        hooks = [
            self.base.get_submodule(name).register_forward_hook(lambda _m, _a, out, name=name: side[name].append(out))
            for name in self.side
        ]
        try:
            with EmbeddingCalls(answer):
                self.base(**self.call(input_ids, attention_mask, position_ids, images))
        except _Stop:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        made = self.language if images else {}
        places = made.get("visual_pos_masks")
        return Record(
            [a for a, _ in self._calls],
            [k for _, k in self._calls],
            looked_up,
            side,
            positions=made.get("position_ids"),
            visual=None if places is None else places.flatten().nonzero().flatten(),
        )


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module tree with every buffer on meta, as the parameters are."""
    twin = copy_without(module)
    for child in twin.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to("meta")
    return twin


def is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are the same values by identity of their memory."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
    )
