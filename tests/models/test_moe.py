"""The router's auxiliary loss is that of stock transformers on the step as one batch, however the step is split."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.training.run_dir import read_metrics
from megatrain.training.trainer import Trainer
from support.families import ASKED, BASE, COEFFICIENT, FAMILIES, RANDOM_ROUTING, ROUTER_LOSS, build, records_router
from support.reference import at_once, batches, check_training, engine, packed
from support.runs import MODEL, WORDS, settings

VOCAB = 96
NO_TERM = [name for name, family in FAMILIES.items() if family.experts and name not in (*ROUTER_LOSS, *RANDOM_ROUTING)]


def padded_steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    """Of three rows each in two micro-batches, padded at the start and at the end."""
    return [
        [
            *batches(1, seed=seed, rows=2, seq=16, padded=True, vocab=VOCAB),
            *(
                {k: v[:1] for k, v in batch.items()}
                for batch in batches(2, seed=seed + 50, rows=2, seq=16, padded=True, vocab=VOCAB)[1:]
            ),
        ]
        for seed in range(number)
    ]


def split(step: list[dict[str, torch.Tensor]], sizes: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    (whole,) = at_once(step)
    return [dict(zip(whole, rows, strict=True)) for rows in zip(*(v.split(sizes) for v in whole.values()), strict=True)]


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ROUTER_LOSS)
def test_three_steps_equal_plain_pytorch_with_the_step_as_one_batch(name: str, experts: str) -> None:
    model = build(name, experts, **ASKED)
    if not records_router(name):
        with pytest.raises(ConfigError, match="set it to false"):
            engine(model)
        return
    check_training(model, padded_steps(3), whole=True)


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_the_split_into_micro_batches_does_not_change_the_set(name: str, sizes: tuple[int, ...]) -> None:
    steps = [split(step, sizes) for step in padded_steps(3)]
    check_training(build(name, "grouped_mm", **ASKED), steps, whole=True, plan={"activation": "recompute"})


def test_packed_rows_count_as_in_plain_pytorch_and_marked_padding_does_not() -> None:
    model = build("mixtral", "grouped_mm", **ASKED)
    steps = [
        [packed([[5, 7, 4], [9, 7, 0]], seed=seed, vocab=VOCAB), packed([[3, 11, 2]], seed=seed + 9, vocab=VOCAB)]
        for seed in range(3)
    ]
    check_training(model, steps, whole=True)
    row = packed([[9, 7]], vocab=VOCAB)
    row["labels"][:, 9:] = -100
    longer = {name: torch.nn.functional.pad(row[name], (0, 5), value=fill) for name, fill in FILL.items()}
    longer["position_ids"][:, 16:] = torch.arange(5)
    longer["padding_mask"] = (torch.arange(21) < 16).long()[None]
    outputs = [engine(model).step([batch]) for batch in (row, longer, {**longer, "padding_mask": None})]
    assert outputs[0].aux_loss == pytest.approx(outputs[1].aux_loss, rel=1e-6)
    assert outputs[0].grad_norm == pytest.approx(outputs[1].grad_norm, rel=1e-5)
    assert outputs[0].aux_loss != pytest.approx(outputs[2].aux_loss, rel=1e-4)


FILL = {"input_ids": 0, "labels": -100, "position_ids": 0}


def test_padding_at_the_end_is_left_out_though_its_mask_is_not_needed_for_attention() -> None:
    model = build("mixtral", "grouped_mm", **ASKED)
    ids = batches(1, seq=16, vocab=VOCAB)[0]["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    data = [{"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}]
    check_training(model, [data], whole=True)


def test_a_micro_batch_without_supervised_tokens_counts_in_the_term() -> None:
    steps = padded_steps(2)
    for step in steps:
        step[1]["labels"] = torch.full_like(step[1]["labels"], -100)
    check_training(build("olmoe", "grouped_mm", **ASKED), steps, whole=True)


def test_the_term_is_reported_and_is_part_of_the_loss() -> None:
    step = padded_steps(1)[0]
    (whole,) = at_once(step)
    model = build("qwen3-moe", **ASKED)
    with torch.no_grad():
        stock = model(**whole, use_cache=False)
    out, ours = engine(model).step(step), engine(build("qwen3-moe"))
    without = ours.step(step)
    assert out.aux_loss == pytest.approx(float(stock.aux_loss), rel=1e-5)
    assert out.loss == pytest.approx(float(stock.loss), rel=1e-5)
    assert without.aux_loss is None
    assert out.loss == pytest.approx(without.loss + COEFFICIENT * out.aux_loss, rel=1e-6)
    assert engine(model).evaluate(step) == pytest.approx(engine(build("qwen3-moe")).evaluate(step), rel=1e-6)


@pytest.mark.parametrize("name", RANDOM_ROUTING)
def test_random_routing_is_replayed_for_the_term_too(name: str) -> None:
    found = []
    for activation in ("keep", "recompute"):
        ours = engine(build(name, **ASKED), plan={"activation": activation})
        outputs = [ours.step(step) for step in padded_steps(2)]
        found.append(([(o.loss, o.aux_loss, o.grad_norm) for o in outputs], dict(ours.state_dict())))
    (kept, weights), (again, others) = found
    assert kept == again
    assert all(kept_value[1] is not None for kept_value in kept)
    assert all(torch.equal(weights[n], others[n]) for n in weights)


@pytest.mark.parametrize(
    "plan", [{"activation": "recompute"}, {"activation": "keep"}, {"activation": "offload"}, {"slots": 2}]
)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_plans_do_not_show(plan: dict[str, Any], experts: str) -> None:
    model, data = build("mixtral", experts, **ASKED), padded_steps(2)
    found = []
    for chosen in ({}, plan):
        ours = engine(model, plan=chosen)
        outputs = [ours.step(step) for step in data]
        found.append(([(o.loss, o.aux_loss, o.grad_norm) for o in outputs], dict(ours.state_dict())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_immediate_updates_have_the_same_numbers() -> None:
    model, data = build("mixtral", "grouped_mm", **ASKED), padded_steps(2)
    runs = [engine(model, max_grad_norm=None, update=update) for update in ("just_in_time", "immediate")]
    losses = [[(out.loss, out.aux_loss) for out in map(ours.step, data)] for ours in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", NO_TERM)
def test_where_stock_adds_no_term_none_is_added(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data, model = padded_steps(1)[0], build(name, output_router_logits=True)
    if not records_router(name):
        with pytest.raises(ConfigError, match="set it to false"):
            engine(model)
        return
    out = engine(model).step(data)
    assert "adds no auxiliary loss" in caplog.text
    assert out.aux_loss is None
    assert out.loss == engine(build(name)).step(data).loss


def test_what_would_split_the_set_is_refused() -> None:
    model, data = build("mixtral", "grouped_mm", **ASKED), padded_steps(1)[0]
    with pytest.raises(ConfigError, match=r"plan\.group is 1 of 2 micro-batches.*all tokens of a step"):
        engine(model, plan={"group": 1}).step(data)
    ours = engine(model, plan={"accumulate": True})
    ours.forward_backward(data)
    with pytest.raises(ConfigError, match="a step is one call of forward_backward"):
        ours.forward_backward(data)
    assert ours.optimizer_step().aux_loss is not None


def test_a_run_takes_the_term_over_its_tokens_however_it_is_split(tmp_path: Path) -> None:
    # three windows that are nearly full and a short one, which alone is cut to 128 tokens
    texts = [" ".join(WORDS[(word * 7 + row) % len(WORDS)] for word in range(115)) for row in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[0][:80]]))
    experts = {"model_type": "mixtral", "num_local_experts": 4, "max_position_embeddings": 300, **ASKED}
    found = []
    for rows in (1, 4):
        config = settings(
            tmp_path,
            model={"config": {**MODEL, **experts}},
            data={"seq_len": 300, "eval": []},
            train={"steps": 2},
            plan={"micro_batch": rows},
            output={"dir": str(tmp_path / str(rows))},
        )
        Trainer(config).fit()
        found.append([(record["loss"], record["aux_loss"]) for record in read_metrics(tmp_path / str(rows))])
    for one, four in zip(*found, strict=True):
        assert one == pytest.approx(four, rel=1e-5)


def test_the_coefficient_and_sizes_are_the_models_own() -> None:
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 3, "output_router_logits": True}
    found = Decoder.from_config({"model_type": "mixtral", **BASE, **sizes, "router_aux_loss_coef": 0.01234567891})
    assert found.router is not None
    assert (found.router.coefficient, found.router.num_experts, found.router.top_k) == (0.01234567891, 6, 3)
    assert Decoder.from_config({"model_type": "mixtral", **BASE, **sizes, "router_aux_loss_coef": 0.0}).router is None


def test_another_term_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral as stock

    original = stock.load_balancing_loss_func
    monkeypatch.setattr(stock, "load_balancing_loss_func", lambda *a, **k: original(*a, **k) ** 2)
    with pytest.raises(ConfigError, match=re.escape("auxiliary loss of MixtralForCausalLM is not the one")):
        megatrain.Engine(build("mixtral", **ASKED), device="cpu")
