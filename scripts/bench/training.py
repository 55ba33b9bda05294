"""Speed of a training step on one GPU: this repository's trainer, and alternatives.

    python -m scripts.bench.training --help

Everything takes the same step (trainer.loop.Trainer: autocast, torch.compile, gradient clipping, the check
for finite gradients, fused AdamW). Only the model or the attention differs:

  fpa-cudnn, fpa-flash   our Llama with PyTorch's attention, restricted to cuDNN or FlashAttention-2
  fpa-fa4                the same with FlashAttention-4, if the package flash-attn-4 is installed
  fpa                    the same with the kernel that the trainer chooses on this GPU
  sagebwd                our Llama with SageBwd
  sagebwd-consistent     the same with attention=sagebwd_consistent
  sagebwd-int8-scores    the same with attention=sagebwd_int8_scores
  sagebwd-16-bit-dq      the same with dQ in 16 bit, too: one backward kernel on Hopper
  sagebwd-16-bit-p       sagebwd-consistent without the residual of O (attention.compensate_o=false)
  …-deterministic        with hardware.deterministic=true
  …-graphs               with hardware.cuda_graphs=true
  hf                     transformers' LlamaForCausalLM of the same shape, attn_implementation="sdpa".
                         With torch before 2.14, compiling it makes a mask that rules out fast kernels
  hf-causal              the same without that mask
  nanogpt                a GPT-2-style model with the same FLOPs: LayerNorm, GELU, learned positions,
                         PyTorch's own choice of attention

Only our Llama has QK-norm, if the model's settings turn it on. Each is measured in a process of its own; a
failure becomes a row with its reason. The data are random token ids made on the GPU.

The four tables of `scripts.reproduce training_speed` take about 25 minutes of one H200.

Columns:
  step         from the end of one optimizer step to the end of the next; median after --warm-up steps
  MFU          FLOPs of our Llama, for every row, divided by the GPU's dense bf16 peak
  peak memory  of the timed steps; with CUDA graphs, all that PyTorch has reserved
  attention, matrix products, other kernels
               shares of the time in kernels, by kernel name (KERNEL_CLASSES in training_step.py), from
               further steps under torch.profiler; on a CPU, PyTorch's operators
  GPU busy     time in kernels divided by the time of the step
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.files import read_json, write_json
from scripts.bench.measuring import describe_run
from scripts.bench.training_peers import BASELINES
from scripts.bench.training_step import CONFIGS, ROOT, Job
from scripts.bench.training_tables import SPEEDUP_OVER, Row, draw, tables, to_markdown
from scripts.command_line import command_parser, positive_int
from scripts.output import (
    add_output_options,
    read_result,
    resolve_out,
    say_written,
    with_ending,
    write_markdown,
    write_tables,
)

PROGRAM = "python -m scripts.bench.training"
CHILD = "import sys; from scripts.bench.training_step import run_job; run_job(sys.argv[1])"

#: Our Llama, by the name that --attention takes: overrides of the trainer's settings.
ATTENTIONS = {
    "fpa-cudnn": ["attention=fpa", "attention.sdpa=cudnn"],
    "fpa-flash": ["attention=fpa", "attention.sdpa=flash"],
    "fpa-fa4": ["attention=fpa", "attention.sdpa=fa4"],
    "fpa": ["attention=fpa"],
    "sagebwd": ["attention=sagebwd"],
    "sagebwd-16-bit-p": ["attention=sagebwd_consistent", "attention.compensate_o=false"],
    "sagebwd-consistent": ["attention=sagebwd_consistent"],
    "sagebwd-int8-scores": ["attention=sagebwd_int8_scores"],
    "sagebwd-16-bit-dq": ["attention=sagebwd_consistent", "attention.int8_matmuls=[s_fwd,s_bwd,dk]"],
    "fpa-deterministic": ["attention=fpa", "hardware.deterministic=true"],
    "sagebwd-deterministic": ["attention=sagebwd", "hardware.deterministic=true"],
    "fpa-graphs": ["attention=fpa", "hardware.cuda_graphs=true"],
    "sagebwd-graphs": ["attention=sagebwd", "hardware.cuda_graphs=true"],
}
EXAMPLES = """
examples:
  SageBwd and cuDNN at the paper's context, and what the data loader and the log cost
      python -m scripts.bench.training --attention fpa-cudnn sagebwd --baselines --contexts 4096 --loader
  four micro-batches per step as with tps=260k, and no QK-norm as in the other models
      python -m scripts.bench.training --accumulation 4 --set model.qk_norm=false
  what hardware.deterministic=true costs
      python -m scripts.bench.training --attention fpa fpa-deterministic --baselines
  try the command without a GPU
      python -m scripts.bench.training --device cpu --model llama_debug --contexts 64 \\
          --tokens-per-micro-batch 256 --attention fpa sagebwd --baselines --steps 3 --warm-up 1
  draw committed results again, without a GPU
      python -m scripts.bench.training --draw results/bench_training.json

files, with --out PREFIX, written after every row; Ctrl-C ends the command and keeps them:
  PREFIX.json   rows with their longest kernels, failures; settings, hardware, versions
  PREFIX.md     a table for each context
  PREFIX.png    tokens/s, and the parts of a step
"""


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure every contestant, write the files and print the tables; or draw those of --draw again."""
    arguments = parse_arguments(argv)
    if arguments.draw:
        result = read_result(arguments.draw)
        rows = [Row(**row) for row in result["rows"]]
        write_markdown(arguments.out, to_markdown(result, rows))
        show(rows, result, arguments)
        return
    contestants = dict.fromkeys([*arguments.attention, *arguments.baselines])
    pairs = itertools.product(dict.fromkeys(arguments.contexts), contestants)
    jobs, rows = [job_of(contestant, context, arguments) for context, contestant in pairs], []
    result = describe_run(PROGRAM, argv, arguments, ("transformers",))
    interrupted = False
    try:
        for job in (progress := tqdm(jobs, desc="contestants", disable=None)):
            progress.set_postfix_str(f"{job.contestant}, context {job.context}")
            rows = add_ratios([*rows, run_process(job, arguments.limit)])
            result |= {"measured": f"{len(rows)} of {len(jobs)}"}
            write_tables(arguments.out, result, rows, to_markdown(result, rows))
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        show(rows, result, arguments)
    if interrupted:
        sys.exit(130)  # the shell's convention


def show(rows: list[Row], result: dict[str, Any], arguments: Namespace) -> None:
    """Print the tables, draw the picture, and say where all files are."""
    print("\n".join(["", *tables(rows)]))
    draw(rows, with_ending(arguments.out, ".png"), result)
    say_written(arguments, ".json", ".md", ".png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments. Ends with a message, and exit code 2, if they cannot work here."""
    parser = command_parser(PROGRAM, __doc__, EXAMPLES)
    several = {"nargs": "*", "metavar": "NAME"}
    add = parser.add_argument_group("contestants").add_argument
    ours = [*SPEEDUP_OVER, "sagebwd"]
    chosen = f"our Llama with: {', '.join(ATTENTIONS)} (default: {', '.join(ours)})"
    add("--attention", **several, choices=ATTENTIONS, default=ours, help=chosen)
    add(
        "--baselines",
        **several,
        choices=BASELINES,
        default=[*BASELINES],
        help=f"other models: {', '.join(BASELINES)} (default: all)",
    )
    add(
        "--set", **several | {"metavar": "KEY=VALUE"}, default=[], help="settings of train.py for all of them"
    )
    count = {"type": positive_int, "metavar": "N"}
    add = parser.add_argument_group("shape").add_argument
    models = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    add("--model", choices=models, default="llama_325m", help="a file of configs/model (default %(default)s)")
    add(
        "--contexts",
        **count | {"nargs": "+"},
        default=[4096, 16384],
        help="tokens of a sequence (default 4096 16384)",
    )
    add("--tokens-per-micro-batch", **count, default=65536, help="default %(default)s")
    add("--accumulation", **count, default=1, help="micro-batches per step (default %(default)s)")
    add = parser.add_argument_group("measurement").add_argument
    add("--steps", **count, default=20, help="timed optimizer steps (default %(default)s)")
    add("--warm-up", **count, default=5, help="untimed steps first (default %(default)s)")
    add("--profile-steps", **count, default=3, help="steps under the profiler (default %(default)s)")
    add("--loader", action="store_true", help="also time the trainer's data loader and log")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    add("--no-compile", action="store_true", help="without torch.compile (always so on a CPU)")
    add(
        "--limit",
        type=positive_int,
        default=1200,
        metavar="SECONDS",
        help="for each row (default %(default)s)",
    )
    add_output_options(parser.add_argument_group("output").add_argument, "training")
    arguments = parser.parse_args(argv)
    resolve_out(arguments, "training", parser)
    if arguments.draw is None:
        check(arguments, parser)
    return arguments


def check(arguments: Namespace, parser: ArgumentParser) -> None:
    """Refuse arguments that do not fit together, or need a GPU that is not there."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; run this where there is one, or use --device cpu, as in --help")
    if not arguments.attention and not arguments.baselines:
        parser.error("nothing to measure; name something with --attention or --baselines")
    tokens = arguments.tokens_per_micro_batch
    for context in arguments.contexts:
        if tokens % context:
            nearest = -(-tokens // context) * context
            parser.error(
                f"--tokens-per-micro-batch {tokens} is not a multiple of context {context}; use {nearest}"
            )


def job_of(contestant: str, context: int, arguments: Namespace) -> Job:
    """The job of a contestant at a context."""
    micro_batch = arguments.tokens_per_micro_batch // context
    on_gpu = arguments.device == "cuda"
    counts = (arguments.warm_up, arguments.steps, arguments.profile_steps)
    overrides = [
        *ATTENTIONS.get(contestant, []),
        f"model={arguments.model}",
        "data=embedded",  # never opened; its vocabulary fits every model
        "logger=files",
        f"hardware={'gpu' if on_gpu else 'cpu'}",
        f"hardware.compile={on_gpu and not arguments.no_compile}",
        f"hardware.micro_batch={micro_batch}",
        f"tps.tokens_per_step={arguments.tokens_per_micro_batch * arguments.accumulation}",
        "tps.warmup_steps=0",
        f"steps={1 + 2 * sum(counts)}",  # more than are run
        f"context={context}",
        *arguments.set,
    ]
    loader = arguments.loader and contestant in ATTENTIONS
    return Job(contestant, context, micro_batch, overrides, *counts, loader)


# --- A process for each contestant --------------------------------------------------------------------------


def run_process(job: Job, limit: int) -> Row:
    """The row of a job, measured in a process of its own that may take `limit` seconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_json(folder / "job.json", asdict(job))
        command = [sys.executable, "-c", CHILD, str(folder / "job.json")]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        with (folder / "log.txt").open("w") as log:
            options = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": subprocess.STDOUT}
            try:
                ended = subprocess.run(command, timeout=limit, **options)
                reason = f"its process ended with code {ended.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"it took longer than --limit {limit} seconds"
        measured = read_json(folder / "answer.json") or {"reason": reason}
        if "reason" in measured:
            measured["log"] = (folder / "log.txt").read_text(errors="replace").splitlines()[-15:]
    return Row(job.contestant, job.context, job.micro_batch, **measured)


def add_ratios(rows: list[Row]) -> list[Row]:
    """The same rows, with their speedup over the rows SPEEDUP_OVER of their context."""
    for row in rows:
        others = [r for r in rows if r.context == row.context and r.contestant in SPEEDUP_OVER and r.step_ms]
        row.speedup = {r.contestant: r.step_ms / row.step_ms for r in others} if row.step_ms else {}
    return rows


if __name__ == "__main__":
    main()
