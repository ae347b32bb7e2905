"""What a layer must be for its experts to be spread over several units."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.models.autograd_graph import nodes_between
from megatrain.models.expert_groups import Experts


class Bank(nn.Module):
    """Three experts that add their weight to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(3, 4, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states @ self.up[int(top_k_index[0, 0])] * top_k_weights


class Half(nn.Module):
    """Calls its experts, and does something with what they return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.experts, self.out = Bank(), nn.Linear(4, 4, bias=kind == "a matrix and a bias")

    def forward(self, hidden: Tensor) -> Any:
        rows = hidden.view(-1, 4)
        chosen, weights = torch.zeros(len(rows), 1, dtype=torch.int64), torch.ones(len(rows), 1)
        found = self.experts(rows, chosen, weights)
        if self.kind == "twice":
            found = found + self.experts(rows, chosen, weights)
        if self.kind.startswith("a matrix"):
            found = self.out(found)
        if self.kind == "a matrix of batches":
            found = torch.bmm(found[None], torch.ones(1, 4, 4))[0]
        if self.kind == "reads its experts":
            found = found + self.experts.up[0, 0]
        beside = self.out(rows)  # of the input: that is no matter
        return hidden + (found * 2 + beside).view_as(hidden)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain", ""),
        ("twice", "its MLP calls its experts 2 times"),
        ("a matrix", "its MLP multiplies what its experts return by a matrix"),
        ("a matrix and a bias", "its MLP multiplies what its experts return by a matrix"),
        ("a matrix of batches", "its MLP multiplies what its experts return by a matrix"),
        ("reads its experts", "its MLP cannot be computed around its experts (AttributeError)"),
    ],
)
def test_what_is_around_experts_is_tried(kind: str, reason: str) -> None:
    found = Experts("experts", ("up",), 3).tried(Half(kind), lambda half, hidden: half(hidden), torch.ones(1, 2, 4))
    assert found == (reason or Experts("experts", ("up",), 3, chosen=1))
    assert Experts("experts", ("up",), 8, chosen=2).share(3) == 1 - 0.75**3


def test_nodes_between_are_those_on_the_way_alone() -> None:
    leaf, other = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    output = (leaf.exp() + (other @ other).sin()).sum()
    names = [node.name() for node in nodes_between(output, leaf)]
    assert [name.rpartition(":")[2] for name in names] == [
        "AccumulateGrad",
        "ExpBackward0",
        "AddBackward0",
        "SumBackward0",
    ]
