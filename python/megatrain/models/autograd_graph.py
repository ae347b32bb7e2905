"""What a result depends on, read off its autograd graph without running a backward."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megatrain.errors import ConfigError


def leaves_of(outputs: Iterable[Tensor]) -> set[int]:
    """`id` of every leaf that `outputs` pass a gradient on to.

    Raises ConfigError where reentrant checkpointing is part of the graph: it starts a backward of its own within
    backward, which `torch.autograd.grad`, and so a streamed layer, does not allow (torch.utils.checkpoint).
    """
    outputs = list(outputs)
    found = {id(tensor) for tensor in outputs if tensor.requires_grad and tensor.is_leaf}
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise ConfigError(
                "checkpointing with use_reentrant=True cannot be streamed: pass use_reentrant=False, or leave it out, "
                "since megatrain decides itself what is recomputed (plan.activation)"
            )
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def nodes_between(output: Tensor, leaf: Tensor) -> list[Any]:
    """The nodes of the graph of `output` that pass a gradient on towards `leaf`."""
    order: list[Any] = []
    pending: list[tuple[Any, bool]] = [(output.grad_fn, False)]
    seen: set[Any] = set()
    while pending:
        node, visited = pending.pop()
        if visited:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending += [(following, False) for following, _ in node.next_functions]
    leads: set[Any] = set()
    for node in order:  # whatever a node passes its gradient on to comes before it
        if getattr(node, "variable", None) is leaf or any(following in leads for following, _ in node.next_functions):
            leads.add(node)
    return [node for node in order if node in leads]
