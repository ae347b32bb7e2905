"""Held-out rows that are trained on too, by whatever paths `data.train` and `data.eval` name their files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatrain.config.data_files import ROWS, DataFiles, is_document
from megatrain.config.schema import SourceConfig
from megatrain.errors import ConfigError

_FRACTIONS = {"train": 0.95, "eval": 0.05}
"""What the named splits of `python:` sources are parts of."""

_NOT_CONTENT = ("weight", "label", "tools", "documents")
"""Fields that do not decide which side of a fraction a row falls on."""

Found = tuple[SourceConfig, DataFiles]
"""A source as it was written, and the files behind it."""


def check(train: Iterable[Found], held_out: Iterable[Found]) -> list[str]:
    """The paths of `data.eval` whose rows are trained on under the same path, which is a warning's matter. Raises
    ConfigError where a file is in both under different paths, since that is seldom meant."""
    trained = [(source, found, _identities(found.files)) for source, found in train]
    warned: dict[str, None] = {}
    for source, found in held_out:
        files = _identities(found.files)
        for other, its_found, its_files in trained:
            shared = [name for identity, name in files.items() if identity in its_files]
            if not shared or _complements((other, its_found), (source, found), shared):
                continue
            if other.path != source.path:
                raise _refusal(source, other, shared)
            warned[source.path] = None
    return list(warned)


def _identities(files: Iterable[str]) -> dict[object, str]:
    """Files by what tells them apart, however they are named: device and inode, or the name of rows that are in no
    file."""
    return {_identity(file): file for file in files}


def _identity(file: str) -> object:
    if file.startswith(("python:", ROWS)):
        return file
    facts = Path(file).stat()
    return facts.st_dev, facts.st_ino


def _complements(train: Found, held_out: Found, shared: Sequence[str]) -> bool:
    """Whether two sources that share files take different rows of them: fractions, by the content of rows, from
    opposite ends. A text that is parted by lines falls into the same parts only where it is the only one of both."""
    fractions = [_fraction(train[0]), _fraction(held_out[0])]
    known = [fraction for fraction in fractions if fraction is not None]
    if len(known) < 2 or sum(known) > 1 + 1e-9:  # fractions such as 0.9 and 0.1 are not exact
        return False
    same_files = len(train[1].files) == len(held_out[1].files) == len(shared)
    return _reading(train) == _reading(held_out) and (same_files or not any(map(is_document, shared)))


def _reading(found: Found) -> tuple[str, dict[str, str]]:
    """What decides, beside its file, what content a row has."""
    settings = found[1].settings
    return settings.format, {ours: theirs for ours, theirs in settings.fields.items() if ours not in _NOT_CONTENT}


def _fraction(source: SourceConfig) -> float | None:
    if isinstance(source.split, str):
        return _FRACTIONS.get(source.split) if source.path.startswith("python:") else None
    return source.split


def _refusal(source: SourceConfig, other: SourceConfig, shared: Sequence[str]) -> ConfigError:
    more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
    if isinstance(source.split, float):
        remedy = (
            "Name the same path in both, so that only the rest of its rows is trained on, or leave the file out of "
            "data.train"
        )
    else:
        remedy = (
            "Leave it out of data.train, or name other rows; to measure rows that are trained on, name the same path "
            "in both"
        )
    return ConfigError(
        f"data.eval: {shared[0]}{more} of {source.path} would be trained on too, as a part of {other.path} in "
        f"data.train, and the loss would not be a held-out one. {remedy}"
    )
