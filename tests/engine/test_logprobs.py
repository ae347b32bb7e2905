"""`head.logprobs` of a loss function: values and gradients of torch's log_softmax, in chunks, within planned memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.engine import embed_head
from megatrain.engine.logprobs import LossHead, PlainHead, logprobs_bytes
from megatrain.engine.profile import loss_fn_bytes
from megatrain.errors import ConfigError
from support.peak import Peak
from support.reference import batches, build, engine, error, weights


def from_logits(hidden: Tensor, head: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the next tokens by torch alone, 0 where there is no label."""
    logp = head(hidden)[:, :-1].float().log_softmax(-1)
    targets = labels[:, 1:]
    known = targets != -100
    found = logp.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    return found * known, -(logp.exp() * logp).sum(-1) * known


def with_torch(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
    found, entropy = from_logits(hidden, head, batch["labels"])
    return -(found * batch["weights"]).sum() - 0.1 * entropy.sum()


def in_chunks(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
    found, entropy = head.logprobs(hidden, batch["labels"], entropy=True)
    return -(found * batch["weights"]).sum() - 0.1 * entropy.sum()


def weighted(count: int = 3, vocab: int = 256) -> list[dict[str, Tensor]]:
    data = batches(count, vocab=vocab)
    for seed, batch in enumerate(data):
        batch["weights"] = torch.randn(2, 31, generator=torch.Generator().manual_seed(seed))
    return data


CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "attn_implementation": "eager"}
MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", CAPPED),
    ("granite", {"logits_scaling": 4.0}),
    ("gptj", {"rotary_dim": 8, "n_inner": 128}),  # a head with a bias
]


@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize(("kind", "changes"), MODELS, ids=["plain", "tied", "capped", "scaled", "biased"])
def test_a_step_equals_that_of_log_softmax_over_all_logits(
    kind: str, changes: dict[str, Any], chunk: int | None
) -> None:
    model, data = build(kind, **changes), weighted()
    wanted = engine(model)
    ours = engine(model, plan={"loss_chunk": chunk} if chunk else {})
    for _ in range(2):  # the second starts from sums that hold the first one's gradients
        first, second = wanted.step(data, loss_fn=with_torch), ours.step(data, loss_fn=in_chunks)
        assert second.loss == pytest.approx(first.loss, rel=1e-5)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert all(error(ours.weight(n), v) < 1e-5 for n, v in weights(wanted).items())


def test_the_first_micro_batch_may_use_the_logits_and_the_second_the_chunks() -> None:
    def by_turns(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        odd = batch["weights"][0, 0] > 0
        first, second = (in_chunks, with_torch) if odd else (with_torch, in_chunks)
        return 0.25 * first(hidden, head, batch) + 0.75 * second(hidden, head, batch)

    model, data = build(), weighted(4)
    wanted, ours = engine(model), engine(model)
    first, second = wanted.step(data, loss_fn=with_torch), ours.step(data, loss_fn=by_turns)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert all(error(ours.weight(n), v) < 1e-5 for n, v in weights(wanted).items())


def test_the_sum_over_supervised_tokens_is_the_built_in_loss_and_the_engines_own_logprobs() -> None:
    seen = []

    def loss_fn(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append(head.logprobs(hidden, batch["labels"]))
        return -seen[-1].sum()

    model, data = build(), batches(2)
    plain, ours = engine(model), engine(model)
    scored = ours.logprobs(data)
    first, second = plain.step(data), ours.step(data, loss_fn=loss_fn)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert all(torch.equal(a, b.detach()) for a, b in zip(scored, seen, strict=True))


@pytest.mark.parametrize("entropy", [False, True])
def test_bf16_has_the_error_of_rounding_its_inputs_alone(entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 32, generator=generator).bfloat16()
    weight = torch.randn(512, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 512, (2, 40), generator=generator)
    labels[0, 5:20] = -100
    total = torch.zeros(512, 32)
    plain = PlainHead(
        weight=weight,
        bias=None,
        logit_scale=1.0,
        softcap=None,
        chunk=16,
        grad_weight=total,
        grad_bias=None,
        sums=[total],
        starting=True,
        in_backward=True,
    )
    leaf = hidden.clone().requires_grad_()
    found = LossHead(lambda h: F.linear(h, weight), plain, 512, 16).logprobs(leaf, labels, entropy=entropy)  # type: ignore[call-overload]
    wide, wide_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = from_logits_fp64(wide, wide_weight, labels)
    ours, wanted = (found, expected) if entropy else ((found,), expected[:1])
    sum(value.sum() for value in ours).backward()
    sum(value.sum() for value in wanted).backward()
    for value, exact in zip(ours, wanted, strict=True):
        assert value.dtype == torch.float32
        assert error(value, exact) < 1e-6
    assert error(leaf.grad, wide.grad) < 4e-3  # bf16's own rounding
    assert error(total, wide_weight.grad) < 1e-6


def from_logits_fp64(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = F.linear(hidden, weight)[:, :-1].log_softmax(-1)
    known = labels[:, 1:] != -100
    found = logp.gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
    return found * known, -(logp.exp() * logp).sum(-1) * known


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_its_memory_is_what_is_planned_and_far_below_that_of_all_logits(
    tied: bool, precision: str, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", vocab_size=4096, tie_word_embeddings=tied)
    sizes = {"micro_batch": (4, 64), "micro_batches": 1}
    ours = engine(model, precision=precision, plan={"loss_chunk": 16, "loss_workspace": "64KiB"}, **sizes)
    peaks, custom = [], embed_head.HeadTemplate._custom

    def measured(*args: Any) -> Any:
        with Peak() as peak:
            result = custom(*args)
        peaks.append(peak.peak)
        return result

    def loss_fn(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        found = head.logprobs(hidden, batch["labels"], entropy=entropy)
        return -sum(part.sum() for part in found) if entropy else -found.sum()

    monkeypatch.setattr(embed_head.HeadTemplate, "_custom", measured)
    ours.step(batches(1, rows=4, seq=64, vocab=4096), loss_fn=loss_fn)
    planned = logprobs_bytes(256, 4096, 64, 16, ours.decoder.dtype, "cpu") + (64 << 10)
    assert planned / 3 < peaks[0] <= planned
    assert planned < loss_fn_bytes(ours.decoder, 256) / 4


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(2, 31, dtype=torch.int64), r"hidden \(2, 32, 64\) and labels \(2, 31\)"),
        (torch.zeros(2, 32), "an integer tensor .*, not a tensor of torch.float32"),
        (None, "not NoneType"),
        (torch.full((2, 32), 256), "the label 256, and the model has 256 tokens"),
        (torch.full((2, 32), -1), "the label -1, .*without a label is -100"),
    ],
    ids=["shifted", "floating", "missing", "beyond", "negative"],
)
def test_labels_that_do_not_belong_to_the_hidden_states_are_refused(labels: Any, words: str) -> None:
    ours, wanted = engine(build()), engine(build())
    data = batches(1)
    with pytest.raises(ConfigError, match=words):
        ours.step(data, loss_fn=lambda hidden, head, _: -head.logprobs(hidden, labels).sum())
    assert ours.step(data) == wanted.step(data)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda hidden: hidden.double(),
            r"hidden of width 64 in torch\.float64, and the head takes 64 in torch\.float32",
        ),
        (lambda hidden: hidden[..., :5], r"hidden of width 5 in torch\.float32, and the head takes 64"),
    ],
    ids=["wider numbers", "narrower rows"],
)
def test_hidden_states_that_the_head_does_not_take_are_refused(
    change: Callable[[Tensor], Tensor], words: str, entropy: bool
) -> None:
    ours, data = engine(build()), batches(1)

    def loss_fn(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        found = head.logprobs(change(hidden), batch["labels"], entropy=entropy)
        return -(found[0] if entropy else found).sum()

    with pytest.raises(ConfigError, match=words):
        ours.step(data, loss_fn=loss_fn)


def test_a_gradient_taken_inside_the_loss_function_is_refused_since_it_would_be_counted_twice() -> None:
    def loss_fn(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
        found = head.logprobs(hidden, batch["labels"]).sum()
        (grad,) = torch.autograd.grad(found, hidden, retain_graph=True)
        return grad.square().sum() - found

    with pytest.raises(ConfigError, match="inside loss_fn"):
        engine(build()).step(batches(1), loss_fn=loss_fn)


def test_a_head_that_is_no_plain_matmul_gives_the_same_in_chunks() -> None:
    model, data = build("gptj", rotary_dim=8), weighted(2)
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Softplus())
    wanted, ours = engine(model), engine(model, plan={"loss_chunk": 7})
    assert not ours.decoder.head.plain
    first, second = wanted.step(data, loss_fn=with_torch), ours.step(data, loss_fn=in_chunks)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert all(error(ours.weight(n), v) < 1e-5 for n, v in weights(wanted).items())
