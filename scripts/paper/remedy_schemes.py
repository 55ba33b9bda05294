"""Candidates against the bias of INT8 attention's gradients: settings of SageBwd, and ideas without a kernel.

Every candidate is a scheme of `scripts.paper.attention_emulation`, whole matrices in float32. `attend_with`
makes an attention of it that a model can run, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from model.backends import AttentionFn
from sagebwd import SageConfig
from scripts.paper.attention_emulation import (
    Forward,
    Head,
    Scheme,
    emulate_backward,
    emulate_forward,
    probabilities,
    scheme_of,
)
from scripts.paper.gradient_variants import COST, DEFAULT_COST
from scripts.paper.products import over_rounded_sums, product_of, scores_of, smooth_values
from scripts.paper.roundings import (
    Rounding,
    from_groups,
    in_groups,
    int8,
    rotated,
    rotation,
    stochastic_int8,
    uint8,
)
from trainer.probe import without_tf32

#: Entries of P that are alive at a time in `attend_with` (64 MiB in float32); some ten such matrices are.
ENTRIES_AT_ONCE = 2**24
#: A row of a tile gets finer scales where more than this share of the sum of its magnitudes rounds to zero.
LOST = 0.01
#: Columns that share a finer scale: the contraction of one INT8 instruction of the tensor cores.
FINE = 32
#: Draws of a scheme that rounds at random.
DRAWS = 8


@dataclass(frozen=True)
class Remedy:
    """A candidate.

    units: tensor-core time, see `scripts.paper.gradient_variants`; 11 is all six products in INT8.
    config: the setting of the library that it is; None: it has no kernel.
    extra: what it costs beyond tensor-core time.
    draws: 1 if it computes the same again, else how many draws tell its bias from its noise.
    """

    title: str
    scheme: Scheme
    units: float = DEFAULT_COST
    config: SageConfig | None = None
    extra: str = ""
    draws: int = 1

    @property
    def all_int8(self) -> bool:
        """Whether it needs no more tensor-core time than the paper's six products in INT8."""
        return self.units == DEFAULT_COST


def remedies(head_dim: int, dtype: torch.dtype) -> dict[str, Remedy]:
    """Every candidate by name, for heads of this size and inputs of this dtype."""
    return settings(head_dim, dtype) | ideas(head_dim, dtype) | combinations(head_dim, dtype)


def settings(head_dim: int, dtype: torch.dtype) -> dict[str, Remedy]:
    """The candidates that are settings of the library, and 16-bit attention for comparison."""

    def setting(title: str, config: SageConfig, extra: str = "", units: float = DEFAULT_COST) -> Remedy:
        return Remedy(title, scheme_of(config, head_dim, dtype), units, config, extra)

    in_16_bit = scheme_of(SageConfig(int8_matmuls=()), head_dim, dtype)
    consistent = DEFAULT_COST + COST["o"] + COST["dv"]
    mean = "the mean of V"
    return {
        "16_bit": Remedy("all products in 16 bit", in_16_bit, DEFAULT_COST + sum(COST.values()) - COST["dp"]),
        "default": setting("default", SageConfig()),
        "paper": setting("`paper()`", SageConfig.paper()),
        "unsigned_p": setting("`unsigned_p`", SageConfig(unsigned_p=True)),
        "smooth_v": setting("`smooth_v`", SageConfig(smooth_v=True), mean),
        "low_bias": setting("`low_bias()`: both", SageConfig.low_bias(), mean),
        "consistent": setting("`consistent()`", SageConfig.consistent(), "the residual of O", consistent),
    }


def ideas(head_dim: int, dtype: torch.dtype) -> dict[str, Remedy]:
    """Changes of the default that have no kernel."""
    scheme = scheme_of(SageConfig(), head_dim, dtype)
    return {
        "own_sum": Remedy(
            "O over the sum of its own rounded P", own_sum(scheme, head_dim), extra="a row sum of rounded P"
        ),
        "stochastic": Remedy(
            "P and dS rounded stochastically",
            stochastic(scheme, head_dim),
            extra="a random number per element of P and dS",
            draws=DRAWS,
        ),
        "finer": Remedy(
            f"scales per {FINE} where small P and dS round to zero",
            finer(scheme, head_dim),
            extra="a sum per row and tile; more scales in some rows",
        ),
        "hadamard": Remedy(
            "Hadamard rotation of Q and K",
            hadamard(scheme, head_dim),
            extra="D log₂ D additions per token of Q, K, dQ and dK",
        ),
    }


def combinations(head_dim: int, dtype: torch.dtype) -> dict[str, Remedy]:
    """`low_bias()` with each of the ideas that go with it."""
    block_q, block_kv = SageConfig().tile(head_dim)
    scheme = scheme_of(SageConfig.low_bias(), head_dim, dtype)
    by_own_sum = smooth_values(over_rounded_sums(uint8(1, block_kv), int8(block_kv, None)))
    random_ds = {
        "dq": product_of(stochastic_int8(1, block_kv), int8(block_kv, None)),
        "dk": product_of(stochastic_int8(1, block_q), int8(block_q, None)),
    }
    return {
        "low_bias_own_sum": Remedy(
            "`low_bias()`, O over the sum of its own rounded P",
            replace(scheme, output=by_own_sum),
            extra="the mean of V; a row sum of rounded P",
        ),
        "low_bias_stochastic": Remedy(
            "`low_bias()`, dS rounded stochastically",
            replace(scheme, **random_ds),
            extra="the mean of V; a random number per element of dS",
            draws=DRAWS,
        ),
        "low_bias_hadamard": Remedy(
            "`low_bias()`, Hadamard rotation of Q and K",
            hadamard(scheme, head_dim),
            extra="the mean of V; D log₂ D additions per token of Q, K, dQ and dK",
        ),
    }


# --- Ideas --------------------------------------------------------------------------------------------------


def own_sum(scheme: Scheme, head_dim: int) -> Scheme:
    """O divided by the sum of P as the product takes it: rows of rounded P then sum to 1."""
    _, block_kv = SageConfig().tile(head_dim)
    return replace(scheme, output=over_rounded_sums(int8(1, block_kv), int8(block_kv, None)))


def weights_rounded_by(scheme: Scheme, head_dim: int, rounding: Callable[[int], Rounding]) -> Scheme:
    """P in O and dV and dS in dQ and dK rounded by rounding(columns of a tile), the tokens as before."""
    block_q, block_kv = SageConfig().tile(head_dim)
    to_keys = product_of(rounding(block_kv), int8(block_kv, None))
    to_queries = product_of(rounding(block_q), int8(block_q, None))
    return replace(scheme, output=to_keys, dq=to_keys, dv=to_queries, dk=to_queries)


def stochastic(scheme: Scheme, head_dim: int) -> Scheme:
    """P and dS rounded up with the probability of the fraction, in all four products that take them."""
    return weights_rounded_by(scheme, head_dim, partial(stochastic_int8, 1))


def finer(scheme: Scheme, head_dim: int) -> Scheme:
    return weights_rounded_by(scheme, head_dim, finer_where_zero)


def finer_where_zero(columns: int, fine: int = FINE, lost: float = LOST) -> Rounding:
    """INT8 with a scale per row and `columns`; per `fine` columns where the coarse scale loses too much."""
    coarse, refined = int8(1, columns), int8(1, fine)
    return lambda x: torch.where(loses_too_much(x, columns, lost), refined(x), coarse(x))


def loses_too_much(x: Tensor, columns: int, lost: float = LOST) -> Tensor:
    """Where more than `lost` of the sum of magnitudes of a row's `columns` rounds to zero; shaped as x."""
    size = x.abs()
    gone = torch.where(int8(1, columns)(x) == 0, size, 0.0)
    groups = in_groups(size, 1, columns)
    too_much = in_groups(gone, 1, columns).sum(3, keepdim=True) > lost * groups.sum(3, keepdim=True)
    return from_groups(too_much.expand_as(groups), x)


def hadamard(scheme: Scheme, head_dim: int) -> Scheme:
    """Q and K rounded in a rotated basis. QKᵀ does not change; dQ and dK are turned back at the end."""
    block_q, block_kv = SageConfig().tile(head_dim)
    turn = rotation(head_dim)
    queries, keys = rotated(int8(block_q, None), turn), rotated(int8(block_kv, None), turn)
    return replace(
        scheme,
        scores=scores_of(queries, keys),
        dq=product_of(int8(1, block_kv), keys),
        dk=product_of(int8(1, block_q), queries),
    )


# --- In a model ---------------------------------------------------------------------------------------------


def attend_with(scheme: Scheme) -> AttentionFn:
    """The emulated attention, differentiable: q, k, v (B, H, N, D) → O of q's dtype.

    Raises ValueError for attention that is not causal, and for fewer key than query heads.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        if not is_causal or enable_gqa:
            raise ValueError(
                f"is_causal={is_causal}, enable_gqa={enable_gqa}: the emulation is causal and has a key head "
                "for every query head; use a model with n_kv_heads=null"
            )
        return Emulated.apply(q, k, v, scheme)

    return attend


class Emulated(torch.autograd.Function):
    """Forward and backward of a scheme. δ is made from the O that the forward returned, as in a kernel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scheme: Scheme) -> Tensor:
        out = over_heads(lambda *head: emulate_forward(*head, scheme).out, q, k, v)
        ctx.save_for_backward(q, k, v, out)
        ctx.scheme = scheme
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors

        def gradients(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
            forward = Forward(probabilities(q, k, ctx.scheme), out)
            return emulate_backward(Head(q, k, v, grad_out), ctx.scheme, forward)[1:]

        found = over_heads(gradients, q, k, v, out, grad_out)
        return *(x.to(q.dtype) for x in found), None


def over_heads(function: Callable, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """`function` of single heads (N, D) in float32, for all of (B, H, N, D); random draws differ by head."""
    batch, heads, tokens, _ = tensors[0].shape
    at_once = max(ENTRIES_AT_ONCE // tokens**2, 1)
    mapped = torch.vmap(function, randomness="different", chunk_size=at_once)
    with torch.autocast(tensors[0].device.type, enabled=False), without_tf32():
        found = mapped(*(x.detach().flatten(0, 1).float() for x in tensors))
    if isinstance(found, tuple):
        return tuple(x.unflatten(0, (batch, heads)) for x in found)
    return found.unflatten(0, (batch, heads))
