"""Attention in which every token sees its own document alone, without a dense mask (variable-length attention).

Packed rows in stock transformers need a mask of seq x seq entries for each row, and the fused kernels then compute
every block of it, at about three times the cost of causal attention. Here a layer gets the boundaries of the documents
(`Documents`) in place of its mask, and attention runs over all documents in one launch: on CUDA the FlashAttention-2
kernels for variable lengths that torch contains (`aten::_flash_attention_forward` with `cum_seq_q`; arXiv 2307.08691),
on the CPU one document after another. Which models can use it, `packing.py` finds out.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

NAME = "megatrain_documents"
"""Our attention implementation among those of transformers; it is `sdpa` where there are no documents."""
_FLASH_WIDTH = 256
"""Widest head that the flash kernels take."""


class Documents(NamedTuple):
    """Where the documents of a micro-batch begin; given to a layer in place of its attention mask."""

    starts: Tensor
    """(N + 1,), int32: where each document begins among the tokens of all rows, and where the last one ends."""
    lengths: Tensor
    """(N,), int64, always on the CPU: the host must know the longest document without waiting for the device."""
    window: int | None
    """Most tokens that a token sees, itself included; None: all of its document up to itself."""
    hidden: Tensor | None = None
    """(T,), bool: True for padding, which sees nothing and is a document of its own; None without padding."""

    def to(self, device: torch.device) -> "Documents":
        """A copy on `device`, made asynchronously from pinned memory, with sizes rounded up."""
        rounded = self.rounded_up()
        starts = rounded.starts.pin_memory().to(device, non_blocking=True)
        hidden = None if self.hidden is None else self.hidden.pin_memory().to(device, non_blocking=True)
        return mark_dynamic(rounded._replace(starts=starts, hidden=hidden))

    def rounded_up(self) -> "Documents":
        """The same documents, followed by empty ones, their number and the longest length rounded up to powers of two:
        so that batches have few kinds, each of which can be captured as CUDA graphs. The kernels do the same arithmetic
        for them."""
        count, longest = self.lengths.shape[0], int(self.lengths.max())
        more = (1 << (count - 1).bit_length()) - count
        lengths = torch.cat([self.lengths, self.lengths.new_zeros(more)])
        lengths[0] = 1 << (longest - 1).bit_length()
        return self._replace(starts=torch.cat([self.starts, self.starts[-1:].expand(more)]), lengths=lengths)


def mark_dynamic(documents: Documents) -> Documents:
    """Marks the number of documents as a dynamic size for torch.compile, so that one graph serves every batch."""
    torch._dynamo.mark_dynamic(documents.starts, 0)
    torch._dynamo.mark_dynamic(documents.lengths, 0)
    return documents


def is_documents(value: Any) -> bool:
    """Predicate for pytree walks, which would otherwise flatten `Documents`."""
    return isinstance(value, Documents)


def dense(documents: Documents, batch: int, seq: int) -> Tensor:
    """The equivalent boolean mask (batch, 1, seq, seq): True where a query sees a key."""
    at = torch.arange(batch * seq, device=documents.starts.device)
    number = torch.bucketize(at, documents.starts, right=True).view(batch, seq)
    back = at[:seq, None] - at[:seq]
    near = back >= 0 if documents.window is None else (back >= 0) & (back < documents.window)
    seen = (number[:, :, None] == number[:, None, :]) & near
    if documents.hidden is not None:
        seen &= ~documents.hidden.view(batch, seq, 1)
    return seen[:, None]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers (`AttentionInterface`). `query`, `key` and `value` are (batch, heads, seq,
    width), the latter two with fewer heads in grouped attention; the result is (batch, seq, heads, width). Where the
    mask is `Documents`, attention runs over those; otherwise as in `sdpa`."""
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
    # one width for all three, a multiple of 8 as the flash kernels need; padding with zeros adds nothing to a product
    common = -(-max(width, value.shape[-1]) // 8) * 8
    alike = [t if t.shape[-1] == common else F.pad(t, (0, common - t.shape[-1])) for t in (query, key, value)]
    flat = [t.transpose(1, 2).flatten(0, 1) for t in alike]
    scale = width**-0.5 if scale is None else scale
    output: Tensor = documents_attention(*flat, of.starts, of.lengths, of.window, scale)[0]
    if of.hidden is not None:
        output = output.masked_fill(of.hidden[:, None, None], 0.0)
    return output.view(batch, seq, *output.shape[1:])[..., : value.shape[-1]]


def takes_documents(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether a kernel over documents exists; without one each layer builds a dense mask of the documents."""
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
    """Output (T, heads, width) and the log-sum-exp of each query (heads, T), in fp32 or wider. One opaque operation for
    torch.compile, whatever the number of documents."""
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
    """Arguments that forward and backward share. A window longer than every document is left out, since the kernel
    without a window is faster."""
    window = None if window is None or window >= longest else window
    left = -1 if window is None else window - 1
    sides = {"window_size_left": left, "window_size_right": 0}
    return {"is_causal": window is None, "return_debug_mask": False, "scale": scale, **sides}


def _causal(length: int, window: int | None, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """The same for one document in the CPU kernel."""
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
    """(slice of the tokens, length) of every document that is not empty."""
    ends = lengths.cumsum(0).tolist()
    return [(slice(end - n, end), n) for end, n in zip(ends, lengths.tolist(), strict=True) if n]


def _sums(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[1::-1], dtype=torch.promote_types(query.dtype, torch.float32))


def _one(tensor: Tensor, part: slice) -> Tensor:
    """(T, heads, width) -> (1, heads, length, width)"""
    return tensor[part].transpose(0, 1)[None]


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeats heads of keys or values to as many as the queries have."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _gather(grad: Tensor, like: Tensor) -> Tensor:
    """Sums a gradient over the heads that `_repeat` repeated."""
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
    """An upper bound, as if all tokens were one document: shapes do not say how long the documents are."""
    tokens, heads, width = query
    return int(4 * tokens * heads * width * min(window or tokens, tokens))
