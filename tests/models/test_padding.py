"""Padding before, after and between the tokens of a row: the numbers of stock transformers."""

import pytest
import torch

from support import families
from support.reference import batches, build, check_training, engine, error, loss_sum, supervised

EAGER = {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_implementation": "eager"}


def padded(left: int, right: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, the first with padding at both ends. Its first token is supervised, hence predicted by padding."""
    (batch,) = batches(1, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :left] = 0
    mask[0, 32 - right :] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


@pytest.mark.parametrize(("left", "right"), [(3, 4), (9, 1), (0, 4), (3, 0)])
@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_padding_at_both_ends_of_a_row_is_what_stock_transformers_makes_of_it(kind: str, left: int, right: int) -> None:
    model = build(kind, **(EAGER if kind == "gemma2" else {"attn_implementation": "eager"}))
    data = [padded(left, right, seed=seed) for seed in range(3)]
    with torch.no_grad():
        wanted = sum(float(loss_sum(model, b)) for b in data) / sum(supervised(b) for b in data)
    assert engine(model).evaluate(data) == pytest.approx(wanted, rel=2e-6)


def test_training_on_rows_padded_at_both_ends_equals_plain_pytorch() -> None:
    check_training(
        build("gemma2", **EAGER), [[padded(3, 4, seed=seed), padded(7, 2, seed=seed + 9)] for seed in (0, 1)]
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_right_padding_trains_alike_under_each_implementation_of_attention(attention: str) -> None:
    model = build(attn_implementation=attention)
    steps = [[padded(0, 4, seed=seed), padded(0, 9, seed=seed + 9)] for seed in (0, 1)]
    ours, _ = check_training(model, steps)
    other = engine(build(attn_implementation="eager" if attention == "sdpa" else "sdpa"))
    for step in steps:
        other.step(step)
    for name in ours.state_dict():
        assert error(ours.gradient(name), other.gradient(name)) < 1e-5, name
    assert ours.evaluate(steps[0]) == pytest.approx(other.evaluate(steps[0]), rel=1e-6)


PLACES = {"before": [(0, 5), (0, 2)], "after": [(11, 16), (14, 16)], "between": [(5, 9), (0, 3)]}


@pytest.mark.parametrize("filling", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama3", "qwen3-moe", "gemma3", "gpt-oss", "bloom", "qwen3.5", "lfm2"])
def test_positions_of_padding_say_nothing(name: str, place: str, filling: int) -> None:
    """Trainers count positions along the tokens that are seen, and give those of padding any number."""
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 96, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    for row, (first, last) in enumerate(PLACES[place]):
        mask[row, first:last] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filling)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(mask == 0, -100),
        "attention_mask": mask,
        "position_ids": positions,
    }
    model = families.build(name)
    with torch.no_grad():
        wanted = float(model(**batch).loss)
    assert engine(model).step([batch]).loss == pytest.approx(wanted, rel=2e-6)
