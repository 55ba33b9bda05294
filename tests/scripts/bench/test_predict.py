"""scripts.bench.predict: what it reads from machine code, compared with counts by hand and with shapes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import product

import pytest

from sagebwd import SageConfig
from sagebwd.kernels.cuda.compile import why_no_compiler
from scripts.bench import predict, sass
from scripts.bench.attention_peers import CONFIGS
from scripts.bench.gpu_rates import GPUS, cycles_of
from scripts.bench.sass_loops import Program

#: A loop over tiles as ptxas writes it: an inner loop of 0x80 / 0x40 iterations, two ways through a branch, a
#: copy that is not always made, one instruction that is never executed, and a loop that waits.
SAMPLE = """
	.target	sm_89
	.section	.text.other_kernel,"ax",@progbits
other_kernel:
        /*0000*/                   EXIT ;
	.section	.text.some_kernel,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=252"
some_kernel:
.text.some_kernel:
        /*0000*/                   S2R R9, SR_TID.X ;
        /*0010*/               @P3 EXIT ;
.L_x_0:
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   IMMA.16832.S8.S8 R32, R96.ROW, R34.COL, R76 ;
        /*0040*/                   IMAD.MOV.U32 R148, RZ, RZ, RZ ;
.L_x_1:
        /*0050*/                   LDSM.16.M88.4 R28, [R151+0x400] ;
        /*0060*/                   HMMA.16816.F32.BF16 R136, R72.reuse, R28, R136 ;
        /*0070*/                   IADD3 R148, R148, 0x40, RZ ;
        /*0080*/                   ISETP.GE.U32.AND P1, PT, R148, 0x80, PT ;
        /*0090*/              @!P1 BRA `(.L_x_1) ;
        /*00a0*/               @P1 BRA P2, `(.L_x_2) ;
        /*00b0*/                   FMUL R1, R1, R2 ;
        /*00c0*/                   FADD R1, R1, R3 ;
        /*00d0*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*00e0*/                   FFMA R1, R1, R2, R3 ;
.L_x_3:
        /*00f0*/               @P4 BRA `(.L_x_5) ;
        /*0100*/                   IMAD.MOV.U32 R31, RZ, RZ, R9 ;
.L_x_4:
        /*0110*/                   IADD3 R30, R31, 0x1000, RZ ;
        /*0120*/                   ISETP.GE.AND P2, PT, R31, 0x2210, PT ;
        /*0130*/              @!PT LDS RZ, [RZ] ;
        /*0140*/                   LDGSTS.E.BYPASS.128 [R31+0x6400], [R28.64] ;
        /*0150*/                   IMAD.MOV.U32 R31, RZ, RZ, R30 ;
        /*0160*/              @!P2 BRA `(.L_x_4) ;
.L_x_5:
        /*0170*/                   LDG.E.STRONG.GPU R29, [R30.64] ;
        /*0180*/                   ISETP.NE.AND P2, PT, R29, R210, PT ;
        /*0190*/               @P2 BRA `(.L_x_5) ;
        /*01a0*/                   MUFU.EX2 R5, R5 ;
        /*01b0*/              @!P6 CALL.REL.NOINC `(.L_x_6) ;
        /*01c0*/                   BRA `(.L_x_0) ;
.L_x_6:
        /*01d0*/                   STG.E.128 [R2.64], R4 ;
        /*01e0*/                   EXIT ;
.L_x_7:
        /*01f0*/                   BRA `(.L_x_7);
"""
TILE = Counter(
    {
        "BAR.SYNC.DEFER_BLOCKING": 1, "IMMA.16832.S8.S8": 1, "IMAD.MOV.U32": 1 + 1 + 4, "LDSM.16.M88.4": 2,
        "HMMA.16816.F32.BF16": 2, "IADD3": 2 + 4, "ISETP.GE.U32.AND": 2, "BRA": 2 + 1 + 1 + 4 + 1 + 1,
        "FFMA": 1, "ISETP.GE.AND": 4, "NOP": 4, "LDGSTS.E.BYPASS.128": 4, "LDG.E.STRONG.GPU": 1,
        "ISETP.NE.AND": 1, "MUFU.EX2": 1, "CALL.REL.NOINC": 1,
    }
)  # fmt: skip


def test_a_tile_is_counted_as_by_hand():
    """Addresses 0, 0x1000, 0x2000 and 0x3000 are copied: the last is the first that is not below 0x2210."""
    program = Program(SAMPLE, "some_kernel")
    assert program.per_iteration() == TILE
    assert program.outside() == Counter({"S2R": 1, "EXIT": 2, "STG.E.128": 1})


#: Two kinds of warps: threads from 96 on go to .L_x_9, copy, and multiply less. They count what they copy
#: from 16 · thread − 0x800 on.
TWO_KINDS = """
	.target	sm_90
	.section	.text.two_kinds_kernel,"ax",@progbits
two_kinds_kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   IMAD.SHL.U32 R1, R0, 0x10, RZ ;
        /*0020*/                   VIADD R2, R1, 0xfffff800 ;
        /*0030*/                   ISETP.GE.U32.AND P0, PT, R0, 0x60, PT ;
        /*0040*/               @P0 BRA `(.L_x_9) ;
        /*0050*/               @P1 BRA `(.L_x_8) ;
.L_x_7:
        /*0060*/                   IMMA.16832.S8.S8 R32, R96.ROW, R34.COL, R76 ;
        /*0070*/                   IMMA.16832.S8.S8 R36, R96.ROW, R34.COL, R76 ;
        /*0080*/              @!P6 BRA `(.L_x_7) ;
.L_x_8:
        /*0090*/                   STG.E.128 [R2.64], R4 ;
        /*00a0*/                   EXIT ;
.L_x_9:
        /*00b0*/               @P1 EXIT ;
.L_x_10:
        /*00c0*/                   MOV R3, R2 ;
.L_x_11:
        /*00d0*/                   IADD3 R3, R3, 0x200, RZ ;
        /*00e0*/                   LDGSTS.E.BYPASS.128 [R31+0x6400], [R28.64] ;
        /*00f0*/                   ISETP.GE.AND P2, PT, R3, 0x200, PT ;
        /*0100*/              @!P2 BRA `(.L_x_11) ;
        /*0110*/                   IMMA.16832.S8.S8 R32, R96.ROW, R34.COL, R76 ;
        /*0120*/               @P3 BRA `(.L_x_12) ;
        /*0130*/                   STG.E [R2.64], R4 ;
        /*0140*/                   BRA `(.L_x_13) ;
.L_x_12:
        /*0150*/                   REDG.E.ADD.F32 [R2.64], R4 ;
        /*0160*/                   REDG.E.ADD.F32 [R2.64], R5 ;
.L_x_13:
        /*0170*/              @!P6 BRA `(.L_x_10) ;
        /*0180*/                   EXIT ;
"""


def test_each_kind_of_warps_has_its_loop():
    """Thread 96 counts from -0x200 on, so that it copies twice; no kind executes what another does."""
    program = Program(TWO_KINDS, "two_kinds_kernel", (3, 2))
    assert program.per_iteration(0) == Counter({"IMMA.16832.S8.S8": 2, "BRA": 1})
    of_others = program.per_iteration(1)
    assert of_others == Counter(
        {
            "MOV": 1, "IADD3": 2, "LDGSTS.E.BYPASS.128": 2, "ISETP.GE.AND": 2, "BRA": 2 + 2,
            "IMMA.16832.S8.S8": 1, "REDG.E.ADD.F32": 2,
        }
    )  # fmt: skip
    before = Counter({"S2R": 1, "IMAD.SHL.U32": 1, "VIADD": 1, "ISETP.GE.U32.AND": 1, "BRA": 1})
    assert program.outside(0) == before + Counter({"BRA": 1, "STG.E.128": 1, "EXIT": 1})
    assert program.outside(1) == before + Counter({"EXIT": 2})
    both = predict.of_all_warps([program.per_iteration(0), of_others], (3, 2))
    assert predict.products_found(both) == {"IMMA": 3 * 2 + 2 * 1}
    assert cycles_of(both, GPUS["H200"]).units["shared memory"] == 2 * (2 * 4 + 2)
    message = "two_kinds_kernel has 2 outermost loops with tensor-core instructions, but 1 kind"
    with pytest.raises(ValueError, match=message):
        Program(TWO_KINDS, "two_kinds_kernel")


def test_cycles_are_work_over_rates():
    """Eight warps on an RTX 4090, unit by unit from its published rates."""
    cycles = cycles_of(predict.of_all_warps([TILE], [8]), GPUS["RTX 4090"])
    assert cycles.units == {
        "tensor": 8 * (16 * 8 * 32 / 1024 + 2 * 16 * 8 * 16 / 256),
        "FP32": 8 * 32 * max((1 + 6) / 128, 6 / 64),
        "ALU": 8 * 32 * (6 + 7) / 64,
        "special functions": 8 * 32 * 1 / 16,
        "shared memory": 8 * (2 * 4 + 4 * 4 + 1),
        "issue": 8 * TILE.total() / 4,
    }
    assert cycles.bound == max(cycles.units.values())
    assert cycles.without_overlap == cycles.tensor + 8 * (2 * 4 + 4 * 4 + 1)
    assert {*cycles.issue_only} == {"BAR.SYNC.DEFER_BLOCKING", "BRA", "NOP", "CALL.REL.NOINC"}
    with pytest.raises(ValueError, match=r"HMMA\.1688\.F32 has another shape than IMMA"):
        cycles_of(Counter({"HMMA.1688.F32": 1}), GPUS["A100"])


def test_predicates_can_count_to_two():
    """As on sm_120: a loop goes on while it finds a predicate true, and clears it."""
    changes = {
        "IMAD.MOV.U32 R148, RZ, RZ, RZ": "UPLOP3.LUT UP0, UPT, UPT, UPT, UPT, 0x80, 0x8",
        "IADD3 R148, R148, 0x40, RZ": "UPLOP3.LUT UP2, UPT, UPT, UPT, UP0, 0x80, 0x8",
        "ISETP.GE.U32.AND P1, PT, R148, 0x80, PT": "UPLOP3.LUT UP0, UPT, UPT, UPT, UPT, 0x40, 0x4",
        "@!P1 BRA `(.L_x_1)": "     BRA.U UP2, `(.L_x_1)",
    }
    text = SAMPLE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert Program(text, "some_kernel").per_iteration()["HMMA.16816.F32.BF16"] == 2


def test_what_cannot_be_counted_is_an_error():
    with pytest.raises(ValueError, match="no kernel 'absent_kernel'"):
        Program(SAMPLE, "absent_kernel")
    with pytest.raises(ValueError, match="other_kernel has 0 outermost loops with tensor-core instructions"):
        Program(SAMPLE, "other_kernel")
    endless = SAMPLE.replace("R148, 0x80, PT", "R148, R7, PT")
    with pytest.raises(ValueError, match="the loop at 0x50 does not count up to a constant"):
        Program(endless, "some_kernel").per_iteration()


def test_without_a_disassembler_the_message_says_what_to_install(monkeypatch):
    def nothing(package):
        raise sass.PackageNotFoundError(package)

    monkeypatch.setattr(sass, "distribution", nothing)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        sass.disassemble(b"")


needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))

#: (pass, preset, head size): threads that copy a tile's operands, the bytes of each copy.
COPIES = {
    ("forward", "default", 64): (128, [128 * 64, 16, 128 * 64]),
    ("backward", "default", 64): (128, [64 * (3 * 64 + 8) + 16, 64 * 2 * 64]),
    ("backward", "default", 128): (256, [64 * (3 * 128 + 8) + 16, 64 * 2 * 128]),
    ("backward", "paper", 64): (128, [128 * (3 * 64 + 8) + 16, 128 * 2 * 64]),
}


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize(("which", "preset", "head_dim"), COPIES, ids=str)
def test_the_kernels_have_the_products_and_copies_that_a_tile_needs(which, preset, head_dim, architecture):
    """Of all warps; copies of 16 bytes by some threads, of which the last may be partly idle."""
    text = predict.machine_code(which, preset, head_dim, "causal", architecture)
    config = CONFIGS[preset][1]
    source = predict.source_of(which, head_dim, config)
    program = Program(text, f"{source}_kernel", predict.warps_of(source))
    kinds = range(len(program.warps))
    counts = predict.of_all_warps([program.per_iteration(kind) for kind in kinds], program.warps)
    # The products of a tile by hand: (rows, columns, depth) of each, in steps of 16 x 8 results.
    queries, keys = predict.tile_of(which, head_dim, config)
    of_s, of_keys = (keys, queries, head_dim), (keys, head_dim, queries)
    of_queries = (queries, head_dim, keys)
    int8 = [of_s, of_queries] if which == "forward" else [of_s, of_keys, of_keys, of_queries]
    needed = {"IMMA": sum(rows // 16 * (columns // 8) * (depth // 32) for rows, columns, depth in int8)}
    if which == "backward":
        needed["HMMA"] = keys // 16 * (queries // 8) * (head_dim // 16)  # dP
    assert predict.products_found(counts) == needed == predict.products_needed(which, head_dim, config)
    threads, sizes = COPIES[which, preset, head_dim]
    copies = sum(-(-size // (threads * 16)) for size in sizes)
    # Both halves of the forward's warps run one loop. The first half copies, and its path is taken for all.
    executing = 2 * threads if which == "forward" else threads
    assert counts["LDGSTS.E.BYPASS.128"] * 32 == copies * executing
    added = sum(count for opcode, count in counts.items() if opcode.startswith(("RED.E.ADD", "REDG.E.ADD")))
    assert added * 32 == (queries * head_dim if which == "backward" else 0)  # dQ


@needs_compiler
def test_the_command_writes_what_it_predicts(tmp_path, capsys):
    out = tmp_path / "predicted"
    options = ["--gpus", "RTX 4090", "--head-dims", "64", "--masks", "causal", "--presets", "default"]
    predict.main([*options, "--out", str(out)])
    assert "Predictions, not measurements" in capsys.readouterr().out
    result = json.loads(out.with_suffix(".json").read_text())
    assert [row["kernel"] for row in result["kernels"]] == ["forward", "backward"]
    assert [row["warps"] for row in result["kernels"]] == [[8], [8, 4]]
    rows = {row["tokens"]: row for row in result["rows"]}
    assert [*rows] == predict.LENGTHS
    assert all(row["no_overlap"] < row["overlap"] for row in rows.values())
    assert (rows[8192]["flash"], rows[8192]["paper"]) == (143, 248)
    forward, backward = (kernel["cycles"]["tensor"] for kernel in result["kernels"])
    peak = 3.5 * 4 * 64 * 128 * 64 / (forward / 2 + backward) * 128 * 2.52e-3  # if tensor cores never waited
    assert 0.9 * peak < rows[32768]["overlap"] < peak


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 1000])
def test_tiles_are_those_with_a_visible_pair(tokens, is_causal):
    """By trying all pairs of blocks."""
    for which, (queries, keys) in product(predict.PASSES, [(128, 128), (64, 128), (128, 64)]):
        blocks = [(i, j) for i in range(0, tokens, queries) for j in range(0, tokens, keys)]
        seen = [(i, j) for i, j in blocks if not is_causal or min(i + queries, tokens) > j]
        ctas = len({(i if which == "forward" else j) for i, j in blocks})
        assert predict.work_of(which, (queries, keys), tokens, is_causal) == (len(seen), ctas)


def test_a_setting_has_its_products_and_bytes():
    """paper(): tiles of 128 x 64. 16-bit P: O and dV are no INT8 products, and V and dO are not quantized."""
    paper, p_16bit = CONFIGS["paper"][1], CONFIGS["16-bit-p"][1]
    assert predict.tile_of("forward", 64, paper) == predict.tile_of("backward", 128, paper) == (128, 64)
    one = 128 // 16 * (64 // 8) * 128  # rows, columns, depth of S at D 128
    assert predict.products_needed("backward", 128, paper) == {"IMMA": 4 * one // 32, "HMMA": one // 16}
    assert predict.products_needed("forward", 128, p_16bit) == {"IMMA": 2 * one // 32, "HMMA": 2 * one // 16}
    assert predict.products_needed("backward", 64, p_16bit) == {"IMMA": 3 * one // 2 // 32, "HMMA": one // 16}
    # Bytes read and written by each packing kernel: mean of K; Q; K and V; K by columns; Q, dO and O.
    assert predict.packing_bytes(SageConfig()) == 2 + 3 + (4 + 2) + (5 + 2)
    assert predict.packing_bytes(p_16bit) == 2 + 3 + (2 + 1) + (5 + 1)


def test_published_peaks_are_the_rates():
    for gpu in GPUS.values():
        peak = 2 * gpu.bits16 * gpu.sms * gpu.clock_ghz * 1e9 / 1e12
        assert peak == pytest.approx(gpu.bf16_peak, rel=0.02)
