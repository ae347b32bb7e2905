"""What is said when a run does not fit: what is missing, who holds it, and which changes would fit."""

import dataclasses
import json
from typing import Any

import pytest

from megatrain import _core
from megatrain.config import Config, yaml12
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.models.presets import SHAPES
from megatrain.planning import planner, remedies
from megatrain.system import descriptions
from megatrain.system.hardware import GIB, Machine, format_bytes
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
    busy = refused(config(train={"batch_size": 8}), with_held(machine, 151 * GIB // 2))
    assert "plan.micro_batch=4" in busy.partition("would fit:")[2], busy
    assert "held by" not in refused(config(memory={"host": "1GiB", "gpu": "2GiB"}), machine)


def changed(asked: Config, words: str) -> Config:
    """The configuration with `section.key=value` words of a way."""
    document = asked.to_dict()
    for word in words.split():
        key, _, value = word.partition("=")
        *sections, name = key.split(".")
        part = document
        for section in sections:
            part[section] = part.get(section) or {}
            part = part[section]
        part[name] = yaml12.load(value, key)
    return Config.from_dict(document)


def replayed(asked: Config, machine: Machine, way: remedies.Way) -> planner.RunPlan:
    """The plan of a way, as someone makes it who types what the refusal says."""
    on = descriptions.from_words(way.machine.split(","), machine, "changed") if way.machine else machine
    other = changed(asked, way.settings)
    decoder = prepare_model(other, on, plan_only=True).decoder
    return planner.plan_run(other, decoder, device="cuda", machine=on, rows=planner.nominal_rows(other))


def ways(asked: Config, machine: Machine) -> tuple[remedies.Way, ...]:
    decoder = prepare_model(asked, machine, plan_only=True).decoder
    with pytest.raises(remedies.Refusal) as error:
        planner.plan_run(asked, decoder, device="cuda", machine=machine, rows=planner.nominal_rows(asked))
    assert all(f"  {way}" in str(error.value).splitlines() for way in error.value.ways)
    return error.value.ways


@pytest.mark.parametrize(
    ("gpu", "named"), [("4GiB", "plan.micro_batch=4"), ("3.5GiB", "plan.slots=null plan.fragments=auto")]
)
def test_changes_that_are_named_fit_and_the_next_larger_do_not(gpu: str, named: str) -> None:
    machine = descriptions.from_description(MACHINE, "machine.yaml")
    asked = config(plan={"micro_batch": 8, "slots": 24, "fragments": "whole"}, memory={"gpu": gpu})
    found = ways(asked, machine)
    assert 1 <= len(found) <= 3
    assert named in [way.settings for way in found]
    for way in found:
        replayed(asked, machine, way)
    sizes = [int(way.settings.partition("=")[2]) for way in found if way.settings.startswith("plan.micro_batch")]
    for size in sizes:
        refused(dataclasses.replace(asked, plan=dataclasses.replace(asked.plan, micro_batch=2 * size)), machine)


RTX4090 = "gpu.name=RTX 4090,gpu.memory=24GiB,gpu.capability=8.9,host.cpus=16,host.memory="
DRIVES = ",disk.count=2,disk.free=4TB"
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("model", "machine", "kinds"),
    [
        ("qwen2.5-7b", f"{RTX4090}32GiB", ["train.moments=8bit", "disk.count=1", "host.memory=128GiB"]),
        (
            "qwen2.5-7b",
            f"{RTX4090}10GiB{DRIVES}",
            ["train.update=immediate", "host.memory=32GiB", "gpu.memory=80GiB"],
        ),
        # With weights on the drives too, the host has room for all of it; the card has not.
        ("llama-70b", f"{RTX4090}256GiB{DRIVES}", ["train.batch_tokens=8192", "gpu.memory=32GiB"]),
    ],
)
def test_every_way_that_is_named_fits_when_it_is_taken_and_hardware_comes_last(
    model: str, machine: str, kinds: list[str]
) -> None:
    shape = LLAMA_70B if model == "llama-70b" else SHAPES[model].config()
    asked = Config.of({"model": {"config": shape}, "device": "cuda", "train": {"steps": 1}})
    described = descriptions.from_words(machine.split(","), None, machine)
    found = ways(asked, described)
    assert len(found) == len(kinds)
    for way, kind in zip(found, kinds, strict=True):
        assert kind in f"{way.settings} {way.machine}", way
        plan = replayed(asked, described, way).plan
        assert plan["totals"]["disk"] == way.spilled
        if way.moved is not None:
            moved = plan["estimate"]["disk_read"], plan["estimate"]["disk_written"]
            assert way.moved == moved
            assert f" of {way.stored[0]}" in str(way)
            assert f"{way.stored[-1]}, {format_bytes(moved[0])} read" in str(way)
        else:
            assert way.stored in ((), ("optimizer state",))
    assert model == "qwen2.5-7b" or all(way.moved is not None for way in found)
    assert [bool(way.machine) for way in found] == sorted(bool(way.machine) for way in found)


def test_a_refusal_says_how_much_host_memory_is_missing_and_not_that_the_card_should_hold_all_state() -> None:
    machine = descriptions.from_words(f"{RTX4090}64GiB".split(","), None, "machine")
    asked = Config.of({"model": {"config": SHAPES["qwen2.5-14b"].config()}, "device": "cuda", "train": {"steps": 1}})
    said = refused(asked, machine)
    host = sum(item["bytes"] for item in said_items(asked, machine) if item["tier"] == "host")
    assert host > 14 * 14.7e9
    assert f"{format_bytes(host)} of host memory are needed and 60.80 GiB allowed" in said
    assert "of device memory are needed" not in said


def said_items(asked: Config, machine: Machine) -> list[dict[str, Any]]:
    with pytest.raises(DoesNotFit) as error:
        planned(asked, machine)
    return error.value.items


def test_of_each_kind_the_smallest_change_is_named_and_contradictions_are_left_out() -> None:
    asked = config(plan={"slabs": 8, "slots": 4}, train={"update": "immediate", "max_grad_norm": None})
    machine = descriptions.from_description(MACHINE, "machine.yaml")
    tried: list[Config] = []

    def fits(changed: Config, where: Machine) -> bool:
        tried.append(changed)
        return where == machine and (changed.data.seq_len <= 1024 or changed.plan.slabs is None)

    def made(changed: Config, where: Machine) -> dict[str, Any] | None:
        return {"totals": {"disk": 0}} if fits(changed, where) else None

    found = [str(way) for way in remedies.ways_that_fit(asked, machine, 8, fits, made)]
    assert found == ["plan.slabs=null", "data.seq_len=1024 train.batch_size=32"]
    assert all(
        changed.train.batch_size * changed.data.seq_len in (8 * 4096, changed.data.seq_len)
        for changed in tried
        if changed.data.seq_len < 4096
    )
    assert remedies.ways_that_fit(asked, machine, 8, lambda *_: False, lambda *_: None) == []


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
