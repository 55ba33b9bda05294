"""How DTensor shards attention: whole sequences (the batch) or whole heads, never tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sagebwd._ops import ops
from sagebwd.config import decode

#: Placements of the results and of the arguments on one axis of the device mesh.
Placements = tuple[list[Any], list[Any]]

BATCH, HEADS = 0, 1
#: Tensors (B, heads, …). Of ``out_residual`` this is true if there is one.
SHARDED = ("grad_out", "grad_lse", "q", "k", "v", "out", "lse", "k_mean", "out_residual")


def register() -> None:
    """Register the strategies. Call once."""
    results = {
        ops.forward.default: ("out", "lse", "k_mean", "out_residual", "packed_q", "packed_kv"),
        ops.backward.default: ("q", "k", "v"),
    }
    for operator, names in results.items():
        register_sharding(operator)(_strategy(operator, names))


def _strategy(operator: OpOverload, results: tuple[str, ...]) -> Callable[..., list[Placements]]:
    """The ways to shard ``operator``, whose results are sharded as the tensors with these names."""
    names = [argument.name for argument in operator._schema.arguments]

    def placements(*values: Any, **others: Any) -> list[Placements]:
        given = {**dict(zip(names, values, strict=False)), **others}
        if given.get("pack_for_backward"):
            raise NotImplementedError("packed Q, K and V have no sharding; pass pack_for_backward=False")
        has_residual = decode(given["config"]).compensate_o

        def place(name: str, axis: int | None) -> Replicate | Shard:
            is_whole = axis is None or name not in SHARDED or (name == "out_residual" and not has_residual)
            return Replicate() if is_whole else Shard(axis)

        def row(axis: int | None) -> Placements:
            arguments = [place(x, axis) if hasattr(y, "placements") else None for x, y in given.items()]
            return [place(x, axis) for x in results], arguments

        rows = [row(None)]
        if given["cu_seqlens"] is None:
            rows.append(row(BATCH))
        if _heads_divide(given):
            rows.append(row(HEADS))
        return rows

    return placements


def _heads_divide(given: dict[str, Any]) -> bool:
    """Whether all shards of heads have as many key heads, so that the groups of GQA stay together.

    DTensor takes the way that moves the least data. That is none if the tensors agree on each axis of the
    mesh; otherwise it may shard heads along any axes, unless there are more shards than heads.
    """
    if given["k"] is None:
        return False
    specs = [x for x in given.values() if hasattr(x, "placements")]
    sizes, kv_heads = specs[0].mesh.shape, given["k"].shape[1]
    asked = [{x.placements[i] for x in specs} - {Replicate()} for i in range(len(sizes))]
    if all(x in (set(), {Shard(BATCH)}, {Shard(HEADS)}) for x in asked):
        shards = prod(size for size, x in zip(sizes, asked, strict=True) if x == {Shard(HEADS)})
        if kv_heads % shards == 0:
            return True
    possible = [prod(some) for n in range(len(sizes)) for some in combinations(sizes, n + 1)]
    return all(kv_heads % shards == 0 or kv_heads < shards for shards in possible)
