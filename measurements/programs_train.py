"""Do real programs train with `python -m sagebwd.run`? TRL's SFTTrainer, and a LoRA of an image model.

    python measurements/programs_train.py --text 'text/*.parquet' --out FOLDER/programs_train.json
    python measurements/programs_train.py --text 'text/*.parquet' --out /tmp/x.json --tiny    on a CPU

Needs trl, datasets, transformers, peft, diffusers, and TIKTOKEN_CACHE_DIR with GPT-2's vocabulary. Nothing is
downloaded: models have random weights, of one seed. Each arm is this file as a program of its own, with the
launcher in front or without it:

    torch            without the launcher; attention by the kernel that torch picks
    null             the same with that kernel forbidden: full precision twice, the null of a difference
    sagebwd          python -m sagebwd.run --sdpa
    sagebwd-low_bias python -m sagebwd.run --sdpa --preset low_bias
    sagebwd-ampere   as sagebwd; the program strikes Hopper's kernels from the list (no setting does it)

Tasks, with the sizes for one H200 (150 steps each, bf16 autocast):
    language_full    Qwen3, 12 layers of 768, heads of 128 (6 : 3), fp32 weights; 8 × 1,024 tokens, no padding
    language_lora    the first arm's trained model in bf16, documents padded on the right (a mask in each
                     call), gradient checkpointing
    image            SD3, 8 layers of 12 × 64, 8 × (1,024 + 77) tokens, LoRA, flow matching on waves

Columns: loss of the first step, and mean of the last 20; its difference from the first arm; the largest
difference of a step; share of calls in INT8; median time of a step.
"""

import argparse
import bisect
import glob
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "torch": [],
    "null": [],
    "sagebwd": ["-m", "sagebwd.run", "--sdpa"],
    "sagebwd-low_bias": ["-m", "sagebwd.run", "--sdpa", "--preset", "low_bias"],
    "sagebwd-ampere": ["-m", "sagebwd.run", "--sdpa"],
}
LAST = 20


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", required=True, help="parquet files with a column `text`")
    add("--out", type=Path, required=True, help="the JSON")
    add("--steps", type=int, default=150)
    add("--tiny", action="store_true", help="two layers, 64 tokens, 6 steps")
    add("--programs", nargs="+", default=["language", "image"])
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    add("--program", help=argparse.SUPPRESS)  # of the program itself, as is --arm
    add("--arm", help=argparse.SUPPRESS)
    add("--base", help=argparse.SUPPRESS)  # where the first arm leaves the model that all adapt
    arguments = parser.parse_args()
    arguments.steps = 6 if arguments.tiny else arguments.steps
    return arguments


# --- The driver --------------------------------------------------------------------------------------------


def main():
    arguments = parse_arguments()
    if arguments.program:
        run_program(arguments)
    else:
        run_arms(arguments)


def run_arms(arguments):
    result = {"command": sys.argv, "steps": arguments.steps, "cells": []}
    with tempfile.TemporaryDirectory() as base:
        for program in arguments.programs:
            for arm in arguments.arms:
                result["cells"] += run_arm(program, arm, base, arguments)
                compare(result["cells"])
                arguments.out.write_text(json.dumps(result, indent=1))
    print(table(result["cells"]))


def run_arm(program, arm, base, arguments):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        own = ["--program", program, "--arm", arm, "--base", base, "--out", str(out)]
        own += ["--text", str(Path(arguments.text).absolute())]
        own += ["--steps", str(arguments.steps), *["--tiny"] * arguments.tiny]
        command = [sys.executable, *ARMS[arm], str(Path(__file__).resolve()), *own]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        seconds = time.monotonic() - began
        print(f"{program}, {arm}: exit {done.returncode} after {seconds:.0f} s", flush=True)
        cells = json.loads(out.read_text()) if out.exists() else []
        if done.returncode or not cells:
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", flush=True)
            cells = cells or [{"task": program}]
        said = done.stderr.rpartition("\nSageBwd:\n")[2] if "\nSageBwd:\n" in done.stderr else ""
        warnings = sorted({line for line in done.stderr.splitlines() if "Warning" in line})
        about = {"arm": arm, "exit": done.returncode, "seconds": seconds, "said": said, "warnings": warnings}
        return [about | cell for cell in cells]


def compare(cells):
    for cell in cells:
        first = next(x for x in cells if x["task"] == cell["task"])
        if len(cell.get("losses", ())) == len(first.get("losses", ())) > 0:
            cell["loss"] = statistics.mean(cell["losses"][-LAST:])
            cell["difference"] = cell["loss"] - statistics.mean(first["losses"][-LAST:])
            cell["largest_difference"] = max(
                abs(x - y) for x, y in zip(cell["losses"], first["losses"], strict=True)
            )


def table(cells):
    head = ("task", "arm", "first", "last 20", "difference", "largest", "INT8", "step, ms", "kernels")
    lines = [head]
    for cell in cells:
        if "loss" not in cell:
            lines.append((cell["task"], cell["arm"], "failed", *[""] * 6))
            continue
        calls = sum(row["calls"] for row in cell["report"])
        in_int8 = sum(row["calls"] for row in cell["report"] if row["kernels"])
        share = f"{in_int8 / calls:.0%} of {calls}" if calls else "–"
        kernels = {row["kernels"] or row["reason"] for row in cell["report"]} | {*cell["picked"]}
        numbers = (cell["losses"][0], cell["loss"], cell["difference"], cell["largest_difference"])
        texts = [f"{x:{form}}" for x, form in zip(numbers, (".4f", ".4f", "+.4f", ".4f"), strict=True)]
        lines.append(
            (cell["task"], cell["arm"], *texts, share, f"{cell['ms']:.1f}", ", ".join(sorted(kernels)))
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# --- A program ---------------------------------------------------------------------------------------------


def run_program(arguments):
    import torch

    if arguments.arm == "sagebwd-ampere":
        from sagebwd import dispatch

        dispatch.KERNEL_SETS = tuple(name for name in dispatch.KERNEL_SETS if name != "hopper")
    picked = watch_torch(forbid=arguments.arm == "null") if not ARMS[arguments.arm] else Counter()
    cells = []
    for task in PROGRAMS[arguments.program]:
        torch.manual_seed(0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        losses, times = task(arguments)
        report = []
        if "sagebwd" in sys.modules:
            import sagebwd

            report = [
                {"name": row.name, "kernels": row.kernels, "reason": row.reason, "calls": row.calls}
                for row in sagebwd.report(clear=task is not PROGRAMS[arguments.program][-1]).rows
            ]
        cells.append(
            {
                "task": task.__name__,
                "losses": losses,
                "ms": 1e3 * statistics.median(times[min(10, len(times) // 2) :]),
                "report": report,
                "picked": dict(picked),
                "gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            }
        )
        picked.clear()
        arguments.out.write_text(json.dumps(cells))


def watch_torch(forbid):
    """Count which kernels torch picks for its attention; with `forbid`, let it pick another one."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    original, counts = F.scaled_dot_product_attention, Counter()
    names = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]
    allowed = [getattr(SDPBackend, x) for x in (names if torch.cuda.is_available() else [names[0], "MATH"])]

    def pick(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        device = query.device.type
        if torch.is_autocast_enabled(device):  # the operator casts by itself, this function does not
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        found = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        return SDPBackend(found)

    def attention(*tensors, **settings):
        signature = str([signs(x) for x in (*tensors, *settings.items())])
        if signature not in chosen:  # asked once: the answer costs as much as a short call
            found = pick(*tensors, **settings)
            others = [backend for backend in allowed if not forbid or backend != found]
            with sdpa_kernel(others):
                chosen[signature] = others, pick(*tensors, **settings).name
        others, name = chosen[signature]
        counts[name] += 1
        with sdpa_kernel(others) if forbid else nullcontext():
            return original(*tensors, **settings)

    def signs(x):
        if isinstance(x, torch.Tensor):
            return x.shape, x.dtype, x.stride(), x.requires_grad
        return [signs(y) for y in x] if isinstance(x, tuple) else x

    chosen = {}
    F.scaled_dot_product_attention = attention
    return counts


# --- Language ----------------------------------------------------------------------------------------------


def language_full(arguments):
    """Rows of equal length, cut from the text laid end to end: causal attention without a mask."""
    return train_language(arguments, {"packing": True, "packing_strategy": "wrapped", "learning_rate": 6e-4})


def language_lora(arguments):
    """A document per row, padded on the right, frozen weights in bf16."""
    from peft import LoraConfig

    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return train_language(arguments, {"learning_rate": 1e-3}, lora)


def train_language(arguments, settings, lora=None):
    import pyarrow.parquet
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    import data.huggingface_tokenizer
    import data.tokenizers

    tokens, batch = (64, 2) if arguments.tiny else (1024, 8)
    data.huggingface_tokenizer.write(
        data.tokenizers.load("gpt2").to_huggingface(), Path("tokenizer"),
        end_of_text=data.huggingface_tokenizer.END_OF_TEXT, context=tokens,
    )  # fmt: skip
    texts = [
        text
        for path in sorted(glob.glob(arguments.text))
        for text in pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
    ]
    if lora:  # other texts than those that the model was trained on
        texts = texts[-arguments.steps * batch :]
    else:  # at least so many characters as the steps take
        lengths = list(itertools.accumulate(map(len, texts)))
        texts = texts[: 1 + bisect.bisect(lengths, 6 * arguments.steps * batch * tokens)]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    if not arguments.tiny:
        sizes = {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        }
    config = Qwen3Config(
        vocab_size=50304, intermediate_size=3 * sizes["hidden_size"], head_dim=32 if arguments.tiny else 128,
        max_position_embeddings=tokens, tie_word_embeddings=True, bos_token_id=50256, eos_token_id=50256,
        **sizes,
    )  # fmt: skip
    torch.manual_seed(1)
    if lora:
        model = Qwen3ForCausalLM.from_pretrained(arguments.base, dtype=torch.bfloat16)
    else:
        model = Qwen3ForCausalLM._from_config(config)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="run", max_steps=arguments.steps, per_device_train_batch_size=batch, max_length=tokens,
            warmup_steps=max(1, arguments.steps // 10), logging_steps=1, save_strategy="no", report_to="none",
            seed=1, bf16=True, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
            gradient_checkpointing=lora is not None, **settings,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=AutoTokenizer.from_pretrained("tokenizer"),
        peft_config=lora,
    )  # fmt: skip
    times = time_of_logs(trainer)
    trainer.train()
    if not (lora or os.listdir(arguments.base)):
        model.save_pretrained(arguments.base)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], times


def time_of_logs(trainer):
    """Seconds of each step but the first; a log reads the loss, which waits for the GPU."""
    from transformers import TrainerCallback

    times, before = [], []

    class Clock(TrainerCallback):
        def on_log(self, *_, logs, **__):
            now = time.perf_counter()
            times.extend(now - x for x in before if "loss" in logs)
            before[:] = [now]

    trainer.add_callback(Clock)
    return times


# --- Images ------------------------------------------------------------------------------------------------

KINDS = 16  # of images, each with its text


def image(arguments):
    """A LoRA of a frozen SD3 in bf16, as diffusers' scripts train it: adapters in fp32, under autocast."""
    import torch
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, words, batch = (8, 7, 2) if arguments.tiny else (64, 77, 8)
    layers, heads, head_dim = (2, 2, 32) if arguments.tiny else (8, 12, 64)
    torch.manual_seed(1)
    model = SD3Transformer2DModel(
        sample_size=side, num_layers=layers, num_attention_heads=heads, attention_head_dim=head_dim,
        joint_attention_dim=256, caption_projection_dim=heads * head_dim, pooled_projection_dim=256,
        pos_embed_max_size=64, qk_norm="rms_norm",
    )  # fmt: skip
    model.requires_grad_(False).to(device, torch.bfloat16)
    adapted = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    adapted += ["net.0.proj", "net.2", "pos_embed.proj", "proj_out"]
    model.add_adapter(LoraConfig(r=32, lora_alpha=32, target_modules=adapted))
    model.train()
    weights = [x for x in model.parameters() if x.requires_grad]
    for x in weights:
        x.data = x.data.float()
    optimizer = torch.optim.AdamW(weights, lr=2e-3, fused=device == "cuda")
    fixed = torch.Generator().manual_seed(2)
    waves = torch.rand(KINDS, 16, 4, generator=fixed)
    text = torch.randn(KINDS, words, 256, generator=fixed).to(device, torch.bfloat16)
    pooled = torch.randn(KINDS, 256, generator=fixed).to(device, torch.bfloat16)
    axis = torch.linspace(0, 1, side)
    losses, times = [], []
    for step in range(arguments.steps):
        draw = torch.Generator().manual_seed(step)
        kinds = torch.randint(KINDS, (batch,), generator=draw)
        shift = torch.rand(batch, 1, 1, 1, generator=draw)
        wave = waves[kinds][..., None, None]  # (batch, 16, 4, 1, 1)
        phase = 2 * wave[:, :, 0] * axis[:, None] + 2 * wave[:, :, 1] * axis + wave[:, :, 2] + shift
        clean = torch.sin(2 * torch.pi * phase)
        noise = torch.randn(clean.shape, generator=draw)
        share = torch.randn(batch, generator=draw).sigmoid()
        noisy = torch.lerp(clean, noise, share[:, None, None, None]).to(device, torch.bfloat16)
        target = (noise - clean).to(device)
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            found = model(
                noisy, encoder_hidden_states=text[kinds], pooled_projections=pooled[kinds],
                timestep=1000 * share.to(device), return_dict=False,
            )[0]  # fmt: skip
        loss = torch.nn.functional.mse_loss(found.float(), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - began)
    return losses, times


PROGRAMS = {"language": [language_full, language_lora], "image": [image]}

if __name__ == "__main__":
    main()
