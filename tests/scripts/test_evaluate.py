"""Tasks of lm-evaluation-harness on an exported run give the trainer's loss; errors name the fix."""

import importlib.util
import json
import math
from types import SimpleNamespace

import pytest

from common.files import read_lines
from scripts import evaluate
from scripts.export import export_checkpoint
from trainer.run_directory import RunDirectory, read_metrics

CONTEXT = 64
TASK = """\
task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{first}}}}"
doc_to_target: "{{{{others}}}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


def test_lm_eval_gives_the_loss_of_the_trainer(trained, place, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(evaluate, "BOOTSTRAPS", 0)
    text = (place / "val.txt").read_text()
    sequences = [text[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(8)]
    lines = [json.dumps({"first": sequence[0], "others": sequence[1:]}) for sequence in sequences]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_text.yaml").write_text(TASK.format(data=tmp_path / "text.jsonl"))
    common = [str(trained), "--tasks", "local_text", "--include", str(tmp_path / "tasks"), "--device", "cpu"]
    evaluate.main(common)
    evaluate.main([*common, "--step", "2"])
    validated = {r["step"]: r["val_loss"] for r in read_metrics(trained / "metrics.jsonl") if "val_loss" in r}
    records = read_lines(trained / "evaluations.jsonl")
    assert [record["step"] for record in records] == [4, 2]
    for record in records:
        loss = math.log(record["results"]["local_text"]["perplexity"]) / CONTEXT
        assert loss == pytest.approx(validated[record["step"]], abs=1e-5)
    assert "step 2:\n  local_text" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"unknown are no_such_task; `lm-eval ls tasks` lists"):
        evaluate.main([*common, "--tasks", "no_such_task,local_text"])
    with pytest.raises(SystemExit, match="is no folder; give the one with your task files"):
        evaluate.main([*common, "--include", str(tmp_path / "none")])


@pytest.fixture
def without_harness(monkeypatch):
    """Everything but the harness itself, which finds .25 in every task."""
    monkeypatch.setattr(evaluate, "check_installed", lambda: None)
    monkeypatch.setattr(evaluate, "run_tasks", lambda arguments, folder, context: {"task": {"acc": 0.25}})


@pytest.mark.usefixtures("without_harness")
def test_results_are_added_to_the_run(trained, monkeypatch, capsys):
    run = SimpleNamespace(summary={}, finish=lambda: None)
    monkeypatch.setattr(evaluate, "start_wandb", lambda *_, run_id, **__: run if run_id == "abc" else None)
    monkeypatch.setattr(evaluate, "sealed_in", lambda path: {"wandb_id": "abc"})
    evaluate.main([str(trained), "--tasks", "task", "--wandb"])
    assert read_lines(trained / "evaluations.jsonl")[-1]["results"] == {"task": {"acc": 0.25}}
    assert run.summary == {"eval/task/acc": 0.25, "eval/step": 4}
    assert capsys.readouterr().out.split() == [f"{trained},", "step", "4:", "task", "acc", "0.2500"]

    monkeypatch.setattr(evaluate, "sealed_in", lambda path: {"wandb_id": None})
    with pytest.raises(SystemExit, match="was not logged to W&B; the results are in"):
        evaluate.main([str(trained), "--tasks", "task", "--wandb"])
    (trained / "weights" / "tokenizer.json").rename(trained / "weights" / "moved")
    with pytest.raises(SystemExit, match=r"has no tokenizer\.json: .* Name a checkpoint with --step N"):
        evaluate.main([str(trained), "--tasks", "task"])


@pytest.mark.usefixtures("without_harness")
def test_an_export_in_16_bits_is_not_taken_for_one_in_float32(trained):
    folder = RunDirectory(trained).exports / "step_00000002"
    export_checkpoint(trained, 2, folder, "bfloat16")
    with pytest.raises(SystemExit, match=r"step_00000002 has weights in bfloat16; move it away"):
        evaluate.main([str(trained), "--tasks", "task", "--step", "2"])


def test_without_lm_eval_the_fix_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(SystemExit, match=r"needs lm_eval: pip install -e '\.\[train,evaluate\]'"):
        evaluate.main([str(tmp_path), "--tasks", "hellaswag"])


def test_numbers_of_the_harness():
    found = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "acc,strict": 1, "sample_len": 3}
    assert evaluate.numbers(found) == {"acc": 0.5, "acc,strict": 1.0}
