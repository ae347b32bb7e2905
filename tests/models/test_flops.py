"""Model FLOPs, against hand-made sums of public shapes."""

from types import SimpleNamespace

import pytest

from megatrain.models.flops import ModelCount, count_model
from megatrain.models.presets import SHAPES


def test_flops_are_six_a_matmul_parameter_and_half_of_the_attention_square() -> None:
    shape = SHAPES["qwen2.5-3b"]
    kv = shape.kv_heads * (shape.hidden // shape.heads)
    layer = 2 * shape.hidden**2 + 2 * shape.hidden * kv + 3 * shape.hidden * shape.intermediate
    tensors = [
        ("model.embed_tokens.weight", 0, (shape.vocab, shape.hidden)),
        *(("w", unit, (layer // shape.hidden, shape.hidden)) for unit in range(1, shape.layers + 1)),
        *(("norm", unit, (shape.hidden,)) for unit in range(1, shape.layers + 1)),
    ]
    config = SimpleNamespace(vocab_size=shape.vocab, hidden_size=shape.hidden, num_attention_heads=shape.heads)
    count = count_model(config, tensors, shape.layers)
    by_hand = 6 * (shape.layers * layer + shape.vocab * shape.hidden) + 6 * shape.layers * shape.hidden * 1024
    assert count.flops_per_token(1024) == pytest.approx(by_hand, rel=1e-12)


def test_a_window_bounds_the_pairs() -> None:
    full = ModelCount(matmul_params=0, attention_width=1, windows=(None,))
    narrow = ModelCount(matmul_params=0, attention_width=1, windows=(8,))
    assert narrow.flops_per_token(8) == full.flops_per_token(8)
    assert narrow.flops_per_token(1000) < full.flops_per_token(1000) / 50


def test_of_routed_experts_only_those_that_a_token_meets_count() -> None:
    config = SimpleNamespace(
        vocab_size=0, hidden_size=4, num_attention_heads=1, num_experts=8, num_experts_per_tok=2, layer_types=[]
    )
    tensors = [("mlp.experts.gate_up_proj", 1, (8, 4, 4)), ("mlp.shared_expert.up.weight", 1, (4, 4))]
    assert count_model(config, tensors, 1).matmul_params == 2 * 16 + 16
