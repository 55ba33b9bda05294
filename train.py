"""Train a Llama with full-precision or SageBwd attention: `python train.py --help` explains the settings."""

import os
import sys
from pathlib import Path

import trainer  # noqa: F401 - it chooses how OpenMP waits, and torch must not be loaded yet
from common.errors import hide_tracebacks

if __name__ == "__main__":  # before the imports that take seconds, or fail
    hide_tracebacks()

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from common.errors import Interrupted, TrainingError
from common.overrides import explaining_help, readable
from common.terminal import say, surviving_closed
from sagebwd.kernels.cuda.compile import use_private_caches
from trainer import distributed, processes, settings, sweep
from trainer.checks import check
from trainer.estimate import describe
from trainer.settings import Settings
from trainer.start import TrainingDirectory, inherited, name_directory

CONFIGS = Path(__file__).parent / "configs"


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def main(config: DictConfig) -> float | None:
    """Train a run. In a sweep, returns its validation loss: what a sweeper that searches minimizes."""
    try:
        overrides = settings.unresolved(HydraConfig.get().overrides.task)
        run_settings = OmegaConf.to_object(inherited(config, overrides))
        run(run_settings)
        searched = _in_sweep() and not run_settings.plan
        return TrainingDirectory(Path(run_settings.run_dir)).validation_loss() if searched else None
    except Interrupted as stop:
        if not (_in_sweep() and HydraConfig.get().runtime.choices["hydra/launcher"] == "basic"):
            say(str(stop))  # of such a sweep the summary tells
        sys.exit(128 + stop.signal)  # the shell's convention; also ends a sweep
    except TrainingError as error:
        if _in_sweep():
            raise CompactHydraException(str(error)) from None  # Hydra goes on with the next run
        sys.exit(str(error))


def run(run_settings: Settings) -> None:
    """Check the settings, then train: in this process, or in one process per device.

    With `plan` set, print what the run needs instead, whatever is in its directory.

    Raises TrainingError for what the user can fix, and Interrupted when asked to stop.
    """
    torchrun = processes.under_torchrun()
    count = int(os.environ["WORLD_SIZE"]) if torchrun else run_settings.hardware.devices
    if run_settings.plan:
        if int(os.environ.get("RANK", 0)) == 0:
            print(describe(run_settings, count))
        return
    name_directory(run_settings, settings.unresolved(HydraConfig.get().overrides.task))
    check(run_settings, count)
    # Under torchrun a rank that has another answer would wait forever, so train() asks for all of them.
    directory = TrainingDirectory(Path(run_settings.run_dir))
    if not torchrun and directory.is_finished_with(run_settings):
        print(f"{run_settings.run_dir} is finished; delete it to train it again")
        return
    # Not at the top: it takes seconds, and neither `--help` nor a plan nor a misspelled setting needs it.
    from trainer.loop import train

    if torchrun or (count == 1 and not _in_sweep()):
        if torchrun:
            processes.watch_parent(os.getppid())  # distributed.start does it for the processes that it starts
        train(run_settings)
    else:  # the runs of a sweep get processes of their own, so that none can affect the next
        distributed.start(train, run_settings, processes=count)
    if not torchrun and not directory.is_finished:
        raise TrainingError(f"{directory.path} has no DONE: its process ended early, as by os._exit(0)")


def _in_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN


if __name__ == "__main__":
    processes.end_with_sweep()
    use_private_caches()
    settings.register()
    sweep.register()
    sys.argv[1:] = readable(sys.argv[1:])
    settings.check_or_exit(sys.argv[1:], CONFIGS)
    with surviving_closed(), explaining_help(sys.argv, Settings, CONFIGS / "attention"):
        main()
