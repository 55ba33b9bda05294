"""An exported folder is whole: transformers alone gives the trainer's ids and the trainer's loss."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import export
from trainer.checkpoint import load_weights
from trainer.run_directory import read_metrics


def loss(folder, text):
    """What transformers alone makes of the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[:-1].view(8, 64)).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[1:]).item()


def test_transformers_gives_the_loss_of_the_trainer(trained, place, capsys):
    run, text = trained, (place / "val.txt").read_text()[: 8 * 64 + 1]
    records = read_metrics(run / "metrics.jsonl")
    for record in records:
        if "val_loss" in record:  # a token is a byte here
            assert record["val_bits_per_byte"] == pytest.approx(record["val_loss"] / math.log(2))
    validated = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    assert loss(run / "weights", text) == pytest.approx(validated[4], abs=1e-5)
    assert validated[2] != pytest.approx(validated[4], abs=1e-3)

    export.main([str(run), "--step", "2"])
    folder = run / "export" / "step_00000002"
    assert capsys.readouterr().out == f"{folder}\n"
    assert loss(folder, text) == pytest.approx(validated[2], abs=1e-5)

    export.main([str(run), "--out", str(run / "newest")])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (run / "newest" / name).read_bytes() == (run / "weights" / name).read_bytes()
    newest, last = (load_file(run / name / "model.safetensors") for name in ("newest", "weights"))
    assert all(torch.equal(newest[name], last[name]) for name in last)
    with pytest.raises(SystemExit, match="holds a model already; choose another --out"):
        export.main([str(run), "--out", str(run / "newest")])
    check_generation(run / "weights")
    check_card(run, folder, place, validated)


def check_generation(folder):
    """It samples text, and ends, without a warning and without a token that is none."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[257:] = model.lm_head.weight[:1]  # padding, as likely as any token
    out = model.generate(torch.tensor([[65]]), max_new_tokens=100)
    assert out.max() <= 256
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256


def check_card(run, folder, place, validated):
    last, earlier = ((model / "README.md").read_text() for model in (run / "weights", folder))
    assert f"validation loss | {validated[4]:.4f} nats per token, at step 4" in last
    assert f"validation loss | {validated[2]:.4f} nats per token, at step 2" in earlier
    assert "512 tokens, 256 per step, context 64" in earlier
    assert str(place) not in last + earlier
    assert run.name + "\n" not in last  # it may be made of the data's path


def test_what_is_no_export(trained, tmp_path, monkeypatch):
    run = trained

    def refused(named, *options, place=run):
        with pytest.raises(SystemExit, match=named):
            export.main([str(place), *options])

    refused("has no config.yaml; give the directory of a run", place=tmp_path)
    refused("no checkpoint of step 3; there: 2, 4", "--step", "3")
    with monkeypatch.context() as patch:
        patch.setattr(export, "load_weights", load_spoiled)
        refused(r"step_00000002 holds NaN or Inf in 1 weights \(norm.weight\)", "--step", "2")
    curve = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(curve[:-1])
    refused("is finished, but metrics.jsonl is ", "--step", "2")
    (run / "metrics.jsonl").write_bytes(curve)
    newest = run / "checkpoints" / "step_00000004"
    next(newest.glob("*.distcp")).write_bytes(b"torn")
    refused("step_00000004 is damaged")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("n_layers: ", "n_layers: 1"))
    refused(r"other settings:\n.*model\.n_layers was 2, is now 12", "--step", "2")
    assert not (run / "export").exists()
    shutil.rmtree(run / "checkpoints")
    refused("holds no checkpoint; train the run")


def test_a_tokenizer_of_ones_own_is_exported(train_here, tmp_path):
    """Its file may be on another machine by then; a changed one is refused."""
    made = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)} | {" ": 26, "ab": 27}, [("a", "b")]))
    made.add_special_tokens(["<end>"])
    made.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 28)])
    made.save(str(tmp_path / "mine.json"))
    (tmp_path / "book.txt").write_text("abba had a dark and stormy night " * 400)
    own = (
        "data=text", f"data.path={tmp_path / 'book.txt'}", f"data.root={tmp_path / 'tokens'}",
        f"data.tokenizer={tmp_path / 'mine.json'}", "steps=3", "sample_prompt=ab",
    )  # fmt: skip
    train_here(tmp_path / "run", *own)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "run" / "weights")
    assert theirs("abba")["input_ids"] == [27, 1, 0]  # as in training, without what its file adds
    assert theirs.eos_token_id == 28

    made.add_tokens(["dark"])
    made.save(str(tmp_path / "mine.json"))
    with pytest.raises(SystemExit, match=r"trained with another tokenizer than data\.tokenizer=.*mine\.json"):
        export.main([str(tmp_path / "run")])


def test_settings_are_published_as_they_were_recorded(train_here, tmp_path, monkeypatch):
    """A run of a stranger: its config.yaml must not read this machine's environment, nor name a secret."""
    monkeypatch.setenv("MY_API_KEY", "s3cret-value-123")
    train_here(tmp_path / "run", r"sample_prompt='\${x}'", "steps=2", "sample_tokens=1")
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    assert "sample_prompt: ${x}" in text
    embedded = "source: stdlib"
    assert embedded in text
    config.write_text(text.replace(embedded, "source: '${oc.env:MY_API_KEY} s3cret-value-123'"))
    monkeypatch.setattr(export, "check_checkpoint", lambda *_: None)  # that seal is theirs, too
    export.main([str(tmp_path / "run")])
    card = (tmp_path / "run" / "export" / "step_00000002" / "README.md").read_text()
    assert "| text | ${oc.env:MY_API_KEY} <redacted: MY_API_KEY> files |" in card
    assert "s3cret" not in card


def load_spoiled(folder, step, llama):
    load_weights(folder, step, llama)
    llama.norm.weight.data[3] = torch.nan
