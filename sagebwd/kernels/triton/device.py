"""Device functions that the kernels share: products, INT8 rounding, scales, tiles and their positions."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

#: Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 when they were imported.
IS_INTERPRETED = triton.knobs.runtime.interpret
INTERPRETED = tl.constexpr(IS_INTERPRETED)

INT8_MAX = tl.constexpr(127.0)
UINT8_MAX = tl.constexpr(255.0)

#: Kernels run over tiles in three phases: those that one limit of the window cuts, whole ones, and those that
#: the other limit or the end cuts. This is the phase of the whole ones; see :func:`key_tiles`.
WHOLE = tl.constexpr(1)

LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)

#: 1.5 · 2²³: adding it to |x| < 2²² rounds x to the nearest integer, ties to even, which then lies in the
#: low bits of the sum. One addition does the work of two slower conversions.
ROUNDING_OFFSET = tl.constexpr(12582912.0)


@triton.jit
def dot(a, b):
    """a @ b: INT8 operands accumulate in int32, 16-bit ones in fp32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        # The interpreter multiplies the bit patterns of bf16.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 ``x`` in a dtype of 16 bits: the nearest value, of two the even one."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts the lower half of the bits off. Half a step of the upper half is added before.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def multiply(a, b):
    """a · b rounded to fp32, never fused with a following addition.

    The backward must find the very logits whose maximum the forward subtracted: with logits of 10⁸ and more
    a fused multiply-add, which does not round the product, would give exp of hundreds where it should be 1.
    """
    if INTERPRETED:
        return a * b
    else:
        return libdevice.mul_rn(a, b)


@triton.jit
def logits(a, b, factor):
    """The tile a @ b of S = QKᵀ or of its transpose, times ``factor``, fp32."""
    product = dot(a, b).to(tl.float32)
    return multiply(product, tl.broadcast_to(factor, product.shape))


@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_max(x, axis: tl.constexpr):
    """Maximum along ``axis``, NaN if any element is."""
    if INTERPRETED:
        # A user-defined combination takes the interpreter seconds; its built-in maximum ignores NaN.
        return tl.max(x, axis) + tl.sum(x * 0.0, axis)
    else:
        return tl.reduce(x, axis, _nan_maximum)


@triton.jit
def scale_of(largest, UNSIGNED: tl.constexpr = False):
    """The INT8 scale for values up to ``largest`` in magnitude: zero if subnormal, NaN if not finite."""
    scale = largest / (UINT8_MAX if UNSIGNED else INT8_MAX)
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    return tl.where(scale == float("inf"), float("nan"), scale)


@triton.jit
def inverse(scale):
    """1 / scale, and zero where the scale is not positive."""
    return 1.0 / tl.where(scale > 0, scale, float("inf"))


@triton.jit
def round_to_int8(x, UNSIGNED: tl.constexpr = False):
    """The nearest integer to |x| ≤ 127; with UNSIGNED to 0 ≤ x ≤ 255, minus 128, for :func:`dot_columns`.

    NaN gives any integer, its scale must be NaN.
    """
    OFFSET: tl.constexpr = ROUNDING_OFFSET - 128.0 if UNSIGNED else ROUNDING_OFFSET
    return (x + OFFSET).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize(x, scale):
    """The nearest integers to x / scale, |x| ≤ 127 scale; scale (rows, 1) or a scalar, zero and NaN included.

    A division per element costs more than everything else here. The quotient by a reciprocal, corrected once
    by its remainder, is the same value: of 8 · 10⁷ quotients next to ties between two steps none differed.
    """
    if INTERPRETED:  # its fused multiply-add rounds twice
        divisor = tl.where(scale > 0, scale, float("inf"))
        return round_to_int8(tl.div_rn(x, tl.broadcast_to(divisor, x.shape)))
    else:
        divisor = tl.where(scale > 0, scale, 1.0)
        reciprocal = tl.where(scale > 0, tl.div_rn(1.0, divisor), 0.0)
        quotient = x * reciprocal
        remainder = tl.fma(-quotient, tl.broadcast_to(divisor, x.shape), x)
        return round_to_int8(tl.fma(remainder, tl.broadcast_to(reciprocal, x.shape), quotient))


@triton.jit
def quantize_rows(x, WHOLE_TILE: tl.constexpr, UNSIGNED: tl.constexpr):
    """Return INT8 values of the tile x and their scales (rows, 1), or with WHOLE_TILE one scale.

    With UNSIGNED no x is negative, and values are stored minus 128; see :func:`round_to_int8`.
    """
    if WHOLE_TILE:
        # Flat, because Triton 3.7 cannot reduce one axis after the other for GPUs of compute capability 10.
        scale = scale_of(nan_max(tl.ravel(tl.abs(x), can_reorder=True), 0), UNSIGNED)
    else:
        scale = scale_of(nan_max(tl.abs(x), 1), UNSIGNED)[:, None]
    return round_to_int8(x * inverse(scale), UNSIGNED), scale


@triton.jit
def position(token):
    """The position of a token in ``columns``: of each 16, position 4 q + 2 h + e takes token 8 h + 2 q + e.

    That is the order in which thread q of four holds a row of an accumulator, which so becomes an operand
    in place, without going through shared memory.
    """
    return token // 16 * 16 + token // 2 % 4 * 4 + token // 8 % 2 * 2 + token % 2


@triton.jit
def in_positions(x):
    """x (rows, tokens) with its columns in the order of :func:`position`."""
    ROWS: tl.constexpr = x.shape[0]
    TOKENS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (ROWS, TOKENS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (ROWS, TOKENS))


@triton.jit
def dot_columns(values, columns, sums):
    """values @ columns as fp32, exact: values (rows, BLOCK) and columns (BLOCK, D_PAD) INT8.

    tl.dot multiplies signed values only. So values 0 … 255 are passed minus 128, and the product starts with
    the difference: 128 times the ``sums`` (D_PAD,) of columns, from :func:`load_sums`. None: signed values.
    """
    product = dot(in_positions(values), columns)
    if sums is not None:
        product += 128 * sums[None, :]
    return product.to(tl.float32)


@triton.jit
def contract_tokens(x, columns, sums, scale, visible, WHOLE_TILE: tl.constexpr, TOKEN_SCALES: tl.constexpr):
    """x @ columns in INT8: x (rows, BLOCK) fp32, columns (BLOCK, D_PAD) INT8 with ``scale``.

    With their ``sums``, see :func:`load_sums`, x is never negative and rounded to 0 … 255; None: −127 … 127.
    Scales per token of ``columns`` run along the contraction, so they go into x before it is quantized;
    where ``visible`` (None: everywhere) hides a token, its scale must not matter, even if it is NaN.
    """
    if TOKEN_SCALES:
        x *= scale[None, :]
        if visible is not None:
            x = tl.where(visible, x, 0.0)
        values, x_scale = quantize_rows(x, WHOLE_TILE, sums is not None)
        return dot_columns(values, columns, sums) * x_scale
    else:
        values, x_scale = quantize_rows(x, WHOLE_TILE, sums is not None)
        return dot_columns(values, columns, sums) * (x_scale * scale)


@triton.jit
def inf_to_nan(x):
    """An infinite sum means that an input was not finite: never pass it on as a plausible result."""
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x)


@triton.jit
def find_document(segments, n, block):
    """Where a block of tokens lies: (document, its first token, its tokens, its first block, block in it).

    Without ``segments`` a sequence is one document of ``n`` tokens.
    """
    if segments is None:
        return 0, 0, n, 0, block
    else:
        document = tl.load(segments.document + block)
        start, first_block = tl.load(segments.start + document), tl.load(segments.first_block + document)
        return (
            document,
            start,
            tl.load(segments.start + document + 1) - start,
            first_block,
            block - first_block,
        )


@triton.jit
def extent(segments, n, document):
    """The same document on the other axis: (its first token, its tokens, its first block)."""
    if segments is None:
        return 0, n, 0
    else:
        start = tl.load(segments.start + document)
        return start, tl.load(segments.start + document + 1) - start, tl.load(segments.first_block + document)


@triton.jit
def key_tiles(first, n_kv, left, right, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """Where the phases of a kernel that owns queries ``first`` … and runs over the keys that they see begin
    and end: phase n takes tiles edges[n] … edges[n + 1] − 1. Phase 0 is empty without a left limit.

    Returns the edges and the end of the keys that any of the queries sees; the last edge, which is only
    needed after the other phases, is the tile of that end.
    """
    seen, whole_end = n_kv, n_kv // BLOCK
    if right is not None:
        seen = tl.minimum(n_kv, first + OWN + right)
        whole_end = tl.minimum(whole_end, (first + 1 + right) // BLOCK)
    begin, whole = 0, 0
    if left is not None:
        begin = tl.maximum(first - left, 0) // BLOCK
        whole = tl.cdiv(tl.maximum(first + OWN - 1 - left, 0), BLOCK)
        whole = tl.minimum(whole, tl.cdiv(seen, BLOCK))
        whole_end = tl.maximum(whole_end, whole)
    return (begin, whole, whole_end), seen


@triton.jit
def query_tiles(
    first, n_q, n_kv, left, right, IS_CAUSAL: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """The edges of the phases of a kernel that owns keys ``first`` … and runs over queries that see them.

    As in :func:`key_tiles`; phase 2 is empty without a left limit. Where keys end within this tile, every
    tile is cut. Queries past the end need no mask: their lse is +inf, so their P is zero.
    """
    begin, whole, end = 0, 0, tl.cdiv(n_q, BLOCK)
    whole_end = end
    if left is not None:
        end = tl.minimum(end, tl.cdiv(first + OWN + left, BLOCK))
        whole_end = tl.minimum(end, (first + left + 1) // BLOCK)
    if right is not None:
        seeing, seeing_all = first - right, first + OWN - 1 - right
        if not IS_CAUSAL:  # then right may be larger
            seeing, seeing_all = tl.maximum(seeing, 0), tl.maximum(seeing_all, 0)
        begin = tl.minimum(seeing // BLOCK, end)
        whole = tl.minimum(tl.cdiv(seeing_all, BLOCK), end)
    whole = tl.where(first + OWN > n_kv, end, whole)
    if left is not None:
        whole_end = tl.maximum(whole_end, whole)
    return begin, whole, whole_end, end


@triton.jit
def visible(queries, keys, exists, left, right):
    """Whether queries see keys. One of them is (rows, 1), the other (1, columns), and ``exists`` as keys."""
    result = exists
    if right is not None:
        result = result & (keys <= queries + right)
    if left is not None:
        result = result & (keys >= queries - left)
    return result


@triton.jit
def head_pointer(x, head, heads, start):
    """Pointer to token ``start`` of a (B, H, N, D) tensor with any strides; ``head`` counts b · H + h."""
    batch, head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    start = tl.full((), start, tl.int64)
    return x.data + batch * x.stride_b + head * x.stride_h + start * x.stride_n


@triton.jit
def token_offsets(x, SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """Offsets (SIZE, D_PAD) from the pointer to the first token of a tile."""
    token, channel = tl.arange(0, SIZE).to(tl.int64), tl.arange(0, D_PAD).to(tl.int64)
    return token[:, None] * x.stride_n + channel[None, :] * x.stride_d


@triton.jit
def token_mask(first, n, d, SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """Which elements (SIZE, D_PAD) of the tile that starts at token ``first`` exist."""
    return (first + tl.arange(0, SIZE) < n)[:, None] & (tl.arange(0, D_PAD) < d)[None, :]


@triton.jit
def load_tokens(x, pointer, first, n, d, SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """Tile (SIZE, D_PAD) from token ``first``, zero outside; ``pointer`` is that of token 0."""
    pointer += tl.full((), first, tl.int64) * x.stride_n
    mask = token_mask(first, n, d, SIZE, D_PAD)
    return tl.load(pointer + token_offsets(x, SIZE, D_PAD), mask=mask, other=0.0)


@triton.jit
def load_tile(x, head, heads, start, first, n, d, SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """:func:`load_tokens` in fp32 of one head, from token ``start`` of it on."""
    pointer = head_pointer(x, head, heads, start)
    return load_tokens(x, pointer, first, n, d, SIZE, D_PAD).to(tl.float32)


@triton.jit
def store_tokens(x, pointer, first, n, d, tile, SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """Store the part of ``tile`` that exists, an infinity of fp32 as NaN."""
    pointer += tl.full((), first, tl.int64) * x.stride_n
    mask = token_mask(first, n, d, SIZE, D_PAD)
    tl.store(
        pointer + token_offsets(x, SIZE, D_PAD),
        round_to(inf_to_nan(tile), x.data.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def load_rows(
    operand, tile, row, IS_INT8: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr
):
    """Rows ``row`` … of a block (SIZE, D_PAD), for a product that contracts channels."""
    offsets = (row + tl.arange(0, SIZE))[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :]
    offset = tile.to(tl.int64) * (BLOCK * D_PAD)
    if IS_INT8:
        return tl.load(operand.rows + offset + offsets)
    else:
        return tl.load(operand.rounded + offset + offsets)


@triton.jit
def load_columns(operand, tile, IS_INT8: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
    """A whole block (BLOCK, D_PAD), for a product that contracts tokens.

    INT8 tensor cores want both operands contiguous along the contraction, hence a transposed copy.
    """
    offset = tile.to(tl.int64) * (BLOCK * D_PAD)
    token, channel = tl.arange(0, BLOCK)[:, None], tl.arange(0, D_PAD)[None, :]
    if IS_INT8:
        return tl.load(operand.columns + offset + channel * BLOCK + token)
    else:
        return tl.load(operand.rounded + offset + token * D_PAD + channel)


@triton.jit
def load_sums(operand, tile, D_PAD: tl.constexpr):
    """The sums (D_PAD,) of the columns of a block."""
    return tl.load(operand.sums + tile.to(tl.int64) * D_PAD + tl.arange(0, D_PAD))


@triton.jit
def load_scale(operand, tile, row, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOKEN_SCALES: tl.constexpr):
    """The scale of a block, or with TOKEN_SCALES those (SIZE,) of its tokens from ``row`` on."""
    if TOKEN_SCALES:
        return tl.load(operand.scale + tile.to(tl.int64) * BLOCK + row + tl.arange(0, SIZE))
    else:
        return tl.load(operand.scale + tile)


@triton.jit
def outer(a, b, TOKEN_SCALES: tl.constexpr):
    """The product of two scales: of two scalars, or (rows, columns) of one per row and one per column."""
    if TOKEN_SCALES:
        return a[:, None] * b[None, :]
    else:
        return a * b


@triton.jit
def mean_logits(
    q, q_tile, k, k_mean, k_tokens, k_pointer, first, n_kv, d, SIZE: tl.constexpr, D_PAD: tl.constexpr
):
    """The part of S that Q-smoothing removed: μ_Q of one block of Q times smoothed keys, (SIZE,) fp32."""
    channels = tl.arange(0, D_PAD)
    q_mean = tl.load(q.mean + q_tile.to(tl.int64) * D_PAD + channels)
    keys = load_tokens(k_tokens, k_pointer, first, n_kv, d, SIZE, D_PAD).to(tl.float32)
    if k.mean is not None:
        keys -= tl.load(k.mean + k_mean.to(tl.int64) * D_PAD + channels)[None, :]
    return tl.sum(keys * q_mean[None, :], 1)
