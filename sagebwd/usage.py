"""What ran: which attention layers computed in INT8, by which kernels, and which in full precision, and why.

Integrations count each call here, and users read it with :func:`sagebwd.report`. Only the logits of the first
calls are looked at, which waits for the GPU. Under ``torch.compile`` a call is counted when it is traced.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.attention import sage_attention
from sagebwd.config import SageConfig, encode
from sagebwd.validation import DTYPES, autocast_dtype, show

#: With S in INT8, errors of dQ and dK reach 10% where the largest logit is about this (results/log.md).
LARGEST_LOGIT = 64.0
#: So many calls of each layer class have their logits looked at: two steps of most models.
LOOKS = 64
#: So many queries and keys of each head are looked at.
LOOKED_AT = (32, 4096)


class _Counted(NamedTuple):
    name: str
    kernels: str
    reason: str
    layer: int  # −1 if it has none


class Obstacle(NamedTuple):
    """Why SageBwd does not compute a call.

    reason: what it does not compute, as a noun.
    fix: what the user can do, other than taking full precision; "" for what the integration always offers.
    """

    reason: str
    fix: str = ""


_counts: Counter[_Counted] = Counter()
_warned: set[tuple[str, str]] = set()
_looks: Counter[tuple[str, SageConfig]] = Counter()


@dataclass(frozen=True)
class ReportRow:
    """Layers of one name that ran in the same way.

    Attributes:
        name: the class of the attention layers, or where the call came from.
        layers: their indices, empty where layers have none.
        kernels: the kernel set that computed them in INT8, "" for full precision.
        reason: why they ran in full precision, "" for INT8.
        calls: how often, all layers together; a layer that is recomputed in the backward counts twice.
    """

    name: str
    layers: tuple[int, ...]
    kernels: str
    reason: str
    calls: int


@dataclass(frozen=True)
class Report:
    """What ran since the process started, or since it was cleared; ``print`` shows a table."""

    rows: tuple[ReportRow, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "SageBwd: no integration has called it; your own calls of sage_attention are not counted"
        head = ("attention", "layers", "calls", "ran")
        cells = [head]
        for row in self.rows:
            how = f"INT8 ({row.kernels})" if row.kernels else f"full precision: {row.reason}"
            cells.append((row.name, _ranges(row.layers), str(row.calls), how))
        return "\n".join(aligned(cells))


def report(*, clear: bool = False) -> Report:
    """Tell what the integrations ran: INT8 and by which kernels, or full precision and why.

    >>> print(sagebwd.report())
    attention        layers   calls  ran
    Gemma3Attention  0-4, 6   240    INT8 (hopper)
    T5Attention               80     full precision: a position bias

    Calls of :func:`sagebwd.sage_attention` itself are not counted.

    Args:
        clear: start counting anew, and warn again.
    """
    rows = []
    for (name, kernels, reason), group in groupby(sorted(_counts), lambda call: call[:3]):
        calls = [*group]
        layers = tuple(call.layer for call in calls if call.layer >= 0)
        rows.append(ReportRow(name, layers, kernels, reason, sum(map(_counts.__getitem__, calls))))
    if clear:
        for own in (_counts, _warned, _looks):
            own.clear()
    return Report(tuple(rows))


@contextmanager
def counted_apart() -> Iterator[None]:
    """Within it, calls are counted and warned of as if there had been none, and forgotten afterwards."""
    kept = [(own, own.copy()) for own in (_counts, _warned, _looks)]
    try:
        report(clear=True)
        yield
    finally:
        for own, before in kept:
            own.clear()
            own.update(before)


def record(name: str, kernels: str, layer: int | None = None, reason: str = "") -> None:
    """Count a call. The first of a name and reason is logged or, in full precision, warned of.

    Args:
        name: the class of the attention layer, or where the call comes from.
        kernels: the kernel set, as :func:`sagebwd.dispatch.choose` names it; "" for full precision.
        layer: index of the layer, if it has one.
        reason: as of :func:`fall_back`, "" for INT8.
    """
    _counts[_Counted(name, kernels, reason, -1 if layer is None else layer)] += 1
    if (name, reason) in _warned:
        return
    _warned.add((name, reason))
    if reason:
        warnings.warn(f"{name} runs in full precision, not in INT8: {reason}", stacklevel=3)
    else:
        logging.getLogger(__name__).info("%s runs in INT8 (%s)", name, kernels)


# A tracer runs the function instead of tracing it, as torch.compiler.assume_constant_result has it, which
# would import torch._dynamo.
record._dynamo_marked_constant = True  # type: ignore[attr-defined]


def counted_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: SageConfig,
    layer: int | None = None,
    **settings: Any,
) -> Any:
    """:func:`sagebwd.sage_attention`, counted as :func:`record` does with the kernels that ran."""
    result = sage_attention(query, key, value, config=config, **settings)
    watch_logits(name, query, key, settings.get("scale"), config)
    out = result[0] if isinstance(result, tuple) else result  # of the dtype that autocast asks for
    head_dim = max(query.shape[-1], value.shape[-1])
    record(name, dispatch.choose(out.device, out.dtype, head_dim, 1.0, encode(config)), layer)
    return result


def watch_logits(name: str, q: Tensor, k: Tensor, scale: float | None, config: SageConfig) -> None:
    """Warn once if logits of the first calls are larger than an INT8 S is good for.

    Looks at some queries of the first batch entry, whatever the mask; on a GPU this waits for it. Nothing is
    looked at under a tracer, while a CUDA graph is captured, or where torch reports what waits.

    Args:
        name: as of :func:`record`.
        q, k, scale, config: as of :func:`sagebwd.sage_attention`.
    """
    if torch.compiler.is_compiling() or _looks[name, config] >= LOOKS:
        return
    has_int8_s = config.is_int8("s_fwd") or config.is_int8("s_bwd")
    if not has_int8_s or type(q) is not Tensor or q.is_meta or q.dim() != 4 or 0 in (*q.shape, *k.shape):
        return
    if q.is_cuda and (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode()):
        return
    _looks[name, config] += 1
    largest = _largest_logit(q.detach()[:1], k.detach()[:1], scale, config)
    if largest > LARGEST_LOGIT and (name, "logits") not in _warned:
        _warned.add((name, "logits"))
        warnings.warn(
            f"{name}: logits reach {largest:.0f}, and from about {LARGEST_LOGIT:.0f} on gradients through an "
            "INT8 S may err by more than 10%; measure with sagebwd.diagnose(model, *inputs), or use "
            "full-precision attention",
            stacklevel=3,
        )


def _largest_logit(q: Tensor, k: Tensor, scale: float | None, config: SageConfig) -> float:
    """The largest |S| of :data:`LOOKED_AT` queries and keys, spread evenly; with the smoothed K."""
    q, k = (x[..., :: -(-x.shape[-2] // most), :].float() for x, most in zip((q, k), LOOKED_AT, strict=True))
    k = k - k.mean(-2, keepdim=True) if config.smooths_k else k
    s = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.mT
    return s.abs().amax().item() * (q.shape[-1] ** -0.5 if scale is None else abs(float(scale)))


def find_obstacle(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, config: SageConfig
) -> Obstacle | None:
    """Why no kernel set can run this input; None if one can.

    The reason does not offer ``kernels="reference"``: other libraries have no such argument.
    """
    if q.dtype not in DTYPES:
        return Obstacle(f"this input: q is {show(q.dtype)} (cast it to bfloat16 or float16)")
    dtype = autocast_dtype(q.device.type) or q.dtype
    scale, head_dim = 1.0 if scale is None else scale, max(q.shape[-1], v.shape[-1])
    try:
        dispatch.choose(q.device, dtype, head_dim, scale, encode(config))
    except (ValueError, NotImplementedError) as error:
        reason = dispatch.explain(q, k, v, config=config).reasons.get("triton", str(error))
        return Obstacle(f"this input: {reason}")
    return None


def fall_back(name: str, reason: str, fallback: str, layer: int | None = None, *, fix: str = "") -> None:
    """Refuse a call that SageBwd does not compute, or count it as one in full precision.

    The caller then computes it in full precision. The first call of a name and reason warns.

    Args:
        name, layer: as of :func:`record`.
        reason: what SageBwd does not compute, as a noun: "a position bias".
        fallback: "error" refuses, "sdpa" counts and warns.
        fix: for the error, what the user can do instead of falling back: "set it to 0".

    Raises:
        NotImplementedError: ``fallback`` is "error".
    """
    if fallback == "error":
        raise refusal(name, reason, fix)
    record(name, "", layer, reason)


def refusal(name: str, reason: str, fix: str = "") -> NotImplementedError:
    """The error of :func:`fall_back`."""
    fix = f"{fix}, or " if fix else ""
    return NotImplementedError(
        f"{name}: sagebwd does not compute {reason}; {fix}register sagebwd with fallback='sdpa' to compute "
        "such layers in full precision"
    )


def check_fallback(fallback: str) -> None:
    """Raise ValueError for an unknown ``fallback``."""
    if fallback not in ("error", "sdpa"):
        raise ValueError(f"fallback is {fallback!r}; use 'error' or 'sdpa'")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of a table, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _ranges(layers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2, 5"."""
    runs = groupby(enumerate(layers), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in ([*group] for _, group in runs)]
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
