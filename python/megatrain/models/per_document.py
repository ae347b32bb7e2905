"""Documents of packed rows as rows of their own, for the layers that cannot keep them apart themselves.

A layer that carries a state from token to token (linear attention, a convolution), adds a bias by position in the row
or builds its mask without reading position ids would let a document see the one before. Such a layer gets each document
as a row of its own. Documents of similar length share a call; shorter ones are padded at the end, which in a causal
model no token sees. The rest of the model runs on the packed rows.

It costs one call of the layer per length instead of one in all, at most an eighth of padding, and two copies of the
hidden states. The layer runs uncompiled there, since there are as many shapes as lengths.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatrain.models.recorder import Record
from megatrain.models.types import LayerFunctions
from megatrain.models.varlen_attention import Documents, is_documents


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Documents that one call of a layer computes, padded to one length."""

    where: Tensor
    """(n * length,), int64: index of each token among those of all rows; padding repeats a document's last token."""
    shape: tuple[int, int]
    """(number of documents, length)"""
    counted: Tensor | None
    """(n * length, 1), fp32: 0 for tokens that a router's auxiliary loss leaves out; None where every token counts."""
    record: Record
    """Arguments of the layers for rows of this shape."""


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentBuckets:
    """The documents of a micro-batch, for the layers that need them as rows of their own."""

    layers: frozenset[int]
    """Indices of those layers."""
    buckets: tuple[Bucket, ...]
    back: Tensor
    """(tokens of all rows,), int64: index of each token among the tokens of the buckets, one bucket after another."""

    def to(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> "DocumentBuckets":
        """A copy on `device`, made asynchronously by `move`."""
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
        """Identities of the storages that stay on the device during the whole step."""
        own = (self.back, *(bucket.where for bucket in self.buckets))
        return frozenset(t.untyped_storage()._cdata for t in own).union(*(b.record.storages() for b in self.buckets))

    def call(self, template: LayerFunctions, layer: int, training: bool) -> "PerDocumentCall":
        """Layer number `layer`, whose weights `template` holds, as a function of the packed hidden states."""
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
    """A layer applied to the documents of a micro-batch."""

    __slots__ = ("_buckets", "_calls")

    def __init__(self, document_buckets: DocumentBuckets, calls: list[Any]) -> None:
        self._buckets = document_buckets
        self._calls = calls

    def __call__(self, hidden: Tensor) -> Any:
        """Hidden states (batch, seq, width) in and out, with (2, E) sums of routers where the layer returns them."""
        width = hidden.shape[-1]
        flat = hidden.reshape(-1, width)
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for bucket, call in zip(self._buckets.buckets, self._calls, strict=True):
            result = call(flat.index_select(0, bucket.where).view(*bucket.shape, width))
            output, *aux = result if isinstance(result, tuple) else (result,)
            outputs.append(output.reshape(-1, width))
            sums += aux
        output = torch.cat(outputs).index_select(0, self._buckets.back).view_as(hidden)
        return (output, torch.stack(sums).sum(0)) if sums else output


def convolves(layer: nn.Module) -> bool:
    """Whether a layer convolves over tokens, as linear attention and state-space layers do."""
    return any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in layer.modules())


def layers_mixing_documents(
    layers: Sequence[nn.Module],
    begins: Tensor,  # (batch, seq), bool: where a document begins
    record: Record,
    places_by_layer: bool,  # whether only the layers use positions (`Recorder.places_by_layer`)
) -> frozenset[int]:
    """Indices of the layers that would let a document see the one before: those without an attention mask that hides
    it, and those that convolve over tokens."""
    documents = begins.sum(1)
    row = int(documents.argmax())
    if int(documents[row]) == 1:
        return frozenset()
    if places_by_layer:
        return frozenset(range(len(layers)))
    border = int(begins[row, 1:].int().argmax()) + 1  # the first token of the second document
    return frozenset(
        layer
        for layer, (args, kwargs) in enumerate(zip(record.args, record.kwargs, strict=True))
        if convolves(layers[layer])
        or not any(_hides(t, row, border, begins.shape) for t in tree_leaves((args, kwargs), is_leaf=is_documents))
    )


def _hides(value: Any, row: int, border: int, shape: torch.Size) -> bool:
    """Whether `value` is an attention mask, or `Documents` in place of one, that hides token `border - 1` of a row from
    token `border`."""
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


def bucket_documents(
    layers: frozenset[int],
    begins: Tensor,  # (batch, seq), bool: where a document begins
    counted: Tensor | None,  # (batch * seq, 1), fp32
    record: Callable[[tuple[int, int]], Record],  # arguments of the layers for rows of a shape
    limit: int | None,  # longest row that the model has positions for
) -> DocumentBuckets:
    """The documents of a micro-batch, grouped by padded length."""
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([begins.numel()])])
    buckets: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        length = padded_length(end - start)
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
    """Upper bound of the bytes that a layer keeps for documents as rows of their own, given what it keeps for whole
    rows (`of_rows`): padding, and a copy of its input (`hidden`)."""
    return of_rows * 9 // 8 + hidden


def padded_length(length: int) -> int:
    """The padded length of a document: the next of eight lengths per power of two."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
