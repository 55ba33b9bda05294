"""Wrong addresses are found in PTX: outside of memory, not aligned, and by lanes that overflow."""

import pytest

from tests.sagebwd.kernels.triton.ptx_addresses import Launch, wrong_addresses

#: Threads below param_1 store 4 bytes of two rows each, at param_0 + 128 · (2 · CTA + row) + 4 · thread.
STORE = """
.visible .entry store(.param .u64 store_param_0, .param .u32 store_param_1) {
    ld.param.b64 %rd1, [store_param_0]; ld.param.b32 %r1, [store_param_1];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x;
    setp.lt.s32 %p1, %r2, %r1;
    mov.b32 %r5, 0;
$L__BB0_1:
    mad.lo.s32 %r4, %r3, 2, %r5;
    shl.b32 %r4, %r4, 7;
    cvt.s64.s32 %rd2, %r4;
    mad.wide.u32 %rd2, %r2, 4, %rd2;
    add.s64 %rd3, %rd1, %rd2;
    @%p1 st.global.b32 [%rd3 + 0], %r2;
    add.s32 %r5, %r5, 1;
    setp.lt.s32 %p2, %r5, 2;
    @%p2 bra $L__BB0_1;
    ret;
}
"""
#: Two values in one register: thread · 2²⁸, cut to 32 bits, and 16 · (thread mod 4), an address.
LANES = """
.visible .entry lanes() {
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; cvt.u64.u32 %rd2, %r2; shl.b64 %rd2, %rd2, 36;
    MULTIPLY
    or.b64 %rd3, %rd1, %rd2; mov.b64 {_, %r3}, %rd3;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];
    ret;
}
"""


@pytest.mark.parametrize(
    ("active", "address", "memory", "why"),
    [
        (32, 4096, 512, None),
        (31, 4096, 508, None),
        (32, 4096, 508, "CTA 1: @%p1 st.global.b32 [%rd3 + 0], %r2: 4 bytes at 0x11fc are not the kernel's"),
        (32, 4095, 512, "CTA 0: @%p1 st.global.b32 [%rd3 + 0], %r2: 4 bytes at 0xfff are not the kernel's"),
        (32, 4098, 512, "CTA 0: @%p1 st.global.b32 [%rd3 + 0], %r2: 4 bytes at 0x1002 are not aligned"),
    ],
)
def test_of_a_loop_over_rows(active, address, memory, why):
    launch = Launch(
        [address, active], [(4096, 4096 + memory + address % 4)], ctas=(0, 1), threads=32, shared=0
    )
    assert wrong_addresses(STORE, launch) == ([why] if why else [])


@pytest.mark.parametrize(
    ("multiply", "is_wrong"),
    [("shl.b32 %r8, %r1, 28; cvt.u64.u32 %rd1, %r8;", False), ("mul.wide.u32 %rd1, %r1, 268435456;", True)],
)
def test_of_a_lane_that_overflows(multiply, is_wrong):
    launch = Launch([], [], ctas=(0,), threads=64, shared=64)
    assert bool(wrong_addresses(LANES.replace("MULTIPLY", multiply), launch)) == is_wrong
