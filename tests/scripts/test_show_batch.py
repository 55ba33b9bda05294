"""scripts.show_batch prints what a step trained on, to a terminal that must not obey it."""

import json

import pytest

from data.corpus import open_corpus
from data.loader import BatchLoader
from scripts import show_batch
from scripts.runs import read_settings
from trainer.run_directory import RunDirectory


@pytest.fixture
def trained(train_here, tmp_path, monkeypatch):
    """A run directory, and the inputs that each of its steps trained on, from 1: bytes of each sequence."""
    seen = {}
    micro_batches = BatchLoader.micro_batches

    def watched(self, step):
        for inputs, targets in micro_batches(self, step):
            seen.setdefault(step + 1, []).extend(bytes(row) for row in inputs.tolist())
            yield inputs, targets

    monkeypatch.setattr(BatchLoader, "micro_batches", watched)
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{i}: a dark\tand stormy night.\x1b[0m\n" for i in range(300)))
    data = ("data=text", f"data.path={book}", "data.tokenizer=bytes", f"data.root={tmp_path / 'tokens'}")
    train_here(tmp_path / "run", *data, "steps=50", "eval_every=50", "checkpoint_every=50", "tps=260k")
    return tmp_path / "run", seen


def shown(row):
    return row.decode().strip("\n").replace("\x1b", r"\x1b")


def test_it_prints_what_the_step_trained_on_or_why_not(trained, capsys):
    run, seen = trained
    for step, epoch in ((3, 0), (50, 1)):  # an epoch is some 40 steps
        show_batch.main([str(run), "--step", str(step)])
        begin, *parts = capsys.readouterr().out.split("\n--- sequence ")
        assert begin.strip() == f"step {step}: 4 sequences of 64 tokens"
        assert [part.split("\n", 1)[1].strip("\n") for part in parts] == [shown(row) for row in seen[step]]
        assert all(f", epoch {epoch}\n" in part for part in parts)
    show_batch.main([str(run), "--step", "50", "--characters", "9"])
    assert f"\n{seen[50][0].decode()[:9]} […]\n" in capsys.readouterr().out

    line = {
        "step": 3, "loss": 9.0, "typical_loss": 3.0, "grad_norm": 1.0, "beyond": ["loss"], "skipped": True,
    }  # fmt: skip
    (run / "spikes.jsonl").write_text(json.dumps(line) + "\n")
    show_batch.main([str(run), "--spikes"])
    spikes = capsys.readouterr().out
    assert "step 3: loss 9 (typical 3), skipped" in spikes
    assert shown(seen[3][0]) in spikes
    (run / "spikes.jsonl").unlink()
    check_refusals(run)


def check_refusals(run):
    def refused(*arguments, named):
        with pytest.raises(SystemExit, match=named):
            show_batch.main([*map(str, arguments)])

    refused(run.parent, "--step", 1, named="has no config.yaml; give the directory of a run")
    refused(run, "--step", 0, named="counted from 1 to 50")
    refused(run, "--step", 51, named="counted from 1 to 50")
    refused(run, "--spikes", named="no step stood out")
    config = (run / "config.yaml").read_text()
    (run.parent / "book.txt").write_text("The rain fell in torrents.\n" * 400)
    made = {*(run.parent / "tokens").rglob("*")}
    refused(run, "--step", 1, named="is not prepared yet")
    assert made == {*(run.parent / "tokens").rglob("*")}  # it writes nothing where config.yaml says
    open_corpus(read_settings(RunDirectory(run)).data)
    refused(run, "--step", 1, named="trained on other text")
    assert (run / "config.yaml").read_text() == config
