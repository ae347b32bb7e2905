"""What a loss function of the caller's allocates is in the plan, and refused where it does not fit."""

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from megatrain.engine import embed_head
from megatrain.engine.profile import loss_fn_bytes
from megatrain.engine.runtime import Runtime
from megatrain.errors import ConfigError, DoesNotFit
from support.peak import peaks_of
from support.reference import batches, build, engine

SIZES = {"micro_batch": (4, 64), "micro_batches": 1}
BATCH = {"rows": 4, "seq": 64}


def cross_entropy(hidden: Tensor, head: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = head(hidden).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def workspace(ours: Any) -> int:
    return sum(item["bytes"] for item in ours.plan["items"] if item["what"] == "workspace (torch)")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen2", True)])
def test_the_cross_entropy_of_all_logits_stays_within_what_is_planned(
    kind: str, tied: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine(build(kind, vocab_size=4096, tie_word_embeddings=tied), precision=precision, **SIZES)
    peaks = peaks_of(monkeypatch, embed_head.HeadTemplate, "_custom")
    ours.step(batches(1, vocab=4096, **BATCH), loss_fn=cross_entropy)
    planned = loss_fn_bytes(ours.decoder, 4 * 64)
    assert planned / 2 < peaks[0] <= planned, (peaks, planned)


def test_the_first_step_with_loss_fn_plans_its_memory_and_gives_the_built_in_losses_numbers() -> None:
    model = build(vocab_size=4096)
    plain, ours = engine(model, **SIZES), engine(model, **SIZES)
    before = workspace(ours)
    for seed in range(2):
        wanted = plain.step(batches(1, seed=seed, vocab=4096, **BATCH))
        out = ours.step(batches(1, seed=seed, vocab=4096, **BATCH), loss_fn=cross_entropy)
        assert out.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert out.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert workspace(ours) - before > 4 * 64 * 4096 * 8
    assert workspace(plain) == before


def test_a_loss_fn_that_does_not_fit_is_refused_before_the_step_and_the_engine_goes_on() -> None:
    ours = engine(build(vocab_size=4096), memory={"gpu": "20MB", "host": "1GiB"}, **SIZES)
    with pytest.raises(DoesNotFit, match=r"(?s)memory of loss_fn: the logits of 256 tokens.*loss_workspace") as refused:
        ours.step(batches(1, vocab=4096, **BATCH), loss_fn=cross_entropy)
    assert refused.value.items
    assert ours.num_steps == 0
    ours.step(batches(1, vocab=4096, **BATCH))
    assert ours.num_steps == 1


def test_a_loss_fn_that_is_refused_at_first_use_leaves_other_steps_as_they_were() -> None:
    """Without sizes the first step plans, so that nothing is planned yet that the refusal could be compared with."""
    ours = engine(build(vocab_size=4096), memory={"gpu": "20MB", "host": "1GiB"})
    with pytest.raises(DoesNotFit, match=r"(?s)memory of loss_fn: the logits of 256 tokens.*loss_workspace"):
        ours.step(batches(1, vocab=4096, **BATCH), loss_fn=cross_entropy)
    ours.step(batches(1, vocab=4096, **BATCH))
    assert ours.num_steps == 1


@pytest.mark.parametrize("planned", [False, True])
def test_sums_that_do_not_fit_leave_the_engine_as_it_was(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine(build())
    data = batches(1)
    if planned:
        ours.step(data)
    request = Runtime.request

    def small(self: Runtime, *sizes: Any) -> dict[str, Any]:
        asked = request(self, *sizes)
        if self.settings.get("accumulate"):
            asked["budget"] |= {"device": 1 << 12, "host": 1 << 12}
        return asked

    monkeypatch.setattr(Runtime, "request", small)
    for _ in range(2):
        with pytest.raises(DoesNotFit):
            ours.forward_backward(data, normalizer=10)
    ours.step(data)
    assert ours.num_steps == 1 + planned


def test_a_declared_workspace_is_planned_from_the_start() -> None:
    plain, declared = (
        engine(build(), **SIZES, plan={"loss_workspace": size} if size else {}) for size in (None, "64MiB")
    )
    assert workspace(declared) - workspace(plain) > 60 << 20
    before = declared.plan
    declared.step(batches(1, **BATCH), loss_fn=cross_entropy)
    assert declared.plan == before


@pytest.mark.parametrize(("size", "words"), [("much", "plan.loss_workspace"), (True, "plan.loss_workspace is True")])
def test_a_workspace_that_is_no_size_is_refused(size: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(build(), plan={"loss_workspace": size})
