"""What `import sagebwd` costs, and what it works without; each in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from sagebwd import sage_attention
from tests.cli import ROOT


def run_python(code):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_registers_the_operators_and_the_reference_imports_no_kernels():
    """CPU tensors run Triton's kernels in its interpreter alone, and that was not asked for."""
    printed = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import sagebwd\n"
        "print(sorted(set(sys.modules) - before))\n"
        "assert torch.ops.sagebwd.forward and torch.ops.sagebwd.backward\n"
        "print(torch.cuda.is_initialized())\n"
        "q = torch.ones(1, 1, 40, 32, dtype=torch.float16, requires_grad=True)\n"
        "out = sagebwd.sage_attention(q, q, q)\n"
        "out.sum().backward()\n"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])\n"
        "print(out.sum().item())\n"
        "try:\n"
        "    sagebwd.sage_attention(q, q, q, kernels='triton')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    modules, is_initialized, not_needed, total, message = printed.splitlines()
    assert "sagebwd.attention" in modules
    for name in ("triton", "hopper", "torch", "cuda"):
        assert name not in modules
    assert (is_initialized, not_needed) == ("False", "[]")
    assert float(total) == pytest.approx(40 * 32, rel=1e-2)
    assert message.startswith('the tensors are on the CPU; move them to a GPU, or pass kernels="reference"')


def test_without_triton_and_cuda_it_computes_and_runs_what_was_exported_here(tmp_path):
    """Triton exists only where there are GPUs it knows. The other process has imported sagebwd alone."""

    class Attention(torch.nn.Module):
        def forward(self, q, mask):
            return sage_attention(q, q, q, is_causal=True, key_padding_mask=mask)

    q, mask = torch.ones(1, 2, 40, 16), torch.arange(40)[None] < 30
    torch.export.save(torch.export.export(Attention(), (q, mask), strict=False), tmp_path / "program.pt2")
    printed = run_python(
        "import sys\n"
        "sys.modules['triton'] = sys.modules['cuda.bindings'] = None  # to import it is an error now\n"
        "import sagebwd, torch\n"
        "q = torch.ones(1, 2, 40, 16)\n"
        "print(sagebwd.sage_attention(q, q, q).sum().item())\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()\n"
        "print(program(q, torch.arange(40)[None] < 30).sum().item())\n"
        "from sagebwd.kernels.cuda.compile import why_no_compiler\n"
        "print(why_no_compiler())\n"
    )
    total, of_program, reason = printed.splitlines()
    assert float(total) == pytest.approx(2 * 40 * 16, rel=1e-2)
    assert float(of_program) == pytest.approx(2 * 30 * 16, rel=1e-2)
    assert "install cuda-bindings" in reason
