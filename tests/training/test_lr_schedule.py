"""Learning-rate schedules against torch's and against what the configuration promises."""

import math

import pytest
import torch

from megatrain.training.lr_schedule import Schedule


def test_step_k_of_w_warm_up_steps_uses_lr_times_k_over_w() -> None:
    schedule = Schedule(name="cosine", warmup=4, total=100)
    assert [schedule.lr(step, 1.0) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_a_fraction_of_warm_up_is_rounded_up() -> None:
    assert Schedule(warmup=0.03, total=100).warmup_steps == 3
    assert Schedule(warmup=0.03, total=10).warmup_steps == 1
    assert Schedule(warmup=0.0, total=10).warmup_steps == 0
    assert Schedule(warmup=50, total=10).warmup_steps == 10
    # in floating point their products are a little more than the whole numbers that they are
    for part, total in ((0.07, 100), (0.14, 100), (0.28, 100), (0.55, 100), (0.07, 10_000)):
        assert Schedule(warmup=part, total=total).warmup_steps == round(part * total)


def test_cosine_is_torchs_cosine_after_warm_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    schedule = Schedule(name="cosine", warmup=0, min_lr=0.1, total=20)
    for step in range(1, 21):
        assert schedule.lr(step, 0.5) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        reference.step()


def test_linear_falls_evenly_to_one_notch_above_the_floor() -> None:
    schedule = Schedule(name="linear", warmup=0, total=4)
    assert [schedule.lr(step, 1.0) for step in range(1, 5)] == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_constant_stays() -> None:
    schedule = Schedule(name="constant", warmup=2, total=9)
    assert [schedule.lr(step, 2.0) for step in (3, 9)] == [2.0, 2.0]


def test_wsd_stays_and_then_falls() -> None:
    schedule = Schedule(name="wsd", warmup=0, total=10, decay=0.4)
    values = [schedule.lr(step, 1.0) for step in range(1, 11)]
    assert values[:7] == [1.0] * 7
    assert values[7:] == pytest.approx([0.75, 0.5, 0.25])


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_every_rate_is_positive_and_at_most_the_base(name: str) -> None:
    for total in (1, 2, 3, 50):
        for warmup in (0, 0.03, 1, 7):
            schedule = Schedule(name=name, warmup=warmup, total=total)
            rates = [schedule.lr(step, 3e-4) for step in range(1, total + 1)]
            assert all(0 < rate <= 3e-4 and math.isfinite(rate) for rate in rates)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "cosin"}, "cosine"),
        ({"total": 0}, "at least 1"),
        ({"warmup": -1.0}, "warmup"),
        ({"min_lr": math.nan}, "min_lr"),
    ],
)
def test_a_wrong_schedule_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**settings)
