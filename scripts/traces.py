"""Traces: q, k, v and dO of a trained model's attention, kept in a safetensors file to be studied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scripts.benchmarking import replace_file


class Layer(NamedTuple):
    """What one layer's attention got, in a causal model: q, grad_out (B, H, N, D); k, v (B, G, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


@dataclass(frozen=True)
class Origin:
    """Where a trace is from."""

    run: str  # name of the run
    step: int  # optimizer steps that the weights have seen
    tokens: int  # tokens they have seen
    tokens_per_step: int
    qk_norm: bool
    attention: str  # the run's own, "fpa" or "sagebwd"
    heads: list[int] | None = None  # the query heads that were kept; None: all


def save_trace(path: Path, origin: Origin, layers: Mapping[int, Layer]) -> None:
    """Write `layers`, by their number in the model, and `origin`, whole or not at all."""
    tensors = {
        f"layer_{number}.{name}": tensor.detach().cpu().contiguous()
        for number, layer in layers.items()
        for name, tensor in layer._asdict().items()
    }
    replace_file(path, lambda file: save_file(tensors, file, metadata={"origin": json.dumps(asdict(origin))}))


def load_trace(path: Path, device: str | torch.device = "cpu") -> tuple[Origin, dict[int, Layer]]:
    """What `save_trace` wrote. Raises ValueError if the file is no trace."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            origin = Origin(**json.loads(file.metadata()["origin"]))
            numbers = sorted({int(name.split(".")[0].removeprefix("layer_")) for name in file.keys()})  # noqa: SIM118
            layers = {
                number: Layer(*(file.get_tensor(f"layer_{number}.{name}") for name in Layer._fields))
                for number in numbers
            }
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is no trace; write one with python -m scripts.layers --traces") from error
    return origin, layers
