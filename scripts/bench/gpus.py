"""How training scales over the GPUs of one machine, and whether losses stay the same.

    python -m scripts.bench.gpus --help

Trains the first steps of one run with `python train.py`, on one GPU and on several:

  ddp    a copy of the model on each GPU; gradients are averaged once a step
  fsdp   weights, gradients and optimizer state sharded (FSDP2)

Tokens per step and the order of the data are the same for any number of GPUs, so losses must agree to
rounding. The text is data=embedded, which needs no download, unless another follows after --.

The default takes about 5 minutes on four H200.

Columns:
  tokens/s              median of the steps after --warm-up
  scaling efficiency    tokens/s divided by (GPUs × tokens/s of one GPU)
  max loss difference   largest difference in any step to the run on one GPU, in nats
  checkpoint pause      how long training waits for the first checkpoint
  probe                 time of one measurement of attention's error during training
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from tqdm import tqdm

import trainer.settings
from data.command_line import override
from scripts.bench.looks import finish, new_figure
from scripts.bench.measuring import describe_run, origin_of
from scripts.bench.training_step import CONFIGS
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.jobs import run_jobs
from scripts.output import (
    add_output_options,
    align,
    number,
    read_result,
    resolve_out,
    say_written,
    with_ending,
    write_markdown,
    write_tables,
)
from trainer.errors import Interrupted
from trainer.run_directory import RunDirectory, read_metrics
from trainer.run_queue import Job

PROGRAM = "python -m scripts.bench.gpus"
EXAMPLES = """
examples:
  python -m scripts.bench.gpus --devices 1 2 4 8 -- data=openwebtext hardware.micro_batch=8
  python -m scripts.bench.gpus --parallel fsdp -- model=llama_1b hardware.micro_batch=4
  python -m scripts.bench.gpus --device cpu --devices 1 2 --steps 4 --warm-up 1 \\
      -- experiment=debug hardware.micro_batch=2
  python -m scripts.bench.gpus --draw results/bench_gpus.json

files, with --out PREFIX:
  PREFIX.json   a row for each run, with its losses; settings, hardware, versions
  PREFIX.md     the table
  PREFIX.png    tokens/s over the number of GPUs
"""

#: The line that trainer.checkpoint logs for each checkpoint.
PAUSED = re.compile(r"training paused ([\d.]+) s for a checkpoint")


@dataclass
class Row:
    """One run. None or empty: not measured."""

    devices: int
    parallel: str  # "none" on one device
    reason: str | None = None  # why it failed
    tokens_per_second: float | None = None
    mfu: float | None = None
    efficiency: float | None = None  # 1: as fast as that many separate GPUs
    peak_memory_gib: float | None = None  # of rank 0
    loss_difference: float | None = None  # largest of all steps to one device, nats
    checkpoint_pause_s: float | None = None  # the first; a later one may also wait for its write
    probe_s: float | None = None  # the last; the first includes set-up
    losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "1" if self.devices == 1 else f"{self.devices}, {self.parallel}"


def main(argv: list[str] | None = None) -> None:
    """Train on every number of devices and write the files; or draw those of --draw again.

    A signal ends the current run; the rows before it are written.
    """
    arguments = parse_arguments(argv)
    if arguments.draw:
        result = read_result(arguments.draw)
        rows = [Row(**row) for row in result["rows"]]
        lines = table(rows, result["settings"]["device"])
        write_markdown(arguments.out, to_markdown(result, lines))
        show(lines, rows, result, arguments)
        return
    result = describe_run(PROGRAM, argv, arguments, ())
    del result["settings"]["runs_dir"]
    with tempfile.TemporaryDirectory(dir=arguments.runs_dir, prefix="bench_gpus-") as name:
        rows, code = train_all(arguments, Path(name))
    if rows:
        compare(rows)
        lines = table(rows, arguments.device)
        write_tables(arguments.out, result, rows, to_markdown(result, lines))
        show(lines, rows, result, arguments)
    if code:
        sys.exit(code)


def show(lines: list[str], rows: list[Row], result: dict[str, Any], arguments: Namespace) -> None:
    """Print the table, draw the picture, and say where all files are."""
    draw(rows, with_ending(arguments.out, ".png"), result)
    print("\n".join(["", *lines, ""]))
    say_written(arguments, ".json", ".md", ".png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    add = parser.add_argument
    count = {"type": positive_int, "metavar": "N"}
    add("--devices", **count, nargs="+", help="numbers of GPUs (default: 1, 2 and 4, if there are as many)")
    add("--parallel", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"], help="default both")
    add("--steps", **count, default=20, help="optimizer steps of each run (default %(default)s)")
    add("--warm-up", **count, default=4, help="untimed steps first (default %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    scratch = Path(tempfile.gettempdir())
    add("--runs-dir", type=Path, default=scratch, help="for the runs while they last (default %(default)s)")
    add_output_options(add, "gpus")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="after --: settings of train.py for all runs")
    arguments = parser.parse_args(argv)
    resolve_out(arguments, "gpus", parser)
    if arguments.draw:
        return arguments
    arguments.device = choose_device(arguments.device, parser)
    there = torch.cuda.device_count() if arguments.device == "cuda" else 1
    if not arguments.devices:
        arguments.devices = [n for n in (1, 2, 4) if n <= there]
    arguments.devices, arguments.parallel = (
        list(dict.fromkeys(x)) for x in (arguments.devices, arguments.parallel)
    )
    if arguments.device == "cuda" and max(arguments.devices) > there:
        parser.error(f"--devices {max(arguments.devices)}: this machine has {there} GPUs")
    if arguments.warm_up >= arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up} leaves none of --steps {arguments.steps} to time")
    return arguments


# --- The runs -----------------------------------------------------------------------------------------------


def train_all(arguments: Namespace, folder: Path) -> tuple[list[Row], int]:
    """Train one run after the other: the rows of those that ended, and the exit code."""
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
        failed = run_jobs(jobs, on_success=read_and_show)
    except Interrupted as stop:
        return [row for row in rows if row.losses], 128 + stop.signal
    for name, reason in failed.items():
        by_name[name].reason = " ".join(reason.split())[-400:]
    return rows, 1 if failed else 0


def job(row: Row, folder: Path, arguments: Namespace) -> Job:
    """The train.py command of a row. It saves a checkpoint halfway and at the end."""
    half = arguments.steps // 2
    settings = {
        "steps": arguments.steps,
        "tps.warmup_steps": 2,
        "hardware.device": arguments.device,
        "hardware.devices": row.devices,
        "hardware.parallel": row.parallel if row.devices > 1 else "auto",
        "log_every": 1,
        "eval_every": arguments.steps,
        "eval_sequences": max(arguments.devices),  # one per rank, for the evaluation at the end
        "sample_tokens": 0,
        "checkpoint_every": max(half, 1),
        "probe.every": max(half - 1, 1),
        "run_dir": folder,
    }
    brings_text = any(text.startswith(("data=", "experiment=")) for text in arguments.overrides)
    own_text = () if brings_text else ("data=embedded",)
    command = [sys.executable, "train.py", "logger=files", *own_text, *arguments.overrides]
    return Job(
        row.name, [*command, *(override(key, value) for key, value in settings.items())], log_of(folder)
    )


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def read(row: Row, folder: Path, warm_up: int) -> None:
    """Fill in the row from the run directory and its log."""
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
    """Fill in what is relative to the run on one device, if there is one."""
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
        f"{origin_of(result)} `{PROGRAM} --help` explains the columns.",
        "",
    ]
    return "\n".join([*head, *lines, ""])


def table(rows: list[Row], device: str) -> list[str]:
    header = ["GPUs" if device == "cuda" else "processes", "tokens/s", "scaling efficiency", "MFU"]
    header += ["peak memory, GiB", "max loss difference", "last loss", "checkpoint pause, s", "probe, s"]
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


#: Line and marker of each way to use several GPUs. Black: these are not attentions, which have the colours.
LINES = {"ddp": "-o", "fsdp": "--^"}


def draw(rows: list[Row], path: Path, result: dict[str, Any]) -> None:
    """Tokens/s over the number of GPUs, with the scaling efficiency, and linear scaling for comparison."""
    figure, ((axes,),) = new_figure(1, 1, (6.5, 4.5))
    done = [row for row in rows if row.tokens_per_second]
    alone = [row for row in done if row.devices == 1]
    counts = sorted({row.devices for row in done})
    if alone:
        linear = [n * alone[0].tokens_per_second for n in counts]
        axes.plot(counts, linear, ":", color="#888888", label="linear scaling")
    for parallel, line in LINES.items():
        own = [row for row in done if row.parallel == parallel]
        curve = sorted(alone + own, key=lambda row: row.devices) if own else []
        axes.plot(*points(curve), line, color="black", markersize=6, label=parallel if own else None)
        offset = (-8, 8) if parallel == "ddp" else (10, -14)  # above the line and below it
        for row in own:
            axes.annotate(
                number(row.efficiency, ".0%"),
                (row.devices, row.tokens_per_second),
                offset,
                textcoords="offset points",
                fontsize=8,
                ha="right" if parallel == "ddp" else "center",
            )
    axes.set(xlabel="GPUs" if result["settings"]["device"] == "cuda" else "processes", ylabel="tokens/s")
    axes.set(ylim=(0, None), xticks=counts)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.08)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    what = f"{trained(result['settings']['overrides'])}; in %: scaling efficiency"
    finish(figure, f"Training on 1 to {max(counts, default=1)} {result['hardware']['name']}", what, path)


def trained(overrides: list[str]) -> str:
    """Model, context and tokens per step that these overrides of train.py give, as far as they are valid."""
    trainer.settings.register()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("train", overrides=overrides, return_hydra_config=True)
    except HydraException:
        return "train.py " + " ".join(overrides)
    model, tokens = config.hydra.runtime.choices["model"], config.tps.tokens_per_step
    return f"{model}, context {config.context:,}, {tokens:,} tokens per step"


def points(rows: list[Row]) -> tuple[list[int], list[float]]:
    return [row.devices for row in rows], [row.tokens_per_second for row in rows]


if __name__ == "__main__":
    main()
