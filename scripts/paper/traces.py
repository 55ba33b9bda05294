"""Traces: q, k, v and dO of a trained model's attention, in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scripts.output import replace_file

FIX = "python -m scripts.paper.layers RUN --traces writes them"


class Layer(NamedTuple):
    """Inputs of one layer's attention, in a causal model: q, grad_out (B, H, N, D); k, v (B, G, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


@dataclass(frozen=True)
class Origin:
    """Where a trace is from."""

    run: str  # name of the run, which tells it from the others that were traced with it
    step: int  # optimizer steps that the weights have seen
    tokens: int  # tokens they have seen
    tokens_per_step: int
    qk_norm: bool
    attention: str  # the run's own, "fpa" or "sagebwd"
    heads: list[int] | None = None  # the query heads that were saved; None: all

    @property
    def name(self) -> str:
        """The run and its step, in words."""
        return f"{self.run}, step {self.step:,}"


def trace_file(folder: Path, origin: Origin) -> Path:
    """Where the trace of a run goes in the folder of the run's traces; by name they are in order of steps."""
    return folder / f"step_{origin.step:08d}.safetensors"


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and those in the folders, by step. Raises ValueError where there is none."""
    found = []
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            what = "holds no trace" if path.is_dir() else "is not there"
            raise ValueError(f"{path} {what}; {FIX}")
        found += files
    return found


def save_trace(path: Path, origin: Origin, layers: Mapping[int, Layer]) -> None:
    """Write `layers`, by their number in the model, and `origin`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"layer_{number}.{name}": tensor.detach().cpu().contiguous()
        for number, layer in layers.items()
        for name, tensor in layer._asdict().items()
    }
    replace_file(path, lambda file: save_file(tensors, file, metadata={"origin": json.dumps(asdict(origin))}))


def load_trace(path: Path, device: str | torch.device = "cpu") -> tuple[Origin, dict[int, Layer]]:
    """What `save_trace` wrote. Raises ValueError if the file is not a trace, or not whole."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            origin = Origin(**json.loads(file.metadata()["origin"]))
            numbers = sorted({int(name.split(".")[0].removeprefix("layer_")) for name in file.keys()})  # noqa: SIM118
            layers = {
                number: Layer(*(file.get_tensor(f"layer_{number}.{name}") for name in Layer._fields))
                for number in numbers
            }
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a trace, or is damaged; {FIX}") from error
    return origin, layers
