"""Store training runs for a comparison: every loss, settings, text, commit; and draw their curves.

    python -m scripts.paper.curves runs/35m-131k/* --out runs/paper/figure1a
    python -m scripts.paper.curves runs/no_qk_norm/* --window 130 152 --out runs/paper/loss_gap

Reads run directories (config.yaml, metrics.jsonl, environment.jsonl) and writes OUT.json.gz and, of runs that
are no branches (scripts.paper.branches draws them), OUT.png. Such a JSON file replaces its runs, whose
directories may be deleted: name it together with further runs to merge them. scripts.paper.losses compares
the runs of all such files.

    final loss   mean training loss of the last tenth of the steps, or of the steps of --window
    diverged     a loss or gradient that is not finite, or at the end a final loss more than 0.3 above the
                 lowest mean of an earlier tenth

Only runs on the same text are compared. Its fingerprint is in the run's checkpoints; --text names the text of
runs that were copied without them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from common.errors import ends_with_message
from common.terminal import command_parser, positive_int
from scripts.bench.measuring import describe_run
from scripts.output import save_figure, with_ending, write_compressed
from scripts.paper.experiments import items
from scripts.paper.losses import compare, losses_table
from scripts.paper.pictures import draw_curves
from scripts.paper.run_summary import read

PROGRAM = "python -m scripts.paper.curves"


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    runs = [run for path in arguments.runs for run in read(path, arguments.window, arguments.text)]
    finished = [run for run in runs if run["finished"] or run["diverged"]]
    if not finished:
        reached = "reached the window" if arguments.window else "is finished"
        raise ValueError(
            f"none of the {len(runs)} runs {reached}; train them first: the same train.py commands"
        )
    rows = compare(finished)
    result = {**describe(argv, arguments, finished), "runs": runs}
    written = write_compressed(arguments.out, result)
    title = items()[arguments.item].title if arguments.item in items() else "Training loss"
    whole = [run for run in finished if "branch_step" not in run["group"]]
    if whole:
        save_figure(draw_curves(whole, title), with_ending(arguments.out, ".png"))
    print(losses_table(rows))
    print(f"{len(finished)} of {len(runs)} runs compared, written to {written}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="run directories, or OUT.json.gz of this command")
    add("--out", type=Path, required=True, help="beginning of the files' names")
    add(
        "--window", nargs=2, type=positive_int, metavar=("FIRST", "LAST"), help="steps whose mean loss counts"
    )
    add("--text", help="the text's fingerprint, of runs without checkpoints")
    add("--item", help="the experiment these runs belong to (configs/paper/)")
    add("--scale", default="scaled", help="its scale (default %(default)s)")
    return parser.parse_args(argv)


def describe(argv: list[str] | None, arguments: Namespace, runs: list[dict]) -> dict[str, Any]:
    """What the numbers are; the hardware and commits are the runs' own."""
    settings = Namespace(item=arguments.item, scale=arguments.scale, device="cpu")
    return {
        "values": "losses in nats per token",
        **describe_run(PROGRAM, argv, settings, ()),
        "item": arguments.item,
        "scale": arguments.scale,
        "hardware": ", ".join(sorted({run["device"] for run in runs})),
    }


if __name__ == "__main__":
    main()
