"""Speed of training: `python train.py` with each attention, on one GPU or several.

    python -m scripts.bench.training --help

Each row is a short run of train.py as a user starts it, with its data loader, log and checks, in a process of
its own. Its speed is read from metrics.jsonl. A failure becomes a row with its reason. The text is
data=embedded, which needs no download, unless --set brings another.

Attentions (--attention):
  fpa-cudnn, fpa-flash, fpa-fa4   full precision by cuDNN, FlashAttention-2 or the package flash-attn-4
  fpa                             the fastest of them on this GPU, as the trainer chooses
  sagebwd, sagebwd-NAME           attention=sagebwd and attention=sagebwd_NAME
  sagebwd-16-bit-p                consistent without the residual of O
  …-deterministic, …-graphs       with hardware.deterministic=true or hardware.cuda_graphs=true
  …-masked                        with data.mask_documents=true

Several GPUs (--devices) train the same steps on the same data, so losses must agree to rounding:
  ddp    a copy of the model on each GPU; gradients are averaged once a step
  fsdp   weights, gradients and optimizer state sharded (FSDP2)

Columns:
  tokens/s       median of the log's records after --warm-up steps
  step           tokens per step / (tokens/s)
  MFU            FLOPs of the model divided by the GPUs' dense bf16 peak
  peak memory    of the first GPU; with CUDA graphs, all that PyTorch has reserved
  speedup        over the first row with the same context and GPUs
  efficiency     tokens/s divided by (GPUs × tokens/s of one GPU with this attention)
  loss diff.     largest difference of the logged losses to one GPU with this attention, nats
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from common.overrides import override
from common.terminal import available_device, command_parser, positive_int
from scripts.bench.measuring import describe_run, origin_of
from scripts.output import SCRATCH, align, number, with_ending, write_tables
from trainer.processes import FINISHED, Job, Outcome, run_all
from trainer.run_directory import RunDirectory, read_metrics

PROGRAM = "python -m scripts.bench.training"
ROOT = Path(__file__).parents[2]

#: By the name that --attention takes: settings of train.py.
ATTENTIONS = {
    "fpa": ["attention=fpa"],
    "fpa-cudnn": ["attention=fpa", "attention.sdpa=cudnn"],
    "fpa-flash": ["attention=fpa", "attention.sdpa=flash"],
    "fpa-fa4": ["attention=fpa", "attention.sdpa=fa4"],
    "sagebwd": ["attention=sagebwd"],
    "sagebwd-paper": ["attention=sagebwd_paper"],
    "sagebwd-consistent": ["attention=sagebwd_consistent"],
    "sagebwd-int8-scores": ["attention=sagebwd_int8_scores"],
    "sagebwd-16-bit-p": ["attention=sagebwd_consistent", "attention.compensate_o=false"],
    "fpa-deterministic": ["attention=fpa", "hardware.deterministic=true"],
    "sagebwd-deterministic": ["attention=sagebwd", "hardware.deterministic=true"],
    "fpa-graphs": ["attention=fpa", "hardware.cuda_graphs=true"],
    "sagebwd-graphs": ["attention=sagebwd", "hardware.cuda_graphs=true"],
    "fpa-masked": ["attention=fpa", "data.mask_documents=true"],
    "sagebwd-masked": ["attention=sagebwd", "data.mask_documents=true"],
}
EXAMPLES = """
examples:
  SageBwd and cuDNN at the paper's context, four micro-batches per step as with tps=260k
      python -m scripts.bench.training --attention fpa-cudnn sagebwd --contexts 4096 --accumulation 4
  what hardware.deterministic=true costs
      python -m scripts.bench.training --attention fpa fpa-deterministic
  documents that do not see each other, of a text of your own
      python -m scripts.bench.training --attention fpa fpa-masked sagebwd sagebwd-masked --contexts 4096 \\
          --accumulation 4 --set data=jsonl data.path=FILE.jsonl data.tokenizer=bytes
  one, two and four GPUs
      python -m scripts.bench.training --attention sagebwd --contexts 4096 --accumulation 4 --devices 1 2 4
  try the command without a GPU
      python -m scripts.bench.training --device cpu --model llama_debug --contexts 64 \\
          --tokens-per-micro-batch 256 --attention fpa sagebwd --steps 3 --warm-up 1

files, with --out PREFIX, written after every row; Ctrl-C ends the command and keeps them:
  PREFIX.json   rows, failures; settings, hardware, versions
  PREFIX.md     a table for each context
"""


@dataclass
class Row:
    """One run. None or empty: not measured."""

    attention: str
    context: int
    devices: int
    parallel: str  # "none" on one device
    reason: str | None = None  # why it failed
    tokens_per_second: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    losses: dict[int, float] = field(default_factory=dict)  # by step, nats
    speedup: float | None = None
    efficiency: float | None = None
    loss_difference: float | None = None

    @property
    def name(self) -> str:
        gpus = "" if self.devices == 1 else f", {self.devices} × {self.parallel}"
        return f"{self.attention}, context {self.context}{gpus}"


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Train with every setting, write the files and print the tables."""
    arguments = parse_arguments(argv)
    rows = rows_to_measure(arguments)
    result = describe_run(PROGRAM, argv, arguments, ("flash-attn-4",))
    del result["settings"]["runs_dir"]
    ended: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.runs_dir, prefix="bench_training-") as scratch:
        folders = {row.name: Path(scratch) / str(i) for i, row in enumerate(rows)}
        by_name = {row.name: row for row in rows}

        def note_end(job: Job, outcome: Outcome) -> None:
            row = by_name[job.name]
            if outcome.kind == FINISHED:
                read(row, folders[row.name], arguments)
            else:
                row.reason = " ".join((outcome.reason or outcome.kind).split())[-400:]
            ended.append(row)
            compare(ended)
            write_tables(arguments.out, result, ended, to_markdown(result, ended))

        jobs = [job_of(row, folders[row.name], arguments) for row in rows]
        stopped_by = run_all(jobs, gpus=[], limit=1, on_end=note_end)
    print("\n".join(["", *tables(ended)]))
    print(f"written: {with_ending(arguments.out, '.json')}, {with_ending(arguments.out, '.md')}")
    if stopped_by:
        sys.exit(128 + stopped_by)  # the shell's convention


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    add, count = parser.add_argument, {"type": positive_int, "metavar": "N"}
    default = ["fpa-cudnn", "fpa-flash", "fpa-fa4", "sagebwd"]
    several = {"nargs": "+", "metavar": "NAME"}
    text = f"{', '.join(ATTENTIONS)} (default: {', '.join(default)})"
    add("--attention", **several, choices=ATTENTIONS, default=default, help=text)
    add("--set", nargs="+", metavar="KEY=VALUE", default=[], help="settings of train.py for all runs")
    models = sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
    add("--model", choices=models, default="llama_325m", help="a file of configs/model (default %(default)s)")
    add("--contexts", **count, nargs="+", default=[4096, 16384], help="default 4096 16384")
    add("--tokens-per-micro-batch", **count, default=65536, help="of each GPU (default %(default)s)")
    add("--accumulation", **count, default=1, help="micro-batches per step of one GPU (default %(default)s)")
    add("--devices", **count, nargs="+", default=[1], help="numbers of GPUs (default 1)")
    add("--parallel", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"], help="default both")
    add("--steps", **count, default=20, help="timed optimizer steps (default %(default)s)")
    add("--warm-up", **count, default=5, help="untimed steps first (default %(default)s)")
    text = "default %(default)s"
    add("--device", type=available_device, choices=("cuda", "cpu"), default="cuda", help=text)
    scratch = Path(tempfile.gettempdir())
    add("--runs-dir", type=Path, default=scratch, help="for the runs while they last (default %(default)s)")
    text = "write PREFIX.json, .md (default %(default)s)"
    add("--out", type=Path, metavar="PREFIX", default=SCRATCH / "training", help=text)
    arguments = parser.parse_args(argv)
    there = torch.cuda.device_count() if arguments.device == "cuda" else max(arguments.devices)
    if max(arguments.devices) > there:
        parser.error(f"--devices {max(arguments.devices)}: this machine has {there} GPUs")
    tokens = arguments.tokens_per_micro_batch
    for context in arguments.contexts:
        if tokens % context:
            nearest = -(-tokens // context) * context
            parser.error(
                f"--tokens-per-micro-batch {tokens} is not a multiple of context {context}; use {nearest}"
            )
    return arguments


# --- The runs -----------------------------------------------------------------------------------------------


def rows_to_measure(arguments: Namespace) -> list[Row]:
    """A row for each combination; one device has no way to be parallel."""
    ways = dict.fromkeys(
        (devices, parallel if devices > 1 else "none")
        for devices, parallel in product(arguments.devices, arguments.parallel)
    )
    axes = (dict.fromkeys(arguments.contexts), ways, dict.fromkeys(arguments.attention))
    return [Row(name, context, *way) for context, way, name in product(*axes)]


def job_of(row: Row, folder: Path, arguments: Namespace) -> Job:
    """The train.py command of a row."""
    steps = arguments.warm_up + arguments.steps
    settings = {
        "context": row.context,
        "model.max_context": max(arguments.contexts),
        "hardware.micro_batch": arguments.tokens_per_micro_batch // row.context,
        "hardware.devices": row.devices,
        "hardware.parallel": row.parallel if row.devices > 1 else "auto",
        "tps.tokens_per_step": arguments.tokens_per_micro_batch * arguments.accumulation,
        "tps.warmup_steps": 0,
        "steps": steps,
        # As seldom as possible, because the log waits for the GPU, with a record at the end of the warm-up.
        "log_every": math.gcd(arguments.warm_up, arguments.steps),
        "eval_every": steps,
        "eval_sequences": max(arguments.devices),  # one per rank, for the evaluation at the end
        "sample_tokens": 0,
        "checkpoint_every": steps,
        "probe.every": 0,
        "run_dir": folder,
    }
    has_text = any(text.startswith(("data=", "experiment=")) for text in arguments.set)
    groups = [f"model={arguments.model}", f"hardware={'gpu' if arguments.device == 'cuda' else 'cpu'}"]
    chosen = [*groups, *([] if has_text else ["data=embedded"]), *ATTENTIONS[row.attention]]
    overrides = [override(key, value) for key, value in settings.items()]
    command = [sys.executable, str(ROOT / "train.py"), "logger=files", *chosen, *overrides, *arguments.set]
    return Job(row.name, command, folder.with_suffix(".log"))


def read(row: Row, folder: Path, arguments: Namespace) -> None:
    """Fill in the row from the metrics of its run."""
    records = [record for record in read_metrics(RunDirectory(folder).metrics) if "loss" in record]
    timed = [record for record in records if record["step"] > arguments.warm_up]
    row.losses = {record["step"]: record["loss"] for record in records}
    row.tokens_per_second = statistics.median(record["tokens_per_second"] for record in timed)
    tokens_per_step = arguments.tokens_per_micro_batch * arguments.accumulation
    row.step_ms = 1e3 * tokens_per_step / row.tokens_per_second
    row.peak_memory_gib = timed[-1]["peak_memory_gib"]
    if all(record["mfu"] for record in timed):
        row.mfu = statistics.median(record["mfu"] for record in timed)


def compare(rows: list[Row]) -> None:
    """Fill in what is relative to another row."""
    timed = [row for row in rows if row.tokens_per_second]
    for row in timed:
        place = (row.context, row.devices, row.parallel)
        first = next(x for x in timed if (x.context, x.devices, x.parallel) == place)
        row.speedup = row.tokens_per_second / first.tokens_per_second
        alone = [x for x in timed if (x.attention, x.context, x.devices) == (row.attention, row.context, 1)]
        if alone and row.devices > 1:
            row.efficiency = row.tokens_per_second / (row.devices * alone[0].tokens_per_second)
            shared = row.losses.keys() & alone[0].losses.keys()
            row.loss_difference = max(abs(row.losses[step] - alone[0].losses[step]) for step in shared)


# --- Tables -------------------------------------------------------------------------------------------------


def to_markdown(result: dict[str, Any], rows: list[Row]) -> str:
    settings = result["settings"]
    what = (
        f"{settings['model']}, {settings['tokens_per_micro_batch']:,} tokens per micro-batch, "
        f"{settings['accumulation']} per step on one GPU. `{PROGRAM} --help` explains rows and columns."
    )
    return "\n".join(["# Speed of training", "", origin_of(result), "", what, "", *tables(rows)])


def tables(rows: list[Row]) -> list[str]:
    """A table for each context, then the reasons of failures."""
    lines = []
    for context in dict.fromkeys(row.context for row in rows):
        header = [f"context {context}", "GPUs", "tokens/s", "step, ms", "MFU", "peak memory, GiB", "speedup"]
        header += ["efficiency", "loss diff."]
        lines += [*align(header, [cells_of(row) for row in rows if row.context == context]), ""]
    failed = [f"- {row.name}: {row.reason}" for row in rows if row.reason]
    return [*lines, "Failed:", "", *failed, ""] if failed else lines


def cells_of(row: Row) -> list[str]:
    return [
        row.attention,
        "1" if row.devices == 1 else f"{row.devices}, {row.parallel}",
        "failed" if row.reason else number(row.tokens_per_second, ",.0f"),
        number(row.step_ms, ".1f"),
        number(row.mfu, ".1%"),
        number(row.peak_memory_gib, ".1f"),
        number(row.speedup, ".3f"),
        number(row.efficiency, ".1%"),
        number(row.loss_difference, ".4f"),
    ]


if __name__ == "__main__":
    main()
