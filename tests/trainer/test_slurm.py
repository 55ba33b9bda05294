from hydra import compose, initialize_config_dir

from tests.cli import ROOT
from trainer import settings


def test_the_slurm_launcher_composes_and_takes_overrides():
    """Against the plugin's own typed settings, which refuse unknown keys."""
    settings.register()
    overrides = ["hydra/launcher=slurm", "hydra.launcher.partition=fast", "hydra.launcher.gpus_per_node=8"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        launcher = compose("train", overrides, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.tasks_per_node) == ("fast", 8, 1)
    assert launcher.max_num_timeout > 0  # requeued at the time limit
