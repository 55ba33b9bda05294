"""Compare training runs over seeds: final losses, divergence, differences and how sure they are.

    python -m scripts.paper.curves runs/35m-131k/* --out runs/paper/figure1a

Reads run directories (config.yaml, metrics.jsonl, environment.jsonl) and writes OUT.json.gz, with each run's
settings, thinned loss curve and the losses behind its final loss, and OUT.png. It prints the differences
between these runs; the report compares them with the runs of all experiments that share their setup. Such a
JSON file replaces its runs, whose directories may be deleted: name it
together with further runs to merge them into one comparison:

    python -m scripts.paper.curves results/figure1a.json.gz runs/more/* --out runs/paper/figure1a

Runs of one model and schedule make a group; within it, runs that differ in the seed alone make a variant.

    final loss   mean training loss of the last tenth of the steps
    diverged     a loss or gradient that is not finite, or at the end a final loss more than 0.3 above the
                 lowest mean of an earlier tenth
    difference   of two variants' final losses, with a 95% interval. The runs of a seed share initialisation
                 and order of the data, so a loss is modeled as variant + seed + noise, by least squares over
                 the group; the noise is what that leaves. One seed gives no interval, unless a run of it
                 was repeated: then the noise is that between repetitions. A repetition has the same commit
                 and settings; of a seed that several commits ran, only one commit's runs count.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser
from scripts.output import with_ending
from scripts.paper import drawing
from scripts.paper.loss_pictures import TITLES, draw, group_name
from scripts.paper.loss_statistics import compare
from scripts.paper.result_files import write_compressed_json
from scripts.paper.run_summary import read
from scripts.paper.variants import title_of

PROGRAM = "python -m scripts.paper.curves"


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        runs = [run for path in arguments.runs for run in read(path)]
        finished = [run for run in runs if run["finished"] or run["diverged"]]
        if not finished:
            raise ValueError(
                f"none of the {len(runs)} runs is finished; train them first: the same train.py commands"
            )
        groups = compare(finished)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    result = {**describe(argv, arguments, finished), "runs": runs}
    written = write_compressed_json(with_ending(arguments.out, ".json"), result)
    title = TITLES.get(arguments.item, "Training loss")
    drawing.save(draw(groups, finished, title), with_ending(arguments.out, ".png"))
    print("\n".join(lines_of(groups)))
    print(f"{len(finished)} of {len(runs)} runs compared, written to {written} and {arguments.out}.png")


def lines_of(groups: list[dict]) -> list[str]:
    """Final losses of each group, with the difference to its first variant."""
    lines = []
    for group in groups:
        lines += ["", group_name(group).replace("\n", " ")]
        first = group["variants"][0]["variant"]
        gaps = {pair["of"]: pair for pair in group["differences"] if pair["minus"] == first}
        for variant in group["variants"]:
            loss, gap = variant["final_loss"], gaps.get(variant["variant"])
            words = [title_of(variant["variant"]), "diverged" if variant["diverged"] else f"{loss:.4f}"]
            if gap:
                words.append(f"{gap['mean']:+.4f}")
            if gap and gap["half_width"] is not None:
                words.append(f"± {gap['half_width']:.4f}")
            lines.append("  " + "  ".join(words))
        lines += [f"  left out, repeated by other code: {run['name']}" for run in group["left_out"]]
    return [*lines, ""]


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or OUT.json.gz of this command")
    parser.add_argument("--out", type=Path, required=True, help="beginning of the files' names")
    parser.add_argument("--item", help="the experiment these runs belong to (scripts/paper/experiments.py)")
    parser.add_argument("--scale", default="scaled", help="its scale (default %(default)s)")
    return parser.parse_args(argv)


def describe(argv: list[str] | None, arguments: Namespace, runs: list[dict]) -> dict[str, Any]:
    """What the numbers are; the hardware and commits are the runs' own."""
    settings = Namespace(item=arguments.item, scale=arguments.scale, device="cpu")
    devices = sorted({run["device"] for run in runs})
    return {
        "values": "losses in nats per token; final_loss: mean of last_losses",
        **describe_run(PROGRAM, argv, settings, ()),
        "item": arguments.item,
        "scale": arguments.scale,
        "hardware": ", ".join(devices),
    }


if __name__ == "__main__":
    main()
