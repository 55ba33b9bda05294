"""The attention that adapters call: counted for :func:`sagebwd.report`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sagebwd import dispatch, usage
from sagebwd.attention import sage_attention
from sagebwd.config import SageConfig, encode
from sagebwd.window import Window


def counted_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: SageConfig,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **settings: Any,
) -> Any:
    """:func:`sagebwd.sage_attention`, counted under ``name`` with the kernels that ran."""
    masks = {"is_causal": is_causal, "window_size": window_size}
    result = sage_attention(query, key, value, config=config, **masks, **settings)
    out = result[0] if isinstance(result, tuple) else result  # of the dtype that autocast asks for
    window = Window.of(is_causal, window_size).narrowed(query.shape[2], key.shape[2])
    usage.record(name, dispatch.choose(out, 1.0, encode(config), is_windowed=window.is_sliding))
    return result
