"""Every exception that megatrain raises on purpose, and how it quotes those of others. Importing this needs neither
torch nor transformers."""

from pathlib import Path

from megatrain._core import DeviceError, DoesNotFit, EngineBroken, MegatrainError, StorageError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpoint",
    "DeviceError",
    "DoesNotFit",
    "EngineBroken",
    "MegatrainError",
    "StorageError",
]


def first_line(error: BaseException) -> str:
    """What a message quotes of another library's exception: its first line with text, else the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class ConfigError(MegatrainError, ValueError):
    """The request is wrong: a setting, a data file, a tokenizer or a model that cannot be used as asked.

    The message says which key, file or row, what was found there, and what to do.
    """


class CheckpointError(MegatrainError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another run."""


class DamagedCheckpoint(CheckpointError):
    """A complete checkpoint in which a file is not as it was written; the message names the file and the place."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder
        """The checkpoint's folder."""
