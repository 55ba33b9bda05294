"""Attention as the programs call it that people train with, against float64: docs/integrations.md lists them.

The calls were read in the programs and written anew, with their arguments, layouts and masks.
"""

import importlib
import inspect
from importlib.metadata import packages_distributions
from pkgutil import resolve_name as of

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sagebwd import SageConfig, report
from sagebwd.integrations import flash_attn, stand_in, torch_flash
from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.test_flash_attn import draw

EXACT = SageConfig(int8_matmuls=())
B, H, N, D = 2, 4, 12, 8
#: Padding on the right, as boundaries of what is shown and what is hidden, and as a mask (B, N).
PARTS = torch.tensor([0, 12, 12, 19, 24], dtype=torch.int32)
SHOWN = torch.arange(N) < torch.tensor([[12], [7]])
#: Two documents in each row, with empty ones behind the last token, by boundaries, positions and lengths.
CUTS = torch.tensor([0, 5, 12, 17, 24, 24, 24], dtype=torch.int32)
DOCUMENTS = {"cu_seqlens_q": CUTS, "cu_seqlens_k": CUTS, "max_seqlen_q": 7, "max_seqlen_k": 7}
LABELS = torch.arange(N) >= 5

DISTANCE = torch.arange(N) - torch.arange(N)[:, None]
CAUSAL = DISTANCE <= 0
#: Which query of (B, 1, N, N) sees which key; only queries of SHOWN are compared.
SEEN = {
    "full": torch.ones(N, N, dtype=torch.bool),
    "padding": SHOWN[:, None, None],
    "causal": CAUSAL,
    "causal, padding": CAUSAL & SHOWN[:, None, None],
    "causal, documents": CAUSAL & (LABELS[:, None] == LABELS),
    "window": (DISTANCE <= 0) & (DISTANCE >= -4),
    "causal, documents, window": CAUSAL & (LABELS[:, None] == LABELS) & (DISTANCE >= -4),
    "window to both sides": DISTANCE.abs() <= 4,
}


def nhd(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def packed(*tensors):
    """(B, H, N, D) to (B·N, H, D)."""
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in tensors)


def unpacked(x):
    return x.unflatten(0, (B, N)).transpose(1, 2)


def rows():
    """Whole rows as sequences; new tensors of boundaries each time, as Wan's code makes them."""
    cuts, cuts_kv = (torch.tensor([0, N, N]).cumsum(0, dtype=torch.int32) for _ in "qk")
    return {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts_kv, "max_seqlen_q": N, "max_seqlen_k": N}


def varlen(name, qkv, *arguments, by_name=False, **settings):
    """The result of a library's function, "module:function", for packed sequences."""
    given = () if by_name else packed(*qkv)
    named = dict(zip("qkv", packed(*qkv), strict=True)) if by_name else {}
    return unpacked(of(name)(*given, *arguments, **named, **settings))


def dense(name, qkv, *arguments, **settings):
    return of(name)(*nhd(*qkv), *arguments, **settings).transpose(1, 2)


def sdpa(q, k, v, mask, **settings):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


def musubi_sage_split(q, k, v):
    sageattn = of("sageattention:sageattn")
    parts = [sageattn(*(x[i : i + 1, :, :n] for x in (q, k, v))) for i, n in enumerate(SHOWN.sum(1))]
    return torch.cat([F.pad(x, (0, 0, 0, N - x.shape[2])) for x in parts])


def sd_scripts_flux(q, k, v):
    """Compiled, where no mask is read: its strides say that it hides keys from all queries."""
    mask = SHOWN[:, None, None].expand(-1, H, N, -1)
    attend = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    return attend(q, k, v, attn_mask=mask)


def sd_scripts_lumina(q, k, v):
    """ai-toolkit's OmniGen2 and Boogu, too."""
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    _, indices, cuts, longest, _ = unpad_input(q.transpose(1, 2), SHOWN)
    q, k, v = (index_first_axis(x, indices) for x in packed(q, k, v))
    settings = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    settings |= {"dropout_p": 0.0, "causal": False, "softmax_scale": D**-0.5}
    return pad_input(flash_attn_varlen_func(q, k, v, **settings), indices, B, N).transpose(1, 2)


def diffsynth_window(q, k, v):
    """Chunks of queries, each with the keys around it and an additive mask."""
    parts = []
    for start in range(0, N, 4):
        first, last = max(0, start - 4), min(N, start + 8)
        is_far = DISTANCE[start : start + 4, first:last].abs() > 4
        mask = torch.zeros(is_far.shape).masked_fill(is_far, torch.finfo().min)[None, None]
        around = (x[:, :, first:last] for x in (k, v))
        parts.append(sdpa(q[:, :, start : start + 4], *around, mask, scale=None))
    return torch.cat(parts, 2)


def one_trainer(*qkv):
    pytest.importorskip("diffusers")
    attend = "diffusers.models.attention_dispatch:dispatch_attention_fn"
    return dense(attend, qkv, attn_mask=SHOWN, backend="native")


def axolotl_padded(q, k, v):
    from flash_attn.bert_padding import pad_input, unpad_input
    from sageattention import sageattn_varlen
    from transformers.modeling_flash_attention_utils import _upad_input

    q, k, v, indices, cuts, longest = _upad_input(*nhd(q, k, v), SHOWN, N, unpad_input)
    settings = {"is_causal": True, "sm_scale": D**-0.5, "tensor_layout": "NHD"}
    return pad_input(sageattn_varlen(q, k, v, *cuts, *longest, **settings), indices, B, N).transpose(1, 2)


def transformers_flash(q, k, v):
    """LLaMA-Factory's ``flash_attn: fa2``, ms-swift's ``--attn_impl flash_attn``, without flash_attn."""
    kernel = of("kernels:get_kernel")("kernels-community/flash-attn2", version=4)
    assert callable(kernel.flash_attn_with_kvcache)
    settings = {"causal": True, "dropout_p": 0.0, "softmax_scale": D**-0.5}
    return unpacked(kernel.flash_attn_varlen_func(*packed(q, k, v), **DOCUMENTS, **settings))


def transformers_sdpa(q, k, v):
    forward, mask = (
        of("transformers.integrations.sdpa_attention:sdpa_attention_forward"),
        SEEN["causal, padding"],
    )
    return forward(torch.nn.Module(), q, k, v, mask, scaling=D**-0.5)[0].transpose(1, 2)


def unsloth_flash(*qkv):
    from transformers.utils.import_utils import _is_package_available

    of("flash_attn.flash_attn_interface:flash_attn_gpu")  # a name that unsloth imports
    assert _is_package_available("flash_attn", return_version=True) == (True, "2.8.3")
    assert packages_distributions()["flash_attn"] == ["flash_attn"]
    return dense("flash_attn:flash_attn_func", qkv, causal=True, window_size=(4, 4))


def unsloth_packed(q, k, v):
    """Without flash_attn and xformers: the sequences of one row, and an additive mask of theirs."""
    assert "enable_gqa" in F.scaled_dot_product_attention.__doc__
    mask = torch.full((N, N), float("-inf")).masked_fill(SEEN["causal, documents"], 0.0)[None, None]
    return sdpa(q, k, v, mask, is_causal=False)


def modded_nanogpt(q, k, v):
    library = of("kernels:get_kernel")("kernels-community/flash-attn3", version=1).flash_attn_interface

    @torch.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        settings = {"causal": True, "softmax_scale": D**-0.5, "window_size": (4, 0)}
        return unpacked(library.flash_attn_varlen_func(*packed(q, k, v), **DOCUMENTS, **settings))

    return attend(q, k, v)


#: As models of Wan call FlashAttention-2 and 3; as axolotl calls SageAttention.
WAN3 = {"seqused_q": None, "seqused_k": None, "softmax_scale": None, "deterministic": False, "causal": False}
WAN2 = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "deterministic": False,
    "softmax_scale": None,
    "causal": False,
}
AXOLOTL = {"is_causal": True, "sm_scale": D**-0.5, "smooth_k": False, "tensor_layout": "NHD"}
FLASH, FLASH_VARLEN = "flash_attn:flash_attn_func", "flash_attn.flash_attn_interface:flash_attn_varlen_func"
FLASH3, FLASH4 = "flash_attn_interface:flash_attn_varlen_func", "flash_attn.cute:flash_attn_func"
SAGE, SAGE_VARLEN = "sageattention:sageattn", "sageattention:sageattn_varlen"
#: By name: which query sees which key, and the call.
CALLS = {
    # musubi-tuner and sd-scripts
    "musubi_sdpa": ("padding", lambda *x: sdpa(*x, SHOWN[:, None, None], dropout_p=0.0)),
    "musubi_flash": ("padding", lambda *x: varlen(FLASH_VARLEN, x, PARTS, PARTS, N, N, 0.0)),
    "musubi_sage": ("padding", lambda *x: varlen(SAGE_VARLEN, x, PARTS, PARTS, N, N)),
    "musubi_sage_split": ("padding", musubi_sage_split),
    "musubi_wan_flash": (
        "full", lambda *x: dense(FLASH, x, 0.0, None, False, (-1, -1), deterministic=False)
    ),
    "musubi_wan_flash3": ("full", lambda *x: varlen(FLASH3, x, by_name=True, **rows(), **WAN3)),
    "musubi_wan_sage": ("full", lambda *x: varlen(SAGE_VARLEN, x, by_name=True, **rows(), sm_scale=None)),
    "musubi_kandinsky": ("full", lambda *x: dense(SAGE, x, tensor_layout="NHD", is_causal=False)),
    "sd_scripts_flux": ("padding", sd_scripts_flux),
    "sd_scripts_lumina": ("padding", sd_scripts_lumina),
    # ai-toolkit, whose Chroma has queries of padding that see nothing; diffusion-pipe, DiffSynth-Studio
    "ai_toolkit_chroma": ("padding", lambda *x: sdpa(*x, SHOWN[:, None, :, None] & SHOWN[:, None, None])),
    "ai_toolkit_flux": ("full", lambda *x: of(SAGE)(*x, dropout_p=0.0, is_causal=False)),
    "diffusion_pipe_wan": ("full", lambda *x: varlen(FLASH_VARLEN, x, by_name=True, **rows(), **WAN2)),
    "diffsynth_flash4": (
        "window to both sides",
        lambda *x: nhd(of(FLASH4)(*nhd(*x), softmax_scale=None, causal=False, window_size=(4, 4))[0])[0],
    ),
    "diffsynth_window": ("window to both sides", diffsynth_window),
    # SimpleTuner puts a function of its own in the place of torch's, which hands on ``is_causal`` alone
    "simple_tuner": ("causal", lambda *x: of(f"{SAGE}_qk_int8_pv_fp16_cuda")(*x, is_causal=True)),
    "one_trainer": ("padding", one_trainer),
    # axolotl, LLaMA-Factory, ms-swift, unsloth, modded-nanogpt
    "axolotl_packed": (
        "causal, documents", lambda *x: varlen(SAGE_VARLEN, x, by_name=True, **DOCUMENTS, **AXOLOTL)
    ),
    "axolotl_padded": ("causal, padding", axolotl_padded),
    "transformers_flash": ("causal, documents", transformers_flash),
    "transformers_sdpa": ("causal, padding", transformers_sdpa),
    "unsloth_flash": ("window", unsloth_flash),
    "unsloth_packed": ("causal, documents", unsloth_packed),
    "modded_nanogpt": ("causal, documents, window", modded_nanogpt),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """What ``python -m sagebwd.run`` does with all its options; without rounding, to compare tightly."""
    monkeypatch.setenv("LOCAL_KERNELS", ":".join(map(stand_in.hub_kernels, stand_in.HUB_KERNELS)))
    for library in stand_in.LIBRARIES:
        stand_in.install(library, EXACT)
    with torch_flash.patch_sdpa(EXACT):
        yield
    for library in stand_in.LIBRARIES:
        stand_in.uninstall(library)


@pytest.mark.parametrize(("seen", "call"), CALLS.values(), ids=CALLS.keys())
def test_a_call_trains_in_int8(launched, seen, call):
    leaves = draw(*[(B, H, N, D)] * 3)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact
    logits = (q @ k.mT * D**-0.5).masked_fill(~SEEN[seen], float("-inf"))
    weights = torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(1)) * SHOWN[:, None, :, None]
    found, truth = call(*leaves), logits.softmax(-1) @ v
    for x in (found, truth):
        (x * weights).sum().backward()
    assert relative_l2(found * (weights != 0), truth * (weights != 0)) < 1e-5
    for leaf, true_leaf in zip(leaves, exact, strict=True):
        assert relative_l2(leaf.grad, true_leaf.grad) < 1e-5
    assert {row.kernels for row in report().rows} == {"reference"}


# --- What is refused, and recomputed -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* runs in full precision, not in INT8:UserWarning")
def test_unsloth_left_padding_stays_in_full_precision(launched):
    """Rows that would see no key are made to see all keys: that is no mask of padding."""
    q, k, v = draw(*[(B, H, N, D)] * 3)
    mask = CAUSAL & SHOWN.flip(1)[:, None, None]
    mask = mask | ~mask.any(-1, keepdim=True)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert {row.kernels for row in report().rows} == {""}


ASKED = {
    "qv": torch.ones(1), "q_descale": torch.ones(1), "attention_chunk": 4, "seqused_k": torch.ones(1),
    "score_mod": print, "mask_mod": print, "page_table": torch.ones(1), "softcap": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
@pytest.mark.parametrize("library", ["flash_attn_interface", "flash_attn.cute"])
def test_what_newer_flash_attention_has_is_computed_or_refused(launched, library, name):
    function = getattr(importlib.import_module(library), name)
    tensors, cuts = nhd(*draw(*[(B, H, N, D)] * 3)), {}
    if "varlen" in name:
        tensors, cuts = packed(*draw(*[(B, H, N, D)] * 3)), rows()
    known = ASKED.keys() & inspect.signature(function).parameters.keys()
    assert len(known) >= 4
    for argument in known:
        with pytest.raises(NotImplementedError, match=f"{argument} is .* sagebwd does not compute"):
            function(*tensors, **cuts, **{argument: ASKED[argument]})
    with_lse = {"return_lse" if "cute" in library else "return_attn_probs": True}
    out, lse = function(*tensors, **cuts, **with_lse, causal=True)
    truth, true_lse = (flash_attn.flash_attn_varlen_func if cuts else flash_attn.flash_attn_func)(
        *tensors, **cuts, causal=True, return_lse=True, config=EXACT
    )
    assert torch.equal(out, truth)
    assert torch.equal(lse, true_lse)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointing_recomputes_with_a_new_mask_and_the_same_autocast(use_reentrant):
    """The backward runs outside of autocast, and the layer makes its mask anew."""
    (x,) = draw((B, H, N, D))

    def layer(x):
        mask = torch.zeros(N, N).masked_fill(~CAUSAL, float("-inf")) + 0.0
        x = F.linear(x, torch.eye(D))  # in the dtype of autocast
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.to(x.dtype))

    gradients = []
    with torch_flash.patch_sdpa():
        for recompute in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                out = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
            x.grad = None
            out.float().square().sum().backward()
            gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert {row.kernels for row in report().rows} == {"reference"}
