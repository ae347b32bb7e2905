"""Data sets of the Hugging Face hub, through the `datasets` package: it downloads them and keeps them as Arrow files,
which are read like any others."""

import importlib
from typing import Any

from megatrain.config import SourceConfig
from megatrain.config.data_files import INSTALL
from megatrain.errors import ConfigError


def hub_files(config: SourceConfig) -> tuple[str, ...]:
    """The Arrow files of a data set that `config.path` names as `OWNER/NAME` or `OWNER/NAME#CONFIGURATION`, of the
    split that `config.split` names. Offline, those that an earlier call downloaded (`HF_HUB_OFFLINE=1`).

    Raises ConfigError where the package is missing, nothing can be loaded, or several splits are there and none is
    named.
    """
    name, _, subset = config.path.partition("#")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"{name}: there is no such file or folder, and a data set of the hub needs {INSTALL}"
        ) from None
    try:
        splits = datasets.load_dataset(name, subset or None)
    except Exception as error:  # of the network, of the hub, of the files there
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{name}: there is no such file or folder here, and no data set of the hub can be loaded: {reason}"
        ) from None
    wanted = config.split
    if not isinstance(wanted, str):
        if len(splits) > 1:
            raise ConfigError(
                f"{config.path} has the splits {', '.join(splits)}; name one, such as "
                f"{{path: {config.path}, split: {next(iter(splits))}}}"
            )
        wanted = next(iter(splits))
    if wanted not in splits:
        raise ConfigError(f"{config.path} has no split {wanted!r}; there are {', '.join(splits)}")
    return tuple(part["filename"] for part in splits[wanted].cache_files)
