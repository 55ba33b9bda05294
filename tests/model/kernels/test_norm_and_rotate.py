import pytest
import torch
from torch import Tensor

from model import backends
from model.config import LlamaConfig
from model.kernels import norm_and_rotate as kernels
from model.llama import Llama, rotary_tables, rotate

EPS = 1e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    cos, sin = (table.float() for table in rotary_tables(shape[1], shape[-1], theta=100.0))
    x, grad_out = torch.randn(2, *shape).to(dtype)
    return tuple(t.to(DEVICE) for t in (3 * x, torch.rand(shape[-1]) + 0.5, cos, sin, grad_out))


def exact(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    x, gain, cos, sin = (t.detach().double() for t in (x, gain, cos, sin))
    leaves = x.requires_grad_(), gain.requires_grad_()
    out = rotate(x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * gain, cos, sin)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def by_kernel(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    leaves = x.detach().requires_grad_(), gain.detach().requires_grad_()
    out = kernels.norm_and_rotate(*leaves, EPS, cos, sin)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize(
    "device", ["cpu" if DEVICE == "cpu" else pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("shape", [(2, 37, 3, 16), (1, 1, 1, 2), (3, 50, 5, 64)])
def test_it_is_its_formula_with_gradients(device, shape, monkeypatch):
    monkeypatch.setattr(kernels, "BACKWARD_BLOCKS", 3)  # fewer than there are blocks of rows
    given = inputs(shape, torch.float32)
    for found, expected in zip(by_kernel(*given), exact(*given), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=1e-5)


# The interpreter cuts bfloat16 off instead of rounding it.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_16_bit_numbers_are_rounded_once(dtype):
    x, gain, cos, sin, _ = inputs((2, 37, 3, 16), dtype)
    expected = exact(x, gain, cos, sin, x)[0]
    found = kernels.norm_and_rotate(x, gain, EPS, cos, sin)
    assert found.dtype == dtype
    differs = found != expected.to(dtype)  # only where float32 falls on the other side of a tie
    assert differs.float().mean() < 0.01
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_strides_do_not_matter():
    x, gain, cos, sin, grad_out = inputs((2, 37, 3, 16), torch.float32)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, grad_out)]
    found = by_kernel(strided[0], gain, cos, sin, strided[1])
    torch.testing.assert_close(found, by_kernel(x, gain, cos, sin, grad_out), atol=0, rtol=0)


def test_it_is_a_well_behaved_operator():
    x, gain, cos, sin, _ = inputs((1, 5, 2, 8), torch.float32)
    arguments = (x.requires_grad_(), gain.requires_grad_(), EPS, cos, sin)
    torch.library.opcheck(kernels.norm_and_rotate, arguments)


@pytest.mark.parametrize(("d_head", "can"), [(64, True), (2, True), (96, False), (1, False), (4096, False)])
def test_heads_it_cannot_halve_into_powers_of_two_are_left_to_pytorch(d_head, can):
    assert kernels.supports(torch.empty(1, 1, 1, d_head, device="meta")) is False  # no GPU
    if DEVICE == "cuda":
        assert kernels.supports(torch.empty(1, 1, 1, d_head, device="cuda")) is can


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_computes_the_same_with_and_without(compiled, monkeypatch):
    config = LlamaConfig(
        vocab_size=64, d_model=64, n_layers=2, n_heads=2, d_head=32, d_ffn=96, max_context=130
    )
    shape = {"device": torch.device("cuda"), "dtype": torch.float32, "d_head": 32, "is_gqa": False}
    attend = backends.build({"backend": "fpa", "sdpa": "math"}, **shape).attend
    torch.manual_seed(0)
    llama = Llama(config, attend).cuda()
    tokens = torch.randint(64, (2, 130), device="cuda")

    def gradients() -> list[Tensor]:
        function = torch.compile(llama, fullgraph=True) if compiled else llama
        return torch.autograd.grad(function(tokens[:, :-1], tokens[:, 1:]), list(llama.parameters()))

    found = gradients()
    monkeypatch.setattr(kernels, "supports", lambda x: False)
    torch.compiler.reset()
    torch.testing.assert_close(found, gradients(), atol=1e-6, rtol=1e-4)
