from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import get_wsd_schedule

from trainer.schedule import learning_rate, length_problems
from trainer.settings import OptimizerSettings

SETTINGS = OptimizerSettings(lr=3e-5, min_lr_ratio=0.1)
WSD = replace(SETTINGS, schedule="wsd", decay_ratio=0.2, decay_type="linear")


def rate(step, steps=300_000, warmup_steps=7_500, settings=SETTINGS):
    return learning_rate(step, steps=steps, warmup_steps=warmup_steps, settings=settings)


def of_torch(make_scheduler, steps):
    """The rate by a scheduler of torch, with the peak of SETTINGS, after 1 to `steps` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=SETTINGS.lr)
    scheduler = make_scheduler(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        yield scheduler.get_last_lr()[0]


def test_cosine_at_its_landmarks():
    assert rate(0) == pytest.approx(3e-5 / 7_500)
    assert rate(7_499) == pytest.approx(3e-5)
    middle = 7_500 + (300_000 - 7_500) // 2 - 1
    assert rate(middle) == pytest.approx((3e-5 + 3e-6) / 2)
    assert rate(299_999) == pytest.approx(3e-6)


def test_cosine_matches_torchs():
    theirs = of_torch(
        lambda x: torch.optim.lr_scheduler.CosineAnnealingLR(x, T_max=90, eta_min=3e-6), steps=90
    )
    ours = [rate(step, steps=100, warmup_steps=10) for step in range(10, 100)]
    assert ours == pytest.approx(list(theirs), rel=1e-9)


def test_linear_matches_torchs():
    theirs = of_torch(lambda x: torch.optim.lr_scheduler.LinearLR(x, 1.0, 0.2, total_iters=90), steps=90)
    settings = replace(SETTINGS, schedule="linear", min_lr_ratio=0.2)
    ours = [rate(step, steps=100, warmup_steps=10, settings=settings) for step in range(10, 100)]
    assert ours == pytest.approx(list(theirs), rel=1e-9)
    assert ours[-1] == pytest.approx(0.2 * settings.lr)


def test_no_warmup_starts_below_the_peak_and_never_rises():
    rates = [rate(step, steps=50, warmup_steps=0) for step in range(50)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < SETTINGS.lr


@pytest.mark.parametrize(("shape", "halfway"), [("linear", 1 - 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_wsd_at_its_ends_and_borders(shape, halfway):
    """10 steps of warm-up, 70 at the peak, 20 of decay; in units of the peak, with a floor of a tenth."""
    settings = replace(WSD, decay_type=shape, lr=1.0)
    rates = [rate(step, steps=100, warmup_steps=10, settings=settings) for step in range(100)]
    assert rates[:10] == [(step + 1) / 10 for step in range(10)]
    assert rates[10:80] == [1.0] * 70
    assert rates[80] == pytest.approx(0.1 + 0.9 * (0.95 if shape == "linear" else 1 - 0.05**0.5))
    assert rates[89] == pytest.approx(0.1 + 0.9 * halfway)
    assert rates[99] == pytest.approx(0.1)
    assert rates[79:] == sorted(rates[79:], reverse=True)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_wsd_matches_transformers(shape):
    theirs = of_torch(
        lambda x: get_wsd_schedule(
            x, 7, num_decay_steps=17, num_training_steps=83, decay_type=shape, min_lr_ratio=0.1
        ),
        steps=83,
    )
    settings = replace(WSD, decay_ratio=0.2, decay_type=shape)  # 16.6 steps, rounded to 17
    ours = [rate(step, steps=83, warmup_steps=7, settings=settings) for step in range(83)]
    assert ours[7:] == pytest.approx(list(theirs)[7:], rel=1e-9)  # theirs warms up from the floor, not from 0


def test_wsd_has_the_defaults_of_its_documentation():
    bare = replace(WSD, decay_ratio=None, decay_type=None)
    settings = replace(WSD, decay_ratio=0.2, decay_type="1-sqrt")
    for step in (0, 5, 79, 80, 99):
        assert rate(step, 100, 3, bare) == rate(step, 100, 3, settings)


def test_wsd_before_its_decay_does_not_depend_on_the_length_of_the_run():
    for step in range(80):
        assert rate(step, 100, 10, WSD) == rate(step, 1000, 10, WSD)


def test_wsd_decays_in_one_step_at_least_and_in_all_at_most():
    assert [rate(step, 3, 1, replace(WSD, decay_ratio=0.01, lr=1.0)) for step in range(3)] == [1, 1, 0.1]
    whole, linear = replace(WSD, decay_ratio=1.0), replace(SETTINGS, schedule="linear")
    assert [rate(s, 9, 0, whole) for s in range(9)] == [rate(s, 9, 0, linear) for s in range(9)]


def test_warmup_and_decay_must_fit_into_the_run():
    (problem,) = length_problems(WSD, steps=100, warmup_steps=81)
    assert "tps.warmup_steps=81 and the decay of 20 steps" in problem
    assert "use tps.warmup_steps=80" in problem
    assert list(length_problems(WSD, steps=100, warmup_steps=80)) == []
