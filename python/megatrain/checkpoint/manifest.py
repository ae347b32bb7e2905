"""`manifest.json` and `state.json` of a checkpoint: written last, and believed only after every value in them was
checked.

A checkpoint may come from anywhere, and its checksums protect against accidents, not against intent. So nothing is
opened outside the folder, whatever names the manifest gives, and whatever is wrong is a CheckpointError.

`docs/checkpoints.md` describes both files.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.hf_folder import json_bytes
from megatrain.errors import CheckpointError
from megatrain.models.types import PRECISIONS
from megatrain.system.atomic import CHUNK_BYTES, crc_per_chunk, is_regular, write_file
from megatrain.units import is_count

NAME = "manifest.json"

_FORMAT = "megatrain checkpoint"
_VERSION = 1
_MOST_BYTES = 256 << 20
"""Largest JSON file that is read. The manifest of a checkpoint of 1e12 parameters has about 3 MB."""


class _Invalid(ValueError):
    """What is wrong with a manifest or state; the caller names the file."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """What the manifest says of one file."""

    nbytes: int
    crc32: tuple[int, ...]
    """One CRC32 per `CHUNK_BYTES` of the file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`, checked."""

    step: int
    precision: str
    """`bf16` or `fp32`."""
    files: Mapping[str, FileSums]
    """By path relative to the folder."""


def write(folder: Path, step: int, precision: str, known: Mapping[str, list[int]]) -> None:
    """Writes the manifest of everything in `folder`. `known`: CRCs of the large files by name; the others are read
    here. Raises StorageError, OSError."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            crc32 = known[name] if name in known else crc_per_chunk(path.read_bytes())
            files[name] = {"bytes": path.stat().st_size, "crc32": crc32}
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": step,
        "precision": precision,
        "chunk_bytes": CHUNK_BYTES,
        "files": files,
    }
    manifest["crc32"] = _own_sum(manifest)
    write_file(folder / NAME, json_bytes(manifest))


def _own_sum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json_bytes({key: value for key, value in manifest.items() if key != "crc32"}))


def read(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint. Raises CheckpointError."""
    path = folder / NAME
    try:
        if not is_regular(path) or path.stat().st_size > _MOST_BYTES:
            raise _Invalid(f"it is not a file of at most {_MOST_BYTES} bytes")
        described = _mapping(json.loads(path.read_bytes()), "it")
        if described.get("format") != _FORMAT:
            raise _Invalid(f"its format is {described.get('format')!r}")
        if described.get("version") != _VERSION:
            raise CheckpointError(
                f"{folder} has version {described.get('version')} of the checkpoint format, and this megatrain reads "
                f"version {_VERSION}; use the one that wrote it"
            )
        if described.get("chunk_bytes") != CHUNK_BYTES:
            raise _Invalid(f"its chunks are of {described.get('chunk_bytes')} bytes")
        if described.get("crc32") != _own_sum(described):
            raise _Invalid("its own checksum does not match")
        return _checked(described)
    except FileNotFoundError:
        what = "is not complete (it has no manifest.json)" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {folder} {what}; name another checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is damaged (it is nested too deeply); take an earlier checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); take an earlier checkpoint") from None


def _checked(described: Mapping[str, Any]) -> Manifest:
    step: Any = described.get("step")
    precision = described.get("precision")
    if not is_count(step, 0):
        raise _Invalid(f"its step is {step!r}")
    if precision not in tuple(PRECISIONS):  # whatever JSON can hold
        raise _Invalid(f"its precision is {precision!r}")
    files = {}
    for name, facts in _mapping(described.get("files"), "its files").items():
        facts = _mapping(facts, name)
        if not _is_inside(name) or name == NAME:
            raise _Invalid(f"{name!r} is not the name of a file in it")
        nbytes: Any = facts.get("bytes")
        crc32 = facts.get("crc32")
        if not is_count(nbytes, 0):
            raise _Invalid(f"the size of {name} is {nbytes!r}")
        if not isinstance(crc32, list) or not all(is_count(one, 0) for one in crc32):
            raise _Invalid(f"the checksums of {name} are {str(crc32)[:80]}")
        if len(crc32) != -(-nbytes // CHUNK_BYTES):
            raise _Invalid(f"{name} has {nbytes} bytes and {len(crc32)} checksums, one per {CHUNK_BYTES} bytes")
        files[name] = FileSums(nbytes, tuple(crc32))
    for name in ("state.json", "config.json"):
        if name not in files:
            raise _Invalid(f"it names no {name}")
        if files[name].nbytes > _MOST_BYTES:
            raise _Invalid(f"{name} has {files[name].nbytes} bytes; at most {_MOST_BYTES} are read")
    return Manifest(step, precision, files)


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file below the folder it is relative to, by its spelling alone."""
    return "\0" not in name and "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Invalid(f"{what} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class State:
    """The content of `state.json`, checked."""

    step_counts: Mapping[str, int]
    """Of every trained tensor, how many updates it had."""
    layout: Any
    """See `hf_layout.read_layout`; None in a checkpoint that does not say."""
    state: Mapping[str, Any]
    """What was given to `begin_save`."""


def state_bytes(state: State, step: int) -> bytes:
    """The text of `state.json`."""
    described = {
        "layout": state.layout,
        "step": step,
        "step_counts": dict(state.step_counts),
        "state": dict(state.state),
    }
    return json_bytes(described)


def parse_state(data: bytes, path: Path) -> State:
    """The reverse of `state_bytes`. Raises CheckpointError."""
    try:
        described = _mapping(json.loads(data), "it")
        counts = _mapping(described.get("step_counts"), "step_counts")
        if wrong := next((name for name, count in counts.items() if not is_count(count, 0)), None):
            raise _Invalid(f"the step count of {wrong} is {counts[wrong]!r}")
        return State(counts, described.get("layout"), _mapping(described.get("state"), "state"))
    except RecursionError:
        raise CheckpointError(f"{path} is damaged (it is nested too deeply); take an earlier checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); take an earlier checkpoint") from None
