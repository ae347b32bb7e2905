"""Batches of training data, each a pure function of the step number.

`batch(step)` depends only on the data set, the settings and `step`, so a run that resumes at any step gets the batches
that it would have got without stopping.
"""

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config import Config
from megatrain.data import shuffle
from megatrain.data.dataset import Dataset, Part
from megatrain.errors import ConfigError
from megatrain.names import IGNORED

if TYPE_CHECKING:
    import torch

_CYCLE, _EPOCH, _SOME_HELD_OUT = 2, 3, 4
"""Part of the key of a random order, so that different uses get different orders."""

_SHORTEST = 128
"""Windows below the full length are padded to a multiple of this many tokens, so that few shapes occur."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepBatch:
    """The data of one optimizer step."""

    step: int
    """From 0."""
    epoch: int
    """From 0."""
    micro_batches: list["dict[str, torch.Tensor]"]
    """Tensors (rows, length), int64: `input_ids`, `labels` (-100: not supervised; not shifted), and with packing
    `position_ids`, which restart at 0 with each row of a window (rows do not attend to each other), without packing
    `attention_mask` (1: token, 0: padding). Where a row of the data set has another weight than 1 also `loss_weights`,
    fp32: the weight of the row that each token is of."""
    row_ids: tuple[int, ...]
    """Rows of the data set in the order they are computed; a row that was split may occur more than once."""
    num_supervised: int
    """Tokens whose prediction counts towards the loss."""
    num_tokens: int
    """Tokens, padding excluded."""
    lengths: tuple[int, ...]
    """Tokens of each row or part of a row, in the order of `row_ids`."""


class Loader:
    """Divides a data set into optimizer steps, epoch by epoch; builds the next step's batch in the background."""

    def __init__(
        self,
        dataset: Dataset,
        config: Config,
        *,
        micro_batch: int | None = None,
        pad_id: int = 0,
        mark_padding: bool = False,
    ) -> None:
        """`micro_batch`: sequences computed at a time (None: `plan.micro_batch`, else a whole step). `pad_id`: the
        token that fills padding; it is never supervised and never attended to. `mark_padding`: with packing, batches
        also have `padding_mask` (1: token, 0: padding)."""
        self._dataset = dataset
        self._data = config.data
        self._train = config.train
        self._max_eval_batches = config.eval.max_batches
        self._micro_batch = micro_batch or config.plan.micro_batch
        self._pad_id = pad_id
        self._mark_padding = mark_padding
        self._weighted = any(part.tokens.weights is not None for part in dataset.parts)
        self._firsts = np.cumsum([0] + [len(part.sequences) for part in dataset.parts])
        self._lengths = np.concatenate([_lengths(part) for part in dataset.parts])
        # Sequences of a step; None: as many as fit into batch_tokens.
        self._per_step = self._train.batch_size
        if self._per_step is None and dataset.packing:
            assert self._train.batch_tokens is not None
            if self._train.batch_tokens % dataset.seq_len:
                raise ConfigError(
                    f"train.batch_tokens ({self._train.batch_tokens}) is not a multiple of seq_len ({dataset.seq_len})"
                )
            self._per_step = self._train.batch_tokens // dataset.seq_len
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._before = [0]
        self._lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[StepBatch]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch. Other epochs have as many, except with `batch_tokens` and without packing, where
        rows of different length fill the steps."""
        return self._num_epoch_steps(0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, from `train.steps` or `train.epochs`."""
        if self._train.steps is not None:
            return self._train.steps
        epochs = self._train.epochs
        assert epochs is not None
        whole = int(epochs)
        steps = self._steps_before(whole)
        if epochs > whole:
            # The small term undoes the rounding of a fraction such as 0.3.
            steps += math.ceil((epochs - whole) * self._num_epoch_steps(whole) - 1e-9)
        return max(1, steps)

    def batch(self, step: int) -> StepBatch:
        """The data of step `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"steps count from 0; there is no step {step}")
        batch = self._next[1].result() if self._next is not None and self._next[0] == step else self._build(step)
        self._next = None
        if step + 1 < self.num_steps:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="megatrain-data")
            self._next = (step + 1, self._pool.submit(self._build, step + 1))
        return batch

    def eval_batches(self) -> Iterator[StepBatch]:
        """All rows once in fixed order, in batches of the size of a training step. Of more than `eval.max_batches` so
        many, of sequences drawn from all sources alike: the same ones in every evaluation and with every seed.

        `StepBatch.step` is the number of the batch.
        """
        sequences = np.arange(len(self._lengths), dtype=np.int64)
        bounds = self._bounds(sequences)
        most = self._max_eval_batches
        if most is not None and most < len(bounds) - 1:
            # Sources come one after the other, and with packing the longest rows of each first.
            sequences = shuffle.order(len(sequences), _SOME_HELD_OUT)
            bounds = self._bounds(sequences)[: most + 1]
        for index in range(len(bounds) - 1):
            yield self._assemble(sequences[bounds[index] : bounds[index + 1]], index, 0)

    def close(self) -> None:
        """Stops the background thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._next = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequences of an epoch in order, and the boundaries of its steps: where each begins, and the end."""
        with self._lock:
            if epoch not in self._epochs:
                chosen = np.concatenate(
                    [
                        self._chosen(part, index, epoch) + self._firsts[index]
                        for index, part in enumerate(self._dataset.parts)
                    ]
                )
                if self._data.shuffle and len(self._dataset.parts) > 1:
                    chosen = chosen[shuffle.order(len(chosen), self._train.seed, _EPOCH, epoch)]
                # Keep only what the current and the next step need; other epochs are computed again when needed.
                kept = dict(list(self._epochs.items())[-1:])
                self._epochs = kept | {epoch: (chosen, self._bounds(chosen))}
            return self._epochs[epoch]

    def _chosen(self, part: Part, index: int, epoch: int) -> np.ndarray:
        """A source's sequences in an epoch: the next `weight` times its number of sequences from an endless series of
        shuffled passes, so that over time each occurs equally often."""
        count, wanted = len(part.sequences), self._dataset.epoch_sequences[index]
        chosen: list[np.ndarray] = []
        at, stop = epoch * wanted, (epoch + 1) * wanted
        while at < stop:
            cycle, offset = divmod(at, count)
            whole = (
                shuffle.order(count, self._train.seed, _CYCLE, index, cycle)
                if self._data.shuffle
                else np.arange(count, dtype=np.int64)
            )
            chosen.append(whole[offset : offset + stop - at])
            at += len(chosen[-1])
        return np.concatenate(chosen)

    def _bounds(self, sequences: np.ndarray) -> np.ndarray:
        count = len(sequences)
        if self._per_step is not None:
            return np.append(np.arange(0, count, self._per_step), count)
        # As many rows as fit; a row that is longer than batch_tokens is a step of its own.
        assert self._train.batch_tokens is not None
        ends = np.cumsum(self._lengths[sequences])
        bounds = [0]
        while bounds[-1] < count:
            before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            stop = int(np.searchsorted(ends, before + self._train.batch_tokens, side="right"))
            bounds.append(max(stop, bounds[-1] + 1))
        return np.array(bounds)

    def _num_epoch_steps(self, epoch: int) -> int:
        if self._per_step is not None:
            return -(-sum(self._dataset.epoch_sequences) // self._per_step)
        return len(self._epoch(epoch)[1]) - 1

    def _steps_before(self, epoch: int) -> int:
        """Steps before an epoch."""
        if self._per_step is not None:
            return epoch * self._num_epoch_steps(0)
        with self._lock:
            while len(self._before) <= epoch:
                self._before.append(self._before[-1] + self._num_epoch_steps(len(self._before) - 1))
            return self._before[epoch]

    def _build(self, step: int) -> StepBatch:
        if self._per_step is not None:
            epoch = step // self._num_epoch_steps(0)
        else:
            epoch = 0
            while self._steps_before(epoch + 1) <= step:
                epoch += 1
        sequences, bounds = self._epoch(epoch)
        index = step - self._steps_before(epoch)
        return self._assemble(sequences[bounds[index] : bounds[index + 1]], step, epoch)

    def _assemble(self, sequences: np.ndarray, step: int, epoch: int) -> StepBatch:
        if not self._dataset.packing:
            # Sorted by length, longest first: less padding, and the largest micro-batch shows its memory at once.
            sequences = sequences[np.argsort(-self._lengths[sequences], kind="stable")]
        size = self._micro_batch or len(sequences)
        micro_batches = []
        row_ids: list[int] = []
        lengths: list[int] = []
        supervised = 0
        for low in range(0, len(sequences), size):
            group = [self._locate(int(sequence)) for sequence in sequences[low : low + size]]
            micro_batch, num_supervised = self._tensors(group)
            micro_batches.append(micro_batch)
            supervised += num_supervised
            for part, pieces in group:
                row_ids += (part.first_row + part.pieces.row[pieces]).tolist()
                lengths += part.pieces.length[pieces].tolist()
        return StepBatch(step, epoch, micro_batches, tuple(row_ids), supervised, sum(lengths), tuple(lengths))

    def _locate(self, sequence: int) -> tuple[Part, np.ndarray]:
        index = int(np.searchsorted(self._firsts, sequence, side="right")) - 1
        part = self._dataset.parts[index]
        return part, part.sequences.pieces(sequence - int(self._firsts[index]))

    def _tensors(self, group: Sequence[tuple[Part, np.ndarray]]) -> "tuple[dict[str, torch.Tensor], int]":
        import torch

        used = [int(part.pieces.length[pieces].sum()) for part, pieces in group]
        width = max(used)
        if self._dataset.packing:
            width = min(self._dataset.seq_len, -(-width // _SHORTEST) * _SHORTEST)
        shape = (len(group), width)
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        weights = np.ones(shape, dtype=np.float32) if self._weighted else None
        for line, (part, pieces) in enumerate(group):
            at = 0
            for piece in pieces.tolist():
                start, length = int(part.pieces.start[piece]), int(part.pieces.length[piece])
                ids = part.tokens.tokens[start : start + length]
                learnt = part.tokens.supervised[start + 1 : start + length] != 0
                input_ids[line, at : at + length] = ids
                # The first token of a row is never supervised: the row before it must not predict it.
                labels[line, at + 1 : at + length] = np.where(learnt, ids[1:], IGNORED)
                positions[line, at : at + length] = np.arange(length)
                if weights is not None and part.tokens.weights is not None:
                    weights[line, at : at + length] = part.tokens.weights[part.pieces.row[piece]]
                at += length
            positions[line, at:] = np.arange(width - at)
        arrays: dict[str, np.ndarray] = {"input_ids": input_ids, "labels": labels}
        if weights is not None:
            arrays["loss_weights"] = weights
        real = (np.arange(width) < np.array(used)[:, None]).astype(np.int64)
        if self._dataset.packing:
            arrays["position_ids"] = positions
            if self._mark_padding:
                arrays["padding_mask"] = real
        else:
            arrays["attention_mask"] = real
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return tensors, int((labels != IGNORED).sum())


def _lengths(part: Part) -> np.ndarray:
    """(sequences,) int64: tokens in each."""
    sums = np.concatenate([[0], np.cumsum(part.pieces.length[part.sequences.order])])
    lengths: np.ndarray = sums[part.sequences.offsets[1:]] - sums[part.sequences.offsets[:-1]]
    return lengths
