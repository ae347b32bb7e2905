"""How published checkpoints store what the installed transformers holds in one tensor: experts apart, other names.

transformers knows the way from its own tensors to the published ones. It is run once, on tensors without storage: each
result is then a view that tells which elements of which tensor it stands for. So weights can be read into place, and
written from it, without ever forming the tensors in between.
"""

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Consecutive elements of one tensor of the model, which a file holds as a tensor of its own."""

    name: str
    """The model's tensor."""
    start: int
    """First element in it."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


Layout = dict[str, Block]
"""Every tensor of a folder by name, and what of the model it holds. A name may come twice: a head beside the embedding
that it is tied to."""


def library(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """As the library holds the model's tensors of `shapes`."""
    return {name: Block(name, 0, shape) for name, shape in shapes.items()}


def describe(layout: Layout, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A layout as JSON: `library` or `published` where it is one of these, else every block."""
    for name, known in (("library", library(shapes)), ("published", published(model, dict(shapes)))):
        if layout == known:
            return name
    return {theirs: [block.name, block.start, list(block.shape)] for theirs, block in layout.items()}


def read_layout(described: Any, shapes: Mapping[str, tuple[int, ...]]) -> Layout | None:
    """What `describe` made, for a model's tensors of `shapes`; None for the published layout, and for one that does not
    hold every one of these tensors whole."""
    if described == "library":
        return library(shapes)
    if not isinstance(described, dict):
        return None
    layout = {theirs: Block(name, start, tuple(shape)) for theirs, (name, start, shape) in described.items()}
    there = dict.fromkeys(shapes, 0)
    for block in set(layout.values()):
        if block.name in there:
            there[block.name] += block.numel
    whole = {name for name, count in there.items() if count == torch.Size(shapes[name]).numel()}
    if whole != set(shapes) or {block.name for block in layout.values()} != whole:
        log.warning("the recorded layout of the model's source is not that of this model: the published one is written")
        return None
    return layout


class _Views(TorchFunctionMode):
    """Copies nothing that is only to be laid out otherwise, so that a view stays one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, Tensor.to):
            return args[0]
        return func(*args, **(kwargs or {}))


def published(model: Any, shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Every tensor of a published checkpoint by name, for the model's tensors of `shapes`. A tensor that is published
    otherwise than in blocks of consecutive elements keeps the library's name and form, which transformers reads too."""
    own = library(shapes)
    reverted = _reverted(model, shapes)
    if reverted is None:
        return own
    tensors, sources = reverted
    found: dict[str, Block] = {}
    covered = dict.fromkeys(shapes, 0)
    for name, view in tensors.items():
        owner = sources.get(view.untyped_storage()._cdata)
        if owner is None or not view.is_contiguous():
            continue
        found[name] = Block(owner, int(view.storage_offset()), tuple(view.shape))
        covered[owner] += view.numel()
    whole = {name for name, block in own.items() if covered[name] == block.numel}
    kept = {name: block for name, block in found.items() if block.name in whole}
    return kept | {name: block for name, block in own.items() if name not in whole}


def _reverted(model: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], dict[int, str]] | None:
    """transformers' own result, and whose storage is whose; None for a model that is not transformers'."""
    library = sys.modules.get("transformers.modeling_utils")  # whoever has one of its models has imported it
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
    try:
        with _Views():
            return revert_weight_conversion(model, dict(tensors)), sources
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        log.warning("%s is kept in the library's own layout: %s", type(model).__name__, error)
        return None
