"""What GPUs since Ampere execute per cycle, as published, and which unit executes which instruction.

Sources:
  guide        NVIDIA, CUDA C++ Programming Guide (until 12) and Best Practices Guide (13), "Throughput of
               Native Arithmetic Instructions": results per cycle and SM
  profiler     NVIDIA, Nsight Compute Profiling Guide, "Pipelines": which unit executes what
  whitepapers  NVIDIA A100, GA102, Ada, RTX Blackwell: SMs, boost clock, memory, dense tensor-core peaks. A
               rate is the peak / 2 / SMs / clock.
  FA2          Dao, FlashAttention-2, arXiv 2307.08691: at most 73% of the peak on an A100
  paper        SageBwd, arXiv 2603.02170, Figures 2 and 3: FlashAttention-2 at 90 to 95% of an RTX 4090's peak
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

WARP = 32
#: Multiply-adds of one instruction of a warp, by the beginning of its opcode.
TENSOR_PRODUCTS = {"IMMA.16832": 16 * 8 * 32, "HMMA.16816": 16 * 8 * 16}


@dataclass(frozen=True)
class GPU:
    """A GPU that is on sale.

    int8, bits16: multiply-adds of the tensor cores per cycle and SM, of INT8 and of bf16 with fp32 sums.
    fp32: lanes per cycle and SM of FADD, FMUL, FFMA; integer multiply-adds share them.
    add: the same of integer additions, minima and maxima, where they are faster than other integer work.
    bf16_peak: TFLOP/s, dense, fp32 sums, as published.
    flash: the share of it that FlashAttention-2 is taken to reach.
    bandwidth: of the memory, GB/s.
    """

    name: str
    architecture: str
    sms: int
    clock_ghz: float
    int8: int
    bits16: int
    bf16_peak: float
    flash: float
    bandwidth: float
    fp32: int = 128
    add: int = 64


#: whitepapers; on a GeForce, bf16 with fp32 sums has half the rate of the same chip in a professional card.
GPUS = {
    "RTX 4090": GPU("RTX 4090", "sm_89", 128, 2.52, 1024, 256, 165.2, 0.925, 1008),
    "RTX 3090": GPU("RTX 3090", "sm_86", 82, 1.695, 1024, 256, 71.0, 0.925, 936),
    "RTX 5090": GPU("RTX 5090", "sm_120", 170, 2.407, 1024, 256, 209.5, 0.925, 1792, add=128),
    "L40S": GPU("L40S", "sm_89", 142, 2.52, 1024, 512, 362.0, 0.73, 864),
    "A100": GPU("A100", "sm_80", 108, 1.41, 2048, 1024, 312.0, 0.73, 2039, fp32=64),
    # To check the method: these kernels were timed there (results/bench_ampere_h200.json.gz). The rates are
    # those of mma.sync, timed by hand; FlashAttention-2's share of their peak is from this file.
    "H200": GPU("H200", "sm_90", 132, 1.98, 2706, 1354, 708.0, 0.42, 4800),
}

#: guide: 64 results per cycle and SM for all of these on 8.x. profiler: the ALU executes integer and logical
#: instructions except multiplication, comparisons, minima, maxima, and the fast conversions I2FP and F2FP.
ALU = (
    "LOP3", "SHF", "LEA", "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "PRMT", "IABS", "PLOP3", "I2FP", "F2FP",
    "CS2R", "BMSK", "SGXT", "FLO", "R2P", "P2R",
)  # fmt: skip
#: guide: 128 on 12.0, 64 before.
ADD = ("IADD3", "IADD", "VIADD", "IMNMX", "VIMNMX", "VIADDMNMX")
FP32 = ("FADD", "FMUL", "FFMA", "FSWZADD")
#: profiler: executed by half of the FP32 lanes (FMA heavy); guide: 64. MOV may run there or in the ALU.
INTEGER_PRODUCTS = ("IMAD", "IDP", "MOV")
#: guide: 16 results per cycle and SM. profiler: XU, special functions and all conversions that are not fast.
SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC")
ALU_RATE, INTEGER_PRODUCT_RATE, SPECIAL_RATE = 64, 64, 16
#: Four schedulers in each SM, which issue one instruction of a warp per cycle each.
SCHEDULERS = 4


@dataclass
class Cycles:
    """Cycles of an SM for one tile, by unit, and instructions of all warps that no unit was found for."""

    units: dict[str, float] = field(default_factory=dict)
    issue_only: Counter[str] = field(default_factory=Counter)

    @property
    def tensor(self) -> float:
        return self.units["tensor"]

    @property
    def others(self) -> float:
        """The longest of all but the tensor cores."""
        return max(cycles for unit, cycles in self.units.items() if unit != "tensor")

    @property
    def bound(self) -> float:
        """If everything overlaps."""
        return max(self.units.values())

    @property
    def without_overlap(self) -> float:
        """If the tensor cores wait while anything else runs, and anything else waits for them."""
        return self.tensor + self.others


def cycles_of(counts: Counter[str], gpu: GPU) -> Cycles:
    """Cycles of one SM, by unit.

    Args:
        counts: {opcode: how often it is executed by all warps together}.
    """
    lanes: Counter[str] = Counter()
    cycles = Cycles({"tensor": 0.0})
    wavefronts = 0
    for opcode, count in counts.items():
        base = opcode.split(".")[0]
        if products := products_of(opcode):
            cycles.units["tensor"] += count * products / (gpu.int8 if base == "IMMA" else gpu.bits16)
        elif unit := unit_of(base):
            lanes[unit] += WARP * count
        elif own := wavefronts_of(opcode):
            wavefronts += count * own
        else:
            cycles.issue_only[opcode] += count
    cycles.units |= {
        "FP32": max(
            (lanes["fp32"] + lanes["product"]) / gpu.fp32,
            lanes["product"] / INTEGER_PRODUCT_RATE,
        ),
        "ALU": lanes["alu"] / ALU_RATE + lanes["add"] / gpu.add,
        "special functions": lanes["special"] / SPECIAL_RATE,
        "shared memory": wavefronts,
        "issue": counts.total() / SCHEDULERS,
    }
    return cycles


def products_of(opcode: str) -> int:
    """Multiply-adds of a tensor-core instruction; 0 of any other. Raises ValueError for an unknown shape."""
    if opcode.split(".")[0] not in ("IMMA", "HMMA"):
        return 0
    for beginning, products in TENSOR_PRODUCTS.items():
        if opcode.startswith(beginning):
            return products
    raise ValueError(
        f"{opcode} has another shape than {', '.join(TENSOR_PRODUCTS)}; add it to TENSOR_PRODUCTS"
    )


def unit_of(base: str) -> str | None:
    """The arithmetic unit of an instruction; None if it has none, or an unknown one."""
    units = {"alu": ALU, "add": ADD, "fp32": FP32, "product": INTEGER_PRODUCTS, "special": SPECIAL}
    return next((unit for unit, names in units.items() if base in names), None)


def wavefronts_of(opcode: str) -> int:
    """How often 128 bytes pass between a warp and shared memory or the L1 cache; 0 without any.

    Each takes a cycle of the SM (guide: 32 banks of 4 bytes, and 32 results of shuffles). Every lane counts,
    also where several read the same word. A transposition (MOVM) and an atomic count as one: not published.
    """
    base, *modifiers = opcode.split(".")
    if base == "LDSM":
        return int(modifiers[-1])
    if base in ("LDS", "STS", "LDG", "STG", "LDL", "STL", "LDGSTS"):
        bits = next((int(modifier) for modifier in modifiers if modifier in ("64", "128")), 32)
        return bits // 32
    return int(base in ("ATOMS", "RED", "REDG", "SHFL", "MOVM"))
