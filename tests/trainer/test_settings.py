import copy
import re
from dataclasses import asdict, replace
from operator import attrgetter

import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from common.errors import SettingsError
from common.overrides import comments_in, setting_hints
from model.backends.sagebwd import PRESETS
from tests.warm import CONFIGS
from trainer.checks import Sizes, check, report_warmup
from trainer.optimizer import learning_rate
from trainer.settings import Settings, attention_settings, check_or_exit, unresolved
from trainer.start import default_name


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


PAPER_ON_GPU = [
    # tps, devices, steps, tokens, sequences, micro-steps of 16 sequences
    ("260k", 1, 300_000, 262_144, 64, 4),
    ("260k", 4, 300_000, 262_144, 64, 1),
    ("2.1m", 1, 37_500, 2_097_152, 512, 32),
    ("2.1m", 8, 37_500, 2_097_152, 512, 4),
]


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    """The default settings want a GPU; whether there is one is tested apart."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize(("tps", "devices", "steps", "tokens", "sequences", "micro_steps"), PAPER_ON_GPU)
def test_the_papers_runs(compose_settings, tps, devices, steps, tokens, sequences, micro_steps):
    settings = compose_settings("attention=sagebwd", f"tps={tps}")
    warmup = {"260k": 7_500, "2.1m": 1_000}[tps]
    assert check(settings, devices) == Sizes(steps, warmup, tokens, sequences, 16, micro_steps)
    assert steps * tokens == 78_643_200_000
    assert (settings.context, settings.hardware.dtype) == (4096, "bfloat16")
    assert (settings.optimizer.lr, settings.model.norm_eps) == (3e-5, 1e-6)
    assert (settings.attention.config.smooth_k, settings.attention.config.smooth_q) == (True, False)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_attentions_of_their_own(compose_settings, name):
    group = "attention=sagebwd" + f"_{name}" * (name != "default")
    preset = PRESETS[name]
    assert compose_settings(group).attention.config == preset
    toggled = compose_settings(group, f"attention.smooth_k={not preset.smooth_k}", "attention.block_q=null")
    assert toggled.attention.config == replace(preset, smooth_k=not preset.smooth_k)


BAD = [
    # overrides, what the message must name
    (["hardware.micro_batch=12"], ["micro_batch=12", "245760", "294912", "micro_batch=8 or 16"]),
    (["tps.tokens_per_step=100000"], ["100000", "65536", "131072"]),
    (["tps.divide_by=7"], ["tps.divide_by=7 = 458752", "tokens_per_step=458752"]),
    (["experiment=debug", "tps.tokens_per_step=1000"], ["1000", "262144"]),
    (["context=8192", "hardware.micro_batch=8"], ["context=8192", "model.max_context=4096"]),
    (["model.d_head=63"], ["d_head", "63"]),
    (["model.vocab_size=50000"], ["model.vocab_size=50000", "50257", "50304"]),
    (["optimizer.lr=0"], ["optimizer.lr=0"]),
    (["optimizer.lr=nan"], ["optimizer.lr=nan"]),
    (["optimizer.beta2=1.0"], ["optimizer.beta2=1.0"]),
    (["optimizer.min_lr_ratio=2"], ["min_lr_ratio=2"]),
    (["optimizer.weight_decay=-1"], ["weight_decay=-1"]),
    (["optimizer.arguments.betas=[{_args_: [1]}]"], ["optimizer.arguments has _args_"]),
    (["optimizer.arguments.momentum={_target_: torch.load}"], ["optimizer.arguments has _target_"]),
    (["optimizer.name=sgd"], ["optimizer.name=sgd", "adamw", "muon"]),
    (["optimizer.name=muon"], ["choose optimizer=muon"]),
    (["optimizer=muon", "optimizer.muon_lr=0"], ["optimizer.muon_lr=0"]),
    (["optimizer=muon", "optimizer.muon_momentum=1"], ["optimizer.muon_momentum=1"]),
    (["optimizer=muon", "optimizer.muon_lr_scale=rms"], ["muon_lr_scale=rms", "match_rms_adamw", "original"]),
    (["optimizer=muon", "optimizer.muon_lr_scale=original"], ["use optimizer.muon_lr=0.02"]),
    (["optimizer.schedule=step"], ["optimizer.schedule=step", "cosine, linear, wsd"]),
    (["optimizer.schedule=wsd", "optimizer.decay_ratio=0"], ["decay_ratio=0"]),
    (["total_tokens=1000"], ["total_tokens=1000", "262144"]),
    (["hardware.device=tpu"], ["hardware.device=tpu", "cuda"]),
    (
        ["hardware=cpu", "hardware.cuda_graphs=true"],
        ["hardware.device=cpu", "1 device(s)", "cuda_graphs=false"],
    ),
    (
        ["experiment=debug", "attention.sdpa=cudnn", "data.mask_documents=true"],
        ["data.mask_documents=true: attention.sdpa=cudnn takes no", "flash"],
    ),
    (["hardware.timeout_s=inf"], ["hardware.timeout_s=inf"]),
    (["seed=-1"], ["seed=-1"]),
    (["seed=9223372036854775808"], ["seed=9223372036854775808"]),
    (["hardware.devices=9"], ["hardware.devices=9", "8 GPU"]),
    (["hardware.devices=3"], ["× 3 device(s) = 196608", "196608 or 393216"]),
    (["spike.window=4"], ["spike.window=4", "8"]),
    (["spike.threshold=nan"], ["spike.threshold=nan"]),
]


@pytest.mark.parametrize(("overrides", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_settings_name_a_fix_that_works(compose_settings, overrides, named):
    try:
        settings = compose_settings(*overrides)
        check(settings, settings.hardware.devices)
    except SettingsError as error:
        told = str(error)
    else:
        pytest.fail("nothing was refused")
    assert [text for text in named if text not in told] == [], told
    for name, values in re.findall(r"(?:use |can: |; or )([a-z][\w.]*)=([\w.]+(?: or \d+)*)", told):
        for value in values.split(" or "):
            fixed = copy.deepcopy(settings)
            group, _, key = name.rpartition(".")
            setattr(attrgetter(group)(fixed) if group else fixed, key, yaml.safe_load(value))
            check(fixed, fixed.hardware.devices)


def test_a_pass_has_no_more_than_a_device_has_in_a_step(compose_settings):
    sizes = [check(compose_settings("experiment=debug"), ranks) for ranks in (1, 2, 4)]
    assert [(one.micro_batch, one.micro_steps) for one in sizes] == [(4, 1), (2, 1), (1, 1)]


def test_every_problem_is_told_at_once(compose_settings):
    """Those of single values first: what follows from a wrong one says nothing."""
    values = ["optimizer.lr=-1", "eval_every=0", "model.d_head=63", "hardware.dtype=int8"]
    values += ["data.tokenizer=gpt5", "data.val_fraction=2", "probe.alarm=0", "train_sequences=0"]
    with pytest.raises(SettingsError) as caught:
        check(compose_settings(*values, "hardware.devices=9"), 1)
    assert [text for text in values if text not in str(caught.value)] == []
    together = ["model.vocab_size=64", "context=5000", "hardware.devices=9"]
    with pytest.raises(SettingsError) as caught:
        check(compose_settings(*together), 1)
    assert [text for text in together if text not in str(caught.value)] == []


def test_no_gpu_points_to_what_runs_without(compose_settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError, match="experiment=quickstart"):
        check(compose_settings(), 1)


def test_a_small_gpu_trains_the_papers_model(compose_settings):
    settings = compose_settings("hardware=gpu_24gb")
    assert check(settings, 1).micro_steps == 32
    assert (settings.context, settings.hardware.dtype) == (4096, "bfloat16")


WARMUPS = {"steps=2": 0, "steps=100": 10, "steps=7500": 750, "steps=7501": 7500}
WSD = {"steps=8000": 800, "steps=9375": 7500, "optimizer.decay_ratio=0.95 steps=100": 5}
WARMUPS |= {f"optimizer.schedule=wsd {length}": warmup for length, warmup in WSD.items()}


@pytest.mark.parametrize(("overrides", "warmup"), WARMUPS.items())
def test_a_short_run_has_a_short_warmup_and_says_so(compose_settings, caplog, overrides, warmup):
    settings = compose_settings(*overrides.split())
    sizes = check(settings, 1)
    assert sizes.warmup_steps == warmup
    how = {"steps": sizes.steps, "warmup_steps": warmup, "settings": settings.optimizer}
    rates = [learning_rate(step, **how) for step in range(sizes.steps)]
    assert max(rates) == pytest.approx(3e-5, rel=0.01) or sizes.steps == 2
    assert rates[-1] == pytest.approx(3e-6)
    report_warmup(settings)
    assert ("tps.warmup_steps=7500" in caplog.text) == (warmup != 7500)


def test_large_models_are_sharded(compose_settings):
    def is_sharded(preset, asked, ranks):
        settings = compose_settings(f"model={preset}", f"hardware.parallel={asked}")
        return settings.hardware.is_sharded(settings.model, ranks)

    assert is_sharded("llama_1b", "auto", 2)
    assert is_sharded("llama_325m", "fsdp", 2)
    for parallel in (("llama_325m", "auto", 8), ("llama_1b", "auto", 1), ("llama_1b", "ddp", 2)):
        assert not is_sharded(*parallel)
    assert not is_sharded("llama_325m", "fsdp", 1)


def test_ranks_that_share_sequences_are_one_group(compose_settings):
    shared = compose_settings("tps=260k", "hardware.context_parallel=4", "hardware.micro_batch=16")
    assert check(shared, 8).micro_steps == 2
    with pytest.raises(SettingsError, match=r"16 sequences × context=4096 tokens × 3 group\(s\) of 4 dev"):
        check(shared, 12)
    with pytest.raises(SettingsError, match=r"context_parallel=4 does not divide devices=6; .*: 1, 2$"):
        check(shared, 6)
    few = compose_settings("hardware.context_parallel=4", "model.n_kv_heads=2")
    with pytest.raises(SettingsError, match=r"does not divide key and value heads=2; .*: 1, 2$"):
        check(few, 8)


def test_float8_needs_its_library_a_dtype_and_a_gpu_that_has_it(compose_settings, monkeypatch):
    settings = compose_settings("model.linear=float8")
    monkeypatch.setattr("trainer.checks.find_spec", lambda name: name)
    check(settings, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A40")
    monkeypatch.setattr("trainer.checks.find_spec", lambda name: None)
    settings.hardware.dtype = "float32"
    with pytest.raises(SettingsError) as told:
        check(settings, 1)
    for words in ("hardware.dtype=bfloat16", "train,float8", "NVIDIA A40", "8.9", "model.linear=null"):
        assert words in str(told.value)
