"""A run's whole state on disk, under Hugging Face names: never units, never pickle.

    checkpoints/step-N/
        model-*.safetensors, index, config, tokenizer    the weights as the device computes with them: a Hugging Face
                                                         folder that stock transformers loads
        residual-*.safetensors                           the lower halves of the fp32 masters (bf16 runs)
        exp_avg-*.safetensors, exp_avg_sq-*.safetensors  AdamW's moments, as they are stored
        state.json                                       step count of each trained tensor, the layout of the model's
                                                         source, and what the trainer adds
        manifest.json                                    size and CRC32 per 64 MiB of every file, written last

`docs/checkpoints.md` documents the format. A checkpoint is complete when its manifest verifies. It is written under
a temporary name and renamed, so an interrupted save never looks complete, and an earlier checkpoint is untouched until
the new one is on disk. It says nothing about placement, so it loads under any plan.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint import manifest
from megatrain.checkpoint.hf_folder import copy_files
from megatrain.checkpoint.manifest import FileSums, State
from megatrain.checkpoint.step_folders import list_checkpoints, step_folder
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.models.types import PRECISIONS
from megatrain.system import safetensors_io
from megatrain.system.atomic import crc_per_chunk, present
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.weights.state_format import StateFormat

log: logging.Logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(model|residual|exp_avg|exp_avg_sq)(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is valid and whose files have the sizes it lists. Never modified through this class:
    a run may be training in the folder."""

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
        """One sentence per file whose contents do not match the manifest. Reads all files."""
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
        planes: dict[str, list[Shard]] = {stem: [] for stem in ("model", "residual", *MOMENTS)}
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
        form = self._state_format(planes)
        for stem in ("residual", *MOMENTS):
            held = self._entries(planes[stem])
            if held.keys() != (set() if stem == "residual" and self.precision == "fp32" else trained):
                raise self._damaged(f"its {stem} files and state.json name different tensors")
            for name, entry in held.items():
                shape = model[name].shape if name in model else None
                if shape is not None and stem != "residual":
                    shape = form.moment_shape(shape)
                dtype = form.residual_dtype if stem == "residual" else form.moment_dtype
                if (entry.shape, entry.dtype) != (shape, dtype):
                    raise self._damaged(f"its {stem} of {name} is {entry.dtype} of shape {list(entry.shape)}")
        for name in trained:
            if name not in model or model[name].dtype != PRECISIONS[self.precision]:
                raise self._damaged(f"its {name} was trained in {self.precision} and is stored in another type")
        return planes

    def _state_format(self, planes: Mapping[str, Sequence[Shard]]) -> StateFormat:
        moment = next((e for shard in planes["exp_avg"] for e in shard.entries), None)
        residual = next((e for shard in planes["residual"] for e in shard.entries), None)
        try:
            return StateFormat.of_dtypes(
                moment.dtype if moment is not None else None, residual.dtype if residual is not None else None
            )
        except KeyError as error:
            found = {entry.dtype: entry for entry in (residual, moment) if entry is not None}[error.args[0]]
            shape = list(found.shape)
            raise self._damaged(f"its optimizer state of {found.name} is {found.dtype} of shape {shape}") from None

    def state_format(self) -> StateFormat:
        """How its moments and masters are stored. Raises CheckpointError."""
        return self._state_format(self.planes())

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
    """One sentence per problem of a checkpoint; empty when it is complete and undamaged. Reads every byte."""
    try:
        return Checkpoint.open(Path(folder)).problems()
    except CheckpointError as error:
        return [str(error)]


def latest_complete(run: str | Path, damaged: set[Path] | None = None) -> Path | None:
    """The newest checkpoint of a run that is complete by its manifest and file sizes, or None. Incomplete ones are
    skipped with a warning and added to `damaged`; those already in `damaged` are not opened."""
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
    """The complete checkpoint that `which` names: the number of a step, or `last`. Raises ConfigError for anything
    else, CheckpointError when that checkpoint does not exist or is not complete."""
    if which.isascii() and which.isdecimal() and len(which) < 19:
        return Checkpoint.open(step_folder(run, int(which))).folder
    if which != "last":
        raise ConfigError(f"step is {which!r}; it must be a number or last")
    newest = latest_complete(run)
    if newest is None:
        raise CheckpointError(f"{run} holds no complete checkpoint; train first, or name another run")
    return newest
