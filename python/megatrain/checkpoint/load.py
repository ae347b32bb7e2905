"""Restoring a checkpoint (`checkpoint.py`) into an engine, bit for bit."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.checkpoint import MOMENTS, Checkpoint
from megatrain.checkpoint.hf_folder import join
from megatrain.errors import CheckpointError, DamagedCheckpoint
from megatrain.names import format_names
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import DamagedFile, Entry
from megatrain.weights import hf_layout
from megatrain.weights.planes import set_step_count, write_plane
from megatrain.weights.source import FileWeights
from megatrain.weights.state_format import StateFormat
from megatrain.weights.types import Core, Decoder, Stored, TensorRef

log: logging.Logger = logging.getLogger(__name__)

_PIECE = 4 << 20
"""Elements of a tensor that are held in memory at a time."""


def load(
    folder: str | Path,
    engine: Stored,
    *,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,  # bytes done, bytes in all
    # given the `state` before the first value is replaced; what it raises leaves the engine unchanged
    begin: Callable[[Mapping[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Restores every plane bit for bit, compares every CRC on the way, and returns the `state` given to `save`.

    A parameter that was frozen and is trained now starts with zero moments and count 0. One that was trained and is
    frozen now keeps the weights that it was computed with. A frozen tensor that the engine stores in another type than
    the checkpoint is converted where every value stays the same. Raises CheckpointError, before anything is changed,
    when the checkpoint belongs to another model, and when a file is damaged (the engine's state is then undefined: load
    another checkpoint).
    """
    checkpoint = Checkpoint.open(Path(folder))
    core, decoder = engine.core, engine.decoder  # in this order: the core's plan decides where tensors are
    saved, planes = checkpoint.state(), checkpoint.planes()
    counts = saved.step_counts
    shapes = {ref.name: tuple(ref.shape) for ref in decoder.tensors.values()}
    layout = hf_layout.read_layout(saved.layout, shapes)
    restore = _Restore(core, decoder.tensors, counts, FileWeights(planes["model"]), FileWeights(planes["residual"]))
    work = [(shard, checkpoint.files[shard.path.name].crc32) for group in planes.values() for shard in group]
    total, done = sum(shard.size for shard, _ in work), [0]

    def report(size: int) -> None:
        done[0] += size
        if progress is not None:
            progress(min(done[0], total), total)

    try:
        _check(checkpoint, decoder, restore, engine.state_format)
        begin(saved.state)
        safetensors_io.read_checked(work, restore.write, threads=threads, progress=report)
    except DamagedFile as error:
        raise DamagedCheckpoint(f"{error}; take an earlier checkpoint", checkpoint.folder) from None
    new = [ref for ref in decoder.tensors.values() if ref.role == "trainable" and ref.name not in counts]
    for ref in new:
        _clear_moments(core, ref, engine.state_format)
    if new:
        log.info("trained from now on, with moments that start at zero: %s", format_names([ref.name for ref in new]))
    for ref in decoder.tensors.values():
        if ref.role == "trainable":
            set_step_count(core, ref, counts.get(ref.name, 0))
    if saved.layout is not None:
        decoder.set_layout(layout)
    return dict(saved.state)


def _check(checkpoint: Checkpoint, decoder: Decoder, restore: "_Restore", state_format: StateFormat) -> None:
    """Raises CheckpointError unless every tensor of the model is there in its shape, and no other, and each fits into
    what the engine stores it in. Raises DamagedFile."""
    entries = restore.model.entries
    problems = []
    if checkpoint.precision != decoder.precision:
        problems.append(f"it was trained in {checkpoint.precision} and this run is {decoder.precision}")
    saved, own = (form.request() for form in (checkpoint.state_format(), state_format))
    if decoder.precision == "fp32":
        saved["master"] = own["master"]
    for key, value in own.items():
        if saved[key] != value and restore.counts:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder} was saved with {key}: {saved[key]}, and this run has {key}: {value}; "
                f"go on with train.{key}: {saved[key]}, or export the checkpoint and start another run from its weights"
            )
    for names, what in (
        (decoder.tensors.keys() - entries.keys(), "it lacks"),
        (entries.keys() - decoder.tensors.keys(), "the model has no tensor for its"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5])
            problems.append(f"{what} {shown}" + (f" and {len(names) - 5} more" if len(names) > 5 else ""))
    for name, entry in entries.items():
        ref = decoder.tensors.get(name)
        if ref is None:
            continue
        if tuple(ref.shape) != entry.shape:
            problems.append(f"its {name} has shape {list(entry.shape)} and the model's has {list(ref.shape)}")
        elif entry.dtype.is_floating_point != ref.dtype.is_floating_point:
            problems.append(f"its {name} is {entry.dtype} and the model's is {ref.dtype}")
    if not problems:
        inexact = [ref for ref in decoder.tensors.values() if not restore.is_exact(ref)]
        problems += [f"its {ref.name} has values that {ref.dtype}, its type here, cannot hold" for ref in inexact]
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} does not belong to this model: {'; '.join(problems[:4])}{more}"
        )


@dataclass(frozen=True, slots=True)
class _Restore:
    """Puts pieces of a checkpoint's files into the planes of the store."""

    core: Core
    tensors: Mapping[str, TensorRef]
    counts: Mapping[str, int]
    """Of the tensors that were trained."""
    model: FileWeights
    residual: FileWeights

    def write(self, stem: str, entry: Entry, start: int, piece: Tensor) -> None:
        """One piece; see `safetensors_io.read_checked`."""
        ref = self.tensors[entry.name]
        try:
            if ref.role == "trainable":
                trained = entry.name in self.counts
                plane = stem if stem != "model" else "weights" if trained else "master"
                write_plane(self.core, ref, plane, piece, start)
            elif stem == "model":
                write_plane(self.core, ref, "weights", self._frozen(ref, start, piece).to(ref.dtype), start)
        except ValueError as error:  # of the core: a value that is not finite
            raise DamagedFile(f"{self.model.where(entry.name)}: {entry.name}: {error}") from None

    def _frozen(self, ref: TensorRef, start: int, piece: Tensor) -> Tensor:
        """The values of a tensor that is frozen now: as stored; of one that was trained and is stored here in another
        type than it was computed in, the fp32 masters."""
        if ref.dtype == piece.dtype or ref.name not in self.residual.entries:
            return piece
        size = self.residual.entries[ref.name].dtype.itemsize
        buffer = torch.empty(piece.numel() * size, dtype=torch.uint8)
        return join(piece, self.residual.read(ref.name, start, piece.numel(), buffer))

    def is_exact(self, ref: TensorRef) -> bool:
        """Whether the type that a frozen tensor has here holds every value of it. Reads the values only where the type
        alone does not say. Raises DamagedFile."""
        entry = self.model.entries[ref.name]
        if ref.role == "trainable" or ref.dtype == entry.dtype:
            return True
        stored = torch.float32 if ref.name in self.residual.entries else entry.dtype
        if torch.promote_types(stored, ref.dtype) == ref.dtype:
            return True
        for start in range(0, entry.numel, _PIECE):
            count = min(_PIECE, entry.numel - start)
            room = torch.empty(count * entry.dtype.itemsize, dtype=torch.uint8)
            values = self._frozen(ref, start, self.model.read(ref.name, start, count, room))
            if not torch.equal(values.to(ref.dtype).to(values.dtype), values):
                return False
        return True


def _clear_moments(core: Core, ref: TensorRef, state_format: StateFormat) -> None:
    numel = torch.Size(state_format.moment_shape(ref.shape)).numel()
    zeros = torch.zeros(min(numel, _PIECE), dtype=state_format.moment_dtype)
    for moment in MOMENTS:
        for start in range(0, numel, max(len(zeros), 1)):
            write_plane(core, ref, moment, zeros[: numel - start], start)
