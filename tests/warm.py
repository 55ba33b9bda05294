"""Runs in processes that start within a tenth of a second, and with faults built in.

One process imports torch and the trainer once; the processes of the runs are forked from it.
"""

import atexit
import copy
import functools
import gc
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

# Some only because every run needs them, and they are slow to import.
import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import numpy.ctypeslib  # noqa: F401
import pandas  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint._fsspec_filesystem
import torch.multiprocessing
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

import trainer.loop
import trainer.settings
from common.errors import Interrupted, TrainingError
from tests.cli import ROOT
from trainer import distributed
from trainer.loop import train
from trainer.processes import StopRequest
from trainer.run import Run
from trainer.settings import Settings

CONFIGS = ROOT / "configs"
GROUPS = {"data", *(folder.name for folder in CONFIGS.iterdir())}

gc.freeze()  # searching the modules for garbage would take half of a run
# Faults are called in the process of the run before it trains; they must be functions that pickle.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, "pytest"])


def no_picture(figure: Figure, path: Path) -> None:
    """In place of Figure.savefig, which takes as long as the rest of a debug run, with a probe four times."""
    path.write_text("no picture")


@functools.cache
def _of_groups(*overrides: str) -> DictConfig:
    trainer.settings.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def config(*overrides: str) -> DictConfig:
    """What Hydra makes of these arguments of train.py; of the same options of groups, which is slow, once."""
    values = OverridesParser.create().parse_overrides(list(overrides))
    groups = [one for one in values if one.key_or_group in GROUPS or one.key_or_group.startswith("hydra")]
    found = copy.deepcopy(_of_groups(*(one.input_line for one in groups)))
    ConfigLoaderImpl._apply_overrides_to_config([one for one in values if one not in groups], found)
    return found


def composed(*overrides: str) -> Settings:
    """The settings that `python train.py` makes of these arguments."""
    return OmegaConf.to_object(config(*overrides))


def debug_settings(datasets: Path, *overrides: str) -> Settings:
    """The settings of tests.cli.debug_command(datasets, *overrides)."""
    return composed("experiment=debug", f"data.root={datasets}", *overrides)


def at_step(step: int, act: Callable[[Run], object], *, after: bool = False) -> None:
    """A fault: act(run) before the step that follows `step` others is computed, or right after that."""
    original = trainer.loop.train_step

    def train_step(run: Run) -> dict[str, float]:
        due = run.step == step
        if due and not after:
            act(run)
        values = original(run)
        if due and after:
            act(run)
        return values

    trainer.loop.train_step = train_step


def start(settings: Settings, *faults: Callable[[], None], rank: int = 0, ranks: int = 1, port: int = 0):
    """A process that calls the faults, then trains as train.py does; what it prints goes to `run_dir`.out."""
    output = Path(f"{settings.run_dir}.out")
    environment = {} if ranks == 1 else _torchrun(rank, ranks, port)
    process = SERVER.Process(target=_train, args=(settings, output, environment, faults))
    process.start()
    return process


def finish(process, settings: Settings, code: int = 0) -> str:
    """Wait for the process, which must end with this exit code; what all processes of the run printed."""
    process.join(120)
    output = Path(f"{settings.run_dir}.out").read_text()
    assert process.exitcode == code, output
    return output


def start_script(command: list[str], output: Path):
    """A process that does what `python SCRIPT ARGUMENTS` does, seconds sooner, and prints into a file."""
    process = SERVER.Process(target=_run_script, args=(command[1:], dict(os.environ), output))
    process.start()
    return process


def run(settings: Settings, *faults: Callable[[], None], code: int = 0) -> str:
    return finish(start(settings, *faults), settings, code)


def two_ranks(
    settings: Settings, *faults_of_each: list[Callable[[], None]], codes: tuple[int, int] = (0, 0)
) -> str:
    """Train on two ranks, with faults of their own, which must end with these exit codes."""
    port = free_port()
    processes = [
        start(settings, *faults, rank=rank, ranks=2, port=port) for rank, faults in enumerate(faults_of_each)
    ]
    return [finish(process, settings, code) for process, code in zip(processes, codes, strict=True)][-1]


def train_all(*runs: Settings | Sequence[Settings], ranks: int = 2) -> list[list[str]]:
    """Train these one after another, in the same processes, a rank each, or each its own of a pair.

    What each rank refuses them with ("": nothing).
    """
    port, pairs = free_port(), [[one] * ranks if isinstance(one, Settings) else one for one in runs]
    environments = [_torchrun(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    output = Path(f"{pairs[0][0].run_dir}.out")
    with ProcessPoolExecutor(ranks, SERVER) as pool:
        return [*pool.map(_train_all, zip(*pairs, strict=True), itertools.repeat(output), environments)]


def launch_two(work: Callable[..., None], *arguments: object) -> None:
    """trainer.distributed.start(work, …) for two ranks; raises what that raises."""
    call(functools.partial(distributed.start, work, *arguments, processes=2))


def call(function: Callable[[], None]) -> None:
    """Call the function in a process whose ranks are forked, and raise what it raises."""
    with ProcessPoolExecutor(1, SERVER, ranks_are_forked) as pool:
        pool.submit(function).result()


def ranks_are_forked() -> None:
    """Let trainer.distributed fork its ranks from this process, which has imported all that they need.

    They begin with the handlers of signals that a fresh process has.
    """
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    os.register_at_fork(after_in_child=lambda: [signal.signal(*item) for item in handlers.items()])
    torch.multiprocessing.spawn = functools.partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test", **where}


def _run_script(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    _begin(output, environment)
    ranks_are_forked()
    os.chdir(ROOT)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them


def _train(settings: Settings, output: Path, environment: dict[str, str], faults) -> None:
    _begin(output, environment)
    for fault in faults:
        fault()
    try:
        train(settings)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signal)
    except TrainingError as error:
        sys.exit(str(error))


def _train_all(runs: Sequence[Settings], output: Path, environment: dict[str, str]) -> list[str]:
    told = []
    _begin(output, environment)
    with distributed.joined("cpu") as ranks:
        distributed.joined = lambda device: nullcontext(ranks)
        for one in runs:
            try:
                train(one)
                told.append("")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def _begin(output: Path, environment: dict[str, str]) -> None:
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    Figure.savefig = no_picture
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
    tqdm.set_lock(threading.RLock())  # its usual one is a semaphore, and leaks when killed
