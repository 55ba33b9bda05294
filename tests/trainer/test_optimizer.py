import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.optimizer import adamw, learning_rate
from trainer.settings import OptimizerSettings

SETTINGS = OptimizerSettings(
    lr=3e-5, min_lr_ratio=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=1.0
)


def rate(step, steps=300_000, warmup_steps=7_500):
    return learning_rate(step, steps=steps, warmup_steps=warmup_steps, settings=SETTINGS)


def test_schedule_at_its_landmarks():
    assert rate(0) == pytest.approx(3e-5 / 7_500)
    assert rate(7_499) == pytest.approx(3e-5)
    middle = 7_500 + (300_000 - 7_500) // 2 - 1
    assert rate(middle) == pytest.approx((3e-5 + 3e-6) / 2)
    assert rate(299_999) == pytest.approx(3e-6)


def test_schedule_matches_torchs_cosine():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=SETTINGS.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=3e-6)
    for step in range(10, 100):
        optimizer.step()
        scheduler.step()
        assert rate(step, steps=100, warmup_steps=10) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)


def test_linear_schedule_matches_torchs():
    settings = replace(SETTINGS, schedule="linear", min_lr_ratio=0.2)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=settings.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=90)
    for step in range(10, 100):
        optimizer.step()
        scheduler.step()
        rate = learning_rate(step, steps=100, warmup_steps=10, settings=settings)
        assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
    assert rate == pytest.approx(0.2 * settings.lr)


def test_no_warmup_starts_below_the_peak_and_never_rises():
    rates = [rate(step, steps=50, warmup_steps=0) for step in range(50)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < SETTINGS.lr


def test_decays_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.RMSNorm(4), nn.Linear(4, 3, bias=True))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 3e-5 * 0.1) if parameter.dim() == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-7, atol=0)


def test_first_step_is_the_sign_of_the_gradient():
    """Adam's bias-corrected first step: lr · g / (|g| + eps)."""
    model = nn.RMSNorm(3)
    optimizer = adamw(model, SETTINGS)
    model.weight.grad = torch.tensor([2.0, -3.0, 1e-3])
    optimizer.step()
    torch.testing.assert_close(
        model.weight.detach(), 1 - 3e-5 * torch.tensor([1.0, -1.0, 1.0]), rtol=1e-7, atol=1e-9
    )
    assert math.isclose(optimizer.param_groups[0]["betas"][1], 0.95)
