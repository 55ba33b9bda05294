"""What is left of the cause's runs, on two GPUs: dQ alone in 16 bit, stochastic rounding, 2.1M tokens per step, lr .004.

    setsid python3 cause_queue.py FOLDER      progress: FOLDER/progress; logs: FOLDER/logs; runs: FOLDER/runs

GPU 0: a 35M model with QK-norm (seed 11) and two branches of 256 steps × 2,097,152 tokens; beside and after them whole runs
at lr .004. GPU 1: a 35M model without QK-norm (seed 10) and four branches of 133M tokens, then as GPU 0 with seed 12.
FOLDER holds code/ (a checkout), text/ (parquet, validation-mix.parquet, validation-openwebtext.parquet), site/ (packages)
and tiktoken_cache/.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
IS_DRY = os.environ.get("DRY") == "1"  # on a CPU
BEGAN = time.monotonic()
DATA = ["data=parquet", "data.path=../text/train-*.parquet", "data.val_path=../text/validation-mix.parquet",
        "+data.validation.openwebtext=../text/validation-openwebtext.parquet", "data.root=../tokens"]
COMMON = ["experiment=scaled_131k", "logger.wandb=off", "eval_every=1000000", "eval_sequences=512", "checkpoint_every=100000",
          "milestone_every=null", "probe.every=0", "sample_tokens=0", "attention=fpa"]
TRUNK = ["total_tokens=200015872", "optimizer.schedule=constant"]  # 1,526 steps
BRANCH = ["total_tokens=333316096", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.4"]  # 1,017 steps
#: 256 steps, the learning rate falling over all of them.
LONG_BRANCH = ["tps.divide_by=1", "total_tokens=3737124864", "optimizer.schedule=wsd", "optimizer.decay_ratio=0.14366"]
if IS_DRY:
    COMMON += ["model=llama_debug", "model.vocab_size=50304", "context=64", "tps.tokens_per_step=256", "tps.divide_by=1",
               "tps.warmup_steps=2", "hardware=cpu", "hardware.micro_batch=2", "hardware.dtype=float32", "total_tokens=1024"]
    TRUNK[0], BRANCH[0] = "total_tokens=1024", "total_tokens=2048"
    LONG_BRANCH[:2] = ["tps.tokens_per_step=512", "total_tokens=3072"]
CUDNN, FLASH = (["attention=fpa", f"attention.sdpa={'math' if IS_DRY else name}"] for name in ("cudnn", "flash"))
ARMS = {"fpa-cudnn": CUDNN, "sagebwd-paper": ["attention=sagebwd_paper"],
        "dq_16_bit": ["attention=ablation", "attention.arm=dq_16_bit"],
        "stochastic": ["attention=ablation", "attention.arm=stochastic"]}
WHOLE = {"fpa-cudnn": CUDNN, "sagebwd": ["attention=sagebwd"], "fpa-flash": FLASH, "sagebwd-low_bias": ["attention=sagebwd_low_bias"]}
ENVIRONMENT = dict(os.environ, PYTHONPATH=f"{FOLDER / 'code'}:{FOLDER / 'site'}", TIKTOKEN_CACHE_DIR=str(FOLDER / "tiktoken_cache"),
                   TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"), TRITON_CACHE_DIR=str(FOLDER / "triton"), OMP_NUM_THREADS="2")


def changed(arm):
    """Triton does not see that kernels compiled with ABLATION_DS differ, so they have a cache of their own."""
    return {"ABLATION_DS": arm, "TRITON_CACHE_DIR": str(FOLDER / f"triton-{arm}")} if arm == "stochastic" else {}


def note(text):
    with (FOLDER / "progress").open("a") as file:
        file.write(f"[{time.monotonic() - BEGAN:5.0f}] {text}\n")


#: Processes that share a GPU: a 35M model takes 11 GiB.
SLOTS = {gpu: threading.Semaphore(int(os.environ.get("PER_GPU", "4"))) for gpu in ("0", "1", "")}


def call(name, gpu, *command, **environment):
    with SLOTS[gpu], (FOLDER / "logs" / f"{name}.log").open("w") as log:
        return subprocess.run([sys.executable, *command], cwd=FOLDER / "code", stdout=log, stderr=subprocess.STDOUT,
                              env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpu} | environment).returncode


def train(gpu, name, *arguments, **environment):
    note(f"start {name} on {gpu}")
    code = call(name, gpu, "train.py", *arguments, f"run_dir=../runs/{name}", **environment)
    note(f"{name}: {code}")
    return code == 0


def side_by_side(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
        time.sleep(0 if IS_DRY else 2)
    for thread in threads:
        thread.join()


def branch(gpu, name, trunk, arm, arguments, evaluated):
    environment = changed(arm)
    name = f"{name}-{arm}-s{trunk.rsplit('-s')[-1]}"
    if train(gpu, name, *arguments, *ARMS[arm], f"branch_from=../runs/{trunk}", **environment) and evaluated:
        call(f"evaluate-{name}", gpu, "measurements/evaluate_weights.py", f"../runs/{name}", **environment)


def model_and_branches(gpu, seed, qk_norm, name, arguments, arms):
    trunk = f"trunk-{name}-s{seed}"
    if train(gpu, trunk, *DATA, *COMMON, *TRUNK, f"model.qk_norm={qk_norm}", f"seed={seed}"):
        side_by_side([lambda arm=arm: branch(gpu, name, trunk, arm, [*arguments, f"seed={seed}"], not qk_norm) for arm in arms])


def long_branches(gpu, seed):
    model_and_branches(gpu, seed, True, "qk-norm-2.1m", LONG_BRANCH, ["fpa-cudnn", "sagebwd-paper"])


whole = queue.Queue()
for seed in range(1, 3 if IS_DRY else 7):
    for name, attention in WHOLE.items():
        whole.put((f"lr0.004-{name}-s{seed}", [*DATA, *COMMON, *attention, "model.qk_norm=true", f"seed={seed}", "optimizer.lr=0.004"]))


def whole_runs(gpu):
    while not whole.empty():
        name, arguments = whole.get()
        train(gpu, name, *arguments)


def gpu_0():
    side_by_side([lambda: long_branches("0", 11), lambda: whole_runs("0")])


def gpu_1():
    model_and_branches("1", 10, False, "no-qk-norm-131k", BRANCH, ARMS)
    long_branches("1", 12)
    whole_runs("1")


for name in ("logs", "runs", "inductor", "triton"):
    (FOLDER / name).mkdir(mode=0o700, exist_ok=True)
assert call("prepare", "", "-m", "data.prepare", *DATA) == 0
note("prepared")
side_by_side([gpu_0, gpu_1, lambda: (time.sleep(0 if IS_DRY else 700), whole_runs("0"))])
note("all done")
