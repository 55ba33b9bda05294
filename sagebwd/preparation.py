"""Compiling kernels before the first call needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.attention import sage_attention
from sagebwd.config import DEFAULT_CONFIG, SageConfig, encode
from sagebwd.interface import AttentionParams
from sagebwd.kernels import ops
from sagebwd.validation import cast_to_autocast_dtype, check_arguments
from sagebwd.window import Window


def prepare(
    *queries: Tensor,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    configs: Sequence[SageConfig] = (DEFAULT_CONFIG,),
) -> None:
    """Compile and load the kernels of :func:`sagebwd.sage_attention` and its backward, so that no call waits.

    Without it the first call of a kind does that, for a second or more. Here all kinds compile at once.
    Kernels depend on the GPU, the dtype, the head size, ``config``, and on whether there is a causal mask, a
    window, or packed documents (which masks become), but not on the other sizes:

    >>> q = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16, device="cuda")
    >>> sagebwd.prepare(q, is_causal=True, configs=[SageConfig(), SageConfig.consistent()])

    Triton compiles one kernel after another, and some again for other sizes: pass q as the model has it.

    Args:
        queries: (…, H, N, D), one for each head size, dtype or GPU. Each is queries, keys and values of a
            forward and a backward, for each of ``configs``.
        is_causal, window_size, cu_seqlens, configs: as of :func:`sagebwd.sage_attention`.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as the call does.
    """
    kinds = [(q.detach().requires_grad_(), config) for q in queries for config in configs]
    for q, config in kinds:
        check_arguments(q, q, q, scale=None, enable_gqa=False, config=config)
        window = Window.of(is_causal, window_size).narrowed(q.shape[-2], q.shape[-2])
        kernels = dispatch.choose(*cast_to_autocast_dtype(q), 1.0, encode(config))
        params = AttentionParams(window, 1.0, config, kernels, cu_seqlens, pack_for_backward=True)
        ops.load_ahead(*cast_to_autocast_dtype(q), params)
    for q, config in kinds:
        given = {"is_causal": is_causal, "window_size": window_size, "cu_seqlens": cu_seqlens}
        with torch.enable_grad():
            out = sage_attention(q, q, q, **given, config=config)
        torch.autograd.grad(out, q, out)
