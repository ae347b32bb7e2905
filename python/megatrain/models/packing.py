"""Which models can attend over the documents of packed rows without a dense mask, and switching those to it.

transformers describes attention by a mask function. `find_documents` evaluates that function at a few entries for each
token, so packed documents, sliding windows, chunks and padding are all recognised in the same way; a mask that is
nothing of the kind stays dense. Whether a model's layers pass the documents on to their attention unchanged is found by
running each structure of layers on meta.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatrain.models.modules import on_meta, to_meta
from megatrain.models.recorder import Recorder
from megatrain.models.support import ModelParts
from megatrain.models.varlen_attention import (
    NAME,
    Documents,
    attend,
    is_documents,
    mark_dynamic,
    takes_documents,
)

_TRIAL = "megatrain_documents_trial"


def find_documents(
    sees: Callable[[Tensor, Tensor], Tensor],  # (query, key) indices, (batch, seq) int64 -> bool, broadcastable to it
    real: Tensor,  # (batch, seq), bool: False is padding
    window: int | None,
) -> Documents | None:
    """The documents that a mask function describes, or None where it describes something else.

    Evaluates a few entries of the mask for each token, never the whole mask. A document begins where a token does not
    see the token before it. To agree, each token must then see itself, the first token that its document and window
    allow, and one halfway; and it must see neither the token before that first one, nor the first token of its row
    where that is outside, nor the token that follows.
    """
    batch, seq = real.shape
    if (window is not None and window < 1) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        return None  # padding after the tokens of a row sees those tokens
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
    if len(starts) == 2:  # a single document: add an empty one, since torch.compile specialises on a size of 1
        starts = torch.cat([starts, starts[-1:]])
    hidden = None if bool(real.all()) else ~real.flatten()
    return mark_dynamic(Documents(starts.int(), starts.diff(), window, hidden))


def build_mask(**given: Any) -> Any:
    """A mask function of transformers (`AttentionMaskInterface`): None or a dense mask as for `sdpa`, and `Documents`
    wherever a dense mask describes documents."""
    from transformers.masking_utils import sdpa_mask

    batch, seq, padding = given["batch_size"], given["q_length"], given.get("attention_mask")
    whole = seq == given["kv_length"] and not any(given.get(k, 0) for k in ("q_offset", "kv_offset", "use_vmap"))
    if not whole or (padding is not None and padding.shape[-1] != seq):
        return sdpa_mask(**given)
    row, head, sees = torch.arange(batch)[:, None], torch.zeros((), dtype=torch.int64), given["mask_function"]
    real = torch.ones(batch, seq, dtype=torch.bool) if padding is None else padding.bool()
    window = given.get("local_size")
    found = find_documents(lambda queries, keys: sees(row, head, queries, keys), real, window)
    # where every row is one document, `sdpa` needs no mask: it is causal attention
    if found is None or (int(found.lengths[:batch].min()) == seq and (window is None or window >= seq)):
        return sdpa_mask(**given)
    return found


def _refusal(module: Any, given: dict[str, Any]) -> str | None:
    """What an attention call asks for, besides a mask, that no kernel over documents computes; None where nothing."""
    known = {"softcap": "soft caps", "s_aux": "attention sinks", "position_bias": "a bias of positions"}
    asked = [what for name, what in known.items() if given.get(name) is not None]
    if given.get("dropout"):
        asked.append("dropout of attention")
    causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        asked.append("attention to what follows")
    return ", ".join(asked) or None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a model's attention keeps the documents of a packed row apart."""

    refusal: str | None
    """Why it needs a dense mask; None where it attends over documents."""
    width: int = 0
    """Width of its widest attention head."""

    def how(self, device: str, dtype: torch.dtype) -> str:
        """A phrase for plans and the numerics key: the method on a kind of device."""
        if self.refusal is not None:
            return f"dense mask ({self.refusal})"
        if takes_documents(device, dtype, self.width):
            return "variable length"
        return f"dense mask (no kernel for {str(dtype).removeprefix('torch.')} heads of {self.width})"


class _Reached(Exception):
    """Ends a trial run of a layer where its attention begins."""

    def __init__(self, refusal: str | None, width: int) -> None:
        super().__init__()
        self.refusal = refusal
        self.width = width


def _trial(
    module: Any, query: Tensor, _key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """An attention function that reports what it was called with."""
    refusal = _refusal(module, given) if isinstance(attention_mask, Documents) else "a mask of its own making"
    raise _Reached(refusal, max(query.shape[-1], value.shape[-1]))


def use_varlen_attention(
    parts: ModelParts,
    recorder: Recorder,
    firsts: Sequence[int],  # the first layer of each structure
) -> Packing:
    """Switches a model to attention over documents where its layers can; packed rows of others keep dense masks.

    The base must pass documents to its layers, and each structure of layers, run on meta, must pass them on to its
    attention unchanged. Changes the attention implementation in the model's configurations.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for name, function in ((NAME, attend), (_TRIAL, _trial)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, build_mask)
    if parts.vision:
        return Packing(refusal="a model that also takes images")
    configs = _configs(parts, recorder)
    if any(c._attn_implementation not in ("sdpa", NAME, None) for c in configs):
        return Packing(refusal="eager attention")
    found = Packing(refusal="untried")
    try:
        _set(configs, _TRIAL)
        found = _try(parts, recorder, firsts)
    finally:
        _set(configs, "sdpa" if found.refusal else NAME)
    return found


def _configs(parts: ModelParts, recorder: Recorder) -> list[Any]:
    """Every configuration from which a module of the base, or of the recorder's copy of it, reads its attention."""
    held = [m.__dict__.get("config") for base in (parts.base, recorder.base) for m in base.modules()]
    held += [parts.config, parts.text_config]
    return list({id(c): c for c in held if hasattr(c, "_attn_implementation_internal")}.values())


def _set(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation_internal = name


def _try(parts: ModelParts, recorder: Recorder, firsts: Sequence[int]) -> Packing:
    """Runs one layer of each structure up to its attention."""
    ignored = Packing(refusal="masks that do not follow position_ids")
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    if "position_ids" not in recorder.accepts:
        return ignored
    record = recorder.record(torch.zeros_like(positions), None, positions)
    widths = []
    for first in firsts:
        args, kwargs = record.args[first], record.kwargs[first]
        if not any(is_documents(value) for value in tree_leaves((args, kwargs), is_leaf=is_documents)):
            continue
        hidden = torch.empty(*positions.shape, parts.hidden_size, dtype=parts.dtype, device="meta")
        layer = on_meta(parts.layers[first])
        reason = f"attention of its own in {type(layer).__name__}"
        try:
            with torch.no_grad():
                layer(hidden, *to_meta(args), **to_meta(kwargs))
        except _Reached as reached:
            if reached.refusal is None:
                widths.append(reached.width)
                continue
            reason = reached.refusal
        except Exception as error:
            # whatever a layer does with its mask that documents do not allow, a dense mask allows
            reason += f" ({type(error).__name__})"
        return Packing(refusal=reason)
    return Packing(refusal=None, width=max(widths)) if widths else ignored
