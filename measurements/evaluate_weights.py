# ruff: noqa
"""Loss of a run's final weights with its own attention and with full precision, on the same text. Writes RUN/attentions.json.

Is a gap in the weights, or in the forward that they are evaluated with?
"""

import json
import sys
from pathlib import Path

import torch

import model.huggingface
from data.corpus import open_corpus
from data.loader import evaluation_batches
from model import backends
from scripts.runs import read_settings
from trainer.run_directory import RunDirectory

TRAIN_SEQUENCES, BATCH = 512, 8
directory = RunDirectory(Path(sys.argv[1]))
settings = read_settings(directory)
device = torch.device(settings.hardware.device)
dtype = getattr(torch, settings.hardware.dtype)
corpus = open_corpus(settings.data)
texts = {f"validation {one.name or ''}".strip(): one.tokens for one in corpus.validation} | {
    "training": corpus.train
}
shape = {"device": device, "dtype": dtype, "d_head": settings.model.d_head, "is_gqa": settings.model.is_gqa}
full = {"backend": "fpa", "sdpa": "cudnn" if device.type == "cuda" else "math"}
attentions = {"own": settings.attention.build(**shape), "full precision": backends.build(full, **shape)}
found = {}
with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
    for attention, backend in attentions.items():
        llama = model.huggingface.load(directory.weights, backend.attend).to(device).eval()
        for text, tokens in texts.items():
            count = min(TRAIN_SEQUENCES, (len(tokens) - 1) // settings.context)
            sums = torch.zeros(2, dtype=torch.float64, device=device)
            for inputs, targets, *_ in evaluation_batches(
                tokens, context=settings.context, sequences=count, micro_batch=BATCH
            ):
                loss = llama(inputs.to(device), targets.to(device))
                sums += torch.stack([loss.double() * inputs.numel(), sums.new_tensor(inputs.numel())])
            found.setdefault(text, {})[attention] = (sums[0] / sums[1]).item()
            found[text]["tokens"] = int(sums[1])
(directory.path / "attentions.json").write_text(json.dumps(found))
print(json.dumps(found, indent=1))
