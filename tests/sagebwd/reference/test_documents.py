"""Packed documents: bit for bit the same as each document alone, and nothing from anywhere else."""

from itertools import pairwise

import pytest
import torch

from sagebwd import SageConfig, sage_attention
from sagebwd.reference import attention, exact_attention
from sagebwd.validation import check_documents

CONFIGS = {
    "default": SageConfig(),
    "paper": SageConfig.paper(),
    "strictly causal": SageConfig.strictly_causal(),
    "smooth_q": SageConfig(smooth_q=True),
    "smooth_v": SageConfig(smooth_v=True),
    "unsigned_p": SageConfig(unsigned_p=True),
    "no INT8": SageConfig(int8_matmuls=(), smooth_k=False),
}
#: (tokens of q, cu_seqlens, tokens of k, cu_seqlens_kv)
PACKS = {
    "one": (70, [0, 70], 70, None),
    "several": (300, [0, 1, 130, 131, 300], 300, None),
    "tokens of no document": (210, [3, 80, 200], 210, None),
    "empty documents": (90, [0, 0, 40, 40, 40, 90, 90], 90, None),
    "other keys": (120, [0, 50, 120], 170, [10, 20, 160]),
    "keys or queries missing": (60, [0, 20, 20, 60], 100, [0, 0, 40, 100]),
}
PER_QUERY = ("out", "lse", "delta", "dq")
PER_KEY = ("dk", "dv")
PER_PAIR = ("p", "dp", "ds")


@pytest.fixture(params=PACKS.values(), ids=PACKS.keys())
def pack(request, draw):
    """Inputs, the arguments that say where the documents are, and the tokens of each document."""
    n_q, rows, n_kv, columns = request.param
    inputs = draw(n_q, n_kv, head_dim=20, batch=1, heads=4, kv_heads=2)
    boundaries = {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}
    if columns is not None:
        boundaries["cu_seqlens_kv"] = torch.tensor(columns)
    spans = zip(pairwise(rows), pairwise(columns or rows), strict=True)
    return inputs, boundaries, [(slice(*row), slice(*column)) for row, column in spans]


def of_document(inputs, span):
    q, k, v, grad_out = inputs
    rows, columns = span
    return q[..., rows, :], k[..., columns, :], v[..., columns, :], grad_out[..., rows, :]


def is_empty(span):
    return any(tokens.start == tokens.stop for tokens in span)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pack_is_each_of_its_documents_alone(pack, config, is_causal):
    inputs, boundaries, spans = pack
    settings = {"is_causal": is_causal, "enable_gqa": True, "config": config, "scale": 0.3}
    packed = attention(*inputs, **boundaries, **settings)
    wanted = {name: torch.zeros_like(getattr(packed, name)) for name in (*PER_QUERY, *PER_KEY, *PER_PAIR)}
    wanted["lse"].fill_(-torch.inf)
    for span in spans:
        if is_empty(span):
            continue
        rows, columns = span
        alone = attention(*of_document(inputs, span), **settings)
        for name in PER_QUERY:
            wanted[name][:, :, rows] = getattr(alone, name)
        for name in PER_KEY:
            wanted[name][:, :, columns] = getattr(alone, name)
        for name in PER_PAIR:
            wanted[name][:, :, rows, columns] = getattr(alone, name)
    for name, value in wanted.items():
        assert torch.equal(getattr(packed, name), value), name


def operator_gradients(inputs, **arguments):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = sage_attention(*leaves, **arguments)
    return (out, *torch.autograd.grad(out, leaves, inputs[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_runs_packs(pack, dtype):
    inputs, boundaries, _ = pack
    inputs = [x.to(dtype) for x in inputs]
    settings = {**boundaries, "is_causal": True, "enable_gqa": True}
    result = attention(*inputs, **settings)
    for x, name in zip(operator_gradients(inputs, **settings), ("out", "dq", "dk", "dv"), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, getattr(result, name)), name


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_int8_is_exact_attention(pack, is_causal):
    inputs, boundaries, _ = pack
    wanted = exact_attention(*inputs, **boundaries, is_causal=is_causal)
    config = SageConfig(int8_matmuls=())
    found = operator_gradients(inputs, **boundaries, is_causal=is_causal, enable_gqa=True, config=config)
    for x, name in zip(found, ("out", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(x.double(), getattr(wanted, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nothing_comes_from_outside_a_document(draw, poison):
    inputs = draw(100, batch=1)
    cu_seqlens = torch.tensor([10, 45, 90])
    clean = attention(*inputs, cu_seqlens=cu_seqlens)
    for x in inputs:
        x[..., :10, :] = x[..., 45:, :] = poison
    poisoned = attention(*inputs, cu_seqlens=cu_seqlens)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(poisoned, name)[..., :45, :], getattr(clean, name)[..., :45, :]), name
        assert not getattr(poisoned, name)[..., 90:, :].any(), name
    assert poisoned.out[..., 45:90, :].isnan().all()


def test_a_pack_of_empty_documents_has_zero_gradients(draw):
    inputs = draw(30, batch=1)
    for x in operator_gradients(inputs, cu_seqlens=torch.tensor([7, 7, 7])):
        assert x.shape == inputs[0].shape
        assert not x.any()


def test_without_grad_out_there_is_no_backward(draw):
    result = attention(*draw(30, batch=1)[:3], cu_seqlens=torch.tensor([0, 10, 30]))
    assert result.lse.isfinite().all()
    assert result.p is None


ONE = torch.ones(1, 2, 8, 16)
CUTS = torch.tensor([0, 3, 8])


@pytest.mark.parametrize("operator", [sage_attention, attention])
@pytest.mark.parametrize(
    ("cu_seqlens", "cu_seqlens_kv", "message"),
    [
        (None, CUTS, "cu_seqlens_kv is given without cu_seqlens; pass cu_seqlens, or neither"),
        ([0, 8], None, "cu_seqlens is a list; pass a torch.Tensor"),
        (CUTS.float(), None, "cu_seqlens is float32; cast it to int32 or int64"),
        (CUTS.bool(), None, "cu_seqlens is bool; cast it"),
        (CUTS[None], None, r"cu_seqlens has shape \(1, 3\); pass \(documents \+ 1,\)"),
        (CUTS[:1], None, r"cu_seqlens has shape \(1,\); pass"),
        (CUTS[0], None, r"cu_seqlens has shape \(\); pass"),
        (CUTS, CUTS.half(), "cu_seqlens_kv is float16; cast it"),
        (CUTS, CUTS[None], r"cu_seqlens_kv has shape \(1, 3\)"),
        (CUTS.to("meta"), None, "cu_seqlens is on meta and q on cpu; move it there"),
        (CUTS, CUTS[:2], "cu_seqlens has 3 entries and cu_seqlens_kv 2; give both one for each document"),
        (CUTS - 1, None, "cu_seqlens starts at -1; start it at 0 or later"),
        (CUTS + 1, None, "cu_seqlens ends at 9, past the 8 tokens; end it at 8 or earlier"),
        (CUTS, CUTS + 1, "cu_seqlens_kv ends at 9, past the 8 tokens"),
        (torch.tensor([0, 5, 4, 8]), None, "cu_seqlens goes back from 5 to 4 in document 1"),
        (torch.tensor([0, 99, 8]), None, "cu_seqlens goes back from 99 to 8 in document 1"),
    ],
)
def test_refuses_with_the_fix(operator, cu_seqlens, cu_seqlens_kv, message):
    with pytest.raises(ValueError, match=message):
        operator(ONE, ONE, ONE, cu_seqlens=cu_seqlens, cu_seqlens_kv=cu_seqlens_kv)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (
            torch.ones(2, 2, 8, 16),
            torch.ones(2, 2, 8, 16),
            "q has batch size 2; lay all documents end to end",
        ),
        (ONE, ONE[:, :, :5], "q has 8 tokens and k 5; pass cu_seqlens_kv, the boundaries in k and v"),
    ],
)
def test_refuses_inputs_that_are_no_pack(q, k, message):
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, cu_seqlens=CUTS)


def test_the_shared_checks_never_read_the_boundaries():
    """They run before kernels too, where reading would wait for the GPU; a meta tensor cannot be read."""
    q, cu_seqlens = ONE.to("meta"), CUTS.to("meta")
    check_documents(q, q, cu_seqlens, None)
    check_documents(q, q[:, :, :3], cu_seqlens, cu_seqlens.int())
    with pytest.raises(RuntimeError):
        cu_seqlens.tolist()
