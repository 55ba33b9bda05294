"""The example trains, with padding, by Trainer and without."""

import json

import pytest
import torch

from examples import finetune_transformers

SIZES = {"layers": 1, "width": 32, "heads": 2, "kv-heads": 1, "tokens": 32, "steps": 10}
TINY = ["--device=cpu", "--learning-rate=5e-3", *(f"--{name}={size}" for name, size in SIZES.items())]


def check(result):
    assert result["gradient_cosine"] > 0.999
    for attention in ("sdpa", "sagebwd"):
        losses = result[attention]["losses"]
        assert len(losses) == 10
        assert losses[-1] < losses[0] - 0.2
        assert result[attention]["ms_per_step"] > 0
    assert result["sagebwd"]["losses"] != result["sdpa"]["losses"]
    assert result["sagebwd"]["losses"] == pytest.approx(result["sdpa"]["losses"], abs=0.05)


def test_without_accelerate(tmp_path, capsys):
    out = tmp_path / "result.json"
    check(finetune_transformers.main([*TINY, "--loop", "plain", "--out", str(out)]))
    check(json.loads(out.read_text()))
    assert "INT8 (reference)" in capsys.readouterr().out


def test_with_trainer():
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    check(finetune_transformers.main([*TINY, "--loop", "trainer"]))


def test_trainer_without_accelerate_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        finetune_transformers.main(["--loop", "trainer"])
    assert "pip install accelerate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "0"],
        ["--heads", "3"],  # does not divide --width 32
        ["--baseline", "sagebwd"],
        ["--out", "/nowhere/x.json"],
    ],
    ids=" ".join,
)
def test_mistakes_are_named_before_it_trains(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        finetune_transformers.main([*TINY, *options])
    assert stopped.value.code == 2
    assert "error: --" in capsys.readouterr().err


def test_batches_are_padded_and_padding_is_no_target():
    arguments = finetune_transformers.parse_arguments(TINY)
    texts = finetune_transformers.Texts(arguments)
    batch = finetune_transformers.collate([*texts][:4])
    hidden = batch["attention_mask"] == 0
    assert hidden.any()
    assert torch.equal(hidden, batch["labels"] == finetune_transformers.IGNORED)
