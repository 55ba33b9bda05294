import json
import multiprocessing
from dataclasses import fields

import pytest
import torch
import yaml

from data.files import write_text
from sagebwd import SageConfig
from trainer.errors import TrainingError
from trainer.run_directory import RunDirectory, default_name, read_metrics
from trainer.settings import ProbeSettings, Settings, SpikeSettings


def test_name_comes_from_the_overrides_in_any_order():
    assert default_name(["tps=260k", "attention=sagebwd"]) == "attention-sagebwd+tps-260k"
    assert default_name(["attention=sagebwd", "tps=260k", "run_dir=x"]) == "attention-sagebwd+tps-260k"
    assert default_name([]) == "default"


def test_names_of_different_runs_differ():
    overrides = [
        ["data.path=a/b"],
        ["data.path=a-b"],
        ["data.path=a_b"],
        ["data.path=" + "x" * 300],
        ["data.path=" + "x" * 300 + "y"],
        ["tps=260k"],
        ["tps=2.1m"],
    ]
    names = [default_name(o) for o in overrides]
    assert len(set(names)) == len(names)
    assert all(len(name) < 200 and "/" not in name for name in names)


def make_settings(**changes):
    settings = Settings()
    for key, value in changes.items():
        setattr(settings, key, value)
    return settings


def opened(path, **settings):
    directory = RunDirectory(path)
    with directory.locked():
        directory.open(make_settings(**settings))
    return directory


def test_settings_that_came_later_have_their_default_in_older_runs(tmp_path):
    directory = opened(tmp_path / "run", seed=1)
    (directory.checkpoints / "step_00000001").mkdir(parents=True)
    older = [line for line in directory.config.read_text().splitlines() if "schedule" not in line]
    write_text(directory.config, "\n".join(older) + "\n")
    opened(tmp_path / "run", seed=1)
    assert "schedule: cosine" in directory.config.read_text()


def test_open_refuses_a_run_with_other_settings_and_names_them(tmp_path):
    directory = opened(tmp_path / "run", seed=1, context=64)
    (directory.checkpoints / "step_00000001").mkdir(parents=True)
    opened(tmp_path / "run", seed=1, context=64, log_every=7)  # reporting may change
    opened(tmp_path / "run", seed=1, context=64, probe=ProbeSettings(every=3), spike=SpikeSettings(window=9))
    with pytest.raises(TrainingError, match=r"(?s)seed was 1, is now 2.*run_dir"):
        opened(tmp_path / "run", seed=2, context=64)


def test_config_says_what_the_attention_was_whatever_its_preset_comes_to_mean(tmp_path):
    directory = opened(tmp_path / "run", attention={"backend": "sagebwd", "preset": "paper", "block_q": 32})
    stored = yaml.safe_load(directory.config.read_text())["attention"]
    assert "preset" not in stored
    assert (stored["granularity"], stored["block_q"], stored["block_kv"]) == ("block", 32, 64)


#: As config.yaml recorded the attention when all backends shared one list of settings.
OLD_NULLS = dict.fromkeys(["sdpa", "implementation", *(field.name for field in fields(SageConfig))])
OLD_SAGE = OLD_NULLS | {"backend": "sagebwd", "smooth_k": True, "smooth_q": False, "implementation": "auto"}
OLD_ACCURATE = OLD_SAGE | {"smooth_k": False, "operand_scales": "token", "granularity": "row"}
OLD_ACCURATE |= {"int8_matmuls": ["dv", "dq", "dk"], "block_q": 64, "block_kv": 64}


@pytest.mark.parametrize(
    ("old", "same", "other"),
    [
        (OLD_NULLS | {"backend": "fpa"}, {"backend": "fpa"}, {"backend": "fpa", "sdpa": "flash"}),
        (OLD_SAGE, {"backend": "sagebwd"}, {"backend": "sagebwd", "preset": "paper"}),
        (OLD_SAGE, {"backend": "sagebwd", "preset": "default"}, {"backend": "fpa"}),
        (OLD_ACCURATE, {"backend": "sagebwd", "preset": "accurate"}, {"backend": "sagebwd"}),
    ],
)
def test_runs_from_before_presets_can_be_resumed(tmp_path, old, same, other):
    directory = opened(tmp_path / "run", attention={"backend": "fpa"})
    (directory.checkpoints / "step_00000001").mkdir(parents=True)
    stored = yaml.safe_load(directory.config.read_text()) | {"attention": old}
    write_text(directory.config, yaml.safe_dump(stored))
    with pytest.raises(TrainingError, match=r"attention\.\w+ was"):
        opened(tmp_path / "run", attention=other)
    opened(tmp_path / "run", attention=same)


def test_settings_may_be_corrected_while_there_is_nothing_to_lose(tmp_path):
    opened(tmp_path / "run", seed=1)
    assert "seed: 2" in opened(tmp_path / "run", seed=2).config.read_text()


def test_rerun_clears_only_a_finished_run(tmp_path):
    directory = opened(tmp_path, seed=1)
    for path in (directory.metrics, directory.spikes, directory.probe_plot):
        path.write_text('{"step": 1}\n')
    directory.traces.mkdir()
    opened(tmp_path, seed=1, rerun_finished=True)
    assert directory.metrics.exists()
    directory.finish()
    opened(tmp_path, seed=2, rerun_finished=True)
    gone = (directory.metrics, directory.spikes, directory.probe_plot, directory.traces)
    assert not any(path.exists() for path in gone)
    assert not directory.is_finished


def test_every_start_notes_its_environment(tmp_path):
    directory = RunDirectory(tmp_path)
    for devices in (1, 2):
        directory.note_environment(torch.device("cpu"), devices)
    lines = [json.loads(line) for line in (tmp_path / "environment.jsonl").read_text().splitlines()]
    assert [line["devices"] for line in lines] == [1, 2]
    assert lines[0]["torch"] == torch.__version__


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"cannot create the run directory .*file/run.* run_dir="):
        opened(tmp_path / "file" / "run")


def hold(path, held, release):
    with RunDirectory(path).locked():
        held.set()
        release.wait(30)


def test_two_processes_cannot_train_the_same_run(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, held, release))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(TrainingError, match="in use by another process"), RunDirectory(tmp_path).locked():
            pass
    finally:
        release.set()
        other.join()
    with RunDirectory(tmp_path).locked():
        pass


def test_metrics_after_the_checkpoint_and_a_torn_line_are_dropped(tmp_path):
    directory = RunDirectory(tmp_path)
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3)]
    directory.metrics.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(directory.metrics)] == [1, 2, 3]
    directory.spikes.write_text("\n".join(lines) + "\n")
    directory.truncate_metrics(2)
    assert directory.metrics.read_text() == "\n".join(lines[:2]) + "\n"
    assert directory.spikes.read_text() == directory.metrics.read_text()


def test_atomic_write_leaves_the_old_content_when_it_fails(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new\ud800")
    assert path.read_text() == "old"
