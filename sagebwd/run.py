"""Run a program with SageBwd in the place of the attention that it calls, without changing the program.

    python -m sagebwd.run train.py --lr 1e-4
    python -m sagebwd.run --sdpa --preset low_bias -m package.train --lr 1e-4
    python -m sagebwd.run --flash-attn accelerate launch train.py
    torchrun --nproc-per-node 2 -m sagebwd.run train.py

The program is a Python file, a module (-m) or a command. It runs as without this, and so do the Python
processes that it starts. At its end rank 0 prints what ran in INT8, what did not, and why.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.nn import functional as F

from sagebwd import usage
from sagebwd.config import PRESETS
from sagebwd.integrations import stand_in
from sagebwd.integrations.sdpa import patch_sdpa
from sagebwd.integrations.stand_in import is_imported_from_elsewhere

#: Tells the processes of the program what to replace: a preset and :data:`REPLACED`, with commas between.
VARIABLE = "SAGEBWD_RUN"
#: The process that was started first, which says so if it made no call.
FIRST_PROCESS = "SAGEBWD_RUN_PROCESS"

#: What an option replaces.
REPLACED = {
    "sdpa": "torch's scaled_dot_product_attention",
    "flash_attn": "the library flash_attn (FlashAttention-2 and -4), and the Hub's kernel flash-attn2",
    "flash_attn_3": "the library flash_attn_interface, and the Hub's kernel flash-attn3",
    "sageattention": "the library sageattention",
}


def main(argv: list[str] | None = None) -> None:
    """Replace this process by the program's."""
    parser = argparse.ArgumentParser(
        "python -m sagebwd.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without an option: --sdpa, and flash_attn and sageattention where they are installed.",
        allow_abbrev=False,
    )  # fmt: skip
    for name, meaning in REPLACED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=f"replace {meaning}")
    parser.add_argument("--preset", choices=PRESETS, default="default", help="what is quantized, and how")
    parser.add_argument("-m", action="store_true", dest="is_module", help="the program is a module")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="file, module or command, and its arguments"
    )
    options = parser.parse_args(argv)
    if not options.program:
        parser.error("name the program: a Python file, -m and a module, or a command")
    if sys.flags.ignore_environment:
        parser.error("python's options -E and -I hide PYTHONPATH, which the program needs; leave them out")
    chosen = [name for name in REPLACED if getattr(options, name)] or ["sdpa", *_installed()]
    os.environ[VARIABLE] = ",".join([options.preset, *chosen])
    os.environ[FIRST_PROCESS] = str(os.getpid())
    paths = [str(Path(__file__).parent / "integrations" / "startup"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    kernels = ":".join(filter(None, [*map(stand_in.hub_kernels, chosen), os.environ.get("LOCAL_KERNELS")]))
    if kernels and os.name != "nt":  # Windows' paths have colons themselves
        os.environ["LOCAL_KERNELS"] = kernels
    command = _command(options.program, options.is_module)
    if command is None:
        parser.error(f"there is no file and no command {options.program[0]!r}")
    sys.stdout.flush()
    if os.name == "nt":  # where exec would return to the shell at once
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)


def _installed() -> list[str]:
    """Without FlashAttention-3, whose older releases return a tuple where newer ones return the output."""
    return [name for name in ("flash_attn", "sageattention") if importlib.util.find_spec(name)]


def _command(program: list[str], is_module: bool) -> list[str] | None:
    """The program as a command line, of this interpreter if it is Python; None if there is no such one."""
    python = [sys.executable, *_interpreter_options()]
    if is_module:
        return [*python, "-m", *program]
    executable = shutil.which(program[0])
    if executable and not program[0].endswith(".py"):
        return [executable, *program[1:]]
    return [*python, *program] if os.path.exists(program[0]) else None


def _interpreter_options() -> list[str]:
    """What stands between ``python`` and ``-m sagebwd.run``, such as ``-u``."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if len(before) < 2:
        return []
    *options, last, _ = before
    last = last.removesuffix("m")  # of -m, or of -um
    return options if last == "-" else [*options, last]


# --- In the processes of the program -----------------------------------------------------------------------


def patch_process() -> None:
    """Replace what :data:`VARIABLE` names, and report at exit. Called when the program has imported torch.

    What runs in INT8 is also logged when it first does so: a long run should not have to end before.
    """
    if _is_first_rank():
        log = logging.getLogger(usage.__name__)
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    preset, *chosen = os.environ[VARIABLE].split(",")
    for name in chosen:
        if name == "sdpa":
            patch_sdpa(PRESETS[preset])
        else:
            stand_in.install(name, PRESETS[preset])
    atexit.register(_print_report, os.getpid(), F.scaled_dot_product_attention)


def _print_report(process: int, patched: object) -> None:
    """Print what the process ran, if it is one of rank 0 that ran anything, or the first one."""
    report = usage.report()
    is_first = os.environ[FIRST_PROCESS] == str(process)
    is_fork = os.getpid() != process
    if is_fork or not _is_first_rank() or not (report.rows or is_first):
        return
    nothing = f"{sys.argv[0]} itself made no call that was to be replaced"
    print("\nSageBwd:", report if report.rows else nothing, *_caveats(patched), sep="\n", file=sys.stderr)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _caveats(patched: object) -> Iterator[str]:
    """What the report does not count."""
    imported = [name for name in ("xformers",) if name in sys.modules]
    imported += [library for name, library in stand_in.LIBRARIES.items() if is_imported_from_elsewhere(name)]
    if imported:
        yield f"The program imported {', '.join(imported)}, whose attention is not replaced."
    now = F.scaled_dot_product_attention
    if now is not patched:
        name = f"{now.__module__}.{getattr(now, '__qualname__', now)}"
        yield f"The program put {name} before PyTorch's attention; SageBwd saw what that hands on."


if __name__ == "__main__":
    main()
