"""One run of a model's base on stubs: what runs before and after its layers, and whether those are a plain chain."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from megatrain.errors import ConfigError
from megatrain.models.autograd_graph import leaves_of
from megatrain.models.recorder import EmbeddingCalls, Record, Recorder, Stub, is_same
from megatrain.models.state_changes import StateWatch, refusal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one run of a base on stubs has shown."""

    record: Record
    before: frozenset[int]
    """`id` of every tensor of the recorder's base that is used before the first layer."""
    after: frozenset[int]
    """The same after the last layer."""
    trained: frozenset[int]
    """`id` of every parameter of the recorder's base that gets a gradient from the output of the base."""
    side: tuple[str, ...]
    """Modules that run before the layers without reading the hidden states, such as rotary tables."""
    tail: tuple[str, ...]
    """Modules after the last layer, each of which is applied to the output of the one before it."""
    tables: tuple[tuple[int, int | None], ...]
    """Per embedding call: `id` of its weight in the recorder's base, and `padding_idx`, the row without gradient."""
    plain_embedding: bool
    """Whether the first layer gets the rows of the only embedding unchanged."""


def probe(recorder: Recorder, input_ids: Tensor) -> Probe:
    """Runs the recorder's base to its end on `input_ids` (1, 2) and checks that it can be streamed.

    Raises ConfigError, with the reason, where the layers are not a plain chain or the base changes state of its own.
    """
    base, name = recorder.base, type(recorder.base).__name__
    recorder.begin(to_the_end=True)
    base.train()  # so that a dropout after the embedding shows
    own = {id(t) for t in (*base.parameters(), *base.buffers())}
    used: dict[str, set[int]] = {"before": set(), "between": set(), "after": set()}
    looked_up: list[Tensor | None] = []
    rows: list[Tensor] = []
    tables: list[tuple[int, int | None]] = []
    calls: list[tuple[str, str, Any, Any]] = []  # (phase, module, first input, output)
    watch = StateWatch(base)

    def phase() -> str:
        if not recorder.calls:
            return "before"
        return "after" if len(recorder.calls) == recorder.num_layers else "between"

    def seen(tensor: Tensor) -> None:
        if id(tensor) in own:
            used[phase()].add(id(tensor))

    def answer(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        used[phase()].add(id(weight))
        tables.append((id(weight), padding_idx))
        looked_up.append(None if is_same(ids, input_ids) else ids)
        rows.append(torch.zeros(*ids.shape, weight.shape[1], dtype=recorder.dtype, requires_grad=True))
        return rows[-1] if torch.is_grad_enabled() else rows[-1].detach()

    hooks = [
        module.register_forward_hook(
            lambda _, args, kwargs, out, path=path: calls.append(
                (phase(), path, args[0] if args else next(iter(kwargs.values()), None), out)
            ),
            with_kwargs=True,
        )
        for path, module in base.named_modules()
        if path and not isinstance(module, (Stub, nn.ModuleList))
    ]
    for parameter in base.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        with torch.enable_grad(), watch, EmbeddingCalls(answer, seen):
            output = base(**recorder.call(input_ids, None, None))
    finally:
        base.eval()
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        for hook in hooks:
            hook.remove()
    if len(recorder.calls) != recorder.num_layers:
        raise ConfigError(f"{name} ran {len(recorder.calls)} of its {recorder.num_layers} layers")
    _check_chain(recorder, name, used["between"])
    last: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    if torch.autograd.grad(last.sum(), recorder.hidden[-1], retain_graph=True, allow_unused=True)[0] is None:
        raise ConfigError(f"the output of {name} passes no gradient on to its last layer, so nothing would be trained")
    leaves = leaves_of([last])
    # a module that reads weights runs on the device, where they are, even if it gets no gradient
    weightless = {path for path, module in base.named_modules() if not _holds_weights(module)}
    side = tuple(
        dict.fromkeys(
            path for at, path, _, out in calls if at == "before" and path in weightless and not _requires_grad(out)
        )
    )
    side = tuple(path for path in side if not any(path.startswith(f"{other}.") for other in side))
    # what rotary tables keep, and attributes of the modules that hold the layers, are reset for every record
    holders = ("", recorder.layers.rpartition(".")[0])
    stored = {path for path, _ in (*base.named_parameters(), *base.named_buffers())}
    changed = [path for path in watch.changed() if not _within(path, side)]
    changed = [path for path in changed if path in stored or path.rpartition(".")[0] not in holders]
    if changed:
        raise ConfigError(refusal(name, changed))
    found = Probe(
        record=Record([a for a, _ in recorder.calls], [k for _, k in recorder.calls], looked_up, {}),
        before=frozenset(used["before"]),
        after=frozenset(used["after"]),
        trained=frozenset(
            leaves | {weight for (weight, _), row in zip(tables, rows, strict=True) if id(row) in leaves}
        ),
        side=side,
        tail=_tail(recorder, name, [c for c in calls if c[0] == "after"], last),
        tables=tuple(tables),
        plain_embedding=len(rows) == 1 and looked_up == [None] and is_same(rows[0], recorder.hidden[0]),
    )
    _refuse_weights_in_arguments(recorder, name, input_ids)
    return found


def _check_chain(recorder: Recorder, name: str, between: set[int]) -> None:
    """Refuses what a chain of independent layers would not reproduce."""
    if between or any(not is_same(a, b) for a, b in zip(recorder.hidden, recorder.hidden[1:], strict=False)):
        raise ConfigError(f"{name} changes the hidden states between its layers, so they cannot be streamed")
    if not all(hidden.requires_grad for hidden in recorder.hidden):
        raise ConfigError(
            f"{name} cuts the gradient between its layers (detach), so earlier layers would not be trained"
        )
    check_arguments(recorder, name)


def check_arguments(recorder: Recorder, name: str) -> None:
    """Refuses layers that are called with anything that depends on weights, besides the hidden states, or with mutable
    state."""
    for index, (args, kwargs) in enumerate(recorder.calls):
        for key, value in [*enumerate(args, 1), *kwargs.items()]:
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_flatten(value)[0]):
                raise ConfigError(f"{name} passes layer {index} a second input computed from embeddings ({key})")
            if isinstance(value, (dict, list)):
                raise ConfigError(f"{name} passes state from layer to layer ({key}), so layers cannot be streamed")


def _refuse_weights_in_arguments(recorder: Recorder, name: str, input_ids: Tensor) -> None:
    """Refuses arguments of layers that depend on weights without a gradient (`no_grad`, `detach`): they are recorded on
    the CPU, where no weights are. Seen by recording with NaN for every weight."""
    with recorder.weights_as(float("nan")):
        record = recorder.record(input_ids)
    for index, (args, kwargs) in enumerate(zip(record.args, record.kwargs, strict=True)):
        for key, value in [*enumerate(args, 1), *kwargs.items()]:
            leaves = tree_flatten(value)[0]
            if any(isinstance(t, Tensor) and t.is_floating_point() and bool(t.isnan().any()) for t in leaves):
                raise ConfigError(f"{name} passes layer {index} a second input computed from weights ({key})")


def _tail(recorder: Recorder, name: str, calls: list[tuple[str, str, Any, Any]], last: Tensor) -> tuple[str, ...]:
    """Names of the chain of modules that leads from the last layer to the output of the base."""
    chain: list[str] = []
    hidden, holders = recorder.hidden[-1], ("", recorder.layers.rpartition(".")[0])
    for _, path, first, out in calls:
        inside = path.rpartition(".")[0] in holders
        if isinstance(first, Tensor) and isinstance(out, Tensor) and is_same(first, hidden) and inside:
            chain.append(path)
            hidden = out
    if not is_same(last, hidden):
        raise ConfigError(f"{name} does more after its last layer than to call modules, so its head cannot be cut off")
    return tuple(chain)


def _requires_grad(value: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_flatten(value)[0])


def _holds_weights(module: nn.Module) -> bool:
    """Whether a module tree has parameters or persistent buffers, whose values come from a checkpoint."""
    return any(True for _ in module.parameters()) or any(
        buffer is not None and name not in child._non_persistent_buffers_set
        for child in module.modules()
        for name, buffer in child._buffers.items()
    )


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
