"""The device that an engine computes on, for the core and for torch, and what it can compute with."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatrain import _core
from megatrain.config import constraints
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.system import hardware


def choose_precision(precision: str, device: torch.device) -> str:
    """The precision of compute on a device, by the rule that the configuration has too."""
    card = device.type == "cuda"
    return constraints.choose_precision(
        precision,
        device.type,
        native_bf16=card and torch.cuda.get_device_capability(device) >= (8, 0),
        card=torch.cuda.get_device_name(device) if card else "",
        key="precision",
    )


def choose_matmul(matmul: Any, precision: str, device: torch.device) -> str:
    """In what linear layers multiply on a device, by the rules that the configuration has too."""
    constraints.check_matmul(matmul, precision)
    if matmul == "fp8" and device.type == "cuda":
        constraints.refuse_float8(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    return str(matmul)


def as_decoder(
    model: nn.Module | Decoder, freeze: Sequence[str], precision: str, matmul: str, device: torch.device
) -> Decoder:
    """The model, cut into units, for a device. Raises ConfigError where a Decoder is given with what it has itself."""
    if not isinstance(model, Decoder):
        chosen = choose_precision(precision, device)
        return Decoder(model, freeze=freeze, precision=chosen, matmul=choose_matmul(matmul, chosen, device))
    given = {"freeze": freeze, "matmul": matmul != "bf16", "precision": precision not in ("auto", model.precision)}
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} belongs to the Decoder when one is given")
    choose_matmul(model.matmul, model.precision, device)  # which this device may not have
    return model


def open_device(device: "str | torch.device | _core.Device") -> "tuple[_core.Device, torch.device]":
    """The core's device and torch's; `cuda` without a number is torch's current device, which stays the current one.
    Raises ConfigError for a device that is not there, or is of another kind."""
    if isinstance(device, _core.Device):
        if device.ordinal is None:
            return device, torch.device("cpu")
        return device, torch.device("cuda", device.ordinal)
    kind, colon, ordinal = str(device).partition(":")
    numbered = not colon or (kind != "auto" and ordinal.isdecimal())
    if type(device) not in (str, torch.device) or kind not in ("auto", "cuda", "cpu") or not numbered:
        raise ConfigError(f"device must be auto, cuda, cuda:N or cpu, as a string or a torch.device, not {device!r}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        if int(ordinal or 0):
            raise ConfigError(f"device is {str(device)!r}, and the host is one device: write cpu")
        return _core.Device.cpu(), torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(hardware.no_card(hardware.read().gpu_reason or "torch finds none"))
    cards = torch.cuda.device_count()
    number = int(ordinal) if ordinal else torch.cuda.current_device()
    if number >= cards:
        there = "the only card is cuda:0" if cards == 1 else f"cards are cuda:0 to cuda:{cards - 1}"
        raise ConfigError(f"device is {str(device)!r}, and there is no such card; {there}")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with torch.cuda.device(number):
        return _core.Device.cuda(number), torch.device("cuda", number)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within, a card is torch's current device, on which kernels of Triton and generators without a device run."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
