"""``python -m sagebwd.run``: a program runs as without it, its attention and its processes' in INT8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd import run as launcher

ROOT = Path(__file__).parents[3]

#: Prints what a program may depend on, then fails.
PROGRAM = """
import multiprocessing, os, pickle, sys

class Thing:
    pass

def child():
    import torch
    x = torch.ones(1, 1, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)

if __name__ == "__main__":
    print("torch" in sys.modules, "sagebwd" in sys.modules)
    print(sys.argv, __file__, __spec__, sys.path[0], os.path.basename(sys.executable), sys.flags, sep="\\n")
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__, sys.modules["__main__"].Thing is Thing)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode, sys.stdin.read(), flush=True)
    raise RuntimeError("the end")
"""

#: Calls attention in INT8, with dropout, and by a library that is not installed.
TRAINS = """
from sageattention import sageattn  # before torch
import torch
from torch.nn.functional import scaled_dot_product_attention
x = torch.randn(1, 2, 32, 16, requires_grad=True)
scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward()
sageattn(x, x, x).sum().backward()
"""


@pytest.fixture
def run(tmp_path):
    """Run Python with a program in a folder of its own; the finished process, output as text."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "trains.py").write_text(TRAINS)

    def running(*arguments, **environment):
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, input="from stdin", capture_output=True, text=True,
            timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip

    return running


def test_a_program_runs_as_without_it(run):
    plain = run("-u", "program.py", "--sdpa", "-m", "x")
    found = run(
        "-u", "-m", "sagebwd.run", "--sdpa", "--preset", "low_bias", "program.py", "--sdpa", "-m", "x"
    )
    assert found.stdout == plain.stdout
    assert "0 from stdin" in plain.stdout
    assert found.returncode == plain.returncode == 1
    assert plain.stderr.endswith("RuntimeError: the end\n")
    # The process that was started, which imported torch, reports; the program itself did not import it.
    report, traceback = found.stderr.split(plain.stderr.partition("\n")[0])
    assert plain.stderr.endswith(traceback)
    assert "scaled_dot_product_attention          1      INT8 (reference)" in report


def test_the_report_names_what_ran_and_what_did_not(run):
    found = run("-m", "sagebwd.run", "--sageattention", "--sdpa", "-m", "trains")
    assert found.returncode == 0, found.stderr
    rows = [" ".join(line.split()) for line in found.stderr.splitlines()]
    assert rows[-3:] == [
        "sageattn 1 INT8 (reference)",
        "scaled_dot_product_attention 1 full precision: attention dropout",
        "scaled_dot_product_attention 1 INT8 (reference)",
    ]


def test_a_command_without_attention(run):
    found = run("-m", "sagebwd.run", "--sdpa", sys.executable, "-c", "import torch; exit(5)")
    assert found.returncode == 5
    assert "made no call" in found.stderr


def test_ranks_of_torchrun_report_once(run):
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    found = run(*ranks, "-m", "sagebwd.run", "--sageattention", "trains.py")
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("INT8 (reference)") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the program"),
        (("--preset", "x", "a.py"), "low_bias"),
        (("a.py",), "no file and no command 'a.py'"),
    ],
)
def test_mistakes_are_named(arguments, message, monkeypatch, capsys):
    for variable in (launcher.VARIABLE, launcher.FIRST_PROCESS, "PYTHONPATH"):
        monkeypatch.setenv(variable, "")  # and to what it is now in the end
    with pytest.raises(SystemExit):
        launcher.main([*arguments])
    assert message in capsys.readouterr().err
