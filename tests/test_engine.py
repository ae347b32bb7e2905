"""The engine as a user sees it."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import megatrain
from megatrain import _core
from megatrain.errors import ConfigError, DoesNotFit, EngineBroken
from reference import batches, build, config, engine, error, loss_sum, packed, run_reference, supervised


def weights(ours: megatrain.Engine) -> dict[str, torch.Tensor]:
    return {name: ours.weight(name) for name in ours.decoder.tensors}


def assert_unchanged(ours: megatrain.Engine, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())


def test_a_real_model_is_moved_into_the_store_and_left_without_storage() -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    ours = megatrain.Engine(model, device="cpu", micro_batch=(2, 32), micro_batches=1)
    assert all(p.device.type == "meta" for p in model.parameters())
    state = ours.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_evaluation_and_log_probabilities_equal_stock_transformers_and_change_nothing() -> None:
    model, data = build("qwen2"), batches(5, padded=True)
    ours = engine(model, micro_batch=(2, 32), micro_batches=2)
    before = weights(ours)
    with torch.no_grad():
        wanted = sum(float(loss_sum(model, b)) for b in data) / sum(supervised(b) for b in data)
    assert ours.evaluate(data) == pytest.approx(wanted, rel=1e-5)
    found = ours.logprobs(data)
    assert [tuple(f.shape) for f in found] == [(2, 31)] * 5
    total = -sum(float(f.double().sum()) for f in found) / sum(supervised(b) for b in data)
    assert total == pytest.approx(wanted, rel=1e-5)
    assert_unchanged(ours, before)


def test_logits_of_the_next_token_equal_stock_transformers() -> None:
    changes = {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
    model = build("gemma2", attn_implementation="eager", **changes)
    ids = batches(1)[0]["input_ids"][:1, :7]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[:, -1]
    assert torch.allclose(engine(model).logits(ids), wanted, atol=1e-5)


def test_a_loss_function_of_the_callers_gives_what_the_built_in_one_gives() -> None:
    def cross_entropy(hidden: torch.Tensor, head: Any, batch: dict[str, Any]) -> torch.Tensor:
        logits = head(hidden)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")

    for tied in (False, True):
        model, data = build("llama", tie_word_embeddings=tied), batches(3)
        plain, own = engine(model), engine(model)
        first, second = plain.step(data), own.step(data, loss_fn=cross_entropy)
        assert second.loss == pytest.approx(first.loss, rel=1e-6)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert all(error(own.weight(n), v) < 1e-5 for n, v in weights(plain).items())


def test_label_smoothing_and_z_loss_equal_torch() -> None:
    model, (batch,) = build(), batches(1)
    ours = engine(model, label_smoothing=0.1, z_loss=1e-2)
    ours.forward_backward([batch])
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, label_smoothing=0.1) + 1e-2 * logits.logsumexp(-1).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert error(ours.gradient(name), parameter.grad) < 1e-5
    ours.optimizer_step()


def test_the_two_halves_of_a_step_make_the_step_and_gradients_add_up_between_them() -> None:
    model, data = build(), batches(4)
    whole, halves = engine(model), engine(model)
    tokens = sum(supervised(b) for b in data)
    out = whole.step(data)
    loss = halves.forward_backward(data[:2], normalizer=tokens)
    loss += halves.forward_backward(data[2:], normalizer=tokens)
    with pytest.raises(ConfigError, match="without optimizer_step"):
        halves.step(data)
    second = halves.optimizer_step()
    assert second.loss == pytest.approx(loss, rel=1e-12)
    assert second.num_tokens == out.num_tokens == tokens
    assert out.loss == pytest.approx(loss, rel=1e-6)
    assert out.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    assert all(error(halves.weight(n), v) < 1e-5 for n, v in weights(whole).items())


def test_immediate_updates_cannot_be_clipped_added_up_or_read_as_gradients() -> None:
    with pytest.raises(ConfigError, match=r"update.*max_grad_norm"):
        engine(build(), update="immediate", max_grad_norm=1.0)
    ours = engine(build(), update="immediate", max_grad_norm=None)
    ours.forward_backward(batches(1))
    with pytest.raises(ConfigError, match="cannot be added up"):
        ours.forward_backward(batches(1))
    ours.optimizer_step()
    with pytest.raises(ConfigError, match="keeps no gradients"):
        ours.gradient("model.norm.weight")


def test_a_micro_batch_without_supervised_tokens_adds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, data = build(), batches(2)
    empty = {"input_ids": data[0]["input_ids"], "labels": torch.full_like(data[0]["labels"], -100)}
    with_it, without = engine(model), engine(model)
    with caplog.at_level(logging.WARNING):
        first = with_it.step([data[0], empty, data[1]])
    assert "[1] have no supervised token" in caplog.text
    second = without.step(data)
    assert (first.loss, first.grad_norm, first.num_tokens) == (second.loss, second.grad_norm, second.num_tokens)
    assert_unchanged(with_it, weights(without))


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


def test_the_learning_rate_of_groups_keeps_its_ratio() -> None:
    optimizer = megatrain.AdamW(lr=1e-3, weight_decay=0.1, groups=[{"params": "*norm*", "lr": 2e-3}])
    assert [g[0] for g in optimizer.core_groups()] == [1e-3, 2e-3]
    optimizer.set_lr(5e-4)
    assert [g[0] for g in optimizer.core_groups()] == [5e-4, 1e-3]
    with pytest.raises(ConfigError, match="not negative"):
        optimizer.set_lr(-1.0)


def test_optimizer_settings_out_of_range_are_refused() -> None:
    for bad in ({"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"betas": (0.9,)}):
        with pytest.raises(ConfigError, match=r"optimizer"):
            megatrain.AdamW(**bad)
    for group, reason in (
        ({"params": ["*nothing*"]}, "matches no trained parameter"),
        ({"params": [], "lr": 1.0}, "params must be a pattern"),
        ({"params": "*", "momentum": 1.0}, "unknown key 'momentum'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(build(), optimizer=megatrain.AdamW(groups=[group]))
    twice = megatrain.AdamW(groups=[{"params": "*norm*"}, {"params": "model.norm.*"}])
    with pytest.raises(ConfigError, match="in group 0 and in group 1"):
        engine(build(), optimizer=twice)


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.full((1, 8), 256)}, "micro-batch 0: token id 256, but the model's embedding has 256"),
    ({"input_ids": torch.full((1, 8), -1)}, "token id -1"),
    ({"input_ids": torch.zeros(1, 65, dtype=torch.int64)}, "sequence of 65 tokens, but the model has positions for 64"),
    ({"labels": torch.full((1, 8), 300)}, "label 300, but the model's head has 256"),
    ({"labels": torch.zeros(1, 7, dtype=torch.int64)}, "labels has shape \\[1, 7\\], but input_ids \\[1, 8\\]"),
    ({"input_ids": torch.zeros(8, dtype=torch.int64)}, "must be integers of shape"),
    ({"input_ids": torch.zeros(1, 8)}, "must be integers"),
    ({"attention_mask": torch.full((1, 8), 2)}, "attention_mask must hold 0 and 1"),
    ({"attention_mask": torch.zeros(1, 8, dtype=torch.int64)}, "hides a whole row"),
    ({"position_ids": torch.full((1, 8), 64)}, "position 64, but the model has positions for 64"),
    (
        {
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]),
        },
        "position_ids restart while attention_mask hides padding",
    ),
]


@pytest.mark.parametrize(("change", "reason"), BAD_BATCHES, ids=range(len(BAD_BATCHES)))
def test_micro_batches_that_the_model_cannot_take_are_refused(change: dict[str, Any], reason: str) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    ours = engine(build())
    with pytest.raises(ConfigError, match=reason):
        ours.step([{"input_ids": ids, "labels": ids, **change}])
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        ours.step([])
    with pytest.raises(ConfigError, match="has no labels"):
        ours.step([{"input_ids": ids}])


def test_an_all_ones_mask_and_counting_positions_change_no_bit() -> None:
    model, (batch,) = build(), batches(1)
    plain, said = engine(model), engine(model)
    explicit = {
        **batch,
        "attention_mask": torch.ones_like(batch["input_ids"]),
        "position_ids": torch.arange(32).expand(2, 32),
    }
    assert plain.step([batch]) == said.step([explicit])


def test_documents_packed_into_one_row_do_not_see_each_other() -> None:
    model, row = build("mistral"), packed([[9, 14, 5]])
    ours = engine(model)
    alone = {"input_ids": row["input_ids"][:, 9:23], "labels": row["labels"][:, 9:23]}
    (together,), (apart,) = ours.logprobs([row]), ours.logprobs([alone])
    assert torch.allclose(together[:, 9:22], apart, atol=1e-5)
    changed = {**row, "input_ids": row["input_ids"].clone()}
    changed["input_ids"][:, :9] = 3
    assert torch.equal(ours.logprobs([changed])[0][:, 9:], together[:, 9:])


def test_more_micro_batches_than_planned_are_refused_with_what_to_do() -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=2)
    with pytest.raises(ConfigError, match="create it with micro_batches=3"):
        ours.step(batches(3))
    ours.step(batches(1))  # fewer are fine: an epoch's last step
    ours.step(batches(2, seq=17))  # and so are other shapes


def test_an_engine_without_sizes_plans_again_for_larger_steps_and_keeps_its_state() -> None:
    model, data = build(), [batches(1, seed=0, seq=9), batches(3, seed=1), batches(2, seed=2)]
    growing, sized = engine(model), engine(model, micro_batch=(2, 32), micro_batches=3)
    assert [growing.step(step) for step in data] == [sized.step(step) for step in data]
    assert_unchanged(growing, weights(sized))
    assert growing.optimizer_state("model.norm.weight")["step"] == 3


def test_a_larger_step_that_does_not_fit_is_refused_and_loses_nothing() -> None:
    ours = engine(build(), memory={"gpu": 6 << 20, "host": 1 << 30})
    ours.step(batches(1))
    before = weights(ours)
    with pytest.raises(DoesNotFit):
        ours.step(batches(1, rows=64, seq=64))
    assert_unchanged(ours, before)
    ours.step(batches(1))


def test_adding_up_gradients_needs_a_planned_store() -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=1)
    ours.forward_backward(batches(1))
    with pytest.raises(ConfigError, match="'accumulate': True"):
        ours.forward_backward(batches(1))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, None, r"without normalizer, so its gradients were divided by its own \d+ tokens, and again without one"),
        (None, 7, "without normalizer, .*again with 7"),
        (100, None, "with normalizer 100, and again without one"),
        (100, 7, "with normalizer 100, and again with 7"),
    ],
)
def test_gradients_of_other_normalizers_are_not_added_up(first: Any, second: Any, words: str) -> None:
    ours, twin, data = engine(build()), engine(build()), batches(2)
    for one in (ours, twin):
        one.forward_backward(data[:1], normalizer=first)
    with pytest.raises(ConfigError, match=words):
        ours.forward_backward(data[1:], normalizer=second)
    if first is not None:  # what waited has waited on
        assert ours.forward_backward(data[1:], normalizer=first) == twin.forward_backward(data[1:], normalizer=first)
    assert ours.optimizer_step() == twin.optimizer_step()
    assert_unchanged(ours, weights(twin))
    assert ours.step(data) == twin.step(data)


def test_micro_batches_of_different_shapes_in_one_step_equal_plain_pytorch() -> None:
    model = build("gpt2")
    data = [batches(1, rows=1, seq=12)[0], batches(1, rows=3, seq=32)[0], batches(1, rows=2, seq=20)[0]]
    exact = run_reference(model, [data], dtype=torch.float64)
    out = engine(model, plan={"activation": "recompute"}).step(data)
    assert out.loss == pytest.approx(exact.losses[0], rel=1e-6)
    assert out.grad_norm == pytest.approx(exact.norms[0], rel=1e-5)


def test_a_budget_that_is_too_small_is_refused_with_its_sum() -> None:
    with pytest.raises(DoesNotFit) as refused:
        engine(build(), memory={"gpu": "1GiB", "host": 1 << 18}, micro_batch=(2, 32), micro_batches=1)
    assert refused.value.items
    assert {"what", "bytes"} <= set(refused.value.items[0])


def test_settings_that_mean_nothing_are_refused() -> None:
    model = build()
    for options, reason in (
        ({"plan": {"slot": 2}}, "unknown key 'slot'"),
        ({"memory": {"vram": 2}}, "unknown key 'vram'"),
        ({"memory": {"nvme": {"path": "x"}}}, "nvme is not supported"),
        ({"memory": {"gpu": "many"}}, "memory.gpu"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"update": "sometime"}, "update must be"),
        ({"device": "tpu"}, "device must be"),
        ({"precision": "fp8"}, "precision must be"),
        ({"plan": {"compile": True}}, "compile is for CUDA"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(model, micro_batch=(2, 32), micro_batches=1, **options)


def test_several_processes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        engine(build())


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


def test_a_checkpoint_restores_the_state_bit_for_bit(tmp_path: Path) -> None:
    model = build(tie_word_embeddings=True)
    straight, first, second = (engine(model, micro_batch=(2, 32), micro_batches=3) for _ in range(3))
    data = [batches(3, seed=s) for s in range(4)]
    outs = [straight.step(step) for step in data]
    assert [first.step(step) for step in data[:2]] == outs[:2]
    first.save(tmp_path / "saved", {"position": 7})
    assert second.load(tmp_path / "saved") == {"position": 7}
    assert [second.step(step) for step in data[2:]] == outs[2:]
    assert_unchanged(second, weights(straight))


def test_a_saved_model_loads_in_stock_transformers_with_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for tied in (False, True):
        ours = engine(build(tie_word_embeddings=tied))
        for seed in range(2):
            ours.step(batches(2, seed=seed))
        folder = tmp_path / f"tied-{tied}"
        ours.save_pretrained(folder)
        stock, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (stock.lm_head.weight.data_ptr() == stock.model.embed_tokens.weight.data_ptr()) == tied
        ids = batches(1)[0]["input_ids"][:1]
        with torch.no_grad():
            assert torch.allclose(stock(ids).logits[:, -1], ours.logits(ids), atol=1e-5)
        again = megatrain.Engine.from_pretrained(str(folder), device="cpu", precision="fp32")
        assert_unchanged(again, weights(ours))


def test_a_closed_engine_says_so() -> None:
    ours = engine(build())
    ours.step(batches(1))
    ours.close()
    with pytest.raises(EngineBroken, match="closed"):
        ours.step(batches(1))


def test_the_package_imports_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, megatrain; assert 'torch' not in sys.modules; print(len(dir(megatrain)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_the_package_are_those_it_lists() -> None:
    assert set(megatrain.__all__) <= set(dir(megatrain))
    assert megatrain.Decoder.from_config(config()).num_layers == 4
    with pytest.raises(AttributeError, match="no attribute 'Adam'"):
        _ = megatrain.Adam


@pytest.mark.parametrize(
    ("mask", "dropped"),
    [([1, 1, 1, 1, 1, 0, 0, 0], True), ([0, 0, 1, 1, 1, 1, 1, 1], False), ([1, 1, 0, 1, 1, 1, 1, 1], False)],
    ids=["behind", "before", "between"],
)
def test_padding_behind_a_row_needs_no_dense_mask_in_a_causal_model(mask: list[int], dropped: bool) -> None:
    ours = engine(build())
    hidden = torch.tensor([mask, [1] * 8])
    ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(hidden == 0, -100)
    micro = ours.prepare([{"input_ids": ids, "labels": labels, "attention_mask": hidden}]).micro_batches[0]
    assert (micro.attention_mask is None) == dropped
    loud = ours.prepare([{"input_ids": ids, "labels": ids, "attention_mask": hidden}]).micro_batches[0]
    assert loud.attention_mask is not None, "padding that is supervised sees what the mask lets it see"


def test_a_model_whose_weights_were_taken_is_refused_and_never_drawn_at_random() -> None:
    model = build()
    megatrain.Engine(model, device="cpu", micro_batch=(2, 32), micro_batches=1).close()
    with pytest.raises(ConfigError, match="moved into an earlier engine"):
        megatrain.Engine(model, device="cpu")


def test_an_engine_cut_off_while_it_was_set_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = megatrain.Engine(build(), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(ours._runtime, "_build", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ours.step(batches(1))
    with pytest.raises(EngineBroken, match="load the model again"):
        ours.step(batches(1))


def test_a_model_with_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = build()
    model.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        megatrain.Engine(model, device="cpu").step(batches(1))


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


def test_autocast_around_a_step_changes_no_bit() -> None:
    ours, wanted = (engine(build()) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = ours.step(batches(2))
    assert found == wanted.step(batches(2))
    assert_unchanged(ours, weights(wanted))


def test_inference_mode_around_a_call_changes_no_bit() -> None:
    data = batches(2)
    ours, wanted = (megatrain.Engine(build(), device="cpu") for _ in range(2))
    with torch.inference_mode():
        assert ours.evaluate([{**data[0], "input_ids": data[0]["input_ids"] + 0}]) == wanted.evaluate(data[:1])
        assert ours.step(data) == wanted.step(data)
    assert ours.step(data) == wanted.step(data)
    assert_unchanged(ours, weights(wanted))


def test_a_save_never_takes_the_place_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    ours = engine(build())
    ours.step(batches(1))
    file, folder = tmp_path / "notes.txt", tmp_path / "project"
    file.write_text("mine")
    folder.mkdir()
    (folder / "main.py").write_text("mine")
    for place in (file, folder):
        with pytest.raises(ConfigError, match="is no checkpoint"):
            ours.save(place)
    assert file.read_text() == (folder / "main.py").read_text() == "mine"
    for _ in range(2):  # an earlier checkpoint gives way
        ours.save(tmp_path / "saved")


def test_calls_out_of_order_and_shapeless_micro_batches_are_refused() -> None:
    ours = engine(build())
    with pytest.raises(ConfigError, match="without forward_backward"):
        ours.optimizer_step()
    with pytest.raises(ConfigError, match="at least one batch"):
        ours.evaluate([])
    assert ours.logprobs([]) == []
    given: list[Any] = [batches(1)[0], ["text"], [{"input_ids": [[1, 2], [3]]}], [{"input_ids": "text"}]]
    for wrong in given:
        with pytest.raises(ConfigError):
            ours.step(wrong)
    with pytest.raises(ConfigError, match="dtype must be"):
        ours.save_pretrained("nowhere", dtype="int8")


@pytest.mark.parametrize(
    "settings",
    [
        {"grad_precision": "fp8"},
        {"label_smoothing": 2},
        {"z_loss": math.nan},
        {"micro_batch": 4},
        {"micro_batch": (0, 16)},
        {"micro_batches": 0},
        {"plan": {"loss_chunk": -1}},
        {"plan": {"slots": 0}},
        {"plan": {"slots": "three"}},
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
    ],
)
def test_arguments_out_of_range_are_refused_as_wrong_requests(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        megatrain.Engine(build(), device="cpu", **settings).step(batches(1))


def test_settings_that_are_no_numbers_are_refused_with_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, data = engine(build()), batches(1)
    for call in (
        lambda: ours.set_lr("1e-3"),  # type: ignore[arg-type]
        lambda: ours.forward_backward(data, normalizer="x"),  # type: ignore[arg-type]
        lambda: megatrain.Engine(build(), device="cpu", max_grad_norm="1"),  # type: ignore[arg-type]
        lambda: megatrain.Trainer(5),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"'1e-3'|'x'|'1'|5"):
            call()
    assert ours.forward_backward(data, normalizer=torch.tensor(4.0)) > 0  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is two"):
        engine(build())


# ------------------------------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda _: None, "returned None"),
        (lambda loss: loss.item(), r"returned float \d"),
        (lambda loss: loss.expand(3), r"a tensor of shape \(3,\)"),
        (lambda loss: loss.detach(), "without a gradient"),
        (lambda loss: loss.long(), r"a tensor of torch\.int64"),
    ],
    ids=["None", "float", "not-0-d", "detached", "integer"],
)
@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_what_a_loss_function_returned_is_refused_by_name(returned: Any, words: str, update: str) -> None:
    ours, wanted = (
        engine(build(), update=update, max_grad_norm=None if update == "immediate" else 1.0) for _ in range(2)
    )
    data = batches(1)
    with pytest.raises(ConfigError, match=f"loss_fn returned .*{words.removeprefix('returned ')}.*must return the sum"):
        ours.step(data, loss_fn=lambda hidden, head, _: returned(head(hidden).float().square().sum()))
    assert ours.step(data) == wanted.step(data)


def test_an_unknown_key_of_a_micro_batch_is_refused_with_the_nearest_one() -> None:
    ours = engine(build())
    ids = batches(1)[0]["input_ids"]
    for call in (lambda b: ours.step([b]), lambda b: ours.evaluate([b]), lambda b: ours.logprobs([b])):
        with pytest.raises(ConfigError, match=r"micro-batch 0 has 'lables'.*did you mean labels\?"):
            call({"input_ids": ids, "labels": ids, "lables": ids})
    with pytest.raises(
        ConfigError, match=r"'advantages'.*known are input_ids, labels, attention_mask, position_ids, padding_mask"
    ):
        ours.step([{"input_ids": ids, "labels": ids, "advantages": ids}])
    seen = []

    def loss_fn(hidden: Any, head: Any, batch: Any) -> Any:
        seen.append(sorted(batch))
        return head(hidden).float().square().sum()

    ours.step([{"input_ids": ids, "labels": ids, "advantages": ids}], loss_fn=loss_fn)
    assert seen == [["advantages", "input_ids", "labels"]]
    ours.step([{"input_ids": ids, "labels": ids, "token_type_ids": None}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": (1, 500)}, r"micro_batch is \(1, 500\).*positions for 64 tokens"),
        ({"micro_batch": (1, 2.5)}, r"micro_batch must be \(rows, seq\)"),
        ({"micro_batch": 4}, r"micro_batch must be \(rows, seq\)"),
        ({"micro_batches": "2"}, "micro_batches must be at least 1, not '2'"),
        ({"label_smoothing": "0.1"}, "label_smoothing must be at least 0 and below 1, not '0.1'"),
        ({"z_loss": None}, "z_loss must be finite"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"memory": "1GiB"}, "memory must be a dict, not str"),
        ({"memory": {"gpuu": "1GiB"}}, "unknown key 'gpuu'; did you mean gpu?"),
        ({"memory": {"gpu": "1 potato"}}, "memory.gpu: '1 potato': unknown unit 'potato'"),
        ({"memory": {"gpu": 0.5}}, "memory.gpu is 0.5; write bytes as a whole number"),
        ({"memory": {"host": True}}, "memory.host is True"),
        ({"plan": ["slots"]}, "plan must be a dict, not list"),
        ({"plan": {"loss_chunk": 1.5}}, "loss_chunk must be at least 1"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_with_its_value(options: dict[str, Any], words: str) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=words):
        megatrain.Engine(model, device="cpu", **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_device_is_named_as_torch_names_it_and_another_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (torch.device("cpu"), "cpu", "cpu:0"):
        assert megatrain.Engine(build(), device=known).device == torch.device("cpu")
    for unknown, words in (
        ("cuda:x", "not 'cuda:x'"),
        ("cuda:", "not 'cuda:'"),
        (torch.device("meta"), r"not device\(type='meta'\)"),
        (0, "not 0"),
        ("cpu:1", "device is 'cpu:1', and the host is one device"),
    ):
        with pytest.raises(ConfigError, match=words):
            megatrain.Engine(build(), device=unknown)  # type: ignore[arg-type]
    model = build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for card in ("cuda", torch.device("cuda", 1)):
        with pytest.raises(ConfigError, match=r"device is cuda and there is no usable card: .*megatrain doctor"):
            megatrain.Engine(model, device=card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device is 'cuda:7', and there is no such card; cards are cuda:0 to cuda:1"):
        megatrain.Engine(model, device="cuda:7")


def test_a_state_dict_says_what_to_save_instead_of_itself(tmp_path: Path) -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=1)
    with pytest.raises(TypeError, match=r"dict\(engine.state_dict\(\)\).*save_pretrained"):
        torch.save(ours.state_dict(), tmp_path / "weights.pt")
    torch.save(dict(ours.state_dict()), tmp_path / "weights.pt")
    back = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(back[name], value) for name, value in weights(ours).items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_does_not_fit_is_left_as_it_was(tied: bool) -> None:
    model, data = build(tie_word_embeddings=tied), batches(1)[0]["input_ids"]
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    with torch.no_grad():
        logits = model(input_ids=data).logits
    refusals: list[tuple[Any, dict[str, Any]]] = [
        (DoesNotFit, {"micro_batch": (2, 32), "micro_batches": 1, "memory": {"host": "64KiB"}}),
        (ConfigError, {"freeze": ["no.such.parameter"]}),
        (ConfigError, {"optimizer": megatrain.AdamW(groups=[{"params": "no.such.parameter", "lr": 1.0}])}),
        (ConfigError, {"plan": {"slotss": 2}}),
    ]
    for error_type, options in refusals:
        with pytest.raises(error_type):
            megatrain.Engine(model, device="cpu", **options)
        assert all(one is parameters[name] for name, one in model.named_parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(input_ids=data).logits, logits)
    ours = megatrain.Engine(model, device="cpu", micro_batch=(2, 32), micro_batches=1)
    assert all(torch.equal(ours.state_dict()[name], before[name]) for name in before)


def calls(ours: megatrain.Engine, folder: Path) -> dict[str, Any]:
    """Every public method and property of an engine, with arguments it takes while it can be used."""
    data, name = batches(1), next(iter(ours.decoder.tensors))
    found = {
        "prepare": lambda: ours.prepare(data),
        "step": lambda: ours.step(data),
        "forward_backward": lambda: ours.forward_backward(data),
        "optimizer_step": ours.optimizer_step,
        "num_steps": lambda: ours.num_steps,
        "set_lr": lambda: ours.set_lr(1e-3),
        "evaluate": lambda: ours.evaluate(data),
        "logprobs": lambda: ours.logprobs(data),
        "logits": lambda: ours.logits(data[0]["input_ids"][:1]),
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
        "core": lambda: ours.core,
        "plan": lambda: ours.plan,
        "request": lambda: ours.request((1, 8), 1),
        "__enter__": ours.__enter__,
    }
    # These say what the engine was made with, and go on saying it; `close` may be called again.
    facts = {"close", "device", "grad_precision", "from_pretrained"}
    public = {n for n in vars(megatrain.Engine) if not n.startswith("_")}
    assert set(found) == (public - facts) | {"__enter__"}
    return found


def broken_in_native_code(ours: megatrain.Engine) -> str:
    """An immediate engine, abandoned after some units were updated."""
    core = ours.core
    core.begin("train", 1, groups=ours.optimizer.core_groups())
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
