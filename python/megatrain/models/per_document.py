"""Documents of packed rows, one by one through the layers that cannot keep them apart themselves.

A layer that carries a state from token to token (linear attention, a convolution), adds a bias by place in the row or
builds its mask without looking at positions would let a document see the one before. Such a layer is given each
document as a row of its own: documents of like length together, the shorter ones filled up behind, where in a causal
model nothing sees the filling. Everything else of the model runs on the packed rows.

It costs a call of the layer for each length instead of one, at most an eighth of filling, and two copies of the hidden
states; the layer runs uncompiled there, since the shapes are as many as the documents' lengths.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatrain.models.packing import Documents, is_documents
from megatrain.models.recorder import Record

if TYPE_CHECKING:
    from megatrain.engine.template import LayerTemplate
    from megatrain.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Documents that one call of a layer computes."""

    where: Tensor
    """(n * length,), int64: each token's place among the tokens of all rows; filling repeats a document's last."""
    shape: tuple[int, int]
    """(n, length)"""
    counted: Tensor | None
    """(n * length, 1), fp32: 0 for what a router's auxiliary loss leaves out; None: every token counts."""
    record: Record
    """What layers are called with for rows of this shape."""


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentBuckets:
    """A micro-batch's documents, for the layers that need them one by one."""

    layers: frozenset[int]
    """Those layers."""
    buckets: tuple[Bucket, ...]
    back: Tensor
    """(tokens of all rows,), int64: each token's place among the buckets' tokens."""

    def to(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> "DocumentBuckets":
        """The same on `device`, copied asynchronously by `move`."""
        if device.type == "cpu":
            return self
        buckets = (
            dataclasses.replace(
                bucket,
                where=move(bucket.where),
                counted=move(bucket.counted) if bucket.counted is not None else None,
                record=bucket.record.to(device),
            )
            for bucket in self.buckets
        )
        return DocumentBuckets(self.layers, tuple(buckets), move(self.back))

    def storages(self) -> frozenset[int]:
        """Identities of the memory that stays on the device anyway."""
        own = (self.back, *(bucket.where for bucket in self.buckets))
        return frozenset(t.untyped_storage()._cdata for t in own).union(*(b.record.storages() for b in self.buckets))

    def call(self, template: "LayerTemplate", layer: int, training: bool) -> "PerDocumentCall":
        """The `layer`-th layer as a function of the packed hidden states."""
        calls: list[Any] = []
        for bucket in self.buckets:
            args, kwargs = bucket.record.args[layer], bucket.record.kwargs[layer]
            calls.append(
                template.training_call(args, kwargs, bucket.counted, compiled=False)
                if training
                else template.call(args, kwargs, compiled=False)
            )
        return PerDocumentCall(self, calls)


class PerDocumentCall:
    """A layer with a micro-batch's documents."""

    __slots__ = ("_apart", "_calls")

    def __init__(self, document_buckets: DocumentBuckets, calls: list[Any]) -> None:
        self._apart = document_buckets
        self._calls = calls

    def __call__(self, hidden: Tensor) -> Any:
        """Hidden states (batch, seq, width) in and out, with the sums of routers where they are asked for."""
        width = hidden.shape[-1]
        flat = hidden.reshape(-1, width)
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for bucket, call in zip(self._apart.buckets, self._calls, strict=True):
            result = call(flat.index_select(0, bucket.where).view(*bucket.shape, width))
            output, *aux = result if isinstance(result, tuple) else (result,)
            outputs.append(output.reshape(-1, width))
            sums += aux
        output = torch.cat(outputs).index_select(0, self._apart.back).view_as(hidden)
        return (output, torch.stack(sums).sum(0)) if sums else output


def layers_mixing_documents(decoder: "Decoder", begins: Tensor, record: Record) -> frozenset[int]:
    """Layers that would let a document see the one before, where documents begin at `begins` (batch, seq): those
    without an attention mask that hides it, and those that convolve over tokens."""
    documents = begins.sum(1)
    row = int(documents.argmax())
    if int(documents[row]) == 1:
        return frozenset()
    if decoder.recorder.places_by_layer:
        return frozenset(range(decoder.num_layers))
    border = int(begins[row, 1:].int().argmax()) + 1  # the first token of the second document
    return frozenset(
        layer
        for layer, (args, kwargs) in enumerate(zip(record.args, record.kwargs, strict=True))
        if decoder.convolves(layer)
        or not any(_hides(t, row, border, begins.shape) for t in tree_leaves((args, kwargs), is_leaf=is_documents))
    )


def _hides(value: Any, row: int, border: int, shape: torch.Size) -> bool:
    """Whether `value` is an attention mask, or stands for one, that hides token `border - 1` from token `border` of a
    row."""
    rows, seq = shape
    if isinstance(value, Documents):
        return bool((value.starts == row * seq + border).any())
    if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[0] not in (1, rows):
        return False
    if value.shape[2] != seq or value.shape[3] < seq:
        return False
    entries = value[row if value.shape[0] > 1 else 0, 0, border]
    # a token sees itself, which tells the two kinds of boolean masks apart
    if value.dtype == torch.bool:
        return bool(entries[border - 1] != entries[border])
    return float(entries[border - 1]) < -1e4


def set_apart(
    layers: frozenset[int],
    begins: Tensor,  # (batch, seq), bool: where a document begins
    counted: Tensor | None,  # (batch * seq, 1), fp32
    record: Callable[[tuple[int, int]], Record],  # of rows of a shape
    limit: int | None,  # longest row that the model has positions for
) -> DocumentBuckets:
    """The documents of a micro-batch, those of like length together."""
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([begins.numel()])])
    buckets: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        length = filled_up(end - start)
        buckets.setdefault(min(length, max(limit, end - start)) if limit else length, []).append((start, end))
    made: list[Bucket] = []
    back = torch.empty(begins.numel(), dtype=torch.int64)
    first = 0
    for length, documents in sorted(buckets.items()):
        spans = torch.tensor(documents)
        where = spans[:, :1] + torch.arange(length)
        real = where < spans[:, 1:]
        back[where[real]] = first + real.flatten().nonzero().flatten()
        first += where.numel()
        where = torch.minimum(where, spans[:, 1:] - 1).flatten()
        counts = real.reshape(-1, 1).float() if counted is None else counted[where] * real.reshape(-1, 1)
        shape = (len(documents), length)
        made.append(Bucket(where, shape, None if bool(counts.all()) else counts, record(shape)))
    return DocumentBuckets(layers, tuple(made), back)


def kept_bytes(of_rows: int, hidden: int) -> int:
    """Bytes that a layer keeps at most for documents one by one, which keeps `of_rows` for whole rows: filling, and its
    own copy of its input (`hidden`)."""
    return of_rows * 9 // 8 + hidden


def filled_up(length: int) -> int:
    """The next of eight lengths an octave."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
