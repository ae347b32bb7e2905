"""AdamW's settings: which tensor is updated with what. The arithmetic is the core's."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatrain.config.constraints import check_eps, refuse_beyond_fp32
from megatrain.engine.options import known_keywords
from megatrain.errors import ConfigError
from megatrain.names import match, suggest

CoreGroup = tuple[float, float, float, float, float]
"""lr, beta1, beta2, eps, weight_decay: what the core takes for one group."""

_KEYS = ("lr", "betas", "eps", "weight_decay")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Settings of the parameters that `params` means."""

    params: tuple[str, ...]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def core(self, lr_factor: float = 1.0) -> CoreGroup:
        """As the core takes it, with the learning rate times `lr_factor`."""
        return self.lr * lr_factor, self.betas[0], self.betas[1], self.eps, self.weight_decay


@known_keywords
class AdamW:
    """Settings in torch.optim.AdamW's words and with its defaults; a group names its parameters by patterns.

    `groups`: dicts with `params` (a pattern or a list of them) and any of `lr`, `betas`, `eps`, `weight_decay`; what a
    group does not give it takes from here, and what no group means is in the default group.
    Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        default = _checked("optimizer", (), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.groups: list[Group] = [default]
        if isinstance(groups, Mapping | str) or not isinstance(groups, Iterable):
            raise ConfigError(f"optimizer: groups must be a list of dicts, not {groups!r}")
        for number, given in enumerate(groups):
            where = f"optimizer.groups[{number}]"
            if not isinstance(given, Mapping):
                raise ConfigError(f"{where} must be a dict, not {given!r}")
            unknown = sorted(set(given) - {"params", *_KEYS})
            if unknown:
                raise ConfigError(f"{where}: unknown key {unknown[0]!r}; {suggest(unknown[0], ('params', *_KEYS))}")
            params = given.get("params")
            params = (params,) if isinstance(params, str) else params
            params = tuple(params) if isinstance(params, Iterable) else ()
            if not params or not all(isinstance(p, str) for p in params):
                raise ConfigError(f"{where}: params must be a pattern of parameter names or a list of them")
            settings = {key: given.get(key, getattr(default, key)) for key in _KEYS}
            self.groups.append(_checked(where, params, settings))
        self._base_lr = default.lr
        self._lr = default.lr

    @property
    def lr(self) -> float:
        """Learning rate of the default group."""
        return self._lr

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate; groups with their own keep their ratio to it, as under a schedule of torch's. Raises
        ConfigError for one that `checked_lr` refuses."""
        self._lr = self.checked_lr(lr)

    def checked_lr(self, lr: float) -> float:
        """A learning rate that `set_lr` takes. Raises ConfigError for what is no number of fp32 from 0 on, and, where a
        group has a rate of its own and the default one started at 0, for any other than 0."""
        try:
            value = math.nan if isinstance(lr, bool | str) else float(lr)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"lr must be a finite number and not negative, not {lr!r}")
        refuse_beyond_fp32(value, "lr")
        if self._base_lr == 0 and value != 0 and any(g.lr for g in self.groups[1:]):
            raise ConfigError("lr started at 0 while a group has its own: their ratio is not defined")
        return value

    def core_groups(self) -> list[CoreGroup]:
        """Every group as the core takes it, the default one first."""
        if self._base_lr == 0:
            default = dataclasses.replace(self.groups[0], lr=self._lr)
            return [default.core(), *(g.core() for g in self.groups[1:])]
        factor = self._lr / self._base_lr
        first = dataclasses.replace(self.groups[0], lr=self._lr).core()
        return [first, *(g.core(factor) for g in self.groups[1:])]

    def assign(self, names: Iterable[str]) -> dict[str, int]:
        """Group of each trained parameter. Raises ConfigError for a pattern that means none, or two groups for one."""
        assigned: dict[str, int] = {}
        names = list(names)
        known = set(names)
        for index, group in enumerate(self.groups[1:], 1):
            for pattern in group.params:
                hits = [pattern] if pattern in known else [n for n in names if match(pattern, n)]
                if not hits:
                    raise ConfigError(f"optimizer.groups[{index - 1}]: {pattern!r} matches no trained parameter")
                for name in hits:
                    if assigned.setdefault(name, index) != index:
                        first = assigned[name] - 1
                        raise ConfigError(f"optimizer.groups: {name} is in group {first} and in group {index - 1}")
        return {name: assigned.get(name, 0) for name in names}


def check_adamw(optimizer: Any) -> None:
    """Raises ConfigError for what is no `AdamW`, such as one of torch's."""
    if not isinstance(optimizer, AdamW):
        raise ConfigError(f"optimizer must be a megatrain.AdamW, not {type(optimizer).__name__}")


def _checked(where: str, params: tuple[str, ...], given: Mapping[str, Any]) -> Group:
    lr, eps, decay = (_number(where, name, given[name]) for name in ("lr", "eps", "weight_decay"))
    betas = given["betas"]
    pair = tuple(betas) if isinstance(betas, Iterable) and not isinstance(betas, str) else ()
    if len(pair) != 2:
        raise ConfigError(f"{where}: betas must be two numbers, such as (0.9, 0.999), not {betas!r}")
    beta1, beta2 = (_number(where, "betas", beta) for beta in pair)
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{where}: {name} must be finite and not negative, not {value}")
        refuse_beyond_fp32(value, f"{where}: {name}")
    for value in (beta1, beta2):
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{where}: betas must be in [0, 1), not {(beta1, beta2)}")
    check_eps(eps, (beta1, beta2), f"{where}: eps")
    return Group(params=params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)


def _number(where: str, name: str, given: Any) -> float:
    """A number as a float; one that is too large for that is infinite."""
    try:
        if isinstance(given, bool | str):
            raise TypeError
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{where}: {name} must be a number, not {given!r}") from None
