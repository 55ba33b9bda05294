import json
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from common.errors import TrainingError
from trainer.record import Record, Stopwatch, TensorBoard, logged_steps


def make_record(folder, wandb_run, tensorboard=None):
    loggers = {"W&B": wandb_run, "TensorBoard": tensorboard}
    return Record(folder / "metrics.jsonl", loggers, steps=3, first_step=0, name="name")


def test_records_reach_the_file_line_by_line_and_wandb(tmp_path, capsys):
    run = Mock()
    record = make_record(tmp_path, run)
    record.write({"step": 1, "loss": 2.5, "mfu": None})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5, "mfu": None}
    record.write({"step": 2, "loss": 2.0, "grad_norm": float("nan")})
    _, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert second == '{"step": 2, "loss": 2.0, "grad_norm": null}'
    record.progress(2.5, 1234.0, 0.25)
    record.advance()
    record.close()
    expected = [call.log({"loss": 2.5}, step=1), call.log({"loss": 2.0}, step=2), call.finish()]
    assert run.mock_calls == expected
    shown = capsys.readouterr().err
    assert "1/3" in shown
    assert "loss=2.500, tok/s=1,234, MFU=25.0%" in shown


def test_a_record_counts_the_steps_with_a_loss_and_those_of_before(tmp_path):
    for step in (3, 4):
        record = make_record(tmp_path, None)
        record.write({"step": step, "loss": 5.0})
        record.write({"step": step, "val_loss": 5.0})
        record.close()
    assert record.logged == 2
    assert logged_steps(tmp_path / "metrics.jsonl") == [3, 4]


def test_records_reach_tensorboard_without_what_is_not_a_number(tmp_path, monkeypatch):
    """And hide the steps that run again."""
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    record = make_record(tmp_path, None, TensorBoard(tmp_path / "tensorboard", 4))
    record.write({"step": 5, "tokens": 20, "loss": 2.5, "mfu": None, "grad_norm": float("nan")})
    record.write({"step": 6, "sample": "text"})
    record.close()
    assert writer.mock_calls == [
        call(str(tmp_path / "tensorboard"), purge_step=5),
        call().add_scalar("tokens", 20, 5),
        call().add_scalar("loss", 2.5, 5),
        call().add_text("sample", "text", 6),
        call().close(),
    ]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    with pytest.raises(TrainingError, match="pip install"):
        TensorBoard(tmp_path, 0)


def test_one_logger_that_fails_does_not_stop_the_other(tmp_path, caplog):
    whole, broken = Mock(), Mock()
    broken.log.side_effect = OSError("no room")
    record = make_record(tmp_path, whole, broken)
    for step in (1, 2):
        record.write({"step": step})
    record.close()
    assert whole.mock_calls == [call.log({}, step=1), call.log({}, step=2), call.finish()]
    assert caplog.text.count("TensorBoard failed (OSError: no room)") == 1


def test_stopwatch_leaves_pauses_out():
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    time.sleep(0.02)
    with watch.paused(), watch.paused():
        time.sleep(0.15)
    time.sleep(0.02)
    assert 0.04 <= watch.take() < 0.15
    assert watch.take() < 0.02  # starts from zero, and still runs
