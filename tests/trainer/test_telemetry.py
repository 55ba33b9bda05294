import json

from trainer.telemetry import Telemetry


def test_records_reach_the_file_line_by_line_and_wandb(tmp_path, capsys):
    class Run:
        def __init__(self):
            self.logged, self.finished = [], False

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    run = Run()
    telemetry = Telemetry(tmp_path / "metrics.jsonl", run, steps=3, first_step=0, name="name")
    telemetry.record({"step": 1, "loss": 2.5, "mfu": None})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5, "mfu": None}
    telemetry.record({"step": 2, "loss": 2.0, "grad_norm": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[
        1
    ] == '{"step": 2, "loss": 2.0, "grad_norm": null}'
    telemetry.progress(2.5, 1234.0, 0.25)
    telemetry.advance()
    telemetry.close()
    assert run.logged == [(1, {"loss": 2.5}), (2, {"loss": 2.0})]
    assert run.finished
    shown = capsys.readouterr().err
    assert "1/3" in shown
    assert "loss=2.500, tok/s=1,234, MFU=25.0%" in shown


def test_alerts_reach_wandb_and_its_failures_do_not_reach_training(tmp_path, caplog):
    class Run:
        def __init__(self):
            self.alerts = []

        def alert(self, title, text):
            self.alerts.append((title, text))
            raise OSError("no route to host")

        def finish(self):
            pass

    run = Run()
    for wandb_run in (run, None):
        telemetry = Telemetry(tmp_path / "metrics.jsonl", wandb_run, steps=3, first_step=0, name="name")
        telemetry.alert("title", "text")
        telemetry.close()
    assert run.alerts == [("title", "text")]
    assert caplog.text.count("no route to host") == 1
