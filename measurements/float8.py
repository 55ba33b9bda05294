"""Float8 linear layers of torchao under our trainer: speed and losses of {cuDNN, SageBwd} × {bf16, float8}.

    python measurements/float8.py --text 'text/*.parquet' --out FOLDER/float8.json
    python measurements/float8.py --text 'text/*.parquet' --out /tmp/x.json --tiny    on a CPU

The trainer's own Run and train_step; only the linear layers of the blocks are replaced before
(torchao.float8.convert_to_float8_training). The head, tied to the embedding, is no nn.Linear and stays in
bf16, as do norms, rotary embedding and loss. Compiled block by block, as the trainer does with FSDP: the
first step takes 4 s and not 17, the others .4% longer; --whole compiles the model as the trainer does on one
GPU. Cells run in the order of ORDER, in one process, until --seconds are over.

    325m   llama_325m, heads of 64, 32,768 tokens a step
    1b     llama_1b with 16 heads of 128 (8 for keys), 16,384 tokens a step

Columns: tokens/s, median of the steps after the first WARM_UP; relative to bf16 linear layers with the same
attention; seconds of the first step (it compiles); loss, mean of the last 10 steps; its difference from the
first row of the model.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import trainer.loop
import trainer.run
from trainer import distributed, parallel, settings
from trainer.checks import check
from trainer.processes import StopRequest
from trainer.start import TrainingDirectory

WARM_UP, LAST = 5, 10
MODELS = {
    "325m": ["model=llama_325m", "hardware.micro_batch=8", "tps.tokens_per_step=32768"],
    "1b": [
        *("model=llama_1b", "model.n_heads=16", "model.d_head=128"),
        *("hardware.micro_batch=4", "tps.tokens_per_step=16384"),
    ],
}
TINY = ["model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.d_ffn=128"]
TINY += [
    "model.d_head=32",
    "hardware=cpu",
    "context=64",
    "tps.tokens_per_step=256",
    "hardware.dtype=bfloat16",
]
ATTENTIONS = {
    "cudnn": ["attention=fpa", "attention.sdpa=cudnn"],
    "sagebwd": ["attention=sagebwd"],
    "flash": ["attention=fpa", "attention.sdpa=flash"],
}
#: (model, attention, linear layers), the most important first. flash: the null of a difference of losses.
ORDER = [
    *((model, attention, linear) for model in MODELS for linear in ("bf16", "tensorwise")
      for attention in ("cudnn", "sagebwd")),
    *((model, attention, "rowwise") for model in ("1b", "325m") for attention in ("cudnn", "sagebwd")),
    *((model, "flash", "bf16") for model in MODELS),
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", required=True, help="parquet files with a column `text`")
    add("--out", type=Path, required=True, help="the JSON")
    add("--steps", type=int, default=60)
    add("--seconds", type=float, default=300, help="no cell starts later (default %(default)s)")
    add("--whole", action="store_true", help="compile the model as a whole")
    add("--cells", nargs="+", metavar="MODEL-ATTENTION-LINEAR", help="these alone")
    add("--tiny", action="store_true", help="two layers, 64 tokens, on a CPU; float8 is emulated")
    arguments = parser.parse_args()
    settings.register()
    result = {"command": sys.argv, "steps": arguments.steps, "torch": torch.__version__, "rows": []}
    began = time.monotonic()
    original = trainer.run.build_llama
    with (
        tempfile.TemporaryDirectory() as folder,
        initialize_config_dir(str(ROOT / "configs"), version_base="1.3"),
    ):
        for cell in ORDER:
            if arguments.cells and "-".join(cell) not in arguments.cells:
                continue
            if time.monotonic() - began > arguments.seconds:
                break
            row = dict(zip(("model", "attention", "linear"), cell, strict=True))
            trainer.run.build_llama = lambda *given, linear=cell[2]: convert(
                original(*given), linear, arguments
            )
            try:
                row |= train(row, Path(folder), arguments)
            except Exception as error:  # the other cells are still to be measured
                traceback.print_exc()
                row["error"] = repr(error)[:500]
            torch._dynamo.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            result["rows"].append(row)
            compare(result["rows"])
            arguments.out.write_text(json.dumps(result, indent=1))
            print({name: value for name, value in row.items() if name not in ("losses", "ms")}, flush=True)
    print(table(result["rows"]))


def convert(llama, linear, arguments):
    if linear == "bf16":
        return llama
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(linear)
    if arguments.tiny:
        object.__setattr__(config, "emulate", True)
    convert_to_float8_training(llama.layers, config=config)
    assert {type(x).__name__ for x in llama.layers.modules() if isinstance(x, torch.nn.Linear)} == {
        "Float8Linear"
    }
    return llama


def train(row, folder, arguments):
    run_dir = folder / "-".join(row.values())
    attention = ATTENTIONS[row["attention"]]
    overrides = [
        *MODELS[row["model"]], "logger=files", "context=4096",
        "data=parquet", f"data.path='{Path(arguments.text).absolute()}'", f"data.root={folder / 'tokens'}",
        f"steps={arguments.steps}", "tps.warmup_steps=10", "optimizer.lr=1e-3", "probe.every=0",
        "sample_tokens=0", "log_every=1", f"run_dir={run_dir}", *(TINY if arguments.tiny else []),
        *(attention[:1] if arguments.tiny else attention), f"hardware.compile={arguments.whole}",
    ]  # fmt: skip
    run_settings = OmegaConf.to_object(compose("train", overrides))
    check(run_settings, 1)
    trainer.loop.make_deterministic(False)
    losses, times = [], []
    directory = TrainingDirectory(run_dir)
    with distributed.joined(run_settings.hardware.device) as ranks, StopRequest() as stop, directory.locked():
        directory.open(run_settings)
        run = trainer.run.Run(run_settings, directory, ranks, stop)
        if not arguments.whole:
            parallel._compile_in_pieces(run.llama)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            while run.step < run.sizes.steps:
                began = time.perf_counter()
                losses.append(trainer.loop.train_step(run)["loss"])
                run.step += 1
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        finally:
            run.close()
    step = statistics.median(times[min(WARM_UP, len(times) - 1) :])
    return {
        "tokens_per_second": run.sizes.tokens_per_step / step,
        "first_step_s": times[0],
        "loss": statistics.mean(losses[-LAST:]),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "losses": losses,
        "ms": [1e3 * x for x in times],
        "attention_kernels": run.backend.description,
    }


def compare(rows):
    for row in rows:
        if "loss" not in row:
            continue
        done = [x for x in rows if x["model"] == row["model"] and "loss" in x]
        row["loss_difference"] = row["loss"] - done[0]["loss"]
        same = [x for x in done if x["attention"] == row["attention"] and x["linear"] == "bf16"]
        row["speedup"] = row["tokens_per_second"] / same[0]["tokens_per_second"] if same else None


def table(rows):
    lines = [
        ("model", "attention", "linear", "tokens/s", "to bf16", "first step, s", "GiB", "loss", "difference")
    ]
    for row in rows:
        cells = [row["model"], row["attention"], row["linear"]]
        if "loss" not in row:
            lines.append((*cells, "failed", *[""] * 5))
            continue
        names = ("tokens_per_second", "speedup", "first_step_s", "gib", "loss", "loss_difference")
        forms = (",.0f", ".3f", ".1f", ".1f", ".4f", "+.4f")
        values = [(row[name], form) for name, form in zip(names, forms, strict=True)]
        lines.append((*cells, *("–" if value is None else f"{value:{form}}" for value, form in values)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    main()
