"""The MLP half of a layer in tiles of tokens, so that the activations of one tile exist at a time.

Forward keeps only the half's input. Backward computes one tile after another again, with gradients, and goes back
through it at once; the gradients of the weights are added up over the tiles as they are over micro-batches. The tiles
are calls of the layer as any other, so a compiled layer stays one graph. (Tiled computation of the MLP: ALST,
arXiv 2506.13996, section 3.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.last_matmul import outputs_unwanted
from megatrain.engine.saved_tensors import CheckpointedCall


def tile_length(tokens: int, tiles: int) -> int:
    """Tokens of a tile; the last one may have fewer."""
    return -(-tokens // tiles)


def in_tiles(layer: Callable[[Tensor], Any], hidden: Tensor, tiles: int) -> Tensor:
    """`layer` of `hidden` (batch, seq, width), computed without gradients a tile of tokens at a time."""
    output = torch.empty_like(hidden)
    with torch.no_grad():
        for source, target in zip(cut_tokens(hidden, tiles), cut_tokens(output, tiles), strict=True):
            target.copy_(layer(source))
    return output


def cut_tokens(hidden: Tensor, tiles: int) -> Iterator[Tensor]:
    """Views (1, tokens of the tile, width) of the tokens of (batch, seq, width)."""
    rows = hidden.view(1, -1, hidden.shape[-1])
    return iter(torch.split(rows, tile_length(rows.shape[1], tiles), 1))


class TiledCall(CheckpointedCall):
    """One MLP half with one micro-batch, from its forward until its backward has ended."""

    __slots__ = ("_tiles",)

    def use_tiles(self, tiles: int) -> None:
        """In how many tiles it is computed."""
        self._tiles = tiles

    def forward(self, hidden: Tensor, activation: str, input_on_host: bool) -> Tensor:
        """The half's output for `hidden` (batch, seq, width), of which backward needs nothing but the input. With the
        activation `offload` the input goes to the host, as it does with `input_on_host`."""
        self._leaf = self._input = hidden = hidden.detach().contiguous()
        if input_on_host or activation == "offload":
            self._stage_input()
        output = in_tiles(self._layer, hidden, self._tiles)
        if self._input_is_away:
            self._leaf = self._input = hidden.new_empty(0)
        return output

    def backward_by_tile(
        self,
        grad: Tensor,  # gradient of the output, (batch, seq, width)
        parameters: list[Tensor],
        image: int,
        stage_at: int | None,
        begin: Callable[[bool], None],  # before each tile; whether it is the first
        finish: Callable[[Sequence[Tensor | None]], None],  # after each, with the gradients of the parameters
    ) -> Tensor:
        """The gradient of the input, tile by tile. Arguments are as for `backward`."""
        self._fetch_input(image, stage_at)
        result = torch.empty_like(grad, memory_format=torch.contiguous_format)
        parts = (cut_tokens(tensor, self._tiles) for tensor in (self._input, grad.contiguous(), result))
        for number, (source, of_output, target) in enumerate(zip(*parts, strict=True)):
            leaf = source.detach().requires_grad_()
            begin(number == 0)
            with torch.enable_grad(), outputs_unwanted():
                output = self._layer(leaf)
            of_input, *found = torch.autograd.grad(output, (leaf, *parameters), of_output, allow_unused=True)
            del output
            assert of_input is not None
            target.copy_(of_input)
            finish(found)
        return result
