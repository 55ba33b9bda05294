import json

import numpy as np
import pytest

from data.corpus import open_corpus
from data.loader import BatchLoader
from scripts import show_batch
from scripts.runs import read_settings
from scripts.show_batch import Sequence, odd
from trainer.run_directory import RunDirectory


def sequence(tokens, index=0):
    return Sequence(index=index, epoch=0, tokens=np.array(tokens, dtype=np.uint16), end_of_text=256)


def test_summary_of_a_sequence():
    s = sequence([7, 7, 7, 256, 1, 2, 2, 7, 256])
    assert s.top_token == (7, 4 / 9)
    assert s.distinct == 4
    assert s.longest_run == 3
    assert s.boundaries == [3, 8]
    assert s.documents == 2
    whole = sequence([5, 5, 5])
    assert (whole.top_token, whole.distinct, whole.longest_run, whole.documents) == ((5, 1.0), 1, 3, 1)


def test_odd_sequences_are_unlike_their_step():
    usual = [sequence(np.arange(64) % 20, index=i) for i in range(5)]
    repeats = sequence([*range(40), *[3] * 24], index=5)  # frequent, and in a row
    narrow = sequence(np.arange(64) % 10, index=6)
    assert odd([*usual, repeats, narrow]) == {5, 6}
    assert odd(usual) == set()


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
    """Text on a terminal, which must not obey it."""
    return row.decode().strip("\n").replace("\x1b", r"\x1b")


def test_it_prints_what_the_step_trained_on(trained, capsys):
    run, seen = trained
    for step, epoch in ((3, 0), (50, 1)):  # an epoch is some 40 steps
        show_batch.main([str(run), "--step", str(step), "--characters", "0"])
        printed = capsys.readouterr().out
        _, *parts = printed.split("\n--- sequence ")
        texts = [part.split("\n", 1)[1].strip("\n") for part in parts]
        assert texts == [shown(row) for row in seen[step]]
        assert all(f", epoch {epoch}, documents end at tokens: none" in part for part in parts)
        assert f"step {step}: 4 sequences of 64 tokens" in printed

    index = parts[2].split(",")[0]
    show_batch.main([str(run), "--step", "50", "--sequence", index])
    chosen = capsys.readouterr().out
    assert shown(seen[50][2]) in chosen
    assert chosen.count("--- sequence") == 1
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

    for arguments, named in (
        (["--step", "0"], "counted from 1 to 50"),
        (["--step", "51"], "counted from 1 to 50"),
        (["--step", "50", "--sequence", "999999"], f"999999, but on .*{index}.*leave --sequence out"),
    ):
        with pytest.raises(SystemExit, match=named):
            show_batch.main([str(run), *arguments])
    (run / "spikes.jsonl").unlink()
    with pytest.raises(SystemExit, match="no step stood out"):
        show_batch.main([str(run), "--spikes"])
    config = (run / "config.yaml").read_text()
    (run.parent / "book.txt").write_text("The rain fell in torrents.\n" * 400)
    made = {*(run.parent / "tokens").rglob("*")}
    with pytest.raises(SystemExit, match="is not prepared yet"):
        show_batch.main([str(run), "--step", "1"])
    assert made == {*(run.parent / "tokens").rglob("*")}  # it writes nothing where config.yaml says
    open_corpus(read_settings(RunDirectory(run)).data)
    with pytest.raises(SystemExit, match="trained on other text"):
        show_batch.main([str(run), "--step", "1"])
    assert (run / "config.yaml").read_text() == config


def test_mistakes_on_the_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"has no config.yaml; give the directory of a run"):
        show_batch.main([str(tmp_path), "--step", "1"])
    for arguments, named in (
        ([], "--step --spikes"),
        (["--spikes", "--sequence", "3"], "use it with --step"),
        (["--step", "1", "--characters", "-1"], "--characters -1"),
    ):
        with pytest.raises(SystemExit):
            show_batch.main([str(tmp_path), *arguments])
        assert named in capsys.readouterr().err
    with pytest.raises(SystemExit):
        show_batch.main(["--help"])
    assert "python -m scripts.show_batch runs/NAME --spikes" in capsys.readouterr().out
