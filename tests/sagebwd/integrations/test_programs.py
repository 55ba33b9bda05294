"""Attention as the programs call it that people train with, against float64: docs/integrations.md lists them.

The calls were read in the programs and written anew, with their arguments, layouts and masks.
"""

import importlib
import inspect
from importlib.metadata import packages_distributions

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


# --- musubi-tuner and sd-scripts ---------------------------------------------------------------------------


def musubi_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=SHOWN[:, None, None], dropout_p=0.0)


def musubi_flash(q, k, v):
    from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func  # noqa: F401

    return unpacked(flash_attn_varlen_func(*packed(q, k, v), PARTS, PARTS, N, N, 0.0))


def musubi_sage(q, k, v):
    from sageattention import sageattn_varlen

    return unpacked(sageattn_varlen(*packed(q, k, v), PARTS, PARTS, N, N))


def musubi_sage_split(q, k, v):
    from sageattention import sageattn

    parts = [sageattn(*(x[i : i + 1, :, :n] for x in (q, k, v))) for i, n in enumerate(SHOWN.sum(1))]
    return torch.cat([F.pad(x, (0, 0, 0, N - x.shape[2])) for x in parts])


def musubi_wan_flash(q, k, v):
    import flash_attn

    return flash_attn.flash_attn_func(
        *nhd(q, k, v), 0.0, None, False, (-1, -1), deterministic=False
    ).transpose(1, 2)


def musubi_wan_flash3(q, k, v):
    import flash_attn_interface

    q, k, v = packed(q, k, v)
    settings = {"seqused_q": None, "seqused_k": None, "softmax_scale": None, "deterministic": False}
    attend = flash_attn_interface.flash_attn_varlen_func
    return unpacked(attend(q=q, k=k, v=v, **rows(), **settings, causal=False))


def musubi_wan_sage(q, k, v):
    import sageattention

    q, k, v = packed(q, k, v)
    return unpacked(sageattention.sageattn_varlen(q=q, k=k, v=v, **rows(), sm_scale=None))


def musubi_kandinsky(q, k, v):
    import sageattention

    return sageattention.sageattn(*nhd(q, k, v), tensor_layout="NHD", is_causal=False).transpose(1, 2)


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
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, max_seqlen_q=longest, max_seqlen_k=longest,
        dropout_p=0.0, causal=False, softmax_scale=D**-0.5,
    )  # fmt: skip
    return pad_input(out, indices, B, N).transpose(1, 2)


# --- ai-toolkit, diffusion-pipe, DiffSynth-Studio, SimpleTuner, OneTrainer ---------------------------------


def ai_toolkit_chroma(q, k, v):
    """Queries of padding see nothing."""
    mask = (SHOWN.float()[:, None, :, None] * SHOWN.float()[:, None, None]).bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def ai_toolkit_flux(q, k, v):
    from sageattention import sageattn

    return sageattn(q, k, v, dropout_p=0.0, is_causal=False)


def diffusion_pipe_wan(q, k, v):
    import flash_attn

    q, k, v = packed(q, k, v)
    settings = {"dropout_p": 0.0, "softmax_scale": None, "window_size": (-1, -1), "deterministic": False}
    return unpacked(flash_attn.flash_attn_varlen_func(q=q, k=k, v=v, **rows(), **settings, causal=False))


def diffsynth_flash4(q, k, v):
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(*nhd(q, k, v), softmax_scale=None, causal=False, window_size=(4, 4))
    return out[0].transpose(1, 2)


def diffsynth_window(q, k, v):
    """Chunks of queries, each with the keys around it and an additive mask."""
    parts = []
    for start in range(0, N, 4):
        first, last = max(0, start - 4), min(N, start + 8)
        is_far = DISTANCE[start : start + 4, first:last].abs() > 4
        mask = torch.zeros(is_far.shape).masked_fill(is_far, torch.finfo().min)[None, None]
        around = (x[:, :, first:last] for x in (k, v))
        parts.append(F.scaled_dot_product_attention(q[:, :, start : start + 4], *around, mask, scale=None))
    return torch.cat(parts, 2)


def simple_tuner(q, k, v):
    """It puts a function of its own in the place of torch's, which hands on ``is_causal`` alone."""
    from sageattention import sageattn_qk_int8_pv_fp16_cuda

    return sageattn_qk_int8_pv_fp16_cuda(q, k, v, is_causal=True)


def one_trainer(q, k, v):
    attention_dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    out = attention_dispatch.dispatch_attention_fn(*nhd(q, k, v), attn_mask=SHOWN, backend="native")
    return out.transpose(1, 2)


# --- axolotl, LLaMA-Factory, ms-swift, unsloth, modded-nanogpt ---------------------------------------------


def axolotl_packed(q, k, v):
    from sageattention import sageattn_varlen

    q, k, v = packed(q, k, v)
    settings = {"is_causal": True, "sm_scale": D**-0.5, "smooth_k": False, "tensor_layout": "NHD"}
    return unpacked(sageattn_varlen(q=q, k=k, v=v, **DOCUMENTS, **settings))


def axolotl_padded(q, k, v):
    from flash_attn.bert_padding import pad_input, unpad_input
    from sageattention import sageattn_varlen
    from transformers.modeling_flash_attention_utils import _upad_input

    q, k, v, indices, cuts, longest = _upad_input(*nhd(q, k, v), SHOWN, N, unpad_input)
    settings = {"is_causal": True, "sm_scale": D**-0.5, "tensor_layout": "NHD"}
    return pad_input(sageattn_varlen(q, k, v, *cuts, *longest, **settings), indices, B, N).transpose(1, 2)


def transformers_flash(q, k, v):
    """LLaMA-Factory's ``flash_attn: fa2``, ms-swift's ``--attn_impl flash_attn``, without flash_attn."""
    from kernels import get_kernel

    kernel = get_kernel("kernels-community/flash-attn2", version=4)
    assert callable(kernel.flash_attn_with_kvcache)
    settings = {"causal": True, "dropout_p": 0.0, "softmax_scale": D**-0.5}
    return unpacked(kernel.flash_attn_varlen_func(*packed(q, k, v), **DOCUMENTS, **settings))


def transformers_sdpa(q, k, v):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = SEEN["causal, padding"]
    return sdpa_attention_forward(torch.nn.Module(), q, k, v, mask, scaling=D**-0.5)[0].transpose(1, 2)


def unsloth_flash(q, k, v):
    from flash_attn import flash_attn_func
    from flash_attn.flash_attn_interface import flash_attn_gpu  # noqa: F401
    from transformers.utils.import_utils import _is_package_available

    assert _is_package_available("flash_attn", return_version=True) == (True, "2.8.3")
    assert packages_distributions()["flash_attn"] == ["flash_attn"]
    return flash_attn_func(*nhd(q, k, v), causal=True, window_size=(4, 4)).transpose(1, 2)


def unsloth_packed(q, k, v):
    """Without flash_attn and xformers: the sequences of one row, and an additive mask of theirs."""
    mask = torch.full((N, N), float("-inf")).masked_fill(SEEN["causal, documents"], 0.0)[None, None]
    assert "enable_gqa" in F.scaled_dot_product_attention.__doc__
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False)


def modded_nanogpt(q, k, v):
    from kernels import get_kernel

    flash_attn_interface = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_interface

    @torch.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        settings = {"causal": True, "softmax_scale": D**-0.5, "window_size": (4, 0)}
        varlen = flash_attn_interface.flash_attn_varlen_func
        return unpacked(varlen(*packed(q, k, v), **DOCUMENTS, **settings))

    return attend(q, k, v)


CALLS = {
    musubi_sdpa: "padding",
    musubi_flash: "padding",
    musubi_sage: "padding",
    musubi_sage_split: "padding",
    musubi_wan_flash: "full",
    musubi_wan_flash3: "full",
    musubi_wan_sage: "full",
    musubi_kandinsky: "full",
    sd_scripts_flux: "padding",
    sd_scripts_lumina: "padding",
    ai_toolkit_chroma: "padding",
    ai_toolkit_flux: "full",
    diffusion_pipe_wan: "full",
    diffsynth_flash4: "window to both sides",
    diffsynth_window: "window to both sides",
    simple_tuner: "causal",
    one_trainer: "padding",
    axolotl_packed: "causal, documents",
    axolotl_padded: "causal, padding",
    transformers_flash: "causal, documents",
    transformers_sdpa: "causal, padding",
    unsloth_flash: "window",
    unsloth_packed: "causal, documents",
    modded_nanogpt: "causal, documents, window",
}


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


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_trains_in_int8(launched, call):
    leaves = draw(*[(B, H, N, D)] * 3)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact
    logits = (q @ k.mT * D**-0.5).masked_fill(~SEEN[CALLS[call]], float("-inf"))
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


def test_code_for_the_first_flash_attention_3_does_not_take_the_output_alone(launched):
    """diffusion-pipe's Wan takes the first of (output, lse), which FlashAttention-3 returned until 2025."""
    import flash_attn_interface

    q, k, v = packed(*draw(*[(B, H, N, D)] * 3))
    out = flash_attn_interface.flash_attn_varlen_func(q, k, v, **rows())
    with pytest.raises(RuntimeError, match="unflatten"):
        out[0].unflatten(0, (B, N))


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
