"""GGUF files: the fp32 copy that they are unpacked to is planned for, made late and given back."""

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.config import Config
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.planning import planner
from megatrain.system import hardware
from megatrain.training import forecast
from megatrain.training.setup import build_engine, prepare_model
from megatrain.weights.gguf import unpacking_bytes
from support.gguf_files import write_gguf
from support.reference import batches

VOCAB = 320


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "tiny.gguf"
    write_gguf(made, VOCAB)
    return made


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> "list[weakref.ref[Any]]":
    """References to the tensors of every model that transformers has unpacked."""
    found: list[weakref.ref[Any]] = []
    stock = AutoModelForCausalLM.from_pretrained

    def noting(*args: Any, **keywords: Any) -> Any:
        model = stock(*args, **keywords)
        found.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    return found


def config(path: Path, memory: dict[str, str] | None = None, freeze: tuple[str, ...] = ()) -> Config:
    return Config.from_dict(
        {
            "model": {"path": str(path), "freeze": list(freeze)},
            "data": {"seq_len": 16},
            "train": {"batch_size": 1, "steps": 1, "precision": "bf16"},
            "memory": memory or {},
            "device": "cpu",
        }
    )


def test_a_runs_copy_is_made_when_its_store_is_filled_and_given_back(
    path: Path, unpacked: "list[weakref.ref[Any]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.training import setup
    from support.tiny_tokenizer import tiny_tokenizer

    monkeypatch.setattr(setup, "build_tokenizer", lambda *_: tiny_tokenizer(vocab_size=VOCAB - 20))
    asked = config(path)
    model_setup = prepare_model(asked, hardware.read(gpus=False))
    run_plan = planner.plan_run(asked, model_setup.decoder, device="cpu", machine=model_setup.machine, rows=1)
    assert not unpacked
    with build_engine(model_setup, run_plan) as ours:
        gc.collect()
        assert unpacked
        assert not any(tensor() is not None for tensor in unpacked)
        ours.step(batches(1, rows=1, seq=8, vocab=VOCAB))


def test_an_engines_copy_is_planned_for_made_late_and_given_back(
    path: Path, unpacked: "list[weakref.ref[Any]]"
) -> None:
    limit = {"gpu": "1GiB", "host": "1GiB"}
    with megatrain.Engine.from_pretrained(path, device="cpu", memory=limit) as ours:
        assert ours.request((1, 8), 1)["budget"]["host"] == (1 << 30) - unpacking_bytes(ours.decoder)
        assert not unpacked
        ours.step(batches(1, rows=1, seq=8, vocab=VOCAB))
        gc.collect()
        assert unpacked
        assert not any(tensor() is not None for tensor in unpacked)
        assert ours.request((1, 8), 1)["budget"]["host"] == 1 << 30


def test_every_plan_of_a_run_leaves_room_for_the_copy(path: Path) -> None:
    machine = dataclasses.replace(hardware.read(gpus=False), memory_available=8 << 30, memory_limit=8 << 30)
    numbers = [VOCAB * 32, 32, *2 * [4 * 32 * 32, 3 * 48 * 32, 2 * 32]]
    copy = 4 * (sum(numbers) + 2 * VOCAB * 32)
    for memory, whole in (({}, machine.host_budget()), ({"host": "2GiB"}, 2 << 30)):
        planned = forecast.without_data(config(path, memory), machine).run_plan
        assert planned.budget["host"] == whole - copy
    with pytest.raises(
        DoesNotFit, match=f"{hardware.format_bytes(copy)} of host memory are kept for unpacking the GGUF file"
    ):
        forecast.without_data(config(path, {"host": "128KiB"}), machine)
    with pytest.raises(
        DoesNotFit, match=f"{hardware.format_bytes(copy)} of host memory are kept for unpacking the GGUF file"
    ):
        megatrain.Engine.from_pretrained(
            path, device="cpu", memory={"host": "128KiB"}, micro_batch=(1, 8), micro_batches=1
        )


def test_frozen_tensors_are_planned_in_the_type_that_they_are_unpacked_to(path: Path) -> None:
    frozen = ("model.embed_tokens.*",)
    planned = prepare_model(config(path, freeze=frozen), hardware.read(gpus=False), plan_only=True).decoder
    name = "model.embed_tokens.weight"
    with megatrain.Engine.from_pretrained(path, precision="bf16", freeze=frozen, device="cpu") as ours:
        wanted = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        assert torch.equal(ours.weight(name), wanted.state_dict()[name])
        assert {n: t.dtype for n, t in planned.tensors.items()} == {n: t.dtype for n, t in ours.decoder.tensors.items()}
    assert planned.tensors[name].dtype == torch.float32


def test_a_file_that_was_cut_off_is_refused_before_anything_is_planned(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match=r"tiny\.gguf \(\d+ bytes\) cannot be read"):
        megatrain.Engine.from_pretrained(path, device="cpu")
