"""Checks of the arguments of attention, shared by all kernel sets. Each message says what to change."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd.config import PRESETS, SageConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BOUNDARY_DTYPES = (torch.int32, torch.int64)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    enable_gqa: bool,
    config: SageConfig,
    dropout_p: float = 0.0,
) -> None:
    """Raise ValueError unless the arguments describe an attention that SageBwd computes."""
    _check_dropout(dropout_p)
    _check_tensors(q, k, v)
    _check_shapes(q, k, v, enable_gqa)
    _check_scale(scale)
    check_config(config)


def check_config(config: SageConfig) -> None:
    """Raise ValueError unless ``config`` is a SageConfig."""
    if isinstance(config, SageConfig):
        return
    if callable(config):  # the class, or SageConfig.paper
        name = getattr(config, "__qualname__", type(config).__name__)
        raise ValueError(f"config is {name}; call it: {name}()")
    is_preset = isinstance(config, str) and config in PRESETS
    wanted = PRESETS[config] if is_preset else "a sagebwd.SageConfig"
    raise ValueError(f"config is a {type(config).__name__}; pass {wanted}")


def check_name(name: str) -> None:
    """Raise ValueError unless a ``name`` to register is a string."""
    if not isinstance(name, str):
        raise ValueError(f"name is a {type(name).__name__}; pass a string, and settings as config=…")


def check_documents(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None) -> None:
    """Raise ValueError unless the boundaries can cut q and k into documents.

    Looks at shapes and dtypes, never at the values: reading them would wait for the GPU.
    """
    if cu_seqlens is None:
        if cu_seqlens_kv is not None:
            raise ValueError("cu_seqlens_kv is given without cu_seqlens; pass cu_seqlens, or neither")
        return
    given = {"cu_seqlens": cu_seqlens, "cu_seqlens_kv": cu_seqlens_kv}
    for name, boundaries in given.items():
        if boundaries is not None:
            _check_boundaries(name, boundaries, q)
    if q.shape[0] != 1:
        raise ValueError(f"q has batch size {q.shape[0]}; lay all documents end to end in a batch of 1")
    if cu_seqlens_kv is None and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"q has {q.shape[-2]} tokens and k {k.shape[-2]}; pass cu_seqlens_kv, the boundaries in k and v"
        )
    if cu_seqlens_kv is not None and len(cu_seqlens_kv) != len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries and cu_seqlens_kv {len(cu_seqlens_kv)}; "
            "give both one for each document and one more"
        )


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise ValueError unless ``sinks`` is None or a logit for each head of q (…, H, N, D)."""
    if sinks is None:
        return
    check_tensor("sinks", sinks, q)
    if not sinks.is_floating_point():
        raise ValueError(f"sinks is {show(sinks.dtype)}; pass a floating-point tensor")
    if sinks.shape != (_heads(q),):
        raise ValueError(f"sinks has shape {show(sinks.shape)}; pass (heads,), here {(_heads(q),)}")


def check_tensor(name: str, x: Any, q: Tensor) -> None:
    """Raise ValueError unless ``x``, which may be q itself, is a tensor on the device of q."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}; move it there")
    if hasattr(q, "device_mesh") and not hasattr(x, "device_mesh"):
        raise ValueError(f"{name} is no DTensor and q is; pass distribute_tensor({name}, q.device_mesh)")


def check_backward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError for dual tensors: torch would silently drop their tangents."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "sage_attention has no forward-mode derivative; call backward, "
            "or use torch.nn.functional.scaled_dot_product_attention"
        )


def check_grad_out(grad_out: Tensor, q: Tensor) -> None:
    """Raise ValueError unless ``grad_out`` can be the gradient of the attention output for ``q``."""
    for name in ("shape", "dtype", "device"):
        found, wanted = getattr(grad_out, name), getattr(q, name)
        if found != wanted:
            raise ValueError(f"grad_out has {name} {show(found)}; the output has {show(wanted)}, match it")


def cast_to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast to its dtype as ``scaled_dot_product_attention`` does; gradients flow back."""
    dtype = autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """To what autocast casts on a type of device; None if it is off. The meta device has none."""
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def _check_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p={dropout_p} is not supported; use dropout_p=0.0, "
            "or torch.nn.functional.scaled_dot_product_attention"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q)
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(
                f"{name} is nested or sparse; pass a dense tensor, sequences of different lengths end to end "
                "in a batch of 1 with cu_seqlens"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} is {show(x.dtype)}; cast it to float16, bfloat16 or float32")
    # Under autocast a mix of dtypes is cast to one.
    if not autocast_dtype(q.device.type) and len({q.dtype, k.dtype, v.dtype}) > 1:
        found = ", ".join(show(x.dtype) for x in (q, k, v))
        raise ValueError(f"q, k, v are {found}; cast them to one dtype")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) >= 2:
        raise ValueError(f"got {_shapes(q, k, v)}; each must be (batch, heads, tokens, head size)")
    if of_k[:-1] != of_v[:-1]:
        raise ValueError(f"got {_shapes(q, k, v)}; k and v must have the same shape but for the head size")
    if of_q[:-3] != of_k[:-3]:
        raise ValueError(f"got {_shapes(q, k, v)}; the batch must be the same for all")
    if of_q[-1] != of_k[-1]:
        raise ValueError(f"got {_shapes(q, k, v)}; q and k must have the same head size")
    heads, kv_heads = _heads(q), _heads(k)
    if kv_heads == 0 != heads or (kv_heads and heads % kv_heads):
        raise ValueError(f"q has {heads} heads, not a multiple of the {kv_heads} of k; change one of them")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; pass enable_gqa=True to share k and v in groups"
        )


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_scale(scale: Any) -> None:
    """A tensor is taken for its value, which is a number outside autograd: it gets no gradient."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise ValueError(f"scale has shape {show(scale.shape)}; pass one number for all logits")
        if scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "scale is a tensor that wants a gradient, and would get none; multiply q by it and pass "
                "scale=1.0, or pass scale.detach()"
            )
    # isfinite takes no symbol of a tracer.
    if isinstance(scale, str) or (scale is not None and not -math.inf < scale < math.inf):
        raise ValueError(f"scale is {scale!r}; pass a finite number, or None for 1/√(head size)")


def _check_boundaries(name: str, boundaries: Any, q: Tensor) -> None:
    check_tensor(name, boundaries, q)
    if boundaries.dtype not in BOUNDARY_DTYPES:
        raise ValueError(f"{name} is {show(boundaries.dtype)}; cast it to int32 or int64")
    if boundaries.dim() != 1 or len(boundaries) < 2:
        raise ValueError(
            f"{name} has shape {show(boundaries.shape)}; pass (documents + 1,), "
            "the first token of each document and the end of the last"
        )


def show(value: Any) -> str:
    """A shape, dtype or device as a message prints it."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
