import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from tests.cli import losses
from trainer import loop, parallel, plan
from trainer.errors import TrainingError
from trainer.loop import make_deterministic, with_user_facing_errors


def test_an_exhausted_gpu_names_a_smaller_micro_batch(compose_settings):
    settings = compose_settings("hardware.micro_batch=12")
    with (
        pytest.raises(TrainingError, match=r"CUDA out of memory, .*Use hardware.micro_batch=6"),
        with_user_facing_errors(settings),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.")


def test_a_full_disk_is_told_without_a_traceback(compose_settings):
    with (
        pytest.raises(TrainingError, match=r"the disk is full: metrics\.jsonl.*same command"),
        with_user_facing_errors(compose_settings()),
    ):
        raise OSError(28, "No space left on device", "metrics.jsonl")


def test_mistakes_of_the_program_keep_their_traceback(compose_settings):
    with pytest.raises(KeyError), with_user_facing_errors(compose_settings()):
        raise KeyError("bug")


def test_deterministic_reaches_pytorch_cublas_and_the_compiler(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        make_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch._inductor.config.deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        make_deterministic(False)


def test_gradients_in_memory_of_a_cuda_graph_are_not_lost(train_here, tmp_path, monkeypatch):
    """Stopped and continued, too. Without a GPU: each pass writes its gradients where the one before did."""

    def place(llama, hardware, ranks, **_):
        for parameter in llama.parameters():
            written = torch.empty_like(parameter)
            parameter.register_hook(lambda x, written=written: written.copy_(x).view_as(written))
        return llama, llama

    options = ("hardware.micro_batch=2",)
    whole = train_here(tmp_path / "whole", *options)
    monkeypatch.setattr(
        plan, "CHECKS", [check for check in plan.CHECKS if check is not plan.check_cuda_graphs]
    )
    monkeypatch.setattr(parallel, "place", place)
    options = (tmp_path / "run", *options, "hardware.cuda_graphs=true")
    last = train_here(*options).checkpoints.folder / "step_00000008"
    shutil.rmtree(last)
    continued = train_here(*options)
    assert last.exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    for found, wanted in zip(continued.llama.parameters(), whole.llama.parameters(), strict=True):
        assert torch.equal(found, wanted)


WAITS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def test_a_step_waits_for_the_device_once(train_here, tmp_path, monkeypatch):
    """Reading a tensor's value waits until the GPU has computed it; counted where the trainer does it."""
    waits = Counter()

    def counted(name, original):
        def call(self, *arguments, **settings):
            caller = sys._getframe(1).f_code
            if Path(caller.co_filename).parent == Path(loop.__file__).parent:
                waits[caller.co_name] += 1
            return original(self, *arguments, **settings)

        return call

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    overrides = ("steps=6", "checkpoint_every=2", "eval_every=6", "sample_tokens=0", "probe.every=0")
    train_here(tmp_path / "run", *overrides, "checkpoint_background=true")
    assert waits.pop("_exchange") == 6
    assert waits.pop("validation_loss") == 1
    assert waits.pop("_on_any_rank") == 3  # whether a checkpoint is finite; copying it waits anyway
    assert not waits
