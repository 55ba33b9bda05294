"""Which kernels run an attention, and why faster ones do not. Nothing else in the library decides that.

Kernel sets, fastest first:

    hopper      CUDA, wgmma: NVIDIA GPUs of compute capability 9.0
    ampere      CUDA, mma.sync: NVIDIA GPUs since Ampere
    triton      NVIDIA GPUs since Ampere
    reference   plain PyTorch: any device, slow; what CPU tensors run

What each set needs is in :mod:`sagebwd.kernel_rules`. One function, :func:`passed_over`, applies these rules
in this order. It chooses the kernels of a call, explains the choice (:func:`explain`), and makes the tables
in the docs (:func:`table`, :func:`architectures`), which need no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.config import DEFAULT_CONFIG, PRESETS, SageConfig, decode
from sagebwd.kernel_rules import (
    ABSENT_GPU,
    AMPERE,
    CUDA_HEAD_DIMS,
    GPU,
    HOPPER,
    KERNEL_SETS,
    LARGEST_HEAD_DIM,
    Call,
    Rule,
    describe,
    obstacles,
    use_instead,
)
from sagebwd.validation import autocast_dtype, check_arguments
from sagebwd.window import Window

#: Devices whose tensors run the reference if no kernel set is asked for.
REFERENCE_DEVICES = ("cpu", "meta")
USE_REFERENCE = 'pass kernels="reference", which runs, slowly, anywhere'


# --- The order ---------------------------------------------------------------------------------------------


def not_chosen(kernels: str, call: Call) -> list[Rule]:
    """Why a kernel set that can run is still not chosen: it then runs only if the caller asks for it."""
    request = f'pass kernels="{kernels}" to run it'
    if kernels in ("hopper", "ampere") and call.gpu == ABSENT_GPU:
        return [Rule(False, "it is not known which GPU will run this", request)]
    if kernels == "reference" and call.device not in REFERENCE_DEVICES:
        return [Rule(False, "it is slow", request)]
    return []


def _on_its_gpu(kernels: str, call: Call) -> Call:
    """The call on a Hopper GPU for ``hopper``, if it is not known which GPU will run it."""
    if kernels == "hopper" and call.gpu == ABSENT_GPU:
        return call._replace(gpu=ARCHITECTURES["9.0"])
    return call


def passed_over(call: Call) -> tuple[str, dict[str, list[Rule]]]:
    """The kernel set that is chosen, or "none", and for each faster one the rules that speak against it."""
    reasons: dict[str, list[Rule]] = {}
    for name in KERNEL_SETS:
        against = obstacles(name, _on_its_gpu(name, call)) or not_chosen(name, call)
        if not against:
            return name, reasons
        reasons[name] = against
    return "none", reasons


# --- The choice --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Which kernels run an attention, and why faster ones do not.

    Attributes:
        kernels: one of :data:`KERNEL_SETS`; "none" if the call raises an error.
        reasons: by kernel set, why it is not used: each that is faster than ``kernels``.
        faster_preset: a name of :data:`sagebwd.config.PRESETS` that runs one of these, if the settings are a
            preset themselves; else None.
        use_instead: on a GPU that should not run INT8 attention at all, why, and what it should run; else "".
    """

    kernels: str
    reasons: dict[str, str]
    faster_preset: str | None = None
    use_instead: str = ""

    def __str__(self) -> str:
        lines = [f"kernels: {self.kernels}"]
        for reason, names in groupby(self.reasons, self.reasons.get):
            lines.append(f"not {', '.join(names)}: {reason}")
        if self.faster_preset:
            lines.append(f"faster here: {PRESETS[self.faster_preset]}")
        if self.use_instead:
            lines.append(self.use_instead)
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    config: SageConfig = DEFAULT_CONFIG,
    device: str | tuple[int, int] | None = None,
) -> Explanation:
    """Tell which kernels ``sage_attention`` runs with these arguments, and why not faster ones.

    >>> print(sagebwd.explain(q, config=SageConfig(smooth_q=True), device="NVIDIA H100"))
    kernels: triton
    not hopper, ampere: smooth_q is True (set smooth_q=False)

    Args:
        q: the queries (…, H, N, D). Device, dtype and head size matter, under autocast its dtype.
        config: as of :func:`sagebwd.sage_attention`.
        k, v, is_causal, window_size: the same. The choice depends only on the head size of v.
        device: instead of that of q, a GPU that need not be here, with Triton: its name, such as
            "NVIDIA H100" or "RTX 4090", or its compute capability, such as (9, 0).

    Raises:
        ValueError: as :func:`sagebwd.sage_attention` does; or the name of the GPU is not known.
    """
    k = q if k is None else k
    v = k if v is None else v
    check_arguments(q, k, v, scale=None, enable_gqa=True, config=config)
    Window.of(is_causal, window_size)  # which raises
    kind = q.device.type if device is None else "cuda"
    dtype = autocast_dtype(kind) or q.dtype
    head_dim = max(q.shape[-1], v.shape[-1])
    if device is not None:
        return explain_call(Call(kind, hypothetical_gpu(device), dtype, head_dim, config))
    return explain_call(_call(q.device, dtype, head_dim, config))


def explain_call(call: Call) -> Explanation:
    """:func:`explain` for a call that need not exist: a hypothetical GPU is a :class:`GPU`."""
    kernels, reasons = passed_over(call)
    told = {name: describe(against) for name, against in reasons.items()}
    return Explanation(kernels, told, faster_preset(call, kernels), use_instead(call.gpu))


def faster_preset(call: Call, kernels: str) -> str | None:
    """The preset to name to who asked for one that the Triton kernels run: one with CUDA kernels.

    Of those the one that has the smaller errors. None for heads of up to 32 channels, where no kernel set
    is faster.
    """
    is_preset = call.config in PRESETS.values()
    if kernels != "triton" or not is_preset or call.head_dim < CUDA_HEAD_DIMS[0]:
        return None
    others = ("consistent", "default")
    return next((x for x in others if passed_over(call._replace(config=PRESETS[x]))[0] != "triton"), None)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    scale: float,
    config: str,
    kernels: str | None = None,
) -> str:
    """The kernel set that runs attention on such tensors: ``kernels``, or the fastest that can.

    A CPU or meta tensor runs the reference unless ``kernels`` says otherwise. ``config`` comes from
    :func:`sagebwd.config.encode`: a call looks at the settings once. Warns, once for each reason, where
    settings keep a GPU from its fastest kernels, and on a GPU that should run full precision.

    Args:
        head_dim: the larger of those of queries and values.

    Raises:
        ValueError: dtype, head size, scale or tile; the message says what to change.
        NotImplementedError: a setting, a GPU or a device without kernels.
    """
    if kernels not in (None, *KERNEL_SETS):
        names = ", ".join(map(repr, KERNEL_SETS))
        raise ValueError(f"kernels is {kernels!r}; use one of {names}, or None for the fastest")
    # index, because under a tracer the size may be a symbol; the kernels are compiled for one size anyway.
    arguments = (device, dtype, operator.index(head_dim), config, kernels)
    if torch.compiler.is_compiling():
        chosen, wrong_value, not_implemented = _choose_while_tracing(*arguments)
        if wrong_value:
            raise ValueError(wrong_value)
        if not_implemented:
            raise NotImplementedError(not_implemented)
    else:
        chosen = _choose_once(*arguments)
    if scale < 0 and chosen != "reference":
        raise ValueError(f"scale is {scale}; pass one that is not negative and change the sign of q")
    return chosen


def _choose_while_tracing(*arguments: Any) -> tuple[str, str, str]:
    """The kernel set, or the message of a ValueError, or of a NotImplementedError; the others are empty.

    A tracer does not pass on what this raises.
    """
    try:
        return _choose_once(*arguments), "", ""
    except ValueError as error:
        return "", str(error), ""
    except NotImplementedError as error:
        return "", "", str(error)


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: 3 s that most users do not need.
# A tracer then runs the function, which asks the driver, instead of tracing it.
_choose_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache
def _choose_once(
    device: torch.device, dtype: torch.dtype, head_dim: int, config: str, kernels: str | None
) -> str:
    """As :func:`choose`, whatever the scale; the result is remembered."""
    if kernels == "reference" or (kernels is None and device.type in REFERENCE_DEVICES):
        return "reference"
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"sagebwd has no kernels for {device.type.upper()} tensors; {USE_REFERENCE}"
        )
    call = _call(device, dtype, head_dim, decode(config))
    return _fastest(call) if kernels is None else _as_asked(kernels, call)


def _fastest(call: Call) -> str:
    """The fastest kernel set that can run. Warns as :func:`choose` does."""
    chosen, reasons = passed_over(call)
    if chosen == "none":
        able = [name for name in reasons if name != "reference" and not obstacles(name, call)]
        fixes = [rule.fix for name in able for rule in not_chosen(name, call)]
        raise _refusal(obstacles("triton", call)[0], fixes)
    for name, against in reasons.items():
        if all(rule.warns for rule in against) and not not_chosen(name, call):
            what = f"sage_attention runs the {chosen} kernels, slower than the {name} kernels on this GPU"
            preset = faster_preset(call, chosen)
            instead = f"; {PRESETS[preset]} runs CUDA kernels" if preset else ""
            _warn_once(f"{what}: {describe(against)}{instead}")
            break
    if instead := use_instead(call.gpu):
        _warn_once(instead)
    return chosen


def _as_asked(kernels: str, call: Call) -> str:
    """The kernel set that is asked for, if it can run."""
    if kernels == "triton" and call.device == "cpu":
        call = call._replace(is_interpreted=_is_interpreted())
    broken = obstacles(kernels, _on_its_gpu(kernels, call))
    if broken and kernels == "triton":
        raise _refusal(broken[0])
    if broken:
        raise broken[0].error(f'kernels="{kernels}" cannot run: {describe(broken)}; or pass kernels=None')
    return kernels


def _refusal(rule: Rule, fixes: Sequence[str] = ()) -> Exception:
    """The error where this rule keeps even the Triton kernels from running.

    Args:
        fixes: what the caller can do, besides making the rule hold and asking for the reference.
    """
    workarounds = [fix for fix in (rule.fix, *fixes, USE_REFERENCE) if fix]
    return rule.error(f"{rule.reason}; {', or '.join(workarounds)}")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=7)


# --- Which machine this is ---------------------------------------------------------------------------------


def _call(device: torch.device, dtype: torch.dtype, head_dim: int, config: SageConfig) -> Call:
    gpu = gpu_of(device.index or 0) if device.type == "cuda" else None
    return Call(device.type, gpu, dtype, head_dim, config, _has_triton())


@functools.cache
def gpu_of(index: int) -> GPU:
    """The GPU with this index. Where there is none: :data:`ABSENT_GPU`."""
    if not torch.cuda.is_available():
        return ABSENT_GPU
    capability = torch.cuda.get_device_capability(index)
    is_amd = torch.version.hip is not None
    reason = None
    if capability >= AMPERE and not is_amd:
        from sagebwd.kernels.cuda.compile import why_no_compiler
        from sagebwd.kernels.cuda.launch import why_no_driver

        reason = why_no_compiler() or why_no_driver()
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
    "10.3": GPU("a B300", (10, 3)),
    "12.0": GPU("an RTX 50", (12, 0)),
}


#: What names of products contain, by compute capability; the first that fits counts.
PRODUCTS = {
    (7, 0): "V100",
    (7, 5): r"T4|RTX 20\d\d|Quadro|TITAN RTX|Turing",
    (8, 9): r"Ada|RTX 40\d\d|L4|L40S?",
    (8, 6): r"RTX 30\d\d|RTX A\d+|A2|A10G?|A16|A40",
    (8, 0): r"A30|A100|A800|Ampere",
    (9, 0): r"G?H\d+|Hopper",
    (10, 3): r"G?B300",
    (10, 0): r"G?B[12]00",
    (12, 1): r"GB10|DGX Spark",
    (12, 0): r"RTX 50\d\d|RTX PRO",
}


def hypothetical_gpu(device: str | tuple[int, int]) -> GPU:
    """The GPU of a name or a compute capability. Raises ValueError for one that is not known."""
    if not isinstance(device, str):
        return GPU("a GPU", tuple(device))
    for capability, names in PRODUCTS.items():
        if re.search(rf"\b({names})\b", device, re.IGNORECASE):
            return GPU(device, capability)
    raise ValueError(
        f"device is {device!r}, whose compute capability is not known here; pass that, such as (9, 0)"
    )


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
        found = [{name: x.kernels for name, x in architectures(config, size).items()} for size in sizes]
        for kernels, group in groupby(zip(found, sizes, strict=True), lambda item: item[0]):
            head_dims = [size for _, size in group]
            rows.append(Row(preset, (head_dims[0], head_dims[-1]), kernels))
    return rows


def architectures(config: SageConfig = DEFAULT_CONFIG, head_dim: int = 64) -> dict[str, Explanation]:
    """:func:`explain` for bf16 tensors on each of :data:`ARCHITECTURES`, and on the "CPU". Needs no GPU."""
    calls = {name: Call("cuda", gpu, torch.bfloat16, head_dim, config) for name, gpu in ARCHITECTURES.items()}
    calls["CPU"] = Call("cpu", None, torch.bfloat16, head_dim, config)
    return {name: explain_call(call) for name, call in calls.items()}
