"""What `import sagebwd` costs, and what it works without; each in a process of its own."""

import os
import subprocess
import sys

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
    run_python("""
import sys, torch
before = set(sys.modules)
import sagebwd
new = " ".join(set(sys.modules) - before)
assert "sagebwd.attention" in new
assert not [name for name in ("triton", "hopper", "torch", "cuda") if name in new], new
assert torch.ops.sagebwd.forward and torch.ops.sagebwd.backward
assert not torch.cuda.is_initialized()
q = torch.ones(1, 1, 40, 32, dtype=torch.float16, requires_grad=True)
out = sagebwd.sage_attention(q, q, q)
out.sum().backward()
assert not {"triton", "torch._dynamo"} & set(sys.modules)
assert abs(out.sum().item() - 40 * 32) < 12, out.sum()
try:
    sagebwd.sage_attention(q, q, q, kernels="triton")
except ValueError as error:
    assert 'the tensors are on the CPU; move them to a GPU, or pass kernels="reference"' in str(error), error
else:
    raise AssertionError
""")


def test_without_triton_and_cuda_it_computes_and_runs_what_was_exported_here(tmp_path):
    """Triton exists only where there are GPUs it knows. The other process has imported sagebwd alone."""

    class Attention(torch.nn.Module):
        def forward(self, q, mask):
            return sage_attention(q, q, q, is_causal=True, key_padding_mask=mask)

    q, mask = torch.ones(1, 2, 40, 16), torch.arange(40)[None] < 30
    torch.export.save(torch.export.export(Attention(), (q, mask), strict=False), tmp_path / "program.pt2")
    path = str(tmp_path / "program.pt2")
    run_python(f"""
import sys
sys.modules["triton"] = sys.modules["cuda.bindings"] = None  # to import it is an error now
import sagebwd, torch
from sagebwd.kernels.cuda.compile import why_no_compiler
q = torch.ones(1, 2, 40, 16)
assert abs(sagebwd.sage_attention(q, q, q).sum().item() - 2 * 40 * 16) < 12
program = torch.export.load({path!r}).module()
assert abs(program(q, torch.arange(40)[None] < 30).sum().item() - 2 * 30 * 16) < 9
assert "install cuda-bindings" in why_no_compiler()
""")
