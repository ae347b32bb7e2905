"""Rules that the engine's arguments and the configuration share."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain import _core
from megatrain.config import Config
from megatrain.config.constraints import choose_precision, smallest_eps
from megatrain.engine import devices
from megatrain.errors import ConfigError
from megatrain.planning import planner

CARDS = {"native": (8, 0), "older": (7, 5)}


def config(tmp_path: Path, **train: Any) -> Config:
    file = tmp_path / "run.yaml"
    keys = "\n".join(f"  {key}: {'null' if value is None else value}" for key, value in train.items())
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    file.write_text(f"model: {tmp_path}\ndata: {data}\noutput: {{dir: {tmp_path}/run}}\ntrain:\n  steps: 1\n{keys}\n")
    return Config.load(file)


@pytest.mark.parametrize("asked", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("device", ["cpu", "older", "native"])
def test_engine_and_configuration_choose_the_same_precision_and_refuse_the_same(
    asked: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "cpu" if device == "cpu" else "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CARDS[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    gpu = None if kind == "cpu" else type("Gpu", (), {"capability": CARDS[device], "name": "Card"})()
    machine = type("Described", (), {"gpu": gpu})()
    ways: list[Any] = [
        lambda: devices.choose_precision(asked, torch.device(kind)),
        lambda: planner.choose_precision(config(tmp_path, precision=asked), kind, machine),
    ]
    if device == "older" and asked != "fp32":
        for way in ways:
            with pytest.raises(
                ConfigError, match=rf"precision is {asked} and Card has no native bf16.*precision: fp32"
            ):
                way()
        return
    wanted = {"auto": "fp32" if kind == "cpu" else "bf16"}.get(asked, asked)
    assert [way() for way in ways] == [wanted, wanted]


def test_another_word_for_a_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision must be auto, bf16 or fp32, not 'fp8'"):
        choose_precision("fp8", "cpu", native_bf16=False, card="", key="precision")


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-17, 5e-16])
def test_an_eps_that_cannot_give_torchs_updates_is_refused_everywhere(eps: float, tmp_path: Path) -> None:
    words = re.escape(f"is {eps:g}; with betas[1] 0.999 it must be at least 8.8e-16")
    with pytest.raises(ConfigError, match=f"optimizer: eps {words}"):
        megatrain.AdamW(eps=eps)
    with pytest.raises(ConfigError, match=rf"optimizer.groups\[0\]: eps {words}"):
        megatrain.AdamW(groups=[{"params": "*norm*", "eps": eps}])
    with pytest.raises(ConfigError, match=f"train.eps {words}"):
        config(tmp_path, eps=eps)
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, groups=f"[{{params: ['*norm*'], eps: {eps}}}]")


def test_an_eps_that_only_a_groups_betas_make_too_small_is_refused(tmp_path: Path) -> None:
    assert config(tmp_path, eps=1e-15).train.eps == 1e-15
    with pytest.raises(ConfigError, match=r"betas\[1\] 0.9999"):
        config(tmp_path, eps=1e-15, groups="[{params: ['*norm*'], betas: [0.9, 0.9999]}]")
    with pytest.raises(ConfigError, match=r"betas\[1\] 0.9999"):
        megatrain.AdamW(eps=1e-15, groups=[{"params": "*norm*", "betas": (0.9, 0.9999)}])


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.999, 0.9999])
@pytest.mark.parametrize("exponent", range(-24, -12))
def test_with_the_smallest_eps_updates_of_any_tiny_gradient_are_torchs(beta2: float, exponent: int) -> None:
    """A gradient whose second moment is stored as 0 moves a weight as far as in torch, to 3e-5 of the rate a step."""
    eps, lr = smallest_eps(beta2), 1e-2
    gradient = torch.full((64,), 3.0 * 10.0**exponent)
    parameter = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    stock = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, beta2), eps=eps, weight_decay=0.0)
    weights, moment, square = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    for step in range(1, 4):
        parameter.grad = gradient.double()
        stock.step()
        _core.adamw(
            weights, None, moment, square, gradient, lr=lr, betas=(0.9, beta2), eps=eps, weight_decay=0.0, step=step
        )  # fmt: skip
    assert float((weights - parameter.detach()).abs().max()) < 3 * 3e-5 * lr


def test_immediate_updates_with_clipping_are_refused_in_the_same_words(tmp_path: Path) -> None:
    for way in (
        lambda: config(tmp_path, update="immediate"),
        lambda: megatrain.Engine(torch.nn.Linear(1, 1), update="immediate"),
    ):
        with pytest.raises(ConfigError, match=r"update: immediate cannot clip.*max_grad_norm is 1.0.*just_in_time"):
            way()
