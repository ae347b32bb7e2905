"""What one run of a model on stubs tells about it: what runs before and behind its layers, and whether they are a plain
chain that can be streamed.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from megatrain.errors import ConfigError
from megatrain.models.recorder import EmbeddingCalls, Record, Recorder, Stub, is_same, on_meta


def untouched(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], width: int, dtype: torch.dtype
) -> list[str]:
    """Names of the parameters of a layer that its forward never looks at; none where it cannot run without values."""
    names = {id(p): name for name, p in layer.named_parameters()}
    touched: set[int] = set()

    def answer(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        touched.add(id(weight))
        return F.embedding(ids, weight, padding)

    def move(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    hidden = torch.empty(1, 2, width, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), EmbeddingCalls(answer, lambda tensor: touched.add(id(tensor))):
            on_meta(layer)(hidden, *tree_map(move, args), **tree_map(move, kwargs))
    except (RuntimeError, NotImplementedError):
        return []
    return [name for identity, name in names.items() if identity not in touched]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one run of a base on stubs tells about it."""

    record: Record
    before: frozenset[int]
    """`id` of every tensor of the recorder's base that is used before the first layer."""
    after: frozenset[int]
    """The same after the last layer."""
    side: tuple[str, ...]
    """Modules that run before the layers without seeing the hidden states, such as rotary tables."""
    tail: tuple[str, ...]
    """Modules after the last layer, each applied to the output of the one before."""
    tables: tuple[tuple[int, int | None], ...]
    """An embedding call each: `id` of its weight in the recorder's base, and the row that gets no gradient."""
    plain_embedding: bool
    """Whether the first layer gets the rows of the one embedding as they are."""


def probe(recorder: Recorder, input_ids: Tensor) -> Probe:
    """Runs the recorder's base to its end on `input_ids` (1, 2) and checks that it can be streamed.

    Raises ConfigError, naming the reason, when layers are not a plain chain.
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
        return rows[-1]

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
        with torch.enable_grad(), EmbeddingCalls(answer, seen):
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
    side = tuple(dict.fromkeys(path for at, path, _, out in calls if at == "before" and not _requires_grad(out)))
    side = tuple(path for path in side if not any(path.startswith(f"{other}.") for other in side))
    return Probe(
        record=Record([a for a, _ in recorder.calls], [k for _, k in recorder.calls], looked_up, {}),
        before=frozenset(used["before"]),
        after=frozenset(used["after"]),
        side=side,
        tail=_tail(recorder, name, [c for c in calls if c[0] == "after"], output),
        tables=tuple(tables),
        plain_embedding=len(rows) == 1 and looked_up == [None] and is_same(rows[0], recorder.hidden[0]),
    )


def _check_chain(recorder: Recorder, name: str, between: set[int]) -> None:
    """Refuses what a stream of independent layers would not reproduce."""
    if between or any(not is_same(a, b) for a, b in zip(recorder.hidden, recorder.hidden[1:], strict=False)):
        raise ConfigError(f"{name} changes the hidden states between its layers, so they cannot be streamed")
    check_arguments(recorder, name)


def check_arguments(recorder: Recorder, name: str) -> None:
    """Refuses layers that were called with more than hidden states and what no weight has made."""
    for index, (args, kwargs) in enumerate(recorder.calls):
        for key, value in [*enumerate(args, 1), *kwargs.items()]:
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_flatten(value)[0]):
                raise ConfigError(f"{name} passes layer {index} a second input computed from embeddings ({key})")
            if isinstance(value, (dict, list)):
                raise ConfigError(f"{name} passes state from layer to layer ({key}), so layers cannot be streamed")


def _tail(recorder: Recorder, name: str, calls: list[tuple[str, str, Any, Any]], output: Any) -> tuple[str, ...]:
    """The chain of modules that leads from the last layer to the base's output."""
    chain: list[str] = []
    hidden, holders = recorder.hidden[-1], ("", recorder.layers.rpartition(".")[0])
    for _, path, first, out in calls:
        inside = path.rpartition(".")[0] in holders
        if isinstance(first, Tensor) and isinstance(out, Tensor) and is_same(first, hidden) and inside:
            chain.append(path)
            hidden = out
    last = output[0] if isinstance(output, tuple) else output.last_hidden_state
    if not is_same(last, hidden):
        raise ConfigError(f"{name} does more after its last layer than to call modules, so its head cannot be cut off")
    return tuple(chain)


def _requires_grad(value: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_flatten(value)[0])
