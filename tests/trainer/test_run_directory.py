import json
import os
import subprocess

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from common.errors import TrainingError
from common.files import append_line, read_lines, write_text
from data.settings import DataSettings
from scripts.runs import read_settings
from tests.cli import flip
from trainer import identity
from trainer.run_directory import RunDirectory, read_metrics, write_seal
from trainer.settings import OptimizerSettings, Settings
from trainer.start import TrainingDirectory, default_name


@pytest.mark.parametrize("left", [None, "metrics.jsonl", "DIVERGED"])
def test_a_run_that_never_trained_leaves_no_directory(tmp_path, left):
    path = tmp_path / "runs" / "new"

    def fails(error):
        directory = TrainingDirectory(path)
        with directory.locked():
            directory.open(Settings())
            (path / "log.txt").write_text("starting")
            if left:
                (path / left).write_text("1\n")
            raise error

    with pytest.raises(TrainingError):
        fails(TrainingError("no text"))
    assert path.exists() == bool(left)
    (tmp_path / "runs" / "new").mkdir(exist_ok=True)  # the user's own, or a launcher's
    with pytest.raises(KeyboardInterrupt):
        fails(KeyboardInterrupt())
    assert (path / "log.txt").exists()


def test_what_a_sweeper_minimizes_is_the_last_validation_loss(tmp_path):
    directory = TrainingDirectory(tmp_path)
    assert directory.validation_loss() is None
    for record in ({"val_loss": 3.0}, {"val_loss": 2.5}, {"loss": 1.0}):
        append_line(directory.metrics, {"step": 1, **record})
    assert directory.validation_loss() == 2.5


def test_name_comes_from_the_overrides_in_any_order_and_differs_for_different_runs(tmp_path):
    for words in ("tps=260k attention=sagebwd", "attention=sagebwd tps=260k run_dir=x data.root=x"):
        assert default_name(words.split()) == "attention-sagebwd+tps-260k"
    assert default_name([]) == "default"
    paths = ["a/b", "a-b", "a_b", "x" * 300, "x" * 300 + "y", "a\udcff"]
    paths += ["日" * 85, "日" * 84 + "月", "日" * 300]
    overrides = (*(f"data.path={path}" for path in paths), "tps=260k", "tps=2.1m")
    names = [default_name([one]) for one in overrides]
    assert len(set(names)) == len(names)
    for name in names:
        (tmp_path / name).mkdir()  # raises if it is no name


def opened(path, **settings):
    directory = TrainingDirectory(path)
    with directory.locked():
        directory.open(Settings(**settings))
    return directory


def checkpoint_of(directory, step=1, **settings):
    """A checkpoint of which only the seal is read."""
    folder = directory.checkpoints / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    write_seal(folder, {"step": step, "settings": Settings(**settings).recorded()})
    return folder


def everything_in(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def refused(path, match, **settings):
    """Opening the folder raises TrainingError and changes nothing in it."""
    before = everything_in(path)
    with pytest.raises(TrainingError, match=match):
        opened(path, **settings)
    assert everything_in(path) == before


def test_settings_may_be_corrected_while_there_is_nothing_to_lose(tmp_path):
    """Metrics without a checkpoint are some."""
    opened(tmp_path / "run", seed=2)
    directory = opened(tmp_path / "run", seed=1)
    assert "seed: 1" in directory.config.read_text()
    directory.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    refused(tmp_path / "run", r"(?s)other settings.*seed was 1, is now 2.*run_dir", seed=2)
    opened(tmp_path / "run", seed=1)  # killed before its first checkpoint, for example
    assert directory.metrics.exists()


def test_checkpoints_that_are_gone_are_not_taken_for_none(tmp_path):
    directory = opened(tmp_path / "run", seed=1)
    directory.metrics.write_text('{"step": 6, "loss": 2.0}\n')
    checkpoint_of(directory, 6, seed=1)
    directory.note_checkpoint(6)
    elsewhere = directory.checkpoints.rename(tmp_path / "elsewhere")
    refused(directory.path, r"was saved at step 6, but .*checkpoints holds no checkpoint. Restore", seed=1)
    directory.checkpoints.symlink_to(tmp_path / "unmounted")
    refused(directory.path, r"checkpoints.* cannot be read: .*No such file.*Mount", seed=1)
    directory.checkpoints.unlink()
    directory.checkpoints.write_text("")
    refused(directory.path, "cannot be read: Not a directory", seed=1)
    directory.checkpoints.unlink()
    directory.checkpoints.symlink_to(elsewhere)
    opened(directory.path, seed=1)


CODE = b"attention: {}\ndata: !!python/object/apply:builtins.dict []\n"


@pytest.mark.parametrize("content", [None, b"seed: [1\n", b"seed: \xff\n", CODE])
def test_a_run_whose_config_yaml_is_damaged_is_left_as_it_is(tmp_path, content):
    directory = finished(tmp_path, seed=1)
    checkpoint_of(directory, seed=1)
    directory.config.unlink() if content is None else directory.config.write_bytes(content)
    told = r"config\.yaml does not say the settings .*restore it"
    refused(tmp_path, told, seed=1)
    with pytest.raises(TrainingError, match=told):
        directory.is_finished_with(Settings(seed=1))


def finished(path, **settings):
    directory = opened(path, **settings)
    directory.finish()
    return directory


CHANGES = [
    ({"seed": 2}, "seed was 1, is now 2"),
    ({"attention": {"backend": "sagebwd"}}, "attention.backend was fpa, is now sagebwd"),
    ({"optimizer": OptimizerSettings(lr=0.5)}, r"optimizer.lr was \?\?\?, is now 0.5"),
    ({"steps": 16}, "steps was 8, is now 16"),
]


def test_other_settings_are_not_reported_as_finished(tmp_path):
    asked = {"seed": 1, "steps": 8}
    directory = finished(tmp_path / "run", **asked)
    assert directory.is_finished_with(Settings(**asked))
    assert directory.is_finished_with(Settings(**asked, log_every=3))
    for change, told in CHANGES:
        with pytest.raises(TrainingError, match=told):
            directory.is_finished_with(Settings(**asked | change))


def test_a_finished_run_whose_text_moved_is_compared_by_the_trainer(tmp_path):
    directory = finished(tmp_path, data=DataSettings(path="a/book.txt"))
    assert directory.is_finished_with(Settings(data=DataSettings(path="a/book.txt")))
    assert not directory.is_finished_with(Settings(data=DataSettings(path="b/book.txt")))


RESULTS = ("metrics.jsonl", "spikes.jsonl", "environment.jsonl", "loss.png", "weights/model.safetensors")
DAMAGES = [
    lambda path: path.unlink(),
    lambda path: os.truncate(path, path.stat().st_size - 1),
    lambda path: flip(path, 0),
    lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    lambda path: (path.unlink(), path.mkdir()),
]


def whole(path, **settings):
    directory = opened(path, **settings)
    directory.weights.mkdir(exist_ok=True)
    for name in RESULTS:
        (path / name).write_text('{"step": 8}\n')
    directory.finish()
    return directory


@pytest.mark.parametrize(("name", "damage"), [*zip(RESULTS, DAMAGES, strict=True)])
def test_a_run_whose_results_are_damaged_is_not_reported_as_finished(tmp_path, name, damage):
    directory = whole(tmp_path)
    assert directory.is_finished_with(Settings())
    damage(tmp_path / name)
    with pytest.raises(TrainingError, match=rf"is finished, but {name} is .*delete .*DONE"):
        directory.is_finished_with(Settings())
    others = [tmp_path / other for other in RESULTS if other != name]
    directory.check(*others)
    with pytest.raises(ValueError, match=rf"is finished, but {name} is "):
        directory.check(tmp_path / name)


def test_what_came_later_grows_or_may_be_edited_is_none_of_the_run(tmp_path):
    """So is the place of its text, which may be corrected."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "README.md").write_text("a card")
    directory = whole(tmp_path, data=DataSettings(root="there"))
    write_text(directory.config, directory.config.read_text().replace("root: there", "root: here"))
    for name in ("evaluations.jsonl", "log.txt", "weights/notes.txt", "weights/README.md"):
        (tmp_path / name).write_text("later")
    assert directory.is_finished_with(Settings())


def test_a_run_that_goes_on_is_not_finished_until_its_end(tmp_path):
    """Its text has moved, say: what DONE lists begins to change."""
    directory = whole(tmp_path, seed=1)
    opened(tmp_path, seed=1)
    assert not directory.is_finished
    directory.note_environment(torch.device("cpu"), 1)
    directory.finish()
    directory.check()


DAMAGED_LINES = ["{damaged", "7", '{"loss": 1.0}', '{"step": "3"}', "\x80", '{"step": 3, "val_loss/a": [1]}']
DAMAGED_LINES += ['{"step": 3, "loss": ' + "9" * 400 + "}", '{"step": 3, "n": ' + "[" * 100_000 + "}"]


@pytest.mark.parametrize("line", DAMAGED_LINES, ids=range(len(DAMAGED_LINES)))
def test_a_damaged_line_of_the_metrics_is_named_with_the_command_that_removes_it(tmp_path, line):
    directory = TrainingDirectory(tmp_path / "it's")
    directory.path.mkdir()
    good = ['{"step": 1}', '{"step": 2}', '{"step": 3}']
    directory.metrics.write_bytes("\n".join([*good[:2], line, good[2], ""]).encode("latin-1"))
    before = directory.metrics.read_bytes()
    told = r"line 3 of .*metrics\.jsonl is damaged .*delete that line: "
    with pytest.raises(ValueError, match=told) as error:
        directory.truncate_metrics(2)
    assert directory.metrics.read_bytes() == before
    subprocess.run(str(error.value).rpartition("delete that line: ")[2], shell=True, check=True)
    assert directory.metrics.read_text().splitlines() == good
    directory.truncate_metrics(2)
    assert directory.metrics.read_text().splitlines() == good[:2]


def test_a_line_that_a_full_disk_cut_short_is_replaced_by_the_next(tmp_path):
    file = tmp_path / "environment.jsonl"
    append_line(file, {"start": 1})
    with file.open("a") as handle:
        handle.write('{"start": 2, "comm')
    append_line(file, {"start": 3})
    assert read_lines(file) == [{"start": 1}, {"start": 3}]


def test_what_a_killed_process_left_is_removed_and_no_result(tmp_path):
    directory = whole(tmp_path)
    for name in ("config.yaml.77.tmp", "weights/model.safetensors.77.tmp", "weights/notes.tmp"):
        (tmp_path / name).touch()
    opened(tmp_path)
    directory.finish()
    assert [path.name for path in tmp_path.rglob("*.tmp")] == ["notes.tmp"]
    assert ".77.tmp" not in (tmp_path / "DONE").read_text()


def test_a_damaged_line_of_the_environment_is_found_at_the_start(tmp_path):
    directory = opened(tmp_path)
    directory.environment.write_text('{"torch": "2"}\n{damaged\n{"torch": "2"}\n')
    with pytest.raises(TrainingError, match=r"line 2 of .*environment.jsonl is damaged .*delete that line"):
        opened(tmp_path)


def test_a_run_is_trained_once_at_a_time(tmp_path):
    """By whoever opens the folder, in another process or not."""
    with (
        TrainingDirectory(tmp_path).locked(),
        pytest.raises(TrainingError, match="in use by another process"),
        TrainingDirectory(tmp_path).locked(),
    ):
        pass
    with TrainingDirectory(tmp_path).locked():
        pass


def test_metrics_after_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    directory = TrainingDirectory(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3)]
    directory.metrics.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(directory.metrics)] == [1, 2, 3]
    directory.spikes.write_text("\n".join(lines) + "\n")
    directory.truncate_metrics(2)
    assert directory.metrics.read_text() == "\n".join(lines[:2]) + "\n"
    assert directory.spikes.read_text() == directory.metrics.read_text()


#: How a run executes or reports may change when it is continued, what it computes may not.
EXECUTES = """hardware.micro_batch hardware.compile hardware.recompute log_every eval_every eval_sequences
    sample_tokens checkpoint_every keep_checkpoints milestone_every skip_nonfinite
    spike.threshold probe.every data.sources.wiki.path data.validation.wiki"""
COMPUTES = """hardware.dtype seed context train_sequences tps.warmup_steps optimizer.eps
    optimizer.min_lr_ratio model.qk_norm attention.smooth_k data.tokenizer data.sources.wiki.weight"""


def test_what_may_change():
    """A mark of a group holds unless a setting has its own."""
    assert [name for name in EXECUTES.split() if not identity.may_change(name)] == []
    assert [name for name in COMPUTES.split() if identity.may_change(name)] == []


texts = (
    st.text()
    | st.sampled_from("\x85\u2028\u2029\ufeff")
    | st.lists(st.sampled_from(["${", "}", "\\", "oc.env:HOME", "x", "'", "$", "{"])).map("".join)
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(texts, texts)
def test_settings_are_read_as_they_were_recorded(tmp_path_factory, prompt, column):
    data = DataSettings(column=column, validation={"a": {"b": prompt}})
    stored = Settings(sample_prompt=prompt, data=data).recorded()
    config = tmp_path_factory.getbasetemp() / "config.yaml"
    config.write_bytes(identity.as_yaml(stored).encode())
    assert identity.read(config) == stored
    complete = stored | {"tps": {"tokens_per_step": 8, "warmup_steps": 1}}
    for group in ("optimizer", "logger", "hardware", "probe", "spike"):
        complete[group] = {name: 1 for name, value in stored[group].items() if value == "???"}
    complete |= {name: 1 for name, value in complete.items() if value == "???" and name != "sample_prompt"}
    config.write_bytes(identity.as_yaml(complete).encode())
    read = read_settings(RunDirectory(config.parent))
    assert (read.sample_prompt, read.data.column) == (prompt, column)
    assert read.data.validation == {"a": {"b": prompt}}
