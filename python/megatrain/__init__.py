"""Full-precision training of language models larger than GPU memory, on one GPU.

The names are imported when they are first used, so that `import megatrain` needs neither torch nor a card.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatrain.compat import check_platform

check_platform()

from megatrain._core import __version__  # noqa: E402 (first the sentence that says why it cannot be loaded)
from megatrain.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    DeviceError,
    DoesNotFit,
    EngineBroken,
    MegatrainError,
    StorageError,
)

if TYPE_CHECKING:
    from megatrain.config import Config as Config
    from megatrain.engine.engine import Engine as Engine
    from megatrain.engine.engine import EvalOutput as EvalOutput
    from megatrain.engine.engine import StepOutput as StepOutput
    from megatrain.engine.optimizer import AdamW as AdamW
    from megatrain.models.decoder import Decoder as Decoder
    from megatrain.training.callbacks import Callback as Callback
    from megatrain.training.trainer import Trainer as Trainer

_LAZY = {
    "AdamW": "engine.optimizer",
    "Callback": "training.callbacks",
    "Config": "config",
    "Decoder": "models.decoder",
    "Engine": "engine.engine",
    "EvalOutput": "engine.transactions",
    "StepOutput": "engine.transactions",
    "Trainer": "training.trainer",
}

__all__ = [
    "AdamW",
    "Callback",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Decoder",
    "DeviceError",
    "DoesNotFit",
    "Engine",
    "EngineBroken",
    "EvalOutput",
    "MegatrainError",
    "StepOutput",
    "StorageError",
    "Trainer",
    "__version__",
]


if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses every other name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
        return getattr(importlib.import_module(f"megatrain.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
