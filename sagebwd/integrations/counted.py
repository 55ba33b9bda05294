"""The attention that adapters call: counted for :func:`sagebwd.report`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sagebwd import dispatch, usage
from sagebwd.attention import sage_attention
from sagebwd.config import SageConfig, encode


def counted_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: SageConfig,
    **settings: Any,
) -> Any:
    """:func:`sagebwd.sage_attention`, counted under ``name`` with the kernels that ran."""
    result = sage_attention(query, key, value, config=config, **settings)
    out = result[0] if isinstance(result, tuple) else result  # of the dtype that autocast asks for
    usage.record(name, dispatch.choose(out, 1.0, encode(config)))
    return result
