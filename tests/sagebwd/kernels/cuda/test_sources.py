"""packing.cu and the shared headers compile for every GPU that kernel sets are planned for; needs no GPU."""

import pytest

from sagebwd.kernels.cuda.compile import SHARED, Sources, compile_source

pytestmark = pytest.mark.usefixtures("nvrtc")

every_architecture = pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
HEADERS = sorted(path.name for path in SHARED.glob("*.cuh"))


@every_architecture
def test_packing_compiles(architecture):
    defines = {"HEAD_DIM": 64, "IS_BF16": True}
    cubin, _ = compile_source(Sources(architecture, (SHARED,)), "packing", defines)
    assert b".text.pack_grad_kernel" in cubin


@every_architecture
@pytest.mark.parametrize("header", HEADERS)
def test_headers_compile_alone(tmp_path, header, architecture):
    """No header needs another to be included before it, nor an instruction that only some GPUs have."""
    (tmp_path / "alone.cu").write_text(
        f'#include "{header}"\nextern "C" __global__ void empty_kernel() {{}}\n'
    )
    compile_source(Sources(architecture, (tmp_path, SHARED)), "alone", {"HEAD_DIM": 128, "IS_CAUSAL": 1})
