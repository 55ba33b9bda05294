"""Which kernels run a call of another library, which has no argument for them."""

from __future__ import annotations

from torch import Tensor

from sagebwd import dispatch
from sagebwd.config import SageConfig, encode
from sagebwd.validation import DTYPES, cast_to_autocast_dtype


def choose_kernels(q: Tensor, k: Tensor, v: Tensor, scale: float, config: SageConfig) -> tuple[str, str]:
    """The kernel set that will run, and "", or "" and why none can.

    The reason does not offer ``kernels="reference"``, as :func:`sagebwd.sage_attention` does.
    """
    if q.dtype not in DTYPES:
        return "", f"q is {str(q.dtype).removeprefix('torch.')} (cast it to bfloat16 or float16)"
    q, *_ = cast_to_autocast_dtype(q, k, v)
    try:
        return dispatch.choose(q, scale, encode(config)), ""
    except (ValueError, NotImplementedError) as error:
        return "", dispatch.explain(q, config=config).reasons.get("triton", str(error))
