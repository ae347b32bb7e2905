"""The turn between two steps: rows of the embedding that a step does not look up are updated beneath its backward,
which no number shows."""

import functools
from typing import Any

import pytest
import torch

from megatrain import _core
from megatrain.engine.step import Pass
from support.reference import batches, build, engine

MICRO_BATCHES = 2


@functools.cache
def model(kind: str, tied: bool) -> Any:
    return build(kind, tie_word_embeddings=tied)


def bits(kind: str, tied: bool, **options: Any) -> list[torch.Tensor]:
    """Losses, norms, weights, moments, gradients and counts after three immediate steps of few tokens."""
    ours = engine(
        model(kind, tied),
        micro_batch=(1, 8),
        micro_batches=MICRO_BATCHES,
        update="immediate",
        max_grad_norm=None,
        plan={"poison": True, "threads": 1, "state_on_device": 0, **options.pop("plan", {})},
        **options,
    )
    found = []
    for step in range(3):
        out = ours.step(batches(MICRO_BATCHES, rows=1, seq=8, seed=step))
        found.append(torch.tensor([out.loss, out.grad_norm], dtype=torch.float64))
    for name in ours.decoder.tensors:
        state = ours.optimizer_state(name)
        found += [ours.weight(name), state["exp_avg"], state["exp_avg_sq"], torch.tensor(state["step"])]
    ours.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)])
def test_rows_updated_early_do_not_show(kind: str, tied: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Pass, "looked_up", lambda _: None)
        late = bits(kind, tied, precision=precision, device=_core.Device.cpu(seed=1))
    told: list[tuple[int, torch.Tensor] | None] = []
    looked_up = Pass.looked_up
    monkeypatch.setattr(Pass, "looked_up", lambda run: told.append(looked_up(run)) or told[-1])
    for seed, group in ((2, 1), (3, 2)):
        early = bits(kind, tied, precision=precision, device=_core.Device.cpu(seed=seed), plan={"group": group})
        assert len(early) == len(late)
        assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    assert len(told) == 6
    for rows in told:
        assert rows is not None
        assert 0 < len(rows[1]) < model(kind, tied).get_input_embeddings().num_embeddings


def test_rows_are_refused_that_cannot_have_been_looked_up() -> None:
    ours = engine(model("llama", False), update="immediate", max_grad_norm=None, plan={"state_on_device": 0})
    groups, _ = ours._runtime.core_groups(False)
    for rows, words in (([5, 5], "ascending"), ([-1], "negative"), ([1 << 40], "looked up")):
        with pytest.raises(ValueError, match=words):
            ours.core.begin("train", 1, 0, groups=groups, rows=(0, torch.tensor(rows)))
    ours.close()
