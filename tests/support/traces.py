"""Traces of layers that tests plan for, each made once a process: with a public shape one takes a second, and a refusal
takes dozens."""

from typing import Any

import pytest

from megatrain.engine import layer_cost
from megatrain.models.decoder import Decoder
from megatrain.models.types import Unit

_FOUND: dict[tuple[Any, ...], layer_cost.Measured] = {}


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a `conftest.py`: what a compiled layer keeps is measured once for all models that are alike."""
    measure = layer_cost._measure_compiled

    def once(decoder: Decoder, unit: Unit, rows: int, seq: int, device: str, least: bool) -> layer_cost.Measured:
        layer = decoder.module_of(unit)
        tensors = tuple((name, tuple(t.shape), t.requires_grad) for name, t in layer.named_parameters())
        config = decoder.text_config.to_json_string(use_diff=False)
        key = (config, str(layer), tensors, decoder.dtype, decoder.matmul, unit.half, rows, seq, device, least)
        if key not in _FOUND:
            _FOUND[key] = measure(decoder, unit, rows, seq, device, least)
        return _FOUND[key]

    monkeypatch.setattr(layer_cost, "_measure_compiled", once)
