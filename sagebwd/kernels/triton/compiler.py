"""How kernels are compiled: around two mistakes of what Triton 3.6 brings, seen as illegal memory accesses.

**LLVM's poison.** Its vectorizer joins two operations on addresses and computes both for both lanes. Flags
such as nuw ("no bit is lost") then also stand where they do not hold, at results that nobody takes: in LLVM's
terms these are poison. But where such a pair goes from one basic block to another, it becomes one register
of 64 bits, in which the bits that are lost land in the other lane, a wrong address. So operations on vectors
lose their flags first. Seen for 8.0, 8.6, 8.9 and 12.0; Triton 3.7 makes right code of the same.
``tests/sagebwd/kernels/triton/ptx_addresses.py`` follows the addresses of a kernel.

**ptxas 12.8**, with which Triton 3.6 and 3.7 assemble for Hopper, adds the offset of a slice of a tile to a
register that holds something else, and wgmma reads shared memory at that address. Seen with a block of 128
queries; kernels of 3 in 75 random settings have it, those of the presets do not. The kernels that ptxas 12.9
and 13.1 make of the same PTX do not have it, and Triton ships one of these for Blackwell.
``tests/sagebwd/kernels/triton/wgmma_addresses.py`` finds such addresses in machine code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton

from sagebwd.kernels.triton.operands import SIZES

HOPPER = "sm90"
#: The first version of ptxas, and of Triton, without the mistake.
FIRST_RIGHT, FIRST_RIGHT_TRITON = (12, 9), (3, 7)
#: An operation on vectors of integers, and the flags that make poison of some results.
VECTOR = re.compile(r"^ +%\S+ = .*<\d+ x i\d+>.*$", re.MULTILINE)
FLAGS = re.compile(r"\b(?:nuw|nsw|exact|disjoint|nneg|samesign) ")


def kernel(function: Callable[..., None]) -> Any:
    """Decorate a function that is launched: ``triton.jit``, without either mistake."""
    jitted = triton.jit(function, do_not_specialize=SIZES)
    compile_kernel = getattr(jitted, "_do_compile", None)
    if compile_kernel is None:  # Triton's interpreter compiles nothing
        return jitted

    def compile_right(
        key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *rest: Any
    ) -> Any:
        knobs = triton.knobs
        needs_ptxas = options.arch == HOPPER and not is_right(knobs.nvidia.ptxas)
        if not needs_ptxas and not leaks_poison():
            return compile_kernel(key, signature, device, constexprs, options, *rest)
        with knobs.nvidia.scope(), knobs.runtime.scope():
            if needs_ptxas:
                knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
            if leaks_poison():
                knobs.runtime.add_stages_inspection_hook = remove_flags
            # Triton's cache does not tell what is compiled so from the rest, but it does their options. This
            # one is ptxas's default, so it changes nothing else.
            options = replace(options, ptx_options=f"{options.ptx_options or ''} --opt-level=3".strip())
            return compile_kernel(key, signature, device, constexprs, options, *rest)

    jitted._do_compile = compile_right
    return jitted


def leaks_poison() -> bool:
    """Whether this Triton's LLVM lets one lane of a vector change another."""
    return tuple(map(int, triton.__version__.split(".")[:2])) < FIRST_RIGHT_TRITON


def remove_flags(backend: Any, stages: dict[str, Callable[..., Any]], *_: Any) -> None:
    """A hook of Triton's, called with the stages of a compilation: LLVM IR ends without flags on vectors."""
    make_llir = stages["llir"]

    def make_llir_without(module: Any, metadata: Any) -> str:
        return VECTOR.sub(lambda line: FLAGS.sub("", line[0]), make_llir(module, metadata))

    stages["llir"] = make_llir_without


def is_right(ptxas: Any) -> bool:
    """Whether this ptxas, as Triton describes it, is free of the mistake."""
    return tuple(map(int, ptxas.version.split("."))) >= FIRST_RIGHT
