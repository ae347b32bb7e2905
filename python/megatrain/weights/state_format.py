"""How AdamW's moments and the fp32 masters are stored between two updates."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ConfigError

_MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_RESIDUAL_DTYPES = {"32bit": torch.int16, "24bit": torch.int8}
_GROUP = 128
"""8-bit moments are stored in groups of so many elements: their codes, then a biased exponent for every 32."""
_SCALED = 32
_GROUP_BYTES = _GROUP + _GROUP // _SCALED


def stored_elements(numel: int, plane: str, dtype: torch.dtype) -> int:
    """How many values are stored of a plane of a parameter with so many elements; `dtype` is theirs."""
    compact = plane in ("exp_avg", "exp_avg_sq") and dtype == torch.uint8
    return -(-numel // _GROUP) * _GROUP_BYTES if compact else numel


@dataclasses.dataclass(frozen=True, slots=True)
class StateFormat:
    """The settings `train.moments` and `train.master`. Raises ConfigError for values that do not exist."""

    moments: str = "fp32"
    """`fp32`, `bf16` or `8bit`."""
    master: str = "32bit"
    """`32bit` or `24bit`; where weights are fp32, they are the masters."""

    def __post_init__(self) -> None:
        for key, allowed in (("moments", _MOMENT_DTYPES), ("master", _RESIDUAL_DTYPES)):
            value = getattr(self, key)
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(
                    f"{key} must be {', '.join(list(allowed)[:-1])} or {list(allowed)[-1]}, not {value!r}"
                )

    @classmethod
    def of_dtypes(cls, moment: torch.dtype | None, residual: torch.dtype | None) -> "StateFormat":
        """The format of a checkpoint's planes. Raises KeyError for dtypes of none."""
        moments = {dtype: name for name, dtype in _MOMENT_DTYPES.items()}
        masters = {dtype: name for name, dtype in _RESIDUAL_DTYPES.items()}
        return cls(
            moments[torch.float32 if moment is None else moment], masters[torch.int16 if residual is None else residual]
        )

    def check_precision(self, precision: str) -> None:
        """Raises ConfigError where the compute precision (bf16 or fp32) contradicts the master."""
        if self.master == "24bit" and precision == "fp32":
            raise ConfigError(
                "train.master: 24bit is about the bits beside bf16 weights, and with fp32 compute the weights are "
                "fp32; remove it, or set train.precision: bf16"
            )

    @property
    def moment_dtype(self) -> torch.dtype:
        """Of what is stored of a moment; uint8 for groups of 8-bit ones."""
        return _MOMENT_DTYPES[self.moments]

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of what a master has beside its bf16 weight."""
        return _RESIDUAL_DTYPES[self.master]

    def moment_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what is stored of one moment of a parameter."""
        if self.moments != "8bit":
            return shape
        return (-(-torch.Size(shape).numel() // _GROUP) * _GROUP_BYTES,)

    def bytes(self, shape: tuple[int, ...], precision: str) -> int:
        """Bytes of both moments of a parameter, and of what its master has beside a bf16 weight."""
        moments = 2 * torch.Size(self.moment_shape(shape)).numel() * self.moment_dtype.itemsize
        residual = self.residual_dtype.itemsize if precision == "bf16" else 0
        return moments + residual * torch.Size(shape).numel()

    def request(self) -> dict[str, Any]:
        """As the core takes it."""
        return {"moments": self.moments, "master": self.master}

    def moment(self, stored: Tensor, shape: tuple[int, ...], *, signed: bool) -> Tensor:
        """A moment in fp32, from what is stored of it. First moments are `signed`; see
        `adamw/kernels/compact.rs` for the format of 8-bit ones."""
        if self.moments != "8bit":
            return stored.float().view(shape)
        groups = stored.view(-1, _GROUP_BYTES)
        codes = groups[:, :_GROUP].reshape(-1, _GROUP // _SCALED, _SCALED).to(torch.int32)
        exponents = groups[:, _GROUP:].reshape(-1, _GROUP // _SCALED, 1).to(torch.int32).clamp(max=252)
        scale = ((exponents + 1) << 23).view(torch.float32)
        steps = torch.tensor(127.0 if signed else 255.0)
        root = ((codes & 127) if signed else codes).float() * (1 / steps)
        share = root * root
        values = (share if signed else share * share) * scale
        if signed:
            values = torch.where(codes >= 128, -values, values)
        return values.flatten()[: torch.Size(shape).numel()].view(shape).clone()
