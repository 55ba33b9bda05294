"""Reproduce the paper's tables and figures, one command each.

    python -m scripts.reproduce --list

An item (configs/paper/ITEM.yaml) trains the runs it needs, measures, and writes ITEM.json (or ITEM.json.gz)
and a picture to a folder of runs/reproduce/results. The committed numbers in results/ change only with
--write-results; the report there is then filled in again: python -m scripts.paper.report.

Runs are `train.py` command lines, each with a directory below --runs-dir, where items that share a run find
it: an interrupted run is continued, a finished one is not run again. Stop it at any time (Ctrl-C, SIGTERM):
running runs save, and the same command continues. When a run fails, the end of its log is shown and the
others go on; the exit code is then 1.

Everything after -- goes to every train.py: the text, most of all, or hardware settings.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from tqdm import tqdm

from common.errors import Interrupted
from common.files import read_lines
from common.overrides import override
from common.terminal import command_parser, positive_int
from scripts.paper.experiments import SCALES, Item, Run, duration_in_words, find, items, total_cost
from scripts.runs import is_settled
from trainer.identity import may_change
from trainer.processes import FAILED, FINISHED, POLL_S, Job, Outcome, StopSignal, forget_one_run, run_all
from trainer.run_directory import RunDirectory
from trainer.settings import check_or_exit

#: The committed results.
RESULTS = Path("results")
#: Overrides that choose the text; runs that start from others have their own, or that of the other.
TEXT = (
    *("data=", "data.path=", "data.val_path=", "data.column=", "data.tokenizer="),
    *("data.val_fraction=", "data.name=", "data.config=", "data.split=", "data.folder="),
)
#: What each run has of its own.
OWN = ("run_dir=", "runs_dir=", "init_from=", "branch_from=", "seed=")

EXAMPLES = """
examples:
  what there is, and what it costs
      python -m scripts.reproduce --list
  Table 1: on a CPU, in under a minute
      python -m scripts.reproduce table1
  see all training items work, in minutes on a CPU
      python -m scripts.reproduce figure1a figure4 finetune --scale debug
  everything at the scale of this checkout's results, on two GPUs, two runs at a time on each
      python -m scripts.reproduce --all --gpus 0,1 --per-gpu 2 -- data=parquet 'data.path=corpus/*.parquet'
  measure Table 1 again and replace the committed numbers
      python -m scripts.reproduce table1 --write-results
  the commands alone
      python -m scripts.reproduce figure1a --dry-run
"""


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.list:
        print(listing())
        return
    also = "" if arguments.write_results else f"; --write-results replaces those in {RESULTS}/"
    print(f"results go to {arguments.results}/{also}", flush=True)
    failed = []
    for item in arguments.items:
        print(f"{item.name}: {item.title}", flush=True)
        try:
            if not reproduce(item, arguments):
                failed.append(item.name)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            sys.exit(128 + stop.signal)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; when that is fixed, the same command tries what is missing")


# --- Command line -------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else list(argv)
    place = argv.index("--") if "--" in argv else len(argv)
    parser = command_parser("python -m scripts.reproduce", __doc__, EXAMPLES)
    parser.usage = "%(prog)s [ITEM …] [options] [-- OVERRIDES OF train.py …]"
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help="what to reproduce; --list shows the names")
    add("--list", action="store_true", help="show all items with their cost, and end")
    add("--all", action="store_true", help="every item whose result is not there yet, in order")
    add(
        "--scale",
        choices=SCALES,
        default="scaled",
        help="full: the paper's; scaled: hours of one H200; debug: seconds on a CPU, the numbers mean "
        "nothing (default %(default)s)",
    )
    add("--gpus", default="", metavar="N[,N …]", help="GPUs to distribute runs over (default: what CUDA has)")
    add("--per-gpu", type=positive_int, default=1, metavar="N", help="runs at a time on each (default 1)")
    add("--runs-dir", type=Path, default=Path("runs/reproduce"), help="holds the runs (default %(default)s)")
    add(
        "--results",
        type=Path,
        help="folder for JSON and pictures (default: RUNS_DIR/results, or RUNS_DIR/debug-results with "
        "--scale debug)",
    )
    add("--write-results", action="store_true", help=f"replace the committed numbers in {RESULTS}/")
    add("--dry-run", action="store_true", help="print the commands and end")
    arguments = parser.parse_args(argv[:place])
    arguments.overrides = argv[place + 1 :]
    arguments.gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    check(arguments, parser)
    return arguments


def check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be run, before anything is; find the items and the folder of results."""
    for text in arguments.overrides:
        if "=" not in text:
            parser.error(f"{text!r} after -- is not an override of train.py; write name=value")
        if text.startswith(OWN):
            parser.error(f"{text} after --: each run has its own; to train one again, delete its folder")
    check_or_exit(arguments.overrides, Path(__file__).parents[1] / "configs")
    if arguments.write_results and arguments.scale == "debug":
        parser.error("--write-results: the debug scale measures nothing; use --scale scaled or full")
    name = "debug-results" if arguments.scale == "debug" else "results"
    elsewhere = arguments.results or arguments.runs_dir / name
    if not arguments.write_results and elsewhere.resolve() == RESULTS.resolve():
        parser.error(f"--results {elsewhere}: use --write-results to replace the committed numbers")
    arguments.results = RESULTS if arguments.write_results else elsewhere
    if arguments.list:
        return
    if not Path("train.py").exists():
        parser.error("there is no train.py here; run this from the root of the checkout")
    if bool(arguments.items) == arguments.all:
        parser.error("name what to reproduce, or --all; --list shows the names")
    missing = [one for one in items().values() if not list(arguments.results.glob(f"{one.result}.json*"))]
    try:
        arguments.items = [find(name) for name in arguments.items] or missing
    except KeyError as error:
        parser.error(f"there is no item {error}; choose among {', '.join(items())}")


def listing() -> str:
    """A line for each item: cost of one H200 at both scales, runs, title and further names."""
    lines = [f"{'item':20} {'scaled':>8} {'full':>8} {'runs':>10}  what"]
    for item in items().values():
        scaled, full = (duration_in_words(item.cost(scale)) for scale in ("scaled", "full"))
        runs = " / ".join(str(len(item.runs[scale])) for scale in ("scaled", "full") if item.runs[scale])
        also = f" (also {', '.join(item.also)})" if item.also else ""
        lines.append(f"{item.name:20} {scaled:>8} {full:>8} {runs:>10}  {item.title}{also}")
    total = " / ".join(duration_in_words(total_cost(scale)) for scale in ("scaled", "full"))
    told = "estimated time of one H200 (table1: a CPU); runs that items share are counted once here"
    return "\n".join([*lines, "", f"All: {total}, {told}."])


# --- An item ------------------------------------------------------------------------------------------------


def reproduce(item: Item, arguments: argparse.Namespace) -> bool:
    """Train the item's runs and measure; whether all went well. Raises Interrupted."""
    runs = item.runs[arguments.scale]
    if arguments.dry_run:
        print("".join(f"{shlex.join(train_command(run, arguments))}\n" for run in runs), end="")
        paths = [arguments.runs_dir / run.name for run in item.compared(arguments.scale)]
        commands = [measure_command(text, paths, arguments) for text in item.commands[arguments.scale]]
        print("\n".join(map(shlex.join, commands)))
        return True
    if problems := [problem for run in runs if (problem := unlike_finished(run, arguments))]:
        print("\n".join(problems), file=sys.stderr)
        return False
    well = True
    for stage in stages(runs):
        well = train(stage, arguments) and well
    directories = [RunDirectory(arguments.runs_dir / run.name) for run in item.compared(arguments.scale)]
    paths = [directory.path for directory in directories if can_be_read(directory, item)]
    if runs and not paths:
        print(f"{item.name}: none of its runs is there, so there is nothing to measure", file=sys.stderr)
        return False
    (arguments.results / item.result).parent.mkdir(parents=True, exist_ok=True)
    # Commands build on each other: none is tried after one that failed.
    return all(measure(text, paths, arguments) for text in item.commands[arguments.scale]) and well


def can_be_read(directory: RunDirectory, item: Item) -> bool:
    """Whether the item's commands can use the run as it is; says so if not, once it has been started."""
    if not directory.metrics.exists():
        return False
    if item.needs_weights and not directory.is_finished:
        print(f"{item.name}: {directory.path} is left out, it has no finished weights", file=sys.stderr)
        return False
    return True


# --- Training -----------------------------------------------------------------------------------------------


def stages(runs: Sequence[Run]) -> list[list[Run]]:
    """First the runs that need no others, then those that start from them."""
    first = [run for run in runs if run.after is None]
    return [first, [run for run in runs if run.after is not None]]


def train(runs: Sequence[Run], arguments: argparse.Namespace) -> bool:
    """Train what is not finished; whether all runs came to an end of their own. Raises Interrupted."""
    jobs = [
        job(run, arguments) for run in runs if not is_settled(RunDirectory(arguments.runs_dir / run.name))
    ]
    places = [*arguments.gpus] * arguments.per_gpu
    forget_one_run(len(runs))
    failed = []

    def note_end(job: Job, outcome: Outcome) -> None:
        if outcome.kind != FINISHED:
            failed.append(job.name)
        if outcome.kind == FAILED:
            tqdm.write(indent(outcome.reason, "    "), file=sys.stderr)

    if stopped_by := run_all(jobs, gpus=places, limit=len(places) or arguments.per_gpu, on_end=note_end):
        raise interrupted(stopped_by)
    return not failed


def train_command(run: Run, arguments: argparse.Namespace) -> list[str]:
    """The train.py command line of a run."""
    given = [text for text in arguments.overrides if not (run.after and text.startswith(TEXT))]
    own = [*run.overrides, override("run_dir", arguments.runs_dir / run.name)]
    if run.branches_from:
        own.append(override("branch_from", arguments.runs_dir / run.branches_from))
    if run.starts_from:
        own.append(override("init_from", arguments.runs_dir / run.starts_from / "weights"))
    return [sys.executable, "train.py", *own, *given]


def job(run: Run, arguments: argparse.Namespace) -> Job:
    """Its training as a job; a run that diverged has come to an end, too."""
    own = RunDirectory(arguments.runs_dir / run.name)
    return Job(
        run.name,
        train_command(run, arguments),
        own.path.with_name(f"{own.path.name}.log"),
        gpus=run.gpus if arguments.gpus else 0,
        ended_well=lambda code: own.diverged_at() is not None or (code == 0 and own.is_finished),
    )


def unlike_finished(run: Run, arguments: argparse.Namespace) -> str | None:
    """What is wrong if the finished run of this name was trained with other settings than these."""
    own = RunDirectory(arguments.runs_dir / run.name)
    if not is_settled(own):
        return None
    before = read_lines(own.environment)[-1]["command"]
    changed = sorted(identifying(before) ^ identifying(train_command(run, arguments)))
    if not changed:
        return None
    return (
        f"{own.path} is finished, but with other settings: {', '.join(changed)} on one side only; give "
        "these runs another --runs-dir, or delete that folder"
    )


def identifying(command: Sequence[str]) -> set[str]:
    """The settings of a train.py command line that make the run what it is."""
    return {text for text in command if "=" in text and not may_change(text.split("=")[0])}


# --- Measuring ----------------------------------------------------------------------------------------------


def measure_command(text: str, runs: Sequence[Path], arguments: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m"]
    for word in text.split():
        words += map(str, runs) if word == "{runs}" else [word.replace("{results}", str(arguments.results))]
    return words


def measure(text: str, runs: Sequence[Path], arguments: argparse.Namespace) -> bool:
    """Run one of scripts/ on the runs; whether it succeeded. Raises Interrupted."""
    command = measure_command(text, runs, arguments)
    code = run_here(command, arguments.gpus[0] if arguments.gpus else None)
    if code:
        print(f"{shlex.join(command)} failed with exit code {code}", file=sys.stderr)
    return code == 0


def run_here(command: Sequence[str], gpu: str | None) -> int:
    """Run one command with its output on the terminal; its exit code. gpu: None for what CUDA finds."""
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with StopSignal() as stop:
        process = subprocess.Popen(command, env={**os.environ, **visible}, start_new_session=True)
        while process.poll() is None and not stop.signal:
            time.sleep(POLL_S)
        if stop.signal:
            process.send_signal(signal.SIGINT)  # what the commands of scripts/ clean up upon
            process.wait()
            raise interrupted(stop.signal)
    return process.returncode


def interrupted(number: int) -> Interrupted:
    name = signal.Signals(number).name
    return Interrupted(f"stopped by {name}; the same command continues", number)


if __name__ == "__main__":
    main()
