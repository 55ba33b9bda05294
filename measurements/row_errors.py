"""Rows of dQ and dK of a run's model under each arm: how many are zero, how much of the small ones is left. Writes RUN/rows-….json.

    ABLATION_DS=zero_rows python measurements/row_errors.py RUN

Without ABLATION_DS: all arms that need none, and the presets. Mean over layers.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import model.huggingface
from data.corpus import open_corpus
from data.loader import evaluation_batches
from model import backends
from model.backends import ablation
from sagebwd import sage_attention
from sagebwd.config import PRESETS
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from scripts.runs import read_settings
from trainer.probe import capture
from trainer.run_directory import RunDirectory

CHANGE = os.environ.get("ABLATION_DS", "")
directory = RunDirectory(Path(sys.argv[1]))
settings = read_settings(directory)
device, dtype = torch.device(settings.hardware.device), getattr(torch, settings.hardware.dtype)
shape = {"device": device, "dtype": dtype, "d_head": settings.model.d_head, "is_gqa": settings.model.is_gqa}
autocast = partial(torch.autocast, device.type, dtype) if dtype == torch.bfloat16 else nullcontext
sequences = 8 if device.type == "cuda" else 1

full = backends.build({"backend": "fpa"}, **shape)
llama = model.huggingface.load(directory.weights, full.attend).to(device)
tokens = open_corpus(settings.data).train
batch = next(evaluation_batches(tokens, context=settings.context, sequences=sequences, micro_batch=sequences))
inputs, targets = (x.to(device) for x in batch[:2])
captured = capture(llama, list(range(len(llama.layers))), inputs, targets, None, autocast=autocast)
captured = captured.values() if isinstance(captured, dict) else captured

attentions = {arm: ablation.Settings(arm=arm).build(**shape).attend for arm in ablation.ARMS if (arm in ablation.CHANGES) == bool(CHANGE) and CHANGE in ("", arm)}
if not CHANGE:
    paper, default = PRESETS["paper"], PRESETS["default"]
    more = {"paper, no K-smoothing": replace(paper, smooth_k=False), "paper, Q-smoothing": replace(paper, smooth_q=True), "default, no K-smoothing": replace(default, smooth_k=False)}
    for name, config in (PRESETS | more).items():
        attentions[name] = lambda q, k, v, is_causal, enable_gqa, config=config: sage_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa, config=config)
    attentions["full precision"] = full.attend


def of_rows(found, exact):
    found, exact = found.double(), exact.double()
    sizes = exact.norm(dim=-1)
    small = (sizes < sizes.flatten().quantile(0.25)) & (sizes > 0)
    left = (found * exact).sum(-1) / exact.square().sum(-1).clamp_min(1e-300)
    return {
        "l2": relative_l2(found, exact),
        "zero": ((found.norm(dim=-1) == 0) & (sizes > 0)).double().mean().item(),
        "small_median": left[small].median().item(),
        "small_mean": left[small].clamp(-1, 3).mean().item(),
        "left_mean": left[sizes > 0].clamp(-1, 3).mean().item(),
        "error_of_sum": ((found - exact).sum(-2).norm() / exact.norm()).item(),
    }


result = {}
for name, attend in attentions.items():
    sums = {}
    for one in captured:
        exact = exact_attention(one.q, one.k, one.v, one.grad_out, is_causal=True)
        leaves = [x.detach().to(dtype).requires_grad_() for x in (one.q, one.k, one.v)]
        out = attend(*leaves, is_causal=True, enable_gqa=settings.model.is_gqa)
        gradients = torch.autograd.grad(out, leaves, one.grad_out.to(out))
        for tensor, found, truth in (("dq", gradients[0], exact.dq), ("dk", gradients[1], exact.dk)):
            for key, value in of_rows(found, truth).items():
                sums.setdefault(f"{tensor}_{key}", []).append(value)
    result[name] = {key: sum(values) / len(values) for key, values in sums.items()}
    print(f"{name:24}", " ".join(f"{key} {value:.4f}" for key, value in result[name].items()), flush=True)
(directory.path / f"rows-{CHANGE or 'none'}.json").write_text(json.dumps(result))
