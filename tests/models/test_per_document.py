"""Packed rows where layers cannot keep documents apart: each document is a row of its own there."""

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.models.per_document import padded_length
from support.families import ASKED, build
from support.reference import check_training, engine, one_document_per_row, packed

VOCAB = 96
LENGTHS = [[[37, 9, 18], [20, 21, 23]], [[50, 1, 13]]]


def filled_steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    """Documents of which most are filled up."""
    return [
        [packed(lengths, seed=10 * seed + i, vocab=VOCAB) for i, lengths in enumerate(LENGTHS)]
        for seed in range(number)
    ]


def as_rows(step: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The documents as one padded micro-batch."""
    documents = one_document_per_row(step)
    width = max(document["input_ids"].shape[1] for document in documents)

    def rows(name: str, fill: int) -> torch.Tensor:
        padded = (torch.nn.functional.pad(d[name], (0, width - d[name].shape[1]), value=fill) for d in documents)
        return torch.cat(list(padded))

    mask = torch.cat([(torch.arange(width) < d["input_ids"].shape[1])[None] for d in documents]).long()
    return [{"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": mask}]


def test_filling_is_at_most_an_eighth_and_lengths_are_few() -> None:
    assert [padded_length(n) for n in (1, 7, 8, 9, 16, 17, 31, 33, 37)] == [1, 7, 8, 9, 16, 18, 32, 36, 40]
    for length in range(1, 5000):
        assert length <= padded_length(length) <= length * 9 / 8
    assert len({padded_length(n) for n in range(2048, 4096)}) <= 9


@pytest.mark.parametrize(
    ("name", "experts"), [("qwen3.5", None), ("qwen3-next", "grouped_mm"), ("gpt-oss", "eager"), ("bloom", None)]
)
def test_filled_documents_train_as_each_by_itself(name: str, experts: str | None) -> None:
    check_training(build(name, experts), filled_steps(2), alone=True)


@pytest.mark.parametrize("name", ["gpt-oss", "lfm2"])
def test_plans_do_not_show(name: str) -> None:
    found = []
    for activation in ("keep", "recompute", "offload"):
        ours = engine(build(name), plan={"activation": activation})
        outputs = [ours.step(step) for step in filled_steps(2)]
        found.append(([(o.loss, o.grad_norm) for o in outputs], dict(ours.state_dict())))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, weights[name]) for name, value in found[0][1].items())


def test_filling_does_not_count_in_the_routers_loss() -> None:
    step = filled_steps(1)[0]
    # a document of one token has nothing to predict, so that only packed rows hold it
    step[1] = {name: value[:, :50] for name, value in step[1].items()}
    model = build("gpt-oss", "grouped_mm", **ASKED)
    alone, together = engine(model).step(as_rows(step)), engine(model).step(step)
    for field in ("loss", "aux_loss", "grad_norm"):
        assert getattr(together, field) == pytest.approx(getattr(alone, field), rel=1e-5)


def test_documents_that_do_not_begin_at_0_are_refused() -> None:
    row = packed([[9, 7]], vocab=VOCAB)
    row["position_ids"][:, 9:] += 3
    with pytest.raises(ConfigError, match=r"does not begin at 0, but layers\.0 is given each document"):
        engine(build("lfm2")).step([row])


def test_only_the_layers_that_need_it_get_documents_one_by_one() -> None:
    decoder = engine(build("qwen3.5")).decoder
    assert decoder.config.layer_types[0] == "linear_attention"
    assert decoder.mixing_layers == {0}
    assert engine(build("mistral")).decoder.mixing_layers == frozenset()
