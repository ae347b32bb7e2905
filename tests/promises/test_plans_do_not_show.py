"""Under one numerics key every plan gives the same bits: placement, order and threads do not show."""

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain import _core
from support.reference import batches, build, engine

MICRO_BATCHES = 3  # two commute, and would hide a wrong order


@functools.cache
def model(kind: str, tied: bool) -> Any:
    return build(kind, tie_word_embeddings=tied)


def bits(kind: str = "llama", tied: bool = False, seed: int | None = None, **options: Any) -> list[torch.Tensor]:
    """Losses, norms, weights, moments and counts after three steps."""
    options.setdefault("device", _core.Device.cpu(seed=seed))
    options["plan"] = {"poison": True, "threads": 1, **options.pop("plan", {})}
    ours = engine(model(kind, tied), micro_batch=(2, 32), micro_batches=MICRO_BATCHES, **options)
    found = []
    for step in range(3):
        out = ours.step(batches(MICRO_BATCHES, seed=step))
        found += [torch.tensor([out.loss, out.grad_norm], dtype=torch.float64)]
    for name in ours.decoder.tensors:
        state = ours.optimizer_state(name)
        found += [ours.weight(name), state["exp_avg"], state["exp_avg_sq"], torch.tensor(state["step"])]
    ours.close()
    return found


@functools.cache
def wanted(**options: Any) -> list[torch.Tensor]:
    return bits(**options)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"value {index} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_slots_and_the_order_of_ready_work_do_not_show(slots: int, seed: int) -> None:
    assert_same_bits(bits(seed=seed, plan={"slots": slots}), wanted())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_optimizer_threads_do_not_show(threads: int) -> None:
    assert_same_bits(bits(seed=3, plan={"threads": threads}), wanted())


@pytest.mark.parametrize(
    ("activation", "inputs"), list(itertools.product(["keep", "offload", "recompute"], ["device", "host"]))
)
def test_where_activations_and_inputs_are_does_not_show(activation: str, inputs: str) -> None:
    assert_same_bits(bits(seed=4, plan={"activation": activation, "inputs": inputs}), wanted())


@pytest.mark.parametrize("inputs", [1, 2, 4])
@pytest.mark.parametrize("activation", ["recompute", "offload"])
@pytest.mark.parametrize("group", [1, 3])
def test_inputs_that_wait_on_disk_do_not_show(tmp_path: Path, inputs: int, activation: str, group: int) -> None:
    memory = {"gpu": "1GiB", "host": "1GiB", "nvme": {"path": tmp_path}}
    plan = {"inputs_on_disk": inputs, "activation": activation, "group": group, "slots": 2, "stage_buffers": 2}
    for seed in (16, 17):
        assert_same_bits(bits(seed=seed, memory=memory, plan=plan), wanted())
    immediate = {"max_grad_norm": None, "update": "immediate"}
    found = bits(seed=18, memory=memory, plan={**plan, "slabs": 1, "state_on_disk": 3}, **immediate)
    assert_same_bits(found, wanted(max_grad_norm=None))


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_how_micro_batches_are_grouped_does_not_show(group: int, tied: bool) -> None:
    assert_same_bits(bits(tied=tied, seed=5, plan={"group": group, "keep": 2}), wanted(tied=tied))


@pytest.mark.parametrize(
    "more",
    [
        {"inputs": "device"},
        {"inputs": "host", "stage_buffers": 2},
        {"activation": "offload", "inputs": "host"},
        {"large_keep": 0, "state_on_device": 2},
        {"offload": 1, "inputs": "host"},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_large_group_that_keeps_less_does_not_show(more: dict[str, Any], tied: bool) -> None:
    plan = {"group": 1, "large_group": 2, "keep": 3, "large_keep": 1, "slots": 3} | more
    assert_same_bits(bits(tied=tied, seed=14, plan=plan), wanted(tied=tied))
    immediate = {"max_grad_norm": None, "update": "immediate"}
    found = bits(tied=tied, seed=15, plan={**plan, "slabs": 2}, **immediate)
    assert_same_bits(found, wanted(tied=tied, max_grad_norm=None))


@pytest.mark.parametrize("slabs", [1, 2])
def test_update_mode_and_slabs_do_not_show(slabs: int) -> None:
    plain = wanted(max_grad_norm=None)
    assert_same_bits(bits(max_grad_norm=None, update="immediate", seed=6, plan={"slabs": slabs}), plain)


@pytest.mark.parametrize("units", [1, 3, 6])
def test_units_updated_on_the_device_do_not_show(units: int) -> None:
    assert_same_bits(bits(seed=7, plan={"state_on_device": units}), wanted())


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 3])
def test_layers_whose_state_visits_the_device_do_not_show(layers: int, parts: int) -> None:
    visiting = {"updates_on_device": layers, "parts": parts}
    assert_same_bits(bits(seed=10, plan=visiting), wanted())
    immediate = {"max_grad_norm": None, "update": "immediate"}
    for slots, slabs in ((2, 1), (3, 4)):
        found = bits(seed=11, plan={**visiting, "slots": slots, "slabs": slabs}, **immediate)
        assert_same_bits(found, wanted(max_grad_norm=None))
    for grads in ("bf16", "fp32"):
        narrow = {"precision": "bf16", "grad_precision": grads}
        assert_same_bits(bits(seed=12, plan={**visiting, "state_on_device": 2}, **narrow), wanted(**narrow))


def drawn(number: int) -> dict[str, Any]:
    """A plan out of the whole product of what may be asked for, the same for the same number."""
    pick = random.Random(number).choice
    kept = pick(
        [
            {"activation": "keep"},
            {"activation": "recompute"},
            {"activation": "offload"},
            {"keep": 2},
            {"keep": 0, "offload": 2},
        ]
    )
    plan = kept | {
        "slots": pick([2, 3, 4, 6]),
        "group": pick([1, 2, 3]),
        "inputs": pick(["device", "host"]),
        "stage_buffers": pick([2, 3]),
        "state_on_device": pick([0, 1, 3]),
        "updates_on_device": pick([0, 1, 2]),
        "parts": pick([1, 2, 5]),
        "threads": pick([1, 2, 3]),
        "poison": number % 3 == 0,
    }
    options: dict[str, Any] = {"seed": 100 + number, "tied": pick([False, True]), "plan": plan}
    if number % 2:
        plan["slabs"] = pick([1, 2, 4])
        options |= {"update": "immediate", "max_grad_norm": None}
    return options


@pytest.mark.parametrize("number", range(20))
def test_no_combination_of_choices_shows(number: int) -> None:
    options = drawn(number)
    plain = {name: options[name] for name in ("tied", "max_grad_norm") if name in options}
    assert_same_bits(bits(**options), wanted(**plain))


@pytest.mark.parametrize("kind", ["mistral", "gpt2"])
def test_other_families_do_not_show_their_plan_either(kind: str) -> None:
    tied = kind == "gpt2"
    plan = {"slots": 2, "activation": "recompute", "inputs": "host", "group": 2}
    assert_same_bits(bits(kind=kind, tied=tied, seed=8, plan=plan), wanted(kind=kind, tied=tied))


def test_bf16_does_not_show_its_plan_either() -> None:
    for plan in ({"slots": 2, "activation": "recompute", "inputs": "host"}, {"group": 1, "activation": "offload"}):
        assert_same_bits(bits(precision="bf16", seed=9, plan=plan), wanted(precision="bf16"))


def test_dropout_is_replayed_in_recomputation_and_does_not_show_the_plan() -> None:
    dropping = build("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)

    def losses(plan: dict[str, Any]) -> list[float]:
        ours = engine(dropping, micro_batch=(2, 32), micro_batches=MICRO_BATCHES, plan=plan)
        return [ours.step(batches(MICRO_BATCHES, seed=s)).loss for s in range(3)]

    kept = losses({"activation": "keep"})
    assert kept == losses({"activation": "recompute", "group": 1}) == losses({"activation": "offload"})
    plain = engine(build("gpt2"))
    assert kept[0] != plain.step(batches(MICRO_BATCHES, seed=0)).loss


def test_a_step_leaves_the_callers_random_state_alone() -> None:
    ours = engine(model("llama", False))
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    ours.step(batches(1))
    assert torch.equal(torch.rand(1), expected)


def test_two_engines_of_one_seed_draw_the_same_initial_weights() -> None:
    from support.reference import config

    first, second = (
        megatrain.Engine(megatrain.Decoder.from_config(config()), device="cpu", seed=5, memory={"gpu": 1 << 30})
        for _ in range(2)
    )
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.weight(name))
