"""Compute all addresses of a kernel from its PTX, without a GPU, and say which of them are wrong.

Integers are computed as a GPU does, for all threads of a CTA side by side. Floats and what is loaded are
unknown: no address of these kernels depends on them, unless documents are packed. So this sees what LLVM
makes of indices, strides and masks, see sagebwd/kernels/triton/compiler.py, but not what ptxas makes of them.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

#: Bytes of an access: .v4.b32 is 16; of a matrix of ldmatrix a thread addresses one row.
ACCESS = re.compile(r"(?:\.v(\d))?\.[bfsu](\d+)")
ADDRESS = re.compile(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]")
REGISTER = re.compile(r"%\w+")
GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)")
COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
#: How many an operation reads, but for two.
ARGUMENTS = {"mov": 1, "cvt": 1, "not": 1, "neg": 1, "bfe": 3, "bfi": 4}
INTEGER, FLOAT = re.compile(r"([bsu])(\d+)|pred"), re.compile(r"f16|f32|f64")
#: Parameters, memory of the tensor cores, and barriers, which one thread of a warp that is elected handles.
ELSEWHERE = ("ld.param", "tcgen05", "mbarrier")


class Unknown(Exception):
    """A value that is not computed here."""


class Launch(NamedTuple):
    """One call of a kernel.

    parameters: integers and addresses in order; None for a float. memory: (begin, end) of each tensor.
    ctas: those that are looked at. shared: bytes of shared memory.
    """

    parameters: Sequence[int | None]
    memory: Sequence[tuple[int, int]]
    ctas: Iterable[int]
    threads: int
    shared: int


def wrong_addresses(ptx: str, launch: Launch) -> list[str]:
    """One line for each instruction that accesses what it must not: where, and the first such address."""
    program, labels = parse(ptx)
    found: dict[str, str] = {}
    for cta in launch.ctas:
        for instruction, why in Threads(launch, cta).run(program, labels):
            found.setdefault(instruction, f"CTA {cta}: {instruction}: {why}")
    return list(found.values())


def parse(ptx: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of the one kernel, and where its labels are."""
    program: list[str] = []
    labels: dict[str, int] = {}
    body = re.sub(r"//.*", "", ptx[ptx.index("{", ptx.index(".entry")) + 1 :])
    for line in re.split(r"[\n;]", body):
        line = line.strip()
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = len(program)
        elif line and line[0] not in ".{}":
            program.append(line.replace("\t", " "))
    return program, labels


class Threads:
    """The threads of one CTA: by register what each holds, uint64 or bool."""

    def __init__(self, launch: Launch, cta: int) -> None:
        self.launch = launch
        ids = np.arange(launch.threads, dtype=np.uint64)
        self.registers = {
            "%tid.x": ids,
            "%ctaid.x": np.full_like(ids, cta),
            "global_smem": np.zeros_like(ids),
        }

    def run(self, program: Sequence[str], labels: dict[str, int]) -> list[tuple[str, str]]:
        """Each access that is wrong, with the reason."""
        found, position = [], 0
        while not (line := program[position]).startswith("ret"):
            position += 1
            guard = GUARD.match(line)
            name, operands = re.match(r"(\S+)\s*(.*)", guard[3] if guard else line).groups()
            try:
                active = self.guarded(guard)
                if name.startswith("bra"):
                    # An unknown condition asks for a special case of a function; it stores nothing.
                    assert active.all() or not active.any(), f"threads go different ways: {line}"
                    position = labels[operands] if active.all() else position
                elif "[" in operands and not name.startswith(ELSEWHERE):
                    found += [(line, why) for why in self.access(name, operands, active)]
                    self.forget(operands)
                else:
                    self.compute(name, operands)
            except Unknown as unknown:
                if "[" in operands and not name.startswith(ELSEWHERE):
                    found.append((line, f"{unknown} is unknown"))
                self.forget(operands)
        return found

    def guarded(self, guard: re.Match[str] | None) -> np.ndarray:
        """The threads that execute an instruction."""
        if guard is None:
            return np.ones(self.launch.threads, bool)
        active = self.read(guard[2])
        return ~active if guard[1] else active

    def forget(self, operands: str) -> None:
        """What an instruction writes is unknown: its first operand, if that is no address."""
        first = operands[: operands.find("}")] if operands.startswith("{") else operands.split(",")[0]
        for register in REGISTER.findall(first) if "[" not in first else ():
            self.registers.pop(register, None)

    def read(self, operand: str, bits: int = 64, *, is_signed: bool = False) -> np.ndarray:
        """A register or a constant of so many bits."""
        operand = operand.strip()
        if re.fullmatch(r"-?\d+|0x\w+", operand):
            value = np.full(self.launch.threads, int(operand, 0) & (2**64 - 1), np.uint64)
        elif (value := self.registers.get(operand)) is None:
            raise Unknown(operand)
        if value.dtype == bool:
            return value
        if not is_signed:
            return value & np.uint64(2**bits - 1)
        unused = np.uint64(64 - bits)
        return (value << unused).view(np.int64) >> unused.astype(np.int64)

    def write(self, register: str, value: np.ndarray, bits: int) -> None:
        is_predicate = bits == 1 or value.dtype == bool
        number = value.astype(np.uint64) & np.uint64(2**bits - 1)
        self.registers[register.strip()] = value.astype(bool) if is_predicate else number

    # --- Memory -----------------------------------------------------------------------------------------

    def access(self, name: str, operands: str, active: np.ndarray) -> list[str]:
        """Why an instruction must not access what it does, once for each of its addresses."""
        addresses = ADDRESS.findall(operands)
        if name.startswith("cp.async"):  # [shared], [global], bytes, how many of these are read
            size, *read = (x.strip() for x in operands.split(",")[2:])
            reads = active & (self.read(read[0], 32) > 0) if read else active
            return [
                *self.why_wrong(addresses[0], int(size, 0), active, is_shared=True),
                *self.why_wrong(addresses[1], int(size, 0), reads, is_shared=False),
            ]
        if name.startswith(("ldmatrix", "stmatrix")):
            size, rows = 16, 8 * int(re.search(r"\.x(\d)", name)[1])
            active = active & (np.arange(len(active)) % 32 < rows)
        else:
            count, bits = ACCESS.search(name).groups()
            size = int(count or 1) * int(bits) // 8
        return self.why_wrong(addresses[0], size, active, is_shared=".shared" in name)

    def why_wrong(
        self, address: tuple[str, str], size: int, active: np.ndarray, *, is_shared: bool
    ) -> list[str]:
        """Of ``size`` bytes that each active thread accesses."""
        base, offset = address
        places = self.read(base, 32 if is_shared else 64).astype(np.int64)[active] + int(offset or 0)
        is_inside = np.zeros(places.shape, bool)
        for begin, end in [(0, self.launch.shared)] if is_shared else self.launch.memory:
            is_inside |= (places >= begin) & (places + size <= end)
        if not is_inside.all():
            return [f"{size} bytes at {places[~is_inside][0]:#x} are not the kernel's"]
        if (places % size).any():
            return [f"{size} bytes at {places[places % size != 0][0]:#x} are not aligned"]
        return []

    # --- Integers ---------------------------------------------------------------------------------------

    def compute(self, name: str, operands: str) -> None:
        """Write the result of an operation on integers or predicates; that of others is unknown."""
        operation, *kinds = name.split(".")
        target, *sources = operands.split(",")
        if operation == "ld":
            parameter = self.launch.parameters[int(re.search(r"_param_(\d+)", operands)[1])]
            self.write(target, self.read(str(parameter)), 64)  # None, a float, is unknown
            return
        kind = INTEGER.fullmatch(kinds[-1]) if kinds else None
        if kind is None or any(FLOAT.search(x) for x in kinds):
            raise Unknown(target)
        bits, is_signed = int(kind[2] or 1), kind[1] == "s"
        if operation == "mov" and "{" in operands:
            self.move_parts(operands, bits)
        elif operation in ("mul", "mad") and kinds[0] != "hi":
            self.multiply(target, sources, bits * (2 if kinds[0] == "wide" else 1), bits, is_signed=is_signed)
        else:
            values = [self.read(x, bits, is_signed=is_signed) for x in sources[: ARGUMENTS.get(operation, 2)]]
            if operation == "setp":
                result = COMPARISONS[kinds[0]](*values)
            elif operation == "selp":
                result = np.where(self.read(sources[2]), *values)
            elif operation in OPERATIONS:
                result = OPERATIONS[operation](*values)
            else:
                raise Unknown(target)
            self.write(target, result, int(kinds[-2][1:]) if operation == "cvt" else bits)

    def multiply(
        self, target: str, sources: Sequence[str], width: int, bits: int, *, is_signed: bool
    ) -> None:
        """The product of two numbers, or their product plus a third, in ``width`` bits."""
        x, y = (self.read(source, bits, is_signed=is_signed) for source in sources[:2])
        rest = self.read(sources[2], width, is_signed=is_signed) if len(sources) > 2 else 0
        self.write(target, x * y + rest, width)

    def move_parts(self, operands: str, bits: int) -> None:
        """Take a register apart, lowest bits first, or put one together."""
        parts = re.search(r"\{(.*)\}", operands)[1].split(",")
        width = bits // len(parts)
        places = [np.uint64(index * width) for index in range(len(parts))]
        if operands.startswith("{"):
            whole = self.read(operands.split("}")[1].strip(" ,"), bits)
            for part, place in zip(parts, places, strict=True):
                self.write(part, whole >> place, width)
        else:
            values = [self.read(part, width) << place for part, place in zip(parts, places, strict=True)]
            self.write(operands.split(",")[0], sum(values), bits)


def shift(x: np.ndarray, places: np.ndarray, by: np.ufunc) -> np.ndarray:
    return by(x, np.minimum(places, 63).astype(x.dtype))


def field(x: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``length`` bits from ``first`` on; of a signed number with their sign."""
    unused = 64 - length.astype(x.dtype)
    return x << (unused - first.astype(x.dtype)) >> unused


def insert(x: np.ndarray, into: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    mask = ((np.uint64(1) << length) - np.uint64(1)) << first
    return into & ~mask | (x << first) & mask


OPERATIONS = {
    "mov": lambda x: x, "cvt": lambda x: x, "not": np.invert, "neg": lambda x: -x,
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    "div": lambda x, y: np.sign(x) * np.sign(y) * (abs(x) // abs(y)),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "bfe": field, "bfi": insert,
    "shl": partial(shift, by=np.left_shift), "shr": partial(shift, by=np.right_shift),
}  # fmt: skip
