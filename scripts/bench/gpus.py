"""How training scales over the GPUs of a machine, and whether it stays the same training.

    python -m scripts.bench.gpus --help

Trains the first steps of the same run again and again with `python train.py`, on one GPU and on several:

    ddp     a copy of the model on each GPU; gradients are exchanged once a step
    fsdp    weights, gradients and moments shared out (FSDP2)

The text is that of data=embedded, which needs no download, if no other is given after --. Tokens per step,
data and their order are the same everywhere, so the losses must be, to rounding. The speed
is the median of the steps after --warm-up; efficiency: that over the same of one GPU times their number.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from scripts.bench.measuring import (
    align,
    beside,
    choose_device,
    describe_run,
    number,
    origin_of,
    save_figure,
    write_tables,
)
from scripts.paper.arguments import positive_int
from scripts.paper.run_pool import Job, Stopped, run_all
from trainer.run_directory import RunDirectory, read_metrics

PROGRAM = "python -m scripts.bench.gpus"
EXAMPLES = """
examples:
  python -m scripts.bench.gpus --devices 1 2 4 8 -- data=openwebtext hardware.micro_batch=8
  python -m scripts.bench.gpus --parallel fsdp -- model=llama_1b hardware.micro_batch=4
  python -m scripts.bench.gpus --device cpu --devices 1 2 --steps 4 --warm-up 1 -- experiment=debug

writes
  results/bench_gpus.json   settings, hardware, versions, and the row of every run with its losses
  results/bench_gpus.md     the table
  results/bench_gpus.png    tokens/s over the number of GPUs
"""

#: What trainer.checkpoint logs of each checkpoint.
PAUSED = re.compile(r"training paused ([\d.]+) s for a checkpoint")


@dataclass
class Row:
    """One run. What was not measured is None or empty."""

    devices: int
    parallel: str  # "none" on one device
    reason: str | None = None  # why it failed
    tokens_per_second: float | None = None
    mfu: float | None = None
    efficiency: float | None = None  # of 1: as fast as that many single ones
    peak_memory_gib: float | None = None  # of the main rank's device
    loss_difference: float | None = None  # largest of all steps to the run on one device, in nats
    checkpoint_pause_s: float | None = None  # of the first: so soon after it, the next may wait for its write
    probe_s: float | None = None  # the last one; the first prepares
    losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "1" if self.devices == 1 else f"{self.devices}, {self.parallel}"


def main(argv: list[str] | None = None) -> None:
    """Train with every number of devices, print each row as it is done, write the files.

    A signal ends the run that is going on; the rows before it are written.
    """
    arguments = parse_arguments(argv)
    result = describe_run(PROGRAM, argv, arguments, ())
    del result["settings"]["runs_dir"]
    with tempfile.TemporaryDirectory(dir=arguments.runs_dir, prefix="bench_gpus-") as name:
        rows, code = train_all(arguments, Path(name))
    if rows:
        compare(rows)
        lines = table(rows, arguments.device)
        write_tables(arguments.out, result, rows, to_markdown(result, lines))
        draw(rows, beside(arguments.out, ".png"), result["hardware"]["name"])
        print("\n".join(["", *lines, "", f"written to {arguments.out}.json, .md and .png"]))
    if code:
        sys.exit(code)


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    count = {"type": positive_int, "metavar": "N"}
    add("--devices", **count, nargs="+", help="numbers of GPUs (default: 1, 2 and 4, as far as there are)")
    add("--parallel", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"], help="default both")
    add("--steps", **count, default=20, help="optimizer steps of each run (default %(default)s)")
    add("--warm-up", **count, default=4, help="steps before those that count (default %(default)s)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--runs-dir", type=Path, default=Path(tempfile.gettempdir()), help="scratch space (%(default)s)")
    out = Path("results/bench_gpus")
    add("--out", type=Path, default=out, help="what the files' names begin with (default %(default)s)")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="after --: settings of train.py, for all runs")
    arguments = parser.parse_args(argv)
    arguments.device = choose_device(arguments.device, parser)
    there = torch.cuda.device_count() if arguments.device == "cuda" else 1
    if not arguments.devices:
        arguments.devices = [n for n in (1, 2, 4) if n <= there]
    arguments.devices, arguments.parallel = (
        list(dict.fromkeys(x)) for x in (arguments.devices, arguments.parallel)
    )
    if arguments.device == "cuda" and max(arguments.devices) > there:
        parser.error(f"--devices {max(arguments.devices)}: this machine has {there}")
    if arguments.warm_up >= arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up} leaves none of --steps {arguments.steps} to be timed")
    return arguments


# --- The runs -----------------------------------------------------------------------------------------------


def train_all(arguments: Namespace, folder: Path) -> tuple[list[Row], int]:
    """One run after the other: the rows of those that ended, and the exit code."""
    rows = [Row(1, "none")] if 1 in arguments.devices else []
    rows += [Row(n, parallel) for n in arguments.devices if n > 1 for parallel in arguments.parallel]
    folders = {row.name: folder / f"{row.devices}-{row.parallel}" for row in rows}
    by_name = {row.name: row for row in rows}

    def read_and_show(done: Job) -> None:
        row = by_name[done.name]
        read(row, folders[row.name], arguments.warm_up)
        tqdm.write(f"{row.name}: {row.tokens_per_second:,.0f} tokens/s")

    jobs = [job(row, folders[row.name], arguments) for row in rows]
    try:
        failed = run_all(jobs, [None], on_success=read_and_show)
    except Stopped as stop:
        return [row for row in rows if row.losses], 128 + stop.number
    for one in failed:
        by_name[one.name].reason = " ".join(one.log.read_text(errors="replace").split())[-400:]
    return rows, 1 if failed else 0


def job(row: Row, folder: Path, arguments: Namespace) -> Job:
    """The train.py of a row. It saves one checkpoint in the middle and one at the end."""
    half = arguments.steps // 2
    settings = {
        "steps": arguments.steps,
        "tps.warmup_steps": 2,
        "hardware.device": arguments.device,
        "hardware.devices": row.devices,
        "hardware.parallel": row.parallel if row.devices > 1 else "auto",
        "log_every": 1,
        "eval_every": arguments.steps,
        "eval_sequences": max(arguments.devices),  # one each, for the end: nothing is compiled for so few
        "sample_tokens": 0,
        "checkpoint_every": max(half, 1),
        "probe.every": max(half - 1, 1),
        "run_dir": folder,
    }
    brings_text = any(text.startswith(("data=", "experiment=")) for text in arguments.overrides)
    own_text = () if brings_text else ("data=embedded",)
    command = [sys.executable, "train.py", "logger=files", *own_text, *arguments.overrides]
    return Job(row.name, [*command, *(f"{key}={value}" for key, value in settings.items())], log_of(folder))


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def read(row: Row, folder: Path, warm_up: int) -> None:
    """Fill in the row from what its run left."""
    directory = RunDirectory(folder)
    records = read_metrics(directory.metrics)
    steps = [record for record in records if "loss" in record]
    timed = [record for record in steps if record["step"] > warm_up]
    row.losses = [record["loss"] for record in steps]
    row.tokens_per_second = statistics.median(record["tokens_per_second"] for record in timed)
    if all(record["mfu"] for record in timed):
        row.mfu = statistics.median(record["mfu"] for record in timed)
    row.peak_memory_gib = steps[-1]["peak_memory_gib"]
    pauses = PAUSED.findall(log_of(folder).read_text(errors="replace"))
    row.checkpoint_pause_s = float(pauses[0]) if pauses else None
    probes = [record["probe/seconds"] for record in records if "probe/seconds" in record]
    row.probe_s = probes[-1] if probes else None


def compare(rows: list[Row]) -> None:
    """Fill in what needs the run on one device."""
    alone = next((row for row in rows if row.devices == 1 and row.losses), None)
    for row in rows if alone else []:
        if row.losses:
            row.efficiency = row.tokens_per_second / (row.devices * alone.tokens_per_second)
            pairs = zip(row.losses, alone.losses, strict=False)
            row.loss_difference = max(abs(loss - other) for loss, other in pairs)


# --- Table and picture --------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any], lines: list[str]) -> str:
    head = [
        "# Training on several GPUs",
        "",
        f"{origin_of(result)} `{PROGRAM} --help` says what the columns are.",
        "",
    ]
    return "\n".join([*head, *lines, ""])


def table(rows: list[Row], device: str) -> list[str]:
    header = ["GPUs" if device == "cuda" else "processes", "tokens/s", "efficiency", "MFU", "peak, GiB"]
    header += ["largest difference of the loss", "last loss", "pause for a checkpoint, s", "probe, s"]
    cells = [
        [
            row.name,
            "failed" if row.reason else number(row.tokens_per_second, ",.0f"),
            number(row.efficiency, ".1%"),
            number(row.mfu, ".1%"),
            number(row.peak_memory_gib, ".1f"),
            number(row.loss_difference, ".4f"),
            number(row.losses[-1] if row.losses else None, ".4f"),
            number(row.checkpoint_pause_s, ".2f"),
            number(row.probe_s, ".2f"),
        ]
        for row in rows
    ]
    return align(header, cells)


def draw(rows: list[Row], path: Path, hardware: str) -> None:
    """Tokens/s over the number of GPUs, beside that many times one of them."""
    import matplotlib  # slow to import; only needed when all is measured

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    done = [row for row in rows if row.tokens_per_second]
    alone = [row for row in done if row.devices == 1]
    for parallel in dict.fromkeys(row.parallel for row in done if row.devices > 1):
        curve = alone + [row for row in done if row.parallel == parallel]
        axes.plot(
            [row.devices for row in curve], [row.tokens_per_second for row in curve], "o-", label=parallel
        )
    if alone:
        counts = sorted({row.devices for row in done})
        axes.plot(
            counts,
            [n * alone[0].tokens_per_second for n in counts],
            "--",
            color="grey",
            label="that many times one",
        )
    axes.set(xlabel="GPUs", ylabel="tokens/s", title=f"Training on {hardware}", ylim=(0, None))
    axes.set_xticks(sorted({row.devices for row in done}))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    save_figure(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    main()
