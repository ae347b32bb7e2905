"""What a model asks of the planner: sizes and work of every unit, measured on the meta device. Allocates nothing."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatrain.engine.cuts import Cut
from megatrain.engine.embed_head import tail_bytes, tail_kept_bytes
from megatrain.engine.layer_cost import (
    Measured,
    gradient_bytes,
    measure,
    measure_part,
    measure_tiled,
    running_bytes,
)
from megatrain.engine.layer_graphs import can_capture
from megatrain.engine.logprobs import logprobs_bytes
from megatrain.engine.loss import default_chunk, workspace_bytes
from megatrain.engine.optimizer import AdamW, CoreGroup
from megatrain.engine.saved_tensors import STAGE_ALIGN
from megatrain.engine.template import cast_bytes
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.types import CORE_DTYPES, Unit
from megatrain.system.hardware import GIB, Gpu
from megatrain.weights.state_format import StateFormat


def plan_request(
    decoder: Decoder,
    *,
    tiles: int = 1,  # of tokens, in which the MLP halves of layers are computed
    routed: bool = False,  # whether of groups of experts those are sent that tokens are routed to
    least: bool = True,  # whether compiled layers keep as little as they can, or what torch chooses
    micro_batch: tuple[int, int],  # (rows, seq) of the largest micro-batch
    micro_batches: int,  # most micro-batches of one step
    grad_precision: str,
    state_format: StateFormat,
    update: str,
    budget: dict[str, int],  # bytes: device, host, and disk where there is one for state
    device: str,  # cuda or cpu
    requests: dict[str, Any] | None = None,  # numbers that the planner shall not derive
    rates: dict[str, float] | None = None,  # measured rates of the machine
    loss_chunk: int | None = None,
    loss_fn: bool | int = False,  # whether a loss function of the caller's is used; its device memory in bytes if known
    card_bytes: int | None = None,  # memory of the card; None: as much as an H100's
) -> dict[str, Any]:
    """The request of `megatrain._core.plan`, as a dict."""
    rows, seq = micro_batch
    for key in ("group", "large_group"):
        size = (requests or {}).get(key)
        if decoder.router is not None and size is not None and size < micro_batches:
            raise ConfigError(
                f"plan.{key} is {size} of {micro_batches} micro-batches: the router's auxiliary loss is taken over all "
                f"tokens of a step, so backward begins when all have been forward; leave plan.{key} out, or set "
                "output_router_logits to false"
            )
    if decoder.precision == "fp32":
        grad_precision = "fp32"
    compiled = bool((requests or {}).get("compile", device == "cuda"))
    kinds = {_kind(unit): unit for unit in reversed(decoder.units) if unit.layer is not None}

    def work_of(unit: Unit) -> Measured:
        if unit.part is not None:
            return measure_part(decoder, unit, rows, seq, device)
        if tiles > 1 and decoder.is_tiled(unit):
            return measure_tiled(decoder, unit, rows * seq, tiles, device, compiled, least)
        return measure(decoder, unit, rows, seq, device, compiled=compiled, least=least)

    by_kind = {kind: work_of(unit) for kind, unit in kinds.items()}
    measured = list(by_kind.values())
    numbers = {name: number for number, name in enumerate(_trained(decoder))}
    tokens = rows * seq
    aligned_input = -(-tokens * decoder.hidden_size * decoder.dtype.itemsize // STAGE_ALIGN) * STAGE_ALIGN
    head_flops = 2 * tokens * decoder.vocab_size * decoder.hidden_size
    units = []
    tiled = Cut(decoder, tiles).tiled
    for number, unit in enumerate(decoder.units):
        work = by_kind.get(_kind(unit), Measured(0, 0))
        # beside its input, what follows the experts keeps what these returned; it keeps both for all the others
        inputs = {None: 1, "after": 2}.get(unit.part, 0) if unit.role == "layer" else 0
        units.append(
            {
                "name": unit.name,
                "role": unit.role,
                "tensors": [
                    {
                        "name": t.name,
                        "shape": list(t.shape),
                        "dtype": CORE_DTYPES[t.dtype],
                        "role": t.role,
                        "group": numbers.get(t.name, 0),
                        **({"begin": t.begin} if t.begin else {}),
                    }
                    for t in unit.tensors
                ],
                "kept_bytes": work.kept_bytes + inputs * aligned_input if unit.role == "layer" else 0,
                "input_bytes": inputs * aligned_input,
                **({"weights_of": unit.weights_of} if unit.weights_of is not None else {}),
                **({"routed": _routed(decoder, number, tokens)} if routed and unit.experts is not None else {}),
                "flops": head_flops if unit.role == "head" else work.flops,
                **_beside_matmuls(
                    unit,
                    work,
                    micro_batch,
                    decoder.vocab_size,
                    device,
                    tiled.get(number, 1),
                    (rates or {}).get("launch_s", LAUNCH_S),
                ),
            }
        )
        if work.float8_flops and device != "cpu":
            units[-1] |= _in_float8(units[-1], unit, work, tokens, float8_share(rates or {}, device))
    chunk = loss_chunk or default_chunk(decoder.vocab_size, device, card_bytes)
    workspace = _workspace(decoder, list(kinds.values()), measured, tokens, micro_batches, chunk, device, loss_fn)
    more = (requests or {}).get("more_workspace") or 0  # measured, where the bounds were exceeded
    more += max((m.converting_bytes for m in measured), default=0)
    # every micro-batch passes through the experts of a layer before the first one leaves it
    more += micro_batches * max((m.passing_bytes for m in measured), default=0)
    return {
        "units": units,
        "tied": decoder.tied,
        "precision": decoder.precision,
        "grad_precision": grad_precision,
        "state": state_format.request(),
        "update": update,
        "micro_batches": micro_batches,
        **{what: size + more for what, size in workspace.items()},
        "context_bytes": Gpu(name="", total_bytes=card_bytes or 80 * GIB).context_bytes if device == "cuda" else 0,
        "fragmentation": FRAGMENTATION if device == "cuda" else 0.0,
        "largest_bytes": max(m.largest_bytes for m in measured),
        "budget": dict(budget),
        "shared_memory": device == "cpu",
        "device": device,
        "one_group": decoder.router is not None,
        "sum_layers": tiles > 1,
        "requests": {
            **{k: v for k, v in (requests or {}).items() if k in REQUESTS and v is not None},
            "graphs": device == "cuda"
            and bool((requests or {}).get("graphs", True))
            and can_capture(decoder, micro_batches),
        },
        "rates": {k: v for k, v in (rates or {}).items() if k in RATES},
    }


def _routed(decoder: Decoder, number: int, tokens: int) -> dict[str, Any]:
    """How the group of experts that is this unit is sent in part (`Routed` of the core)."""
    unit = decoder.units[number]
    assert unit.structure is not None
    experts = decoder.experts[unit.structure]
    assert experts is not None
    before = (by for by in range(number, 0, -1) if decoder.units[by].part == "before")
    return {"by": next(before), "experts": unit.tensors[0].shape[0], "share": max(experts.share(tokens), 1e-6)}


def _kind(unit: Unit) -> tuple[Any, ...]:
    """Units of one kind take the same work."""
    return unit.structure, unit.half, unit.part


_FROM_HBM = 0.7
"""What of the bytes that a compiled layer's elementwise kernels move goes to the card's memory; its caches serve the
rest. Of this and the next two: a profile by kernel on an H100, Qwen2.5-3B's shapes, 8,192 tokens a micro-batch."""
_MOVED_BY_KEPT = 1.1
"""Bytes that a layer's elementwise kernels move in forward for each byte that it keeps, where they are not counted."""
_MOVED_BY_LOSS = 14
"""Bytes that the loss moves for each logit, beside its three matmuls."""
_MOVES_OF_A_PASS = 3.4
"""What forward and backward move together, in multiples of forward, as the core takes it of a unit whose backward
remakes something (`BACKWARD_MOVES`), which is what it takes the head for."""
LAUNCH_S = 1.2e-3
"""Seconds of the calling thread that a compiled layer's forward takes: guards, wrappers and some thirty launches. A run
that has measured its steps corrects it, as it does the machine's rates (`launch_s` among them)."""
_RAMP_OF_LAUNCH = 1 / 30
"""What a kernel takes to begin and end on the card, of what its launch takes: 1.3 microseconds. It was fitted together
with `BETWEEN_STEPS_S` of the core."""


def _beside_matmuls(
    unit: Unit,
    work: Measured,
    micro_batch: tuple[int, int],
    vocab: int,
    device: str,
    tiles: int,
    launch_s: float,
) -> dict[str, float]:
    """What a step's time is made of beside `flops`. On the CPU the measured rate of matmuls stands for everything."""
    if device == "cpu" or unit.role == "embed":
        return {}
    tokens = math.prod(micro_batch)
    if unit.role == "head":
        return {
            "moved_bytes": _MOVED_BY_LOSS * tokens * vocab / _MOVES_OF_A_PASS,
            "ramp_s": _RAMP_OF_LAUNCH * launch_s,
        }
    if unit.half is not None:
        launch_s *= tiles / 2
    return {
        "attention_flops": work.attention_flops,
        "attention_row": micro_batch[1],
        "spared_flops": work.flops if tiles > 1 else _spared_flops(unit, work, tokens),
        "moved_bytes": _moved_bytes(work),
        "launch_s": launch_s,
        "ramp_s": _RAMP_OF_LAUNCH * launch_s,
        "captures": tiles == 1 and unit.part is None,
        "remakes": work.remakes,
    }


def _moved_bytes(work: Measured) -> float:
    """What forward's elementwise kernels move through the card's memory."""
    if work.moved_bytes is not None:
        return _FROM_HBM * work.moved_bytes
    return _MOVED_BY_KEPT * (work.kept_bytes + work.dropped_bytes)


def _spared_flops(unit: Unit, work: Measured, tokens: int) -> int:
    """What a recomputation leaves out; where that is not known, the last matrix's product."""
    if work.spared_flops is not None:
        return work.spared_flops
    matrices = [t.shape for t in unit.tensors if len(t.shape) == 2]
    last = 2 * tokens * torch.Size(matrices[-1]).numel() if matrices else 0
    return min(last, max(0, work.flops - work.attention_flops))


def staged_bytes(request: dict[str, Any], plan: dict[str, Any]) -> list[int]:
    """For each unit, how many bytes of its activations the core copies to the host and back for one micro-batch: at
    least what was asked for. It has no more than a unit's own, however large a staging buffer is."""
    return [
        (asked["kept_bytes"] if "offload" in (planned["activation"], planned.get("large_activation")) else 0)
        + (asked["input_bytes"] if planned["input"] != "device" else 0)
        for asked, planned in zip(request["units"], plan["units"], strict=True)
    ]


def float8_share(rates: Mapping[str, float], device: str) -> float:
    """Time that a float8 linear layer takes, as a share of a bf16 one's: forward and the input's gradient multiply
    float8, the weight's gradient bf16. The core takes one number for all three."""
    if device == "cpu":
        return 1.0
    usual = rates.get("matmul_tflops", 1.0)
    return (1 + 2 * usual / rates.get("float8_tflops", _FLOAT8 * usual)) / 3


_FLOAT8 = 2.0
"""How many times as fast as bf16 matrices a card multiplies float8 ones where that was not measured; of data sheets."""
_CONVERTED = 3
"""Bytes that are moved to convert a bf16 number to float8."""


def _in_float8(asked: dict[str, Any], unit: Unit, work: Measured, tokens: int, share: float) -> dict[str, float]:
    """What of a unit's request is otherwise where linear layers multiply in float8: `flops` are those of bf16 that take
    as long."""
    flops = round(work.flops - (1 - share) * work.float8_flops)
    spared = min(round(share * asked["spared_flops"]), flops - work.attention_flops)
    # every matrix, and as many activations as it has columns
    matrices = [t.shape for t in unit.tensors if len(t.shape) == 2]
    converted = _CONVERTED * sum(shape[0] * shape[1] + tokens * shape[1] for shape in matrices)
    return {"flops": flops, "spared_flops": spared, "moved_bytes": asked["moved_bytes"] + converted}


def core_groups(
    decoder: Decoder,
    optimizer: AdamW,
    assigned: Mapping[str, int],  # what `optimizer.assign` returned
    seen: bool,  # whether a micro-batch had an image
) -> tuple[list[CoreGroup], list[int]]:
    """Groups as the core takes them, and which are idle. To the core every trained tensor is a group of its own, so
    that settings can be grouped otherwise at any time. A part that processes images has no gradient in a step without
    one, and torch leaves such a parameter as it is."""
    settings, names = optimizer.core_groups(), _trained(decoder)
    idle = [] if seen else [number for number, name in enumerate(names) if decoder.is_vision(name)]
    return [settings[assigned[name]] for name in names], idle


def _trained(decoder: Decoder) -> list[str]:
    """Names of the trained tensors; a place in this list is the number of a group of the core."""
    return [t.name for t in decoder.tensors.values() if t.role == "trainable"]


FRAGMENTATION = 0.05
"""What torch's allocator has reserved beyond what is in use, as a share of that: 1 to 4 % were measured on an H100 with
micro-batches of 8,192 tokens. One row of 131,072 tokens of Qwen2.5-7B needs 5 to 12 % more than the 30.6 GiB in use,
by the allocator's rules applied to what a compiled layer allocates and frees: up to one tensor of its widest part."""

REQUESTS = (
    "slots",
    "slabs",
    "group",
    "large_group",
    "large_keep",
    "activation",
    "keep",
    "offload",
    "inputs",
    "state_on_device",
    "updates_on_device",
    "state_on_disk",
    "weights_on_disk",
    "inputs_on_disk",
    "stage_buffers",
    "parts",
    "accumulate",
    "graphs",
)
"""Numbers of a plan that may be given instead of derived."""

RATES = (
    "h2d_gbs",
    "d2h_gbs",
    "matmul_tflops",
    "adamw_gparams",
    "hbm_gbs",
    "state_read_gbs",
    "state_write_gbs",
    "link_cost",
)
"""Measured rates that the planner reads."""


def loss_fn_bytes(decoder: Decoder, tokens: int) -> int:
    """Device memory of a loss function of the caller's that forms the logits of a whole micro-batch and their
    cross-entropy, backward included. One that needs more, or less since it uses `head.logprobs`, is for the caller to
    declare (`loss_workspace`)."""
    size = decoder.dtype.itemsize
    # logits, their fp32 copy, log-probabilities and the gradients of both: never more than this at one time
    per_logit = size + 12
    if decoder.head.softcap is not None or decoder.head.logit_scale != 1.0:
        per_logit += 2 * size
    head = [t for t in decoder.units[-1].tensors if t.role == "trainable"]
    if decoder.tied and decoder.head.weight is not None:
        head += [t for t in (decoder.tensors[decoder.head.weight],) if t.role == "trainable"]
    gradients = sum(torch.Size(t.shape).numel() for t in head) * size
    return tokens * decoder.vocab_size * per_logit + gradients + tokens * decoder.hidden_size * (2 * size + 8)


def _workspace(
    decoder: Decoder,
    layers: list[Unit],  # one of each kind
    measured: list[Measured],
    tokens: int,
    micro_batches: int,
    chunk: int,
    device: str,
    loss_fn: bool | int,
) -> dict[str, int]:
    """Upper bounds of what torch allocates on the device at one time for work in progress: beside everything that is
    kept, and when all of that is gone."""
    size = decoder.dtype.itemsize
    hidden = tokens * decoder.hidden_size * size
    gradients = max(gradient_bytes(unit, decoder) for unit in layers)
    running = [running_bytes(m, hidden, gradients) for m in measured]
    beside = max(total - m.kept_bytes for total, m in zip(running, measured, strict=True))
    chunks = workspace_bytes(tokens, decoder.vocab_size, decoder.hidden_size, chunk, decoder.dtype, device)
    kept = tail_kept_bytes(decoder, tokens)
    loss = max(chunks + kept, tail_bytes(decoder, tokens)) + 3 * hidden
    if loss_fn is not False:
        chunked = logprobs_bytes(tokens, decoder.vocab_size, decoder.hidden_size, chunk, decoder.dtype, device)
        custom = max(loss_fn_bytes(decoder, tokens), chunked) if loss_fn is True else loss_fn + chunked
        loss = max(loss, custom + kept + 3 * hidden)
    step_tokens = tokens * micro_batches
    embed = (2 * tokens + min(step_tokens, decoder.num_embeddings)) * decoder.hidden_size * 4 + 2 * hidden
    front = grads = deepstack = 0
    if decoder.vision_spec is not None:
        # as if every token were an image's: how many are is not known before the first step
        trained = [t for t in decoder.units[0].tensors if t.role == "trainable" and decoder.is_vision(t.name)]
        front = int(tokens * decoder.vision_spec.running_bytes)
        grads = int(tokens * decoder.vision_spec.kept_bytes) if trained else 0
        grads += sum(torch.Size(t.shape).numel() for t in trained) * size
        deepstack = decoder.vision_spec.deepstack * hidden
    casts = cast_bytes(decoder)
    # between two layers every micro-batch has one gradient or one set of hidden states
    passing = (micro_batches + 1) * hidden + micro_batches * deepstack
    return {
        "workspace_bytes": max(beside, loss, front) + passing + casts,
        "late_workspace_bytes": max(*running, embed + front + grads) + passing + casts,
    }
