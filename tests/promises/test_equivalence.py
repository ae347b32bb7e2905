"""Our steps against stock transformers, torch.optim.AdamW and clip_grad_norm_, judged by an fp64 run of the same."""

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import megatrain
from support.reference import (
    FAMILIES,
    ORIGINAL,
    batches,
    build,
    check_training,
    engine,
    error,
    loss_sum,
    packed,
    run_reference,
    scaled,
    supervised,
)


def steps(number: int = 3, **options: Any) -> list[list[dict[str, torch.Tensor]]]:
    return [batches(seed=seed, **options) for seed in range(number)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_three_clipped_steps_equal_plain_pytorch(kind: str) -> None:
    check_training(build(kind), steps())


@pytest.mark.parametrize("kind", FAMILIES)
def test_right_padding_and_recomputation_equal_plain_pytorch(kind: str) -> None:
    check_training(build(kind), steps(2, padded=True), plan={"activation": "recompute"})


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_packed_rows_equal_plain_pytorch(kind: str) -> None:
    rows = [[packed([[9, 14, 9], [20, 12, 0]], seed=s), packed([[5, 5, 22]], seed=s + 9)] for s in range(2)]
    check_training(build(kind), rows)


@pytest.mark.parametrize("rope", ROPE_INIT_FUNCTIONS)
def test_every_rope_scaling_of_the_library_trains_beyond_its_length_as_in_stock(rope: str) -> None:
    check_training(scaled(rope), steps(2, count=2, seq=4 * ORIGINAL))


@pytest.mark.parametrize("rope", ROPE_INIT_FUNCTIONS)
def test_logits_of_every_rope_scaling_are_those_of_stock_at_every_position(rope: str) -> None:
    model = scaled(rope).eval()
    plain = build("llama", max_position_embeddings=4 * ORIGINAL).eval()
    ours = engine(model)
    for seq in (4 * ORIGINAL, ORIGINAL // 2, 3 * ORIGINAL):  # what a scaling keeps of longer rows is kept alike
        (batch,) = batches(1, seed=seq, seq=seq)
        with torch.no_grad():
            logits, unscaled = (m(batch["input_ids"], use_cache=False).logits for m in (model, plain))
        assert error(ours.logits(batch["input_ids"]), logits[:, -1]) < 1e-5
        wanted = logits.log_softmax(-1)[:, :-1].gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        assert error(ours.logprobs([batch])[0], wanted) < 1e-5
        assert seq <= ORIGINAL or error(unscaled, logits) > 1e-3, "the scaling shows"


def test_a_scaling_that_follows_the_length_looks_at_each_micro_batch_alone() -> None:
    # stock keeps what a longer row before asked for, so that from short to long it has nothing to keep
    data = [[batches(1, seed=7 * n + seed, seq=n)[0] for n in (16, 48, 96, 128)] for seed in range(2)]
    ours, _ = check_training(scaled("dynamic"), data)
    upwards, downwards = ours.logprobs(data[0]), ours.logprobs(data[0][::-1])
    assert all(torch.equal(a, b) for a, b in zip(upwards, downwards[::-1], strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_implementations_equal_plain_pytorch_under_padding(attention: str) -> None:
    check_training(build("llama", attn_implementation=attention), steps(2, padded=True))


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parameters_stay_and_the_rest_equals_plain_pytorch(tied: bool) -> None:
    model = build("llama", tie_word_embeddings=tied)
    ours, _ = check_training(
        model,
        steps(2),
        reference={"frozen": ("embed_tokens", "layers.1.")},
        freeze=["*embed_tokens*", "*.layers.1.*"],
    )
    before = model.state_dict()
    assert torch.equal(ours.weight("model.layers.1.mlp.up_proj.weight"), before["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(ours.weight("model.embed_tokens.weight"), before["model.embed_tokens.weight"])


def test_a_group_without_decay_equals_torch_parameter_groups() -> None:
    optimizer = megatrain.AdamW(lr=3e-4, weight_decay=0.5, groups=[{"params": ["*norm*"], "weight_decay": 0.0}])
    reference = {"weight_decay": 0.5, "no_decay": ("norm",)}
    check_training(build("llama"), steps(2), reference=reference, optimizer=optimizer)


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_unclipped_steps_equal_plain_pytorch_in_both_update_modes(update: str) -> None:
    reference = {"max_grad_norm": None}
    check_training(build("qwen2"), steps(), reference=reference, update=update, max_grad_norm=None)


def test_clipping_far_below_one_is_honoured_and_the_norm_is_that_before_it() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
    ours = engine(model, max_grad_norm=1.0)
    exact = run_reference(model, steps(1), dtype=torch.float64, max_grad_norm=1.0)
    out = ours.step(steps(1)[0])
    assert out.grad_norm > 20
    assert out.clip == pytest.approx(1.0 / (out.grad_norm + 1e-6), rel=1e-6)
    assert out.grad_norm == pytest.approx(exact.norms[0], rel=1e-5)
    check_training(model, steps(2), reference={"max_grad_norm": 1.0}, max_grad_norm=1.0)


def test_splits_of_rows_with_unequal_supervised_tokens_give_one_loss_norm_and_weights() -> None:
    counts = (1, 31, 5, 17, 2, 29, 11, 3)
    model = build("llama")

    def rows(seed: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(seed))
        labels = torch.full_like(ids, -100)
        for row, count in enumerate(counts):
            labels[row, 32 - count :] = ids[row, 32 - count :]
        return {"input_ids": ids, "labels": labels}

    data = [rows(seed) for seed in range(3)]
    for size in (8, 1, 4):
        split = [[{k: v[i : i + size] for k, v in b.items()} for i in range(0, 8, size)] for b in data]
        ours, _ = check_training(model, split)
        ours.close()
    assert supervised(data[0]) == sum(counts)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_weight_has_one_gradient_one_pair_of_moments_and_one_update(tied: bool) -> None:
    for count in (1, 3):
        ours, exact = check_training(build("llama", tie_word_embeddings=tied), steps(5, count=count))
        assert ("lm_head.weight" in ours.decoder.aliases) == tied
        assert torch.equal(ours.weight("lm_head.weight"), ours.weight("model.embed_tokens.weight")) == tied
        assert len(exact.gradients) == len(ours.decoder.tensors)


def test_gradients_of_micro_batches_are_added_never_replaced() -> None:
    model, (first, second) = build("llama"), batches(2)
    ours = engine(model)
    tokens = supervised(first) + supervised(second)
    ours.forward_backward([first, second])
    sums, last = {}, {}
    for batch in (first, second):
        model.zero_grad()
        (loss_sum(model, batch) / tokens).backward()
        last = {n: p.grad.clone() for n, p in model.named_parameters()}
        sums = {n: sums.get(n, 0) + g for n, g in last.items()}
    for name, wanted in sums.items():
        assert error(ours.gradient(name), wanted) < 1e-5
        assert error(ours.gradient(name), last[name]) > 1e-2
    ours.optimizer_step()


def test_twenty_steps_of_four_micro_batches_follow_the_reference_curve() -> None:
    # unequal micro-batches over and over, at a rate that learns them: a gradient that was replaced would show
    data = [batches(4, seed=seed % 4) for seed in range(20)]
    optimizer = megatrain.AdamW(lr=1e-3, weight_decay=0.1)
    model, reference = build("llama"), {"lr": 1e-3, "weight_decay": 0.1}
    ours, exact = check_training(model, data, reference=reference, optimizer=optimizer)
    assert exact.losses[-1] < 0.9 * exact.losses[0]
    last = run_reference(model, [step[-1:] for step in data], dtype=torch.float32, **reference)
    assert abs(last.losses[-1] - exact.losses[-1]) > 1e-2 * exact.losses[-1]
    assert ours.plan["micro_batches"] == 4


def test_the_gradient_of_a_padding_row_is_zero_as_in_torch() -> None:
    data = [batches(2, seed=s) for s in range(2)]
    for step in data:
        for batch in step:
            batch["input_ids"][:, 3] = 7
    check_training(build("llama", pad_token_id=7), data)


def test_twenty_bf16_steps_follow_fp32_within_two_hundredths() -> None:
    model = build("llama")
    data = [batches(2, seed=s % 4) for s in range(20)]
    exact = run_reference(model, data, dtype=torch.float32, lr=1e-3)
    ours = engine(model, precision="bf16", optimizer=megatrain.AdamW(lr=1e-3, weight_decay=0.1))
    losses = [ours.step(step).loss for step in data]
    assert max(abs(a - b) for a, b in zip(losses, exact.losses, strict=True)) < 2e-2
    assert losses[-1] < losses[0]


def test_updates_far_below_bf16_resolution_are_not_lost() -> None:
    model = build("llama")
    data = [batches(1, seed=0)] * 30
    exact = run_reference(model, data, dtype=torch.float32, lr=1e-6, weight_decay=0.0)
    ours = engine(model, precision="bf16", optimizer=megatrain.AdamW(lr=1e-6, weight_decay=0.0))
    for step in data:
        ours.step(step)
    name = "model.layers.0.input_layernorm.weight"
    before, after = model.state_dict()[name], dict(exact.model.named_parameters())[name].detach()
    assert float((after - before).abs().max()) < 2**-9 / 30  # a single update rounds to nothing in bf16
    assert error(ours.weight(name) - before, after - before) < 0.1
