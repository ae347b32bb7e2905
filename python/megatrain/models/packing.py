"""Attention in which every token sees its own document alone, without a dense mask.

transformers describes who sees whom by a mask of seq x seq entries for each row; the fused kernels then compute every
block of it, at three times the price of causal attention. Here the model's own forward is handed where the
documents of its rows begin instead (`Documents`), and a layer's attention runs over documents of any length at once:
the flash kernels on a CUDA card, one document after another on the CPU. What a mask says is read off its own function,
entry by entry where it matters, so packed documents, sliding windows, chunks and padding are all the same here; a mask
that is nothing of the kind stays dense.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder

NAME = "megatrain_documents"
"""Our attention implementation among those of transformers; without documents it is `sdpa`."""

_TRIAL = "megatrain_documents_trial"
_FLASH_WIDTH = 256
"""Largest head that the flash kernels take."""


class Documents(NamedTuple):
    """Stands where a layer expects its mask."""

    starts: Tensor
    """(N + 1,), int32: where each document begins among the tokens of all rows, and where the last one ends."""
    lengths: Tensor
    """(N,), int64, on the CPU wherever the layer computes: the host must know the longest without asking a device."""
    window: int | None
    """How many tokens a token sees at most, itself included; None: its document up to itself."""
    hidden: Tensor | None = None
    """(T,), bool: what is padding, which sees nothing and is a document of its own; None where nothing is."""

    def to(self, device: torch.device) -> "Documents":
        """The same on `device`, copied asynchronously."""
        starts, hidden = (
            t if t is None else t.pin_memory().to(device, non_blocking=True) for t in (self.starts, self.hidden)
        )
        assert starts is not None
        return of_any_number(self._replace(starts=starts, hidden=hidden))


def of_any_number(documents: Documents) -> Documents:
    """Tells the compiler that other batches have another number of documents, so that it compiles once."""
    torch._dynamo.mark_dynamic(documents.starts, 0)
    torch._dynamo.mark_dynamic(documents.lengths, 0)
    return documents


# -------------------------------------------------------------------------------------------------- masks


def find(
    sees: Callable[[Tensor, Tensor], Tensor],  # (batch, seq) queries and keys -> bool, (batch, seq) or broadcast to it
    real: Tensor,  # (batch, seq), bool: False is padding
    window: int | None,
) -> Documents | None:
    """The documents that a mask's own function describes, or None where it describes something else.

    Looks at as many entries of the mask as there are tokens, a few times, and never at all of it: a document begins
    where a token does not see the one before. Then each token must see itself and the first that its document and its
    window leave it, and neither the one before that, nor its row's first, nor the one that follows.
    """
    batch, seq = real.shape
    if (window is not None and window < 1) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        return None  # padding that follows sees what it follows
    at = torch.arange(seq).expand(batch, seq)
    before, after = (at - 1).clamp_min(0), (at + 1).clamp_max(seq - 1)

    def visible(keys: Tensor) -> Tensor:
        return sees(at, keys).expand(batch, seq) & real.gather(1, keys)

    joined = torch.where(real, visible(before), ~real.gather(1, before))
    begins = (~joined).index_fill(1, torch.zeros(1, dtype=torch.int64), True)
    first = torch.where(begins, at, 0).cummax(1).values
    if window is not None:
        first = torch.maximum(first, at - window + 1)
    opening = real.int().argmax(1, keepdim=True).expand(batch, seq)
    agrees = visible(at) & visible(first) & visible((first + at) // 2)
    agrees &= visible((first - 1).clamp_min(0)) == (first == 0)
    agrees &= visible(opening) == (first <= opening)
    agrees &= visible(after) == (at == seq - 1)
    if not bool((agrees | ~real).all()):
        return None
    starts = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([batch * seq])])
    if len(starts) == 2:  # one row, one document: an empty one beside it, since compilers take a size of 1 for fixed
        starts = torch.cat([starts, starts[-1:]])
    hidden = None if bool(real.all()) else ~real.flatten()
    return of_any_number(Documents(starts.int(), starts.diff(), window, hidden))


def mask(**given: Any) -> Any:
    """What transformers asks for a mask: None or dense as for `sdpa`, and documents in place of most dense ones."""
    from transformers.masking_utils import sdpa_mask

    batch, seq, padding = given["batch_size"], given["q_length"], given.get("attention_mask")
    whole = seq == given["kv_length"] and not any(given.get(k, 0) for k in ("q_offset", "kv_offset", "use_vmap"))
    if not whole or (padding is not None and padding.shape[-1] != seq):
        return sdpa_mask(**given)
    row, head, sees = torch.arange(batch)[:, None], torch.zeros((), dtype=torch.int64), given["mask_function"]
    real = torch.ones(batch, seq, dtype=torch.bool) if padding is None else padding.bool()
    window = given.get("local_size")
    found = find(lambda queries, keys: sees(row, head, queries, keys), real, window)
    # rows that are one document each are what `sdpa` calls causal
    if found is None or (int(found.lengths[:batch].min()) == seq and (window is None or window >= seq)):
        return sdpa_mask(**given)
    return found


def dense(documents: Documents, batch: int, seq: int) -> Tensor:
    """The mask that `documents` stand for: True where a query sees a key (batch, 1, seq, seq)."""
    at = torch.arange(batch * seq, device=documents.starts.device)
    number = torch.bucketize(at, documents.starts, right=True).view(batch, seq)
    back = at[:seq, None] - at[:seq]
    near = back >= 0 if documents.window is None else (back >= 0) & (back < documents.window)
    seen = (number[:, :, None] == number[:, None, :]) & near
    if documents.hidden is not None:
        seen &= ~documents.hidden.view(batch, seq, 1)
    return seen[:, None]


# ---------------------------------------------------------------------------------------------- attention


def _refusal(module: Any, given: dict[str, Any]) -> str | None:
    """What an attention asks for beside a mask that no kernel over documents does."""
    known = {"softcap": "soft caps", "s_aux": "attention sinks", "position_bias": "a bias of positions"}
    asked = [what for name, what in known.items() if given.get(name) is not None]
    if given.get("dropout"):
        asked.append("dropout of attention")
    causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        asked.append("attention to what follows")
    return ", ".join(asked) or None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention: (batch, heads, seq, width) each, fewer heads of keys and values -> (batch, seq, heads,
    width). With documents in the mask's place, over those; else as `sdpa` does it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, _, seq, width = query.shape
    if isinstance(attention_mask, Documents):
        if takes_documents(query.device.type, query.dtype, max(width, value.shape[-1])):
            return _over_documents(query, key, value, attention_mask, given.get("scaling")), None
        attention_mask = dense(attention_mask, batch, seq)
    output: tuple[Tensor, None] = cast("Any", sdpa_attention_forward)(
        module, query, key, value, attention_mask, **given
    )
    return output


def _over_documents(query: Tensor, key: Tensor, value: Tensor, of: Documents, scale: float | None) -> Tensor:
    batch, _, seq, width = query.shape
    # one width for all, and a multiple of 8 for the flash kernels: zeros add nothing to a product
    common = -(-max(width, value.shape[-1]) // 8) * 8
    alike = [t if t.shape[-1] == common else F.pad(t, (0, common - t.shape[-1])) for t in (query, key, value)]
    flat = [t.transpose(1, 2).flatten(0, 1) for t in alike]
    scale = width**-0.5 if scale is None else scale
    output: Tensor = documents_attention(*flat, of.starts, of.lengths, of.window, scale)[0]
    if of.hidden is not None:
        output = output.masked_fill(of.hidden[:, None, None], 0.0)
    return output.view(batch, seq, *output.shape[1:])[..., : value.shape[-1]]


def takes_documents(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether there is a kernel for it; else each layer makes itself a dense mask of the documents."""
    return device != "cuda" or (dtype in (torch.bfloat16, torch.float16) and width <= _FLASH_WIDTH)


@torch.library.custom_op("megatrain::documents_attention", mutates_args=())
def documents_attention(
    query: Tensor,  # (T, heads, width)
    key: Tensor,  # (T, fewer heads, width)
    value: Tensor,  # (T, fewer heads, width)
    starts: Tensor,  # (N + 1,), int32
    lengths: Tensor,  # (N,), on the CPU
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, width) and the logarithm of each query's sum of exponentials (heads, T), in fp32 at least. One
    opaque operation for the compiler, whatever the number of documents."""
    if query.is_cuda:
        longest = int(lengths.max())
        output, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, **_flash(window, longest, scale)
        )
        return output.contiguous(), sums
    output, sums = torch.empty_like(query), _sums(query)
    key, value = _repeat(key, query), _repeat(value, query)
    for part, length in _parts(lengths):
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_one(t, part) for t in (query, key, value)), 0.0, **_causal(length, window, scale, query.dtype)
        )
        output[part] = made[0][0].transpose(0, 1)
        sums[:, part] = made[1][0]
    return output, sums


@torch.library.custom_op("megatrain::documents_attention_backward", mutates_args=())
def documents_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    if query.is_cuda:
        longest = int(lengths.max())
        unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)  # random state: there is no dropout
        rest = _flash(window, longest, scale)
        causal = rest.pop("is_causal")
        del rest["return_debug_mask"]
        made = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            *(query, key, value, output, sums, starts, starts, longest, longest, 0.0, causal, *unused),
            **rest,
        )
        return tuple(t.contiguous() for t in made)
    grads = [torch.empty_like(query) for _ in range(3)]
    wide = [query, _repeat(key, query), _repeat(value, query)]
    for part, length in _parts(lengths):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_one(t, part) for t in (grad, *wide, output)),
            sums[:, part][None],
            0.0,
            **_causal(length, window, scale, query.dtype),
        )
        for into, made in zip(grads, found, strict=True):
            into[part] = made[0].transpose(0, 1)
    return grads[0], _gather(grads[1], key), _gather(grads[2], value)


def _flash(window: int | None, longest: int, scale: float) -> dict[str, Any]:
    """What forward and backward are told alike. A window that no document fills is none, which is the faster kernel."""
    window = None if window is None or window >= longest else window
    left = -1 if window is None else window - 1
    sides = {"window_size_left": left, "window_size_right": 0}
    return {"is_causal": window is None, "return_debug_mask": False, "scale": scale, **sides}


def _causal(length: int, window: int | None, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """The same for one document on the CPU."""
    if window is None or window >= length:
        return {"is_causal": True, "scale": scale}
    at = torch.arange(length)
    back = at[:, None] - at
    hidden = (back < 0) | (back >= window)
    return {
        "is_causal": False,
        "attn_mask": torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf),
    } | {"scale": scale}


def _parts(lengths: Tensor) -> list[tuple[slice, int]]:
    """(tokens, length) of each document that has any."""
    ends = lengths.cumsum(0).tolist()
    return [(slice(end - n, end), n) for end, n in zip(ends, lengths.tolist(), strict=True) if n]


def _sums(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[1::-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _one(tensor: Tensor, part: slice) -> Tensor:
    """(T, heads, width) -> (1, heads, length, width)"""
    return tensor[part].transpose(0, 1)[None]


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    """As many heads as the queries have."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _gather(grad: Tensor, like: Tensor) -> Tensor:
    """Sums over the heads that were repeated."""
    return grad.view(grad.shape[0], like.shape[1], -1, grad.shape[2]).sum(2)


@documents_attention.register_fake
def _(query: Tensor, *_rest: Any) -> Any:
    return query.new_empty(query.shape), _sums(query)


@documents_attention_backward.register_fake
def _(*tensors: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in tensors[1:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _gradients(ctx: Any, grad: Tensor, _sums: Tensor) -> Any:
    found = torch.ops.megatrain.documents_attention_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*found, None, None, None, None)


documents_attention.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.megatrain.documents_attention)
def _flops(query: Any, _key: Any, _value: Any, _starts: Any, _lengths: Any, window: Any, _scale: Any, **_: Any) -> int:
    """At most: shapes do not tell how long the documents are."""
    tokens, heads, width = query
    return int(4 * tokens * heads * width * min(window or tokens, tokens))


# --------------------------------------------------------------------------------------------- which models


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a model's attention keeps the documents of a row apart."""

    refusal: str | None
    """Why only by a dense mask; None: over documents."""
    width: int = 0
    """Of its largest head."""

    def how(self, device: str, dtype: torch.dtype) -> str:
        """In words, on a kind of device."""
        if self.refusal is not None:
            return f"dense mask ({self.refusal})"
        if takes_documents(device, dtype, self.width):
            return "variable length"
        return f"dense mask (no kernel for {str(dtype).removeprefix('torch.')} heads of {self.width})"


class _Reached(Exception):
    """EmbedHead a trial where attention begins."""

    def __init__(self, refusal: str | None, width: int) -> None:
        super().__init__()
        self.refusal = refusal
        self.width = width


def _trial(
    module: Any, query: Tensor, _key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention that tells what it is asked for."""
    refusal = _refusal(module, given) if isinstance(attention_mask, Documents) else "a mask of its own making"
    raise _Reached(refusal, max(query.shape[-1], value.shape[-1]))


def adopt(decoder: "Decoder") -> Packing:
    """Has the layers of a model attend over documents where they can; the packed rows of others keep dense masks.

    Found out as everything here is, by running the model's own code: its base must hand documents to the layers, and
    each structure of layers, on meta, must hand them on to attention as they are.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for name, function in ((NAME, attend), (_TRIAL, _trial)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
    if decoder.vision_spec is not None:
        return Packing(refusal="a model that also takes images")
    configs = _configs(decoder)
    if any(c._attn_implementation not in ("sdpa", NAME, None) for c in configs):
        return Packing(refusal="eager attention")
    found = Packing(refusal="untried")
    try:
        _set(configs, _TRIAL)
        found = _try(decoder)
    finally:
        _set(configs, "sdpa" if found.refusal else NAME)
    return found


def _configs(decoder: "Decoder") -> list[Any]:
    """Every configuration that a module of the base, or of its recorder's copy, reads its attention from."""
    held = [m.__dict__.get("config") for base in (decoder.base, decoder.recorder.base) for m in base.modules()]
    held += [decoder.config, decoder.text_config]
    return list({id(c): c for c in held if hasattr(c, "_attn_implementation_internal")}.values())


def _set(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation_internal = name


def _try(decoder: "Decoder") -> Packing:
    """Runs each structure of layers up to its attention."""
    from megatrain.models.recorder import on_meta

    blind = Packing(refusal="masks that do not follow position_ids")
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    if "position_ids" not in decoder.recorder.accepts:
        return blind
    record = decoder.recorder.record(torch.zeros_like(positions), None, positions)
    widths = []

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    for first in decoder.structures:
        args, kwargs = record.args[first], record.kwargs[first]
        if not any(is_documents(value) for value in tree_leaves((args, kwargs), is_leaf=is_documents)):
            continue
        hidden = torch.empty(*positions.shape, decoder.hidden_size, dtype=decoder.dtype, device="meta")
        layer = on_meta(decoder.layers[first])
        reason = f"attention of its own in {type(layer).__name__}"
        try:
            with torch.no_grad():
                layer(hidden, *tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except _Reached as reached:
            if reached.refusal is None:
                widths.append(reached.width)
                continue
            reason = reached.refusal
        except Exception as error:
            # whatever a layer does with its mask that documents do not allow, a dense one will do
            reason += f" ({type(error).__name__})"
        return Packing(refusal=reason)
    return Packing(refusal=None, width=max(widths)) if widths else blind


def is_documents(value: Any) -> bool:
    """For walks through arguments, which would take `Documents` apart."""
    return isinstance(value, Documents)
