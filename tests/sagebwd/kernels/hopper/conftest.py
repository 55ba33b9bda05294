"""Fixtures for the Hopper kernels, which run on the GPU that they are written for, and on no other.

They take the place of those of the folder above. A test that uses ``device``, which most do by way of other
fixtures, runs with ``-m gpu``.
"""

from __future__ import annotations

import pytest
import torch

from sagebwd import dispatch
from sagebwd.kernels.cuda import runtime
from sagebwd.kernels.hopper.attention import COMPUTE_CAPABILITY
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels import test_torch as as_operators
from tests.sagebwd.kernels.hopper.cases import FP16, NAMES
from tests.sagebwd.kernels.triton import test_against_float64 as against_float64
from tests.sagebwd.kernels.triton import test_against_reference as against_reference
from tests.sagebwd.kernels.triton import test_documents as documents

# As close to the reference, or to float64, as is asked of the Triton kernels; and what else is the same.
assert_same_in_fp16 = against_reference.assert_same
errors, check_errors = against_float64.errors, against_float64.check
alone, compiled = documents.alone, as_operators.compiled


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if reason := runtime.why_unavailable(torch.device("cuda"), COMPUTE_CAPABILITY):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def only_hopper(device, monkeypatch):
    """Another choice of kernels fails, so that no test passes because it was made silently."""
    choose = dispatch.choose

    def choose_hopper(q, scale, config, kernels=None):
        chosen = choose(q, scale, config, kernels)
        assert chosen == kernels or chosen == "hopper"
        return chosen

    monkeypatch.setattr(dispatch, "choose", choose_hopper)
    monkeypatch.setattr(as_operators, "KERNELS", "hopper")


@pytest.fixture
def kernel_set():
    """What the GPU itself runs."""
    return


@pytest.fixture
def attend(attend, only_hopper, poisoned_memory):
    """That of the folder above; hence ``kernels`` and ``attend_reference`` too."""
    return attend


@pytest.fixture
def on_gpu(sample, device):
    """:func:`sample` on the GPU."""
    return lambda *lengths, **options: [x.to(device) for x in sample(*lengths, **options)]


@pytest.fixture
def assert_same(assert_same_in_fp16):
    """The bound of test_against_reference.py; in bf16 that of its test_bf16."""

    def assert_same(found, wanted, names=NAMES):
        if found["out"].dtype == FP16:
            assert_same_in_fp16(found, wanted, names)
            return
        for name in names:
            assert found[name].dtype == wanted[name].dtype
            assert found[name].isfinite().all(), name
            assert relative_l2(found[name], wanted[name]) < 8e-3, name

    return assert_same


@pytest.fixture
def check(kernels, attend_reference, assert_same):
    """Assert that the kernels give on CPU inputs what the reference does; return their result."""

    def check(inputs, names=NAMES, **options):
        found = kernels(*inputs, **options)
        assert_same(found, attend_reference(*inputs, **options), names)
        return found

    return check


@pytest.fixture
def gradients(only_hopper):
    """(function, q, k, v, grad_out) -> [out, dq, dk, dv]; memory is as it comes."""

    def gradients(function, q, k, v, grad_out):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    return gradients
