"""Traces are read as they were written, and anything else is refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from scripts.paper.traces import Layer, Origin, find_traces, load_trace, save_trace, trace_file

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
        with pytest.raises(ValueError, match=r"is not a trace, or is damaged; .*--traces"):
            load_trace(tmp_path / f"{name}.safetensors")


def test_a_trace_that_was_cut_short_is_refused(tmp_path):
    path = tmp_path / "trace.safetensors"
    save_trace(path, ORIGIN, {2: layer(1)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"trace\.safetensors is not a trace, or is damaged; .*--traces"):
        load_trace(path)


def test_traces_are_found_by_file_and_by_folder_in_order_of_steps(tmp_path):
    files = [trace_file(tmp_path, replace(ORIGIN, step=step)) for step in (2000, 30, 100)]
    for file in files:
        file.touch()
    assert find_traces([files[0]]) == [files[0]]
    assert find_traces([tmp_path]) == [files[1], files[2], files[0]]
    (tmp_path / "empty").mkdir()
    for name, what in (("empty", "holds no trace"), ("gone", "is not there"), ("a.safetensors", "is not")):
        with pytest.raises(
            ValueError, match=rf"{name} {what}.*scripts.paper.layers RUN --traces writes them"
        ):
            find_traces([tmp_path, tmp_path / name])
