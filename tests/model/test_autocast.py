"""What must stay in float32 under autocast: against float64, closer than bfloat16 would leave it."""

import torch

from model.llama import RMSNorm, norm_and_rotate, rotary_tables
from model.loss import linear_cross_entropy

ROUNDING = 2.0**-9  # of one value to bfloat16, relative, at most


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def test_the_gain_of_a_norm_is_not_rounded():
    """Gains of 1 + 2⁻¹⁰ are 1 in bfloat16; the result, rounded once, is at most a step away."""
    norm = RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        norm.weight.fill_(1 + 2.0**-8 - 2.0**-12)  # 1 in bfloat16
    x = torch.randn(200, 64).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight[0].double()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.to(torch.float32).bfloat16())


def test_a_normed_head_is_rounded_once_after_the_rotation():
    norm = RMSNorm(32, eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    cos, sin = (x.float() for x in rotary_tables(16, 32, 100.0))
    x = torch.randn(2, 16, 3, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm_and_rotate(x, norm, cos, sin)
    halves = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    first, second = halves.chunk(2, -1)
    c, s = cos.double(), sin.double()
    exact = torch.cat((first * c - second * s, second * c + first * s), -1)
    same = (found == exact.float().bfloat16()).double().mean()
    assert same > 0.999  # rounded twice, one in five differs


def test_gradients_of_the_head_are_summed_over_chunks_in_float32():
    """100 chunks: in bfloat16 a sum loses what is smaller than a 256th of it."""
    tokens, channels, words = 800, 16, 24
    x = (1 + 0.1 * torch.randn(tokens, channels)).bfloat16().float()
    weight = (0.1 * torch.randn(words, channels)).bfloat16().float().requires_grad_()
    targets = torch.randint(words, (tokens,))
    gradients = []
    for chunk in (8, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, chunk)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.dtype == torch.float32
        gradients.append(gradient)
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x.double() @ exact.mT, targets), exact)
    # Chunks round their own products; their sum adds nothing to that.
    assert relative(gradients[0], wanted) < 1.5 * relative(gradients[1], wanted) + ROUNDING
