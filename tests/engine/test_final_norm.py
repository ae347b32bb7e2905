"""The final norm in tiles of tokens: the same numbers as at once, in as much memory as is planned."""

from typing import Any

import pytest
import torch
from torch import nn

from megatrain.engine import embed_head
from support.peak import peaks_of
from support.reference import batches, build, engine

ROWS, SEQ, VOCAB = 4, 24, 96


def one_step(tile: int, monkeypatch: pytest.MonkeyPatch, micro_batches: int, **options: Any) -> tuple[Any, Any]:
    monkeypatch.setattr(embed_head, "_TAIL_TOKENS", tile)
    ours = engine(build("qwen3"), **options)
    out = ours.forward_backward(batches(micro_batches, rows=ROWS, seq=SEQ, vocab=VOCAB))
    return out, {name: ours.gradient(name) for name in ours.decoder.tensors}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_and_gradients_are_those_of_the_norm_at_once(
    precision: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, wanted = one_step(ROWS * SEQ, monkeypatch, micro_batches, precision=precision)
    tiled, found = one_step(7, monkeypatch, micro_batches, precision=precision)
    assert tiled == whole
    for name, gradient in wanted.items():
        if name == "model.norm.weight":  # the one sum over tokens
            error = float((found[name] - gradient).norm() / gradient.norm())
            assert error < (1e-6 if precision == "fp32" else 4e-3), error
        else:
            assert torch.equal(found[name], gradient), name


def test_evaluation_and_log_probabilities_do_not_change_with_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for tile in (ROWS * SEQ, 7):
        monkeypatch.setattr(embed_head, "_TAIL_TOKENS", tile)
        ours = engine(build("qwen3"))
        batch = batches(1, rows=ROWS, seq=SEQ, vocab=VOCAB)
        found.append((ours.evaluate(batch), ours.logprobs(batch)[0]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tile", [ROWS * SEQ, 16])
def test_a_norm_allocates_no_more_than_is_planned(kind: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_head, "_TAIL_TOKENS", tile)
    ours = engine(build(kind), precision="bf16")

    def plain(_: Any, normed: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros((), dtype=torch.float64), torch.ones_like(normed)

    monkeypatch.setattr(embed_head.HeadTemplate, "_plain", plain)
    peaks = peaks_of(monkeypatch, embed_head.HeadTemplate, "train_step")
    ours.forward_backward(batches(1, rows=ROWS, seq=SEQ, vocab=VOCAB))
    hidden = ROWS * SEQ * ours.decoder.hidden_size * 2
    planned = embed_head.tail_bytes(ours.decoder, ROWS * SEQ) + 3 * hidden
    assert hidden < peaks[0] <= planned, (peaks, planned)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "olmo2", "phi3", "gpt_neox", "cohere"])
@pytest.mark.parametrize("tile", [ROWS * SEQ, 16])
def test_what_a_norm_keeps_is_planned_beside_the_loss(kind: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_head, "_TAIL_TOKENS", tile)
    ours = engine(build(kind), precision="bf16")
    hidden = ROWS * SEQ * ours.decoder.hidden_size * 2
    in_loss = 100 * hidden

    def loss(_: Any, normed: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        del normed, _others
        torch.empty(in_loss, dtype=torch.uint8)
        return torch.zeros((), dtype=torch.float64), torch.ones(ROWS, SEQ, ours.decoder.hidden_size).bfloat16()

    for name in ("_plain", "_own"):
        monkeypatch.setattr(embed_head.HeadTemplate, name, loss)
    peaks = peaks_of(monkeypatch, embed_head.HeadTemplate, "train_step")
    ours.forward_backward(batches(1, rows=ROWS, seq=SEQ, vocab=VOCAB))
    kept = embed_head.tail_kept_bytes(ours.decoder, ROWS * SEQ)
    if tile < ROWS * SEQ and ours.decoder.tail_is_token_wise:
        assert kept == 0
    # beside that its result, and a number or two a token, which on the CPU may have another dtype
    assert abs(peaks[0] - (in_loss + kept + hidden)) <= hidden // 16, (peaks, kept, hidden)


def test_what_draws_random_numbers_mixes_tokens_or_changes_the_width_after_the_last_layer_is_not_tiled() -> None:
    class Mixes(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.cumsum(1)

    for after, token_wise in (
        (nn.Identity(), True),
        (nn.Dropout(0.1), False),
        (Mixes(), False),
        (nn.Linear(64, 32), False),
    ):
        decoder = engine(build("qwen3")).decoder
        decoder.base.norm = nn.Sequential(decoder.base.norm, after)
        assert decoder.tail_is_token_wise == token_wise
