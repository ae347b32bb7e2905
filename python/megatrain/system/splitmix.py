"""The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):
64 well-mixed bits from any 64 bits, the same on every machine and with every library version."""

from typing import TypeVar

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
"""What splitmix64 adds to its counter for the next number."""

_MASK = (1 << 64) - 1

Bits = TypeVar("Bits", int, np.ndarray)


def mix(bits: Bits) -> Bits:
    """Mixed bits of a whole number below 2**64, or of each element of an array of uint64."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed: Bits = bits ^ (bits >> 31)
    return mixed


def draw(state: int) -> int:
    """The number that splitmix64 gives at a state: 64 bits."""
    return mix((state + GAMMA) & _MASK)
