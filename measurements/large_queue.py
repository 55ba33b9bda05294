# ruff: noqa
"""325M with QK-norm: a trunk of 100M tokens on two GPUs, then two branches, one on each.

    setsid python3 large_queue.py FOLDER      progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs
FOLDER holds code/, text/, site/, tiktoken_cache/, evaluate_weights.py. Settings are environment variables:
    ARMS="fpa-cudnn sagebwd"      the arms on GPU 0 and GPU 1; default: fpa-cudnn sagebwd-paper
    TPS=2097152 STEPS=95          tokens per step and steps of a branch; default: 131072, 1350
    DECAY=.33                     the share of a branch in which its learning rate falls; default: 1
    SEED=2
Seconds on two H200s: 15 to prepare, 390 for the trunk, .75 a step of 131,072 and 11.5 of 2,097,152, 60 to evaluate.
"""

import os, subprocess, sys, threading, time
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
IS_DRY = os.environ.get("DRY") == "1"
BEGAN = time.monotonic()
STEPS = int(os.environ.get("STEPS", "1350"))
TPS = int(os.environ.get("TPS", "131072"))
DECAY = float(os.environ.get("DECAY", "1"))
SEED = os.environ.get("SEED", "1")
CHOSEN = os.environ.get("ARMS", "fpa-cudnn sagebwd-paper").split()
DATA = [
    "data=parquet",
    "data.path=../text/train-*.parquet",
    "data.val_path=../text/validation-mix.parquet",
    "+data.validation.openwebtext=../text/validation-openwebtext.parquet",
    "data.root=../tokens",
]
COMMON = [
    "experiment=scaled_325m",
    "tps=2.1m",
    "tps.divide_by=16",
    "tps.warmup_steps=50",
    "logger.wandb=off",
    "eval_every=1000000",
    "eval_sequences=128",
    "checkpoint_every=100000",
    "milestone_every=null",
    "probe.every=0",
    "sample_tokens=0",
    "attention=fpa",
    "hardware.micro_batch=8",
    f"seed={SEED}",
]
TRUNK_STEPS = 763
TRUNK = ["steps=763", "optimizer.schedule=constant", "hardware.devices=2"]
BRANCH = [
    f"steps={TRUNK_STEPS + STEPS}",
    "logger.wandb=off",
    "optimizer.schedule=wsd",
    f"optimizer.decay_ratio={DECAY * STEPS / (TRUNK_STEPS + STEPS):.5f}",
    f"tps.tokens_per_step={TPS}",
    "tps.divide_by=1",
]
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
        f"seed={SEED}",
    ]
    TRUNK[0], BRANCH[0] = "steps=4", "steps=10"
    BRANCH[3:] = ["optimizer.decay_ratio=0.6", "tps.tokens_per_step=1024"]
ARMS = {
    "fpa-cudnn": ["attention=fpa", f"attention.sdpa={'math' if IS_DRY else 'cudnn'}"],
    "fpa-flash": ["attention=fpa", "attention.sdpa=flash"],
    "sagebwd": ["attention=sagebwd"],
    "sagebwd-paper": ["attention=sagebwd_paper"],
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


def call(name, gpus, *command):
    with (FOLDER / "logs" / f"{name}.log").open("w") as log:
        return subprocess.run(
            [sys.executable, *command],
            cwd=FOLDER / "code",
            stdout=log,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpus},
        ).returncode


def branch(gpu, arm):
    name = f"325m-qk-norm-{TPS >> 10}k-{arm}-s{SEED}"
    note(f"start {name}")
    code = call(
        name,
        gpu,
        "train.py",
        "hardware.devices=1",
        *BRANCH,
        *ARMS[arm],
        f"branch_from=../runs/trunk-325m-s{SEED}",
        f"run_dir=../runs/{name}",
    )
    note(f"{name}: {code}")
    if code == 0:
        note(f"evaluate {name}: {call(f'evaluate-{name}', gpu, '../evaluate_weights.py', f'../runs/{name}')}")


for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
if not (FOLDER / "runs" / f"trunk-325m-s{SEED}" / "DONE").exists():
    assert call("prepare", "", "-m", "data.prepare", *DATA) == 0
    note("prepared")
    code = call(
        f"trunk-325m-s{SEED}",
        "" if IS_DRY else "0,1",
        "train.py",
        *DATA,
        *COMMON,
        *TRUNK,
        f"run_dir=../runs/trunk-325m-s{SEED}",
    )
    note(f"trunk: {code}")
    assert code == 0
threads = [threading.Thread(target=branch, args=(str(gpu), arm)) for gpu, arm in enumerate(CHOSEN)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
note("all done")
