"""325M models and their branches: a model is trained on a pair of GPUs, then its four branches, two a GPU.

    setsid python3 branch_queue_325m.py FOLDER [SECONDS [2]]     2: two GPUs, only the models without QK-norm
    progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs

FOLDER holds code/ (a checkout), text/ (parquet, validation-mix.parquet, validation-openwebtext.parquet),
site/ (packages) and tiktoken_cache/. Tokens are prepared first, 10 s. After SECONDS no further model is
begun. By estimate a model takes 180 s on two H100s, its branches 320 s without QK-norm and 590 s at 2.1M
tokens per step. Where three runs of micro-batch 8 have room (100 GiB), the next model begins beside them.
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
DATA = [
    "data=parquet",
    "data.path=../text/train-*.parquet",
    "data.val_path=../text/validation-mix.parquet",
    "+data.validation.openwebtext=../text/validation-openwebtext.parquet",
    "data.root=../tokens",
]
COMMON = [
    "experiment=scaled_325m",
    "logger.wandb=off",
    "eval_every=1000000",
    "eval_sequences=240",
    "checkpoint_every=100000",
    "milestone_every=null",
    "probe.every=0",
    "sample_tokens=0",
    "attention=fpa",
    "steps=200",
    "optimizer.schedule=constant",
    "hardware.micro_batch=8",
]
MODELS = {"325m": [], "325m-no-qk-norm": ["model.qk_norm=false"]}
AT = {
    "260k": ["steps=300", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.3334"],
    "2.1m": [
        "tps.tokens_per_step=2097152",
        "steps=224",
        "optimizer.schedule=wsd",
        "optimizer.decay_ratio=0.1072",
    ],
}
ATTENTIONS = {
    "cudnn": ["attention=fpa", "attention.sdpa=cudnn"],
    "flash": ["attention=fpa", "attention.sdpa=flash"],
    "sagebwd": ["attention=sagebwd"],
    "paper": ["attention=sagebwd_paper"],
}
#: For each pair of GPUs: model, seed, tokens per step of its branches. Most wanted first.
PAIRS = {
    "0,1": [("325m-no-qk-norm", seed, "260k") for seed in (1, 2, 3)],
    "2,3": [("325m", seed, "2.1m") for seed in (1, 2)],
}
if len(sys.argv) > 3:
    PAIRS.pop("2,3")
ENVIRONMENT = dict(
    os.environ,
    PYTHONPATH=str(FOLDER / "site"),
    TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
    TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"),
    TRITON_CACHE_DIR=str(FOLDER / "triton"),
    OMP_NUM_THREADS="2",
)


def note(text):
    with (FOLDER / "progress").open("a") as file:
        file.write(f"[{time.monotonic() - BEGAN:5.0f}] {text}\n")


def train(gpus, name, *arguments):
    note(f"start {name} on {gpus}")
    with (FOLDER / "logs" / f"{name}.log").open("w") as log:
        command = [sys.executable, "train.py", *arguments, f"run_dir=../runs/{name}"]
        code = subprocess.run(
            command,
            cwd=FOLDER / "code",
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(ENVIRONMENT, CUDA_VISIBLE_DEVICES=gpus),
        ).returncode
    note(f"{name}: {code}")
    return code == 0


def is_roomy():
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(query, text=True).split()[0]) > 100 * 1024


def pair(gpus, models):
    before = []
    for model, seed, at in models:
        if not ROOMY:
            join(before)
        if time.monotonic() - BEGAN > SECONDS:
            break
        trunk = f"trunk-{model}-s{seed}"
        settings = [*DATA, *COMMON, *MODELS[model], "hardware.devices=2", f"seed={seed}"]
        well = train(gpus, trunk, *settings)
        join(before)
        before = []
        for index, attention in enumerate(ATTENTIONS if well else []):
            name = f"{model}-{at}-{attention}-s{seed}"
            settings = [*AT[at], *ATTENTIONS[attention], "hardware.devices=1", f"seed={seed}"]
            gpu = gpus.split(",")[index % 2]
            arguments = (gpu, name, *settings, f"branch_from=../runs/{trunk}")
            before.append(threading.Thread(target=train, args=arguments))
            before[-1].start()
    join(before)
    note(f"pair {gpus}: done")


def join(threads):
    for thread in threads:
        thread.join()


ROOMY = is_roomy()
for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
with (FOLDER / "logs" / "prepare.log").open("w") as log:
    subprocess.run(
        [sys.executable, "-m", "data.prepare", *DATA],
        cwd=FOLDER / "code",
        stdout=log,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        check=True,
    )
note("prepared")
for gpus, models in PAIRS.items():
    threading.Thread(target=pair, args=(gpus, models)).start()
