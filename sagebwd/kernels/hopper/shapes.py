"""Tiles of the Hopper kernels, and what a CTA of each has.

The sources compute the same, and do not compile if it differs.
"""

from __future__ import annotations

from typing import NamedTuple

from sagebwd.config import TILE_OF_LARGE_HEADS
from sagebwd.kernel_rules import HOPPER_TILE_WITH_SCALES

#: Queries that a warpgroup takes at a time of a tile that has scales.
STEP_Q = 64


class CTAShape(NamedTuple):
    """What a CTA of a kernel has.

    consumers: warpgroups that compute, 64 tokens of a work tile each.
    shared_bytes: dynamic shared memory.
    others: warpgroups besides: the producer, and the one for dQ in backward.cu.
    share_tokens: whether all consumers have the same 64 tokens.
    """

    consumers: int
    shared_bytes: int
    others: int = 1
    share_tokens: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a work tile."""
        return 64 if self.share_tokens else 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return 128 * (self.consumers + self.others)


#: By kernel, padded head size and the macro that decides, see :func:`shape_macro`.
CTA_SHAPES = {
    ("forward", 64, ""): CTAShape(3, 147_456),
    ("forward", 64, "P_16BIT"): CTAShape(3, 196_608),
    ("forward", 64, "SCALES_OF_TILES"): CTAShape(3, 153_600),
    ("forward", 128, ""): CTAShape(2, 188_416),
    ("forward", 128, "P_16BIT"): CTAShape(2, 203_776),
    ("forward", 128, "SCALES_OF_TILES"): CTAShape(2, 192_512),
    ("forward", 256, ""): CTAShape(2, 214_016),
    ("forward", 256, "P_16BIT"): CTAShape(2, 195_584),
    ("dk_dv", 64, ""): CTAShape(3, 196_608),
    ("dk_dv", 64, "P_16BIT"): CTAShape(3, 172_032),
    ("dk_dv", 64, "SCALES_OF_TILES"): CTAShape(3, 196_608),
    ("dk_dv", 128, ""): CTAShape(2, 211_968),
    ("dk_dv", 128, "P_16BIT"): CTAShape(2, 221_184),
    ("dk_dv", 128, "SCALES_OF_TILES"): CTAShape(2, 211_968),
    ("dk_dv", 256, ""): CTAShape(2, 226_304, share_tokens=True),
    ("dk_dv", 256, "P_16BIT"): CTAShape(2, 193_536, share_tokens=True),
    ("dq", 64, ""): CTAShape(2, 180_224),
    ("dq", 128, ""): CTAShape(2, 219_136),
    ("dq", 256, ""): CTAShape(2, 231_424),
    ("dq_tile_scales", 64, "SCALES_OF_TILES"): CTAShape(2, 184_320),
    ("dq_tile_scales", 128, "SCALES_OF_TILES"): CTAShape(2, 221_184),
    ("backward", 64, ""): CTAShape(2, 228_352, others=2),
    ("backward", 64, "P_16BIT"): CTAShape(2, 211_968, others=2),
    ("backward", 64, "DK_16BIT"): CTAShape(2, 228_352, others=2),
    ("backward", 128, ""): CTAShape(2, 230_400, others=2),
    ("backward", 128, "P_16BIT"): CTAShape(2, 214_016, others=2),
    ("backward", 128, "DK_16BIT"): CTAShape(2, 230_400, others=2),
}


def shape_macro(p_16bit: bool, dk_16bit: bool, tile_scales: bool) -> str:
    """The macro that decides the CTA's shape, as in :data:`CTA_SHAPES`, alone or with others."""
    if tile_scales:
        return "SCALES_OF_TILES"
    if dk_16bit:
        return "DK_16BIT"
    return "P_16BIT" if p_16bit else ""


def tile_macros(head_dim: int, macro: str) -> dict[str, int]:
    """The macros of a padded head size and a :func:`shape_macro` that say which tiles a kernel has."""
    if head_dim == 256:
        tile, own = TILE_OF_LARGE_HEADS, {"ROWS_IN_CHUNKS": True}
    elif macro == "SCALES_OF_TILES":
        tile, own = HOPPER_TILE_WITH_SCALES, {"SCALES_OF_TILES": True, "Q_STEP": STEP_Q}
    else:
        return {}
    return {"TILE_Q": tile[0], "TILE_KV": tile[1], **own}


def work_tokens(name: str, head_dim: int) -> int:
    """Tokens of a work tile of forward.cu or a backward kernel, whatever the settings."""
    return CTA_SHAPES[name, head_dim, ""].tokens
