"""Which operations of torch draw random numbers."""

from typing import Any

import torch

_aten = torch.ops.aten


def argument_names(func: Any) -> list[str]:
    """Names of an operation's arguments, in order."""
    return [argument.name for argument in func._schema.arguments]


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operation draws: dropout, and attention with it, does not where nothing can be dropped."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func.overloadpacket is _aten._fused_sdp_choice:
        return False
    names = argument_names(func)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0))
    if func.overloadpacket in (_aten.native_dropout, _aten.dropout):
        return bool(given["p"]) and given["train"] is not False
    return True
