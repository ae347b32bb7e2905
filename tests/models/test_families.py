"""Every architecture, tiny and random, in our engine against plain PyTorch: loss, norm, gradients, moments, weights."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.checkpoint.export import export_checkpoint
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from support import private_memory
from support.architectures import IN_AND_OUT, PAGE, ROUTED, TRAINED, recorded, table
from support.families import (
    BASE,
    CASES,
    DENSE_MASKS,
    FAMILIES,
    RANDOM_ROUTING,
    REFUSED,
    Refusal,
    as_if_alone,
    build,
    by_document,
    of_kind,
)
from support.reference import batches, check_training, engine, error, packed

VOCAB = 96
EXACT = [case for case in CASES if case[0] not in RANDOM_ROUTING]


SEEDS = {"cohere": 2}
"""Of the first step's rows: others where a gradient of one element cancels to nearly nothing, whose sign Adam takes."""


def padded_steps(number: int, first: int = 0) -> list[list[dict[str, torch.Tensor]]]:
    seeds = range(first, first + number)
    return [batches(2, seed=seed, rows=2, seq=16, padded=True, vocab=VOCAB) for seed in seeds]


def packed_steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    return [
        [packed([[5, 7, 4], [9, 7, 0]], seed=seed, vocab=VOCAB), packed([[3, 11, 2]], seed=seed + 9, vocab=VOCAB)]
        for seed in range(number)
    ]


@pytest.mark.parametrize(("name", "experts"), EXACT)
def test_three_padded_steps_equal_plain_pytorch(name: str, experts: str | None) -> None:
    check_training(build(name, experts), padded_steps(3, SEEDS.get(name, 0)), splits=True)


@pytest.mark.parametrize(("name", "experts"), EXACT)
def test_packed_and_recomputed_steps_equal_plain_pytorch(name: str, experts: str | None) -> None:
    alone = by_document(name)
    plan = {"activation": "recompute"}
    check_training(build(name, experts), packed_steps(3), splits=not alone, alone=alone, plan=plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_of_a_packed_row_do_not_see_each_other(name: str) -> None:
    model = build(name).eval()
    row = packed([[5, 7, 4]], vocab=VOCAB)
    other = {**row, "input_ids": torch.cat([row["input_ids"][:, :5].flip(1), row["input_ids"][:, 5:]], 1)}
    with torch.no_grad():
        alone = model(input_ids=row["input_ids"][:, 5:12], use_cache=False).logits
    wanted = alone.log_softmax(-1)[0, :6].gather(1, row["input_ids"][0, 6:12, None])[:, 0]
    ours = engine(model)
    found, changed = (batch.view(-1)[5:11] for batch in ours.logprobs([row, other]))
    assert (error(found, wanted) < 1e-5) == as_if_alone(name)
    # how many tokens an expert is given decides how its matmul rounds
    assert torch.equal(found, changed) or (FAMILIES[name].experts and error(found, changed) < 1e-6)
    assert bool(ours.decoder.mixing_layers) == by_document(name)
    dense = name in DENSE_MASKS and not by_document(name)
    assert ours.decoder.packed_rows("cpu").startswith("dense mask") == dense


@pytest.mark.parametrize(("name", "experts"), [case for case in CASES if case[0] in RANDOM_ROUTING])
def test_random_routing_is_replayed_in_recomputation(name: str, experts: str | None) -> None:
    found = []
    for activation in ("keep", "recompute"):
        ours = engine(build(name, experts), plan={"activation": activation})
        outputs = [ours.step(step) for step in padded_steps(3)]
        found.append((outputs, dict(ours.state_dict())))
    (kept, kept_weights), (again, again_weights) = found
    assert [(o.loss, o.grad_norm) for o in kept] == [(o.loss, o.grad_norm) for o in again]
    assert all(torch.equal(kept_weights[n], again_weights[n]) for n in kept_weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stock_folder_is_read_trained_exported_and_read_by_stock_again(name: str, tmp_path: Path) -> None:
    stock = build(name).eval()
    stock.save_pretrained(tmp_path / "in")
    ours = megatrain.Engine.from_pretrained(
        str(tmp_path / "in"), precision="fp32", device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}
    )
    with ours:
        before = ours.logits(batches(1, rows=1, seq=8, vocab=VOCAB)[0]["input_ids"])
        ours.save_pretrained(tmp_path / "same")
        ours.step(padded_steps(1)[0])
        after = ours.logits(batches(1, rows=1, seq=8, vocab=VOCAB)[0]["input_ids"])
        ours.save_pretrained(tmp_path / "out")
        ours.save_pretrained(tmp_path / "library", layout="library")
    source, same, out = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "same", "out"))
    assert {n: tuple(t.shape) for n, t in source.items()} == {n: tuple(t.shape) for n, t in out.items()}
    assert all(torch.equal(source[n], same[n]) for n in source)
    ids = batches(1, rows=1, seq=8, vocab=VOCAB)[0]["input_ids"]
    for folder, wanted in (("same", before), ("out", after), ("library", after)):
        again, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        with torch.no_grad():
            assert error(again.eval()(ids, use_cache=False).logits[:, -1], wanted) < 1e-5
    assert error(before, after) > 1e-4


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.title)
def test_what_cannot_be_trained_exactly_is_refused_with_the_reason(refusal: Refusal) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal.reason)):
        Decoder.from_config(of_kind(refusal.kind, BASE | refusal.changes))


def test_experts_that_gather_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batched_mm gathers weights.*grouped_mm or eager"):
        engine(build("mixtral", "batched_mm"))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_that_get_no_token_are_updated_as_in_torch(experts: str) -> None:
    model = build("mixtral", experts, num_local_experts=16, num_experts_per_tok=1)
    data = [batches(2, seed=seed, rows=1, seq=6, vocab=VOCAB) for seed in range(3)]
    _, exact = check_training(model, data, splits=True)
    unused = [bool((g == 0).flatten(1).all(1).any()) for n, g in exact.gradients.items() if "experts" in n]
    assert any(unused)


def test_a_checkpoint_is_exported_as_published_or_as_the_library_holds_it(tmp_path: Path) -> None:
    model = build("mixtral")
    ours = engine(model)
    ours.step(padded_steps(1)[0])
    ours.save(tmp_path / "step-1", step=1)
    for layout in ("source", "library"):
        export_checkpoint(tmp_path / "step-1", tmp_path / layout, layout=layout)
        values = load_file(tmp_path / layout / "model.safetensors")
        assert any(".experts.0." in name for name in values) == (layout == "source")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype=torch.float32)
        assert all(torch.equal(value, ours.weight(name)) for name, value in again.state_dict().items())


def test_the_table_of_architectures_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == table(recorded()), "run python tests/support/architectures.py"
    assert "| not run |" not in page, "run python tests/support/architectures.py"
    assert "**no**" not in page


def test_what_failed_was_skipped_or_is_not_there_does_not_read_yes() -> None:
    found = recorded()
    row = "| Mixtral | `mixtral` | yes | yes | eager, grouped_mm | yes | yes |"
    assert row in table(found)
    changed = {test: dict(cases) for test, cases in found.items()}
    changed[TRAINED]["mixtral eager"] = "failed"
    changed[ROUTED]["mixtral grouped_mm"] = "skipped"
    del changed[IN_AND_OUT]["mixtral"]
    wanted = "| Mixtral | `mixtral` | **no** | yes | **no**, grouped_mm | not run | not run |"
    assert table(changed) == table(found).replace(row, wanted)


def test_a_list_of_experts_is_refused() -> None:
    model = build("llama2")
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM keeps its experts as a list of modules \(mlp\.experts\)"):
        engine(model)


def test_experts_stored_apart_are_loaded_within_the_memory_of_one_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 8}
    build("mixtral", **sizes).save_pretrained(tmp_path)
    peak, largest, found = private_memory.while_loading(tmp_path)
    assert any(".experts.7." in name for name in found)
    assert peak < largest, (peak, largest)
