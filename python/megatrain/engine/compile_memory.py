"""What a compiled layer keeps for its backward and needs while it runs, found by tracing it; no card is needed.

`torch.compile` traces a layer's forward and backward as one graph and cuts it in two where little has to be kept: what
is pointwise is made again in backward, unless a matmul reads it and memory is not short. The same tracing and the same
cut, on tensors without data, say how many bytes that is (min-cut rematerialization, as in torch's
`_functorch/partitioners.py`). The fused attention kernels are one opaque operation here, which keeps what they keep.
"""

import functools
import operator
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain.engine import expert_grads, float8
from megatrain.engine.compile import cut_for
from megatrain.engine.last_matmul import only_for_outputs

_TRACING = threading.Lock()
"""One layer is traced at a time: torch.fx replaces methods of `nn.Module` while it traces, for the whole process, and
afterwards puts back what it found (`_Patcher` in torch/fx/_symbolic_trace.py)."""
_ALIGN = 512
"""Bytes to which torch's allocator rounds."""


class Cut(NamedTuple):
    """Bytes of one layer with one micro-batch of the rows that it was traced with."""

    kept: int
    """What backward needs beyond weights, the layer's input and the tensors that all layers share."""
    backward: int
    """Most that backward has allocated at one time beyond that, all gradients included."""
    forward: int
    """Most that forward has allocated at one time, `kept` and the output included."""
    largest: int
    """The largest tensor of both."""
    moved: int
    """What forward's kernels read and write, those of matmuls and attention not counted."""
    spared_flops: int
    """What of forward's arithmetic a recomputation leaves out: matmuls on which the output alone depends."""


def cut(
    module: nn.Module,
    args: tuple[Any, ...],  # beside the hidden states; their tensors are shared by all layers
    kwargs: dict[str, Any],
    shape: tuple[int, int, int],  # of the hidden states: batch, seq, width
    dtype: torch.dtype,
    tuple_output: bool,
    matmul: str = "bf16",  # in what its linear layers multiply, which are converted to that
    least: bool = True,  # whether it keeps as little as it can, or what torch chooses
) -> Cut:
    """Traces and cuts a layer. Raises whatever tracing raises for a layer that cannot be traced without data."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    float8.convert(module, matmul)
    expert_grads.convert_to_measure(module)
    flat, spec = tree_flatten((args, kwargs))
    places = [index for index, value in enumerate(flat) if isinstance(value, Tensor)]
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    names = list(state)

    def layer(hidden: Tensor, *rest: Tensor) -> tuple[Tensor]:
        given = list(flat)
        for place, value in zip(places, rest[len(names) :], strict=True):
            given[place] = value
        args, kwargs = tree_unflatten(given, spec)
        weights = dict(zip(names, rest, strict=False))
        output = torch.func.functional_call(module, weights, (hidden, *args), kwargs)
        return (output[0] if tuple_output else output,)

    with _TRACING, FakeTensorMode() as mode:
        hidden = torch.empty(shape, dtype=dtype).requires_grad_()
        weights = [_like(value).requires_grad_(value.requires_grad) for value in state.values()]
        shared = [_like(flat[place]) for place in places]
        with _FusedAttention():
            joint: Any = aot_export_joint_simple(
                layer, (hidden, *weights, *shared), trace_joint=True, decompositions=select_decomp_table()
            )
        with mode, cut_for(least):
            forward, backward = min_cut_rematerialization_partition(
                joint, None, num_fwd_outputs=1, static_lifetime_input_indices=list(range(1, 1 + len(names)))
            )
    output, *saved = _results(forward)
    inputs = {_storage(node) for node in forward.graph.nodes if node.op == "placeholder"}
    kept = {_storage(node): _bytes(node.meta["val"]) for node in saved if isinstance(node.meta.get("val"), Tensor)}
    in_backward, in_forward = _memory(backward, _results(backward)), _memory(forward, [output, *saved])
    return Cut(
        kept=sum(size for storage, size in kept.items() if storage not in inputs),
        backward=in_backward.most,
        forward=in_forward.most,
        largest=max(in_backward.largest, in_forward.largest),
        moved=in_forward.moved,
        spared_flops=sum(_flops(node) for node in only_for_outputs(forward.graph, 1)),
    )


def _flops(matmul: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry

    args, kwargs = fx.node.map_arg((matmul.args, matmul.kwargs), lambda node: node.meta["val"])
    target: Any = matmul.target
    return int(flop_registry[target.overloadpacket](*args, **kwargs, out_val=matmul.meta["val"]))


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    output = next(node for node in graph.graph.nodes if node.op == "output")
    return [node for node in tree_flatten(output.args[0])[0] if isinstance(node, fx.Node)]


def _storage(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else id(node)


def _bytes(value: Any) -> int:
    """Of what an operation returns, as the allocator rounds it."""
    tensors = [part for part in tree_flatten(value)[0] if isinstance(part, Tensor)]
    return sum(-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in tensors)


class _Memory(NamedTuple):
    most: int
    """Most bytes that are allocated at one time."""
    largest: int
    """The largest of what is allocated."""
    moved: int
    """Bytes that pointwise operations and reductions read and write."""


def _memory(graph: fx.GraphModule, results: Iterable[fx.Node]) -> _Memory:
    """What a graph's operations allocate, its inputs not counted, and what they move.

    Pointwise operations have no memory of their own unless a matmul, a reduction or the caller reads what they make;
    everything has its own memory from when it is made until the last operation that reads it. What shares memory is one
    kernel, which reads each of its sources once.
    """
    from torch._functorch.partitioners import get_default_op_list

    kinds, results = get_default_op_list(), set(results)
    fma = getattr(torch.ops.prims, "fma", ...)  # of which the partition does not say that it is pointwise
    asserts = torch.ops.aten._assert_tensor_metadata.default
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node.target is not asserts]
    time = {node: at for at, node in enumerate(nodes)}

    def passes(node: fx.Node) -> bool:
        return kinds.is_view(node) or node.target is operator.getitem

    def reduces(node: fx.Node) -> bool:
        return getattr(node.target, "overloadpacket", None) in _reductions()

    def fuses(node: fx.Node) -> bool:
        return kinds.is_fusible(node) or getattr(node.target, "overloadpacket", None) is fma

    @functools.cache
    def is_read(node: fx.Node) -> bool:
        """Whether anything reads the value from memory, rather than within the kernel that makes it."""
        if node in results:
            return True
        # tracing puts an assertion before each conversion, which no compiled graph has
        users = [user for user in node.users if user.op == "call_function" and user.target is not asserts]
        return any(is_read(u) if passes(u) else not (fuses(u) or reduces(u)) for u in users)

    # the memory that a node's value is read from
    reads = {node: {node} for node in graph.graph.nodes if node.op == "placeholder"}
    read_by: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        sources = set().union(*(reads.get(source, set()) for source in node.all_input_nodes))
        fused = fuses(node) and not reduces(node) and not is_read(node)
        reads[node] = sources if fused or passes(node) else {node}
        read_by[node] = sources
        for source in sources:
            last[source] = max(last.get(source, 0), time[node])
    for node in results:
        for source in reads.get(node, ()):
            last[source] = len(nodes)
    ends: dict[int, int] = {}
    now = most = largest = moved = 0
    for node in nodes:
        if reads[node] == {node}:
            if fuses(node) or reduces(node):
                moved += _bytes(node.meta.get("val")) + sum(_bytes(source.meta.get("val")) for source in read_by[node])
            size = _bytes(node.meta.get("val"))
            now += size
            largest = max(largest, size)
            ends[last.get(node, time[node])] = ends.get(last.get(node, time[node]), 0) + size
        most = max(most, now)
        now -= ends.pop(time[node], 0)
    return _Memory(most, largest, moved)


@functools.cache
def _reductions() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.prod, aten.any, aten.all}
    )


class _FusedAttention(TorchFunctionMode):
    """Puts the opaque operation in the place of attention."""

    _ARGUMENTS = ("query", "key", "value")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(self._ARGUMENTS, args, strict=False)) | (kwargs or {})
        return _attention()(*(named[name] for name in self._ARGUMENTS))[0]


@functools.cache
def _attention() -> Any:
    """The operation: (query, key, value), each (batch, heads, seq, width), to output and one fp32 number a query."""
    name = "megatrain::fused_attention"
    torch.library.define(name, "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")
    torch.library.define(
        f"{name}_backward",
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor sums) -> (Tensor, Tensor, Tensor)",
    )

    def fake(query: Tensor, _key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # in the memory order of the queries, as the kernels do
        alike = query.shape[-1] == value.shape[-1]
        output = torch.empty_like(query) if alike else query.new_empty(*query.shape[:-1], value.shape[-1])
        return output, query.new_empty(query.shape[:-1], dtype=torch.float32)

    def fake_backward(
        _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _output: Tensor, _sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)

    def gradients(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return torch.ops.megatrain.fused_attention_backward(grad, *ctx.saved_tensors)

    torch.library.register_fake(name, fake)
    torch.library.register_fake(f"{name}_backward", fake_backward)
    torch.library.register_autograd(name, gradients, setup_context=keep)
    return torch.ops.megatrain.fused_attention
