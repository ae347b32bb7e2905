"""A step that fails, an engine that is cut off, broken or closed: what is left of the state, and what it says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain import _core
from megatrain.errors import ConfigError, EngineBroken
from support.reference import assert_unchanged, batches, build, engine, weights


def test_a_step_without_supervised_tokens_changes_nothing_and_says_so() -> None:
    ours = engine(build())
    ours.step(batches(1))
    before = weights(ours)
    empty = batches(1)[0]
    empty["labels"] = torch.full_like(empty["labels"], -100)
    out = ours.step([empty])
    assert out.skipped
    assert out.num_tokens == 0
    assert "supervised" in out.reason
    assert math.isfinite(out.loss)
    assert_unchanged(ours, before)
    assert ours.optimizer_state("model.norm.weight")["step"] == 1


def test_gradients_that_are_not_finite_skip_the_update_and_are_counted() -> None:
    ours = engine(build())
    ours.step(batches(1))
    before = weights(ours)

    def infinite(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.sum() * float("inf")

    out = ours.step(batches(1), loss_fn=infinite)
    assert out.skipped
    assert not math.isfinite(out.grad_norm)
    assert_unchanged(ours, before)
    assert ours.optimizer_state("model.norm.weight")["step"] == 1
    assert not ours.step(batches(1)).skipped


def test_a_loss_that_is_not_finite_stops_immediate_updates_before_anything_changes() -> None:
    ours = engine(build(), update="immediate", max_grad_norm=None)
    ours.step(batches(1))
    before = weights(ours)

    def infinite(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.sum() * float("inf")

    with pytest.raises(EngineBroken, match="the loss is"):
        ours.step(batches(1), loss_fn=infinite)
    assert_unchanged(ours, before)


@pytest.mark.parametrize("halves", [False, True], ids=["step", "forward_backward"])
def test_a_loss_that_is_not_finite_skips_the_update_though_its_gradients_are(halves: bool) -> None:
    ours, twin = engine(build()), engine(build())
    for one in (ours, twin):
        one.step(batches(1))
    before = weights(ours)

    def infinite(hidden: torch.Tensor, head: Any, _: Any) -> torch.Tensor:
        return head(hidden).sum() + float("inf")

    if halves:
        assert ours.forward_backward(batches(1), loss_fn=infinite) == math.inf
        ours.evaluate(batches(1))
        out = ours.optimizer_step()
    else:
        out = ours.step(batches(1), loss_fn=infinite)
    assert out.skipped
    assert out.reason == "the loss is not finite"
    assert out.loss == math.inf
    assert out.grad_norm > 0
    assert math.isfinite(out.grad_norm)
    assert ours.num_steps == 2
    assert_unchanged(ours, before)
    assert ours.optimizer_state("model.norm.weight")["step"] == 1
    assert ours.step(batches(1)) == twin.step(batches(1))
    assert_unchanged(ours, weights(twin))


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
@pytest.mark.parametrize("normalizer", [1e-40, 1e39, 1e300])
def test_a_normalizer_that_fp32_cannot_divide_by_is_refused(update: str, normalizer: float) -> None:
    ours = engine(build(), update=update, max_grad_norm=None)
    before = weights(ours)
    for loss_fn in (None, lambda hidden, head, _: head(hidden).sum()):
        with pytest.raises(ConfigError, match=r"normalizer is 1e.*1e-30 to 1e\+30"):
            ours.step(batches(1), loss_fn=loss_fn, normalizer=normalizer)
    assert_unchanged(ours, before)


def test_an_exception_within_a_step_leaves_the_engine_as_it_was() -> None:
    ours, twin = engine(build()), engine(build())

    def broken(*_: Any) -> torch.Tensor:
        raise ArithmeticError("the caller's own")

    before = weights(ours)
    with pytest.raises(ArithmeticError):
        ours.step(batches(2), loss_fn=broken)
    assert_unchanged(ours, before)
    assert ours.step(batches(2)) == twin.step(batches(2))


def test_a_failing_device_breaks_the_engine_for_good() -> None:
    device = _core.Device.cpu(faults='{"fail": [{"call": "copy_to_host", "nth": 9}]}')
    ours = engine(build(), device=device, micro_batch=(2, 32), micro_batches=1)
    with pytest.raises(megatrain.MegatrainError, match=r"layers\.\d: device call copy_to_host failed"):
        ours.step(batches(1))
    with pytest.raises(EngineBroken):
        ours.step(batches(1))


def test_a_closed_engine_says_so() -> None:
    ours = engine(build())
    ours.step(batches(1))
    ours.close()
    with pytest.raises(EngineBroken, match="closed"):
        ours.step(batches(1))


def test_an_engine_cut_off_while_it_was_set_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = megatrain.Engine(build(), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.engine.runtime.step_templates", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ours.step(batches(1))
    with pytest.raises(EngineBroken, match="load the model again"):
        ours.step(batches(1))


def test_a_failing_pass_drops_the_gradients_that_waited_and_the_engine_goes_on() -> None:
    one, other = batches(2)
    ours, wanted = (engine(build(), plan={"accumulate": True}) for _ in range(2))
    ours.forward_backward([one], normalizer=30.0)
    with pytest.raises(ZeroDivisionError):
        ours.forward_backward([other], loss_fn=lambda *_: torch.zeros(1 // 0), normalizer=30.0)
    with pytest.raises(ConfigError, match="without forward_backward"):
        ours.optimizer_step()
    ours.step([one])
    wanted.step([one])
    assert_unchanged(ours, weights(wanted))


def calls(ours: megatrain.Engine, folder: Path) -> dict[str, Any]:
    """Every public method and property of an engine, with arguments it takes while it can be used."""
    data, name = batches(1), next(iter(ours.decoder.tensors))
    found = {
        "prepare": lambda: ours.prepare(data),
        "step": lambda: ours.step(data),
        "forward_backward": lambda: ours.forward_backward(data),
        "optimizer_step": ours.optimizer_step,
        "num_steps": lambda: ours.num_steps,
        "grad_norm": ours.grad_norm,
        "set_lr": lambda: ours.set_lr(1e-3),
        "set_optimizer": lambda: ours.set_optimizer(ours.optimizer),
        "zero_grad": ours.zero_grad,
        "set_max_grad_norm": lambda: ours.set_max_grad_norm(1.0),
        "evaluate": lambda: ours.evaluate(data),
        "evaluate_metrics": lambda: ours.evaluate_metrics(data),
        "logprobs": lambda: ours.logprobs(data),
        "logits": lambda: ours.logits(data[0]["input_ids"][:1]),
        "all_logits": lambda: ours.all_logits(data[0]),
        "state_dict": ours.state_dict,
        "weight": lambda: ours.weight(name),
        "optimizer_state": lambda: ours.optimizer_state(name),
        "gradient": lambda: ours.gradient(name),
        "save": lambda: ours.save(folder / "saved"),
        "begin_save": lambda: ours.begin_save(folder / "saved"),
        "load": lambda: ours.load(folder / "saved"),
        "save_pretrained": lambda: ours.save_pretrained(folder / "exported"),
        "numerics": ours.numerics,
        "stats": ours.stats,
        "drain": ours.drain,
        "change_plan": lambda: ours.change_plan({}, {}),
        "core": lambda: ours.core,
        "plan": lambda: ours.plan,
        "request": lambda: ours.request((1, 8), 1),
        "__enter__": ours.__enter__,
    }
    # These say what the engine was made with, and go on saying it; `close` may be called again.
    facts = {"close", "device", "decoder", "grad_precision", "from_pretrained", "lanes"}
    public = {n for n in vars(megatrain.Engine) if not n.startswith("_")}
    assert set(found) == (public - facts) | {"__enter__"}
    return found


def broken_in_native_code(ours: megatrain.Engine) -> str:
    """An immediate engine, abandoned after some units were updated."""
    core = ours.core
    core.begin("train", 1, groups=ours._runtime.core_groups(False)[0])
    while (op := core.next()) is not None and op.phase != "embed_backward":
        core.finish(op)
    core.drain()
    with pytest.raises(EngineBroken):
        core.abandon()
    return "cannot be undone"


@pytest.mark.parametrize("end", ["closed", "closed before first use", "broken"])
def test_every_method_says_why_once_an_engine_is_closed_or_broken(end: str, tmp_path: Path) -> None:
    immediate = end == "broken"
    ours = engine(
        build(), update="immediate" if immediate else "just_in_time", max_grad_norm=None if immediate else 1.0
    )
    made = calls(ours, tmp_path)
    if end != "closed before first use":
        ours.step(batches(1))
    if end == "broken":
        cause = broken_in_native_code(ours)
    else:
        ours.close()
        cause = "the engine is closed"
    for call in made.values():
        with pytest.raises(EngineBroken, match=cause):
            call()
    ours.close()
    ours.close()
