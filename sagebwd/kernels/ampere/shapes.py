"""What a CTA of each kernel has. The sources compute the same, and do not compile if it differs."""

from __future__ import annotations

from typing import NamedTuple

from sagebwd.kernels.cuda.packing import scale_bytes

#: Shared memory that a CTA may take on a GeForce (8.6, 8.9, 12.0).
SHARED_LIMIT = 99 * 1024
#: What is left of it beside static variables, in the backward with 64 keys.
DYNAMIC_LIMIT = SHARED_LIMIT - 256


class CTAShape(NamedTuple):
    """Threads, bytes of dynamic shared memory."""

    threads: int
    shared_bytes: int


#: Threads of a CTA, by source.
THREADS = {
    "forward": 256,
    "backward": 256,
    "backward_dq_warps": 384,
    "backward_64_keys": 256,
    "backward_64_keys_dq_warps": 384,
}
#: Padded head sizes at which backward*_dq_warps.cu run: at 128, the threads of 12 warps lack registers.
DQ_WARP_HEAD_DIMS = (64,)


def backward_source(tile: tuple[int, int], head_dim: int) -> str:
    """The source of the backward for tiles of (queries, keys) and a padded head size."""
    has_dq_warps = head_dim in DQ_WARP_HEAD_DIMS
    return ("backward" if tile[1] == 128 else "backward_64_keys") + "_dq_warps" * has_dq_warps


def cta_shape(
    source: str,
    head_dim: int,
    tile: tuple[int, int],
    *,
    p_16bit: bool = False,
    token_scales: bool = False,
) -> CTAShape:
    """The CTA of a kernel.

    Args:
        source: a key of :data:`THREADS`.
        head_dim: as padded.
        tile: queries and keys of a packed block.
        p_16bit, token_scales: the macros of these names.
    """
    if source == "forward":
        shared_bytes = _forward_bytes(head_dim, tile, p_16bit, token_scales)
    elif source in ("backward", "backward_dq_warps"):
        is_staged = source == "backward_dq_warps"
        shared_bytes = _backward_bytes(head_dim, tile, is_staged, p_16bit, token_scales)
    else:
        of_64_keys = _64_keys_bytes if source == "backward_64_keys" else _64_keys_dq_warps_bytes
        shared_bytes = of_64_keys(head_dim, tile, token_scales)
    return CTAShape(THREADS[source], shared_bytes)


def _forward_bytes(head_dim: int, tile: tuple[int, int], p_16bit: bool, token_scales: bool) -> int:
    """Two stages of K and V, or one and the queries; queries that stay; scales of three. Or staging."""
    block_q, block_kv = tile
    alignment = max(head_dim, 128)
    queries = _align(block_q * head_dim + scale_bytes(1, block_q, token_scales), alignment) * 128 // block_q
    scales = scale_bytes(1 if p_16bit else 2, block_kv, token_scales)
    stage = block_kv * head_dim * (3 if p_16bit else 2)
    in_registers = head_dim <= 128 or p_16bit
    operands = max(2 * stage, (1 if in_registers else 2) * stage + queries) + 3 * scales
    return max(operands, 2 * 64 * (2 * head_dim + 16))


def _backward_bytes(
    head_dim: int, tile: tuple[int, int], is_staged: bool, p_16bit: bool, token_scales: bool
) -> int:
    """V, K by columns, its scales; a block of queries by rows and by columns; dS; maxima.

    With stages there are two blocks of queries, and K by rows.
    """
    block_q, block_kv = tile
    rows = _align(_q_rows_bytes(head_dim, block_q, token_scales), 128)
    columns = (1 if p_16bit else 2) * block_q * head_dim
    exchanged = block_q * block_kv + 2 * block_q * 4
    keys = (4 if is_staged else 3) * block_kv * head_dim + scale_bytes(1, block_kv, token_scales)
    return keys + (2 if is_staged else 1) * (rows + columns) + exchanged


def _64_keys_bytes(head_dim: int, tile: tuple[int, int], token_scales: bool) -> int:
    """V, K by columns; maxima; a block of queries by rows; by columns, dS twice, P: may alias."""
    block_q, block_kv = tile
    keys = 3 * block_kv * head_dim
    rows_begin = _align(keys + 2 * (block_q + 2 * block_kv) * 4, 256)
    rows_end = rows_begin + _align(_q_rows_bytes(head_dim, block_q, token_scales), 256)
    columns = 2 * block_q * head_dim + 3 * block_q * block_kv
    is_aliased = rows_end + columns > DYNAMIC_LIMIT
    return max(rows_end, (rows_begin if is_aliased else rows_end) + columns)


def _64_keys_dq_warps_bytes(head_dim: int, tile: tuple[int, int], token_scales: bool) -> int:
    """The same with two blocks of queries by columns, and nothing that aliases."""
    block_q, block_kv = tile
    keys = 3 * block_kv * head_dim
    rows = _align(_q_rows_bytes(head_dim, block_q, token_scales), 256)
    columns = 2 * 2 * block_q * head_dim
    return keys + rows + columns + 3 * block_q * block_kv + 2 * (block_q + 2 * block_kv) * 4


def _q_rows_bytes(head_dim: int, block_q: int, token_scales: bool) -> int:
    """``Q_AND_GRAD_BYTES`` of layout.cuh."""
    return block_q * (3 * head_dim + 8) + scale_bytes(2, block_q, token_scales)


def _align(x: int, to: int) -> int:
    return -(-x // to) * to
