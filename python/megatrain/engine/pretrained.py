"""A pretrained model as an engine takes it: without storage, with what reads its files into the store."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from megatrain import _core
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.hf_config import load_config
from megatrain.system.terminal import progress_line
from megatrain.weights import gguf, loader, matching, source
from megatrain.weights.types import Weights

ProgressFn = Callable[[str, int, int], None]
"""Called with what is done, bytes done, and bytes in all; from several threads in turn."""


def open_pretrained(
    path: str,
    revision: str | None,
    *,
    precision: str,  # bf16 or fp32
    matmul: str,  # bf16 or fp8
    freeze: Sequence[str],
    attention: str,
    trust_remote_code: bool,
    progress: ProgressFn | Literal["auto"] | None,
) -> tuple[Decoder, Callable[[Decoder, _core.Engine], None], Path]:
    """The model, what fills a core with its weights, and the folder of its files, which are checked now. `progress`:
    called with how far the reading is; `auto`: a line on a terminal or in a notebook; None: nothing.
    Raises ConfigError."""
    if progress not in ("auto", None) and not callable(progress):
        raise ConfigError(f"progress must be auto, None or a function of (what, done, total), not {progress!r}")
    files = source.resolve(path, revision)
    if files.gguf is not None:
        gguf.check(files.gguf)
    make = functools.partial(
        Decoder.from_config,
        load_config(files.folder, trust_remote_code, **files.arguments()),
        precision=precision,
        matmul=matmul,
        freeze=freeze,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )
    if files.gguf is not None:
        decoder = make()
        other = gguf.unpacked_types(decoder)
        decoder = make(frozen_dtypes=other) if other else decoder
        held = gguf.unpacking_bytes(decoder)
        return decoder, _Reading(lambda: source.open_weights(files), progress, held), files.folder
    weights = source.open_weights(files)
    decoder = make(frozen_dtypes={name: entry.dtype for name, entry in weights.entries.items()})
    matching.match(weights, decoder)
    return decoder, _Reading(lambda: weights, progress, 0), files.folder


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """Fills a core with weights, which are given back afterwards."""

    open: Callable[[], Weights]
    progress: ProgressFn | Literal["auto"] | None
    held_bytes: int
    """Host memory that the opened weights take."""

    def __call__(self, decoder: Decoder, core: _core.Engine) -> None:
        report = progress_line() if self.progress == "auto" else self.progress
        loader.load(
            self.open(),
            decoder,
            core,
            progress=None if report is None else lambda done, total: report("reading weights", done, total),
        )
