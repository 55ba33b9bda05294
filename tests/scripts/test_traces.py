"""Traces are read as they were written, and anything else is refused."""

import pytest
import torch
from safetensors.torch import save_file

from scripts.traces import Layer, Origin, load_trace, save_trace

ORIGIN = Origin(
    "a run", step=7, tokens=7 * 512, tokens_per_step=512, qk_norm=True, attention="fpa", heads=[0, 3]
)


def layer(seed: int) -> Layer:
    torch.manual_seed(seed)
    q, grad_out = torch.randn(2, 1, 4, 33, 16, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 33, 16, dtype=torch.bfloat16)
    return Layer(q.transpose(1, 2), k, v, grad_out)  # as a model gives them: not contiguous


def test_a_trace_is_read_as_written(tmp_path):
    layers = {11: layer(0), 2: layer(1)}
    save_trace(tmp_path / "trace.safetensors", ORIGIN, layers)
    origin, found = load_trace(tmp_path / "trace.safetensors")
    assert origin == ORIGIN
    assert list(found) == [2, 11]
    for number, tensors in layers.items():
        assert all(torch.equal(x, y) for x, y in zip(tensors, found[number], strict=True))
    assert [file.name for file in tmp_path.iterdir()] == ["trace.safetensors"]


def test_other_files_are_refused(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name in ("weights", "text"):
        with pytest.raises(ValueError, match=r"is no trace; write one with .*--traces"):
            load_trace(tmp_path / f"{name}.safetensors")
