"""Exact attention against autograd in float64, and against finite differences."""

import pytest
import torch

from sagebwd.reference import exact_attention
from tests.inputs import mask_of

NAMES = ("out", "p", "dp", "ds", "delta", "dq", "dk", "dv")


def by_autograd(q, k, v, grad_out, *, is_causal=False, scale=None, window_size=(-1, -1)):
    """{name: tensor} from the definition of attention; dP and dS are the gradients of P and S.

    A query without keys is left out of the softmax.
    """
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = ~mask_of(*s.shape[-2:], window_size[0], 0 if is_causal else window_size[1])
    s = s.masked_fill(hidden, -torch.inf)
    p = torch.where(hidden.all(-1, keepdim=True), 0.0, s).softmax(-1) * ~hidden
    out = p @ values
    ds, dp, dq, dk, dv = torch.autograd.grad(out, (s, p, q, k, v), grad_out.double())
    delta = (grad_out.double() * out).sum(-1)
    results = (out, p, dp.masked_fill(hidden, 0), ds.masked_fill(hidden, 0), delta, dq, dk, dv)
    return {"lse": s.logsumexp(-1), **dict(zip(NAMES, results, strict=True))}


def assert_close(result, wanted, names=("lse", *NAMES)):
    for name in names:
        torch.testing.assert_close(getattr(result, name), wanted[name], rtol=1e-12, atol=1e-12)


CAUSAL = {"is_causal": True}
MASKS = [
    (70, 70, CAUSAL), (1, 50, {}), (50, 1, CAUSAL), (31, 77, CAUSAL), (77, 31, {}),
    *((*n, {"window_size": window}) for n, window in (((40, 40), (0, 0)), ((40, 40), (12, -1)))),
    *((*n, {"window_size": window}) for n, window in (((47, 13), (5, 0)), ((47, 13), (-1, 4)))),
    (13, 47, {"window_size": (3, 9)}),
]  # fmt: skip


@pytest.mark.parametrize("elements_at_once", [1, 500, 2**24], ids=["row by row", "some rows", "at once"])
@pytest.mark.parametrize(("n_q", "n_kv", "mask"), MASKS)
def test_equals_autograd(draw, n_q, n_kv, mask, elements_at_once):
    inputs = draw(n_q, n_kv, heads=4, kv_heads=2, dtype=torch.bfloat16)
    options = {**mask, "scale": 0.3}
    found = exact_attention(*inputs, **options, matrices=True, elements_at_once=elements_at_once)
    assert_close(found, by_autograd(*inputs, **options))
    without = exact_attention(*inputs, **options, elements_at_once=elements_at_once)
    assert without.p is without.dp is without.ds is None
    assert_close(without, vars(found), ("out", "lse", "delta", "dq", "dk", "dv"))


def test_without_grad_out_and_in_float32_whatever_autograd_and_autocast_are(draw):
    q, k, v, grad_out = draw(20)
    result = exact_attention(q, k, v, matrices=True, dtype=torch.float32)
    assert result.out.dtype == result.lse.dtype == result.p.dtype == torch.float32
    assert all(getattr(result, name) is None for name in ("dp", "ds", "delta", "dq", "dk", "dv"))
    wanted = exact_attention(q, k, v, grad_out)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = exact_attention(q.requires_grad_(), k, v, grad_out)
    assert not found.out.requires_grad
    assert torch.equal(found.dq, wanted.dq)


def test_sinks_and_wider_values(draw):
    """A key more whose value is zero, which queries see that see no other."""
    q, k, v, _ = draw(50, 30, heads=4, kv_heads=2, dtype=torch.float64)
    v = torch.cat([v, v.cos()], -1).requires_grad_()
    sinks = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    q, k = q.requires_grad_(), k.requires_grad_()
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    s = q @ keys.mT * q.shape[-1] ** -0.5
    distance = torch.arange(30) - torch.arange(50)[:, None]
    s = s.masked_fill((distance < -5) | (distance > 0), -torch.inf)
    s = torch.cat([s, sinks[:, None, None].expand(2, 4, 50, 1)], -1)
    p = s.softmax(-1)[..., :-1]
    out = p @ values
    grad_out = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(out, (q, k, v, sinks), grad_out)
    wanted = {"out": out, "lse": s.logsumexp(-1), "p": p}
    wanted |= dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=True))
    options = {"window_size": (5, 0), "sinks": sinks, "matrices": True, "elements_at_once": 500}
    assert_close(exact_attention(q, k, v, grad_out, **options), wanted, wanted.keys())
    without = exact_attention(q, k, v, grad_out, **options | {"sinks": None})
    none = exact_attention(q, k, v, grad_out, **options | {"sinks": torch.full((4,), -torch.inf)})
    assert_close(none, vars(without), ("out", "lse", "p", "dq", "dk", "dv"))


def test_tf32_is_off_in_it_only(draw):
    precisions = []
    torch.set_float32_matmul_precision("high")
    exact_attention(*draw(), on_rows=lambda rows: precisions.append(torch.get_float32_matmul_precision()))
    assert precisions == ["highest"]
    assert torch.get_float32_matmul_precision() == "high"
