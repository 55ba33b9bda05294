import ctypes
import functools
import os
import pty
import re
import runpy
import signal
import subprocess
import sys
import threading
import time

import pytest

from common.errors import Interrupted
from data.tokenizers import Bytes
from tests import warm
from tests.cli import ROOT
from trainer.processes import StopRequest

SHORT = ("steps=8", "checkpoint_every=100", "sample_tokens=0")


def is_interrupted_in_a_call_into_c():
    """Ctrl-C comes while PyTorch, here libc, works: Python's handler then waits."""

    def ask():
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # another thread's would end the waiting

    def work(trainer):
        threading.Thread(target=ask).start()
        ctypes.CDLL(None).usleep(2_000_000)
        print("back from C", file=sys.stderr, flush=True)

    warm.at_step(3, work)


def ignores_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    warm.at_step(3, lambda _: os.kill(os.getpid(), signal.SIGHUP))


def loses_its_terminal():
    """As when a connection breaks: the terminal that it prints to is gone, and SIGHUP says so."""
    screen, terminal = pty.openpty()
    for stream in (1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)

    def hang_up(trainer):
        os.close(screen)
        os.kill(os.getpid(), signal.SIGHUP)

    warm.at_step(3, hang_up)


def loses_its_reader():
    """The other end of its output is closed after its first line; no signal says so."""
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader))).start()


def is_asked_while_it_prepares_data(number):
    """The signal comes while text is tokenized, which then takes longer than anyone waits."""

    def encode_batch(self, texts):
        os.kill(os.getpid(), number)
        time.sleep(60)

    Bytes.encode_batch = encode_batch


def test_what_a_ctrl_c_does_is_said_before_the_step_ends(datasets, tmp_path):
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={tmp_path / 'run'}")
    output = warm.run(settings, is_interrupted_in_a_call_into_c, code=128 + signal.SIGINT)
    assert output.index("a second Ctrl-C") < output.index("back from C") < output.index("stopped at step 4")
    assert output.count("stopping") == 1


def test_under_nohup_a_hangup_stays_ignored(datasets, tmp_path):
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={tmp_path / 'run'}")
    warm.run(settings, ignores_hangups)
    assert (tmp_path / "run" / "DONE").exists()


def test_it_saves_when_its_terminal_is_gone(datasets, tmp_path):
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={tmp_path / 'run'}")
    warm.run(settings, loses_its_terminal, code=128 + signal.SIGHUP)
    assert "from step 4" in warm.run(settings)


def test_a_run_goes_on_without_a_reader(datasets, tmp_path):
    """As with `2>&1 | head -1`."""
    run_dir = tmp_path / "run"
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={run_dir}")
    warm.run(settings, loses_its_reader)
    assert (run_dir / "DONE").exists()
    lines = (run_dir / "log.txt").read_text().splitlines()
    assert len([line for line in lines if line.startswith("nobody reads <stderr> any more")]) == 1
    assert any(line.startswith("finished: ") for line in lines[-4:])


@pytest.fixture
def unprepared(tmp_path):
    (tmp_path / "book.jsonl").write_text('{"text": "It was a dark and stormy night."}\n' * 500)
    text = ("data=jsonl", f"data.path={tmp_path / 'book.jsonl'}", "data.tokenizer=bytes", "context=16")
    run = (*SHORT, "hardware.micro_batch=2", f"run_dir={tmp_path / 'run'}")
    return warm.debug_settings(tmp_path / "data", *text, *run)


def test_all_ranks_end_at_once_when_the_one_that_prepares_data_is_asked_to_stop(unprepared):
    began, number = time.monotonic(), signal.SIGTERM
    asked = functools.partial(is_asked_while_it_prepares_data, number)
    output = warm.two_ranks(unprepared, [asked], [], codes=(128 + number,) * 2)
    assert time.monotonic() - began < 20  # with the start of the processes
    assert output.count("stopped before the first step; the same command continues") == 2
    assert "Traceback" not in output
    warm.run(unprepared)


def test_at_once_raises_for_a_signal_that_came_before():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="nothing to save") as raised, stop.at_once("nothing to save"):
            pytest.fail("went on")
    assert raised.value.signal == signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "code", "told"), [("KeyboardInterrupt", -signal.SIGINT, 0), ("OSError", 1, 1)]
)
def test_during_the_imports_of_train_py_it_prints_no_traceback(tmp_path, error, code, told):
    for module in ("hydra", "torch"):
        (tmp_path / f"{module}.py").write_text(f"raise {error}\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert done.stderr.count("Traceback") == told
    assert bool(done.stdout + done.stderr) == told


def wait_policy(monkeypatch, **chosen):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(ROOT / "trainer" / "__init__.py"))
    return os.environ.get("OMP_WAIT_POLICY")


def test_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    assert wait_policy(monkeypatch, OMP_WAIT_POLICY="active") == "active"
    assert wait_policy(monkeypatch, GOMP_SPINCOUNT="1000") is None
    assert wait_policy(monkeypatch) == "passive"


def test_how_threads_wait_is_chosen_before_torch_is_loaded():
    """train.py imports trainer before what loads torch, which neither package's own file does."""

    def imported(*files):
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        return re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)

    ours = {"torch", "data", "model", "sagebwd", "trainer", "scripts", "common"}
    names = [name for name in imported("train.py") if name in ours]
    assert names[:2] == ["trainer", "common"]
    assert not ours & {*imported("trainer/__init__.py", "common/__init__.py", "common/errors.py")}
