import math

import pytest
import torch
import torch.nn.functional as F

from model.loss import CHUNK, IGNORE_INDEX, linear_cross_entropy


def inputs(tokens=37, channels=16, words=50, scale=1.0):
    x = (scale * torch.randn(tokens, channels)).requires_grad_()
    weight = torch.randn(words, channels).requires_grad_()
    return x, weight, torch.randint(words, (tokens,))


def exact(x, weight, targets):
    """The loss and its gradients by torch's own operator in float64, where all logits exist."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(x @ weight.T, targets)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def found(x, weight, targets, chunk=CHUNK, factor=1.0):
    loss = linear_cross_entropy(x, weight, targets, chunk)
    return loss.detach(), *torch.autograd.grad(factor * loss, (x, weight))


@pytest.mark.parametrize("chunk", [1, 10, 36, 37, CHUNK])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk):
    x, weight, targets = inputs(scale=3.0)
    targets[[3, 20]] = IGNORE_INDEX
    for result, expected in zip(found(x, weight, targets, chunk), exact(x, weight, targets), strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


def test_gradients_follow_what_the_loss_is_multiplied_by():
    x, weight, targets = inputs()
    _, *whole = found(x, weight, targets)
    _, *third = found(x, weight, targets, factor=1 / 3)
    for one, other in zip(whole, third, strict=True):
        torch.testing.assert_close(one, 3 * other)


def test_without_gradients_the_loss_is_the_same():
    x, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, 10)
    assert loss == linear_cross_entropy(x, weight, targets, 10)
    assert not loss.requires_grad


def test_large_logits_do_not_overflow():
    x, weight, targets = inputs(scale=1e3)
    loss, *gradients = found(x, weight, targets, 10)
    assert loss.item() == pytest.approx(exact(x, weight, targets)[0].item(), rel=1e-6)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_when_every_target_is_left_out_the_loss_is_nan_as_torchs():
    x, weight, targets = inputs()
    targets[:] = IGNORE_INDEX
    assert math.isnan(linear_cross_entropy(x, weight, targets).item())
    assert math.isnan(F.cross_entropy(x @ weight.T, targets).item())


@pytest.mark.parametrize("no_word", [-1, 50])
def test_a_target_that_is_no_word_is_an_error(no_word):
    x, weight, targets = inputs()
    targets[5] = no_word
    with pytest.raises(RuntimeError, match=f"index {no_word} is out of bounds"):
        linear_cross_entropy(x, weight, targets)


def test_targets_of_another_length_are_refused():
    x, weight, _ = inputs()
    with pytest.raises(ValueError, match="36 targets for 37 tokens"):
        linear_cross_entropy(x, weight, torch.zeros(36, dtype=torch.int64))
