"""The assembler of the attention kernels on Hopper: not the one that Triton takes.

NVIDIA's ptxas 12.8, with which Triton 3.6 and 3.7 assemble for Hopper, miscompiles some kernels: it adds the
offset of a slice of a tile to a register that holds something else, and wgmma reads shared memory at that
address. Seen as an illegal memory access with a block of 128 queries; kernels of 3 in 75 random settings have
it, those of the presets do not. The kernels that ptxas 12.9 and 13.1 make of the same PTX do not have it,
and Triton ships one of these for Blackwell. ``tests/sagebwd/kernels/triton/wgmma_addresses.py`` finds such
addresses in machine code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

HOPPER = "sm90"
#: The first version of ptxas without the mistake.
FIRST_RIGHT = (12, 9)


def with_right_addresses(kernel: Any) -> Any:
    """Decorate a kernel: for Hopper it is assembled by a ptxas that gets the addresses of wgmma right."""
    compile_kernel = getattr(kernel, "_do_compile", None)
    if compile_kernel is None:  # Triton's interpreter compiles nothing
        return kernel

    def compile_for_hopper(
        key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *rest: Any
    ) -> Any:
        if options.arch != HOPPER or is_right(triton.knobs.nvidia.ptxas):
            return compile_kernel(key, signature, device, constexprs, options, *rest)
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas_blackwell.path
            # Triton's cache does not tell the two assemblers apart, but it does their options. This one is
            # ptxas's default, so it changes nothing else.
            options = replace(options, ptx_options=f"{options.ptx_options or ''} --opt-level=3".strip())
            return compile_kernel(key, signature, device, constexprs, options, *rest)

    kernel._do_compile = compile_for_hopper
    return kernel


def is_right(ptxas: Any) -> bool:
    """Whether this ptxas, as Triton describes it, is free of the mistake."""
    return tuple(map(int, ptxas.version.split("."))) >= FIRST_RIGHT
