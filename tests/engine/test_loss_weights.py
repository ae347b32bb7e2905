"""Weights of rows and of tokens: the loss is that of plain PyTorch with a factor on every token's cross-entropy,
divided by the sum of the factors."""

import copy
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megatrain
from megatrain.engine.loss import chunked_loss
from megatrain.errors import ConfigError
from megatrain.names import IGNORED
from support.reference import batches, build, engine, error, packed, weights

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.5, "softcap": 5.0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_of_the_chunked_loss_counts_by_its_weight(terms: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=generator, dtype=dtype)
    head = torch.randn(53, 16, generator=generator, dtype=dtype) / 4
    targets = torch.randint(53, (37,), generator=generator)
    targets[::5] = IGNORED
    factors = torch.rand(37, generator=generator) * 3
    ours = torch.zeros_like(head)
    found = chunked_loss(hidden, targets, head, row_weights=factors, scale=1 / 29, chunk=8, grad_weight=ours, **terms)

    wide, weight = hidden.double().requires_grad_(), head.double().requires_grad_()
    logits = wide @ weight.t() * terms.get("logit_scale", 1.0)
    if "softcap" in terms:
        logits = terms["softcap"] * torch.tanh(logits / terms["softcap"])
    losses = F.cross_entropy(
        logits,
        targets,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=terms.get("label_smoothing", 0.0),
    )
    losses = losses + terms.get("z_loss", 0.0) * logits.logsumexp(1).square() * (targets != IGNORED)
    wanted = (losses * factors.double()).sum()
    (wanted / 29).backward()
    bound = 1e-13 if dtype == torch.float64 else 2e-6
    assert found.grad_hidden is not None
    assert wide.grad is not None
    assert weight.grad is not None
    assert error(found.loss_sum, wanted) < bound
    assert error(found.grad_hidden, wide.grad) < bound
    assert error(ours, weight.grad) < bound


def rows_and_tokens(count: int = 3) -> list[dict[str, Tensor]]:
    """Micro-batches of which one has a weight for each row, one for each label and one has none."""
    made = batches(count)
    generator = torch.Generator().manual_seed(7)
    made[0]["loss_weights"] = torch.tensor([0.25, 3.0])
    made[1]["loss_weights"] = torch.rand(made[1]["labels"].shape, generator=generator)
    return made


def stock(model: nn.Module, step: list[dict[str, Tensor]]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and gradients of a step in plain PyTorch."""
    model = copy.deepcopy(model)
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for batch in step:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        logits = model(**inputs, use_cache=False).logits[:, :-1].double()
        labels = batch["labels"][:, 1:]
        factors = batch.get("loss_weights", torch.ones(len(labels)))
        factors = factors[:, 1:] if factors.ndim == 2 else factors[:, None].expand(labels.shape)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        total = total + (losses * factors).sum()
        divisor += float(factors[labels != IGNORED].double().sum())
    (total / divisor).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    return float(total.detach()) / divisor, float(norm), gradients


def own_head(kind: str) -> nn.Module:
    """A tiny model; `mlp head` has a head that is no plain matmul."""
    if kind != "mlp head":
        return build(kind)
    model = build()
    model.lm_head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256))
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mlp head"])
def test_a_weighted_step_is_that_of_plain_pytorch(kind: str) -> None:
    model, step = own_head(kind), rows_and_tokens()
    loss, norm, gradients = stock(model, step)
    with engine(model, max_grad_norm=None) as ours:
        assert ours.decoder.head.plain == (kind != "mlp head")
        out = ours.step(step)
        assert out.loss == pytest.approx(loss, rel=1e-5)
        assert out.grad_norm == pytest.approx(norm, rel=1e-5)
        supervised = [batch["labels"][:, 1:] != IGNORED for batch in step]
        assert out.num_tokens == sum(int(mask.sum()) for mask in supervised)
        sums = (3.25 * 31, float(step[1]["loss_weights"][:, 1:][supervised[1]].sum()), int(supervised[2].sum()))
        assert out.total_weight == pytest.approx(sum(sums), rel=1e-6)
        for name, gradient in gradients.items():
            assert error(ours.gradient(name), gradient) < 3e-5, name


def test_packed_documents_have_weights_of_their_own() -> None:
    model, batch = build(), packed([[10, 22], [20, 12]])
    document = (batch["position_ids"] == 0).cumsum(1) - 1
    batch["loss_weights"] = torch.tensor([[0.5, 2.0], [1.0, 4.0]]).gather(1, document)
    loss, norm, _ = stock(model, [batch])
    with engine(model, max_grad_norm=None) as ours:
        out = ours.step([batch])
        assert out.loss == pytest.approx(loss, rel=1e-5)
        assert out.grad_norm == pytest.approx(norm, rel=1e-5)


def trained(model: nn.Module, step: list[dict[str, Tensor]], **options: Any) -> tuple[megatrain.StepOutput, Any]:
    with engine(model, **options) as ours:
        out = ours.step(step)
        return out, weights(ours)


@pytest.mark.parametrize("factor", [1.0, 4.0], ids=["ones", "fours"])
def test_equal_weights_give_the_bits_of_no_weights(factor: float) -> None:
    model, step = build(), batches()
    plain, without = trained(model, step)
    found, after = trained(model, [{**b, "loss_weights": torch.full((2,), factor)} for b in step])
    assert (found.loss, found.grad_norm) == (plain.loss, plain.grad_norm)
    assert plain.total_weight is None
    assert found.total_weight == factor * found.num_tokens
    assert all(torch.equal(after[name], without[name]) for name in without)


def test_a_weight_of_zero_is_as_a_label_that_is_not_supervised() -> None:
    model, (batch,) = build(), batches(1)
    masked = batch["labels"].clone()
    masked[1] = IGNORED
    plain, without = trained(model, [{**batch, "labels": masked}])
    found, after = trained(model, [{**batch, "loss_weights": torch.tensor([1, 0])}])
    assert (found.loss, found.num_tokens) == (plain.loss, plain.num_tokens)
    assert all(torch.equal(after[name], without[name]) for name in without)


def test_without_a_weight_above_zero_nothing_is_updated() -> None:
    model = build()
    step = [{**batch, "loss_weights": torch.zeros(2)} for batch in batches()]
    with engine(model) as ours:
        before = weights(ours)
        assert ours.step(step).reason == "no micro-batch has a supervised token"
        assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())
        with pytest.raises(ConfigError, match="no batch has a supervised token"):
            ours.evaluate(step)


def test_an_evaluation_is_weighted_and_log_probabilities_are_not() -> None:
    model, given = build(), rows_and_tokens()
    plain = [{key: value for key, value in batch.items() if key != "loss_weights"} for batch in given]
    loss, _, _ = stock(model, given)
    right, total = 0.0, 0.0
    for batch in given:
        labels = batch["labels"][:, 1:]
        factors = batch.get("loss_weights", torch.ones(2))
        factors = factors[:, 1:] if factors.ndim == 2 else factors[:, None].expand(labels.shape)
        largest = model(batch["input_ids"], use_cache=False).logits[:, :-1].argmax(-1)
        right += float(((largest == labels) * factors).sum())
        total += float((factors * (labels != IGNORED)).sum())
    with engine(model) as ours:
        found = ours.evaluate_metrics(given)
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.accuracy == pytest.approx(right / total, rel=1e-5)
        assert found.total_weight == pytest.approx(total, rel=1e-6)
        assert ours.evaluate_metrics(plain).total_weight is None
        for ours_logp, plain_logp in zip(ours.logprobs(given), ours.logprobs(plain), strict=True):
            assert torch.equal(ours_logp, plain_logp)


def test_a_normalizer_takes_the_place_of_the_sum_of_weights() -> None:
    model, step = build(), rows_and_tokens()
    with engine(model, plan={"accumulate": True}) as ours:
        whole = ours.forward_backward(step)
        norm = ours.grad_norm()
        total = ours.optimizer_step().total_weight
    with engine(model, plan={"accumulate": True}) as ours:
        parts = sum(ours.forward_backward([batch], normalizer=total) for batch in step)
        assert parts == pytest.approx(whole, rel=1e-6)
        assert ours.grad_norm() == pytest.approx(norm, rel=1e-5)
    with engine(model, plan={"accumulate": True}) as ours:
        ours.forward_backward(step[:1])
        with pytest.raises(ConfigError, match=r"divided by the sum of its own weights, 100\.75"):
            ours.forward_backward(step[1:2])


def test_a_loss_fn_is_given_the_weights_and_divided_as_without() -> None:
    model, (batch,) = build(), batches(1)
    batch["loss_weights"] = torch.tensor([2.0, 2.0])
    seen = []

    def loss_fn(hidden: Tensor, head: Any, given: dict[str, Any]) -> Tensor:
        seen.append(given["loss_weights"])
        return -head.logprobs(hidden, given["labels"]).sum()

    with engine(model) as ours:
        plain = ours.forward_backward([{k: batch[k] for k in ("input_ids", "labels")}])
        ours.zero_grad()
        assert ours.forward_backward([batch], loss_fn=loss_fn) == pytest.approx(plain, rel=1e-6)
    assert torch.equal(seen[0], batch["loss_weights"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([1.0, -0.5]), r"hold -0.5 at row 1, token 0"),
        (torch.tensor([1.0, float("nan")]), r"hold nan at row 1, token 0"),
        (torch.tensor([float("inf"), 1.0]), r"hold inf at row 0"),
        (torch.tensor([1.0, 1e-60], dtype=torch.float64), r"hold 1e-60 at row 1.*fp32 can hold"),
        (torch.tensor([1.0, 1e60], dtype=torch.float64), r"hold 1e\+60 at row 1.*fp32 can hold"),
        (torch.ones(3), r"shape \[2\] .one for each row. or \[2, 32\] .one for each label., not torch.float32 \[3\]"),
        (torch.ones(2, 31), r"not torch.float32 \[2, 31\]"),
        (torch.tensor([True, False]), r"not torch.bool \[2\]"),
        ("heavy", r"loss_weights must be numbers"),
    ],
)
def test_weights_that_are_none_are_refused_by_micro_batch_and_place(given: Any, message: str) -> None:
    first, second = batches(2)
    with engine(build()) as ours, pytest.raises(ConfigError, match=f"micro-batch 1: .*{message}"):
        ours.step([first, {**second, "loss_weights": given}])


@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
@pytest.mark.parametrize("weight", [1e38, 1e-40])
def test_weights_whose_sum_fp32_cannot_divide_by_are_refused(update: str, weight: float) -> None:
    step = [{**batch, "loss_weights": torch.full((2, 32), weight)} for batch in batches(2)]
    with engine(build(), update=update, max_grad_norm=None) as ours:
        before = weights(ours)
        for call in (ours.step, ours.forward_backward, ours.prepare, ours.evaluate):
            with pytest.raises(ConfigError, match=r"loss_weights .* have the sum .*1e-30 to 1e\+30"):
                call(step)
        assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())
        assert ours.step([{**batch, "loss_weights": torch.full((2,), 1e20)} for batch in batches(2)]).loss < 10


INTERPRETED = """
import torch
from megatrain.engine import loss, loss_triton

loss_triton._BLOCK = 64
generator = torch.Generator().manual_seed(0)
for terms in (loss._Terms(0.1, 0.0, 0.0, 1.0, None), loss._Terms(0.1, 0.1, 1e-2, 0.5, 6.0)):
    logits = torch.randn(20, 203, generator=generator) * 3
    targets = torch.randint(203, (20,), generator=generator)
    targets[::4] = -100
    bias, factors = torch.randn(203, generator=generator), torch.rand(20, generator=generator) * 3
    for weights in (None, factors):
        kernel = loss_triton.cross_entropy(logits.clone(), targets, bias, weights, terms, -100, torch.float32)
        twin = loss._cross_entropy(logits.clone(), targets, bias, weights, terms, True)
        for ours, theirs in zip(kernel, twin):
            assert (ours.double() - theirs.double()).norm() < 1e-6 * theirs.double().norm()
print("agrees")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernel_run_by_tritons_interpreter_agrees_with_its_twin() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == "agrees\n", found.stderr
