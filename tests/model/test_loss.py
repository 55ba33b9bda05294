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


def test_gradients_follow_what_the_loss_is_multiplied_by_and_are_not_needed():
    x, weight, targets = inputs()
    loss, *whole = found(x, weight, targets, 10)
    _, *third = found(x, weight, targets, factor=1 / 3)
    for one, other in zip(whole, third, strict=True):
        torch.testing.assert_close(one, 3 * other)
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, targets, 10)
    assert alone == loss
    assert not alone.requires_grad


def test_large_logits_do_not_overflow_and_no_target_gives_nan():
    x, weight, targets = inputs(scale=1e3)
    loss, *gradients = found(x, weight, targets, 10)
    assert loss.item() == pytest.approx(exact(x, weight, targets)[0].item(), rel=1e-6)
    assert all(gradient.isfinite().all() for gradient in gradients)
    targets[:] = IGNORE_INDEX  # every one is left out: as torch's
    assert linear_cross_entropy(x, weight, targets).isnan()


def test_targets_outside_the_vocabulary_or_of_another_length_are_refused():
    x, weight, targets = inputs()
    for no_word in (-1, 50):
        targets[5] = no_word
        with pytest.raises(RuntimeError, match=f"index {no_word} is out of bounds"):
            linear_cross_entropy(x, weight, targets)
    with pytest.raises(ValueError, match="36 targets for 37 tokens"):
        linear_cross_entropy(x, weight, targets[1:])
