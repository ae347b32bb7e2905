"""Keyed numbers are the same everywhere and for ever: orders of data and seeds of dropout are made of them."""

import numpy as np

from megatrain.data.shuffle import order
from megatrain.engine.step import random_key
from megatrain.system.splitmix import GAMMA, draw, mix


def test_the_numbers_are_those_of_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [1234567 + GAMMA * k for k in range(4)]
    assert [draw(state) for state in states] == published
    assert mix(np.array([state + GAMMA & (1 << 64) - 1 for state in states], dtype=np.uint64)).tolist() == published


def test_an_order_and_a_seed_stay_what_earlier_versions_made_of_their_key() -> None:
    assert order(12, 3, 1).tolist() == [3, 8, 11, 2, 0, 7, 6, 1, 5, 9, 4, 10]
    assert random_key(7, 0, 2, 5) == 3042581484180371257
