"""35M models without QK-norm, and branches of each with one part of `paper()`'s backward changed: what raises the loss?

    setsid python3 ablation_queue.py FOLDER SEEDS SECONDS [ARMS]   progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs

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
QK_NORM = os.environ.get("QK_NORM", "false")
IS_DRY = os.environ.get("DRY") == "1"  # on a CPU
BEGAN = time.monotonic()
DATA = ["data=parquet", "data.path=../text/train-*.parquet", "data.val_path=../text/validation-mix.parquet",
        "+data.validation.openwebtext=../text/validation-openwebtext.parquet", "data.root=../tokens"]
COMMON = ["experiment=scaled_131k", "logger.wandb=off", "eval_every=1000000", "eval_sequences=512", "checkpoint_every=100000",
          "milestone_every=null", "probe.every=0", "sample_tokens=0", "attention=fpa", f"model.qk_norm={QK_NORM}",
          "total_tokens=200015872", "optimizer.schedule=constant"]
BRANCH = ["total_tokens=333316096", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.4"]
if IS_DRY:
    COMMON += ["model=llama_debug", "model.vocab_size=50304", "context=64", "tps.tokens_per_step=256", "tps.divide_by=1", "tps.warmup_steps=2",
               "hardware=cpu", "hardware.micro_batch=2", "total_tokens=1536", "hardware.dtype=float32"]
    BRANCH[0] = "total_tokens=3072"
ABLATION = "attention=ablation"
CHANGES = ("random_sign", "stochastic", "zero_rows", "zero_elements", "other_elements")
#: Most wanted first.
ARMS = {
    "fpa-cudnn": ["attention=fpa", "attention.sdpa=math" if IS_DRY else "attention.sdpa=cudnn"],
    "sagebwd-paper": ["attention=sagebwd_paper"],
    "ds_per_row": [ABLATION, "attention.arm=ds_per_row"],
    "random_sign": [ABLATION, "attention.arm=random_sign"],
    "p_per_row": [ABLATION, "attention.arm=p_per_row"],
    "dv_16_bit": [ABLATION, "attention.arm=dv_16_bit"],
    "dq_dk_16_bit": [ABLATION, "attention.arm=dq_dk_16_bit"],
    "sagebwd": ["attention=sagebwd"],
    "dq_16_bit": [ABLATION, "attention.arm=dq_16_bit"],
    **{arm: [ABLATION, f"attention.arm={arm}"] for arm in CHANGES if arm != "random_sign"},
    "fpa-flash": ["attention=fpa", "attention.sdpa=math" if IS_DRY else "attention.sdpa=flash"],
}
ENVIRONMENT = dict(os.environ, PYTHONPATH=f"{FOLDER / 'code'}:{FOLDER / 'site'}", TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
                   TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"), TRITON_CACHE_DIR=str(FOLDER / "triton"), OMP_NUM_THREADS="2")


def changed(arm):
    """Triton does not see that kernels compiled with ABLATION_DS differ, so they have a cache each."""
    return {"ABLATION_DS": arm, "TRITON_CACHE_DIR": str(FOLDER / f"triton-{arm}")} if arm in CHANGES else {}


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


def work(gpu, trunk, seed, arms):
    while time.monotonic() - BEGAN < SECONDS:
        try:
            arm = arms.get_nowait()
        except queue.Empty:
            return
        environment = changed(arm)
        name = f"no-qk-norm-131k-{arm}-s{seed}"
        if train(gpu, name, *BRANCH, *ARMS[arm], f"seed={seed}", f"branch_from=../runs/{trunk}", **environment):
            call(f"evaluate-{name}", gpu, "measurements/evaluate_weights.py", f"../runs/{name}", **environment)


def measure_rows(gpu, trunk, seed):
    for change in ("none", "zero_rows", "zero_elements"):
        call(f"rows-{change}-s{seed}", gpu, "measurements/row_errors.py", f"../runs/{trunk}", **changed(change))


def model_and_branches(gpu, seed):
    trunk = f"trunk-no-qk-norm-s{seed}"
    if not train(gpu, trunk, *DATA, *COMMON, f"seed={seed}"):
        return
    rows = threading.Thread(target=measure_rows, args=(gpu, trunk, seed))
    rows.start()
    arms = queue.Queue()
    for arm in sys.argv[4].split(",") if len(sys.argv) > 4 else ARMS:
        arms.put(arm)
    threads = [threading.Thread(target=work, args=(gpu, trunk, seed, arms)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0 if IS_DRY else 3)
    for thread in [*threads, rows]:
        thread.join()
    note(f"seed {seed}: done")


for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
assert call("prepare", "", "-m", "data.prepare", *DATA) == 0
note("prepared")
for gpu, seed in enumerate(SEEDS):
    threading.Thread(target=model_and_branches, args=(str(gpu), seed)).start()
