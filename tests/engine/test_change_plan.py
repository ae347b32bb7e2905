"""An engine that changes its plan between steps: numbers and the place of state stay, and a refusal changes nothing."""

from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ConfigError
from support.reference import batches, build

MICRO_BATCHES = 3
RATES = {"h2d_gbs": 10.0, "matmul_tflops": 0.1}


def engine(**changes: Any) -> megatrain.Engine:
    return megatrain.Engine(
        build("llama"),
        optimizer=megatrain.AdamW(lr=1e-2),
        device="cpu",
        micro_batch=(2, 32),
        micro_batches=MICRO_BATCHES,
        memory={"gpu": "1GiB", "host": "1GiB"},
        **{"plan": {"activation": "recompute", "group": MICRO_BATCHES, "threads": 1}, **changes},
    )


def step(ours: megatrain.Engine) -> Any:
    return ours.step(batches(MICRO_BATCHES))


def state(ours: megatrain.Engine) -> dict[str, Any]:
    weights = dict(ours.state_dict())
    return {name: [weight, *ours.optimizer_state(name).values()] for name, weight in weights.items()}


def assert_same(ours: megatrain.Engine, other: megatrain.Engine) -> None:
    left, right = state(ours), state(other)
    for name, values in left.items():
        for one, another in zip(values, right[name], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(another)), name


@pytest.mark.parametrize("update", [{}, {"update": "immediate", "max_grad_norm": None}], ids=["clipped", "immediate"])
def test_no_bit_changes(update: dict[str, Any]) -> None:
    left, right = engine(**update), engine(**update)
    for numbers in ({"group": 1, "activation": "keep"}, {"slots": 2, "inputs": "host"}, {"activation": "offload"}):
        assert step(left) == step(right)
        left.change_plan(RATES, {"state_on_device": 0, **numbers})
        assert_same(left, right)
    assert step(left) == step(right)
    assert left.num_steps == right.num_steps == 4
    assert {unit["activation"] for unit in left.plan["units"][1:-1]} == {"offload"}
    assert left.plan["group"] == 1
    assert_same(left, right)


def test_a_plan_that_would_move_state_is_refused_and_the_one_before_goes_on() -> None:
    left, right = engine(), engine()
    assert step(left) == step(right)
    before = left.plan
    for numbers, words in (
        ({"state_on_device": 2}, "which units have their state"),
        ({"group": 99}, "group"),
        ({"slot": 2}, "numbers has 'slot', .*did you mean slots"),
        ({"fragments": "halves"}, "numbers has 'fragments', which is no number of a plan that may change"),
        ({"activation": "save"}, "plan.activation must be keep"),
    ):
        with pytest.raises(ConfigError, match=words):
            left.change_plan(RATES, numbers)
        assert left.plan == before
    assert step(left) == step(right)
    assert_same(left, right)


def test_gradients_that_wait_and_a_checkpoint_that_is_written_come_first(tmp_path: Any) -> None:
    ours = engine()
    ours.forward_backward(batches(MICRO_BATCHES))
    with pytest.raises(ConfigError, match="optimizer_step"):
        ours.change_plan(RATES, {})
    ours.optimizer_step()
    saving = ours.begin_save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="still being written"):
        ours.change_plan(RATES, {})
    saving.finish()
    ours.change_plan(RATES, {"group": 1})
    assert ours.plan["group"] == 1
    assert ours.load(tmp_path / "saved") == {}
