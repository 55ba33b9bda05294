"""Starting from trained weights: they are the ones that are trained further, and others are refused early."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from trainer.checks import check
from trainer.errors import SettingsError, TrainingError

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


def test_weights_that_are_not_those_the_run_left_are_refused(base, train_here, tmp_path):
    shutil.copytree(base.parent, tmp_path / "base")
    weights = tmp_path / "base" / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # of a number: nothing else would tell
    weights.write_bytes(content)
    with pytest.raises(TrainingError, match=r"init_from=.*is finished, but weights/model.safetensors is "):
        train_here(tmp_path / "run", *FROZEN, f"init_from={weights.parent}")


def test_weights_beside_another_file_of_that_name_are_read(base, train_here, tmp_path):
    shutil.copytree(base, tmp_path / "models" / "mine")
    (tmp_path / "models" / "DONE").write_text("of something else")
    train_here(tmp_path / "run", *FROZEN, f"init_from={tmp_path / 'models' / 'mine'}")


def refusal(train_here, folder, *overrides):
    """Why a run from these weights is refused, which must be before anything is trained."""
    with pytest.raises(TrainingError) as refused:
        train_here(folder / "refused", *FROZEN, *overrides)
    assert not (folder / "refused" / "metrics.jsonl").exists()
    return str(refused.value)


def test_another_shape_is_refused(base, train_here, compose_settings, tmp_path):
    told = refusal(train_here, tmp_path, f"init_from={base}", "model.qk_norm=false", "model.d_ffn=64")
    assert "use model.d_ffn=96 model.qk_norm=True (here d_ffn=64, qk_norm=False)" in told
    with pytest.raises(SettingsError, match=r"use the tokenizer .* trained with: data\.tokenizer=.*weights$"):
        check(compose_settings("experiment=debug", f"init_from={base}", "data.tokenizer=gpt2"), 1)


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "config.json"), ("[]", "config.json"), ('{"model_type": "gpt2"}', "llama, qwen3")],
)
def test_a_folder_without_a_model_is_named(train_here, tmp_path, content, named):
    if content:
        (tmp_path / "config.json").write_text(content)
    told = refusal(train_here, tmp_path, f"init_from={tmp_path}")
    assert f"init_from={tmp_path}: " in told
    assert named in told


def test_an_empty_name_is_no_start_from_scratch(train_here, tmp_path):
    """init_from=$WEIGHTS, with a variable that is not set."""
    assert "init_from=: " in refusal(train_here, tmp_path, "init_from=")


def test_damaged_weights_are_told_without_a_traceback(base, train_here, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text((base / "config.json").read_text())
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"model.safetensors is damaged"):
        train_here(tmp_path / "run", *FROZEN, f"init_from={tmp_path / 'weights'}")
