"""Every wrong argument of the operator is refused by name, with what to do instead."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sagebwd import SageConfig, explain, sage_attention
from sagebwd.reference import attention
from sagebwd.validation import check_documents

X = torch.ones(2, 4, 8, 16)
ONE = X[:1]
KEYS = torch.ones(2, 8, dtype=torch.bool)
CUTS = torch.tensor([0, 3, 8])

#: Tensors and words of the message.
TENSORS = [
    ((X, X.double(), X), "k is float64; cast it to float16, bfloat16 or float32"),
    ((X.int(), X, X), "q is int32; cast it"),
    ((X, X, X.half()), "q, k, v are float32, float32, float16; cast them to one dtype"),
    ((X, X.to("meta"), X), "k is on meta and q on cpu; move it there"),
    ((X, None, X), "k is a NoneType; pass a torch.Tensor"),
    ((X, X[0], X[0]), r"must be \(batch, heads, tokens, head size\)"),
    ((X[0, 0, 0],) * 3, r"must be \(batch, heads, tokens, head size\)"),
    ((X, X, X[:, :, :5]), "k and v must have the same shape but for the head size"),
    ((X[..., :8], X, X), "q and k must have the same head size"),
    ((X[:1], X, X), "the batch must be the same"),
    ((X[:, None], X[None], X[None]), "the batch must be the same"),
    ((X, X[:, :2], X[:, :2]), "q has 4 heads and k 2; pass enable_gqa=True"),
    ((X[:, :2], X, X), "q has 2 heads, not a multiple of the 4 of k"),
    ((X, X.to_sparse(), X), "k is nested or sparse; pass a dense tensor, .* with cu_seqlens"),
    ((torch.nested.as_nested_tensor([X[0], X[0]], layout=torch.jagged), X, X), "q is nested or sparse"),
]
#: Arguments of attention on X and words of the message.
SETTINGS = [
    ({"scale": float("nan")}, "scale is nan; pass a finite number"),
    ({"scale": torch.ones(4)}, r"scale has shape \(4,\); pass one number for all logits"),
    ({"scale": torch.tensor(torch.inf)}, r"scale is tensor\(inf\); pass a finite number"),
    ({"scale": "0.1"}, "scale is '0.1'; pass a finite number"),
    ({"is_causal": "no"}, "is_causal is 'no'; pass True or False"),
    ({"config": {"smooth_k": True}}, "config is a dict; pass a sagebwd.SageConfig"),
    ({"config": "paper"}, r"config is a str; pass SageConfig\.paper\(\)"),
    ({"config": SageConfig}, r"config is SageConfig; call it: SageConfig\(\)"),
    ({"config": SageConfig.paper}, r"config is SageConfig.paper; call it: SageConfig.paper\(\)"),
    *(
        ({"window_size": x}, r"window_size is .*; pass two integers, \(left, right\); -1 is no")
        for x in (None, 4, "44", (1,), (1.0, 2), (None, 0), (True, 0), {1, 2})
    ),
    ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\); pass numbers of keys, or -1 for no limit"),
]
#: The same of those that the reference's own call does not have.
OF_THE_OPERATOR = [
    ({"scale": torch.ones((), requires_grad=True)}, r"wants a gradient, .* scale.detach\(\)"),
    ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported; use dropout_p=0.0"),
    ({"attn_mask": torch.ones(8, 8).bool()}, r"shape \(8, 8\) and may differ .* SageBwd has is_causal"),
    ({"attn_mask": torch.ones(2, 4, 1, 8).bool()}, r"pass \(batch, 1, 1, keys\), or expand it"),
    ({"attn_mask": KEYS}, r"shape \(2, 8\), which does not broadcast .* is key_padding_mask"),
    ({"attn_mask": KEYS[0]}, r"shape \(8,\), which does not broadcast"),
    ({"attn_mask": KEYS.int()[:, None, None]}, "attn_mask is int32; pass a bool or an additive"),
    ({"attn_mask": torch.zeros(1, 8, requires_grad=True)}, "wants a gradient, and SageBwd has no bias"),
    ({"attn_mask": torch.full((1, 8), torch.nan)}, "values other than 0 and -9000"),
    ({"attn_mask": True}, "attn_mask is True; pass a torch.Tensor, or is_causal by name: is_causal=True"),
    ({"key_padding_mask": KEYS.long()}, "key_padding_mask is int64; pass bool, True"),
    ({"key_padding_mask": KEYS[:, :7]}, r"shape \(2, 7\); pass \(batch, keys\), here \(2, 8\)"),
    ({"key_padding_mask": KEYS.to("meta")}, "key_padding_mask is on meta and q on cpu; move it there"),
    ({"sinks": [0.0] * 4}, "sinks is a list; pass a torch.Tensor"),
    ({"sinks": torch.zeros(4, dtype=torch.int)}, "sinks is int32; pass a floating-point tensor"),
    ({"sinks": torch.zeros(4, 1)}, r"sinks has shape \(4, 1\); pass \(heads,\), here \(4,\)"),
    ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta and q on cpu; move it there"),
    ({"kernels": "cuda"}, "use one of 'hopper', 'ampere', 'triton', 'ref"),
    ({"kernels": "hopper"}, "the tensors are on the CPU"),
]
#: Boundaries in a batch of 1, and words of the message.
DOCUMENTS = [
    (None, CUTS, "cu_seqlens_kv is given without cu_seqlens; pass cu_seqlens, or neither"),
    ([0, 8], None, "cu_seqlens is a list; pass a torch.Tensor"),
    (CUTS.float(), None, "cu_seqlens is float32; cast it to int32 or int64"),
    (CUTS[None], None, r"cu_seqlens has shape \(1, 3\); pass \(documents \+ 1,\)"),
    (CUTS[:1], None, r"cu_seqlens has shape \(1,\); pass"),
    (CUTS, CUTS.half(), "cu_seqlens_kv is float16; cast it"),
    (CUTS.to("meta"), None, "cu_seqlens is on meta and q on cpu; move it there"),
    (CUTS, CUTS[:2], "cu_seqlens has 3 entries and cu_seqlens_kv 2; give both one for each document"),
    (CUTS - 1, None, "cu_seqlens goes from 0 to -1; boundaries must start at 0 or later"),
    (CUTS, CUTS + 1, "cu_seqlens_kv goes from 9 to 8; .* end at 8, the number of tokens, or earlier"),
    (torch.tensor([0, 5, 4, 8]), None, "cu_seqlens goes from 5 to 4; .* never decrease"),
]


def calls():
    """Tensors, settings, words of the message."""
    yield from ((tensors, {}, words) for tensors, words in TENSORS)
    yield from (((X,) * 3, settings, words) for settings, words in SETTINGS)
    for n in (0, 3):
        few = (X, X[:, :n], X[:, :n])
        yield few, {"enable_gqa": True}, f"q has 4 heads, not a multiple of the {n} of k"
    for rows, columns, words in DOCUMENTS:
        yield (ONE,) * 3, {"cu_seqlens": rows, "cu_seqlens_kv": columns}, words
    yield (X,) * 3, {"cu_seqlens": CUTS}, "q has batch size 2; lay all documents end to end"
    fewer = (ONE, ONE[:, :, :5], ONE[:, :, :5])
    yield fewer, {"cu_seqlens": CUTS}, "8 tokens and k 5; pass cu_seqlens_kv, the boundaries in k"


@pytest.mark.parametrize(("tensors", "settings", "words"), list(calls()))
def test_refuses_with_the_fix(tensors, settings, words):
    for operator in (sage_attention, attention):
        with pytest.raises(ValueError, match=words):
            operator(*tensors, **settings)


@pytest.mark.parametrize(("settings", "words"), OF_THE_OPERATOR)
def test_refuses_masks_sinks_and_kernels_with_the_fix(settings, words):
    with pytest.raises(ValueError, match=words):
        sage_attention(X, X, X, **settings)


def test_refuses_masks_that_do_not_go_with_other_arguments():
    with pytest.raises(ValueError, match="cu_seqlens is given together with a mask; leave the hidden tokens"):
        sage_attention(ONE, ONE, ONE, key_padding_mask=KEYS[:1], cu_seqlens=torch.tensor([0, 8]))
    for mask in ({"is_causal": True}, {"window_size": (2, 2)}, {"window_size": (20, 20)}):
        with pytest.raises(ValueError, match="needs as many queries as keys, got 5 and 8"):
            sage_attention(X[:, :, :5], X, X, key_padding_mask=KEYS, **mask)


@pytest.mark.parametrize("wrong", [(False, 0), (0.0, 0.0), (np.int64(0), 0), ([0], 0), 0])
def test_what_equals_an_argument_that_was_right_is_refused_still(wrong):
    q = torch.randn(1, 1, 8, 16)
    sage_attention(q, q, q, window_size=(0, 0))
    with pytest.raises(ValueError, match="window_size"):
        sage_attention(q, q, q, window_size=wrong)


def test_explain_refuses_what_the_call_refuses():
    for settings, words in SETTINGS:
        if "scale" not in settings:
            with pytest.raises(ValueError, match=words):
                explain(X, **settings)
    for wrong in (X.double(), X[0, 0, 0]):
        with pytest.raises(ValueError, match=r"cast it to float16|must be \(batch"):
            explain(wrong)


WRONG_GRAD_OUT = (
    (X[:1], "grad_out has shape .*; the output has .2, 4"),
    (X.half(), "dtype float16; the output has float32"),
    (X.to("meta"), "grad_out has device meta; the output"),
)


def test_the_diagnostic_call_refuses_with_the_fix():
    for grad_out, words in WRONG_GRAD_OUT:
        with pytest.raises(ValueError, match=words):
            attention(X, X, X, grad_out)
    for tensors in ((X[:, :, :0], X, X), (X[0],) * 3, (X, X, X[..., :8])):
        with pytest.raises(ValueError, match="with one head size for all, and no size of zero"):
            attention(*tensors)


def test_devices_without_kernels_name_the_fix():
    with FakeTensorMode():
        x = torch.ones(1, 2, 8, 16, device="xpu")
        with pytest.raises(NotImplementedError, match='no kernels for XPU tensors; pass kernels="reference"'):
            sage_attention(x, x, x)
    x = X.to("meta")
    with pytest.raises(NotImplementedError, match='no kernels for META tensors; pass kernels="reference"'):
        sage_attention(x, x, x, kernels="triton")


def test_the_checks_never_read_the_boundaries_of_documents():
    """They run before kernels too, where reading would wait for the GPU; a meta tensor cannot be read."""
    q, cu_seqlens = ONE.to("meta"), CUTS.to("meta")
    check_documents(q, q, cu_seqlens, None)
    check_documents(q, q[:, :, :3], cu_seqlens, cu_seqlens.int())
