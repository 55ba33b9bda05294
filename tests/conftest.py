"""Shared by all tests: everything runs offline."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores
