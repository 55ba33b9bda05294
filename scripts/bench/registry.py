"""What scripts.bench.attention measures: shapes, SageBwd by preset and kernel set, and the peers.

To add a peer, write a function that imports it and returns its ``Build``, and give it a line in PEERS.
"""

from __future__ import annotations

import random
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagebwd
from sagebwd import SageConfig, sage_attention
from scripts.bench import cudnn_fp8

#: Largest relative L2 error against float64, on standard Gaussian inputs, for which a speed is reported. FP8
#: with one scale a tensor errs by .05 to .08 there, emulated in the largest case of the benchmark.
BOUND_16_BIT, BOUND_INT8, BOUND_PAPER, BOUND_FP8 = 0.02, 0.06, 0.12, 0.12

#: How sequences of different lengths lie in memory; "dense": all have the same length.
DENSE, PADDED, PACKED = "dense", "padded", "packed"
LAYOUTS = (DENSE, PADDED, PACKED)


# --- Shapes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Self-attention of ``batch`` sequences of ``tokens`` tokens, or of half as many to all but one.

    left, right: limits of a sliding window, −1 for none; as ``window_size`` of ``sage_attention``.
    layout: "dense"; "padded", with padding on the right that a mask hides; or "packed", one after another in
        a batch of 1.
    """

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool
    left: int = -1
    right: int = -1
    layout: str = DENSE

    @property
    def window(self) -> tuple[int, int] | None:
        """The limits, None without any."""
        return (self.left, self.right) if max(self.left, self.right) >= 0 else None

    @property
    def mask(self) -> str:
        name = "causal" if self.causal else "full"
        name = f"window {self.left},{self.right}" if self.window else name
        return name if self.layout == DENSE else f"{name}, {self.layout}"

    @cached_property
    def lengths(self) -> list[int]:
        """The tokens of each sequence. The last, whose results are checked, has the most padding."""
        if self.layout == DENSE:
            return [self.tokens] * self.batch
        draw = random.Random(0)
        first, *others = sorted(draw.randrange(self.tokens // 2, self.tokens) for _ in range(self.batch))
        draw.shuffle(others)
        return [*others, first]

    @property
    def size(self) -> tuple[int, int, int, int]:
        """(B, N, H, D) of Q, K and V."""
        batch, tokens = (1, sum(self.lengths)) if self.layout == PACKED else (self.batch, self.tokens)
        return batch, tokens, self.heads, self.head_dim

    @property
    def last(self) -> slice:
        """The tokens of the last sequence, in the last row of the batch."""
        if self.layout == PACKED:
            return slice(self.size[1] - self.lengths[-1], None)
        return slice(0, self.lengths[-1])

    @property
    def flops(self) -> float:
        """Of the forward: 4·H·D for each pair of tokens that may see each other.

        These are N² in a sequence, half of that if causal, and with a window what it shows.
        """
        return 4 * self.heads * self.head_dim * sum(map(self._pairs, self.lengths))

    def _pairs(self, n: int) -> float:
        if not self.window:
            return n**2 * (0.5 if self.causal else 1)
        left, right = (n if limit < 0 else limit for limit in self.window)
        return sum(min(i + right, n - 1) - max(i - left, 0) + 1 for i in range(n))

    def boundaries(self, device: torch.device) -> Tensor:
        """Where sequences begin and end if they lie one after another: cu_seqlens, (B + 1) int32."""
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0)).to(device, torch.int32)

    def visible(self, device: torch.device) -> Tensor:
        """The tokens that are not padding, (B, N) bool; of a layout that is not packed."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(self.tokens, device=device) < lengths[:, None]

    def __str__(self) -> str:
        return f"{self.mask}, D {self.head_dim}, N {self.tokens}"


#: q, k, v, each (B, H, N, D) → out, the same.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: May raise anything where the implementation does not take the shape.
Build = Callable[[Shape, torch.device], Attend]


@dataclass(frozen=True)
class Implementation:
    """An attention to measure; ``build`` returns the function for a shape."""

    name: str
    build: Build
    bound: float = BOUND_16_BIT  # largest relative L2 of any result
    has_backward: bool = True
    config: SageConfig | None = None  # of SageBwd
    kernels: str | None = None  # the set that is asked for

    def kernels_for(self, q: Tensor) -> str | None:
        """The kernel set of SageBwd that runs, None if it is another project's."""
        return self.kernels or (sagebwd.explain(q, config=self.config).kernels if self.config else None)


# --- SageBwd ------------------------------------------------------------------------------------------------


def build_sagebwd(
    config: SageConfig, shape: Shape, device: torch.device, kernels: str | None = None
) -> Attend:
    settings: dict[str, Any] = {"is_causal": shape.causal, "config": config, "kernels": kernels}
    if shape.window:
        settings["window_size"] = shape.window
    if shape.layout == PADDED:
        settings["key_padding_mask"] = shape.visible(device)
    if shape.layout == PACKED:
        settings["cu_seqlens"] = shape.boundaries(device)
    return partial(sage_attention, **settings)


def without_int8_dq(config: SageConfig) -> SageConfig:
    """The settings with dQ in 16 bit."""
    return replace(config, int8_matmuls=tuple(name for name in config.int8_matmuls if name != "dq"))


#: By the name that --configs takes: the name of the rows, the settings, and the largest relative L2 error.
#: results/ holds these row names; LOOKS in scripts.bench.tables has the titles that people see.
CONFIGS = {
    "default": ("sagebwd", SageConfig(), BOUND_INT8),
    "low-bias": ("sagebwd low bias", SageConfig.low_bias(), BOUND_INT8),
    "smooth-v": ("sagebwd smooth V", SageConfig(smooth_v=True), BOUND_INT8),
    "strictly-causal": ("sagebwd strictly causal", SageConfig.strictly_causal(), BOUND_INT8),
    "paper": ("sagebwd paper", SageConfig.paper(), BOUND_PAPER),
    "consistent": ("sagebwd consistent", SageConfig.consistent(), BOUND_INT8),
    "int8-scores": ("sagebwd S alone in INT8", SageConfig.int8_scores(), BOUND_INT8),
    "16-bit-p": ("sagebwd P in 16 bit", replace(SageConfig.consistent(), compensate_o=False), BOUND_INT8),
    "16-bit-dq": ("sagebwd dQ in 16 bit", without_int8_dq(SageConfig()), BOUND_INT8),
    "consistent-16-bit-dq": (
        "sagebwd consistent, dQ in 16 bit",
        without_int8_dq(SageConfig.consistent()),
        BOUND_INT8,
    ),
}


# --- Peers --------------------------------------------------------------------------------------------------


def load_sdpa(backend: SDPBackend) -> Build:
    """PyTorch's operator restricted to this kernel, which raises where it cannot run."""

    def build(shape: Shape, device: torch.device) -> Attend:
        if shape.window or shape.layout == PACKED:
            raise ValueError(f"scaled_dot_product_attention has no mask for {shape.mask}")
        mask = shape.visible(device)[:, None, None] if shape.layout == PADDED else None
        if mask is not None and shape.causal:
            mask = mask & torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).tril()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            is_causal = shape.causal and mask is None
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

        return attend

    return build


def load_math() -> Build:
    """The definition, with a mask for each pair of tokens."""

    def build(shape: Shape, device: torch.device) -> Attend:
        batch, tokens = (torch.arange(n, device=device) for n in shape.size[:2])
        mask = is_visible(shape, device)(batch[:, None, None, None], None, tokens[:, None], tokens)
        return partial(F.scaled_dot_product_attention, attn_mask=mask)

    return build


def load_torch_flash() -> Build:
    """PyTorch's FlashAttention-2; windows and lengths are below its public operator."""

    def build(shape: Shape, device: torch.device) -> Attend:
        if shape.layout != DENSE:
            from torch.nn.attention.varlen import varlen_attn  # not in the oldest PyTorch that is supported

            window = shape.window or (-1, 0 if shape.causal else -1)
            return unpadded(partial(varlen_attn, window_size=window), shape, device)
        if not shape.window:
            return load_sdpa(SDPBackend.FLASH_ATTENTION)(shape, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            arguments = (None, None, shape.tokens, shape.tokens, 0.0, False, False)
            limits = {"window_size_left": shape.left, "window_size_right": shape.right}
            return torch.ops.aten._flash_attention_forward(q, k, v, *arguments, **limits)

        return token_major(attend)

    return build


def load_flex() -> Build:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def build(shape: Shape, device: torch.device) -> Attend:
        # Without a reset, PyTorch stops compiling after a few shapes and runs the eager N × N definition.
        torch._dynamo.reset()
        # The backward alone runs many times on one graph, so it must not overwrite what the forward saved.
        torch._functorch.config.donated_buffer = False
        mask = None
        if shape.mask != "full":
            batch, tokens = shape.size[0] if shape.layout == PADDED else None, shape.size[1]
            mask = create_block_mask(is_visible(shape, device), batch, None, tokens, tokens, device=device)
        return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    return build


def is_visible(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """The mask, as a mask_mod of FlexAttention: batch, head, query, key → whether the query sees the key."""
    left, right = (sum(shape.lengths) if limit < 0 else limit for limit in (shape.left, shape.right))
    lengths = torch.tensor(shape.lengths, device=device)
    documents = torch.arange(len(shape.lengths), device=device).repeat_interleave(lengths)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query >= key if shape.causal else (key >= query - left) & (key <= query + right)
        if shape.layout == PADDED:
            return near & (key < lengths[batch])
        return near & (documents[query] == documents[key]) if shape.layout == PACKED else near

    return visible


def load_flash_package(module: str) -> Build:
    package = import_module(module)

    def build(shape: Shape, device: torch.device) -> Attend:
        settings: dict[str, Any] = {"causal": shape.causal}
        if shape.window:
            settings["window_size"] = shape.window
        if shape.layout != DENSE:
            return unpadded(partial(package.flash_attn_varlen_func, **settings), shape, device)
        return token_major(partial(package.flash_attn_func, **settings))

    return build


def load_flash_attention_4() -> Build:
    attend = import_module("flash_attn.cute").flash_attn_func

    def build(shape: Shape, device: torch.device) -> Attend:
        if shape.layout != DENSE:
            raise ValueError(f"FlashAttention-4 is not measured {shape.layout}")
        # The package's own function, not the operators of model.kernels, which take more of the host's time.
        # None is no limit.
        limits = tuple(None if limit < 0 else limit for limit in (shape.left, shape.right))
        return token_major(partial(attend, causal=shape.causal, window_size=limits))

    return build


def load_sageattention() -> Build:
    from sageattention import sageattn

    def build(shape: Shape, device: torch.device) -> Attend:
        if shape.window or shape.layout != DENSE:
            raise ValueError(f"sageattn takes no {shape.mask} mask")
        return partial(sageattn, tensor_layout="HND", is_causal=shape.causal)

    return build


def token_major(attend: Callable[..., Any]) -> Attend:
    """Adapt ``attend``, which takes and returns (B, N, H, D); some versions also return the logsumexp."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def unpadded(attend: Callable[..., Any], shape: Shape, device: torch.device) -> Attend:
    """Adapt ``attend`` of packed tokens (T, H, D): padding is left out before it, and put back as zeros.

    Where the tokens are is found out once, not in each call.
    """
    boundaries, longest = shape.boundaries(device), max(shape.lengths)
    is_packed = shape.layout == PACKED
    tokens = None if is_packed else shape.visible(device).flatten().nonzero().squeeze(1)

    def call(*inputs: Tensor) -> Tensor:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in inputs]
        packed = flat if is_packed else [x.index_select(0, tokens) for x in flat]
        out = attend(*packed, boundaries, boundaries, longest, longest)
        out = out[0] if isinstance(out, tuple) else out
        if not is_packed:
            out = out.new_zeros(flat[0].shape).index_copy(0, tokens, out)
        return out.unflatten(0, shape.size[:2]).transpose(1, 2)

    return call


class Peer(NamedTuple):
    """An implementation of another project. ``load`` raises if it is not installed."""

    name: str
    load: Callable[[], Build]
    bound: float = BOUND_16_BIT
    has_backward: bool = True
    device: str = "cuda"  # the type of device that it is measured on


#: By the name that --without takes.
PEERS = {
    "flash": Peer("FlashAttention-2", load_torch_flash),
    "cudnn": Peer("cuDNN", partial(load_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "cudnn_fp8": Peer("cuDNN FP8", partial(cudnn_fp8.load, counts_quantization=True), BOUND_FP8),
    "cudnn_fp8_alone": Peer(
        "cuDNN FP8, inputs in FP8", partial(cudnn_fp8.load, counts_quantization=False), BOUND_FP8
    ),
    "flex": Peer("FlexAttention", load_flex),
    "flash_attn": Peer("flash_attn package", partial(load_flash_package, "flash_attn")),
    "flash_attn_3": Peer("FlashAttention-3", partial(load_flash_package, "flash_attn_interface")),
    "fa4": Peer("FlashAttention-4", load_flash_attention_4),
    "sageattention": Peer("SageAttention", load_sageattention, BOUND_INT8, has_backward=False),
    "math": Peer("SDPA math", load_math, device="cpu"),
}


def find_implementations(arguments: Namespace) -> tuple[list[Implementation], dict[str, str]]:
    """SageBwd and every peer that can run here; and {name: why not} of the others."""
    found = []
    for title, config, bound in (CONFIGS[chosen] for chosen in dict.fromkeys(arguments.configs)):
        for kernels in (None, *dict.fromkeys(arguments.kernels)):
            name = f"{title} ({kernels})" if kernels else title
            build = partial(build_sagebwd, config, kernels=kernels)
            found.append(Implementation(name, build, bound, config=config, kernels=kernels))
    absent = {}
    for option, peer in PEERS.items():
        if option in arguments.without:
            absent[peer.name] = "left out by --without"
        elif not arguments.device.startswith(peer.device):
            absent[peer.name] = f"measured with --device {peer.device} only"
        else:
            try:
                found.append(Implementation(peer.name, peer.load(), peer.bound, peer.has_backward))
            except Exception as error:  # a package built for another PyTorch may raise anything
                absent[peer.name] = explain(error)
    return found, absent


def explain(error: Exception, caught: Sequence[warnings.WarningMessage] = ()) -> str:
    """The error in one line, with PyTorch's reasons, which it gives as warnings (``caught``)."""
    text = (str(error).strip() or "no message").splitlines()[0]
    if "No available kernel" in text:
        told = (str(warning.message).split(" (Triggered internally")[0].strip() for warning in caught)
        # Leave out the headline of each kernel, and the kernels that sdpa_kernel switched off.
        hints = [line for line in told if not line.endswith("because:") and "runtime disabled" not in line]
        text = " ".join([text, *dict.fromkeys(hints)])
    return f"{type(error).__name__}: {text}"[:300]
