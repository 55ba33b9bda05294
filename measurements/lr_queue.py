"""35M models without QK-norm, and branches of each with one part of `paper()`'s backward changed: what raises the loss?

    setsid python3 ablation_queue.py FOLDER SEEDS SECONDS      progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs

One model a GPU, then its branches, two at a time; each one's final weights are then evaluated with its own attention and
with full precision. FOLDER holds code/ (a checkout), text/ (parquet, validation-mix.parquet, validation-openwebtext.parquet),
site/ (packages) and tiktoken_cache/. After SECONDS no further branch is begun.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER, SEEDS, SECONDS = Path(sys.argv[1]).resolve(), sys.argv[2].split(","), float(sys.argv[3])
IS_DRY = os.environ.get("DRY") == "1"  # on a CPU
BEGAN = time.monotonic()
DATA = ["data=parquet", "data.path=../text/train-*.parquet", "data.val_path=../text/validation-mix.parquet",
        "+data.validation.openwebtext=../text/validation-openwebtext.parquet", "data.root=../tokens"]
COMMON = ["experiment=scaled_131k", "logger.wandb=off", "eval_every=1000000", "eval_sequences=512", "checkpoint_every=100000",
          "milestone_every=null", "probe.every=0", "sample_tokens=0", "attention=fpa", "model.qk_norm=true"]
BRANCH = ["total_tokens=333316096", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.4"]
if IS_DRY:
    COMMON += ["model=llama_debug", "model.vocab_size=50304", "context=64", "tps.tokens_per_step=256", "tps.divide_by=1", "tps.warmup_steps=2",
               "hardware=cpu", "hardware.micro_batch=2", "total_tokens=1536", "hardware.dtype=float32"]
    BRANCH[0] = "total_tokens=3072"
ABLATION = "attention=ablation"
#: Most wanted first.
ARMS = {
    "fpa-cudnn": ["attention=fpa", "attention.sdpa=math" if IS_DRY else "attention.sdpa=cudnn"],
    "sagebwd-paper": ["attention=sagebwd_paper"],
    "ds_per_row": [ABLATION, "attention.arm=ds_per_row"],
    "dq_dk_16_bit": [ABLATION, "attention.arm=dq_dk_16_bit"],
    "random_sign": [ABLATION, "attention.arm=random_sign"],
    "p_per_row": [ABLATION, "attention.arm=p_per_row"],
    "sagebwd": ["attention=sagebwd"],
    "dv_16_bit": [ABLATION, "attention.arm=dv_16_bit"],
    "dq_16_bit": [ABLATION, "attention.arm=dq_16_bit"],
    "fpa-flash": ["attention=fpa", "attention.sdpa=math" if IS_DRY else "attention.sdpa=flash"],
}
ENVIRONMENT = dict(os.environ, PYTHONPATH=f"{FOLDER / 'code'}:{FOLDER / 'site'}", TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
                   TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"), TRITON_CACHE_DIR=str(FOLDER / "triton"), OMP_NUM_THREADS="2")


def note(text):
    with (FOLDER / "progress").open("a") as file:
        file.write(f"[{time.monotonic() - BEGAN:5.0f}] {text}\n")


def call(name, gpu, *command, **environment):
    with (FOLDER / "logs" / f"{name}.log").open("w") as log:
        return subprocess.run([sys.executable, *command], cwd=FOLDER / "code", stdout=log, stderr=subprocess.STDOUT,
                              env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpu} | environment).returncode


def train(gpu, name, *arguments, **environment):
    note(f"start {name} on {gpu}")
    code = call(name, gpu, "train.py", *arguments, f"run_dir=../runs/{name}", **environment)
    note(f"{name}: {code}")
    return code == 0



ATTENTIONS = {"fpa-cudnn": ARMS["fpa-cudnn"], "sagebwd": ARMS["sagebwd"], "fpa-flash": ARMS["fpa-flash"], "sagebwd-low_bias": ["attention=sagebwd_low_bias"]}
runs = queue.Queue()
for lr in (0.016, 0.004):
    for seed in range(1, 7):
        for name, attention in ATTENTIONS.items():
            runs.put((f"lr{lr}-{name}-s{seed}", [*DATA, *COMMON, *attention, f"seed={seed}", f"optimizer.lr={lr}"]))


def loop(gpu):
    while time.monotonic() - BEGAN < SECONDS:
        try:
            name, arguments = runs.get_nowait()
        except queue.Empty:
            return
        train(gpu, name, *arguments)


for index in range(4):
    threading.Thread(target=loop, args=(str(index % 2),)).start()
