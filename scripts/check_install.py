"""Install the wheel beside torch alone in an empty environment, train there, and time the import.

    python -m scripts.check_install
    python -m scripts.check_install --torch 2.11.0 --times 15

Builds the wheel of this checkout and lets pip install it after torch, with the dependencies that it asks for.
Then checks that

  packages   pip installed nothing but the wheel
  training   a small attention trains on the CPU, and the process prints no message that `import torch` alone
             does not print (torch warns if there is no NumPy)
  import     `import sagebwd` takes less than 1.2 times as long as `import torch`: medians over processes that
             take turns

Takes about two minutes, and downloads torch if pip has not cached it. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.terminal import command_parser

ROOT = Path(__file__).parents[1]
#: All that the wheel is built from.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "sagebwd")
#: The longest that `import sagebwd` may take, in times of `import torch`.
LONGEST_IMPORT = 1.2

#: Prints the losses of a model whose only way to pass a token on is the attention.
TRAINING = """\
import torch
from sagebwd import sage_attention

torch.manual_seed(0)
projection, head = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
optimizer = torch.optim.Adam([*projection.parameters(), *head.parameters()], lr=1e-2)
x = torch.randn(8, 40, 32)
target = x.cumsum(1) / torch.arange(1, 41)[:, None]
for _ in range(30):
    q, k, v = (y.view(8, 40, 2, 16).transpose(1, 2) for y in projection(x).chunk(3, -1))
    out = sage_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(8, 40, 32)
    loss = (head(out) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        python, others = install(Path(folder), arguments.torch)
        failed = [
            *check_packages(others),
            *check_training(python),
            *check_import(python, arguments.times),
        ]
    for message in failed:
        print(f"FAILED: {message}")
    sys.exit(bool(failed))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.check_install", __doc__)
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="default: %(default)s")
    parser.add_argument(
        "--times", type=int, default=9, metavar="N", help="processes for each import (default: %(default)s)"
    )
    return parser.parse_args(argv)


def install(folder: Path, torch: str) -> tuple[Path, set[str]]:
    """The Python of a new environment with torch and the wheel, and the packages that came with the wheel."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip_install(python, f"torch=={torch}")
    before = packages(python)
    pip_install(python, build_wheel(folder))
    return python, packages(python) - before


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built from a copy: setuptools writes beside what it builds."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy]
    subprocess.run(pip, check=True)
    return next(folder.glob("*.whl"))


def pip_install(python: Path, what: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", what], check=True)


def packages(python: Path) -> set[str]:
    """name==version of all that is installed."""
    pip = [python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
    return set(run(pip).stdout.split())


def check_packages(others: set[str]) -> list[str]:
    """What is wrong with the packages that came with the wheel."""
    print("packages:", *sorted(others))
    unwanted = sorted(name for name in others if not name.startswith("sagebwd=="))
    return [f"the wheel brought {', '.join(unwanted)}"] if unwanted else []


def check_training(python: Path) -> list[str]:
    """What is wrong with training in this environment."""
    trained, imported = run([python, "-c", TRAINING]), run([python, "-c", "import torch"])
    if trained.returncode:
        return [f"training ended with an error:\n{trained.stderr}"]
    first, *_, last = map(float, trained.stdout.split())
    print(f"training: loss {first:.3f} at first, {last:.3f} after 30 steps")
    failed = [] if last < first / 2 else ["the loss did not halve"]
    if trained.stderr != imported.stderr:
        failed.append(f"training printed\n{trained.stderr}import torch alone\n{imported.stderr}")
    return failed


def check_import(python: Path, times: int) -> list[str]:
    """What is wrong with the time that the import takes."""
    torch, sagebwd = import_seconds(python, times)
    print(f"import: torch {torch:.2f} s, sagebwd {sagebwd:.2f} s ({sagebwd / torch:.2f} times)")
    if sagebwd < LONGEST_IMPORT * torch:
        return []
    return [f"import sagebwd takes {LONGEST_IMPORT} times as long as import torch, or more"]


def import_seconds(python: Path, times: int) -> tuple[float, float]:
    """Median wall-clock time of a process that imports torch, and of one that imports sagebwd."""
    seconds: dict[str, list[float]] = {"torch": [], "sagebwd": []}
    for _ in range(times):
        for module, measured in seconds.items():
            begin = time.perf_counter()
            run([python, "-c", f"import {module}"]).check_returncode()
            measured.append(time.perf_counter() - begin)
    return statistics.median(seconds["torch"]), statistics.median(seconds["sagebwd"])


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run to the end in a folder without sources, and keep what is printed."""
    return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)


if __name__ == "__main__":
    main()
