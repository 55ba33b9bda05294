import re
import subprocess
from pathlib import Path

import pytest
import torch

from common.errors import SettingsError, TrainingError
from scripts import export
from tests import warm
from tests.cli import assert_same_run, metrics
from trainer.callbacks import Callback
from trainer.run_directory import verify_seal

CALLS = []
HERE = f"{__name__}."
QUICK = ("sample_tokens=0", "probe.every=0", "steps=4", "log_every=2", "eval_every=2")


class Notes(Callback):
    def __init__(self, scale):
        CALLS.clear()
        self.scale = scale

    def on_step(self, step, record, model):
        CALLS.append(("step", step, {*record}, type(model).__name__))
        record["mine/step"] = self.scale * step

    def on_evaluate(self, step, record, model):
        CALLS.append(("evaluate", step, {*record}, type(model).__name__))
        record["mine/evaluate"] = self.scale * step

    def on_checkpoint(self, step, record, model):
        assert verify_seal(Path(record["path"]))["step"] == step  # it is complete
        CALLS.append(("checkpoint", step, {*record}, type(model).__name__))


class Fails(Callback):
    def __init__(self, where):
        setattr(self, where, self.fail)

    def fail(self, step, record, model):
        raise KeyError("my_key")


class Does(Callback):
    def __init__(self, code):
        self.code = code

    def on_step(self, step, record, model):
        exec(self.code)


class Trains(Callback):
    def on_step(self, step, record, model):
        tokens = torch.ones(1, 8, dtype=torch.long)
        with torch.enable_grad():
            model(tokens, tokens).backward()

    on_evaluate = on_checkpoint = on_step


class Validates(Callback):
    def on_evaluate(self, step, record, model):
        losses = [(model(*batch).item(), batch[0].numel()) for batch in self.validation_batches()]
        record["mine"] = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


class CallsTorchWrongly(Callback):
    def on_evaluate(self, step, record, model):
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))


class Misspelled(Callback):
    def on_eval(self, step, record, model):
        pass


class Refuses(Callback):
    def __init__(self):
        raise ValueError("not today")


def test_hooks_are_called_with_what_is_logged(train_here, tmp_path):
    train_here(tmp_path, *QUICK, "checkpoint_every=2", f"callbacks.mine={{_target_: {HERE}Notes, scale: 10}}")
    steps = [call for call in CALLS if call[0] == "step"]
    assert steps == [("step", n, {"loss", "lr", "grad_norm"}, "Llama") for n in (1, 2, 3, 4)]
    validations = [(n, {"val_loss", "sample"} <= keys) for kind, n, keys, _ in CALLS if kind == "evaluate"]
    assert validations == [(2, True), (4, True)]
    saved = [(n, keys) for kind, n, keys, _ in CALLS if kind == "checkpoint"]
    assert saved == [(2, {"path"}), (4, {"path"})]
    records = metrics(tmp_path)
    logged = [(one["step"], one["mine/step"]) for one in records if "loss" in one]
    assert logged == [(1, 10), (2, 20), (4, 40)]
    assert [one["mine/evaluate"] for one in records if "val_loss" in one] == [20, 40]


def test_a_run_without_them_is_the_same(train_here, tmp_path):
    """They may come and go when a run is continued; no step has the gradients of a callback."""
    train_here(tmp_path / "one", *QUICK, "checkpoint_every=1")
    train_here(tmp_path / "two", *QUICK, "checkpoint_every=1", f"callbacks.mine._target_={HERE}Trains")
    assert_same_run(tmp_path / "one", tmp_path / "two")


PLACE = r" \(test_callbacks.py, line \d+\)"
FAILS = rf"at step \d failed with KeyError: 'my_key'{PLACE}"
REFUSED = [  # a class of this file or a path, what it gets (None: the path alone), what the error has of it
    ("Fails", ", where: on_step", f"callback mine: on_step {FAILS}"),
    ("Fails", ", where: on_checkpoint", f"callback mine: on_checkpoint {FAILS}"),
    ("CallsTorchWrongly", "", rf"on_evaluate at step 2 .*{PLACE}"),
    ("Misspelled", "", "on_eval, which is never called; use on_step, on_evaluate, on_checkpoint"),
    ("Refuses", None, rf"not today{PLACE}"),
    ("Nothing", "", "Nothing"),
    ("re.compile", "", "callbacks.mine="),
]
SPOILS = {  # what on_step does, and what is said of it
    "record['mine'] = model.norm.weight": "record['mine'] is a Parameter; add numbers",
    "record['n'] = 1795880751259932689": "1795880751259932689 is a whole number of more than 18 digits",
    "record['val_note'] = 'fine'": "its val_note is no number",
    "record['step'] = 7": "record['step'] is the trainer's",
    "record['loss'] = float('nan')": "record['loss'] is the trainer's",
    "raise SystemExit(0)": "failed with SystemExit: 0",
}
AT_ONCE = r"callback mine: on_step at step 1 .*"
REFUSED += [("Does", f', code: "{code}"', AT_ONCE + re.escape(told)) for code, told in SPOILS.items()]


@pytest.mark.parametrize(("target", "arguments", "told"), REFUSED)
def test_what_fails_or_would_spoil_the_run_is_named(train_here, tmp_path, target, arguments, told):
    place = HERE if target[0].isupper() else ""
    given = f"{place}{target}" if arguments is None else f"{{_target_: {place}{target}{arguments}}}"
    with pytest.raises((TrainingError, SettingsError), match=told):
        train_here(tmp_path, *QUICK, f"callbacks.mine={given}")


def test_a_metric_of_the_validation_batches(train_here, tmp_path):
    """With the trainer's autocast: the loss of these batches is the trainer's own."""
    autocast = ("eval_sequences=7", "hardware.dtype=bfloat16")
    train_here(tmp_path, *QUICK, *autocast, f"callbacks.mine={HERE}Validates")
    found = [(one["mine"], one["val_loss"]) for one in metrics(tmp_path) if "val_loss" in one]
    assert [mine for mine, _ in found] == pytest.approx([loss for _, loss in found], abs=1e-9)


def test_tasks_run_on_the_checkpoints_that_are_asked_for(train_here, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command[2:]))
    tasks = "tasks: [a, b], every: 4, limit: 7, options: [--device, cpu]"
    tasks = f"callbacks.tasks={{_target_: examples.callbacks.Tasks, {tasks}}}"
    monkeypatch.setattr("examples.callbacks.find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"pip install -e '.\[train,evaluate\]'"):
        train_here(tmp_path, *QUICK, tasks)
    monkeypatch.setattr("examples.callbacks.find_spec", lambda name: name)
    train_here(tmp_path, *QUICK, "checkpoint_every=2", tasks)
    (of_export, evaluate) = asked
    export.main(of_export[1:])
    assert f"pretrained={tmp_path / 'export' / 'step_00000004'},dtype=float32" in evaluate
    assert evaluate[0] == "lm_eval"
    assert evaluate[-4:] == ["--device", "cpu", "--limit", "7"]
    assert evaluate[evaluate.index("--tasks") + 1] == "a,b"


def test_the_example_on_two_ranks_that_share_the_weights(datasets, train_here, tmp_path):
    """By name on the command line, as its docstring says; the norm is that of the whole weights."""
    settings = (*QUICK, "callbacks.norms._target_=examples.callbacks.WeightNorms", "hardware.micro_batch=2")
    train_here(tmp_path / "one", *settings)
    sharded = ("hardware.parallel=fsdp", "hardware.devices=2", f"run_dir={tmp_path / 'two'}")
    warm.two_ranks(warm.debug_settings(datasets, *settings, *sharded), [], [])
    records = (metrics(tmp_path / name) for name in ("one", "two"))
    whole, shared = ([one["weights/layer_1"] for one in run if "val_loss" in one] for run in records)
    assert whole == pytest.approx(shared, rel=1e-4)
    assert 1 < whole[0] < 100
