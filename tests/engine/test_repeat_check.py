"""A step whose gradient pass runs twice: it changes nothing that a plain step does not, and finds what differs."""

import logging
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError, EngineBroken
from support import families
from support.reference import assert_unchanged, batches, build, engine, weights


def state(ours: Any) -> dict[str, torch.Tensor]:
    """Every plane and count of every trained tensor."""
    found = {}
    for name, ref in ours.decoder.tensors.items():
        found[name] = ours.weight(name)
        if ref.role == "trainable":
            moments = ours.optimizer_state(name)
            found |= {f"{name}/{plane}": torch.as_tensor(value) for plane, value in moments.items()}
    return found


def assert_same_state(ours: Any, twin: Any) -> None:
    left, right = state(ours), state(twin)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama3", {}, {}),
        ("llama3", {}, {"plan": {"activation": "offload", "group": 1, "slots": 2}}),
        ("llama3", {}, {"precision": "bf16", "grad_precision": "bf16", "plan": {"activation": "recompute"}}),
        ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.1}, {}),
        ("qwen3-moe", {"output_router_logits": True}, {}),
    ],
)
def test_checked_steps_give_the_bits_of_plain_ones(family: str, changes: Any, options: Any) -> None:
    made = [
        engine(families.build(family, **changes).train(), micro_batch=(2, 32), micro_batches=2, **options)
        for _ in range(2)
    ]
    ours, twin = made
    for step in range(3):
        micro_batches = batches(2, seed=step, vocab=96)
        checked, plain = ours.step(micro_batches, check=step != 1), twin.step(micro_batches)
        assert checked == plain
        assert ours.num_steps == twin.num_steps == step + 1
    assert_same_state(ours, twin)


def test_a_skipped_step_agrees_with_itself() -> None:
    ours = engine(build())
    before = weights(ours)
    out = ours.step(batches(1), loss_fn=lambda hidden, *_: hidden.sum() * float("nan"), check=True)
    assert out.skipped
    assert_unchanged(ours, before)


def test_gradients_that_differ_stop_the_engine_with_unit_tensor_and_both_norms() -> None:
    ours = engine(build())
    ours.step(batches(1))
    before, calls = weights(ours), []

    def racing(hidden: torch.Tensor, head: Any, *_: Any) -> torch.Tensor:
        calls.append(hidden)
        loss = head(hidden).float().square().mean()
        return loss if len(calls) == 1 else loss + 1e-3 * (loss - loss.detach())  # the same value, another gradient

    with pytest.raises(EngineBroken, match=r"step 2 do not agree.*the gradient of model\.embed") as raised:
        ours.step(batches(1), loss_fn=racing, normalizer=1.0, check=True)
    assert len(calls) == 2
    words = str(raised.value)
    assert "(unit embed)" in words
    first, second = (float(part.split()[0]) for part in words.split("its norm was ")[1].split(" and ", 1))
    assert second == pytest.approx(1.001 * first, rel=1e-5)
    assert "Nothing was updated" in words
    ours._passes.guard.broken = ""  # to look at what is left
    assert_unchanged(ours, before)
    assert ours.num_steps == 1


def test_a_loss_that_differs_is_named_first() -> None:
    ours, calls = engine(build()), []

    def racing(hidden: torch.Tensor, head: Any, *_: Any) -> torch.Tensor:
        calls.append(hidden)
        return head(hidden).float().square().mean() * len(calls)

    with pytest.raises(EngineBroken, match="the loss of micro-batch 0 was"):
        ours.step(batches(1), loss_fn=racing, normalizer=1.0, check=True)
    with pytest.raises(EngineBroken, match="do not agree"):  # and nothing else is computed with it
        ours.step(batches(1))


def test_an_exception_in_the_second_pass_leaves_the_engine_as_it_was() -> None:
    ours, twin, calls = engine(build()), engine(build()), []

    def failing(hidden: torch.Tensor, head: Any, *_: Any) -> torch.Tensor:
        calls.append(hidden)
        if len(calls) == 2:
            raise ArithmeticError("the caller's own")
        return head(hidden).float().square().mean()

    with pytest.raises(ArithmeticError):
        ours.step(batches(1), loss_fn=failing, normalizer=1.0, check=True)
    assert ours.step(batches(1)) == twin.step(batches(1))
    assert_same_state(ours, twin)


def test_what_a_check_cost_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine(build()).step(batches(1), check=True)
    assert [r for r in caplog.messages if "agree bit for bit in all" in r and "took" in r]


def test_immediate_updates_cannot_be_checked() -> None:
    ours = engine(build(), update="immediate", max_grad_norm=None)
    with pytest.raises(ConfigError, match="update: just_in_time"):
        ours.step(batches(1), check=True)
