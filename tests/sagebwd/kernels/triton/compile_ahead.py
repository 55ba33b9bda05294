"""Compile the kernels for GPUs that are not there, and print what each takes, a JSON object a line.

    python -m tests.sagebwd.kernels.triton.compile_ahead                   the whole grid, 20 minutes of one
    core
    python -m tests.sagebwd.kernels.triton.compile_ahead "90/*/default/*" "*/128/paper/attention"

A case is capability/head size/variant/kernels, and may be a shell pattern. The kernels go through their own
launchers, with a driver that only names a GPU and launches nothing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when the kernels are imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sagebwd import SageConfig
from sagebwd.interface import AttentionParams
from sagebwd.kernels.triton import launch as tiles
from sagebwd.kernels.triton import lse as sinks_and_lse
from sagebwd.kernels.triton.backward import backward
from sagebwd.kernels.triton.forward import forward
from sagebwd.window import FULL, Window
from tests.sagebwd.kernels.inputs import LAYOUTS
from tests.sagebwd.kernels.triton import ptx_addresses, wgmma_addresses

#: Bytes of shared memory that one CTA may take, by compute capability.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
HEAD_DIMS = (32, 64, 96, 128, 256)
ATTENTION_KERNELS = ("_forward_kernel", "_dk_dv_kernel", "_dq_kernel")
KERNELS = ("attention", "quantize")
TOKENS = 256


class Case(NamedTuple):
    """Which kernels are compiled, and for what."""

    capability: int
    head_dim: int
    variant: str
    kernels: str


class Variant(NamedTuple):
    """One way to call attention."""

    config: SageConfig = SageConfig()
    window: Window = Window.of(is_causal=True)
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int = 4
    packed: bool = False
    #: Of Q, K, V and dO: see ``LAYOUTS``.
    layouts: tuple[int, int, int, int] = (0, 0, 0, 0)


VARIANTS = {
    "default": Variant(), "paper": Variant(SageConfig.paper()), "window": Variant(window=Window(100, 20)),
    "strictly_causal": Variant(SageConfig.strictly_causal()), "packed_gqa": Variant(packed=True, kv_heads=2),
    "full_float16": Variant(window=FULL, dtype=torch.float16), "smooth_q": Variant(SageConfig(smooth_q=True)),
    "unsigned_p": Variant(SageConfig(unsigned_p=True)),
    "no_int8": Variant(SageConfig(int8_matmuls=(), compensate_o=True)),
    # LLVM of Triton 3.6 miscompiles this one at head sizes above 64, but for 9.0 and 10.0.
    "layouts": Variant(
        SageConfig(smooth_q=True, int8_matmuls=("s_fwd", "dv")), layouts=(1, 2, 3, 0), dtype=torch.float16
    ),
    # ptxas 12.8 miscompiles this one.
    "query_blocks": Variant(
        SageConfig(
            smooth_k=False, smooth_q=True, granularity="block", block_q=128, block_kv=64,
            int8_matmuls=("s_fwd", "o", "s_bwd", "dv", "dp", "dq"),
        ),
        dtype=torch.float16,
    ),
}  # fmt: skip


class AbsentGPU:
    """What Triton asks of a driver before it launches a kernel."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are cached by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(patterns: list[str]) -> None:
    """Compile the cases that any of the patterns names and print the records."""
    for case in (Case(*names) for names in product(SHARED_MEMORY, HEAD_DIMS, VARIANTS, KERNELS)):
        if any(fnmatchcase("/".join(map(str, case)), pattern) for pattern in patterns):
            for record in compile_case(case):
                limit = {"shared_limit": SHARED_MEMORY[case.capability]}
                print(json.dumps({**case._asdict(), **limit, **record}), flush=True)


def compile_case(case: Case) -> list[dict[str, Any]]:
    """One record for each kernel; of one that does not compile, its "error"."""
    records: dict[str, dict[str, Any]] = {}
    original, is_hopper = JITFunction.run, tiles.is_hopper

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> None:
        name = self.fn.__name__
        if (name in ATTENTION_KERNELS) != (case.kernels == "attention"):
            return
        try:
            compiled = original(self, *args, **{**options, "warmup": True})
        except Exception as error:
            records[f"{name} {error}"] = {"kernel": name, "error": f"{type(error).__name__}: {error}"}
            return
        if compiled.hash not in records:
            records[compiled.hash] = {"kernel": name, **describe(compiled)}
            if not VARIANTS[case.variant].packed:  # documents are loaded, and unknown
                called = dict(zip(self.arg_names, args, strict=False)) | options
                records[compiled.hash]["wrong_addresses"] += wrong_addresses(compiled, called)

    triton.runtime.driver.set_active(AbsentGPU(case.capability))
    JITFunction.run, tiles.is_hopper = compile_only, lambda _: case.capability == 90
    try:
        run(case.head_dim, VARIANTS[case.variant])
    finally:
        JITFunction.run, tiles.is_hopper = original, is_hopper
    return list(records.values())


def run(head_dim: int, variant: Variant) -> None:
    """A forward and backward pass through the launchers, on tensors that nothing reads."""
    batch, heads = (1 if variant.packed else 2), (4, variant.kv_heads, variant.kv_heads, 4)
    q, k, v, grad_out = (
        LAYOUTS[layout](torch.empty(batch, n, TOKENS, head_dim, dtype=variant.dtype))
        for layout, n in zip(variant.layouts, heads, strict=True)
    )
    cu_seqlens = torch.tensor([0, 100, TOKENS], dtype=torch.int32) if variant.packed else None
    params = AttentionParams(variant.window, head_dim**-0.5, variant.config, "triton", cu_seqlens)
    document = torch.zeros(TOKENS, dtype=torch.int64) if variant.packed else None
    saved = forward(q, k, v, params)
    lse = saved.lse
    if variant.config.smooths_k:
        lse = sinks_and_lse.shifted(q, lse, saved.k_mean, document, 1.0, 1.0, params.documents)
    saved, lse = sinks_and_lse.add_sinks(saved, lse, sinks := q.new_empty(4), params)
    dq, *_ = backward(grad_out, q, k, v, saved, params, lse)
    dq = dq if variant.config.smooths_k else None
    sinks_and_lse.finish_gradients(dq, q, saved, lse, lse, sinks, document, params)


def describe(compiled: Any) -> dict[str, Any]:
    """What a compiled kernel takes of a GPU, and which tensor-core instructions it has."""
    ptx = compiled.asm["ptx"]
    return {
        **registers_and_stack(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "instructions": tensor_core_instructions(ptx),
        "wrong_addresses": wgmma_addresses.wrong_addresses(compiled.asm["cubin"]) if "wgmma" in ptx else [],
        "atomics": len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", ptx, re.MULTILINE)),
    }


def wrong_addresses(compiled: Any, called: dict[str, Any]) -> list[str]:
    """Of the first two CTAs and the last one, in a call with these arguments."""
    names = compiled.src.signature
    arguments = [x for name in names for x in passed(names[name], called[name])]
    storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
    launch = ptx_addresses.Launch(
        parameters=[parameter(x) for x in arguments] + 2 * [0],  # scratch memory, of which there is none
        memory=[(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages],
        ctas=sorted({0, 1, called["grid"][0] - 1}),
        threads=32 * compiled.metadata.num_warps,
        shared=compiled.metadata.shared,
    )
    return ptx_addresses.wrong_addresses(compiled.asm["ptx"], launch)


def passed(kind: Any, value: Any) -> Iterator[Any]:
    """The values of an argument, which may be a tuple of tuples, that are not compiled into the kernel."""
    if isinstance(kind, tuple):
        for own in zip(kind, value, strict=True):
            yield from passed(*own)
    elif kind != "constexpr":
        yield value


def parameter(value: Any) -> int | None:
    """As the kernel gets it; None for a float."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return None if isinstance(value, float) else int(value)


def registers_and_stack(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack, which is where spills go, of one thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack": int(stack)}


def tensor_core_instructions(ptx: str) -> dict[str, int]:
    """How many of each, such as {"wgmma s8": 12, "mma.sync bf16": 8}."""
    # wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 and mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    found = re.findall(r"(wgmma|mma\.sync)\S*\.(s8|f16|bf16)\.\2\b", ptx)
    # tcgen05.mma.cta_group::1.kind::f16; that kind is for bf16 too.
    found += re.findall(r"(tcgen05)\.mma\S*kind::(f16|i8)\b", ptx)
    return dict(Counter(" ".join(pair) for pair in found))


if __name__ == "__main__":
    main(sys.argv[1:] or ["*"])
