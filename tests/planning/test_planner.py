"""What the planner chooses for a card: the split into micro-batches, and what is placed where."""

import dataclasses
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.engine.runtime import hold_torch
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.models.presets import SHAPES
from megatrain.planning import optimizer_groups, planner
from megatrain.system import descriptions
from megatrain.system.hardware import GIB
from megatrain.training.setup import prepare_model
from support.plans import H100

CARD = H100 | {"host": {"memory": "128GiB", "cpus": 16}, "gpu": H100["gpu"] | {"memory": "79GiB"}}


def run_plan(
    model: str,
    rows: int,
    free: int | None = None,
    saved: dict[str, Any] | None = None,
    card: dict[str, Any] = CARD,
    **sections: dict[str, Any],
) -> planner.RunPlan:
    """A step of `rows` by 1,024 tokens on the card, of which `free` bytes are free."""
    document = {"model": {"config": SHAPES[model].config()}, "data": {"seq_len": 1024}, "device": "cuda"}
    train = {"batch_size": rows, "steps": 1} | sections.pop("train", {})
    card = card | {"rates": card["rates"] | sections.pop("rates", {})}
    config, described = Config.of(document | {"train": train} | sections), descriptions.from_description(card, "card")
    decoder = prepare_model(config, described, plan_only=True).decoder
    if free is not None:
        cards = tuple(dataclasses.replace(gpu, held_bytes=gpu.total_bytes - free) for gpu in described.gpus)
        described = dataclasses.replace(described, gpus=cards)
    return planner.plan_run(config, decoder, device="cuda", machine=described, rows=rows, saved=saved)


def test_the_engine_is_asked_for_every_number_of_the_plan_section() -> None:
    from megatrain.config import PlanConfig
    from megatrain.engine.runtime import PLAN_KEYS

    numbers = {field.name for field in dataclasses.fields(PlanConfig)} - {"micro_batch"}
    assert PLAN_KEYS - numbers == {"accumulate", "loss_workspace", "more_workspace", "hold_torch", "trace", "isa"}, (
        "what only a caller of the engine can use"
    )
    assert numbers <= PLAN_KEYS


def test_torch_is_held_to_a_limit_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hold_torch" not in run_plan("tiny", 2).engine_options()["plan"], "all that is free may be used"
    limited = run_plan("tiny", 2, memory={"gpu": "3GiB"})
    assert limited.engine_options()["plan"]["hold_torch"] is True
    held: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", held.append)
    hold_torch(limited.budget["device"], limited.plan)
    items = {item["what"]: item["bytes"] for item in limited.plan["items"] if item["tier"] == "device"}
    ours = sum(size for what, size in items.items() if not what.endswith("(torch)"))
    outside = items["context and libraries (torch)"]
    assert held == [((3 << 30) - ours - outside) / (8 << 30)]


def test_a_run_that_goes_on_computes_compiled_or_not_as_before_unless_it_is_told_otherwise() -> None:
    eager = {"device": "H100", "compiled": False}
    assert run_plan("tiny", 2).options.get("compile") is None
    assert run_plan("tiny", 2, saved=eager).options["compile"] is False
    assert run_plan("tiny", 2, saved=eager, plan={"compile": True}).options["compile"] is True
    assert run_plan("tiny", 2, saved=eager | {"device": "cpu"}).options.get("compile") is None


def counts(found: planner.RunPlan) -> tuple[int, int, int]:
    """Units with their state on the device, layers kept, layers whose input goes to the host."""
    units = found.plan["units"]
    kept = sum(unit["activation"] == "keep" for unit in units[1:-1])
    return sum(u["state"] == "device" for u in units), kept, sum(u["input"] == "host" for u in units)


def test_on_a_card_the_fastest_of_8192_16384_and_32768_tokens_are_computed_at_a_time() -> None:
    small = run_plan("qwen2.5-3b", 32, memory={"gpu": "12GiB"})
    sizes = [run_plan("qwen2.5-3b", 32, memory={"gpu": "12GiB"}, plan={"micro_batch": size}) for size in (8, 16, 32)]
    assert seconds(small) <= min(map(seconds, sizes))
    assert small.micro_batch[0] * small.micro_batches == 32
    long = run_plan("qwen2.5-3b", 128, memory={"gpu": "12GiB"}, plan={"micro_batch": 32, "group": 4})
    assert (long.micro_batch[0], long.micro_batches) == (32, 4)
    assert counts(long)[2] > 0, "layer inputs of 19 GB go to the host"
    assert run_plan("qwen2.5-3b", 32, memory={"gpu": "6GiB"}).micro_batch[0] in (4, 8, 16)
    slow = run_plan("qwen2.5-3b", 32, rates={"matmul_tflops": 1.0, "adamw_gparams": 100.0})
    whole = run_plan("qwen2.5-3b", 32)
    assert slow.micro_batch == whole.micro_batch == (8, 1024), "measured rates do not change the split"
    assert (whole.plan["group"], counts(whole)[1]) == (1, 36), "every activation of one micro-batch is kept"
    larger = run_plan("qwen2.5-3b", 32, card=CARD | {"gpu": CARD["gpu"] | {"name": "NVIDIA H200", "memory": "139GiB"}})
    assert (larger.micro_batch, counts(larger)[:2]) == ((16, 1024), (38, 36)), "all state is on the card either way"


def test_what_happens_to_be_free_on_the_card_changes_placement_and_never_the_split() -> None:
    idle, busy = run_plan("qwen2.5-3b", 32), run_plan("qwen2.5-3b", 32, free=20 * GIB)
    assert busy.micro_batch == idle.micro_batch
    assert busy.plan["totals"]["device"] < 20 * GIB < idle.plan["totals"]["device"]
    with pytest.raises(DoesNotFit, match="device memory"):
        run_plan("qwen2.5-3b", 32, free=6 * GIB)


def seconds(found: planner.RunPlan) -> float:
    return float(found.plan["estimate"]["expected_step_s"])


IMMEDIATE = {"update": "immediate", "max_grad_norm": None}


def test_state_comes_to_the_card_until_the_hosts_part_is_hidden_then_activations_are_kept() -> None:
    few, many = counts(run_plan("qwen2.5-3b", 8)), counts(run_plan("qwen2.5-3b", 32, memory={"gpu": "50GiB"}))
    assert few[0] == 38, "nothing hides the host's updates of a small step"
    assert 2 < many[0] < 38
    assert 0 < many[1] < 36
    assert many[2] == 0
    clipped, immediate = run_plan("qwen2.5-7b", 16), run_plan("qwen2.5-7b", 16, train=IMMEDIATE)
    assert counts(clipped)[0] > counts(immediate)[0], "immediate updates hide beneath the whole step"
    assert run_plan("qwen2.5-7b", 64).micro_batches == 2


def test_the_context_and_fragmentation_are_in_the_sum_and_a_little_is_left_besides() -> None:
    found = run_plan("qwen2.5-3b", 32)
    items = {item["what"]: item["bytes"] for item in found.plan["items"] if item["tier"] == "device"}
    assert items["context and libraries (torch)"] > GIB // 2
    assert items["fragmentation (torch)"] > 0
    assert GIB // 2 < 79 * GIB - found.budget["device"] < 2 * GIB
    assert found.plan["totals"]["device"] > 0.9 * found.budget["device"]
    estimate = found.plan["estimate"]
    assert estimate["step_s"] < estimate["expected_step_s"] < 2 * estimate["step_s"]


@pytest.mark.parametrize(("rows", "micro_batch", "keep", "measured"), [(8, 8, 31, 62.2e9), (32, 16, 6, 63.3e9)])
def test_planned_device_memory_is_within_a_tenth_of_what_was_measured_and_not_below(
    rows: int, micro_batch: int, keep: int, measured: float
) -> None:
    plan = {"state_on_device": 38, "keep": keep, "micro_batch": micro_batch, "group": rows // micro_batch}
    plan |= {"graphs": False}
    planned = run_plan("qwen2.5-3b", rows, plan=plan, memory={"gpu": "85GiB"}).plan["totals"]["device"]
    assert measured <= planned <= 1.1 * measured


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["*"], ["*norm*"]], r"train\.groups\.1 \(\*norm\*\) .*in train\.groups\.0;"),
        (
            [["*up*"], ["*norm*"], ["model.norm.*", "*.up.weight"]],
            r"groups\.2 .*in train\.groups\.0 and train\.groups\.1;",
        ),
        ([["*norm*"], ["*"]], None),
        ([["*norm*"], ["*norm*", "*up*"]], None),
    ],
)
def test_a_group_whose_parameters_are_all_of_earlier_groups_is_refused(
    groups: list[list[str]], message: str | None
) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.norm.weight"]
    listed = [{"params": params, "lr": 1e-3 * (index + 1)} for index, params in enumerate(groups)]
    config = Config.of({"model": {"config": SHAPES["tiny"].config()}, "train": {"groups": listed}})
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            optimizer_groups.optimizer_for(config, names)
        return
    optimizer = optimizer_groups.optimizer_for(config, names)
    rates = [group[0] for group in optimizer.core_groups()]
    found = {name: rates[index] for name, index in optimizer.assign(names).items()}
    assert found["model.norm.weight"] == 1e-3
    assert found["model.layers.0.mlp.up.weight"] == 2e-3


@pytest.mark.parametrize("asked", [4, 9])
def test_asking_for_a_number_of_updates_on_the_card_gives_no_faster_plan_than_leaving_it_out(asked: int) -> None:
    """With a fast host and a small budget, where fewer buffers leave room for the state of one more unit."""
    rates = {"h2d_gbs": 54.1, "d2h_gbs": 54.2, "matmul_tflops": 763, "adamw_gparams": 5.87, "hbm_gbs": 4200}

    def planned(**plan: int) -> planner.RunPlan:
        memory = {"gpu": "12GiB", "host": "106GiB"}
        return run_plan("qwen2.5-3b", 8, train=dict(IMMEDIATE), rates=rates, memory=memory, plan=plan)

    assert seconds(planned()) <= seconds(planned(updates_on_device=asked))
