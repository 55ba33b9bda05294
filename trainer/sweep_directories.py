"""The runs of a sweep must differ in directory: the second in one would find it in use, or finished."""

import sys
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from trainer.errors import explain
from trainer.overrides import unresolved
from trainer.run_directory import default_name


def runs_of(config: DictConfig) -> list[list[str]]:
    """The overrides of each run of the sweep `config`."""
    parsed = OverridesParser.create().parse_overrides(unresolved(config.hydra.overrides.task))
    (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return runs


def refuse_shared_directories(config: DictConfig) -> None:
    """End the program with a message if two runs of the sweep `config` would train in one directory."""
    first_in: dict[Path, list[str]] = {}
    for run in runs_of(config):
        directory = directory_of(run)
        if directory is None:
            continue
        first = first_in.setdefault(directory, run)
        if first is not run:
            sys.exit(
                f"two runs of this sweep would train in {directory}:\n  {' '.join(first)}\n"
                f"  {' '.join(run)}\nLeave run_dir out, so that each run has a directory named after its "
                "settings (below runs_dir=…), and name each value of a sweep once"
            )


def make_sweep_directory(folder: Path) -> None:
    """Create the folder that Hydra writes a sweep's settings to, or end the program with a message."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"cannot create the folder of the sweep: {explain(error)}; set runs_dir=…")


def directory_of(run: list[str]) -> Path | None:
    """Where a run with these overrides trains; None if that depends on other settings."""
    given = dict(text.split("=", 1) for text in run)
    run_dir = given.get("run_dir", "null")
    if "$" in run_dir or "$" in given.get("runs_dir", ""):
        return None
    return Path(given.get("runs_dir", "")) / default_name(run) if run_dir == "null" else Path(run_dir)
