"""What every kernel set and the reference take and return.

A kernel set is a module with

    forward(q, k, v, params) -> ForwardResult
    backward(grad_out, q, k, v, saved, params, grad_lse=None) -> (dq, dk, dv), laid out as q, k, v
    token_mean(k, params): the ``k_mean`` of the forward alone, to its bits

Those that pack (see :attr:`AttentionParams.packs`) take forward(..., together=True), which gives a
:class:`sagebwd.kernels.cuda.plan.KeptResult`; its ``gradients`` is then the backward.

``grad_lse`` (B, H, N_q) fp32, contiguous, is the gradient of the logsumexp to base e. Since
dS = P ∘ (dP − δ + grad_lse), it is subtracted from δ where that is computed; what follows knows only δ.
Rows of dS then sum to grad_lse, not to zero, so that dQ lacks scale · grad_lse · μ where the mean μ of K was
subtracted: :mod:`sagebwd.kernels.lse` adds it.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.config import SageConfig, decode, encode
from sagebwd.window import Window

#: How many arguments :meth:`AttentionParams.flatten` gives.
PARAMETERS = 7


@functools.cache
def kernel_set(kernels: str) -> ModuleType:
    """The module of a kernel set, imported at its first use: none needs the others."""
    name = "reference" if kernels == "reference" else f"kernels.{kernels}.attention"
    return importlib.import_module(f".{name}", __package__)


class AttentionParams(NamedTuple):
    """What is computed of q, k and v, and by which kernels.

    window: which keys a query sees within its document.
    scale: factor of the logits.
    config: what is quantized, and how.
    kernels: a kernel set, from :func:`sagebwd.dispatch.choose`.
    cu_seqlens: (documents + 1,) boundaries of packed documents in q; None without packing.
    cu_seqlens_kv: the same in k and v; None if they are those in q.
    pack_for_backward: whether the forward returns Q, K and V packed, where ``kernels`` can.
    """

    window: Window
    scale: float
    config: SageConfig
    kernels: str = "reference"
    cu_seqlens: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    pack_for_backward: bool = False

    @property
    def boundaries(self) -> tuple[Tensor | None, Tensor | None]:
        """The tensors among these: ``cu_seqlens`` and ``cu_seqlens_kv``."""
        return self.cu_seqlens, self.cu_seqlens_kv

    def with_documents(self, cu_seqlens: Tensor | None, cu_seqlens_kv: Tensor | None) -> AttentionParams:
        """The same with these :attr:`boundaries`."""
        is_same = self.cu_seqlens is cu_seqlens and self.cu_seqlens_kv is cu_seqlens_kv
        return self if is_same else self._replace(cu_seqlens=cu_seqlens, cu_seqlens_kv=cu_seqlens_kv)

    @property
    def kv_boundaries(self) -> Tensor | None:
        """The boundaries of documents in k and v; None without packing."""
        own = self.cu_seqlens is not None and self.cu_seqlens_kv is not None
        return self.cu_seqlens_kv if own else self.cu_seqlens

    @property
    def documents(self) -> int:
        """Their number, 1 without packing."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def packs(self) -> bool:
        """Whether these kernels can pack Q and K for the backward."""
        return self.kernels in ("hopper", "ampere")

    @property
    def packs_v(self) -> bool:
        """Whether these kernels pack V, too, where they pack Q and K for the backward.

        Otherwise the backward reads V itself; on Hopper by bulk copies, unless documents are packed.
        """
        return self.kernels == "hopper" and self.cu_seqlens is not None

    def needed_by_backward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """q, k, v as the backward needs them beside the forward's result: None for what that packed.

        If Q and K are packed, 4 bytes per element are saved instead of 6, 2 of them V itself. A dK in 16 bit
        reads Q itself, a dQ in 16 bit K: 2 bytes more each.
        """
        if not (self.pack_for_backward and self.packs):
            return q, k, v
        is_int8 = self.config.is_int8
        return None if is_int8("dk") else q, None if is_int8("dq") else k, None if self.packs_v else v

    def flatten(self) -> tuple[Any, ...]:
        """As ``sagebwd::backward`` takes them, because operators take no objects.

        ``sagebwd::forward`` takes ``pack_for_backward`` after these.
        """
        return (*self.boundaries, *self.window, self.scale, encode(self.config), self.kernels)

    @classmethod
    def unflatten(
        cls,
        cu_seqlens: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        window_left: int,
        window_right: int,
        scale: float,
        config: str,
        kernels: str,
        pack_for_backward: bool = False,
    ) -> AttentionParams:
        """Of an operator's arguments."""
        window = Window(window_left, window_right)
        boundaries = (cu_seqlens, cu_seqlens_kv)
        return cls(window, scale, decode(config), kernels, *boundaries, pack_for_backward)


class ForwardResult(NamedTuple):
    """What the forward returns: out, and what the backward needs of it.

    out: as q (B, H, N_q, D).
    lse: (B, H, N_q) fp32, the logsumexp of the logits with the smoothed K, to base 2; of the reference to
        base e. −inf for a query that sees no key.
    k_mean: (B, H_kv, documents · D_PAD) fp32, the mean of K over the tokens of each document; no columns if K
        is not smoothed. The backward subtracts what is here. D_PAD is D padded to a power of two, from 32 on,
        or where kernels pack from 64 on.
    out_residual: the error of rounding out to its dtype, as out; empty without ``compensate_o``.
    packed_q, packed_kv: Q and K, packed for the backward, which then needs q only for a dK in 16 bit, and k
        for a dQ in 16 bit; (tiles, bytes) uint8. Empty unless kernels that can pack were asked to.
    """

    out: Tensor
    lse: Tensor
    k_mean: Tensor
    out_residual: Tensor
    packed_q: Tensor
    packed_kv: Tensor


def nothing_packed(like: Tensor) -> tuple[Tensor, Tensor]:
    """An empty ``packed_q`` and ``packed_kv``: operators may not return one tensor twice."""
    return like.new_empty(0, dtype=torch.uint8), like.new_empty(0, dtype=torch.uint8)


def no_mean(k: Tensor) -> Tensor:
    """The ``k_mean`` where K is not smoothed."""
    return k.new_empty((*k.shape[:2], 0), dtype=torch.float32)
