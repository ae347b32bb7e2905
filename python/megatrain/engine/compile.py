"""A layer compiled as one graph for all layers of its structure: what would go back to eager is an error by name."""

from typing import Any

import torch
from torch import nn

from megatrain.engine.last_matmul import backend
from megatrain.errors import ConfigError, first_line

RECOMPILES = 64
"""Graphs that torch may make of one code object: structures and passes of one layer class share it, and torch's own
limit of eight with it."""


class OneGraph:
    """A module compiled as one graph. Torch's limit of recompilations is raised within its calls alone."""

    def __init__(self, module: nn.Module, name: str) -> None:
        """`name` is what an error calls the module."""
        self._name = name
        self._run = torch.compile(module, fullgraph=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own.

        Raises `ConfigError` where the module has no one graph, or has too many for different inputs.
        """
        import torch._dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        config = torch._dynamo.config
        try:
            with config.patch(recompile_limit=max(config.recompile_limit, RECOMPILES)):
                return self._run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = f"{first_line(error)} ({type(error).__name__})"
            raise ConfigError(
                f"{self._name} cannot be compiled as one graph: {reason}; an engine with "
                'plan={"compile": False} runs the layers as they are, which takes more memory and time'
            ) from error
