"""packing.cu compiles for every GPU that kernel sets are planned for; needs no GPU."""

import pytest

from sagebwd.kernels.cuda.compile import SHARED, Sources, compile_source

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_packing_compiles(architecture):
    defines = {"HEAD_DIM": 64, "IS_BF16": True}
    cubin, _ = compile_source(Sources(architecture, (SHARED,)), "packing", defines)
    assert b".text.pack_grad_kernel" in cubin
