"""Run the kernels on small inputs under NVIDIA's compute-sanitizer and count the errors it reports.

    python -m scripts.sanitize
    python -m scripts.sanitize --tools memcheck --cases wide_64 wide_packed
    python -m scripts.sanitize --cases wide_64 wide_128 wide_packed --kernels ampere

memcheck finds out-of-bounds reads and writes, racecheck finds races in shared memory. Needs a GPU, and
compute-sanitizer (of the CUDA toolkit) on PATH.

Each tool runs each case in a process of its own. PyTorch's caching allocator is off, so that each tensor ends
where its allocation ends. The exit code is 1 if there were errors, or if a case did not finish.

racecheck may report threads that write the same sum, rounded differently, to one address: Triton reduces like
that (triton-lang/triton#7264). Nor does it follow some handshakes by barriers: results/log.md, "What
racecheck reports", names those, each of which another tool refutes. Any other is a bug.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from common.terminal import command_parser
from sagebwd import SageConfig, sage_attention
from sagebwd.config import PAPER_INT8_MATMULS
from sagebwd.dispatch import KERNEL_SETS

ROOT = Path(__file__).parents[1]
SANITIZER = "compute-sanitizer"

#: By tool: the line that ends its report, with the number of errors, and options of its own.
TOOLS = {
    "memcheck": (r"ERROR SUMMARY: (\d+) error", ["--report-api-errors", "no"]),
    "racecheck": (r"RACECHECK SUMMARY: .*\((\d+) error", []),
}
TIMEOUT_SECONDS = 900
DEVICE = "cuda"


class Case(NamedTuple):
    """One head of one sequence, with sizes that are not multiples of a tile."""

    config: SageConfig = SageConfig()
    tokens: int = 70
    head_dim: int = 24
    boundaries: tuple[int, ...] | None = None
    backward: bool = True


SIX_WITHOUT_DQ = tuple(name for name in PAPER_INT8_MATMULS if name != "dq")

CASES = {
    "forward": Case(backward=False),
    "backward": Case(),
    "one_tile": Case(tokens=40, head_dim=32),
    "packed": Case(boundaries=(0, 33, 33, 65)),
    "smooth_q": Case(SageConfig(smooth_q=True)),
    "unsigned_p": Case(SageConfig(unsigned_p=True)),
    "token_scales": Case(SageConfig.strictly_causal()),
    "block_granularity": Case(SageConfig.paper()),
    "dp_fp16": Case(SageConfig(dp_fp16_accumulation=True), tokens=200),  # of the Ampere kernels
    "sixteen_bit": Case(SageConfig(int8_matmuls=())),
    # On Hopper these run the CUDA kernels.
    "wide_forward": Case(tokens=200, head_dim=56, backward=False),
    "wide_64": Case(tokens=200, head_dim=56),
    "wide_128": Case(tokens=200, head_dim=120),
    "wide_packed": Case(tokens=200, head_dim=64, boundaries=(0, 33, 33, 165)),
    "wide_16_bit_dq": Case(SageConfig(int8_matmuls=SIX_WITHOUT_DQ), tokens=200, head_dim=56),
    "wide_int8_scores": Case(SageConfig.int8_scores(), tokens=200, head_dim=56),
    "wide_int8_scores_128": Case(SageConfig.int8_scores(), tokens=200, head_dim=120),
    "wide_consistent": Case(SageConfig.consistent(), tokens=200, head_dim=120),
    "wide_token_scales": Case(SageConfig.strictly_causal(), tokens=200, head_dim=120),
    "wide_paper": Case(SageConfig.paper(), tokens=300, head_dim=56),
    "wide_paper_128": Case(SageConfig.paper(), tokens=300, head_dim=120),
    "wide_256": Case(tokens=200, head_dim=248),
    "wide_256_packed": Case(tokens=200, head_dim=248, boundaries=(0, 33, 33, 165)),
    "wide_token_scales_256": Case(SageConfig.strictly_causal(), tokens=200, head_dim=248),
    "wide_smooth_v": Case(SageConfig(smooth_v=True), tokens=200, head_dim=56, boundaries=(0, 33, 33, 165)),
}


def main(argv: list[str] | None = None) -> None:
    """Run the sanitizer on the chosen cases; with --case, run that case in this process."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; run this where there is one")
    if arguments.case:
        run_case(CASES[arguments.case], arguments.kernels)
        print(end_of(arguments.case))
        return
    if shutil.which(SANITIZER) is None:
        sys.exit(f"{SANITIZER} is not on PATH; it comes with the CUDA toolkit, in compute-sanitizer/ or bin/")
    names = kernel_names()
    found = False
    print(f"{'tool':10} {'case':18} errors")
    for tool in arguments.tools:
        for case in arguments.cases:
            output = sanitize(tool, case, names, arguments.kernels)
            errors = count_errors(tool, case, output)
            print(f"{tool:10} {case:18} {'did not finish' if errors is None else errors}", flush=True)
            if errors != 0:
                found = True
                print(output, file=sys.stderr, flush=True)
    sys.exit(found)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.sanitize", __doc__)
    add = parser.add_argument
    for option, known in (("--tools", TOOLS), ("--cases", CASES)):
        text = f"{', '.join(known)} (default: all)"
        metavar = option[2:-1].upper()
        add(option, nargs="+", choices=known, default=[*known], metavar=metavar, help=text)
    add("--case", choices=CASES, metavar="CASE", help="run this one in this process, without a sanitizer")
    text = f"run the cases with this kernel set, not the one that would be chosen: {', '.join(KERNEL_SETS)}"
    add("--kernels", choices=KERNEL_SETS, metavar="NAME", help=text)
    return parser.parse_args(argv)


def kernel_names() -> list[str]:
    """The kernels of this library; the sanitizer skips all others."""
    from sagebwd.kernels.ampere.attention import sources_for
    from sagebwd.kernels.hopper.attention import SOURCES
    from sagebwd.kernels.triton import backward, forward, quantize

    names = [name for module in (forward, backward, quantize) for name in vars(module)]
    folders = {*SOURCES.folders, *sources_for("sm_80").folders}
    for source in (path for folder in folders for path in folder.glob("*.cu")):
        names += re.findall(r"(\w+_kernel)\(", source.read_text())
    return sorted({name for name in names if name.endswith("_kernel")})


def sanitize(tool: str, case: str, names: list[str], kernels: str | None) -> str:
    """The output of the sanitizer and the case."""
    command = [
        *(SANITIZER, "--tool", tool, *TOOLS[tool][1]),
        *("--target-processes", "application-only"),  # not the compiler that Triton starts
        *(option for name in names for option in ("--kernel-name", f"kns={name}")),
        *(sys.executable, "-m", "scripts.sanitize", "--case", case),
        *(("--kernels", kernels) if kernels else ()),
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return f"{error}\n{(error.output or b'').decode(errors='replace')}"
    return done.stdout


def count_errors(tool: str, case: str, output: str) -> int | None:
    """The number of errors in the report; None if the case or the report is cut off."""
    reports = re.findall(TOOLS[tool][0], output)
    if not reports or end_of(case) not in output.splitlines():
        return None
    return sum(map(int, reports))


def end_of(case: str) -> str:
    """The line that a case prints when it has finished."""
    return f"{case} finished"


def run_case(case: Case, kernels: str | None = None) -> None:
    """Forward and backward, causal; the sanitizer watches."""
    kernels = "triton" if DEVICE == "cpu" else kernels  # on a CPU in Triton's interpreter
    q, k, v, grad_out = inputs(case)
    cu_seqlens = None if case.boundaries is None else torch.tensor(case.boundaries, device=DEVICE)
    with torch.set_grad_enabled(case.backward):
        out = sage_attention(
            q, k, v, is_causal=True, cu_seqlens=cu_seqlens, config=case.config, kernels=kernels
        )
    results = [out, *torch.autograd.grad(out, (q, k, v), grad_out)] if case.backward else [out]
    if not all(x.isfinite().all() for x in results):
        sys.exit("a result is not finite")


def inputs(case: Case) -> Iterator[torch.Tensor]:
    """Gaussian q, k, v and grad_out."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(1, 1, case.tokens, case.head_dim, generator=generator)
        yield x.to(DEVICE, torch.float16).requires_grad_(case.backward)


if __name__ == "__main__":
    main()
