"""Writing a checkpoint (`checkpoint.py`): begun between two steps, written in the background while later steps run."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint import manifest
from megatrain.checkpoint.checkpoint import MOMENTS
from megatrain.checkpoint.hf_folder import folder_bytes, json_bytes, write_index, write_model_files
from megatrain.checkpoint.manifest import State
from megatrain.checkpoint.step_folders import is_step_folder
from megatrain.errors import CheckpointError, ConfigError
from megatrain.models.types import PRECISIONS
from megatrain.system import atomic, safetensors_io
from megatrain.system.atomic import staged, write_file
from megatrain.system.safetensors_io import Entry, Shard
from megatrain.units import is_count
from megatrain.weights import hf_layout
from megatrain.weights.planes import pieces_of
from megatrain.weights.types import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save(
    folder: str | Path,
    engine: Stored,
    state: Mapping[str, Any],
    *,
    step: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tokenizer_dir: str | Path | None = None,
    model_dir: str | Path | None = None,
) -> None:
    """`begin_save`, and waits until the checkpoint is complete."""
    begin_save(
        folder, engine, state, step=step, tokenizer=tokenizer, tokenizer_dir=tokenizer_dir, model_dir=model_dir
    ).finish()


def begin_save(
    folder: str | Path,
    engine: Stored,
    state: Mapping[str, Any],  # what else the run needs to go on; JSON
    *,
    step: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,  # saved unless `tokenizer_dir` has the files
    tokenizer_dir: str | Path | None = None,  # its tokenizer files are copied unchanged
    model_dir: str | Path | None = None,  # so are its generation config, processor and code; None: of `tokenizer_dir`
) -> "PendingCheckpoint":
    """Begins a checkpoint of the engine's state after `step` optimizer steps, pending updates included. It is written
    in the background while later passes run, each unit before its next update, and complete when its `finish` returns.

    A checkpoint at `folder` is replaced once the new one is complete; anything else there is refused by ConfigError.
    Where `folder` is a symbolic link, its target is written. Raises StorageError with the bytes needed and free when
    the disk is too full, CheckpointError for a state that is not JSON; nothing is left on disk then.
    """
    folder = Path(folder)
    if not is_count(step, 0):
        raise ConfigError(f"step must be a whole number and not negative, not {step!r}")
    _refuse_other(folder)
    core, decoder = engine.core, engine.decoder  # in this order: the core's plan decides where tensors are
    form = engine.state_format
    # in the order in which the core writes them, which is the same for layers and for halves of them
    ordered = sorted(decoder.tensors.values(), key=lambda ref: (ref.unit, ref.tensor))
    # what is in pieces has a file of its own, through which units ascend
    spread = frozenset(ref.name for ref in ordered if ref.pieces)
    trainable = [ref for ref in ordered if ref.role == "trainable"]
    planes = {"model": [Entry(ref.name, ref.dtype, tuple(ref.shape)) for ref in ordered]}
    if decoder.precision == "bf16":
        planes["residual"] = [Entry(ref.name, form.residual_dtype, tuple(ref.shape)) for ref in trainable]
    for moment in MOMENTS:
        planes[moment] = [Entry(ref.name, form.moment_dtype, form.moment_shape(ref.shape)) for ref in trainable]
    try:
        # a copy: the caller may change it before the save ends
        state = json.loads(json_bytes(dict(state)))
    except TypeError as error:
        raise CheckpointError(f"the state to save is not JSON: {error}") from error
    needed = folder_bytes([e for entries in planes.values() for e in entries], tokenizer, tokenizer_dir, model_dir)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(staged(folder, needed))
        files = [
            shard
            for stem, entries in planes.items()
            if entries
            for shard in safetensors_io.plan_shards(temporary, stem, entries, by_width=True, alone=spread)
        ]
        refs = decoder.tensors
        core.begin_save(
            [
                (
                    str(shard.path),
                    "weights" if shard.stem == "model" else shard.stem,
                    shard.header,
                    [(piece.unit, piece.tensor) for entry in shard.entries for piece in pieces_of(refs[entry.name])],
                )
                for shard in files
            ],
            atomic.CHUNK_BYTES,
            needed,
        )
        return PendingCheckpoint(
            folder, step, engine, stack.pop_all(), temporary, files, state, (tokenizer, tokenizer_dir, model_dir)
        )


class _Cancelled(Exception):
    pass


class PendingCheckpoint:
    """A checkpoint that is being written. `begin_save` makes it; `finish` or `cancel` ends it."""

    def __init__(
        self,
        folder: Path,
        step: int,
        engine: Stored,
        place: contextlib.ExitStack,  # puts the folder in its place, or removes it
        temporary: Path,
        files: Sequence[Shard],
        state: Mapping[str, Any],
        sources: tuple["PreTrainedTokenizerBase | None", str | Path | None, str | Path | None],  # as `begin_save` has
    ) -> None:
        self.folder: Path = folder
        self.step: int = step
        self.over: bool = False
        """Whether it has ended: completed, failed or cancelled."""
        self.on_complete: Callable[[], None] | None = None
        """Called once, after the folder has its final name, by the thread that renamed it."""
        self._failure: Exception | None = None
        self._ending = threading.Lock()
        self._core, self._decoder = engine.core, engine.decoder
        self._place, self._temporary, self._files = place, temporary, files
        self._state, self._sources = state, sources

    @property
    def is_written(self) -> bool:
        """Whether `finish` will return or raise without waiting for large files. Raises EngineBroken."""
        try:
            return self.over or self._core.save_progress()[1]
        except ValueError:  # another thread has taken the core's answer already, and completes the save
            return True

    def finish(self) -> None:
        """Waits for the files, completes the folder and renames it to its final name; of several callers, one does so.
        Raises StorageError in all of them when the disk failed. Nothing is left then, nor after an interrupt."""
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
            weights = PRECISIONS[decoder.precision]
            write_model_files(self._temporary, decoder, weights, *self._sources)
            shapes = {ref.name: tuple(ref.shape) for ref in decoder.tensors.values()}
            layout = hf_layout.describe(decoder.layout, decoder.model, shapes) if decoder.layout else "published"
            trained = [ref for ref in decoder.tensors.values() if ref.role == "trainable"]
            state = State({ref.name: counts[ref.unit][ref.tensor] for ref in trained}, layout, self._state)
            write_file(self._temporary / "state.json", manifest.state_bytes(state, self.step))
            crc32 = {Path(path).name: sums for path, sums in written}
            manifest.write(self._temporary, self.step, decoder.precision, crc32)

    def cancel(self) -> None:
        """Cancels the save and removes what was written, unless it has ended already."""
        with self._ending:
            if self.over:
                return
            self.over, self._failure = True, CheckpointError(f"the save of {self.folder} was cancelled")
            with contextlib.suppress(_Cancelled), self._place:
                self._core.cancel_save()
                raise _Cancelled


def _refuse_other(folder: Path) -> None:
    """Raises ConfigError when `folder` exists and is neither a checkpoint, nor a run's checkpoint folder, nor empty."""
    if not folder.exists() or is_step_folder(folder) or (folder / manifest.NAME).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"{folder} exists already and is not a checkpoint; name another folder, or remove it first")
