from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.overrides import check_or_exit, setting_names
from trainer.settings import Settings

CONFIGS = Path(__file__).parents[2] / "configs"


def test_names_are_those_of_the_composed_settings(compose_settings):
    def flat(tree, prefix=""):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")

    composed = OmegaConf.to_container(OmegaConf.structured(compose_settings()))
    assert setting_names(Settings) == set(flat(composed))


@pytest.mark.parametrize(
    "arguments",
    [
        ["attention=sagebwd", "tps=260k", "optimizer.lr=1e-3", "run_dir='a,b'"],
        ["-m", "attention=fpa,sagebwd", "optimizer.lr=choice(1,2)"],
        ["--help"],
        ["--cfg", "job", "experiment=debug"],
        ["hydra.sweep.dir=x", "hydra/launcher=slurm"],
        ["data.path=[unbalanced"],  # not an override: left to Hydra, which explains its grammar
    ],
)
def test_known_names_pass(arguments):
    check_or_exit(arguments, CONFIGS)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("optimzer.lr=1", "did you mean optimizer.lr"),
        ("lr=1", "did you mean optimizer.lr?"),
        ("attention.smoth_q=true", "did you mean attention.smooth_q"),
        ("qk_norm=true", "did you mean model.qk_norm?"),
        ("warp_drive=on", "python train.py --help lists all settings"),
    ],
)
def test_unknown_names_get_advice(argument, advice):
    with pytest.raises(SystemExit) as stopped:
        check_or_exit(["-m", "tps=260k", argument], CONFIGS)
    assert advice in str(stopped.value)
    assert argument in str(stopped.value)
