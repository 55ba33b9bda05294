"""A pytest plugin that forces Triton to make Ampere-class code, which any later NVIDIA GPU runs, too.

    python -m pytest -p tests.sagebwd.kernels.triton.ampere_code -m gpu -k triton-cuda tests/sagebwd/kernels

So the code that an A100 or a GeForce gets can be tested on a Hopper GPU: mma.sync instead of wgmma, and
tiles, warps and stages as on those GPUs. Only the assembler works for the GPU at hand. For Triton 3.6.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# Triton's cache does not tell this code from that of the GPU at hand.
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="ampere-code-")

import pytest
import torch
import triton
from triton.backends.nvidia import compiler

from sagebwd.kernels.triton import launch

#: Of all kernels that were compiled: how many use which instruction.
instructions: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Force the target before anything is compiled; nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    assembled_for = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    triton.knobs.runtime.override_arch = "sm80"
    triton.knobs.compilation.listener = count_instructions
    compiler.sm_arch_from_capability = lambda capability: assembled_for
    launch.is_hopper = lambda device: False


def count_instructions(*, metadata_group: dict[str, str], **_: Any) -> None:
    """Called by Triton for each compiled kernel."""
    for name, path in metadata_group.items():
        if name.endswith(".ptx"):
            text = Path(path).read_text(encoding="utf-8")
            instructions.update(name for name in ("mma.sync", "wgmma", "tcgen05") if name in text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if it was not Ampere-class code that the tests ran."""
    if not torch.cuda.is_available() or session.config.option.collectonly:
        return
    print(f"\nkernels by instruction: {dict(instructions)}")
    if not instructions["mma.sync"] or instructions["wgmma"] or instructions["tcgen05"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
