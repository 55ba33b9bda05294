import itertools
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F

from common.errors import TrainingError
from model.llama import Llama
from tests import warm
from tests.cli import losses
from tests.data.test_tokenizer_file import word_level
from trainer import loop, parallel, run
from trainer.distributed import Ranks
from trainer.loop import make_deterministic, with_user_facing_errors
from trainer.run_directory import read_metrics

ALONE = Ranks(0, 1, torch.device("cpu"))
SHORT = ("steps=4", "checkpoint_every=2", "sample_tokens=0", "probe.every=0")


def test_an_exhausted_gpu_names_a_smaller_micro_batch(compose_settings, tmp_path, monkeypatch):
    """And where it has written what the memory held, unless that fails."""
    settings = compose_settings("hardware.micro_batch=12", f"run_dir={tmp_path / 'run'}")

    def message():
        with (
            pytest.raises(TrainingError, match=r"CUDA out of memory, .*Use hardware.micro_batch=6") as told,
            with_user_facing_errors(settings, ALONE),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.")
        return str(told.value)

    snapshot = tmp_path / "run" / "out_of_memory_rank_0.pickle"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("blocks"))
    assert str(snapshot) in message()
    assert snapshot.read_text() == "blocks"
    no_gpu = Mock(side_effect=RuntimeError("no CUDA GPUs are available"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", no_gpu)
    assert "memory_viz" not in message()


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

    options = (*SHORT, "hardware.micro_batch=2")
    whole = train_here(tmp_path / "whole", *options)
    monkeypatch.setattr(parallel, "place", place)
    options = (tmp_path / "run", *options, "hardware.cuda_graphs=true")
    last = train_here(*options).checkpoints.folder / "step_00000004"
    shutil.rmtree(last)
    continued = train_here(*options)
    assert last.exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    for found, wanted in zip(continued.llama.parameters(), whole.llama.parameters(), strict=True):
        assert torch.equal(found, wanted)


def spoiling(step, where, value=float("nan")):
    """In place of trainer.run.build_optimizer: it leaves `value` in weights or moments after that step."""

    def built(model, settings):
        optimizer, steps = make(model, settings), itertools.count(1)

        @torch.no_grad()
        def spoil(*_):
            if next(steps) == step:
                parameter = optimizer.param_groups[0]["params"][1]
                (parameter if where == "weights" else optimizer.state[parameter]["exp_avg"])[0, 0] = value

        optimizer.register_step_post_hook(spoil)
        return optimizer

    make = run.build_optimizer
    return built


def test_milestones_are_saved_and_stay_whatever_the_other_checkpoints(train_here, tmp_path):
    saving = ("steps=7", "checkpoint_every=5", "milestone_every=2", "keep_checkpoints=1")
    train_here(tmp_path, *SHORT, *saving)
    assert sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()) == [2, 4, 6, 7]


def test_a_run_whose_last_step_spoils_its_state_is_not_finished(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_optimizer", spoiling(4, "moments", float("inf")))
    with pytest.raises(TrainingError, match=r"after step 4, 1 weights or moments are not finite: layers"):
        train_here(tmp_path, *SHORT)
    assert (tmp_path / "DIVERGED").read_text() == "4\n"
    assert not (tmp_path / "DONE").exists()
    assert not (tmp_path / "weights").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    monkeypatch.undo()
    train_here(tmp_path, *SHORT)
    assert (tmp_path / "DONE").exists()
    assert not (tmp_path / "DIVERGED").exists()


def test_weights_that_are_not_finite_end_the_run_at_once(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_optimizer", spoiling(1, "weights"))
    overrides = ("steps=40", "checkpoint_every=50", "eval_every=50", "skip_nonfinite=true")
    with pytest.raises(TrainingError, match=r"(?s)step 2 is not finite.*no step can be trained") as error:
        train_here(tmp_path, *overrides)
    assert "skip_nonfinite" not in str(error.value)  # would not help
    assert (tmp_path / "DIVERGED").read_text() == "2\n"


def test_a_run_whose_last_record_is_not_finite_is_not_finished(train_here, tmp_path):
    """As the record of its last step says, also if the process that wrote it was killed before the end."""
    train_here(tmp_path, *SHORT)
    (tmp_path / "DONE").unlink()
    for key in ("grad_norm", "val_loss"):
        records = read_metrics(tmp_path / "metrics.jsonl")
        last = next(record for record in reversed(records) if key in record)
        finite, last[key] = last[key], None
        write_records(tmp_path, records)
        with pytest.raises(TrainingError, match=r"(loss|norm).* is not finite, so the run is not finished"):
            train_here(tmp_path, *SHORT)
        assert (tmp_path / "DIVERGED").exists()
        assert not (tmp_path / "DONE").exists()
        last[key] = finite
        write_records(tmp_path, records)


def write_records(run_dir, records):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


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
    train_here(tmp_path / "run", *SHORT, "steps=6", "eval_every=6")
    # The last: whether a checkpoint is finite; copying it waits anyway.
    assert waits == {"_exchange": 6, "validation_loss": 1, "names_not_finite": 3}


def test_a_sample_prompt_that_cannot_be_encoded_is_named(train_here, tmp_path):
    """A vocabulary of words without one for others: tokenizers fails on what is not in it."""
    (tmp_path / "book.txt").write_text("dark night\n" * 2000)
    words = word_level(tmp_path / "tokenizer.json", ["dark", "night"])
    own = ("data=text", f"data.path={tmp_path}/book.txt", f"data.root={tmp_path}", f"data.tokenizer={words}")
    with pytest.raises(TrainingError, match=r"^sample_prompt='The ': .*UNK"):
        train_here(tmp_path / "run", *own)
    assert train_here(tmp_path / "run", *own, "sample_prompt=dark", "steps=1", "tps.warmup_steps=0").step == 1


def test_float8_rounds_the_operands_of_the_blocks_products(compose_settings):
    """Against float64 products of operands rounded by hand, one scale a tensor; gradients to e5m2."""
    pytest.importorskip("torchao", reason="pip install '.[float8]'")
    settings = compose_settings("experiment=debug")
    llama = Llama(settings.model, F.scaled_dot_product_attention)
    before = {name: x.clone() for name, x in llama.state_dict().items()}
    run.use_float8(llama, emulate=True)
    torch.testing.assert_close(llama.state_dict(), before, rtol=0, atol=0)  # in any other model, too
    kinds = {name: type(x).__name__ for name, x in llama.named_modules() if name.endswith("_proj")}
    assert kinds.keys() == {name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")}
    assert {*kinds.values()} == {"Float8Linear"}

    def rounded(x, dtype=torch.float8_e4m3fn):
        scale = torch.finfo(dtype).max / x.detach().double().abs().max()
        return (x.detach() * scale.float()).to(dtype).double() / scale

    linear = llama.layers[0].mlp.gate_proj
    x = torch.randn(32, linear.in_features, requires_grad=True)
    gradient = torch.randn(32, linear.out_features)
    out = linear(x)
    out.backward(gradient)
    operands = rounded(x), rounded(linear.weight), rounded(gradient, torch.float8_e5m2)
    products = operands[0] @ operands[1].T, operands[2] @ operands[1], operands[2].T @ operands[0]
    for found, wanted in zip((out, x.grad, linear.weight.grad), products, strict=True):
        assert (found.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_a_run_in_float8_continues_as_it_began(datasets, tmp_path):
    pytest.importorskip("torchao", reason="pip install '.[float8]'")
    overrides = (*SHORT, "hardware.dtype=bfloat16")
    whole, stopped, bf16 = (
        warm.debug_settings(datasets, *overrides, f"model.linear={linear}", f"run_dir={tmp_path / name}")
        for name, linear in (("whole", "float8"), ("stopped", "float8"), ("bf16", "null"))
    )
    warm.run(whole)
    warm.run(bf16)
    warm.run(stopped, dies_at_step_3, code=1)
    warm.run(stopped)
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    assert 0 < abs(losses(tmp_path / "whole")[-1] - losses(tmp_path / "bf16")[-1]) < 0.02


def dies_at_step_3():
    warm.at_step(3, lambda _: os._exit(1))
