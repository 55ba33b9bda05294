# ruff: noqa
"""35M with QK-norm at lr .004: a trunk of 200M tokens, then branches of 133M tokens: cuDNN, FlashAttention-2, default, low_bias, paper."""

import os, subprocess, sys, threading, time
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
SEED = os.environ.get("SEED", "1")
IS_DRY = os.environ.get("DRY") == "1"
BEGAN = time.monotonic()
DATA = [
    "data=parquet",
    "data.path=../text/train-*.parquet",
    "data.val_path=../text/validation-mix.parquet",
    "+data.validation.openwebtext=../text/validation-openwebtext.parquet",
    "data.root=../tokens",
]
COMMON = [
    "experiment=scaled_131k",
    "logger.wandb=off",
    "eval_every=1000000",
    "eval_sequences=512",
    "checkpoint_every=100000",
    "milestone_every=null",
    "probe.every=0",
    "sample_tokens=0",
    "attention=fpa",
    "optimizer.lr=0.004",
    f"seed={SEED}",
]
TRUNK = ["total_tokens=200015872", "optimizer.schedule=constant"]  # 1,526 steps
BRANCH = ["total_tokens=333316096", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.4"]  # 1,017 steps
if IS_DRY:
    COMMON += [
        "model=llama_debug",
        "model.vocab_size=50304",
        "context=64",
        "tps.tokens_per_step=256",
        "tps.divide_by=1",
        "tps.warmup_steps=2",
        "hardware=cpu",
        "hardware.micro_batch=2",
        "hardware.dtype=float32",
    ]
    TRUNK[0], BRANCH[0] = "total_tokens=1024", "total_tokens=2048"
CUDNN, FLASH = (
    ["attention=fpa", f"attention.sdpa={'math' if IS_DRY else name}"] for name in ("cudnn", "flash")
)
ARMS = {
    "fpa-cudnn": CUDNN,
    "sagebwd": ["attention=sagebwd"],
    "fpa-flash": FLASH,
    "sagebwd-low_bias": ["attention=sagebwd_low_bias"],
}
ENVIRONMENT = dict(
    os.environ,
    PYTHONPATH=f"{FOLDER / 'code'}:{FOLDER / 'site'}",
    TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
    TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"),
    TRITON_CACHE_DIR=str(FOLDER / "triton"),
    OMP_NUM_THREADS="2",
)


def note(text):
    with (FOLDER / "progress").open("a") as file:
        file.write(f"[{time.monotonic() - BEGAN:5.0f}] {text}\n")


def call(name, *command):
    with (FOLDER / "logs" / f"{name}.log").open("w") as log:
        return subprocess.run(
            [sys.executable, *command],
            cwd=FOLDER / "code",
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        ).returncode


def train(name, *arguments):
    note(f"start {name}")
    code = call(name, "train.py", *arguments, f"run_dir=../runs/{name}")
    note(f"{name}: {code}")
    return code


for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
assert call("prepare", "-m", "data.prepare", *DATA) == 0
note("prepared")
trunk = f"trunk-lr0.004-s{SEED}"
assert train(trunk, *DATA, *COMMON, *TRUNK) == 0
threads = [
    threading.Thread(
        target=train,
        args=(f"qk-norm-131k-lr0.004-{arm}-s{SEED}", f"branch_from=../runs/{trunk}", *BRANCH, *attention),
    )
    for arm, attention in ARMS.items()
]
for thread in threads:
    thread.start()
    time.sleep(2)
for thread in threads:
    thread.join()
note("all done")
