"""A change to the kernels: is it faster, and are the bits the same?

    git worktree add ../before HEAD~1
    python -m scripts.bench.changes ../before --kernels hopper --configs default 16-bit-dq

Two checkouts, that folder and this one, take turns on one GPU, each in a process of its own: before, after,
before, after. Kernels are compiled first, all at once. Times include quantization, and the host runs ahead.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data.files import write_json
from scripts.bench import measure_tree
from scripts.bench.attention_peers import CONFIGS
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.output import align

PROGRAM = "python -m scripts.bench.changes"
ROOT = Path(__file__).parents[2]
#: Processes that compile at a time in each checkout.
COMPILERS = 8


class Pair(NamedTuple):
    """What both checkouts gave for one case: a result of each round."""

    name: str
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]

    def row(self) -> list[str]:
        """Cells of the table; times are the smaller of all rounds."""
        failed = [result["error"] for result in (*self.before, *self.after) if "error" in result]
        if failed:
            return [self.name, *[""] * 7, failed[0]]
        cells = []
        for kind in ("forward", "backward"):
            old, new = (min(result[kind] for result in results) for results in (self.before, self.after))
            cells += [f"{old:.3f}", f"{new:.3f}", f"{old / new:.3f}"]
        digests = {result["digest"] for result in (*self.before, *self.after)}
        repeats = all(result["repeats"] for result in (*self.before, *self.after))
        return [
            self.name,
            *cells,
            "same" if len(digests) == 1 else "differ",
            "" if repeats else "do not repeat",
        ]


HEADER = [
    "case",
    *(f"{kind}, ms: {which}" for kind in ("forward", "backward") for which in ("before", "after", "ratio")),
    "bits",
    "remark",
]


def main(argv: list[str] | None = None) -> list[Pair]:
    """Measure, print the table, write JSON if asked to."""
    arguments = parse_arguments(argv)
    cases = dict(named_cases(arguments))
    trees = (arguments.before.resolve(), ROOT)
    if arguments.device != "cpu":
        compile_all([*cases.values()], trees)
    rounds: list[list[dict[str, Any]]] = []
    for tree in tqdm(trees * arguments.rounds, desc="checkouts", disable=not sys.stderr.isatty()):
        rounds.append(measure(tree, [*cases.values()]))
    pairs = [
        Pair(name, [found[i] for found in rounds[::2]], [found[i] for found in rounds[1::2]])
        for i, name in enumerate(cases)
    ]
    print("\n".join(align(HEADER, [pair.row() for pair in pairs])))
    if arguments.out:
        arguments.before = str(arguments.before)
        result = describe_run(PROGRAM, argv, arguments, ()) | {"pairs": [pair._asdict() for pair in pairs]}
        write_json(arguments.out, result)
    return pairs


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument("before", type=Path, help="the other checkout, a folder that holds sagebwd/")
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument(
        "--configs", choices=CONFIGS, default=["default"], **several, help=f"of SageBwd: {', '.join(CONFIGS)}"
    )
    parser.add_argument("--kernels", default=[None], **several, help="by name; default the fastest that can")
    parser.add_argument(
        "--masks", choices=("causal", "full"), default=["causal", "full"], **several, help="default both"
    )
    for name, default in {"head-dims": [64, 128], "lengths": [4096]}.items():
        parser.add_argument(
            f"--{name}", type=positive_int, nargs="+", default=default, help="default %(default)s"
        )
    sizes = {
        "tokens": (16384, "B·N"),
        "width": (2048, "H·D"),
        "repetitions": (30, "timed calls"),
        "rounds": (2, "of both"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{text} (default %(default)s)"
        )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="cuda or cpu; by default a GPU if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all results")
    arguments = parser.parse_args(argv)
    if not (arguments.before / "sagebwd").is_dir():
        parser.error(
            f"{arguments.before} holds no sagebwd/; make a checkout: git worktree add ../before HEAD~1"
        )
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def named_cases(arguments: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each combination of the options, as :func:`scripts.bench.measure_tree.measure` takes it."""
    a = arguments
    for kernels, config, head_dim, mask, length in product(
        a.kernels, a.configs, a.head_dims, a.masks, a.lengths
    ):
        case = {
            "batch": max(1, a.tokens // length), "heads": max(1, a.width // head_dim), "length": length,
            "head_dim": head_dim, "is_causal": mask == "causal", "dtype": a.dtype, "device": a.device,
            "kernels": kernels, "config": asdict(CONFIGS[config][1]), "repetitions": a.repetitions,
        }  # fmt: skip
        yield f"{kernels or 'fastest'}, {config}, D {head_dim}, {mask}, N {length}", case


def compile_all(cases: list[dict[str, Any]], trees: tuple[Path, ...]) -> None:
    """Run every case once, small, in several processes: kernels are in the cache before any is timed.

    What fails here fails again when it is timed, or is compiled only then.
    """
    small = [case | {"batch": 1, "heads": 1, "length": 256, "repetitions": 0} for case in cases]
    parts = [(tree, small[i::COMPILERS]) for tree in trees for i in range(min(COMPILERS, len(small)))]

    def compile_part(part: tuple[Path, list[dict[str, Any]]]) -> None:
        with contextlib.suppress(RuntimeError):
            measure(*part)

    with ThreadPoolExecutor(len(parts)) as pool:
        compiled = pool.map(compile_part, parts)
        for _ in tqdm(compiled, total=len(parts), desc="compile", disable=not sys.stderr.isatty()):
            pass


def measure(tree: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of :mod:`scripts.bench.measure_tree` with the sagebwd of ``tree``.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    # As text, so that the folder of checkouts, and not that of this script, is where Python looks first.
    command = [sys.executable, "-c", Path(measure_tree.__file__).read_text(encoding="utf-8")]
    done = subprocess.run(command, input=json.dumps(cases), cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {tree} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
