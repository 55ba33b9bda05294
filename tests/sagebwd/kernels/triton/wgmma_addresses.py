"""Find wgmma instructions of a cubin whose operands are not where shared memory is.

A matrix descriptor begins with an address in shared memory, in units of 16 bytes and cut to 14 bits. So the
value must come from an instruction that cuts, by additions and moves. ptxas 12.8 sometimes takes another
register instead; see sagebwd/kernels/triton/compiler.py.

The instructions are followed backwards in the order in which they lie in the cubin, not through branches:
loops begin with what was computed before them, so this finds the same.
"""

import re
from collections import defaultdict
from typing import NamedTuple

from tests.sagebwd.kernels.machine_code import disassemble

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?([A-Za-z0-9_.]+) (.*?);")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
#: They pass on a value, or add to it.
FOLLOWED = ("UMOV", "MOV", "IMAD", "UIMAD", "R2UR", "UIADD3", "IADD3", "VIADD", "ULOP3", "LOP3")
#: Their first register is read, not written.
WITHOUT_RESULT = ("ST", "RED", "BAR")
LONGEST_CHAIN = 16


class Write(NamedTuple):
    """An instruction that writes a register: where, which, its operands, and which word of its result."""

    index: int
    name: str
    operands: str
    word: int


def wrong_addresses(cubin: bytes) -> list[str]:
    """One line for each operand of a wgmma that is not an address: where it is, and what it is."""
    found = map(INSTRUCTION.search, disassemble(cubin).splitlines())
    instructions = [x.groups() for x in found if x]  # (position, name, operands)
    writes = defaultdict(list)
    for index, (_, name, operands) in enumerate(instructions):
        for word, register in enumerate(written(name, operands)):
            writes[register].append(Write(index, name, operands, word))
    return [
        f"{position}: {register} is from {why}"
        for index, (position, name, operands) in enumerate(instructions)
        if "GMMA" in name
        for register in descriptors(operands)
        if (why := origin(register, index, writes)) is not None
    ]


def written(name: str, operands: str) -> list[str]:
    """The registers that an instruction writes; none for wgmma, which writes no address."""
    first = REGISTER.fullmatch(operands.split(",")[0].strip())
    if first is None or "GMMA" in name or name.startswith(WITHOUT_RESULT):
        return []
    kind, number = first.groups()
    words = 4 if ".128" in name else 2 if "WIDE" in name or ".64" in name or name.startswith("CS2R") else 1
    return [f"{kind}{int(number) + word}" for word in range(words)]


def descriptors(operands: str) -> list[str]:
    """The registers with the addresses: of A and B, or of B alone if A lies in registers."""
    found = DESCRIPTOR.search(operands)
    if found is None:
        return []
    first = int(found[1])
    has_a_in_registers = len(re.findall(r"\bR\d+", operands[: found.start()])) > 1
    return [f"UR{first + 2}"] if has_a_in_registers else [f"UR{first}", f"UR{first + 2}"]


def origin(register: str, before: int, writes: dict[str, list[Write]], chain: int = 0) -> str | None:
    """None if ``register`` holds an address in shared memory, else the instruction that made its value."""
    last = next((write for write in reversed(writes[register]) if write.index < before), None)
    if last is None:
        return "nothing that was written"
    _, name, operands, word = last
    cuts = ("SGXT" in name and "0xe" in operands) or ("LOP3" in name and "0x3fff" in operands)
    if cuts or name.startswith("LDL"):  # a spilled value is not followed
        return None
    sources = [
        f"{kind}{int(number) + (word if '.64' in name else 0)}"
        for kind, number in REGISTER.findall(operands.partition(",")[2])
    ]
    if name.startswith(FOLLOWED) and sources and chain < LONGEST_CHAIN:
        origins = [origin(source, last.index, writes, chain + 1) for source in sources]
        return None if None in origins else origins[0]
    return f"{name} {operands.strip()}"
