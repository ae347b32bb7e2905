"""Every architecture, tiny and random, in our engine against plain PyTorch: loss, norm, gradients, moments, weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megatrain
from families import CASES, FAMILIES, NO_PACKING, RANDOM_ROUTING, build
from megatrain.errors import ConfigError
from reference import batches, check_training, engine, error, packed

VOCAB = 96
EXACT = [case for case in CASES if case[0] not in RANDOM_ROUTING]
PACKED = [case for case in EXACT if case[0] not in NO_PACKING]


def padded_steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    return [batches(2, seed=seed, rows=2, seq=16, padded=True, vocab=VOCAB) for seed in range(number)]


def packed_steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    return [
        [packed([[5, 7, 4], [9, 7, 0]], seed=seed, vocab=VOCAB), packed([[3, 11, 2]], seed=seed + 9, vocab=VOCAB)]
        for seed in range(number)
    ]


@pytest.mark.parametrize(("name", "experts"), EXACT)
def test_three_padded_steps_equal_plain_pytorch(name: str, experts: str | None) -> None:
    check_training(build(name, experts), padded_steps(3), splits=True)


@pytest.mark.parametrize(("name", "experts"), PACKED)
def test_packed_and_recomputed_steps_equal_plain_pytorch(name: str, experts: str | None) -> None:
    check_training(build(name, experts), packed_steps(3), splits=True, plan={"activation": "recompute"})


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_of_a_packed_row_do_not_see_each_other_or_packing_is_refused(name: str) -> None:
    model = build(name).eval()
    row = packed([[5, 7, 4]], vocab=VOCAB)
    with torch.no_grad():
        together = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
        alone = model(input_ids=row["input_ids"][:, 5:12], use_cache=False).logits
    separate = error(together[:, 5:12], alone) < 1e-5
    assert separate == (name not in NO_PACKING)
    ours = engine(model)
    if separate:
        wanted = alone.log_softmax(-1)[0, :6].gather(1, row["input_ids"][0, 6:12, None])[:, 0]
        assert error(ours.logprobs([row])[0].view(-1)[5:11], wanted) < 1e-5
    else:
        with pytest.raises(ConfigError, match=r"layers\.0.*packed"):
            ours.step([row])


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
