"""What one layer, or half of one, takes with one micro-batch: memory, arithmetic and traffic, measured on the meta
device. Allocates nothing."""

import dataclasses
import inspect
import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from megatrain.engine import compile_memory, expert_grads, float8
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.engine.template import LayerCall, RoutedCall
from megatrain.engine.tiles import tile_length
from megatrain.errors import ConfigError, first_line
from megatrain.models import per_document
from megatrain.models.decoder import Decoder
from megatrain.models.expert_groups import boundary_of
from megatrain.models.flops import experts_per_token
from megatrain.models.fused_attention import FusedAttention
from megatrain.models.modules import on_meta, to_meta
from megatrain.models.moe import RoutedLayer
from megatrain.models.recorder import Recorder
from megatrain.models.types import Unit

log: logging.Logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One layer with one micro-batch."""

    kept_bytes: int
    """What its backward needs beyond weights, its input and the shared masks and tables."""
    flops: int
    """Of the forward's matmuls, attention counted causally."""
    attention_flops: int = 0
    """Those of `flops` that attention takes."""
    float8_flops: int = 0
    """Those of `flops` that are multiplied in float8."""
    converting_bytes: int = 0
    """Most that is allocated to convert the operands of one product, where the layer is not compiled."""
    routed_bytes: int = 0
    """Hidden states of all tokens beside each of their experts, where the layer has experts and is not compiled."""
    dropped_bytes: int = 0
    """What it would keep beside `kept_bytes` if it were not computed in tiles."""
    running_bytes: int | None = None
    """Most that recomputing it and its backward have allocated at one time; None where that is not known."""
    largest_bytes: int = 0
    """The largest tensor that it allocates; 0 where that is not known."""
    moved_bytes: int | None = None
    """What forward's kernels move beside matmuls and attention; None where that is not known."""
    remakes: bool = False
    """Whether its backward makes again what matmuls read of its forward (see `compile.keeping_least`)."""
    spared_flops: int | None = None
    """Those of `flops` that a recomputation leaves out; None where that is not known."""
    passing_bytes: int = 0
    """What each micro-batch has on the device while others pass through the same layer, whose experts are spread over
    several units."""


_SHAPES = ("Attempting to broadcast a dimension", "must match the size of tensor", "shapes cannot be multiplied")
"""What torch says of tensors that do not go together; the first where they have no data."""

_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p")


class _AsOnDevice(TorchFunctionMode):
    """What meta would do otherwise than the device: attention is fused (its arithmetic is counted here), except with
    dropout on the CPU, where dropout keeps its mask in the type of the activations."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.flops = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.dropout and self.device == "cpu":
            given = inspect.signature(F.dropout).bind(*args, **(kwargs or {})).arguments
            active = given.get("p", 0.5) > 0 and given.get("training", True)
            return given["input"] * torch.empty_like(given["input"]) if active else given["input"]
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | (kwargs or {})
        if named.get("dropout_p", 0.0) > 0 and self.device == "cpu":
            return func(*args, **(kwargs or {}))
        query, key, value = named["query"], named["key"], named["value"]
        batch, heads, length, width = query.shape
        self.flops += batch * heads * length * key.shape[2] * (width + value.shape[-1])
        return FusedAttention.apply(query, key, value)


class _NoModules:
    """In place of torch's `ModuleTracker`."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Matmuls(FlopCounterMode):
    """Counts matmuls. Torch's own counter also notes in which module they are, by hooks of all modules of the process:
    they run in other threads' training too, where they fail."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]


def measure(
    decoder: Decoder, unit: Unit, rows: int, seq: int, device: str, *, compiled: bool = False, least: bool = True
) -> Measured:
    """Measures a layer, or half of one, with a micro-batch of `rows` by `seq` tokens on a kind of device."""
    # of one model, however it is cut
    known = _KNOWN.setdefault(decoder.recorder, {})
    key = unit.structure, unit.half, unit.part, rows, seq, device, compiled, least
    if key not in known:
        known[key] = (
            _measure_compiled(decoder, unit, rows, seq, device, least)
            if compiled
            else _measure(decoder, unit, rows, seq, device)
        )
    return known[key]


def _measure(decoder: Decoder, unit: Unit, rows: int, seq: int, device: str) -> Measured:
    first = unit.layer
    assert first is not None
    module = on_meta(decoder.module_of(unit)).train()  # as it is trained, whatever mode the caller's model is in
    float8.convert(module, decoder.matmul)
    if unit.part is not None:
        boundary_of(module).answer = lambda states, *_: torch.zeros_like(states).requires_grad_()
    args, kwargs = _arguments(decoder, first, rows, seq)
    shared = (*_tensors(args), *_tensors(kwargs))
    call: LayerCall | RoutedCall = LayerCall(module, args, kwargs, decoder.recorder.tuple_output)
    gates = decoder.gates_of(unit)
    if decoder.router is not None and gates:
        routed = RoutedLayer(module, decoder.router, gates)
        call = RoutedCall(routed, None, args, kwargs, decoder.recorder.tuple_output)
    storages = frozenset(p.untyped_storage()._cdata for p in module.parameters())
    turn = CheckpointedCall(call, None, storages, 0, lambda: None)
    turn.use_stage(None, 0, 0, frozenset(t.untyped_storage()._cdata for t in shared))
    hidden = torch.empty(rows, seq, decoder.hidden_size, dtype=decoder.dtype, device="meta")
    attention, matmuls = _AsOnDevice(device), _Matmuls()
    try:
        with attention, matmuls:
            output = turn.forward(hidden, "offload", input_on_host=False)
    except (RuntimeError, NotImplementedError) as error:
        if any(words in str(error) for words in _SHAPES):
            name = type(module).__name__
            raise ConfigError(f"{name} cannot be computed with the numbers of this configuration: {error}") from error
        log.info("%s cannot be measured without data, so its activations are estimated: %s", type(module), error)
        return _estimate(decoder, module, rows, seq)
    finally:
        turn.release()
    if getattr(output, "shape", None) != hidden.shape:
        raise ConfigError(f"{type(module).__name__} does not return hidden states of the shape it receives")
    kept = turn.staged_bytes
    if first in decoder.mixing_layers:
        kept = per_document.kept_bytes(kept, hidden.numel() * hidden.element_size())
    in_float8 = sum(
        count
        for operation, count in matmuls.get_flop_counts().get("Global", {}).items()
        if str(operation) == float8.PRODUCT
    )
    flops = matmuls.get_total_flops() + attention.flops
    met = experts_per_token(decoder.text_config) if any(expert_grads.grouped_experts(module)) else 0
    return Measured(
        kept_bytes=kept,
        flops=flops,
        attention_flops=attention.flops,
        float8_flops=in_float8,
        converting_bytes=float8.converting_bytes(module, rows * seq),
        routed_bytes=met * hidden.nbytes,
    )


_RECORDED: weakref.WeakKeyDictionary[Recorder, dict[tuple[int, int], list[tuple[Any, Any]]]] = (
    weakref.WeakKeyDictionary()
)


def _arguments(decoder: Decoder, layer: int, rows: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a layer is called with for a micro-batch of `rows` by `seq` tokens beside the hidden states, on meta.
    Recorded once for each shape: for a million tokens that takes seconds."""
    known = _RECORDED.setdefault(decoder.recorder, {})
    if (rows, seq) not in known:
        record = decoder.recorder.record(torch.zeros((rows, seq), dtype=torch.int64))
        known[rows, seq] = [
            (to_meta(record.args[first]), to_meta(record.kwargs[first])) for first in decoder.structures
        ]
    return known[rows, seq][decoder.structures.index(layer)]


_KNOWN: weakref.WeakKeyDictionary[Recorder, dict[tuple[int | str | None, ...], Measured]] = weakref.WeakKeyDictionary()


def _measure_compiled(decoder: Decoder, unit: Unit, rows: int, seq: int, device: str, least: bool) -> Measured:
    """As `measure`, with what a compiled layer keeps: less than one that runs as it is."""
    eager = measure(decoder, unit, rows, seq, device)
    first = unit.layer
    assert first is not None
    args, kwargs = _arguments(decoder, first, rows, seq)
    try:
        found = compile_memory.cut(
            on_meta(decoder.module_of(unit)).train(),
            args,
            kwargs,
            (rows, seq, decoder.hidden_size),
            decoder.dtype,
            decoder.recorder.tuple_output,
            decoder.matmul,
            least,
        )
    except Exception as error:
        # whatever tracing may raise for a layer whose work depends on values, the count of the plain layer is an answer
        log.info(
            "%s is planned as if it were not compiled: %s", type(decoder.layers[first]).__name__, first_line(error)
        )
        return eager
    router = decoder.router.kept_bytes(rows * seq) if decoder.router is not None and decoder.gates_of(unit) else 0
    running = max(found.forward, found.kept + found.backward + expert_grads.part_bytes(decoder.module_of(unit)))
    compiled = Measured(
        kept_bytes=found.kept + router,
        flops=eager.flops,
        attention_flops=eager.attention_flops,
        float8_flops=eager.float8_flops,
        running_bytes=running,
        largest_bytes=found.largest,
        moved_bytes=found.moved,
        remakes=least,
        spared_flops=found.spared_flops,
    )
    if first not in decoder.mixing_layers:
        return compiled
    state = rows * seq * decoder.hidden_size * decoder.dtype.itemsize
    return _as_either(eager, compiled, state, gradient_bytes(unit, decoder))


def _as_either(eager: Measured, compiled: Measured, hidden: int, gradients: int) -> Measured:
    """`eager`, with memory for a layer that runs so with packed rows and compiled otherwise. `hidden` and `gradients`
    are bytes of a hidden state and of what torch returns for the layer's weights."""
    running = compiled.running_bytes or 0
    return dataclasses.replace(
        eager,
        kept_bytes=max(eager.kept_bytes, compiled.kept_bytes),
        running_bytes=max(running_bytes(eager, hidden, gradients) - 2 * hidden, running),
        largest_bytes=compiled.largest_bytes,
    )


def measure_tiled(
    decoder: Decoder, unit: Unit, tokens: int, tiles: int, device: str, compiled: bool, least: bool
) -> Measured:
    """As `measure`, for a unit that is computed in tiles of tokens: it keeps its input alone, and one tile runs at a
    time. What its backward computes again is counted as a third of its forward, since forward and backward are three
    times that."""
    length = tile_length(tokens, tiles)
    tile = measure(decoder, unit, 1, length, device, compiled=compiled, least=least)
    hidden = length * decoder.hidden_size * decoder.dtype.itemsize
    running = running_bytes(tile, hidden, gradient_bytes(unit, decoder))
    times = tokens / length
    return Measured(
        kept_bytes=0,
        flops=round(tile.flops * times * 4 / 3),
        float8_flops=round(tile.float8_flops * times * 4 / 3),
        dropped_bytes=round(tile.kept_bytes * times),
        converting_bytes=tile.converting_bytes,
        running_bytes=running,
        largest_bytes=tile.largest_bytes,
        moved_bytes=None if tile.moved_bytes is None else round(tile.moved_bytes * times),
        remakes=tile.remakes,
    )


def measure_part(decoder: Decoder, unit: Unit, rows: int, seq: int, device: str) -> Measured:
    """As `measure`, for one of the units that an MLP half is whose experts are spread over several. Any group may have
    most of the routes, so that each is taken to need for its rows what all of them need together."""
    whole = measure(decoder, dataclasses.replace(unit, part=None, experts=None, weights_of=None), rows, seq, device)
    around = measure(
        decoder, dataclasses.replace(unit, part="before", experts=None, weights_of=None), rows, seq, device
    )
    hidden = rows * seq * decoder.hidden_size * decoder.dtype.itemsize
    if unit.experts is None:
        # input, what the experts are given and return, and three gradients; a row and its route for each expert
        passing = 7 * hidden + around.kept_bytes + 2 * whole.routed_bytes
        return dataclasses.replace(
            around,
            kept_bytes=0,
            dropped_bytes=around.kept_bytes,
            running_bytes=running_bytes(around, hidden, gradient_bytes(unit, decoder)),
            passing_bytes=passing,
        )
    begin, end = unit.experts
    share = (end - begin) / decoder.experts_of(unit).count
    return Measured(
        kept_bytes=0,
        flops=round((whole.flops - around.flops) * share),
        dropped_bytes=round((whole.kept_bytes - around.kept_bytes) * share),
        running_bytes=running_bytes(whole, hidden, gradient_bytes(unit, decoder)),
    )


def running_bytes(work: Measured, hidden: int, gradients: int) -> int:
    """Upper bound of what torch allocates while a layer is recomputed and its backward runs: its activations, the
    `gradients` bytes of its weights', and a few tensors of its widest part, beside `hidden` bytes a hidden state.
    Backward begins with what experts return, before there is any gradient of a weight."""
    if work.running_bytes is not None:
        return work.running_bytes + 2 * hidden
    return work.kept_bytes * 5 // 4 + max(gradients + 4 * hidden, 4 * work.routed_bytes)


def gradient_bytes(unit: Unit, decoder: Decoder) -> int:
    """What torch has of the gradients of a unit's weights at one time."""
    weights = sum(torch.Size(t.shape).numel() for t in unit.tensors) * decoder.dtype.itemsize
    return weights - expert_grads.spared_bytes(decoder.module_of(unit))


def _estimate(decoder: Decoder, module: nn.Module, rows: int, seq: int) -> Measured:
    """For layers whose work depends on values (routing in a loop): as if every expert chosen were a dense layer."""
    tokens = rows * seq
    config = decoder.text_config
    chosen = experts_per_token(config)
    inner = getattr(config, "moe_intermediate_size", getattr(config, "intermediate_size", 0))
    kept = tokens * decoder.dtype.itemsize * (10 * decoder.hidden_size + 4 * chosen * (inner + decoder.hidden_size))
    if decoder.router is not None:
        kept += decoder.router.kept_bytes(tokens)
    dense = sum(p.numel() for n, p in module.named_parameters() if p.ndim == 2)
    return Measured(kept, 2 * tokens * (dense + 3 * chosen * inner * decoder.hidden_size))


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, Tensor)]
