"""Speed of a whole training step on one GPU: this repository's trainer, and what one would use instead.

    python -m scripts.bench.training --help

Every contestant takes the trainer's own step (trainer.loop.Trainer: autocast, torch.compile, clipping, the
check for finite numbers, fused AdamW); they differ in the model alone:

    fpa-cudnn, fpa-flash   our Llama with PyTorch's attention, pinned to cuDNN or FlashAttention-2
    fpa                    the same, with the kernel that the trainer itself chooses on this GPU
    sagebwd                our Llama with SageBwd
    …-deterministic, …-graphs    the same with hardware.deterministic=true, with hardware.cuda_graphs=true
    hf                     transformers' LlamaForCausalLM of the same shape, attn_implementation="sdpa".
                           Compiled with a torch before 2.14 it makes a mask, which keeps it from fast kernels
    hf-causal              the same without that mask
    nanogpt                a plain GPT with as many FLOPs: LayerNorm, GELU, learned positions, PyTorch's own
                           choice of attention

Only ours has QK-norm, where the model's settings have it on. Each trains in a fresh process, one after the
other; one that fails becomes a row with its reason. The data are random token ids, made on the GPU. A step
lasts from the end of one optimizer step to the end of the next; the first one, which compiles, and --warm-up
further ones come before those that count. MFU: the FLOPs of our model, for every contestant, over the GPU's
dense bf16 peak. Peak memory: of the timed steps; with CUDA graphs, all that PyTorch holds. Shares of GPU
time: kernels of further steps, under torch.profiler, by their names (KERNEL_CLASSES in this file); on a CPU,
PyTorch's operators.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from tqdm import tqdm

import trainer.settings
from data.corpus import Corpus
from data.files import read_json, write_json
from data.tokens import TokenShards
from model.config import LlamaConfig
from scripts.bench.measuring import (
    beside,
    describe_run,
    finite,
    mark,
    milliseconds,
    synchronize,
    write_tables,
)
from scripts.bench.training_peers import BASELINES
from scripts.bench.training_tables import ATTENTION, PRODUCTS, REST, RIVALS, Row, draw, tables, to_markdown
from scripts.paper.arguments import positive_int
from trainer.distributed import Ranks
from trainer.interrupt import StopRequest
from trainer.loop import Trainer, make_deterministic
from trainer.run_directory import RunDirectory
from trainer.settings import Settings
from trainer.throughput import flops_per_token, peak_memory_gib

PROGRAM = "python -m scripts.bench.training"
CHILD = "import sys; from scripts.bench.training import run_job; run_job(sys.argv[1])"
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

#: Ours, by the name that --attention takes: overrides of the trainer's settings.
ATTENTIONS = {
    "fpa-cudnn": ["attention=fpa", "attention.sdpa=cudnn"],
    "fpa-flash": ["attention=fpa", "attention.sdpa=flash"],
    "fpa": ["attention=fpa"],
    "sagebwd": ["attention=sagebwd"],
    "sagebwd-16-bit-p": ["attention=sagebwd_consistent", "attention.compensate_o=false"],
    "sagebwd-consistent": ["attention=sagebwd_consistent"],
    "fpa-deterministic": ["attention=fpa", "hardware.deterministic=true"],
    "sagebwd-deterministic": ["attention=sagebwd", "hardware.deterministic=true"],
    "fpa-graphs": ["attention=fpa", "hardware.cuda_graphs=true"],
    "sagebwd-graphs": ["attention=sagebwd", "hardware.cuda_graphs=true"],
}
#: What a kernel does, by the first pattern that its name holds; REST if none. Case does not count.
KERNEL_CLASSES = (
    (REST, r"^triton_(poi|red|per|for)_"),  # Inductor names its kernels after all operators they stand near
    (ATTENTION, r"sdpa|scaled_dot_product|flash|fmha|attention|cudnn::fusion"),
    (PRODUCTS, r"gemm|gemv|nvjet|cutlass|cublas|triton_tem|^aten::(add|b|badd)?mm$"),
    (ATTENTION, r"^\w+_kernel$"),  # ours: alone in being neither in a namespace nor a template
)
KERNELS_KEPT = 20  # of each row, in the JSON

EXAMPLES = """
examples:
  ours against cuDNN at the paper's context, and what the data loader and the log take
      python -m scripts.bench.training --attention fpa-cudnn sagebwd --baselines --contexts 4096 --loader
  four micro-batches per step, as tps=260k has, and no QK-norm, as in the baselines
      python -m scripts.bench.training --accumulation 4 --set model.qk_norm=false
  what hardware.deterministic=true costs
      python -m scripts.bench.training --attention fpa fpa-deterministic --baselines
  a look at the files without a GPU
      python -m scripts.bench.training --device cpu --model llama_debug --contexts 64 \\
          --tokens-per-micro-batch 256 --attention fpa sagebwd --steps 3 --warm-up 1

written after every contestant, with --out results/bench_training; Ctrl-C ends the command and keeps them:
  results/bench_training.json   all rows with their longest kernels, failures, settings, hardware, versions
  results/bench_training.md     a table for each context
  results/bench_training.png    tokens/s, and where the time of a step goes
"""


@dataclass(frozen=True)
class Job:
    """What one process measures. `context` in tokens, `micro_batch` in sequences, the rest in steps."""

    contestant: str
    context: int
    micro_batch: int
    overrides: list[str]  # of the trainer's settings
    warm_up: int
    steps: int
    profile_steps: int
    loader: bool  # also measure the data loader and the log


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Measure every contestant, write the files and print the tables."""
    arguments = parse_arguments(argv)
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
        draw(rows, beside(arguments.out, ".png"), result["hardware"]["name"])
        print("\n".join(["", *tables(rows)]))
        print(f"written to {arguments.out}.json, .md and .png")
    if interrupted:
        sys.exit(130)  # the shell's convention


def parse_arguments(argv: list[str] | None) -> Namespace:
    """The arguments; of those that do not fit together or this machine a message, and exit code 2."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = {"nargs": "*", "metavar": "NAME"}
    add = parser.add_argument_group("contestants").add_argument
    ours = [*RIVALS, "sagebwd"]
    chosen = f"ours: {', '.join(ATTENTIONS)} (default: {', '.join(ours)})"
    add("--attention", **several, choices=ATTENTIONS, default=ours, help=chosen)
    add("--baselines", **several, choices=BASELINES, default=[*BASELINES], help="others (default: all)")
    add("--set", **several | {"metavar": "KEY=VALUE"}, default=[], help="settings of train.py, for all")
    count = {"type": positive_int, "metavar": "N"}
    add = parser.add_argument_group("shape").add_argument
    models = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    add("--model", choices=models, default="llama_325m", help="of configs/model (default %(default)s)")
    add("--contexts", **count | {"nargs": "+"}, default=[4096, 16384], help="tokens; default 4096 16384")
    add("--tokens-per-micro-batch", **count, default=65536, help="default %(default)s")
    add("--accumulation", **count, default=1, help="micro-batches a step (default %(default)s)")
    add = parser.add_argument_group("measurement").add_argument
    add("--steps", **count, default=20, help="timed optimizer steps (default %(default)s)")
    add("--warm-up", **count, default=5, help="steps before that (default %(default)s)")
    add("--profile-steps", **count, default=3, help="steps under the profiler (default %(default)s)")
    add("--loader", action="store_true", help="also time the trainer's data loader and log")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    add("--no-compile", action="store_true", help="without torch.compile; on a CPU it is always left out")
    add("--limit", type=positive_int, default=1200, metavar="SECONDS", help="per contestant (%(default)s)")
    out = Path("results/bench_training")
    add("--out", type=Path, default=out, help="what the files' names begin with (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; run this where there is one, or try --device cpu, as in --help")
    if not arguments.attention and not arguments.baselines:
        parser.error("no contestants; name some with --attention or --baselines")
    tokens = arguments.tokens_per_micro_batch
    for context in arguments.contexts:
        if tokens % context:
            nearest = -(-tokens // context) * context
            parser.error(f"--tokens-per-micro-batch {tokens} is no multiple of {context}; use {nearest}")
    return arguments


def job_of(contestant: str, context: int, arguments: Namespace) -> Job:
    micro_batch = arguments.tokens_per_micro_batch // context
    on_gpu = arguments.device == "cuda"
    counts = (arguments.warm_up, arguments.steps, arguments.profile_steps)
    overrides = [
        *ATTENTIONS.get(contestant, []),
        f"model={arguments.model}",
        "data=embedded",  # is never opened; its vocabulary fits every model
        "logger=files",
        f"hardware={'gpu' if on_gpu else 'cpu'}",
        f"hardware.compile={on_gpu and not arguments.no_compile}",
        f"hardware.micro_batch={micro_batch}",
        f"tps.tokens_per_step={arguments.tokens_per_micro_batch * arguments.accumulation}",
        "tps.warmup_steps=0",
        f"steps={1 + 2 * sum(counts)}",  # more than will be taken
        f"context={context}",
        *arguments.set,
    ]
    loader = arguments.loader and contestant in ATTENTIONS
    return Job(contestant, context, micro_batch, overrides, *counts, loader)


# --- A process for each contestant --------------------------------------------------------------------------


def run_process(job: Job, limit: int) -> Row:
    """The row of a job, measured by a fresh process that may take `limit` seconds."""
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


def run_job(name: str) -> None:
    """Measure the job of a file and leave the answer beside it: what the process of a contestant does."""
    file = Path(name)
    try:
        measured = measure(Job(**read_json(file)))
    except Exception as error:
        traceback.print_exc()
        told = " ".join(str(error).split()) or "no message"
        measured = {"reason": f"{type(error).__name__}: {told}"[:400]}
    write_json(file.with_name("answer.json"), finite(measured))


def measure(job: Job) -> dict[str, Any]:
    """The measured fields of the job's row."""
    settings = settings_of(job)
    make_deterministic(settings.hardware.deterministic)
    with tempfile.TemporaryDirectory() as folder:
        bench = BenchTrainer(settings, Path(folder), BASELINES.get(job.contestant))
        try:
            first_ms = bench.time_steps(1)[0]
            bench.time_steps(job.warm_up)
            if bench.ranks.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = bench.time_steps(job.steps)
            flops = flops_per_token(settings.model, job.context)
            row = {"first_step_s": first_ms / 1e3, "loss": bench.loss}
            row |= speed_of(times, bench.plan.tokens_per_step, flops, bench.peak)
            graphs = settings.hardware.cuda_graphs
            row |= {"peak_memory_gib": peak_memory_gib(bench.ranks.device, cuda_graphs=graphs)}
            row |= summarise(bench.profile(job.profile_steps))
            return row | (bench.measure_overheads(job.steps) if job.loader else {})
        finally:
            bench.telemetry.close()


def settings_of(job: Job) -> Settings:
    """Settings of train.py for this job, as its command line would give them."""
    trainer.settings.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = OmegaConf.to_object(compose("train", overrides=job.overrides))
    settings.model.max_context = max(settings.model.max_context, job.context)
    settings.probe.every, settings.spike.threshold = 0, None  # random ids have nothing to tell
    return settings


def speed_of(times: list[float], tokens: int, flops: float, peak: float | None) -> dict[str, float | None]:
    """What follows from times of steps in ms, of `tokens` tokens each, `flops` a token; `peak` in TFLOP/s."""
    median = statistics.median(times)
    p10, p90 = np.percentile(times, (10, 90)).tolist()
    per_second = tokens / (median * 1e-3)
    mfu = per_second * flops / (peak * 1e12) if peak else None
    return {"step_ms": median, "p10_ms": p10, "p90_ms": p90, "tokens_per_second": per_second, "mfu": mfu}


# --- The trainer, on data of its own ------------------------------------------------------------------------


class BenchTrainer(Trainer):
    """The trainer with random ids for data and, if `build` is given, another model."""

    def __init__(self, settings: Settings, folder: Path, build: Callable[[LlamaConfig], nn.Module] | None):
        self.build = build
        self.loss = float("nan")  # of the last step
        device = torch.device("cuda", 0) if settings.hardware.device == "cuda" else torch.device("cpu")
        super().__init__(settings, RunDirectory(folder), Ranks(0, 1, device), StopRequest())

    def _open_corpus(self) -> None:
        return None

    def _make_loader(self) -> SimpleNamespace:
        return SimpleNamespace(micro_batches=self._random_ids)

    def _random_ids(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As BatchLoader.micro_batches, new ids each time, drawn on the device."""
        shape = (2, self.settings.hardware.micro_batch, self.settings.context)
        for _ in range(self.plan.micro_steps):
            inputs, targets = torch.randint(self.settings.model.vocab_size, shape, device=self.ranks.device)
            yield inputs, targets

    def _build_model(self) -> nn.Module:
        if self.build is None:
            return super()._build_model()
        torch.set_float32_matmul_precision("high")  # as the trainer does
        torch.manual_seed(self.settings.seed)
        return self.build(self.settings.model).to(self.ranks.device)

    def time_steps(self, count: int) -> list[float]:
        """Times of so many steps, in ms; nothing waits between them that does not in training."""
        synchronize(self.ranks.device)
        marks = [mark(self.ranks.device)]
        for _ in range(count):
            self.loss = self._train_step()[0]
            self.step += 1
            marks.append(mark(self.ranks.device))
        synchronize(self.ranks.device)
        return [milliseconds(begin, end) for begin, end in itertools.pairwise(marks)]

    def profile(self, steps: int) -> dict[str, float]:
        """Time in each kernel (on a CPU: each operator, without those it calls), in ms per step."""
        on_gpu = self.ranks.device.type == "cuda"
        kind, field_name = ("CUDA", "self_device_time_total") if on_gpu else ("CPU", "self_cpu_time_total")
        with torch.profiler.profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
            self.time_steps(steps)
        times: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            if event.device_type == getattr(DeviceType, kind) and not event.is_user_annotation:
                times[event.key] += getattr(event, field_name) / 1e3 / steps  # from µs
        return dict(times)

    def measure_overheads(self, steps: int) -> dict[str, float]:
        """What the data loader, reading shards on disk, and the log take: medians in ms."""
        self._use_shards(self.directory.path / "tokens.bin")
        self.stopwatch.start()
        return {
            "loader_ms": median_ms(self._load, steps),
            "loader_step_ms": statistics.median(self.time_steps(steps)),
            "log_ms": median_ms(self._report, 20),
        }

    def _load(self) -> None:
        for batch in self.loader.micro_batches(self.step):
            list(map(self._to_device, batch))

    def _report(self) -> None:
        self._log(self.loss, grad_norm=1.0, rate=1e-3, steps_timed=1)
        self.telemetry.advance()

    def _use_shards(self, file: Path) -> None:
        """Train on a file of random ids from now on, through the trainer's own loader."""
        largest = min(self.settings.model.vocab_size, 2**16)
        count = max(self.plan.tokens_per_step * 8, 1 << 20) + 1
        np.random.default_rng(0).integers(0, largest, count, dtype=np.uint16).tofile(file)
        tokens = TokenShards([np.asarray(np.memmap(file, np.uint16, mode="r"))])
        self.corpus = Corpus(tokens, tokens, tokenizer=None, manifest=None)
        self.loader = super()._make_loader()


def median_ms(call: Callable[[], None], times: int) -> float:
    """Host time of a call, in ms."""
    marks = [time.perf_counter(), *(call() or time.perf_counter() for _ in range(times))]
    return 1e3 * statistics.median(end - begin for begin, end in itertools.pairwise(marks))


# --- What follows from the measurements ---------------------------------------------------------------------


def classify(kernel: str) -> str:
    """ATTENTION, PRODUCTS or REST, by the name of a kernel."""
    matching = (kind for kind, pattern in KERNEL_CLASSES if re.search(pattern, kernel, re.IGNORECASE))
    return next(matching, REST)


def summarise(times: dict[str, float]) -> dict[str, Any]:
    """Times in ms by kernel as the fields `class_ms` and `kernels` of a row."""
    classes = dict.fromkeys((ATTENTION, PRODUCTS, REST), 0.0)
    for name, spent in times.items():
        classes[classify(name)] += spent
    longest = sorted(times.items(), key=lambda item: -item[1])[:KERNELS_KEPT]
    return {"class_ms": classes, "kernels": dict(longest)}


def add_ratios(rows: list[Row]) -> list[Row]:
    """The same rows; each that has a time says how it compares with the rivals of its context."""
    for row in rows:
        rivals = [r for r in rows if r.context == row.context and r.contestant in RIVALS and r.step_ms]
        row.speedup = {r.contestant: r.step_ms / row.step_ms for r in rivals} if row.step_ms else {}
    return rows


if __name__ == "__main__":
    main()
