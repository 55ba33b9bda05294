"""The machine code of NVIDIA GPUs (SASS) as text, and its instructions. Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# --- Disassembling ------------------------------------------------------------------------------------------


def disassemble(cubin: bytes) -> str:
    """The machine code of a CUBIN as text.

    Raises:
        FileNotFoundError: there is no nvdisasm.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(find_nvdisasm()), "-c", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def find_nvdisasm() -> Path:
    """NVIDIA's disassembler: Triton's copy, that of a package, or that of a CUDA toolkit.

    Raises:
        FileNotFoundError: none is there; the message says what to install.
    """
    for package in ("triton", "nvidia-cuda-nvdisasm"):
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if file.name in ("nvdisasm", "nvdisasm.exe"):
                return Path(file.locate())
    if found := shutil.which("nvdisasm"):
        return Path(found)
    raise FileNotFoundError(
        "nvdisasm, NVIDIA's disassembler, is not installed: pip install nvidia-cuda-nvdisasm (or triton)"
    )


# --- Instructions -------------------------------------------------------------------------------------------

LABEL = re.compile(r"^(\.L\w+|\$?[\w$.]+):$")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[\dT]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: ``/*0050*/ @!P0 BRA `(.L_x_1) ;``.

    predicate: "P0", "!P0", …; "" if it is executed always.
    opcode: with its modifiers, for example "LDSM.16.M88.4".
    """

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def predicates(self) -> list[str]:
        """All that must hold; a branch has one more among its operands."""
        more = self.operands[0] if self.base == "BRA" else ""
        return [self.predicate] * bool(self.predicate) + [more] * bool(re.fullmatch(r"!?U?P\d", more))

    @property
    def counted_as(self) -> str:
        """The opcode; "NOP" for one that is never executed but fills an issue slot."""
        return "NOP" if self.predicate == "!PT" else self.opcode

    @property
    def target(self) -> str | None:
        """The label that it names, if it does."""
        found = TARGET.search(",".join(self.operands))
        return found[1] if found else None


def parse(text: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and {label: index of the instruction after it}.

    Raises:
        ValueError: the text has no such kernel.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            inside = f".text.{kernel}," in line
        elif inside and (label := LABEL.match(line)):
            labels[label[1]] = len(instructions)
        elif inside and (found := INSTRUCTION.match(line)):
            operands = tuple(operand.strip() for operand in found[4].split(","))
            instructions.append(Instruction(int(found[1], 16), found[2] or "", found[3], operands))
    if not instructions:
        raise ValueError(f"the machine code has no kernel {kernel!r}")
    return instructions, labels
