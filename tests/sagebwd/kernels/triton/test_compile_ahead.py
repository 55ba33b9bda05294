"""The kernels, compiled for GPUs that are not there: they fit, do not spill, and use INT8 tensor cores."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatchcase

import pytest
import triton

from sagebwd.kernels.triton.compiler import is_right, leaks_poison
from tests.cli import ROOT

#: Bytes of stack of a thread; what does not fit in registers goes there. Other variants than the default
#: may spill more, but not without bound.
STACK, STACK_OF_VARIANTS = 512, 1024

ATTENTION_KERNELS = {"_forward_kernel", "_dk_dv_kernel", "_dq_kernel"}


#: Settings whose kernels ptxas 12.8 and LLVM of Triton 3.6 miscompile.
MISCOMPILED, MISCOMPILED_BY_LLVM = "90/32/query_blocks/attention", "86/128/layouts/attention"
#: Cases of compile_ahead.py. CUDA kernels run most settings; these are some that they do not run: on consumer
#: Ampere, and on data-center Blackwell one for which Triton needs help. Hopper's: `make oldest`.
CASES = ["86/128/smooth_q/*", "100/64/paper/attention", MISCOMPILED]
#: A Hopper GPU runs these, and other tests see its spills.
CASES_OF_HOPPER = ["90/256/default/*", "90/128/paper/attention", "90/64/window/attention"]

FREE = "this Triton is free of it"


def compile_ahead(names, cache, change="pass"):
    """What compile_ahead.py prints, after a statement that may change ``compiler``."""
    program = (
        "import sys; from sagebwd.kernels.triton import compiler; "
        "from tests.sagebwd.kernels.triton.compile_ahead import main; "
        f"{change}; main(sys.argv[1:])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES_OF_HOPPER, marks=pytest.mark.gpu)])
def test_kernels_compile_fit_and_use_tensor_cores(cases, tmp_path):
    records = compile_ahead(cases, tmp_path)
    failures = [(failure, record) for record in records for failure in failures_of(record)]
    assert not failures, "\n".join(f"{failure}: {json.dumps(record)}" for failure, record in failures)
    compiled = defaultdict(set)
    for record in records:
        case = "/".join(str(record[name]) for name in ("capability", "head_dim", "variant", "kernels"))
        compiled[case].add(record["kernel"])
    for pattern in cases:
        found = {case: names for case, names in compiled.items() if fnmatchcase(case, pattern)}
        assert found, f"nothing was compiled for {pattern}"
        for case, names in found.items():
            assert names >= (
                ATTENTION_KERNELS if case.endswith("attention") else {"_quantize_grad_kernel"}
            ), case


@pytest.mark.gpu  # it runs anywhere, but takes long
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        pytest.param(
            MISCOMPILED,
            "FIRST_RIGHT",
            marks=pytest.mark.skipif(is_right(triton.knobs.nvidia.ptxas), reason=FREE),
        ),
        pytest.param(
            MISCOMPILED_BY_LLVM,
            "FIRST_RIGHT_TRITON",
            marks=pytest.mark.skipif(not leaks_poison(), reason=FREE),
        ),
    ],
)
def test_mistakes_of_compilers_are_found_out(setting, name, tmp_path):
    """If this fails, part of sagebwd/kernels/triton/compiler.py may no longer be needed."""
    records = compile_ahead([setting], tmp_path, f"compiler.{name} = (0, 0)")
    assert [record["kernel"] for record in records if record["wrong_addresses"]] == ["_dk_dv_kernel"]


def failures_of(record):
    """What is wrong with one kernel, in words."""
    if "error" in record:
        yield "does not compile"
        return
    if record["shared"] > record["shared_limit"]:
        yield "takes more shared memory than there is"
    if record["stack"] > (STACK if record["variant"] == "default" else STACK_OF_VARIANTS):
        yield "spills"
    if record["atomics"]:
        yield "has atomics, so two runs may differ"
    if record["wrong_addresses"]:
        yield "accesses memory that is not its own"
    if record["kernels"] == "attention" and record["variant"] != "query_blocks":
        yield from wrong_instructions(record)


def wrong_instructions(record):
    """Which tensor-core instructions are missing, or should not be there."""
    found = record["instructions"]
    int8 = [name for name in found if name.endswith(("s8", "i8"))]
    sixteen_bit = [name for name in found if name.endswith("f16")]
    if bool(int8) != (record["variant"] != "no_int8"):
        yield f"INT8 instructions: {int8}"
    # dP is the one product of 16 bits in the default; the forward has none.
    if bool(sixteen_bit) != (record["kernel"] != "_forward_kernel" or record["variant"] == "no_int8"):
        yield f"16-bit instructions: {sixteen_bit}"
    # wgmma is about twice as fast. It takes 64 rows, and at a head size of 256 the backward owns 32.
    small = record["head_dim"] == 256 and record["kernel"] != "_forward_kernel"
    if record["capability"] == 90 and not small and any("mma.sync" in name for name in found):
        yield "no wgmma on Hopper"
