"""SwiGLU in one kernel each way: its formula in float64, on a CPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from model.kernels import swiglu as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate and up side by side, and the gradient of the result."""
    torch.manual_seed(0)
    *leading, width = shape
    gate_up, grad_out = torch.randn(*leading, 2 * width), torch.randn(shape)
    gate_up[..., 0] = 30.0  # sigmoids of 1 and of nearly 0
    gate_up[..., width - 1] = -30.0
    return gate_up.to(dtype).to(DEVICE), grad_out.to(dtype).to(DEVICE)


def exact(gate_up: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """The result and its gradient, in float64."""
    gate_up = gate_up.detach().double().requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    out = gate / (1 + (-gate).exp()) * up
    return out.detach(), *torch.autograd.grad(out, gate_up, grad_out.double())


def by_kernel(gate_up: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.detach().requires_grad_()
    out = kernels.swiglu(gate_up)
    return out.detach(), *torch.autograd.grad(out, gate_up, grad_out)


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 1), (3, 1024), (5, 1500), (0, 8)])
def test_it_is_its_formula_with_its_gradient(shape):
    given = inputs(shape, torch.float32)
    for found, expected in zip(by_kernel(*given), exact(*given), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=2e-6)


# The interpreter cuts bfloat16 off instead of rounding it.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_16_bit_numbers_are_rounded_once(dtype):
    given = inputs((37, 96), dtype)
    for found, expected in zip(by_kernel(*given), exact(*given), strict=True):
        assert found.dtype == dtype
        differs = found != expected.to(dtype)  # only where float32 falls on the other side of a tie
        assert differs.float().mean() < 0.01


def test_strides_do_not_matter():
    gate_up, grad_out = inputs((6, 10), torch.float32)
    strided = [t.T.contiguous().T for t in (gate_up, grad_out)]
    torch.testing.assert_close(by_kernel(*strided), by_kernel(gate_up, grad_out), atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, for 0 · Inf
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    gate_up, grad_out = inputs((2, 8), torch.float32)
    gate_up[0, 3] = value
    out, grad = by_kernel(gate_up, grad_out)
    assert not out[0, 3].isfinite()
    assert not grad[0, 11].isfinite()  # of up
    assert out[1].isfinite().all()


def test_it_is_a_well_behaved_operator():
    torch.library.opcheck(kernels.swiglu, (inputs((3, 8), torch.float32)[0].requires_grad_(),))
