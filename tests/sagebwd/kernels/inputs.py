"""Inputs of tests of kernels: extreme values, layouts, documents; and what the tests call their tensors."""

import torch
from torch import Tensor
from torch.nn.functional import pad

INPUTS = ("q", "k", "v", "grad_out")
NAMES = ("out", "dq", "dk", "dv")
GRADIENTS = NAMES[1:]
POISONS = (torch.nan, torch.inf, -torch.inf)


def assert_bit_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Finite, and the same bits."""
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], wanted[name]), name


# --- Values ------------------------------------------------------------------------------------------------


def constant(n: int, head_dim: int, value: float = 0.0, dtype: torch.dtype = torch.float16) -> Tensor:
    """(1, 1, n, head_dim), all ``value``."""
    return torch.full((1, 1, n, head_dim), value, dtype=dtype)


def alternating(like: Tensor, value: float) -> Tensor:
    """± value on even and odd tokens."""
    signs = torch.where(torch.arange(like.shape[-2]) % 2 == 0, 1.0, -1.0).to(like)
    return value * signs.unsqueeze(-1).expand_as(like)


def poison_one(inputs: list[Tensor], name: str, token: int, poison: float) -> list[Tensor]:
    """The inputs with channel 3 of one token of one of them replaced."""
    inputs[INPUTS.index(name)][..., token, 3] = poison
    return inputs


def with_means(inputs: list[Tensor], size: float = 2.0) -> list[Tensor]:
    """The inputs; V of each batch, key head and channel has a mean of its own, up to ``size``."""
    q, k, v, grad_out = inputs
    means = torch.linspace(-size, size, v[:, :, 0].numel()).view(*v.shape[:2], 1, -1)
    return [q, k, (v.float() + means).to(v.dtype), grad_out]


def outlier_channel(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """One channel of each tensor far larger than the others."""
    for x in (q, k, v, grad_out):
        x[..., 5] *= 20
    return q / 4, k / 4, v, grad_out


def outlier_tokens(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """One token in 50 ten times as large: it sets the scale of its block."""
    for x in (q, k, v, grad_out):
        x[..., ::50, :] *= 10
    return q, k, v, grad_out


def common_mean(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Every token of a tensor near the same vector, K most of all."""
    shift = torch.randn(4, q.shape[-1], generator=torch.Generator().manual_seed(1))
    return q + shift[0], k + 10 * shift[1], v + shift[2], grad_out + shift[3]


def sizes_far_apart(q, k, v, grad_out):
    """Tokens of V and dO from 2⁻⁸ to 2⁸, in opposite order."""
    sizes = 2.0 ** torch.linspace(-8, 8, q.shape[-2]).unsqueeze(-1)
    return q, k, v * sizes, grad_out * sizes.flip(0)


def few_values(*inputs):
    """±1: every element of Q, K, V and dO is exact in INT8, and many logits are equal."""
    return tuple(x.sign() for x in inputs)


def tiny_grad_out(q, k, v, grad_out):
    return q, k, v, 2.0**-20 * grad_out


def rows_far_apart(q, k, v, grad_out):
    grad_out[..., ::2, :] *= 2.0**-20
    return q, k, v, grad_out


def outlier_value(q, k, v, grad_out):
    v[..., 70, :] *= 1000
    return q, k, v, grad_out


#: Functions of q, k, v, dO that make them hard to quantize.
HARD_VALUES = (outlier_channel, outlier_tokens, common_mean, sizes_far_apart, few_values)


# --- Tokens that the causal mask hides ---------------------------------------------------------------------

#: What later tokens may be replaced by.
LATER = {
    "other values": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x),
    "huge": lambda x: 0.9 * torch.finfo(x.dtype).max * x.sign(),
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "Inf": lambda x: torch.full_like(x, torch.inf),
    "-Inf": lambda x: torch.full_like(x, -torch.inf),
}


def change_after(x: Tensor, cut: int, later: str) -> Tensor:
    """x with tokens ``cut`` and later replaced by what ``LATER[later]`` makes of them."""
    return torch.cat((x[..., :cut, :], LATER[later](x[..., cut:, :])), -2)


# --- Layouts -----------------------------------------------------------------------------------------------


def token_major(x: Tensor) -> Tensor:
    """(B, N, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    """Channels two elements apart."""
    return x.repeat_interleave(2, -1)[..., ::2]


#: The last one has NaN around it.
LAYOUTS = (
    token_major,
    lambda x: x.mT.contiguous().mT,  # (B, H, D, N)
    every_other,
    lambda x: pad(x, (3, 4, 5, 6, 1, 1), value=torch.nan)[:, 1:-1, 5:-6, 3:-4],
)


# --- Packed documents --------------------------------------------------------------------------------------


def of_document(inputs: list[Tensor], rows: slice, columns: slice) -> tuple[Tensor, ...]:
    """The inputs of one document of a pack."""
    q, k, v, grad_out = inputs
    return q[..., rows, :], k[..., columns, :], v[..., columns, :], grad_out[..., rows, :]


def boundary_arguments(rows: list[int], columns: list[int] | None) -> dict[str, Tensor]:
    """``cu_seqlens`` in int32 and, unless it is None, ``cu_seqlens_kv`` in int64."""
    packed = {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}
    return packed if columns is None else {**packed, "cu_seqlens_kv": torch.tensor(columns)}


def clamped(boundaries: list[int], n: int) -> list[int]:
    """What kernels make of invalid boundaries: each at most n and no less than the one before."""
    largest, result = 0, []
    for boundary in boundaries:
        largest = max(largest, min(max(boundary, 0), n))
        result.append(largest)
    return result
