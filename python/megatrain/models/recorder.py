"""What a model's own forward passes to its layers, recorded by running it with the layers replaced by stubs.

Masks, rotary tables and per-layer arguments differ between architectures and versions of transformers. So the base runs
on the CPU with stubs that note their arguments and return their input, and the real layers are called with those
arguments later. Nothing here knows a model by name, and nothing touches a device.
"""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from megatrain.errors import ConfigError
from megatrain.models.modules import copy_without, replace_module
from megatrain.models.varlen_attention import Documents, is_documents

NO_MASK = "megatrain_no_mask"
"""An attention implementation that transformers does not know, so that it builds no mask: the recorded one is used."""


class EmbeddingCalls(TorchFunctionMode):
    """Answers every call of `torch.nn.functional.embedding` itself, and passes every tensor argument of any torch
    function to `seen`."""

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
    """Stands for layer `index`: passes its arguments to `take` and returns the result."""

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
        """The result of `take`."""
        return self._take(self._index, args, kwargs)


class Replay(nn.Module):
    """Stands for a module that does not read the hidden states: returns its recorded outputs, one per call."""

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
    """What the layers are called with for one micro-batch, besides the hidden states."""

    args: list[tuple[Any, ...]]
    """Per layer: positional arguments, without the hidden states."""
    kwargs: list[dict[str, Any]]
    """Per layer: keyword arguments, without the hidden states."""
    embedding_ids: list[Tensor | None]
    """Per embedding call: the indices looked up; None where they are the token ids themselves."""
    side: dict[str, list[Any]]
    """Outputs of the modules that do not read the hidden states, by module name, in call order."""
    positions: Tensor | None = None
    """Position ids that the model computed for images, as passed to its language part."""
    visual: Tensor | None = None
    """(T,) int64, indices into the flattened batch: tokens to whose hidden states image features are added after a
    layer."""
    _storages: frozenset[int] | None = None

    def to(self, device: torch.device) -> "Record":
        """A copy on `device`, made asynchronously; what several layers share is copied once."""
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
        """Identities of the storages of all tensors that layers are called with."""
        if self._storages is None:
            tensors = (t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, Tensor))
            self._storages = frozenset(t.untyped_storage()._cdata for t in tensors)
        return self._storages


class _Stop(Exception):
    """Ends a forward whose rest is not needed."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


def forward_until_layers(base: nn.Module, layers: str, call: dict[str, Any]) -> Tensor:
    """The hidden states that reach the first layer of `base`, whose `layers` must be `stopping_layers`."""
    try:
        base(**call)
    except _Stop as stop:
        return cast("Tensor", stop.value)
    raise AssertionError(f"{layers} was not reached")


def stopping_layers(layers: nn.ModuleList) -> nn.ModuleList:
    """Stubs for layers; the first one called ends the forward with the hidden states it was given."""

    def take(_: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Stop(args[0] if args else kwargs["hidden_states"])

    return nn.ModuleList([Stub(layer, i, take) for i, layer in enumerate(layers)])


class Recorder:
    """Runs the base of a model on the CPU with stubs for its layers."""

    def __init__(self, base: nn.Module, layers: str, dtype: torch.dtype, tuple_output: bool = False) -> None:
        """`base` has its buffers on the CPU and its parameters anywhere; `layers` is the name of its layer list,
        `dtype` that of the hidden states; `tuple_output` says whether a layer returns a tuple that starts with them."""
        real = base.get_submodule(layers)
        assert isinstance(real, nn.ModuleList)
        self.layers = layers
        self.num_layers: int = len(real)
        self.dtype = dtype
        self.tuple_output = tuple_output
        self.base: nn.Module = copy_without(base, real)
        self.stubs: nn.ModuleList = nn.ModuleList([Stub(layer, i, self._take) for i, layer in enumerate(real)])
        replace_module(self.base, layers, self.stubs)
        for module in self.base.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(
                        torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), requires_grad=False
                    )
        self.base.eval()
        self.accepts: set[str] = set(inspect.signature(type(self.base).forward).parameters)
        self._language = self.base.get_submodule(layers.rpartition(".")[0])
        self._caches = bool(
            {"use_cache"} & {*self.accepts, *inspect.signature(type(self._language).forward).parameters}
        )
        self.side: tuple[str, ...] = ()
        self._state = [
            (m, dict(m.__dict__), dict(m._buffers)) for m in self.base.modules() if m._buffers or m is self.base
        ]
        self.places_by_layer = False
        """Whether the base takes no position ids because only its layers use positions (ALiBi), so none are passed."""
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: list[Tensor] = []
        self._tail = False
        self._one_at_a_time = threading.Lock()
        """A step's micro-batches may be prepared in one thread while another one plans."""
        self.language: dict[str, Any] = {}
        """Keyword arguments of the last call of the module that holds the layers."""
        if self._language is not self.base:
            self._language.register_forward_pre_hook(lambda _m, _a, k: self.language.update(k), with_kwargs=True)

    @property
    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """(args, kwargs) of each layer called in the last run, without the hidden states."""
        return self._calls

    @property
    def hidden(self) -> list[Tensor]:
        """The hidden states passed to each layer in the last run."""
        return self._hidden

    def begin(self, *, to_the_end: bool = False) -> None:
        """Forgets the last run. The next one ends at the last layer, or with `to_the_end` at the end of the forward."""
        self.reset()
        self._calls, self._hidden, self._tail = [], [], to_the_end
        self.language.clear()

    def reset(self) -> None:
        """Restores every buffer and cached length, so that a record depends on its own batch alone: dynamic rotary
        scaling keeps the longest length seen (`dynamic_rope_update` in transformers.modeling_rope_utils), which a
        resumed run would not have seen."""
        for module, attributes, buffers in self._state:
            for name in [n for n in module.__dict__ if n not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            object.__setattr__(module, "_buffers", {k: v.clone() if v is not None else v for k, v in buffers.items()})

    @contextlib.contextmanager
    def weights_as(self, value: float) -> Iterator[None]:
        """A context in which every floating-point parameter of the base is `value`; they are 0 outside it."""
        cells = [p.detach().as_strided((), ()) for p in self.base.parameters() if p.is_floating_point()]
        try:
            for cell in cells:
                cell.fill_(value)
            yield
        finally:
            for cell in cells:
                cell.zero_()

    def _take(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if index != len(self._calls):
            raise ConfigError(
                f"layer {index} of {type(self.base).__name__} is called in place {len(self._calls)}: layers that do "
                "not run once each, in order, cannot be streamed"
            )
        if index == 0 and self._tail and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # the embedding gets no gradient; the layers after it do
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
        images: dict[str, Any] | None = None,  # the model's further inputs, by its names
    ) -> dict[str, Any]:
        """Keyword arguments for the base. Raises ConfigError for an input that the base does not take."""
        call: dict[str, Any] = {"input_ids": input_ids, **(images or {})}
        for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if value is not None:
                if name == "position_ids" and self.places_by_layer:
                    continue
                if name not in self.accepts:
                    raise ConfigError(
                        f"{type(self.base).__name__} accepts no {name}: use rows without padding and packing"
                    )
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
        """Records what the layers are called with for this micro-batch. Safe to call from any thread."""
        with self._one_at_a_time:
            return self._record(input_ids, attention_mask, position_ids, images)

    def _record(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        images: dict[str, Any] | None,
    ) -> Record:
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


def is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are views of the same memory with the same shape and strides."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
    )
