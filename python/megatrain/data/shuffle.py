"""Orders that depend on nothing but their key: the same on every machine and in every version of every library."""

import numpy as np


def order(count: int, *key: int) -> np.ndarray:
    """(count,) int64: a permutation of range(count), drawn by `key`."""
    return np.argsort(_hash(count, *key), kind="stable")


def _hash(count: int, *key: int) -> np.ndarray:
    """(count,) uint64: splitmix64 of counters, from a start that mixes the key."""
    state = 0x6D65676174726169
    for part in key:
        state = _mix_int(state ^ _mix_int(part))
    with np.errstate(over="ignore"):
        value = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


def _mix_int(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
