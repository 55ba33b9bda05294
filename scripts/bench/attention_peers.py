"""The attention implementations that scripts.bench.attention measures: SageBwd and its alternatives."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from model.backends.fpa import KERNELS, TITLES
from sagebwd import SageConfig, sage_attention

#: Largest relative L2 error against float64, on standard Gaussian inputs, for which a speed is reported.
BOUND_16_BIT, BOUND_INT8, BOUND_PAPER = 0.02, 0.06, 0.12


@dataclass(frozen=True)
class Shape:
    """Self-attention of ``batch`` sequences of ``tokens`` tokens.

    left, right: limits of a sliding window, −1 for none; as ``window_size`` of ``sage_attention``.
    """

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool
    left: int = -1
    right: int = -1

    @property
    def window(self) -> tuple[int, int] | None:
        """The limits, None without any."""
        return (self.left, self.right) if max(self.left, self.right) >= 0 else None

    @property
    def mask(self) -> str:
        if self.window:
            return f"window {self.left},{self.right}"
        return "causal" if self.causal else "full"

    @property
    def flops(self) -> float:
        """Of the forward: 4·B·H·D for each of N² pairs of tokens, half of that if causal, whatever an
        implementation repeats or skips. With a window only the pairs that it shows count.
        """
        pairs = self.tokens**2 * (0.5 if self.causal else 1)
        if self.window:
            left, right = (self.tokens if limit < 0 else limit for limit in self.window)
            pairs = sum(min(i + right, self.tokens - 1) - max(i - left, 0) + 1 for i in range(self.tokens))
        return 4 * self.batch * self.heads * pairs * self.head_dim

    def __str__(self) -> str:
        return f"{self.mask}, D {self.head_dim}, N {self.tokens}"


#: q, k, v, each (B, H, N, D) → out, the same.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Build = Callable[[Shape], Attend]


@dataclass(frozen=True)
class Implementation:
    """An attention to measure; ``build`` returns the function for a shape."""

    name: str
    build: Build
    bound: float = BOUND_16_BIT  # largest relative L2 of any result
    has_backward: bool = True


def build_sagebwd(config: SageConfig, shape: Shape, kernels: str | None = None) -> Attend:
    settings = {"window_size": (shape.left, shape.right), "config": config, "kernels": kernels}
    return partial(sage_attention, is_causal=shape.causal, **settings)


def load_sdpa(kernel: str) -> Build:
    """PyTorch's operator restricted to this kernel; raises where the kernel cannot run."""

    def build(shape: Shape) -> Attend:
        if shape.window:
            return build_windowed_sdpa(kernel, shape)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(KERNELS[kernel]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

        return attend

    return build


def build_windowed_sdpa(kernel: str, shape: Shape) -> Attend:
    """PyTorch's FlashAttention-2, which takes windows below the public operator, or its definition."""
    if kernel == "math":
        positions = torch.arange(shape.tokens)
        mask = is_visible(shape)(None, None, positions[:, None], positions)
        return partial(F.scaled_dot_product_attention, attn_mask=mask)
    if kernel != "flash":
        raise ValueError(f"PyTorch's {TITLES[kernel]} takes no window")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arguments = (None, None, shape.tokens, shape.tokens, 0.0, False, False)
        window = {"window_size_left": shape.left, "window_size_right": shape.right}
        return torch.ops.aten._flash_attention_forward(q, k, v, *arguments, **window)

    return token_major(attend)


def load_flex() -> Build:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def build(shape: Shape) -> Attend:
        # Without a reset, PyTorch stops compiling after a few shapes and runs the eager N × N definition.
        torch._dynamo.reset()
        # The backward alone runs many times on one graph, so it must not overwrite what the forward saved.
        torch._functorch.config.donated_buffer = False
        mask = None
        if shape.causal or shape.window:
            sizes = (None, None, shape.tokens, shape.tokens)
            mask = create_block_mask(is_visible(shape), *sizes, device="cuda")
        return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    return build


def is_visible(shape: Shape) -> Callable[..., Tensor]:
    """The mask, as a mask_mod of FlexAttention: batch, head, query, key → whether the query sees the key."""
    left, right = (shape.tokens if limit < 0 else limit for limit in (shape.left, shape.right))
    if shape.causal:
        return lambda batch, head, query, key: query >= key
    return lambda batch, head, query, key: (key >= query - left) & (key <= query + right)


def load_flash_package(module: str) -> Build:
    attend = import_module(module).flash_attn_func

    def build(shape: Shape) -> Attend:
        window = {"window_size": shape.window} if shape.window else {}
        return token_major(partial(attend, causal=shape.causal, **window))

    return build


def load_flash_attention_4() -> Build:
    attend = import_module("flash_attn.cute").flash_attn_func

    def build(shape: Shape) -> Attend:
        # The package's own function, not the operators of model.kernels, which take more of the host's time.
        # None is no limit.
        limits = [None if limit < 0 else limit for limit in (shape.left, shape.right)]
        return token_major(partial(attend, causal=shape.causal, window_size=tuple(limits)))

    return build


def token_major(attend: Callable[..., Any]) -> Attend:
    """Adapt ``attend``, which takes and returns (B, N, H, D); some versions also return the logsumexp."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def load_sageattention() -> Build:
    from sageattention import sageattn

    def build(shape: Shape) -> Attend:
        if shape.window:
            raise ValueError("sageattn takes no window")
        return partial(sageattn, tensor_layout="HND", is_causal=shape.causal)

    return build


class Peer(NamedTuple):
    """An implementation of another project. ``load`` raises if it is not installed."""

    name: str
    load: Callable[[], Build]
    bound: float = BOUND_16_BIT
    has_backward: bool = True
    device: str = "cuda"  # the type of device that it is measured on


def without_int8_dq(config: SageConfig) -> SageConfig:
    """The settings with dQ in 16 bit."""
    return replace(config, int8_matmuls=tuple(name for name in config.int8_matmuls if name != "dq"))


#: By the name that --configs takes: the name of the rows, the settings, and the largest relative L2 error.
#: results/ holds these row names; scripts.bench.looks has the titles that people see.
CONFIGS = {
    "default": ("sagebwd", SageConfig(), BOUND_INT8),
    "low-bias": ("sagebwd low bias", SageConfig.low_bias(), BOUND_INT8),
    "smooth-v": ("sagebwd smooth V", SageConfig(smooth_v=True), BOUND_INT8),
    "strictly-causal": ("sagebwd strictly causal", SageConfig.strictly_causal(), BOUND_INT8),
    "paper": ("sagebwd paper", SageConfig.paper(), BOUND_PAPER),
    "accurate": ("sagebwd accurate", SageConfig.accurate(), BOUND_INT8),
    "consistent": ("sagebwd consistent", SageConfig.consistent(), BOUND_INT8),
    "unsigned-p": ("sagebwd unsigned P", SageConfig(unsigned_p=True), BOUND_INT8),
    "compensated": (
        "sagebwd compensated O",
        replace(SageConfig.consistent(), int8_matmuls=("s_fwd", "s_bwd", "dv", "dq", "dk")),
        BOUND_INT8,
    ),
    "16-bit-dq": ("sagebwd dQ in 16 bit", without_int8_dq(SageConfig()), BOUND_INT8),
    "consistent-16-bit-dq": (
        "sagebwd consistent, dQ in 16 bit",
        without_int8_dq(SageConfig.consistent()),
        BOUND_INT8,
    ),
    "int8-scores": ("sagebwd S alone in INT8", SageConfig.int8_scores(), BOUND_INT8),
    "16-bit-p": ("sagebwd P in 16 bit", replace(SageConfig.consistent(), compensate_o=False), BOUND_INT8),
}

#: By the name that --without takes.
PEERS = {
    "flash": Peer(TITLES["flash"], partial(load_sdpa, "flash")),
    "cudnn": Peer(TITLES["cudnn"], partial(load_sdpa, "cudnn")),
    "flex": Peer("FlexAttention", load_flex),
    "flash_attn": Peer("flash_attn package", partial(load_flash_package, "flash_attn")),
    "flash_attn_3": Peer("FlashAttention-3", partial(load_flash_package, "flash_attn_interface")),
    "fa4": Peer(TITLES["fa4"], load_flash_attention_4),
    "sageattention": Peer("SageAttention", load_sageattention, BOUND_INT8, has_backward=False),
    "math": Peer("SDPA math", partial(load_sdpa, "math"), device="cpu"),
}


def find_implementations(arguments: Namespace) -> tuple[list[Implementation], dict[str, str]]:
    """SageBwd and every peer that can run here; and {name: why not} of the others."""
    found = []
    for title, config, bound in (CONFIGS[chosen] for chosen in dict.fromkeys(arguments.configs)):
        for kernels in (None, *dict.fromkeys(arguments.kernels)):
            name = f"{title} ({kernels})" if kernels else title
            found.append(Implementation(name, partial(build_sagebwd, config, kernels=kernels), bound))
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
