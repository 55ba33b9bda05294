"""Compiling kernels before the first call needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sagebwd.attention import sage_attention
from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.dispatch import explain
from sagebwd.interface import AttentionParams
from sagebwd.kernels import ops
from sagebwd.validation import cast_to_autocast_dtype
from sagebwd.window import Window


def prepare(
    *queries: Tensor,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    configs: Sequence[SageConfig] = (DEFAULT_CONFIG,),
) -> None:
    """Compile and load the kernels of :func:`sagebwd.sage_attention` and its backward, so that no call waits.

    Without it, the first call of each kind waits for its own kernels. Here all kinds compile at once. Kernels
    depend on the GPU, the dtype, the head size, ``config``, and on whether there is a causal mask, a window,
    or packed documents (which other masks become), but not on the other sizes:

    >>> q = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16, device="cuda")
    >>> sagebwd.prepare(q, is_causal=True, configs=[SageConfig(), SageConfig.consistent()])

    Triton compiles one kernel after another, and some again for other sizes: pass q as the model has it.

    Args:
        queries: (…, H, N, D), one for each head size, dtype or GPU. For each of ``configs``, each is taken
            for queries, keys and values of a forward and a backward. More tokens than ``window_size``, which
            otherwise is none.
        is_causal, window_size, cu_seqlens, configs: as of :func:`sagebwd.sage_attention`.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as the call does.
    """
    mask = {"is_causal": is_causal, "window_size": window_size}
    kinds = [(x, config) for q in queries for x in cast_to_autocast_dtype(q.detach()) for config in configs]
    for q, config in kinds:
        kernels = explain(q, **mask, config=config).kernels
        window = Window.of(is_causal, window_size).narrowed(q.shape[-2], q.shape[-2])
        params = AttentionParams(window, 1.0, config, kernels, cu_seqlens, pack_for_backward=True)
        ops.load_ahead(q, params)
    for q, config in kinds:
        with torch.enable_grad():
            out = sage_attention(q.requires_grad_(), q, q, **mask, cu_seqlens=cu_seqlens, config=config)
        torch.autograd.grad(out, q, out)
