"""Which kernels run an attention, and why faster ones do not. Nothing else in the library decides that.

Kernel sets, fastest first:

    hopper      CUDA, wgmma: NVIDIA GPUs of compute capability 9.0
    ampere      CUDA, mma.sync: NVIDIA GPUs since Ampere; on Hopper only if asked for
    triton      NVIDIA GPUs since Ampere
    reference   plain PyTorch: any device, slow; what CPU tensors run

For each set a function lists what it needs as rules (:class:`Rule`), which read as plain sentences. One
function, :func:`passed_over`, applies them in this order. It chooses the kernels of a call, explains the
choice (:func:`explain`), and makes the tables in the docs (:func:`table`, :func:`architectures`), which need
no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.config import (
    DEFAULT_CONFIG,
    PAPER_INT8_MATMULS,
    PRESETS,
    TILE_OF_LARGE_HEADS,
    SageConfig,
    decode,
)
from sagebwd.validation import check_window, is_autocast
from sagebwd.window import Window

#: Fastest first.
KERNEL_SETS = ("hopper", "ampere", "triton", "reference")

#: Compute capabilities.
HOPPER, AMPERE = (9, 0), (8, 0)
#: Head sizes that the kernels on a GPU take are multiples of 8, up to this one.
LARGEST_HEAD_DIM = 256
#: Triton: INT8 tensor cores contract 32 tokens or more, and tiles are powers of two.
TRITON_BLOCKS = (32, 64, 128)
#: CUDA: the tile, (queries, keys), the Hopper kernels' with granularity="block" and with S in 16 bits, the
#: tiles of the Ampere kernels, and the head sizes that are padded to 64 or 128.
CUDA_TILE = (64, 128)
HOPPER_TILE_WITH_SCALES, HOPPER_TILE_WITH_16_BIT_S = (128, 64), (64, 64)
AMPERE_TILES = (CUDA_TILE, (128, 64), (64, 64))
CUDA_HEAD_DIMS = range(33, 129)
#: Products that may run in 16 bit: with the Ampere kernels, with the Hopper kernels. The paper's other INT8
#: products must be in INT8.
CUDA_16_BIT_MATMULS = ("o", "dv")
HOPPER_16_BIT_MATMULS = (*CUDA_16_BIT_MATMULS, "dq", "dk")

#: Devices whose tensors run the reference if no kernel set is asked for.
REFERENCE_DEVICES = ("cpu", "meta")
USE_REFERENCE = 'pass kernels="reference", which runs, slowly, anywhere'


# --- What the choice depends on ----------------------------------------------------------------------------


class GPU(NamedTuple):
    """A GPU, present or hypothetical.

    name: as the driver gives it.
    capability: the compute capability, (9, 0) for Hopper.
    is_amd: whether torch was built for ROCm.
    no_cuda_kernels: why CUDA kernels cannot be compiled or launched on it, None if they can.
    """

    name: str
    capability: tuple[int, int]
    is_amd: bool = False
    no_cuda_kernels: str | None = None


#: Of fake tensors where there is no GPU. It runs the Triton kernels, or those that the call names: what is
#: traced may run elsewhere.
ABSENT_GPU = GPU("a GPU that is not there", AMPERE)


class Call(NamedTuple):
    """What decides which kernels run: device, dtype of q, head size, settings and whether there is a window.

    device: the type of the device, such as "cuda".
    gpu: None unless the device is a GPU.
    has_triton: whether Triton is installed.
    is_interpreted: whether CPU tensors can run the Triton kernels, in Triton's interpreter.
    is_windowed: whether a sliding window hides keys; the causal mask is none.
    """

    device: str
    gpu: GPU | None
    dtype: torch.dtype
    head_dim: int
    config: SageConfig
    has_triton: bool = True
    is_interpreted: bool = False
    is_windowed: bool = False


class Rule(NamedTuple):
    """Something that a kernel set needs.

    holds: whether the call meets it.
    reason: what is wrong if it does not hold.
    fix: how the caller can make it hold; "" if nothing can be done.
    error: what is raised if the kernel set was asked for.
    warns: whether to warn a caller who could change it to get the fastest kernels of a GPU.
    """

    holds: bool
    reason: str
    fix: str = ""
    error: type[Exception] = NotImplementedError
    warns: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}" if self.fix else self.reason


# --- What each kernel set needs ----------------------------------------------------------------------------


def obstacles(kernels: str, call: Call) -> list[Rule]:
    """The rules of a kernel set that ``call`` breaks; none if the set can run it."""
    rules = {
        "hopper": hopper_rules,
        "ampere": ampere_rules,
        "triton": triton_rules,
        "reference": reference_rules,
    }[kernels]
    return [rule for rule in rules(call) if not rule.holds]


def not_chosen(kernels: str, call: Call) -> list[Rule]:
    """Why a kernel set that can run is still not chosen: it then runs only if the caller asks for it."""
    request = f'pass kernels="{kernels}" to run it'
    if kernels == "hopper" and _has_16_bit_s(call.config):
        return [Rule(False, "with s_fwd and s_bwd in 16 bit it ran on a CPU only, by emulation", request)]
    if kernels == "ampere" and call.gpu == ABSENT_GPU:
        return [Rule(False, "it is not known which GPU will run this", request)]
    if kernels == "ampere" and call.gpu is not None and call.gpu.capability == HOPPER:
        return [Rule(False, "on Hopper Triton multiplies INT8 by wgmma, which is faster", request)]
    if kernels == "reference" and call.device not in REFERENCE_DEVICES:
        return [Rule(False, "it is slow", request)]
    return []


def passed_over(call: Call) -> tuple[str, dict[str, list[Rule]]]:
    """The kernel set that is chosen, or "none", and for each faster one the rules that speak against it."""
    reasons: dict[str, list[Rule]] = {}
    for name in KERNEL_SETS:
        against = obstacles(name, call) or not_chosen(name, call)
        if not against:
            return name, reasons
        reasons[name] = against
    return "none", reasons


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
    config = call.config
    has_tile_scales, s_16bit = config.granularity == "block", _has_16_bit_s(config)
    tile, in_16_bit = CUDA_TILE, HOPPER_16_BIT_MATMULS
    if has_tile_scales:
        tile, in_16_bit = HOPPER_TILE_WITH_SCALES, ()
    elif s_16bit:
        tile, in_16_bit = HOPPER_TILE_WITH_16_BIT_S, ("o", "s_fwd", "s_bwd")
    own_tile = config.tile(call.head_dim)
    yield from _rules_of_cuda_kernels(
        call, (tile,), in_16_bit, has_tile_scales=own_tile == HOPPER_TILE_WITH_SCALES
    )
    if s_16bit:
        yield _s_in_16_bit(config, has_64_keys=own_tile[1] == 64)
        yield Rule(
            config.operand_scales == "token",
            "operand_scales is 'block', and s_fwd and s_bwd are not in INT8",
            "set operand_scales='token'",
        )
    yield Rule(
        config.is_int8("dk") or not (config.is_int8("dv") or config.is_int8("dq")),
        "dk is not in INT8, and dv or dq is",
        "add 'dk' to int8_matmuls, or remove 'dv' and 'dq'",
        warns=True,
    )
    yield Rule(
        call.head_dim in CUDA_HEAD_DIMS,
        f"the head size is {call.head_dim}, and the Hopper kernels have sizes from 40 to 128",
    )
    yield _has_cuda_compiler(call)
    if has_tile_scales or not (s_16bit or all(map(config.is_int8, HOPPER_16_BIT_MATMULS))):
        yield _scales_of_blocks(config)


def ampere_rules(call: Call) -> Iterator[Rule]:
    """What the CUDA kernels for GPUs since Ampere need, in the order in which it is checked."""
    yield _on_a_gpu(call.gpu is not None, call)
    if call.gpu is None:
        return
    config, tile = call.config, call.config.tile(call.head_dim)
    has_64_keys, is_small = tile[1] == 64, call.head_dim <= CUDA_HEAD_DIMS[-1]
    s_16bit = _has_16_bit_s(config)
    yield _since_ampere(call.gpu)
    tiles = AMPERE_TILES if is_small else (TILE_OF_LARGE_HEADS,)
    matmuls_in_16_bit = (*CUDA_16_BIT_MATMULS, *(("s_fwd", "s_bwd") if s_16bit else ()))
    yield from _rules_of_cuda_kernels(call, tiles, matmuls_in_16_bit, has_tile_scales=has_64_keys)
    yield Rule(
        config.is_int8("dv") or not has_64_keys,
        "dv is not in INT8, and tiles have 64 keys",
        "add 'dv' to int8_matmuls, or set block_kv=None for up to 128 channels",
    )
    if s_16bit:
        yield _s_in_16_bit(config, has_64_keys=has_64_keys and is_small)
    yield _has_cuda_compiler(call)
    if not s_16bit and not all(map(config.is_int8, CUDA_16_BIT_MATMULS)):
        yield _scales_of_blocks(config)


def triton_rules(call: Call) -> Iterator[Rule]:
    """What the Triton kernels need, in the order in which it is checked."""
    config, gpu = call.config, call.gpu
    yield _on_a_gpu(gpu is not None or call.is_interpreted, call)
    if gpu is not None:
        yield _since_ampere(gpu)
    yield Rule(call.has_triton, "Triton is not installed", "install triton")
    yield from _rules_of_all_kernels(call)
    for name, size in zip(("block_q", "block_kv"), config.tile(call.head_dim), strict=True):
        sizes = ", ".join(map(str, TRITON_BLOCKS))
        yield Rule(size in TRITON_BLOCKS, f"{name} is {size}", f"use one of {sizes}", ValueError)


def reference_rules(call: Call) -> Iterator[Rule]:
    """The reference runs everything."""
    return iter(())


def _on_a_gpu(holds: bool, call: Call) -> Rule:
    return Rule(holds, f"the tensors are on the {call.device.upper()}", "move them to a GPU", ValueError)


def _since_ampere(gpu: GPU) -> Rule:
    return Rule(
        gpu.capability >= AMPERE and not gpu.is_amd,
        f"{gpu.name} has no kernels: they need an NVIDIA GPU of the Ampere generation or later",
    )


def _has_16_bit_s(config: SageConfig) -> bool:
    return not (config.is_int8("s_fwd") or config.is_int8("s_bwd"))


def _s_in_16_bit(config: SageConfig, *, has_64_keys: bool) -> Rule:
    return Rule(
        has_64_keys and not config.is_int8("o") and not config.smooths_k,
        "s_fwd and s_bwd are not in INT8",
        "add them to int8_matmuls, or remove 'o', too, and set smooth_k=False and block_kv=64, for up to 128 "
        "channels",
    )


def _scales_of_blocks(config: SageConfig) -> Rule:
    return Rule(
        config.operand_scales == "block",
        f"operand_scales is {config.operand_scales!r}",
        "set operand_scales='block'",
        warns=True,
    )


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
        warns=True,
    )
    yield Rule(
        config.granularity == "row" or has_tile_scales,
        f"granularity is {config.granularity!r}",
        "set granularity='row', or block_q=128 and block_kv=64",
        warns=True,
    )
    yield Rule(not config.smooth_q, "smooth_q is True", "set smooth_q=False", warns=True)
    missing = [x for x in PAPER_INT8_MATMULS if not config.is_int8(x) and x not in matmuls_in_16_bit]
    yield Rule(
        not missing,
        f"{', '.join(missing)} not in INT8",
        "add them to int8_matmuls",
        warns=True,
    )
    yield Rule(not config.is_int8("dp"), "dp is in INT8", "remove 'dp' from int8_matmuls", warns=True)


def _has_cuda_compiler(call: Call) -> Rule:
    reason = None if call.gpu is None else call.gpu.no_cuda_kernels
    return Rule(reason is None, str(reason), warns=True)


def _rules_of_all_kernels(call: Call) -> Iterator[Rule]:
    config = call.config
    dtype = str(call.dtype).removeprefix("torch.")
    yield Rule(
        call.dtype in (torch.float16, torch.bfloat16),
        f"q, k, v are {dtype}",
        "cast them to bfloat16 or float16",
        ValueError,
    )
    yield Rule(
        call.head_dim % 8 == 0 and call.head_dim <= LARGEST_HEAD_DIM,
        f"the head size is {call.head_dim}",
        f"use a multiple of 8 up to {LARGEST_HEAD_DIM}",
        ValueError,
    )
    for name, value in (("exact_delta", False), ("add_mean_k_term", False), ("s_levels", 1)):
        found = getattr(config, name)
        instead = "compensate_o=True" if name == "exact_delta" else f"{name}={value}"
        yield Rule(found == value, f"{name}={found} has no kernel", f"use {instead}")


# --- The choice --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Which kernels run an attention, and why faster ones do not.

    Attributes:
        kernels: one of :data:`KERNEL_SETS`; "none" if the call raises an error.
        reasons: by kernel set, why it is not used: each that is faster than ``kernels``.
    """

    kernels: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"kernels: {self.kernels}"]
        return "\n".join(lines + [f"not {name}: {reason}" for name, reason in self.reasons.items()])


def explain(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    config: SageConfig = DEFAULT_CONFIG,
) -> Explanation:
    """Tell which kernels ``sage_attention`` runs with these arguments, and why not faster ones.

    >>> print(sagebwd.explain(q, config=SageConfig.accurate()))  # on an H200
    kernels: triton
    not hopper: block_q is 64 and block_kv 64 (set both to None); s_fwd, o, s_bwd not in INT8 (add …
    not ampere: on Hopper Triton multiplies INT8 by wgmma, which is faster (pass kernels="ampere" …

    Args:
        q: the queries (B, H, N, D). Device, dtype and head size matter, under autocast its dtype.
        k, v: they share these with q, and may be left out. A window that is wider than q and k is none.
        is_causal, window_size, config: as of :func:`sagebwd.sage_attention`.

    Raises:
        ValueError: ``window_size`` is not a pair of integers of −1 or more.
    """
    check_window(window_size)
    window = Window.of(is_causal, window_size).narrowed(q.shape[-2], (q if k is None else k).shape[-2])
    dtype = q.dtype
    if is_autocast(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    call = _call(q.device, dtype, q.shape[-1], config, is_windowed=window.is_sliding)
    return explain_call(call)


def explain_call(call: Call) -> Explanation:
    """:func:`explain` for a call that need not exist: a hypothetical GPU is a :class:`GPU`."""
    kernels, reasons = passed_over(call)
    return Explanation(kernels, {name: describe(against) for name, against in reasons.items()})


def choose(
    q: Tensor, scale: float, config: str, kernels: str | None = None, *, is_windowed: bool = False
) -> str:
    """The kernel set that runs attention on ``q``: ``kernels``, or the fastest that can.

    A CPU or meta tensor runs the reference unless ``kernels`` says otherwise. ``config`` comes from
    :func:`sagebwd.config.encode`: a call looks at the settings once. Warns, once for each reason, where
    settings keep a Hopper GPU from its own kernels.

    Raises:
        ValueError: dtype, head size, scale or tile; the message says what to change.
        NotImplementedError: a setting, a GPU or a device without kernels.
    """
    # index, because under a tracer the size may be a symbol; the kernels are compiled for one size anyway.
    head_dim = operator.index(q.shape[-1])
    chosen, error, message = _choose(q.device, q.dtype, head_dim, config, kernels, is_windowed)
    if error == "ValueError":
        raise ValueError(message)
    if error:
        raise NotImplementedError(message)
    if scale < 0 and chosen != "reference":
        raise ValueError(f"scale is {scale}; pass one that is not negative and change the sign of q")
    return chosen


def _choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    config: str,
    kernels: str | None,
    is_windowed: bool,
) -> tuple[str, str, str]:
    return _choose_once(device, dtype, head_dim, config, kernels, is_windowed)


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: 3 s that most users do not need.
# A tracer then runs the function, which asks the driver, instead of tracing it.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache
def _choose_once(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    config: str,
    kernels: str | None,
    is_windowed: bool,
) -> tuple[str, str, str]:
    """(kernel set, "", ""), or ("", name of the error, its message). A result is remembered, an error too."""
    if kernels not in (None, *KERNEL_SETS):
        names = ", ".join(map(repr, KERNEL_SETS))
        return "", "ValueError", f"kernels is {kernels!r}; use one of {names}, or None for the fastest"
    if kernels == "reference" or (kernels is None and device.type in REFERENCE_DEVICES):
        return "reference", "", ""
    if device.type not in ("cpu", "cuda"):
        message = f"sagebwd has no kernels for {device.type.upper()} tensors; {USE_REFERENCE}"
        return "", "NotImplementedError", message
    call = _call(device, dtype, head_dim, decode(config), is_windowed=is_windowed)
    return _fastest(call) if kernels is None else _as_asked(kernels, call)


def _fastest(call: Call) -> tuple[str, str, str]:
    """The result of :func:`_choose_once` if no kernel set is asked for. Warns as :func:`choose` does."""
    chosen, reasons = passed_over(call)
    if chosen == "none":
        able = [name for name in reasons if name != "reference" and not obstacles(name, call)]
        fixes = [rule.fix for name in able for rule in not_chosen(name, call)]
        return _refused(obstacles("triton", call)[0], fixes)
    for name, against in reasons.items():
        if all(rule.warns for rule in against) and not not_chosen(name, call):
            reason = describe(against)
            _warn_once(f"sage_attention runs the Triton kernels, slower than those for this GPU: {reason}")
    return chosen, "", ""


def _as_asked(kernels: str, call: Call) -> tuple[str, str, str]:
    """The result of :func:`_choose_once` for a kernel set that is asked for."""
    if kernels == "triton" and call.device == "cpu":
        call = call._replace(is_interpreted=_is_interpreted())
    if kernels == "hopper" and call.gpu == ABSENT_GPU:
        call = call._replace(gpu=ARCHITECTURES["9.0"])
    broken = obstacles(kernels, call)
    if not broken:
        return kernels, "", ""
    if kernels == "triton":
        return _refused(broken[0])
    message = f'kernels="{kernels}" cannot run: {describe(broken)}; or pass kernels=None'
    return "", broken[0].error.__name__, message


def _refused(rule: Rule, fixes: Sequence[str] = ()) -> tuple[str, str, str]:
    """The result of :func:`_choose_once` where this rule keeps even the Triton kernels from running.

    Args:
        fixes: what the caller can do, besides making the rule hold and asking for the reference.
    """
    ways_out = [fix for fix in (rule.fix, *fixes) if fix]
    message = f"{rule.reason}; {', or '.join([*ways_out, USE_REFERENCE])}"
    return "", rule.error.__name__, message


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=7)


# --- Which machine this is ---------------------------------------------------------------------------------


def _call(
    device: torch.device, dtype: torch.dtype, head_dim: int, config: SageConfig, *, is_windowed: bool = False
) -> Call:
    gpu = gpu_of(device.index or 0) if device.type == "cuda" else None
    return Call(device.type, gpu, dtype, head_dim, config, _has_triton(), is_windowed=is_windowed)


@functools.cache
def gpu_of(index: int) -> GPU:
    """The GPU with this index. Where there is none: :data:`ABSENT_GPU`."""
    if not torch.cuda.is_available():
        return ABSENT_GPU
    capability = torch.cuda.get_device_capability(index)
    is_amd = torch.version.hip is not None
    reason = None
    if capability >= AMPERE and not is_amd:
        from sagebwd.kernels.cuda import runtime

        reason = runtime.why_unavailable(torch.device("cuda", index), capability)
    return GPU(torch.cuda.get_device_name(index), capability, is_amd, reason)


def _is_interpreted() -> bool:
    if not _has_triton():
        return False
    from sagebwd.kernels.triton.device import IS_INTERPRETED

    return IS_INTERPRETED


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# --- The table ---------------------------------------------------------------------------------------------

#: A GPU of each compute capability that the docs speak of, and products that have it.
ARCHITECTURES = {
    "7.5": GPU("a Turing GPU", (7, 5)),
    "8.0": GPU("an A100", (8, 0)),
    "8.6": GPU("an RTX 30, A10 or A40", (8, 6)),
    "8.9": GPU("an RTX 40, L4 or L40S", (8, 9)),
    "9.0": GPU("a Hopper GPU", HOPPER),
    "10.0": GPU("a B200", (10, 0)),
    "12.0": GPU("an RTX 50", (12, 0)),
}


class Row(NamedTuple):
    """Which kernels run a preset, for bf16 tensors.

    preset: a name of :data:`sagebwd.config.PRESETS`.
    head_dims: the smallest and the largest head size of this row; sizes are multiples of 8.
    kernels: the kernel set by compute capability of :data:`ARCHITECTURES`, and on the "CPU".
    """

    preset: str
    head_dims: tuple[int, int]
    kernels: dict[str, str]


def table() -> list[Row]:
    """Preset × head size × GPU → kernel set, by the rules above. Needs no GPU."""
    rows = []
    for preset, config in PRESETS.items():
        sizes = range(8, LARGEST_HEAD_DIM + 1, 8)
        for kernels, group in groupby(sizes, lambda size, config=config: _kernels_by_device(config, size)):
            head_dims = [*group]
            rows.append(Row(preset, (head_dims[0], head_dims[-1]), kernels))
    return rows


def architectures(config: SageConfig = DEFAULT_CONFIG, head_dim: int = 64) -> dict[str, Explanation]:
    """:func:`explain` for bf16 tensors on each of :data:`ARCHITECTURES`, and on the "CPU". Needs no GPU."""
    calls = {name: Call("cuda", gpu, torch.bfloat16, head_dim, config) for name, gpu in ARCHITECTURES.items()}
    calls["CPU"] = Call("cpu", None, torch.bfloat16, head_dim, config)
    return {name: explain_call(call) for name, call in calls.items()}


def _kernels_by_device(config: SageConfig, head_dim: int) -> dict[str, str]:
    return {name: found.kernels for name, found in architectures(config, head_dim).items()}
