"""Train the runs that scripts.paper.large_logits compares: gains of QK-norm × attentions × seeds.

    python -m scripts.paper.large_logits_runs --gpus 0,1 --per-gpu 3 -- data=parquet 'data.path=DIR/*.parquet'
    python -m scripts.paper.large_logits_runs --assay one_batch --gains 1 4 --seeds 1 2 3 -- data=parquet …

Assays:

    large_logits   50M tokens of text, each seen once
    one_batch      the same 131,072 tokens at every step, so that there is no minibatch noise

Stop it at any time (Ctrl-C, SIGTERM, `timeout -s TERM 550 …`): running runs save, and the same command
continues. Finished runs are skipped. Runs go seed by seed, so that whole comparisons are done first. A
finished run keeps its metrics and settings (0.2 MB) and loses its checkpoint and weights (0.5 GB), unless
--keep-weights.

`python -m scripts.reproduce large_logits one_batch` trains the whole grid in the same folder, compares the
runs and writes the report; this command trains parts of it.

Everything after -- goes to every train.py: the text, most of all.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data.command_line import override
from scripts.command_line import command_parser, positive_int
from scripts.jobs import run_jobs
from scripts.paper.further_runs import ASSAYS, GAINS, SEEDS, SETTINGS, gain_overrides, name_of
from scripts.runs import drop_weights_of, is_settled
from trainer.errors import Interrupted
from trainer.run_directory import RunDirectory
from trainer.run_queue import Job

PROGRAM = "python -m scripts.paper.large_logits_runs"


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    commands = grid(arguments)
    if arguments.dry_run:
        print("\n".join(shlex.join(command) for command in commands.values()))
        return
    jobs = [job(path, command) for path, command in commands.items() if not is_settled(RunDirectory(path))]
    print(f"{len(commands) - len(jobs)} of {len(commands)} runs are finished", flush=True)
    tidy = (lambda job: None) if arguments.keep_weights else drop_weights_of
    try:
        failed = run_jobs(jobs, arguments.gpus, arguments.per_gpu, on_success=tidy)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signal)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the same command tries these again")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    argv = list(sys.argv[1:] if argv is None else argv)
    dashes = argv.index("--") if "--" in argv else len(argv)
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--assay", nargs="+", choices=ASSAYS, default=[ASSAYS[0]], help="(default large_logits)")
    add("--gains", nargs="+", type=float, default=GAINS, help="of QK-norm (default 1 2 4 8)")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="(default all)")
    add("--seeds", nargs="+", type=int, default=SEEDS, help="(default 1 to 5)")
    add("--gpus", default="", metavar="N[,N …]", help="GPUs to distribute runs over (default: what CUDA has)")
    add("--per-gpu", type=positive_int, default=1, metavar="N", help="runs at a time on each (default 1)")
    add("--runs-dir", type=Path, default=Path("runs/reproduce/large_logits"), help="(default %(default)s)")
    add("--keep-weights", action="store_true", help="keep checkpoints and weights of finished runs")
    add("--debug", action="store_true", help="tiny runs on a CPU; the numbers mean nothing")
    add("--dry-run", action="store_true", help="print the commands and end")
    arguments = parser.parse_args(argv[:dashes])
    arguments.overrides = argv[dashes + 1 :]
    arguments.gpus = [gpu for gpu in arguments.gpus.split(",") if gpu]
    for text in arguments.overrides:
        if "=" not in text:
            parser.error(f"{text!r} after -- is not an override of train.py; write name=value")
    if not Path("train.py").exists():
        parser.error("there is no train.py here; run this from the root of the checkout")
    return arguments


def grid(arguments: argparse.Namespace) -> dict[Path, list[str]]:
    """The train.py command line of each run, by its directory, in the order in which they run."""
    return {
        arguments.runs_dir / name_of(assay, gain, setting, seed): train_command(
            arguments, assay, gain, setting, seed
        )
        for seed in arguments.seeds
        for assay in arguments.assay
        for gain in arguments.gains
        for setting in arguments.settings
    }


def train_command(
    arguments: argparse.Namespace, assay: str, gain: float, setting: str, seed: int
) -> list[str]:
    run_dir = arguments.runs_dir / name_of(assay, gain, setting, seed)
    own = gain_overrides(assay, gain, setting, seed, debug=arguments.debug)
    return [sys.executable, "train.py", *own, override("run_dir", run_dir), *arguments.overrides]


def job(path: Path, command: Sequence[str]) -> Job:
    """A run that diverged has come to an end, too."""
    log = path.with_name(f"{path.name}.log")
    directory = RunDirectory(path)
    return Job(path.name, list(command), log, ended_well=lambda code: code == 0 or is_settled(directory))


if __name__ == "__main__":
    main()
