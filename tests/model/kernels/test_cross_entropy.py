import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import cross_entropy as kernels
from model.loss import IGNORE_INDEX, linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARE = 0.125
on_each_device = pytest.mark.parametrize(
    "device", ["cpu" if DEVICE == "cpu" else pytest.param("cuda", marks=pytest.mark.gpu)]
)


def inputs(tokens: int, words: int, dtype=torch.float32, scale=3.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (scale * torch.randn(tokens, words)).to(dtype)
    targets = torch.randint(words, (tokens,))
    targets[0], targets[-1], targets[tokens // 2] = 0, words - 1, IGNORE_INDEX
    return logits.to(DEVICE), targets.to(DEVICE)


def exact(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf, targets, reduction="none", ignore_index=IGNORE_INDEX)
    return losses.detach(), torch.autograd.grad(SHARE * losses.sum(), leaf)[0]


def by_kernel(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.cross_entropy(logits, targets, torch.tensor(SHARE, device=logits.device), IGNORE_INDEX)


@on_each_device
@pytest.mark.parametrize("words_at_a_time", [32, 4096])
@pytest.mark.parametrize(("tokens", "words"), [(3, 1), (5, 31), (4, 64), (7, 301)])
def test_it_is_its_formula_with_the_gradient(device, tokens, words, words_at_a_time, monkeypatch):
    monkeypatch.setattr(kernels, "WORDS", words_at_a_time)
    given = inputs(tokens, words)
    for found, expected in zip(by_kernel(*given), exact(*given), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


# The interpreter cuts bfloat16 off instead of rounding it.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_of_16_bit_logits_only_the_gradient_is_rounded(dtype):
    given = inputs(5, 301, dtype)
    (losses, gradient), (exact_losses, exact_gradient) = by_kernel(*given), exact(*given)
    torch.testing.assert_close(losses.double(), exact_losses, atol=2e-6, rtol=2e-6)
    assert gradient.dtype == dtype
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=smallest, rtol=eps / 2 * 1.001)


@pytest.mark.parametrize("scale", [1e3, 1e30])
def test_large_logits_do_not_overflow(scale, monkeypatch):
    monkeypatch.setattr(kernels, "WORDS", 16)
    given = inputs(5, 100, scale=scale)
    for found, expected in zip(by_kernel(*given), exact(*given), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-7, rtol=1e-6)


def test_a_word_that_cannot_come_takes_no_part():
    logits, targets = inputs(5, 40)
    logits[:, 7] = -torch.inf
    targets[targets == 7] = 8
    losses, gradient = by_kernel(logits, targets)
    assert (gradient[:, 7] == 0).all()
    torch.testing.assert_close(losses.double(), exact(logits, targets)[0], atol=2e-6, rtol=2e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter: inf less inf
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -1, 40, 1 << 40])
def test_what_is_not_finite_or_no_word_makes_the_loss_of_its_row_nan(bad):
    logits, targets = inputs(5, 40)
    if isinstance(bad, int):
        targets[1] = bad
    else:
        logits[1, 3] = bad
    losses, gradient = by_kernel(logits, targets)
    assert losses.isnan().tolist() == [False, True, False, False, False]
    assert isinstance(bad, int) or not gradient[1].isfinite().any()
    assert gradient[[0, 2, 3, 4]].isfinite().all()


def test_strides_do_not_matter():
    logits, targets = inputs(5, 40)
    strided = torch.stack((logits, logits)).permute(1, 2, 0)[..., 0]
    every_second = torch.stack((targets, targets), 1).flatten()[::2]
    torch.testing.assert_close(by_kernel(strided, every_second), by_kernel(logits, targets), atol=0, rtol=0)


def test_it_is_a_well_behaved_operator():
    arguments = (*inputs(5, 40), torch.tensor(SHARE, device=DEVICE), IGNORE_INDEX)
    torch.library.opcheck(kernels.cross_entropy, arguments)


def test_logits_on_a_cpu_are_left_to_pytorch():
    assert not kernels.supports(torch.empty(1, 1))


@on_each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_and_its_gradients_are_the_same_with_and_without(device, compiled, monkeypatch):
    torch.manual_seed(0)
    tokens, words, chunk = (300, 1000, 128) if device == "cuda" else (30, 70, 13)
    x, weight = torch.randn(tokens, 64, device=device), torch.randn(words, 64, device=device)
    targets = torch.randint(words, (tokens,), device=device)
    targets[7] = IGNORE_INDEX
    leaves = x.requires_grad_(), weight.requires_grad_()
    backend = "inductor" if device == "cuda" else "aot_eager"

    def results(kernel: bool) -> tuple[Tensor, ...]:
        torch.compiler.reset()
        monkeypatch.setattr(kernels, "supports", lambda logits: kernel)
        function = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
        loss = (function if compiled else linear_cross_entropy)(x, weight, targets, chunk)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(results(kernel=True), results(kernel=False), atol=1e-6, rtol=1e-4)
