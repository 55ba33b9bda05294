"""S = scale · QKᵀ tile by tile: smoothing, quantization and the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams
from sagebwd.reference.quantization import Products, product


def subtract_token_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x − μ and its mean over the tokens μ (..., 1, D)."""
    mean = x.mean(-2, keepdim=True)
    return x - mean, mean


class ScoreTiles:
    """The tiles of S as one pass computes them, and the blocks of Q and K that they are made of.

    Tile (i, j) holds queries ``rows(i)`` and keys ``columns(j)``; the last tile of an axis may be short.
    The softmax scale multiplies the finished product in fp32, not Q: the quantizer would cancel it.

    Attributes:
        block_q, block_kv: queries and keys of a whole tile.
        q_blocks, k_blocks: fp32 blocks (B, H, block, D), smoothed as the settings ask.
        q_means: the mean (B, H, 1, D) of each block of Q, empty without Q-smoothing.
        k_mean: the mean (B, H, 1, D) of K, zero without K-smoothing.
    """

    def __init__(
        self, q: Tensor, k: Tensor, matmul: str, params: AttentionParams, k_mean: Tensor | None = None
    ) -> None:
        """Smooth and quantize Q and K.

        Args:
            q, k: (B, H, N_q, D) and (B, H, N_kv, D) of the dtype that products outside INT8 round to.
            matmul: ``"s_fwd"`` or ``"s_bwd"``.
            k_mean: (B, H, 1, D), what smoothing subtracts from K; None: its mean.
        """
        self.n_q, self.n_kv = q.shape[-2], k.shape[-2]
        self.window, self.scale, self.config = params.window, params.scale, params.config
        self.block_q, self.block_kv = self.config.tile(q.shape[-1])

        k_smooth, self.k_mean = k.float(), torch.zeros_like(k[..., :1, :], dtype=torch.float32)
        if self.config.smooths_k:
            self.k_mean = k_smooth.mean(-2, keepdim=True) if k_mean is None else k_mean
            k_smooth = k_smooth - self.k_mean
        self.k_blocks = k_smooth.split(self.block_kv, -2)

        self.q_blocks, self.q_means = q.float().split(self.block_q, -2), ()
        if self.config.smooth_q:
            self.q_blocks, self.q_means = zip(*map(subtract_token_mean, self.q_blocks), strict=True)

        products = Products(q.dtype, self.config)
        self._q_operands = [products.tokens(block, matmul) for block in self.q_blocks]
        self._k_operands = [products.tokens(block, matmul) for block in self.k_blocks]

    def rows(self, i: int) -> slice:
        """The queries of tile row i."""
        return slice(i * self.block_q, min((i + 1) * self.block_q, self.n_q))

    def columns(self, j: int) -> slice:
        """The keys of tile column j."""
        return slice(j * self.block_kv, min((j + 1) * self.block_kv, self.n_kv))

    def is_visible(self, i: int, j: int) -> bool:
        """Whether any query of tile (i, j) sees any of its keys."""
        keys, columns = self.window.keys_of(self.rows(i), self.n_kv), self.columns(j)
        return keys.start < columns.stop and columns.start < keys.stop

    def visible_columns(self, i: int) -> list[int]:
        """The tile columns that tile row i attends to."""
        return [j for j in range(len(self.k_blocks)) if self.is_visible(i, j)]

    def visible_rows(self, j: int) -> list[int]:
        """The tile rows that attend to tile column j."""
        return [i for i in range(len(self.q_blocks)) if self.is_visible(i, j)]

    def tile(self, i: int, j: int) -> Tensor:
        """S (B, H, rows, columns) of tile (i, j) in fp32, −inf where the mask hides a key."""
        s = product(self._q_operands[i], self._k_operands[j].mT)
        if self.q_means:
            s = s + self.q_means[i] @ self.k_blocks[j].mT
        return torch.where(self.mask(i, j), s * self.scale, -torch.inf)

    def mask(self, i: int, j: int) -> Tensor:
        """True where a query of tile (i, j) sees a key: (rows, columns), or (1, 1) where all see all.

        Queries and keys are counted from the top left, as torch's ``is_causal`` does.
        """
        rows, columns = self.rows(i), self.columns(j)
        if self.window.sees_all(rows, columns):
            return torch.ones(1, 1, dtype=torch.bool, device=self.k_mean.device)
        return self.window.visible(rows, columns, self.k_mean.device)
