"""Attention over the documents of packed rows: the numbers of a dense mask and of separate rows, without the mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from megatrain.models import varlen_attention
from megatrain.models.decoder import Decoder
from megatrain.models.modules import copy_without
from megatrain.models.packing import find_documents
from megatrain.models.varlen_attention import NAME, Documents, attend, dense, is_documents
from support.reference import FAMILIES, build, config, engine, error, packed

ROWS = [[9, 14, 5], [1, 26, 1], [28]]


def positions_of(rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def padding_of(*stretches: tuple[int, int], seq: int = 28) -> Tensor:
    at = torch.arange(seq)
    return torch.stack([(at >= first) & (at < last) for first, last in stretches])


def described(make: Any, implementation: str, **given: Any) -> Any:
    """What transformers makes of a mask for an attention implementation."""
    decoder_config = AutoConfig.for_model("mistral", sliding_window=6)
    decoder_config.attention_chunk_size = 7
    decoder_config._attn_implementation = implementation
    batch, seq = (given.get("position_ids") if given.get("attention_mask") is None else given["attention_mask"]).shape
    given = {"attention_mask": None, "position_ids": None, **given}
    return make(config=decoder_config, inputs_embeds=torch.empty(batch, seq, 1), past_key_values=None, **given)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    Decoder.from_config(config())


MASKS = [create_causal_mask, create_sliding_window_causal_mask, create_chunked_causal_mask]


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": positions_of(ROWS)},
        {"position_ids": positions_of([[3, 1, 1, 4]])},
        {"attention_mask": padding_of((5, 28), (0, 28), (27, 28))},
    ],
    ids=["packed", "one row", "padded"],
)
def test_documents_stand_for_the_mask_that_transformers_would_build(make: Any, given: dict[str, Tensor]) -> None:
    found, wanted = described(make, NAME, **given), described(make, "sdpa", **given)
    assert isinstance(found, Documents)
    assert torch.equal(dense(found, wanted.shape[0], wanted.shape[-1]), wanted)
    assert int(found.lengths.sum()) == wanted.shape[0] * wanted.shape[-1]
    assert found.lengths.device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
def test_rows_of_one_document_need_nothing_and_strange_masks_stay_dense() -> None:
    whole = {"position_ids": positions_of([[28], [28]])}
    assert described(create_causal_mask, NAME, **whole) is None
    split = {"attention_mask": padding_of((0, 28)) & ~padding_of((9, 12))}  # one document around a hole
    trailing = {"attention_mask": padding_of((3, 20))}  # padding sees what it follows
    for given in (
        split,
        trailing,
        {"position_ids": positions_of(ROWS), "or_mask_function": lambda _b, _h, q, k: (q < 3) & (k < 3)},
        {"position_ids": positions_of(ROWS), "block_sequence_ids": torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 19] * 3)},
    ):
        found, wanted = (described(create_causal_mask, name, **given) for name in (NAME, "sdpa"))
        assert isinstance(found, Tensor)
        assert torch.equal(found, wanted)


def test_a_mask_is_looked_at_in_as_many_places_as_there_are_tokens() -> None:
    asked = []
    number = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 800, 124]))[None]

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        asked.append(torch.broadcast_shapes(queries.shape, keys.shape).numel())
        return (keys <= queries) & (number.gather(1, queries) == number.gather(1, keys))

    found = find_documents(sees, torch.ones(1, 1024, dtype=torch.bool), None)
    assert found is not None
    assert found.starts.tolist() == [0, 100, 900, 1024]
    assert sum(asked) <= 8 * 1024


def attention_inputs(seq: int, value_width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(ROWS), 4, seq, 16), (len(ROWS), 2, seq, 16), (len(ROWS), 2, seq, value_width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


class Grouped(torch.nn.Module):
    """An attention with two query heads for each of keys and values."""

    num_key_value_groups = 2


@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("value_width", [16, 10])
@pytest.mark.parametrize(("window", "padded"), [(None, False), (4, False), (14, True), (100, False), (None, True)])
def test_attention_over_documents_equals_attention_with_a_dense_mask(
    window: int | None, padded: bool, value_width: int, by_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_mask:  # where there is no kernel
        monkeypatch.setattr(varlen_attention, "takes_documents", lambda *_: False)
    lengths = torch.tensor([n for row in ROWS for n in row] + [0])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    hidden = padding_of((0, 9), (0, 1), (0, 0)).flatten() if padded else None  # the first document of two rows
    found = Documents(starts, lengths, window, hidden)
    inputs = attention_inputs(28, value_width)
    output, _ = attend(Grouped(), *inputs, found, scaling=0.3)
    query, key, value = inputs
    wanted = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(2, 1),
        value.repeat_interleave(2, 1),
        attn_mask=dense(found, len(ROWS), 28),
        scale=0.3,
    ).transpose(1, 2)
    assert output.shape == wanted.shape
    assert error(output, wanted) < 1e-12
    grad = torch.randn(wanted.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(output, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        assert error(ours, theirs) < 1e-12


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_layer_of_a_packed_or_padded_row_is_handed_a_dense_mask(kind: str) -> None:
    recorder = Decoder.from_config(config(kind)).recorder
    row = packed([[9, 14, 5], [20, 7, 1]])
    ids, padding = row["input_ids"], padding_of((5, 28), (0, 28)).long()
    for record in (recorder.record(ids, None, row["position_ids"]), recorder.record(ids, padding, None)):
        for args, kwargs in zip(record.args, record.kwargs, strict=True):
            leaves = tree_leaves((args, kwargs), is_leaf=is_documents)
            assert sum(isinstance(leaf, Documents) for leaf in leaves) == 1
            assert not any(isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[-1] == 28 for leaf in leaves)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_packed_row_has_loss_and_gradients_of_its_documents_in_rows_of_their_own(kind: str) -> None:
    model, row = build(kind), packed([[9, 14, 5]])
    alone = [{k: v[:, a:b] for k, v in row.items()} for a, b in ((0, 9), (9, 23), (23, 28))]
    together, document_buckets = engine(model), engine(model)
    assert together.decoder.packing.refusal is None
    outs = together.step([row]), document_buckets.step(alone)
    assert outs[0].loss == pytest.approx(outs[1].loss, rel=1e-6)
    for name in together.state_dict():
        assert error(together.gradient(name), document_buckets.gradient(name)) < 1e-5, name


def test_other_tokens_in_one_document_change_no_bit_of_another() -> None:
    ours, row = engine(build("mistral")), packed([[9, 14, 5]])
    other = {**row, "input_ids": row["input_ids"].clone()}
    other["input_ids"][:, :9] = 7
    before, after = (ours.logprobs([batch])[0].view(-1) for batch in (row, other))
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[:8], after[:8])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_one_graph_serves_every_number_of_documents(kind: str) -> None:
    from torch._dynamo.utils import counters

    decoder = Decoder.from_config(config(kind))
    layer = copy_without(decoder.layers[0]).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for row in ([[9, 23]], [[5, 6, 21]], [[4, 4, 4, 20]], [[1] * 32], [[31, 1]]):
        batch = packed(row)
        record = decoder.recorder.record(batch["input_ids"], None, batch["position_ids"])
        hidden = torch.randn(1, 32, 64, requires_grad=True)
        grads = []
        for run in (compiled, layer):
            output = run(hidden, *record.args[0], **record.kwargs[0])
            output = output[0] if decoder.recorder.tuple_output else output
            grads.append(torch.autograd.grad(output.sum(), hidden)[0])
        assert torch.equal(*grads)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (config("llama", attention_dropout=0.1), "dropout of attention"),
        (config("llama", attn_implementation="eager"), "eager attention"),
        (config("gemma2", head_dim=16, sliding_window=8), "eager attention"),
        (config("gpt_oss", num_local_experts=4, head_dim=16), "eager attention"),
        (config("falcon"), "attention of its own in FalconDecoderLayer"),
        (config("opt", ffn_dim=64, word_embed_proj_dim=64, pad_token_id=0), "masks that do not follow position_ids"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else None,
)
def test_models_whose_attention_needs_a_dense_mask_are_named_with_the_reason(settings: Any, reason: str) -> None:
    decoder = Decoder.from_config(settings)
    assert decoder.packing.how("cuda", torch.bfloat16).startswith(f"dense mask ({reason}")
    assert getattr(decoder.config, "_attn_implementation", None) in ("sdpa", "eager")


def test_kernels_of_the_card_are_for_narrow_heads_of_half_the_precision() -> None:
    packing = Decoder.from_config(config("qwen3", head_dim=32)).packing
    assert packing.how("cuda", torch.bfloat16) == packing.how("cpu", torch.float32) == "variable length"
    assert packing.how("cuda", torch.float32) == "dense mask (no kernel for float32 heads of 32)"
    wide = Decoder.from_config(config("gemma", head_dim=320)).packing
    assert wide.how("cuda", torch.bfloat16) == "dense mask (no kernel for bfloat16 heads of 320)"
