"""``python -m sagebwd.run``: a program runs as without it, its attention and its processes' in INT8."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagebwd import run as launcher

ROOT = Path(__file__).parents[3]

#: Prints what a program may depend on, then fails.
PROGRAM = """
import multiprocessing, os, pickle, sys

class Thing:
    pass

def child():
    if "PLAIN" in os.environ:  # nothing of this is compared
        return
    import torch
    x = torch.ones(1, 1, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)

if __name__ == "__main__":
    print("torch" in sys.modules, "sagebwd" in sys.modules)
    print(sys.argv, __file__, __spec__, sys.path, sys.executable, sys.flags, sep="\\n")
    print(os.environ.get("LOCAL_KERNELS"), started)
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__, sys.modules["__main__"].Thing is Thing)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode, sys.stdin.read(), flush=True)
    raise RuntimeError("the end")
"""

#: Calls attention in INT8, with dropout, and imports libraries that lie beside it.
TRAINS = """
from sageattention import sageattn  # before torch
import torch
import flash_attn_interface, xformers
from torch.nn.functional import scaled_dot_product_attention
x = torch.randn(1, 2, 32, 16, requires_grad=True)
scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward()
sageattn(x, x, x).sum().backward()

def attend(*tensors):
    pass

torch.nn.functional.scaled_dot_product_attention = attend
"""

#: The same, before it a language model and an image model, as their libraries' trainers run them.
MODELS = """
import torch
from torch.utils._triton import has_triton
has_triton()  # is remembered: torchao, which transformers imports, would ask a GPU that is not there
torch.cuda.is_available = lambda: True  # for transformers, which else refuses flash_attention_2
from transformers import LlamaConfig, LlamaForCausalLM
from diffusers import FluxTransformer2DModel

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
tokens, shown = torch.arange(48).view(2, 24), torch.ones(2, 24, dtype=torch.long)
shown[0, 16:] = 0
for implementation in ("sdpa", "flash_attention_2"):
    config = LlamaConfig(vocab_size=50, attn_implementation=implementation, **sizes)
    llama = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    llama.gradient_checkpointing_enable()
    llama(tokens, attention_mask=shown, labels=tokens).loss.backward()

sizes = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
flux = FluxTransformer2DModel(
    in_channels=4, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), **sizes
)
image, text, pooled = torch.randn(1, 16, 4), torch.randn(1, 6, 16), torch.randn(1, 16)
ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
for backend in ("sage", "flash", "native"):
    flux.set_attention_backend(backend)
    flux(image, text, pooled, torch.ones(1), **ids).sample.square().sum().backward()
"""


@pytest.fixture
def run(tmp_path):
    """Run Python with a program in a folder of its own; the finished process, output as text."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text("import builtins; builtins.started = 'as ever'")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "elsewhere"):
        (folder / "trains.py").write_text(TRAINS)
        (folder / "xformers.py").touch()
        (folder / "flash_attn_interface.py").touch()  # found before the one that an option replaces it by
    models = "" if importlib.util.find_spec("diffusers") is None else MODELS
    (tmp_path / "all_at_once.py").write_text(models + TRAINS)

    def running(*arguments, **environment):
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "start")])}
        settings = {"cwd": tmp_path, "input": "from stdin", "text": True, "env": os.environ | environment}
        return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=300, **settings)

    return running


def rows(found):
    """What it printed as an error, a space for each gap."""
    return [" ".join(line.split()) for line in found.stderr.splitlines()]


def test_a_program_runs_as_without_it(run):
    plain = run("-bu", "program.py", "--sdpa", "-m", "x", PLAIN="1")
    found = run("-bum", "sagebwd.run", "--sdpa", "--preset", "low_bias", "program.py", "--sdpa", "-m", "x")
    assert found.stdout == plain.stdout
    assert "as ever" in plain.stdout
    assert "0 from stdin" in plain.stdout
    assert found.returncode == plain.returncode == 1
    assert plain.stderr.endswith("RuntimeError: the end\n")
    # The process that was started, which imported torch, reports; the program itself did not import it.
    report, traceback = found.stderr.split(plain.stderr.partition("\n")[0])
    assert plain.stderr.endswith(traceback)
    assert "scaled_dot_product_attention          1      INT8 (reference)" in report


def test_the_report_names_what_ran_and_what_did_not_in_programs_and_models(run):
    libraries = ("--sageattention", "--flash-attn", "--flash-attn-3", "--sdpa")
    found = run("-m", "sagebwd.run", *libraries, "-m", "all_at_once")
    assert found.returncode == 0, found.stderr
    has_models = importlib.util.find_spec("diffusers") is not None
    names = ["scaled_dot_product_attention", "sageattn"]
    if has_models:
        names = ["scaled_dot_product_attention (causal, hidden keys)", "flash_attn_varlen_func", "sageattn"]
        names += ["flash_attn_func", "scaled_dot_product_attention"]
    said = [line for line in rows(found) if "runs in INT8" in line]
    assert said == [f"{name} runs in INT8 (reference)" for name in names]  # as they are called
    report = rows(found)[rows(found).index("attention layers calls ran") + 1 :]
    assert report == [
        *has_models * ["flash_attn_func 2 INT8 (reference)", "flash_attn_varlen_func 4 INT8 (reference)"],
        f"sageattn {3 if has_models else 1} INT8 (reference)",
        "scaled_dot_product_attention 1 full precision: attention dropout",
        f"scaled_dot_product_attention {3 if has_models else 1} INT8 (reference)",
        *has_models * ["scaled_dot_product_attention (causal, hidden keys) 4 INT8 (reference)"],
        "The program imported xformers, flash_attn_interface, whose attention is not replaced.",
        "The program put __main__.attend before PyTorch's attention; SageBwd saw what that hands on.",
    ]


def test_a_command_and_the_ranks_that_it_starts(run, tmp_path):
    """One rank reports, and the command itself, which made no call.

    The ranks find another module of the name sagebwd, as from a checkout that is not installed.
    """
    (tmp_path / "elsewhere" / "sagebwd.py").touch()
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    found = run("-m", "sagebwd.run", "--sageattention", sys.executable, *ranks, "elsewhere/trains.py")
    assert found.returncode == 0, found.stderr
    for line in ("sageattn runs in INT8 (reference)", "sageattn 1 INT8 (reference)"):
        assert rows(found).count(line) == 1
    assert found.stderr.count("itself made no call") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the program"),
        (("--preset", "x", "a.py"), "low_bias"),
        (("a.py",), "no file and no command 'a.py'"),
        (("b.py",), "-E and -I hide PYTHONPATH, which the program needs; leave them out"),
    ],
)
def test_mistakes_are_named(arguments, message, monkeypatch, capsys):
    if arguments == ("b.py",):
        monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=True))
    for variable in (launcher.VARIABLE, launcher.FIRST_PROCESS, "PYTHONPATH"):
        monkeypatch.setenv(variable, "")  # and to what it is now in the end
    with pytest.raises(SystemExit):
        launcher.main([*arguments])
    assert message in capsys.readouterr().err
