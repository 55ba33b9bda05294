# ruff: noqa
"""Does a model that is trained with later tokens in its scales learn to use them?

    python leak.py RUN [RUN ...] --out leak.json

For every checkpoint of each run, on validation text: the loss at some positions with the whole sequence given
(teacher-forced), and with the tokens up to there alone, as in generation. A model that uses what later tokens
do to scales and to the mean of K has a lower teacher-forced loss. Controls: the same weights in full
precision and with strictly_causal(), where nothing leaks; a model trained in full precision, evaluated with the
default, which leaks but was not learned.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from data.corpus import open_corpus
from data.loader import evaluation_batches
from model import backends
from model.llama import Llama
from scripts.runs import read_settings
from trainer.checkpoint import load_weights
from trainer.run_directory import RunDirectory

parser = argparse.ArgumentParser()
parser.add_argument("runs", nargs="+", type=Path)
parser.add_argument("--sequences", type=int, default=256)
parser.add_argument("--positions", type=int, default=48)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--out", type=Path, default=Path("leak.json"))
arguments = parser.parse_args()
ATTENTIONS = {
    "default": {"backend": "sagebwd"},
    "strictly_causal": {"backend": "sagebwd", "preset": "strictly_causal"},
    "full precision": {"backend": "fpa", "sdpa": "cudnn" if torch.cuda.is_available() else "math"},
}


def losses_at(llama, inputs, targets, positions):
    """(sequences, positions): of each target, in nats."""
    logits = llama(inputs)[:, positions].float()
    wanted = targets[:, positions]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), reduction="none"
    ).view_as(wanted)


found = []
for run in arguments.runs:
    directory = RunDirectory(run)
    settings = read_settings(directory)
    device, dtype = torch.device(settings.hardware.device), getattr(torch, settings.hardware.dtype)
    tokens = open_corpus(settings.data).validation[0].tokens
    shape = {
        "device": device,
        "dtype": dtype,
        "d_head": settings.model.d_head,
        "is_gqa": settings.model.is_gqa,
    }
    positions = np.sort(
        np.random.default_rng(0).choice(
            np.arange(settings.context // 16, settings.context), arguments.positions, replace=False
        )
    )
    steps = sorted(int(path.name.split("_")[1]) for path in directory.checkpoints.glob("step_*"))
    for step in steps:
        for name, chosen in ATTENTIONS.items():
            llama = Llama(settings.model, backends.build(chosen, **shape).attend)
            load_weights(directory.checkpoints, step, llama)
            llama = llama.to(device).eval()
            teacher, prefix = [], []
            with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
                for inputs, targets, *_ in evaluation_batches(
                    tokens,
                    context=settings.context,
                    sequences=arguments.sequences,
                    micro_batch=arguments.batch,
                ):
                    inputs, targets = inputs.to(device), targets.to(device)
                    teacher.append(losses_at(llama, inputs, targets, positions))
                    own = [
                        losses_at(llama, inputs[:, : p + 1], targets[:, : p + 1], [p])
                        for p in positions.tolist()
                    ]
                    prefix.append(torch.cat(own, 1))
            teacher, prefix = (torch.cat(x).double() for x in (teacher, prefix))
            of_sequences = (teacher - prefix).mean(1)
            row = {
                "run": run.name,
                "step": step,
                "evaluated with": name,
                "teacher-forced": teacher.mean().item(),
                "by prefix": prefix.mean().item(),
                "difference": of_sequences.mean().item(),
                "standard error": (of_sequences.std() / len(of_sequences) ** 0.5).item(),
                "root mean square": (teacher - prefix).square().mean().sqrt().item(),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps(found, indent=1))
