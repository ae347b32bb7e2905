"""GGUF files: one whole model is unpacked to fp32 beside the store, so the plan leaves room for it.

    check(path)                       # before anything is planned: headers only
    room = unpacking_bytes(decoder)   # left out of the host's budget
    tensors = unpack(path)            # while the store is filled, and given back right after

transformers knows every quantized format, and reads a file only as a whole.
File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatrain.errors import ConfigError, first_line
from megatrain.weights.types import Decoder

log: logging.Logger = logging.getLogger(__name__)

_ERRORS = (OSError, ValueError, ImportError, NotImplementedError, KeyError, IndexError, RuntimeError)
_LARGEST = 2
"""Copies of a tensor that exist beside the whole model while it is unpacked."""


def check(path: Path) -> None:
    """Raises ConfigError for a file whose header or size is wrong, and where a package that reads it is missing."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{path} is a GGUF file, which needs the package {package} (pip install {package})")
    from gguf import GGUFReader

    try:
        GGUFReader(str(path))
    except _ERRORS as error:
        raise _unreadable(path, error) from None


def unpack(path: Path) -> Mapping[str, Tensor]:
    """All tensors in fp32, by Hugging Face name, each tied one once. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    log.info("unpacking %s to fp32 through transformers", path)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    except _ERRORS as error:
        raise _unreadable(path, error) from None
    # Tied tensors once: that transformers' dict has a name for each says nothing about the file.
    own = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return dict(reversed(own.values()))


def unpacking_bytes(decoder: Decoder) -> int:
    """Host memory that `unpack` takes for a model, beside its store."""
    sizes = [torch.Size(ref.shape).numel() for ref in decoder.tensors.values()]
    return torch.float32.itemsize * (sum(sizes) + _LARGEST * max(sizes, default=0))


def unpacked_types(decoder: Decoder) -> dict[str, torch.dtype]:
    """Types of the frozen tensors, as `unpack` gives them, where the decoder has other ones."""
    return {
        name: torch.float32
        for name, ref in decoder.tensors.items()
        if ref.role != "trainable" and ref.dtype.is_floating_point and ref.dtype != torch.float32
    }


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} ({path.stat().st_size} bytes) cannot be read: {first_line(error)}")
