"""train.py on a CUDA GPU: `python -m pytest -m gpu`."""

import signal
import warnings

import pytest
import torch
import torch.nn.functional as F

from model import backends
from model.backends import fpa
from model.config import LlamaConfig
from model.kernels.flash_attention_4 import why_not
from model.llama import Llama
from tests.cli import assert_same_weights, kill_at_step, losses, metrics, run
from tests.trainer.conftest import compose_settings
from trainer import loop
from trainer.distributed import Ranks
from trainer.loop import stop_if_asked
from trainer.processes import StopRequest
from trainer.run import Run
from trainer.start import TrainingDirectory

__all__ = ["compose_settings"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ON_GPU = ("hardware=gpu", "hardware.micro_batch=4", "hardware.compile=false")


def test_bf16_on_a_gpu_names_its_kernel_and_follows_fp32_on_the_cpu(command, tmp_path):
    output = run(command(*ON_GPU, f"run_dir={tmp_path / 'gpu'}"))
    assert any(title in output for title in fpa.TITLES.values())
    assert metrics(tmp_path / "gpu")[0]["peak_memory_gib"] > 0
    run(command(f"run_dir={tmp_path / 'cpu'}"))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-3)


def assert_same_though_killed(command, overrides, folder):
    """A run with these overrides, killed and continued, gives the bits of the one in `folder`/whole."""
    killed = command(*overrides, f"run_dir={folder / 'killed'}")
    code, output = kill_at_step(killed, folder / "killed", 9)
    assert code == -signal.SIGKILL, output
    run(killed)
    assert losses(folder / "killed") == losses(folder / "whole")
    assert_same_weights(folder / "killed", folder / "whole")


@pytest.mark.parametrize("attention", ["fpa", "sagebwd"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_deterministic_it_continues_bit_for_bit(command, tmp_path, attention, compiled):
    overrides = (f"attention={attention}", "model.d_head=64", "steps=40", "checkpoint_every=7")
    hardware = (*ON_GPU, "hardware.deterministic=true", f"hardware.compile={compiled}")
    run(command(*overrides, *hardware, f"run_dir={tmp_path / 'whole'}"))
    assert_same_though_killed(command, (*overrides, *hardware), tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        ("attention=fpa",),
        ("attention=sagebwd",),
        ("attention=sagebwd", "hardware.recompute=blocks"),
        ("attention=fpa", "data.mask_documents=true", "hardware.recompute=blocks"),
        ("attention=sagebwd", "data.mask_documents=true"),
    ],
    ids=["fpa", "sagebwd", "sagebwd, blocks computed again", "fpa, documents", "sagebwd, documents"],
)
def test_cuda_graphs_change_no_bit(command, tmp_path, overrides):
    """Stopped and continued, too: the graphs of the second process begin with other weights."""
    shape = ("model.d_head=64", "steps=20", "eval_every=7", "checkpoint_every=5")
    shared = (*overrides, *shape, *ON_GPU, "hardware.deterministic=true", "hardware.compile=true")
    run(command(*shared, f"run_dir={tmp_path / 'whole'}"))
    assert_same_though_killed(command, (*shared, "hardware.cuda_graphs=true"), tmp_path)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math", "fa4"])
def test_pinned_kernels_compile_into_one_graph_and_agree(kernel):
    if kernel == "fa4" and (reason := why_not(torch.device("cuda"), torch.bfloat16, 32)):
        pytest.skip(reason)
    backend = backends.build(
        {"backend": "fpa", "sdpa": kernel},
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        d_head=32,
        is_gqa=False,
    )
    config = LlamaConfig(
        vocab_size=64, d_model=64, n_layers=2, n_heads=2, d_head=32, d_ffn=96, max_context=128
    )
    torch.manual_seed(0)
    llama = Llama(config, backend.attend).cuda()
    tokens = torch.randint(64, (2, 129), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.compile(llama, fullgraph=True)(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    exact = Llama(config, F.scaled_dot_product_attention).double()
    exact.load_state_dict({name: value.cpu().double() for name, value in llama.state_dict().items()})
    expected = exact(tokens[:, :-1].cpu(), tokens[:, 1:].cpu())
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in llama.parameters()
    )


@pytest.mark.parametrize(
    "overrides",
    [(), ("data.mask_documents=true",), ("data.mask_documents=true", "attention=sagebwd")],
    ids=["fpa", "fpa, documents", "sagebwd, documents"],
)
def test_a_step_waits_for_the_gpu_once(compose_settings, datasets, tmp_path, overrides):
    settings = compose_settings("experiment=debug", *ON_GPU, f"data.root={datasets}", "steps=20", *overrides)
    directory = TrainingDirectory(tmp_path / "run")
    with directory.locked(), StopRequest() as stop:
        directory.open(settings)
        run = Run(settings, directory, Ranks(0, 1, torch.device("cuda", 0)), stop)
        for _ in range(3):  # the first steps allocate and compile
            loop.train_step(run)
            run.step += 1
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")  # warns, too, that it is a prototype
                loop.train_step(run)
                run.checkpoints.poll(writing=False, failed=False)
                stop_if_asked(run, {})
        finally:
            torch.cuda.set_sync_debug_mode("default")
            run.close()
    waits = [str(one.message) for one in waits if "synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 1, waits
