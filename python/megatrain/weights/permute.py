"""A tensor's elements in another order of its dimensions, piece by piece: what a file that holds it transposed needs.

Nothing but the piece and its elements as they are held is in memory at a time.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megatrain.system.safetensors_io import aligned_buffer

Range = tuple[int, int]
"""First index of a dimension, and the one after the last."""


def gather(
    out: Tensor,  # [count], filled
    start: int,
    sizes: Sequence[int],
    held: Sequence[int],
    read: Callable[[int, Tensor], None],
) -> None:
    """Fills `out` with elements from `start` on of an array of `sizes`, which is held elsewhere with its dimensions in
    the order `held`, outermost first. `read(position, into)` fills a flat tensor with consecutive held elements."""
    there = [sizes[dim] for dim in held]
    back = [list(held).index(dim) for dim in range(len(sizes))]
    # Not from the allocator: it keeps what threads gave back in pieces of ever other sizes.
    room = aligned_buffer(out.numel() * out.dtype.itemsize)[: out.numel() * out.dtype.itemsize].view(out.dtype)
    done = 0
    for box in boxes(sizes, start, start + out.numel()):
        extents = [end - begin for begin, end in box]
        taken = room[: math.prod(extents)]
        filled = 0
        for position, count in runs([box[dim] for dim in held], there):
            read(position, taken[filled : filled + count])
            filled += count
        transposed = taken.view([extents[dim] for dim in held]).permute(back)
        _copy(out[done : done + filled].view(extents), transposed)
        done += filled


def _copy(out: Tensor, transposed: Tensor) -> None:
    """Copies a view; transposed matrices one by one, since torch goes through a single one in tiles, which is some ten
    times as fast."""
    if transposed.dim() > 2 and transposed.stride(-2) == 1:
        for one, other in zip(out, transposed, strict=True):
            _copy(one, other)
    else:
        out.copy_(transposed)


def boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[Range, ...]]:
    """Cuts elements [start, stop) of a row-major array into boxes, one range per dimension, in order."""
    if start >= stop:
        return
    inner = math.prod(sizes[1:])
    head = min(stop, -(-start // inner) * inner)
    tail = max(head, stop // inner * inner)

    def within_row(begin: int, end: int) -> Iterator[tuple[Range, ...]]:
        row = begin // inner
        for rest in boxes(sizes[1:], begin - row * inner, end - row * inner):
            yield ((row, row + 1), *rest)

    yield from within_row(start, head)
    if head < tail:
        yield ((head // inner, tail // inner), *((0, size) for size in sizes[1:]))
    yield from within_row(tail, stop)


def runs(box: Sequence[Range], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First element and length of every run of consecutive elements of a row-major array that a box is made of."""
    partial = [dim for dim, size in enumerate(sizes) if box[dim] != (0, size)]
    if not partial:
        yield 0, math.prod(sizes)
        return
    last = partial[-1]
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(last + 1)]
    begin, end = box[last]
    for index in itertools.product(*(range(*limits) for limits in box[:last])):
        outer = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield outer + begin * strides[last], (end - begin) * strides[last]


def piece_of(sizes: Sequence[int], held: Sequence[int], limit: int) -> int:
    """Elements of one piece, at most `limit`: whole matrices where one fits, since these are held in one stretch, else
    whole rows."""
    same = next((dim for dim, other in enumerate(held) if dim != other), len(held))
    for whole in (math.prod(sizes[same:]), math.prod(sizes[same + 1 :])):
        if whole <= limit:
            return limit // whole * whole
    return limit
