"""A run's whole state on disk, under Hugging Face names: never units, never pickle.

    checkpoints/step-N/
        model-*.safetensors, index, config, tokenizer    the weights as the device computes with them: a Hugging Face
                                                         folder that stock transformers loads
        residual-*.safetensors                           the lower halves of the fp32 masters (bf16 runs)
        exp_avg-*.safetensors, exp_avg_sq-*.safetensors  AdamW's moments, fp32
        state.json                                       step counts a tensor, the layout of the model's source, and
                                                         what the trainer adds
        manifest.json                                    size and CRC32 per 64 MiB of every file, written last

A checkpoint is complete when its manifest verifies. It is written beside its place and renamed, so an interrupted save
never looks like one, and an earlier one is untouched until the new one is on disk. Names and shapes are all it says
about the model: it loads under any plan, into any placement.
"""

import contextlib
import json
import logging
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.checkpoint import export
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.system import safetensors_io
from megatrain.system.atomic import CHUNK_BYTES, crc_per_chunk, recover, staged, sync_folder, write_file
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.units import is_count
from megatrain.weights import hf_layout
from megatrain.weights.loader import Core, Decoder, FileWeights, TensorRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FORMAT = "megatrain checkpoint"
_VERSION = 1
_STEP = re.compile(r"step-(\d+)")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(model|residual|exp_avg|exp_avg_sq)(-\d{5}-of-\d{5})?\.safetensors")
_ZEROS_BYTES = 16 << 20


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
    beneath the passes that follow, each unit before its next update, and complete when its `finish` returns.

    A checkpoint at `folder` is replaced once the new one is complete; anything else there is refused by ConfigError.
    Raises StorageError with the bytes needed and free when the disk is too full, CheckpointError for a state that is
    not JSON; nothing is left behind then.
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
        state = json.loads(export.json_bytes(dict(state)))
    except TypeError as error:
        raise CheckpointError(f"the state to save is not JSON: {error}") from error
    needed = export.folder_bytes([e for entries in planes.values() for e in entries], tokenizer, tokenizer_dir)
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
    """A checkpoint on its way to disk. `begin_save` makes it; `finish` or `cancel` ends it."""

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
        """Whether it was finished, with whatever success, or given up."""
        self.on_complete: Callable[[], None] | None = None
        """Called once it is in its place, by the thread that put it there."""
        self._failure: Exception | None = None
        self._ending = threading.Lock()
        self._decoder, self._core = engine.decoder, engine.core
        self._place, self._temporary, self._files = place, temporary, files
        self._state, self._tokenizer, self._tokenizer_dir = state, tokenizer, tokenizer_dir

    @property
    def is_written(self) -> bool:
        """Whether `finish` has nothing large to wait for any more, or a failure to tell. Raises EngineBroken."""
        try:
            return self.over or self._core.save_progress()[1]
        except ValueError:  # another thread has heard from the core already, and completes it
            return True

    def finish(self) -> None:
        """Waits for the files, completes the folder and puts it in its place; of several callers one does it. Raises
        StorageError when the disk failed, to each of them; nothing is left behind then, nor after an interrupt."""
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
                sums, counts = self._core.finish_save()
            finally:
                self._core.cancel_save()  # an interrupt leaves nobody who writes into a folder about to be removed
            for stem in dict.fromkeys(shard.stem for shard in self._files):
                export.write_index(self._temporary, [shard for shard in self._files if shard.stem == stem])
            weights = export.DTYPES[decoder.precision]
            export.write_model_files(self._temporary, decoder, weights, self._tokenizer, self._tokenizer_dir)
            shapes = {ref.name: tuple(ref.shape) for ref in decoder.tensors.values()}
            layout = hf_layout.describe(decoder.layout, decoder.model, shapes) if decoder.layout else "published"
            described = {
                "layout": layout,
                "step": self.step,
                "step_counts": {
                    ref.name: counts[ref.unit][ref.tensor]
                    for ref in decoder.tensors.values()
                    if ref.role == "trainable"
                },
                "state": self._state,
            }
            write_file(self._temporary / "state.json", export.json_bytes(described))
            _write_manifest(self._temporary, self.step, decoder.precision, {Path(path).name: s for path, s in sums})

    def cancel(self) -> None:
        """Gives it up and removes what was written, unless it is over."""
        with self._ending:
            if self.over:
                return
            self.over, self._failure = True, CheckpointError(f"the save of {self.folder} was given up")
            with contextlib.suppress(_Cancelled), self._place:
                self._core.cancel_save()
                raise _Cancelled


def _refuse_other(folder: Path) -> None:
    """Raises ConfigError where something stands that is no checkpoint, nor what is left of one in a run."""
    if not folder.exists() or _STEP.fullmatch(folder.name) or (folder / "manifest.json").is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"{folder} exists already and is no checkpoint; name another folder, or remove it first")


def _write_manifest(folder: Path, step: int, precision: str, sums: Mapping[str, list[int]]) -> None:
    """Describes every file of a folder. Of the shards the sums are known already; the others are small."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            crc32 = sums[name] if name in sums else crc_per_chunk(path.read_bytes())
            files[name] = {"bytes": path.stat().st_size, "crc32": crc32}
    # the other entries reach the disk before the one that says that they are there
    sync_folder(folder)
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": step,
        "precision": precision,
        "chunk_bytes": CHUNK_BYTES,
        "files": files,
    }
    manifest["crc32"] = _own_sum(manifest)
    write_file(folder / "manifest.json", export.json_bytes(manifest))


def _own_sum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(export.json_bytes({key: value for key, value in manifest.items() if key != "crc32"}))


# ------------------------------------------------------------------------------------------ finding and checking


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is whole and whose files have the sizes that it says."""

    folder: Path
    step: int
    precision: str
    """`bf16` or `fp32`."""
    files: dict[str, Any]
    """From the manifest: `bytes` and `crc32` per chunk of every file."""

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the manifest and compares sizes; `verify` compares contents too. Raises CheckpointError."""
        path = folder / "manifest.json"
        try:
            recover(folder)
            manifest = json.loads(path.read_bytes())
            if manifest["format"] != _FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}")
            if manifest["version"] != _VERSION:
                raise CheckpointError(
                    f"{folder} has version {manifest['version']} of the checkpoint format, and this megatrain reads "
                    f"version {_VERSION}; use the one that wrote it"
                )
            if manifest["chunk_bytes"] != CHUNK_BYTES:
                raise ValueError(f"its chunks are of {manifest['chunk_bytes']} bytes")
            if manifest["crc32"] != _own_sum(manifest):
                raise ValueError("its own checksum does not match")
        except FileNotFoundError:
            what = "is not complete (it has no manifest.json)" if folder.is_dir() else "is not there"
            raise CheckpointError(f"checkpoint {folder} {what}; name another checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); take an earlier checkpoint") from None
        for name, facts in manifest["files"].items():
            problem = safetensors_io.check_sums(folder / name, facts["bytes"], ())
            if problem is not None:
                raise CheckpointError(f"checkpoint {folder} is damaged: {problem}; take an earlier one")
        return cls(folder, manifest["step"], manifest["precision"], manifest["files"])

    def problems(self) -> list[str]:
        """What is wrong with the contents of its files, a sentence each; reads all of them."""
        found = (
            safetensors_io.check_sums(self.folder / name, facts["bytes"], facts["crc32"])
            for name, facts in self.files.items()
        )
        return [problem for problem in found if problem is not None]

    def check(self, *stems: str) -> None:
        """Reads the shards of some planes, and every file that is of none, and compares their contents. Raises
        DamagedCheckpoint."""
        for name, facts in self.files.items():
            if _stem(name) not in (None, *stems):
                continue
            problem = safetensors_io.check_sums(self.folder / name, facts["bytes"], facts["crc32"])
            if problem is not None:
                raise DamagedCheckpoint(
                    f"checkpoint {self.folder} is damaged: {problem}; take an earlier one", self.folder
                )

    def shards(self, stem: str) -> list[Shard]:
        """The shards of one plane: `model`, `residual`, `exp_avg` or `exp_avg_sq`. Raises DamagedFile."""
        return [safetensors_io.read_shard(self.folder / name) for name in sorted(self.files) if _stem(name) == stem]

    def state(self) -> dict[str, Any]:
        """Content of `state.json`. Raises CheckpointError."""
        data = (self.folder / "state.json").read_bytes()
        if crc_per_chunk(data) != self.files["state.json"]["crc32"]:
            raise DamagedCheckpoint(f"{self.folder / 'state.json'} is damaged; take an earlier checkpoint", self.folder)
        state: dict[str, Any] = json.loads(data)
        return state


def _stem(name: str) -> str | None:
    """The plane that a file is a shard of; None for all others."""
    shard = _SHARD.fullmatch(name)
    return None if shard is None else shard[1]


def verify(folder: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint, a sentence each; empty when it is complete. Reads every byte."""
    try:
        return Checkpoint.open(Path(folder)).problems()
    except CheckpointError as error:
        return [str(error)]


def list_checkpoints(run: str | Path) -> list[Path]:
    """The folders `checkpoints/step-N` of a run, by step; whether each is complete, `Checkpoint.open` tells."""
    parent = Path(run) / "checkpoints"
    if not parent.is_dir():
        return []
    for aux in parent.glob(".old-step-*"):
        recover(parent / aux.name.removeprefix(".old-"))
    found = ((_STEP.fullmatch(path.name), path) for path in parent.iterdir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def latest_complete(run: str | Path, damaged: set[Path] | None = None) -> Path | None:
    """The newest complete checkpoint of a run, by manifest and sizes; those that are not are passed over with a line in
    the log, and added to `damaged`. Those in it already are not looked at. None when there is none."""
    damaged = set() if damaged is None else damaged
    for folder in reversed(list_checkpoints(run)):
        if folder in damaged:
            continue
        try:
            return Checkpoint.open(folder).folder
        except CheckpointError as error:
            log.warning("passed over: %s", error)
            damaged.add(folder)
    return None


def choose(run: str | Path, which: str) -> Path:
    """The complete checkpoint of a run that is meant: a step's number, or `last`. Raises ConfigError for another word,
    CheckpointError when it is not there or not complete."""
    if which.isdecimal():
        return Checkpoint.open(Path(run) / "checkpoints" / f"step-{int(which)}").folder
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

    A parameter that was frozen and is trained now starts with zero moments and count 0; one that was trained and is
    frozen now keeps its weights. Raises CheckpointError, before anything is changed, when the checkpoint belongs to
    another model, and when a file is damaged (the engine's state is then undefined: load another checkpoint).
    """
    checkpoint = Checkpoint.open(Path(folder))
    decoder, core = engine.decoder, engine.core
    saved = checkpoint.state()
    try:
        planes = {stem: checkpoint.shards(stem) for stem in ("model", "residual", *_MOMENTS)}
        counts: dict[str, int] = saved["step_counts"]
        _check(checkpoint, decoder, planes, counts)
        restore = _Restore(core, decoder.tensors, counts, FileWeights(planes["residual"]))
        work = [(shard, checkpoint.files[shard.path.name]["crc32"]) for group in planes.values() for shard in group]
        total, done = sum(shard.size for shard, _ in work), [0]

        def report(size: int) -> None:
            done[0] += size
            if progress is not None:
                progress(min(done[0], total), total)

        begin()
        safetensors_io.read_checked(work, restore.write, threads=threads, progress=report)
    except DamagedFile as error:
        raise DamagedCheckpoint(f"{error}; take an earlier checkpoint", checkpoint.folder) from None
    for ref in decoder.tensors.values():
        if ref.role == "trainable":
            if ref.name not in counts:
                log.info("%s is trained from here on; its moments start at zero", ref.name)
                _clear_moments(core, ref)
            core.set_step_count(ref.unit, ref.tensor, counts.get(ref.name, 0))
    shapes = {ref.name: tuple(ref.shape) for ref in decoder.tensors.values()}
    if "layout" in saved:
        decoder.set_layout(hf_layout.read_layout(saved["layout"], shapes))
    state: dict[str, Any] = saved["state"]
    return state


def _check(
    checkpoint: Checkpoint, decoder: Decoder, planes: Mapping[str, list[Shard]], counts: Mapping[str, int]
) -> None:
    """Raises CheckpointError unless every tensor of the model is there in its shape, and no other."""
    entries = {entry.name: entry for shard in planes["model"] for entry in shard.entries}
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
        if ref is not None and tuple(ref.shape) != entry.shape:
            problems.append(f"its {name} has shape {list(entry.shape)} and the model's has {list(ref.shape)}")
        elif ref is not None and ref.role != "trainable" and name not in counts and ref.dtype != entry.dtype:
            problems.append(f"its {name} is {entry.dtype} and the model's is {ref.dtype}")
    for stem in ("residual", *_MOMENTS):
        held = {entry.name for shard in planes[stem] for entry in shard.entries}
        if held != set(counts) and not (stem == "residual" and checkpoint.precision == "fp32"):
            problems.append(f"its {stem} files and state.json name different tensors")
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} does not belong to this model: {'; '.join(problems[:4])}{more}"
        )


@dataclass(frozen=True, slots=True)
class _Restore:
    """Puts pieces of a checkpoint's files into the planes."""

    core: Core
    tensors: Mapping[str, TensorRef]
    counts: Mapping[str, int]
    residual: FileWeights

    def write(self, stem: str, entry: Entry, start: int, piece: Tensor) -> None:
        """One piece; see `shards.read_checked`."""
        ref = self.tensors[entry.name]
        trained = entry.name in self.counts
        if ref.role == "trainable":
            plane = stem if stem != "model" else "weights" if trained else "master"
            self.core.write(ref.unit, ref.tensor, plane, piece, start)
        elif stem == "model":
            if ref.dtype != piece.dtype:
                piece = self._master(entry, start, piece).to(ref.dtype)
            self.core.write(ref.unit, ref.tensor, "weights", piece, start)

    def _master(self, entry: Entry, start: int, piece: Tensor) -> Tensor:
        """The fp32 values of a parameter that was trained and is frozen now, in another type than it computed with."""
        if entry.name not in self.residual.entries:
            return piece
        buffer = torch.empty(piece.numel() * 2, dtype=torch.uint8)
        return export.join(piece, self.residual.read(entry.name, start, piece.numel(), buffer))


def _clear_moments(core: Core, ref: TensorRef) -> None:
    numel = torch.Size(ref.shape).numel()
    zeros = torch.zeros(min(numel, _ZEROS_BYTES // 4))
    for moment in _MOMENTS:
        for start in range(0, numel, max(len(zeros), 1)):
            core.write(ref.unit, ref.tensor, moment, zeros[: numel - start], start)
