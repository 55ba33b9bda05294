import os
import re
import shutil

import pytest
import torch
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from common.errors import SettingsError, TrainingError
from common.files import append_line
from tests import warm
from tests.cli import assert_same_weights, flip, losses, metrics
from tests.trainer import conftest
from trainer import sweep
from trainer.checks import check
from trainer.estimate import describe
from trainer.run_directory import RunDirectory, read_sealed_file, seal_text, verify_seal
from trainer.start import TrainingDirectory, inherited

QUICK = ("sample_tokens=0", "probe.every=0", "checkpoint_every=2")


@pytest.fixture
def typed():
    """typed("steps=3", …) -> the Settings that train.py makes of this command line."""
    return lambda *overrides: OmegaConf.to_object(inherited(warm.config(*overrides), list(overrides)))


@pytest.fixture
def train(typed, datasets, monkeypatch):
    """train("steps=3", …) -> trains what train.py would of this command line; the run's folder."""

    def trained(*overrides):
        return conftest.train(typed(f"data.root={datasets}", *overrides), monkeypatch).directory.path

    return trained


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("trunk")


@pytest.fixture
def trunk(kept, train):
    """A run of eight steps with a checkpoint at every second one, made by the first test that needs it."""
    run = kept / "run"
    if not run.exists():
        train("experiment=debug", *QUICK, "steps=8", "keep_checkpoints=9", f"run_dir={run}")
    return run


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_with_more_steps_is_left_as_it_is(trunk, typed):
    again, before = typed("experiment=debug", *QUICK, "steps=12", f"run_dir={trunk}"), contents(trunk)
    for refuse in (TrainingDirectory(trunk).is_finished_with, TrainingDirectory(trunk).open):
        with pytest.raises(TrainingError, match=rf"steps was 8, is now 12(?s:.*)branch_from={trunk} "):
            refuse(again)
    assert before == contents(trunk)


def test_a_branch_that_changes_nothing_is_its_run(train, trunk, tmp_path):
    """Weights, moments, learning rates and the order of the data: its steps have the same bits."""
    branch = train(f"branch_from={trunk}", "branch_step=4", f"run_dir={tmp_path / 'branch'}")
    assert_same_weights(branch, trunk)
    assert losses(branch) == losses(trunk)[4:]
    assert metrics(branch)[-1] == metrics(trunk)[-1]


def test_a_branch_of_more_steps_is_the_run_of_that_length_bit_for_bit(train, tmp_path):
    """With a constant rate, and with wsd of a run that ended before its decay, which more steps put off."""
    debug = ("experiment=debug", *QUICK)
    part = train(*debug, "steps=4", f"run_dir={tmp_path / 'part'}", "optimizer.schedule=constant")
    for schedule in ("constant", "wsd"):
        more = ("steps=8", f"optimizer.schedule={schedule}")
        branch = train(f"branch_from={part}", *more, f"run_dir={tmp_path / schedule}")
        whole = train(*debug, *more, f"run_dir={tmp_path / schedule}-whole")
        assert_same_weights(branch, whole)
        assert losses(branch) == losses(whole)[4:]


def test_the_plan_of_a_branch_counts_what_is_left(typed, trunk, tmp_path):
    branch = (f"branch_from={trunk}", "branch_step=4", f"run_dir={tmp_path / 'branch'}", "plan=true")
    more, fewer = (describe(typed(*branch, f"steps={steps}"), 1) for steps in (12, 3))
    assert re.search(r"steps +8 after step 4\n", more)
    assert re.search(r"tokens +2,048\n", more)  # 256 a step
    assert re.search(r"steps +0 after step 4\n", fewer)


def test_a_sweep_of_branches_is_checked_with_what_they_inherit(trunk):
    """The defaults are those of a GPU, of which no branch of a run on a CPU should be asked."""

    def problem(*overrides):
        with initialize_config_dir(str(warm.CONFIGS), version_base="1.3"):
            return sweep._problem("train", list(overrides), [])

    branch = (f"branch_from={trunk}", "branch_step=4", "attention=sagebwd")
    assert problem(*branch) is None
    assert "hardware.micro_batch=3" in problem(*branch, "hardware.micro_batch=3")
    assert "give the directory of a run" in problem("branch_from=nowhere")


@pytest.mark.parametrize("change", ["attention=sagebwd", "optimizer.weight_decay=0.7"])
def test_what_a_branch_changes_takes_effect_from_there_on(train, trunk, tmp_path, change):
    branch = train(f"branch_from={trunk}", "branch_step=6", change, f"run_dir={tmp_path / 'branch'}")
    (first, last), trunks = losses(branch), losses(trunk)
    assert first == pytest.approx(trunks[6], rel=1e-3)  # the same weights on the same text
    assert last != trunks[-1]
    recorded = OmegaConf.load(branch / "config.yaml")
    assert (recorded.branch_from, recorded.branch_step) == (str(trunk), 6)


def test_a_branch_resumes_from_its_own_checkpoint(train, trunk, tmp_path):
    """Also when its run has gone, and without branch_step, which then was the newest."""
    moved = shutil.copytree(trunk, tmp_path / "trunk")
    command = (f"branch_from={moved}", "steps=11", "attention=sagebwd", f"run_dir={tmp_path / 'branch'}")
    branch = train(*command)
    expected = losses(branch)
    shutil.rmtree(moved)
    shutil.rmtree(branch / "checkpoints" / "step_00000011")
    (branch / "DONE").unlink()
    assert losses(train(*command)) == expected
    assert OmegaConf.load(branch / "config.yaml").branch_step == 8


def test_a_branch_takes_no_code_from_its_run(trunk, train, typed, tmp_path):
    stranger = shutil.copytree(trunk, tmp_path / "stranger")
    recorded = OmegaConf.load(stranger / "config.yaml")
    code = {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}
    recorded.optimizer.arguments, recorded.callbacks = {"betas": code}, {"a": code}
    recorded.data.root, recorded.logger.project = str(tmp_path / "theirs"), "theirs"
    OmegaConf.save(recorded, stranger / "config.yaml")
    sealed = stranger / "checkpoints" / "step_00000008" / "seal.json"
    contents = read_sealed_file(sealed) | {"settings": OmegaConf.to_container(recorded)}
    sealed.write_text(seal_text(contents))
    train(f"branch_from={stranger}", "steps=9", f"run_dir={tmp_path / 'branch'}")
    assert not (tmp_path / "ran").exists()
    recorded.optimizer._target_ = "os.system"
    recorded.sample_prompt = recorded.data.tokenizer = "${oc.env:HOME}"
    OmegaConf.save(recorded, stranger / "config.yaml")
    found = typed(f"branch_from={stranger}", "optimizer._target_=torch.optim.NAdam")
    assert (found.optimizer._target_, found.optimizer.arguments) == ("torch.optim.NAdam", {})
    assert (found.callbacks, found.data.root, found.logger) == ({}, "tokens", typed().logger)
    assert found.sample_prompt == found.data.tokenizer == "${oc.env:HOME}"


LINKS = ".lock DONE config.yaml metrics.jsonl tensorboard weights weights/model.safetensors"


@pytest.mark.parametrize("name", LINKS.split())
def test_links_in_the_run_of_a_stranger_lead_nowhere(train, trunk, tmp_path, name):
    run, outside = shutil.copytree(trunk, tmp_path / "run"), tmp_path / "outside"
    link = run / name
    shutil.move(link, outside) if link.exists() else outside.write_text('{"step": 1}\n')
    link.symlink_to(outside)
    before = contents(tmp_path)
    debug = ("experiment=debug", *QUICK, "steps=8")
    for command in [
        (*debug, f"run_dir={run}"),
        (*debug, f"init_from={run / 'weights'}", f"run_dir={tmp_path / 'new'}"),
        *[(f"branch_from={run}", "steps=9", f"run_dir={tmp_path / 'new'}")] * (name == "config.yaml"),
    ]:
        with pytest.raises(TrainingError, match=rf"{link} is (a link|no regular file)"):
            train(*command)
    with pytest.raises(ValueError, match="is a link"):
        RunDirectory(run).records()
    with pytest.raises(OSError, match=name):
        append_line(link, {"step": 2})
    assert before == contents(tmp_path)


def test_a_pipe_a_checkpoint_and_checkpoints_that_are_links_are_refused(trunk, tmp_path):
    run = shutil.copytree(trunk, tmp_path / "run")
    os.mkfifo(run / "log.txt")  # to open it blocks
    with pytest.raises(ValueError, match=r"log\.txt is a link or a pipe"):
        RunDirectory(run).records()
    (run / "log.txt").unlink()
    newest = run / "checkpoints" / "step_00000008"
    shutil.rmtree(newest)
    newest.symlink_to(trunk / "checkpoints" / newest.name)
    with pytest.raises(ValueError, match="is a link"):
        verify_seal(newest)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(trunk / "checkpoints")  # to train would delete some
    with pytest.raises(ValueError, match="those of another run"):
        RunDirectory(run).records()


FROZEN = ("optimizer.lr=1e-30", "tps.warmup_steps=0", "steps=1", "sample_tokens=0")


@pytest.fixture
def base(trunk):
    return trunk / "weights"


def test_training_starts_from_the_weights(base, train_here, tmp_path):
    """A step that moves nothing leaves them as they were, under another attention and another context.

    What is called DONE beside them is not that of their run.
    """
    mine = shutil.copytree(base, tmp_path / "models" / "mine")
    (tmp_path / "models" / "DONE").write_text("of something else")
    changed = (tmp_path / "run", *FROZEN, "attention=sagebwd", "model.max_context=96")
    train_here(*changed, f"init_from={mine}")
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "run" / "weights"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-20)
    with pytest.raises(TrainingError, match=r"init_from was .*mine, is now None"):
        train_here(*changed)


def test_weights_that_are_not_those_the_run_left_are_refused(base, train_here, tmp_path):
    shutil.copytree(base.parent, tmp_path / "base")
    weights = tmp_path / "base" / "weights" / "model.safetensors"
    flip(weights, -2)  # of a number: nothing else would tell
    with pytest.raises(TrainingError, match=r"init_from=.*is finished, but weights/model.safetensors is "):
        train_here(tmp_path / "run", *FROZEN, f"init_from={weights.parent}")


def test_a_tokenizer_of_more_tokens_than_the_weights_know_is_refused(base, compose_settings):
    with pytest.raises(SettingsError, match=r"use the tokenizer .* trained with: data\.tokenizer=.*weights$"):
        check(compose_settings("experiment=debug", f"init_from={base}", "data.tokenizer=gpt2"), 1)


def test_weights_bring_their_shape_and_tokenizer(typed, base, tmp_path):
    found = typed("data=text", "data.path=x", f"init_from={base}")
    assert (found.model.d_model, found.model.n_layers, found.data.tokenizer) == (32, 2, "bytes")
    found = typed(f"init_from={base}", "model.max_context=96", "data.tokenizer=gpt2")
    assert (found.model.d_model, found.model.max_context, found.data.tokenizer) == (32, 96, "gpt2")
    folder = shutil.copytree(base, tmp_path / "model")
    assert typed(f"init_from={folder}").data.tokenizer == str(folder)
    (folder / "tokenizer.json").unlink()
    assert typed(f"init_from={folder}", "data=embedded").data.tokenizer == "bytes"


def test_a_run_that_has_begun_does_not_need_the_weights_it_began_with(train, trunk, tmp_path):
    weights = shutil.copytree(trunk / "weights", tmp_path / "model")
    command = ("experiment=debug", *QUICK, f"init_from={weights}", "steps=4", f"run_dir={tmp_path / 'run'}")
    run = train(*command)
    expected = losses(run)
    for name in ("config.json", "model.safetensors"):  # the tokenizer stays
        (weights / name).unlink()
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    (run / "DONE").unlink()
    assert losses(train(*command)) == expected


REFUSED = {  # what is typed, and what the error has of it
    "branch_from=TRUNK model.n_layers=1": "model.n_layers=2",
    "branch_from=TRUNK optimizer=muon": "optimizer.name=adamw",
    "branch_from=TRUNK optimizer._target_=torch.optim.NAdam": "takes no code from its run",
    "branch_from=TRUNK data.tokenizer=gpt2 model.vocab_size=50304": "data.tokenizer=bytes",
    "branch_from=TRUNK branch_step=5": "no checkpoint of step 5; there: 2, 4, 6, 8",
    "branch_from=TRUNK": "has done all 8 steps of this run; raise steps",
    "branch_from=TRUNK experiment=debug": "leave init_from and experiment out",
    "branch_from=TRUNK init_from=x": "leave init_from and experiment out",
    "branch_from=EMPTY": "give the directory of a run",
    "experiment=debug init_from=TRUNK/weights model.d_ffn=64": r"use model.d_ffn=96 \(here d_ffn=64\)",
    "experiment=debug init_from=EMPTY": "config.json",
    "experiment=debug init_from=GPT2": "llama, qwen3",
    "experiment=debug init_from=": "init_from=: ",  # $WEIGHTS, a variable that is not set
    "experiment=debug init_from=TORN": "model.safetensors is damaged",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_started_from_is_named_before_anything_is_trained(train, trunk, tmp_path, line):
    for name in ("EMPTY", "GPT2", "TORN"):
        (tmp_path / name).mkdir()
    (tmp_path / "GPT2" / "config.json").write_text('{"model_type": "gpt2"}')
    shutil.copy(trunk / "weights" / "config.json", tmp_path / "TORN")
    (tmp_path / "TORN" / "model.safetensors").write_bytes(b"torn")
    words = line.replace("TRUNK", str(trunk))
    words = re.sub("=(EMPTY|GPT2|TORN)", rf"={tmp_path}/\1", words).split()
    with pytest.raises(TrainingError, match=REFUSED[line]):
        train(*words, f"run_dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()
