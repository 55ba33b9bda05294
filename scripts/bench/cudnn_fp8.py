"""cuDNN's FP8 attention with its backward, a peer of scripts.bench.attention: D 128, dense, causal or full.

The package is nvidia-cudnn-frontend; TransformerEngine's FP8 attention runs the same kernels. Each operand
has one scale for the whole tensor. On Hopper O, dQ, dK and dV are FP8, too, so their scales must be known
before they are computed: they come from the maxima of the last call, as in TransformerEngine's delayed
scaling. The first call of a shape repeats a graph until its scales settle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
HEAD_DIM = 128
#: dS needs its scale before dQ and dK have maxima, and these before they have scales.
CALLS_TO_SETTLE = 3
#: Of P, which is at most 1. A power of two adds no rounding.
SCALE_OF_P = 256.0


def load(*, counts_quantization: bool) -> Callable[..., Any]:
    """The ``Build`` of a peer: attention from bf16 or fp16 to the same dtype. Raises without the package.

    Args:
        counts_quantization: if False, inputs are quantized and results dequantized only when these inputs are
            seen first, and later calls run cuDNN's kernels alone. Its memory then says nothing.
    """
    import_module("cudnn")

    def build(shape: Any, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if shape.head_dim != HEAD_DIM or shape.mask not in ("causal", "full"):
            raise ValueError(f"cuDNN's FP8 backward has D {HEAD_DIM}, causal or full, on Hopper; not {shape}")
        kernels = Kernels(shape.size, shape.causal, device, counts_quantization)
        return lambda q, k, v: Attention.apply(q, k, v, kernels)

    return build


class Attention(torch.autograd.Function):
    """q, k, v (B, H, N, D), stored as (B, N, H, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels) -> Tensor:
        out, *saved = kernels.forward(q, k, v)
        ctx.kernels = kernels
        ctx.save_for_backward(q, k, v, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        return (*ctx.kernels.backward(q, k, v, grad_out, *saved), None)


class Kernels:
    """Both graphs for one shape.

    Args:
        size: (B, N, H, D).
    """

    def __init__(
        self, size: Sequence[int], is_causal: bool, device: torch.device, counts_quantization: bool
    ) -> None:
        batch, tokens, heads, head_dim = size
        x = torch.empty(size, dtype=FP8, device="meta").transpose(1, 2)
        rows = torch.empty(batch, heads, tokens, 1, device="meta")
        node = partial(Graph, device, counts_quantization, is_causal=is_causal, scale=1 / math.sqrt(head_dim))
        self.forward_graph = node(
            "sdpa_fp8",
            inputs={"q": x, "k": x, "v": x},
            outputs={"o": x, "stats": rows},
            maxima=("s", "o"),
            descales=("q", "k", "v", "s"),
            scales=("s", "o"),
            generate_stats=True,
        )
        self.backward_graph = node(
            "sdpa_fp8_backward",
            inputs={"q": x, "k": x, "v": x, "o": x, "dO": x, "stats": rows},
            outputs={"dQ": x, "dK": x, "dV": x},
            maxima=("dQ", "dK", "dV", "dP"),
            descales=("q", "k", "v", "o", "dO", "s", "dP"),
            scales=("s", "dQ", "dK", "dV", "dP"),
        )
        self.known: dict[Any, Any] | None = None if counts_quantization else {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """O, and what :meth:`backward` takes after its first four arguments."""
        packed = [self._quantized(x) for x in (q, k, v)]
        descales = {name: descale for name, (_, descale) in zip("qkv", packed, strict=True)}
        (o, lse), own = self.forward_graph([x for x, _ in packed], descales)
        return self._restored("o", q, o, own["o"]), *sum(packed, ()), o, own["o"], lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        """dQ, dK, dV."""
        q8, of_q, k8, of_k, v8, of_v, o, of_o, lse = saved
        do8, of_do = self._quantized(grad_out)
        descales = {"q": of_q, "k": of_k, "v": of_v, "o": of_o, "dO": of_do}
        grads, own = self.backward_graph([q8, k8, v8, o, do8, lse], descales)
        named = zip(("dQ", "dK", "dV"), (q, k, v), grads, strict=True)
        return tuple(self._restored(name, x, grad, own[name]) for name, x, grad in named)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._once(x.data_ptr(), partial(quantize, x))

    def _restored(self, name: str, like: Tensor, x: Tensor, descale: Tensor) -> Tensor:
        made = self._once((name, like.data_ptr()), partial(dequantize, x, descale, like.dtype))
        return made.detach()  # of its own: autograd writes into what a Function returns

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``; the same object for the same key if quantization does not count."""
        if self.known is None:
            return make()
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]


class Graph:
    """One node of cuDNN's graph API, built once.

    Args:
        inputs, outputs: tensors of the shapes, strides and dtypes; on the meta device.
        maxima: the names of the maxima that come after ``outputs``.
        descales, scales: the names of scalars; "s" is P, "dP" is dS.
    """

    def __init__(
        self,
        device: torch.device,
        follows: bool,
        node: str,
        *,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        maxima: Sequence[str],
        descales: Sequence[str],
        scales: Sequence[str],
        is_causal: bool,
        scale: float,
        **options: Any,
    ) -> None:
        cudnn = import_module("cudnn")
        types = {FP8: cudnn.data_type.FP8_E4M3, torch.float32: cudnn.data_type.FLOAT}
        self.handle = _handle(device.index)
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        scalar = torch.empty(1, 1, 1, 1, device="meta")
        scalars = [f"descale_{name}" for name in descales] + [f"scale_{name}" for name in scales]
        layouts = {**inputs, **dict.fromkeys(scalars, scalar)}
        ports = {
            name: graph.tensor(
                name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types[x.dtype]
            )
            for name, x in layouts.items()
        }
        found = getattr(graph, node)(**ports, attn_scale=scale, use_causal_mask=is_causal, **options)
        for port, x in zip(found, [*outputs.values(), *[scalar] * len(maxima)], strict=True):
            port.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
            port.set_data_type(types[x.dtype])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph, self.ports, self.found = graph, ports, found
        self.inputs, self.outputs, self.maxima = [*inputs], [*outputs.values()], maxima
        self.of_p = torch.tensor([SCALE_OF_P, 1 / SCALE_OF_P], device=device).view(2, 1, 1, 1, 1)
        self.device, self.follows, self.is_settled = device, follows, False
        self.workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
        self.largest = torch.ones(len(maxima), 1, 1, 1, 1, device=device)
        self.scales: dict[str, Tensor] = {}
        self.descales: dict[str, Tensor] = {}

    def __call__(
        self, inputs: Sequence[Tensor], descales: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """(the outputs, the descales that belong to them)."""
        for _ in range(1 if self.is_settled else CALLS_TO_SETTLE):
            if self.follows or not self.is_settled:
                self._follow()
            outputs = self._run(inputs, self.descales | descales)
        self.is_settled = True
        return outputs, self.descales

    def _follow(self) -> None:
        """New scales by the last maxima; in new tensors, because a backward may still need the old ones."""
        self.scales = dict(zip(self.maxima, LARGEST / self.largest, strict=True))
        self.descales = dict(zip(self.maxima, self.largest / LARGEST, strict=True))
        self.scales["s"], self.descales["s"] = self.of_p
        self.largest.zero_()

    def _run(self, inputs: Sequence[Tensor], descales: dict[str, Tensor]) -> list[Tensor]:
        given = dict(zip(self.inputs, inputs, strict=True))
        given |= {f"descale_{name}": x for name, x in descales.items()}
        given |= {f"scale_{name}": x for name, x in self.scales.items()}
        outputs = [torch.empty_like(x, device=self.device) for x in self.outputs]
        bound = {port: given[name] for name, port in self.ports.items()}
        bound |= dict(zip(self.found, [*outputs, *self.largest], strict=True))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        import_module("cudnn").set_stream(handle=self.handle, stream=stream)
        self.graph.execute(bound, self.workspace, handle=self.handle)
        return outputs


@cache
def _handle(index: int | None) -> Any:
    """One handle of cuDNN for a device."""
    return import_module("cudnn").create_handle()


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in FP8 with the same strides, the factor that restores it)."""
    flat, descale = _fused(_quantize)(_in_memory_order(x))
    return flat.view(x.transpose(1, 2).shape).transpose(1, 2), descale.view(1, 1, 1, 1)


def dequantize(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · descale with the same strides."""
    flat = _fused(_dequantize)(_in_memory_order(x), descale, dtype)
    return flat.view(x.transpose(1, 2).shape).transpose(1, 2)


def _in_memory_order(x: Tensor) -> Tensor:
    """One dimension, so that what is compiled depends on the number of elements alone."""
    return x.detach().transpose(1, 2).reshape(-1)


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Eager PyTorch would read and write the tensor three times."""
    return torch.compile(function, dynamic=False)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax().float()
    return (x.float() * (LARGEST / largest)).to(FP8), largest / LARGEST


def _dequantize(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * descale.view(())).to(dtype)
