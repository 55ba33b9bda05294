"""Measure training steps of one contestant: what a process of scripts.bench.training does."""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

import trainer.settings
from data.corpus import Corpus
from data.files import read_json, write_json
from data.tokens import TokenShards
from model.config import LlamaConfig, flops_per_token
from scripts.bench.measuring import mark, milliseconds, synchronize
from scripts.bench.training_peers import BASELINES
from scripts.bench.training_tables import ATTENTION, OTHER_KERNELS, PRODUCTS
from scripts.output import finite
from trainer.distributed import Ranks
from trainer.interrupt import StopRequest
from trainer.loop import Trainer, make_deterministic
from trainer.machine import peak_memory_gib
from trainer.run_directory import RunDirectory
from trainer.settings import Settings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

#: The class of a kernel: that of the first pattern found in its name, ignoring case; otherwise OTHER_KERNELS.
KERNEL_CLASSES = (
    (
        OTHER_KERNELS,
        r"^triton_(poi|red|per|for)_",
    ),  # Inductor puts the names of fused operators into its kernels'
    (ATTENTION, r"sdpa|scaled_dot_product|flash|fmha|attention|cudnn::fusion"),
    (PRODUCTS, r"gemm|gemv|nvjet|cutlass|cublas|triton_tem|^aten::(add|b|badd)?mm$"),
    (ATTENTION, r"^\w+_kernel$"),  # ours; all others have a namespace or a template
)
KERNELS_KEPT = 20  # in the JSON, for each row


@dataclass(frozen=True)
class Job:
    """What one process measures. `context` in tokens, `micro_batch` in sequences, counts in steps."""

    contestant: str
    context: int
    micro_batch: int
    overrides: list[str]  # of the trainer's settings
    warm_up: int
    steps: int
    profile_steps: int
    loader: bool  # also measure the data loader and the log


def run_job(name: str) -> None:
    """Measure the job in a JSON file; write answer.json into the same folder."""
    file = Path(name)
    try:
        measured = measure(Job(**read_json(file)))
    except Exception as error:
        traceback.print_exc()
        told = " ".join(str(error).split()) or "no message"
        measured = {"reason": f"{type(error).__name__}: {told}"[:400]}
    write_json(file.with_name("answer.json"), finite(measured))


def measure(job: Job) -> dict[str, Any]:
    """The measured fields of a row."""
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
            row |= speed_of(times, bench.sizes.tokens_per_step, flops, bench.peak)
            graphs = settings.hardware.cuda_graphs
            row |= {"peak_memory_gib": peak_memory_gib(bench.ranks.device, cuda_graphs=graphs)}
            row |= summarise(bench.profile(job.profile_steps))
            return row | (bench.measure_overheads(job.steps) if job.loader else {})
        finally:
            bench.record.close()


def settings_of(job: Job) -> Settings:
    """The settings that train.py would get from the job's overrides."""
    trainer.settings.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = OmegaConf.to_object(compose("train", overrides=job.overrides))
    settings.model.max_context = max(settings.model.max_context, job.context)
    settings.probe.every, settings.spike.threshold = 0, None  # both are meaningless on random ids
    return settings


def speed_of(times: list[float], tokens: int, flops: float, peak: float | None) -> dict[str, float | None]:
    """Speed fields of a row, from times of steps in ms.

    `tokens` per step, `flops` per token, `peak` in TFLOP/s; without a peak there is no MFU.
    """
    median = statistics.median(times)
    p10, p90 = np.percentile(times, (10, 90)).tolist()
    per_second = tokens / (median * 1e-3)
    mfu = per_second * flops / (peak * 1e12) if peak else None
    return {"step_ms": median, "p10_ms": p10, "p90_ms": p90, "tokens_per_second": per_second, "mfu": mfu}


# --- The trainer, on data of its own ------------------------------------------------------------------------


class BenchTrainer(Trainer):
    """The trainer on random token ids and, if `build` is given, another model."""

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
        """Like BatchLoader.micro_batches, with new ids each time, drawn on the device."""
        shape = (2, self.settings.hardware.micro_batch, self.settings.context)
        for _ in range(self.sizes.micro_steps):
            inputs, targets = torch.randint(self.settings.model.vocab_size, shape, device=self.ranks.device)
            yield inputs, targets

    def _build_model(self) -> nn.Module:
        if self.build is None:
            return super()._build_model()
        torch.set_float32_matmul_precision("high")  # as the trainer does
        torch.manual_seed(self.settings.seed)
        return self.build(self.settings.model).to(self.ranks.device)

    def time_steps(self, count: int) -> list[float]:
        """Times of `count` steps, in ms, with no synchronization that training does not have."""
        synchronize(self.ranks.device)
        marks = [mark(self.ranks.device)]
        for _ in range(count):
            self.loss = self._train_step()[0]
            self.step += 1
            marks.append(mark(self.ranks.device))
        synchronize(self.ranks.device)
        return [milliseconds(begin, end) for begin, end in itertools.pairwise(marks)]

    def profile(self, steps: int) -> dict[str, float]:
        """{kernel: ms per step}; on a CPU {operator: ms per step} without the operators it calls."""
        on_gpu = self.ranks.device.type == "cuda"
        kind, field_name = ("CUDA", "self_device_time_total") if on_gpu else ("CPU", "self_cpu_time_total")
        activity = getattr(ProfilerActivity, kind)
        with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
            self.time_steps(steps)
        times: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            if event.device_type == getattr(DeviceType, kind) and not event.is_user_annotation:
                times[event.key] += getattr(event, field_name) / 1e3 / steps  # from µs
        return dict(times)

    def measure_overheads(self, steps: int) -> dict[str, float]:
        """Medians in ms of the data loader, which reads shards from disk, and of the log."""
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
        self.record.advance()

    def _use_shards(self, file: Path) -> None:
        """From now on, train on a file of random ids, through the trainer's own loader."""
        largest = min(self.settings.model.vocab_size, 2**16)
        count = max(self.sizes.tokens_per_step * 8, 1 << 20) + 1
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
    """ATTENTION, PRODUCTS or OTHER_KERNELS, by the name of a kernel."""
    matching = (kind for kind, pattern in KERNEL_CLASSES if re.search(pattern, kernel, re.IGNORECASE))
    return next(matching, OTHER_KERNELS)


def summarise(times: dict[str, float]) -> dict[str, Any]:
    """The fields `class_ms` and `kernels` of a row, from {kernel: ms}."""
    classes = dict.fromkeys((ATTENTION, PRODUCTS, OTHER_KERNELS), 0.0)
    for name, spent in times.items():
        classes[classify(name)] += spent
    longest = sorted(times.items(), key=lambda item: -item[1])[:KERNELS_KEPT]
    return {"class_ms": classes, "kernels": dict(longest)}
