"""How much text is in the files of a configuration's data, by their size: before any of it is tokenized."""

import contextlib
import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config.data_files import COMPRESSED, ROWS, find, is_columnar, is_document, suffix_of
from megatrain.config.schema import SourceConfig
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.config.config import Config

BYTES_PER_TOKEN = 4
"""Of English text under a vocabulary of 32,000 tokens or more; only for data that was not tokenized yet."""


def data_bytes(config: "Config") -> int | None:
    """Bytes of text in one epoch of `data.train`; None where files are missing, packed, or not files."""
    total = 0.0
    for source in config.data.train:
        files = _plain_files(source)
        if files is None:
            return None
        part = source.split if isinstance(source.split, float) else 1.0
        total += sum(Path(file).stat().st_size for file in files) * part * source.weight
    return round(total) or None


def row_bytes(config: "Config") -> list[int] | None:
    """Bytes of each row of `data.train`, of which all files are read; empty where they are documents, which may be cut
    anywhere. None where `data_bytes` is, and where a file cannot be read."""
    sizes: list[int] = []
    for source in config.data.train:
        files = _plain_files(source)
        if files is None:
            return None
        for file in files:
            if not is_document(file):
                try:
                    sizes += _row_bytes(Path(file))
                except (OSError, ValueError, csv.Error):
                    return None  # what is wrong with it is said when the data are read
    return sizes


def _plain_files(source: SourceConfig) -> tuple[str, ...] | None:
    """The files of a source; None where they are missing, packed, or not files."""
    if source.path.startswith(("python:", ROWS)):
        return None
    with contextlib.suppress(ConfigError):
        files = find(source).files
        if not any(Path(file).suffix in COMPRESSED or is_columnar(file) for file in files):
            return files
    return None


def _row_bytes(file: Path) -> Iterable[int]:
    """Bytes of each row of a file."""
    kind = suffix_of(str(file))
    if kind == ".json":
        held = json.loads(file.read_bytes())
        yield from (
            len(json.dumps(row, ensure_ascii=False).encode()) for row in (held if isinstance(held, list) else ())
        )
    elif kind in (".csv", ".tsv"):
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from (
                len("".join(row).encode()) for row in csv.reader(stream, delimiter="," if kind == ".csv" else "\t")
            )
    else:
        with file.open("rb") as stream:
            yield from map(len, stream)
