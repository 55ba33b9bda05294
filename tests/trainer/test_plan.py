from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from model import backends
from model.backends.sagebwd import PRESETS, sage_config
from sagebwd import SageConfig
from trainer.errors import SettingsError
from trainer.plan import Plan, is_sharded, make_plan

CONFIGS = Path(__file__).parents[2] / "configs"

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


@pytest.mark.parametrize("attention", ["fpa", "sagebwd"])
@pytest.mark.parametrize(("tps", "devices", "steps", "tokens", "sequences", "micro_steps"), PAPER_ON_GPU)
def test_the_papers_runs(compose_settings, attention, tps, devices, steps, tokens, sequences, micro_steps):
    settings = compose_settings(f"attention={attention}", f"tps={tps}")
    assert make_plan(settings, devices) == Plan(steps, tokens, sequences, micro_steps)
    assert steps * tokens == 78_643_200_000
    assert settings.context == 4096
    assert settings.optimizer.lr == 3e-5
    assert settings.tps.warmup_steps == {"260k": 7_500, "2.1m": 1_000}[tps]
    assert settings.model.norm_eps == 1e-6
    assert settings.hardware.dtype == "bfloat16"
    if attention == "sagebwd":
        config = config_of(settings)
        assert (config.smooth_k, config.smooth_q) == (True, False)


def config_of(settings):
    return sage_config(backends.read(settings.attention)[1])


@pytest.mark.parametrize("name", ["paper", "consistent", "accurate", "strictly_causal"])
def test_presets_are_attentions_of_their_own(compose_settings, name):
    preset = getattr(SageConfig, name)()
    assert config_of(compose_settings(f"attention=sagebwd_{name}")) == preset
    toggled = compose_settings(f"attention=sagebwd_{name}", f"attention.smooth_k={not preset.smooth_k}")
    assert config_of(toggled) == replace(preset, smooth_k=not preset.smooth_k)


def test_every_preset_of_the_library_has_its_file():
    files = {file.stem.removeprefix("sagebwd_") for file in (CONFIGS / "attention").glob("sagebwd_*.yaml")}
    assert files == PRESETS.keys() - {"default"}


def test_the_default_attention_is_the_librarys_default(compose_settings):
    assert config_of(compose_settings("attention=sagebwd")) == SageConfig()


@pytest.mark.parametrize("attention", ["fpa", "sagebwd", "sagebwd_accurate"])
def test_a_sweep_may_turn_a_switch_off_for_all_attentions(compose_settings, attention):
    make_plan(compose_settings(f"attention={attention}", "attention.smooth_k=false"), 1)


def test_debug_keeps_the_ratio_of_the_papers_tokens_per_step(compose_settings):
    small, large = (
        make_plan(compose_settings("experiment=debug", f"tps={tps}"), 1).tokens_per_step
        for tps in ("260k", "2.1m")
    )
    assert large == 8 * small < 10_000


BAD = [
    # overrides, what the message must name
    (["hardware.micro_batch=12"], ["micro_batch=12", "245760", "294912", "micro_batch=8 or 16"]),
    (["tps.tokens_per_step=100000"], ["100000", "65536", "131072"]),
    (["tps.divide_by=7"], ["not a multiple", "262143"]),
    (["context=8192", "hardware.micro_batch=8"], ["context=8192", "model.max_context=4096"]),
    (["model.n_heads=16", "model.n_kv_heads=5"], ["n_kv_heads", "5"]),
    (["model.d_head=63"], ["d_head", "63"]),
    (["model.vocab_size=50000"], ["model.vocab_size=50000", "50257", "50304"]),
    (["attention.smooth_q=true"], ["smooth_q", "fpa", "attention=sagebwd"]),
    (["attention.smooth_k=true"], ["smooth_k", "fpa", "attention=sagebwd"]),
    (["attention=sagebwd", "attention.granularity=tile"], ["granularity", "tile", "block", "row"]),
    (["attention=sagebwd", "attention.sdpa=flash"], ["sdpa", "fpa"]),
    (["attention.backend=nonsense"], ["nonsense", "fpa", "sagebwd"]),
    (["attention.sdpa=fastest"], ["fastest", "cudnn", "flash"]),
    (["data=text"], ["data.path"]),
    (["data=parquet", "data.path=/nowhere/*.parquet"], ["/nowhere/*.parquet"]),
    (["data.tokenizer=gpt5"], ["gpt5", "gpt2", "bytes"]),
    (["optimizer.lr=0"], ["optimizer.lr=0", "greater than zero"]),
    (["optimizer.lr=nan"], ["optimizer.lr=nan"]),
    (["optimizer.beta2=1.0"], ["optimizer.beta2=1.0", "0.95"]),
    (["optimizer.min_lr_ratio=2"], ["min_lr_ratio=2", "between 0 and 1"]),
    (["optimizer.weight_decay=-1"], ["weight_decay=-1"]),
    (["optimizer.name=sgd"], ["optimizer.name=sgd", "optimizer=adamw", "optimizer=muon"]),
    (["optimizer.muon_lr=0.02"], ["optimizer.muon_lr=0.02", "optimizer=muon"]),
    (["optimizer=muon", "optimizer.name=adamw"], ["muon_momentum=0.95", "muon_lr_scale=match_rms_adamw"]),
    (["optimizer.name=muon"], ["optimizer.muon_momentum=None", "use optimizer=muon"]),
    (["optimizer=muon", "optimizer.muon_lr=0"], ["optimizer.muon_lr=0", "null uses optimizer.lr"]),
    (["optimizer=muon", "optimizer.muon_momentum=1"], ["optimizer.muon_momentum=1", "0.95"]),
    (["optimizer=muon", "optimizer.muon_lr_scale=rms"], ["muon_lr_scale=rms", "match_rms_adamw", "original"]),
    (["optimizer=muon", "optimizer.muon_lr_scale=original"], ["use optimizer.muon_lr=0.02"]),
    (["optimizer.schedule=step"], ["optimizer.schedule=step", "cosine, linear, wsd"]),
    (["optimizer.decay_ratio=0.1"], ["optimizer.decay_ratio=0.1", "schedule=cosine", "schedule=wsd"]),
    (["optimizer.schedule=wsd", "optimizer.decay_ratio=0"], ["decay_ratio=0", "0.1 to 0.2"]),
    (["optimizer.schedule=wsd", "optimizer.decay_type=cosine"], ["decay_type=cosine", "linear, 1-sqrt"]),
    (["optimizer.schedule=wsd", "steps=8000"], ["tps.warmup_steps=7500", "1600 steps", "warmup_steps=6400"]),
    (["profile.steps=5", "steps=14", "tps.warmup_steps=2"], ["profile.start=10", "14 steps"]),
    (["eval_every=0"], ["eval_every=0"]),
    (["milestone_every=0"], ["milestone_every=0", "greater than zero"]),
    (["milestone_every=1500"], ["milestone_every=1500", "checkpoint_every=1000", "milestone_every=2000"]),
    (["steps=100"], ["tps.warmup_steps=7500", "100 steps", "tps.warmup_steps=10"]),
    (["total_tokens=1000"], ["total_tokens=1000", "262144"]),
    (["hardware.dtype=int8"], ["hardware.dtype=int8", "bfloat16"]),
    (["hardware.device=tpu"], ["hardware.device=tpu", "cuda"]),
    (
        ["hardware=cpu", "hardware.cuda_graphs=true"],
        ["hardware.device=cpu", "1 device(s)", "cuda_graphs=false"],
    ),
    (["hardware.deterministic=true", "attention.sdpa=cudnn"], ["sdpa=cudnn", "attention.sdpa=flash"]),
    (["hardware.parallel=zero"], ["hardware.parallel=zero", "auto", "ddp", "fsdp"]),
    (["hardware.recompute=all"], ["hardware.recompute=all", "none", "blocks"]),
    (["hardware.timeout_s=0"], ["hardware.timeout_s=0", "greater than zero"]),
    (["hardware.timeout_s=inf"], ["hardware.timeout_s=inf", "must be finite"]),
    (["hardware.timeout_s=1e30"], ["hardware.timeout_s=1e+30", "at most 31536000"]),
    (["seed=-1"], ["seed=-1", "must not be negative"]),
    (["seed=99999999999999999999999"], ["seed=99999999999999999999999", "less than 2**63"]),
    (["hardware.devices=9"], ["hardware.devices=9", "8 GPU"]),
    (["logger.wandb=maybe"], ["logger.wandb=maybe", "offline"]),
    (["run_dir="], ["run_dir= is empty", "run_dir=runs/NAME"]),
    (["runs_dir="], ["runs_dir= is empty", "runs_dir=runs"]),
    (["init_from="], ["init_from= is empty", "leave it out"]),
    (["data.root="], ["data.root= is empty", "data.root=tokens"]),
    (["probe.every=-1"], ["probe.every=-1", "0 turns"]),
    (["probe.layers=[3,20]"], ["probe.layers", "20", "0 to 19"]),
    (["probe.layers=[-1]"], ["probe.layers", "-1", "0 to 19", "probe.layers=[19]"]),
    (["probe.layers=[]"], ["probe.layers", "probe.every=0"]),
    (["probe.sequences=0"], ["probe.sequences=0", "between 1 and"]),
    (["probe.sequences=65"], ["probe.sequences=65", "hardware.micro_batch="]),
    (["probe.alarm=0"], ["probe.alarm=0", "null"]),
    (["spike.window=4"], ["spike.window=4", "8", "spike.threshold=null"]),
    (["spike.threshold=nan"], ["spike.threshold=nan", "null"]),
    (["spike.threshold=null", "spike.skip=true"], ["spike.skip=true", "spike.threshold=6"]),
]


@pytest.mark.parametrize(("overrides", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_settings_name_the_fix(compose_settings, overrides, named):
    settings = compose_settings(*overrides)
    with pytest.raises(SettingsError) as caught:
        make_plan(settings, settings.hardware.devices)
    assert [text for text in named if text not in str(caught.value)] == [], str(caught.value)


def test_the_largest_seed_and_timeout_are_allowed(compose_settings):
    make_plan(compose_settings(f"seed={2**63 - 1}", "hardware.timeout_s=31536000"), 1)
    torch.Generator().manual_seed(2**63 - 1)
    timedelta(seconds=31536000)


def test_ranks_count_in_the_tokens_per_step(compose_settings):
    settings = compose_settings()
    with pytest.raises(SettingsError, match=r"× 3 device\(s\) = 196608 .*196608 or 393216"):
        make_plan(settings, 3)


def test_every_problem_is_told_at_once(compose_settings):
    wrong = {
        "optimizer.lr=-1": "optimizer.lr=-1",
        "optimizer.beta1=2": "optimizer.beta1=2",
        "optimizer.weight_decay=-1": "optimizer.weight_decay=-1",
        "optimizer.min_lr_ratio=3": "optimizer.min_lr_ratio=3",
        "eval_every=0": "eval_every=0",
        "tps.warmup_steps=-1": "tps.warmup_steps=-1",
        "sample_prompt=''": "sample_prompt is empty",
        "milestone_every=7": "milestone_every=7",
        "context=5000": "context=5000",
        "model.d_head=63": "model.d_head=63",
        "model.n_kv_heads=5": "model.n_kv_heads=5",
        "hardware.dtype=int8": "hardware.dtype=int8",
        "hardware.parallel=zero": "hardware.parallel=zero",
        "hardware.devices=9": "hardware.devices=9",
        "attention.sdpa=fastest": "attention.sdpa=fastest",
        "data.tokenizer=gpt5": "data.tokenizer=gpt5",
        "data.val_fraction=2": "data.val_fraction=2",
        "probe.every=-1": "probe.every=-1",
        "probe.sequences=0": "probe.sequences=0",
        "probe.alarm=0": "probe.alarm=0",
        "spike.window=4": "spike.window=4",
        "spike.threshold=-1": "spike.threshold=-1",
        "init_from=/nowhere": "init_from=/nowhere",
    }
    with pytest.raises(SettingsError) as caught:
        make_plan(compose_settings(*wrong), 1)
    assert [text for text in wrong.values() if text not in str(caught.value)] == []
    # model.d_head and n_kv_heads share a line each; 262144 tokens cannot be made of 5000.
    assert len(str(caught.value).splitlines()) == 1 + len(wrong) + 1


@pytest.mark.parametrize(
    "override",
    [
        "total_tokens=0",
        "steps=0",
        "tps.divide_by=0",
        "tps.tokens_per_step=0",
        "checkpoint_every=0",
        "hardware.micro_batch=0",
        "context=0",
        "train_sequences=0",
        "model.n_layers=0",
        "model.n_heads=0",
        "data.tokenizer=x",
    ],
)
def test_no_check_stumbles_over_what_another_reports(compose_settings, override):
    with pytest.raises(SettingsError, match=override):
        make_plan(compose_settings(override, "milestone_every=1000"), 1)


@pytest.mark.parametrize("devices", [0, -1])
def test_no_devices_are_refused(compose_settings, devices):
    settings = compose_settings(f"hardware.devices={devices}")
    with pytest.raises(SettingsError, match=f"hardware.devices={devices} must be greater than zero$"):
        make_plan(settings, devices)


def test_no_gpu_points_to_what_runs_without(compose_settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError, match="experiment=quickstart"):
        make_plan(compose_settings(), 1)


def test_a_small_gpu_trains_the_papers_model(compose_settings):
    settings = compose_settings("hardware=gpu_24gb")
    assert make_plan(settings, 1).micro_steps == 32
    assert (settings.context, settings.hardware.dtype) == (4096, "bfloat16")


def test_suggested_fixes_work(compose_settings):
    for fix in ("hardware.micro_batch=8", "hardware.micro_batch=16", "tps.tokens_per_step=245760"):
        make_plan(compose_settings("hardware.micro_batch=12", fix), 1)


@pytest.mark.parametrize(
    ("preset", "asked", "ranks", "sharded"),
    [
        ("llama_325m", "auto", 8, False),
        ("llama_1b", "auto", 2, True),
        ("llama_1b", "auto", 1, False),
        ("llama_1b", "ddp", 2, False),
        ("llama_325m", "fsdp", 2, True),
        ("llama_325m", "fsdp", 1, False),
    ],
)
def test_large_models_are_sharded(compose_settings, preset, asked, ranks, sharded):
    settings = compose_settings(f"model={preset}", f"hardware.parallel={asked}")
    assert is_sharded(settings.model, settings.hardware, ranks) is sharded
