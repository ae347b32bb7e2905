"""Layers captured as CUDA graphs: what a step's layers launch is recorded once and replayed in later steps.

Launching a layer's kernels from Python takes the calling thread 2 to 3 ms for its forward and backward, which is longer
than a small layer computes. A graph is launched at once (docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). It
reads and writes the addresses that it was captured with, so only layers whose weights stay on the device are captured
(`UnitPlan::can_be_captured` in the core), each with every micro-batch of a step. Everything else of a pass, the loss
and the embedding among it, runs as without graphs.

A pass is captured after it has run a few times with inputs of the same shapes, without computing anything: its
operations are repeated in their order while their kernels are recorded. So nothing is lost where capturing fails.
"""

import collections
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain._core import ComputeOp
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.engine.template import cast_bytes, has_dropout
from megatrain.errors import first_line
from megatrain.models.decoder import Decoder
from megatrain.models.varlen_attention import Documents, is_documents, mark_dynamic

if TYPE_CHECKING:
    from megatrain.engine.inputs import MicroBatch
    from megatrain.engine.step import StepTemplates
    from megatrain.models.recorder import Record

log: logging.Logger = logging.getLogger(__name__)

_RUNS = 2
"""Passes with inputs of the same shapes that run before one is captured: compilers have chosen their kernels then."""
_MOST_MICRO_BATCHES = 32
"""Of a pass that is captured: each has graphs of its own."""
_MOST_SHAPES = 8
"""Passes with inputs of different shapes that are captured at a time; the one not used for longest goes first."""
_MOST_COUNTED = 4096
"""Shapes whose passes are counted; rows of many lengths have ever new ones."""
_LARGEST_INPUT = 64 << 20
"""Bytes of a layer's arguments (masks, rotary tables) above which a pass is not captured: they are held twice."""


def can_capture(decoder: Decoder, micro_batches: int) -> bool:
    """Whether the layers of a model launch the same kernels in every step of `micro_batches`, as far as their kind
    shows: those of routed experts depend on the routes, and random numbers on the step. Weights that are cast pass
    through a buffer that all layers share, whose contents a graph would not know."""
    return (
        micro_batches <= _MOST_MICRO_BATCHES
        and not cast_bytes(decoder)
        and not any("experts" in name for name in decoder.tensors)
        and decoder.vision_spec is None
        and not any(has_dropout(layer) for layer in decoder.layers)
    )


@dataclasses.dataclass(slots=True)
class _Part:
    """One operation of a layer with one micro-batch."""

    fields: tuple[Any, ...]
    graph: torch.cuda.CUDAGraph
    entry: Tensor | None
    """What the graph reads, where no other graph has written it: copied here before it is launched."""
    exit: Tensor | None
    """What the graph writes for an operation that is no graph's."""


@dataclasses.dataclass(slots=True)
class CapturedPass:
    """The graphs of a pass over micro-batches of certain shapes."""

    parts: dict[tuple[str, int, int], _Part]
    """By phase, unit and micro-batch."""
    inputs: list[Tensor]
    """What the graphs read of the layers' arguments."""
    between: Tensor
    """Stands for hidden states that are passed on from graph to graph."""
    loaded: list[Tensor | None] = dataclasses.field(default_factory=list)
    """What was last copied to `inputs`."""

    def load(self, inputs: Sequence[Tensor]) -> None:
        """Copies the arguments of a pass to where the graphs read them."""
        for i, (target, source) in enumerate(zip(self.inputs, inputs, strict=True)):
            if self.loaded[i] is not source:
                target.copy_(source)
                self.loaded[i] = source

    def run(self, op: ComputeOp, given: Tensor) -> Tensor | None:
        """The operation's result for hidden states or their gradient; None where it has no graph."""
        part = self.parts.get((op.phase, op.unit, op.micro_batch))
        if part is None:
            return None
        if part.fields != _fields(op):
            raise RuntimeError(f"{op.phase} of unit {op.unit} was captured as {part.fields} and is now {_fields(op)}")
        if part.entry is not None:
            part.entry.copy_(given)
        part.graph.replay()
        return self.between if part.exit is None else part.exit


class LayerGraphs:
    """The captured passes of one set of templates."""

    def __init__(self, units: frozenset[int]) -> None:
        """`units` are those that may be captured."""
        self._units = units
        self._captured: collections.OrderedDict[Any, CapturedPass] = collections.OrderedDict()
        self._runs: collections.Counter[int] = collections.Counter()
        """Passes by the hash of their key."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._failed = False
        self._last: tuple[Record, _Arguments | None] | None = None

    def begin(self, micro_batches: "Sequence[MicroBatch]") -> "CapturedPass | Recording | None":
        """What a pass over these micro-batches, which have their records, does about graphs: it replays them, records
        its operations to be captured at its end, or neither."""
        if self._failed or len(micro_batches) > _MOST_MICRO_BATCHES or _get_current_dispatch_mode_stack():
            return None
        arguments: list[_Arguments] = []
        inputs: dict[int, Tensor] = {}
        for micro in micro_batches:
            found = self._arguments(micro)
            if found is None:
                return None
            arguments.append(found)
            inputs |= {id(tensor): tensor for tensor in found.tensors}
        # which arguments are one tensor is part of what is captured
        order = {identity: number for number, identity in enumerate(inputs)}
        key = tuple(a.key for a in arguments), tuple(order[id(t)] for a in arguments for t in a.tensors)
        captured = self._captured.get(key)
        if captured is not None:
            self._captured.move_to_end(key)
            captured.load(list(inputs.values()))
            return captured
        if len(self._runs) >= _MOST_COUNTED:
            self._runs.clear()
        number = hash(key)
        self._runs[number] += 1
        if self._runs[number] <= _RUNS:
            return None
        return Recording(self, key, arguments, inputs)

    def _arguments(self, micro: "MicroBatch") -> "_Arguments | None":
        """Rows without padding or packing share one record, so it is looked at once."""
        if self._last is None or self._last[0] is not micro.recorded:
            self._last = micro.recorded, _Arguments.of(micro)
        return self._last[1]

    def capture(self, recording: "Recording", templates: "StepTemplates", *, fp32_sums: bool) -> None:
        """Captures the pass whose operations were recorded. Where that fails, the log says so, and passes go on without
        graphs."""
        try:
            captured = self._capture(recording, templates, fp32_sums)
        except Exception as error:  # whatever a model's code does that a graph cannot hold
            self._failed = True
            self._captured.clear()
            log.info("the layers' kernels are launched one by one: no CUDA graph holds them (%s)", first_line(error))
            return
        self._captured[recording.key] = captured
        if len(self._captured) > _MOST_SHAPES:
            self._captured.popitem(last=False)

    def _capture(self, recording: "Recording", templates: "StepTemplates", fp32_sums: bool) -> CapturedPass:
        device = templates.weights.device
        if recording.draws:
            raise RuntimeError("a layer draws random numbers")
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        static = {identity: tensor.clone() for identity, tensor in recording.inputs.items()}
        work = _Capture(templates, self._units, recording.arguments, static, self._pool, fp32_sums)
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()  # what it frees may call the driver, which a capture does not allow
        try:
            with torch.cuda.stream(self._stream):
                for op in recording.ops:
                    work.add(op)
        finally:
            if enabled:
                gc.enable()
        between = torch.empty(0, dtype=templates.decoder.dtype, device=device)
        return CapturedPass(work.parts, list(static.values()), between, [*recording.inputs.values()])


def _fields(op: ComputeOp) -> tuple[Any, ...]:
    """What a captured operation depends on."""
    return op.weights, op.grad, op.accumulator, op.activation, op.input_on_host, op.stage, op.first, op.last


@dataclasses.dataclass(slots=True)
class _Arguments:
    """What the layers are called with for one micro-batch."""

    shape: tuple[int, int]
    key: tuple[Any, ...]
    """Equal for what the same graphs can read."""
    tensors: list[Tensor]
    """Those on the device, in order."""
    leaves: list[Any]
    spec: Any

    @classmethod
    def of(cls, micro: "MicroBatch") -> "_Arguments | None":
        """None where no graph can read them."""
        record = micro.recorded
        if micro.document_buckets is not None or record.visual is not None or micro.images:
            return None
        leaves, spec = tree_flatten((record.args, record.kwargs), is_leaf=is_documents)
        kinds: list[Any] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                kinds.append((leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device.type))
            elif isinstance(leaf, Documents):
                tensors += [t for t in (leaf.starts, leaf.hidden) if t is not None]
                longest = int(leaf.lengths.max())
                kinds.append((leaf.window, leaf.hidden is None, leaf.starts.shape[0], longest))
            elif leaf is None or isinstance(leaf, int | float | str):
                kinds.append(leaf)
            else:
                return None
        distinct = {id(t): t for t in tensors}.values()
        if any(not t.is_cuda for t in distinct) or sum(t.nbytes for t in distinct) > _LARGEST_INPUT:
            return None
        names = tuple(tuple(kwargs) for kwargs in record.kwargs)
        return cls(micro.shape, (micro.shape, names, tuple(kinds)), tensors, leaves, spec)

    def bound_to(self, static: dict[int, Tensor]) -> Any:
        """(args, kwargs) of the layers with other tensors of the same shapes."""

        def bound(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return static[id(leaf)]
            if isinstance(leaf, Documents):
                hidden = None if leaf.hidden is None else static[id(leaf.hidden)]
                return mark_dynamic(leaf._replace(starts=static[id(leaf.starts)], hidden=hidden))
            return leaf

        return tree_unflatten([bound(leaf) for leaf in self.leaves], self.spec)


class Recording:
    """The operations of a pass that is to be captured."""

    def __init__(self, graphs: LayerGraphs, key: Any, arguments: "list[_Arguments]", inputs: dict[int, Tensor]) -> None:
        self._graphs = graphs
        self.key = key
        self.arguments = arguments
        self.inputs = inputs
        self.ops: list[ComputeOp] = []
        self.draws: bool = False
        """Whether a layer has drawn random numbers."""

    def add(self, op: ComputeOp, device: torch.device) -> None:
        """Notes an operation that has just run."""
        self.ops.append(op)
        if op.phase == "forward" and device.index is not None:
            # the generator was seeded before the layer began, which sets its offset to 0
            self.draws |= torch.cuda.default_generators[device.index].get_offset() != 0

    def capture(self, templates: "StepTemplates", *, fp32_sums: bool) -> None:
        """To be called when the pass has ended."""
        self._graphs.capture(self, templates, fp32_sums=fp32_sums)


class _Capture:
    """A pass that is being captured: its operations in their order, none of which computes anything."""

    def __init__(
        self,
        templates: "StepTemplates",
        units: frozenset[int],
        arguments: "list[_Arguments]",
        static: dict[int, Tensor],  # by identity of an argument: where the graphs read it
        pool: Any,
        fp32_sums: bool,
    ) -> None:
        self._templates = templates
        self._units = units
        self._shapes = [a.shape for a in arguments]
        self._arguments = [a.bound_to(static) for a in arguments]
        self._pool = pool
        self._fp32_sums = fp32_sums
        self._hidden: dict[int, Tensor] = {}
        self._grad: dict[int, Tensor] = {}
        self._turns: dict[tuple[int, int], CheckpointedCall] = {}
        self.parts: dict[tuple[str, int, int], _Part] = {}

    def add(self, op: ComputeOp) -> None:
        """Captures an operation of a layer; the others only free what they would consume."""
        unit, m = op.unit, op.micro_batch
        if op.phase in ("forward", "backward") and unit in self._units:
            layer = self._templates.layers[unit].bind(op.weights, unit)
            if op.phase == "forward":
                self._forward(op, layer)
            else:
                self._backward(op)
        elif op.phase == "loss" or (op.phase == "forward" and unit not in self._units):
            self._hidden.pop(m, None)
        elif op.phase == "backward":
            self._grad.pop(m, None)

    def _forward(self, op: ComputeOp, number: int) -> None:
        unit, m = op.unit, op.micro_batch
        templates = self._templates
        args, kwargs = self._arguments[m]
        layer = templates.layers[unit].call(args[number], kwargs[number])
        weights = templates.weights
        turn = CheckpointedCall(layer, weights, frozenset((weights.storage,)), op.weights, lambda: None)
        before = self._hidden.pop(m, None)
        hidden = self._between_graphs(m) if before is None else before
        out = self._between_graphs(m) if unit + 1 not in self._units else None
        with self._capturing(op, hidden if before is None else None, out):
            after = turn.forward(hidden, op.activation, False)
            if out is not None:
                out.copy_(after)
        del hidden, before
        if out is None:
            self._hidden[m] = after
        self._turns[unit, m] = turn

    def _backward(self, op: ComputeOp) -> None:
        unit, m = op.unit, op.micro_batch
        templates = self._templates
        template, turn = templates.layers[unit], self._turns.pop((unit, m))
        sums = templates.sums[unit].at(op.accumulator) if op.accumulator is not None else None
        grads = templates.grads[unit]
        targets = sums if sums is not None else grads.at(op.grad) if op.grad is not None else []
        before = self._grad.pop(m, None)
        grad = self._between_graphs(m) if before is None else before
        out = self._between_graphs(m) if unit - 1 not in self._units else None
        with self._capturing(op, grad if before is None else None, out):
            wanted = [target for target in targets if target is not None]
            template.weight_grads.begin(wanted, first=op.first, in_fp32=self._fp32_sums)
            found = turn.backward(grad, template.parameters, op.weights, None)
            if template.weight_grads.finish(found[1:]):
                raise RuntimeError("a layer gives a parameter no gradient")
            assert found[0] is not None
            if op.last and op.accumulator is not None and op.grad is not None:
                grads.flat(op.grad).copy_(templates.sums[unit].flat(op.accumulator))
            if out is not None:
                out.copy_(found[0])
        if out is None:
            self._grad[m] = found[0]

    def _between_graphs(self, m: int) -> Tensor:
        """A tensor like the hidden states of a micro-batch, outside the memory of the graphs."""
        decoder = self._templates.decoder
        shape = (*self._shapes[m], decoder.hidden_size)
        return torch.empty(shape, dtype=decoder.dtype, device=self._templates.weights.device)

    @contextlib.contextmanager
    def _capturing(self, op: ComputeOp, entry: Tensor | None, out: Tensor | None) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        # other threads of this process go on calling the driver meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self.parts[op.phase, op.unit, op.micro_batch] = _Part(_fields(op), graph, entry, out)
