"""Quantised checkpoints, read as the numbers that they stand for: MXFP4 (gpt-oss), and FP8 with one scale per block
(DeepSeek-V3).

Some models are published in no other form. Their weights are dequantised as they are read, piece by piece, to what
transformers gives with `dequantize=True`; an export is not quantised again.

Formats: OCP Microscaling Formats (MX) Specification 1.0 for MXFP4, whose blocks gpt-oss stores as `_blocks` and
`_scales`; DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3, for FP8 in blocks of 128 x 128 with
`_scale_inv`. Reference: transformers' `integrations/mxfp4.py` and `integrations/finegrained_fp8.py`.
"""

import functools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import Entry
from megatrain.weights.permute import boxes

if TYPE_CHECKING:
    from megatrain.weights.types import Weights

log: logging.Logger = logging.getLogger(__name__)

_METHODS = ("fp8", "mxfp4")
_FP8 = torch.float8_e4m3fn
_FP8_BLOCK = (128, 128)
_SCALE = "_scale_inv"
_UNUSED = ("activation_scale", "input_scale")
"""Endings of FP8 scales for activations, which are not quantised here."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4_BLOCK = 32
"""Elements that share one scale; two are stored per byte."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SPAN = 1 << 13
"""Blocks of MXFP4 that are dequantised at a time."""


def settings(config: Any, where: object) -> dict[str, Any] | None:
    """How a model's weights are quantised, of its configuration or the content of its `config.json`; None where they
    are not. Raises ConfigError, by name, for a method that is not read."""
    told = config.get("quantization_config") if isinstance(config, Mapping) else _attribute(config)
    if not told:
        return None
    if not (isinstance(told, Mapping) or hasattr(told, "to_dict")):
        raise ConfigError(f"{where}: quantization_config is {told!r}; expected an object")
    told = dict(told if isinstance(told, Mapping) else told.to_dict())
    method = told.get("quant_method") or (
        "bitsandbytes" if told.get("load_in_4bit") or told.get("load_in_8bit") else ""
    )
    method = str(getattr(method, "value", method))
    if method not in _METHODS:
        named = f"with {method}" if method else "by a method that its configuration does not name"
        raise ConfigError(
            f"{where} is quantised {named}; of quantised weights, only {' and '.join(_METHODS)} are read. Name the "
            "model that it was made from (its page on the hub links it), or dequantise it once with transformers "
            "(model.dequantize(), then save_pretrained) and name that folder"
        )
    return {**told, "quant_method": method}


def _attribute(config: Any) -> Any:
    return getattr(config, "quantization_config", None)


def without(config: Any, where: object) -> Any:
    """A configuration as that of the model that is trained: not quantised. Raises ConfigError as `settings`."""
    if settings(config, where) is not None:
        del config.quantization_config
    return config


def dequantised(source: "Weights", folder: Path) -> "Weights":
    """The weights in a folder, whatever its `config.json` says of them. Raises ConfigError, which names file and key,
    where scales and weights do not belong together."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return source  # whoever reads the configuration will say so
    told = settings(config, folder) if isinstance(config, dict) else None
    if told is None:
        narrow = next((name for name, entry in source.entries.items() if entry.dtype == _FP8), None)
        if narrow is not None:
            raise ConfigError(
                f"{path} does not say how weights are quantised (quantization_config), and {source.where(narrow)} "
                f"holds {narrow} in {_FP8}; fetch the configuration that belongs to them, or name the original model"
            )
        return source
    method = told["quant_method"]
    log.warning(
        "%s holds its weights in %s: they are dequantised as they are read, training goes on in bf16 or fp32, and the "
        "export will not be quantised",
        folder,
        method.upper(),
    )
    parts: dict[str, _Quantised] = _mxfp4(source) if method == "mxfp4" else _fp8(source, told)
    return Dequantised(source, parts, transposed=method == "mxfp4")


class _Quantised(Protocol):
    """One tensor."""

    @property
    def entry(self) -> Entry:
        """As it is read."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The source's tensors that it is made from; the first holds the values."""

    def read(self, start: int, count: int, buffer: Tensor) -> Tensor:
        """As `Weights.read`; the result is a view of `buffer`."""


class Dequantised:
    """Tensors of a source of which some are quantised."""

    quantised = True

    def __init__(self, source: "Weights", parts: "Mapping[str, _Quantised]", *, transposed: bool) -> None:
        self._source, self._parts = source, parts
        used = {name for part in parts.values() for name in part.parts}
        plain = {name: entry for name, entry in source.entries.items() if name not in used}
        self.entries: Mapping[str, Entry] = {
            **{name: entry for name, entry in plain.items() if not name.endswith(_UNUSED)},
            **{name: part.entry for name, part in parts.items()},
        }
        self.transposed: frozenset[str] = frozenset(parts if transposed else ())

    def where(self, name: str) -> str:
        """The file that a tensor's values are in."""
        part = self._parts.get(name)
        return self._source.where(part.parts[0] if part else name)

    def read(self, name: str, start: int, count: int, buffer: Tensor) -> Tensor:
        """See `Weights.read`."""
        part = self._parts.get(name)
        return part.read(start, count, buffer) if part else self._source.read(name, start, count, buffer)


# ----------------------------------------------------------------------------------------------------------- FP8


@dataclass(frozen=True, slots=True)
class _Fp8:
    """A tensor [..., rows, columns] of FP8, each block of which is to be multiplied by its scale. Read as fp32."""

    source: "Weights"
    weight: Entry
    scale: Entry
    block: tuple[int, int]

    @property
    def entry(self) -> Entry:
        return Entry(self.weight.name, torch.float32, self.weight.shape)

    @property
    def parts(self) -> tuple[str, ...]:
        return self.weight.name, self.scale.name

    def read(self, start: int, count: int, buffer: Tensor) -> Tensor:
        out = buffer[: count * 4].view(torch.float32)
        narrow = self.source.read(self.weight.name, start, count, safetensors_io.aligned_buffer(count))
        *outer, rows, columns = self.weight.shape
        height, width = self.block
        done = 0
        for matrices, (top, bottom), (left, right) in boxes((math.prod(outer), rows, columns), start, start + count):
            for matrix in range(*matrices):
                for band in range(top // height, -(-bottom // height)):
                    taken = min(bottom, (band + 1) * height) - max(top, band * height)
                    size = taken * (right - left)
                    values = out[done : done + size].copy_(narrow[done : done + size])
                    scales = self._scales(matrix, band).repeat_interleave(width)[left:right]
                    values.view(taken, right - left).mul_(scales)
                    done += size
        return out

    def _scales(self, matrix: int, band: int) -> Tensor:
        """Of the blocks in one band of rows, fp32."""
        _, rows, columns = _bands(self.weight.shape, self.block)
        room = torch.empty(columns * self.scale.dtype.itemsize, dtype=torch.uint8)
        return self.source.read(self.scale.name, (matrix * rows + band) * columns, columns, room).float()


def _bands(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int, int]:
    """Number of matrices, and of blocks downwards and across in each; blocks at the edges may be smaller."""
    *outer, rows, columns = shape
    return math.prod(outer), -(-rows // block[0]), -(-columns // block[1])


def _fp8(source: "Weights", told: Mapping[str, Any]) -> "dict[str, _Quantised]":
    block = told.get("weight_block_size", _FP8_BLOCK)
    if block is not None and not (len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise ConfigError(f"quantization_config.weight_block_size is {block!r}; expected two numbers, as [128, 128]")
    parts: dict[str, _Quantised] = {}
    for name, entry in source.entries.items():
        where = source.where(name)
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) not in source.entries:
            raise ConfigError(f"{where} holds {name} but no file holds {name.removesuffix(_SCALE)}; {_AGAIN}")
        scale = source.entries.get(name + _SCALE)
        if entry.dtype != _FP8:
            if scale is not None:
                raise ConfigError(f"{where} holds {name} in {entry.dtype}, with scales as if it were {_FP8}; {_AGAIN}")
            continue
        if scale is None:
            raise ConfigError(f"{where} holds {name} in {_FP8}, but no file holds its scales {name + _SCALE}; {_AGAIN}")
        if len(entry.shape) < 2:
            raise ConfigError(f"{where} holds {name} in {_FP8} of shape {list(entry.shape)}, which is not a matrix")
        rows, columns = entry.shape[-2:]
        size = (rows, columns) if block is None else (block[0], block[1])
        counts = _bands(entry.shape, size)
        expected = (*entry.shape[:-2], *counts[1:])
        if scale.shape != expected and not (block is None and scale.numel == counts[0]):
            per = "a tensor" if block is None else f"blocks of {size[0]} x {size[1]}"
            raise ConfigError(
                f"{source.where(scale.name)} holds {scale.name} of shape {list(scale.shape)}, where {name} of shape "
                f"{list(entry.shape)} has scales of shape {list(expected)}, one for each of {per}; {_AGAIN}"
            )
        if not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
            raise ConfigError(
                f"{source.where(scale.name)} holds {scale.name} in {scale.dtype}; scales are read in fp32, bf16 or fp16"
            )
        parts[name] = _Fp8(source, entry, scale, size)
    return parts


# --------------------------------------------------------------------------------------------------------- MXFP4


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """A tensor [..., blocks, 16] of bytes, each of two E2M1 numbers, the lower half first, and an exponent of 2 for
    each block, with 127 added. Read as bf16, which holds each value exactly, [..., elements]."""

    source: "Weights"
    name: str
    blocks: Entry
    scales: Entry

    @property
    def entry(self) -> Entry:
        *outer, count, _ = self.blocks.shape
        return Entry(self.name, torch.bfloat16, (*outer, count * _MXFP4_BLOCK))

    @property
    def parts(self) -> tuple[str, ...]:
        return self.blocks.name, self.scales.name

    def read(self, start: int, count: int, buffer: Tensor) -> Tensor:
        out = buffer[: count * 2].view(torch.bfloat16)
        room = torch.empty(_SPAN * (_MXFP4_BLOCK // 2 + 1), dtype=torch.uint8)
        end = start + count
        for first in range(start // _MXFP4_BLOCK, -(-end // _MXFP4_BLOCK), _SPAN):
            number = min(_SPAN, -(-end // _MXFP4_BLOCK) - first)
            values = self._widened(first, number, room).view(-1)
            begin = first * _MXFP4_BLOCK
            low, high = max(start, begin), min(end, begin + len(values))
            out[low - start : high - start].copy_(values[low - begin : high - begin])
        return out

    def _widened(self, first: int, number: int, room: Tensor) -> Tensor:
        """Blocks from `first` on, [number, 32]."""
        size = _MXFP4_BLOCK // 2
        packed = self.source.read(self.blocks.name, first * size, number * size, room[_SPAN:])
        exponents = self.source.read(self.scales.name, first, number, room[:_SPAN]).int() - 127
        values = _pairs().index_select(0, packed.int()).view(torch.bfloat16).view(number, _MXFP4_BLOCK)
        factors = torch.ldexp(torch.ones(number, 1), exponents.view(number, 1))
        return values.float().mul_(factors).bfloat16()  # exact, but where bf16 ends too


@functools.cache
def _pairs() -> Tensor:
    """The two numbers of every byte as bf16, in one int32 each, [256]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int32).view(-1)


def _mxfp4(source: "Weights") -> "dict[str, _Quantised]":
    parts: dict[str, _Quantised] = {}
    for key, blocks in source.entries.items():
        where = source.where(key)
        if key.endswith(_SCALES) and key.removesuffix(_SCALES) + _BLOCKS not in source.entries:
            raise ConfigError(f"{where} holds {key} but no file holds {key.removesuffix(_SCALES) + _BLOCKS}; {_AGAIN}")
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        scales = source.entries.get(name + _SCALES)
        if scales is None:
            raise ConfigError(f"{where} holds {key}, but no file holds its scales {name + _SCALES}; {_AGAIN}")
        for entry in (blocks, scales):
            if entry.dtype != torch.uint8:
                raise ConfigError(
                    f"{source.where(entry.name)} holds {entry.name} in {entry.dtype}, where MXFP4 has {torch.uint8}"
                )
        if len(blocks.shape) < 3 or blocks.shape[-1] != _MXFP4_BLOCK // 2:
            raise ConfigError(
                f"{where} holds {key} of shape {list(blocks.shape)}, where MXFP4 has [..., rows, blocks, "
                f"{_MXFP4_BLOCK // 2}]; {_AGAIN}"
            )
        if scales.shape != blocks.shape[:-1]:
            raise ConfigError(
                f"{source.where(scales.name)} holds {scales.name} of shape {list(scales.shape)}, where {key} of shape "
                f"{list(blocks.shape)} has scales of shape {list(blocks.shape[:-1])}, one for each block; {_AGAIN}"
            )
        parts[name] = _Mxfp4(source, name, blocks, scales)
    return parts


_AGAIN = "the files are not of one model, or not whole, so fetch them again"
