"""Tensors that CUDA kernels fill."""

from __future__ import annotations

from torch import Tensor

from sagebwd.kernels.cuda.arguments import CTokenTensor
from sagebwd.kernels.layout import Axis, empty_result


class Result:
    """A tensor for kernels to fill, laid out as ``x``; (B, N, H, D) in memory if x is a stand-in.

    Kernels write contiguous channels. Where x has another layout they fill a buffer, which is then copied.
    Tokens that belong to no document are not visited, and so are zero from the start, or all with
    ``is_zeroed``.
    """

    def __init__(self, x: Tensor, axis: Axis, *, is_zeroed: bool = False) -> None:
        self._result = empty_result(x)
        self._buffer = self._result if self._result.stride(-1) == 1 else x.new_empty(x.shape)
        if is_zeroed or axis.segments is not None:
            self._buffer.zero_()
        self.target = CTokenTensor.of(self._buffer)

    def finish(self) -> Tensor:
        """The tensor; call it after the kernels that fill it were launched."""
        if self._buffer is not self._result:
            self._result.copy_(self._buffer)
        return self._result
