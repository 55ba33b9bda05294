"""The kernel sets under test: one description each, from which the tests of this folder make their cases.

A test that uses the fixture ``kernel_set``, which most do by way of other fixtures, runs once for each
description in :data:`KERNEL_SETS`. :func:`over` gives it parameters that depend on the set, :func:`only` and
its like leave sets out. To test another kernel set, add its description.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from sagebwd import SageConfig, dispatch
from sagebwd.config import DEFAULT_CONFIG, MATMULS, P_MATMULS, PAPER_INT8_MATMULS
from sagebwd.kernels.ampere.shapes import backward_source
from tests.sagebwd.kernels.cuda import sources_on_cpu

FP16, BF16 = torch.float16, torch.bfloat16


def without_int8(*products: str, **settings: Any) -> SageConfig:
    """The default with these products in 16 bits, and ``settings``."""
    names = tuple(name for name in PAPER_INT8_MATMULS if name not in products)
    return SageConfig(int8_matmuls=names, **settings)


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """A kernel set on a device, and what the tests must know of it.

    name: as ``sage_attention(kernels=name)`` takes it. part: what this covers of the set, if it has several.
    device: where its inputs lie. "cpu" is Triton's interpreter, which affords small cases only.
    gpu: the kind of GPU whose rules in :mod:`sagebwd.dispatch` say which settings run; None without one.
    why_unavailable: why it cannot run on this machine, None if it can. Its tests are then skipped.
    is_cuda: whether it is written in CUDA and takes operands that packing.cu packs.
    is_reference: it runs the tests that do not compare with it, and those marked with :data:`reference_too`.
    is_emulated: these are the CUDA sources compiled as C++ (cuda/on_cpu), which no GPU is needed for. Each
        setting takes a second to compile, so that only tests marked with :data:`emulated_too` run them, in
        fp16 alone: all that the sources know of bf16 is in a header that is replaced.
    backward_kernels: the names of the kernels that compute gradients by default, at head size 64.

    head_dims: the head sizes that most tests run. all_head_dims: those of the tests about head sizes.
    heads: (query heads, key heads) of tests about lengths.
    tokens: a length of several tiles of queries and of keys, the last of each not full.
    poisoned_tokens: tokens of these in different tiles, the last one too.
    short: (queries, keys) of tests that are not about lengths.
    small_tile: settings of a tile of which ``tokens`` are several, if that of the default is larger.
    lengths: (queries, keys, is_causal) around its tiles. float64_sizes: (tokens, head size, heads).
    packs: by name (tokens of q, cu_seqlens, tokens of k, cu_seqlens_kv); the latter may be None.
    pack_heads: (query heads, key heads) by pack, "others" for those that are not named.
    variants: settings with code of their own in these kernels, which get tests of lengths and packs.
    main_variants: those of them that get tests of groups of heads and of poisons, too.
    another_config: settings that differ from the default.

    any_lengths, any_head_dims, any_config, examples: what random tests draw, and how many.
    large_values: ± these as Q and K give logits that choose among keys.
    exact_from: from which of ``large_values`` on such an output is exact. Below, it may be off by a step of
        fp16: kernels round the product before they subtract the maximum if it exceeds 2¹³.
    agrees_to, bf16_error: relative L2 difference from the reference in fp16, as ``assert_same`` has it, and
        in bf16.
    extra_memory: at most so many times what q, k and v take is allocated on top of inputs and results, by
        default and if they fill their blocks.
    """

    name: str
    part: str = ""
    device: str
    gpu: dispatch.GPU | None
    why_unavailable: Callable[[], str | None]
    is_cuda: bool = False
    is_reference: bool = False
    is_emulated: bool = False
    backward_kernels: tuple[str, ...] = ("dk_dv_kernel", "dq_kernel")
    head_dims: tuple[int, ...]
    all_head_dims: tuple[int, ...]
    heads: tuple[int, int]
    tokens: int
    poisoned_tokens: tuple[int, ...]
    short: tuple[int, int]
    small_tile: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[tuple[int, int, bool], ...]
    float64_sizes: tuple[tuple[int, int, int], ...]
    packs: Mapping[str, tuple[int, list[int], int, list[int] | None]]
    pack_heads: Mapping[str, tuple[int, int]]
    variants: Mapping[str, SageConfig]
    main_variants: tuple[str, ...]
    another_config: SageConfig
    any_lengths: st.SearchStrategy[int]
    any_head_dims: st.SearchStrategy[int]
    any_config: st.SearchStrategy[SageConfig]
    examples: int
    large_values: tuple[int, ...]
    exact_from: int = 0
    agrees_to: float = 1e-3
    bf16_error: float = 8e-3
    extra_memory: float = 1.5

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def __str__(self) -> str:
        return f"{self.name}-{self.device}" + (f"-{self.part}" if self.part else "")

    def runs(self, config: SageConfig, head_dim: int | None = None) -> bool:
        """Whether the rules of this set let it run these settings; by themselves they need no GPU."""
        head_dim = self.head_dims[0] if head_dim is None else head_dim
        call = dispatch.Call(self.device, self.gpu, FP16, head_dim, config, True, not self.is_gpu)
        return not dispatch.obstacles(self.name, call)

    def config(self, **settings: Any) -> SageConfig:
        """These settings in small tiles."""
        return SageConfig(**{**self.small_tile, **settings})

    def those_it_runs(self, configs: Mapping[str, SageConfig]) -> dict[str, SageConfig]:
        return {name: config for name, config in configs.items() if self.runs(config)}


# --- Choosing sets and parameters --------------------------------------------------------------------------


def over(names: str, values: Callable[[KernelSet], Iterable[Any]]) -> pytest.MarkDecorator:
    """As ``pytest.mark.parametrize``, with values that depend on the kernel set. Several give products."""
    return pytest.mark.over(names, values)


def only(condition: Callable[[KernelSet], bool]) -> pytest.MarkDecorator:
    """Run the test for kernel sets that meet the condition."""
    return pytest.mark.only.with_args(condition)


def needs(**settings: Any) -> pytest.MarkDecorator:
    """Run the test for kernel sets that run these settings."""
    return only(lambda kernel_set: kernel_set.runs(SageConfig(**settings)))


def named(configs: Mapping[str, Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, with their names."""
    rows = ((name, x if isinstance(x, tuple) else (x,)) for name, x in configs.items())
    return [pytest.param(*values, id=name) for name, values in rows]


#: Run the test for the emulated CUDA kernels, too.
emulated_too = pytest.mark.emulated
#: Run the test for the reference, too, although it compares kernels with the reference.
reference_too = pytest.mark.reference
#: For what all kernel sets do alike: without a GPU the reference stands for them.
reference_first = only(lambda kernel_set: kernel_set.is_gpu or kernel_set.is_reference)
#: For what only depends on what is saved for backward. Without a GPU: Q, K and V themselves, and packed.
one_of_each_kind = only(lambda kernels: kernels.is_gpu or str(kernels) in ("reference-cpu", "ampere-cpu"))
kernels_only = only(lambda kernel_set: not kernel_set.is_reference)
on_gpu = only(lambda kernel_set: kernel_set.is_gpu)
triton_only = only(lambda kernel_set: kernel_set.name == "triton")

every_head_dim = over("head_dim", lambda kernel_set: kernel_set.head_dims)
#: The interpreter affords one of the two.
causal_first = over("is_causal", lambda kernel_set: [True, False] if kernel_set.is_gpu else [True])
full_first = over("is_causal", lambda kernel_set: [False, True] if kernel_set.is_gpu else [False])
causal_and_full = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])


# --- Triton ------------------------------------------------------------------------------------------------


def boundaries_of(lengths: Iterable[int], first: int = 0) -> list[int]:
    """The boundaries of documents of these lengths."""
    return list(accumulate(lengths, initial=first))


_LENGTHS = (
    (2, 2, True), (1, 70, False), (64, 65, False), (65, 63, True), (129, 128, True), (33, 150, True),
    (150, 33, True),
)  # fmt: skip
_PACKS = {
    "one": (70, [0, 70], 70, None),
    "two": (67, [0, 1, 67], 67, None),
    "several": (103, [0, 66, 67, 103], 103, None),
    "tokens of no document": (90, [3, 30, 80], 90, None),
    "empty documents": (70, [0, 0, 40, 40, 40, 70, 70], 70, None),
    "other keys": (60, [0, 25, 60], 110, [10, 20, 105]),
    "keys or queries missing": (60, [0, 20, 20, 60], 50, [0, 0, 15, 50]),
    "long": (1500, [0, 64, 128, 129, 700, 1499], 1500, None),
}


def _with_switches(config: SageConfig, smooth_k: bool, unsigned_p: bool) -> SageConfig:
    unsigned_p = unsigned_p and any(map(config.is_int8, P_MATMULS))
    return replace(config, smooth_k=smooth_k, unsigned_p=unsigned_p)


INTERPRETER = KernelSet(
    name="triton", device="cpu", gpu=None,
    why_unavailable=lambda: "a GPU is there: they are compiled" if torch.cuda.is_available() else None,
    head_dims=(32,), all_head_dims=(8, 80, 256), heads=(1, 1), tokens=70, poisoned_tokens=(0, 40, 69),
    short=(40, 40), small_tile={"block_q": 64, "block_kv": 64}, lengths=_LENGTHS,
    float64_sizes=((100, 64, 1),),
    packs=_PACKS, pack_heads={"others": (1, 1), "several": (2, 1), "two": (2, 2)},
    variants={}, main_variants=(), another_config=SageConfig(smooth_q=True, operand_scales="token"),
    any_lengths=st.integers(1, 50), any_head_dims=st.sampled_from([8, 16, 32, 40]),
    any_config=st.builds(
        _with_switches,
        st.builds(
            SageConfig, smooth_q=st.booleans(), operand_scales=st.sampled_from(["block", "token"]),
            granularity=st.sampled_from(["block", "row"]),
            int8_matmuls=st.sets(st.sampled_from(MATMULS)).map(tuple),
            block_q=st.sampled_from([32, 64]), block_kv=st.sampled_from([32, 64]),
        ),
        smooth_k=st.booleans(), unsigned_p=st.booleans(),
    ),
    examples=8,  # each has settings of its own, for which a GPU compiles kernels
    large_values=(300, 60000),
)  # fmt: skip

TRITON = replace(
    INTERPRETER, device="cuda", gpu=dispatch.ARCHITECTURES["8.0"],
    why_unavailable=lambda: None if torch.cuda.is_available() else "there is no GPU",
    all_head_dims=(8, 40, 64, 80, 128, 256), heads=(2, 1), short=(130, 200),
    lengths=(
        *_LENGTHS,
        *(
            (n_q, n_kv, is_causal)
            for n_q in (1, 2, 31, 64, 127, 128, 129, 257, 1000)
            for n_kv in (2, 32, 63, 65, 128, 255, 1000)
            for is_causal in (False, True)
            if n_q > 1 or not is_causal  # the only query would see one key
        ),
    ),
    float64_sizes=((150, 64, 1), (1024, 128, 4), (777, 80, 3)),
    variants={
        "smooth_v": SageConfig(smooth_v=True), "unsigned_p": SageConfig(unsigned_p=True),
        "consistent": SageConfig.consistent(),
    },
    main_variants=("unsigned_p", "consistent"), large_values=(100, 300, 1000, 3000, 10000, 60000),
    bf16_error=8e-3,  # steps of bf16 are 8 times those of fp16
)  # fmt: skip

#: Plain PyTorch: sizes of the interpreter, and any setting.
REFERENCE = replace(
    INTERPRETER, name="reference", is_reference=True, why_unavailable=lambda: None, examples=0
)

# --- Hopper ------------------------------------------------------------------------------------------------

_AROUND_TILES = (1, 63, 64, 65, 0, 127, 128, 129, 300, 2)
_EQUAL_LENGTHS = (2, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 300, 385, 1000)
_OTHER_LENGTHS = (
    (2, 65), (2, 1000), (31, 129), (31, 300), (63, 64), (63, 192), (64, 63), (64, 65), (64, 128), (65, 64),
    (65, 257), (127, 2), (127, 129), (128, 127), (128, 191), (129, 31), (129, 127), (129, 1000), (191, 65),
    (192, 128), (192, 257), (257, 2), (257, 256), (300, 64), (300, 1000), (1000, 31), (1000, 129),
    (1000, 300),
)  # fmt: skip
_LENGTHS_OF_HOPPER = (*((n, n) for n in _EQUAL_LENGTHS), *_OTHER_LENGTHS)

#: Of both CUDA kernel sets.
_CUDA_VARIANTS = {
    "smooth_v": SageConfig(smooth_v=True),
    "unsigned_p": SageConfig(unsigned_p=True),
    "16-bit O, dV": without_int8("o", "dv"),
    "consistent": SageConfig.consistent(),
    "unsigned_p, smooth_v": SageConfig(unsigned_p=True, smooth_v=True),
    "16-bit O": without_int8("o", unsigned_p=True),
    "16-bit dV": without_int8("dv", smooth_v=True),
    "compensate_o": without_int8("o", compensate_o=True),
    "strictly_causal": SageConfig.strictly_causal(),
    "token scales, unsigned_p, smooth_v": SageConfig(operand_scales="token", unsigned_p=True, smooth_v=True),
}
_MAIN_CUDA_VARIANTS = ("unsigned_p", "16-bit O, dV", "consistent", "strictly_causal")


def without_hopper() -> str | None:
    """Why the Hopper kernels cannot run on this machine; None if they can."""
    return _without(lambda capability: capability == dispatch.HOPPER)


def _without(is_right: Callable[[tuple[int, int]], bool]) -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU"
    capability = torch.cuda.get_device_capability()
    if not is_right(capability):
        return f"the GPU has compute capability {capability}"
    return dispatch.gpu_of(torch.cuda.current_device()).no_cuda_kernels


_INT8_SWITCHES = {name: st.booleans() for name in ("smooth_k", "smooth_v", "unsigned_p")}

HOPPER = KernelSet(
    name="hopper", device="cuda", gpu=dispatch.ARCHITECTURES["9.0"], why_unavailable=without_hopper,
    is_cuda=True, head_dims=(64, 128), all_head_dims=(40, 48, 56, 72, 80, 96, 104, 120), heads=(2, 1),
    tokens=140,
    poisoned_tokens=(0, 40, 69, 130, 139),  # both blocks of queries that share a tile of 128 keys, the next
    short=(130, 200),
    # Around blocks of 64 queries, work tiles of 128 and 192, blocks of 128 keys.
    lengths=(
        *((*n, causal) for n in _LENGTHS_OF_HOPPER for causal in (True, False)),
        *((1, n, False) for n in (2, 63, 128, 129, 1000)),
    ),
    float64_sizes=((150, 64, 1), (1024, 128, 4), (777, 80, 3), (1024, 64, 1), (777, 128, 1)),
    packs={
        "one": (300, [0, 300], 300, None),
        "around tiles": (879, boundaries_of(_AROUND_TILES), 879, None),
        "tokens of no document": (920, boundaries_of(_AROUND_TILES, 3), 920, None),
        "empty documents": (128, [0, 0, 0, 65, 65, 128, 128, 128], 128, None),
        "short documents": (310, boundaries_of((n % 6 for n in range(120)), 5), 310, None),
        "other keys": (
            620, boundaries_of((65, 1, 128, 300, 63, 2), 10),
            700, boundaries_of((129, 64, 300, 63, 2, 127), 7),
        ),
        "keys or queries missing": (
            400, boundaries_of((64, 0, 129, 65, 0, 100)), 330, boundaries_of((0, 130, 65, 0, 0, 130))
        ),
    },
    pack_heads={"others": (4, 2)},
    variants={
        **_CUDA_VARIANTS, "16-bit dQ": without_int8("dq"),
        "consistent, 16-bit dQ": without_int8("o", "dv", "dq", compensate_o=True),
        "S alone": without_int8("o", "dv", "dq", "dk"), "paper": SageConfig.paper(),
    },
    main_variants=(*_MAIN_CUDA_VARIANTS, "16-bit dQ", "consistent, 16-bit dQ", "S alone", "paper"),
    another_config=SageConfig(smooth_v=True, unsigned_p=True),
    any_lengths=st.integers(1, 400), any_head_dims=st.integers(5, 16).map(lambda n: 8 * n),
    any_config=st.one_of(
        st.builds(SageConfig, operand_scales=st.sampled_from(["block", "token"]), **_INT8_SWITCHES),
        st.builds(functools.partial(replace, SageConfig.paper()), **_INT8_SWITCHES),
    ),
    examples=90, large_values=(22, 24, 26, 28, 100, 300, 3000, 10000, 60000), exact_from=100,
)  # fmt: skip

#: Other tiles, and other loops, in which products of 64 channels take turns.
HOPPER_256 = replace(
    HOPPER, part="256", head_dims=(256,), all_head_dims=(136, 160, 192, 248),
    lengths=tuple(length for i, length in enumerate(HOPPER.lengths) if i % 3 == 0 or length[0] <= 65),
    float64_sizes=((150, 256, 1), (1024, 256, 2), (777, 200, 1)),
    variants=_CUDA_VARIANTS, main_variants=_MAIN_CUDA_VARIANTS,
    any_head_dims=st.integers(17, 32).map(lambda n: 8 * n),
    any_config=st.builds(SageConfig, operand_scales=st.sampled_from(["block", "token"]), **_INT8_SWITCHES),
    examples=30,
)  # fmt: skip

# --- Ampere ------------------------------------------------------------------------------------------------


#: The tiles and packed operands of Hopper, and others.
AMPERE = replace(
    HOPPER, name="ampere", gpu=dispatch.ARCHITECTURES["8.0"],
    backward_kernels=(f"{backward_source(DEFAULT_CONFIG.tile(64), 64)}_kernel",),
    why_unavailable=lambda: _without(lambda capability: capability >= dispatch.AMPERE),
    all_head_dims=(8, 32, *HOPPER.all_head_dims), any_head_dims=st.integers(1, 16).map(lambda n: 8 * n),
    variants={
        **_CUDA_VARIANTS, "paper": SageConfig.paper(), "dP in fp16": SageConfig(dp_fp16_accumulation=True),
        "row scales in 128 x 64": SageConfig(block_q=128, block_kv=64, unsigned_p=True),
        "dP in fp16, paper": replace(SageConfig.paper(), dp_fp16_accumulation=True),
    },
    main_variants=(*_MAIN_CUDA_VARIANTS, "paper"),
    extra_memory=2.25,  # one backward kernel needs all packed operands at once, and dQ in fp32
)  # fmt: skip

# --- CUDA sources on a CPU ---------------------------------------------------------------------------------


def _without_compiler() -> str | None:
    if torch.cuda.is_available():
        return "with a GPU at hand kernels are not emulated"
    return None if sources_on_cpu.has_compiler() else "there is no g++ that knows C++20"


_ON_CPU = {
    "device": "cpu", "is_emulated": True, "why_unavailable": _without_compiler, "head_dims": (64,),
    "heads": (4, 2), "poisoned_tokens": (0, 70, 139), "short": (65, 130), "examples": 0, "agrees_to": 2e-4,
}  # fmt: skip
EMULATED = (replace(HOPPER, **_ON_CPU), replace(AMPERE, **_ON_CPU))

#: All of them. Those on "cpu" run without a GPU, the others with ``-m gpu``.
KERNEL_SETS = (REFERENCE, INTERPRETER, *EMULATED, TRITON, HOPPER, HOPPER_256, AMPERE)
