"""How published checkpoints store what the installed transformers holds in one tensor: one tensor per expert,
transposed, several tensors in one, other names.

transformers converts its own tensors to the published ones (`conversion_mapping.py`, `revert_weight_conversion` in
`core_model_loading.py`, since version 5). That conversion is run once, on tensors without storage: each result is then
a view, which shows the elements of the tensor that it stands for. So weights are read into place, and written from it,
without forming the tensors in between.
"""

import copy
import dataclasses
import functools
import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.units import is_count
from megatrain.weights.permute import gather

log: logging.Logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Elements of one tensor of the model that are contiguous in a file and, but for their order, in the
    model."""

    name: str
    """The model's tensor."""
    start: int
    """First element in it."""
    numel: int
    sizes: tuple[int, ...] = ()
    """Of the file's dimensions, where the model has them in another order."""
    order: tuple[int, ...] = ()
    """Which of these dimensions are the model's, outermost first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: its shape, and the consecutive blocks that it consists of."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def names(self) -> list[str]:
        """Tensors of the model that it holds something of."""
        return [block.name for block in self.blocks]


Layout = dict[str, Stored]
"""Every tensor of a folder by name, and what of the model it holds. A name may come twice: a head beside the embedding
that it is tied to."""


def whole(name: str, shape: tuple[int, ...]) -> Stored:
    """A tensor as the library holds it."""
    return Stored(shape, (Block(name, 0, math.prod(shape)),))


def transposed(name: str, shape: tuple[int, ...]) -> Stored:
    """A tensor whose last two dimensions, of those that the library holds, a file has the other way round."""
    *outer, rows, columns = shape
    transposed = torch.empty(shape, device="meta").transpose(-1, -2)
    block = _block(name, transposed)
    assert block is not None
    return Stored((*outer, columns, rows), (block,))


def library(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """As the library holds the model's tensors of `shapes`."""
    return {name: whole(name, shape) for name, shape in shapes.items()}


def fill(stored: Stored, start: int, out: Tensor, read: Callable[[str, int, Tensor], None]) -> None:
    """Fills `out`, flat, with elements of a file's tensor from `start` on. `read(name, position, into)` fills a flat
    tensor with consecutive elements of the model's tensor `name`."""
    done, begin = 0, 0
    for block in stored.blocks:
        low, high = max(start, begin) - begin, min(start + out.numel(), begin + block.numel) - begin
        begin += block.numel
        if low >= high:
            continue
        piece = out[done : done + high - low]
        done += high - low
        if block.order:
            gather(piece, low, block.sizes, block.order, functools.partial(_read_from, read, block))
        else:
            read(block.name, block.start + low, piece)


def _read_from(read: Callable[[str, int, Tensor], None], block: Block, position: int, into: Tensor) -> None:
    read(block.name, block.start + position, into)


# ------------------------------------------------------------------------------------------------- in a checkpoint


def describe(layout: Layout, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A layout as JSON: `library` or `published` where it is one of these, else every tensor."""
    for name, known in (("library", library(shapes)), ("published", published(model, dict(shapes)))):
        if layout == known:
            return name
    return {theirs: _described(stored) for theirs, stored in layout.items()}


def _described(stored: Stored) -> Any:
    if len(stored.blocks) == 1 and not stored.blocks[0].order:
        return [stored.blocks[0].name, stored.blocks[0].start, list(stored.shape)]
    return {"shape": list(stored.shape), "blocks": [dataclasses.asdict(block) for block in stored.blocks]}


def _stored(described: Any) -> Stored:
    if isinstance(described, list):
        name, start, shape = described
        return Stored(tuple(shape), (Block(name, start, math.prod(shape)),))
    blocks = [
        {**block, "sizes": tuple(block["sizes"]), "order": tuple(block["order"])} for block in described["blocks"]
    ]
    return Stored(tuple(described["shape"]), tuple(Block(**block) for block in blocks))


def _is_within(stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a recorded tensor is made of elements that the model's tensors have."""
    return (
        all(is_count(size, 0) for size in stored.shape)
        and stored.numel == sum(block.numel for block in stored.blocks)
        and all(
            is_count(number, 0)
            for block in stored.blocks
            for number in (block.start, block.numel, *block.sizes, *block.order)
        )
        and all(
            block.name in shapes
            and block.start + block.numel <= math.prod(shapes[block.name])
            and sorted(block.order) == list(range(len(block.sizes)))
            and (not block.order or math.prod(block.sizes) == block.numel)
            for block in stored.blocks
        )
    )


def read_layout(described: Any, shapes: Mapping[str, tuple[int, ...]]) -> Layout | None:
    """What `describe` made, for a model's tensors of `shapes`; None for the published layout, and for one that does not
    hold every one of these tensors whole."""
    if described == "library":
        return library(shapes)
    if not isinstance(described, dict):
        return None
    try:
        layout = {theirs: _stored(value) for theirs, value in described.items()}
        valid = all(_is_within(stored, shapes) for stored in layout.values())
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        log.warning("the recorded layout of the model's source is damaged: the published one is written")
        return None
    there = _counts(set(layout.values()), shapes)
    complete = {name for name, count in there.items() if count == math.prod(shapes[name])}
    if complete != set(shapes) or {name for stored in layout.values() for name in stored.names} != complete:
        log.warning("the recorded layout of the model's source is not that of this model: the published one is written")
        return None
    return layout


def _counts(held: "set[Stored] | list[Stored]", names: Mapping[str, Any]) -> dict[str, int]:
    """How many elements of each tensor of the model there are."""
    there = dict.fromkeys(names, 0)
    for stored in held:
        for block in stored.blocks:
            if block.name in there:
                there[block.name] += block.numel
    return there


# -------------------------------------------------------------------------------------------------- as published


class _Views(TorchFunctionMode):
    """Copies nothing that is only to be laid out otherwise, so that a view stays one; and where elements have to be
    brought into a new order, or several tensors into one, it keeps from what."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        """By storage: a tensor without one of the model's own, and those whose elements it holds consecutively."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, Tensor.to):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.cat:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            if math.prod(result.shape[:dim]) == 1:
                self.made[_storage(result)] = result, tuple(args[0])
        elif func is Tensor.reshape and _storage(result) != _storage(args[0]):
            self.made[_storage(result)] = result, (args[0],)
        return result


def published(model: Any, shapes: dict[str, tuple[int, ...]], *, transposed: bool = False) -> Layout:
    """Every tensor of a published checkpoint by name, for the model's tensors of `shapes`. A tensor of which that
    cannot be told keeps the library's name and form, which transformers reads too. `transposed`: with every tensor
    transposed that transformers transposes only where its shape says so, which is then not how it writes them."""
    own = library(shapes)
    reverted = _reverted(model, shapes, transposed)
    if reverted is None:
        return own
    tensors, sources, made = reverted
    found: Layout = {}
    for name, view in tensors.items():
        blocks = _blocks(view, sources, made)
        if blocks is not None:
            found[name] = Stored(tuple(view.shape), tuple(blocks))
    covered = _counts(list(found.values()), shapes)
    complete = {name for name, stored in own.items() if covered[name] == stored.numel}
    kept = {name: stored for name, stored in found.items() if complete.issuperset(stored.names)}
    there = {name for stored in kept.values() for name in stored.names}
    return kept | {name: stored for name, stored in own.items() if name not in there}


def _blocks(
    view: Tensor, sources: Mapping[int, str], made: Mapping[int, tuple[Tensor, tuple[Tensor, ...]]]
) -> list[Block] | None:
    """What a view consists of, in its own order; None where it is not made of blocks."""
    owner = sources.get(_storage(view))
    if owner is not None:
        block = _block(owner, view)
        return None if block is None else [block]
    result, parts = made.get(_storage(view), (None, ()))
    if result is None or view.numel() != result.numel() or not view.is_contiguous():
        return None
    found = [_blocks(part, sources, made) for part in parts if part.numel()]
    return None if any(blocks is None for blocks in found) else [block for blocks in found for block in blocks or ()]


def _block(name: str, view: Tensor) -> Block | None:
    """The elements of a tensor that a view of it has; None where there are gaps between them."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride  # the model has both dimensions beside each other too
        else:
            dims.append((size, stride))
    order = sorted(range(len(dims)), key=lambda dim: -dims[dim][1])
    expected = 1
    for dim in reversed(order):
        if dims[dim][1] != expected:
            return None
        expected *= dims[dim][0]
    start = int(view.storage_offset())
    if order == list(range(len(dims))):
        return Block(name, start, view.numel())
    return Block(name, start, view.numel(), tuple(size for size, _ in dims), tuple(order))


def _reverted(
    model: Any, shapes: dict[str, tuple[int, ...]], transposed: bool
) -> tuple[dict[str, Tensor], dict[int, str], dict[int, tuple[Tensor, tuple[Tensor, ...]]]] | None:
    """transformers' own result, whose storage is whose, and what was made of several; None for a model that is not
    transformers', and where nothing is turned."""
    library = sys.modules.get("transformers.modeling_utils")  # whoever has one of its models has imported it
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sources = {_storage(tensor): name for name, tensor in tensors.items()}
    views = _Views()
    before = model.__dict__.get("_weight_conversions")
    try:
        if transposed:
            conversions = _transposed(model)
            if conversions is None:
                return None
            model._weight_conversions = conversions
        with views:
            return revert_weight_conversion(model, dict(tensors)), sources, views.made
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        log.warning("%s is kept in the library's own layout: %s", type(model).__name__, error)
        return None
    finally:
        if transposed and before is None:
            model.__dict__.pop("_weight_conversions", None)
        elif transposed:
            model._weight_conversions = before


def _transposed(model: Any) -> list[Any] | None:
    """The conversions of a model's kind, with those that look at the shape first made to transpose always; None where
    there is none of these."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = copy.deepcopy(model.__dict__.get("_weight_conversions"))
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        # transformers leaves these out too: whether a source had the prefix cannot be told from the model
        conversions = [conversion for conversion in conversions if type(conversion).__name__ != "PrefixChange"]
    found = False
    for conversion in conversions:
        for operation in getattr(conversion, "operations", ()):
            if getattr(operation, "check_dims", False):
                operation.check_dims, found = False, True
    return conversions if found else None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
