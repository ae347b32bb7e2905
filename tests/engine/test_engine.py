"""The engine as a user sees it."""

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import megatrain
from megatrain import _core
from megatrain.engine.runtime import Runtime
from megatrain.errors import ConfigError
from support import families
from support.reference import (
    assert_unchanged,
    batches,
    build,
    config,
    engine,
    error,
    loss_sum,
    one_document_per_row,
    packed,
    run_reference,
    supervised,
    weights,
)


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


def test_the_learning_rate_of_groups_keeps_its_ratio() -> None:
    optimizer = megatrain.AdamW(lr=1e-3, weight_decay=0.1, groups=[{"params": "*norm*", "lr": 2e-3}])
    assert [g[0] for g in optimizer.core_groups()] == [1e-3, 2e-3]
    optimizer.set_lr(5e-4)
    assert [g[0] for g in optimizer.core_groups()] == [5e-4, 1e-3]
    with pytest.raises(ConfigError, match="not negative"):
        optimizer.set_lr(-1.0)


def test_groups_can_be_set_between_steps_and_train_as_if_the_engine_had_been_made_with_them() -> None:
    data = batches(2)
    grouped = megatrain.AdamW(lr=3e-4, weight_decay=0.1, groups=[{"params": "*norm*", "weight_decay": 0.0, "lr": 1e-3}])
    made_with_them = engine(build(), optimizer=grouped, micro_batch=(2, 32), micro_batches=2)
    changed = engine(build(), micro_batch=(2, 32), micro_batches=2)
    changed.set_optimizer(megatrain.AdamW(lr=3e-4, weight_decay=0.1, groups=[grouped_as_dict(grouped)]))
    made_with_them.step(data)
    changed.step(data)
    assert_unchanged(changed, weights(made_with_them))
    # and again with other groups, which are finer than those of the step before
    first = "model.layers.1.mlp.up_proj.weight"
    still = {name: value.clone() for name, value in weights(changed).items()}
    changed.set_optimizer(megatrain.AdamW(lr=0.0, weight_decay=0.0, groups=[{"params": first, "lr": 1e-3}]))
    changed.step(data)
    moved = {name for name, value in weights(changed).items() if not torch.equal(value, still[name])}
    assert moved == {first}
    assert changed.optimizer_state("model.norm.weight")["step"] == 2
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        changed.set_optimizer(megatrain.AdamW(groups=[{"params": "*nothing*"}]))
    with pytest.raises(ConfigError, match=r"must be a megatrain\.AdamW, not dict"):
        changed.set_optimizer({"lr": 1.0})  # type: ignore[arg-type]
    assert changed.optimizer.groups[1].params == (first,)


def test_a_checkpoint_has_the_learning_rate_of_the_settings_in_force(tmp_path: Path) -> None:
    saved, loaded = engine(build()), engine(build())
    saved.set_optimizer(megatrain.AdamW(lr=0.25))
    saved.step(batches(1))
    saved.save(tmp_path / "checkpoint")
    loaded.set_optimizer(megatrain.AdamW(lr=0.5))
    loaded.load(tmp_path / "checkpoint")
    assert loaded.optimizer.lr == 0.25


def grouped_as_dict(optimizer: megatrain.AdamW) -> dict[str, Any]:
    """The settings of an optimizer's first group of its own."""
    group = optimizer.groups[1]
    return {"params": group.params, "lr": group.lr, "weight_decay": group.weight_decay}


@pytest.mark.parametrize("kind", ["llama", "tied", "gemma2", "phi"])
def test_accuracy_and_perplexity_are_those_of_stocks_logits(kind: str) -> None:
    changes = {"tied": {"tie_word_embeddings": True}, "gemma2": {"head_dim": 16, "attn_implementation": "eager"}}.get(
        kind, {}
    )
    model = build("llama" if kind == "tied" else kind, **changes)
    # likely tokens are often the next ones, so that the share is neither 0 nor 1
    data = batches(3, padded=True)
    with torch.no_grad():
        for batch in data:
            likely = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits.argmax(-1)
            take = torch.rand(likely[:, :-1].shape, generator=torch.Generator().manual_seed(1)) < 0.4
            take &= batch["labels"][:, 1:] != -100
            batch["labels"][:, 1:] = torch.where(take, likely[:, :-1], batch["labels"][:, 1:])
        right = tokens = 0
        for batch in data:
            wanted = batch["labels"][:, 1:]
            logits = model(batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
            right += int(((logits.argmax(-1) == wanted) & (wanted != -100)).sum())
            tokens += int((wanted != -100).sum())
    ours = engine(model, plan={"loss_chunk": 24})
    found = ours.evaluate_metrics(data)
    assert 0.3 < right / tokens < 0.6
    assert (found.accuracy, found.num_tokens) == (right / tokens, tokens)
    assert found.loss == ours.evaluate(data)
    assert found.perplexity == pytest.approx(float(torch.tensor(found.loss).exp()), rel=1e-5)
    assert megatrain.EvalOutput(loss=1e9, accuracy=0.0, num_tokens=1).perplexity == float("inf")
    assert math.isnan(megatrain.EvalOutput(loss=math.nan, accuracy=0.0, num_tokens=0).perplexity)


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    """As for argmax: the head of an untrained model is often zero, and would be right about every token otherwise."""
    model, (batch,) = build(), batches(1)
    torch.nn.init.zeros_(model.lm_head.weight)
    labels = batch["labels"][:, 1:]
    labels[0, 0] = 0
    found = engine(model).evaluate_metrics([batch])
    assert found.accuracy == pytest.approx(float((labels == 0).sum()) / found.num_tokens, abs=1e-9)


def test_the_norm_of_gradients_is_known_before_they_are_applied() -> None:
    data = batches(2)
    halves, whole = engine(build()), engine(build(), max_grad_norm=None)
    with pytest.raises(ConfigError, match="grad_norm was called without forward_backward"):
        halves.grad_norm()
    before = {name: value.clone() for name, value in weights(halves).items()}
    halves.forward_backward(data)
    norm = halves.grad_norm()
    assert_unchanged(halves, before)
    assert norm > 0.5
    halves.set_max_grad_norm(None)
    out = halves.optimizer_step()
    assert (out.grad_norm, out.clip) == (norm, 1.0)
    assert whole.step(data).grad_norm == norm
    assert_unchanged(halves, weights(whole))
    with pytest.raises(ConfigError, match="max_grad_norm must be positive"):
        halves.set_max_grad_norm(-1.0)
    immediate = engine(build(), update="immediate", max_grad_norm=None)
    with pytest.raises(ConfigError, match="immediate cannot clip"):
        immediate.set_max_grad_norm(1.0)


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
    (together,), (document_buckets,) = ours.logprobs([row]), ours.logprobs([alone])
    assert torch.allclose(together[:, 9:22], document_buckets, atol=1e-5)
    changed = {**row, "input_ids": row["input_ids"].clone()}
    changed["input_ids"][:, :9] = 3
    assert torch.equal(ours.logprobs([changed])[0][:, 9:], together[:, 9:])


def test_an_engine_without_sizes_plans_again_for_larger_steps_and_keeps_its_state() -> None:
    model, data = build(), [batches(1, seed=0, seq=9), batches(3, seed=1), batches(2, seed=2)]
    growing, sized = engine(model), engine(model, micro_batch=(2, 32), micro_batches=3)
    assert [growing.step(step) for step in data] == [sized.step(step) for step in data]
    assert_unchanged(growing, weights(sized))
    assert growing.optimizer_state("model.norm.weight")["step"] == 3


def test_micro_batches_of_different_shapes_in_one_step_equal_plain_pytorch() -> None:
    model = build("gpt2")
    data = [batches(1, rows=1, seq=12)[0], batches(1, rows=3, seq=32)[0], batches(1, rows=2, seq=20)[0]]
    exact = run_reference(model, [data], dtype=torch.float64)
    out = engine(model, plan={"activation": "recompute"}).step(data)
    assert out.loss == pytest.approx(exact.losses[0], rel=1e-6)
    assert out.grad_norm == pytest.approx(exact.norms[0], rel=1e-5)


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


def test_a_load_takes_over_the_learning_rate_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def grouped(lr: float) -> megatrain.Engine:
        return engine(build(), optimizer=megatrain.AdamW(lr=lr, groups=[{"params": "*norm*", "lr": 1e-4}]))

    first, second, started_at_0 = grouped(2e-5), grouped(2e-5), grouped(0.0)
    first.save(tmp_path / "same")
    first.set_lr(1e-5)
    first.step(batches(1))
    first.save(tmp_path / "saved")
    with caplog.at_level(logging.INFO, logger="megatrain"):
        second.load(tmp_path / "same")
        assert "learning rate" not in caplog.text
        second.load(tmp_path / "saved")
    assert f"learning rate 2e-05 -> 1e-05, which {tmp_path / 'saved'} was saved with, and in proportion" in caplog.text
    assert [group[0] for group in second.optimizer.core_groups()] == pytest.approx([1e-5, 5e-5])
    before = weights(started_at_0)
    with pytest.raises(ConfigError, match=r"saved was saved with learning rate 1e-05.*ratio is not defined.*set_optim"):
        started_at_0.load(tmp_path / "saved")
    assert started_at_0.num_steps == 0
    assert_unchanged(started_at_0, before)
    started_at_0.set_optimizer(second.optimizer)
    started_at_0.load(tmp_path / "saved")
    assert_unchanged(started_at_0, weights(first))


@pytest.mark.parametrize("share", [0.5, 1 / 32, 0.0])
def test_less_memory_to_pin_than_a_run_asks_for_is_one_warning_and_changes_no_bit(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """H11 with its limits (1 GiB, 64 MiB, nothing) as shares of its 2 GiB, at a model whose state takes 29 MiB."""
    model = build(hidden_size=256, intermediate_size=512, vocab_size=512)
    state_bytes = 12 * sum(p.numel() for p in model.parameters())
    assert state_bytes > 24 << 20
    data = [batches(2, seed=seed, rows=1, seq=16) for seed in range(3)]

    def train(limit: int | None) -> dict[str, torch.Tensor]:
        faults = None if limit is None else f'{{"pin_limit_bytes": {limit}}}'
        ours = engine(model, device=_core.Device.cpu(seed=1, faults=faults), micro_batch=(1, 16), micro_batches=2)
        for step in data:
            ours.step(step)
        found = weights(ours)
        for name in ours.decoder.tensors:
            moments = ours.optimizer_state(name)
            found |= {f"{name} {moment}": moments[moment] for moment in ("exp_avg", "exp_avg_sq")}
        ours.close()
        return found

    caplog.clear()
    wanted = train(None)
    assert not [r for r in caplog.records if "pinned" in r.message]
    limit = int(share * state_bytes)
    found = train(limit)
    (warning,) = [r.message for r in caplog.records if "pinned" in r.message]
    numbers = re.search(r"only (\d+) of (\d+) bytes", warning)
    assert numbers is not None, warning
    obtained, asked = map(int, numbers.groups())
    assert obtained <= limit < asked
    assert asked >= state_bytes // 2
    assert (obtained > 0) == (share == 0.5), (
        "memory is pinned in a few large pieces, of which the small limit fits none"
    )
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


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


def test_reading_weights_tells_how_far_it_is_on_a_terminal_and_to_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build().save_pretrained(tmp_path)

    def read(**asked: Any) -> str:
        capsys.readouterr()
        megatrain.Engine.from_pretrained(str(tmp_path), device="cpu", precision="fp32", **asked).drain()
        said = capsys.readouterr()
        assert not said.out
        return said.err

    assert not read(), "no terminal"
    told: list[tuple[str, int, int]] = []
    assert not read(progress=lambda *now: told.append(now))
    total = sum(p.numel() * 4 for p in build().parameters())
    assert [what for what, _, _ in told] == ["reading weights"] * len(told)
    assert [now[2] for now in told] == [total] * len(told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == total
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert not read(progress=None)
    shown = read()
    assert shown.startswith("\rreading weights ")
    assert shown.endswith("reading weights 100 %\x1b[K\r\x1b[K"), "the line is empty again"
    with pytest.raises(ConfigError, match="progress must be auto, None or a function"):
        read(progress=True)


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


@pytest.mark.parametrize("kind", ["llama2", "gpt2", "opt", "falcon", "gemma2"])
def test_packed_rows_may_be_longer_than_the_models_positions(kind: str) -> None:
    """Documents of 40 and 63 tokens in a row of 103, in a model that has positions for 64."""
    model = families.build(kind)
    row = packed([[40, 63]], vocab=96)
    documents = one_document_per_row([row])
    found, alone = engine(model), engine(model)
    ours, wanted = found.step([row]), alone.step(documents)
    assert ours.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.numerics()["packed_rows"]
    with pytest.raises(ConfigError, match="position 64, but the model has positions for 64"):
        found.step([packed([[65, 38]], vocab=96)])
    with pytest.raises(ConfigError, match="sequence of 103 tokens, but the model has positions for 64"):
        found.step([{name: row[name] for name in ("input_ids", "labels")}])


@pytest.mark.parametrize("use", ["evaluate", "logprobs"])
def test_first_use_without_training_plans_for_one_batch_however_many_are_given(use: str) -> None:
    def planned(count: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
        ours = engine(build())
        found = getattr(ours, use)(batches(1, rows=1, seq=16) * (count - 1) + batches(1))
        return ours.plan, ours.numerics(), found

    (one, one_key, _), (many, many_key, _) = planned(1), planned(40)
    assert many["totals"] == one["totals"]
    assert many["micro_batches"] == 1
    assert many_key == one_key
    trained = engine(build())
    trained.step(batches(3))
    assert trained.numerics() == one_key, "the key follows from how the engine was made"


def test_batches_of_many_shapes_are_evaluated_under_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, planned = engine(build()), []
    start = Runtime._start
    monkeypatch.setattr(Runtime, "_start", lambda runtime, *args: planned.append(args[:2]) or start(runtime, *args))
    ours.evaluate([batch for seq in (8, 16, 24, 32) for batch in batches(1, seq=seq)])
    assert planned == [((2, 32), 1)]


def test_a_checkpoint_is_loaded_by_an_engine_without_sizes_and_no_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, again = engine(build(), micro_batch=(2, 32), micro_batches=3), engine(build())
    ours.step(batches(3))
    ours.save(tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        again.load(tmp_path / "saved")
    assert "numerics key has changed" not in caplog.text
