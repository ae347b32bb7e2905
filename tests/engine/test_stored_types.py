"""Frozen weights stored in another type than they are computed in: copied once per unit and direction, into memory that
the plan counts, and held by nothing between forward and backward."""

from typing import Any

import pytest
import torch

import megatrain
from megatrain.engine.device_memory import CastBuffer
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.engine.template import cast_bytes
from support.reference import batches, build

LAYERS = 4
FROZEN = ["*.layers.*"]


def engine(stored: torch.dtype, micro_batches: int, **changes: Any) -> megatrain.Engine:
    decoder = megatrain.Decoder(
        build("llama", **changes),
        freeze=FROZEN,
        precision="bf16",
        frozen_dtypes={n: stored for n, _ in build("llama").named_parameters() if ".layers." in n},
    )
    return megatrain.Engine(
        decoder,
        device="cpu",
        micro_batch=(2, 32),
        micro_batches=micro_batches,
        memory={"gpu": "1GiB", "host": "1GiB"},
        plan={"activation": "keep", "group": micro_batches, "threads": 1},
    )


def workspace(ours: megatrain.Engine) -> int:
    return sum(item["bytes"] for item in ours.plan["items"] if item["what"] == "workspace (torch)")


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_unit_is_cast_once_per_direction(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fill = CastBuffer.fill

    def counted(buffer: CastBuffer, owner: Any, copies: Any) -> None:
        if owner != buffer._owner:
            made.append(owner)
        fill(buffer, owner, copies)

    monkeypatch.setattr(CastBuffer, "fill", counted)
    ours = engine(torch.float32, micro_batches)
    ours.step(batches(micro_batches))
    # the last layer's copies are still there for its backward: the head has none
    assert made == [*range(1, LAYERS + 1), *range(LAYERS - 1, 0, -1)]


def test_what_backward_needs_holds_no_copy_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the graph holds are those of a model stored as it is computed."""
    held: list[int] = []
    keep = CheckpointedCall._keep

    def counted(call: CheckpointedCall, tensor: torch.Tensor) -> Any:
        handle = keep(call, tensor)
        if type(handle).__name__ == "_Kept":
            held.append(tensor.untyped_storage().nbytes())
        return handle

    monkeypatch.setattr(CheckpointedCall, "_keep", counted)
    sums = []
    for stored in (torch.bfloat16, torch.float32):
        held.clear()
        engine(stored, 2).step(batches(2))
        sums.append(sum(held))
    assert sums[0] == sums[1] > 0


def test_the_plan_counts_the_copies_of_the_unit_that_has_most() -> None:
    plain, cast = engine(torch.bfloat16, 2), engine(torch.float32, 2)
    layer = sum(-(-p.numel() * 2 // 256) * 256 for p in build("llama").model.layers[0].parameters())
    assert cast_bytes(cast.decoder) == layer
    assert cast_bytes(plain.decoder) == 0
    assert workspace(cast) - workspace(plain) == layer


def test_the_copy_of_a_frozen_tied_embedding_counts_with_the_heads_own() -> None:
    model = build("llama", tie_word_embeddings=True)
    decoder = megatrain.Decoder(model, freeze=["*embed_tokens*", "model.norm.weight"], precision="bf16")
    assert cast_bytes(decoder) == 256 * 64 * 2 + 256
