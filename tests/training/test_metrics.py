"""Counting, against hand-made sums of public shapes."""

import json
import math
from types import SimpleNamespace

import pytest

from megatrain.models.presets import SHAPES
from megatrain.training.metrics import (
    ModelCount,
    StepRecord,
    Throughput,
    count_model,
    dumps,
    duration,
    host_peak_bytes,
    without_progress,
)


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


def test_a_record_is_one_line_and_never_holds_nan() -> None:
    record = StepRecord(step=3, loss=math.nan, grad_norm=math.inf, lr=1e-3, tokens=8, num_tokens=7)
    line = record.as_json()
    assert "\n" not in line
    read = json.loads(line)
    assert read["loss"] is None
    assert read["grad_norm"] is None
    assert (read["step"], read["tokens"], read["num_tokens"]) == (3, 8, 7)
    assert dumps({"a": [math.nan, 1.0]}) == '{"a": [null, 1.0]}'


def test_throughput_is_over_a_window() -> None:
    throughput = Throughput(window=2)
    assert throughput.tokens_per_s == 0.0
    for _ in range(5):
        throughput.add(100)
    assert throughput.tokens_per_s > 0
    assert throughput.step_s > 0


def test_durations_read_like_speech() -> None:
    assert duration(5.2) == "5 s"
    assert duration(65) == "1 min 05 s"
    assert duration(3 * 3600 + 300) == "3 h 05 min"
    assert duration(math.inf) == "?"


def test_peak_host_memory_is_that_of_this_process() -> None:
    assert host_peak_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([5.0, 4.0], ""),
        ([5.0], ""),
        ([], ""),
        ([5.0, 5.0], "5.0000 in the first step, 5.0000 in the last step"),
        ([5.0, None], "5.0000 in the first step, inf"),
        ([5.0, *[9.0] * 97, 4.0, 4.5], "5.0000 in the first step, 8.0500 in the last 10 steps"),
        ([5.0, *[9.0] * 380, *[4.9] * 20], ""),
    ],
)
def test_no_progress_is_the_last_tenth_not_below_the_first_step(losses: list[float | None], words: str) -> None:
    said = without_progress(losses)
    assert (words in said) if words else said == ""
