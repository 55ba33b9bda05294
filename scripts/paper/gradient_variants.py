"""What `scripts.paper.gradient_error` compares: the default's roundings one by one, variants, costs.

Cost is in units of one INT8 product of N × N × D; a 16-bit product costs two, one in 8-bit floating point
one. There are seven products, ten in all, because both kernels of the backward need S and dP:

    forward        S, O                1 + 1
    dK/dV kernel   S, dP, dV, dK       1 + 2 + 1 + 1
    dQ kernel      S, dP, dQ           1 + 2 + 1

which makes 11 for the paper's six products in INT8, and 18 for all in 16-bit. What is not a product
(exponentials, maxima, rounding) is not counted, although Hopper's kernels spend most of their time on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from sagebwd.config import SageConfig
from scripts.paper.attention_emulation import Scheme, scheme_of
from scripts.paper.products import Product, product_of, scores_but_hard_tiles, scores_of, smooth_values
from scripts.paper.roundings import (
    Rounding,
    but_channels,
    but_hard_tiles,
    exact,
    float8,
    int8,
    per_channel,
    rotated,
    stochastic_int8,
    to_dtype,
    uint8,
)

#: Units that each product costs by default, over all kernels. In 16-bit, a product costs as much more.
COST = {"s": 3, "o": 1, "dv": 1, "dp": 4, "dq": 1, "dk": 1}
DEFAULT_COST = sum(COST.values())

#: The roundings of the default, in groups whose part in the error is measured alone and by leaving it out.
#: On dQ and dK, O has an effect through δ only.
STEPS = {
    "S": ("Q in S", "K in S"),
    "O and δ": ("P in O", "V in O", "O stored"),
    **{name: (name,) for name in ("P in O", "V in O", "O stored")},
    **{name: (name,) for name in ("P in dV", "dO in dV", "dS in dQ", "K in dQ", "dS in dK", "Q in dK")},
}
ROUNDINGS = tuple(dict.fromkeys(name for names in STEPS.values() for name in names))


@dataclass(frozen=True)
class Variant:
    """A scheme, what it costs, and in how many draws it is averaged (where it rounds at random)."""

    scheme: Scheme
    cost: float = DEFAULT_COST
    draws: int = 1


def ladder(head_dim: int, dtype: torch.dtype) -> dict[tuple[str, str], Scheme]:
    """By ("alone", step) the default with nothing else rounded, by ("all but", step) all but that."""
    schemes = {}
    for step, names in STEPS.items():
        schemes["alone", step] = rounded_in(names, head_dim, dtype)
        others = [name for name in ROUNDINGS if name not in names]
        schemes["all but", step] = rounded_in(others, head_dim, dtype)
    return schemes


def rounded_in(names: Iterable[str], head_dim: int, dtype: torch.dtype) -> Scheme:
    """The default with only the roundings `names` of ROUNDINGS, everything else exact."""
    names = set(names)
    block_q, block_kv = SageConfig().tile(head_dim)

    def if_named(name: str, rounding: Rounding) -> Rounding:
        return rounding if name in names else exact

    def contraction(weights: str, tokens: str, block: int) -> Product:
        return product_of(if_named(weights, int8(1, block)), if_named(tokens, int8(block, None)))

    return Scheme(
        scores=scores_of(if_named("Q in S", int8(block_q, None)), if_named("K in S", int8(block_kv, None))),
        output=contraction("P in O", "V in O", block_kv),
        dv=contraction("P in dV", "dO in dV", block_q),
        dq=contraction("dS in dQ", "K in dQ", block_kv),
        dk=contraction("dS in dK", "Q in dK", block_q),
        stored=if_named("O stored", to_dtype(dtype)),
    )


def variants(head_dim: int, dtype: torch.dtype) -> dict[str, Variant]:
    """Every variant by its name."""
    return switches(head_dim, dtype) | ideas(head_dim, dtype) | combinations(head_dim, dtype)


def switches(head_dim: int, dtype: torch.dtype) -> dict[str, Variant]:
    """Variants that are settings of `SageConfig`."""

    def variant(cost: float = DEFAULT_COST, **settings: object) -> Variant:
        return Variant(scheme_of(SageConfig(**settings), head_dim, dtype), cost)

    def but(*products: str, **settings: object) -> Variant:
        """The default with some 16-bit products."""
        names = [
            name for product in products for name in (("s_fwd", "s_bwd") if product == "s" else (product,))
        ]
        int8_matmuls = tuple(name for name in SageConfig().int8_matmuls if name not in names)
        return variant(DEFAULT_COST + sum(COST[p] for p in products), int8_matmuls=int8_matmuls, **settings)

    delta = 3  # S and dP once more
    return {
        "paper": Variant(scheme_of(SageConfig.paper(), head_dim, dtype)),
        "default": variant(),
        "no K-smoothing": variant(smooth_k=False),
        "Q-smoothing": variant(smooth_q=True),
        "V-smoothing": variant(smooth_v=True),
        "V-smoothing, tiles 64 × 64": variant(smooth_v=True, block_kv=64),
        "strictly causal": Variant(scheme_of(SageConfig.strictly_causal(), head_dim, dtype)),
        "token scales": variant(operand_scales="token"),
        "V-smoothing, token scales": variant(smooth_v=True, operand_scales="token"),
        "unsigned P": variant(unsigned_p=True),
        "unsigned P, V-smoothing": variant(unsigned_p=True, smooth_v=True),
        "tiles 64 × 64": variant(block_kv=64),
        "exact δ": variant(DEFAULT_COST + delta, exact_delta=True),
        "exact δ, unsigned P": variant(DEFAULT_COST + delta, exact_delta=True, unsigned_p=True),
        "S of two levels": variant(DEFAULT_COST + 6, s_levels=2),
        "S of two levels, exact δ": variant(DEFAULT_COST + 6 + delta + 2, s_levels=2, exact_delta=True),
        "16-bit S": but("s"),
        "16-bit S, no K-smoothing": but("s", smooth_k=False),
        "16-bit O": but("o"),
        "16-bit O, compensated": but("o", compensate_o=True),
        "16-bit O, dV": but("o", "dv"),
        "consistent": but("o", "dv", compensate_o=True),
        "16-bit dQ, dK": but("dq", "dk"),
        "16-bit S, O": but("s", "o"),
        "16-bit S, dQ, dK": but("s", "dq", "dk"),
        "16-bit S, O, token scales": but("s", "o", operand_scales="token"),
        "16-bit S, O, compensated": but("s", "o", compensate_o=True),
        "16-bit S, O, dQ, dK": but("s", "o", "dq", "dk"),
        "accurate": Variant(scheme_of(SageConfig.accurate(), head_dim, dtype), DEFAULT_COST + 4),
        "all in 16 bit": but("s", "o", "dv", "dq", "dk"),
        "all in 16 bit, compensated": but("s", "o", "dv", "dq", "dk", compensate_o=True),
        "all in 16 bit, no K-smoothing": but("s", "o", "dv", "dq", "dk", smooth_k=False),
    }


def ideas(head_dim: int, dtype: torch.dtype) -> dict[str, Variant]:
    """Changes of the default that no setting of `SageConfig` covers, one each."""
    default = scheme_of(SageConfig(), head_dim, dtype)
    block_q, block_kv = SageConfig().tile(head_dim)
    queries, keys = int8(block_q, None), int8(block_kv, None)
    to_queries, to_keys = int8(1, block_q), int8(1, block_kv)

    def variant(cost: float = DEFAULT_COST, draws: int = 1, **products: object) -> Variant:
        return Variant(replace(default, **products), cost, draws)

    def tokens(change: object) -> dict[str, Product]:
        """The four products that contract tokens, with a change of how these are rounded."""
        return {
            "output": product_of(to_keys, change(keys)),
            "dv": product_of(to_queries, change(queries)),
            "dq": product_of(to_keys, change(keys)),
            "dk": product_of(to_queries, change(queries)),
        }

    stochastic = {
        "dq": product_of(stochastic_int8(1, block_kv), keys),
        "dk": product_of(stochastic_int8(1, block_q), queries),
    }

    def hard_ds(share: float) -> Variant:
        return variant(
            DEFAULT_COST + 2 * share,
            dq=product_of(but_hard_tiles(to_keys, block_q, block_kv, share), keys),
            dk=product_of(but_hard_tiles(to_queries, block_kv, block_q, share), queries),
        )

    def hard_s(share: float) -> Variant:
        scores = scores_but_hard_tiles(default.scores, block_q, block_kv, share)
        # The forward computes a hard tile in INT8 and again in 16-bit, the backward twice in 16-bit.
        return variant(DEFAULT_COST + 4 * share, scores=scores)

    return {
        "stochastic dS": variant(**stochastic),
        "stochastic dS, mean of 8": variant(draws=8, **stochastic),
        "16-bit dS in 5% of tiles": hard_ds(0.05),
        "16-bit dS in 25% of tiles": hard_ds(0.25),
        "16-bit S in 5% of tiles": hard_s(0.05),
        "16-bit S in 25% of tiles": hard_s(0.25),
        "exact δ in dK": variant(delta="exact in dK"),
        "projected δ": variant(DEFAULT_COST + 1, delta="projected"),
        "a scale per token in S": variant(scores=scores_of(int8(1, None), int8(1, None))),
        "rotated S": variant(scores=scores_of(rotated(queries), rotated(keys))),
        "K of two levels in S": variant(
            DEFAULT_COST + 3, scores=scores_of(queries, int8(block_kv, None, levels=2))
        ),
        # Q and K choose channels independently, so up to two of eight channels of the product are 16-bit.
        "16-bit channels in S, 1 of 8": variant(
            DEFAULT_COST + 3 / 4, scores=scores_of(but_channels(queries, 1 / 8), but_channels(keys, 1 / 8))
        ),
        "scales per channel": variant(**tokens(per_channel)),
        "rotated tokens": variant(**tokens(rotated)),
        "dS, P in groups of 32": variant(
            output=product_of(int8(1, 32), keys),
            dv=product_of(int8(1, 32), queries),
            dq=product_of(int8(1, 32), keys),
            dk=product_of(int8(1, 32), queries),
        ),
        "dQ, dK in e4m3": variant(
            dq=product_of(float8(1, block_kv), float8(block_kv, None)),
            dk=product_of(float8(1, block_q), float8(block_q, None)),
        ),
    }


def combinations(head_dim: int, dtype: torch.dtype) -> dict[str, Variant]:
    """Several ideas at once: those that cost no product ("free"), more of them, and with a 16-bit S or O."""
    unsigned = scheme_of(SageConfig(unsigned_p=True, smooth_v=True), head_dim, dtype)
    block_q, block_kv = SageConfig().tile(head_dim)
    queries, keys, rounded = int8(block_q, None), int8(block_kv, None), to_dtype(dtype)

    def outputs(size: int) -> dict[str, Product]:
        return {"output": smooth_values(product_of(uint8(1, size), keys))}

    def gradients(size: int) -> dict[str, Product]:
        """dQ and dK from dS in groups of `size`."""
        return {
            "dq": product_of(int8(1, min(size, block_kv)), keys),
            "dk": product_of(int8(1, min(size, block_q)), queries),
        }

    free = replace(unsigned, delta="exact in dK")
    finer = replace(free, **outputs(32), **gradients(32))
    by_token = scores_of(int8(1, None), int8(1, None))
    in_16_bit = {"s": scores_of(rounded, rounded), "o": product_of(rounded, rounded)}
    smooth_v = scheme_of(SageConfig(smooth_v=True), head_dim, dtype)
    token = scheme_of(SageConfig(smooth_v=True, operand_scales="token"), head_dim, dtype)
    return {
        "V-smoothing, exact δ in dK": Variant(replace(smooth_v, delta="exact in dK")),
        "V-smoothing, token scales, exact δ in dK": Variant(replace(token, delta="exact in dK")),
        "free": Variant(free),
        "free, a scale per token in S": Variant(replace(free, scores=by_token)),
        "free, groups of 32": Variant(finer),
        "free, groups of 32, a scale per token in S": Variant(replace(finer, scores=by_token)),
        "free, 16-bit S": Variant(replace(free, scores=in_16_bit["s"]), DEFAULT_COST + 3),
        "free, 16-bit S, groups of 32": Variant(replace(finer, scores=in_16_bit["s"]), DEFAULT_COST + 3),
        "16-bit S, O, groups of 32": Variant(
            replace(finer, scores=in_16_bit["s"], output=in_16_bit["o"]), DEFAULT_COST + 4
        ),
        "16-bit O, groups of 32, a scale per token in S": Variant(
            replace(finer, scores=by_token, output=in_16_bit["o"]), DEFAULT_COST + 1
        ),
    }
