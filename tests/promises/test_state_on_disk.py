"""Optimizer state, and weights, whose home is a disk (`memory.nvme`): bit-equal to a run in memory, through resume
and kill. (Runs with layer inputs on disk are killed here too.)"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain import Engine, Trainer
from megatrain.errors import ConfigError, DoesNotFit, EngineBroken
from megatrain.models.decoder import Decoder
from megatrain.system import hardware
from support.fake_core import llama
from support.resume import batches, same, started, state
from support.runs import course, killed_after, settings

UNITS = 5
"""Of the model: embedding, three layers, head."""


def on_disk(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine that may keep state in `folder`."""
    return {"memory": {"gpu": "1GiB", "host": "1GiB", "nvme": {"path": folder}}, **options}


def trained(engine: Engine, accumulation: int = 2) -> tuple[list[float], dict[str, Any]]:
    losses = [engine.step(batches(step, accumulation)).loss for step in range(4)]
    found = losses, state(engine)
    engine.close()
    return found


MODES = {
    "just in time": {},
    "immediate": {"update": "immediate", "max_grad_norm": None},
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("units", "weights"), [(1, 0), (3, 0), (UNITS, 0), (1, 1), (UNITS, 2), (UNITS, UNITS)])
def test_state_on_disk_does_not_show(tmp_path: Path, units: int, weights: int, mode: str, precision: str) -> None:
    plain = trained(started(precision, False, accumulation=2, **MODES[mode]))
    for activation, parts in itertools.product(["keep", "offload", "recompute"], [1, 3]):
        plan = {"state_on_disk": units, "activation": activation, "parts": parts, "poison": parts == 3}
        plan |= {"weights_on_disk": weights, "slots": 2, "group": (parts + 1) // 2}
        engine = started(precision, False, accumulation=2, **on_disk(tmp_path, plan=plan, **MODES[mode]))
        assert [unit["state"] for unit in engine.plan["units"]].count("disk") == units
        assert [unit.get("weights_on_disk", False) for unit in engine.plan["units"]].count(True) == weights
        assert engine.plan["totals"]["disk"] > 0
        losses, found = trained(engine)
        assert losses == plain[0], (activation, parts)
        assert same(found, plain[1]), (activation, parts)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("first", ["host", "disk"])
@pytest.mark.parametrize("weights", [0, 3])
@pytest.mark.parametrize(
    ("precision", "tied", "accumulation"), [("fp32", False, 3), ("bf16", True, 1), ("bf16", False, 3)]
)
def test_a_run_resumes_bit_equal_from_host_to_disk_and_back(
    tmp_path: Path, first: str, weights: int, precision: str, tied: bool, accumulation: int
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    disk = on_disk(spill, plan={"state_on_disk": 4, "weights_on_disk": weights, "parts": 2})
    options = {"host": ({}, disk), "disk": (disk, {})}[first]
    straight = started(precision, tied, accumulation=accumulation)
    losses = [straight.step(batches(step, accumulation)).loss for step in range(6)]
    before = started(precision, tied, accumulation=accumulation, **options[0])
    for step in range(3):
        before.step(batches(step, accumulation))
    before.save(tmp_path / "step-3", step=3)
    before.close()
    after = started(precision, tied, seed=77, accumulation=accumulation, **options[1])
    after.load(tmp_path / "step-3")
    assert [after.step(batches(step, accumulation)).loss for step in range(3, 6)] == losses[3:]
    assert same(state(after), state(straight))
    # Loading and saving again copies from file to file.
    after.save(tmp_path / "step-6", step=6)
    straight.save(tmp_path / "straight", step=6)
    for file in (tmp_path / "straight").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "step-6" / file.name).read_bytes(), file.name
    after.close()
    straight.close()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_on_disk_are_evaluated_read_and_exported_as_those_in_memory(
    tmp_path: Path, tied: bool, precision: str
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    plan = {"weights_on_disk": 4 if tied else UNITS, "slots": 2, "poison": True}
    engines = [
        started(precision, tied, accumulation=2),
        started(precision, tied, accumulation=2, **on_disk(spill, plan=plan)),
    ]
    found = []
    for engine in engines:
        seen: list[Any] = [engine.evaluate(batches(7, 2))]
        for step in range(2):
            seen.append(engine.step(batches(step, 2)).loss)
            # once with the updates of the step under way, and once with the weights still in slots
            seen += [engine.evaluate(batches(7, 2)), engine.evaluate(batches(7, 2))]
        seen.append([row.tolist() for row in engine.logprobs(batches(8, 2))])
        folder = tmp_path / f"export-{len(found)}"
        engine.save_pretrained(folder)
        seen.append({file.name: file.read_bytes() for file in folder.glob("*.safetensors")})
        seen.append(state(engine))
        found.append(seen)
    plain, other = found
    assert other[:-1] == plain[:-1]
    assert same(other[-1], plain[-1])
    for engine in engines:
        engine.close()


def test_weights_on_disk_that_a_caller_overwrites_are_what_the_next_step_uses(tmp_path: Path) -> None:
    plain = started("bf16", False, accumulation=1)
    other = started("bf16", False, accumulation=1, **on_disk(tmp_path, plan={"weights_on_disk": UNITS}))
    plain.save(tmp_path / "begin", step=0)
    for engine in (plain, other):
        for step in range(2):
            engine.step(batches(step, 1))
        engine.load(tmp_path / "begin")
    losses = [[engine.step(batches(step, 1)).loss for step in range(3)] for engine in (plain, other)]
    assert losses[0] == losses[1]
    assert same(state(plain), state(other))
    plain.close()
    other.close()


def larger(**options: Any) -> Engine:
    """An engine whose state is larger than the buffers that state on disk passes through."""
    shape = llama(hidden_size=128, intermediate_size=512, num_hidden_layers=6)
    decoder = Decoder.from_config(shape, precision="bf16")
    return Engine(decoder, device="cpu", seed=0, micro_batch=(2, 12), micro_batches=2, **options)


def test_state_is_spilled_only_where_the_host_is_too_small(tmp_path: Path) -> None:
    plan = {"slots": 2, "parts": 4, "activation": "recompute"}
    roomy_memory = {"host": "1GiB", "nvme": {"path": tmp_path}}
    roomy = larger(plan=plan, memory=roomy_memory)
    totals = roomy.plan["totals"]
    assert totals["disk"] == 0
    plain = trained(roomy)
    tight = totals["device"] + totals["host"] - (3 << 20)
    with pytest.raises(DoesNotFit, match="host memory are needed"):
        larger(plan=plan, memory={"host": tight})
    engine = larger(plan=plan, memory={"host": tight, "nvme": {"path": str(tmp_path), "size": "64MiB"}})
    totals = engine.plan["totals"]
    assert 0 < totals["disk"] <= 64 << 20
    assert totals["device"] + totals["host"] <= tight
    for step in range(4):
        engine.step(batches(step, 2))
        engine.drain()
    moved = engine.stats().raw
    assert moved["state_bytes_read"] == moved["state_bytes_written"] == totals["disk"]
    assert moved["lanes"]["state_read"] > 0
    assert same(state(engine), plain[1])
    engine.close()
    # Smaller still than what is left with all state on disk.
    everything = larger(plan=plan | {"state_on_disk": 8, "weights_on_disk": 0}, memory=roomy_memory)
    limits = everything.plan["totals"]
    everything.close()
    tight = limits["device"] + limits["host"] - (1 << 20)
    engine = larger(plan=plan, memory={"host": tight, "nvme": {"path": str(tmp_path), "size": "64MiB"}})
    totals, units = engine.plan["totals"], engine.plan["units"]
    assert totals["device"] + totals["host"] <= tight
    assert all(unit["state"] == "disk" for unit in units)
    assert 0 < sum(unit.get("weights_on_disk", False) for unit in units) < 8
    for step in range(4):
        engine.step(batches(step, 2))
        engine.drain()
    moved, estimate = engine.stats().raw, engine.plan["estimate"]
    assert moved["state_bytes_written"] == estimate["disk_written"]
    assert moved["state_bytes_read"] == estimate["disk_read"] > estimate["disk_written"]
    assert same(state(engine), plain[1])
    engine.close()


def test_a_second_plan_says_that_the_first_ones_state_files_are_still_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [1 << 40]
    monkeypatch.setattr(hardware.SystemProbe, "disk", lambda *_: (1, room[0]))
    options = on_disk(tmp_path, plan={"state_on_disk": UNITS}, micro_batch=None, micro_batches=None)
    plain, engine = (started("bf16", False, **one) for one in ({"micro_batch": None, "micro_batches": None}, options))
    for one in (plain, engine):
        one.step(batches(0, 1))
    held = engine.plan["totals"]["disk"]
    assert held > 0
    room[0] = (1 << 30) + held // 2
    taken = f"(?s)present engine, whose .* of host memory and {hardware.format_bytes(held)} on disk are taken"
    with pytest.raises(DoesNotFit, match=taken) as refused:
        engine.step(batches(1, 2))
    assert refused.value.items
    for step, count in ((1, 1), (2, 1)):
        assert engine.step(batches(step, count)).loss == plain.step(batches(step, count)).loss
    room[0] = 1 << 40
    assert engine.step(batches(3, 2)).loss == plain.step(batches(3, 2)).loss
    assert same(state(engine), state(plain))


def test_a_loss_fn_that_moves_nothing_needs_no_second_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [1 << 40]
    monkeypatch.setattr(hardware.SystemProbe, "disk", lambda *_: (1, room[0]))
    engine = started("bf16", False, accumulation=1, **on_disk(tmp_path, plan={"state_on_disk": UNITS}))
    engine.step(batches(0, 1))
    core = engine._runtime.core
    room[0] = 1 << 30
    engine.step(batches(1, 1), loss_fn=lambda hidden, head, _: head(hidden).float().square().sum())
    assert engine._runtime.core is core


def test_a_state_file_that_is_cut_off_ends_the_run_and_names_what_is_missing(tmp_path: Path) -> None:
    engine = started("bf16", False, accumulation=1, **on_disk(tmp_path, plan={"state_on_disk": UNITS}))
    engine.step(batches(0, 1))
    engine.drain()
    links = {one: os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    held = [one for one, target in links.items() if str(tmp_path) in target and target.endswith("state (deleted)")]
    assert len(held) == 1
    os.truncate(held[0], 4096)

    def train() -> None:
        for step in range(1, 3):
            engine.step(batches(step, 1))
            engine.drain()

    with pytest.raises(EngineBroken, match=r"read_state of unit .*state of unit .* bytes here.*it was shortened"):
        train()
    with pytest.raises(EngineBroken, match="it was shortened"):
        engine.step(batches(3, 1))
    engine.close()


def test_two_engines_on_one_path_do_not_meet(tmp_path: Path) -> None:
    plain = trained(started("bf16", False, accumulation=2))
    options = on_disk(tmp_path, plan={"state_on_disk": UNITS})
    one, other = (started("bf16", False, accumulation=2, **options) for _ in range(2))
    assert len(list(tmp_path.iterdir())) == 2
    for step in range(4):
        one.step(batches(step, 2))
        other.step(batches(step, 2))
    for engine in (one, other):
        assert same(state(engine), plain[1])
        engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "plan", "reason"),
    [
        ({"nvme": {"path": "nowhere"}}, {}, "memory.nvme.path: .*nowhere does not exist; make the folder"),
        ({"nvme": "somewhere"}, {}, "memory.nvme must be a dict with a path"),
        ({"nvme": {"path": [".", "."]}}, {}, "memory.nvme.path names .* twice"),
        ({"nvme": {"path": []}}, {}, "memory.nvme.path is an empty list"),
        ({"nvme": {"path": ".", "sice": 3}}, {}, "memory.nvme: unknown key 'sice'; did you mean size"),
        ({"nvme": {"path": ".", "size": "much"}}, {}, "memory.nvme.size"),
        ({}, {"state_on_disk": 2}, "plan.state_on_disk is 2, and no disk is named"),
        ({}, {"weights_on_disk": 2}, "plan.weights_on_disk is 2, and no disk is named"),
        (
            {"nvme": {"path": "."}},
            {"weights_on_disk": 2, "state_on_disk": 1},
            "plan.weights_on_disk = 2 contradicts plan.state_on_disk",
        ),
    ],
)
def test_what_cannot_be_a_place_for_state_is_refused_by_name(
    memory: dict[str, Any], plan: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        started("bf16", False, memory={"gpu": "1GiB", "host": "1GiB", **memory}, plan=plan)


@pytest.mark.parametrize(
    "plan",
    [{"state_on_disk": 3, "weights_on_disk": 2, "parts": 2}, {"activation": "recompute", "inputs_on_disk": 2}],
    ids=["state and weights", "inputs"],
)
def test_a_killed_run_leaves_nothing_on_disk_and_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    drives = [tmp_path / "fast", tmp_path / "faster"]
    for drive in drives:
        drive.mkdir()

    def asked(run: str, **sections: Any) -> dict[str, Any]:
        output = {"dir": str(tmp_path / run), "export": "never", "save_every": 3}
        return settings(tmp_path, train={"steps": 30}, output=output, **sections)

    nvme = {"nvme": {"path": [str(drive) for drive in drives], "size": "64MiB"}}
    on_disk = asked("run", memory=nvme, plan=plan)
    killed_after(5, on_disk, tmp_path)
    for drive in drives:
        assert [file.name for file in drive.rglob("*") if file.is_file()] == ["lock"]
    Trainer(on_disk).fit()
    Trainer(asked("straight", plan={key: plan[key] for key in plan if not key.endswith("_on_disk")})).fit()
    assert course(tmp_path / "run") == course(tmp_path / "straight")
    for drive in drives:
        assert list(drive.iterdir()) == []
