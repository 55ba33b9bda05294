"""Models and their branches on four GPUs: a model is trained on a pair of them, then its branches, two a GPU, while the
pair trains the next model.

    setsid python3 branch_queue.py FOLDER [SECONDS]      progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs

FOLDER holds code/ (a checkout), text/ (parquet, validation-mix.parquet, validation-openwebtext.parquet), site/ (packages)
and tiktoken_cache/. Tokens are prepared first, 10 s. After SECONDS no further model is begun. A model: 110 to 145 s;
its four branches beside the next model: about 300 s.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 1e9
BEGAN = time.monotonic()
DATA = ["data=parquet", "data.path=../text/train-*.parquet", "data.val_path=../text/validation-mix.parquet",
        "+data.validation.openwebtext=../text/validation-openwebtext.parquet", "data.root=../tokens"]
COMMON = ["experiment=scaled_131k", "logger.wandb=off", "eval_every=1000000", "eval_sequences=512", "checkpoint_every=100000",
          "milestone_every=null", "probe.every=0", "sample_tokens=0", "attention=fpa", "total_tokens=200015872",
          "optimizer.schedule=constant"]
MODELS = {"gain1": [], "gain4": ["model.qk_norm_gain=4"], "no-qk-norm": ["model.qk_norm=false"]}
AT = {"131k": ["total_tokens=333316096", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.4"],
      "2.1m": ["tps.divide_by=1", "total_tokens=3334471680", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.0403"]}
ATTENTIONS = {
    "cudnn": ["attention=fpa", "attention.sdpa=cudnn"], "flash": ["attention=fpa", "attention.sdpa=flash"],
    "sagebwd": ["attention=sagebwd"], "paper": ["attention=sagebwd_paper"],
    "paper-no_smoothing": ["attention=sagebwd_paper", "attention.smooth_k=false"],
    "paper-smooth_qk": ["attention=sagebwd_paper", "attention.smooth_q=true"],
}
FOUR, SMOOTHING = ["cudnn", "paper", "sagebwd", "flash"], ["cudnn", "paper", "paper-no_smoothing", "flash"]
#: For each pair of GPUs: model, seed, tokens per step of its branches, their attentions. Most wanted first.
PAIRS = {
    "0,1": [("no-qk-norm", 3, "131k", FOUR), ("no-qk-norm", 4, "131k", FOUR), ("no-qk-norm", 5, "131k", FOUR),
            ("gain1", 1, "2.1m", FOUR), ("gain1", 3, "2.1m", FOUR)],
    "2,3": [("gain4", 3, "131k", SMOOTHING), ("gain4", 4, "131k", SMOOTHING), ("gain1", 2, "2.1m", FOUR),
            ("gain4", 5, "131k", SMOOTHING)],
}
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(FOLDER / "site"), TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
                   TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"), TRITON_CACHE_DIR=str(FOLDER / "triton"), OMP_NUM_THREADS="2")


def note(text):
    with (FOLDER / "progress").open("a") as file:
        file.write(f"[{time.monotonic() - BEGAN:5.0f}] {text}\n")


def train(gpus, name, *arguments):
    note(f"start {name} on {gpus}")
    with (FOLDER / "logs" / f"{name}.log").open("w") as log:
        command = [sys.executable, "train.py", *arguments, f"run_dir=../runs/{name}"]
        code = subprocess.run(command, cwd=FOLDER / "code", stdout=log, stderr=subprocess.STDOUT,
                              env=dict(ENVIRONMENT, CUDA_VISIBLE_DEVICES=gpus)).returncode
    note(f"{name}: {code}")
    return code == 0


def pair(gpus, models):
    before = []
    for model, seed, at, attentions in models:
        if time.monotonic() - BEGAN > SECONDS:
            break
        trunk = f"trunk-{model}-s{seed}"
        well = train(gpus, trunk, *DATA, *COMMON, *MODELS[model], "hardware.devices=2", f"seed={seed}")
        for thread in before:
            thread.join()
        before = [
            threading.Thread(target=train, args=(
                gpus.split(",")[index % 2], f"{model}-{at}-{attention}-s{seed}", *AT[at], *ATTENTIONS[attention],
                "hardware.devices=1", f"seed={seed}", f"branch_from=../runs/{trunk}"))
            for index, attention in enumerate(attentions) if well
        ]
        for thread in before:
            thread.start()
    for thread in before:
        thread.join()
    note(f"pair {gpus}: done")


for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
with (FOLDER / "logs" / "prepare.log").open("w") as log:
    subprocess.run([sys.executable, "-m", "data.prepare", *DATA], cwd=FOLDER / "code", stdout=log, stderr=subprocess.STDOUT,
                   env=ENVIRONMENT, check=True)
note("prepared")
for gpus, models in PAIRS.items():
    threading.Thread(target=pair, args=(gpus, models)).start()
