"""Which values of a series are spikes."""

import math

from megatrain.training.spikes import SpikeDetector


def flagged(values: list[float | None]) -> list[int]:
    detector = SpikeDetector()
    return [index for index, value in enumerate(values) if detector.add(value) is not None]


def noisy(count: int) -> list[float]:
    return [2.0 + 0.05 * math.sin(7.3 * index) for index in range(count)]


def test_a_jump_far_above_the_recent_values_is_a_spike_and_gives_their_median() -> None:
    detector = SpikeDetector()
    for value in noisy(40):
        assert detector.add(value) is None
    median = detector.add(6.0)
    assert median is not None
    assert abs(median - 2.0) < 0.05


def test_noise_a_falling_loss_and_a_drop_are_none() -> None:
    assert flagged(noisy(200)) == []
    assert flagged([10.0 * 0.97**index for index in range(200)]) == []
    assert flagged([*noisy(40), 0.5]) == []


def test_a_constant_series_does_not_flag_its_own_rounding() -> None:
    assert flagged([1.0] * 40 + [1.0001]) == []
    assert flagged([1.0] * 40 + [2.0]) == [40]


def test_nothing_is_compared_before_there_is_enough_to_compare_with() -> None:
    assert flagged([1.0, 50.0, 1.0]) == []
    assert flagged([*noisy(15), 50.0]) == []
    assert flagged([*noisy(16), 50.0]) == [16]


def test_values_that_are_missing_or_not_finite_are_left_out() -> None:
    assert flagged([*noisy(20), None, math.nan, math.inf, *noisy(20)]) == []


def test_a_few_spikes_do_not_hide_the_next_one() -> None:
    assert flagged([*noisy(40), 9.0, 9.0, 9.0, *noisy(5), 9.0]) == [40, 41, 42, 48]
