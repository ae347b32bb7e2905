"""Which card an engine uses and is planned for, with a fake of the driver and of torch's two cards."""

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_core import llama

import megatrain
from megatrain.engine import devices, runtime
from megatrain.errors import DoesNotFit
from megatrain.system import hardware
from megatrain.system.hardware import GIB, MIB, Machine, SystemProbe
from megatrain.weights.state_format import StateFormat


class Device:
    """A core's device."""

    def __init__(self, ordinal: int | None, current: int | None = None) -> None:
        self.ordinal, self.kind = ordinal, "cpu" if ordinal is None else "cuda"
        self.opened_under = current


class Torch:
    """Two cards; `current` is the caller's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.current = current
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "device_count", lambda: 2)
        monkeypatch.setattr(cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(cuda, "device", self.device)
        core = types.SimpleNamespace(Device=Device)
        Device.cuda = staticmethod(lambda n: Device(n, self.current))  # type: ignore[attr-defined]
        Device.cpu = staticmethod(lambda: Device(None))  # type: ignore[attr-defined]
        monkeypatch.setattr(devices, "_core", core)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = (
            self.current,
            torch.device("cuda", device).index if isinstance(device, int) else device.index,
        )
        try:
            yield
        finally:
            self.current = before


@pytest.mark.parametrize(
    ("asked", "current", "number"), [("cuda", 1, 1), ("cuda", 0, 0), ("cuda:0", 1, 0), ("cuda:1", 0, 1)]
)
def test_cuda_is_torchs_current_device_and_the_callers_stays_current(
    asked: str, current: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Torch(monkeypatch, current)
    for name in (asked, torch.device(asked)):
        core, device = devices.open_device(name)
        assert (core.ordinal, device, core.opened_under) == (number, torch.device("cuda", number), number)
        assert cards.current == current


def test_a_device_of_the_core_and_torchs_are_the_same_card(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, 0)
    given: Any = Device(1)
    assert devices.open_device(given) == (given, torch.device("cuda", 1))
    cpu: Any = Device(None)
    assert devices.open_device(cpu)[1] == torch.device("cpu")


class TwoCards(SystemProbe):
    """A machine with a large card and a small one, most of which another program holds."""

    def cuda_status(self) -> dict[str, Any]:
        cards = [("H100", 80, [9, 0]), ("RTX 3060", 12, [8, 6])]
        devices = [{"name": n, "total_bytes": g * GIB, "capability": c} for n, g, c in cards]
        return {"available": True, "reason": None, "devices": devices}

    def gpu_free(self, card: int) -> int | None:
        return [70 * GIB, 4 * GIB][card]

    def current_card(self) -> int:
        return 0


def test_an_engine_is_planned_with_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", TwoCards())
    planned: Any = types.SimpleNamespace(device=torch.device("cuda", 1), _core=None, _load=None)
    machine: Machine = runtime.Runtime._machine(planned)
    assert machine.gpu is not None
    assert machine.gpu.name == "RTX 3060"
    assert machine.budget("cuda")["device"] == 4 * GIB + machine.gpu.context_bytes - 256 * MIB
    planned.device = torch.device("cuda", 0)
    assert runtime.Runtime._machine(planned).budget("cuda")["device"] == 70 * GIB + 640 * MIB - GIB


class Card(SystemProbe):
    """A machine with one card, of which other programs leave `free` bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def cuda_status(self) -> dict[str, Any]:
        card = {"name": "RTX 4090", "total_bytes": 24 * GIB, "capability": [8, 9]}
        return {"available": True, "reason": None, "devices": [card]}

    def gpu_free(self, card: int) -> int | None:
        return [self.free][card]


def test_how_layers_are_cut_does_not_follow_what_other_programs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _on_a_card(monkeypatch, {"activation": "recompute", "inputs": "host"}, intermediate_size=4096)

    def cut(free: float) -> dict[str, Any]:
        monkeypatch.setattr(hardware, "SYSTEM_PROBE", Card(int(free * GIB)))
        return ours._first_that_fits((1, 32768), 1)[0].options

    assert cut(23) == {"fragments": "whole", "kept_tensors": "least"}
    assert cut(4) == cut(23), "and it fits, though a layer takes much of what is left"
    with pytest.raises(
        DoesNotFit,
        match=r"plan=\{'fragments': 'halves', 'mlp_tiles': \d+, 'kept_tensors': 'least'\}, which fits now",
    ) as refused:
        cut(1.5)
    assert refused.value.items
    with pytest.raises(DoesNotFit) as refused:
        cut(0.1)
    assert "which fits now" not in str(refused.value)


def test_on_the_cpu_an_engine_uses_its_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megatrain.Engine(_model(), device="cpu", micro_batch=(1, 32), micro_batches=1, plan={"keep": 3})
    totals = model.plan["totals"]
    larger = max(totals.values())
    model.close()
    monkeypatch.setattr(Machine, "host_budget", lambda _: larger + (64 << 10))
    with pytest.raises(DoesNotFit, match="which the device shares"):
        # Each tier fits into what is available; both together do not.
        megatrain.Engine(_model(), device="cpu", micro_batch=(1, 32), micro_batches=1, plan={"keep": 3})


def _model(**changes: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(LlamaConfig(**llama() | changes))  # type: ignore[no-any-return]


EACH = {
    "slots": 2,
    "slabs": 2,
    "group": 1,
    "large_group": 2,
    "large_keep": 0,
    "keep": 1,
    "offload": 1,
    "activation": "recompute",
    "inputs": "host",
    "inputs_on_disk": 1,
    "state_on_device": "auto",
    "updates_on_device": 1,
    "state_on_disk": 1,
    "weights_on_disk": 1,
    "stage_buffers": 2,
    "parts": 2,
    "accumulate": True,
    "graphs": False,
}
"""A value for each number that may be asked for of a plan."""


def _on_a_card(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], disk: Path | None = None, intermediate_size: int = 2048
) -> runtime.Runtime:
    """What an engine on an idle card of 24 GiB plans with."""
    monkeypatch.setattr(hardware, "SYSTEM_PROBE", Card(23 * GIB))
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 32768}
    return runtime.Runtime(
        megatrain.Decoder(_model(**sizes, intermediate_size=intermediate_size), precision="bf16"),
        megatrain.AdamW(),
        types.SimpleNamespace(total_bytes=24 * GIB),  # type: ignore[arg-type]
        torch.device("cuda", 0),
        update="immediate" if "slabs" in plan else "just_in_time",
        grad_precision="bf16",
        memory={"host": 8 * GIB} | ({} if disk is None else {"nvme": {"path": str(disk), "size": GIB}}),
        plan=plan,
        micro_batch=None,
        micro_batches=None,
        load=None,
        rates=None,
        seed=0,
        state_format=StateFormat(),
    )


@pytest.mark.parametrize("key", sorted(EACH))
def test_whatever_is_asked_for_what_layers_keep_is_decided_without_an_error(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EACH.keys() == set(runtime.REQUESTS)
    ours = _on_a_card(monkeypatch, {key: EACH[key]}, tmp_path if "disk" in key else None)
    cut, _, _ = ours._first_that_fits((1, 8192), 2)
    placed = (
        key in ("large_keep", "keep", "offload", "activation", "inputs", "accumulate", "updates_on_device")
        or "disk" in key
    )
    assert cut.keeps == ("least" if placed else "usual")


def test_an_engine_that_is_planned_again_keeps_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = dict.fromkeys(("kept_tensors", "fragments", "mlp_tiles"))  # as good as left out
    ours = _on_a_card(monkeypatch, unset)
    cut, _, _ = ours._first_that_fits((1, 8192), 1)
    assert cut.keeps == "usual"
    assert ours._first_that_fits((24, 32768), 1)[0].keeps == "least"
    ours._core, ours.cut = object(), cut  # type: ignore[assignment]
    assert ours._first_that_fits((24, 32768), 1)[0].keeps == "usual"
    ours._core = None
