"""What is said when a run does not fit: what is missing, who holds it, and which changes would fit."""

import dataclasses
import json
from typing import Any

import pytest

from megatrain import _core
from megatrain.config import Config
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.models.presets import SHAPES
from megatrain.planning import planner, remedies
from megatrain.system import descriptions
from megatrain.system.hardware import GIB, Machine
from megatrain.training.setup import prepare_model

MACHINE = {"host": {"memory": "64GiB", "cpus": 16}, "gpu": {"name": "H100", "memory": "80GiB", "capability": [9, 0]}}


def config(**sections: Any) -> Config:
    model = {"config": SHAPES["qwen2.5-0.5b"].config()}
    train = {"batch_size": 8, "steps": 1} | sections.pop("train", {})
    return Config.of({"model": model, "data": {"seq_len": 4096}, "train": train, "device": "cuda", **sections})


def planned(asked: Config, machine: Machine) -> planner.RunPlan:
    decoder = prepare_model(asked, machine, plan_only=True).decoder
    return planner.plan_run(asked, decoder, device="cuda", machine=machine, rows=8)


def refused(asked: Config, machine: Machine) -> str:
    with pytest.raises(DoesNotFit) as error:
        planned(asked, machine)
    assert error.value.items
    return str(error.value)


def with_held(machine: Machine, held: int) -> Machine:
    return dataclasses.replace(machine, gpus=tuple(dataclasses.replace(gpu, held_bytes=held) for gpu in machine.gpus))


def test_what_others_hold_of_the_card_is_a_line_of_the_refusal() -> None:
    machine = descriptions.from_description(MACHINE, "machine.yaml")
    asked = config(train={"batch_size": 8}, plan={"micro_batch": 8})
    said = refused(asked, with_held(machine, 78 * GIB))
    assert "of device memory are needed and 1.00 GiB allowed" in said
    assert " GiB too little" in said
    assert "device memory: 1.00 GiB of 80.00 GiB of H100" in said
    assert "78.00 GiB  device  held by other programs" in said
    # The split follows from the idle card; beside what is held now, smaller micro-batches fit.
    busy = refused(config(train={"batch_size": 8}), with_held(machine, 75 * GIB))
    assert "plan.micro_batch=4" in busy.partition("would fit:")[2], busy
    assert "held by" not in refused(config(memory={"host": "1GiB", "gpu": "2GiB"}), machine)


def test_changes_that_are_named_fit_and_the_next_larger_do_not() -> None:
    machine = descriptions.from_description(MACHINE, "machine.yaml")
    asked = config(plan={"micro_batch": 8, "slots": 24}, memory={"gpu": "4GiB"})
    said = refused(asked, machine)
    words = [line.strip() for line in said.partition("would fit:")[2].splitlines() if line.strip()]
    assert 1 <= len(words) <= 3
    for word in words:
        document = asked.to_dict()
        for change in word.split():
            key, _, value = change.partition("=")
            section, _, name = key.partition(".")
            document[section][name] = None if value == "null" else json.loads(value)
        planned(Config.from_dict(document), machine)
    sizes = [int(word.partition("=")[2]) for word in words if word.startswith("plan.micro_batch")]
    for size in sizes:
        refused(dataclasses.replace(asked, plan=dataclasses.replace(asked.plan, micro_batch=2 * size)), machine)


def test_of_each_kind_the_smallest_change_is_named_and_contradictions_are_left_out() -> None:
    asked = config(plan={"slabs": 8, "slots": 4}, train={"update": "immediate", "max_grad_norm": None})
    tried: list[Config] = []

    def fits(changed: Config) -> bool:
        tried.append(changed)
        return changed.data.seq_len <= 1024 or changed.plan.slabs is None

    assert remedies.changes_that_fit(asked, 8, fits) == ["plan.slabs=null", "data.seq_len=1024"]
    assert {changed.data.seq_len for changed in tried} == {4096, 2048, 1024}
    assert all(
        changed.train.batch_size * changed.data.seq_len == 8 * 4096 for changed in tried if changed.data.seq_len < 4096
    )
    assert remedies.changes_that_fit(asked, 8, lambda _: False) == []


def test_a_run_on_the_cpu_uses_one_memory_once() -> None:
    """Also through the engine: what a plan puts on the device is host memory there."""
    asked = config(train={"batch_size": 1})
    asked = dataclasses.replace(asked, device="cpu")
    machine = descriptions.from_description(MACHINE | {"gpu": None}, "machine.yaml")
    decoder = prepare_model(asked, machine, plan_only=True).decoder
    found = planner.plan_run(asked, decoder, device="cpu", machine=machine, rows=1)
    totals = found.plan["totals"]
    whole = totals["device"] + totals["host"]
    request = found.request | {"budget": {"device": whole - 1, "host": whole - 1}}
    assert request["shared_memory"] is True
    tight = json.loads(_core.plan(json.dumps(request)))["totals"]
    assert tight["device"] + tight["host"] < whole
    request["budget"] = {"device": whole, "host": tight["host"] + (1 << 20)}
    with pytest.raises(DoesNotFit, match="which the device shares"):
        _core.plan(json.dumps(request))
    assert found.engine_options()["memory"] == {"gpu": machine.host_budget(), "host": machine.host_budget()}
    with pytest.raises(ConfigError):
        Config.from_dict({"model": "a", "memory": {"gpu": -1}})
