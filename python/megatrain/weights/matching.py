"""Matches the tensors of a source to the model's, and finds what is missing, left over or of the wrong shape or
type."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megatrain.errors import ConfigError
from megatrain.system import safetensors_io
from megatrain.system.safetensors_io import Entry
from megatrain.weights.hf_layout import Layout, Stored, library, published, transposed

if TYPE_CHECKING:
    from megatrain.weights.types import Decoder, Weights

_PIECE_BYTES = 16 << 20

_NOT_WEIGHTS = (r"rotary_emb\.inv_freq$", r"attn\.(masked_)?bias$")
"""Buffers in older files that current models no longer store."""


def match(source: "Weights", decoder: "Decoder") -> Layout:
    """The elements of the model that each source tensor holds, by source name. Together they cover every tensor of the
    model once; further names of tied tensors are included. Tensors may be stored as transformers holds them or as the
    hub publishes them (one tensor per expert, transposed, several in one). The base model's prefix (`model.`) may be
    missing on either side. Names that the model's class ignores are ignored. Raises ConfigError, which names what is
    missing, left over, or of another shape or type."""
    found, twins = matched(source, decoder)
    return found | twins


def exported(source: "Weights", decoder: "Decoder") -> Layout | None:
    """The layout of an export: the source's own, or None (as models of its kind are published) for a quantized source.
    Raises ConfigError, as `match` does."""
    layout = match(source, decoder)
    return None if source.quantised else layout


def matched(source: "Weights", decoder: "Decoder") -> tuple[Layout, Layout]:
    """As `match`, in two parts: the first name of each tensor, and further names of tied tensors."""
    prefix = getattr(decoder.model, "base_model_prefix", "")
    prefix = prefix + "." if prefix else ""
    places = _Places(decoder)
    found: dict[Stored, str] = {}
    unknown: list[str] = []
    ignore = getattr(decoder.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in (*ignore, *_NOT_WEIGHTS)]
    twins: list[tuple[str, str]] = []
    for name, entry in source.entries.items():
        spellings = (name, prefix + name, name.removeprefix(prefix)) if prefix else (name,)
        held = (places.find(spelling, entry.shape, name in source.transposed) for spelling in spellings)
        stored = next((place for place in held if place is not None), None)
        if stored is None:
            if not any(pattern.search(name) for pattern in patterns):
                unknown.append(name)
        elif stored in found:
            twins.append((found[stored], name))
        else:
            found[stored] = name
    problems = places.problems(found)
    if unknown:
        problems.append(f"holds {_listed(unknown)}, which the model does not have")
    for stored, theirs in found.items():
        problems += _mismatch(stored, theirs, source.entries[theirs], decoder)
    if problems:
        where = source.where(next(iter(source.entries))) if source.entries else "the file"
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ConfigError(
            f"the weights in {where} do not belong to this configuration: the source {'; it '.join(problems[:4])}{more}"
        )
    for first, second in twins:
        _require_equal(source, first, second)
    layout = {theirs: stored for stored, theirs in found.items()}
    return layout, {second: layout[first] for first, second in twins}


def _mismatch(stored: Stored, theirs: str, entry: Entry, decoder: "Decoder") -> list[str]:
    """What is wrong with a tensor's shape or type."""
    if stored.shape != entry.shape:
        return [f"has {theirs} of shape {list(entry.shape)} where the model has {list(stored.shape)}"]
    if entry.dtype.itemsize < 2 and _is_float(entry.dtype):
        return [f"has {theirs} in {entry.dtype}: quantised weights cannot be trained, take the original model"]
    for name in stored.names:
        ref = decoder.tensors[name]
        if ref.role == "trainable" and not _is_float(entry.dtype):
            return [f"has {theirs} in {entry.dtype} where the model has a weight"]
        if ref.role != "trainable" and _is_float(entry.dtype) != _is_float(ref.dtype):
            return [f"has {theirs} in {entry.dtype} where the model has {ref.dtype}"]
    return []


class _Places:
    """Finds the model's elements for a tensor of a file, under every name that it may have there."""

    def __init__(self, decoder: "Decoder") -> None:
        shapes = {name: tuple(ref.shape) for name, ref in decoder.tensors.items()}
        self._shapes = shapes
        self._whole = library(shapes)
        self._aliases = dict(decoder.aliases)
        self._published = published(decoder.model, shapes)
        self._transposed = published(decoder.model, shapes, transposed=True)

    def find(self, name: str, shape: tuple[int, ...], is_transposed: bool = False) -> Stored | None:
        """The elements that a file's tensor of this name and shape stands for."""
        ours = self._aliases.get(name, name)
        own = self._whole.get(ours)
        if is_transposed:
            return own and transposed(ours, self._shapes[ours])
        places = [place for place in (self._published.get(name), self._transposed.get(name), own) if place is not None]
        fitting = [place for place in places if place.shape == shape]
        return fitting[0] if fitting else own or (places[0] if places else None)

    def problems(self, found: Mapping[Stored, str]) -> list[str]:
        """What is missing, or present twice."""
        there = dict.fromkeys(self._whole, 0)
        for stored in found:
            for block in stored.blocks:
                there[block.name] += block.numel
        missing, twice = [], []
        for name, count in there.items():
            whole = self._whole[name]
            if count > whole.numel:
                twice.append(name)
            elif count < whole.numel or (whole.numel == 0 and whole not in found):
                parts = [theirs for theirs, stored in self._published.items() if name in stored.names]
                missing += [t for t in parts if self._published[t] not in found] if count else [name]
        problems = [f"lacks {_listed(missing)}"] if missing else []
        return [*problems, f"holds {_listed(twice)} both whole and in parts"] if twice else problems


def _require_equal(source: "Weights", first: str, second: str) -> None:
    """Raises ConfigError unless two names of one tied tensor hold the same values."""
    one, two = source.entries[first], source.entries[second]
    buffers = safetensors_io.aligned_buffer(_PIECE_BYTES), safetensors_io.aligned_buffer(_PIECE_BYTES)
    step = _PIECE_BYTES // torch.float64.itemsize
    same = one.shape == two.shape and all(
        torch.equal(
            source.read(first, start, min(step, one.numel - start), buffers[0]).float(),
            source.read(second, start, min(step, one.numel - start), buffers[1]).float(),
        )
        for start in range(0, one.numel, step)
    )
    if not same:
        raise ConfigError(
            f"{first} and {second} are one tied weight in the configuration, but {source.where(second)} holds "
            "different values for them; to train each, set tie_word_embeddings: false in the model's config.json"
        )


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
