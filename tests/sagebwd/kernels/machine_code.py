"""What a compiler made of a kernel: registers, spills, shared memory, and the instructions."""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import triton

from sagebwd.kernels.cuda.compile import Sources, compile_source

#: Where there is a driver, NVRTC takes what it compiled before from its cache, without a word in the log.
WITH_LOG = ("--ptxas-options=-v", "--no-cache")


class MachineCode:
    """A CUDA source as NVRTC compiles it; ``log`` is what ptxas says."""

    def __init__(self, sources: Sources, source: str, defines: Mapping[str, object]) -> None:
        self.cubin, self.log = compile_source(sources, source, defines, WITH_LOG)
        assert "spill" in self.log, self.log

    @property
    def spilled_bytes(self) -> int:
        """Of the kernel that spills most."""
        return max(self._numbers(r"(\d+) bytes spill (?:stores|loads)"))

    @property
    def registers(self) -> int:
        """Of a thread."""
        return max(self._numbers(r"Used (\d+) registers"))

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory that the launch does not ask for."""
        return sum(self._numbers(r"(\d+) bytes smem"))

    @functools.cached_property
    def text(self) -> str:
        """The instructions."""
        return disassemble(self.cubin)

    def count(self, instruction: str) -> int:
        """How often it occurs; a regular expression."""
        return len(re.findall(rf"\b{instruction}", self.text))

    def int8_products(self) -> Counter[tuple[str, str]]:
        """How many have operands of these types: U8 or S8."""
        return Counter(re.findall(r"\bIG?MMA\.\w+\.(\w+)\.(\w+)", self.text))

    def _numbers(self, pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, self.log)]


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
