"""A run's whole state on disk, under Hugging Face names: never units, never pickle.

    checkpoints/step-N/
        model-*.safetensors, index, config, tokenizer    the weights as the device computes with them: a Hugging Face
                                                         folder that stock transformers loads
        residual-*.safetensors                           the lower halves of the fp32 masters (bf16 runs)
        exp_avg-*.safetensors, exp_avg_sq-*.safetensors  AdamW's moments, fp32
        state.json                                       step count of each trained tensor, the layout of the model's
                                                         source, and what the trainer adds
        manifest.json                                    size and CRC32 per 64 MiB of every file, written last

`docs/checkpoints.md` documents the format. A checkpoint is complete when its manifest verifies. It is written beside
its place and renamed, so an interrupted save never looks like one, and an earlier one is untouched until the new one is
on disk. Names and shapes are all it says about the model: it loads under any plan, into any placement.
"""

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.checkpoint import manifest
from megatrain.checkpoint.hf_folder import (
    DTYPES,
    copy_files,
    folder_bytes,
    join,
    json_bytes,
    write_index,
    write_model_files,
)
from megatrain.checkpoint.manifest import FileSums, State
from megatrain.checkpoint.step_folders import is_step_folder, list_checkpoints, step_folder
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.names import format_names
from megatrain.system import safetensors_io
from megatrain.system.atomic import CHUNK_BYTES, crc_per_chunk, present, staged, write_file
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.units import is_count
from megatrain.weights import hf_layout
from megatrain.weights.source import FileWeights
from megatrain.weights.types import Core, Decoder, TensorRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(model|residual|exp_avg|exp_avg_sq)(-\d{5}-of-\d{5})?\.safetensors")
_PIECE = 4 << 20
"""Elements of a tensor that are in memory at a time."""


class Trained(Protocol):
    """What is saved and restored; `megatrain.Engine`."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def core(self) -> Core: ...


# ------------------------------------------------------------------------------------------------------- writing


def save(
    folder: str | Path,
    engine: Trained,
    state: Mapping[str, Any],
    *,
    step: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tokenizer_dir: str | Path | None = None,
) -> None:
    """`begin_save`, and waits until the checkpoint is complete."""
    begin_save(folder, engine, state, step=step, tokenizer=tokenizer, tokenizer_dir=tokenizer_dir).finish()


def begin_save(
    folder: str | Path,
    engine: Trained,
    state: Mapping[str, Any],  # what else the run needs to go on; JSON
    *,
    step: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,  # saved unless `tokenizer_dir` has the files
    tokenizer_dir: str | Path | None = None,  # its tokenizer files and generation config are copied unchanged
) -> "PendingCheckpoint":
    """Begins a checkpoint of the engine's state after `step` optimizer steps, pending updates included. It is written
    in the background while later passes run, each unit before its next update, and complete when its `finish` returns.

    A checkpoint at `folder` is replaced once the new one is complete; anything else there is refused by ConfigError.
    Where `folder` is a symbolic link, its target is written. Raises StorageError with the bytes needed and free when
    the disk is too full, CheckpointError for a state that is not JSON; nothing is left behind then.
    """
    folder = Path(folder)
    if not is_count(step, 0):
        raise ConfigError(f"step must be a whole number and not negative, not {step!r}")
    _refuse_other(folder)
    decoder = engine.decoder
    trainable = [ref for ref in decoder.tensors.values() if ref.role == "trainable"]
    planes = {"model": [Entry(ref.name, ref.dtype, tuple(ref.shape)) for ref in decoder.tensors.values()]}
    if decoder.precision == "bf16":
        planes["residual"] = [Entry(ref.name, torch.int16, tuple(ref.shape)) for ref in trainable]
    for moment in _MOMENTS:
        planes[moment] = [Entry(ref.name, torch.float32, tuple(ref.shape)) for ref in trainable]
    try:
        # As it is now, whatever becomes of it before the end.
        state = json.loads(json_bytes(dict(state)))
    except TypeError as error:
        raise CheckpointError(f"the state to save is not JSON: {error}") from error
    needed = folder_bytes([e for entries in planes.values() for e in entries], tokenizer, tokenizer_dir)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(staged(folder, needed))
        files = [
            shard
            for stem, entries in planes.items()
            if entries
            for shard in safetensors_io.plan_shards(temporary, stem, entries, by_width=True)
        ]
        refs = decoder.tensors
        engine.core.begin_save(
            [
                (
                    str(shard.path),
                    "weights" if shard.stem == "model" else shard.stem,
                    shard.header,
                    [(refs[entry.name].unit, refs[entry.name].tensor) for entry in shard.entries],
                )
                for shard in files
            ],
            CHUNK_BYTES,
            needed,
        )
        return PendingCheckpoint(
            folder, step, engine, stack.pop_all(), temporary, files, state, tokenizer, tokenizer_dir
        )


class _Cancelled(Exception):
    pass


class PendingCheckpoint:
    """A checkpoint that is being written. `begin_save` makes it; `finish` or `cancel` ends it."""

    def __init__(
        self,
        folder: Path,
        step: int,
        engine: Trained,
        place: contextlib.ExitStack,  # puts the folder in its place, or removes it
        temporary: Path,
        files: Sequence[Shard],
        state: Mapping[str, Any],
        tokenizer: "PreTrainedTokenizerBase | None",
        tokenizer_dir: str | Path | None,
    ) -> None:
        self.folder, self.step = folder, step
        self.over = False
        """Whether it was finished, successfully or not, or cancelled."""
        self.on_complete: Callable[[], None] | None = None
        """Called once it is in its place, by the thread that put it there."""
        self._failure: Exception | None = None
        self._ending = threading.Lock()
        self._decoder, self._core = engine.decoder, engine.core
        self._place, self._temporary, self._files = place, temporary, files
        self._state, self._tokenizer, self._tokenizer_dir = state, tokenizer, tokenizer_dir

    @property
    def is_written(self) -> bool:
        """Whether `finish` will return, or raise, without waiting for anything large. Raises EngineBroken."""
        try:
            return self.over or self._core.save_progress()[1]
        except ValueError:  # another thread has taken the core's answer already, and completes the save
            return True

    def finish(self) -> None:
        """Waits for the files, completes the folder and puts it in its place; of several callers, one does so. Raises
        StorageError in each of them when the disk failed; nothing is left behind then, nor after an interrupt."""
        with self._ending:
            if self.over:
                if self._failure is not None:
                    raise self._failure
                return
            try:
                self._complete()
                if self.on_complete is not None:
                    self.on_complete()
            except BaseException as error:
                interrupted = CheckpointError(f"the save of {self.folder} was interrupted")
                self._failure = error if isinstance(error, Exception) else interrupted
                raise
            finally:
                self.over = True

    def _complete(self) -> None:
        decoder = self._decoder
        with self._place:
            try:
                written, counts = self._core.finish_save()
            finally:
                self._core.cancel_save()  # after an interrupt nothing may write into a folder about to be removed
            for stem in dict.fromkeys(shard.stem for shard in self._files):
                write_index(self._temporary, [shard for shard in self._files if shard.stem == stem])
            weights = DTYPES[decoder.precision]
            write_model_files(self._temporary, decoder, weights, self._tokenizer, self._tokenizer_dir)
            shapes = {ref.name: tuple(ref.shape) for ref in decoder.tensors.values()}
            layout = hf_layout.describe(decoder.layout, decoder.model, shapes) if decoder.layout else "published"
            trained = [ref for ref in decoder.tensors.values() if ref.role == "trainable"]
            state = State({ref.name: counts[ref.unit][ref.tensor] for ref in trained}, layout, self._state)
            write_file(self._temporary / "state.json", manifest.state_bytes(state, self.step))
            crc32 = {Path(path).name: sums for path, sums in written}
            manifest.write(self._temporary, self.step, decoder.precision, crc32)

    def cancel(self) -> None:
        """Cancels it and removes what was written, unless it is over."""
        with self._ending:
            if self.over:
                return
            self.over, self._failure = True, CheckpointError(f"the save of {self.folder} was cancelled")
            with contextlib.suppress(_Cancelled), self._place:
                self._core.cancel_save()
                raise _Cancelled


def _refuse_other(folder: Path) -> None:
    """Raises ConfigError when there is something at `folder` that is neither a checkpoint nor a part of one in a
    run."""
    if not folder.exists() or is_step_folder(folder) or (folder / manifest.NAME).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"{folder} exists already and is no checkpoint; name another folder, or remove it first")


# ------------------------------------------------------------------------------------------ finding and checking


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is whole and whose files have the sizes that it says. Only read, never changed: a run
    may be training in the folder."""

    folder: Path
    step: int
    precision: str
    """`bf16` or `fp32`."""
    files: Mapping[str, FileSums]
    """By path relative to the folder."""

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the manifest and compares sizes; `problems` compares contents too. Raises CheckpointError."""
        folder = present(folder)
        found = manifest.read(folder)
        for name, sums in found.files.items():
            problem = safetensors_io.check_sums(folder / name, sums.nbytes, ())
            if problem is not None:
                raise CheckpointError(f"checkpoint {folder} is damaged: {problem}; take an earlier one")
        return cls(folder, found.step, found.precision, found.files)

    def problems(self) -> list[str]:
        """What is wrong with the contents of its files, one sentence per file; reads all of them."""
        found = (
            safetensors_io.check_sums(self.folder / name, sums.nbytes, sums.crc32) for name, sums in self.files.items()
        )
        return [problem for problem in found if problem is not None]

    def check(self, *stems: str) -> None:
        """Reads the shards of the named planes, and every file that is not a shard, and compares their contents with
        the manifest. Raises DamagedCheckpoint."""
        for name, sums in self.files.items():
            if _stem(name) not in (None, *stems):
                continue
            problem = safetensors_io.check_sums(self.folder / name, sums.nbytes, sums.crc32)
            if problem is not None:
                raise self._damaged(problem)

    def state(self) -> State:
        """Content of `state.json`. Raises CheckpointError."""
        return manifest.parse_state(self._small("state.json"), self.folder / "state.json")

    def config(self) -> dict[str, Any]:
        """Content of `config.json`. Raises CheckpointError."""
        try:
            config = json.loads(self._small("config.json"))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"config.json is not JSON ({error})") from None
        if not isinstance(config, dict):
            raise self._damaged("config.json is not a JSON object")
        return config

    def planes(self) -> dict[str, list[Shard]]:
        """The shards of each plane: `model`, `residual`, `exp_avg`, `exp_avg_sq`. Raises CheckpointError unless every
        trained tensor is in each of its planes, once, and in the model's shape."""
        trained = set(self.state().step_counts)
        planes: dict[str, list[Shard]] = {stem: [] for stem in ("model", "residual", *_MOMENTS)}
        try:
            for name, sums in sorted(self.files.items()):
                stem = _stem(name)
                if stem is None:
                    continue
                shard = safetensors_io.read_shard(self.folder / name)
                if shard.size != sums.nbytes:
                    raise self._damaged(f"{name} has {shard.size} bytes instead of {sums.nbytes}")
                planes[stem].append(shard)
        except DamagedFile as error:
            raise self._damaged(str(error)) from None
        model = self._entries(planes["model"])
        if not model:
            raise self._damaged("it holds no weights")
        for stem, dtype in {"residual": torch.int16, **dict.fromkeys(_MOMENTS, torch.float32)}.items():
            held = self._entries(planes[stem])
            if held.keys() != (set() if stem == "residual" and self.precision == "fp32" else trained):
                raise self._damaged(f"its {stem} files and state.json name different tensors")
            for name, entry in held.items():
                if name not in model or entry.shape != model[name].shape or entry.dtype != dtype:
                    raise self._damaged(f"its {stem} of {name} is {entry.dtype} of shape {list(entry.shape)}")
        for name in trained:
            if name not in model or model[name].dtype != DTYPES[self.precision]:
                raise self._damaged(f"its {name} was trained in {self.precision} and is not stored so")
        return planes

    def types(self) -> dict[str, torch.dtype]:
        """The type that each tensor of the model is stored in, so that a run that goes on stores frozen ones in the
        same (`Decoder.from_config(frozen_dtypes=…)`). Raises CheckpointError."""
        return {name: entry.dtype for name, entry in self._entries(self.planes()["model"]).items()}

    def copy_files(self, folder: Path, patterns: Iterable[str]) -> None:
        """`hf_folder.copy_files` into `folder`, with the checksums of what was copied. Raises CheckpointError,
        StorageError."""
        copied = set(copy_files(self.folder, folder, patterns))
        for name, sums in self.files.items():
            if name.split("/")[0] in copied:
                problem = safetensors_io.check_sums(folder / name, sums.nbytes, sums.crc32)
                if problem is not None:
                    raise self._damaged(f"what was copied of it is not what was saved: {problem}")

    def _entries(self, shards: Sequence[Shard]) -> dict[str, Entry]:
        entries = [entry for shard in shards for entry in shard.entries]
        found = {entry.name: entry for entry in entries}
        if len(found) < len(entries):
            raise self._damaged(f"two of its {shards[0].stem} files hold the same tensor")
        return found

    def _small(self, name: str) -> bytes:
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be read: {error.strerror}") from None
        if tuple(crc_per_chunk(data)) != self.files[name].crc32:
            raise self._damaged(f"{self.folder / name} is damaged, its checksum does not match")
        return data

    def _damaged(self, problem: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"checkpoint {self.folder} is damaged: {problem}; take an earlier one", self.folder)


def _stem(name: str) -> str | None:
    """The plane that a file is a shard of; None for all others."""
    shard = _SHARD.fullmatch(name)
    return None if shard is None else shard[1]


def verify(folder: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence per file; empty when it is complete. Reads every
    byte."""
    try:
        return Checkpoint.open(Path(folder)).problems()
    except CheckpointError as error:
        return [str(error)]


def latest_complete(run: str | Path, damaged: set[Path] | None = None) -> Path | None:
    """The newest checkpoint of a run that is complete by its manifest and sizes; None when there is none. Others are
    skipped with a line in the log and added to `damaged`; those that are in it already are not opened."""
    damaged = set() if damaged is None else damaged
    for folder in reversed(list_checkpoints(run)):
        if folder in damaged:
            continue
        try:
            return Checkpoint.open(folder).folder
        except CheckpointError as error:
            log.warning("skipped: %s", error)
            damaged.add(folder)
    return None


def choose(run: str | Path, which: str) -> Path:
    """The complete checkpoint of a run that `which` names: a step's number, or `last`. Raises ConfigError for another
    word, CheckpointError when it does not exist or is not complete."""
    if which.isascii() and which.isdecimal() and len(which) < 19:
        return Checkpoint.open(step_folder(run, int(which))).folder
    if which != "last":
        raise ConfigError(f"the step asked for is {which!r}; it is a number or last")
    newest = latest_complete(run)
    if newest is None:
        raise CheckpointError(f"{run} holds no complete checkpoint; train first, or name another run")
    return newest


# ------------------------------------------------------------------------------------------------------- loading


def load(
    folder: str | Path,
    engine: Trained,
    *,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,  # bytes done, bytes in all
    begin: Callable[[], object] = lambda: None,  # called before the first value is replaced
) -> dict[str, Any]:
    """Restores every plane bit for bit, compares every CRC on the way, and returns the `state` given to `save`.

    A parameter that was frozen and is trained now starts with zero moments and count 0. One that was trained and is
    frozen now keeps the weights that it was computed with. A frozen tensor that the engine stores in another type than
    the checkpoint is converted where every value stays the same. Raises CheckpointError, before anything is changed,
    when the checkpoint belongs to another model, and when a file is damaged (the engine's state is then undefined: load
    another checkpoint).
    """
    checkpoint = Checkpoint.open(Path(folder))
    decoder, core = engine.decoder, engine.core
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
        _check(checkpoint, decoder, restore)
        begin()
        safetensors_io.read_checked(work, restore.write, threads=threads, progress=report)
    except DamagedFile as error:
        raise DamagedCheckpoint(f"{error}; take an earlier checkpoint", checkpoint.folder) from None
    new = [ref for ref in decoder.tensors.values() if ref.role == "trainable" and ref.name not in counts]
    for ref in new:
        _clear_moments(core, ref)
    if new:
        log.info("trained from here on, with moments that start at zero: %s", format_names([ref.name for ref in new]))
    for ref in decoder.tensors.values():
        if ref.role == "trainable":
            core.set_step_count(ref.unit, ref.tensor, counts.get(ref.name, 0))
    if saved.layout is not None:
        decoder.set_layout(layout)
    return dict(saved.state)


def _check(checkpoint: Checkpoint, decoder: Decoder, restore: "_Restore") -> None:
    """Raises CheckpointError unless every tensor of the model is there in its shape, and no other, and each fits into
    what the engine stores it in. Raises DamagedFile."""
    entries = restore.model.entries
    problems = []
    if checkpoint.precision != decoder.precision:
        problems.append(f"it was trained in {checkpoint.precision} and this run is {decoder.precision}")
    for names, what in (
        (decoder.tensors.keys() - entries.keys(), "it lacks"),
        (entries.keys() - decoder.tensors.keys(), "the model has no place for its"),
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
                self.core.write(ref.unit, ref.tensor, plane, piece, start)
            elif stem == "model":
                self.core.write(ref.unit, ref.tensor, "weights", self._frozen(ref, start, piece).to(ref.dtype), start)
        except ValueError as error:  # of the core: a value that is not finite
            raise DamagedFile(f"{self.model.where(entry.name)}: {entry.name}: {error}") from None

    def _frozen(self, ref: TensorRef, start: int, piece: Tensor) -> Tensor:
        """The values of a tensor that is frozen now: as stored; of one that was trained and is stored here in another
        type than it was computed in, the fp32 masters."""
        if ref.dtype == piece.dtype or ref.name not in self.residual.entries:
            return piece
        buffer = torch.empty(piece.numel() * 2, dtype=torch.uint8)
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


def _clear_moments(core: Core, ref: TensorRef) -> None:
    numel = torch.Size(ref.shape).numel()
    zeros = torch.zeros(min(numel, _PIECE))
    for moment in _MOMENTS:
        for start in range(0, numel, max(len(zeros), 1)):
            core.write(ref.unit, ref.tensor, moment, zeros[: numel - start], start)
