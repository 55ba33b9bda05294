"""Reproduce the paper's tables and figures, one command each.

    python -m scripts.reproduce --list
    python -m scripts.reproduce table1
    python -m scripts.reproduce figure1a --gpus 0,1 --per-gpu 2 -- data=parquet 'data.path=corpus/*.parquet'
    python -m scripts.reproduce --all --scale full

An item trains the runs it needs, measures, and writes ITEM.json (or ITEM.json.gz), a picture, and the report,
README.md, to runs/reproduce/results. The committed numbers in results/ change only with --write-results.

Runs are `train.py` command lines, each with a directory below --runs-dir, where items that share a run find
it: an interrupted run is continued, a finished one is not run again. Stop it at any time (Ctrl-C, SIGTERM):
running runs save, and the same command continues. When a run fails, the end of its log is shown and the
others go on; the exit code is then 1.

Everything after -- goes to every train.py: the text, most of all, or hardware settings.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from data.command_line import override
from scripts.jobs import run_here, run_jobs
from scripts.paper import report
from scripts.paper.experiment_runs import SCALES, Run
from scripts.paper.experiments import ITEMS, RESULTS, RUNS, TRACES, Item, duration_in_words, find, total_cost
from scripts.paper.report.template import UnknownField
from scripts.paper.result_files import DamagedResult
from scripts.paper.run_summary import would_diverge
from scripts.runs import drop_weights_of, is_settled
from trainer.arguments import check_or_exit
from trainer.errors import Interrupted
from trainer.identity import may_change
from trainer.run_directory import RunDirectory, read_lines
from trainer.run_queue import Job

#: Overrides that choose the text; runs that bring their own do without them.
TEXT = (
    "data=",
    "data.path=",
    "data.val_path=",
    "data.column=",
    "data.tokenizer=",
    "data.val_fraction=",
    "data.name=",
)

ELSEWHERE = f"; --write-results replaces the committed ones in {RESULTS}/"

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
    failed = []
    print(f"results go to {arguments.results}/{'' if arguments.write_results else ELSEWHERE}", flush=True)
    for item in arguments.items:
        if arguments.all and marker(arguments, item).exists():
            print(f"{item.name}: done before; python -m scripts.reproduce {item.name} runs it again")
            continue
        print(f"{item.name}: {item.title}", flush=True)
        try:
            done = reproduce(item, arguments)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            sys.exit(128 + stop.signal)
        if arguments.dry_run:
            continue
        if done:
            mark_done(arguments, item)
        else:
            failed.append(item.name)
        renew_report(arguments.results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; when that is fixed, the same command tries what is missing")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    argv, overrides = split_at_dashes(argv)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        usage="%(prog)s [ITEM …] [options] [-- OVERRIDES OF train.py …]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("items", nargs="*", metavar="ITEM", help="what to reproduce; --list shows the names")
    parser.add_argument("--list", action="store_true", help="show all items with their cost, and end")
    parser.add_argument("--all", action="store_true", help="every item that is not done yet, in order")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="scaled",
        help="full: the paper's; scaled: hours of one H200; debug: seconds on a CPU, the numbers mean "
        "nothing (default %(default)s)",
    )
    parser.add_argument(
        "--gpus", default="", metavar="N[,N …]", help="GPUs to distribute runs over (default: what CUDA has)"
    )
    parser.add_argument(
        "--per-gpu", type=int, default=1, metavar="N", help="runs at a time on each (default 1)"
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs/reproduce"), help="holds the runs (default %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for JSON, pictures and the report (default: RUNS_DIR/results, or RUNS_DIR/debug-results "
        "with --scale debug)",
    )
    parser.add_argument(
        "--write-results",
        action="store_true",
        help=f"replace the committed numbers, pictures and report in {RESULTS}/",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and end")
    arguments = parser.parse_args(argv)
    arguments.overrides = overrides
    arguments.gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    check(arguments, parser)
    arguments.results = results_folder(arguments)
    return arguments


def results_folder(arguments: argparse.Namespace) -> Path:
    """Where JSON, pictures and the report go: into results/ only on request."""
    if arguments.write_results:
        return RESULTS
    name = "debug-results" if arguments.scale == "debug" else "results"
    return arguments.results or arguments.runs_dir / name


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after the first --."""
    place = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:place]), list(argv[place + 1 :])


def check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be run, before anything is."""
    if arguments.per_gpu < 1:
        parser.error(f"--per-gpu {arguments.per_gpu}: at least one run at a time")
    for text in arguments.overrides:
        if "=" not in text:
            parser.error(f"{text!r} after -- is not an override of train.py; write name=value")
        if text.startswith(("run_dir=", "runs_dir=", "init_from=", "seed=", "rerun_finished=")):
            parser.error(f"{text} after --: each run has its own; to train one again, delete its folder")
    check_or_exit(arguments.overrides, Path(__file__).parents[1] / "configs")
    if arguments.write_results and arguments.scale == "debug":
        parser.error("--write-results: the debug scale measures nothing; use --scale scaled or full")
    if arguments.write_results and arguments.results:
        parser.error(f"--write-results writes to {RESULTS}/; leave out --results {arguments.results}")
    if arguments.results and arguments.results.resolve() == RESULTS.resolve():
        parser.error(f"--results {arguments.results}: use --write-results to replace the committed numbers")
    if arguments.list:
        return
    if not Path("train.py").exists():
        parser.error("there is no train.py here; run this from the root of the checkout")
    if bool(arguments.items) == arguments.all:
        parser.error("name what to reproduce, or --all; --list shows the names")
    try:
        arguments.items = [find(name) for name in arguments.items] or list(ITEMS)
    except KeyError as error:
        parser.error(f"there is no item {error}; choose among {', '.join(item.name for item in ITEMS)}")


def listing() -> str:
    """All items as a table: cost of one H200 at both scales."""
    rows = []
    for item in ITEMS:
        runs = [len(item.runs(scale)) for scale in ("scaled", "full")]
        costs = [duration_in_words(item.cost(scale)) for scale in ("scaled", "full")]
        rows.append([item.name, *costs, " / ".join(map(str, runs)) if any(runs) else "", item.title])
    width = max(len(row[0]) for row in rows)
    lines = [f"{'item':{width}}  {'scaled':>8}  {'full':>8}  {'runs':>7}  what"]
    lines += [
        f"{name:{width}}  {scaled:>8}  {full:>8}  {runs:>7}  {title}"
        for name, scaled, full, runs, title in rows
    ]
    also = [f"{' and '.join(item.also)}: {item.name}" for item in ITEMS if item.also]
    return "\n".join(
        [
            *lines,
            "",
            f"All: {' / '.join(duration_in_words(total_cost(scale)) for scale in SCALES[1::-1])}. Estimated "
            "time of one H200; runs that items share are counted in each and once in all. table1 and "
            "causal_leak run on a CPU.",
            f"Further names: {'; '.join(also)}.",
        ]
    )


def reproduce(item: Item, arguments: argparse.Namespace) -> bool:
    """Train the item's runs and measure; whether all went well. Raises Interrupted."""
    absent = [command[0] for command in item.commands[arguments.scale] if not find_spec(command[0])]
    if absent:  # said before hours are spent on training
        print(f"{item.name}: {', '.join(absent)} is not part of this checkout yet", file=sys.stderr)
        return False
    well = True
    for stage in item.stages.get(arguments.scale, ()):
        if problems := unlike_finished_runs(stage, arguments):
            print("\n".join(problems), file=sys.stderr)
            return False
        well = train(stage, arguments, keep_weights=item.keeps_weights) and well
    paths = [arguments.runs_dir / run.name for run in compared(item, arguments.scale)]
    if not arguments.dry_run:
        paths = [path for path in paths if can_be_read(RunDirectory(path), item)]
        if item.stages and not paths:
            print(f"{item.name}: none of its runs is there, so there is nothing to measure", file=sys.stderr)
            return False
        arguments.results.mkdir(parents=True, exist_ok=True)
    # Commands build on each other: none is tried after one that failed.
    return all(measure(command, paths, arguments) for command in item.commands[arguments.scale]) and well


def can_be_read(directory: RunDirectory, item: Item) -> bool:
    """Whether the item's commands can use the run as it is; says so if not, once it has been started."""
    if not directory.metrics.exists():
        return False
    if item.of_weights and not directory.is_finished:
        print(f"{item.name}: {directory.path} is left out, it has no finished weights", file=sys.stderr)
        return False
    return True


def compared(item: Item, scale: str) -> list[Run]:
    """The runs that the item's command reads: all but those that others only start from."""
    runs = item.runs(scale)
    started_from = {run.starts_from for run in runs}
    return [run for run in runs if run.name not in started_from]


# --- Training -----------------------------------------------------------------------------------------------


def train(runs: Sequence[Run], arguments: argparse.Namespace, *, keep_weights: bool = True) -> bool:
    """Train what is not finished; whether all runs came to an end of their own. Raises Interrupted."""
    if not arguments.dry_run:
        runs = [run for run in runs if is_worth_training(run, arguments)]
    commands = {run: train_command(run, arguments) for run in runs}
    if arguments.dry_run:
        print("\n".join(shlex.join(command) for command in commands.values()))
        return True
    jobs = [job(run, commands[run], arguments) for run in runs if not is_settled(directory(run, arguments))]
    tidy = (lambda job: None) if keep_weights else drop_weights_of
    return not run_jobs(jobs, arguments.gpus, arguments.per_gpu, on_success=tidy)


def unlike_finished_runs(runs: Sequence[Run], arguments: argparse.Namespace) -> list[str]:
    """Which runs are finished with other settings: they are neither trained nor measured."""
    if arguments.dry_run:
        return []
    found = (unlike_finished(run, train_command(run, arguments), arguments) for run in runs)
    return [problem for problem in found if problem]


def is_worth_training(run: Run, arguments: argparse.Namespace) -> bool:
    """False if all the runs that would say how this one ends have diverged; says so."""
    before = [RunDirectory(arguments.runs_dir / name) for name in run.unless_diverged]
    if not before or not all(map(would_diverge, before)):
        return True
    print(f"{run.name}: not trained, it diverged at half the learning rate in every seed", flush=True)
    return False


def train_command(run: Run, arguments: argparse.Namespace) -> list[str]:
    """The train.py command line of a run."""
    given = [text for text in arguments.overrides if not (run.own_text and text.startswith(TEXT))]
    own = [*run.overrides, override("run_dir", arguments.runs_dir / run.name)]
    if run.starts_from:
        own.append(override("init_from", arguments.runs_dir / run.starts_from / "weights"))
    return [sys.executable, "train.py", *own, *given]


def job(run: Run, command: list[str], arguments: argparse.Namespace) -> Job:
    """Its training as a job; a run that diverged has come to an end, too."""
    own = directory(run, arguments)
    log = own.path.with_name(f"{own.path.name}.log")
    return Job(run.name, command, log, ended_well=lambda code: code == 0 or own.diverged_at() is not None)


def directory(run: Run, arguments: argparse.Namespace) -> RunDirectory:
    return RunDirectory(arguments.runs_dir / run.name)


def unlike_finished(run: Run, command: list[str], arguments: argparse.Namespace) -> str | None:
    """What is wrong if the finished run of this name was trained with other settings than these."""
    own = directory(run, arguments)
    if not is_settled(own):
        return None
    before = set(overrides_of(read_lines(own.path / "environment.jsonl")[-1]["command"]))
    changed = sorted(before ^ set(overrides_of(command)))
    if not changed:
        return None
    return (
        f"{own.path} is finished, but with other settings: {', '.join(changed)} on one side only; give "
        "these runs another --runs-dir, or delete that folder"
    )


def overrides_of(command: Sequence[str]) -> list[str]:
    """The settings of a train.py command line that make the run what it is."""
    return [text for text in command if "=" in text and not may_change(text.split("=")[0])]


# --- Measuring ----------------------------------------------------------------------------------------------


def measure(command: Sequence[str], runs: Sequence[Path], arguments: argparse.Namespace) -> bool:
    """Run one of scripts/ on the runs; whether it succeeded."""
    lists = {RUNS: [str(run) for run in runs], TRACES: [str(RunDirectory(run).traces) for run in runs]}
    module, *rest = command
    words = [w for text in rest for w in lists.get(text, [text.replace("{results}", str(arguments.results))])]
    line = [sys.executable, "-m", module, *words]
    if arguments.dry_run:
        print(shlex.join(line))
        return True
    code = run_here(line, arguments.gpus[0] if arguments.gpus else None)
    if code:
        print(f"{shlex.join(line)} failed with exit code {code}", file=sys.stderr)
    return code == 0


# --- What is done -------------------------------------------------------------------------------------------


def marker(arguments: argparse.Namespace, item: Item) -> Path:
    """The file that says that --all need not run this item again."""
    where = "-committed" if arguments.write_results else ""
    return arguments.runs_dir / "done" / f"{arguments.scale}-{item.name}{where}"


def mark_done(arguments: argparse.Namespace, item: Item) -> None:
    path = marker(arguments, item)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def renew_report(folder: Path) -> None:
    """Write the report, unless a file it needs is damaged: that must not end a long command."""
    try:
        print(f"report: {report.write(folder)}")
    except (DamagedResult, UnknownField, FileNotFoundError) as error:
        print(f"the report could not be renewed: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
