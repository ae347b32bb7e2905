"""The optimizer that a configuration asks for: groups of parameters by name, with settings of their own."""

import glob
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, TrainConfig
from megatrain.errors import ConfigError
from megatrain.names import match

if TYPE_CHECKING:
    from megatrain.engine.optimizer import AdamW


def optimizer_for(config: Config, names: list[str]) -> "AdamW":
    """AdamW with one group for each setting that occurs among the trainable parameters `names`. Raises ConfigError for
    a pattern that matches none, and for a group of which every parameter is another's."""
    from megatrain.engine.optimizer import AdamW

    train = config.train
    patterns = [(f"train.no_decay: {p!r}", p) for p in train.no_decay]
    patterns += [(f"train.groups.{i}.params: {p!r}", p) for i, group in enumerate(train.groups) for p in group.params]
    for where, pattern in patterns:
        if not any(match(pattern, name) for name in names):
            raise ConfigError(f"{where} matches no trained parameter; names look like {names[0]}")
    owners = [_group_of(train, name) for name in names]
    _refuse_empty_groups(train, names, owners)
    default = (train.lr, train.betas, train.eps, train.weight_decay)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, owner in zip(names, owners, strict=True):
        lr, betas, eps, decay = default
        if any(match(pattern, name) for pattern in train.no_decay):
            decay = 0.0
        if owner is not None:
            own = train.groups[owner]
            lr = own.lr if own.lr is not None else lr
            betas = own.betas if own.betas is not None else betas
            eps = own.eps if own.eps is not None else eps
            decay = own.weight_decay if own.weight_decay is not None else decay
        groups.setdefault((lr, betas, eps, decay), []).append(name)
    return AdamW(
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        groups=[
            {
                "params": [glob.escape(name) for name in members],
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": decay,
            }
            for (lr, betas, eps, decay), members in groups.items()
            if (lr, betas, eps, decay) != default
        ],
    )


def _group_of(train: TrainConfig, name: str) -> int | None:
    """Index into `train.groups` of the one that has a parameter; None: the settings of `train` hold for it."""
    return next((i for i, group in enumerate(train.groups) if any(match(p, name) for p in group.params)), None)


def _refuse_empty_groups(train: TrainConfig, names: list[str], owners: list[int | None]) -> None:
    """Raises ConfigError for a group whose settings would have no effect. `owners`: the group of each name."""
    for index, group in enumerate(train.groups):
        if index not in owners:
            matched = (o for name, o in zip(names, owners, strict=True) if any(match(p, name) for p in group.params))
            earlier = " and ".join(f"train.groups.{other}" for other in sorted({o for o in matched if o is not None}))
            raise ConfigError(
                f"train.groups.{index} ({', '.join(group.params)}) has no effect: the first group that matches a "
                f"parameter has it, and all that this one matches are in {earlier}; write it before that, or remove it"
            )
