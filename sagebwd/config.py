"""The settings of SageBwd (arXiv 2603.02170): one frozen dataclass, and its presets by name."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

#: The seven matrix products of a forward and backward pass, in the order in which they run.
#: ``s_fwd`` and ``s_bwd`` are S = QKᵀ, which the backward recomputes; ``o`` is O = PV, ``dv`` dV = PᵀdO,
#: ``dp`` dP = dOVᵀ, ``dq`` dQ = dS·K and ``dk`` dK = dSᵀQ.
MATMULS = ("s_fwd", "o", "s_bwd", "dv", "dp", "dq", "dk")

#: What the paper runs in INT8: everything but dP, whose error would pass into both dQ and dK.
PAPER_INT8_MATMULS = ("s_fwd", "o", "s_bwd", "dv", "dq", "dk")

#: The products whose left operand is P, which is never negative: P̃ in the forward, P in the backward.
P_MATMULS = ("o", "dv")

#: The products that take K.
K_MATMULS = ("s_fwd", "s_bwd", "dq")

#: Tensor cores contract in steps of at least 16, so tiles come in multiples of it.
TILE_STEP = 16

#: (queries, keys) of a tile where the settings leave them open: up to a head size of 128, and above.
TILE, TILE_OF_LARGE_HEADS = (64, 128), (64, 64)


@dataclass(frozen=True)
class SageConfig:
    """Settings of one SageBwd attention: what is quantized, and how. :data:`PRESETS` names the presets.

    The default is the most accurate setting that should cost a kernel no speed. It differs from
    :meth:`paper` in two things:

    - ``granularity="row"``: one scale per output row needs no reduction over the whole tile, so it is no
      slower than one scale per tile. It halves the error of dQ, dK and dV while logits are small.
    - 64 × 128 tiles instead of 128 × 64. The error of dK and dV grows with ``block_q``, that of O and dQ
      more slowly with ``block_kv``; and 64 × 128 was the fastest forward tile measured on Hopper. Heads
      of more than 128 channels take 64 × 64, because their rows fill a GPU's shared memory sooner.

    Under ``is_causal`` an output depends slightly on tokens that the mask hides from it, in every preset but
    :meth:`strictly_causal`; under ``window_size``, likewise. Hidden tokens contribute to

    - μ_K, the mean of all keys (``smooth_k``), which shifts what every key rounds to;
    - μ_Q, the mean of a block of queries (``smooth_q``);
    - μ_V, the mean of all values (``smooth_v``);
    - the scale of a block of Q, K, V or dO that earlier tokens share with them (``operand_scales="block"``);
    - the scale of a whole tile of P and dS in the backward (``granularity="block"``).

    ``results/accuracy/causal_leak.json`` has their sizes.

    A preset takes settings that replace its own: ``SageConfig.paper(smooth_k=False)``.
    :func:`sagebwd.explain` tells which kernels run a setting.

    Attributes:
        smooth_k: subtract the mean over all tokens, μ_K, from K before it is quantized. The softmax does
            not change. Without effect where no product takes K in INT8: see :attr:`smooths_k`.
        smooth_q: subtract from each block of Q its own token mean, μ_Q. Adds the row μ_Q·Kᵀ to S and the
            term (dSᵀ1)·μ_Qᵀ to dK.
        smooth_v: subtract the mean over all tokens, μ_V, from V before it is quantized for O, and add it to
            O. O does not change, because rows of P sum to 1, but its rounding error is then relative to
            V − μ_V instead of V. That improves δ, and so dQ and dK, where all values of a sequence have a
            common part. Costs one more read of V.
        unsigned_p: round P̃ in O and P in dV, which are never negative, to unsigned INT8: 0 … 255 with scale
            max / 255, instead of −127 … 127 with max / 127. Steps are half as wide. A product outside INT8
            does not change. Free where tensor cores multiply unsigned by signed (the CUDA kernels). The
            Triton kernels subtract 128 from P and add 128 times the column sums of the other operand, one
            more value per channel of each block to load.
        operand_scales: scales of Q, K, V and dO. ``"block"``, as in the paper: one per block of tokens.
            ``"token"``: one per token. In a product that contracts tokens (O, dV, dQ, dK) this scale runs
            along the contracted axis, so P or dS is multiplied by it, in fp32, before it is quantized.
            Masked elements are zeroed before that, so not even a NaN behind the mask passes.
        granularity: scales of P and dS in the backward. ``"block"``, as in the paper: one per tile.
            ``"row"``: one per output row of the product, within each tile; that is per key for P in dV and
            for dS in dK, per query for dS in dQ. The scale never runs along the contracted axis, so each
            stays a plain INT8 product.
        int8_matmuls: which of :data:`MATMULS` run in INT8; the others round their operands to the dtype of
            the inputs and accumulate in fp32. Stored in the order of :data:`MATMULS`.
        compensate_o: divide O, which must be outside INT8, by the sum of P̃ as the product takes it, rounded,
            and save the residual of O, which is its error of rounding to the dtype of the inputs, for
            δ = rowsum(dO∘O). Such a δ is nearly rowsum(P∘dP) of the backward's own P and dP, for one more
            tensor of the size of O. The logsumexp is that of the same sum.
        dp_fp16_accumulation: dP = dO·Vᵀ with fp16 accumulators, for which the tensor cores of a GeForce have
            twice the rate. V and dO are rounded to fp16, with power-of-two scales, shared as
            ``operand_scales`` says, at which no sum can overflow. A sum is rounded after each 16 products.
            Errors of dQ and dK grow where the mean of V is many times its standard deviation, most with
            ``compensate_o``. dP must be outside INT8. In the Ampere kernels, with
            ``operand_scales="block"`` and dV in INT8, and in the reference.
        block_q: queries per tile, which is also the size of a block of Q and dO. None: see :meth:`tile`.
        block_kv: keys per tile, which is also the size of a block of K and V. None: see :meth:`tile`.

    Raises:
        ValueError: a setting is out of range, or two settings contradict each other.
    """

    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = False
    unsigned_p: bool = False
    operand_scales: str = "block"
    granularity: str = "row"
    int8_matmuls: tuple[str, ...] = PAPER_INT8_MATMULS
    compensate_o: bool = False
    dp_fp16_accumulation: bool = False
    block_q: int | None = None
    block_kv: int | None = None

    @classmethod
    def paper(cls, **changes: Any) -> SageConfig:
        """The literal algorithm of the paper: one scale per tile everywhere in the backward.

        The paper does not give its tile. 128 × 64 is what SageAttention's public kernels use, and what the
        error of dK against that of dQ in its Table 1 (.0220 / .0184) points to.
        """
        return cls(**{"granularity": "block", "block_q": 128, "block_kv": 64} | changes)

    @classmethod
    def low_bias(cls, **changes: Any) -> SageConfig:
        """All six products in INT8, and nearly none of the bias that the default adds to gradients.

        The default's bias comes from O, whose rounding does not average out over tokens or batches. V is
        smoothed, so that O rounds only what is left of V without its mean, and P uses all of 0 … 255. In two
        trained 35M models the bias falls from 4 to 5% of the gradient to less than 1%. Same tensor-core time
        as the default.
        """
        return cls(**{"smooth_v": True, "unsigned_p": True} | changes)

    @classmethod
    def strictly_causal(cls, **changes: Any) -> SageConfig:
        """Under ``is_causal``, out and dq of a token depend, bit for bit, on it and earlier tokens only.

        With a ``window_size`` they depend on the token and those that its window shows, only.

        Not even a NaN or Inf of a later token shows, as long as O and dQ are INT8 products: outside INT8 it
        reaches the queries of its tile as 0 · NaN. This preset is more accurate than the default unless the
        channels of K have a strong mean. With a strong mean it is less accurate, most of all in dQ, because
        K is not smoothed.
        """
        return cls(**{"smooth_k": False, "operand_scales": "token"} | changes)

    @classmethod
    def consistent(cls, **changes: Any) -> SageConfig:
        """16-bit P, and a δ consistent with the backward's P and dP: relative L2 errors of 1–2% in dQ and dK.

        When the rows of V are similar, dP is almost constant along a row and dS = P ∘ (dP − δ) is a small
        difference of large terms. Any error in δ, which comes from rounding O, then dominates dQ, in 16-bit
        attention as well; compensating O removes it. O and dV, outside INT8, are more accurate, too. Does
        not reduce the error of S, which dominates when logits are large.

        13 units of tensor-core time, compared with 11 for the default and 18 for 16-bit attention. P needs
        neither scales nor rounding to INT8, which on Hopper saves more time than the 16-bit products cost.
        """
        return cls(**{"int8_matmuls": ("s_fwd", "s_bwd", "dq", "dk"), "compensate_o": True} | changes)

    @classmethod
    def int8_scores(cls, **changes: Any) -> SageConfig:
        """S alone in INT8, forward and backward; all else as in :meth:`consistent`, in 16 bit.

        More accurate than :meth:`consistent`, because dS is not rounded to INT8. On Hopper one backward
        kernel computes it: 12 units of tensor-core time, compared with 14 for 16-bit attention. Elsewhere the
        Triton kernels run it in 15 units, compared with 11 for the default.
        """
        return cls(**{"int8_matmuls": ("s_fwd", "s_bwd"), "compensate_o": True} | changes)

    def __repr__(self) -> str:
        """As code makes it, from the nearest preset: ``SageConfig.paper(smooth_k=False)``."""
        preset, changes = nearest_preset(self)
        made_by = "SageConfig" if preset == "default" else f"SageConfig.{preset}"
        return f"{made_by}({', '.join(f'{name}={value!r}' for name, value in changes.items())})"

    def __hash__(self) -> int:
        return hash(self._text)

    def tile(self, head_dim: int) -> tuple[int, int]:
        """(queries, keys) of a tile: what is set, and 64 × 128, or 64 × 64 for heads larger than 128."""
        queries, keys = TILE if head_dim <= 128 else TILE_OF_LARGE_HEADS
        return self.block_q or queries, self.block_kv or keys

    def is_int8(self, matmul: str) -> bool:
        """Whether ``matmul``, one of :data:`MATMULS`, runs in INT8."""
        return matmul in self.int8_matmuls

    def is_unsigned(self, matmul: str) -> bool:
        """Whether the left operand of ``matmul``, one of :data:`MATMULS`, is unsigned INT8."""
        return self.unsigned_p and matmul in P_MATMULS and self.is_int8(matmul)

    @property
    def smooths_k(self) -> bool:
        """Whether K is smoothed: if ``smooth_k`` asks for it, and a product takes K in INT8.

        In 16 bit, K − μ_K would be rounded, and K is not: with Gaussians of σ = 3 the error of O in fp16
        would be four times that of torch's attention.
        """
        return self.smooth_k and any(map(self.is_int8, K_MATMULS))

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if isinstance(field.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; set it to true or false")
        self._normalise_int8_matmuls()
        for name, finer in (("operand_scales", "token"), ("granularity", "row")):
            if (value := getattr(self, name)) not in ("block", finer):
                raise ValueError(f"{name} is {value!r}; set it to 'block' or {finer!r}")
        self._check_tile()
        o, dp, p = self.is_int8("o"), self.is_int8("dp"), any(map(self.is_int8, P_MATMULS))
        needs = {
            "smooth_v": (o, "an INT8 O; add 'o' to int8_matmuls"),
            "unsigned_p": (p, "an INT8 O or dV; add 'o' or 'dv' to int8_matmuls"),
            "compensate_o": (not o, "an O outside INT8; remove 'o' from int8_matmuls"),
            "dp_fp16_accumulation": (not dp, "a dP outside INT8; remove 'dp' from int8_matmuls"),
        }
        for name, (is_met, need) in needs.items():
            if getattr(self, name) and not is_met:
                raise ValueError(f"{name}=True needs {need} or set {name}=False")
        # Written once: it would take a third of a short call.
        values = [f"'{field.name}': {getattr(self, field.name)!r}" for field in fields(self)]
        object.__setattr__(self, "_text", "{" + ", ".join(values) + "}")

    def _normalise_int8_matmuls(self) -> None:
        """Check the names and store them as a tuple in one order, so that equal settings are equal."""
        if self.int8_matmuls is None or isinstance(self.int8_matmuls, str):
            raise ValueError(f"int8_matmuls is {self.int8_matmuls!r}; give a list of products, [] for none")
        chosen = set(self.int8_matmuls)
        unknown = sorted(chosen.difference(MATMULS))
        if unknown:
            raise ValueError(f"int8_matmuls names {', '.join(unknown)}; choose from {', '.join(MATMULS)}")
        object.__setattr__(self, "int8_matmuls", tuple(name for name in MATMULS if name in chosen))

    def _check_tile(self) -> None:
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < TILE_STEP or size % TILE_STEP):
                raise ValueError(
                    f"{name} is {size!r}; set it to a positive multiple of {TILE_STEP}, such as 64, "
                    "or to None for the rule by head size"
                )


DEFAULT_CONFIG = SageConfig()

#: Every preset by its name: what ``attention=sagebwd_<name>`` trains with, and the rows of tables.
PRESETS: dict[str, SageConfig] = {
    "default": DEFAULT_CONFIG,
    "low_bias": SageConfig.low_bias(),
    "paper": SageConfig.paper(),
    "consistent": SageConfig.consistent(),
    "int8_scores": SageConfig.int8_scores(),
    "strictly_causal": SageConfig.strictly_causal(),
}


def nearest_preset(config: SageConfig, preferred: str = "default") -> tuple[str, dict[str, Any]]:
    """The preset that differs least from ``config``, ``preferred`` of several, and what differs from it."""
    settings = asdict(config)
    changes = {
        name: {key: value for key, value in settings.items() if value != getattr(preset, key)}
        for name, preset in PRESETS.items()
    }
    nearest = min(PRESETS, key=lambda name: (len(changes[name]), name != preferred))
    return nearest, changes[nearest]


def encode(config: SageConfig) -> str:
    """``config`` as text, because operators take no objects. :func:`decode` reads it."""
    return config._text


@lru_cache
def decode(text: str) -> SageConfig:
    """The settings that :func:`encode` wrote."""
    return SageConfig(**ast.literal_eval(text))
