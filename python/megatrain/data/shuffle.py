"""Orders that depend on nothing but their key: the same on every machine and in every version of every library."""

import numpy as np

from megatrain.system.splitmix import GAMMA, draw, mix

_START = 0x6D65676174726169


def order(count: int, *key: int) -> np.ndarray:
    """(count,) int64: a permutation of range(count), drawn by `key`."""
    state = _START
    for part in key:
        state = draw(state ^ draw(part))
    return np.argsort(mix(np.arange(1, count + 1, dtype=np.uint64) * GAMMA + state), kind="stable")
