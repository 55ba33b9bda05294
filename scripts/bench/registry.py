"""What scripts.bench.attention measures: shapes, SageBwd by preset and kernel set, and the peers.

To add a peer, write a function that imports it and returns its ``Build``, and give it a line in PEERS.
"""

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
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagebwd
from sagebwd import SageConfig, sage_attention

#: Largest relative L2 error against float64, on standard Gaussian inputs, for which a speed is reported.
BOUND_16_BIT, BOUND_INT8, BOUND_PAPER = 0.02, 0.06, 0.12


# --- Shapes -------------------------------------------------------------------------------------------------


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
        """Of the forward: 4·H·D for each pair of tokens that may see each other.

        These are N² in a sequence, half of that if causal, and with a window what it shows.
        """
        n, pairs = self.tokens, self.tokens**2 * (0.5 if self.causal else 1)
        if self.window:
            left, right = (n if limit < 0 else limit for limit in self.window)
            pairs = sum(min(i + right, n - 1) - max(i - left, 0) + 1 for i in range(n))
        return 4 * self.batch * self.heads * self.head_dim * pairs

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
    return partial(sage_attention, **settings)


#: By the name that --configs takes: the name of the rows, the settings, and the largest relative L2 error.
#: results/ holds these row names; LOOKS in scripts.bench.tables has the titles that people see.
CONFIGS = {
    "default": ("sagebwd", SageConfig(), BOUND_INT8),
    "low-bias": ("sagebwd low bias", SageConfig.low_bias(), BOUND_INT8),
    "strictly-causal": ("sagebwd strictly causal", SageConfig.strictly_causal(), BOUND_INT8),
    "paper": ("sagebwd paper", SageConfig.paper(), BOUND_PAPER),
    "consistent": ("sagebwd consistent", SageConfig.consistent(), BOUND_INT8),
    "int8-scores": ("sagebwd S alone in INT8", SageConfig.int8_scores(), BOUND_INT8),
    "16-bit-p": ("sagebwd P in 16 bit", replace(SageConfig.consistent(), compensate_o=False), BOUND_INT8),
}


# --- Peers --------------------------------------------------------------------------------------------------


def load_sdpa(backend: SDPBackend) -> Build:
    """PyTorch's operator restricted to this kernel, which raises where it cannot run."""

    def build(shape: Shape, device: torch.device) -> Attend:
        if shape.window:
            raise ValueError(f"scaled_dot_product_attention has no mask for {shape.mask}")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

        return attend

    return build


def load_math() -> Build:
    """The definition, with a mask for each pair of tokens."""

    def build(shape: Shape, device: torch.device) -> Attend:
        tokens = torch.arange(shape.tokens, device=device)
        mask = is_visible(shape)(None, None, tokens[:, None], tokens)
        return partial(F.scaled_dot_product_attention, attn_mask=mask)

    return build


def load_torch_flash() -> Build:
    """PyTorch's FlashAttention-2; windows are below its public operator."""

    def build(shape: Shape, device: torch.device) -> Attend:
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
            mask = create_block_mask(is_visible(shape), None, None, shape.tokens, shape.tokens, device=device)
        return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    return build


def is_visible(shape: Shape) -> Callable[..., Tensor]:
    """The mask, as a mask_mod of FlexAttention: batch, head, query, key → whether the query sees the key."""
    left, right = (shape.tokens if limit < 0 else limit for limit in (shape.left, shape.right))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if shape.causal else (key >= query - left) & (key <= query + right)

    return visible


def load_flash_package(module: str) -> Build:
    package = import_module(module)

    def build(shape: Shape, device: torch.device) -> Attend:
        settings: dict[str, Any] = {"causal": shape.causal}
        if shape.window:
            settings["window_size"] = shape.window
        return token_major(partial(package.flash_attn_func, **settings))

    return build


def load_flash_attention_4() -> Build:
    attend = import_module("flash_attn.cute").flash_attn_func

    def build(shape: Shape, device: torch.device) -> Attend:
        # The package's own function, not the operators of model.kernels, which take more of the host's time.
        # None is no limit.
        limits = tuple(None if limit < 0 else limit for limit in (shape.left, shape.right))
        return token_major(partial(attend, causal=shape.causal, window_size=limits))

    return build


def token_major(attend: Callable[..., Any]) -> Attend:
    """Adapt ``attend``, which takes and returns (B, N, H, D); some versions also return the logsumexp."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


class Peer(NamedTuple):
    """An implementation of another project. ``load`` raises if it is not installed."""

    name: str
    load: Callable[[], Build]
    device: str = "cuda"  # the type of device that it is measured on


#: By the name that --without takes.
PEERS = {
    "flash": Peer("FlashAttention-2", load_torch_flash),
    "cudnn": Peer("cuDNN", partial(load_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "flex": Peer("FlexAttention", load_flex),
    "flash_attn": Peer("flash_attn package", partial(load_flash_package, "flash_attn")),
    "flash_attn_3": Peer("FlashAttention-3", partial(load_flash_package, "flash_attn_interface")),
    "fa4": Peer("FlashAttention-4", load_flash_attention_4),
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
                found.append(Implementation(peer.name, peer.load()))
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
