"""Starting from trained weights: they are the ones that are trained further, and others are refused early."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.errors import SettingsError, TrainingError
from trainer.plan import make_plan

FROZEN = ("optimizer.lr=1e-30", "tps.warmup_steps=0", "steps=1", "sample_tokens=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a base run's directory, made by the first test that needs it."""
    return tmp_path_factory.mktemp("base") / "run"


@pytest.fixture
def base(trained, train_here):
    """The weights of a run of three steps."""
    if not trained.exists():
        train_here(trained, "steps=3")
    return trained / "weights"


@pytest.mark.parametrize("attention", ["fpa", "sagebwd"])
def test_training_starts_from_the_weights(base, train_here, tmp_path, attention):
    """A step that moves nothing leaves them as they were, under either attention and another context."""
    train_here(
        tmp_path / "run", *FROZEN, f"init_from={base}", f"attention={attention}", "model.max_context=96"
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "weights")
    )
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-20)
    if attention == "fpa":
        with pytest.raises(TrainingError, match=r"init_from was .*weights, is now None"):
            train_here(tmp_path / "run", *FROZEN, "model.max_context=96")


def test_a_continued_run_goes_on_from_its_checkpoint_not_from_the_weights(base, train_here, tmp_path):
    overrides = ("steps=4", f"init_from={base}", "checkpoint_every=2", "sample_tokens=0")
    whole = train_here(tmp_path / "run", *overrides)
    for path in (tmp_path / "run" / "checkpoints" / "step_00000004").iterdir():
        path.unlink()  # the newest is lost; step 2 remains
    base.rename(tmp_path / "moved")  # they are not needed any more
    try:
        continued = train_here(tmp_path / "run", *overrides)
    finally:
        (tmp_path / "moved").rename(base)
    for left, right in zip(whole.llama.parameters(), continued.llama.parameters(), strict=True):
        assert torch.equal(left, right)


def plan(compose_settings, *overrides):
    return make_plan(compose_settings("experiment=debug", *overrides), ranks=1)


def test_another_shape_is_refused_before_anything_is_built(base, compose_settings):
    with pytest.raises(
        SettingsError,
        match=r"another shape; use model\.d_ffn=96 model\.qk_norm=True \(here d_ffn=64, qk_norm=False\)",
    ):
        plan(compose_settings, f"init_from={base}", "model.qk_norm=false", "model.d_ffn=64")
    plan(compose_settings, f"init_from={base}", "model.n_kv_heads=2", "model.init_std=1")  # the same weights
    with pytest.raises(SettingsError, match=r"another shape; use model=llama_debug$"):
        plan(compose_settings, f"init_from={base}", "model=llama_tiny", "data.tokenizer=bytes")
    with pytest.raises(SettingsError, match=r"use the tokenizer .* trained with: data\.tokenizer=.*weights$"):
        plan(compose_settings, f"init_from={base}", "data.tokenizer=gpt2")


def test_a_folder_without_a_model_is_named(compose_settings, tmp_path):
    with pytest.raises(
        SettingsError, match=r"init_from=.*: there is no config.json; give the weights/ folder"
    ):
        plan(compose_settings, f"init_from={tmp_path}")
    with pytest.raises(SettingsError, match=r"init_from=.*py: there is no config.json; give the weights/"):
        plan(compose_settings, f"init_from={__file__}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(SettingsError, match=r"init_from=.*model_type=gpt2, supported are llama, qwen3"):
        plan(compose_settings, f"init_from={tmp_path}")


def test_fine_tuning_asks_for_the_weights_to_start_from(compose_settings):
    with pytest.raises(SettingsError, match=r"init_from=runs/NAME/weights: there is no config.json; give"):
        make_plan(compose_settings("experiment=finetune", "hardware=cpu", "hardware.micro_batch=2"), ranks=1)


def test_damaged_weights_are_told_without_a_traceback(base, train_here, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text((base / "config.json").read_text())
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"model.safetensors is damaged"):
        train_here(tmp_path / "run", *FROZEN, f"init_from={tmp_path / 'weights'}")


def test_weights_that_are_not_finite_are_named(base, train_here, tmp_path):
    """A training step would find a loss that is not finite, and blame the learning rate."""
    shutil.copytree(base, tmp_path / "weights")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "weights" / "model.safetensors")
    with pytest.raises(TrainingError, match=r"model\.safetensors: model\.norm\.weight has 1 of 32 values"):
        train_here(tmp_path / "run", *FROZEN, f"init_from={tmp_path / 'weights'}")


@pytest.mark.parametrize("content", ["[]", '{"model_type": ["llama"]}', '{"model_type": "llama"}'])
def test_a_damaged_config_is_told_before_anything_is_built(compose_settings, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=r"init_from=.*config\.json"):
        plan(compose_settings, f"init_from={tmp_path}")
