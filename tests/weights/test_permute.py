"""Elements in another order of their dimensions, against what torch makes of the same in memory."""

import itertools
import math

import pytest
import torch

from megatrain.weights.permute import boxes, gather, piece_of, runs

SIZES = [(7,), (4, 6), (3, 4, 5), (1, 5, 1, 3), (2, 3, 2, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_any_piece_in_any_order_is_that_of_torch(sizes: tuple[int, ...]) -> None:
    total = math.prod(sizes)
    values = torch.arange(total, dtype=torch.float32).view(sizes)
    for held in itertools.permutations(range(len(sizes))):
        stored = values.permute(held).contiguous().view(-1)

        def read(position: int, into: torch.Tensor, stored: torch.Tensor = stored) -> None:
            into.copy_(stored[position : position + into.numel()])

        for start, stop in itertools.combinations(range(total + 1), 2):
            out = torch.full((stop - start,), -1.0)
            gather(out, start, sizes, held, read)
            assert torch.equal(out, values.view(-1)[start:stop]), (held, start, stop)


@pytest.mark.parametrize("sizes", SIZES)
def test_boxes_cover_a_stretch_once_and_in_order(sizes: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(sizes)).view(sizes)
    for start, stop in itertools.combinations(range(values.numel() + 1), 2):
        cut = [values[tuple(slice(*limits) for limits in box)].flatten() for box in boxes(sizes, start, stop)]
        assert torch.cat(cut).tolist() == list(range(start, stop))
        assert len(cut) <= 2 * len(sizes)


def test_runs_are_as_long_as_they_can_be() -> None:
    assert list(runs([(0, 3), (0, 4), (0, 5)], (3, 4, 5))) == [(0, 60)]
    assert list(runs([(1, 3), (0, 4), (0, 5)], (3, 4, 5))) == [(20, 40)]
    assert list(runs([(1, 3), (2, 4), (0, 5)], (3, 4, 5))) == [(30, 10), (50, 10)]
    assert list(runs([(0, 3), (0, 4), (4, 5)], (3, 4, 5))) == [(5 * row + 4, 1) for row in range(12)]


def test_pieces_are_whole_matrices_or_else_whole_rows_or_else_what_fits() -> None:
    assert piece_of((8, 16, 32), (0, 2, 1), 2000) == 3 * 16 * 32
    assert piece_of((8, 16, 32), (0, 2, 1), 500) == 15 * 32
    assert piece_of((8, 16, 32), (0, 2, 1), 20) == 20
