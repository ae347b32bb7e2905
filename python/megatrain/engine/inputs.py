"""Micro-batches as callers give them, checked, and as a step needs them.

Everything that needs a look at values happens here, on the CPU and before the step: ranges, supervised tokens, masks
and rotary tables (by the recorder), which embedding rows are looked up. The device part is asynchronous copies.
"""

import collections
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatrain.engine.numerics import full_precision
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.per_document import DocumentBuckets, bucket_documents, layers_mixing_documents
from megatrain.models.recorder import Record
from megatrain.models.varlen_attention import is_documents
from megatrain.models.vision import INPUTS, PLACEHOLDERS, count_features
from megatrain.names import IGNORED, suggest

Batch = Mapping[str, Any]
"""`input_ids` (batch, seq), `labels` (batch, seq; -100 is not supervised), `attention_mask` or `position_ids`;
`loss_weights`, factors of the losses, for each row (batch,) or for each label (batch, seq). Packed rows may name their
padding in `padding_mask` (0 is padding), which only a router's auxiliary loss asks for. For a model
that sees, what its processor makes of images too (`pixel_values`, `image_grid_thw`, `token_type_ids`, …). For a
`loss_fn` whatever else it reads."""

KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "padding_mask", "loss_weights")
"""What of a micro-batch is read for any model. A `loss_fn` is given the whole dict: only with one it may hold more."""

LEAST_DIVISOR, MOST_DIVISOR = 1e-30, 1e30
"""What a loss can be divided by. Far beyond, the sum of losses, or one over what it is divided by, is no number of
fp32."""

_CACHED_SHAPES = 16

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@dataclasses.dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch, ready to be computed. Tensors are on the CPU until `to` has moved them."""

    index: int
    """Place in the caller's list; keys the random state."""
    shape: tuple[int, int]
    """(batch, seq)"""
    num_tokens: int
    """Supervised tokens."""
    input_ids: Tensor
    """(batch, seq), int64"""
    targets: Tensor
    """(batch * seq,), int64: the next token's label"""
    rows: Tensor
    """(num_tokens,), int64: which targets are supervised"""
    weights: Tensor | None
    """(batch * seq,), fp32: the factor of each target's loss; None: 1."""
    total_weight: float
    """Sum of the supervised targets' weights; without weights `num_tokens`."""
    attention_mask: Tensor | None
    position_ids: Tensor | None
    counted: Tensor | None
    """(batch * seq, 1), fp32: 0 for padding, which a router's auxiliary loss leaves out; None: every token counts."""
    record: Record | None
    """None: the record of its shape, from the recorder's cache."""
    document_buckets: DocumentBuckets | None
    """The documents of packed rows, for layers that cannot keep them apart; None: all can."""
    lookups: list[Tensor]
    """Per embedding call: the rows looked up, as indices into the step's distinct rows (flat, int64)."""
    batch: dict[str, Any]
    """The micro-batch as the caller passed it."""
    images: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Model inputs other than tokens, by the model's names; empty without an image."""

    @property
    def recorded(self) -> Record:
        """The record of a micro-batch that `InputPreprocessor.with_record` has returned."""
        if self.record is None:
            raise RuntimeError(f"micro-batch {self.index} is computed before its record was looked up")
        return self.record


@dataclasses.dataclass(slots=True, kw_only=True)
class StepInputs:
    """The micro-batches of one step, checked and recorded."""

    micro_batches: list[MicroBatch]
    """Those with a supervised token; all of them with a `loss_fn`."""
    num_tokens: int
    """Supervised tokens of all."""
    total_weight: float
    """Sum of their weights, which the loss is divided by; without weights `num_tokens`."""
    tables: dict[int, tuple[Tensor, int]]
    """For each trained embedding table (index in unit 0): the distinct rows looked up, and which of them is padding."""
    empty: list[int]
    """Micro-batches without a supervised token, which add nothing."""
    with_loss_fn: bool
    """Whether they are for a step with `loss_fn`."""
    preprocessor: "InputPreprocessor"
    """Which made them, for its own model."""

    def check_step(self, preprocessor: "InputPreprocessor", with_loss_fn: bool) -> None:
        """Raises ConfigError where they were prepared for another engine than the one of `preprocessor`, or for steps
        of the other loss."""
        if self.preprocessor is not preprocessor:
            raise ConfigError("these micro-batches were prepared by another engine; prepare them with this one")
        if self.with_loss_fn and not with_loss_fn:
            raise ConfigError(
                "these micro-batches were prepared with with_loss_fn=True and step has no loss_fn, so their "
                "loss_weights would not be applied; prepare them without with_loss_fn, or give the loss_fn"
            )
        if with_loss_fn and not self.with_loss_fn:
            raise ConfigError(
                "step has a loss_fn and these micro-batches were prepared without, so those that have no supervised "
                "token would be left out; prepare them with engine.prepare(micro_batches, with_loss_fn=True)"
            )

    @property
    def weighted(self) -> bool:
        """Whether any micro-batch has weights."""
        return any(m.weights is not None for m in self.micro_batches)

    @property
    def seen(self) -> bool:
        """Whether any micro-batch has an image."""
        return any(key in m.images for m in self.micro_batches for key in PLACEHOLDERS)

    @property
    def largest(self) -> tuple[int, int]:
        """(batch, seq) of the micro-batch with most tokens."""
        return max((m.shape for m in self.micro_batches), key=lambda shape: shape[0] * shape[1], default=(0, 0))


def check_list_of_batches(batches: Any) -> None:
    """Raises ConfigError for what is no list of micro-batches."""
    if isinstance(batches, Mapping):
        raise ConfigError("micro-batches must be a list of dicts, not one dict; write [batch]")
    if isinstance(batches, StepInputs):
        raise ConfigError("what engine.prepare returned is for one step of training; give the list of dicts itself")
    if not isinstance(batches, list | tuple):
        raise ConfigError(f"micro-batches must be a list of dicts, not {type(batches).__name__}")


def largest_shape(batches: Sequence[Batch]) -> tuple[int, int]:
    """(batch, seq) of the batch with most tokens, so that one plan serves them all. What is no batch is left to
    `InputPreprocessor.prepare` to refuse."""
    largest = (0, 0)
    given: Sequence[Any] = batches
    for batch in given:
        try:
            rows = batch["input_ids"]
            shape = len(rows), len(rows[0])
        except (TypeError, KeyError, IndexError):
            continue
        largest = max(largest, shape, key=math.prod)
    return largest


class InputPreprocessor:
    """Checks and records micro-batches for one model; safe to call from another thread."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.decoder = decoder
        self._device = device
        self._lock = threading.Lock()
        self._plain: collections.OrderedDict[tuple[int, int], tuple[Record, Record]] = collections.OrderedDict()

    @torch.inference_mode(False)
    def prepare(
        self, batches: Sequence[Batch], *, need_labels: bool = True, keep_empty: bool = False, more_keys: bool = False
    ) -> StepInputs:
        """The CPU's part. Raises ConfigError, which names the micro-batch, for anything the model cannot take. Keys
        beside `KEYS` are let through with `more_keys` only."""
        check_list_of_batches(batches)
        if not batches:
            raise ConfigError("a step needs at least one micro-batch")
        with full_precision:  # rotary tables are products of matrices
            checked = [self._check(i, batch, need_labels, more_keys) for i, batch in enumerate(batches)]
        # a router's auxiliary loss is taken over the whole step, so that no row of it may be left out
        whole = self.decoder.router is not None and any(m.num_tokens for m in checked)
        used = [m for m in checked if m.num_tokens or keep_empty or whole]
        total_weight = math.fsum(m.total_weight for m in used)
        if any(m.weights is not None for m in used) and total_weight:
            _check_total(total_weight)
        records = [m.record if m.record is not None else self._of_shape(m.shape)[0] for m in used]
        return StepInputs(
            micro_batches=used,
            num_tokens=sum(m.num_tokens for m in used),
            total_weight=total_weight,
            tables=self._look_up(used, records),
            empty=[m.index for m in checked if not m.num_tokens and not whole],
            with_loss_fn=more_keys,
            preprocessor=self,
        )

    def in_groups(
        self, batches: Sequence[Batch], size: int, *, need_labels: bool = True, keep_empty: bool = False
    ) -> Iterator[StepInputs]:
        """Batches as they are given, `size` at a time; groups without a supervised token are left out, except with
        `keep_empty`."""
        for start in range(0, len(batches), size):
            part = batches[start : start + size]
            prepared = self.prepare(part, need_labels=need_labels, keep_empty=keep_empty)
            if prepared.micro_batches:
                yield prepared

    def to_device(self, micro: MicroBatch, with_batch: bool = False) -> MicroBatch:
        """The micro-batch on the device, copied asynchronously; masks and rotary tables follow with `with_record`."""
        if self._device.type == "cpu":
            return micro
        batch = micro.batch
        if with_batch:
            batch = {k: self.move(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
        return dataclasses.replace(
            micro,
            input_ids=self.move(micro.input_ids),
            targets=self.move(micro.targets),
            rows=self.move(micro.rows),
            weights=self.move(micro.weights) if micro.weights is not None else None,
            attention_mask=self.move(micro.attention_mask) if micro.attention_mask is not None else None,
            position_ids=self.move(micro.position_ids) if micro.position_ids is not None else None,
            counted=self.move(micro.counted) if micro.counted is not None else None,
            lookups=[self.move(where) for where in micro.lookups],
            batch=batch,
            images={key: self.move(value) for key, value in micro.images.items()},
        )

    def masked(self, prepared: StepInputs) -> int | None:
        """The first micro-batch of which a layer is called with a dense mask."""
        for micro in prepared.micro_batches:
            record = micro.record if micro.record is not None else self._of_shape(micro.shape)[0]
            square = (micro.shape[1], micro.shape[1])
            given = tree_leaves((record.args, record.kwargs), is_leaf=is_documents)
            if any(isinstance(value, Tensor) and value.ndim == 4 and value.shape[-2:] == square for value in given):
                return micro.index
        return None

    def has_own_masks(self, prepared: StepInputs) -> bool:
        """Whether a layer is called with a dense mask that is not that of the shape alone."""
        own = any(micro.record is not None for micro in prepared.micro_batches)
        return own and self.masked(prepared) is not None

    def with_record(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with what its layers are called with on the device, copied asynchronously."""
        record = micro.record.to(self._device) if micro.record is not None else self._of_shape(micro.shape)[1]
        document_buckets = (
            micro.document_buckets.to(self._device, self.move) if micro.document_buckets is not None else None
        )
        return dataclasses.replace(micro, record=record, document_buckets=document_buckets)

    def move(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; from pinned memory, since a pageable copy would wait for the device."""
        if self._device.type == "cpu":
            return tensor
        return tensor if tensor.is_cuda else tensor.contiguous().pin_memory().to(self._device, non_blocking=True)

    def end_copies(self) -> None:
        """To be called when all copies at the beginning of a pass are queued: queues a small kernel after them.

        On an H100 whatever was queued after these copies once uploads had begun, an event included, ran only once the
        uploads paused, which at 3B and 32k tokens was 60 ms later: it seems to be queued where the last copy was, on
        the engine that the uploads then keep busy. That a kernel between them ends this has not been measured yet."""
        if self._device.type == "cuda":
            torch.ones(1, device=self._device)

    def _of_shape(self, shape: tuple[int, int]) -> tuple[Record, Record]:
        """Record of a micro-batch without padding or packing, on the CPU and on the device: its shape decides it."""
        with self._lock, full_precision:
            if shape not in self._plain:
                record = self.decoder.recorder.record(torch.zeros(shape, dtype=torch.int64))
                self._plain[shape] = record, record.to(self._device)
                if len(self._plain) > _CACHED_SHAPES:
                    self._plain.popitem(last=False)
            self._plain.move_to_end(shape)
            return self._plain[shape]

    def _check(self, index: int, batch: Batch, need_labels: bool, more_keys: bool) -> MicroBatch:
        where = f"micro-batch {index}"
        if not isinstance(batch, Mapping):
            raise ConfigError(f"{where} must be a dict of tensors, not {type(batch).__name__}")
        known = (*KEYS, *(INPUTS if self.decoder.vision_spec is not None else ()))
        for key, value in batch.items():
            if key not in known and key not in PLACEHOLDERS and value is not None and not more_keys:
                raise ConfigError(
                    f"{where} has {key!r}, which is not used ({suggest(key, known)}); only a loss_fn, given the "
                    "whole dict, may read more"
                )
        ids = _matrix(where, "input_ids", batch.get("input_ids"), None)
        shape = (int(ids.shape[0]), int(ids.shape[1]))
        decoder = self.decoder
        _in_range(where, "token id", ids, decoder.num_embeddings, "the model's embedding has")
        limit = decoder.max_positions
        # packed rows are as long as one likes: what counts is the largest position, for models that are given them
        counts = batch.get("position_ids") is None or "position_ids" not in decoder.recorder.accepts
        if limit is not None and shape[1] > limit and counts:
            raise ConfigError(
                f"{where}: sequence of {shape[1]} tokens, but the model has positions for {limit}; shorten the row, or "
                "give the position_ids of its documents where it holds several"
            )
        labels = batch.get("labels")
        if labels is None and need_labels:
            raise ConfigError(f"{where} has no labels")
        targets = torch.full(shape, IGNORED, dtype=torch.int64)
        if labels is not None:
            labels = _matrix(where, "labels", labels, shape)
            targets[:, :-1] = labels[:, 1:]
            supervised = targets != IGNORED
            _in_range(where, "label", targets[supervised], decoder.vocab_size, "the model's head has")
        targets = targets.flatten()
        # a loss_fn reads the dict itself, and may have weights of another kind in it
        weights = None if more_keys else _loss_weights(where, batch, shape)
        if weights is not None:
            targets = torch.where(weights > 0, targets, IGNORED)  # a weight of 0 is a label of -100
        rows = (targets != IGNORED).nonzero().flatten()
        mask, positions = self._mask_and_positions(where, batch, shape)
        padded = mask is not None  # beside padding positions that begin again are refused, so that they part nothing
        counted = self._counted(where, batch, mask, shape, more_keys)
        images = self._images(where, batch, ids)
        # types of tokens may lift causality, so that what goes before sees what follows
        causal = "token_type_ids" not in images
        if mask is not None and causal:
            mask = _without_what_follows(mask, (targets != IGNORED).view(shape))
        record, document_buckets = None, None
        if mask is not None or positions is not None or images:
            with self._lock:
                record = self._record(where, ids, mask, positions, images)
            if positions is not None and not padded:
                document_buckets = self._apart(where, positions, record, counted, images)
        return MicroBatch(
            index=index,
            shape=shape,
            num_tokens=int(rows.shape[0]),
            input_ids=ids,
            targets=targets,
            rows=rows,
            weights=weights,
            total_weight=float(rows.shape[0]) if weights is None else float(weights[rows].sum(dtype=torch.float64)),
            attention_mask=mask,
            position_ids=positions,
            counted=counted,
            record=record,
            document_buckets=document_buckets,
            lookups=[],
            batch={name: v.clone() if more_keys and isinstance(v, Tensor) else v for name, v in batch.items()},
            images=images,
        )

    def _counted(
        self, where: str, batch: Batch, mask: Tensor | None, shape: tuple[int, int], more_keys: bool
    ) -> Tensor | None:
        """Which tokens a router's auxiliary loss is taken over."""
        padding = batch.get("padding_mask")
        if self.decoder.router is None and more_keys:
            return None  # a loss_fn may have another one
        if padding is not None:
            padding = _matrix(where, "padding_mask", padding, shape) != 0
        if self.decoder.router is None:
            return None
        if padding is not None:
            mask = padding if mask is None else padding & (mask != 0)
        return None if mask is None or bool(mask.all()) else (mask != 0).reshape(-1, 1).float()

    def _record(
        self, where: str, ids: Tensor, mask: Tensor | None, positions: Tensor | None, images: dict[str, Tensor]
    ) -> Record:
        recorder = self.decoder.recorder
        if not images:
            return recorder.record(ids, mask, positions)
        try:
            return recorder.record(ids, mask, positions, images)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, StopIteration) as error:
            raise ConfigError(f"{where}: {self._why_not(ids, images, error)}") from error

    def _why_not(self, ids: Tensor, images: dict[str, Tensor], error: Exception) -> str:
        """Why a model's own forward refused images."""
        recorder, vision_spec = self.decoder.recorder, self.decoder.vision_spec
        assert vision_spec is not None
        for key in PLACEHOLDERS:
            features = count_features(recorder, images, key, self.decoder.hidden_size)
            places = int((ids == vision_spec.placeholders.get(key, -1)).sum())
            if features is not None and features != places:
                return (
                    f"{key} {[*images[key].shape]} make {features} features, but input_ids hold token "
                    f"{vision_spec.placeholders.get(key)}, the place of one, {places} times"
                )
        shapes = ", ".join(f"{key} {[*value.shape]}" for key, value in images.items())
        return f"{type(recorder.base).__name__} cannot take {shapes}: {error}"

    def _images(self, where: str, batch: Batch, ids: Tensor) -> dict[str, Tensor]:
        """What the model takes beside the tokens; empty where the micro-batch has no image."""
        given = {key: batch[key] for key in INPUTS if batch.get(key) is not None}
        pixels = [key for key in PLACEHOLDERS if key in given]
        vision_spec, recorder = self.decoder.vision_spec, self.decoder.recorder
        for key in pixels:
            if vision_spec is None or key not in recorder.accepts:
                raise ConfigError(f"{where} has {key}, but {type(recorder.base).__name__} takes none")
        if vision_spec is None:
            return {}
        for key, token in vision_spec.placeholders.items():
            count = int((ids == token).sum())
            if count and key not in given:
                raise ConfigError(
                    f"{where}: input_ids hold token {token}, the place of a feature of an image, {count} times, but "
                    f"there are no {key}"
                )
        images: dict[str, Tensor] = {}
        for key, value in given.items():
            if key in recorder.accepts:
                try:
                    images[key] = torch.as_tensor(value).cpu().clone()  # as with token ids, see `_matrix`
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ConfigError(f"{where}: {key} must be a tensor: {error}") from None
                if key.endswith("token_type_ids"):
                    images[key] = _matrix(where, key, value, (int(ids.shape[0]), int(ids.shape[1])))
        return images

    def _apart(
        self, where: str, positions: Tensor, record: Record, counted: Tensor | None, images: dict[str, Tensor]
    ) -> DocumentBuckets | None:
        """The documents of packed rows, where some layers would let one see the one before."""
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        layers = layers_mixing_documents(self.decoder.layers, begins, record, self.decoder.recorder.places_by_layer)
        if not layers:
            return None
        if images:
            raise ConfigError(
                f"{where}: images in packed rows, but layers.{min(layers)} is given each document as a row of its own, "
                "where images cannot be assigned to documents; put one document in each row (data.packing: false)"
            )
        if bool((positions[begins] != 0).any()):
            raise ConfigError(
                f"{where}: a document in position_ids does not begin at 0, but layers.{min(layers)} is given each "
                "document as a row of its own; begin each at 0"
            )

        def record_of(shape: tuple[int, int]) -> Record:
            with self._lock:
                return self.decoder.recorder.record(torch.zeros(shape, dtype=torch.int64))

        return bucket_documents(layers, begins, counted, record_of, self.decoder.max_positions)

    def _mask_and_positions(
        self, where: str, batch: Batch, shape: tuple[int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Mask and positions, each None where it says nothing: all ones, and positions that count."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if mask is not None:
            mask = _matrix(where, "attention_mask", mask, shape)
            if bool(((mask != 0) & (mask != 1)).any()):
                raise ConfigError(f"{where}: attention_mask must hold 0 and 1 only")
            if bool((mask == 0).all(1).any()):
                raise ConfigError(f"{where}: attention_mask hides a whole row; leave such rows out")
        if positions is not None:
            positions = _matrix(where, "position_ids", positions, shape)
            limit = self.decoder.max_positions
            if limit is not None:
                _in_range(where, "position", positions, limit, "the model has positions for")
            if mask is not None and not bool(mask.all()) and _begins_again(mask == 1, positions):
                raise ConfigError(
                    f"{where}: position_ids restart while attention_mask hides padding; transformers separates "
                    "packed rows by position_ids only, so give padding its own and leave attention_mask out"
                )
            if torch.equal(positions, torch.arange(shape[1]).expand(shape)):
                positions = None
        if mask is not None and bool(mask.all()):
            mask = None
        return mask, positions

    def _look_up(self, used: list[MicroBatch], records: list[Record]) -> dict[int, tuple[Tensor, int]]:
        """Fills every micro-batch's `lookups` and returns each trained table's distinct rows."""
        decoder, tables = self.decoder, {}
        embed = decoder.units[0].tensors
        ids = [
            [m.input_ids if c is None else c for c in record.embedding_ids]
            for m, record in zip(used, records, strict=True)
        ]
        numbers: dict[int, Tensor] = {}
        for call, (table, padding) in enumerate(decoder.tables):
            if embed[table].role != "trainable" or table in numbers or not used:
                continue
            calls = [c for c, (t, _) in enumerate(decoder.tables) if t == table]
            seen = torch.zeros(embed[table].shape[0], dtype=torch.bool)
            for of_micro in ids:
                for c in calls:
                    seen[of_micro[c].flatten()] = True
            numbers[table] = seen.cumsum(0) - 1
            place = int(numbers[table][padding]) if padding is not None and bool(seen[padding]) else -1
            tables[table] = seen.nonzero().flatten(), place
            del call
        for micro, of_micro in zip(used, ids, strict=True):
            micro.lookups = [
                numbers[table][of_micro[c].flatten()] if table in numbers else torch.empty(0, dtype=torch.int64)
                for c, (table, _) in enumerate(decoder.tables)
            ]
        return tables


def _begins_again(real: Tensor, positions: Tensor) -> bool:
    """Whether positions (batch, seq) do anything but go up along the tokens of a row that are `real`, by one from one
    to the next, and by any number where padding is between them. Those of padding say nothing."""
    together = real[:, 1:] & real[:, :-1]
    largest = positions.masked_fill(~real, -1).cummax(1).values
    down = real[:, 1:] & (positions[:, 1:] <= largest[:, :-1])
    return bool((down | (together & (positions[:, 1:] != positions[:, :-1] + 1))).any())


def _without_what_follows(mask: Tensor, supervised: Tensor) -> Tensor | None:
    """The mask of (batch, seq) without the padding that follows a row, or None where nothing is left of it. In a causal
    model no token sees that padding, so that hiding it changes nothing unless it is supervised itself. A row with
    padding before or between its tokens keeps its mask: padding that has nothing to attend to looks at everything."""
    follows = (mask.flip(1).cumsum(1) == 0).flip(1)
    free = follows & ~((follows & supervised) | (~follows & (mask == 0))).any(1, keepdim=True)
    mask = mask.masked_fill(free, 1)
    return None if bool(mask.all()) else mask


def _loss_weights(where: str, batch: Batch, shape: tuple[int, int]) -> Tensor | None:
    """(batch * seq,) fp32 weights of the next token's loss, 0 at each row's end; None where there are none."""
    given = batch.get("loss_weights")
    if given is None:
        return None
    try:
        weights = _strided(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: loss_weights must be numbers: {error}") from None
    if tuple(weights.shape) not in (shape[:1], shape) or weights.dtype == torch.bool or weights.dtype.is_complex:
        raise ConfigError(
            f"{where}: loss_weights must be numbers of shape {[shape[0]]} (one for each row) or {[*shape]} (one for "
            f"each label), not {weights.dtype} {[*weights.shape]}"
        )
    weights = weights.unsqueeze(1).expand(shape) if weights.ndim == 1 else weights
    narrow = weights.float()
    wrong = ~(torch.isfinite(narrow) & (narrow >= 0)) | ((narrow == 0) & (weights != 0))
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ConfigError(
            f"{where}: loss_weights hold {weights[row, place].item()} at row {row}, token {place}; a weight is a "
            "number from 0 on that fp32 can hold"
        )
    shifted = torch.zeros(shape)
    shifted[:, :-1] = narrow[:, 1:]
    return shifted.flatten()


def _check_total(weight: float) -> None:
    """Raises ConfigError where a loss cannot be divided by so large or small a sum of weights."""
    if not LEAST_DIVISOR <= weight <= MOST_DIVISOR:
        raise ConfigError(
            f"the loss_weights of these micro-batches have the sum {weight:g}; fp32 can divide a loss by "
            f"{LEAST_DIVISOR:g} to {MOST_DIVISOR:g}. The loss is divided by that sum, so multiply all of them by one "
            "number: it changes nothing else"
        )


def _matrix(where: str, name: str, value: Any, shape: tuple[int, int] | None) -> Tensor:
    """`value` as an int64 CPU tensor (batch, seq)."""
    if value is None:
        raise ConfigError(f"{where} has no {name}")
    try:
        tensor = _strided(value)
        tensor = tensor.clone() if tensor.is_inference() else tensor
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: {name} must be integers of shape (batch, seq): {error}") from None
    # a boolean mask counts as one of integers; boolean token ids do not
    number = (tensor.dtype == torch.bool and name.endswith("mask")) or tensor.dtype in _INTEGERS
    if tensor.ndim != 2 or not number or 0 in tensor.shape:
        raise ConfigError(
            f"{where}: {name} must be integers of shape (batch, seq), not {tensor.dtype} {[*tensor.shape]}"
        )
    if shape is not None and tuple(tensor.shape) != shape:
        raise ConfigError(f"{where}: {name} has shape {[*tensor.shape]}, but input_ids {[*shape]}")
    return tensor.to(torch.int64, copy=True)  # the caller may fill its tensor again before the step


def _strided(value: Any) -> Tensor:
    """`value` as an ordinary tensor on the CPU. Raises TypeError for a tensor that is none, and what torch raises."""
    tensor = torch.as_tensor(value).cpu()
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError("it is sparse, nested or packed otherwise; make it an ordinary tensor")
    return tensor


def _in_range(where: str, what: str, values: Tensor, limit: int, owner: str) -> None:
    if not values.numel():
        return
    low, high = (int(v) for v in values.aminmax())
    if low < 0 or high >= limit:
        bad = high if high >= limit else low
        raise ConfigError(f"{where}: {what} {bad}, but {owner} {limit}")
