from dataclasses import asdict
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from common.overrides import comments_in, setting_hints
from trainer.settings import Settings, attention_settings, check_or_exit, unresolved
from trainer.start import default_name

CONFIGS = Path(__file__).parents[2] / "configs"


def test_names_are_those_of_the_composed_settings(compose_settings):
    def flat(tree, prefix=""):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")

    names = set(flat(asdict(compose_settings())))
    assert set(setting_hints(Settings)) == {name for name in names if not name.startswith("attention.")}
    assert {"attention.preset", "attention.smooth_k", "attention.sdpa"} <= attention_settings()


def test_help_says_what_each_setting_means():
    """Whatever group it is in, whether its comment stands beside it, above it or inside a bracket."""
    hints, notes = setting_hints(Settings), comments_in(Settings)
    groups = {name.rpartition(".")[0] for name in hints}
    settings = {name for name in hints if name not in groups and not name.startswith(("data.", "attention"))}
    assert not settings - notes.keys()
    assert notes["optimizer.lr"] == "peak learning rate"
    assert notes["hardware.context_parallel"].startswith("devices that share the tokens")
    assert notes["hardware.dtype"].startswith('"bfloat16" (autocast')
    assert not groups & notes.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ["attention=sagebwd", "tps=260k", "optimizer.lr=1e-3", "run_dir='a,b'"],
        ["-m", "attention=fpa,sagebwd", "optimizer.lr=choice(1,2)"],
        ["--help"],
        ["--cfg", "job", "experiment=debug"],
        ["--config-dir", "own", "-m", "steps=1,2", "optimizer.lr=1", "hardware.peak_tflops=1e3"],
        ["hydra.sweep.dir=x", "hydra/launcher=slurm"],
        ["-m", "hydra/launcher=local_gpus", "hydra.launcher.jobs=2"],
        ["hydra.searchpath=[file:///own/configs]", "hydra/launcher=own"],
        ["~experiment"],
        ["model=glob(llama_*)"],
        ["attention='fpa'", "tps=choice(260k,2.1m)"],
        ["hydra.searchpath=[file:///own/configs]", "experiment=own"],
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
        ("qk_norm=true", "did you mean model.qk_norm?"),
        ("attention.backnd=fpa", "did you mean attention.backend"),
        ("warp_drive=on", "python train.py --help lists all settings"),
        ("experiment=quickstrat", "did you mean experiment=quickstart?"),
        ("model=llama_325m,LLAMA_1B", "did you mean model=llama_1b?"),
        ("attention=sage_consistent", "did you mean attention=sagebwd_consistent?"),
        ("+experiment=dbug", "did you mean experiment=debug?"),
        ("hardware=tpu", "hardware has no option 'tpu'; "),
        ("hydra/launcher=local_gpu", "did you mean hydra/launcher=local_gpus?"),
        ("hydra/launcher=ray", "choose one of basic, local_gpus, slurm"),
        ("tps=1m", "one of 2.1m, 260k, or set tps.tokens_per_step=N"),
        ("batch_size=32", "set tps.tokens_per_step (of all devices) and hardware.micro_batch"),
        ("training.epochs=3", "set steps or total_tokens"),
        ("gradient_accumulation_steps=4", "it follows from tps.tokens_per_step"),
        ("steps=1.5k", "steps is a whole number: 1500"),
        ("total_tokens=100M", "total_tokens is a whole number: 100000000"),
        ("attention=fpa,null", "leave it out for the default, or choose one of fpa, sagebwd"),
        ("total_tokens=1e8", "total_tokens is a whole number: 100000000"),
        ("hardware.micro_batch=2,4.5", "hardware.micro_batch is a whole number"),
        ("plan", "give it a value, plan=…"),
        ("README.md", "did you mean data.path=README.md?"),
        ("quick", "there is no such option; settings are name=value"),
    ],
)
def test_unknown_names_get_advice(argument, advice):
    with pytest.raises(SystemExit) as stopped:
        check_or_exit(["-m", "tps=260k", argument], CONFIGS)
    assert [text for text in (advice, argument) if text not in str(stopped.value)] == []


def test_a_launcher_whose_package_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(ConfigStore, "list", lambda store, group: ["basic.yaml"])
    with pytest.raises(SystemExit) as stopped:
        check_or_exit(["-m", "hydra/launcher=slurm"], CONFIGS)
    told = "hydra/launcher=slurm needs hydra-submitit-launcher: pip install -e '.[slurm]'"
    assert str(stopped.value) == told


def test_no_secret_gets_into_the_name_of_a_run(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2")
    typed = OmegaConf.create(["sample_prompt=${oc.env:MY_API_KEY}"])
    assert typed[0] == "sample_prompt=hunter2"  # what one gets by reading it
    assert "hunter2" not in default_name(unresolved(typed))
