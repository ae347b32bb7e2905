"""What a vision-language model does with images before its first language layer, found by running its own code.

The modules besides the language model (vision tower, projector) belong to the embed unit: they are sent with it and run
as part of the model's own forward up to the first layer. A recording does not need their values, only their shapes, so
there a stub runs each part on meta and returns zeros of the right shape.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from megatrain.errors import ConfigError
from megatrain.models.fused_attention import FusedAttention
from megatrain.models.modules import copy_without, renew_parameters, replace_module
from megatrain.models.recorder import EmbeddingCalls, Recorder
from megatrain.models.trace import check_arguments

INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
)
"""What processors return besides the tokens, by the argument names of transformers' models."""
PLACEHOLDERS = {"pixel_values": "image_token_id", "pixel_values_videos": "video_token_id"}
"""Per input: the key of the configuration that holds the token in whose place its features are put."""
_KNOWN_SHAPES = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """What the vision parts feed into the decoder."""

    parts: tuple[str, ...]
    """Modules of the base that process images, by name."""
    trained: frozenset[str]
    """Their parameters that get a gradient from an image, by their names in the base."""
    before: frozenset[int]
    """`id` of every other tensor of the recorder's base that is used before the first layer, given an image."""
    deepstack: int
    """After how many of the first layers image features are added to the hidden states (DeepStack, arXiv
    2406.04334)."""
    placeholders: dict[str, int]
    """Per input: the id of the token in whose place its features are put."""
    kept_bytes: float
    """Bytes that autograd keeps of the parts per image token, with their blocks recomputed."""
    running_bytes: float
    """Bytes that one block keeps per image token."""


class _OnMeta(TorchFunctionMode):
    """Computes on meta whatever has a tensor on meta among its arguments."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # outer modes must not see what happens here
            if any(isinstance(value, Tensor) and value.is_meta for value in tree_flatten((args, kwargs))[0]):
                args, kwargs = tree_map(_to_meta, args), tree_map(_to_meta, kwargs)
                if func is F.scaled_dot_product_attention:
                    return FusedAttention.apply(*inspect.signature(_attention).bind(*args, **kwargs).args[:3])
            return func(*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
    """The part of fused attention's signature that decides the shape of its output."""


def _to_meta(value: Any) -> Any:
    # a 0-d tensor combines with tensors of any device, and may be a size, whose value is needed
    return value.to("meta") if isinstance(value, Tensor) and value.ndim else value


def _floats_to_meta(value: Any) -> Any:
    # integers keep their values: shapes depend on counts and sizes
    return value.detach().to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


class VisionStub(nn.Module):
    """Stands for a vision part of the base: returns zeros of the shapes that the part would return."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        twin = copy_without(part)
        renew_parameters(twin)
        object.__setattr__(self, "_part", part)  # not registered: its parameters are not the recorder's
        object.__setattr__(self, "_twin", twin)
        self._known: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.watch: Callable[[Tensor, list[Tensor]], Tensor] | None = None
        """Given a tensor on meta that the part returned, and its inputs, makes a tensor with values in its place; None:
        zeros."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_part"), name)

    @property
    def twin(self) -> nn.Module:
        """The part itself, its parameters on meta."""
        return object.__getattribute__(self, "_twin")  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors of the shapes and dtypes that the part returns."""
        if self.watch is not None:
            watch, inputs = self.watch, [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, Tensor)]
            with torch.enable_grad(), _OnMeta():
                made = self.twin(*tree_map(_floats_to_meta, args), **tree_map(_floats_to_meta, kwargs))
            return tree_map(lambda v: watch(v, inputs) if isinstance(v, Tensor) and v.is_meta else v, made)
        key = _key((args, kwargs))
        made = self._known.get(key)
        if made is None:
            with torch.no_grad(), _OnMeta():
                made = self.twin(*tree_map(_floats_to_meta, args), **tree_map(_floats_to_meta, kwargs))
            self._known[key] = made
            if len(self._known) > _KNOWN_SHAPES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return tree_map(lambda v: _zeros(v) if isinstance(v, Tensor) and v.is_meta else v, made)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _key(tree: Any) -> Any:
    """What the shapes of a part's outputs depend on: the shapes of floating-point inputs and the values of integers."""
    leaves, structure = tree_flatten(tree)
    found: list[Any] = [structure]
    for value in leaves:
        if isinstance(value, Tensor):
            values = None if value.is_floating_point() else tuple(value.flatten().tolist())
            found.append((tuple(value.shape), value.dtype, values))
        else:
            found.append(repr(value))
    return tuple(map(repr, found))


def stub_out(recorder: Recorder, parts: tuple[str, ...]) -> None:
    """Replaces the vision parts of a recorder's base by stubs."""
    for name in parts:
        replace_module(recorder.base, name, VisionStub(recorder.base.get_submodule(name)))


def trace_vision(recorder: Recorder, parts: tuple[str, ...], config: Any, calls: int) -> VisionSpec:
    """Runs the recorder's base to its end on a small image and checks that it can be streamed. `calls` is the number of
    embedding calls for text alone.

    Raises ConfigError, with the reason, where images do more than change the hidden states.
    """
    base, name = recorder.base, type(recorder.base).__name__
    stubs: dict[str, Any] = {part: base.get_submodule(part) for part in parts}
    generator = torch.Generator().manual_seed(0)
    made: list[tuple[Tensor, Tensor]] = []

    def watch(like: Tensor, inputs: list[Tensor]) -> Tensor:
        if not like.is_floating_point():
            return _zeros(like)
        # distinct values, so that what is done with them shows; and a graph that leads back to the part's inputs
        leaf = torch.randn(like.shape, generator=generator).to(like.dtype).requires_grad_()
        made.append((leaf, like))
        return leaf + sum(v.flatten()[:1].sum().to(leaf.dtype) * 0 for v in inputs if v.requires_grad)

    own = {id(t) for t in (*base.parameters(), *base.buffers())}
    before: set[int] = set()
    looked_up = 0
    saved = _Saved([stub.twin for stub in stubs.values()])

    def seen(tensor: Tensor) -> None:
        if id(tensor) in own and not recorder.calls:
            before.add(id(tensor))

    def answer(ids: Tensor, weight: Tensor, _: int | None) -> Tensor:
        nonlocal looked_up
        looked_up += 1
        before.add(id(weight))
        return torch.zeros(*ids.shape, weight.shape[1], dtype=recorder.dtype, requires_grad=True)

    try:
        images, ids = _example(recorder, config)
        for stub in stubs.values():
            stub.watch = watch
        recorder.begin(to_the_end=True)
        with torch.enable_grad(), EmbeddingCalls(answer, seen), saved:
            base(**recorder.call(ids, None, None, images))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{name} could not be run on a stub of an image: {error}") from error
    finally:
        for stub in stubs.values():
            stub.watch = None
    if len(recorder.calls) != recorder.num_layers:
        raise ConfigError(f"{name} ran {len(recorder.calls)} of its {recorder.num_layers} layers on an image")
    if looked_up != calls:
        raise ConfigError(f"{name} looks up {looked_up} embeddings with an image and {calls} without one")
    check_arguments(recorder, name)
    features = int((ids == config.image_token_id).sum())
    return VisionSpec(
        parts=parts,
        trained=_trained(recorder.hidden[-1], made, {part: stub.twin for part, stub in stubs.items()}),
        before=frozenset(before),
        deepstack=_deepstack(recorder, name),
        placeholders={
            key: int(token)
            for key, field in PLACEHOLDERS.items()
            if (token := getattr(config, field, None)) is not None
        },
        kept_bytes=saved.kept / features,
        running_bytes=saved.running / features,
    )


class _Saved(contextlib.AbstractContextManager[None]):
    """Counts the bytes that autograd keeps of modules on meta, as if their blocks were recomputed."""

    def __init__(self, twins: list[nn.Module]) -> None:
        modules = [module for twin in twins for module in twin.modules()]
        self._weights = {p.untyped_storage()._cdata for twin in twins for p in twin.parameters()}
        self._blocks = blocks_of(modules)
        self._all: dict[int, Tensor] = {}
        self._inputs = 0
        self._handles: list[Any] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def running(self) -> float:
        """Bytes of one block."""
        return self._total / max(1, len(self._blocks))

    @property
    def kept(self) -> float:
        """Bytes of the inputs of all blocks; of everything where there are no blocks."""
        return self._inputs if self._blocks else self._total

    @property
    def _total(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._all.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if tensor.is_meta and storage not in self._weights:
            self._all[storage] = tensor
        return tensor

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        self._inputs += hidden.nbytes if isinstance(hidden, Tensor) else 0

    def __enter__(self) -> None:
        self._handles = [b.register_forward_pre_hook(self._enter, with_kwargs=True) for b in self._blocks]
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()


def blocks_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules that transformers can recompute one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def recompute_blocks(parts: Iterable[nn.Module]) -> None:
    """Makes the blocks of vision parts keep only their input for backward (non-reentrant checkpointing)."""
    for block in blocks_of(module for part in parts for module in part.modules()):
        made: Any = block
        made.gradient_checkpointing = True
        made._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def _trained(hidden: Tensor, made: list[tuple[Tensor, Tensor]], twins: dict[str, nn.Module]) -> frozenset[str]:
    """Names of the parameters of the parts on which the last layer's hidden states depend. `made` holds, for each
    tensor that a part returned, the leaf that stood for it and the tensor on meta."""
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(hidden.sum(), [leaf for leaf, _ in made], allow_unused=True)
    used = [like for (_, like), grad in zip(made, grads, strict=True) if grad is not None and like.requires_grad]
    named = [(f"{part}.{name}", p) for part, twin in twins.items() for name, p in twin.named_parameters()]
    named = [(name, p) for name, p in named if p.requires_grad]
    if not used or not named:
        return frozenset()
    of: tuple[Tensor | None, ...] = torch.autograd.grad(
        used, [p for _, p in named], [torch.empty_like(u) for u in used], allow_unused=True
    )
    return frozenset(name for (name, _), grad in zip(named, of, strict=True) if grad is not None)


def _example(recorder: Recorder, config: Any) -> tuple[dict[str, Tensor], Tensor]:
    """One image as a processor would return it, and a row of tokens with places for it: either patches and the grid of
    the image, or a square image of the size that the vision part is made for."""
    see: Any = config.vision_config
    if "image_grid_thw" in recorder.accepts:
        side = 2 * see.spatial_merge_size
        channels = getattr(see, "in_channels", None) or getattr(see, "in_chans", 3)
        width = channels * see.temporal_patch_size * see.patch_size**2
        images = {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}
    else:
        size = see.image_size if isinstance(see.image_size, (list, tuple)) else (see.image_size, see.image_size)
        images = {"pixel_values": torch.zeros(1, getattr(see, "num_channels", 3), *size)}
        extract: Any = recorder.base.get_image_features
        asked = inspect.signature(extract).parameters.get("image_sizes")
        if asked is not None and asked.default is inspect.Parameter.empty:
            images["image_sizes"] = torch.tensor([[*size]])
    count = _count(recorder.base.get_image_features, images, config.get_text_config().hidden_size)
    ids = torch.zeros(1, count + 2, dtype=torch.int64)
    ids[:, 1:-1] = config.image_token_id
    types = (ids == config.image_token_id).to(torch.int64)
    return images | {key: types for key in ("token_type_ids", "mm_token_type_ids") if key in recorder.accepts}, ids


def count_features(recorder: Recorder, images: dict[str, Any], key: str, width: int) -> int | None:
    """The number of hidden states of `width` that the model makes of the input `key`; None where there is none, or
    where the model's own code fails on it."""
    if key not in images:
        return None
    extract: Any = recorder.base.get_image_features if key == "pixel_values" else recorder.base.get_video_features
    try:
        return _count(extract, images, width)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None


def _count(extract: Any, images: dict[str, Any], width: int) -> int:
    takes = inspect.signature(extract).parameters
    with torch.no_grad():
        features = extract(**{key: value for key, value in images.items() if key in takes})
    features = getattr(features, "pooler_output", features)
    return sum(t.numel() for t in tree_flatten(features)[0] if isinstance(t, Tensor)) // width


def _deepstack(recorder: Recorder, name: str) -> int:
    """After how many layers features are added. Raises ConfigError for any other change between two layers."""
    features = list(recorder.language.get("deepstack_visual_embeds") or ())
    mask = recorder.language.get("visual_pos_masks")
    if len(features) >= recorder.num_layers:
        raise ConfigError(f"{name} adds features of images after its last layer, so its head cannot be cut off")
    for index, (given, got) in enumerate(zip(recorder.hidden, recorder.hidden[1:], strict=False)):
        wanted = given.detach()
        if index < len(features) and mask is not None:
            wanted = add_features(wanted, mask.flatten().nonzero().flatten(), features[index].detach())
        if not torch.equal(wanted, got.detach()):
            raise ConfigError(f"{name} changes the hidden states between its layers, so they cannot be streamed")
    return len(features)


def add_features(hidden: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """Hidden states (batch, seq, width) with `features` (T, width) added to the tokens `where` (T,), int64, which index
    the flattened batch."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    changed = flat.index_select(0, where) + features.to(hidden.dtype)
    return flat.index_copy(0, where, changed).view_as(hidden)


def feature_grad(grad: Tensor, where: Tensor) -> Tensor:
    """The gradient (T, width) of the features, given `grad` of the result of `add_features`."""
    return grad.reshape(-1, grad.shape[-1]).index_select(0, where)
