"""A layer compiled as one graph for all layers of its structure: what would go back to eager is an error by name."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from megatrain.engine import last_matmul
from megatrain.errors import ConfigError, first_line

RECOMPILES = 64
"""Graphs that torch may make of one code object: structures and passes of one layer class share it, and torch's own
limit of eight with it."""


@contextlib.contextmanager
def keeping_least() -> Iterator[None]:
    """Within it, torch cuts layers so that backward makes again what is pointwise even where a matmul reads it, such as
    the inputs of a layer's linear layers, which torch keeps otherwise. A layer of 7B then keeps 97 instead of 148 KiB a
    token, and takes as long on an H200 (36.7 ms forward and backward with 16 rows of 1,024). By its kernels one of 3B
    takes about 2 % longer, so that torch's own cut is taken where memory is not short (`cuts.Cut.keeps`)."""
    import torch._functorch.config

    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        yield


def cut_for(least: bool) -> contextlib.AbstractContextManager[None]:
    """Within it, torch cuts layers so that they keep least, or as it does otherwise."""
    return keeping_least() if least else contextlib.nullcontext()


def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor for `torch.compile`, as layers are compiled here that keep least."""
    with cut_for(least=True):
        return last_matmul.backend(graph, inputs, "least")


def usual_backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """As `backend`, for layers that keep what torch chooses."""
    with cut_for(least=False):
        return last_matmul.backend(graph, inputs, "usual")


class OneGraph:
    """A module compiled as one graph. Torch's limit of recompilations is raised within its calls alone."""

    def __init__(self, module: nn.Module, name: str, *, least: bool = True) -> None:
        """`name` is what an error calls the module; `least`: whether it keeps as little as it can for backward."""
        self._name = name
        self._run = torch.compile(module, fullgraph=True, backend=backend if least else usual_backend)

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
