"""Random orders that depend only on their key: the same on every machine and with every library version."""

import numpy as np

from megatrain.system.splitmix import GAMMA, draw, mix

_START = 0x6D65676174726169


def order(count: int, *key: int) -> np.ndarray:
    """(count,) int64: the permutation of range(count) that `key` determines."""
    state = _START
    for part in key:
        state = draw(state ^ draw(part))
    return np.argsort(mix(np.arange(1, count + 1, dtype=np.uint64) * GAMMA + state), kind="stable")
