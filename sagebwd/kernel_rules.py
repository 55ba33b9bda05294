"""What each kernel set needs, as rules that read as plain sentences. :mod:`sagebwd.dispatch` applies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sagebwd.config import DEFAULT_CONFIG, PAPER_INT8_MATMULS, TILE, TILE_OF_LARGE_HEADS, SageConfig
from sagebwd.validation import show

#: Fastest first.
KERNEL_SETS = ("hopper", "ampere", "triton", "reference")

#: Compute capabilities.
HOPPER, AMPERE = (9, 0), (8, 0)
#: Of data-center Blackwell the first number, and the first without fast INT8 tensor cores.
DATA_CENTER_BLACKWELL, WITHOUT_INT8 = 10, (10, 3)
#: Head sizes that the kernels on a GPU take are multiples of 8, up to this one.
LARGEST_HEAD_DIM = 256
#: Triton: INT8 tensor cores contract 32 tokens or more, and tiles are powers of two.
TRITON_BLOCKS = (32, 64, 128)
#: Tiles, (queries, keys), for head sizes that are padded to 64 or 128; larger ones have TILE_OF_LARGE_HEADS.
#: Of the Hopper kernels that with granularity="block", besides TILE; all of the Ampere kernels.
HOPPER_TILE_WITH_SCALES = (128, 64)
AMPERE_TILES = (TILE, (128, 64), (64, 64))
CUDA_HEAD_DIMS = range(33, 129)
#: Products that may run in 16 bit: with the Ampere kernels, with the Hopper kernels. The paper's other INT8
#: products must be in INT8.
CUDA_16_BIT_MATMULS = ("o", "dv")
HOPPER_16_BIT_MATMULS = (*CUDA_16_BIT_MATMULS, "dq", "dk")


# --- What the choice depends on ----------------------------------------------------------------------------


class GPU(NamedTuple):
    """A GPU, present or hypothetical.

    name: as the driver gives it.
    capability: the compute capability, (9, 0) for Hopper.
    is_amd: whether torch was built for ROCm.
    no_cuda_kernels: why CUDA kernels cannot be compiled or launched on it, and after a semicolon what helps;
        None if they can.
    """

    name: str
    capability: tuple[int, int]
    is_amd: bool = False
    no_cuda_kernels: str | None = None


#: Of fake tensors where there is no GPU. It runs the Triton kernels, or those that the call names: what is
#: traced may run elsewhere.
ABSENT_GPU = GPU("a GPU that is not there", AMPERE)


class Call(NamedTuple):
    """What decides which kernels run: device, dtype of q, head size and settings. A window does not.

    device: the type of the device, such as "cuda".
    gpu: None unless the device is a GPU.
    has_triton: whether Triton is installed.
    is_interpreted: whether CPU tensors can run the Triton kernels, in Triton's interpreter.
    """

    device: str
    gpu: GPU | None
    dtype: torch.dtype
    head_dim: int
    config: SageConfig
    has_triton: bool = True
    is_interpreted: bool = False


class Rule(NamedTuple):
    """Something that a kernel set needs.

    holds: whether the call meets it.
    reason: what is wrong if it does not hold.
    fix: how the caller can make it hold; "" if nothing can be done.
    error: what is raised if the kernel set was asked for.
    """

    holds: bool
    reason: str
    fix: str = ""
    error: type[Exception] = NotImplementedError

    @property
    def warns(self) -> bool:
        """Whether to warn a caller who could change it to get the fastest kernels of a GPU."""
        return bool(self.fix) and self.error is NotImplementedError


# --- What each kernel set needs ----------------------------------------------------------------------------


def obstacles(kernels: str, call: Call) -> list[Rule]:
    """The rules of a kernel set that ``call`` breaks; none if the set can run it."""
    if kernels == "reference":
        return []  # it runs everything
    rules = {"hopper": hopper_rules, "ampere": ampere_rules, "triton": triton_rules}[kernels]
    return [rule for rule in rules(call) if not rule.holds]


def describe(broken: list[Rule]) -> str:
    """Broken rules as one line of text: what is wrong (how to fix it); …"""
    return "; ".join(f"{rule.reason} ({rule.fix})" if rule.fix else rule.reason for rule in broken)


def hopper_rules(call: Call) -> Iterator[Rule]:
    """What the CUDA kernels for Hopper need, in the order in which it is checked."""
    gpu = call.gpu
    yield _on_a_gpu(gpu is not None, call)
    if gpu is None:
        return
    have, need = (".".join(map(str, capability)) for capability in (gpu.capability, HOPPER))
    yield Rule(not gpu.is_amd, f"{gpu.name} is an AMD GPU, which runs no CUDA kernels")
    yield Rule(gpu.capability == HOPPER, f"{gpu.name} has compute capability {have}, not {need} (Hopper)")
    if gpu.is_amd or gpu.capability != HOPPER:
        return  # what else is in the way does not matter
    config, own_tile, has_large_heads = call.config, call.config.tile(call.head_dim), is_large(call.head_dim)
    has_tile_scales = config.granularity == "block" and not has_large_heads
    tile, in_16_bit = _hopper_variant(config, has_large_heads=has_large_heads)
    may_have_scales = not has_large_heads and own_tile == HOPPER_TILE_WITH_SCALES
    yield from _rules_of_cuda_kernels(call, (tile,), in_16_bit, has_tile_scales=may_have_scales)
    yield Rule(
        config.is_int8("dk") or not (config.is_int8("dv") or config.is_int8("dq")),
        "dk is not in INT8, and dv or dq is",
        "add 'dk' to int8_matmuls, or remove 'dv' and 'dq'",
    )
    yield Rule(
        call.head_dim >= CUDA_HEAD_DIMS[0],
        f"the head size is {call.head_dim}, and the Hopper kernels have sizes from 40 on",
    )
    yield _without_fp16_accumulation(config)
    yield _has_cuda_compiler(call)
    if has_tile_scales or not all(map(config.is_int8, HOPPER_16_BIT_MATMULS)):
        yield _scales_of_blocks(config)


def _hopper_variant(config: SageConfig, *, has_large_heads: bool) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The tile of the kernels that come nearest to these settings, and what may be in 16 bits."""
    if has_large_heads:
        return TILE_OF_LARGE_HEADS, CUDA_16_BIT_MATMULS
    if config.granularity == "block":
        return HOPPER_TILE_WITH_SCALES, ()
    return TILE, HOPPER_16_BIT_MATMULS


def ampere_rules(call: Call) -> Iterator[Rule]:
    """What the CUDA kernels for GPUs since Ampere need, in the order in which it is checked."""
    yield _on_a_gpu(call.gpu is not None, call)
    if call.gpu is None:
        return
    config, tile = call.config, call.config.tile(call.head_dim)
    has_64_keys = tile[1] == 64
    yield _since_ampere(call.gpu)
    tiles = (TILE_OF_LARGE_HEADS,) if is_large(call.head_dim) else AMPERE_TILES
    yield from _rules_of_cuda_kernels(call, tiles, has_tile_scales=has_64_keys)
    yield Rule(
        config.is_int8("dv") or not has_64_keys,
        "dv is not in INT8, and tiles have 64 keys",
        "add 'dv' to int8_matmuls, or set block_kv=None for up to 128 channels",
    )
    yield Rule(
        not config.dp_fp16_accumulation or (config.is_int8("dv") and config.operand_scales == "block"),
        "dp_fp16_accumulation is True, and dv is not in INT8 or operand_scales is not 'block'",
        "set dp_fp16_accumulation=False, or add 'dv' to int8_matmuls and set operand_scales='block'",
    )
    yield _has_cuda_compiler(call)
    if not all(map(config.is_int8, CUDA_16_BIT_MATMULS)):
        yield _scales_of_blocks(config)


def triton_rules(call: Call) -> Iterator[Rule]:
    """What the Triton kernels need, in the order in which it is checked."""
    config, gpu = call.config, call.gpu
    yield _on_a_gpu(gpu is not None or call.is_interpreted, call)
    if gpu is None and not call.is_interpreted:
        return
    if gpu is not None:
        yield _since_ampere(gpu)
    yield Rule(call.has_triton, "Triton is not installed", "install triton")
    yield from _rules_of_all_kernels(call)
    yield _without_fp16_accumulation(config)
    for name, size in zip(("block_q", "block_kv"), config.tile(call.head_dim), strict=True):
        sizes = ", ".join(map(str, TRITON_BLOCKS))
        yield Rule(size in TRITON_BLOCKS, f"{name} is {size}", f"use one of {sizes}", ValueError)


def _on_a_gpu(holds: bool, call: Call) -> Rule:
    if call.device == "meta":  # without values, they cannot be moved
        fix = "create them on the GPU that will run them"
        return Rule(holds, "the tensors are on the meta device, which runs no kernels", fix, ValueError)
    return Rule(holds, f"the tensors are on the {call.device.upper()}", "move them to a GPU", ValueError)


def _since_ampere(gpu: GPU) -> Rule:
    return Rule(
        gpu.capability >= AMPERE and not gpu.is_amd,
        f"{gpu.name} has no kernels: they need an NVIDIA GPU of the Ampere generation or later",
    )


def use_instead(gpu: GPU | None) -> str:
    """Why data-center Blackwell should run attention in full precision, and by what; "" for other GPUs."""
    if gpu is None or gpu.is_amd or gpu.capability[0] != DATA_CENTER_BLACKWELL:
        return ""
    is_first = gpu.capability < WITHOUT_INT8
    why = "runs these INT8 products several times below its peak" if is_first else "has no fast INT8"
    return f"{gpu.name} {why}: use cuDNN's attention or FlashAttention-4, in full precision"


def is_large(head_dim: int) -> bool:
    """Whether CUDA kernels pad heads of this size to 256 channels."""
    return head_dim > CUDA_HEAD_DIMS[-1]


def _without_fp16_accumulation(config: SageConfig) -> Rule:
    return Rule(
        not config.dp_fp16_accumulation,
        "dp_fp16_accumulation is True, which only the Ampere kernels have",
        "set dp_fp16_accumulation=False",
    )


def _scales_of_blocks(config: SageConfig) -> Rule:
    scales = config.operand_scales
    return Rule(scales == "block", f"operand_scales is {scales!r}", "set operand_scales='block'")


def _rules_of_cuda_kernels(
    call: Call,
    tiles: tuple[tuple[int, int], ...],
    matmuls_in_16_bit: tuple[str, ...] = CUDA_16_BIT_MATMULS,
    has_tile_scales: bool = False,
) -> Iterator[Rule]:
    """What the Hopper and the Ampere kernels need.

    Args:
        tiles: (queries, keys) of those that they have.
        matmuls_in_16_bit: of the paper's INT8 products, those that may run in 16 bit.
        has_tile_scales: whether they have granularity="block".
    """
    config = call.config
    yield from _rules_of_all_kernels(call)
    has_default = DEFAULT_CONFIG.tile(call.head_dim) in tiles
    yield Rule(
        config.block_q is config.block_kv is None or config.tile(call.head_dim) in tiles,
        f"block_q is {config.block_q} and block_kv {config.block_kv}",
        "set both to None" if has_default else "set block_q={} and block_kv={}".format(*tiles[0]),
    )
    yield Rule(
        config.granularity == "row" or has_tile_scales,
        f"granularity is {config.granularity!r}",
        "set granularity='row'" + ("" if is_large(call.head_dim) else ", or block_q=128 and block_kv=64"),
    )
    yield Rule(not config.smooth_q, "smooth_q is True", "set smooth_q=False")
    missing = [x for x in PAPER_INT8_MATMULS if not config.is_int8(x) and x not in matmuls_in_16_bit]
    yield Rule(not missing, f"{', '.join(missing)} not in INT8", "add them to int8_matmuls")
    yield Rule(not config.is_int8("dp"), "dp is in INT8", "remove 'dp' from int8_matmuls")


def _has_cuda_compiler(call: Call) -> Rule:
    reason, _, fix = (call.gpu.no_cuda_kernels or "").partition("; ")
    return Rule(not reason, reason, fix)


def _rules_of_all_kernels(call: Call) -> Iterator[Rule]:
    yield Rule(
        call.dtype in (torch.float16, torch.bfloat16),
        f"q, k, v are {show(call.dtype)}",
        "cast them to bfloat16 or float16",
        ValueError,
    )
    yield Rule(
        call.head_dim % 8 == 0 and call.head_dim <= LARGEST_HEAD_DIM,
        f"the head size is {call.head_dim}",
        f"use a multiple of 8 up to {LARGEST_HEAD_DIM}",
        ValueError,
    )
