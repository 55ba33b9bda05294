"""The quantizer's promises, on any values; and the exactness of INT8 products."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sagebwd.reference.quantization import (
    LONGEST_EXACT_CONTRACTION,
    PER_BLOCK,
    PER_COLUMN,
    PER_ROW,
    Operand,
    product,
    product_in_fp16,
    quantize,
    round_to,
    to_fp16,
)

TINY = torch.finfo(torch.float32).tiny

matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=7),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
).map(torch.from_numpy)
shared_axes = st.sampled_from([PER_BLOCK, PER_ROW, PER_COLUMN])


@given(matrices, shared_axes, st.booleans())
def test_values_fill_8_bits_and_the_error_is_at_most_half_a_step(x, shared, unsigned):
    x, largest = (x.abs(), 255) if unsigned else (x, 127)
    values, scale = quantize(x, shared, unsigned=unsigned)
    assert torch.equal(values, values.round())
    assert torch.equal(values.abs().amax(shared, keepdim=True), torch.where(scale > 0, float(largest), 0.0))
    assert (values >= 0).all() or not unsigned
    assert scale.shape[-2:] == tuple(1 if axis in shared else x.shape[axis] for axis in (-2, -1))
    error = (values.double() * scale.double() - x.double()).abs()
    half_a_step = torch.where(scale > 0, scale.double() * (0.5 + 1e-4), largest * TINY)
    assert (error <= half_a_step).all()


def test_ties_round_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(x).values.tolist() == [[127, 0, 2, 2, 0, -2]]
    x = torch.tensor([[255.0, 0.5, 1.5, 127.5, 128.5, 254.5]])
    assert quantize(x, unsigned=True).values.tolist() == [[255, 0, 2, 128, 128, 254]]


SUBNORMAL = [(0.0, False), (0.0, True), (1e-44, False), (126 * TINY, False), (254 * TINY, True)]


@pytest.mark.parametrize(("largest", "unsigned"), SUBNORMAL)
def test_a_scale_that_would_be_subnormal_gives_zeros(largest, unsigned):
    values, scale = quantize(torch.full((2, 2), largest), unsigned=unsigned)
    assert not values.any()
    assert not scale.any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("unsigned", [False, True])
def test_nan_and_inf_poison_every_product_of_their_block(poison, unsigned):
    x = torch.ones(2, 3, 4)
    x[1, 2, 3] = poison
    operand = quantize(x, unsigned=unsigned)
    assert operand.values.isfinite().all()
    assert operand.scale.isnan().flatten().tolist() == [False, True]
    result = product(operand, quantize(torch.zeros(4, 5)))
    assert result[1].isnan().all()
    assert not result[0].any()


@pytest.mark.parametrize("length", [256, LONGEST_EXACT_CONTRACTION, 3001])
@pytest.mark.parametrize(("smallest", "largest"), [(-127, 127), (0, 255)], ids=["signed", "unsigned"])
def test_int8_products_are_exact(length, smallest, largest):
    generator = torch.Generator().manual_seed(length)
    a = torch.randint(smallest, largest + 1, (3, length), generator=generator)
    b = torch.randint(-127, 128, (length, 5), generator=generator)
    a[0], b[:, 0] = largest, 127  # the largest sum there is
    one = torch.ones(1, 1)
    found = product(Operand(a.float(), one), Operand(b.float(), one))
    assert torch.equal(found, (a @ b).float())


def test_a_scale_along_the_contracted_axis_is_refused():
    x = torch.ones(3, 3)
    for operands in ((quantize(x, PER_COLUMN), quantize(x)), (quantize(x), quantize(x, PER_ROW))):
        with pytest.raises(ValueError, match="vary along the contracted axis"):
            product(*operands)


def test_products_outside_int8_round_to_the_dtype():
    x = torch.tensor([[1.0 + 2**-9]])
    assert round_to(x, torch.float32).values.item() == 1 + 2**-9
    assert round_to(x, torch.bfloat16).values.item() == 1.0
    assert round_to(x, torch.bfloat16).values.dtype == torch.float32


@pytest.mark.parametrize("x", [torch.inf, -torch.inf, torch.nan, 1e5])
def test_what_is_infinite_outside_int8_becomes_nan(x):
    """1e5 overflows fp16. As Inf it could end as a plausible value, such as exp(−Inf)."""
    assert round_to(torch.tensor([[x]]), torch.float16).values.isnan().all()
    assert round_to(torch.tensor([[6.5e4]]), torch.float16).values.item() == 64992


# --- fp16, for dP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [PER_BLOCK, PER_ROW])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_fp16_operands_keep_their_digits(shared, size):
    """Of values down to 2⁻¹⁵ of the largest: bf16 has fewer digits than fp16."""
    x = (size * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    x[x.abs() < 2**-15 * x.abs().max()] = 0.0
    values, scale = to_fp16(x, x.abs().amax(shared, keepdim=True))
    assert torch.equal(values * scale, x)
    assert torch.equal(scale, 2.0 ** scale.log2().round())
    largest = values.abs().amax(shared)
    assert ((largest >= 1) & (largest < 2)).all()


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.full((3, 4), 1e-40)])
def test_zero_and_subnormal_blocks_are_zero_in_fp16(x):
    values, scale = to_fp16(x, x.max())
    assert not values.any()
    assert not scale.any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_the_scale_of_fp16_nan(poison):
    x = torch.ones(3, 4)
    x[1, 2] = poison
    values, scale = to_fp16(x, x.abs().amax(PER_ROW, keepdim=True))
    assert values.isfinite().all()
    assert scale.flatten().isnan().tolist() == [False, True, False]


def test_products_in_fp16_are_numpy_s():
    """A step of 16 in float64, rounded by NumPy, at a size where several of the sums are subnormal."""
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(40, 56, generator=generator) for _ in range(2))
    a, b = (to_fp16(x, 64 * x.abs().amax(PER_BLOCK, keepdim=True)) for x in tensors)
    total = np.zeros((40, 40))
    for i in range(0, 56, 16):
        x, y = (side.values[:, i : i + 16].double().numpy() for side in (a, b))
        total = (total + x @ y.T).astype(np.float16).astype(np.float64)
    wanted = torch.from_numpy(total) * float(a.scale * b.scale)
    assert (product_in_fp16(a, b.mT).double() == wanted).double().mean() > 0.999  # fp32 rounds twice
