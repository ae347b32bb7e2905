"""A compiled layer's last matmul, which is left out when the layer is recomputed.

A layer is recomputed for what its backward needs, not for its output: the matmul that the output ends with, a quarter
of a decoder layer's arithmetic, need not be repeated. (Where layers run eagerly, the recomputation stops early instead,
as torch's checkpoint does.) `torch.compile` makes one graph for both, which returns the output and what backward needs,
so that matmuls on which nothing but the output depends become operations that look whether their result is wanted. It
stays one graph, with the same kernels: what a recomputation makes is what forward made, to the bit.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from megatrain.engine import float8

_state = threading.local()
_MADE_HERE = 2
"""Number of what is replaced, so that graphs that an earlier release has stored are not used."""


@contextmanager
def outputs_unwanted() -> Iterator[None]:
    """Within it, this thread's calls of compiled layers make what backward needs; the values of their outputs are
    arbitrary."""
    before = getattr(_state, "unwanted", False)
    _state.unwanted = True
    try:
        yield
    finally:
        _state.unwanted = before


def backend(graph: fx.GraphModule, inputs: Sequence[Any], cut: str) -> Callable[..., Any]:
    """Inductor for `torch.compile`, but for the matmuls that only outputs depend on. `cut` names how forward and
    backward are cut apart within this call, which torch's own key of stored graphs does not tell."""
    from torch._inductor.compile_fx import compile_fx

    _operations()
    config: Any = torch.compiler.config
    # what torch has stored of the same layer has its usual matmuls
    with config.patch(cache_key_tag=f"{config.cache_key_tag} megatrain {_MADE_HERE} {cut}"):
        compiled: Any = compile_fx(graph, inputs, inner_compile=_compile)
    return compiled  # type: ignore[no-any-return]


def _compile(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    if not options.get("is_backward") and not options.get("is_inference"):
        replace(graph, _number_of_outputs())
    return compile_fx_inner(graph, inputs, **options)


def _number_of_outputs() -> int:
    """How many results of the forward that is being compiled are not what backward needs, which come last."""
    metadata: Any = torch._guards.TracingContext.get().fw_metadata
    number: int = metadata.num_forward
    return number


def replace(graph_module: fx.GraphModule, outputs: int) -> int:
    """Replaces the matmuls that only the first `outputs` results of a forward graph depend on. Returns how many."""
    found, operations = only_for_outputs(graph_module.graph, outputs), _operations()
    for node in found:
        node.target = operations[node.target]
    graph_module.recompile()
    return len(found)


def only_for_outputs(graph: fx.Graph, outputs: int) -> list[fx.Node]:
    """Matmuls of a forward graph on which only its first `outputs` results depend."""
    results: Any = graph.output_node().args[0]
    waiting = [node for node in results[outputs:] if isinstance(node, fx.Node)]
    waiting += [node for node in graph.nodes if node.op == "call_function" and node.is_impure()]
    needed: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    operations = _operations()
    return [node for node in graph.nodes if node.target in operations and node not in needed]


@functools.cache
def _operations() -> dict[Any, Any]:
    """By matmul: the operation that is that matmul where outputs are wanted, and has no values elsewhere. They are
    defined here, once: a graph that torch has stored reads them without having been made in this process."""
    aten = torch.ops.aten
    float8.define_operations()
    return {
        matmul: _if_wanted(matmul, without_values)
        for matmul, without_values in (
            (aten.mm.default, lambda a, b: a.new_empty(a.shape[0], b.shape[1])),
            (aten.addmm.default, lambda _, a, b, **_scales: a.new_empty(a.shape[0], b.shape[1])),
            (aten.bmm.default, lambda a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[2])),
            (
                torch.ops.megatrain.float8_matmul.default,
                lambda rows, _, weights, *_others: rows.new_empty(
                    rows.shape[0], weights.shape[0], dtype=torch.bfloat16
                ),
            ),
        )
    }


def _if_wanted(matmul: Any, without_values: Callable[..., Tensor]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if getattr(_state, "unwanted", False):
            return without_values(*args, **kwargs)
        result: Tensor = matmul(*args, **kwargs)
        return result

    kind, arguments = str(matmul._schema).split("(", 1)
    name = f"{kind.partition('::')[2]}_if_wanted"
    # inputs as the graph has them: the kernel of a matmul depends on their strides
    torch.library.define(f"megatrain::{name}", f"({arguments}", tags=(torch.Tag.needs_exact_strides,))
    torch.library.impl(f"megatrain::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"megatrain::{name}", without_values)
    return getattr(torch.ops.megatrain, name).default
