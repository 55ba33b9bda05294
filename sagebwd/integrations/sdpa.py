"""SageBwd in the place of ``torch.nn.functional.scaled_dot_product_attention``, called from Python.

>>> from sagebwd.integrations import torch_flash
>>> torch_flash.patch_sdpa()  # from now on in this process; or: with torch_flash.patch_sdpa(): …
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from sagebwd import usage
from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.dispatch import LARGEST_HEAD_DIM
from sagebwd.integrations.varlen import Layout, attend, find_layout, has_values, read_mask, remember_recent
from sagebwd.usage import counted_attention
from sagebwd.validation import autocast_dtype, check_config
from sagebwd.window import CAUSAL

NAME = "scaled_dot_product_attention"


class patch_sdpa:
    """From now on ``torch.nn.functional.scaled_dot_product_attention`` runs SageBwd where it can.

    In a ``with`` until its end, else until :meth:`remove` or the end of the process. On a GPU and on a CPU,
    in all threads, also where a module imported the function by name. Models that were compiled before keep
    torch's. What :func:`why_full_precision` names stays in full precision; a warning says so, and
    :func:`sagebwd.report` counts.

    A mask is computed in INT8 if it shows what SageBwd computes: a triangle, a window, blocks of documents,
    keys that are hidden from all queries. On a GPU a mask's values are read once, which waits for it; a
    compiled graph reads none.

    Args:
        config: what is quantized, and how.

    Raises:
        ValueError: ``config`` is not a SageConfig.
    """

    def __init__(self, config: SageConfig = DEFAULT_CONFIG) -> None:
        check_config(config)
        self._before = F.scaled_dot_product_attention
        self._patched = _patched(getattr(self._before, "original", self._before), config)
        for module, name in _holders(self._before):
            setattr(module, name, self._patched)

    def __enter__(self) -> patch_sdpa:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give all modules the function that they had before."""
        for module, name in _holders(self._patched):
            setattr(module, name, self._before)


def why_full_precision(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str:
    """Why :class:`patch_sdpa` leaves a call to torch, whatever its mask; "" if SageBwd computes it."""
    tensors = (query, key, value)
    if not all(isinstance(x, Tensor) for x in tensors) or any(x.is_nested for x in tensors):
        return "nested tensors"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    device = query.device.type
    if device not in ("cpu", "cuda"):
        return f"tensors on {device}"
    if any(0 in x.shape for x in tensors):
        return "empty tensors"
    dtype = autocast_dtype(device) or query.dtype
    if dtype not in (torch.float16, torch.bfloat16, *([torch.float32] if device == "cpu" else [])):
        return f"{str(dtype).removeprefix('torch.')} on {device}"
    if key.shape[:-1] != value.shape[:-1] or key.shape[:-3] != query.shape[:-3]:
        return "keys and values of other shapes"
    if key.shape[:-2] != query.shape[:-2] and not enable_gqa:
        return "heads that torch broadcasts"
    for head_dim in (query.shape[-1], value.shape[-1]):
        if head_dim > LARGEST_HEAD_DIM or (device == "cuda" and head_dim % 8):
            return f"a head size of {head_dim}"
    return ""


def _patched(original: Callable[..., Tensor], config: SageConfig) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if isinstance(attn_mask, CausalBias) and not is_causal and _is_square(attn_mask):
            attn_mask, settings["is_causal"] = None, True
        reason, layout, shown = why_full_precision(query, key, value, enable_gqa), None, ""
        reason = "attention dropout" if dropout_p else reason
        if not reason and attn_mask is not None and query.dim() != 4:
            reason = "a mask of tensors that are not (batch, heads, tokens, head size)"
        elif not reason and attn_mask is not None:
            layout, shown = layout_of(attn_mask, query.shape[0], query.shape[2], key.shape[2])
            reason = "a mask together with is_causal" if is_causal else "" if layout else shown
        if reason:
            usage.fall_back(NAME, reason, "sdpa")
            return original(query, key, value, attn_mask, dropout_p, **settings)
        if layout is None:
            return counted_attention(NAME, query, key, value, config=config, **settings)
        attention = functools.partial(counted_attention, f"{NAME} ({shown})")
        return attend(query, key, value, layout, attention=attention, scale=scale, config=config)

    scaled_dot_product_attention.__doc__ = original.__doc__
    scaled_dot_product_attention.__module__ = F.__name__  # where pickle finds it for a model that holds it
    scaled_dot_product_attention.__qualname__ = NAME
    scaled_dot_product_attention.original = original
    return scaled_dot_product_attention


def _is_square(bias: CausalBias) -> bool:
    """Whether it is the mask of ``is_causal``, which counts from the first query and key."""
    return bias.variant == CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv


@remember_recent
def layout_of(mask: Tensor, batch: int, n_q: int, n_kv: int) -> tuple[Layout | None, str]:
    """The layout that a mask shows, and its name; or None and why there is none."""
    if isinstance(mask, CausalBias):
        return Layout(CAUSAL), "causal, from the last key"
    seen = read_mask(mask, batch, n_q, n_kv)
    if seen is not None:
        return find_layout(seen, batch, n_kv), str(seen)
    if not has_values(mask):
        return None, "a mask for each pair of tokens, which a compiled graph does not read"
    kind = "an additive" if mask.is_floating_point() else "a"
    return None, f"{kind} mask that is not a window, documents or hidden keys, the same for all heads"


def _holders(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """(module, name) of every module that holds ``function``, which ``from … import`` copies; not our own.

    Nor torch's C++ module, by which compiled graphs call what was left in full precision.
    """
    skipped = (f"{__name__.partition('.')[0]}.", "torch._C.")
    return [
        (module, name)
        for path, module in [*sys.modules.items()]
        if not path.startswith(skipped) and isinstance(getattr(module, "__dict__", None), dict)
        for name, value in [*module.__dict__.items()]
        if value is function
    ]
